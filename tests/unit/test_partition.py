"""WholeParams: owners and bucket layout, for any parameters and world size."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise, product

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.oracles import spec, specs
from zeroshard import LayoutError, ZeroConfig, ZeroRedundancyOptimizer
from zeroshard._types import Rank
from zeroshard.layout.layout import Layout
from zeroshard.layout.partition import (
    ALIGNMENT_BYTES,
    AssignedOwners,
    FlatShards,
    Partitioner,
    ShardGranularity,
    WholeParams,
    as_strategy,
)
from zeroshard.layout.spec import ParamSpec, make_param_specs

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.complex128, torch.uint8]
WORLD_SIZES = st.integers(1, 9)
Groups = list[dict[str, list[torch.Tensor]]]
deterministic_examples = settings(
    max_examples=60, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
)


@st.composite
def params(draw: st.DrawFn) -> torch.Tensor:
    """Draw a meta tensor of up to three dimensions, possibly empty, transposed or with gaps."""
    shape = draw(st.lists(st.integers(0, 6), max_size=3))
    tensor = torch.empty(shape, dtype=draw(st.sampled_from(DTYPES)), device="meta")
    memory_layout = draw(st.sampled_from(["plain", "plain", "transposed", "gaps"]))
    if shape and memory_layout == "transposed":
        tensor = tensor.transpose(0, -1)
    if shape and memory_layout == "gaps":
        tensor = tensor[..., ::2]
    trainable = tensor.is_floating_point() and draw(st.integers(0, 3)) > 0
    return tensor.requires_grad_(trainable)


GROUPS = st.lists(st.lists(params(), max_size=8), min_size=1, max_size=4).map(
    lambda groups: [{"params": group} for group in groups]
)


def partition_whole(param_specs: Sequence[ParamSpec], world_size: int) -> Layout:
    return WholeParams().extend(Layout.empty(world_size), param_specs)


def owners_of(layout: Layout) -> list[int]:
    return [layout.owner_of(param) for param in range(len(layout.params))]


def expected_owners(
    param_specs: Sequence[ParamSpec], world_size: int, fixed: Mapping[int, int] | None = None
) -> list[int]:
    """Reference: group by group, assign the largest remaining parameter to the least loaded rank.

    Trainable parameters of a group come before frozen ones. Ties between frozen loads are broken by trainable loads.
    """
    loads = {True: [0] * world_size, False: [0] * world_size}
    owners = [-1] * len(param_specs)
    for index, rank in (fixed or {}).items():
        owners[index] = rank
        loads[param_specs[index].trainable][rank] += param_specs[index].numel
    for group, trainable in product(
        range(1 + max((param_spec.group for param_spec in param_specs), default=-1)), (True, False)
    ):
        remaining = [
            param_spec
            for param_spec in param_specs
            if param_spec.group == group and param_spec.trainable == trainable and owners[param_spec.index] < 0
        ]
        while remaining:
            largest = remaining[0]
            for param_spec in remaining:
                if param_spec.numel > largest.numel:
                    largest = param_spec
            remaining.remove(largest)
            tie_breakers = [0] * world_size if trainable else loads[True]
            best = min(zip(loads[trainable], tie_breakers, range(world_size), strict=True))[2]
            owners[largest.index] = best
            loads[trainable][best] += largest.numel
    return owners


@deterministic_examples
@given(GROUPS, WORLD_SIZES)
def test_owners_match_reference(groups: Groups, world_size: int) -> None:
    param_specs = make_param_specs(groups)
    assert owners_of(partition_whole(param_specs, world_size)) == expected_owners(param_specs, world_size)


@deterministic_examples
@given(GROUPS, WORLD_SIZES)
def test_each_param_has_one_aligned_slot(groups: Groups, world_size: int) -> None:
    param_specs = make_param_specs(groups)
    layout = partition_whole(param_specs, world_size)
    param_shards = [param_shard for bucket in layout.buckets for param_shard in bucket.param_shards]
    assert Counter(param_shard.param for param_shard in param_shards) == Counter(range(len(param_specs)))
    for param_shard in param_shards:
        param_spec = param_specs[param_shard.param]
        assert param_shard.in_param == (0, param_spec.storage_numel)
        assert param_shard.in_bucket.length == param_spec.storage_numel
        assert param_shard.in_bucket.start * param_spec.dtype.itemsize % ALIGNMENT_BYTES == 0
    for bucket in layout.buckets:
        assert all(a.in_bucket.stop <= b.in_bucket.start for a, b in pairwise(bucket.param_shards))
        assert {param_specs[param_shard.param].dtype for param_shard in bucket.param_shards} == {bucket.dtype}
    assert [bucket.dtype for bucket in layout.buckets] == list(
        dict.fromkeys(param_spec.dtype for param_spec in param_specs)
    )


@deterministic_examples
@given(GROUPS, WORLD_SIZES)
def test_trainable_params_are_contiguous_in_each_shard(groups: Groups, world_size: int) -> None:
    param_specs = make_param_specs(groups)
    for bucket in partition_whole(param_specs, world_size).buckets:
        for _, param_shards in groupby(bucket.param_shards, key=lambda param_shard: param_shard.owner):
            flags = [param_specs[param_shard.param].trainable for param_shard in param_shards]
            assert flags == sorted(flags, reverse=True)


@deterministic_examples
@given(GROUPS, WORLD_SIZES)
def test_load_difference_is_at_most_one_param(groups: Groups, world_size: int) -> None:
    param_specs = make_param_specs(groups)
    layout = partition_whole(param_specs, world_size)
    for trainable in (True, False):
        loads = layout.numel_per_rank(trainable=trainable)
        sizes = [param_spec.numel for param_spec in param_specs if param_spec.trainable == trainable]
        assert sum(loads) == sum(sizes)
        assert max(loads) - min(loads) <= max(sizes, default=0)


@deterministic_examples
@given(GROUPS, GROUPS, WORLD_SIZES)
def test_extending_keeps_owners_and_continues_balancing(first: Groups, second: Groups, world_size: int) -> None:
    param_specs = make_param_specs([*first, *second])
    num_existing = sum(len(group["params"]) for group in first)
    before = partition_whole(param_specs[:num_existing], world_size)
    after = WholeParams().extend(before, param_specs[num_existing:])
    assert after.params == param_specs
    assert after.buckets[: len(before.buckets)] == before.buckets
    assert owners_of(after) == expected_owners(param_specs, world_size)


@pytest.mark.parametrize("world_size", range(1, 10))
@pytest.mark.parametrize("trainable", [True, False])
def test_repeated_sizes_balance_exactly(world_size: int, trainable: bool) -> None:
    for sizes in ([9, 7, 5, 3] * world_size, sorted([9, 7, 5, 3] * world_size)):
        layout = partition_whole(specs(sizes, trainable=trainable), world_size)
        assert layout.numel_per_rank(trainable=trainable) == [24] * world_size
        assert layout.numel_per_rank(trainable=not trainable) == [0] * world_size


def test_frozen_params_do_not_affect_trainable_balance() -> None:
    """A large frozen parameter has no state, so its owner still gets its share of trainable ones."""
    giant = spec(0, (1000,), trainable=False)
    small = specs([4, 4, 4, 4], first=1)
    layout = partition_whole([giant, *small], 2)
    assert layout.numel_per_rank(trainable=True) == [8, 8]
    assert owners_of(layout) == [0, 0, 1, 0, 1]


def test_frozen_ties_go_to_rank_with_fewest_trainable_elements() -> None:
    trained = partition_whole(specs([9, 7, 5, 3, 9, 7, 5]), 2)
    assert trained.numel_per_rank(trainable=True) == [24, 21]
    added = WholeParams().extend(trained, specs([3], first=7, group=1, trainable=False))
    assert added.owner_of(7) == 1
    assert [
        sum(pair)
        for pair in zip(*(added.numel_per_rank(trainable=trainable) for trainable in (True, False)), strict=True)
    ] == [
        24,
        24,
    ]
    extended = WholeParams().extend(trained, specs([3, 2, 2], first=7, group=1, trainable=False))
    assert owners_of(extended)[7:] == [1, 0, 0]


def test_trainable_params_of_a_group_are_assigned_first() -> None:
    """Even if the frozen parameter is the largest."""
    assert owners_of(partition_whole([spec(0, (100,), trainable=False), *specs([4], first=1)], 2)) == [1, 0]


def test_loads_accumulate_across_groups_but_sorting_is_per_group() -> None:
    first, second = specs([1, 2]), specs([8, 3], group=1, first=2)
    assert owners_of(partition_whole([*first, *second], 2)) == [1, 0, 1, 0]


def test_ties_keep_order_and_prefer_lowest_rank() -> None:
    assert owners_of(partition_whole(specs([5, 5, 5, 5]), 3)) == [0, 1, 2, 0]


def test_more_ranks_than_params() -> None:
    layout = partition_whole(specs([3, 2]), 5)
    assert [layout.params_owned_by(Rank(rank)) for rank in range(5)] == [(0,), (1,), (), (), ()]
    assert [shard.length for shard in layout.buckets[0].shards[2:]] == [0, 0, 0]


def test_separate_buckets_per_device() -> None:
    param_specs = [spec(0, device="cuda:0"), spec(1, device="cpu"), spec(2, device="cuda:0")]
    buckets = partition_whole(param_specs, 1).buckets
    assert [bucket.params for bucket in buckets] == [[0, 2], [1]]
    assert [bucket.device.type for bucket in buckets] == ["cuda", "cpu"]


def test_assignment_cost_does_not_grow_with_world_size() -> None:
    """Each of 10,000 parameters is compared with a few ranks, not with all. Comparisons are counted, not timed."""
    param_specs = specs([1 + i % 97 for i in range(10_000)])
    comparisons: dict[int, int] = {}

    class Load(int):
        seen = 0

        def __lt__(self, other: int) -> bool:
            Load.seen += 1
            return int.__lt__(self, other)

        def __radd__(self, other: int) -> "Load":
            return Load(int.__add__(self, other))

        __add__ = __radd__

    for world_size in (8, 1024):
        Load.seen = 0
        WholeParams(cost=lambda param_spec: Load(param_spec.numel)).extend(Layout.empty(world_size), param_specs)
        comparisons[world_size] = Load.seen
    assert comparisons[8] > 0
    assert comparisons[1024] < 25 * len(param_specs)


SPECS = [spec(0, (2,)), spec(1, (9,)), spec(2, (4,)), spec(3, (7,), trainable=False), spec(4, (3,))]


def test_assigned_owners_are_used() -> None:
    owned = {4: Rank(1), 2: Rank(1), 1: Rank(0), 0: Rank(1)}
    layout = AssignedOwners(owned, {4: 0, 2: 0, 1: 1, 0: 1}).extend(Layout.empty(2), SPECS)
    assert owners_of(layout) == [1, 0, 1, 0, 1]  # ranks 0 and 1 have 9 trainable elements each
    assert [bucket.params for bucket in layout.buckets] == [[2, 4], [1, 0], [3]]


def test_unassigned_params_are_balanced() -> None:
    """Assigned parameters count as load: the frozen one goes to the rank with the fewest trainable elements."""
    for fixed in ({1: Rank(2)}, {0: Rank(0), 1: Rank(1), 2: Rank(2), 4: Rank(0)}, {3: Rank(1)}):
        layout = AssignedOwners(fixed, dict.fromkeys(fixed, 0)).extend(Layout.empty(3), SPECS)
        assert owners_of(layout) == expected_owners(SPECS, 3, fixed)
    assigned = {0: Rank(0), 1: Rank(0), 2: Rank(1), 4: Rank(2)}
    assert AssignedOwners(assigned, dict.fromkeys(assigned, 0)).extend(Layout.empty(3), SPECS).owner_of(3) == 2


class UserPartitioner:
    """Has attributes with the names of ours but other types: only `extend` may be used."""

    splits_params, granularity, bucket_bytes, cost = "yes", 7, "3 MiB", 1

    def extend(self, layout: Layout, specs: Sequence[ParamSpec]) -> Layout:
        return WholeParams().extend(layout, specs)


def test_user_defined_partitioner_needs_only_extend() -> None:
    strategy = as_strategy(UserPartitioner())
    assert strategy.is_custom
    assert not strategy.splits_params
    assert (strategy.granularity, strategy.bucket_bytes, strategy.cost) == (None, None, None)
    assert strategy.with_granularity(ShardGranularity(8, 8)) is strategy
    assert strategy.describe() == "owners are chosen by UserPartitioner"
    assert strategy.extend(Layout.empty(2), SPECS) == WholeParams().extend(Layout.empty(2), SPECS)


class ForgetfulPartitioner:
    def extend(self, layout: Layout, specs: Sequence[ParamSpec]) -> Layout:
        return WholeParams().extend(layout, specs[:-1])


@pytest.mark.usefixtures("single_rank")
def test_a_partitioner_must_add_all_params() -> None:
    params, config = torch.nn.Linear(3, 2).named_parameters(), ZeroConfig(partition=ForgetfulPartitioner())
    with pytest.raises(LayoutError, match=r"ForgetfulPartitioner.*1 parameters, expected 2: .*bias"):
        ZeroRedundancyOptimizer(params, torch.optim.SGD, config=config, lr=0.1)


def test_subclass_of_a_partitioner_builds_its_own_buckets() -> None:
    class OtherShards(FlatShards):
        pass

    class OtherOwners(WholeParams):
        pass

    ours: list[Partitioner] = [FlatShards(), WholeParams()]
    theirs: list[Partitioner] = [OtherShards(), OtherOwners()]
    assert [as_strategy(partitioner) is partitioner for partitioner in (*ours, *theirs)] == [True] * 4
    assert [as_strategy(partitioner).is_custom for partitioner in (*ours, *theirs)] == [False, False, True, True]
    assert [as_strategy(partitioner).splits_params for partitioner in theirs] == [True, False]
