"""How a bucket is divided: one shard a rank, however many ranks there are."""

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import overload

from ..units import Rank, Span


class Shards(Sequence[Span]):
    """One span a rank, in the order of ranks. What is kept does not grow with their number."""

    @abstractmethod
    def holder(self, place: int) -> Rank:
        """The rank in whose shard a place lies."""

    @abstractmethod
    def filled(self) -> Iterable[tuple[Rank, Span]]:
        """Those with elements, by rank: perhaps few of many."""

    @abstractmethod
    def clipped(self, stop: int) -> "Shards":
        """The same, of a bucket that ends here."""

    @abstractmethod
    def problems(self, numel: int) -> Iterator[str]:
        """Why they do not cover a bucket of so many elements."""

    @abstractmethod
    def _of(self, rank: int) -> Span: ...

    @overload
    def __getitem__(self, rank: int) -> Span: ...
    @overload
    def __getitem__(self, rank: slice) -> list[Span]: ...
    def __getitem__(self, rank: int | slice) -> Span | list[Span]:
        if isinstance(rank, slice):
            return [self._of(one) for one in range(*rank.indices(len(self)))]
        if not 0 <= rank < len(self):
            raise IndexError(f"there is no rank {rank}")
        return self._of(rank)


@dataclass(frozen=True)
class EqualShards(Shards):
    """All are equally long, but those that reach beyond the end."""

    length: int
    ranks: int
    stop: int

    def holder(self, place: int) -> Rank:
        return Rank(min(place // max(self.length, 1), self.ranks - 1))

    def filled(self) -> Iterable[tuple[Rank, Span]]:
        return ((Rank(rank), shard) for rank, shard in enumerate(self) if shard.length)

    def clipped(self, stop: int) -> "EqualShards":
        return replace(self, stop=stop)

    def problems(self, numel: int) -> Iterator[str]:
        if not 0 <= numel <= min(self.length * self.ranks, self.stop):
            yield f"end at {self.length * self.ranks} of {numel} elements"

    def __len__(self) -> int:
        return self.ranks

    def _of(self, rank: int) -> Span:
        return Span(min(rank * self.length, self.stop), min((rank + 1) * self.length, self.stop))


@dataclass(frozen=True)
class ListedShards(Shards):
    """Of any lengths. Ranks that are not named have nothing."""

    spans: Mapping[Rank, Span]
    """In the order of ranks, one behind the other."""
    ranks: int

    def holder(self, place: int) -> Rank:
        found = bisect_right(self._starts, place) - 1
        return self._ranks[max(found, 0)] if self._ranks else Rank(0)

    def filled(self) -> Iterable[tuple[Rank, Span]]:
        return ((rank, shard) for rank, shard in self.spans.items() if shard.length)

    def clipped(self, stop: int) -> "ListedShards":
        return replace(self, spans={rank: Span(min(a, stop), min(b, stop)) for rank, (a, b) in self.spans.items()})

    def problems(self, numel: int) -> Iterator[str]:
        if self._ranks != sorted(self._ranks) or not all(0 <= rank < self.ranks for rank in self._ranks):
            yield f"belong to ranks {self._ranks} of {self.ranks}"
        starts, stops = [0, *self._stops], [*self._starts, numel]
        if starts != stops or sorted(starts) != starts:
            yield f"do not lie one behind the other in its {numel} elements"

    def __len__(self) -> int:
        return self.ranks

    def _of(self, rank: int) -> Span:
        if Rank(rank) in self.spans:
            return self.spans[Rank(rank)]
        before = bisect_right(self._ranks, rank) - 1
        end = self.spans[self._ranks[before]].stop if before >= 0 else 0
        return Span(end, end)

    @cached_property
    def _ranks(self) -> list[Rank]:
        return list(self.spans)

    @cached_property
    def _stops(self) -> list[int]:
        return [span.stop for span in self.spans.values()]

    @cached_property
    def _starts(self) -> list[int]:
        return [span.start for span in self.spans.values()]


class DealtShards(ListedShards):
    """As long as what each rank was dealt: no parameter is cut."""


class SnappedShards(ListedShards):
    """Almost equally long: they end where parameters may be cut."""
