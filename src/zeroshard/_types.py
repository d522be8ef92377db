"""Types and small helpers that every package uses: ranks and spans."""

from collections import defaultdict
from collections.abc import Hashable, Iterable
from typing import NamedTuple, NewType, TypeVar

Key = TypeVar("Key", bound=Hashable)

Rank = NewType("Rank", int)
"""A rank within the optimizer's process group; layouts use these."""

GlobalRank = NewType("GlobalRank", int)
"""A rank of the whole job; ``torch.distributed`` takes these as source or destination."""

MIB = 1 << 20


class Span(NamedTuple):
    """A half-open range ``[start, stop)`` of elements."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start

    def contains(self, other: "Span") -> bool:
        return self.start <= other.start <= other.stop <= self.stop


def align_up(value: int, step: int) -> int:
    """Round `value` up to a multiple of `step`."""
    return -(-value // step) * step


def group_ranks(values: Iterable[Key]) -> dict[Key, list[int]]:
    """Group ranks by value, in order of first occurrence. `values` has one for each rank, in rank order."""
    groups: dict[Key, list[int]] = defaultdict(list)
    for rank, value in enumerate(values):
        groups[value].append(rank)
    return dict(groups)
