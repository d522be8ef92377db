"""What a way of moving slices of a flat buffer is."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from math import frexp
from typing import Protocol, runtime_checkable

import torch

from ..policies import Reduce, sum_dtype
from ..units import Rank, Span
from .group import Group
from .pending import Pending


class Arriving(ABC):
    """Slices of all ranks on their way to this rank, their owner.

    Hazard: what was given to `ShardWay.reduce` must stay untouched until `wait` has returned, also by a failure.
    """

    def arrives(self, within: float) -> bool:  # noqa: ARG002
        """Whether `wait` can return without waiting on the host, after so many seconds at most."""
        return True

    @abstractmethod
    def wait(self) -> None:
        """The sum is there."""


class ByThread(Arriving):
    """What a thread brings about, and says when it is over."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self.failure: Exception | None = None

    def arrives(self, within: float) -> bool:
        return self._over.wait(within)

    def wait(self) -> None:
        self._over.wait()
        if self.failure is not None:
            raise self.failure

    def fail(self, failure: Exception) -> None:
        """Raised at the end: others rely on what this rank sends. The first one counts."""
        self.failure = self.failure or failure

    def attempt(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as failure:
            self.fail(failure)

    def end(self) -> None:
        self._over.set()


class ShardWay(ABC):
    """One way to do both verbs. All ranks call them in the same order."""

    def __init__(self, group: Group, reduce: Reduce) -> None:
        self.group, self.policy = group, reduce
        self.ranks = group.size
        """All those whose slices are added up."""

    equal_shards = False
    """Needs the whole flat buffer with shards of equal length, padding and all."""
    adds_locally = False
    """Sums are made here, in as many passes over memory as there are factors: a share had better be taken before."""

    @property
    def eager(self) -> bool:
        """May be used while other ranks do other things: it keeps no host waiting, and mixes with no other messages."""
        return True

    @abstractmethod
    def reduce(self, flat: torch.Tensor, shards: Sequence[Span], into: torch.Tensor, share: float) -> Arriving:
        """Start sending each shard of `flat` to its owner, where `into` becomes the sum over ranks times `share`."""

    @abstractmethod
    def gather(self, flat: torch.Tensor, shards: Sequence[Span]) -> Pending:
        """Start bringing each owner's shard into `flat` on all ranks."""

    def bytes_to_reduce(self, shards: Sequence[Span], dtype: torch.dtype, into: torch.dtype) -> int:  # noqa: ARG002
        """What this rank sends to reduce a bucket of `dtype`, if the backend sends no byte in vain."""
        return sum(it.length for rank, it in filled(shards) if rank != self.group.rank) * dtype.itemsize

    def bytes_to_gather(self, shards: Sequence[Span], dtype: torch.dtype) -> int:
        """The same to gather one."""
        return (self.group.size - 1) * shards[self.group.rank].length * dtype.itemsize

    def kept(self) -> list[torch.Tensor]:
        """Memory that is kept for the next ones."""
        return []


@runtime_checkable
class Sparse(Protocol):
    """Shards that know which of them have elements."""

    def filled(self) -> Iterable[tuple[Rank, Span]]: ...


def filled(shards: Sequence[Span]) -> Iterable[tuple[Rank, Span]]:
    """Those with elements, by rank. Where a few of thousands of ranks have some, the others are not looked at."""
    if isinstance(shards, Sparse):
        return shards.filled()
    return ((Rank(rank), shard) for rank, shard in enumerate(shards) if shard.length)


def cut(flat: torch.Tensor, shards: Sequence[Span]) -> list[torch.Tensor]:
    """Its shards. Hazard: a message that is too short would be received without a word."""
    end = max(shard.stop for shard in shards)
    if flat.numel() < end:
        raise ValueError(f"a bucket of {end} elements was given as {flat.numel()}")
    return [flat[slice(*shard)] for shard in shards]


def add_in_order(slices: Sequence[torch.Tensor], into: torch.Tensor, share: float) -> None:
    """Write the sum of all slices, each times `share`, into `into`."""
    first, *others = slices
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


def _is_exact(factor: float) -> bool:
    """A power of two."""
    return frexp(factor)[0] == 0.5
