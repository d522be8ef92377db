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


def superlinear_cost(one: ParamSpec) -> float:
    """Cost that grows faster than numel, like matrix products."""
    return 1.0 + one.numel * math.sqrt(one.numel)


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
    spans: dict[int, list[tuple[int, int]]] = {one.index: [] for one in specs}
    for bucket in layout.buckets:
        for piece in bucket.param_shards:
            spans[piece.param].append((piece.in_param.start, piece.in_param.stop))
            assert bucket.shards[piece.owner].contains(piece.in_bucket)
    for one in specs:
        ends = sorted(spans[one.index])
        assert sum(stop - start for start, stop in ends) == one.storage_numel
        assert all(a[1] == b[0] for a, b in pairwise(ends))
        assert one.group in FLAT_GROUPS or len(ends) == 1, "whole"


@deterministic_examples
@given(params(), WORLD_SIZES, BUCKET_SIZES)
def test_whole_params_are_aligned_in_homogeneous_buckets(specs: list[ParamSpec], ranks: int, size: int | None) -> None:
    for bucket in make_layout(specs, ranks, size).buckets:
        members = [specs[index] for index in bucket.params]
        assert len({(one.group in WHOLE_GROUPS, one.trainable, one.dtype, one.device) for one in members}) == 1
        assert bucket.has_whole_params == (members[0].group in WHOLE_GROUPS)
        for room in bucket.slots if bucket.has_whole_params else ():
            assert room.span.start * bucket.dtype.itemsize % ALIGNMENT_BYTES == 0


@deterministic_examples
@given(params(), WORLD_SIZES, st.integers(1, 600))
def test_buckets_are_filled_in_backward_order(specs: list[ParamSpec], ranks: int, size: int) -> None:
    """Backward finishes the last parameter first. Frozen parameters have no gradients and come last."""
    buckets = [sorted(bucket.params, reverse=True) for bucket in make_layout(specs, ranks, size).buckets]
    trained = [specs[members[0]].trainable for members in buckets]
    assert trained == sorted(trained, reverse=True)
    kinds = {(one.group in WHOLE_GROUPS, one.trainable, one.dtype): one for one in specs}
    for kind in kinds:
        alike = [it for it in buckets if kind == bucket_key(specs[it[0]])]
        small = [it for it in alike if nbytes(specs[it[0]]) < size]
        assert all(len(it) == 1 for it in alike if it not in small), "a large one is alone"
        expected = [one.index for one in reversed(specs) if bucket_key(one) == kind and nbytes(one) < size]
        assert list(chain.from_iterable(small)) == expected
        for full, following in pairwise(small):
            held = sum(nbytes(specs[index]) for index in full)
            assert held <= size < held + nbytes(specs[following[0]]), "the next would not have fitted"


def bucket_key(one: ParamSpec) -> tuple[bool, bool, torch.dtype]:
    return one.group in WHOLE_GROUPS, one.trainable, one.dtype


def nbytes(one: ParamSpec) -> int:
    return one.storage_numel * one.dtype.itemsize


@deterministic_examples
@given(params(), st.integers(0, 12), WORLD_SIZES, BUCKET_SIZES)
def test_extending_keeps_owners_and_continues_balancing(
    specs: list[ParamSpec], known: int, ranks: int, size: int | None
) -> None:
    before = make_layout(specs[:known], ranks, size)
    after = make_partitioner(size).extend(before, specs[known:])
    assert after.params == tuple(specs)
    assert after.buckets[: len(before.buckets)] == before.buckets
    loads = [0.0] * ranks
    for one in specs:
        if one.group in WHOLE_GROUPS and one.trainable:
            loads[after.owner_of(one.index)] += superlinear_cost(one)
    dearest = max((superlinear_cost(one) for one in specs if one.group in WHOLE_GROUPS and one.trainable), default=0)
    assert max(loads) - min(loads) <= dearest + 1e-9


def optimal_max_load(costs: tuple[int, ...], ranks: int) -> int:
    """Return the smallest possible maximum load, by exhaustive search."""

    @cache
    def least(loads: tuple[int, ...], left: tuple[int, ...]) -> int:
        if not left:
            return max(loads)
        return min(
            least(tuple(sorted([*loads[:i], loads[i] + left[0], *loads[i + 1 :]])), left[1:]) for i in range(ranks)
        )

    return least((0,) * ranks, costs)


@deterministic_examples
@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(1, 4))
def test_largest_first_assignment_is_close_to_optimal(costs: list[int], ranks: int) -> None:
    """Graham's bound: at most (4/3 - 1/3N) times the optimum."""
    specs = [spec(index, (1,)) for index in range(len(costs))]
    owners = assign_owners(Layout.empty(ranks), specs, lambda one: costs[one.index])
    loads = [sum(costs[index] for index, owner in owners.items() if owner == rank) for rank in range(ranks)]
    assert max(loads) <= (4 / 3 - 1 / (3 * ranks)) * optimal_max_load(tuple(costs), ranks) + 1e-9


def test_transformer_matrices_are_balanced() -> None:
    """The highest cost of a rank is at most 1 % above the mean."""
    shapes = [(768, 2304), (768, 768), (768, 3072), (3072, 768)] * 12
    layout = make_layout([spec(index, shape) for index, shape in enumerate(shapes)], 4)
    held = [Counter(layout.params[i].shape for i in layout.params_owned_by(Rank(rank))) for rank in range(4)]
    loads = [sum(superlinear_cost(layout.params[i]) for i in layout.params_owned_by(Rank(rank))) for rank in range(4)]
    assert max(loads) <= 1.01 * sum(loads) / 4
    assert sum(held, Counter()) == Counter(shapes)


def test_owners_depend_on_cost_not_numel() -> None:
    specs = [spec(0, (2, 2)), spec(1, (50,)), spec(2, (50,))]
    owners = assign_owners(Layout.empty(2), specs, lambda one: 10 if one.index == 0 else 1)
    assert owners == {0: 0, 1: 1, 2: 1}


@pytest.mark.parametrize("cost", [float("nan"), float("inf"), -1])
def test_invalid_cost_is_rejected(cost: float) -> None:
    with pytest.raises(ConfigError, match=r"the cost of parameter 0 \(w\) is .*: it must be a number of 0 or more"):
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
