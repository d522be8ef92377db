"""The transport interface: reduce-scatter and all-gather of a flat buffer whose shards belong to ranks.

::

    flat     | shard of rank 0 | shard of rank 1 | shard of rank 2 | pad |

    reduce_scatter   every rank passes its own `flat`; each owner gets the sum of its shard over all ranks
    all_gather       every rank passes a `flat` with its own shard filled in; the others' shards are received into it

Implementations: `gloo.py` (CPU), `nccl.py` (NCCL, and all-reduce as the fallback), `hybrid.py` (with replicas).
"""

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
    """A reduce-scatter in flight.

    Hazard: the buffer passed to `ShardTransport.reduce_scatter` must not change until `wait` has returned or raised.
    """

    def is_ready(self, timeout_s: float) -> bool:  # noqa: ARG002
        """Wait at most `timeout_s` and return whether `wait` can then return without blocking the host."""
        return True

    @abstractmethod
    def wait(self) -> None:
        """Wait until the output holds the sum; on a GPU only the current stream waits."""


class ThreadedWork(ReduceWork):
    """A reduction that a background thread completes with `mark_done`."""

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
        """Store an error for `wait` to raise; the first one counts.

        The thread goes on, since other ranks rely on what this rank sends.
        """
        self.error = self.error or error

    def run_guarded(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:
            self.set_error(error)

    def mark_done(self) -> None:
        self._done.set()


class ShardTransport(ABC):
    """Reduce-scatters and all-gathers buckets. All ranks of the group must make the same calls in the same order."""

    def __init__(self, group: Group, reduce: Reduce) -> None:
        self.group, self.policy = group, reduce
        self.num_ranks = group.size
        """The number of ranks whose gradients are summed: with replicas more than the group's size."""

    needs_equal_shards = False
    """Whether `flat` must include padding, so that all shards have the same length."""
    reduces_on_host = False
    """Whether the host computes sums. A scale other than 1 costs extra passes over memory: scale beforehand."""

    @property
    def can_overlap_backward(self) -> bool:
        """Whether collectives may start during backward, while other ranks may be elsewhere.

        That holds if starting them does not block the host and they cannot be paired with other messages.
        """
        return True

    @abstractmethod
    def reduce_scatter(
        self, flat: torch.Tensor, shards: Sequence[Span], output: torch.Tensor, scale: float
    ) -> ReduceWork:
        """Start reducing each shard to its owner, where `output` becomes the sum over ranks times `scale`."""

    @abstractmethod
    def all_gather(self, flat: torch.Tensor, shards: Sequence[Span]) -> PendingWork:
        """Start gathering each owner's shard into `flat` on all ranks."""

    def reduce_scatter_nbytes(self, shards: Sequence[Span], dtype: torch.dtype, output_dtype: torch.dtype) -> int:  # noqa: ARG002
        """Return how many bytes this rank sends to reduce-scatter a bucket of `dtype`, with an optimal backend."""
        numel = sum(shard.length for rank, shard in non_empty_shards(shards) if rank != self.group.rank)
        return numel * dtype.itemsize

    def all_gather_nbytes(self, shards: Sequence[Span], dtype: torch.dtype) -> int:
        """Return how many bytes this rank sends to all-gather a bucket of `dtype`, with an optimal backend."""
        return (self.group.size - 1) * shards[self.group.rank].length * dtype.itemsize

    def cached_buffers(self) -> list[torch.Tensor]:
        """Return the memory that is kept for reuse."""
        return []


@runtime_checkable
class SparseShards(Protocol):
    """A sequence of shards that knows which of them are not empty."""

    def non_empty(self) -> Iterable[tuple[Rank, Span]]: ...


def non_empty_shards(shards: Sequence[Span]) -> Iterable[tuple[Rank, Span]]:
    """Return the ranks that own elements, and their shards, without visiting the empty ones if `shards` is sparse."""
    if isinstance(shards, SparseShards):
        return shards.non_empty()
    return ((Rank(rank), shard) for rank, shard in enumerate(shards) if shard.length)


def split_shards(flat: torch.Tensor, shards: Sequence[Span]) -> list[torch.Tensor]:
    """Return views of all shards of `flat`.

    Hazard: gloo would receive a message that is too short without an error, hence the check.
    """
    end = max(shard.stop for shard in shards)
    if flat.numel() < end:
        raise ValueError(f"a bucket of {end} elements was given as {flat.numel()}")
    return [flat[slice(*shard)] for shard in shards]


def sum_in_rank_order(slices: Sequence[torch.Tensor], output: torch.Tensor, scale: float) -> None:
    """Write the sum of all slices, each times `scale`, into `output`. Low-precision slices are summed in float32."""
    first, *others = slices
    dtype = sum_dtype(first.dtype)
    total = output if output.dtype == dtype else torch.empty_like(output, dtype=dtype)
    if first.dtype != dtype:
        total.copy_(first).mul_(scale)
    elif scale == 1 and others:
        torch.add(first, others.pop(0), out=total)
    else:
        torch.mul(first, scale, out=total)
    for other in others:
        # Scale and round each slice, as DDP does: only then does the result not depend on which rank scales, and when.
        if _is_power_of_two(scale):
            total.add_(other, alpha=scale)
        else:
            total.add_(torch.mul(other.to(dtype), scale))
    if total is not output:
        output.copy_(total)


def _is_power_of_two(factor: float) -> bool:
    return frexp(factor)[0] == 0.5
