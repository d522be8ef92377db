"""Slices of a flat buffer to their owners, and back: the best way there is on each backend.

A way is a `ShardWay`. The table of measurements behind the choice is in docs/decisions/0010.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..policies import Reduce, sum_dtype
from ..units import Rank, Span
from .collectives import as_bytes
from .group import Group
from .pairs import Pairwise
from .pending import Pending, Together, Waitable
from .ways import Arriving, ShardWay, add_in_order


class Native(ShardWay):
    """The backend's own collectives: NCCL. Waiting for them keeps the stream waiting, not the host."""

    equal_shards = True

    def reduce(self, flat: torch.Tensor, _: Sequence[Span], into: torch.Tensor, share: float) -> Arriving:
        if self._policy.fixed_order or sum_dtype(flat.dtype) != flat.dtype:
            parts = torch.empty_like(flat)
            work = dist.all_to_all_single(parts, flat, group=self.group.process_group, async_op=True)
            return _Slices(list(parts.chunk(self.group.size)), work, into, share, keep=flat)
        shard = into if into.dtype == flat.dtype else torch.empty_like(into, dtype=flat.dtype)
        return _Summed(shard, _reduce_scatter(shard, flat, self.group.process_group), into, share, keep=flat)

    def gather(self, flat: torch.Tensor, shards: Sequence[Span]) -> Pending:
        mine = flat[slice(*shards[self.group.rank])]
        return Pending(_all_gather(flat, mine, self.group.process_group), flat)


class Whole(ShardWay):
    """Reduce everything everywhere: for backends that know no better, such as gloo with CUDA tensors."""

    def reduce(self, flat: torch.Tensor, shards: Sequence[Span], into: torch.Tensor, share: float) -> Arriving:
        total = flat.to(sum_dtype(flat.dtype), copy=True)
        work = dist.all_reduce(total, group=self.group.process_group, async_op=True)
        return _Summed(total[slice(*shards[self.group.rank])], work, into, share, keep=total)

    def gather(self, flat: torch.Tensor, shards: Sequence[Span]) -> Pending:
        raw = [(Rank(rank), as_bytes(flat[slice(*shard)])) for rank, shard in enumerate(shards) if shard.length]
        return Pending(Together([_broadcast(self.group, part, rank) for rank, part in raw]), flat)

    @property
    def eager(self) -> bool:
        # Hazard: gloo pairs collectives by their order, also with those of the control channel in the same group.
        return self.group.size == 1 or self.group.control is not self.group.process_group


class Ways:
    """The best way for each kind of bucket. All ranks ask in the same order: each way has messages of its own."""

    def __init__(self, group: Group, reduce: Reduce) -> None:
        self._group, self._reduce = group, reduce
        self._known: dict[tuple[torch.device, bool], ShardWay] = {}

    def of(self, device: torch.device, *, equal: bool) -> ShardWay:
        """`equal`: all shards are equally long."""
        kind = (device, equal)
        if kind not in self._known:
            self._known[kind] = best_way(self._group, device, self._reduce, equal=equal)
        return self._known[kind]

    @property
    def eager(self) -> bool:
        """All of them are."""
        return all(way.eager for way in self._known.values())


def best_way(group: Group, device: torch.device, reduce: Reduce, *, equal: bool) -> ShardWay:
    """`equal`: all shards are equally long."""
    name = group.process_group._get_backend(device).name().lower() if group.size > 1 else ""
    if name in ("nccl", "fake", "xccl", "hccl") and equal:
        return Native(group, reduce)
    return Pairwise(group, reduce) if device.type == "cpu" and name in ("gloo", "mpi") else Whole(group, reduce)


class _Slices(Arriving):
    """Those of all ranks, yet to be added up."""

    def __init__(
        self, slices: list[torch.Tensor], work: Waitable, into: torch.Tensor, share: float, keep: torch.Tensor
    ) -> None:
        self._slices, self._work, self._into, self._share, self._keep = slices, work, into, share, keep

    def wait(self) -> None:
        self._work.wait()
        add_in_order(self._slices, self._into, self._share)


class _Summed(Arriving):
    """Added up on the way."""

    def __init__(
        self, shard: torch.Tensor, work: Waitable, into: torch.Tensor, share: float, keep: torch.Tensor
    ) -> None:
        self._shard, self._work, self._into, self._share, self._keep = shard, work, into, share, keep

    def wait(self) -> None:
        self._work.wait()
        self._shard.mul_(self._share)
        if self._shard is not self._into:
            self._into.copy_(self._shard)


def _broadcast(group: Group, part: torch.Tensor, owner: Rank) -> Any:
    return dist.broadcast(part, group.to_global(owner), group=group.process_group, async_op=True)


def _reduce_scatter(shard: torch.Tensor, flat: torch.Tensor, group: dist.ProcessGroup) -> Any:
    verb = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    return verb(shard, flat, group=group, async_op=True)


def _all_gather(flat: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> Any:
    verb = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    return verb(flat, shard, group=group, async_op=True)
