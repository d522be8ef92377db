"""Every slice straight to its owner, who adds in the order of ranks: gloo with CPU tensors.

Slices travel in pieces. A thread receives a row of them, one from each other rank, into memory that is kept for that,
and adds it up while it is in the cache. So what is received takes little memory, however long the slices are.
"""

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ..labels import Unrecorded
from ..policies import Reduce
from ..units import MIB, Rank, Span, align_up
from .collectives import as_bytes
from .ending import wait_at_exit_for
from .group import Group
from .pending import Pending, Together
from .ways import Arriving, ByThread, ShardWay, add_in_order, cut

FIRST_TAG = 1 << 20
"""Beyond what users give their own messages."""
ROW = 4 * MIB
LEAST_PIECE = 64 * 1024
"""Bytes of a row, unless its pieces would be shorter than that."""
ALIGNED = 64
"""Bytes: where a piece starts in memory."""
ROWS = 3
"""Rows that are received at once."""

_tags: WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = WeakKeyDictionary()
"""Ways are made in the same order on all ranks, and messages of one must not be taken for those of another."""


class Pairwise(ShardWay):
    adds_locally = True

    def __init__(self, group: Group, reduce: Reduce) -> None:
        super().__init__(group, reduce)
        tags = _tags.setdefault(group.process_group, count(FIRST_TAG))
        # Hazard: what is reduced is received by a thread in its own time, and must not meet what is gathered.
        self._reducing, self._gathering = _Pairs(group, next(tags)), _Pairs(group, next(tags))
        self._receiver = _Receiver(self._reducing)

    def reduce(self, flat: torch.Tensor, shards: Sequence[Span], into: torch.Tensor, share: float) -> Arriving:
        pairs, slices = self._reducing, cut(flat, shards)
        parts = [(piece, other) for other in pairs.others for piece in pairs.pieces(slices[other]) if piece.numel()]
        with Unrecorded():
            sent = [pairs.send(*part) for part in parts]
        total = _Sum(share, Pending(Together(sent), flat, self.group.line))
        own = pairs.pieces(slices[self.group.rank])
        targets = torch.split(into, [piece.numel() for piece in own])
        rows = [_Row(piece, target, total) for piece, target in zip(own, targets, strict=True)]
        self._receiver.take([*rows[:-1], rows[-1]._replace(is_last=True)])
        return total

    def gather(self, flat: torch.Tensor, shards: Sequence[Span]) -> Pending:
        pairs, slices = self._gathering, cut(flat, shards)
        own = slices[self.group.rank]
        with Unrecorded():
            works = [pairs.receive(slices[other], other) for other in pairs.others if slices[other].numel()]
            works += [pairs.send(own, other) for other in pairs.others if own.numel()]
        return Pending(Together(works), flat, self.group.line)

    def kept(self) -> list[torch.Tensor]:
        return self._receiver.kept()


class _Pairs:
    """Messages between two ranks, apart from all others."""

    def __init__(self, group: Group, tag: int) -> None:
        self._group, self._tag, self.me = group, tag, group.rank
        self.line = group.line
        self.others = [Rank((group.rank + turn) % group.size) for turn in range(1, group.size)]
        """In an order that has every rank begin with another one."""
        self._piece = max(LEAST_PIECE, align_up(ROW // max(1, len(self.others)), ALIGNED))

    def pieces(self, part: torch.Tensor) -> Sequence[torch.Tensor]:
        """What travels as one message each."""
        return torch.split(part, self._piece // part.itemsize)

    def send(self, part: torch.Tensor, other: Rank) -> Any:
        group = self._group.process_group
        with self.line:
            try:
                return dist.isend(as_bytes(part), self._group.to_global(other), group, self._tag)
            except ValueError:
                # Hazard: torch refuses a group that was destroyed. Others may wait for this message, and live longer.
                return group.send([as_bytes(part)], other, self._tag)

    def receive(self, part: torch.Tensor, other: Rank) -> Any:
        group = self._group.process_group
        with self.line:
            try:
                return dist.irecv(as_bytes(part), self._group.to_global(other), group, self._tag)
            except ValueError:  # as above: without it, the sender's process would wait at its end
                return group.recv([as_bytes(part)], other, self._tag)


class _Sum(ByThread):
    """Complete when all rows have been added up and all that others need was sent."""

    def __init__(self, share: float, sent: Pending) -> None:
        super().__init__()
        self.share, self._sent = share, sent

    def end(self) -> None:
        self.attempt(self._sent.wait)
        super().end()


class _Row(NamedTuple):
    """A piece of this rank's slice, and where its sum with those of the others belongs."""

    own: torch.Tensor
    into: torch.Tensor
    total: _Sum
    is_last: bool = False


class _Receiver:
    """Receives and adds up, row after row, in a thread that lives as long as there is something to receive."""

    def __init__(self, pairs: _Pairs) -> None:
        self._pairs = pairs
        self._lock = threading.Lock()
        self._queue: deque[_Row] = deque()
        self._runs = False
        self._idle: list[torch.Tensor] = []
        """Memory for a row each. The thread's own, as is all below."""

    def take(self, rows: Sequence[_Row]) -> None:
        with self._lock:
            if not self._runs:  # a thread that cannot be started leaves nothing behind; one that can waits for the lock
                thread = threading.Thread(target=self._run, name="zeroshard-receiver", daemon=True)
                thread.start()
                self._runs = True
                wait_at_exit_for(thread, line=self._pairs.line)
            self._queue.extend(rows)

    def kept(self) -> list[torch.Tensor]:
        return list(self._idle)

    @torch.no_grad()
    def _run(self) -> None:
        under_way: deque[tuple[_Row, _Receiving | None]] = deque()
        while True:
            new = self._next_rows(ROWS - len(under_way), last=not under_way)
            under_way.extend((row, self._start(row)) for row in new)
            if not under_way:
                return
            self._finish(*under_way.popleft())

    def _next_rows(self, most: int, *, last: bool) -> list[_Row]:
        """`last`: if there are none, the thread ends."""
        with self._lock:
            rows = [self._queue.popleft() for _ in range(min(most, len(self._queue)))]
            self._runs = not last or bool(rows)
            return rows

    def _start(self, row: _Row) -> "_Receiving | None":
        try:
            return _Receiving(row, self._room(row), self._pairs)
        except Exception as failure:
            row.total.fail(failure)
            return None

    def _finish(self, row: _Row, receiving: "_Receiving | None") -> None:
        try:
            if receiving is not None:
                receiving.add_up()
                self._idle.append(receiving.room)
        except Exception as failure:
            row.total.fail(failure)
        if row.is_last:
            row.total.end()

    def _room(self, row: _Row) -> torch.Tensor:
        nbytes = len(self._pairs.others) * _spacing(row.own)
        room = self._idle.pop() if self._idle else None
        if room is not None and room.numel() >= nbytes:
            return room
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


class _Receiving:
    """A row on its way."""

    def __init__(self, row: _Row, room: torch.Tensor, pairs: _Pairs) -> None:
        self._row, self.room = row, room
        own, step = row.own, _spacing(row.own)
        others = pairs.others if own.numel() else []
        parts = {other: room[n * step :][: own.nbytes].view(own.dtype) for n, other in enumerate(others)}
        self._slices = {**parts, pairs.me: own}
        works = Together([pairs.receive(part, other) for other, part in parts.items()])
        self._under_way = Pending(works, room, pairs.line)

    def add_up(self) -> None:
        self._under_way.wait()
        add_in_order([part for _, part in sorted(self._slices.items())], self._row.into, self._row.total.share)


def _spacing(piece: torch.Tensor) -> int:
    """Bytes from one piece of a row to the next."""
    return align_up(piece.nbytes, ALIGNED)
