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
from ..engine.grad_reducer import EAGER_COPY_MIN_BYTES
from ..engine.under_way import MAX_IN_FLIGHT
from .._types import Rank


class BackwardSimulation:
    """What `in_backward` takes at most, and what `stays` for the next pass."""

    def __init__(
        self,
        layout: Layout,
        stage: ZeroStage,
        reduce: Reduce,
        update_dtype: Callable[[torch.dtype], torch.dtype],
        *,
        rank: Rank,
        num_replicas: int,
    ) -> None:
        """`updated_in`: what parameters of a dtype are updated in. `rows` of ranks hold the same."""
        self._layout, self._frees_grads, self._reduce = layout, stage.frees, reduce
        self._update_dtype, self._rank, self._num_replicas = update_dtype, rank, num_replicas
        self._is_single_rank = layout.world_size * num_replicas == 1
        self._buffer_bytes = max(
            (self._wire_bytes(it) for it in self._trainable_buckets if len(it.slots) > 1), default=0
        )
        """Bytes of a buffer that all buckets of several parameters take turns in."""
        self._memory = _PeakCounter()
        self._buffer_memory = _PeakCounter()
        self._simulate()

    @property
    def peak_bytes(self) -> int:
        return self._memory.peak

    @property
    def persistent_bytes(self) -> int:
        return self._buffer_memory.peak

    @property
    def _trainable_buckets(self) -> list[Bucket]:
        return [it for it in self._layout.buckets if self._layout.has_trainable_params(it.index)]

    def _wire_bytes(self, bucket: Bucket) -> int:
        return bucket.numel * self._wire_dtype(bucket).itemsize

    def _wire_dtype(self, bucket: Bucket) -> torch.dtype:
        return self._reduce.wire_dtype(bucket.dtype)

    def _simulate(self) -> None:
        under_way: deque[int] = deque()
        for bucket in self._trainable_buckets:
            waiting = self._fill_bucket(bucket)
            if self._is_single_rank:
                self._memory.free(waiting)
                continue
            kept = self._start_reduce(bucket, waiting)
            under_way.append(kept)
            while len(under_way) > MAX_IN_FLIGHT:
                self._memory.free(under_way.popleft())

    def _fill_bucket(self, bucket: Bucket) -> int:
        """Gradients come, one after the other; bytes of those that wait."""
        packs, waiting = len(bucket.slots) > 1, 0
        if packs and not self._is_single_rank:
            self._acquire_buffer()
        for param in bucket.params:
            spec = self._layout.params[param]
            nbytes = spec.storage_numel * spec.dtype.itemsize
            self._memory.allocate(nbytes if self._frees_grads else 0)
            if packs and nbytes >= EAGER_COPY_MIN_BYTES and not self._is_single_rank and self._frees_grads:
                self._memory.free(nbytes)
            else:
                waiting += nbytes if self._frees_grads else 0
        return waiting

    def _acquire_buffer(self) -> None:
        """There is one to fill beside those that are under way, and they stay."""
        if self._buffer_memory.current < (MAX_IN_FLIGHT + 1) * self._buffer_bytes:
            self._buffer_memory.allocate(self._buffer_bytes)
            self._memory.allocate(self._buffer_bytes)

    def _start_reduce(self, bucket: Bucket, pending_bytes: int) -> int:
        """Bytes that are let go when it has arrived."""
        copied = self._accumulation_bytes(bucket) + self._cross_replica_bytes(bucket)
        if len(bucket.slots) > 1:
            self._memory.free(pending_bytes)
            self._memory.allocate(copied)
            return copied
        if self._is_zero_copy(bucket):
            self._memory.allocate(copied)
            return copied + pending_bytes
        copied += self._wire_bytes(bucket)
        self._memory.allocate(copied)
        self._memory.free(pending_bytes)
        return copied

    def _is_zero_copy(self, bucket: Bucket) -> bool:
        """Whether the only gradient of a bucket is what is sent; else it is copied for that."""
        (room,) = bucket.slots
        return self._frees_grads and room.span.length == bucket.numel and self._wire_dtype(bucket) == bucket.dtype

    def _accumulation_bytes(self, bucket: Bucket) -> int:
        """What it takes to add up slices in more precision than they travel in."""
        wire = self._wire_dtype(bucket)
        if bucket.has_equal_shards:
            exact = sum_dtype(wire) == wire and not self._reduce.fixed_order
            return 0 if exact else self._wire_bytes(bucket)
        return 0 if sum_dtype(wire) == wire else bucket.numel * sum_dtype(wire).itemsize

    def _cross_replica_bytes(self, bucket: Bucket) -> int:
        """A sum of this row, and in a fixed order those of all rows."""
        if self._num_replicas == 1:
            return 0
        exact = sum_dtype(self._wire_dtype(bucket))
        counted = (
            not bucket.has_equal_shards or self._update_dtype(bucket.dtype) == exact
        )  # it is among `_copied`, or stays
        apart = (not counted) + self._num_replicas * self._reduce.fixed_order
        return apart * bucket.shards[self._rank].length * exact.itemsize


@dataclass
class _PeakCounter:
    """Of water, in bytes."""

    current: int = 0
    peak: int = 0

    def allocate(self, nbytes: int) -> None:
        self.current += nbytes
        self.peak = max(self.peak, self.current)

    def free(self, nbytes: int) -> None:
        self.current -= nbytes
