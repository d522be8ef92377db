"""A report of an optimizer: all that is counted, on this rank alone. Nothing is sent."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ..build import EngineBuilder
from ..layout.layout import Layout
from ..layout.spec import ParamSpec
from ..engine.flat_engine import FlatShardEngine
from ..engine.inner import ParamGroup
from ..engine.base import Engine
from ..peer_checkpoint.snapshot import PeerSnapshots
from ..state.trees import collect_plain_tensors
from .._types import Rank
from ..report import Report
from .values import CommVolume, Counters, MemoryUse
from .words import describe_setup


def make_report(
    builder: EngineBuilder,
    engine: Engine,
    groups: Sequence[ParamGroup],
    peer_snapshots: PeerSnapshots | None,
    *,
    is_layout_final: bool,
) -> Report:
    """`settled`: owners will not change any more."""
    comm, states = engine.comm, dict(_collect_state_by_group(engine))
    held = {**engine.memory_usage(), "state": [tensor for tensors in states.values() for tensor in tensors]}
    return Report(
        rank=comm.data_parallel.group.rank,
        shard_rank=comm.group.rank,
        world_size=comm.group.size,
        num_replicas=comm.data_parallel.group.size // comm.group.size,
        optimizer_classes=tuple(kind.name for kind in builder.optimizer_specs),
        config=describe_setup(builder),
        is_layout_final=is_layout_final,
        balance=builder.compute_balance(engine.layout, groups),
        state_bytes=_estimate_state_bytes(engine.layout, comm.group.rank, states),
        memory=(
            *_measure_memory(held),
            *([] if peer_snapshots is None else [MemoryUse("second copies", "cpu", peer_snapshots.nbytes)]),
        ),
        comm_volume=CommVolume(*engine.bytes_to_send()),
        times=comm.profiler.last_step,
        counters=_read_counters(engine, peer_snapshots),
        layout=engine.layout,
    )


def _collect_state_by_group(engine: Engine) -> Iterator[tuple[int, list[torch.Tensor]]]:
    """Tensors of this rank's state, by the number of their group; -1 for those that belong to no parameter."""
    alone = [(list(range(len(it.optimizer.param_groups))), it) for it in engine.inner.local_optimizers]
    parts = (
        [(part.group_ids, part.inner) for part in engine.optimizer_shards]
        if isinstance(engine, FlatShardEngine)
        else alone
    )
    others: list[Any] = []
    for numbers, inner in parts:
        others += collect_plain_tensors(inner.shared_state())
        for number, group in zip(numbers, inner.optimizer.param_groups, strict=True):
            state = [inner.optimizer.state.get(param, {}) for param in group["params"]]
            yield number, collect_plain_tensors([dict(it) if isinstance(it, Mapping) else it for it in state])
    yield -1, others


def _estimate_state_bytes(
    layout: Layout, rank: Rank, state_by_group: Mapping[int, list[torch.Tensor]]
) -> tuple[int | None, ...]:
    """Of each rank: as many bytes for each element of a group as there are here, if there are elements of it here."""
    mine: Counter[int] = Counter()
    for bucket in layout.buckets:
        for piece in bucket.param_shards_of_rank(rank):
            mine[layout.params[piece.param].group] += _count_trainable(
                layout.params[piece.param], piece.in_param.length
            )
    sizes = {group: sum(it.nbytes for it in tensors) for group, tensors in state_by_group.items()}
    rates = {group: sizes.get(group, 0) / elements for group, elements in mine.items() if elements}
    found = layout.sum_per_rank(lambda spec, elements: rates.get(spec.group, 0.0) * _count_trainable(spec, elements))
    unknown = layout.sum_per_rank(lambda spec, elements: 0 if spec.group in rates else _count_trainable(spec, elements))
    estimates = [None if lacking else round(size) for size, lacking in zip(found, unknown, strict=True)]
    estimates[rank] = sum(sizes.values())
    return tuple(estimates)


def _count_trainable(spec: ParamSpec, elements: int) -> int:
    """Gaps that strides leave do not count."""
    return elements * spec.numel // spec.storage_numel if spec.trainable and spec.storage_numel else 0


def _measure_memory(tensors_by_category: Mapping[str, Sequence[torch.Tensor]]) -> Iterator[MemoryUse]:
    order = ("parameters", "gradients", "state", "master weights", "staging")
    for what in order:
        sizes: Counter[str] = Counter()
        for tensor in tensors_by_category.get(what, ()):
            sizes[tensor.device.type] += tensor.nbytes
        for device, nbytes in sorted(sizes.items()):
            yield MemoryUse(what, device, nbytes)


def _read_counters(engine: Engine, peer_snapshots: PeerSnapshots | None) -> Counters:
    nonfinite = engine.checks.nonfinite
    return Counters(
        engine.steps,
        nonfinite.detected,
        nonfinite.skipped,
        engine.checks.num_consistency_checks,
        None if peer_snapshots is None else peer_snapshots.step,
        0 if peer_snapshots is None else peer_snapshots.bytes_sent,
    )
