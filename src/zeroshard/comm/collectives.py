"""The few verbs between ranks, each done the best way there is for the backend."""

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
"""gloo reduces around a ring, two hops a rank. Beyond this many ranks a few words go faster through a root."""


class Comm:
    """The verbs, bound to a group. Every verb but `send` and `receive` must be called on all of its ranks.

    Parameters travel in the user's group, wherever they lie. The rest is host memory, whatever the user's default
    device, and travels in `Group.control`.

    Where there are replicas, several groups train together, each with all there is. Ownership is a matter of `group`;
    whatever must be the same on all ranks is one of `everyone`.
    """

    tag = 0
    """By which messages to one rank are told apart from others."""

    def __init__(self, group: Group, data_parallel: "Comm | None" = None, replicas: Group | None = None) -> None:
        self.group, self._data_parallel = group, data_parallel
        self.profiler: StepProfiler = StepProfiler() if data_parallel is None else data_parallel.profiler
        """Of the optimizer that this one is made for."""
        self.replicas = replicas
        """This rank and those that own the same in other groups, if there are any."""
        for part in (group, replicas) if data_parallel else ():
            if part is not None:
                part.attach_detector(self.data_parallel.group)

    @property
    def data_parallel(self) -> "Comm":
        """The verbs, bound to all ranks that train together."""
        return self._data_parallel or self

    @property
    def is_single_rank(self) -> bool:
        """No other rank trains."""
        return self.data_parallel.group.size == 1

    def broadcast(self, flat: torch.Tensor, owner: Rank) -> PendingWork:
        """Start sending `flat` from `owner` into the same-sized `flat` of all others."""
        raw = view_as_bytes(flat)
        source = self.group.to_global(owner)
        with self.group.failure_detector:
            work = dist.broadcast(raw, source, group=self.group.process_group, async_op=True)
        return PendingWork(work, raw, self.group.failure_detector)

    def all_reduce_max(self, values: list[int]) -> list[int]:
        """The largest of each value over all ranks."""
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
        """`tensor`, changed to the largest value over all ranks, wherever it lies."""
        with self.group.failure_detector:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group.process_group)
        return tensor

    def all_reduce_sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor`, changed to the sum over all ranks, wherever it lies."""
        with self.group.failure_detector:
            dist.all_reduce(tensor, group=self.group.process_group)
        return tensor

    def all_reduce_any(self, flags: bytes) -> bytes:
        """Flags (0 or 1 a byte) that any rank has set."""
        buffer = bytearray(flags)
        with self.group.failure_detector:
            dist.all_reduce(_wrap_buffer(buffer), op=dist.ReduceOp.MAX, group=self.group.cpu_group)
        return bytes(buffer)

    def all_gather_text(self, text: str, *, max_bytes: int = 4096) -> list[str]:
        """Each rank's `text`, cut to `most` bytes."""
        mine = _wrap_buffer(bytearray(encode_text(text)[:max_bytes].ljust(max_bytes, b"\0")))
        buffers = [bytearray(max_bytes) for _ in range(self.group.size)]
        with self.group.failure_detector:
            dist.all_gather([_wrap_buffer(buffer) for buffer in buffers], mine, group=self.group.cpu_group)
        return [bytes(buffer).rstrip(b"\0").decode(errors="ignore") for buffer in buffers]

    def broadcast_bytes(self, data: bytes | None, source: Rank) -> bytes:
        """The source's `data`, on every rank. The others pass None."""
        size = torch.tensor([len(data or b"")], device="cpu")
        root = self.group.to_global(source)
        with self.group.failure_detector:
            dist.broadcast(size, root, group=self.group.cpu_group)
        buffer = bytearray(data or bytes(int(size.item())))
        with self.group.failure_detector:
            dist.broadcast(_wrap_buffer(buffer), root, group=self.group.cpu_group)
        return bytes(buffer)

    def send(self, flat: torch.Tensor, to: Rank) -> PendingWork:
        """Start sending host memory to one rank, which must `receive` as many bytes."""
        raw = view_as_bytes(flat)
        with self.group.failure_detector:
            work = dist.isend(raw, self.group.to_global(to), self.group.cpu_group, self.tag)
        return PendingWork(work, raw, self.group.failure_detector)

    def receive(self, flat: torch.Tensor, source: Rank) -> PendingWork:
        """Start receiving into host memory what one rank sends."""
        raw = view_as_bytes(flat)
        with self.group.failure_detector:
            work = dist.irecv(raw, self.group.to_global(source), self.group.cpu_group, self.tag)
        return PendingWork(work, raw, self.group.failure_detector)


def view_as_bytes(flat: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as bytes: every dtype travels alike on every backend."""
    return flat.detach().view(-1).view(torch.uint8)


def _wrap_buffer(buffer: bytearray) -> torch.Tensor:
    """A tensor that shares the memory of `buffer`."""
    return torch.frombuffer(buffer, dtype=torch.uint8) if buffer else torch.empty(0, dtype=torch.uint8, device="cpu")


def encode_text(text: str) -> bytes:
    """Any text: also half a character, which names and messages may have, must not fail on one rank alone."""
    return text.encode(errors="backslashreplace")


# ---------------------------------------------------------------------------------------------------------------------
# Messages beside all others, for a thread of its own.


BACKGROUND_TAG_BASE = 1 << 24
"""Beyond what users and ways between ranks give their own messages."""

_background_tags: WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = WeakKeyDictionary()
"""Those who talk aside do so in the same order on all ranks, and messages of one must not be taken for another's."""


class BackgroundComm(Comm):
    """`send` and `receive` of messages that meet no others. The other verbs are not for threads. Made on all ranks.

    They travel in `Group.control`: a process group of its own would have to be found by a name, which torch makes of
    how many groups a process is in.
    """

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self.tag = next(_background_tags.setdefault(group.cpu_group, count(BACKGROUND_TAG_BASE)))

    def all_succeeded(self, *, succeeded: bool) -> bool:
        """Whether it is so on all ranks, which all call it. The first asks, and tells the others."""
        flag = torch.tensor([succeeded], dtype=torch.uint8, device="cpu")
        if self.group.rank == 0:
            return self._reduce_on_rank0(flag)
        self.send(flag, Rank(0)).wait()
        self.receive(flag, Rank(0)).wait()
        return bool(flag.item())

    def _reduce_on_rank0(self, flag: torch.Tensor) -> bool:
        others = [Rank(rank) for rank in range(1, self.group.size)]
        for call in (self._receive_flag, self._send_flag):
            for rank in others:
                call(flag, rank)
        return bool(flag.item())

    def _receive_flag(self, flag: torch.Tensor, rank: Rank) -> None:
        heard = torch.zeros_like(flag)
        self.receive(heard, rank).wait()
        flag.mul_(heard)

    def _send_flag(self, flag: torch.Tensor, rank: Rank) -> None:
        self.send(flag.clone(), rank).wait()
