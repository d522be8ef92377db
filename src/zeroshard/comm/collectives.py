"""`Comm`: the collectives and point-to-point messages that zeroshard uses, bound to a group.

Gradient and parameter buckets go through a `ShardTransport` instead.
"""

from collections.abc import Iterator
from itertools import count
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from .._types import Rank
from ..profiling import StepProfiler
from .process_group import Group
from .work import PendingWork

MAX_RING_RANKS = 16
"""gloo all-reduces around a ring, two hops per rank. With more ranks a small message is faster through a root."""


class Comm:
    """Collectives over `group`. All its ranks must call every method but `send` and `receive`.

    Parameters and tensors of the caller go through the user's process group, on whatever device they are. Everything
    else is host memory, whatever the user's default device, and goes through `Group.cpu_group`.

    Without replicas, `group` holds all ranks. With replicas (hybrid sharding) there are several shard groups, and each
    holds the full optimizer state::

        data_parallel   all ranks; whatever must be equal on all ranks is checked and broadcast here
        group           this rank's shard group: its ranks own the shards
        replicas        the ranks that own the same shard in the other shard groups, and this rank
    """

    tag = 0
    """The tag of point-to-point messages."""

    def __init__(
        self,
        group: Group,
        data_parallel: "Comm | None" = None,
        replicas: Group | None = None,
        *,
        profiler: StepProfiler | None = None,
    ) -> None:
        self.group, self._data_parallel = group, data_parallel
        self.consensus_profiler = profiler or StepProfiler()
        """Times consensus rounds."""
        self.replicas = replicas
        """The ranks that own the same shard, including this one; None without replicas."""
        for subgroup in (group, replicas) if data_parallel else ():
            if subgroup is not None:
                subgroup.attach_detector(self.data_parallel.group)

    @property
    def data_parallel(self) -> "Comm":
        """The `Comm` of all data-parallel ranks."""
        return self._data_parallel or self

    @property
    def is_single_rank(self) -> bool:
        """Whether there are no other data-parallel ranks."""
        return self.data_parallel.group.size == 1

    def broadcast(self, flat: torch.Tensor, owner: Rank) -> PendingWork:
        """Start broadcasting the owner's `flat` into the equally sized `flat` of all other ranks."""
        return start_broadcast(self.group, flat, owner)

    def all_reduce_max(self, values: list[int]) -> list[int]:
        """Return the maximum of each value over all ranks. All ranks pass the same number of values."""
        tensor = torch.tensor(values, dtype=torch.int64, device="cpu")
        with self.group.failure_detector:
            if self.group.size <= MAX_RING_RANKS:
                dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group.cpu_group)
            else:
                self._all_reduce_max_via_root(tensor)
        return [int(value) for value in tensor.tolist()]

    def _all_reduce_max_via_root(self, tensor: torch.Tensor) -> None:
        root = self.group.to_global(Rank(0))
        gathered = tensor.repeat(self.group.size if self.group.rank == 0 else 0, 1)
        dist.gather(tensor, list(gathered) or None, root, group=self.group.cpu_group)
        if self.group.rank == 0:
            tensor.copy_(gathered.amax(0))
        dist.broadcast(tensor, root, group=self.group.cpu_group)

    def all_reduce_max_(self, tensor: torch.Tensor) -> torch.Tensor:
        """All-reduce `tensor` in place to the maximum over all ranks, on any device, and return it."""
        with self.group.failure_detector:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group.process_group)
        return tensor

    def all_reduce_sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """All-reduce `tensor` in place to the sum over all ranks, on any device, and return it."""
        with self.group.failure_detector:
            dist.all_reduce(tensor, group=self.group.process_group)
        return tensor

    def all_reduce_any(self, flags: bytes) -> bytes:
        """Return which flags (one byte of 0 or 1 each) are set on any rank."""
        buffer = bytearray(flags)
        with self.group.failure_detector:
            dist.all_reduce(_wrap_buffer(buffer), op=dist.ReduceOp.MAX, group=self.group.cpu_group)
        return bytes(buffer)

    def all_gather_text(self, text: str, *, max_bytes: int | None = 4096) -> list[str]:
        """Return the text of each rank, truncated to `max_bytes`. With None, the ranks first exchange their lengths."""
        encoded = encode_text(text)
        if self.group.size == 1:
            return [encoded[:max_bytes].decode(errors="ignore")]
        if max_bytes is None:
            max_bytes = max(self.all_reduce_max([len(encoded)])[0], 1)
        own = _wrap_buffer(bytearray(encoded[:max_bytes].ljust(max_bytes, b"\0")))
        buffers = [bytearray(max_bytes) for _ in range(self.group.size)]
        with self.group.failure_detector:
            dist.all_gather([_wrap_buffer(buffer) for buffer in buffers], own, group=self.group.cpu_group)
        return [bytes(buffer).rstrip(b"\0").decode(errors="ignore") for buffer in buffers]

    def broadcast_bytes(self, data: bytes | None, source: Rank) -> bytes:
        """Broadcast the bytes of `source`, and return them on every rank. Other ranks pass None."""
        size = torch.tensor([len(data or b"")], device="cpu")
        root = self.group.to_global(source)
        with self.group.failure_detector:
            dist.broadcast(size, root, group=self.group.cpu_group)
        buffer = bytearray(data or bytes(int(size.item())))
        with self.group.failure_detector:
            dist.broadcast(_wrap_buffer(buffer), root, group=self.group.cpu_group)
        return bytes(buffer)

    def send(self, flat: torch.Tensor, to: Rank) -> PendingWork:
        """Start sending a CPU tensor to one rank, which must `receive` the same number of bytes."""
        raw = view_as_bytes(flat)
        with self.group.failure_detector:
            work = dist.isend(raw, self.group.to_global(to), self.group.cpu_group, self.tag)
        return PendingWork(work, raw, self.group.failure_detector)

    def receive(self, flat: torch.Tensor, source: Rank) -> PendingWork:
        """Start receiving into a CPU tensor from one rank, which must `send` the same number of bytes."""
        raw = view_as_bytes(flat)
        with self.group.failure_detector:
            work = dist.irecv(raw, self.group.to_global(source), self.group.cpu_group, self.tag)
        return PendingWork(work, raw, self.group.failure_detector)


def start_broadcast(group: Group, flat: torch.Tensor, owner: Rank) -> PendingWork:
    """Start broadcasting the owner's `flat`, as `Comm.broadcast` does."""
    raw = view_as_bytes(flat)
    with group.failure_detector:
        work = dist.broadcast(raw, group.to_global(owner), group=group.process_group, async_op=True)
    return PendingWork(work, raw, group.failure_detector)


def view_as_bytes(flat: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as bytes: every backend can send those, whatever the dtype."""
    return flat.detach().view(-1).view(torch.uint8)


def _wrap_buffer(buffer: bytearray) -> torch.Tensor:
    """Return a tensor that shares the memory of `buffer`."""
    return torch.frombuffer(buffer, dtype=torch.uint8) if buffer else torch.empty(0, dtype=torch.uint8, device="cpu")


def encode_text(text: str) -> bytes:
    """Encode any string. Names and messages may contain lone surrogates, which must not fail on one rank alone."""
    return text.encode(errors="backslashreplace")


# ---------------------------------------------------------------------------------------------------------------------
# Point-to-point messages of background threads.


BACKGROUND_TAG_BASE = 1 << 24
"""Larger than the tags of users and transports."""

_background_tags: WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = WeakKeyDictionary()
"""The next unused tag by process group. All ranks create their `BackgroundComm` objects in the same order."""


class BackgroundComm(Comm):
    """`send` and `receive` with a tag of their own, for a background thread. All ranks must construct it together.

    The inherited collectives must not be called from a thread. Messages go through `Group.cpu_group`, where the tag
    separates them from others: a process group of their own would cost another mesh of connections.
    """

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self.tag = next(_background_tags.setdefault(group.cpu_group, count(BACKGROUND_TAG_BASE)))

    def all_succeeded(self, *, succeeded: bool) -> bool:
        """Return whether `succeeded` is true on all ranks, as rank 0 collects it. All ranks must call."""
        flag = torch.tensor([succeeded], dtype=torch.uint8, device="cpu")
        if self.group.rank == 0:
            return self._reduce_on_rank0(flag)
        self.send(flag, Rank(0)).wait()
        self.receive(flag, Rank(0)).wait()
        return bool(flag.item())

    def _reduce_on_rank0(self, flag: torch.Tensor) -> bool:
        others = [Rank(rank) for rank in range(1, self.group.size)]
        for rank in others:
            self._receive_flag(flag, rank)
        for rank in others:
            self._send_flag(flag, rank)
        return bool(flag.item())

    def _receive_flag(self, flag: torch.Tensor, rank: Rank) -> None:
        received = torch.zeros_like(flag)
        self.receive(received, rank).wait()
        flag.mul_(received)

    def _send_flag(self, flag: torch.Tensor, rank: Rank) -> None:
        self.send(flag.clone(), rank).wait()
