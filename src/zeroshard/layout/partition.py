"""Partitioners: strategies that assign parameters to buckets and buckets to ranks.

`WholeParams` gives each parameter to one rank, `FlatShards` splits buckets evenly, and `MixedPartitioner` does both,
group by group. A partitioner only appends: no earlier parameter moves when a group is added. All ranks compute the
same layout from the same specs, without communication.
"""

import heapq
import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import groupby
from typing import NamedTuple, Protocol

import torch

from .._types import MIB, Rank, Span, align_up
from ..errors import ConfigError
from .layout import AlignedShards, Bucket, BucketSlot, EqualShards, Layout, WholeParamShards
from .spec import ParamSpec

# ---------------------------------------------------------------------------------------------------------------------
# Granularity: where a parameter may be split (anywhere, or at the block boundaries of its optimizer).


class ShardGranularity(NamedTuple):
    """Each shard of a split parameter has a multiple of `align` elements, and at least `min_numel`."""

    align: int = 1
    min_numel: int = 1

    @property
    def is_elementwise(self) -> bool:
        """Whether parameters may be split anywhere."""
        return self == ShardGranularity()

    @property
    def min_shard_numel(self) -> int:
        """The length of the shortest shard of a split parameter."""
        return align_up(self.min_numel, self.align)

    def satisfies(self, required: "ShardGranularity") -> bool:
        """Return whether shards of this granularity also meet `required`."""
        return self.align % required.align == 0 and self.min_shard_numel >= required.min_shard_numel

    def can_split(self, spec: ParamSpec) -> bool:
        """Return whether a parameter may be split. Blocks count elements in order, so it must be contiguous."""
        if self.is_elementwise:
            return True
        return spec.is_contiguous and spec.numel % self.align == 0 and spec.numel >= 2 * self.min_shard_numel

    def nearest_boundary(self, offset: int, spec: ParamSpec, shard_numel: int) -> int:
        """Return the allowed boundary that is nearest to `offset` in the parameter's memory; both ends are allowed.

        `shard_numel` is the distance between the offsets of neighbouring ranks. If it is small, boundaries are
        `min_shard_numel` apart, so that no shard between two of them is too short.
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
# Partitioners.


ALIGNMENT_BYTES = 64
"""Alignment of parameters in a bucket, for vector loads and cache lines."""

AlignmentPolicy = Callable[[int, int], bool]
"""Takes padding and numel; returns whether to spend this padding on aligning a parameter of that size."""


class Partitioner(Protocol):
    """Assigns new parameters to ranks, given a layout that does not change. All that a user-defined one needs."""

    def extend(self, layout: Layout, specs: Sequence[ParamSpec]) -> Layout:
        """Return `layout` with `specs` in new buckets; no earlier parameter moves."""
        ...


CostFn = Callable[[ParamSpec], float]
"""Cost of updating a parameter, in any unit."""


class PartitionStrategy(ABC):
    """A partitioner that also answers how it assigns the parameters of one optimizer.

    The defaults are those of a partitioner about which nothing is known.
    """

    @abstractmethod
    def extend(self, layout: Layout, specs: Sequence[ParamSpec]) -> Layout:
        """Return `layout` with `specs` in new buckets; no earlier parameter moves."""

    @abstractmethod
    def describe(self) -> str:
        """Describe who updates a parameter, for reports."""

    @property
    def splits_params(self) -> bool:
        """Whether parameters are split across ranks."""
        return False

    @property
    def is_custom(self) -> bool:
        """Whether `extend` is the user's own. It then builds all buckets, also those of other optimizers."""
        return True

    @property
    def granularity(self) -> ShardGranularity | None:
        """The granularity that was asked for; None leaves it to the probe."""
        return None

    @property
    def bucket_bytes(self) -> int | None:
        """The bucket size that was asked for; None leaves it to the device."""
        return None

    @property
    def cost(self) -> CostFn | None:
        """The cost of updating a parameter; None leaves it to the optimizer."""
        return None

    def with_granularity(self, granularity: ShardGranularity) -> "PartitionStrategy":  # noqa: ARG002
        """Return the same partitioner with another granularity; no change if it does not split parameters."""
        return self


@dataclass(frozen=True)
class CustomPartitioner(PartitionStrategy):
    """A partitioner that the user has defined."""

    partitioner: Partitioner

    def extend(self, layout: Layout, specs: Sequence[ParamSpec]) -> Layout:
        return self.partitioner.extend(layout, specs)

    def describe(self) -> str:
        return f"owners are chosen by {type(self.partitioner).__qualname__}"


def as_strategy(partitioner: Partitioner) -> PartitionStrategy:
    """Wrap a partitioner that the user has defined; return all others as they are."""
    return partitioner if isinstance(partitioner, PartitionStrategy) else CustomPartitioner(partitioner)


@dataclass(frozen=True)
class WholeParams(PartitionStrategy):
    """Each parameter belongs to one rank. Required by optimizers whose update depends on the whole tensor.

    Assignment is greedy: from the most expensive parameter to the cheapest, each goes to the least loaded rank.
    Trainable and frozen parameters are balanced separately, since a frozen one costs its owner no state. Ties between
    frozen loads go to the rank with the smallest trainable load.

    cost: cost of updating a parameter. By default `shard` counts the operations of the optimizer's step on tensors of
        that shape. `ZeroRedundancyOptimizer` balances elements, group after group, like torch's class.
    """

    cost: CostFn | None = None

    def __post_init__(self) -> None:
        if self.cost is not None and not callable(self.cost):
            raise ConfigError(f"expected WholeParams(cost=...) to be a function of a ParamSpec, got {self.cost!r}")

    def __repr__(self) -> str:
        # Must be equal on all ranks, and the repr of a function contains its address.
        name = getattr(self.cost, "__qualname__", type(self.cost).__qualname__)
        return f"{type(self).__name__}({'' if self.cost is None else f'cost={name}'})"

    def extend(self, layout: Layout, specs: Sequence[ParamSpec]) -> Layout:
        return place_params(layout, specs, assign_owners(layout, specs, self.cost))

    def describe(self) -> str:
        return "each parameter is updated by one rank"

    @property
    def is_custom(self) -> bool:
        return type(self) is not WholeParams


@dataclass(frozen=True)
class AssignedOwners:
    """Whole parameters with given owners and buckets, by parameter index.

    Parameters without a given owner are assigned as `WholeParams` does; the others count towards the load.
    """

    owners: Mapping[int, Rank]
    buckets: Mapping[int, int]

    def extend(self, layout: Layout, specs: Sequence[ParamSpec]) -> Layout:
        unassigned = [spec for spec in specs if spec.index not in self.owners]
        assigned = sorted((spec for spec in specs if spec.index in self.owners), key=self._bucket_of)
        owners = assign_owners(layout, specs, fixed_owners=self.owners)
        return place_params(layout, [*assigned, *unassigned], owners, bucket_of=self._bucket_of)

    def _bucket_of(self, spec: ParamSpec) -> int:
        return self.buckets.get(spec.index, -1)


@dataclass(frozen=True)
class FlatShards(PartitionStrategy):
    """Each rank owns an equal shard of every bucket; parameters are split wherever their optimizer allows it.

    A bucket holds parameters of one dtype and device, in the order in which backward is expected to produce their
    gradients: the reverse of the model's order. Frozen parameters get buckets of their own, so that neither their
    gradients nor their values are communicated. A parameter of `bucket_bytes` or more gets its own bucket.

    `bucket_bytes` defaults to 1/16 of the parameters: three buckets are in memory during backward, which should be
    little compared with the model. It is at most 25 MiB on the CPU and 128 MiB on accelerators, where latency matters
    more than bandwidth, and not so small that latency dominates (see `default_bucket_bytes`). A single rank has no
    communication to overlap and uses larger buckets.

    With `align`, each shard of a parameter has a multiple of `align` elements and at least `min_numel`, as optimizers
    that work on blocks require. Parameters that cannot be split like that stay whole, and shards are as equal as
    possible. By default a probe of the optimizer class determines both.
    """

    bucket_bytes: int | None = None
    align: int | None = None
    min_numel: int | None = None

    def __post_init__(self) -> None:
        for name, unit in (("bucket_bytes", "bytes"), ("align", "elements"), ("min_numel", "elements")):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"expected FlatShards({name}=...) to be a positive number of {unit}, got {value!r}")

    def __repr__(self) -> str:
        options = ((option.name, getattr(self, option.name)) for option in fields(self))
        return f"FlatShards({', '.join(f'{name}={value}' for name, value in options if value is not None)})"

    @property
    def splits_params(self) -> bool:
        return True

    @property
    def is_custom(self) -> bool:
        return type(self) is not FlatShards

    @property
    def granularity(self) -> ShardGranularity | None:
        if self.align is None and self.min_numel is None:
            return None
        return ShardGranularity(self.align or 1, self.min_numel or self.align or 1)

    def with_granularity(self, granularity: ShardGranularity) -> "FlatShards":
        return replace(self, **granularity._asdict())

    def describe(self) -> str:
        granularity = self.granularity
        cuts = (
            ""
            if granularity is None or granularity.is_elementwise
            else f", split at multiples of {granularity.align} elements"
        )
        return f"each rank updates its shard of every bucket{cuts}"

    def extend(self, layout: Layout, specs: Sequence[ParamSpec]) -> Layout:
        granularity = self.granularity or ShardGranularity()
        granularities = {spec.group: granularity for spec in specs}
        return MixedPartitioner({}, self.bucket_bytes, granularities).extend(layout, specs)


@dataclass(frozen=True)
class MixedPartitioner:
    """Keeps parameters of some groups whole and splits the others; buckets are in the order of `FlatShards`."""

    costs: Mapping[int, CostFn]
    """By group, for groups whose parameters stay whole."""
    bucket_bytes: int | None = None
    granularities: Mapping[int, ShardGranularity] = field(default_factory=dict)
    """By group, for split groups that are not elementwise."""

    def extend(self, layout: Layout, specs: Sequence[ParamSpec]) -> Layout:
        world_size = layout.world_size
        total_bytes = sum(spec.storage_bytes for spec in (*layout.params, *specs))
        members = sorted(
            self._group_into_buckets(specs, total_bytes, world_size), key=lambda bucket: not bucket[0].trainable
        )
        whole_params = [spec for spec in specs if self._is_whole_param(spec)]
        owners = assign_owners(layout, whole_params, lambda spec: self.costs[spec.group](spec))
        should_align = _choose_alignment([spec for spec in specs if not self._is_whole_param(spec)], world_size)
        buckets = [
            _make_whole_param_bucket(index, bucket, owners, world_size)
            if self._is_whole_param(bucket[0])
            else self._make_flat_bucket(index, bucket, world_size, should_align)
            for index, bucket in enumerate(members, len(layout.buckets))
        ]
        return _append_buckets(layout, specs, buckets)

    def _is_whole_param(self, spec: ParamSpec) -> bool:
        return spec.group in self.costs

    def _granularity_of(self, spec: ParamSpec) -> ShardGranularity:
        return self.granularities.get(spec.group, ShardGranularity())

    def _make_flat_bucket(
        self, index: int, specs: Sequence[ParamSpec], world_size: int, should_align: AlignmentPolicy
    ) -> Bucket:
        slots, granularity = tuple(_assign_slots(specs, should_align)), self._granularity_of(specs[0])
        shards = (
            _make_equal_shards(slots, specs[0], world_size)
            if granularity.is_elementwise
            else _make_aligned_shards(slots, specs, world_size, granularity)
        )
        return Bucket(index, specs[0].dtype, specs[0].device, shards[world_size - 1].stop, shards, slots)

    def _group_into_buckets(
        self, specs: Sequence[ParamSpec], total_bytes: int, world_size: int
    ) -> Iterator[list[ParamSpec]]:
        """Yield the members of each bucket, in the order in which buckets fill up."""
        open_buckets: dict[Hashable, list[ParamSpec]] = defaultdict(list)
        free_bytes: dict[Hashable, int] = {}
        for spec in reversed(specs):
            key = (self._is_whole_param(spec), self._granularity_of(spec), spec.trainable, spec.dtype, spec.device)
            nbytes = spec.storage_bytes
            capacity = self.bucket_bytes or default_bucket_bytes(spec.device, total_bytes, world_size)
            if nbytes >= capacity:
                yield [spec]
                continue
            if nbytes > free_bytes.get(key, 0) and open_buckets[key]:
                yield open_buckets.pop(key)
            free_bytes[key] = (free_bytes[key] if open_buckets[key] else capacity) - nbytes
            open_buckets[key].append(spec)
        yield from (bucket for bucket in open_buckets.values() if bucket)


def assign_owners(
    layout: Layout,
    specs: Sequence[ParamSpec],
    cost: CostFn | None = None,
    fixed_owners: Mapping[int, Rank] | None = None,
) -> dict[int, Rank]:
    """Return an owner for each new parameter, balanced on top of the load that `layout` already gives each rank.

    Without a cost, groups are balanced one after the other, by elements. `fixed_owners`, by parameter index, are kept.
    """
    cost_of = validate_cost(cost) if cost else (lambda spec: spec.numel)
    owners = dict(fixed_owners or {})
    trainable, frozen = (
        _assigned_cost_per_rank(layout, cost_of, trainable=is_trainable)
        if cost
        else layout.whole_param_numel_per_rank(trainable=is_trainable)
        for is_trainable in (True, False)
    )
    for spec in specs:
        if spec.index in owners:
            (trainable if spec.trainable else frozen)[owners[spec.index]] += cost_of(spec)
    balancer = _LoadBalancer(trainable)
    unassigned = [spec for spec in specs if spec.index not in owners]
    for _, batch in groupby(unassigned, key=lambda spec: cost or spec.group):
        members = sorted(batch, key=lambda spec: -cost_of(spec))
        for spec in (spec for spec in members if spec.trainable):
            owners[spec.index] = balancer.assign(cost_of(spec))
        if all(spec.trainable for spec in members):
            continue  # building the balancer below is O(world_size)
        # The trainable loads break ties between equal frozen loads, and are final only now.
        frozen_balancer = _LoadBalancer(frozen, tie_breakers=trainable)
        for spec in (spec for spec in members if not spec.trainable):
            owners[spec.index] = frozen_balancer.assign(cost_of(spec))
    return owners


def validate_cost(cost: CostFn) -> CostFn:
    """Return a cost function that raises `ConfigError` for a negative, infinite or NaN cost."""

    def validated_cost(spec: ParamSpec) -> float:
        value = cost(spec)
        if not 0 <= value < math.inf:
            raise ConfigError(f"expected the cost of {spec.label} to be a non-negative number, got {value!r}")
        return value

    return validated_cost


def _assigned_cost_per_rank(layout: Layout, cost: CostFn, *, trainable: bool) -> list[float]:
    """Return the cost of the whole parameters of each rank. Flat shards are equal on all ranks and do not count."""
    loads: list[float] = [0] * layout.world_size
    for bucket in layout.buckets:
        for slot in bucket.slots if bucket.has_whole_params else ():
            spec = layout.params[slot.param]
            if spec.trainable == trainable:
                loads[bucket.shards.owner_at(slot.span.start)] += cost(spec)
    return loads


def place_params(
    layout: Layout,
    specs: Sequence[ParamSpec],
    owners: Mapping[int, Rank],
    *,
    bucket_of: Callable[[ParamSpec], Hashable] = lambda _: None,
) -> Layout:
    """Append whole-parameter buckets to `layout`: one per key of `bucket_of`, dtype and device, as they first occur."""
    members: dict[Hashable, list[ParamSpec]] = defaultdict(list)
    for spec in specs:
        members[bucket_of(spec), spec.dtype, spec.device].append(spec)
    buckets = [
        _make_whole_param_bucket(index, bucket_specs, owners, layout.world_size)
        for index, bucket_specs in enumerate(members.values(), len(layout.buckets))
    ]
    return _append_buckets(layout, specs, buckets)


def _append_buckets(layout: Layout, specs: Sequence[ParamSpec], buckets: Sequence[Bucket]) -> Layout:
    params = (*layout.params, *sorted(specs, key=lambda spec: spec.index))
    return Layout(layout.world_size, params, (*layout.buckets, *buckets), base=layout)


def _make_whole_param_bucket(
    index: int, specs: Sequence[ParamSpec], owners: Mapping[int, Rank], world_size: int
) -> Bucket:
    alignment = _alignment_numel(specs[0])
    specs_by_owner: dict[Rank, list[ParamSpec]] = defaultdict(list)
    for spec in specs:
        specs_by_owner[owners[spec.index]].append(spec)
    shards: dict[Rank, Span] = {}
    slots: list[BucketSlot] = []
    end = 0
    for rank in sorted(specs_by_owner):
        start = end
        # Frozen parameters come last, so that the trainable ones can be sent as one contiguous range.
        for spec in sorted(specs_by_owner[rank], key=lambda spec: not spec.trainable):
            span = Span(end, end + spec.storage_numel)
            slots.append(BucketSlot(spec.index, span))
            # A parameter without elements also takes up space, so that its offset identifies its owner.
            end = align_up(max(span.stop, end + 1), alignment)
        shards[rank] = Span(start, end)
    return Bucket(index, specs[0].dtype, specs[0].device, end, WholeParamShards(shards, world_size), tuple(slots))


MODEL_BYTES_PER_BUCKET_BYTE = 16
MIN_SHARD_BYTES = 256 * 1024
"""A bucket is at least this large for each rank, because each message has a latency."""


def default_bucket_bytes(device: torch.device, total_bytes: int, world_size: int) -> int:
    """Return the bucket size to use for a model of `total_bytes` when `bucket_bytes` is not set."""
    smallest, largest = (8 * MIB, 25 * MIB) if device.type == "cpu" else (25 * MIB, 128 * MIB)
    if world_size == 1:
        return 8 * largest
    smallest = max(smallest, MIN_SHARD_BYTES * world_size)
    return min(max(smallest, total_bytes // MODEL_BYTES_PER_BUCKET_BYTE), largest)


def _make_equal_shards(slots: Sequence[BucketSlot], like: ParamSpec, world_size: int) -> EqualShards:
    """Divide a bucket evenly, with aligned shards if the padding is negligible."""
    unpadded = -(-slots[-1].span.stop // world_size)
    shard_numel = align_up(unpadded, _alignment_numel(like))
    shard_numel = shard_numel if _is_negligible_padding(shard_numel - unpadded, unpadded) else unpadded
    return EqualShards(shard_numel, world_size, shard_numel * world_size)


def _make_aligned_shards(
    slots: Sequence[BucketSlot], specs: Sequence[ParamSpec], world_size: int, granularity: ShardGranularity
) -> AlignedShards:
    """Divide a bucket almost evenly: each shard ends at the allowed boundary nearest to the even split."""
    by_index, numel = {spec.index: spec for spec in specs}, slots[-1].span.stop
    spans: dict[Rank, Span] = {}
    start = 0
    for rank in range(world_size):
        even_stop = (rank + 1) * numel // world_size
        param, (first, _) = slots[max(0, bisect_right(slots, even_stop, key=lambda slot: slot.span.start) - 1)]
        offset = min(even_stop - first, by_index[param].storage_numel)
        stop = (
            numel
            if rank == world_size - 1
            else first + granularity.nearest_boundary(offset, by_index[param], numel // world_size)
        )
        if stop > start:
            spans[Rank(rank)] = Span(start, stop)
            start = stop
    return AlignedShards(spans, world_size)


def _assign_slots(specs: Sequence[ParamSpec], should_align: AlignmentPolicy) -> Iterator[BucketSlot]:
    """Yield adjacent slots. Parameters of one group are neighbours, so that a shard has few ranges per group."""
    end, alignment = 0, _alignment_numel(specs[0])
    # Parameters whose size keeps the next one aligned come first.
    for spec in sorted(specs, key=lambda spec: (spec.group, spec.storage_numel % alignment != 0)):
        aligned = align_up(end, alignment)
        start = aligned if should_align(aligned - end, spec.storage_numel) else end
        end = start + spec.storage_numel
        yield BucketSlot(spec.index, Span(start, end))


def _choose_alignment(specs: Sequence[ParamSpec], world_size: int) -> AlignmentPolicy:
    """Return which parameters to align: all, none, or those for which the padding is negligible.

    Kernels are slower on unaligned memory, and some then sum in another order. So all parameters are aligned where the
    total padding is negligible, and otherwise the large ones, unless shards are so short that single elements matter.
    Only trainable parameters count, since they have state.
    """
    trainable = [spec for spec in specs if spec.trainable] or specs
    numel = sum(spec.storage_numel for spec in trainable)
    if not _is_negligible_padding(world_size, numel):
        return lambda _, __: False
    padding = sum(align_up(spec.storage_numel, _alignment_numel(spec)) - spec.storage_numel for spec in trainable)
    return (lambda _, __: True) if _is_negligible_padding(padding + world_size, numel) else _is_negligible_padding


def _alignment_numel(spec: ParamSpec) -> int:
    """Return `ALIGNMENT_BYTES` in elements."""
    return max(1, ALIGNMENT_BYTES // spec.dtype.itemsize)


def _is_negligible_padding(padding: int, numel: int) -> bool:
    """Return whether padding is at most 1/2048 of the elements."""
    return 2048 * padding <= numel


class _LoadBalancer:
    """Assigns work to the least loaded rank; ties go to the smaller tie breaker, then to the lower rank."""

    def __init__(self, loads: list[float], tie_breakers: Sequence[float] | None = None) -> None:
        """`loads` is updated in place."""
        self._loads = loads
        tie_breakers = [0] * len(loads) if tie_breakers is None else tie_breakers
        self._heap = [(load, tie_breakers[rank], rank) for rank, load in enumerate(loads)]
        heapq.heapify(self._heap)

    def assign(self, cost: float) -> Rank:
        load, tie_breaker, rank = self._heap[0]
        self._loads[rank] = load + cost
        heapq.heapreplace(self._heap, (load + cost, tie_breaker, rank))
        return Rank(rank)


# ---------------------------------------------------------------------------------------------------------------------
# Balance: how evenly ranks are loaded.


class Balance(NamedTuple):
    numel_per_rank: tuple[int, ...]
    """Trainable elements that each rank owns; optimizer state is proportional to it."""
    cost_per_rank: tuple[float, ...]
    """Cost of each rank's update, in the unit of the cost function."""

    def __str__(self) -> str:
        return f"Balance(memory_imbalance={self.memory_imbalance:.3f}, compute_imbalance={self.compute_imbalance:.3f})"

    @property
    def memory_imbalance(self) -> float:
        """Largest number of elements of a rank, divided by the mean."""
        return _max_over_mean(self.numel_per_rank)

    @property
    def compute_imbalance(self) -> float:
        """Largest update cost of a rank, divided by the mean."""
        return _max_over_mean(self.cost_per_rank)


def compute_balance(layout: Layout, cost: CostFn) -> Balance:
    """Return the balance of trainable parameters. The cost of a split parameter is divided among its owners."""

    def cost_of(spec: ParamSpec, numel: int) -> float:
        return cost(spec) * numel / spec.storage_numel if spec.trainable and spec.storage_numel else 0.0

    return Balance(tuple(layout.numel_per_rank(trainable=True)), tuple(layout.sum_per_rank(cost_of)))


def _max_over_mean(loads: tuple[float, ...]) -> float:
    return max(loads) * len(loads) / sum(loads) if any(loads) else 1.0
