"""Gradients of a bucket as one flat run of memory, copied only where they must be."""

from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial

import torch

from ..layout.layout import Bucket, BucketSlot, Layout
from ..layout.spec import ParamSpec
from ..state.trees import dense_flat_view
from .._types import Span

MAX_IDLE_BUFFERS = 3
"""Idle buffers of a kind: one that is filled while two are under way."""

FOREACH_BATCH_SIZE = 256
"""Gradients that are copied by one call."""

OptionalGrads = Iterable[torch.Tensor | None]
"""Looked at one after the other, and only once."""


class GradSlot:
    """Where a parameter lies in a bucket."""

    def __init__(self, bucket_slot: BucketSlot, spec: ParamSpec) -> None:
        (self.param, self.span), self.spec = bucket_slot, spec

    def view_in(self, flat: torch.Tensor) -> torch.Tensor:
        """Its part of a flat buffer, in its shape."""
        return flat[slice(*self.span)].as_strided(self.spec.shape, self.spec.stride)


class BucketBuffer:
    """Flat memory, and the views of it that buckets have made."""

    def __init__(self, flat: torch.Tensor) -> None:
        self.flat = flat
        self.views: dict[int, list[torch.Tensor]] = {}


class BufferPool:
    """Buffers of one dtype on one device, each large enough for every bucket that several parameters share."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self._device = dtype, device
        self._buffer_numel = 0
        self._idle: list[BucketBuffer] = []

    def idle_buffers(self) -> list[torch.Tensor]:
        """The memory of idle buffers."""
        return [buffer.flat for buffer in self._idle]

    def reserve(self, numel: int) -> None:
        if numel > self._buffer_numel:
            self._buffer_numel = numel
            self._idle.clear()

    def acquire(self, numel: int) -> BucketBuffer:
        """A buffer for so many elements at least. One for more than there is room for is not kept."""
        if self._idle and numel <= self._buffer_numel:
            return self._idle.pop()
        return BucketBuffer(torch.empty(max(numel, self._buffer_numel), dtype=self.dtype, device=self._device))

    def release(self, buffer: BucketBuffer) -> None:
        if len(self._idle) < MAX_IDLE_BUFFERS and buffer.flat.numel() == self._buffer_numel:
            self._idle.append(buffer)


class BucketPacker:
    """How the gradients of a bucket are laid out on the way: as in the bucket, but without the padding at its end."""

    def __init__(
        self, layout: Layout, bucket: Bucket, dtype: torch.dtype, *, include_padding: bool, scale: float = 1.0
    ) -> None:
        """`padded`: the padding at the end travels too, so that all shards are equally long. `share`: a factor that
        gradients are multiplied by when they are packed."""
        self._bucket_index, self._dtype, self._scale = bucket.index, dtype, scale
        self.slots = _make_slots(layout, bucket)
        filled = max((place.span.stop for place in self.slots), default=0)
        self.numel = bucket.numel if include_padding else filled
        self.shards = bucket.shards.truncate(self.numel)
        self._padding_spans = _find_padding(self.slots, self.numel)
        self._slots_with_gaps = {n for n, place in enumerate(self.slots) if place.spec.storage_numel > place.spec.numel}

    def zero_copy_view(self, grad: torch.Tensor | None) -> torch.Tensor | None:
        """The only gradient of a bucket itself, if it lies in memory as it would be packed."""
        spec = self.slots[0].spec
        if grad is None or grad.layout != torch.strided or self._padding_spans:
            return None
        lies_so = (grad.dtype, grad.shape, grad.stride()) == (self._dtype, spec.shape, spec.stride)
        return dense_flat_view(grad) if lies_so else None

    def copy_in(self, slot_index: int, grad: torch.Tensor, buffer: BucketBuffer) -> None:
        """Copy one gradient into a buffer."""
        view = self._views_of(buffer)[slot_index]
        if slot_index in self._slots_with_gaps:
            self._zero_gaps(slot_index, buffer)
        if self._scale == 1:
            view.copy_(_to_dense(grad))
        else:
            torch.mul(_to_dense(grad), self._scale, out=view)

    def pack(self, grads: OptionalGrads, buffer: BucketBuffer, already_copied: Container[int] = ()) -> torch.Tensor:
        """Copy them into a buffer, with zeros for what is missing. To those that were `put` there before they are
        added."""
        flat = buffer.flat[: self.numel]
        for span in self._padding_spans:
            flat[slice(*span)].zero_()
        copies = _ForeachBatch(self._copy_batch)
        for place, (view, grad) in enumerate(zip(self._views_of(buffer), grads, strict=True)):
            if place in already_copied:
                if grad is not None:
                    view.add_(_to_dense(grad), alpha=self._scale)
                continue
            if place in self._slots_with_gaps:
                self._zero_gaps(place, buffer)
            if grad is None:
                view.zero_()
            else:
                copies.add(view, _to_dense(grad))
        copies.flush()
        return flat

    def _copy_batch(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        torch._foreach_copy_(targets, sources)
        if self._scale != 1:
            torch._foreach_mul_(targets, self._scale)

    def add(self, grads: OptionalGrads, buffer: BucketBuffer) -> None:
        """Add them to what is in a buffer."""
        sums = _ForeachBatch(partial(torch._foreach_add_, alpha=self._scale))
        for view, grad in zip(self._views_of(buffer), grads, strict=True):
            if grad is not None:
                sums.add(view, _to_dense(grad))
        sums.flush()

    def _zero_gaps(self, slot_index: int, buffer: BucketBuffer) -> None:
        """Zeros where the strides of a parameter leave gaps."""
        buffer.flat[slice(*self.slots[slot_index].span)].zero_()

    def _views_of(self, buffer: BucketBuffer) -> list[torch.Tensor]:
        if self._bucket_index not in buffer.views:
            buffer.views[self._bucket_index] = [place.view_in(buffer.flat) for place in self.slots]
        return buffer.views[self._bucket_index]


class _ForeachBatch:
    """Pairs of tensors for one call, of which there are not too many at a time.

    Gradients exist for Python only while they are looked at. Thousands at once would each time set off the garbage
    collector, and all be old when they are let go: it would then look at everything there is.
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


def _make_slots(layout: Layout, bucket: Bucket) -> list[GradSlot]:
    return [GradSlot(room, layout.params[room.param]) for room in bucket.slots]


def _find_padding(slots: Sequence[GradSlot], numel: int) -> list[Span]:
    """What lies between parameters, and behind the last."""
    edges = [0, *(edge for place in slots for edge in place.span), numel]
    return [Span(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop]


def _to_dense(grad: torch.Tensor) -> torch.Tensor:
    return grad if grad.layout == torch.strided else grad.to_dense()
