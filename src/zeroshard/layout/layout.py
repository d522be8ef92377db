"""The frozen answer to: which rank owns which span of which parameter, and where does it lie.

A bucket is one flat run of memory of one dtype on one device. Rank r owns the r-th of its shards.
A piece puts a span of a parameter into a shard; a parameter is the sum of its pieces.

    bucket 0   |    shard of rank 0    |  shard of rank 1  |   shard of rank 2   |
    whole      | p0 ....... | p3 ..... | p1 .............. | p2 .... | p4 . | p5 |
    cut        | p0 ....... | p1 .....   p1 ..... | p2 ...   p2 | p3 .. | p4 | p5 |
"""

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch

from ..errors import LayoutError
from ..units import Rank, Span
from .specs import ParamSpec


class Piece(NamedTuple):
    """A span of a parameter, and the place of its memory in a bucket.

    `in_param` counts the elements of the parameter's memory, gaps that its strides leave included; `in_bucket` is as
    long.
    """

    param: int
    in_param: Span
    bucket: int
    in_bucket: Span
    owner: Rank


@dataclass(frozen=True)
class Bucket:
    """One flat run of memory, divided into one shard a rank. Its pieces are in the order of their memory."""

    index: int
    dtype: torch.dtype
    device: torch.device
    numel: int
    shards: tuple[Span, ...]
    pieces: tuple[Piece, ...]

    @cached_property
    def has_equal_shards(self) -> bool:
        return len({shard.length for shard in self.shards}) <= 1


@dataclass(frozen=True)
class Layout:
    """All parameters, all buckets, checked when it is made."""

    world_size: int
    params: tuple[ParamSpec, ...]
    buckets: tuple[Bucket, ...]

    def __post_init__(self) -> None:
        for problem in self._problems():
            raise LayoutError(f"inconsistent layout: {problem}")

    @staticmethod
    def empty(world_size: int) -> "Layout":
        return Layout(world_size, (), ())

    @cached_property
    def pieces_by_param(self) -> tuple[tuple[Piece, ...], ...]:
        """The pieces of each parameter, in the order of its elements."""
        found: list[list[Piece]] = [[] for _ in self.params]
        for piece in self._pieces():
            found[piece.param].append(piece)
        return tuple(tuple(sorted(pieces, key=lambda piece: piece.in_param)) for pieces in found)

    def owned_by(self, rank: Rank) -> tuple[int, ...]:
        """Parameters of which `rank` owns at least a piece, in order."""
        return tuple(
            index for index, pieces in enumerate(self.pieces_by_param) if any(piece.owner == rank for piece in pieces)
        )

    def piece_of(self, param: int, rank: Rank) -> Piece | None:
        """What a rank owns of a parameter."""
        return next((piece for piece in self.pieces_by_param[param] if piece.owner == rank), None)

    def owner_of(self, param: int) -> Rank:
        """The one rank that owns all of a parameter."""
        (piece,) = self.pieces_by_param[param]
        return piece.owner

    def loads(self, *, trainable: bool) -> list[int]:
        """Elements owned by each rank, of the trainable or of the frozen parameters."""
        loads = [0] * self.world_size
        for piece in self._pieces():
            spec = self.params[piece.param]
            if spec.trainable == trainable and spec.extent:
                loads[piece.owner] += piece.in_param.length * spec.numel // spec.extent  # gaps do not count
        return loads

    @cached_property
    def digest(self) -> str:
        """The same for layouts that put the same pieces into the same places, on whichever device numbers."""
        numbers = array("q", [self.world_size])
        for bucket in self.buckets:
            numbers.extend((bucket.numel, len(bucket.pieces)))
            for piece in bucket.pieces:
                numbers.extend((piece.param, *piece.in_param, *piece.in_bucket, piece.owner))
        kinds = ",".join(f"{bucket.dtype}@{bucket.device.type}" for bucket in self.buckets)
        return hashlib.blake2b(numbers.tobytes() + kinds.encode(), digest_size=16).hexdigest()

    def _pieces(self) -> Iterator[Piece]:
        for bucket in self.buckets:
            yield from bucket.pieces

    def _problems(self) -> Iterator[str]:
        """What contradicts itself. Only the first is sure to be right: each check relies on the ones before."""
        for index, spec in enumerate(self.params):
            if spec.index != index:
                yield f"{spec.label} stands at place {index}"
        for index, bucket in enumerate(self.buckets):
            if bucket.index != index:
                yield f"bucket {bucket.index} stands at place {index}"
            yield from self._misplaced_shards(bucket)
            yield from self._misplaced_pieces(bucket)
        for spec, pieces in zip(self.params, self.pieces_by_param, strict=True):
            yield from _uncovered(spec, pieces)

    def _misplaced_shards(self, bucket: Bucket) -> Iterator[str]:
        if len(bucket.shards) != self.world_size:
            yield f"bucket {bucket.index} has {len(bucket.shards)} shards for {self.world_size} ranks"
        edges = [0, *(edge for shard in bucket.shards for edge in shard), bucket.numel]
        if any(a > b for a, b in pairwise(edges)):
            yield f"the shards of bucket {bucket.index} are out of order"

    def _misplaced_pieces(self, bucket: Bucket) -> Iterator[str]:
        end = 0
        for piece in bucket.pieces:
            if not 0 <= piece.param < len(self.params):
                yield f"there is no parameter {piece.param}"
            if not 0 <= piece.owner < self.world_size:
                yield f"there is no rank {piece.owner}"
            spec = self.params[piece.param]
            if piece.bucket != bucket.index:
                yield f"{spec.label} is listed in bucket {bucket.index} and meant for {piece.bucket}"
            if piece.in_bucket.start < end or not bucket.shards[piece.owner].holds(piece.in_bucket):
                yield f"{spec.label} does not fit its place in bucket {bucket.index}"
            if spec.dtype != bucket.dtype or spec.device != bucket.device:
                yield f"{spec.label} is {spec.dtype} on {spec.device} in a bucket of {bucket.dtype} on {bucket.device}"
            end = piece.in_bucket.stop


def _uncovered(spec: ParamSpec, pieces: Sequence[Piece]) -> Iterator[str]:
    end = 0
    for piece in pieces:
        if piece.in_param.start != end:
            yield f"{spec.label} has a gap or an overlap at element {end}"
        if len(pieces) > 1 and piece.in_param.length < 1:
            yield f"{spec.label} has an empty piece"
        if piece.in_bucket.length != piece.in_param.length:
            yield f"{spec.label} has a place of the wrong size"
        end = piece.in_param.stop
    if not pieces or end != spec.extent:
        yield f"{spec.label} is not covered from element {end} on"
