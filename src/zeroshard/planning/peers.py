"""What others take: `DistributedDataParallel` alone and with torch's own ZeRO, and FSDP2. With their defaults."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..layout.layout import Layout
from ..layout.partition import WholeParams
from ..layout.specs import ParamSpec
from ..units import MIB
from .shapes import ParamShape
from .training import Training
from .usage import Estimate, Traffic, Usage

_DDP_BUCKET = 25 * MIB


@dataclass(frozen=True)
class Replicated:
    """DDP: everything everywhere. It copies gradients into buckets of its own."""

    name: ClassVar[str] = "DDP"

    def estimate(self, training: Training, ranks: int) -> Estimate:
        usage = _under_ddp(training, training.specs)
        return Estimate(self.name, ranks, usage, _ddp_traffic(training, ranks))


@dataclass(frozen=True)
class TorchZero:
    """DDP, with each parameter's state on one rank, which then sends the parameter to all."""

    name: ClassVar[str] = "torch ZeRO"

    def estimate(self, training: Training, ranks: int) -> Estimate:
        layout = WholeParams().extend(Layout.empty(ranks), training.specs)
        loads = layout.tally(lambda spec, _: training.state(spec, spec.shape) + _masters(training, [spec]))
        fullest = max(range(ranks), key=lambda rank: loads[rank])
        owned = [spec for spec in training.specs if layout.owner_of(spec.index) == fullest]
        balance = max(loads) * ranks / sum(loads) if any(loads) else 1.0
        return Estimate(self.name, ranks, _under_ddp(training, owned), self._traffic(training, ranks), balance)

    def _traffic(self, training: Training, ranks: int) -> Traffic:
        """One message a parameter, beside DDP's."""
        reduced, trained = _ddp_traffic(training, ranks), training.model.trained
        if ranks == 1:
            return reduced
        sent = reduced.sent + sum(it.nbytes for it in trained) * (ranks - 1) // ranks
        messages = reduced.messages + len(trained)
        return Traffic(sent, messages, training.network_of(ranks).seconds(sent, messages, ranks))


@dataclass(frozen=True)
class FullySharded:
    """FSDP2, with each block of a list sharded on its own, and freed after its use. Masters are the parameters."""

    name: ClassVar[str] = "FSDP2"

    def estimate(self, training: Training, ranks: int) -> Estimate:
        own = {spec.index: _rows(spec.shape, ranks) for spec in training.specs}
        elements = {spec.index: _numel(own[spec.index]) for spec in training.specs}
        kept = {spec.index: training.dtype_of_update(spec.dtype).itemsize for spec in training.specs}
        trained = [spec for spec in training.specs if spec.trainable]
        state = sum(training.state(spec, own[spec.index]) for spec in trained if elements[spec.index])
        tensors = [(spec, own[spec.index]) for spec in trained]
        usage = Usage(
            parameters=sum(elements[i] * kept[i] for i in elements) + training.model.buffers,
            gradients=sum(elements[it.index] * kept[it.index] for it in trained),
            state=state,
            in_backward=_unsharded(training),
            in_step=training.temporaries(tensors, fuses=False),
            activations=training.activations,
        )
        most, mean = sum(elements[it.index] for it in trained), sum(it.numel for it in trained) / ranks
        balance = most / mean if mean else 1.0
        return Estimate(self.name, ranks, usage, self._traffic(training, ranks), balance)

    def _traffic(self, training: Training, ranks: int) -> Traffic:
        """Blocks are gathered for forward and for backward; what belongs to none is gathered once."""
        if ranks == 1:
            return Traffic(0, 0)
        root, *blocks = training.model.blocks
        gathered = _nbytes(root) + 2 * sum(map(_nbytes, blocks))
        reduced = sum(it.nbytes for it in training.model.trained)
        sent, messages = (gathered + reduced) * (ranks - 1) // ranks, 2 + 3 * len(blocks)
        return Traffic(sent, messages, training.network_of(ranks).seconds(sent, messages, ranks))


def _under_ddp(training: Training, updated: Sequence[ParamSpec]) -> Usage:
    """`updated`: parameters that the fullest rank has state of. DDP's buckets are as large as the gradients."""
    model = training.model
    gradients = sum(it.nbytes for it in model.trained)
    temporaries = training.temporaries([(spec, spec.shape) for spec in updated], fuses=False)
    parameters = _nbytes(model.params) + model.buffers
    return Usage(
        parameters=parameters,
        gradients=gradients,
        state=sum(training.state(spec, spec.shape) for spec in updated),
        masters=_masters(training, updated),
        in_backward=gradients,
        in_step=gradients + temporaries,
        while_made=parameters + gradients,
        activations=training.activations,
    )


def _ddp_traffic(training: Training, ranks: int) -> Traffic:
    """An all-reduce of each bucket: as much as to its owners and back."""
    if ranks == 1:
        return Traffic(0, 0)
    gradients = sum(it.nbytes for it in training.model.trained)
    sent, messages = 2 * gradients * (ranks - 1) // ranks, 2 * -(-gradients // _DDP_BUCKET)
    return Traffic(sent, messages, training.network_of(ranks).seconds(sent, messages, ranks))


def _unsharded(training: Training) -> int:
    """What is whole for moments in backward.

    The gradients of a block, the message that they go in, and the two blocks that come next; and what belongs to no
    block all the time, with its gradients at the end.
    """
    root, *blocks = map(_nbytes, training.model.blocks)
    most = (2 * blocks[i] + sum(blocks[max(0, i - 2) : i]) for i in range(len(blocks)))
    return root + max(2 * root, *most, 0)


def _masters(training: Training, specs: Sequence[ParamSpec]) -> int:
    covered = [it for it in specs if it.trainable and training.dtype_of_update(it.dtype) != it.dtype]
    return sum(it.numel * training.dtype_of_update(it.dtype).itemsize for it in covered)


def _rows(shape: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    """Of the rank that has most: FSDP2 divides the first dimension."""
    return (-(-shape[0] // ranks), *shape[1:]) if shape else ()


def _numel(shape: tuple[int, ...]) -> int:
    return ParamShape("", shape).numel


def _nbytes(params: Sequence[ParamShape]) -> int:
    return sum(it.nbytes for it in params)
