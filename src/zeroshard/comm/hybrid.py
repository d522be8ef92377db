"""Transports for hybrid sharding: reduce-scatter within the shard group, then all-reduce across replicas.

The second stage also runs during backward. All replicas get bitwise the same sums: each element is summed by one of
them, or by all in the same order. Parameters are all-gathered within the shard group only.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from .._types import align_up
from ..config import sum_dtype
from ..layout.layout import EqualShards, Shards
from .gloo import GlooTransport
from .nccl import BackendSumWork, NcclTransport, OrderedSumWork, all_gather_flat, all_reduce_nbytes
from .process_group import Group
from .transport import HostBufferPool, ReduceWork, ShardTransport, ThreadedWork, WorkerThread
from .work import PendingWork

SPLIT_ALIGN_NUMEL = 16
"""The alignment of the spans that replicas sum, in elements."""
MAX_IDLE_BUFFERS = 2


class GlooHybridTransport(ShardTransport):
    """CPU tensors over gloo; threads run the second stage.

    Replicas all-reduce a shard as reduce-scatter plus all-gather: each replica sums one span of it and sends the result
    to the others. That sends no more than a ring all-reduce would, and sums in the order of shard groups.
    """

    reduces_on_host = True

    def __init__(self, shard_transport: GlooTransport, replica_transport: GlooTransport) -> None:
        super().__init__(shard_transport.group, shard_transport.policy)
        self._shard_transport, self._replica_transport = shard_transport, replica_transport
        self.num_ranks = shard_transport.group.size * replica_transport.group.size
        # Hazard: operations across replicas must start in the order of the `reduce_scatter` calls, which is the same on
        # all ranks: one worker thread per stage.
        detector = shard_transport.group.failure_detector
        self._reduce_worker = _ActionThread("zeroshard-replica-reduce", detector)
        self._gather_worker = _ActionThread("zeroshard-replica-gather", detector)
        self._sum_buffers = HostBufferPool(MAX_IDLE_BUFFERS)
        """For sums within the shard group."""

    def reduce_scatter(self, flat: torch.Tensor, shards: Shards, output: torch.Tensor, scale: float) -> ReduceWork:
        dtype = sum_dtype(flat.dtype)
        memory = self._sum_buffers.acquire(output.numel() * dtype.itemsize)
        shard_sum = memory[: output.numel() * dtype.itemsize].view(dtype)
        with self._reduce_worker.open_queue() as queue:
            shard_work = self._shard_transport.reduce_scatter(flat, shards, shard_sum, scale)
            release = partial(self._sum_buffers.release, memory)
            reduce_work = _TwoStageReduce(shard_work, shard_sum, output, self._replica_transport, release)
            queue.append(partial(self._reduce_across_replicas, reduce_work))
        return reduce_work

    def _reduce_across_replicas(self, reduce_work: "_TwoStageReduce") -> None:
        reduce_work.reduce_across_replicas()
        try:
            with self._gather_worker.open_queue() as queue:
                queue.append(reduce_work.gather_across_replicas)
        except Exception as error:  # the thread cannot start
            reduce_work.set_error(error)
            reduce_work.mark_done()

    def all_gather(self, flat: torch.Tensor, shards: Shards) -> PendingWork:
        return self._shard_transport.all_gather(flat, shards)

    def reduce_scatter_nbytes(self, shards: Shards, dtype: torch.dtype, output_dtype: torch.dtype) -> int:
        replica_spans = split_evenly(shards[self.group.rank].length, self._replica_transport.group.size)
        total = self._shard_transport.reduce_scatter_nbytes(shards, dtype, sum_dtype(dtype))
        total += self._replica_transport.reduce_scatter_nbytes(replica_spans, sum_dtype(dtype), output_dtype)
        return total + self._replica_transport.all_gather_nbytes(replica_spans, output_dtype)

    def cached_buffers(self) -> list[torch.Tensor]:
        return [
            *self._shard_transport.cached_buffers(),
            *self._replica_transport.cached_buffers(),
            *self._sum_buffers.idle_buffers(),
        ]


class NcclHybridTransport(ShardTransport):
    """NCCL; the second stage waits for the first on a side stream, so neither the host nor other streams wait."""

    def __init__(self, shard_transport: NcclTransport, replica_group: Group) -> None:
        super().__init__(shard_transport.group, shard_transport.policy)
        self._shard_transport, self._replica_group = shard_transport, replica_group
        self.needs_equal_shards = shard_transport.needs_equal_shards
        self.num_ranks = shard_transport.group.size * replica_group.size
        self._stream: Any = None

    def reduce_scatter(self, flat: torch.Tensor, shards: Shards, output: torch.Tensor, scale: float) -> ReduceWork:
        dtype, side_stream = sum_dtype(flat.dtype), self._side_stream(flat.device)
        # Hazard: allocate everything before the first message. After it, a rank out of memory must not raise alone:
        # the caller would send the bucket again.
        shard_sum = output if output.dtype == dtype else torch.empty_like(output, dtype=dtype)
        replica_sums = (
            shard_sum.new_empty((self._replica_group.size, shard_sum.numel())) if self.policy.fixed_order else None
        )
        shard_work = self._shard_transport.reduce_scatter(flat, shards, shard_sum, scale)
        with self.group.failure_detector.abort_on_error(), side_stream:
            shard_work.wait()
            return self._reduce_across_replicas(shard_sum, replica_sums, output, shard_work)

    def _reduce_across_replicas(
        self, shard_sum: torch.Tensor, replica_sums: torch.Tensor | None, output: torch.Tensor, shard_work: ReduceWork
    ) -> ReduceWork:
        """Start the all-reduce of `shard_sum` across replicas; `replica_sums` receives all summands, if given.

        Hazard: the side stream may still use the memory of `shard_work`; keep it alive until the result is waited for.
        """
        group, detector = self._replica_group.process_group, self._replica_group.failure_detector
        if replica_sums is not None:
            with detector:
                work = all_gather_flat(replica_sums.view(-1), shard_sum, group)
            pending = PendingWork(work, shard_sum, detector)
            return OrderedSumWork(list(replica_sums), pending, output, 1.0, keep_alive=shard_work)
        with detector:
            work = dist.all_reduce(shard_sum, group=group, async_op=True)
        pending = PendingWork(work, shard_sum, detector)
        return BackendSumWork(shard_sum, pending, output, 1.0, keep_alive=shard_work)

    def all_gather(self, flat: torch.Tensor, shards: Shards) -> PendingWork:
        return self._shard_transport.all_gather(flat, shards)

    def reduce_scatter_nbytes(self, shards: Shards, dtype: torch.dtype, output_dtype: torch.dtype) -> int:
        shard_nbytes = shards[self.group.rank].length * sum_dtype(dtype).itemsize
        num_replicas = self._replica_group.size
        if self.policy.fixed_order:
            replica_nbytes = (num_replicas - 1) * shard_nbytes
        else:
            replica_nbytes = all_reduce_nbytes(shard_nbytes, num_replicas)
        return self._shard_transport.reduce_scatter_nbytes(shards, dtype, output_dtype) + replica_nbytes

    def _side_stream(self, device: torch.device) -> AbstractContextManager[Any]:
        if device.type == "cpu":
            return nullcontext()
        module: Any = torch.get_device_module(device)
        self._stream = self._stream or module.Stream(device)
        stream: AbstractContextManager[Any] = module.stream(self._stream)
        return stream


class _TwoStageReduce(ThreadedWork):
    """A shard that is reduced within its shard group, and then across replicas."""

    def __init__(
        self,
        shard_work: ReduceWork,
        shard_sum: torch.Tensor,
        output: torch.Tensor,
        replica_transport: GlooTransport,
        release_shard_sum: Callable[[], None],
    ) -> None:
        super().__init__()
        self._shard_work, self._shard_sum, self._output = shard_work, shard_sum, output
        self._replica_transport, self._release_shard_sum = replica_transport, release_shard_sum
        self._replica_spans = split_evenly(output.numel(), replica_transport.group.size)
        self._replica_work: ReduceWork | None = None

    def reduce_across_replicas(self) -> None:
        """Wait for the sum of the shard group and start the reduce-scatter across replicas."""
        self.run_guarded(self._shard_work.wait)
        self.run_guarded(self._start_replica_reduce)

    def gather_across_replicas(self) -> None:
        """Wait for this rank's span of the total, and all-gather the spans of all replicas."""
        if self._replica_work is not None:
            self.run_guarded(self._replica_work.wait)
        self.run_guarded(lambda: self._replica_transport.all_gather(self._output, self._replica_spans).wait())
        if self.error is None:
            self._release_shard_sum()
        self.mark_done()

    def _start_replica_reduce(self) -> None:
        own = self._output[slice(*self._replica_spans[self._replica_transport.group.rank])]
        self._replica_work = self._replica_transport.reduce_scatter(self._shard_sum, self._replica_spans, own, 1.0)


def split_evenly(numel: int, num_parts: int) -> EqualShards:
    """Split `numel` elements into `num_parts` spans of about the same length; the last ones may be empty."""
    return EqualShards(align_up(-(-numel // num_parts), SPLIT_ALIGN_NUMEL), num_parts, numel)


class _ActionThread(WorkerThread[Callable[[], None]]):
    """Runs actions, which must not raise, in order."""

    @torch.no_grad()
    def _run(self) -> None:
        while actions := self.take(1, stop_if_empty=True):
            actions[0]()
