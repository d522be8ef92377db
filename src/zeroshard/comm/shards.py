"""Slices of a flat buffer to their owners, and back: the best way there is on each backend.

A way is a `ShardWay`. The table of measurements behind the choice is in docs/decisions/0010.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ..policies import Reduce, sum_dtype
from ..units import Rank, Span
from .collectives import as_bytes
from .group import Group
from .pending import Pending, Together, Waitable, Watched, Watcher

FIRST_TAG = 1 << 20
"""Beyond what users give their own messages."""

_tags: WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = WeakKeyDictionary()
"""Ways are made in the same order on all ranks, and messages of one must not be taken for those of another."""


class Arriving(ABC):
    """Slices of all ranks on their way to this rank, their owner.

    Hazard: what was given to `ShardWay.reduce` must stay untouched until `average` has returned.
    """

    @property
    @abstractmethod
    def arrived(self) -> bool:
        """Whether `average` would return without waiting on the host."""

    @abstractmethod
    def average(self, into: torch.Tensor) -> None:
        """Write the average over all ranks into `into`."""


class ShardWay(ABC):
    """One way to do both verbs. All ranks call them in the same order."""

    def __init__(self, group: Group, reduce: Reduce) -> None:
        self.group, self._policy = group, reduce

    equal_shards = False
    """Needs the whole flat buffer with shards of equal length, padding and all."""

    @property
    def eager(self) -> bool:
        """May be used while other ranks do other things: it keeps no host waiting, and mixes with no other messages."""
        return True

    @abstractmethod
    def reduce(self, flat: torch.Tensor, shards: Sequence[Span]) -> Arriving:
        """Start sending each shard of `flat` to its owner."""

    @abstractmethod
    def gather(self, flat: torch.Tensor, shards: Sequence[Span]) -> Pending:
        """Start bringing each owner's shard into `flat` on all ranks."""


class Pairwise(ShardWay):
    """Every slice straight to its owner, who adds in the order of ranks: gloo with CPU tensors."""

    def __init__(self, group: Group, reduce: Reduce) -> None:
        super().__init__(group, reduce)
        self._watcher = Watcher()
        self._tag = next(_tags.setdefault(group.process_group, count(FIRST_TAG)))

    def reduce(self, flat: torch.Tensor, shards: Sequence[Span]) -> Arriving:
        me, size = self.group.rank, self.group.size
        others = [Rank((me + turn) % size) for turn in range(1, size)]
        own = flat[slice(*shards[me])]
        slices = {rank: torch.empty_like(own) for rank in others} | {me: own}
        # Receives first: a message that finds its buffer ready is not kept waiting.
        works = [self._receive(slices[other], other) for other in others if own.numel()]
        works += [self._send(flat[slice(*shards[other])], other) for other in others if shards[other].length]
        return _ByPairs([slices[Rank(rank)] for rank in range(size)], self._watcher.watch(works), keep=flat)

    def gather(self, flat: torch.Tensor, shards: Sequence[Span]) -> Pending:
        raw = [(Rank(rank), as_bytes(flat[slice(*shard)])) for rank, shard in enumerate(shards) if shard.length]
        works = [_broadcast(self.group, part, rank) for rank, part in raw]
        return Pending(Together(works), flat)

    def _send(self, part: torch.Tensor, other: Rank) -> Any:
        return dist.isend(as_bytes(part), self.group.to_global(other), self.group.process_group, self._tag)

    def _receive(self, part: torch.Tensor, other: Rank) -> Any:
        return dist.irecv(as_bytes(part), self.group.to_global(other), self.group.process_group, self._tag)


class Native(ShardWay):
    """The backend's own collectives: NCCL. Waiting for them keeps the stream waiting, not the host."""

    equal_shards = True

    def reduce(self, flat: torch.Tensor, shards: Sequence[Span]) -> Arriving:
        if self._policy.fixed_order or sum_dtype(flat.dtype) != flat.dtype:
            parts = torch.empty_like(flat)
            work = dist.all_to_all_single(parts, flat, group=self.group.process_group, async_op=True)
            return _ByPairs(list(parts.chunk(self.group.size)), _Enqueued(work), keep=flat)
        shard = torch.empty_like(flat[slice(*shards[self.group.rank])])
        return _Summed(shard, _reduce_scatter(shard, flat, self.group.process_group), self.group.size, keep=flat)

    def gather(self, flat: torch.Tensor, shards: Sequence[Span]) -> Pending:
        mine = flat[slice(*shards[self.group.rank])]
        return Pending(_all_gather(flat, mine, self.group.process_group), flat)


class Whole(ShardWay):
    """Reduce everything everywhere: for backends that know no better, such as gloo with CUDA tensors."""

    def reduce(self, flat: torch.Tensor, shards: Sequence[Span]) -> Arriving:
        total = flat.to(sum_dtype(flat.dtype), copy=True)
        work = dist.all_reduce(total, group=self.group.process_group, async_op=True)
        return _Summed(total[slice(*shards[self.group.rank])], work, self.group.size, keep=total)

    gather = Pairwise.gather

    @property
    def eager(self) -> bool:
        # Hazard: gloo pairs collectives by their order, also with those of the control channel in the same group.
        return self.group.size == 1 or self.group.control is not self.group.process_group


def best_way(group: Group, device: torch.device, reduce: Reduce, *, equal: bool) -> ShardWay:
    """`equal`: all shards are equally long."""
    name = group.process_group._get_backend(device).name().lower() if group.size > 1 else ""
    if name in ("nccl", "fake", "xccl", "hccl") and equal:
        return Native(group, reduce)
    return Pairwise(group, reduce) if device.type == "cpu" and name in ("gloo", "mpi") else Whole(group, reduce)


class _ByPairs(Arriving):
    def __init__(self, slices: list[torch.Tensor], work: "Watched | _Enqueued", keep: torch.Tensor) -> None:
        self._slices, self._work, self._keep = slices, work, keep

    @property
    def arrived(self) -> bool:
        return self._work.done

    def average(self, into: torch.Tensor) -> None:
        self._work.wait()
        share = 1 / len(self._slices)
        first, *others = self._slices
        exact = sum_dtype(first.dtype)
        wide = into if into.dtype == exact else torch.empty_like(into, dtype=exact)
        if first.dtype == wide.dtype:
            torch.mul(first, share, out=wide)
        else:
            wide.copy_(first).mul_(share)
        for other in others:
            wide.add_(other, alpha=share)
        if wide is not into:
            into.copy_(wide)


class _Summed(Arriving):
    arrived = True

    def __init__(self, shard: torch.Tensor, work: Waitable, ranks: int, keep: torch.Tensor) -> None:
        self._shard, self._work, self._ranks, self._keep = shard, work, ranks, keep

    def average(self, into: torch.Tensor) -> None:
        self._work.wait()
        torch.mul(self._shard, 1 / self._ranks, out=self._shard)
        into.copy_(self._shard)


class _Enqueued:
    """Work of a backend whose `wait` returns at once, and keeps the stream waiting."""

    done = True

    def __init__(self, work: Waitable) -> None:
        self.wait = work.wait


def _broadcast(group: Group, part: torch.Tensor, owner: Rank) -> Any:
    return dist.broadcast(part, group.to_global(owner), group=group.process_group, async_op=True)


def _reduce_scatter(shard: torch.Tensor, flat: torch.Tensor, group: dist.ProcessGroup) -> Any:
    verb = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    return verb(shard, flat, group=group, async_op=True)


def _all_gather(flat: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> Any:
    verb = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    return verb(flat, shard, group=group, async_op=True)
