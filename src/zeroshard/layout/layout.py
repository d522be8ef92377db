"""The frozen answer to: which rank owns which span of which parameter, and where does it lie.

A bucket is one flat run of memory of one dtype on one device. Every parameter has a room in one bucket, and rank r owns
the r-th of a bucket's shards. Where rooms and shards overlap are pieces: what a rank owns of a parameter.

    bucket 0   |    shard of rank 0    |  shard of rank 1  |   shard of rank 2   |
    whole      | p0 ....... | p3 ..... | p1 .............. | p2 .... | p4 . | p5 |
    cut        | p0 ....... | p1 .....   p1 ..... | p2 ...   p2 | p3 .. | p4 | p5 |

Rooms are kept, pieces are computed: with thousands of ranks there are many more of these.
"""

import hashlib
from abc import abstractmethod
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, replace
from functools import cached_property
from itertools import accumulate, islice
from typing import Any, NamedTuple, TypeVar, overload

import torch

from .._types import Rank, Span
from ..errors import LayoutError
from .spec import ParamSpec

# ---------------------------------------------------------------------------------------------------------------------
# How a bucket is divided: one shard a rank, however many ranks there are.


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


# ---------------------------------------------------------------------------------------------------------------------
# The frozen answer to: which rank owns which span of which parameter, and where does it lie.
#
# A bucket is one flat run of memory of one dtype on one device. Every parameter has a room in one bucket, and rank r
# owns
# the r-th of a bucket's shards. Where rooms and shards overlap are pieces: what a rank owns of a parameter.
#
#     bucket 0   |    shard of rank 0    |  shard of rank 1  |   shard of rank 2   |
#     whole      | p0 ....... | p3 ..... | p1 .............. | p2 .... | p4 . | p5 |
#     cut        | p0 ....... | p1 .....   p1 ..... | p2 ...   p2 | p3 .. | p4 | p5 |
#
# Rooms are kept, pieces are computed: with thousands of ranks there are many more of these.


T = TypeVar("T", int, float)


class BucketSlot(NamedTuple):
    """Where a parameter lies in its bucket: all elements of its memory, gaps that its strides leave included."""

    param: int
    span: Span


class ParamShard(NamedTuple):
    """What a rank owns of a parameter.

    `in_param` counts the elements of the parameter's memory; `in_bucket` is as long.
    """

    param: int
    in_param: Span
    bucket: int
    in_bucket: Span
    owner: Rank


@dataclass(frozen=True)
class Bucket:
    """One flat run of memory, divided into one shard a rank. Its rooms are in the order of their memory."""

    index: int
    dtype: torch.dtype
    device: torch.device
    numel: int
    shards: Shards
    slots: tuple[BucketSlot, ...]

    @property
    def has_equal_shards(self) -> bool:
        return isinstance(self.shards, EqualShards)

    @property
    def has_whole_params(self) -> bool:
        """Each parameter belongs to one rank."""
        return isinstance(self.shards, WholeParamShards)

    @cached_property
    def params(self) -> list[int]:
        return [room.param for room in self.slots]

    @cached_property
    def digest(self) -> bytes:
        """Equal for buckets with the same rooms and shards, on whichever device number."""
        numbers = array("q", [self.numel, len(self.slots)])
        for param, span in self.slots:
            numbers.extend((param, *span))
        kind = f"{self.dtype}@{self.device.type} {self.shards}"
        return hashlib.blake2b(numbers.tobytes() + kind.encode(), digest_size=16).digest()

    @property
    def param_shards(self) -> Iterator[ParamShard]:
        """Those of all ranks, in the order of their memory."""
        for room in self.slots:
            yield from self.param_shards_in_slot(room)

    def param_shards_in_slot(self, slot: BucketSlot) -> Iterator[ParamShard]:
        """What ranks own of one parameter."""
        last = self.shards.owner_at(max(slot.span.stop - 1, slot.span.start))
        for rank in range(self.shards.owner_at(slot.span.start), last + 1):
            piece = self.param_shard(slot, Rank(rank))
            if piece is not None:
                yield piece

    def numel_by_rank_range(self, slot: BucketSlot) -> Iterator[tuple[range, int]]:
        """Ranks that own as many elements of one parameter, and how many: the first, the last, those between."""
        start, stop = slot.span
        first, last = self.shards.owner_at(start), self.shards.owner_at(max(stop - 1, start))
        if first == last:
            yield range(first, first + 1), stop - start
            return
        yield range(first, first + 1), self.shards[first].stop - start
        yield range(first + 1, last), self.shards[first + 1].length
        yield range(last, last + 1), stop - self.shards[last].start

    def param_shards_of_rank(self, rank: Rank) -> Iterator[ParamShard]:
        """What one rank owns."""
        shard = self.shards[rank]
        first = bisect_left(self.slots, shard.start, key=lambda room: room.span.stop)
        for room in islice(self.slots, first, None):
            if room.span.start > shard.stop:
                return
            piece = self.param_shard(room, rank)
            if piece is not None:
                yield piece

    def param_shard(self, slot: BucketSlot, rank: Rank) -> ParamShard | None:
        """What a rank owns of a parameter. One without elements belongs to the rank in whose shard it lies."""
        shard, (start, stop) = self.shards[rank], slot.span
        mine = Span(max(start, shard.start), min(stop, shard.stop))
        if not (mine.length > 0 or (start == stop and self.shards.owner_at(start) == rank)):
            return None
        if start == stop:
            mine = slot.span
        return ParamShard(slot.param, Span(mine.start - start, mine.stop - start), self.index, mine, rank)


@dataclass(frozen=True)
class Layout:
    """All parameters, all buckets, checked when it is made."""

    world_size: int
    params: tuple[ParamSpec, ...]
    buckets: tuple[Bucket, ...]
    base: InitVar["Layout | None"] = None
    """The layout that this one extends. Its parameters and buckets come first and are not checked again."""

    def __post_init__(self, base: "Layout | None") -> None:
        for problem in self._find_problems(base):
            raise LayoutError(f"inconsistent layout: {problem}")
        # Reuse what is known of the base, so that adding a group costs as much as the group, not as the model.
        if base is not None and "_chained_digest" in vars(base):
            vars(self)["_chained_digest"] = _extend_digest(base._chained_digest, self.buckets[len(base.buckets) :])
        if base is not None and "_whole_param_numel" in vars(base):
            vars(self)["_whole_param_numel"] = self._add_whole_param_numel(
                base._whole_param_numel, self.buckets[len(base.buckets) :]
            )

    @staticmethod
    def empty(world_size: int) -> "Layout":
        return Layout(world_size, (), ())

    def params_owned_by(self, rank: Rank, *, first_bucket: int = 0) -> tuple[int, ...]:
        """Parameters that `rank` owns whole or in part, in order, from bucket `first_bucket` on."""
        buckets = islice(self.buckets, first_bucket, None)
        return tuple(sorted(piece.param for bucket in buckets for piece in bucket.param_shards_of_rank(rank)))

    def bucket_of(self, param: int) -> int:
        return self._locations[param][0]

    def has_trainable_params(self, bucket: int) -> bool:
        """Whether some parameter of a bucket is trained."""
        return any(self.params[param].trainable for param in self.buckets[bucket].params)

    def describe_bucket(self, index: int, contents: str) -> str:
        """What is under way, in words: `contents` of a bucket."""
        first, *others = (self.params[param].label for param in self.buckets[index].params)
        more = f" and {len(others)} more" if others else ""
        return f"{contents} of bucket {index} of {len(self.buckets)} ({first}{more})"

    def param_shards(self, param: int) -> tuple[ParamShard, ...]:
        """In the order of its elements."""
        bucket, room = self._locations[param]
        return tuple(self.buckets[bucket].param_shards_in_slot(room))

    def param_shard(self, param: int, rank: Rank) -> ParamShard | None:
        """What a rank owns of a parameter."""
        bucket, room = self._locations[param]
        return self.buckets[bucket].param_shard(room, rank)

    def owner_of(self, param: int) -> Rank:
        """The one rank that owns all of a parameter."""
        (piece,) = self.param_shards(param)
        return piece.owner

    def numel_per_rank(self, *, trainable: bool) -> list[int]:
        """Elements owned by each rank, of the trainable or of the frozen parameters."""

        def count(spec: ParamSpec, numel: int) -> int:
            counts = spec.trainable == trainable and spec.storage_numel
            return numel * spec.numel // spec.storage_numel if counts else 0  # gaps do not count

        return self.sum_per_rank(count)

    def sum_per_rank(self, value_of: Callable[[ParamSpec, int], T]) -> list[T]:
        """What each rank's elements are worth, given what so many elements of a parameter are.

        Ranks are not looked at one by one where many own as much of a parameter.
        """
        sums: list[Any] = [0] * self.world_size
        rises: list[Any] = [0] * (self.world_size + 1)
        for bucket in self.buckets:
            for room in bucket.slots:
                for ranks, elements in bucket.numel_by_rank_range(room):
                    value = value_of(self.params[room.param], elements)
                    if len(ranks) == 1:
                        sums[ranks[0]] += value
                    else:
                        rises[ranks.start] += value
                        rises[ranks.stop] -= value
        return [own + shared for own, shared in zip(sums, accumulate(rises[:-1]), strict=True)]

    @property
    def digest(self) -> str:
        """The same for layouts that put the same pieces into the same places, on whichever device numbers."""
        return self._chained_digest.hex()

    @cached_property
    def _chained_digest(self) -> bytes:
        return _extend_digest(self.world_size.to_bytes(8, "big"), self.buckets)

    def whole_param_numel_per_rank(self, *, trainable: bool) -> list[float]:
        """Elements of whole parameters that each rank was dealt, of the trainable or of the frozen ones."""
        return list(self._whole_param_numel[trainable])

    @cached_property
    def _whole_param_numel(self) -> tuple[list[int], list[int]]:
        """Of the frozen, of the trainable parameters."""
        return self._add_whole_param_numel(([0] * self.world_size, [0] * self.world_size), self.buckets)

    def _add_whole_param_numel(
        self, numel_per_rank: tuple[list[int], list[int]], buckets: Sequence[Bucket]
    ) -> tuple[list[int], list[int]]:
        frozen, trainable = map(list, numel_per_rank)
        for bucket in buckets:
            for param, span in bucket.slots if bucket.has_whole_params else ():
                spec = self.params[param]
                (trainable if spec.trainable else frozen)[bucket.shards.owner_at(span.start)] += spec.numel
        return frozen, trainable

    @cached_property
    def _locations(self) -> dict[int, tuple[int, BucketSlot]]:
        return {room.param: (bucket.index, room) for bucket in self.buckets for room in bucket.slots}

    def _find_problems(self, base: "Layout | None") -> Iterator[str]:
        """What contradicts itself. Only the first is sure to be right: each check relies on the ones before."""
        params, buckets = (0, 0) if base is None else (len(base.params), len(base.buckets))
        if (
            base is not None
            and (
                base.world_size != self.world_size
                or self.params[:params] != base.params  # quick, since tuples look for identity first
                or self.buckets[:buckets] != base.buckets
            )
        ):
            yield "it does not start with the layout that it extends"
        for index, spec in enumerate(self.params[params:], params):
            if spec.index != index:
                yield f"{spec.label} stands at place {index}"
        placed = bytearray(b"\1" * params + bytes(len(self.params) - params))
        for index, bucket in enumerate(self.buckets[buckets:], buckets):
            if bucket.index != index:
                yield f"bucket {bucket.index} stands at place {index}"
            yield from self._find_shard_problems(bucket)
            yield from self._find_slot_problems(bucket, placed)
        if 0 in placed:
            yield f"{self.params[placed.index(0)].label} has no room"

    def _find_shard_problems(self, bucket: Bucket) -> Iterator[str]:
        if len(bucket.shards) != self.world_size:
            yield f"bucket {bucket.index} has {len(bucket.shards)} shards for {self.world_size} ranks"
        for problem in bucket.shards.find_problems(bucket.numel):
            yield f"the shards of bucket {bucket.index} {problem}"

    def _find_slot_problems(self, bucket: Bucket, has_slot: bytearray) -> Iterator[str]:
        """`placed`: a flag for each parameter that has a room."""
        end = 0
        for param, span in bucket.slots:
            if not 0 <= param < len(self.params):
                yield f"there is no parameter {param}"
            spec = self.params[param]
            if has_slot[param]:
                yield f"{spec.label} has two rooms"
            if span.length != spec.storage_numel:
                yield f"{spec.label} has {spec.storage_numel} elements and a room for {span.length}"
            if not end <= span.start <= span.stop <= bucket.numel:
                yield f"{spec.label} does not fit its place in bucket {bucket.index}"
            if bucket.has_whole_params and not bucket.shards[bucket.shards.owner_at(span.start)].contains(span):
                yield f"{spec.label} does not fit one shard of bucket {bucket.index}"
            if spec.dtype != bucket.dtype or spec.device != bucket.device:
                yield f"{spec.label} is {spec.dtype} on {spec.device} in a bucket of {bucket.dtype} on {bucket.device}"
            end, has_slot[param] = span.stop, 1


def _extend_digest(digest: bytes, buckets: Sequence[Bucket]) -> bytes:
    """The digest of a layout with more buckets."""
    for bucket in buckets:
        digest = hashlib.blake2b(digest + bucket.digest, digest_size=16).digest()
    return digest
