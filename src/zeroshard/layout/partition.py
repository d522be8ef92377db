"""Strategies that make layouts."""

import heapq
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

from ..units import Rank, Span, align_up
from .layout import Bucket, Layout, Piece
from .specs import ParamSpec

ALIGNMENT = 64
"""Bytes: where a parameter starts in a bucket, for vector loads and cache lines."""


class Partitioner(Protocol):
    """Decides who owns new parameters, given a layout that stays as it is."""

    def extend(self, layout: Layout, specs: Sequence[ParamSpec]) -> Layout:
        """`layout` with `specs` placed in new buckets; no earlier piece moves."""
        ...


@dataclass(frozen=True)
class WholeParams:
    """Every parameter belongs to one rank: needed by optimizers that look at whole tensors.

    Group after group, from the largest parameter to the smallest, each goes to the rank with the least so far.
    Trainable and frozen parameters are balanced separately: a frozen one costs its owner no state.
    """

    def extend(self, layout: Layout, specs: Sequence[ParamSpec]) -> Layout:
        return place(layout, specs, deal(layout, specs))


@dataclass(frozen=True)
class AssignedOwners:
    """Whole parameters whose owner and bucket were decided elsewhere, by parameter index.

    What is not named there is dealt out as `WholeParams` does.
    """

    owners: Mapping[int, Rank]
    buckets: Mapping[int, int]

    def extend(self, layout: Layout, specs: Sequence[ParamSpec]) -> Layout:
        rest = [spec for spec in specs if spec.index not in self.owners]
        named = sorted((spec for spec in specs if spec.index in self.owners), key=self._bucket_of)
        owners = {**deal(layout, rest), **self.owners}
        return place(layout, [*named, *rest], owners, bucket_of=self._bucket_of)

    def _bucket_of(self, spec: ParamSpec) -> int:
        return self.buckets.get(spec.index, -1)


def deal(layout: Layout, specs: Sequence[ParamSpec]) -> dict[int, Rank]:
    """An owner for each new parameter; the loads of `layout` run on."""
    tallies = {trains: _Tally(layout.loads(trainable=trains)) for trains in (True, False)}
    owners: dict[int, Rank] = {}
    for _, group in groupby(specs, key=lambda spec: spec.group):
        for spec in sorted(group, key=lambda spec: -spec.numel):
            owners[spec.index] = tallies[spec.trainable].give(spec.numel)
    return owners


def place(
    layout: Layout,
    specs: Sequence[ParamSpec],
    owners: Mapping[int, Rank],
    *,
    bucket_of: Callable[[ParamSpec], Hashable] = lambda _: None,
) -> Layout:
    """`layout` and new buckets: one for each key of `bucket_of`, dtype and device, in order of appearance."""
    kinds: dict[Hashable, list[ParamSpec]] = defaultdict(list)
    for spec in specs:
        kinds[bucket_of(spec), spec.dtype, spec.device].append(spec)
    first = len(layout.buckets)
    buckets = [_bucket(index, kind, owners, layout.world_size) for index, kind in enumerate(kinds.values(), first)]
    params = tuple(sorted((*layout.params, *specs), key=lambda spec: spec.index))
    return Layout(layout.world_size, params, (*layout.buckets, *buckets))


def _bucket(index: int, specs: Sequence[ParamSpec], owners: Mapping[int, Rank], world_size: int) -> Bucket:
    step = max(1, ALIGNMENT // specs[0].dtype.itemsize)
    queues: list[list[ParamSpec]] = [[] for _ in range(world_size)]
    for spec in specs:
        queues[owners[spec.index]].append(spec)
    shards: list[Span] = []
    pieces: list[Piece] = []
    end = 0
    for rank, queue in enumerate(queues):
        start = end
        # Frozen ones last: what travels is then one run.
        for spec in sorted(queue, key=lambda spec: not spec.trainable):
            room = Span(end, end + spec.extent)
            pieces.append(Piece(spec.index, Span(0, spec.numel), index, room, Rank(rank)))
            end = align_up(room.stop, step)
        shards.append(Span(start, end))
    return Bucket(index, specs[0].dtype, specs[0].device, end, tuple(shards), tuple(pieces))


class _Tally:
    """Who has the least so far; ties go to the lowest rank."""

    def __init__(self, loads: Iterable[int]) -> None:
        self._heap = [(load, rank) for rank, load in enumerate(loads)]
        heapq.heapify(self._heap)

    def give(self, elements: int) -> Rank:
        load, rank = self._heap[0]
        heapq.heapreplace(self._heap, (load + elements, rank))
        return Rank(rank)
