"""Transports built on the backend's own collectives.

`NcclTransport` and `NcclUnevenTransport` are for NCCL and for backends with its semantics (xccl, hccl): waiting blocks
a stream, not the host. `AllReduceTransport` works with any backend. docs/decisions/0010 has the measurements behind the
choice.
"""

from typing import Any

import torch
import torch.distributed as dist

from ..config import ReducePolicy, sum_dtype
from ..layout.layout import Shards
from ..profiling import ProfilerPaused
from .collectives import view_as_bytes
from .process_group import Group
from .transport import ReduceWork, ShardTransport, sum_in_rank_order
from .work import PendingWork, Waitable, WorkList, wait_until_completed

MAX_SEQUENTIAL_ADDS = 16
"""The most shards that are summed one by one, with a kernel each, if no fixed order is required."""


class NcclTransport(ShardTransport):
    """NCCL's reduce-scatter and all-gather. Waiting blocks the stream, not the host.

    For a fixed summation order, or a sum in higher precision than the wire dtype, an all-to-all replaces the
    reduce-scatter, and the owner sums.
    """

    needs_equal_shards = True

    def reduce_scatter(self, flat: torch.Tensor, _: Shards, output: torch.Tensor, scale: float) -> ReduceWork:
        if self.policy.fixed_order or sum_dtype(flat.dtype) != flat.dtype:
            received = torch.empty_like(flat)
            with self.group.failure_detector:
                work = dist.all_to_all_single(received, flat, group=self.group.process_group, async_op=True)
            pending = PendingWork(work, flat, self.group.failure_detector)
            if self.group.size > MAX_SEQUENTIAL_ADDS and not self.policy.fixed_order:
                return _BatchedSumWork(received.view(self.group.size, -1), pending, output, scale)
            return OrderedSumWork(list(received.chunk(self.group.size)), pending, output, scale)
        shard = output if output.dtype == flat.dtype else torch.empty_like(output, dtype=flat.dtype)
        with self.group.failure_detector:
            work = _reduce_scatter_flat(shard, flat, self.group.process_group)
        return BackendSumWork(shard, PendingWork(work, flat, self.group.failure_detector), output, scale)

    def all_gather(self, flat: torch.Tensor, shards: Shards) -> PendingWork:
        own = flat[slice(*shards[self.group.rank])]
        with self.group.failure_detector:
            return PendingWork(all_gather_flat(flat, own, self.group.process_group), flat, self.group.failure_detector)


class NcclUnevenTransport(NcclTransport):
    """NCCL with shards of different lengths (ranks own whole parameters): one reduce or broadcast per owner.

    An all-to-all would need `world_size` times the memory of a shard on its owner. Therefore low-precision gradients
    are converted to float32 before they are sent.
    """

    needs_equal_shards = False

    def reduce_scatter(self, flat: torch.Tensor, shards: Shards, output: torch.Tensor, scale: float) -> ReduceWork:
        dtype = sum_dtype(flat.dtype)
        own_sum = output if output.dtype == dtype else torch.empty_like(output, dtype=dtype)
        slices = {owner: flat[slice(*shard)] for owner, shard in shards.non_empty()}
        # Hazard: `reduce` overwrites the owner's tensor with the sum, and `flat` must not change: reduce a copy.
        buffers = {
            owner: own_sum.copy_(shard) if owner == self.group.rank else shard.to(dtype)
            for owner, shard in slices.items()
        }
        with self.group.failure_detector:
            works = [
                dist.reduce(buffer, self.group.to_global(owner), group=self.group.process_group, async_op=True)
                for owner, buffer in buffers.items()
            ]
        return BackendSumWork(
            own_sum, PendingWork(WorkList(works), flat, self.group.failure_detector), output, scale, keep_alive=buffers
        )

    def reduce_scatter_nbytes(self, shards: Shards, dtype: torch.dtype, output_dtype: torch.dtype) -> int:
        return super().reduce_scatter_nbytes(shards, sum_dtype(dtype), output_dtype)

    def all_gather(self, flat: torch.Tensor, shards: Shards) -> PendingWork:
        return broadcast_shards(self.group, flat, shards)


class AllReduceTransport(ShardTransport):
    """All-reduces full buckets: for backends without reduce-scatter, such as gloo with CUDA tensors."""

    def __init__(self, group: Group, reduce: ReducePolicy, data_parallel: Group | None = None) -> None:
        """`data_parallel`: the ranks whose gradients are summed, if they are more than those of `group`."""
        super().__init__(group, reduce)
        self._data_parallel = data_parallel or group
        self.num_ranks = self._data_parallel.size

    def reduce_scatter(self, flat: torch.Tensor, shards: Shards, output: torch.Tensor, scale: float) -> ReduceWork:
        total = flat.to(sum_dtype(flat.dtype), copy=True)
        with self.group.failure_detector, ProfilerPaused():
            work = dist.all_reduce(total, group=self._data_parallel.process_group, async_op=True)
        pending = PendingWork(work, total, self.group.failure_detector)
        return HostBlockingSumWork(work, total[slice(*shards[self.group.rank])], pending, output, scale)

    def reduce_scatter_nbytes(self, shards: Shards, dtype: torch.dtype, output_dtype: torch.dtype) -> int:  # noqa: ARG002
        nbytes = sum(shard.length for _, shard in shards.non_empty()) * sum_dtype(dtype).itemsize
        return all_reduce_nbytes(nbytes, self._data_parallel.size)

    def all_gather(self, flat: torch.Tensor, shards: Shards) -> PendingWork:
        with ProfilerPaused():
            return broadcast_shards(self.group, flat, shards)

    @property
    def can_overlap_backward(self) -> bool:
        # Hazard: gloo pairs collectives by their order, including those of the program in the same group.
        return self._data_parallel.size == 1 or not self._data_parallel.supports_device(torch.device("cpu"))


class StreamWork(ReduceWork):
    """Work that only a stream waits for."""

    def is_ready(self, timeout_s: float) -> bool:  # noqa: ARG002
        return True


class OrderedSumWork(StreamWork):
    """Sums the received slices in rank order when waited for."""

    def __init__(
        self, slices: list[torch.Tensor], work: Waitable, output: torch.Tensor, scale: float, keep_alive: Any = None
    ) -> None:
        self._slices, self._work, self._output, self._scale, self._keep_alive = slices, work, output, scale, keep_alive

    def wait(self) -> None:
        self._work.wait()
        sum_in_rank_order(self._slices, self._output, self._scale)


class _BatchedSumWork(StreamWork):
    """Sums the received slices of many ranks in one call: deterministic, but not in rank order."""

    def __init__(self, slices: torch.Tensor, work: Waitable, output: torch.Tensor, scale: float) -> None:
        self._slices, self._work, self._output, self._scale = slices, work, output, scale

    def wait(self) -> None:
        self._work.wait()
        self._output.copy_(torch.sum(self._slices, 0, dtype=sum_dtype(self._slices.dtype)).mul_(self._scale))


class BackendSumWork(StreamWork):
    """The backend sums; `wait` scales and converts the result."""

    def __init__(
        self, shard: torch.Tensor, work: Waitable, output: torch.Tensor, scale: float, keep_alive: Any = None
    ) -> None:
        self._shard, self._work, self._output, self._scale, self._keep_alive = shard, work, output, scale, keep_alive

    def wait(self) -> None:
        self._work.wait()
        if self._scale != 1:
            self._shard.mul_(self._scale)
        if self._shard is not self._output:
            self._output.copy_(self._shard)


class HostBlockingSumWork(BackendSumWork):
    """The sum of a backend that may block the host while it waits."""

    def __init__(self, backend_work: Any, *args: Any) -> None:
        super().__init__(*args)
        self._backend_work = backend_work

    def is_ready(self, timeout_s: float) -> bool:
        return self._backend_work is None or wait_until_completed(self._backend_work, timeout_s)


def all_reduce_nbytes(nbytes: int, num_ranks: int) -> int:
    """Return how many bytes each rank sends in a ring all-reduce."""
    return 2 * nbytes * (num_ranks - 1) // num_ranks


def broadcast_shards(group: Group, flat: torch.Tensor, shards: Shards) -> PendingWork:
    """Start broadcasting each owner's shard to all ranks of the group."""
    views = [(group.to_global(rank), view_as_bytes(flat[slice(*shard)])) for rank, shard in shards.non_empty()]
    with group.failure_detector:
        works = [dist.broadcast(view, owner, group=group.process_group, async_op=True) for owner, view in views]
    return PendingWork(WorkList(works), flat, group.failure_detector)


def _reduce_scatter_flat(shard: torch.Tensor, flat: torch.Tensor, group: dist.ProcessGroup) -> Any:
    reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    return reduce_scatter(shard, flat, group=group, async_op=True)


def all_gather_flat(flat: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> Any:
    all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    return all_gather(flat, shard, group=group, async_op=True)
