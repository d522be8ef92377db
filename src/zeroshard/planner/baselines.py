"""Estimates of the alternatives, with their defaults: DDP, DDP with torch's ZeroRedundancyOptimizer, and FSDP2."""

import math
from collections.abc import Sequence

from .._types import MIB
from ..layout.layout import Layout
from ..layout.partition import WholeParams
from ..layout.spec import ParamSpec
from .estimate import Estimate, MemoryEstimate, TrainingSetup
from .shapes import ParamShape

_DDP_BUCKET_BYTES = 25 * MIB


def estimate_ddp(training: TrainingSetup, ranks: int) -> Estimate:
    """DDP: everything is replicated. An all-reduce sends as much as a reduce-scatter and an all-gather."""
    traffic = training.collective_traffic(2 * training.grad_bytes, _num_ddp_messages(training), ranks)
    return Estimate("DDP", ranks, _estimate_ddp_memory(training, training.param_specs), traffic)


def estimate_torch_zero(training: TrainingSetup, ranks: int) -> Estimate:
    """DDP with `ZeroRedundancyOptimizer`: the owner of a parameter keeps its state and broadcasts its update."""
    layout = WholeParams().extend(Layout.empty(ranks), training.param_specs)
    loads = layout.sum_per_rank(lambda spec, _: training.state_bytes(spec, spec.shape) + _master_bytes(training, spec))
    fullest = max(range(ranks), key=lambda rank: loads[rank])
    owned = [spec for spec in training.param_specs if layout.owner_of(spec.index) == fullest]
    messages = _num_ddp_messages(training) + len(training.model.trainable_params)
    traffic = training.collective_traffic(3 * training.grad_bytes, messages, ranks)
    imbalance = max(loads) * ranks / sum(loads) if any(loads) else 1.0
    return Estimate("torch ZeRO", ranks, _estimate_ddp_memory(training, owned), traffic, imbalance)


def estimate_fsdp2(training: TrainingSetup, ranks: int) -> Estimate:
    """FSDP2 with `fully_shard` on each block, resharded after forward. The sharded parameters are the masters.

    Blocks are all-gathered for forward and for backward, root parameters once.
    """
    # The rank with the most: FSDP2 splits the first dimension.
    shards = [
        (spec, (-(-spec.shape[0] // ranks), *spec.shape[1:]) if spec.shape else ()) for spec in training.param_specs
    ]
    nbytes = [math.prod(shape) * training.update_dtype(spec.dtype).itemsize for spec, shape in shards]
    trainable = [(spec, shape) for spec, shape in shards if spec.trainable]
    memory = MemoryEstimate(
        parameters=sum(nbytes) + training.model.buffer_bytes,
        gradients=sum(size for (spec, _), size in zip(shards, nbytes, strict=True) if spec.trainable),
        state=sum(training.state_bytes(spec, shape) for spec, shape in trainable if math.prod(shape)),
        backward_overhead=_unsharded_bytes(training),
        step_overhead=training.temporary_bytes(trainable, use_fused=False),
        activations=training.activations,
    )
    most, total = sum(math.prod(shape) for _, shape in trainable), sum(spec.numel for spec, _ in trainable)
    root, *blocks = map(_params_nbytes, training.model.blocks)
    traffic = training.collective_traffic(root + 2 * sum(blocks) + training.grad_bytes, 2 + 3 * len(blocks), ranks)
    return Estimate("FSDP2", ranks, memory, traffic, most * ranks / total if total else 1.0)


def _estimate_ddp_memory(training: TrainingSetup, updated: Sequence[ParamSpec]) -> MemoryEstimate:
    """Estimate DDP on a rank that updates these parameters. Gradients are copied into buckets."""
    parameters, gradients = _params_nbytes(training.model.params) + training.model.buffer_bytes, training.grad_bytes
    temporary = training.temporary_bytes([(spec, spec.shape) for spec in updated], use_fused=False)
    return MemoryEstimate(
        parameters=parameters,
        gradients=gradients,
        state=sum(training.state_bytes(spec, spec.shape) for spec in updated),
        masters=sum(_master_bytes(training, spec) for spec in updated),
        backward_overhead=gradients,
        step_overhead=gradients + temporary,
        construction_peak=parameters + gradients,
        activations=training.activations,
    )


def _num_ddp_messages(training: TrainingSetup) -> int:
    return 2 * -(-training.grad_bytes // _DDP_BUCKET_BYTES)


def _unsharded_bytes(training: TrainingSetup) -> int:
    """Return FSDP2's peak of unsharded memory in backward.

    A block's gradients, their reduce-scatter buffer and the two prefetched blocks; in addition the root parameters all
    the time, with their gradients at the end.
    """
    root, *blocks = map(_params_nbytes, training.model.blocks)
    block_peaks = (2 * blocks[i] + sum(blocks[max(0, i - 2) : i]) for i in range(len(blocks)))
    return root + max(2 * root, *block_peaks, 0)


def _master_bytes(training: TrainingSetup, spec: ParamSpec) -> int:
    updated = training.update_dtype(spec.dtype)
    return spec.numel * updated.itemsize if spec.trainable and updated != spec.dtype else 0


def _params_nbytes(params: Sequence[ParamShape]) -> int:
    return sum(param.nbytes for param in params)
