"""Types and small helpers that every package uses: ranks, spans, formatting."""

from collections.abc import Sequence
from typing import NamedTuple, NewType

Rank = NewType("Rank", int)
"""A rank within the optimizer's process group; layouts use these."""

GlobalRank = NewType("GlobalRank", int)
"""A rank of the whole job; ``torch.distributed`` takes these as source or destination."""

MIB = 1 << 20
_MAX_RANKS_SHOWN = 8


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


def format_ranks(ranks: Sequence[int]) -> str:
    """Format the first few ranks for a message: "ranks 0, 1, 2"."""
    shown = ", ".join(map(str, ranks[:_MAX_RANKS_SHOWN])) + (", ..." if len(ranks) > _MAX_RANKS_SHOWN else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def replace_unprintable(text: str) -> str:
    """Replace characters that a terminal may interpret: names may come from untrusted files."""
    return "".join(char if char.isprintable() else "?" for char in text)
