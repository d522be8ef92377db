"""Slices of a flat buffer to their owners, and back: the best way there is on each backend.

A way is a `ShardWay`; these are for one group of ranks. The table of measurements behind the choice is in
docs/decisions/0010.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from .._types import Span
from ..config import Reduce, sum_dtype
from ..profiling import ProfilerPaused
from .collectives import view_as_bytes
from .gloo import GlooTransport
from .process_group import Group
from .transport import ReduceWork, ShardTransport, non_empty_shards, sum_in_rank_order
from .work import PendingWork, Waitable, WorkList

MAX_SEQUENTIAL_ADDS = 16
"""Slices that are added one after the other, with a call each, where no order is asked for."""


class NcclTransport(ShardTransport):
    """The backend's own collectives: NCCL. Waiting for them keeps the stream waiting, not the host."""

    needs_equal_shards = True

    def reduce_scatter(self, flat: torch.Tensor, _: Sequence[Span], output: torch.Tensor, scale: float) -> ReduceWork:
        if self.policy.fixed_order or sum_dtype(flat.dtype) != flat.dtype:
            parts = torch.empty_like(flat)
            with self.group.failure_detector:
                work = dist.all_to_all_single(parts, flat, group=self.group.process_group, async_op=True)
            arrived = PendingWork(work, flat, self.group.failure_detector)
            if self.group.size > MAX_SEQUENTIAL_ADDS and not self.policy.fixed_order:
                return _BatchedSumWork(parts.view(self.group.size, -1), arrived, output, scale)
            return OrderedSumWork(list(parts.chunk(self.group.size)), arrived, output, scale)
        shard = output if output.dtype == flat.dtype else torch.empty_like(output, dtype=flat.dtype)
        with self.group.failure_detector:
            work = _reduce_scatter_flat(shard, flat, self.group.process_group)
        return BackendSumWork(shard, PendingWork(work, flat, self.group.failure_detector), output, scale)

    def all_gather(self, flat: torch.Tensor, shards: Sequence[Span]) -> PendingWork:
        mine = flat[slice(*shards[self.group.rank])]
        with self.group.failure_detector:
            return PendingWork(all_gather_flat(flat, mine, self.group.process_group), flat, self.group.failure_detector)


class NcclUnevenTransport(NcclTransport):
    """The same where ranks own whole parameters: one message for each rank that owns something.

    To bring everyone's part to an owner and add up there would take as many times its memory as there are ranks. So
    what is less precise than float32 travels as that.
    """

    needs_equal_shards = False

    def reduce_scatter(
        self, flat: torch.Tensor, shards: Sequence[Span], output: torch.Tensor, scale: float
    ) -> ReduceWork:
        exact = sum_dtype(flat.dtype)
        mine = output if output.dtype == exact else torch.empty_like(output, dtype=exact)
        owned = {owner: flat[slice(*shard)] for owner, shard in non_empty_shards(shards)}
        # Hazard: an owner's tensor becomes the sum, and what was given must stay as it is.
        parts = {rank: mine.copy_(it) if rank == self.group.rank else it.to(exact) for rank, it in owned.items()}
        with self.group.failure_detector:
            works = [
                dist.reduce(part, self.group.to_global(owner), group=self.group.process_group, async_op=True)
                for owner, part in parts.items()
            ]
        return BackendSumWork(
            mine, PendingWork(WorkList(works), flat, self.group.failure_detector), output, scale, keep_alive=parts
        )

    def reduce_scatter_nbytes(self, shards: Sequence[Span], dtype: torch.dtype, output_dtype: torch.dtype) -> int:
        return super().reduce_scatter_nbytes(shards, sum_dtype(dtype), output_dtype)

    def all_gather(self, flat: torch.Tensor, shards: Sequence[Span]) -> PendingWork:
        return broadcast_shards(self.group, flat, shards)


class AllReduceTransport(ShardTransport):
    """Reduce everything everywhere: for backends that know no better, such as gloo with CUDA tensors."""

    def __init__(self, group: Group, reduce: Reduce, data_parallel: Group | None = None) -> None:
        """`everyone`: the ranks whose slices are added up, if others than those of `group` are among them."""
        super().__init__(group, reduce)
        self._data_parallel = data_parallel or group
        self.num_ranks = self._data_parallel.size

    def reduce_scatter(
        self, flat: torch.Tensor, shards: Sequence[Span], output: torch.Tensor, scale: float
    ) -> ReduceWork:
        total = flat.to(sum_dtype(flat.dtype), copy=True)
        with self.group.failure_detector, ProfilerPaused():
            work = dist.all_reduce(total, group=self._data_parallel.process_group, async_op=True)
        arrived = PendingWork(work, total, self.group.failure_detector)
        return BackendSumWork(total[slice(*shards[self.group.rank])], arrived, output, scale)

    def reduce_scatter_nbytes(self, shards: Sequence[Span], dtype: torch.dtype, output_dtype: torch.dtype) -> int:  # noqa: ARG002
        total = sum(it.length for _, it in non_empty_shards(shards)) * sum_dtype(dtype).itemsize
        return all_reduce_nbytes(total, self._data_parallel.size)

    def all_gather(self, flat: torch.Tensor, shards: Sequence[Span]) -> PendingWork:
        with ProfilerPaused():
            return broadcast_shards(self.group, flat, shards)

    @property
    def can_overlap_backward(self) -> bool:
        # Hazard: gloo pairs collectives by their order, also with those of the control channel in the same group.
        return self._data_parallel.size == 1 or self._data_parallel.cpu_group is not self._data_parallel.process_group


def select_group_transport(
    group: Group, device: torch.device, reduce: Reduce, *, has_equal_shards: bool
) -> ShardTransport:
    """`equal`: all shards are equally long."""
    name = group.process_group._get_backend(device).name().lower() if group.size > 1 else ""
    if name in ("nccl", "fake", "xccl", "hccl"):
        return NcclTransport(group, reduce) if has_equal_shards else NcclUnevenTransport(group, reduce)
    return (
        GlooTransport(group, reduce)
        if device.type == "cpu" and name in ("gloo", "mpi")
        else AllReduceTransport(group, reduce)
    )


class OrderedSumWork(ReduceWork):
    """Those of all ranks, yet to be added up."""

    def __init__(
        self, slices: list[torch.Tensor], work: Waitable, output: torch.Tensor, scale: float, keep_alive: Any = None
    ) -> None:
        self._slices, self._work, self._output, self._scale, self._keep_alive = slices, work, output, scale, keep_alive

    def wait(self) -> None:
        self._work.wait()
        sum_in_rank_order(self._slices, self._output, self._scale)


class _BatchedSumWork(ReduceWork):
    """Those of very many ranks, which one call adds up: in an order of its own, always the same."""

    def __init__(self, slices: torch.Tensor, work: Waitable, output: torch.Tensor, scale: float) -> None:
        self._slices, self._work, self._output, self._scale = slices, work, output, scale

    def wait(self) -> None:
        self._work.wait()
        self._output.copy_(torch.sum(self._slices, 0, dtype=sum_dtype(self._slices.dtype)).mul_(self._scale))


class BackendSumWork(ReduceWork):
    """Added up on the way."""

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


def all_reduce_nbytes(nbytes: int, num_ranks: int) -> int:
    """What each rank sends around a ring."""
    return 2 * nbytes * (num_ranks - 1) // num_ranks


def broadcast_shards(group: Group, flat: torch.Tensor, shards: Sequence[Span]) -> PendingWork:
    """Each owner's shard to everyone."""
    raw = [(group.to_global(rank), view_as_bytes(flat[slice(*shard)])) for rank, shard in non_empty_shards(shards)]
    with group.failure_detector:
        works = [dist.broadcast(part, owner, group=group.process_group, async_op=True) for owner, part in raw]
    return PendingWork(WorkList(works), flat, group.failure_detector)


def _reduce_scatter_flat(shard: torch.Tensor, flat: torch.Tensor, group: dist.ProcessGroup) -> Any:
    verb = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    return verb(shard, flat, group=group, async_op=True)


def all_gather_flat(flat: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> Any:
    verb = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    return verb(flat, shard, group=group, async_op=True)
