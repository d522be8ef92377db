"""A span of a tensor's memory as boxes of its elements: what rectangular formats can name."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..units import Span


class Box(NamedTuple):
    """The elements `offsets[d] <= index[d] < offsets[d] + sizes[d]`."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements of memory from the first of a tensor to its last."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def overlaps(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether two elements may lie at one place: then some stride is within reach of the smaller ones."""
    reach = 0
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size > 1):
        if step <= reach:
            return True
        reach += (size - 1) * step
    return False


class _Dim(NamedTuple):
    place: int
    size: int
    step: int


def boxes(shape: Sequence[int], stride: Sequence[int], span: Span) -> list[Box]:
    """The elements that lie in `span` of the memory of a tensor, in at most 2d-1 boxes for d dimensions.

    Strides may be in any order and leave gaps, but no two elements may share their memory.
    """
    if 0 in shape:
        return []
    dims = [_Dim(*dim) for dim in zip(range(len(shape)), shape, stride, strict=True)]
    outer_first = sorted((dim for dim in dims if dim.size > 1), key=lambda dim: -dim.step)
    whole = Box((0,) * len(shape), tuple(shape))
    return list(_within(outer_first, whole, span))


def _within(dims: Sequence[_Dim], box: Box, span: Span) -> Iterator[Box]:
    """The part of `box` in `span`, which is counted from the first element of the box. All of `dims` are whole."""
    extent = 1 + sum((dim.size - 1) * dim.step for dim in dims)
    if span.start <= 0 and span.stop >= extent:
        yield box
        return
    if span.stop <= 0 or span.start >= extent:
        return
    outer, *inner = dims
    block = 1 + sum((dim.size - 1) * dim.step for dim in inner)
    first = max(0, -(-span.start // outer.step))
    last = min(outer.size, max(0, span.stop - block) // outer.step + 1) if span.stop >= block else 0
    if first >= last:  # no block is whole
        for number in range(max(0, span.start // outer.step), min(outer.size, -(-span.stop // outer.step))):
            yield from _block(inner, outer, box, span, number)
        return
    if first > 0:
        yield from _block(inner, outer, box, span, first - 1)
    yield _narrowed(box, outer, first, last)
    if last < outer.size:
        yield from _block(inner, outer, box, span, last)


def _block(inner: Sequence[_Dim], outer: _Dim, box: Box, span: Span, number: int) -> Iterator[Box]:
    start = number * outer.step
    yield from _within(inner, _narrowed(box, outer, number, number + 1), Span(span.start - start, span.stop - start))


def _narrowed(box: Box, dim: _Dim, start: int, stop: int) -> Box:
    offsets, sizes = list(box.offsets), list(box.sizes)
    offsets[dim.place], sizes[dim.place] = start, stop - start
    return Box(tuple(offsets), tuple(sizes))
