"""Slices of a flat buffer to their owners, and back: the best way there is on each backend.

A way is a `ShardWay`; these are for one group of ranks. The table of measurements behind the choice is in
docs/decisions/0010.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..labels import Unrecorded
from ..policies import Reduce, sum_dtype
from ..units import Span
from .collectives import as_bytes
from .group import Group
from .pairs import Pairwise
from .pending import Pending, Together, Waitable
from .ways import Arriving, ShardWay, add_in_order, filled

IN_TURN = 16
"""Slices that are added one after the other, with a call each, where no order is asked for."""


class Native(ShardWay):
    """The backend's own collectives: NCCL. Waiting for them keeps the stream waiting, not the host."""

    equal_shards = True

    def reduce(self, flat: torch.Tensor, _: Sequence[Span], into: torch.Tensor, share: float) -> Arriving:
        if self.policy.fixed_order or sum_dtype(flat.dtype) != flat.dtype:
            parts = torch.empty_like(flat)
            with self.group.line:
                work = dist.all_to_all_single(parts, flat, group=self.group.process_group, async_op=True)
            arrived = Pending(work, flat, self.group.line)
            if self.group.size > IN_TURN and not self.policy.fixed_order:
                return _Rows(parts.view(self.group.size, -1), arrived, into, share)
            return Slices(list(parts.chunk(self.group.size)), arrived, into, share)
        shard = into if into.dtype == flat.dtype else torch.empty_like(into, dtype=flat.dtype)
        with self.group.line:
            work = _reduce_scatter(shard, flat, self.group.process_group)
        return Summed(shard, Pending(work, flat, self.group.line), into, share)

    def gather(self, flat: torch.Tensor, shards: Sequence[Span]) -> Pending:
        mine = flat[slice(*shards[self.group.rank])]
        with self.group.line:
            return Pending(all_gather(flat, mine, self.group.process_group), flat, self.group.line)


class NativeUneven(Native):
    """The same where ranks own whole parameters: one message for each rank that owns something.

    To bring everyone's part to an owner and add up there would take as many times its memory as there are ranks. So
    what is less precise than float32 travels as that.
    """

    equal_shards = False

    def reduce(self, flat: torch.Tensor, shards: Sequence[Span], into: torch.Tensor, share: float) -> Arriving:
        exact = sum_dtype(flat.dtype)
        mine = into if into.dtype == exact else torch.empty_like(into, dtype=exact)
        owned = {owner: flat[slice(*shard)] for owner, shard in filled(shards)}
        # Hazard: an owner's tensor becomes the sum, and what was given must stay as it is.
        parts = {rank: mine.copy_(it) if rank == self.group.rank else it.to(exact) for rank, it in owned.items()}
        with self.group.line:
            works = [
                dist.reduce(part, self.group.to_global(owner), group=self.group.process_group, async_op=True)
                for owner, part in parts.items()
            ]
        return Summed(mine, Pending(Together(works), flat, self.group.line), into, share, keep=parts)

    def bytes_to_reduce(self, shards: Sequence[Span], dtype: torch.dtype, into: torch.dtype) -> int:
        return super().bytes_to_reduce(shards, sum_dtype(dtype), into)

    def gather(self, flat: torch.Tensor, shards: Sequence[Span]) -> Pending:
        return broadcasts(self.group, flat, shards)


class Whole(ShardWay):
    """Reduce everything everywhere: for backends that know no better, such as gloo with CUDA tensors."""

    def __init__(self, group: Group, reduce: Reduce, everyone: Group | None = None) -> None:
        """`everyone`: the ranks whose slices are added up, if others than those of `group` are among them."""
        super().__init__(group, reduce)
        self._everyone = everyone or group
        self.ranks = self._everyone.size

    def reduce(self, flat: torch.Tensor, shards: Sequence[Span], into: torch.Tensor, share: float) -> Arriving:
        total = flat.to(sum_dtype(flat.dtype), copy=True)
        with self.group.line, Unrecorded():
            work = dist.all_reduce(total, group=self._everyone.process_group, async_op=True)
        arrived = Pending(work, total, self.group.line)
        return Summed(total[slice(*shards[self.group.rank])], arrived, into, share)

    def bytes_to_reduce(self, shards: Sequence[Span], dtype: torch.dtype, into: torch.dtype) -> int:  # noqa: ARG002
        total = sum(it.length for _, it in filled(shards)) * sum_dtype(dtype).itemsize
        return bytes_of_all_reduce(total, self._everyone.size)

    def gather(self, flat: torch.Tensor, shards: Sequence[Span]) -> Pending:
        with Unrecorded():
            return broadcasts(self.group, flat, shards)

    @property
    def eager(self) -> bool:
        # Hazard: gloo pairs collectives by their order, also with those of the control channel in the same group.
        return self._everyone.size == 1 or self._everyone.control is not self._everyone.process_group


def best_way(group: Group, device: torch.device, reduce: Reduce, *, equal: bool) -> ShardWay:
    """`equal`: all shards are equally long."""
    name = group.process_group._get_backend(device).name().lower() if group.size > 1 else ""
    if name in ("nccl", "fake", "xccl", "hccl"):
        return Native(group, reduce) if equal else NativeUneven(group, reduce)
    return Pairwise(group, reduce) if device.type == "cpu" and name in ("gloo", "mpi") else Whole(group, reduce)


class Slices(Arriving):
    """Those of all ranks, yet to be added up."""

    def __init__(
        self, slices: list[torch.Tensor], arrived: Waitable, into: torch.Tensor, share: float, keep: Any = None
    ) -> None:
        self._slices, self._arrived, self._into, self._share, self._keep = slices, arrived, into, share, keep

    def wait(self) -> None:
        self._arrived.wait()
        add_in_order(self._slices, self._into, self._share)


class _Rows(Arriving):
    """Those of very many ranks, which one call adds up: in an order of its own, always the same."""

    def __init__(self, rows: torch.Tensor, arrived: Waitable, into: torch.Tensor, share: float) -> None:
        self._rows, self._arrived, self._into, self._share = rows, arrived, into, share

    def wait(self) -> None:
        self._arrived.wait()
        self._into.copy_(torch.sum(self._rows, 0, dtype=sum_dtype(self._rows.dtype)).mul_(self._share))


class Summed(Arriving):
    """Added up on the way."""

    def __init__(
        self, shard: torch.Tensor, arrived: Waitable, into: torch.Tensor, share: float, keep: Any = None
    ) -> None:
        self._shard, self._arrived, self._into, self._share, self._keep = shard, arrived, into, share, keep

    def wait(self) -> None:
        self._arrived.wait()
        if self._share != 1:
            self._shard.mul_(self._share)
        if self._shard is not self._into:
            self._into.copy_(self._shard)


def bytes_of_all_reduce(nbytes: int, ranks: int) -> int:
    """What each rank sends around a ring."""
    return 2 * nbytes * (ranks - 1) // ranks


def broadcasts(group: Group, flat: torch.Tensor, shards: Sequence[Span]) -> Pending:
    """Each owner's shard to everyone."""
    raw = [(group.to_global(rank), as_bytes(flat[slice(*shard)])) for rank, shard in filled(shards)]
    with group.line:
        works = [dist.broadcast(part, owner, group=group.process_group, async_op=True) for owner, part in raw]
    return Pending(Together(works), flat, group.line)


def _reduce_scatter(shard: torch.Tensor, flat: torch.Tensor, group: dist.ProcessGroup) -> Any:
    verb = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    return verb(shard, flat, group=group, async_op=True)


def all_gather(flat: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> Any:
    verb = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    return verb(flat, shard, group=group, async_op=True)
