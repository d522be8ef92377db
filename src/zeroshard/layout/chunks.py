"""A span of a tensor's memory as boxes of its elements: what rectangular formats can name."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .._types import Span


class Chunk(NamedTuple):
    """The elements `offsets[d] <= index[d] < offsets[d] + sizes[d]`."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def storage_numel(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements of memory from the first of a tensor to its last."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def has_internal_overlap(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether two elements may lie at one place: then some stride is within reach of the smaller ones."""
    reach = 0
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size > 1):
        if step <= reach:
            return True
        reach += (size - 1) * step
    return False


class _Dim(NamedTuple):
    axis: int
    size: int
    stride: int


def split_into_chunks(shape: Sequence[int], stride: Sequence[int], span: Span) -> list[Chunk]:
    """The elements that lie in `span` of the memory of a tensor, in at most 2d-1 boxes for d dimensions.

    Strides may be in any order and leave gaps, but no two elements may share their memory.
    """
    if 0 in shape:
        return []
    dims = [_Dim(*dim) for dim in zip(range(len(shape)), shape, stride, strict=True)]
    outer_first = sorted((dim for dim in dims if dim.size > 1), key=lambda dim: -dim.stride)
    whole = Chunk((0,) * len(shape), tuple(shape))
    return list(_iter_chunks(outer_first, whole, span))


def _iter_chunks(dims: Sequence[_Dim], chunk: Chunk, span: Span) -> Iterator[Chunk]:
    """The part of `box` in `span`, which is counted from the first element of the box. All of `dims` are whole."""
    extent = 1 + sum((dim.size - 1) * dim.stride for dim in dims)
    if span.start <= 0 and span.stop >= extent:
        yield chunk
        return
    if span.stop <= 0 or span.start >= extent:
        return
    outer, *inner = dims
    block = 1 + sum((dim.size - 1) * dim.stride for dim in inner)
    first = max(0, -(-span.start // outer.stride))
    last = min(outer.size, max(0, span.stop - block) // outer.stride + 1) if span.stop >= block else 0
    if first >= last:  # no block is whole
        for number in range(max(0, span.start // outer.stride), min(outer.size, -(-span.stop // outer.stride))):
            yield from _iter_row_chunks(inner, outer, chunk, span, number)
        return
    if first > 0:
        yield from _iter_row_chunks(inner, outer, chunk, span, first - 1)
    yield _narrow(chunk, outer, first, last)
    if last < outer.size:
        yield from _iter_row_chunks(inner, outer, chunk, span, last)


def _iter_row_chunks(inner: Sequence[_Dim], outer: _Dim, chunk: Chunk, span: Span, index: int) -> Iterator[Chunk]:
    start = index * outer.stride
    yield from _iter_chunks(inner, _narrow(chunk, outer, index, index + 1), Span(span.start - start, span.stop - start))


def _narrow(chunk: Chunk, dim: _Dim, start: int, stop: int) -> Chunk:
    offsets, sizes = list(chunk.offsets), list(chunk.sizes)
    offsets[dim.axis], sizes[dim.axis] = start, stop - start
    return Chunk(tuple(offsets), tuple(sizes))
