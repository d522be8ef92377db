"""Strategies that make layouts."""

import heapq
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import groupby
from typing import NamedTuple, Protocol

import torch

from .._types import MIB, Rank, Span, align_up
from ..errors import ConfigError
from .layout import AlignedShards, Bucket, BucketSlot, EqualShards, Layout, WholeParamShards
from .spec import ParamSpec

# ---------------------------------------------------------------------------------------------------------------------
# Where a parameter may be cut: anywhere, or where the blocks of an optimizer begin.


class ShardGranularity(NamedTuple):
    """Pieces of a parameter that is cut have a multiple of `align` elements, and at least `least` of them."""

    align: int = 1
    min_numel: int = 1

    @property
    def is_elementwise(self) -> bool:
        """Parameters may be cut anywhere."""
        return self == ShardGranularity()

    @property
    def min_shard_numel(self) -> int:
        """Elements of the shortest piece."""
        return align_up(self.min_numel, self.align)

    def satisfies(self, required: "ShardGranularity") -> bool:
        """Whether all that is cut so is cut as `needed` wants it."""
        return self.align % required.align == 0 and self.min_shard_numel >= required.min_shard_numel

    def can_split(self, spec: ParamSpec) -> bool:
        """Whether a parameter may be cut at all. Blocks count its elements in order, so they must lie in order."""
        if self.is_elementwise:
            return True
        return spec.is_contiguous and spec.numel % self.align == 0 and spec.numel >= 2 * self.min_shard_numel

    def nearest_boundary(self, offset: int, spec: ParamSpec, shard_numel: int) -> int:
        """The end of a piece that is nearest to a place in the parameter's memory; its own ends are such, too.

        `shard`: elements from one such place to the next. Where they are few, cuts are so far apart that no piece
        between two of them is too short.
        """
        if self.is_elementwise:
            return offset
        if not self.can_split(spec):
            return _nearer_of(offset, 0, spec.storage_numel)
        step = self.align if shard_numel >= 2 * self.min_shard_numel else self.min_shard_numel
        first, last = self.min_shard_numel, (spec.storage_numel - self.min_shard_numel) // step * step
        if offset < first:
            return _nearer_of(offset, 0, first)
        if offset > last:
            return _nearer_of(offset, last, spec.storage_numel)
        return _nearer_of(offset, offset // step * step, align_up(offset, step))


def _nearer_of(offset: int, low: int, high: int) -> int:
    return low if offset - low <= high - offset else high


# ---------------------------------------------------------------------------------------------------------------------
# Strategies that make layouts.


ALIGNMENT_BYTES = 64
"""Bytes: where a parameter starts in a bucket, for vector loads and cache lines."""


AlignmentPolicy = Callable[[int, int], bool]
"""Whether so much padding in front of a parameter of so many elements shall align it."""


class Partitioner(Protocol):
    """Decides who owns new parameters, given a layout that stays as it is."""

    def extend(self, layout: Layout, specs: Sequence[ParamSpec]) -> Layout:
        """`layout` with `specs` placed in new buckets; no earlier piece moves."""
        ...


CostFn = Callable[[ParamSpec], float]
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

    cost: CostFn | None = None

    def __post_init__(self) -> None:
        if self.cost is not None and not callable(self.cost):
            raise ConfigError(f"WholeParams(cost=...) takes a function of a ParamSpec, not {self.cost!r}")

    def __repr__(self) -> str:
        # Equal on all ranks: that of a function would hold its address.
        name = getattr(self.cost, "__qualname__", type(self.cost).__qualname__)
        return f"{type(self).__name__}({'' if self.cost is None else f'cost={name}'})"

    def extend(self, layout: Layout, specs: Sequence[ParamSpec]) -> Layout:
        return place_params(layout, specs, assign_owners(layout, specs, self.cost))


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
        owners = assign_owners(layout, specs, fixed_owners=self.owners)
        return place_params(layout, [*named, *rest], owners, bucket_of=self._bucket_of)

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
    min_numel: int | None = None

    def __post_init__(self) -> None:
        for name, unit in (("bucket_bytes", "bytes"), ("align", "elements"), ("min_numel", "elements")):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"FlatShards({name}=...) takes a number of {unit}, not {value!r}")

    def __repr__(self) -> str:
        given = ((it.name, getattr(self, it.name)) for it in fields(self))
        return f"FlatShards({', '.join(f'{name}={value}' for name, value in given if value is not None)})"

    @property
    def granularity(self) -> ShardGranularity | None:
        """Where parameters are cut, unless that is left to the self-test."""
        if self.align is None and self.min_numel is None:
            return None
        return ShardGranularity(self.align or 1, self.min_numel or self.align or 1)

    def extend(self, layout: Layout, specs: Sequence[ParamSpec]) -> Layout:
        grain = self.granularity or ShardGranularity()
        return MixedPartitioner({}, self.bucket_bytes, {spec.group: grain for spec in specs}).extend(layout, specs)


@dataclass(frozen=True)
class MixedPartitioner:
    """Parameters of some groups stay whole, the others are cut, all in buckets in the order of `FlatShards`."""

    costs: Mapping[int, CostFn]
    """Of the groups that stay whole."""
    bucket_bytes: int | None = None
    granularities: Mapping[int, ShardGranularity] = field(default_factory=dict)
    """Of the groups that are cut, unless anywhere."""

    def extend(self, layout: Layout, specs: Sequence[ParamSpec]) -> Layout:
        members = sorted(self._group_into_buckets(specs, layout.world_size), key=lambda bucket: not bucket[0].trainable)
        first, ranks = len(layout.buckets), layout.world_size
        whole = [spec for spec in specs if self._is_whole_param(spec)]
        owners = assign_owners(layout, whole, lambda spec: self.costs[spec.group](spec))
        worth = _choose_alignment([spec for spec in specs if not self._is_whole_param(spec)], ranks)
        made = [
            _make_whole_param_bucket(i, bucket, owners, ranks)
            if self._is_whole_param(bucket[0])
            else self._make_flat_bucket(i, bucket, ranks, worth)
            for i, bucket in enumerate(members, first)
        ]
        return _append_buckets(layout, specs, made)

    def _is_whole_param(self, spec: ParamSpec) -> bool:
        return spec.group in self.costs

    def _granularity_of(self, spec: ParamSpec) -> ShardGranularity:
        return self.granularities.get(spec.group, ShardGranularity())

    def _make_flat_bucket(
        self, index: int, specs: Sequence[ParamSpec], world_size: int, should_align: AlignmentPolicy
    ) -> Bucket:
        rooms, grain = tuple(_assign_slots(specs, should_align)), self._granularity_of(specs[0])
        shards = (
            _make_equal_shards(rooms, specs[0], world_size)
            if grain.is_elementwise
            else _make_aligned_shards(rooms, specs, world_size, grain)
        )
        return Bucket(index, specs[0].dtype, specs[0].device, shards[world_size - 1].stop, shards, rooms)

    def _group_into_buckets(self, specs: Sequence[ParamSpec], world_size: int) -> Iterator[list[ParamSpec]]:
        """Buckets in the order in which they are full."""
        filling: dict[Hashable, list[ParamSpec]] = defaultdict(list)
        room: dict[Hashable, int] = {}
        for spec in reversed(specs):
            kind = (self._is_whole_param(spec), self._granularity_of(spec), spec.trainable, spec.dtype, spec.device)
            nbytes = spec.storage_numel * spec.dtype.itemsize
            size = self.bucket_bytes or default_bucket_bytes(spec.device, world_size)
            if nbytes >= size:
                yield [spec]
                continue
            if nbytes > room.get(kind, 0) and filling[kind]:
                yield filling.pop(kind)
            room[kind] = (room[kind] if filling[kind] else size) - nbytes
            filling[kind].append(spec)
        yield from (bucket for bucket in filling.values() if bucket)


def assign_owners(
    layout: Layout,
    specs: Sequence[ParamSpec],
    cost: CostFn | None = None,
    fixed_owners: Mapping[int, Rank] | None = None,
) -> dict[int, Rank]:
    """An owner for each new parameter; the loads of `layout` run on. Without a cost, group after group by size.

    `fixed`: owners of some of them, by index, that are not to be changed.
    """
    price = validate_cost(cost) if cost else (lambda spec: spec.numel)
    owners = dict(fixed_owners or {})
    trainable, frozen = (
        _assigned_cost_per_rank(layout, price, trainable=trains)
        if cost
        else layout.whole_param_numel_per_rank(trainable=trains)
        for trains in (True, False)
    )
    for spec in specs:
        if spec.index in owners:
            (trainable if spec.trainable else frozen)[owners[spec.index]] += price(spec)
    tally = _LoadBalancer(trainable)
    open_specs = [spec for spec in specs if spec.index not in owners]
    for _, batch in groupby(open_specs, key=lambda spec: cost or spec.group):
        members = sorted(batch, key=lambda spec: -price(spec))
        for spec in (spec for spec in members if spec.trainable):
            owners[spec.index] = tally.assign(price(spec))
        if all(spec.trainable for spec in members):
            continue  # the tally below costs as much as there are ranks
        # Only now are the trainable loads of this batch known, which decide between equal frozen loads.
        frozen_tally = _LoadBalancer(frozen, tie_breakers=trainable)
        for spec in (spec for spec in members if not spec.trainable):
            owners[spec.index] = frozen_tally.assign(price(spec))
    return owners


def validate_cost(cost: CostFn) -> CostFn:
    """The same, which refuses to be no number."""

    def validated_cost(spec: ParamSpec) -> float:
        found = cost(spec)
        if not 0 <= found < math.inf:
            raise ConfigError(f"the cost of {spec.label} is {found!r}: it must be a number of 0 or more")
        return found

    return validated_cost


def _assigned_cost_per_rank(layout: Layout, cost: CostFn, *, trainable: bool) -> list[float]:
    """What each rank has been dealt. Slices of buckets are equal on all ranks, and do not count."""
    loads: list[float] = [0] * layout.world_size
    for bucket in layout.buckets:
        for room in bucket.slots if bucket.has_whole_params else ():
            spec = layout.params[room.param]
            if spec.trainable == trainable:
                loads[bucket.shards.owner_at(room.span.start)] += cost(spec)
    return loads


def place_params(
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
    buckets = [
        _make_whole_param_bucket(index, kind, owners, layout.world_size)
        for index, kind in enumerate(kinds.values(), first)
    ]
    return _append_buckets(layout, specs, buckets)


def _append_buckets(layout: Layout, specs: Sequence[ParamSpec], buckets: Sequence[Bucket]) -> Layout:
    params = (*layout.params, *sorted(specs, key=lambda spec: spec.index))
    return Layout(layout.world_size, params, (*layout.buckets, *buckets), base=layout)


def _make_whole_param_bucket(
    index: int, specs: Sequence[ParamSpec], owners: Mapping[int, Rank], world_size: int
) -> Bucket:
    step = _alignment_numel(specs[0])
    queues: dict[Rank, list[ParamSpec]] = defaultdict(list)
    for spec in specs:
        queues[owners[spec.index]].append(spec)
    shards: dict[Rank, Span] = {}
    rooms: list[BucketSlot] = []
    end = 0
    for rank in sorted(queues):
        start = end
        # Frozen ones last: what travels is then one run.
        for spec in sorted(queues[rank], key=lambda spec: not spec.trainable):
            room = Span(end, end + spec.storage_numel)
            rooms.append(BucketSlot(spec.index, room))
            end = align_up(max(room.stop, end + 1), step)  # also one without elements has a place, and so an owner
        shards[rank] = Span(start, end)
    return Bucket(index, specs[0].dtype, specs[0].device, end, WholeParamShards(shards, world_size), tuple(rooms))


def default_bucket_bytes(device: torch.device, world_size: int) -> int:
    """Of buckets, where nobody says how large they shall be."""
    size = 25 * MIB if device.type == "cpu" else 128 * MIB
    return size if world_size > 1 else 8 * size


def _make_equal_shards(slots: Sequence[BucketSlot], like: ParamSpec, world_size: int) -> EqualShards:
    """Aligned as parameters are, if that costs next to nothing."""
    least = -(-slots[-1].span.stop // world_size)
    shard = align_up(least, _alignment_numel(like))
    shard = shard if _is_negligible_padding(shard - least, least) else least
    return EqualShards(shard, world_size, shard * world_size)


def _make_aligned_shards(
    slots: Sequence[BucketSlot], specs: Sequence[ParamSpec], world_size: int, granularity: ShardGranularity
) -> AlignedShards:
    """Each ends at the nearest place to that of an equal one where a parameter ends, or may be cut."""
    by_index, numel = {spec.index: spec for spec in specs}, slots[-1].span.stop
    spans: dict[Rank, Span] = {}
    start = 0
    for rank in range(world_size):
        equal = (rank + 1) * numel // world_size
        param, (first, _) = slots[max(0, bisect_right(slots, equal, key=lambda room: room.span.start) - 1)]
        inside = min(equal - first, by_index[param].storage_numel)
        stop = (
            numel
            if rank == world_size - 1
            else first + granularity.nearest_boundary(inside, by_index[param], numel // world_size)
        )
        if stop > start:
            spans[Rank(rank)] = Span(start, stop)
            start = stop
    return AlignedShards(spans, world_size)


def _assign_slots(specs: Sequence[ParamSpec], should_align: AlignmentPolicy) -> Iterator[BucketSlot]:
    """Parameters one behind the other; those of one group are neighbours, so that a shard has few runs of one group."""
    end, step = 0, _alignment_numel(specs[0])
    # Those that leave the next one aligned come first.
    for spec in sorted(specs, key=lambda spec: (spec.group, spec.storage_numel % step != 0)):
        aligned = align_up(end, step)
        start = aligned if should_align(aligned - end, spec.storage_numel) else end
        end = start + spec.storage_numel
        yield BucketSlot(spec.index, Span(start, end))


def _choose_alignment(specs: Sequence[ParamSpec], world_size: int) -> AlignmentPolicy:
    """All parameters are aligned where that costs next to nothing: kernels are slower on what is not aligned, and some
    then add in another order. Else those large enough to bear it, unless shards are so short that an element counts.
    What is trained decides, since it has state.
    """
    trained = [spec for spec in specs if spec.trainable] or specs
    elements = sum(spec.storage_numel for spec in trained)
    if not _is_negligible_padding(world_size, elements):
        return lambda _, __: False
    padding = sum(align_up(spec.storage_numel, _alignment_numel(spec)) - spec.storage_numel for spec in trained)
    return (lambda _, __: True) if _is_negligible_padding(padding + world_size, elements) else _is_negligible_padding


def _alignment_numel(spec: ParamSpec) -> int:
    """Elements from one aligned place to the next."""
    return max(1, ALIGNMENT_BYTES // spec.dtype.itemsize)


def _is_negligible_padding(padding: int, numel: int) -> bool:
    """Parameters and shards may be aligned for half a thousandth each."""
    return 2048 * padding <= numel


class _LoadBalancer:
    """Who has the least so far; equal loads are decided by the smaller of `ties`, then by the lower rank."""

    def __init__(self, loads: list[float], tie_breakers: Sequence[float] | None = None) -> None:
        """`loads` is kept up to date."""
        self._loads = loads
        tie_breakers = [0] * len(loads) if tie_breakers is None else tie_breakers
        self._heap = [(load, tie_breakers[rank], rank) for rank, load in enumerate(loads)]
        heapq.heapify(self._heap)

    def assign(self, cost: float) -> Rank:
        load, tie, rank = self._heap[0]
        self._loads[rank] = load + cost
        heapq.heapreplace(self._heap, (load + cost, tie, rank))
        return Rank(rank)


# ---------------------------------------------------------------------------------------------------------------------
# How evenly the ranks are loaded.


class Balance(NamedTuple):
    numel_per_rank: tuple[int, ...]
    """Trained elements of each rank: its state is as large."""
    cost_per_rank: tuple[float, ...]
    """What each rank's update takes, in the unit of the costs."""

    def __str__(self) -> str:
        return f"Balance(memory_imbalance={self.memory_imbalance:.3f}, compute_imbalance={self.compute_imbalance:.3f})"

    @property
    def memory_imbalance(self) -> float:
        """The elements of the rank with most, over the mean."""
        return _max_over_mean(self.numel_per_rank)

    @property
    def compute_imbalance(self) -> float:
        """The work of the rank with most, over the mean."""
        return _max_over_mean(self.cost_per_rank)


def compute_balance(layout: Layout, cost: CostFn) -> Balance:
    """Of all that is trained. A rank that owns a part of a parameter has that part of its cost."""

    def cost_of(spec: ParamSpec, numel: int) -> float:
        return cost(spec) * numel / spec.storage_numel if spec.trainable and spec.storage_numel else 0.0

    return Balance(tuple(layout.numel_per_rank(trainable=True)), tuple(layout.sum_per_rank(cost_of)))


def _max_over_mean(loads: tuple[float, ...]) -> float:
    return max(loads) * len(loads) / sum(loads) if any(loads) else 1.0
