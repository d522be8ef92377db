"""WholeParams: owners and bucket layout, for any parameters and world size."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise, product

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.oracles import spec, specs
from zeroshard._types import Rank
from zeroshard.layout.layout import Layout
from zeroshard.layout.partition import ALIGNMENT_BYTES, AssignedOwners, WholeParams
from zeroshard.layout.spec import ParamSpec, make_param_specs

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.complex128, torch.uint8]
WORLD_SIZES = st.integers(1, 9)
Groups = list[dict[str, list[torch.Tensor]]]
steadily = settings(
    max_examples=60, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
)


@st.composite
def params(draw: st.DrawFn) -> torch.Tensor:
    """Draw a meta tensor of up to three dimensions, possibly empty, transposed or with gaps."""
    shape = draw(st.lists(st.integers(0, 6), max_size=3))
    made = torch.empty(shape, dtype=draw(st.sampled_from(DTYPES)), device="meta")
    form = draw(st.sampled_from(["plain", "plain", "transposed", "gaps"]))
    if shape and form == "transposed":
        made = made.transpose(0, -1)
    if shape and form == "gaps":
        made = made[..., ::2]
    trainable = made.is_floating_point() and draw(st.integers(0, 3)) > 0
    return made.requires_grad_(trainable)


GROUPS = st.lists(st.lists(params(), max_size=8), min_size=1, max_size=4).map(
    lambda groups: [{"params": group} for group in groups]
)


def partition_whole(made: Sequence[ParamSpec], world_size: int) -> Layout:
    return WholeParams().extend(Layout.empty(world_size), made)


def owners_of(layout: Layout) -> list[int]:
    return [layout.owner_of(param) for param in range(len(layout.params))]


def expected_owners(made: Sequence[ParamSpec], world_size: int, fixed: Mapping[int, int] | None = None) -> list[int]:
    """Reference: group by group, assign the largest remaining parameter to the least loaded rank.

    Trainable parameters of a group come before frozen ones. Ties between frozen loads are broken by trainable loads.
    """
    loads = {True: [0] * world_size, False: [0] * world_size}
    found = [-1] * len(made)
    for index, rank in (fixed or {}).items():
        found[index] = rank
        loads[made[index].trainable][rank] += made[index].numel
    for number, trainable in product(range(1 + max((one.group for one in made), default=-1)), (True, False)):
        left = [one for one in made if one.group == number and one.trainable == trainable and found[one.index] < 0]
        while left:
            largest = left[0]
            for one in left:
                if one.numel > largest.numel:
                    largest = one
            left.remove(largest)
            ties = [0] * world_size if trainable else loads[True]
            best = min(zip(loads[trainable], ties, range(world_size), strict=True))[2]
            found[largest.index] = best
            loads[trainable][best] += largest.numel
    return found


@steadily
@given(GROUPS, WORLD_SIZES)
def test_owners_match_reference(groups: Groups, world_size: int) -> None:
    made = make_param_specs(groups)
    assert owners_of(partition_whole(made, world_size)) == expected_owners(made, world_size)


@steadily
@given(GROUPS, WORLD_SIZES)
def test_each_param_has_one_aligned_slot(groups: Groups, world_size: int) -> None:
    made = make_param_specs(groups)
    layout = partition_whole(made, world_size)
    pieces = [piece for bucket in layout.buckets for piece in bucket.param_shards]
    assert Counter(piece.param for piece in pieces) == Counter(range(len(made)))
    for piece in pieces:
        one = made[piece.param]
        assert piece.in_param == (0, one.storage_numel)
        assert piece.in_bucket.length == one.storage_numel
        assert piece.in_bucket.start * one.dtype.itemsize % ALIGNMENT_BYTES == 0
    for bucket in layout.buckets:
        assert all(a.in_bucket.stop <= b.in_bucket.start for a, b in pairwise(bucket.param_shards))
        assert {made[piece.param].dtype for piece in bucket.param_shards} == {bucket.dtype}
    assert [bucket.dtype for bucket in layout.buckets] == list(dict.fromkeys(one.dtype for one in made))


@steadily
@given(GROUPS, WORLD_SIZES)
def test_trainable_params_are_contiguous_in_each_shard(groups: Groups, world_size: int) -> None:
    made = make_param_specs(groups)
    for bucket in partition_whole(made, world_size).buckets:
        for _, pieces in groupby(bucket.param_shards, key=lambda piece: piece.owner):
            flags = [made[piece.param].trainable for piece in pieces]
            assert flags == sorted(flags, reverse=True)


@steadily
@given(GROUPS, WORLD_SIZES)
def test_load_difference_is_at_most_one_param(groups: Groups, world_size: int) -> None:
    made = make_param_specs(groups)
    layout = partition_whole(made, world_size)
    for trainable in (True, False):
        loads = layout.numel_per_rank(trainable=trainable)
        sizes = [one.numel for one in made if one.trainable == trainable]
        assert sum(loads) == sum(sizes)
        assert max(loads) - min(loads) <= max(sizes, default=0)


@steadily
@given(GROUPS, GROUPS, WORLD_SIZES)
def test_extending_keeps_owners_and_continues_balancing(first: Groups, second: Groups, world_size: int) -> None:
    made = make_param_specs([*first, *second])
    known = sum(len(group["params"]) for group in first)
    before = partition_whole(made[:known], world_size)
    after = WholeParams().extend(before, made[known:])
    assert after.params == made
    assert after.buckets[: len(before.buckets)] == before.buckets
    assert owners_of(after) == expected_owners(made, world_size)


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
    assert [sum(pair) for pair in zip(*(added.numel_per_rank(trainable=it) for it in (True, False)), strict=True)] == [
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
    made = [spec(0, device="cuda:0"), spec(1, device="cpu"), spec(2, device="cuda:0")]
    buckets = partition_whole(made, 1).buckets
    assert [bucket.params for bucket in buckets] == [[0, 2], [1]]
    assert [bucket.device.type for bucket in buckets] == ["cuda", "cpu"]


def test_assignment_cost_does_not_grow_with_world_size() -> None:
    """Each of 10,000 parameters is compared with a few ranks, not with all. Comparisons are counted, not timed."""
    made = specs([1 + i % 97 for i in range(10_000)])
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
        WholeParams(cost=lambda one: Load(one.numel)).extend(Layout.empty(world_size), made)
        comparisons[world_size] = Load.seen
    assert comparisons[8] > 0
    assert comparisons[1024] < 25 * len(made)


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
    taken = {0: Rank(0), 1: Rank(0), 2: Rank(1), 4: Rank(2)}
    assert AssignedOwners(taken, dict.fromkeys(taken, 0)).extend(Layout.empty(3), SPECS).owner_of(3) == 2
