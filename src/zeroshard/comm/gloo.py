"""The transport for CPU tensors over gloo: point-to-point messages; gradients are summed by the owner in rank order.

Each shard is sent in chunks. A thread on the owner receives one row of chunks at a time, one chunk from each peer, into
a reused buffer, and sums it while it is in the CPU cache::

    from rank 0   | chunk 0 | chunk 1 | chunk 2 |
    from rank 1   | chunk 0 | chunk 1 | chunk 2 |
    from rank 2   | chunk 0 | chunk 1 | chunk 2 |
                     row 0     row 1     row 2

Receiving therefore takes at most `MAX_ROWS_IN_FLIGHT` rows of memory, however long the shards are.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from .._types import MIB, Rank, align_up
from ..config import ReducePolicy
from ..layout.layout import Shards
from ..profiling import ProfilerPaused
from .collectives import view_as_bytes
from .process_group import Group
from .transport import (
    HostBufferPool,
    ReduceWork,
    ShardTransport,
    ThreadedWork,
    WorkerThread,
    split_shards,
    sum_in_rank_order,
)
from .work import PendingWork, WorkList

P2P_TAG_BASE = 1 << 20
"""Larger than the tags of users."""
BROADCAST_TAG = P2P_TAG_BASE - 3
"""One tag for the broadcasts of all transports: all ranks start them in the same order. A tag that ranks count would
differ between them after an error on one rank."""
CHUNK_ROW_BYTES = 4 * MIB
"""The size of a row, unless its chunks would be shorter than `MIN_CHUNK_BYTES`."""
MIN_CHUNK_BYTES = 64 * 1024
CHUNK_ALIGN_BYTES = 64
"""The alignment of chunks in the receive buffer."""
MAX_ROWS_IN_FLIGHT = 3

_p2p_tags: WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = WeakKeyDictionary()
"""The next unused tag by process group. All ranks create their transports in the same order."""


class GlooTransport(ShardTransport):
    """Sends every chunk straight to its owner, and updated shards straight to all peers."""

    reduces_on_host = True

    def __init__(self, group: Group, reduce: ReducePolicy) -> None:
        super().__init__(group, reduce)
        tags = _p2p_tags.setdefault(group.process_group, count(P2P_TAG_BASE))
        # Hazard: a thread receives reduce-scatter messages asynchronously. They must not be paired with messages of an
        # all-gather, so each has a tag of its own.
        self._reduce_channel, self._gather_channel = _P2PChannel(group, next(tags)), _P2PChannel(group, next(tags))
        self._broadcast_channel = _P2PChannel(group, BROADCAST_TAG)
        self._reduce_thread = _ReduceThread(self._reduce_channel)

    def reduce_scatter(self, flat: torch.Tensor, shards: Shards, output: torch.Tensor, scale: float) -> ReduceWork:
        channel, slices = self._reduce_channel, split_shards(flat, shards)
        messages = [
            (chunk, peer) for peer in channel.peers for chunk in channel.split_chunks(slices[peer]) if chunk.numel()
        ]
        own_chunks = channel.split_chunks(slices[self.group.rank])
        outputs = torch.split(output, [chunk.numel() for chunk in own_chunks])
        with self._reduce_thread.open_queue() as queue:
            with ProfilerPaused():
                sends = [channel.send(chunk, peer) for chunk, peer in messages]
            reduce_work = _GlooReduceWork(scale, PendingWork(WorkList(sends), flat, self.group.failure_detector))
            rows = [_ChunkRow(chunk, out, reduce_work) for chunk, out in zip(own_chunks, outputs, strict=True)]
            queue.extend([*rows[:-1], rows[-1]._replace(is_last=True)])
        return reduce_work

    def all_gather(self, flat: torch.Tensor, shards: Shards) -> PendingWork:
        channel, slices = self._gather_channel, split_shards(flat, shards)
        own = slices[self.group.rank]
        with ProfilerPaused():
            works = [channel.receive(slices[peer], peer) for peer in channel.peers if slices[peer].numel()]
            works += [channel.send(own, peer) for peer in channel.peers if own.numel()]
        return PendingWork(WorkList(works), flat, self.group.failure_detector)

    def broadcast(self, flat: torch.Tensor, owner: Rank) -> PendingWork:
        # gloo's broadcasts wait for each other in two threads. Point-to-point messages are all in flight at once.
        channel = self._broadcast_channel
        with ProfilerPaused():
            if owner == self.group.rank:
                works = [channel.send(flat, peer) for peer in channel.peers]
            else:
                works = [channel.receive(flat, owner)]
        return PendingWork(WorkList(works), flat, self.group.failure_detector)

    def cached_buffers(self) -> list[torch.Tensor]:
        return self._reduce_thread.receive_buffers.idle_buffers()


class _P2PChannel:
    """Point-to-point messages with a tag of their own."""

    def __init__(self, group: Group, tag: int) -> None:
        self._group, self._tag, self.rank = group, tag, group.rank
        self.failure_detector = group.failure_detector
        self.peers = [Rank((group.rank + offset) % group.size) for offset in range(1, group.size)]
        """All other ranks, rotated so that every rank starts with a different peer."""
        self._chunk_bytes = max(
            MIN_CHUNK_BYTES, align_up(CHUNK_ROW_BYTES // max(1, len(self.peers)), CHUNK_ALIGN_BYTES)
        )

    def split_chunks(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """Split a slice into chunks, which are sent as one message each."""
        return torch.split(tensor, self._chunk_bytes // tensor.itemsize)

    def send(self, tensor: torch.Tensor, peer: Rank) -> Any:
        group = self._group.process_group
        with self.failure_detector:
            try:
                return dist.isend(view_as_bytes(tensor), self._group.to_global(peer), group, self._tag)
            except ValueError:
                # Hazard: torch refuses a destroyed group. A peer that lives longer may still wait for this message.
                return group.send([view_as_bytes(tensor)], peer, self._tag)

    def receive(self, tensor: torch.Tensor, peer: Rank) -> Any:
        group = self._group.process_group
        with self.failure_detector:
            try:
                return dist.irecv(view_as_bytes(tensor), self._group.to_global(peer), group, self._tag)
            except ValueError:  # as in `send`: otherwise the sender would block at exit
                return group.recv([view_as_bytes(tensor)], peer, self._tag)


class _GlooReduceWork(ThreadedWork):
    """A reduce-scatter in flight: done when all rows are summed and all sends are complete."""

    def __init__(self, scale: float, sends: PendingWork) -> None:
        super().__init__()
        self.scale, self._sends = scale, sends

    def mark_done(self) -> None:
        self.run_guarded(self._sends.wait)
        super().mark_done()


class _ChunkRow(NamedTuple):
    """A chunk of this rank's own shard, and the output for its sum with the chunks of the peers."""

    own_chunk: torch.Tensor
    output: torch.Tensor
    reduce_work: _GlooReduceWork
    is_last: bool = False


class _ReduceThread(WorkerThread[_ChunkRow]):
    """Receives and sums rows in a thread, with several rows in flight."""

    def __init__(self, channel: _P2PChannel) -> None:
        super().__init__("zeroshard-receiver", channel.failure_detector)
        self._channel = channel
        self.receive_buffers = HostBufferPool(MAX_ROWS_IN_FLIGHT)
        """One row each."""

    @torch.no_grad()
    def _run(self) -> None:
        in_flight: deque[tuple[_ChunkRow, _RowReceive | None]] = deque()
        while True:
            new_rows = self.take(MAX_ROWS_IN_FLIGHT - len(in_flight), stop_if_empty=not in_flight)
            in_flight.extend((row, self._start_receive(row)) for row in new_rows)
            if not in_flight:
                return
            self._finish_row(*in_flight.popleft())

    def _start_receive(self, row: _ChunkRow) -> "_RowReceive | None":
        try:
            nbytes = len(self._channel.peers) * _chunk_stride_bytes(row.own_chunk)
            return _RowReceive(row, self.receive_buffers.acquire(nbytes), self._channel)
        except Exception as error:
            row.reduce_work.set_error(error)
            return None

    def _finish_row(self, row: _ChunkRow, row_receive: "_RowReceive | None") -> None:
        try:
            if row_receive is not None:
                row_receive.wait_and_sum()
                self.receive_buffers.release(row_receive.buffer)
        except Exception as error:
            row.reduce_work.set_error(error)
        if row.is_last:
            row.reduce_work.mark_done()


class _RowReceive:
    """The receives of one row."""

    def __init__(self, row: _ChunkRow, buffer: torch.Tensor, channel: _P2PChannel) -> None:
        self._row, self.buffer = row, buffer
        own, stride = row.own_chunk, _chunk_stride_bytes(row.own_chunk)
        peers = channel.peers if own.numel() else []
        received = {peer: buffer[n * stride :][: own.nbytes].view(own.dtype) for n, peer in enumerate(peers)}
        self._chunks = {**received, channel.rank: own}
        works = WorkList([channel.receive(chunk, peer) for peer, chunk in received.items()])
        self._work = PendingWork(works, buffer, channel.failure_detector)

    def wait_and_sum(self) -> None:
        self._work.wait()
        chunks = [chunk for _, chunk in sorted(self._chunks.items())]
        sum_in_rank_order(chunks, self._row.output, self._row.reduce_work.scale)


def _chunk_stride_bytes(chunk: torch.Tensor) -> int:
    """Return the distance of two chunks in a receive buffer."""
    return align_up(chunk.nbytes, CHUNK_ALIGN_BYTES)
