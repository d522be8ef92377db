"""Splitting spans of memory into few chunks, with each element of the span in exactly one of them."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroshard._types import Span
from zeroshard.layout.chunks import Chunk, split_into_chunks

Dims = list[tuple[int, int]]
"""Sizes and strides of the dimensions."""


@st.composite
def strided_dims(draw: st.DrawFn) -> Dims:
    """Dimensions in any order, with gaps between elements and between blocks."""
    sizes = draw(st.lists(st.integers(0, 4), max_size=4))
    dims, block = [], 1
    for size in sizes:
        stride = block + draw(st.integers(0, 3))
        dims.append((size, stride))
        block = (max(size, 1) - 1) * stride + block
    return draw(st.permutations(dims))


@st.composite
def strided_spans(draw: st.DrawFn) -> tuple[Dims, Span]:
    dims = draw(strided_dims())
    extent = extent_of(dims)
    start = draw(st.integers(0, extent))
    return dims, Span(start, draw(st.integers(start, extent)))


def extent_of(dims: Dims) -> int:
    return 1 + sum((size - 1) * stride for size, stride in dims) if all(size for size, _ in dims) else 0


def indices_in(chunk: Chunk) -> list[tuple[int, ...]]:
    ranges = [range(offset, offset + size) for offset, size in zip(chunk.offsets, chunk.sizes, strict=True)]
    return list(product(*ranges))


def expected_indices(dims: Dims, span: Span) -> set[tuple[int, ...]]:
    strides = [stride for _, stride in dims]
    indices = product(*(range(size) for size, _ in dims))
    offsets = {index: sum(i * stride for i, stride in zip(index, strides, strict=True)) for index in indices}
    return {index for index, offset in offsets.items() if span.start <= offset < span.stop}


def split(dims: Dims, span: Span) -> list[Chunk]:
    return split_into_chunks([size for size, _ in dims], [stride for _, stride in dims], span)


@given(strided_spans())
def test_chunks_cover_each_element_of_the_span_once(case: tuple[Dims, Span]) -> None:
    elements = [index for chunk in split(*case) for index in indices_in(chunk)]
    assert len(elements) == len(set(elements))
    assert set(elements) == expected_indices(*case)


@given(strided_spans())
def test_few_chunks_and_none_empty(case: tuple[Dims, Span]) -> None:
    chunks = split(*case)
    assert len(chunks) <= max(1, 2 * len(case[0]) - 1)
    assert all(size > 0 for chunk in chunks for size in chunk.sizes)


@given(strided_dims(), st.lists(st.integers(0, 200), max_size=5))
def test_consecutive_spans_cover_the_tensor(dims: Dims, cuts: list[int]) -> None:
    extent = extent_of(dims)
    bounds = [0, *sorted(cut for cut in cuts if cut < extent), extent]
    spans = [Span(*span_bounds) for span_bounds in pairwise(bounds)]
    elements = [index for span in spans for chunk in split(dims, span) for index in indices_in(chunk)]
    assert sorted(elements) == sorted(expected_indices(dims, Span(0, extent)))


@pytest.mark.parametrize(
    ("shape", "stride", "span", "expected"),
    [
        ((), (), Span(0, 1), [Chunk((), ())]),
        ((), (), Span(0, 0), []),
        ((3, 0), (1, 1), Span(0, 0), []),
        ((4, 5), (5, 1), Span(0, 20), [Chunk((0, 0), (4, 5))]),
        ((4, 5), (5, 1), Span(7, 8), [Chunk((1, 2), (1, 1))]),
        ((4, 5), (1, 4), Span(4, 12), [Chunk((0, 1), (4, 2))]),
    ],
)
def test_examples(shape: tuple[int, ...], stride: tuple[int, ...], span: Span, expected: list[Chunk]) -> None:
    assert split_into_chunks(shape, stride, span) == expected
