"""What a way of moving slices of a flat buffer is."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from math import frexp
from typing import Protocol, runtime_checkable

import torch

from .._types import Rank, Span
from ..config import Reduce, sum_dtype
from .process_group import Group
from .work import PendingWork


class ReduceWork(ABC):
    """Slices of all ranks on their way to this rank, their owner.

    Hazard: what was given to `ShardWay.reduce` must stay untouched until `wait` has returned, also by a failure.
    """

    def is_ready(self, timeout_s: float) -> bool:  # noqa: ARG002
        """Whether `wait` can return without waiting on the host, after so many seconds at most."""
        return True

    @abstractmethod
    def wait(self) -> None:
        """The sum is there."""


class ThreadedWork(ReduceWork):
    """What a thread brings about, and says when it is over."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self.error: Exception | None = None

    def is_ready(self, timeout_s: float) -> bool:
        return self._done.wait(timeout_s)

    def wait(self) -> None:
        self._done.wait()
        if self.error is not None:
            raise self.error

    def set_error(self, error: Exception) -> None:
        """Raised at the end: others rely on what this rank sends. The first one counts."""
        self.error = self.error or error

    def run_guarded(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as failure:
            self.set_error(failure)

    def mark_done(self) -> None:
        self._done.set()


class ShardTransport(ABC):
    """One way to do both verbs. All ranks call them in the same order."""

    def __init__(self, group: Group, reduce: Reduce) -> None:
        self.group, self.policy = group, reduce
        self.num_ranks = group.size
        """All those whose slices are added up."""

    needs_equal_shards = False
    """Needs the whole flat buffer with shards of equal length, padding and all."""
    reduces_on_host = False
    """Sums are made here, in as many passes over memory as there are factors: a share had better be taken before."""

    @property
    def can_overlap_backward(self) -> bool:
        """May be used while other ranks do other things: it keeps no host waiting, and mixes with no other messages."""
        return True

    @abstractmethod
    def reduce_scatter(
        self, flat: torch.Tensor, shards: Sequence[Span], output: torch.Tensor, scale: float
    ) -> ReduceWork:
        """Start sending each shard of `flat` to its owner, where `into` becomes the sum over ranks times `share`."""

    @abstractmethod
    def all_gather(self, flat: torch.Tensor, shards: Sequence[Span]) -> PendingWork:
        """Start bringing each owner's shard into `flat` on all ranks."""

    def reduce_scatter_nbytes(self, shards: Sequence[Span], dtype: torch.dtype, output_dtype: torch.dtype) -> int:  # noqa: ARG002
        """What this rank sends to reduce a bucket of `dtype`, if the backend sends no byte in vain."""
        return sum(it.length for rank, it in non_empty_shards(shards) if rank != self.group.rank) * dtype.itemsize

    def all_gather_nbytes(self, shards: Sequence[Span], dtype: torch.dtype) -> int:
        """The same to gather one."""
        return (self.group.size - 1) * shards[self.group.rank].length * dtype.itemsize

    def cached_buffers(self) -> list[torch.Tensor]:
        """Memory that is kept for the next ones."""
        return []


@runtime_checkable
class SparseShards(Protocol):
    """Shards that know which of them have elements."""

    def non_empty(self) -> Iterable[tuple[Rank, Span]]: ...


def non_empty_shards(shards: Sequence[Span]) -> Iterable[tuple[Rank, Span]]:
    """Those with elements, by rank. Where a few of thousands of ranks have some, the others are not looked at."""
    if isinstance(shards, SparseShards):
        return shards.non_empty()
    return ((Rank(rank), shard) for rank, shard in enumerate(shards) if shard.length)


def split_shards(flat: torch.Tensor, shards: Sequence[Span]) -> list[torch.Tensor]:
    """Its shards. Hazard: a message that is too short would be received without a word."""
    end = max(shard.stop for shard in shards)
    if flat.numel() < end:
        raise ValueError(f"a bucket of {end} elements was given as {flat.numel()}")
    return [flat[slice(*shard)] for shard in shards]


def sum_in_rank_order(slices: Sequence[torch.Tensor], output: torch.Tensor, scale: float) -> None:
    """Write the sum of all slices, each times `share`, into `into`."""
    first, *others = slices
    exact = sum_dtype(first.dtype)
    wide = output if output.dtype == exact else torch.empty_like(output, dtype=exact)
    if first.dtype != exact:
        wide.copy_(first).mul_(scale)
    elif scale == 1 and others:
        torch.add(first, others.pop(0), out=wide)
    else:
        torch.mul(first, scale, out=wide)
    for other in others:
        # Each times its share, rounded, as DDP does it: only then do bits not depend on who multiplies, and when.
        if _is_power_of_two(scale):
            wide.add_(other, alpha=scale)
        else:
            wide.add_(torch.mul(other.to(exact), scale))
    if wide is not output:
        output.copy_(wide)


def _is_power_of_two(factor: float) -> bool:
    """A power of two."""
    return frexp(factor)[0] == 0.5
