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

from ..policies import sum_dtype
from ..units import Span, align_up
from .ending import wait_at_exit_for
from .group import Group
from .line import Line
from .pairs import Pairwise
from .pending import Pending
from .shards import Native, Slices, Summed, all_gather, bytes_of_all_reduce
from .ways import Arriving, ByThread, ShardWay

ALIGNED = 16
"""Elements: where a replica's part of a sum starts."""
KEPT_ROOMS = 2


class Relayed(ShardWay):
    """gloo with CPU tensors: threads pass on what has come.

    Of a shard that its row has summed up each replica adds up one part, and brings it to the others. So across rows
    goes no more than an all-reduce of the shard would send, and the order of the sum is that of rows.
    """

    adds_locally = True

    def __init__(self, inside: Pairwise, across: Pairwise) -> None:
        super().__init__(inside.group, inside.policy)
        self._inside, self._across = inside, across
        self.ranks = inside.group.size * across.group.size
        # Hazard: what meets others must start in the order of `reduce`, which is the same on all ranks.
        line = inside.group.line
        self._meeting, self._spreading = _Line("zeroshard-meeting", line), _Line("zeroshard-spreading", line)
        self._rooms = _Rooms()

    def reduce(self, flat: torch.Tensor, shards: Sequence[Span], into: torch.Tensor, share: float) -> Arriving:
        room = self._rooms.take(into.numel(), sum_dtype(flat.dtype))
        joint = _Joint(self._inside.reduce(flat, shards, room, share), room, into, self._across)

        def meet() -> None:
            joint.meet()
            try:
                self._spreading.put(spread)
            except Exception as failure:  # no thread can be started
                joint.fail(failure)
                joint.end()

        def spread() -> None:
            joint.spread(self._rooms)

        self._meeting.put(meet)
        return joint

    def gather(self, flat: torch.Tensor, shards: Sequence[Span]) -> Pending:
        return self._inside.gather(flat, shards)

    def bytes_to_reduce(self, shards: Sequence[Span], dtype: torch.dtype, into: torch.dtype) -> int:
        parts = divided(shards[self.group.rank].length, self._across.group.size)
        exact = sum_dtype(dtype)
        across = self._across.bytes_to_reduce(parts, exact, into) + self._across.bytes_to_gather(parts, into)
        return self._inside.bytes_to_reduce(shards, dtype, exact) + across

    def kept(self) -> list[torch.Tensor]:
        return [*self._inside.kept(), *self._across.kept(), *self._rooms.kept()]


class Chained(ShardWay):
    """NCCL: the second sum waits for the first on a stream of its own, and nobody else does."""

    def __init__(self, inside: Native, across: Group) -> None:
        super().__init__(inside.group, inside.policy)
        self._inside, self._across = inside, across
        self.equal_shards = inside.equal_shards
        self.ranks = inside.group.size * across.size
        self._stream: Any = None

    def reduce(self, flat: torch.Tensor, shards: Sequence[Span], into: torch.Tensor, share: float) -> Arriving:
        exact = sum_dtype(flat.dtype)
        part = into if into.dtype == exact else torch.empty_like(into, dtype=exact)
        inside = self._inside.reduce(flat, shards, part, share)
        with self._beside(flat.device):
            inside.wait()
            return self._sum(part, into, inside)

    def _sum(self, part: torch.Tensor, into: torch.Tensor, inside: Arriving) -> Arriving:
        """Hazard: `inside` has memory that the stream may still use, until the sum is waited for."""
        group, line = self._across.process_group, self._across.line
        if self.policy.fixed_order:
            parts = part.new_empty((self._across.size, part.numel()))
            with line:
                work = all_gather(parts.view(-1), part, group)
            return Slices(list(parts), Pending(work, part, line), into, 1.0, keep=inside)
        with line:
            work = dist.all_reduce(part, group=group, async_op=True)
        return Summed(part, Pending(work, part, line), into, 1.0, keep=inside)

    def gather(self, flat: torch.Tensor, shards: Sequence[Span]) -> Pending:
        return self._inside.gather(flat, shards)

    def bytes_to_reduce(self, shards: Sequence[Span], dtype: torch.dtype, into: torch.dtype) -> int:
        own, rows = shards[self.group.rank].length * sum_dtype(dtype).itemsize, self._across.size
        across = (rows - 1) * own if self.policy.fixed_order else bytes_of_all_reduce(own, rows)
        return self._inside.bytes_to_reduce(shards, dtype, into) + across

    def _beside(self, device: torch.device) -> AbstractContextManager[Any]:
        if device.type == "cpu":
            return nullcontext()
        module: Any = torch.get_device_module(device)
        self._stream = self._stream or module.Stream(device)
        stream: AbstractContextManager[Any] = module.stream(self._stream)
        return stream


class _Joint(ByThread):
    """A shard on its way through both sums."""

    def __init__(self, inside: Arriving, room: torch.Tensor, into: torch.Tensor, across: Pairwise) -> None:
        super().__init__()
        self._inside, self._room, self._into, self._across = inside, room, into, across
        self._parts = divided(into.numel(), across.group.size)
        self._summing: Arriving | None = None

    def meet(self) -> None:
        """The sum of the row has come: on with it to replicas."""
        self.attempt(self._inside.wait)
        self.attempt(self._add_up)

    def spread(self, rooms: "_Rooms") -> None:
        """This rank's part of the sum of all rows has come: bring it to replicas, and theirs here."""
        if self._summing is not None:
            self.attempt(self._summing.wait)
        self.attempt(lambda: self._across.gather(self._into, self._parts).wait())
        if self.failure is None:
            rooms.give_back(self._room)
        self.end()

    def _add_up(self) -> None:
        mine = self._into[slice(*self._parts[self._across.group.rank])]
        self._summing = self._across.reduce(self._room, self._parts, mine, 1.0)


def divided(numel: int, parts: int) -> list[Span]:
    """Spans of about the same length, one a part."""
    step = align_up(-(-numel // parts), ALIGNED)
    return [Span(min(n * step, numel), min((n + 1) * step, numel)) for n in range(parts)]


class _Line:
    """Does one thing after the other, in a thread that lives as long as there is something to do."""

    def __init__(self, name: str, connection: Line) -> None:
        self._name, self._connection = name, connection
        self._lock = threading.Lock()
        self._queue: deque[Callable[[], None]] = deque()
        self._runs = False

    def put(self, action: Callable[[], None]) -> None:
        """`action` must not raise."""
        with self._lock:
            if not self._runs:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                thread.start()
                self._runs = True
                wait_at_exit_for(thread, line=self._connection)
            self._queue.append(action)

    @torch.no_grad()
    def _run(self) -> None:
        while (action := self._next()) is not None:
            action()

    def _next(self) -> Callable[[], None] | None:
        with self._lock:
            self._runs = bool(self._queue)
            return self._queue.popleft() if self._queue else None


class _Rooms:
    """Memory for sums of a row, kept for the next ones: fresh memory costs page faults."""

    def __init__(self) -> None:
        self._idle: list[torch.Tensor] = []
        self._lock = threading.Lock()

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        nbytes = numel * dtype.itemsize
        with self._lock:
            memory = next((it for it in self._idle if it.numel() >= nbytes), None)
            self._idle = [it for it in self._idle if it is not memory]
        if memory is None:
            memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        return memory[:nbytes].view(dtype)

    def kept(self) -> list[torch.Tensor]:
        with self._lock:
            return list(self._idle)

    def give_back(self, room: torch.Tensor) -> None:
        memory = torch.empty(0, dtype=torch.uint8, device="cpu").set_(room.untyped_storage())
        with self._lock:
            self._idle = [*self._idle, memory][-KEPT_ROOMS:]
