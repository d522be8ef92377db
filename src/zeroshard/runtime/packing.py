"""Gradients of a bucket as one flat run of memory, copied only where they must be."""

from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial

import torch

from ..layout.layout import Bucket, Layout, Room
from ..layout.specs import ParamSpec
from ..state.trees import dense_memory
from ..units import Span

KEPT_BUFFERS = 3
"""Idle buffers of a kind: one that is filled while two are under way."""

AT_ONCE = 256
"""Gradients that are copied by one call."""

Grads = Iterable[torch.Tensor | None]
"""Looked at one after the other, and only once."""


class Place:
    """Where a parameter lies in a bucket."""

    def __init__(self, room: Room, spec: ParamSpec) -> None:
        (self.param, self.span), self.spec = room, spec

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Its part of a flat buffer, in its shape."""
        return flat[slice(*self.span)].as_strided(self.spec.shape, self.spec.stride)


class Buffer:
    """Flat memory, and the views of it that buckets have made."""

    def __init__(self, flat: torch.Tensor) -> None:
        self.flat = flat
        self.views: dict[int, list[torch.Tensor]] = {}


class Pool:
    """Buffers of one dtype on one device, each large enough for every bucket that several parameters share."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self._device = dtype, device
        self._numel = 0
        self._idle: list[Buffer] = []

    def kept(self) -> list[torch.Tensor]:
        """The memory of idle buffers."""
        return [buffer.flat for buffer in self._idle]

    def make_room(self, numel: int) -> None:
        if numel > self._numel:
            self._numel = numel
            self._idle.clear()

    def take(self, numel: int) -> Buffer:
        """A buffer for so many elements at least. One for more than there is room for is not kept."""
        if self._idle and numel <= self._numel:
            return self._idle.pop()
        return Buffer(torch.empty(max(numel, self._numel), dtype=self.dtype, device=self._device))

    def give_back(self, buffer: Buffer) -> None:
        if len(self._idle) < KEPT_BUFFERS and buffer.flat.numel() == self._numel:
            self._idle.append(buffer)


class Packing:
    """How the gradients of a bucket are laid out on the way: as in the bucket, but without the padding at its end."""

    def __init__(self, layout: Layout, bucket: Bucket, dtype: torch.dtype, *, padded: bool, share: float = 1.0) -> None:
        """`padded`: the padding at the end travels too, so that all shards are equally long. `share`: a factor that
        gradients are multiplied by when they are packed."""
        self._bucket, self._dtype, self._share = bucket.index, dtype, share
        self.places = _places(layout, bucket)
        filled = max((place.span.stop for place in self.places), default=0)
        self.numel = bucket.numel if padded else filled
        self.shards = bucket.shards.clipped(self.numel)
        self._padding = _padding(self.places, self.numel)
        self._gapped = {n for n, place in enumerate(self.places) if place.spec.extent > place.spec.numel}

    def as_it_lies(self, grad: torch.Tensor | None) -> torch.Tensor | None:
        """The only gradient of a bucket itself, if it lies in memory as it would be packed."""
        spec = self.places[0].spec
        if grad is None or grad.layout != torch.strided or self._padding:
            return None
        lies_so = (grad.dtype, grad.shape, grad.stride()) == (self._dtype, spec.shape, spec.stride)
        return dense_memory(grad) if lies_so else None

    def put(self, place: int, grad: torch.Tensor, buffer: Buffer) -> None:
        """Copy one gradient into a buffer."""
        view = self._views(buffer)[place]
        if place in self._gapped:
            self._fill_gaps(place, buffer)
        if self._share == 1:
            view.copy_(_dense(grad))
        else:
            torch.mul(_dense(grad), self._share, out=view)

    def pack(self, grads: Grads, buffer: Buffer, there: Container[int] = ()) -> torch.Tensor:
        """Copy them into a buffer, with zeros for what is missing. To those that were `put` there before they are
        added."""
        flat = buffer.flat[: self.numel]
        for span in self._padding:
            flat[slice(*span)].zero_()
        copies = _Batch(self._copy)
        for place, (view, grad) in enumerate(zip(self._views(buffer), grads, strict=True)):
            if place in there:
                if grad is not None:
                    view.add_(_dense(grad), alpha=self._share)
                continue
            if place in self._gapped:
                self._fill_gaps(place, buffer)
            if grad is None:
                view.zero_()
            else:
                copies.add(view, _dense(grad))
        copies.flush()
        return flat

    def _copy(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        torch._foreach_copy_(targets, sources)
        if self._share != 1:
            torch._foreach_mul_(targets, self._share)

    def add(self, grads: Grads, buffer: Buffer) -> None:
        """Add them to what is in a buffer."""
        sums = _Batch(partial(torch._foreach_add_, alpha=self._share))
        for view, grad in zip(self._views(buffer), grads, strict=True):
            if grad is not None:
                sums.add(view, _dense(grad))
        sums.flush()

    def _fill_gaps(self, place: int, buffer: Buffer) -> None:
        """Zeros where the strides of a parameter leave gaps."""
        buffer.flat[slice(*self.places[place].span)].zero_()

    def _views(self, buffer: Buffer) -> list[torch.Tensor]:
        if self._bucket not in buffer.views:
            buffer.views[self._bucket] = [place.of(buffer.flat) for place in self.places]
        return buffer.views[self._bucket]


class _Batch:
    """Pairs of tensors for one call, of which there are not too many at a time.

    Gradients exist for Python only while they are looked at. Thousands at once would each time set off the garbage
    collector, and all be old when they are let go: it would then look at everything there is.
    """

    def __init__(self, call: Callable[[list[torch.Tensor], list[torch.Tensor]], object]) -> None:
        self._call = call
        self._targets: list[torch.Tensor] = []
        self._sources: list[torch.Tensor] = []

    def add(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._targets.append(target)
        self._sources.append(source)
        if len(self._targets) == AT_ONCE:
            self.flush()

    def flush(self) -> None:
        if self._targets:
            self._call(self._targets, self._sources)
            self._targets.clear()
            self._sources.clear()


def _places(layout: Layout, bucket: Bucket) -> list[Place]:
    return [Place(room, layout.params[room.param]) for room in bucket.rooms]


def _padding(places: Sequence[Place], numel: int) -> list[Span]:
    """What lies between parameters, and behind the last."""
    edges = [0, *(edge for place in places for edge in place.span), numel]
    return [Span(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop]


def _dense(grad: torch.Tensor) -> torch.Tensor:
    return grad if grad.layout == torch.strided else grad.to_dense()
