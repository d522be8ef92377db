"""Gradients of a bucket as one flat run of memory, copied only where they must be."""

from collections.abc import Sequence

import torch

from ..checkpoint.trees import dense_memory
from ..layout.layout import Bucket, Layout
from ..layout.specs import ParamSpec
from ..units import Span

KEPT_BUFFERS = 3
"""Idle buffers of a kind. With peers that keep pace no more than that are ever in use."""

Grads = Sequence[torch.Tensor | None]


class Place:
    """Where a parameter lies in a bucket."""

    def __init__(self, param: int, start: int, spec: ParamSpec) -> None:
        self.param, self.spec = param, spec
        self.span = Span(start, start + spec.extent)

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Its part of a flat buffer, in its shape."""
        return flat[slice(*self.span)].as_strided(self.spec.shape, self.spec.stride)


class Buffer:
    """Flat memory, and the views of it that buckets have made."""

    def __init__(self, flat: torch.Tensor) -> None:
        self.flat = flat
        self.views: dict[int, list[torch.Tensor]] = {}


class Pool:
    """Buffers of one dtype on one device, each large enough for every bucket that needs one."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self._device = dtype, device
        self._numel = 0
        self._idle: list[Buffer] = []

    def make_room(self, numel: int) -> None:
        if numel > self._numel:
            self._numel = numel
            self._idle.clear()

    def take(self) -> Buffer:
        if self._idle:
            return self._idle.pop()
        return Buffer(torch.empty(self._numel, dtype=self.dtype, device=self._device))

    def give_back(self, buffer: Buffer) -> None:
        if len(self._idle) < KEPT_BUFFERS and buffer.flat.numel() == self._numel:
            self._idle.append(buffer)


class Packing:
    """How the gradients of a bucket are laid out on the way: as in the bucket, but without the padding at its end."""

    def __init__(self, layout: Layout, bucket: Bucket, dtype: torch.dtype, *, padded: bool) -> None:
        """`padded`: the padding at the end travels too, so that all shards are equally long."""
        self._bucket, self._dtype = bucket.index, dtype
        self.places = _places(layout, bucket)
        filled = max((place.span.stop for place in self.places), default=0)
        self.numel = bucket.numel if padded else filled
        self.shards = [Span(min(shard.start, self.numel), min(shard.stop, self.numel)) for shard in bucket.shards]
        self._holes = _holes(self.places, self.numel)

    def as_it_lies(self, grads: Grads) -> torch.Tensor | None:
        """The only gradient of a bucket itself, if it lies in memory as it would be packed."""
        if len(grads) != 1 or grads[0] is None or grads[0].layout != torch.strided or self._holes:
            return None
        grad, spec = grads[0], self.places[0].spec
        return dense_memory(grad) if grad.dtype == self._dtype and grad.stride() == spec.stride else None

    def pack(self, grads: Grads, buffer: Buffer) -> torch.Tensor:
        """Copy them into a buffer, with zeros for what is missing."""
        flat = buffer.flat[: self.numel]
        for hole in self._holes:
            flat[slice(*hole)].zero_()
        views = self._views(buffer)
        given = [_dense(grad) for grad in grads if grad is not None]
        if given:
            torch._foreach_copy_(_where_given(views, grads), given)
        if len(given) < len(views):
            torch._foreach_zero_([view for view, grad in zip(views, grads, strict=True) if grad is None])
        return flat

    def add(self, grads: Grads, buffer: Buffer) -> None:
        """Add them to what is in a buffer."""
        given = [_dense(grad) for grad in grads if grad is not None]
        if given:
            torch._foreach_add_(_where_given(self._views(buffer), grads), given)

    def _views(self, buffer: Buffer) -> list[torch.Tensor]:
        if self._bucket not in buffer.views:
            buffer.views[self._bucket] = [place.of(buffer.flat) for place in self.places]
        return buffer.views[self._bucket]


def _places(layout: Layout, bucket: Bucket) -> list[Place]:
    starts: dict[int, int] = {}
    for piece in bucket.pieces:
        starts.setdefault(piece.param, piece.in_bucket.start)
    return [Place(index, start, layout.params[index]) for index, start in starts.items()]


def _holes(places: Sequence[Place], numel: int) -> list[Span]:
    """What no gradient fills: padding, and parameters whose strides leave gaps."""
    edges = [0, *(edge for place in places for edge in place.span), numel]
    between = [Span(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop]
    return [*between, *(place.span for place in places if place.spec.extent > place.spec.numel)]


def _where_given(views: Sequence[torch.Tensor], grads: Grads) -> list[torch.Tensor]:
    return [view for view, grad in zip(views, grads, strict=True) if grad is not None]


def _dense(grad: torch.Tensor) -> torch.Tensor:
    return grad if grad.layout == torch.strided else grad.to_dense()
