"""Slices to their owners where several ranks own the same: summed in a row first, then across rows.

What a rank has summed up of its row meets what its replicas have of theirs, while backward runs. All replicas get the
same bits: each element of a sum is made by one of them, or by all in the same order.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from .._types import Span, align_up
from ..config import sum_dtype
from .failure import FailureDetector, join_at_exit
from .gloo import GlooTransport
from .nccl import BackendSumWork, NcclTransport, OrderedSumWork, all_gather_flat, all_reduce_nbytes
from .process_group import Group
from .transport import ReduceWork, ShardTransport, ThreadedWork
from .work import PendingWork

SPLIT_ALIGN_NUMEL = 16
"""Elements: where a replica's part of a sum starts."""
MAX_CACHED_BUFFERS = 2


class GlooHybridTransport(ShardTransport):
    """gloo with CPU tensors: threads pass on what has come.

    Of a shard that its row has summed up each replica adds up one part, and brings it to the others. So across rows
    goes no more than an all-reduce of the shard would send, and the order of the sum is that of rows.
    """

    reduces_on_host = True

    def __init__(self, shard_transport: GlooTransport, replica_transport: GlooTransport) -> None:
        super().__init__(shard_transport.group, shard_transport.policy)
        self._shard_transport, self._replica_transport = shard_transport, replica_transport
        self.num_ranks = shard_transport.group.size * replica_transport.group.size
        # Hazard: what meets others must start in the order of `reduce`, which is the same on all ranks.
        line = shard_transport.group.failure_detector
        self._reduce_worker, self._gather_worker = (
            _WorkerThread("zeroshard-meeting", line),
            _WorkerThread("zeroshard-spreading", line),
        )
        self._buffer_pool = _BufferPool()

    def reduce_scatter(
        self, flat: torch.Tensor, shards: Sequence[Span], output: torch.Tensor, scale: float
    ) -> ReduceWork:
        room = self._buffer_pool.acquire(output.numel(), sum_dtype(flat.dtype))
        joint = _TwoStageReduce(
            self._shard_transport.reduce_scatter(flat, shards, room, scale), room, output, self._replica_transport
        )

        def reduce_across_replicas() -> None:
            joint.reduce_across_replicas()
            try:
                self._gather_worker.submit(gather_across_replicas)
            except Exception as failure:  # no thread can be started
                joint.set_error(failure)
                joint.mark_done()

        def gather_across_replicas() -> None:
            joint.gather_across_replicas(self._buffer_pool)

        self._reduce_worker.submit(reduce_across_replicas)
        return joint

    def all_gather(self, flat: torch.Tensor, shards: Sequence[Span]) -> PendingWork:
        return self._shard_transport.all_gather(flat, shards)

    def reduce_scatter_nbytes(self, shards: Sequence[Span], dtype: torch.dtype, output_dtype: torch.dtype) -> int:
        parts = split_evenly(shards[self.group.rank].length, self._replica_transport.group.size)
        exact = sum_dtype(dtype)
        across = self._replica_transport.reduce_scatter_nbytes(
            parts, exact, output_dtype
        ) + self._replica_transport.all_gather_nbytes(parts, output_dtype)
        return self._shard_transport.reduce_scatter_nbytes(shards, dtype, exact) + across

    def cached_buffers(self) -> list[torch.Tensor]:
        return [
            *self._shard_transport.cached_buffers(),
            *self._replica_transport.cached_buffers(),
            *self._buffer_pool.cached_buffers(),
        ]


class NcclHybridTransport(ShardTransport):
    """NCCL: the second sum waits for the first on a stream of its own, and nobody else does."""

    def __init__(self, shard_transport: NcclTransport, replica_group: Group) -> None:
        super().__init__(shard_transport.group, shard_transport.policy)
        self._shard_transport, self._replica_group = shard_transport, replica_group
        self.needs_equal_shards = shard_transport.needs_equal_shards
        self.num_ranks = shard_transport.group.size * replica_group.size
        self._stream: Any = None

    def reduce_scatter(
        self, flat: torch.Tensor, shards: Sequence[Span], output: torch.Tensor, scale: float
    ) -> ReduceWork:
        exact = sum_dtype(flat.dtype)
        part = output if output.dtype == exact else torch.empty_like(output, dtype=exact)
        inside = self._shard_transport.reduce_scatter(flat, shards, part, scale)
        with self._side_stream(flat.device):
            inside.wait()
            return self._reduce_across_replicas(part, output, inside)

    def _reduce_across_replicas(
        self, shard_sum: torch.Tensor, output: torch.Tensor, shard_work: ReduceWork
    ) -> ReduceWork:
        """Hazard: `inside` has memory that the stream may still use, until the sum is waited for."""
        group, line = self._replica_group.process_group, self._replica_group.failure_detector
        if self.policy.fixed_order:
            parts = shard_sum.new_empty((self._replica_group.size, shard_sum.numel()))
            with line:
                work = all_gather_flat(parts.view(-1), shard_sum, group)
            return OrderedSumWork(list(parts), PendingWork(work, shard_sum, line), output, 1.0, keep_alive=shard_work)
        with line:
            work = dist.all_reduce(shard_sum, group=group, async_op=True)
        return BackendSumWork(shard_sum, PendingWork(work, shard_sum, line), output, 1.0, keep_alive=shard_work)

    def all_gather(self, flat: torch.Tensor, shards: Sequence[Span]) -> PendingWork:
        return self._shard_transport.all_gather(flat, shards)

    def reduce_scatter_nbytes(self, shards: Sequence[Span], dtype: torch.dtype, output_dtype: torch.dtype) -> int:
        own, rows = shards[self.group.rank].length * sum_dtype(dtype).itemsize, self._replica_group.size
        across = (rows - 1) * own if self.policy.fixed_order else all_reduce_nbytes(own, rows)
        return self._shard_transport.reduce_scatter_nbytes(shards, dtype, output_dtype) + across

    def _side_stream(self, device: torch.device) -> AbstractContextManager[Any]:
        if device.type == "cpu":
            return nullcontext()
        module: Any = torch.get_device_module(device)
        self._stream = self._stream or module.Stream(device)
        stream: AbstractContextManager[Any] = module.stream(self._stream)
        return stream


class _TwoStageReduce(ThreadedWork):
    """A shard on its way through both sums."""

    def __init__(
        self, shard_work: ReduceWork, buffer: torch.Tensor, output: torch.Tensor, replica_transport: GlooTransport
    ) -> None:
        super().__init__()
        self._shard_work, self._buffer, self._output, self._replica_transport = (
            shard_work,
            buffer,
            output,
            replica_transport,
        )
        self._replica_spans = split_evenly(output.numel(), replica_transport.group.size)
        self._replica_work: ReduceWork | None = None

    def reduce_across_replicas(self) -> None:
        """The sum of the row has come: on with it to replicas."""
        self.run_guarded(self._shard_work.wait)
        self.run_guarded(self._start_replica_reduce)

    def gather_across_replicas(self, buffer_pool: "_BufferPool") -> None:
        """This rank's part of the sum of all rows has come: bring it to replicas, and theirs here."""
        if self._replica_work is not None:
            self.run_guarded(self._replica_work.wait)
        self.run_guarded(lambda: self._replica_transport.all_gather(self._output, self._replica_spans).wait())
        if self.error is None:
            buffer_pool.release(self._buffer)
        self.mark_done()

    def _start_replica_reduce(self) -> None:
        mine = self._output[slice(*self._replica_spans[self._replica_transport.group.rank])]
        self._replica_work = self._replica_transport.reduce_scatter(self._buffer, self._replica_spans, mine, 1.0)


def split_evenly(numel: int, num_parts: int) -> list[Span]:
    """Spans of about the same length, one a part."""
    step = align_up(-(-numel // num_parts), SPLIT_ALIGN_NUMEL)
    return [Span(min(n * step, numel), min((n + 1) * step, numel)) for n in range(num_parts)]


class _WorkerThread:
    """Does one thing after the other, in a thread that lives as long as there is something to do."""

    def __init__(self, name: str, failure_detector: FailureDetector) -> None:
        self._name, self._failure_detector = name, failure_detector
        self._lock = threading.Lock()
        self._queue: deque[Callable[[], None]] = deque()
        self._is_running = False

    def submit(self, action: Callable[[], None]) -> None:
        """`action` must not raise."""
        with self._lock:
            if not self._is_running:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                thread.start()
                self._is_running = True
                join_at_exit(thread, failure_detector=self._failure_detector)
            self._queue.append(action)

    @torch.no_grad()
    def _run(self) -> None:
        while (action := self._next_action()) is not None:
            action()

    def _next_action(self) -> Callable[[], None] | None:
        with self._lock:
            self._is_running = bool(self._queue)
            return self._queue.popleft() if self._queue else None


class _BufferPool:
    """Memory for sums of a row, kept for the next ones: fresh memory costs page faults."""

    def __init__(self) -> None:
        self._free_buffers: list[torch.Tensor] = []
        self._lock = threading.Lock()

    def acquire(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        nbytes = numel * dtype.itemsize
        with self._lock:
            memory = next((it for it in self._free_buffers if it.numel() >= nbytes), None)
            self._free_buffers = [it for it in self._free_buffers if it is not memory]
        if memory is None:
            memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        return memory[:nbytes].view(dtype)

    def cached_buffers(self) -> list[torch.Tensor]:
        with self._lock:
            return list(self._free_buffers)

    def release(self, buffer: torch.Tensor) -> None:
        memory = torch.empty(0, dtype=torch.uint8, device="cpu").set_(buffer.untyped_storage())
        with self._lock:
            self._free_buffers = [*self._free_buffers, memory][-MAX_CACHED_BUFFERS:]
