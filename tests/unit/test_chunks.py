"""Spans of memory as boxes of elements: each element in the span once, no other, in few boxes."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroshard._types import Span
from zeroshard.layout.chunks import Chunk, split_into_chunks

Dims = list[tuple[int, int]]
"""Sizes and steps."""


@st.composite
def strided(draw: st.DrawFn) -> Dims:
    """Dimensions in any order, with gaps between their elements and between their blocks."""
    sizes = draw(st.lists(st.integers(0, 4), max_size=4))
    dims, block = [], 1
    for size in sizes:
        step = block + draw(st.integers(0, 3))
        dims.append((size, step))
        block = (max(size, 1) - 1) * step + block
    return draw(st.permutations(dims))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Dims, Span]:
    dims = draw(strided())
    extent = extent_of(dims)
    start = draw(st.integers(0, extent))
    return dims, Span(start, draw(st.integers(start, extent)))


def extent_of(dims: Dims) -> int:
    return 1 + sum((size - 1) * step for size, step in dims) if all(size for size, _ in dims) else 0


def inside(box: Chunk) -> list[tuple[int, ...]]:
    ranges = [range(offset, offset + size) for offset, size in zip(box.offsets, box.sizes, strict=True)]
    return list(product(*ranges))


def expected(dims: Dims, span: Span) -> set[tuple[int, ...]]:
    steps = [step for _, step in dims]
    indices = product(*(range(size) for size, _ in dims))
    places = {index: sum(i * step for i, step in zip(index, steps, strict=True)) for index in indices}
    return {index for index, place in places.items() if span.start <= place < span.stop}


def found_in(dims: Dims, span: Span) -> list[Chunk]:
    return split_into_chunks([size for size, _ in dims], [step for _, step in dims], span)


@given(cases())
def test_each_element_in_the_span_once_and_no_other(case: tuple[Dims, Span]) -> None:
    elements = [index for box in found_in(*case) for index in inside(box)]
    assert len(elements) == len(set(elements))
    assert set(elements) == expected(*case)


@given(cases())
def test_they_are_few_and_none_is_empty(case: tuple[Dims, Span]) -> None:
    found = found_in(*case)
    assert len(found) <= max(1, 2 * len(case[0]) - 1)
    assert all(size > 0 for box in found for size in box.sizes)


@given(strided(), st.lists(st.integers(0, 200), max_size=5))
def test_ranks_that_share_a_tensor_have_all_of_it(dims: Dims, cuts: list[int]) -> None:
    extent = extent_of(dims)
    places = [0, *sorted(cut for cut in cuts if cut < extent), extent]
    spans = [Span(*it) for it in pairwise(places)]
    elements = [index for span in spans for box in found_in(dims, span) for index in inside(box)]
    assert sorted(elements) == sorted(expected(dims, Span(0, extent)))


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
def test_plain_ones(shape: tuple[int, ...], stride: tuple[int, ...], span: Span, found: list[Chunk]) -> None:
    assert split_into_chunks(shape, stride, span) == found
