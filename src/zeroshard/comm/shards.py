"""Slices of a flat buffer to their owners, and back: the best way there is on each backend.

A way is a `ShardWay`. The table of measurements behind the choice is in docs/decisions/0010.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import count
from math import frexp
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

    Hazard: what was given to `ShardWay.reduce` must stay untouched until `add_up` has returned.
    """

    def arrives(self, within: float) -> bool:  # noqa: ARG002
        """Whether `add_up` can return without waiting on the host, after so many seconds at most."""
        return True

    @abstractmethod
    def add_up(self, into: torch.Tensor, share: float) -> None:
        """Write the sum over all ranks, times `share`, into `into`."""


class ShardWay(ABC):
    """One way to do both verbs. All ranks call them in the same order."""

    def __init__(self, group: Group, reduce: Reduce) -> None:
        self.group, self._policy = group, reduce

    equal_shards = False
    """Needs the whole flat buffer with shards of equal length, padding and all."""
    adds_locally = False
    """Sums are made here, in as many passes over memory as there are factors: a share had better be taken before."""

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

    adds_locally = True

    def __init__(self, group: Group, reduce: Reduce) -> None:
        super().__init__(group, reduce)
        self._watcher = Watcher()
        self._tag = next(_tags.setdefault(group.process_group, count(FIRST_TAG)))
        self._others = [Rank((group.rank + turn) % group.size) for turn in range(1, group.size)]
        """All other ranks, in an order that has every rank begin with another one."""

    def reduce(self, flat: torch.Tensor, shards: Sequence[Span]) -> Arriving:
        me, size = self.group.rank, self.group.size
        own = flat[slice(*shards[me])]
        slices = {rank: torch.empty_like(own) for rank in self._others} | {me: own}
        # Receives first: a message that finds its buffer ready is not kept waiting.
        works = [self._receive(slices[other], other) for other in self._others if own.numel()]
        works += [self._send(flat[slice(*shards[other])], other) for other in self._others if shards[other].length]
        return _ByPairs([slices[Rank(rank)] for rank in range(size)], self._watcher.watch(works), keep=flat)

    def gather(self, flat: torch.Tensor, shards: Sequence[Span]) -> Pending:
        own = flat[slice(*shards[self.group.rank])]
        parts = [(other, flat[slice(*shards[other])]) for other in self._others]
        works = [self._receive(part, other) for other, part in parts if part.numel()]
        works += [self._send(own, other) for other in self._others if own.numel()]
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
        return _Summed(shard, _reduce_scatter(shard, flat, self.group.process_group), keep=flat)

    def gather(self, flat: torch.Tensor, shards: Sequence[Span]) -> Pending:
        mine = flat[slice(*shards[self.group.rank])]
        return Pending(_all_gather(flat, mine, self.group.process_group), flat)


class Whole(ShardWay):
    """Reduce everything everywhere: for backends that know no better, such as gloo with CUDA tensors."""

    def reduce(self, flat: torch.Tensor, shards: Sequence[Span]) -> Arriving:
        total = flat.to(sum_dtype(flat.dtype), copy=True)
        work = dist.all_reduce(total, group=self.group.process_group, async_op=True)
        return _Summed(total[slice(*shards[self.group.rank])], work, keep=total)

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


class _ByPairs(Arriving):
    def __init__(self, slices: list[torch.Tensor], work: "Watched | _Enqueued", keep: torch.Tensor) -> None:
        self._slices, self._work, self._keep = slices, work, keep

    def arrives(self, within: float) -> bool:
        return self._work.done(within)

    def add_up(self, into: torch.Tensor, share: float) -> None:
        self._work.wait()
        first, *others = self._slices
        exact = sum_dtype(first.dtype)
        wide = into if into.dtype == exact else torch.empty_like(into, dtype=exact)
        if first.dtype != exact:
            wide.copy_(first).mul_(share)
        elif share == 1 and others:
            torch.add(first, others.pop(0), out=wide)
        else:
            torch.mul(first, share, out=wide)
        for other in others:
            # Each times its share, rounded, as DDP does it: only then do bits not depend on who multiplies, and when.
            if _is_exact(share):
                wide.add_(other, alpha=share)
            else:
                wide.add_(torch.mul(other.to(exact), share))
        if wide is not into:
            into.copy_(wide)


class _Summed(Arriving):
    def __init__(self, shard: torch.Tensor, work: Waitable, keep: torch.Tensor) -> None:
        self._shard, self._work, self._keep = shard, work, keep

    def add_up(self, into: torch.Tensor, share: float) -> None:
        self._work.wait()
        torch.mul(self._shard, share, out=self._shard)
        into.copy_(self._shard)


class _Enqueued:
    """Work of a backend whose `wait` returns at once, and keeps the stream waiting."""

    def __init__(self, work: Waitable) -> None:
        self.wait = work.wait

    def done(self, _: float) -> bool:
        return True


def _is_exact(factor: float) -> bool:
    """A power of two."""
    return frexp(factor)[0] == 0.5


def _broadcast(group: Group, part: torch.Tensor, owner: Rank) -> Any:
    return dist.broadcast(part, group.to_global(owner), group=group.process_group, async_op=True)


def _reduce_scatter(shard: torch.Tensor, flat: torch.Tensor, group: dist.ProcessGroup) -> Any:
    verb = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    return verb(shard, flat, group=group, async_op=True)


def _all_gather(flat: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> Any:
    verb = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    return verb(flat, shard, group=group, async_op=True)
