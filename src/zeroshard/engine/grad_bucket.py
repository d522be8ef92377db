"""Pack the gradients of a bucket into one flat buffer and start its reduce-scatter.

`BucketPacker` knows where each gradient lies in the flat buffer, `BufferPool` recycles the buffers, and `ReduceBucket`
combines both with a transport. A bucket with a single dense gradient is sent without a copy.
"""

from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from .._torch_compat import foreach_add_, foreach_copy_, foreach_mul_
from .._types import Span
from ..comm.transport import ReduceWork, ShardTransport
from ..config import sum_dtype
from ..layout.layout import Bucket, BucketSlot, Layout
from ..layout.spec import ParamSpec
from ..profiling import Phase, StepProfiler
from ..state.tensor_utils import dense_flat_view

MAX_IDLE_BUFFERS = 3
"""Idle buffers that a pool keeps: one is filled while two are in flight."""

FOREACH_BATCH_SIZE = 256
"""Maximum number of gradients in one `torch._foreach_*` call."""

OptionalGrads = Iterable[torch.Tensor | None]
"""Gradients in slot order, None where a parameter has none. Iterated once, one at a time."""


class GradSlot:
    """The range of a parameter in its bucket, with the spec of that parameter."""

    def __init__(self, bucket_slot: BucketSlot, spec: ParamSpec) -> None:
        (self.param, self.span), self.spec = bucket_slot, spec

    def view_in(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the view of this slot in a flat buffer, with the shape and strides of the parameter."""
        return flat[slice(*self.span)].as_strided(self.spec.shape, self.spec.stride)


class BucketBuffer:
    """A flat buffer, and the views into it that buckets have created, by bucket index."""

    def __init__(self, flat: torch.Tensor) -> None:
        self.flat = flat
        self.views: dict[int, list[torch.Tensor]] = {}


class BufferPool:
    """A pool of buffers of one dtype on one device, each large enough for every bucket that needs packing."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self._device = dtype, device
        self._buffer_numel = 0
        self._idle: list[BucketBuffer] = []

    def idle_buffers(self) -> list[torch.Tensor]:
        return [buffer.flat for buffer in self._idle]

    def reserve(self, numel: int) -> None:
        """Make all further buffers large enough for `numel` elements."""
        if numel > self._buffer_numel:
            self._buffer_numel = numel
            self._idle.clear()

    def acquire(self, numel: int) -> BucketBuffer:
        """Return a buffer of at least `numel` elements. A buffer beyond the reserved size is not pooled on release."""
        if self._idle and numel <= self._buffer_numel:
            return self._idle.pop()
        return BucketBuffer(torch.empty(max(numel, self._buffer_numel), dtype=self.dtype, device=self._device))

    def release(self, buffer: BucketBuffer) -> None:
        if len(self._idle) < MAX_IDLE_BUFFERS and buffer.flat.numel() == self._buffer_numel:
            self._idle.append(buffer)


class BucketPacker:
    """The layout of a bucket's gradients on the wire: as in the bucket, usually without the padding at its end."""

    def __init__(
        self, layout: Layout, bucket: Bucket, dtype: torch.dtype, *, include_padding: bool, scale: float = 1.0
    ) -> None:
        """Describe `bucket`, packed in `dtype`.

        Args:
            include_padding: send the padding at the end too, which makes all shards equally long.
            scale: factor that gradients are multiplied by when they are packed.
        """
        self._bucket_index, self._dtype, self._scale = bucket.index, dtype, scale
        self.slots = [GradSlot(slot, layout.params[slot.param]) for slot in bucket.slots]
        filled = max((slot.span.stop for slot in self.slots), default=0)
        self.numel = bucket.numel if include_padding else filled
        self.shards = bucket.shards.truncate(self.numel)
        self._padding_spans = _find_padding(self.slots, self.numel)
        self._slots_with_gaps = {n for n, slot in enumerate(self.slots) if slot.spec.storage_numel > slot.spec.numel}
        """Slots of parameters whose strides leave gaps in memory."""

    def zero_copy_view(self, grad: torch.Tensor | None) -> torch.Tensor | None:
        """Return a flat view of a bucket's only gradient if its memory is what `pack` would produce, else None."""
        spec = self.slots[0].spec
        if grad is None or grad.layout != torch.strided or self._padding_spans:
            return None
        is_packed = (grad.dtype, grad.shape, grad.stride()) == (self._dtype, spec.shape, spec.stride)
        return dense_flat_view(grad) if is_packed else None

    def copy_in(self, slot_index: int, grad: torch.Tensor, buffer: BucketBuffer) -> None:
        """Copy one gradient into its slot of `buffer`."""
        view = self._views_of(buffer)[slot_index]
        if slot_index in self._slots_with_gaps:
            self._zero_gaps(slot_index, buffer)
        dense = _to_dense(grad)
        if self._scale == 1:
            view.copy_(dense)
        elif dense.dtype == view.dtype:
            torch.mul(dense, self._scale, out=view)
        else:  # round once, in the dtype of the buffer, as `pack` does
            view.copy_(dense).mul_(self._scale)

    def pack(self, grads: OptionalGrads, buffer: BucketBuffer, already_copied: Container[int] = ()) -> torch.Tensor:
        """Copy gradients into `buffer`, with zeros for None, and return the flat range to send.

        Gradients of slots in `already_copied` are added to what `copy_in` wrote there.
        """
        flat = buffer.flat[: self.numel]
        for span in self._padding_spans:
            flat[slice(*span)].zero_()
        copies = _ForeachBatch(self._copy_batch)
        for slot_index, (view, grad) in enumerate(zip(self._views_of(buffer), grads, strict=True)):
            if slot_index in already_copied:
                if grad is not None:
                    view.add_(_to_dense(grad), alpha=self._scale)
                continue
            if slot_index in self._slots_with_gaps:
                self._zero_gaps(slot_index, buffer)
            if grad is None:
                view.zero_()
            else:
                copies.add(view, _to_dense(grad))
        copies.flush()
        return flat

    def _copy_batch(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        foreach_copy_(targets, sources)
        if self._scale != 1:
            foreach_mul_(targets, self._scale)

    def add(self, grads: OptionalGrads, buffer: BucketBuffer) -> None:
        """Add gradients to the contents of `buffer`."""
        sums = _ForeachBatch(partial(foreach_add_, alpha=self._scale))
        for view, grad in zip(self._views_of(buffer), grads, strict=True):
            if grad is not None:
                sums.add(view, _to_dense(grad))
        sums.flush()

    def _zero_gaps(self, slot_index: int, buffer: BucketBuffer) -> None:
        buffer.flat[slice(*self.slots[slot_index].span)].zero_()

    def _views_of(self, buffer: BucketBuffer) -> list[torch.Tensor]:
        if self._bucket_index not in buffer.views:
            buffer.views[self._bucket_index] = [slot.view_in(buffer.flat) for slot in self.slots]
        return buffer.views[self._bucket_index]


class _ForeachBatch:
    """Collects (target, source) pairs and passes them to `foreach_op`, at most `FOREACH_BATCH_SIZE` at a time.

    A gradient has a Python object only while it is referenced from here. Thousands of them at once would trigger the
    garbage collector each time, and survive into its oldest generation, which leads to full collections.
    """

    def __init__(self, foreach_op: Callable[[list[torch.Tensor], list[torch.Tensor]], object]) -> None:
        self._foreach_op = foreach_op
        self._targets: list[torch.Tensor] = []
        self._sources: list[torch.Tensor] = []

    def add(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._targets.append(target)
        self._sources.append(source)
        if len(self._targets) == FOREACH_BATCH_SIZE:
            self.flush()

    def flush(self) -> None:
        if self._targets:
            self._foreach_op(self._targets, self._sources)
            self._targets.clear()
            self._sources.clear()


def _find_padding(slots: Sequence[GradSlot], numel: int) -> list[Span]:
    """Return the spans before, between and after the slots of a buffer of `numel` elements."""
    edges = [0, *(edge for slot in slots for edge in slot.span), numel]
    return [Span(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop]


def _to_dense(grad: torch.Tensor) -> torch.Tensor:
    return grad if grad.layout == torch.strided else grad.to_dense()


# ---------------------------------------------------------------------------------------------------------------------
# Bucket: buffers, readiness and the reduce-scatter of its gradients.


class ReduceBucket:
    """The gradient side of a bucket: collects gradients in a buffer and reduce-scatters them.

    Not thread-safe: `GradReducer` calls it with its lock held while backward runs, and without it between passes.
    """

    def __init__(
        self, layout: Layout, bucket: Bucket, transport: ShardTransport, pool: BufferPool, profiler: StepProfiler
    ) -> None:
        self.index, self._transport, self._pool, self._profiler = bucket.index, transport, pool, profiler
        self.needs_packing = len(bucket.slots) > 1
        """The bucket has several parameters: their gradients are copied into one buffer before they are sent."""
        scale = 1 / transport.num_ranks
        # Scale after the sum if scaling before would round more than once, or if a gradient is sent without a copy.
        is_exact = pool.dtype == bucket.dtype == sum_dtype(pool.dtype)
        pre_scale = scale if transport.reduces_on_host and is_exact and self.needs_packing else 1.0
        self._post_scale = scale / pre_scale
        self.packer = BucketPacker(
            layout, bucket, pool.dtype, include_padding=transport.needs_equal_shards, scale=pre_scale
        )
        self.slots = self.packer.slots
        self.has_grads = False
        """The shard of this bucket holds gradients of an earlier reduce."""
        self.params = [slot.param for slot in self.slots]
        if self.needs_packing:
            pool.reserve(self.packer.numel)
        self._slot_index_of = {param: slot_index for slot_index, param in enumerate(self.params)}
        self._open_buffer: BucketBuffer | None = None
        self._copied_slots: set[int] = set()
        self._shard_buffer: BucketBuffer | None = None

    def large_params(self, min_bytes: int) -> list[int]:
        """Return the parameters of at least `min_bytes`."""
        return [slot.param for slot in self.slots if slot.spec.storage_numel * slot.spec.dtype.itemsize >= min_bytes]

    @property
    def copied_params(self) -> list[int]:
        """Parameters whose gradients `copy_in` has copied to the open buffer, which has not been sent."""
        return [self.params[slot_index] for slot_index in self._copied_slots]

    def copy_in(self, param: int, grad: torch.Tensor) -> None:
        """Copy a gradient to the open buffer ahead of the others, which allows the caller to free it."""
        slot_index = self._slot_index_of[param]
        with self._profiler.phase(Phase.PACK_GRADS, self.index):
            self.packer.copy_in(slot_index, grad, self._get_open_buffer())
        self._copied_slots.add(slot_index)

    def start_reduce(self, grads: OptionalGrads, output: "ReduceOutput", *, owns_grads: bool) -> "PendingReduce":
        """Start the reduce-scatter of `grads` and of the gradients that `copy_in` has copied.

        With `owns_grads` nothing else refers to the gradients, and a single one may be sent without a copy. Otherwise
        the next backward pass may add to them while they are in flight.
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
        """Start a reduce-scatter of zeros, for ranks that wait for this bucket. Its result is discarded."""
        buffer = self._pool.acquire(self.packer.numel)
        flat = self.packer.pack([None] * len(self.slots), buffer)
        return self._launch_reduce(flat, output, buffer)._replace(is_needed=False)

    def _launch_reduce(
        self, flat: torch.Tensor, output: "ReduceOutput", buffer: BucketBuffer | None
    ) -> "PendingReduce":
        with self._profiler.phase(Phase.SEND_GRADS, self.index):
            work = self._transport.reduce_scatter(flat, self.packer.shards, output.tensor, self._post_scale)
        return PendingReduce(self, work, output, buffer)

    def bytes_to_send(self, shard_dtype: torch.dtype) -> int:
        """Return the bytes that this rank sends to reduce the bucket once into shards of `shard_dtype`."""
        return self._transport.reduce_scatter_nbytes(self.packer.shards, self._pool.dtype, shard_dtype)

    def open_buffers(self) -> list[torch.Tensor]:
        """Return the buffer that is being filled, if there is one."""
        return [] if self._open_buffer is None else [self._open_buffer.flat]

    def clear(self, *, set_to_none: bool) -> None:
        """Discard the gradients that `copy_in` has copied, or zero them."""
        if set_to_none:
            self._copied_slots.clear()
        for slot_index in self._copied_slots:
            self.slots[slot_index].view_in(self._get_open_buffer().flat).zero_()

    def release(self, pending: "PendingReduce") -> None:
        """Return the buffer of a finished reduce to the pool."""
        if pending.buffer is not None:
            self._pool.release(pending.buffer)

    def wrap_shard(self, shard: torch.Tensor) -> BucketBuffer:
        """Return `shard` as a buffer to pack into; its views are created once."""
        if self._shard_buffer is None or self._shard_buffer.flat is not shard:
            self._shard_buffer = BucketBuffer(shard)
        return self._shard_buffer

    def _get_open_buffer(self) -> BucketBuffer:
        if self._open_buffer is None:
            self._open_buffer = self._pool.acquire(self.packer.numel)
        return self._open_buffer


class ReduceOutput(NamedTuple):
    """The tensor that a reduce-scatter writes the average to."""

    tensor: torch.Tensor
    is_shard: bool
    """The tensor is the shard itself; otherwise the result must be copied or added to the shard."""


class PendingReduce(NamedTuple):
    """A reduce-scatter in flight."""

    bucket: ReduceBucket
    work: ReduceWork
    output: ReduceOutput
    buffer: BucketBuffer | None
    """Returned to the pool when the reduce has finished; None if the gradient was sent without a copy."""
    is_needed: bool = True
    """False if the result must be discarded: it consists of zeros, or was cleared in flight."""
