"""The frozen answer to: which rank owns which span of which parameter, and where does it lie.

A bucket is one flat run of memory of one dtype on one device. Every parameter has a room in one bucket, and rank r owns
the r-th of a bucket's shards. Where rooms and shards overlap are pieces: what a rank owns of a parameter.

    bucket 0   |    shard of rank 0    |  shard of rank 1  |   shard of rank 2   |
    whole      | p0 ....... | p3 ..... | p1 .............. | p2 .... | p4 . | p5 |
    cut        | p0 ....... | p1 .....   p1 ..... | p2 ...   p2 | p3 .. | p4 | p5 |

Rooms are kept, pieces are computed: with thousands of ranks there are many more of these.
"""

import hashlib
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import InitVar, dataclass
from functools import cached_property
from itertools import accumulate, islice
from typing import Any, NamedTuple, TypeVar

import torch

from ..errors import LayoutError
from ..units import Rank, Span
from .shards import DealtShards, EqualShards, Shards
from .specs import ParamSpec

T = TypeVar("T", int, float)


class Room(NamedTuple):
    """Where a parameter lies in its bucket: all elements of its memory, gaps that its strides leave included."""

    param: int
    span: Span


class Piece(NamedTuple):
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
    rooms: tuple[Room, ...]

    @property
    def has_equal_shards(self) -> bool:
        return isinstance(self.shards, EqualShards)

    @property
    def is_dealt(self) -> bool:
        """Each parameter belongs to one rank."""
        return isinstance(self.shards, DealtShards)

    @cached_property
    def params(self) -> list[int]:
        return [room.param for room in self.rooms]

    @cached_property
    def digest(self) -> bytes:
        """Equal for buckets with the same rooms and shards, on whichever device number."""
        numbers = array("q", [self.numel, len(self.rooms)])
        for param, span in self.rooms:
            numbers.extend((param, *span))
        kind = f"{self.dtype}@{self.device.type} {self.shards}"
        return hashlib.blake2b(numbers.tobytes() + kind.encode(), digest_size=16).digest()

    @property
    def pieces(self) -> Iterator[Piece]:
        """Those of all ranks, in the order of their memory."""
        for room in self.rooms:
            yield from self.pieces_in(room)

    def pieces_in(self, room: Room) -> Iterator[Piece]:
        """What ranks own of one parameter."""
        last = self.shards.holder(max(room.span.stop - 1, room.span.start))
        for rank in range(self.shards.holder(room.span.start), last + 1):
            piece = self.piece(room, Rank(rank))
            if piece is not None:
                yield piece

    def shares(self, room: Room) -> Iterator[tuple[range, int]]:
        """Ranks that own as many elements of one parameter, and how many: the first, the last, those between."""
        start, stop = room.span
        first, last = self.shards.holder(start), self.shards.holder(max(stop - 1, start))
        if first == last:
            yield range(first, first + 1), stop - start
            return
        yield range(first, first + 1), self.shards[first].stop - start
        yield range(first + 1, last), self.shards[first + 1].length
        yield range(last, last + 1), stop - self.shards[last].start

    def pieces_of(self, rank: Rank) -> Iterator[Piece]:
        """What one rank owns."""
        shard = self.shards[rank]
        first = bisect_left(self.rooms, shard.start, key=lambda room: room.span.stop)
        for room in islice(self.rooms, first, None):
            if room.span.start > shard.stop:
                return
            piece = self.piece(room, rank)
            if piece is not None:
                yield piece

    def piece(self, room: Room, rank: Rank) -> Piece | None:
        """What a rank owns of a parameter. One without elements belongs to the rank in whose shard it lies."""
        shard, (start, stop) = self.shards[rank], room.span
        mine = Span(max(start, shard.start), min(stop, shard.stop))
        if not (mine.length > 0 or (start == stop and self.shards.holder(start) == rank)):
            return None
        if start == stop:
            mine = room.span
        return Piece(room.param, Span(mine.start - start, mine.stop - start), self.index, mine, rank)


@dataclass(frozen=True)
class Layout:
    """All parameters, all buckets, checked when it is made."""

    world_size: int
    params: tuple[ParamSpec, ...]
    buckets: tuple[Bucket, ...]
    base: InitVar["Layout | None"] = None
    """The layout that this one extends. Its parameters and buckets come first and are not checked again."""

    def __post_init__(self, base: "Layout | None") -> None:
        for problem in self._problems(base):
            raise LayoutError(f"inconsistent layout: {problem}")
        # Reuse what is known of the base, so that adding a group costs as much as the group, not as the model.
        if base is not None and "_chained_digest" in vars(base):
            vars(self)["_chained_digest"] = _chain(base._chained_digest, self.buckets[len(base.buckets) :])
        if base is not None and "_dealt" in vars(base):
            vars(self)["_dealt"] = self._deal_out(base._dealt, self.buckets[len(base.buckets) :])

    @staticmethod
    def empty(world_size: int) -> "Layout":
        return Layout(world_size, (), ())

    def owned_by(self, rank: Rank, *, first_bucket: int = 0) -> tuple[int, ...]:
        """Parameters that `rank` owns whole or in part, in order, from bucket `first_bucket` on."""
        buckets = islice(self.buckets, first_bucket, None)
        return tuple(sorted(piece.param for bucket in buckets for piece in bucket.pieces_of(rank)))

    def bucket_of(self, param: int) -> int:
        return self._homes[param][0]

    def trains(self, bucket: int) -> bool:
        """Whether some parameter of a bucket is trained."""
        return any(self.params[param].trainable for param in self.buckets[bucket].params)

    def name_bucket(self, index: int, contents: str) -> str:
        """What is under way, in words: `contents` of a bucket."""
        first, *others = (self.params[param].label for param in self.buckets[index].params)
        more = f" and {len(others)} more" if others else ""
        return f"{contents} of bucket {index} of {len(self.buckets)} ({first}{more})"

    def pieces_of_param(self, param: int) -> tuple[Piece, ...]:
        """In the order of its elements."""
        bucket, room = self._homes[param]
        return tuple(self.buckets[bucket].pieces_in(room))

    def piece_of(self, param: int, rank: Rank) -> Piece | None:
        """What a rank owns of a parameter."""
        bucket, room = self._homes[param]
        return self.buckets[bucket].piece(room, rank)

    def owner_of(self, param: int) -> Rank:
        """The one rank that owns all of a parameter."""
        (piece,) = self.pieces_of_param(param)
        return piece.owner

    def loads(self, *, trainable: bool) -> list[int]:
        """Elements owned by each rank, of the trainable or of the frozen parameters."""

        def load(spec: ParamSpec, elements: int) -> int:
            counts = spec.trainable == trainable and spec.extent
            return elements * spec.numel // spec.extent if counts else 0  # gaps do not count

        return self.tally(load)

    def tally(self, worth: Callable[[ParamSpec, int], T]) -> list[T]:
        """What each rank's elements are worth, given what so many elements of a parameter are.

        Ranks are not looked at one by one where many own as much of a parameter.
        """
        sums: list[Any] = [0] * self.world_size
        rises: list[Any] = [0] * (self.world_size + 1)
        for bucket in self.buckets:
            for room in bucket.rooms:
                for ranks, elements in bucket.shares(room):
                    value = worth(self.params[room.param], elements)
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
        return _chain(self.world_size.to_bytes(8, "big"), self.buckets)

    def dealt(self, *, trainable: bool) -> list[float]:
        """Elements of whole parameters that each rank was dealt, of the trainable or of the frozen ones."""
        return list(self._dealt[trainable])

    @cached_property
    def _dealt(self) -> tuple[list[int], list[int]]:
        """Of the frozen, of the trainable parameters."""
        return self._deal_out(([0] * self.world_size, [0] * self.world_size), self.buckets)

    def _deal_out(self, loads: tuple[list[int], list[int]], buckets: Sequence[Bucket]) -> tuple[list[int], list[int]]:
        frozen, trainable = map(list, loads)
        for bucket in buckets:
            for param, span in bucket.rooms if bucket.is_dealt else ():
                spec = self.params[param]
                (trainable if spec.trainable else frozen)[bucket.shards.holder(span.start)] += spec.numel
        return frozen, trainable

    @cached_property
    def _homes(self) -> dict[int, tuple[int, Room]]:
        return {room.param: (bucket.index, room) for bucket in self.buckets for room in bucket.rooms}

    def _problems(self, base: "Layout | None") -> Iterator[str]:
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
            yield from self._misplaced_shards(bucket)
            yield from self._misplaced_rooms(bucket, placed)
        if 0 in placed:
            yield f"{self.params[placed.index(0)].label} has no room"

    def _misplaced_shards(self, bucket: Bucket) -> Iterator[str]:
        if len(bucket.shards) != self.world_size:
            yield f"bucket {bucket.index} has {len(bucket.shards)} shards for {self.world_size} ranks"
        for problem in bucket.shards.problems(bucket.numel):
            yield f"the shards of bucket {bucket.index} {problem}"

    def _misplaced_rooms(self, bucket: Bucket, placed: bytearray) -> Iterator[str]:
        """`placed`: a flag for each parameter that has a room."""
        end = 0
        for param, span in bucket.rooms:
            if not 0 <= param < len(self.params):
                yield f"there is no parameter {param}"
            spec = self.params[param]
            if placed[param]:
                yield f"{spec.label} has two rooms"
            if span.length != spec.extent:
                yield f"{spec.label} has {spec.extent} elements and a room for {span.length}"
            if not end <= span.start <= span.stop <= bucket.numel:
                yield f"{spec.label} does not fit its place in bucket {bucket.index}"
            if bucket.is_dealt and not bucket.shards[bucket.shards.holder(span.start)].holds(span):
                yield f"{spec.label} does not fit one shard of bucket {bucket.index}"
            if spec.dtype != bucket.dtype or spec.device != bucket.device:
                yield f"{spec.label} is {spec.dtype} on {spec.device} in a bucket of {bucket.dtype} on {bucket.device}"
            end, placed[param] = span.stop, 1


def _chain(digest: bytes, buckets: Sequence[Bucket]) -> bytes:
    """The digest of a layout with more buckets."""
    for bucket in buckets:
        digest = hashlib.blake2b(digest + bucket.digest, digest_size=16).digest()
    return digest
