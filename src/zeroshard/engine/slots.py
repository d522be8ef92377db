"""A bucket as gradients see it, and one round of them on its way."""

from typing import NamedTuple

import torch

from ..comm.transport import ReduceWork, ShardTransport
from ..profiling import Phase, StepProfiler
from ..layout.layout import Bucket, Layout
from ..policies import sum_dtype
from .grad_bucket import BucketBuffer, BucketPacker, BufferPool, OptionalGrads


class GradBucket:
    """A bucket as gradients see it."""

    def __init__(
        self, layout: Layout, bucket: Bucket, transport: ShardTransport, pool: BufferPool, profiler: StepProfiler
    ) -> None:
        self.index, self._transport, self._pool, self._profiler = bucket.index, transport, pool, profiler
        self.needs_packing = len(bucket.slots) > 1
        """Gradients are copied together before they are sent."""
        share = 1 / transport.num_ranks
        # What would be rounded more than once, or is sent as it lies, is better multiplied after it was added up.
        exact = pool.dtype == bucket.dtype == sum_dtype(pool.dtype)
        before = share if transport.reduces_on_host and exact and self.needs_packing else 1.0
        self._post_scale = share / before
        self.packer = BucketPacker(
            layout, bucket, pool.dtype, include_padding=transport.needs_equal_shards, scale=before
        )
        self.slots = self.packer.slots
        self.has_grads = False
        """Its shard has gradients, to which further ones are added."""
        self.params = [place.param for place in self.slots]
        self.num_expected = self.num_missing = 0
        """Parameters that train, and those of them of which the gradients are awaited."""
        if self.needs_packing:
            pool.reserve(self.packer.numel)
        self._slot_index_of = {param: place for place, param in enumerate(self.params)}
        self._open_buffer: BucketBuffer | None = None
        self._copied_slots: set[int] = set()
        self._shard_buffer: BucketBuffer | None = None

    def large_params(self, min_bytes: int) -> list[int]:
        """Parameters of so many bytes or more."""
        return [
            place.param for place in self.slots if place.spec.storage_numel * place.spec.dtype.itemsize >= min_bytes
        ]

    @property
    def copied_params(self) -> list[int]:
        """Parameters whose gradients have been copied already, and wait for the others."""
        return [self.params[place] for place in self._copied_slots]

    def copy_in(self, param: int, grad: torch.Tensor) -> None:
        """Copy a gradient to where it will be sent from, so that it can be freed."""
        place = self._slot_index_of[param]
        with self._profiler.phase(Phase.PACK_GRADS, self.index):
            self.packer.copy_in(place, grad, self._get_open_buffer())
        self._copied_slots.add(place)

    def start_reduce(self, grads: OptionalGrads, output: "ReduceOutput", *, owns_grads: bool) -> "PendingReduce":
        """Send them, with those that were put in.

        `ours`: nobody else holds them; else the next backward pass may add to them under way.
        """
        if not self.needs_packing:
            (grad,) = grads = list(grads)
            if owns_grads and (flat := self.packer.zero_copy_view(grad)) is not None:
                return self._launch_reduce(flat, output, None)
        buffer = self._get_open_buffer()
        with self._profiler.phase(Phase.PACK_GRADS, self.index):
            flat = self.packer.pack(grads, buffer, self._copied_slots)
        self._open_buffer, self._copied_slots = None, set()
        return self._launch_reduce(flat, output, buffer)

    def start_reduce_zeros(self, output: "ReduceOutput") -> "PendingReduce":
        """Send what nobody will use."""
        buffer = self._pool.acquire(self.packer.numel)
        flat = self.packer.pack([None] * len(self.slots), buffer)
        return self._launch_reduce(flat, output, buffer)._replace(is_needed=False)

    def _launch_reduce(
        self, flat: torch.Tensor, output: "ReduceOutput", buffer: BucketBuffer | None
    ) -> "PendingReduce":
        with self._profiler.phase(Phase.SEND_GRADS, self.index):
            arriving = self._transport.reduce_scatter(flat, self.packer.shards, output.tensor, self._post_scale)
        return PendingReduce(self, arriving, output, buffer)

    def bytes_to_send(self, shard_dtype: torch.dtype) -> int:
        """What this rank sends of it in a round. `into`: what its shard of gradients is."""
        return self._transport.reduce_scatter_nbytes(self.packer.shards, self._pool.dtype, shard_dtype)

    def open_buffers(self) -> list[torch.Tensor]:
        """Memory that waits for further gradients."""
        return [] if self._open_buffer is None else [self._open_buffer.flat]

    def clear(self, *, set_to_none: bool) -> None:
        """Forget what was put in, or make it zero."""
        if set_to_none:
            self._copied_slots.clear()
        for place in self._copied_slots:
            self.slots[place].view_in(self._get_open_buffer().flat).zero_()

    def release(self, pending: "PendingReduce") -> None:
        if pending.buffer is not None:
            self._pool.release(pending.buffer)

    def wrap_shard(self, shard: torch.Tensor) -> BucketBuffer:
        """The shard as something to pack into, with views made once."""
        if self._shard_buffer is None or self._shard_buffer.flat is not shard:
            self._shard_buffer = BucketBuffer(shard)
        return self._shard_buffer

    def _get_open_buffer(self) -> BucketBuffer:
        if self._open_buffer is None:
            self._open_buffer = self._pool.acquire(self.packer.numel)
        return self._open_buffer


class ReduceOutput(NamedTuple):
    """Where the average is made."""

    tensor: torch.Tensor
    is_shard: bool
    """It is the shard itself; else it has to be brought there."""


class PendingReduce(NamedTuple):
    bucket: GradBucket
    work: ReduceWork
    output: ReduceOutput
    buffer: BucketBuffer | None
    """What must be given back once it has arrived."""
    is_needed: bool = True
    """It was not cleared on the way."""
