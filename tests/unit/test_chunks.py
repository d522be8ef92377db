"""Splitting spans of memory into chunks: each element of the span is in one chunk, and there are few chunks."""

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
def strided(draw: st.DrawFn) -> Dims:
    """Dimensions in any order, with gaps between elements and between blocks."""
    sizes = draw(st.lists(st.integers(0, 4), max_size=4))
    dims, block = [], 1
    for size in sizes:
        step = block + draw(st.integers(0, 3))
        dims.append((size, step))
        block = (max(size, 1) - 1) * step + block
    return draw(st.permutations(dims))


@st.composite
def strided_spans(draw: st.DrawFn) -> tuple[Dims, Span]:
    dims = draw(strided())
    extent = extent_of(dims)
    start = draw(st.integers(0, extent))
    return dims, Span(start, draw(st.integers(start, extent)))


def extent_of(dims: Dims) -> int:
    return 1 + sum((size - 1) * step for size, step in dims) if all(size for size, _ in dims) else 0


def indices_in(chunk: Chunk) -> list[tuple[int, ...]]:
    ranges = [range(offset, offset + size) for offset, size in zip(chunk.offsets, chunk.sizes, strict=True)]
    return list(product(*ranges))


def expected_indices(dims: Dims, span: Span) -> set[tuple[int, ...]]:
    steps = [step for _, step in dims]
    indices = product(*(range(size) for size, _ in dims))
    places = {index: sum(i * step for i, step in zip(index, steps, strict=True)) for index in indices}
    return {index for index, place in places.items() if span.start <= place < span.stop}


def split(dims: Dims, span: Span) -> list[Chunk]:
    return split_into_chunks([size for size, _ in dims], [step for _, step in dims], span)


@given(strided_spans())
def test_chunks_cover_each_element_of_the_span_once(case: tuple[Dims, Span]) -> None:
    elements = [index for chunk in split(*case) for index in indices_in(chunk)]
    assert len(elements) == len(set(elements))
    assert set(elements) == expected_indices(*case)


@given(strided_spans())
def test_few_chunks_and_none_empty(case: tuple[Dims, Span]) -> None:
    found = split(*case)
    assert len(found) <= max(1, 2 * len(case[0]) - 1)
    assert all(size > 0 for chunk in found for size in chunk.sizes)


@given(strided(), st.lists(st.integers(0, 200), max_size=5))
def test_consecutive_spans_cover_the_tensor(dims: Dims, cuts: list[int]) -> None:
    extent = extent_of(dims)
    places = [0, *sorted(cut for cut in cuts if cut < extent), extent]
    spans = [Span(*ends) for ends in pairwise(places)]
    elements = [index for span in spans for chunk in split(dims, span) for index in indices_in(chunk)]
    assert sorted(elements) == sorted(expected_indices(dims, Span(0, extent)))


@pytest.mark.parametrize(
    ("shape", "stride", "span", "found"),
    [
        ((), (), Span(0, 1), [Chunk((), ())]),
        ((), (), Span(0, 0), []),
        ((3, 0), (1, 1), Span(0, 0), []),
        ((4, 5), (5, 1), Span(0, 20), [Chunk((0, 0), (4, 5))]),
        ((4, 5), (5, 1), Span(7, 8), [Chunk((1, 2), (1, 1))]),
        ((4, 5), (1, 4), Span(4, 12), [Chunk((0, 1), (4, 2))]),
    ],
)
def test_examples(shape: tuple[int, ...], stride: tuple[int, ...], span: Span, found: list[Chunk]) -> None:
    assert split_into_chunks(shape, stride, span) == found
