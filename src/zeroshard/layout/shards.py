"""How a bucket is divided: one shard a rank, however many ranks there are."""

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import overload

from .._types import Rank, Span


class Shards(Sequence[Span]):
    """One span a rank, in the order of ranks. What is kept does not grow with their number."""

    @abstractmethod
    def owner_at(self, offset: int) -> Rank:
        """The rank in whose shard a place lies."""

    @abstractmethod
    def non_empty(self) -> Iterable[tuple[Rank, Span]]:
        """Those with elements, by rank: perhaps few of many."""

    @abstractmethod
    def truncate(self, stop: int) -> "Shards":
        """The same, of a bucket that ends here."""

    @abstractmethod
    def find_problems(self, numel: int) -> Iterator[str]:
        """Why they do not cover a bucket of so many elements."""

    @abstractmethod
    def _span_of(self, rank: int) -> Span: ...

    @overload
    def __getitem__(self, rank: int) -> Span: ...
    @overload
    def __getitem__(self, rank: slice) -> list[Span]: ...
    def __getitem__(self, rank: int | slice) -> Span | list[Span]:
        if isinstance(rank, slice):
            return [self._span_of(one) for one in range(*rank.indices(len(self)))]
        if not 0 <= rank < len(self):
            raise IndexError(f"there is no rank {rank}")
        return self._span_of(rank)


@dataclass(frozen=True)
class EqualShards(Shards):
    """All are equally long, but those that reach beyond the end."""

    shard_numel: int
    world_size: int
    stop: int

    def owner_at(self, offset: int) -> Rank:
        return Rank(min(offset // max(self.shard_numel, 1), self.world_size - 1))

    def non_empty(self) -> Iterable[tuple[Rank, Span]]:
        return ((Rank(rank), shard) for rank, shard in enumerate(self) if shard.length)

    def truncate(self, stop: int) -> "EqualShards":
        return replace(self, stop=stop)

    def find_problems(self, numel: int) -> Iterator[str]:
        if not 0 <= numel <= min(self.shard_numel * self.world_size, self.stop):
            yield f"end at {self.shard_numel * self.world_size} of {numel} elements"

    def __len__(self) -> int:
        return self.world_size

    def _span_of(self, rank: int) -> Span:
        return Span(min(rank * self.shard_numel, self.stop), min((rank + 1) * self.shard_numel, self.stop))


@dataclass(frozen=True)
class ExplicitShards(Shards):
    """Of any lengths. Ranks that are not named have nothing."""

    spans: Mapping[Rank, Span]
    """In the order of ranks, one behind the other."""
    world_size: int

    def owner_at(self, offset: int) -> Rank:
        found = bisect_right(self._starts, offset) - 1
        return self._ranks[max(found, 0)] if self._ranks else Rank(0)

    def non_empty(self) -> Iterable[tuple[Rank, Span]]:
        return ((rank, shard) for rank, shard in self.spans.items() if shard.length)

    def truncate(self, stop: int) -> "ExplicitShards":
        return replace(self, spans={rank: Span(min(a, stop), min(b, stop)) for rank, (a, b) in self.spans.items()})

    def find_problems(self, numel: int) -> Iterator[str]:
        if self._ranks != sorted(self._ranks) or not all(0 <= rank < self.world_size for rank in self._ranks):
            yield f"belong to ranks {self._ranks} of {self.world_size}"
        starts, stops = [0, *self._stops], [*self._starts, numel]
        if starts != stops or sorted(starts) != starts:
            yield f"do not lie one behind the other in its {numel} elements"

    def __len__(self) -> int:
        return self.world_size

    def _span_of(self, rank: int) -> Span:
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


class WholeParamShards(ExplicitShards):
    """As long as what each rank was dealt: no parameter is cut."""


class AlignedShards(ExplicitShards):
    """Almost equally long: they end where parameters may be cut."""
