"""How much memory gradients take on their way to their owners: a backward pass, played through bucket by bucket.

It follows runtime/grad_sync.py, as it is with NCCL: large gradients are copied into a buffer as they come and freed,
small ones wait for their bucket to be full, and no more than two buckets are under way.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..layout.layout import Bucket, Layout
from ..policies import Reduce, ZeroStage, sum_dtype
from ..runtime.grad_sync import LARGE
from ..runtime.under_way import CROWD
from ..units import Rank


class Transit:
    """What `in_backward` takes at most, and what `stays` for the next pass."""

    def __init__(
        self,
        layout: Layout,
        stage: ZeroStage,
        reduce: Reduce,
        updated_in: Callable[[torch.dtype], torch.dtype],
        *,
        rank: Rank,
        rows: int,
    ) -> None:
        """`updated_in`: what parameters of a dtype are updated in. `rows` of ranks hold the same."""
        self._layout, self._frees, self._reduce = layout, stage.frees, reduce
        self._updated_in, self._rank, self._rows = updated_in, rank, rows
        self._alone = layout.world_size * rows == 1
        self._size = max((self._wire(it) for it in self._trained if len(it.rooms) > 1), default=0)
        """Bytes of a buffer that all buckets of several parameters take turns in."""
        self._level = _Level()
        self._buffers = _Level()
        self._play()

    @property
    def in_backward(self) -> int:
        return self._level.most

    @property
    def stays(self) -> int:
        return self._buffers.most

    @property
    def _trained(self) -> list[Bucket]:
        return [it for it in self._layout.buckets if self._layout.trains(it.index)]

    def _wire(self, bucket: Bucket) -> int:
        return bucket.numel * self._wire_dtype(bucket).itemsize

    def _wire_dtype(self, bucket: Bucket) -> torch.dtype:
        return self._reduce.wire_dtype(bucket.dtype)

    def _play(self) -> None:
        under_way: deque[int] = deque()
        for bucket in self._trained:
            waiting = self._fill(bucket)
            if self._alone:
                self._level.drop(waiting)
                continue
            kept = self._send(bucket, waiting)
            under_way.append(kept)
            while len(under_way) > CROWD:
                self._level.drop(under_way.popleft())

    def _fill(self, bucket: Bucket) -> int:
        """Gradients come, one after the other; bytes of those that wait."""
        packs, waiting = len(bucket.rooms) > 1, 0
        if packs and not self._alone:
            self._take_buffer()
        for param in bucket.params:
            spec = self._layout.params[param]
            nbytes = spec.extent * spec.dtype.itemsize
            self._level.rise(nbytes if self._frees else 0)
            if packs and nbytes >= LARGE and not self._alone and self._frees:
                self._level.drop(nbytes)
            else:
                waiting += nbytes if self._frees else 0
        return waiting

    def _take_buffer(self) -> None:
        """There is one to fill beside those that are under way, and they stay."""
        if self._buffers.now < (CROWD + 1) * self._size:
            self._buffers.rise(self._size)
            self._level.rise(self._size)

    def _send(self, bucket: Bucket, waiting: int) -> int:
        """Bytes that are let go when it has arrived."""
        copied = self._copied(bucket) + self._between_rows(bucket)
        if len(bucket.rooms) > 1:
            self._level.drop(waiting)
            self._level.rise(copied)
            return copied
        if self._goes_as_it_lies(bucket):
            self._level.rise(copied)
            return copied + waiting
        copied += self._wire(bucket)
        self._level.rise(copied)
        self._level.drop(waiting)
        return copied

    def _goes_as_it_lies(self, bucket: Bucket) -> bool:
        """Whether the only gradient of a bucket is what is sent; else it is copied for that."""
        (room,) = bucket.rooms
        return self._frees and room.span.length == bucket.numel and self._wire_dtype(bucket) == bucket.dtype

    def _copied(self, bucket: Bucket) -> int:
        """What it takes to add up slices in more precision than they travel in."""
        wire = self._wire_dtype(bucket)
        if bucket.has_equal_shards:
            exact = sum_dtype(wire) == wire and not self._reduce.fixed_order
            return 0 if exact else self._wire(bucket)
        return 0 if sum_dtype(wire) == wire else bucket.numel * sum_dtype(wire).itemsize

    def _between_rows(self, bucket: Bucket) -> int:
        """A sum of this row, and in a fixed order those of all rows."""
        if self._rows == 1:
            return 0
        exact = sum_dtype(self._wire_dtype(bucket))
        counted = (
            not bucket.has_equal_shards or self._updated_in(bucket.dtype) == exact
        )  # it is among `_copied`, or stays
        apart = (not counted) + self._rows * self._reduce.fixed_order
        return apart * bucket.shards[self._rank].length * exact.itemsize


@dataclass
class _Level:
    """Of water, in bytes."""

    now: int = 0
    most: int = 0

    def rise(self, nbytes: int) -> None:
        self.now += nbytes
        self.most = max(self.most, self.now)

    def drop(self, nbytes: int) -> None:
        self.now -= nbytes
