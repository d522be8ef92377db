"""Strategies that make layouts."""

import heapq
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import torch

from ..errors import ConfigError
from ..units import MIB, Rank, Span, align_up
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


@dataclass(frozen=True)
class FlatShards:
    """Every rank owns an equal slice of every bucket; a parameter may be cut anywhere.

    Buckets hold parameters of one dtype and device in the order in which backward is expected to finish them: the
    reverse of that of the model, as far as it is known. Frozen parameters have buckets of their own, so that neither
    their gradients nor their values travel. A parameter of `bucket_bytes` or more has a bucket for itself.

    By default that is 25 MiB on the CPU, and 128 MiB elsewhere, where a call is dear and a byte is cheap. One rank
    alone has nothing to overlap and takes more.
    """

    bucket_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.bucket_bytes is not None and (type(self.bucket_bytes) is not int or self.bucket_bytes < 1):
            raise ConfigError(f"FlatShards(bucket_bytes=...) takes a number of bytes, not {self.bucket_bytes!r}")

    def extend(self, layout: Layout, specs: Sequence[ParamSpec]) -> Layout:
        members = sorted(self._fill(specs, layout.world_size), key=lambda bucket: not bucket[0].trainable)
        first, worth = len(layout.buckets), _alignment(specs, layout.world_size)
        cuts = [_cut(i, bucket, layout.world_size, worth) for i, bucket in enumerate(members, first)]
        return _grown(layout, specs, cuts)

    def _fill(self, specs: Sequence[ParamSpec], world_size: int) -> Iterator[list[ParamSpec]]:
        """Buckets in the order in which they are full."""
        filling: dict[Hashable, list[ParamSpec]] = defaultdict(list)
        room: dict[Hashable, int] = {}
        for spec in reversed(specs):
            kind, nbytes = (spec.trainable, spec.dtype, spec.device), spec.extent * spec.dtype.itemsize
            size = self.bucket_bytes or _bucket_bytes(spec.device, world_size)
            if nbytes >= size:
                yield [spec]
                continue
            if nbytes > room.get(kind, 0) and filling[kind]:
                yield filling.pop(kind)
            room[kind] = (room[kind] if filling[kind] else size) - nbytes
            filling[kind].append(spec)
        yield from (bucket for bucket in filling.values() if bucket)


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
    return _grown(layout, specs, buckets)


def _grown(layout: Layout, specs: Sequence[ParamSpec], buckets: Sequence[Bucket]) -> Layout:
    params = tuple(sorted((*layout.params, *specs), key=lambda spec: spec.index))
    return Layout(layout.world_size, params, (*layout.buckets, *buckets))


def _bucket(index: int, specs: Sequence[ParamSpec], owners: Mapping[int, Rank], world_size: int) -> Bucket:
    step = _step(specs[0])
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
            pieces.append(Piece(spec.index, Span(0, spec.extent), index, room, Rank(rank)))
            end = align_up(room.stop, step)
        shards.append(Span(start, end))
    return Bucket(index, specs[0].dtype, specs[0].device, end, tuple(shards), tuple(pieces))


def _bucket_bytes(device: torch.device, world_size: int) -> int:
    size = 25 * MIB if device.type == "cpu" else 128 * MIB
    return size if world_size > 1 else 8 * size


Alignment = Callable[[int, int], bool]
"""Whether so much padding in front of a parameter of so many elements shall align it."""


def _cut(index: int, specs: Sequence[ParamSpec], world_size: int, worth: Alignment) -> Bucket:
    """A bucket of equal shards; they too are aligned if that costs next to nothing."""
    rooms = _rooms(specs, worth)
    least = -(-rooms[-1][1].stop // world_size)
    shard = align_up(least, _step(specs[0]))
    shard = shard if _is_cheap(shard - least, least) else least
    shards = tuple(Span(rank * shard, (rank + 1) * shard) for rank in range(world_size))
    pieces = tuple(piece for spec, room in rooms for piece in _pieces(index, spec, room, shard))
    return Bucket(index, specs[0].dtype, specs[0].device, shard * world_size, shards, pieces)


def _rooms(specs: Sequence[ParamSpec], worth: Alignment) -> list[tuple[ParamSpec, Span]]:
    """Parameters one behind the other; those of one group are neighbours, so that a shard has few runs of one group."""
    rooms: list[tuple[ParamSpec, Span]] = []
    end, step = 0, _step(specs[0])
    # Those that leave the next one aligned come first.
    for spec in sorted(specs, key=lambda spec: (spec.group, spec.extent % step != 0)):
        aligned = align_up(end, step)
        start = aligned if worth(aligned - end, spec.extent) else end
        end = start + spec.extent
        rooms.append((spec, Span(start, end)))
    return rooms


def _alignment(specs: Sequence[ParamSpec], world_size: int) -> Alignment:
    """All parameters are aligned where that costs next to nothing: kernels are slower on what is not aligned, and some
    then add in another order. Else those large enough to bear it, unless shards are so short that an element counts.
    What is trained decides, since it has state.
    """
    trained = [spec for spec in specs if spec.trainable] or specs
    elements = sum(spec.extent for spec in trained)
    if not _is_cheap(world_size, elements):
        return lambda _, __: False
    padding = sum(align_up(spec.extent, _step(spec)) - spec.extent for spec in trained)
    return (lambda _, __: True) if _is_cheap(padding + world_size, elements) else _is_cheap


def _step(spec: ParamSpec) -> int:
    """Elements from one aligned place to the next."""
    return max(1, ALIGNMENT // spec.dtype.itemsize)


def _pieces(bucket: int, spec: ParamSpec, room: Span, shard: int) -> Iterator[Piece]:
    """What each shard has of a parameter."""
    start = room.start
    while True:
        owner = min(start, max(room.stop - 1, 0)) // max(shard, 1)
        stop = min(room.stop, (owner + 1) * shard) if room.length else room.stop
        yield Piece(spec.index, Span(start - room.start, stop - room.start), bucket, Span(start, stop), Rank(owner))
        if stop == room.stop:
            return
        start = stop


def _is_cheap(padding: int, elements: int) -> bool:
    """Parameters and shards may be aligned for half a thousandth each."""
    return 2048 * padding <= elements


class _Tally:
    """Who has the least so far; ties go to the lowest rank."""

    def __init__(self, loads: Iterable[int]) -> None:
        self._heap = [(load, rank) for rank, load in enumerate(loads)]
        heapq.heapify(self._heap)

    def give(self, elements: int) -> Rank:
        load, rank = self._heap[0]
        heapq.heapreplace(self._heap, (load + elements, rank))
        return Rank(rank)
