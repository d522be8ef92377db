"""The few verbs between ranks, each done the best way there is for the backend."""

import torch
import torch.distributed as dist

from ..labels import Clock
from ..units import Rank
from .group import Group
from .pending import Pending

RING_RANKS = 16
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

    def __init__(self, group: Group, everyone: "Comm | None" = None, replicas: Group | None = None) -> None:
        self.group, self._everyone = group, everyone
        self.clock: Clock = Clock() if everyone is None else everyone.clock
        """Of the optimizer that this one is made for."""
        self.replicas = replicas
        """This rank and those that own the same in other groups, if there are any."""
        for part in (group, replicas) if everyone else ():
            if part is not None:
                part.share_line(self.everyone.group)

    @property
    def everyone(self) -> "Comm":
        """The verbs, bound to all ranks that train together."""
        return self._everyone or self

    @property
    def is_alone(self) -> bool:
        """No other rank trains."""
        return self.everyone.group.size == 1

    def broadcast(self, flat: torch.Tensor, owner: Rank) -> Pending:
        """Start sending `flat` from `owner` into the same-sized `flat` of all others."""
        raw = as_bytes(flat)
        source = self.group.to_global(owner)
        with self.group.line:
            work = dist.broadcast(raw, source, group=self.group.process_group, async_op=True)
        return Pending(work, raw, self.group.line)

    def maximum(self, values: list[int]) -> list[int]:
        """The largest of each value over all ranks."""
        tensor = torch.tensor(values, dtype=torch.int64, device="cpu")
        with self.group.line:
            if self.group.size <= RING_RANKS:
                dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group.control)
            else:
                self._maximum_by_tree(tensor)
        return [int(value) for value in tensor.tolist()]

    def _maximum_by_tree(self, tensor: torch.Tensor) -> None:
        root = self.group.to_global(Rank(0))
        gathered = tensor.repeat(self.group.size if self.group.rank == 0 else 0, 1)
        dist.gather(tensor, list(gathered) or None, root, group=self.group.control)
        if self.group.rank == 0:
            tensor.copy_(gathered.amax(0))
        dist.broadcast(tensor, root, group=self.group.control)

    def maximum_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor`, changed to the largest value over all ranks, wherever it lies."""
        with self.group.line:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group.process_group)
        return tensor

    def sum_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor`, changed to the sum over all ranks, wherever it lies."""
        with self.group.line:
            dist.all_reduce(tensor, group=self.group.process_group)
        return tensor

    def union(self, flags: bytes) -> bytes:
        """Flags (0 or 1 a byte) that any rank has set."""
        buffer = bytearray(flags)
        with self.group.line:
            dist.all_reduce(_over(buffer), op=dist.ReduceOp.MAX, group=self.group.control)
        return bytes(buffer)

    def share(self, text: str, *, most: int = 4096) -> list[str]:
        """Each rank's `text`, cut to `most` bytes."""
        mine = _over(bytearray(encoded(text)[:most].ljust(most, b"\0")))
        buffers = [bytearray(most) for _ in range(self.group.size)]
        with self.group.line:
            dist.all_gather([_over(buffer) for buffer in buffers], mine, group=self.group.control)
        return [bytes(buffer).rstrip(b"\0").decode(errors="ignore") for buffer in buffers]

    def broadcast_bytes(self, data: bytes | None, source: Rank) -> bytes:
        """The source's `data`, on every rank. The others pass None."""
        size = torch.tensor([len(data or b"")], device="cpu")
        root = self.group.to_global(source)
        with self.group.line:
            dist.broadcast(size, root, group=self.group.control)
        buffer = bytearray(data or bytes(int(size.item())))
        with self.group.line:
            dist.broadcast(_over(buffer), root, group=self.group.control)
        return bytes(buffer)

    def send(self, flat: torch.Tensor, to: Rank) -> Pending:
        """Start sending host memory to one rank, which must `receive` as many bytes."""
        raw = as_bytes(flat)
        with self.group.line:
            work = dist.isend(raw, self.group.to_global(to), self.group.control, self.tag)
        return Pending(work, raw, self.group.line)

    def receive(self, flat: torch.Tensor, source: Rank) -> Pending:
        """Start receiving into host memory what one rank sends."""
        raw = as_bytes(flat)
        with self.group.line:
            work = dist.irecv(raw, self.group.to_global(source), self.group.control, self.tag)
        return Pending(work, raw, self.group.line)


def as_bytes(flat: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as bytes: every dtype travels alike on every backend."""
    return flat.detach().view(-1).view(torch.uint8)


def _over(buffer: bytearray) -> torch.Tensor:
    """A tensor that shares the memory of `buffer`."""
    return torch.frombuffer(buffer, dtype=torch.uint8) if buffer else torch.empty(0, dtype=torch.uint8, device="cpu")


def encoded(text: str) -> bytes:
    """Any text: also half a character, which names and messages may have, must not fail on one rank alone."""
    return text.encode(errors="backslashreplace")
