"""What others take: `DistributedDataParallel` alone and with torch's own ZeRO, and FSDP2. With their defaults."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from .._types import MIB
from ..layout.layout import Layout
from ..layout.partition import WholeParams
from ..layout.spec import ParamSpec
from .estimate import Estimate, MemoryEstimate, Traffic, TrainingSetup
from .shapes import ParamShape

_DDP_BUCKET_BYTES = 25 * MIB


@dataclass(frozen=True)
class DDPBaseline:
    """DDP: everything everywhere. It copies gradients into buckets of its own."""

    name: ClassVar[str] = "DDP"

    def estimate(self, training: TrainingSetup, ranks: int) -> Estimate:
        usage = _estimate_ddp_memory(training, training.param_specs)
        return Estimate(self.name, ranks, usage, _estimate_ddp_traffic(training, ranks))


@dataclass(frozen=True)
class TorchZeroBaseline:
    """DDP, with each parameter's state on one rank, which then sends the parameter to all."""

    name: ClassVar[str] = "torch ZeRO"

    def estimate(self, training: TrainingSetup, ranks: int) -> Estimate:
        layout = WholeParams().extend(Layout.empty(ranks), training.param_specs)
        loads = layout.sum_per_rank(
            lambda spec, _: training.state_bytes(spec, spec.shape) + _master_bytes(training, [spec])
        )
        fullest = max(range(ranks), key=lambda rank: loads[rank])
        owned = [spec for spec in training.param_specs if layout.owner_of(spec.index) == fullest]
        balance = max(loads) * ranks / sum(loads) if any(loads) else 1.0
        return Estimate(
            self.name, ranks, _estimate_ddp_memory(training, owned), self._estimate_traffic(training, ranks), balance
        )

    def _estimate_traffic(self, training: TrainingSetup, ranks: int) -> Traffic:
        """One message a parameter, beside DDP's."""
        reduced, trained = _estimate_ddp_traffic(training, ranks), training.model.trainable_params
        if ranks == 1:
            return reduced
        sent = reduced.sent + sum(it.nbytes for it in trained) * (ranks - 1) // ranks
        messages = reduced.messages + len(trained)
        return Traffic(sent, messages, training.network_for(ranks).estimate_seconds(sent, messages, ranks))


@dataclass(frozen=True)
class FSDP2Baseline:
    """FSDP2, with each block of a list sharded on its own, and freed after its use. Masters are the parameters."""

    name: ClassVar[str] = "FSDP2"

    def estimate(self, training: TrainingSetup, ranks: int) -> Estimate:
        own = {spec.index: _fsdp2_shard_shape(spec.shape, ranks) for spec in training.param_specs}
        elements = {spec.index: _shape_numel(own[spec.index]) for spec in training.param_specs}
        kept = {spec.index: training.update_dtype(spec.dtype).itemsize for spec in training.param_specs}
        trained = [spec for spec in training.param_specs if spec.trainable]
        state = sum(training.state_bytes(spec, own[spec.index]) for spec in trained if elements[spec.index])
        tensors = [(spec, own[spec.index]) for spec in trained]
        usage = MemoryEstimate(
            parameters=sum(elements[i] * kept[i] for i in elements) + training.model.buffer_bytes,
            gradients=sum(elements[it.index] * kept[it.index] for it in trained),
            state=state,
            backward_overhead=_fsdp2_unsharded_bytes(training),
            step_overhead=training.temporary_bytes(tensors, use_fused=False),
            activations=training.activations,
        )
        most, mean = sum(elements[it.index] for it in trained), sum(it.numel for it in trained) / ranks
        balance = most / mean if mean else 1.0
        return Estimate(self.name, ranks, usage, self._estimate_traffic(training, ranks), balance)

    def _estimate_traffic(self, training: TrainingSetup, ranks: int) -> Traffic:
        """Blocks are gathered for forward and for backward; what belongs to none is gathered once."""
        if ranks == 1:
            return Traffic(0, 0)
        root, *blocks = training.model.blocks
        gathered = _params_nbytes(root) + 2 * sum(map(_params_nbytes, blocks))
        reduced = sum(it.nbytes for it in training.model.trainable_params)
        sent, messages = (gathered + reduced) * (ranks - 1) // ranks, 2 + 3 * len(blocks)
        return Traffic(sent, messages, training.network_for(ranks).estimate_seconds(sent, messages, ranks))


def _estimate_ddp_memory(training: TrainingSetup, updated_specs: Sequence[ParamSpec]) -> MemoryEstimate:
    """`updated`: parameters that the fullest rank has state of. DDP's buckets are as large as the gradients."""
    model = training.model
    gradients = sum(it.nbytes for it in model.trainable_params)
    temporaries = training.temporary_bytes([(spec, spec.shape) for spec in updated_specs], use_fused=False)
    parameters = _params_nbytes(model.params) + model.buffer_bytes
    return MemoryEstimate(
        parameters=parameters,
        gradients=gradients,
        state=sum(training.state_bytes(spec, spec.shape) for spec in updated_specs),
        masters=_master_bytes(training, updated_specs),
        backward_overhead=gradients,
        step_overhead=gradients + temporaries,
        construction_peak=parameters + gradients,
        activations=training.activations,
    )


def _estimate_ddp_traffic(training: TrainingSetup, ranks: int) -> Traffic:
    """An all-reduce of each bucket: as much as to its owners and back."""
    if ranks == 1:
        return Traffic(0, 0)
    gradients = sum(it.nbytes for it in training.model.trainable_params)
    sent, messages = 2 * gradients * (ranks - 1) // ranks, 2 * -(-gradients // _DDP_BUCKET_BYTES)
    return Traffic(sent, messages, training.network_for(ranks).estimate_seconds(sent, messages, ranks))


def _fsdp2_unsharded_bytes(training: TrainingSetup) -> int:
    """What is whole for moments in backward.

    The gradients of a block, the message that they go in, and the two blocks that come next; and what belongs to no
    block all the time, with its gradients at the end.
    """
    root, *blocks = map(_params_nbytes, training.model.blocks)
    most = (2 * blocks[i] + sum(blocks[max(0, i - 2) : i]) for i in range(len(blocks)))
    return root + max(2 * root, *most, 0)


def _master_bytes(training: TrainingSetup, specs: Sequence[ParamSpec]) -> int:
    covered = [it for it in specs if it.trainable and training.update_dtype(it.dtype) != it.dtype]
    return sum(it.numel * training.update_dtype(it.dtype).itemsize for it in covered)


def _fsdp2_shard_shape(shape: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    """Of the rank that has most: FSDP2 divides the first dimension."""
    return (-(-shape[0] // ranks), *shape[1:]) if shape else ()


def _shape_numel(shape: tuple[int, ...]) -> int:
    return ParamShape("", shape).numel


def _params_nbytes(params: Sequence[ParamShape]) -> int:
    return sum(it.nbytes for it in params)
