"""Split a span of a tensor's memory into rectangular chunks, the only shards that DCP can describe."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .._types import Span


class Chunk(NamedTuple):
    """A box of elements: `offsets[d] <= index[d] < offsets[d] + sizes[d]`."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def storage_numel(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return the number of memory elements from the first to the last element of a tensor, gaps included."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def has_internal_overlap(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether two elements may share memory: some stride is within the extent of the smaller strides."""
    extent = 0
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size > 1):
        if step <= extent:
            return True
        extent += (size - 1) * step
    return False


class _Dim(NamedTuple):
    axis: int
    size: int
    stride: int


def split_into_chunks(shape: Sequence[int], stride: Sequence[int], span: Span) -> list[Chunk]:
    """Return the elements of a tensor that lie in `span` of its memory, as at most 2d-1 chunks for d dimensions.

    Strides may be in any order and may leave gaps, but no two elements may share memory.
    """
    if 0 in shape:
        return []
    dims = [_Dim(*dim) for dim in zip(range(len(shape)), shape, stride, strict=True)]
    outer_first = sorted((dim for dim in dims if dim.size > 1), key=lambda dim: -dim.stride)
    full = Chunk((0,) * len(shape), tuple(shape))
    return list(_iter_chunks(outer_first, full, span))


def _iter_chunks(dims: Sequence[_Dim], chunk: Chunk, span: Span) -> Iterator[Chunk]:
    """Yield the intersection of `chunk` and `span`, which counts from the first element of the chunk.

    The chunk spans all of `dims`, outermost first.
    """
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
    if first >= last:  # the span contains no complete block
        for index in range(max(0, span.start // outer.stride), min(outer.size, -(-span.stop // outer.stride))):
            yield from _iter_row_chunks(inner, outer, chunk, span, index)
        return
    if first > 0:
        yield from _iter_row_chunks(inner, outer, chunk, span, first - 1)
    yield _narrow(chunk, outer, first, last)
    if last < outer.size:
        yield from _iter_row_chunks(inner, outer, chunk, span, last)


def _iter_row_chunks(inner: Sequence[_Dim], outer: _Dim, chunk: Chunk, span: Span, index: int) -> Iterator[Chunk]:
    """Yield the intersection of `span` and the block at `index` of the outermost dimension."""
    start = index * outer.stride
    yield from _iter_chunks(inner, _narrow(chunk, outer, index, index + 1), Span(span.start - start, span.stop - start))


def _narrow(chunk: Chunk, dim: _Dim, start: int, stop: int) -> Chunk:
    offsets, sizes = list(chunk.offsets), list(chunk.sizes)
    offsets[dim.axis], sizes[dim.axis] = start, stop - start
    return Chunk(tuple(offsets), tuple(sizes))
