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

from .._types import MIB, Rank, Span, align_up
from ..config import Reduce
from ..profiling import ProfilerPaused
from .collectives import view_as_bytes
from .failure import join_at_exit
from .process_group import Group
from .transport import ReduceWork, ShardTransport, ThreadedWork, split_shards, sum_in_rank_order
from .work import PendingWork, WorkList

P2P_TAG_BASE = 1 << 20
"""Beyond what users give their own messages."""
CHUNK_ROW_BYTES = 4 * MIB
MIN_CHUNK_BYTES = 64 * 1024
"""Bytes of a row, unless its pieces would be shorter than that."""
CHUNK_ALIGN_BYTES = 64
"""Bytes: where a piece starts in memory."""
MAX_ROWS_IN_FLIGHT = 3
"""Rows that are received at once."""

_p2p_tags: WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = WeakKeyDictionary()
"""Ways are made in the same order on all ranks, and messages of one must not be taken for those of another."""


class GlooTransport(ShardTransport):
    reduces_on_host = True

    def __init__(self, group: Group, reduce: Reduce) -> None:
        super().__init__(group, reduce)
        tags = _p2p_tags.setdefault(group.process_group, count(P2P_TAG_BASE))
        # Hazard: what is reduced is received by a thread in its own time, and must not meet what is gathered.
        self._reduce_channel, self._gather_channel = _P2PChannel(group, next(tags)), _P2PChannel(group, next(tags))
        self._reduce_thread = _ReduceThread(self._reduce_channel)

    def reduce_scatter(
        self, flat: torch.Tensor, shards: Sequence[Span], output: torch.Tensor, scale: float
    ) -> ReduceWork:
        pairs, slices = self._reduce_channel, split_shards(flat, shards)
        parts = [
            (piece, other) for other in pairs.peers for piece in pairs.split_chunks(slices[other]) if piece.numel()
        ]
        with ProfilerPaused():
            sent = [pairs.send(*part) for part in parts]
        total = _GlooReduceWork(scale, PendingWork(WorkList(sent), flat, self.group.failure_detector))
        own = pairs.split_chunks(slices[self.group.rank])
        targets = torch.split(output, [piece.numel() for piece in own])
        rows = [_ChunkRow(piece, target, total) for piece, target in zip(own, targets, strict=True)]
        self._reduce_thread.submit([*rows[:-1], rows[-1]._replace(is_last=True)])
        return total

    def all_gather(self, flat: torch.Tensor, shards: Sequence[Span]) -> PendingWork:
        pairs, slices = self._gather_channel, split_shards(flat, shards)
        own = slices[self.group.rank]
        with ProfilerPaused():
            works = [pairs.receive(slices[other], other) for other in pairs.peers if slices[other].numel()]
            works += [pairs.send(own, other) for other in pairs.peers if own.numel()]
        return PendingWork(WorkList(works), flat, self.group.failure_detector)

    def cached_buffers(self) -> list[torch.Tensor]:
        return self._reduce_thread.cached_buffers()


class _P2PChannel:
    """Messages between two ranks, apart from all others."""

    def __init__(self, group: Group, tag: int) -> None:
        self._group, self._tag, self.rank = group, tag, group.rank
        self.failure_detector = group.failure_detector
        self.peers = [Rank((group.rank + turn) % group.size) for turn in range(1, group.size)]
        """In an order that has every rank begin with another one."""
        self._chunk_bytes = max(
            MIN_CHUNK_BYTES, align_up(CHUNK_ROW_BYTES // max(1, len(self.peers)), CHUNK_ALIGN_BYTES)
        )

    def split_chunks(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """What travels as one message each."""
        return torch.split(tensor, self._chunk_bytes // tensor.itemsize)

    def send(self, tensor: torch.Tensor, peer: Rank) -> Any:
        group = self._group.process_group
        with self.failure_detector:
            try:
                return dist.isend(view_as_bytes(tensor), self._group.to_global(peer), group, self._tag)
            except ValueError:
                # Hazard: torch refuses a group that was destroyed. Others may wait for this message, and live longer.
                return group.send([view_as_bytes(tensor)], peer, self._tag)

    def receive(self, tensor: torch.Tensor, peer: Rank) -> Any:
        group = self._group.process_group
        with self.failure_detector:
            try:
                return dist.irecv(view_as_bytes(tensor), self._group.to_global(peer), group, self._tag)
            except ValueError:  # as above: without it, the sender's process would wait at its end
                return group.recv([view_as_bytes(tensor)], peer, self._tag)


class _GlooReduceWork(ThreadedWork):
    """Complete when all rows have been added up and all that others need was sent."""

    def __init__(self, scale: float, sends: PendingWork) -> None:
        super().__init__()
        self.scale, self._sends = scale, sends

    def mark_done(self) -> None:
        self.run_guarded(self._sends.wait)
        super().mark_done()


class _ChunkRow(NamedTuple):
    """A piece of this rank's slice, and where its sum with those of the others belongs."""

    own_chunk: torch.Tensor
    output: torch.Tensor
    reduce_work: _GlooReduceWork
    is_last: bool = False


class _ReduceThread:
    """Receives and adds up, row after row, in a thread that lives as long as there is something to receive."""

    def __init__(self, channel: _P2PChannel) -> None:
        self._channel = channel
        self._lock = threading.Lock()
        self._queue: deque[_ChunkRow] = deque()
        self._is_running = False
        self._free_buffers: list[torch.Tensor] = []
        """Memory for a row each. The thread's own, as is all below."""

    def submit(self, rows: Sequence[_ChunkRow]) -> None:
        with self._lock:
            if (
                not self._is_running
            ):  # a thread that cannot be started leaves nothing behind; one that can waits for the lock
                thread = threading.Thread(target=self._run, name="zeroshard-receiver", daemon=True)
                thread.start()
                self._is_running = True
                join_at_exit(thread, failure_detector=self._channel.failure_detector)
            self._queue.extend(rows)

    def cached_buffers(self) -> list[torch.Tensor]:
        return list(self._free_buffers)

    @torch.no_grad()
    def _run(self) -> None:
        under_way: deque[tuple[_ChunkRow, _RowReceive | None]] = deque()
        while True:
            new = self._next_rows(MAX_ROWS_IN_FLIGHT - len(under_way), stop_if_empty=not under_way)
            under_way.extend((row, self._start_receive(row)) for row in new)
            if not under_way:
                return
            self._finish_row(*under_way.popleft())

    def _next_rows(self, max_rows: int, *, stop_if_empty: bool) -> list[_ChunkRow]:
        """`last`: if there are none, the thread ends."""
        with self._lock:
            rows = [self._queue.popleft() for _ in range(min(max_rows, len(self._queue)))]
            self._is_running = not stop_if_empty or bool(rows)
            return rows

    def _start_receive(self, row: _ChunkRow) -> "_RowReceive | None":
        try:
            return _RowReceive(row, self._get_buffer(row), self._channel)
        except Exception as failure:
            row.reduce_work.set_error(failure)
            return None

    def _finish_row(self, row: _ChunkRow, row_receive: "_RowReceive | None") -> None:
        try:
            if row_receive is not None:
                row_receive.wait_and_sum()
                self._free_buffers.append(row_receive.buffer)
        except Exception as failure:
            row.reduce_work.set_error(failure)
        if row.is_last:
            row.reduce_work.mark_done()

    def _get_buffer(self, row: _ChunkRow) -> torch.Tensor:
        nbytes = len(self._channel.peers) * _chunk_stride_bytes(row.own_chunk)
        room = self._free_buffers.pop() if self._free_buffers else None
        if room is not None and room.numel() >= nbytes:
            return room
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


class _RowReceive:
    """A row on its way."""

    def __init__(self, row: _ChunkRow, buffer: torch.Tensor, channel: _P2PChannel) -> None:
        self._row, self.buffer = row, buffer
        own, step = row.own_chunk, _chunk_stride_bytes(row.own_chunk)
        others = channel.peers if own.numel() else []
        parts = {other: buffer[n * step :][: own.nbytes].view(own.dtype) for n, other in enumerate(others)}
        self._chunks = {**parts, channel.rank: own}
        works = WorkList([channel.receive(part, other) for other, part in parts.items()])
        self._work = PendingWork(works, buffer, channel.failure_detector)

    def wait_and_sum(self) -> None:
        self._work.wait()
        sum_in_rank_order(
            [part for _, part in sorted(self._chunks.items())], self._row.output, self._row.reduce_work.scale
        )


def _chunk_stride_bytes(chunk: torch.Tensor) -> int:
    """Bytes from one piece of a row to the next."""
    return align_up(chunk.nbytes, CHUNK_ALIGN_BYTES)
