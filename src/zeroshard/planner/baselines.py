"""Estimates of the alternatives, with their defaults: DDP, DDP with torch's ZeroRedundancyOptimizer, and FSDP2."""

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
    """DDP: everything is replicated. Gradients are copied into buckets."""

    name: ClassVar[str] = "DDP"

    def estimate(self, training: TrainingSetup, ranks: int) -> Estimate:
        memory = _estimate_ddp_memory(training, training.param_specs)
        return Estimate(self.name, ranks, memory, _estimate_ddp_traffic(training, ranks))


@dataclass(frozen=True)
class TorchZeroBaseline:
    """DDP with `ZeroRedundancyOptimizer`: the owner of a parameter keeps its state and broadcasts its update."""

    name: ClassVar[str] = "torch ZeRO"

    def estimate(self, training: TrainingSetup, ranks: int) -> Estimate:
        layout = WholeParams().extend(Layout.empty(ranks), training.param_specs)
        loads = layout.sum_per_rank(
            lambda spec, _: training.state_bytes(spec, spec.shape) + _master_bytes(training, [spec])
        )
        fullest = max(range(ranks), key=lambda rank: loads[rank])
        owned = [spec for spec in training.param_specs if layout.owner_of(spec.index) == fullest]
        imbalance = max(loads) * ranks / sum(loads) if any(loads) else 1.0
        return Estimate(
            self.name, ranks, _estimate_ddp_memory(training, owned), self._estimate_traffic(training, ranks), imbalance
        )

    def _estimate_traffic(self, training: TrainingSetup, ranks: int) -> Traffic:
        """Return DDP's traffic plus one broadcast per parameter."""
        reduced, trainable = _estimate_ddp_traffic(training, ranks), training.model.trainable_params
        if ranks == 1:
            return reduced
        sent = reduced.sent + sum(param.nbytes for param in trainable) * (ranks - 1) // ranks
        messages = reduced.messages + len(trainable)
        return Traffic(sent, messages, training.network_for(ranks).estimate_seconds(sent, messages, ranks))


@dataclass(frozen=True)
class FSDP2Baseline:
    """FSDP2 with `fully_shard` on each block, resharded after forward. The sharded parameters are the masters."""

    name: ClassVar[str] = "FSDP2"

    def estimate(self, training: TrainingSetup, ranks: int) -> Estimate:
        shapes = {spec.index: _fsdp2_shard_shape(spec.shape, ranks) for spec in training.param_specs}
        elements = {spec.index: _shape_numel(shapes[spec.index]) for spec in training.param_specs}
        itemsizes = {spec.index: training.update_dtype(spec.dtype).itemsize for spec in training.param_specs}
        trainable = [spec for spec in training.param_specs if spec.trainable]
        state = sum(training.state_bytes(spec, shapes[spec.index]) for spec in trainable if elements[spec.index])
        tensors = [(spec, shapes[spec.index]) for spec in trainable]
        memory = MemoryEstimate(
            parameters=sum(elements[i] * itemsizes[i] for i in elements) + training.model.buffer_bytes,
            gradients=sum(elements[spec.index] * itemsizes[spec.index] for spec in trainable),
            state=state,
            backward_overhead=_fsdp2_unsharded_bytes(training),
            step_overhead=training.temporary_bytes(tensors, use_fused=False),
            activations=training.activations,
        )
        most, mean = sum(elements[spec.index] for spec in trainable), sum(spec.numel for spec in trainable) / ranks
        imbalance = most / mean if mean else 1.0
        return Estimate(self.name, ranks, memory, self._estimate_traffic(training, ranks), imbalance)

    def _estimate_traffic(self, training: TrainingSetup, ranks: int) -> Traffic:
        """Return the traffic: blocks are all-gathered for forward and for backward, root parameters once."""
        if ranks == 1:
            return Traffic(0, 0)
        root, *blocks = training.model.blocks
        gathered = _params_nbytes(root) + 2 * sum(map(_params_nbytes, blocks))
        reduced = sum(param.nbytes for param in training.model.trainable_params)
        sent, messages = (gathered + reduced) * (ranks - 1) // ranks, 2 + 3 * len(blocks)
        return Traffic(sent, messages, training.network_for(ranks).estimate_seconds(sent, messages, ranks))


def _estimate_ddp_memory(training: TrainingSetup, updated_specs: Sequence[ParamSpec]) -> MemoryEstimate:
    """Estimate DDP on a rank with state for `updated_specs`. Its buckets are as large as all gradients."""
    model = training.model
    gradients = sum(param.nbytes for param in model.trainable_params)
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
    """Return the traffic of all-reducing each bucket, which equals a reduce-scatter and an all-gather."""
    if ranks == 1:
        return Traffic(0, 0)
    gradients = sum(param.nbytes for param in training.model.trainable_params)
    sent, messages = 2 * gradients * (ranks - 1) // ranks, 2 * -(-gradients // _DDP_BUCKET_BYTES)
    return Traffic(sent, messages, training.network_for(ranks).estimate_seconds(sent, messages, ranks))


def _fsdp2_unsharded_bytes(training: TrainingSetup) -> int:
    """Return the peak of unsharded memory in backward.

    A block's gradients, their reduce-scatter buffer and the two prefetched blocks; in addition the root parameters all
    the time, with their gradients at the end.
    """
    root, *blocks = map(_params_nbytes, training.model.blocks)
    block_peaks = (2 * blocks[i] + sum(blocks[max(0, i - 2) : i]) for i in range(len(blocks)))
    return root + max(2 * root, *block_peaks, 0)


def _master_bytes(training: TrainingSetup, specs: Sequence[ParamSpec]) -> int:
    covered = [spec for spec in specs if spec.trainable and training.update_dtype(spec.dtype) != spec.dtype]
    return sum(spec.numel * training.update_dtype(spec.dtype).itemsize for spec in covered)


def _fsdp2_shard_shape(shape: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    """Return the shard shape on the fullest rank. FSDP2 splits the first dimension."""
    return (-(-shape[0] // ranks), *shape[1:]) if shape else ()


def _shape_numel(shape: tuple[int, ...]) -> int:
    return ParamShape("", shape).numel


def _params_nbytes(params: Sequence[ParamShape]) -> int:
    return sum(param.nbytes for param in params)
