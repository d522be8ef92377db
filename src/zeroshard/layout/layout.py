"""Layout: an immutable description of which rank owns which span of which parameter, and where it lies.

A bucket is one flat buffer of one dtype on one device. Each parameter has one slot in one bucket, and rank r owns the
r-th shard of every bucket. The overlap of a slot and a shard is a `ParamShard`: what a rank owns of a parameter. ::

    bucket 0       |    shard of rank 0    |  shard of rank 1  |   shard of rank 2   |
    whole params   | p0 ....... | p3 ..... | p1 .............. | p2 .... | p4 . | p5 |
    flat shards    | p0 ....... | p1 .....   p1 ..... | p2 ...   p2 | p3 .. | p4 | p5 |

A layout stores slots and computes param shards on demand: with thousands of ranks there are many more of the latter.
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

from .._formatting import format_names
from .._types import Rank, Span
from ..errors import LayoutError
from .spec import ParamSpec

# ---------------------------------------------------------------------------------------------------------------------
# Shards of a bucket: one span per rank.


class Shards(Sequence[Span]):
    """One span per rank, in rank order. Memory use does not depend on the number of ranks."""

    @property
    def are_equal(self) -> bool:
        """Whether all shards have the same length, except those that a bucket without its padding cuts off."""
        return False

    @property
    def hold_whole_params(self) -> bool:
        """Whether each parameter belongs to exactly one rank."""
        return False

    @abstractmethod
    def owner_at(self, offset: int) -> Rank:
        """Return the rank whose shard contains `offset`."""

    @abstractmethod
    def non_empty(self) -> Iterable[tuple[Rank, Span]]:
        """Yield ranks with a non-empty shard, in rank order. There may be few of them."""

    @abstractmethod
    def truncate(self, stop: int) -> "Shards":
        """Return the same shards, cut off at `stop`."""

    @abstractmethod
    def find_problems(self, numel: int) -> Iterator[str]:
        """Yield the reasons why the shards do not cover a bucket of `numel` elements."""

    @abstractmethod
    def _span_of(self, rank: int) -> Span: ...

    @overload
    def __getitem__(self, rank: int) -> Span: ...
    @overload
    def __getitem__(self, rank: slice) -> list[Span]: ...
    def __getitem__(self, rank: int | slice) -> Span | list[Span]:
        if isinstance(rank, slice):
            return [self._span_of(index) for index in range(*rank.indices(len(self)))]
        if not 0 <= rank < len(self):
            raise IndexError(f"there is no rank {rank}")
        return self._span_of(rank)


@dataclass(frozen=True)
class EqualShards(Shards):
    """Shards of equal length, except those that would end beyond `stop`."""

    shard_numel: int
    world_size: int
    stop: int

    @property
    def are_equal(self) -> bool:
        return True

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
    """Shards of any lengths. Ranks that are not listed own nothing."""

    spans: Mapping[Rank, Span]
    """In rank order, adjacent."""
    world_size: int

    def owner_at(self, offset: int) -> Rank:
        position = bisect_right(self._starts, offset) - 1
        return self._ranks[max(position, 0)] if self._ranks else Rank(0)

    def non_empty(self) -> Iterable[tuple[Rank, Span]]:
        return ((rank, shard) for rank, shard in self.spans.items() if shard.length)

    def truncate(self, stop: int) -> "ExplicitShards":
        return replace(
            self, spans={rank: Span(min(first, stop), min(last, stop)) for rank, (first, last) in self.spans.items()}
        )

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
    """Each shard holds whole parameters: none is split between ranks."""

    @property
    def hold_whole_params(self) -> bool:
        return True


class AlignedShards(ExplicitShards):
    """Shards of nearly equal length that end where the optimizer allows a parameter to be split."""


# ---------------------------------------------------------------------------------------------------------------------
# Buckets and the layout that they make up.


T = TypeVar("T", int, float)


class BucketSlot(NamedTuple):
    """Where a parameter lies in its bucket. The span covers all its memory, including gaps between its strides."""

    param: int
    span: Span


class ParamShard(NamedTuple):
    """The part of a parameter that one rank owns.

    `in_param` is a span of the parameter's memory, `in_bucket` the same elements in the bucket.
    """

    param: int
    in_param: Span
    bucket: int
    in_bucket: Span
    owner: Rank


@dataclass(frozen=True)
class Bucket:
    """A flat buffer, divided into one shard per rank. Slots are in memory order."""

    index: int
    dtype: torch.dtype
    device: torch.device
    numel: int
    shards: Shards
    slots: tuple[BucketSlot, ...]

    @property
    def has_equal_shards(self) -> bool:
        return self.shards.are_equal

    @property
    def has_whole_params(self) -> bool:
        """Whether each parameter belongs to exactly one rank."""
        return self.shards.hold_whole_params

    @cached_property
    def params(self) -> list[int]:
        return [slot.param for slot in self.slots]

    @cached_property
    def digest(self) -> bytes:
        """A hash that is equal for buckets with equal slots and shards. The device index does not count."""
        numbers = array("q", [self.numel, len(self.slots)])
        for param, span in self.slots:
            numbers.extend((param, *span))
        text = f"{self.dtype}@{self.device.type} {self.shards}"
        return hashlib.blake2b(numbers.tobytes() + text.encode(), digest_size=16).digest()

    @property
    def param_shards(self) -> Iterator[ParamShard]:
        """The param shards of all ranks, in memory order."""
        for slot in self.slots:
            yield from self.param_shards_in_slot(slot)

    def param_shards_in_slot(self, slot: BucketSlot) -> Iterator[ParamShard]:
        """Yield the shards of one parameter, in rank order."""
        last = self.shards.owner_at(max(slot.span.stop - 1, slot.span.start))
        for rank in range(self.shards.owner_at(slot.span.start), last + 1):
            param_shard = self.param_shard(slot, Rank(rank))
            if param_shard is not None:
                yield param_shard

    def numel_by_rank_range(self, slot: BucketSlot) -> Iterator[tuple[range, int]]:
        """Yield ranges of ranks that own equally many elements of one parameter, and that number.

        These are the first rank, the ranks in between and the last one.
        """
        start, stop = slot.span
        first, last = self.shards.owner_at(start), self.shards.owner_at(max(stop - 1, start))
        if first == last:
            yield range(first, first + 1), stop - start
            return
        yield range(first, first + 1), self.shards[first].stop - start
        yield range(first + 1, last), self.shards[first + 1].length
        yield range(last, last + 1), stop - self.shards[last].start

    def param_shards_of_rank(self, rank: Rank) -> Iterator[ParamShard]:
        """Yield what one rank owns, in memory order."""
        shard = self.shards[rank]
        first = bisect_left(self.slots, shard.start, key=lambda slot: slot.span.stop)
        for slot in islice(self.slots, first, None):
            if slot.span.start > shard.stop:
                return
            param_shard = self.param_shard(slot, rank)
            if param_shard is not None:
                yield param_shard

    def param_shard(self, slot: BucketSlot, rank: Rank) -> ParamShard | None:
        """Return what `rank` owns of a parameter. A parameter without elements belongs to the rank at its offset."""
        shard, (start, stop) = self.shards[rank], slot.span
        owned = Span(max(start, shard.start), min(stop, shard.stop))
        if not (owned.length > 0 or (start == stop and self.shards.owner_at(start) == rank)):
            return None
        if start == stop:
            owned = slot.span
        return ParamShard(slot.param, Span(owned.start - start, owned.stop - start), self.index, owned, rank)


@dataclass(frozen=True)
class Layout:
    """All parameters and buckets of an optimizer. Raises `LayoutError` at construction if they are inconsistent."""

    world_size: int
    params: tuple[ParamSpec, ...]
    buckets: tuple[Bucket, ...]
    base: InitVar["Layout | None"] = None
    """The layout that this one extends. Its parameters and buckets come first and are not validated again."""

    def __post_init__(self, base: "Layout | None") -> None:
        for problem in self._find_problems(base):
            raise LayoutError(f"inconsistent layout: {problem}")
        # Reuse the cached values of the base: adding a group then costs as much as the group, not as the model.
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
        """Return the parameters that `rank` owns at least partly, sorted, from bucket `first_bucket` on."""
        buckets = islice(self.buckets, first_bucket, None)
        return tuple(sorted(shard.param for bucket in buckets for shard in bucket.param_shards_of_rank(rank)))

    def bucket_of(self, param: int) -> int:
        return self._locations[param][0]

    def has_trainable_params(self, bucket: int) -> bool:
        return any(self.params[param].trainable for param in self.buckets[bucket].params)

    def describe_bucket(self, index: int, contents: str) -> str:
        """Describe `contents` of a bucket for error messages about work in flight."""
        names = format_names([self.params[param].label for param in self.buckets[index].params], 1)
        return f"{contents} of bucket {index} of {len(self.buckets)} ({names})"

    def param_shards(self, param: int) -> tuple[ParamShard, ...]:
        """Return the shards of a parameter, in the order of its elements."""
        bucket, slot = self._locations[param]
        return tuple(self.buckets[bucket].param_shards_in_slot(slot))

    def param_shard(self, param: int, rank: Rank) -> ParamShard | None:
        """Return what `rank` owns of a parameter, or None."""
        bucket, slot = self._locations[param]
        return self.buckets[bucket].param_shard(slot, rank)

    def owner_of(self, param: int) -> Rank:
        """Return the owner of a parameter that is not split."""
        (param_shard,) = self.param_shards(param)
        return param_shard.owner

    def numel_per_rank(self, *, trainable: bool) -> list[int]:
        """Return how many elements each rank owns of the trainable, or of the frozen, parameters."""

        def count(spec: ParamSpec, numel: int) -> int:
            counts = spec.trainable == trainable and spec.storage_numel
            return numel * spec.numel // spec.storage_numel if counts else 0  # gaps do not count

        return self.sum_per_rank(count)

    def sum_per_rank(self, value_of: Callable[[ParamSpec, int], T]) -> list[T]:
        """Sum `value_of(spec, numel)` over all that each rank owns.

        Ranks that own equally much of a parameter are handled as a range, not one by one.
        """
        sums: list[Any] = [0] * self.world_size
        deltas: list[Any] = [0] * (self.world_size + 1)
        for bucket in self.buckets:
            for slot in bucket.slots:
                for ranks, numel in bucket.numel_by_rank_range(slot):
                    value = value_of(self.params[slot.param], numel)
                    if len(ranks) == 1:
                        sums[ranks[0]] += value
                    else:
                        deltas[ranks.start] += value
                        deltas[ranks.stop] -= value
        return [own + shared for own, shared in zip(sums, accumulate(deltas[:-1]), strict=True)]

    @property
    def digest(self) -> str:
        """A hash that is equal for layouts with equal buckets. Device indices do not count."""
        return self._chained_digest.hex()

    @cached_property
    def _chained_digest(self) -> bytes:
        return _extend_digest(self.world_size.to_bytes(8, "big"), self.buckets)

    def whole_param_numel_per_rank(self, *, trainable: bool) -> list[float]:
        """Return how many elements of unsplit trainable, or frozen, parameters each rank owns."""
        return list(self._whole_param_numel[trainable])

    @cached_property
    def _whole_param_numel(self) -> tuple[list[int], list[int]]:
        """Per rank, of the frozen and of the trainable parameters."""
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
        return {slot.param: (bucket.index, slot) for bucket in self.buckets for slot in bucket.slots}

    def _find_problems(self, base: "Layout | None") -> Iterator[str]:
        """Yield inconsistencies. Only the first is reliable: each check assumes that those before it passed."""
        params, buckets = (0, 0) if base is None else (len(base.params), len(base.buckets))
        if (
            base is not None
            and (
                base.world_size != self.world_size
                or self.params[:params] != base.params  # fast: tuples compare identity first
                or self.buckets[:buckets] != base.buckets
            )
        ):
            yield "it does not start with the layout that it extends"
        for index, spec in enumerate(self.params[params:], params):
            if spec.index != index:
                yield f"{spec.label} stands at place {index}"
        has_slot = bytearray(b"\1" * params + bytes(len(self.params) - params))
        for index, bucket in enumerate(self.buckets[buckets:], buckets):
            if bucket.index != index:
                yield f"bucket {bucket.index} stands at place {index}"
            yield from self._find_shard_problems(bucket)
            yield from self._find_slot_problems(bucket, has_slot)
        if 0 in has_slot:
            yield f"{self.params[has_slot.index(0)].label} has no slot"

    def _find_shard_problems(self, bucket: Bucket) -> Iterator[str]:
        if len(bucket.shards) != self.world_size:
            yield f"bucket {bucket.index} has {len(bucket.shards)} shards for {self.world_size} ranks"
        for problem in bucket.shards.find_problems(bucket.numel):
            yield f"the shards of bucket {bucket.index} {problem}"

    def _find_slot_problems(self, bucket: Bucket, has_slot: bytearray) -> Iterator[str]:
        """Yield problems of a bucket's slots. `has_slot` has a flag per parameter, which this sets."""
        end = 0
        for param, span in bucket.slots:
            if not 0 <= param < len(self.params):
                yield f"there is no parameter {param}"
            spec = self.params[param]
            if has_slot[param]:
                yield f"{spec.label} has two slots"
            if span.length != spec.storage_numel:
                yield f"{spec.label} has {spec.storage_numel} elements and a slot of {span.length}"
            if not end <= span.start <= span.stop <= bucket.numel:
                yield f"{spec.label} does not fit its place in bucket {bucket.index}"
            if bucket.has_whole_params and not bucket.shards[bucket.shards.owner_at(span.start)].contains(span):
                yield f"{spec.label} does not fit one shard of bucket {bucket.index}"
            if spec.dtype != bucket.dtype or spec.device != bucket.device:
                yield f"{spec.label} is {spec.dtype} on {spec.device} in a bucket of {bucket.dtype} on {bucket.device}"
            end, has_slot[param] = span.stop, 1


def _extend_digest(digest: bytes, buckets: Sequence[Bucket]) -> bytes:
    """Return the digest of a layout after appending `buckets`."""
    for bucket in buckets:
        digest = hashlib.blake2b(digest + bucket.digest, digest_size=16).digest()
    return digest
