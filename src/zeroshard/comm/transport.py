"""The transport interface: reduce-scatter, all-gather and broadcast of flat buffers whose shards belong to ranks.

::

    flat     | shard of rank 0 | shard of rank 1 | shard of rank 2 | pad |

    reduce_scatter   every rank passes its own `flat`; each owner gets the sum of its shard over all ranks
    all_gather       every rank passes a `flat` with its own shard filled in; the others' shards are received into it
    broadcast        one rank owns all of `flat`; the other ranks receive it

Implementations: `gloo.py` (CPU), `nccl.py` (NCCL, and all-reduce as the fallback), `hybrid.py` (with replicas).
"""

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import frexp
from typing import Generic, TypeVar

import torch

from .._types import Rank
from ..config import ReducePolicy, sum_dtype
from ..layout.layout import Shards
from .collectives import start_broadcast
from .failure import FailureDetector, join_at_exit
from .process_group import Group
from .work import PendingWork

Item = TypeVar("Item")


class ReduceWork(ABC):
    """A reduce-scatter in flight.

    Hazard: the buffer passed to `ShardTransport.reduce_scatter` must not change until `wait` has returned or raised.
    """

    @abstractmethod
    def is_ready(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` and return whether `wait` can then return without blocking the host.

        Hazard: backward calls this to bound its waiting. If it returns True for work that blocks the host, backward
        hangs if a peer never arrives.
        """

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


class WorkerThread(ABC, Generic[Item]):
    """A queue, and a thread that runs as long as there are items in it."""

    def __init__(self, name: str, failure_detector: FailureDetector) -> None:
        self._name, self._failure_detector = name, failure_detector
        self._lock = threading.Lock()
        self._queue: deque[Item] = deque()
        self._is_running = False

    @contextmanager
    def open_queue(self) -> Iterator[deque[Item]]:
        """Yield the queue to append items to.

        The thread runs by then, waiting for the items. If it cannot start, this raises before the caller's block, which
        may send messages that the items receive the answers to.
        """
        with self._lock:
            if not self._is_running:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                thread.start()
                self._is_running = True
                join_at_exit(thread, failure_detector=self._failure_detector)
            yield self._queue

    @abstractmethod
    def _run(self) -> None:
        """Process the items that `take` returns, until it returns none. Must not raise."""

    def take(self, max_items: int, *, stop_if_empty: bool) -> list[Item]:
        """Return up to `max_items` items. `stop_if_empty`: if there are none, the thread is about to end."""
        with self._lock:
            items = [self._queue.popleft() for _ in range(min(max_items, len(self._queue)))]
            self._is_running = not stop_if_empty or bool(items)
            return items


class HostBufferPool:
    """Buffers in host memory that are used again, since fresh memory costs page faults. Any thread may use it."""

    def __init__(self, max_idle: int) -> None:
        self._max_idle = max_idle
        self._idle: list[torch.Tensor] = []
        self._lock = threading.Lock()

    def acquire(self, nbytes: int) -> torch.Tensor:
        """Return a buffer of at least `nbytes` bytes, as uint8."""
        with self._lock:
            for position, buffer in enumerate(self._idle):
                if buffer.numel() >= nbytes:
                    return self._idle.pop(position)
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def release(self, buffer: torch.Tensor) -> None:
        """Take back a buffer that `acquire` returned. The pool keeps the latest ones."""
        with self._lock:
            self._idle = [*self._idle, buffer][-self._max_idle :]

    def idle_buffers(self) -> list[torch.Tensor]:
        with self._lock:
            return list(self._idle)


class ShardTransport(ABC):
    """Reduce-scatters, all-gathers and broadcasts. All ranks of the group must make the same calls in the same order.

    Implementations must:

    * Start messages inside `group.failure_detector`, and pass it to the `PendingWork` that waits for them.
    * Return without waiting for other ranks, or set `can_overlap_backward` to False.
    * Do everything that may fail before the first message: if `reduce_scatter` raises anything but `RankLostError`, the
      caller sends the bucket again.
    * Never write to `flat` in `reduce_scatter`.
    * Sum in `sum_dtype` of the wire dtype, and in rank order if `policy.fixed_order` is set. `output` may have another
      dtype than `flat`.
    * Accept shards of unequal length, including empty ones, unless `needs_equal_shards` is True.

    When a rank is lost, `comm/failure.py` closes gloo's connections. Another backend must abort on its own; otherwise
    its peers wait for the timeout.
    """

    def __init__(self, group: Group, reduce: ReducePolicy) -> None:
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
    def reduce_scatter(self, flat: torch.Tensor, shards: Shards, output: torch.Tensor, scale: float) -> ReduceWork:
        """Start reducing each shard to its owner, where `output` becomes the sum over ranks times `scale`."""

    @abstractmethod
    def all_gather(self, flat: torch.Tensor, shards: Shards) -> PendingWork:
        """Start gathering each owner's shard into `flat` on all ranks."""

    def broadcast(self, flat: torch.Tensor, owner: Rank) -> PendingWork:
        """Start sending the owner's `flat` into the equally sized `flat` of all other ranks.

        Use it when all ranks own about the same number of bytes, and `Comm.broadcast` otherwise.
        """
        return start_broadcast(self.group, flat, owner)

    def reduce_scatter_nbytes(self, shards: Shards, dtype: torch.dtype, output_dtype: torch.dtype) -> int:  # noqa: ARG002
        """Return how many bytes this rank sends to reduce-scatter a bucket of `dtype`, with an optimal backend."""
        numel = sum(shard.length for rank, shard in shards.non_empty() if rank != self.group.rank)
        return numel * dtype.itemsize

    def all_gather_nbytes(self, shards: Shards, dtype: torch.dtype) -> int:
        """Return how many bytes this rank sends to all-gather a bucket of `dtype`, with an optimal backend."""
        return (self.group.size - 1) * shards[self.group.rank].length * dtype.itemsize

    def cached_buffers(self) -> list[torch.Tensor]:
        """Return the memory that is kept for reuse."""
        return []


def split_shards(flat: torch.Tensor, shards: Shards) -> list[torch.Tensor]:
    """Return views of all shards of `flat`.

    Hazard: gloo would receive a message that is too short without an error, hence the check.
    """
    end = max(shard.stop for shard in shards)
    if flat.numel() < end:
        raise ValueError(f"expected a buffer of at least {end} elements, got {flat.numel()}")
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
