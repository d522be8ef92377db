"""The frozen answer to: which rank owns which span of which parameter, and where does it lie.

A bucket is one flat run of memory of one dtype on one device. Rank r owns the r-th of its shards.
A piece puts a span of a parameter into a shard; a parameter is the sum of its pieces.

    bucket 0   |    shard of rank 0    |  shard of rank 1  |   shard of rank 2   |
    pieces     | p0 ....... | p3 ..... | p1 .............. | p2 .... | p4 . | p5 |
"""

import hashlib
from array import array
from collections.abc import Iterable
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

    `in_param` counts elements. `in_bucket` is as long, or longer for a whole parameter whose strides leave gaps.
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


@dataclass(frozen=True)
class Layout:
    """All parameters, all buckets, checked when it is made."""

    world_size: int
    params: tuple[ParamSpec, ...]
    buckets: tuple[Bucket, ...]

    def __post_init__(self) -> None:
        for index, spec in enumerate(self.params):
            _require(spec.index == index, f"{spec.label} stands at place {index}")
        for index, bucket in enumerate(self.buckets):
            _require(bucket.index == index, f"bucket {bucket.index} stands at place {index}")
            self._check_bucket(bucket)
        self._check_cover()

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

    def owner_of(self, param: int) -> Rank:
        """The one rank that owns all of a parameter."""
        (piece,) = self.pieces_by_param[param]
        return piece.owner

    def loads(self, *, trainable: bool) -> list[int]:
        """Elements owned by each rank, of the trainable or of the frozen parameters."""
        loads = [0] * self.world_size
        for piece in self._pieces():
            if self.params[piece.param].trainable == trainable:
                loads[piece.owner] += piece.in_param.length
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

    def _pieces(self) -> Iterable[Piece]:
        for bucket in self.buckets:
            yield from bucket.pieces

    def _check_bucket(self, bucket: Bucket) -> None:
        _require(len(bucket.shards) == self.world_size, f"bucket {bucket.index} has {len(bucket.shards)} shards")
        edges = [0, *(edge for shard in bucket.shards for edge in shard), bucket.numel]
        _require(all(a <= b for a, b in pairwise(edges)), f"the shards of bucket {bucket.index} are out of order")
        end = 0
        for piece in bucket.pieces:
            spec = self.params[piece.param]
            fits = bucket.shards[piece.owner].holds(piece.in_bucket) and piece.in_bucket.start >= end
            _require(fits, f"{spec.label} does not fit its place in bucket {bucket.index}")
            _require(piece.bucket == bucket.index, f"{spec.label} is listed in the wrong bucket")
            _require(spec.dtype == bucket.dtype, f"{spec.label} is {spec.dtype} in a bucket of {bucket.dtype}")
            end = piece.in_bucket.stop

    def _check_cover(self) -> None:
        for spec, pieces in zip(self.params, self.pieces_by_param, strict=True):
            end = 0
            for piece in pieces:
                _require(piece.in_param.start == end, f"{spec.label} has a gap or an overlap at element {end}")
                whole = piece.in_param == Span(0, spec.numel)
                room = spec.extent if whole else piece.in_param.length
                _require(piece.in_bucket.length == room, f"{spec.label} has a place of the wrong size")
                end = piece.in_param.stop
            _require(bool(pieces) and end == spec.numel, f"{spec.label} is not covered from element {end} on")


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise LayoutError(f"inconsistent layout: {problem}")
