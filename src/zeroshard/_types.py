"""Numbers with a meaning."""

from collections.abc import Sequence
from typing import NamedTuple, NewType

Rank = NewType("Rank", int)
"""A rank inside the optimizer's process group: what layouts speak of."""

GlobalRank = NewType("GlobalRank", int)
"""A rank of the whole job: what ``torch.distributed`` wants as source or destination."""

MIB = 1 << 20
_MAX_RANKS_SHOWN = 8


class Span(NamedTuple):
    """The half-open range ``[start, stop)`` of elements."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start

    def contains(self, other: "Span") -> bool:
        return self.start <= other.start <= other.stop <= self.stop


def align_up(value: int, step: int) -> int:
    """The smallest multiple of `step` that is not below `value`."""
    return -(-value // step) * step


def format_ranks(ranks: Sequence[int]) -> str:
    """A few of them, in words."""
    shown = ", ".join(map(str, ranks[:_MAX_RANKS_SHOWN])) + (", ..." if len(ranks) > _MAX_RANKS_SHOWN else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def replace_unprintable(text: str) -> str:
    """Replace what a terminal would interpret: names come from other people's files."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
