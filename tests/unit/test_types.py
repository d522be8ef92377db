"""Spans and alignment."""

import pytest

from zeroshard._types import Span, align_up


@pytest.mark.parametrize(
    ("inner", "is_inside"),
    [((2, 5), True), ((3, 4), True), ((2, 2), True), ((5, 5), True), ((1, 4), False), ((3, 6), False), ((4, 3), False)],
)
def test_span_contains(inner: tuple[int, int], is_inside: bool) -> None:
    assert Span(2, 5).contains(Span(*inner)) is is_inside


def test_span_length() -> None:
    assert (Span(2, 5).length, Span(3, 3).length) == (3, 0)


def test_align_up() -> None:
    assert [align_up(value, 4) for value in (0, 1, 3, 4, 5, 8)] == [0, 4, 4, 4, 8, 8]
    assert [align_up(value, 1) for value in (0, 7)] == [0, 7]
