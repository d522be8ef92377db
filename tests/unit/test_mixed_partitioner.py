"""MixedPartitioner: whole and flat-sharded parameters in one layout, for any parameters and world size."""

import math
from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import chain, pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.oracles import spec
from zeroshard import ConfigError
from zeroshard._types import Rank
from zeroshard.layout.layout import Layout
from zeroshard.layout.partition import ALIGNMENT_BYTES, MixedPartitioner, assign_owners
from zeroshard.layout.spec import ParamSpec

WHOLE_GROUPS, FLAT_GROUPS = (0, 2), (1, 3)
DTYPES = [torch.float32, torch.bfloat16, torch.float64]
WORLD_SIZES = st.integers(1, 7)
BUCKET_SIZES = st.one_of(st.none(), st.integers(1, 600))
deterministic_examples = settings(
    max_examples=80, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
)


@st.composite
def params(draw: st.DrawFn, first: int = 0) -> list[ParamSpec]:
    """Draw parameters of four groups, two of them whole, including frozen and empty ones and several dtypes."""
    count = draw(st.integers(0, 12))
    return [
        spec(
            first + index,
            tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=2))),
            dtype=draw(st.sampled_from(DTYPES)),
            group=draw(st.integers(0, 3)),
            trainable=draw(st.integers(0, 4)) > 0,
        )
        for index in range(count)
    ]


def superlinear_cost(param_spec: ParamSpec) -> float:
    """Cost that grows faster than numel, like matrix products."""
    return 1.0 + param_spec.numel * math.sqrt(param_spec.numel)


def make_partitioner(bucket_bytes: int | None = None) -> MixedPartitioner:
    return MixedPartitioner(dict.fromkeys(WHOLE_GROUPS, superlinear_cost), bucket_bytes)


def make_layout(specs: Sequence[ParamSpec], ranks: int, bucket_bytes: int | None = None) -> Layout:
    return make_partitioner(bucket_bytes).extend(Layout.empty(ranks), specs)


@deterministic_examples
@given(params(), WORLD_SIZES, BUCKET_SIZES)
def test_each_element_has_one_owner_and_whole_params_are_not_split(
    specs: list[ParamSpec], ranks: int, size: int | None
) -> None:
    layout = make_layout(specs, ranks, size)
    spans: dict[int, list[tuple[int, int]]] = {param_spec.index: [] for param_spec in specs}
    for bucket in layout.buckets:
        for param_shard in bucket.param_shards:
            spans[param_shard.param].append((param_shard.in_param.start, param_shard.in_param.stop))
            assert bucket.shards[param_shard.owner].contains(param_shard.in_bucket)
    for param_spec in specs:
        ranges = sorted(spans[param_spec.index])
        assert sum(stop - start for start, stop in ranges) == param_spec.storage_numel
        assert all(a[1] == b[0] for a, b in pairwise(ranges))
        assert param_spec.group in FLAT_GROUPS or len(ranges) == 1, "a whole parameter was split"


@deterministic_examples
@given(params(), WORLD_SIZES, BUCKET_SIZES)
def test_whole_params_are_aligned_in_homogeneous_buckets(specs: list[ParamSpec], ranks: int, size: int | None) -> None:
    for bucket in make_layout(specs, ranks, size).buckets:
        members = [specs[index] for index in bucket.params]
        assert (
            len(
                {
                    (param_spec.group in WHOLE_GROUPS, param_spec.trainable, param_spec.dtype, param_spec.device)
                    for param_spec in members
                }
            )
            == 1
        )
        assert bucket.has_whole_params == (members[0].group in WHOLE_GROUPS)
        for slot in bucket.slots if bucket.has_whole_params else ():
            assert slot.span.start * bucket.dtype.itemsize % ALIGNMENT_BYTES == 0


@deterministic_examples
@given(params(), WORLD_SIZES, st.integers(1, 600))
def test_buckets_are_filled_in_backward_order(specs: list[ParamSpec], ranks: int, size: int) -> None:
    """Backward finishes the last parameter first. Frozen parameters have no gradients and come last."""
    buckets = [sorted(bucket.params, reverse=True) for bucket in make_layout(specs, ranks, size).buckets]
    trained = [specs[members[0]].trainable for members in buckets]
    assert trained == sorted(trained, reverse=True)
    keys = {
        (param_spec.group in WHOLE_GROUPS, param_spec.trainable, param_spec.dtype): param_spec for param_spec in specs
    }
    for key in keys:
        matching = [members for members in buckets if key == bucket_key(specs[members[0]])]
        small = [members for members in matching if nbytes(specs[members[0]]) < size]
        assert all(len(members) == 1 for members in matching if members not in small), (
            "a large parameter has a bucket of its own"
        )
        expected = [
            param_spec.index
            for param_spec in reversed(specs)
            if bucket_key(param_spec) == key and nbytes(param_spec) < size
        ]
        assert list(chain.from_iterable(small)) == expected
        for full, following in pairwise(small):
            filled_bytes = sum(nbytes(specs[index]) for index in full)
            assert filled_bytes <= size < filled_bytes + nbytes(specs[following[0]]), "the next parameter does not fit"


def bucket_key(param_spec: ParamSpec) -> tuple[bool, bool, torch.dtype]:
    return param_spec.group in WHOLE_GROUPS, param_spec.trainable, param_spec.dtype


def nbytes(param_spec: ParamSpec) -> int:
    return param_spec.storage_numel * param_spec.dtype.itemsize


@deterministic_examples
@given(params(), st.integers(0, 12), WORLD_SIZES, BUCKET_SIZES)
def test_extending_keeps_owners_and_continues_balancing(
    specs: list[ParamSpec], num_existing: int, ranks: int, size: int | None
) -> None:
    before = make_layout(specs[:num_existing], ranks, size)
    after = make_partitioner(size).extend(before, specs[num_existing:])
    assert after.params == tuple(specs)
    assert after.buckets[: len(before.buckets)] == before.buckets
    loads = [0.0] * ranks
    for param_spec in specs:
        if param_spec.group in WHOLE_GROUPS and param_spec.trainable:
            loads[after.owner_of(param_spec.index)] += superlinear_cost(param_spec)
    highest_cost = max(
        (
            superlinear_cost(param_spec)
            for param_spec in specs
            if param_spec.group in WHOLE_GROUPS and param_spec.trainable
        ),
        default=0,
    )
    assert max(loads) - min(loads) <= highest_cost + 1e-9


def optimal_max_load(costs: tuple[int, ...], ranks: int) -> int:
    """Return the smallest possible maximum load, by exhaustive search."""

    @cache
    def min_max_load(loads: tuple[int, ...], remaining: tuple[int, ...]) -> int:
        if not remaining:
            return max(loads)
        return min(
            min_max_load(tuple(sorted([*loads[:i], loads[i] + remaining[0], *loads[i + 1 :]])), remaining[1:])
            for i in range(ranks)
        )

    return min_max_load((0,) * ranks, costs)


@deterministic_examples
@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(1, 4))
def test_largest_first_assignment_is_close_to_optimal(costs: list[int], ranks: int) -> None:
    """Graham's bound: at most (4/3 - 1/3N) times the optimum."""
    specs = [spec(index, (1,)) for index in range(len(costs))]
    owners = assign_owners(Layout.empty(ranks), specs, lambda param_spec: costs[param_spec.index])
    loads = [sum(costs[index] for index, owner in owners.items() if owner == rank) for rank in range(ranks)]
    assert max(loads) <= (4 / 3 - 1 / (3 * ranks)) * optimal_max_load(tuple(costs), ranks) + 1e-9


def test_transformer_matrices_are_balanced() -> None:
    """The highest cost of a rank is at most 1 % above the mean."""
    shapes = [(768, 2304), (768, 768), (768, 3072), (3072, 768)] * 12
    layout = make_layout([spec(index, shape) for index, shape in enumerate(shapes)], 4)
    shapes_per_rank = [Counter(layout.params[i].shape for i in layout.params_owned_by(Rank(rank))) for rank in range(4)]
    loads = [sum(superlinear_cost(layout.params[i]) for i in layout.params_owned_by(Rank(rank))) for rank in range(4)]
    assert max(loads) <= 1.01 * sum(loads) / 4
    assert sum(shapes_per_rank, Counter()) == Counter(shapes)


def test_owners_depend_on_cost_not_numel() -> None:
    specs = [spec(0, (2, 2)), spec(1, (50,)), spec(2, (50,))]
    owners = assign_owners(Layout.empty(2), specs, lambda param_spec: 10 if param_spec.index == 0 else 1)
    assert owners == {0: 0, 1: 1, 2: 1}


@pytest.mark.parametrize("cost", [float("nan"), float("inf"), -1])
def test_invalid_cost_is_rejected(cost: float) -> None:
    with pytest.raises(ConfigError, match=rf"the cost of parameter 0 \(w\) to be a non-negative number, got {cost}"):
        MixedPartitioner({0: lambda _: cost}).extend(Layout.empty(2), [spec(0, name="w")])


def test_each_group_has_its_own_cost() -> None:
    """Two whole groups with different costs are balanced together."""
    specs = [spec(0, group=0), spec(1, group=0), spec(2, group=2)]
    costs = {0: lambda _: 1.0, 2: lambda _: 2.0}
    layout = MixedPartitioner(costs).extend(Layout.empty(2), specs)
    assert [layout.owner_of(index) for index in range(3)] == [1, 1, 0]


def test_first_ready_gradients_fill_the_first_bucket() -> None:
    """Alternating whole and flat-sharded parameters fill separate buckets; the first to fill comes first."""
    specs = [spec(index, (10,), group=index % 2) for index in range(8)]
    layout = make_layout(specs, 2, 80)
    assert [sorted(bucket.params) for bucket in layout.buckets] == [[5, 7], [4, 6], [1, 3], [0, 2]]
    assert [bucket.has_whole_params for bucket in layout.buckets] == [False, True, False, True]
