"""Strategies that make layouts."""

import heapq
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import groupby
from typing import Protocol

import torch

from ..errors import ConfigError
from ..units import MIB, Rank, Span, align_up
from .grain import Grain
from .layout import Bucket, Layout, Room
from .shards import DealtShards, EqualShards, SnappedShards
from .specs import ParamSpec

ALIGNMENT = 64
"""Bytes: where a parameter starts in a bucket, for vector loads and cache lines."""


Alignment = Callable[[int, int], bool]
"""Whether so much padding in front of a parameter of so many elements shall align it."""


class Partitioner(Protocol):
    """Decides who owns new parameters, given a layout that stays as it is."""

    def extend(self, layout: Layout, specs: Sequence[ParamSpec]) -> Layout:
        """`layout` with `specs` placed in new buckets; no earlier piece moves."""
        ...


Cost = Callable[[ParamSpec], float]
"""What it takes its owner to update a parameter, in any unit."""


@dataclass(frozen=True)
class WholeParams:
    """Every parameter belongs to one rank: needed by optimizers that look at whole tensors.

    From the dearest parameter to the cheapest, each goes to the rank with the least so far. Trainable and frozen
    parameters are balanced separately: a frozen one costs its owner no state. Among ranks with equal frozen loads it
    goes to the one with the smallest trainable load.

    cost: what it takes to update a parameter. By default `shard` counts the operations of the optimizer's step on
        tensors of that shape. `ZeroRedundancyOptimizer` goes by elements, and group after group, as torch's class.
    """

    cost: Cost | None = None

    def __post_init__(self) -> None:
        if self.cost is not None and not callable(self.cost):
            raise ConfigError(f"WholeParams(cost=...) takes a function of a ParamSpec, not {self.cost!r}")

    def __repr__(self) -> str:
        # Equal on all ranks: that of a function would hold its address.
        name = getattr(self.cost, "__qualname__", type(self.cost).__qualname__)
        return f"{type(self).__name__}({'' if self.cost is None else f'cost={name}'})"

    def extend(self, layout: Layout, specs: Sequence[ParamSpec]) -> Layout:
        return place(layout, specs, deal(layout, specs, self.cost))


@dataclass(frozen=True)
class AssignedOwners:
    """Whole parameters whose owner and bucket were decided elsewhere, by parameter index.

    What is not named there is dealt out as `WholeParams` does, and what is named counts as a load.
    """

    owners: Mapping[int, Rank]
    buckets: Mapping[int, int]

    def extend(self, layout: Layout, specs: Sequence[ParamSpec]) -> Layout:
        rest = [spec for spec in specs if spec.index not in self.owners]
        named = sorted((spec for spec in specs if spec.index in self.owners), key=self._bucket_of)
        owners = deal(layout, specs, fixed=self.owners)
        return place(layout, [*named, *rest], owners, bucket_of=self._bucket_of)

    def _bucket_of(self, spec: ParamSpec) -> int:
        return self.buckets.get(spec.index, -1)


@dataclass(frozen=True)
class FlatShards:
    """Every rank owns an equal slice of every bucket; a parameter may be cut anywhere, as far as its optimizer allows.

    Buckets hold parameters of one dtype and device in the order in which backward is expected to finish them: the
    reverse of that of the model, as far as it is known. Frozen parameters have buckets of their own, so that neither
    their gradients nor their values travel. A parameter of `bucket_bytes` or more has a bucket for itself.

    By default that is 25 MiB on the CPU, and 128 MiB elsewhere, where a call is dear and a byte is cheap. One rank
    alone has nothing to overlap and takes more.

    With `align`, pieces of a parameter have a multiple of so many elements, and at least `least` of them, as optimizers
    need it that work on blocks; others stay whole, and slices are as equal as that allows. By default a self-test of
    the optimizer says what it needs.
    """

    bucket_bytes: int | None = None
    align: int | None = None
    least: int | None = None

    def __post_init__(self) -> None:
        for name, unit in (("bucket_bytes", "bytes"), ("align", "elements"), ("least", "elements")):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"FlatShards({name}=...) takes a number of {unit}, not {value!r}")

    def __repr__(self) -> str:
        given = ((it.name, getattr(self, it.name)) for it in fields(self))
        return f"FlatShards({', '.join(f'{name}={value}' for name, value in given if value is not None)})"

    @property
    def grain(self) -> Grain | None:
        """Where parameters are cut, unless that is left to the self-test."""
        if self.align is None and self.least is None:
            return None
        return Grain(self.align or 1, self.least or self.align or 1)

    def extend(self, layout: Layout, specs: Sequence[ParamSpec]) -> Layout:
        grain = self.grain or Grain()
        return SideBySide({}, self.bucket_bytes, {spec.group: grain for spec in specs}).extend(layout, specs)


@dataclass(frozen=True)
class SideBySide:
    """Parameters of some groups stay whole, the others are cut, all in buckets in the order of `FlatShards`."""

    costs: Mapping[int, Cost]
    """Of the groups that stay whole."""
    bucket_bytes: int | None = None
    grains: Mapping[int, Grain] = field(default_factory=dict)
    """Of the groups that are cut, unless anywhere."""

    def extend(self, layout: Layout, specs: Sequence[ParamSpec]) -> Layout:
        members = sorted(self._fill(specs, layout.world_size), key=lambda bucket: not bucket[0].trainable)
        first, ranks = len(layout.buckets), layout.world_size
        whole = [spec for spec in specs if self._is_whole(spec)]
        owners = deal(layout, whole, lambda spec: self.costs[spec.group](spec))
        worth = _alignment([spec for spec in specs if not self._is_whole(spec)], ranks)
        made = [
            _bucket(i, bucket, owners, ranks) if self._is_whole(bucket[0]) else self._cut(i, bucket, ranks, worth)
            for i, bucket in enumerate(members, first)
        ]
        return _grown(layout, specs, made)

    def _is_whole(self, spec: ParamSpec) -> bool:
        return spec.group in self.costs

    def _grain(self, spec: ParamSpec) -> Grain:
        return self.grains.get(spec.group, Grain())

    def _cut(self, index: int, specs: Sequence[ParamSpec], ranks: int, worth: Alignment) -> Bucket:
        rooms, grain = tuple(_rooms(specs, worth)), self._grain(specs[0])
        shards = _equal(rooms, specs[0], ranks) if grain.is_fine else _snapped(rooms, specs, ranks, grain)
        return Bucket(index, specs[0].dtype, specs[0].device, shards[ranks - 1].stop, shards, rooms)

    def _fill(self, specs: Sequence[ParamSpec], world_size: int) -> Iterator[list[ParamSpec]]:
        """Buckets in the order in which they are full."""
        filling: dict[Hashable, list[ParamSpec]] = defaultdict(list)
        room: dict[Hashable, int] = {}
        for spec in reversed(specs):
            kind = (self._is_whole(spec), self._grain(spec), spec.trainable, spec.dtype, spec.device)
            nbytes = spec.extent * spec.dtype.itemsize
            size = self.bucket_bytes or default_bucket_bytes(spec.device, world_size)
            if nbytes >= size:
                yield [spec]
                continue
            if nbytes > room.get(kind, 0) and filling[kind]:
                yield filling.pop(kind)
            room[kind] = (room[kind] if filling[kind] else size) - nbytes
            filling[kind].append(spec)
        yield from (bucket for bucket in filling.values() if bucket)


def deal(
    layout: Layout, specs: Sequence[ParamSpec], cost: Cost | None = None, fixed: Mapping[int, Rank] | None = None
) -> dict[int, Rank]:
    """An owner for each new parameter; the loads of `layout` run on. Without a cost, group after group by size.

    `fixed`: owners of some of them, by index, that are not to be changed.
    """
    price = checked(cost) if cost else (lambda spec: spec.numel)
    owners = dict(fixed or {})
    trainable, frozen = (
        _loads(layout, price, trainable=trains) if cost else layout.dealt(trainable=trains) for trains in (True, False)
    )
    for spec in specs:
        if spec.index in owners:
            (trainable if spec.trainable else frozen)[owners[spec.index]] += price(spec)
    tally = _Tally(trainable)
    open_specs = [spec for spec in specs if spec.index not in owners]
    for _, batch in groupby(open_specs, key=lambda spec: cost or spec.group):
        members = sorted(batch, key=lambda spec: -price(spec))
        for spec in (spec for spec in members if spec.trainable):
            owners[spec.index] = tally.give(price(spec))
        if all(spec.trainable for spec in members):
            continue  # the tally below costs as much as there are ranks
        # Only now are the trainable loads of this batch known, which decide between equal frozen loads.
        frozen_tally = _Tally(frozen, ties=trainable)
        for spec in (spec for spec in members if not spec.trainable):
            owners[spec.index] = frozen_tally.give(price(spec))
    return owners


def checked(cost: Cost) -> Cost:
    """The same, which refuses to be no number."""

    def price(spec: ParamSpec) -> float:
        found = cost(spec)
        if not 0 <= found < math.inf:
            raise ConfigError(f"the cost of {spec.label} is {found!r}: it must be a number of 0 or more")
        return found

    return price


def _loads(layout: Layout, price: Cost, *, trainable: bool) -> list[float]:
    """What each rank has been dealt. Slices of buckets are equal on all ranks, and do not count."""
    loads: list[float] = [0] * layout.world_size
    for bucket in layout.buckets:
        for room in bucket.rooms if bucket.is_dealt else ():
            spec = layout.params[room.param]
            if spec.trainable == trainable:
                loads[bucket.shards.holder(room.span.start)] += price(spec)
    return loads


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
    params = (*layout.params, *sorted(specs, key=lambda spec: spec.index))
    return Layout(layout.world_size, params, (*layout.buckets, *buckets), base=layout)


def _bucket(index: int, specs: Sequence[ParamSpec], owners: Mapping[int, Rank], world_size: int) -> Bucket:
    step = _step(specs[0])
    queues: dict[Rank, list[ParamSpec]] = defaultdict(list)
    for spec in specs:
        queues[owners[spec.index]].append(spec)
    shards: dict[Rank, Span] = {}
    rooms: list[Room] = []
    end = 0
    for rank in sorted(queues):
        start = end
        # Frozen ones last: what travels is then one run.
        for spec in sorted(queues[rank], key=lambda spec: not spec.trainable):
            room = Span(end, end + spec.extent)
            rooms.append(Room(spec.index, room))
            end = align_up(max(room.stop, end + 1), step)  # also one without elements has a place, and so an owner
        shards[rank] = Span(start, end)
    return Bucket(index, specs[0].dtype, specs[0].device, end, DealtShards(shards, world_size), tuple(rooms))


def default_bucket_bytes(device: torch.device, world_size: int) -> int:
    """Of buckets, where nobody says how large they shall be."""
    size = 25 * MIB if device.type == "cpu" else 128 * MIB
    return size if world_size > 1 else 8 * size


def _equal(rooms: Sequence[Room], like: ParamSpec, world_size: int) -> EqualShards:
    """Aligned as parameters are, if that costs next to nothing."""
    least = -(-rooms[-1].span.stop // world_size)
    shard = align_up(least, _step(like))
    shard = shard if _is_cheap(shard - least, least) else least
    return EqualShards(shard, world_size, shard * world_size)


def _snapped(rooms: Sequence[Room], specs: Sequence[ParamSpec], world_size: int, grain: Grain) -> SnappedShards:
    """Each ends at the nearest place to that of an equal one where a parameter ends, or may be cut."""
    by_index, numel = {spec.index: spec for spec in specs}, rooms[-1].span.stop
    spans: dict[Rank, Span] = {}
    start = 0
    for rank in range(world_size):
        equal = (rank + 1) * numel // world_size
        param, (first, _) = rooms[max(0, bisect_right(rooms, equal, key=lambda room: room.span.start) - 1)]
        inside = min(equal - first, by_index[param].extent)
        stop = numel if rank == world_size - 1 else first + grain.nearest(inside, by_index[param], numel // world_size)
        if stop > start:
            spans[Rank(rank)] = Span(start, stop)
            start = stop
    return SnappedShards(spans, world_size)


def _rooms(specs: Sequence[ParamSpec], worth: Alignment) -> Iterator[Room]:
    """Parameters one behind the other; those of one group are neighbours, so that a shard has few runs of one group."""
    end, step = 0, _step(specs[0])
    # Those that leave the next one aligned come first.
    for spec in sorted(specs, key=lambda spec: (spec.group, spec.extent % step != 0)):
        aligned = align_up(end, step)
        start = aligned if worth(aligned - end, spec.extent) else end
        end = start + spec.extent
        yield Room(spec.index, Span(start, end))


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


def _is_cheap(padding: int, elements: int) -> bool:
    """Parameters and shards may be aligned for half a thousandth each."""
    return 2048 * padding <= elements


class _Tally:
    """Who has the least so far; equal loads are decided by the smaller of `ties`, then by the lower rank."""

    def __init__(self, loads: list[float], ties: Sequence[float] | None = None) -> None:
        """`loads` is kept up to date."""
        self._loads = loads
        ties = [0] * len(loads) if ties is None else ties
        self._heap = [(load, ties[rank], rank) for rank, load in enumerate(loads)]
        heapq.heapify(self._heap)

    def give(self, cost: float) -> Rank:
        load, tie, rank = self._heap[0]
        self._loads[rank] = load + cost
        heapq.heapreplace(self._heap, (load + cost, tie, rank))
        return Rank(rank)
