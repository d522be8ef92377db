"""Flat shards: owners and offsets of all elements, for any parameters and world size."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.oracles import spec, specs
from tests.unit.test_partition import GROUPS, WORLD_SIZES, Groups, steadily
from zeroshard import ConfigError, FlatShards, ZeroConfig
from zeroshard._types import MIB
from zeroshard.layout.layout import Bucket, Layout
from zeroshard.layout.partition import ALIGNMENT_BYTES
from zeroshard.layout.spec import ParamSpec, make_param_specs

BUCKET_BYTES = st.sampled_from([1, 4, 40, 100, 333, 1000, 8 * MIB])


def make_layout(made: Sequence[ParamSpec], world_size: int, bucket_bytes: int = 8 * MIB) -> Layout:
    return FlatShards(bucket_bytes).extend(Layout.empty(world_size), made)


def bucket_key(one: ParamSpec) -> tuple[bool, torch.dtype, torch.device]:
    return one.trainable, one.dtype, one.device


def nbytes(one: ParamSpec) -> int:
    return one.storage_numel * one.dtype.itemsize


def params_in(layout: Layout, bucket: Bucket) -> list[ParamSpec]:
    """The parameters of a bucket, in memory order."""
    return [layout.params[index] for index in bucket.params]


@steadily
@given(GROUPS, WORLD_SIZES, BUCKET_BYTES)
def test_each_element_has_one_owner_and_one_offset(groups: Groups, world_size: int, bucket_bytes: int) -> None:
    made = make_param_specs(groups)
    layout = make_layout(made, world_size, bucket_bytes)
    owners: dict[int, Counter[int]] = defaultdict(Counter)
    places: Counter[tuple[int, int]] = Counter()
    for bucket in layout.buckets:
        for piece in bucket.param_shards:
            owners[piece.param].update(range(*piece.in_param))
            places.update((bucket.index, element) for element in range(*piece.in_bucket))
            assert bucket.shards[piece.owner].contains(piece.in_bucket)
    assert [owners[one.index] for one in made] == [Counter(range(one.storage_numel)) for one in made]
    assert set(places.values()) <= {1}


@steadily
@given(GROUPS, WORLD_SIZES, BUCKET_BYTES)
def test_each_param_is_contiguous_in_one_bucket(groups: Groups, world_size: int, bucket_bytes: int) -> None:
    """So it can be a view of the bucket, however it is sharded."""
    made = make_param_specs(groups)
    layout = make_layout(made, world_size, bucket_bytes)
    for pieces in map(layout.param_shards, range(len(made))):
        assert len({piece.bucket for piece in pieces}) == 1
        assert all(a.in_bucket.stop == b.in_bucket.start and a.owner < b.owner for a, b in pairwise(pieces))


@steadily
@given(GROUPS, WORLD_SIZES, BUCKET_BYTES)
def test_shards_have_equal_length(groups: Groups, world_size: int, bucket_bytes: int) -> None:
    for bucket in make_layout(make_param_specs(groups), world_size, bucket_bytes).buckets:
        length = bucket.numel // world_size
        assert list(bucket.shards) == [(rank * length, (rank + 1) * length) for rank in range(world_size)]


@steadily
@given(GROUPS, WORLD_SIZES, BUCKET_BYTES)
def test_assignment_of_params_to_buckets(groups: Groups, world_size: int, bucket_bytes: int) -> None:
    """Last parameter first, into the current bucket of its dtype and device if it fits; large parameters are alone."""
    made = make_param_specs(groups)
    layout = make_layout(made, world_size, bucket_bytes)
    found = [params_in(layout, bucket) for bucket in layout.buckets]
    assert all(len({bucket_key(one) for one in together}) == 1 for together in found)
    for wanted in {bucket_key(one) for one in made}:
        same = [together for together in found if bucket_key(together[0]) == wanted]
        shared = [together for together in same if nbytes(together[0]) < bucket_bytes]
        alone = [together for together in same if nbytes(together[0]) >= bucket_bytes]
        assert all(len(together) == 1 for together in alone)
        assert all(sum(map(nbytes, together)) <= bucket_bytes for together in shared)
        for before, after in pairwise(shared):
            first = max(after, key=lambda one: one.index)
            assert first.index < min(one.index for one in before)
            assert sum(map(nbytes, before)) + nbytes(first) > bucket_bytes


@steadily
@given(GROUPS, WORLD_SIZES, BUCKET_BYTES)
def test_frozen_buckets_come_last(groups: Groups, world_size: int, bucket_bytes: int) -> None:
    layout = make_layout(make_param_specs(groups), world_size, bucket_bytes)
    trains = [params_in(layout, bucket)[0].trainable for bucket in layout.buckets]
    assert trains == sorted(trains, reverse=True)


@steadily
@given(GROUPS, WORLD_SIZES, BUCKET_BYTES)
def test_groups_are_contiguous(groups: Groups, world_size: int, bucket_bytes: int) -> None:
    """A shard has at most one contiguous range of each group."""
    layout = make_layout(make_param_specs(groups), world_size, bucket_bytes)
    for bucket in layout.buckets:
        runs = [group for group, _ in groupby(one.group for one in params_in(layout, bucket))]
        assert len(set(runs)) == len(runs)


@steadily
@given(GROUPS, GROUPS, WORLD_SIZES, BUCKET_BYTES)
def test_extend_keeps_existing_buckets(first: Groups, second: Groups, world_size: int, bucket_bytes: int) -> None:
    made = make_param_specs([*first, *second])
    known = sum(len(group["params"]) for group in first)
    before = make_layout(made[:known], world_size, bucket_bytes)
    after = FlatShards(bucket_bytes).extend(before, made[known:])
    assert after.params == made
    assert after.buckets[: len(before.buckets)] == before.buckets
    assert {piece.param for bucket in after.buckets[len(before.buckets) :] for piece in bucket.param_shards} == set(
        range(known, len(made))
    )


# ---- balance


def large_models() -> Iterator[list[ParamSpec]]:
    dtypes = [torch.float32, torch.bfloat16, torch.float64]
    yield specs([1_000_001])
    yield specs([1_000_449])  # one element more than 977 for each of 1,024 ranks
    yield specs([977] * 1024)
    yield specs([7, 65_536] * 16)
    yield specs([1001 * size for size in (47, 71, 7, 91, 64, 17, 91, 16, 25, 52, 73, 27, 84, 22, 47, 86, 98, 100, 9)])
    yield specs([1 + 7919 * i % 5000 for i in range(450)])
    yield specs([1, 2_097_100] * 3)
    yield specs([20_000_000, 300, 2_000_000])
    yield specs([768 * 3072, 3072, 3072 * 768, 768, 768, 768 * 768] * 4)
    yield [spec(i, (999,), dtype=dtypes[i % 3], group=i % 2) for i in range(1200)]
    yield [spec(i, (1301,), trainable=i % 5 > 0) for i in range(1200)]


@pytest.mark.parametrize("world_size", [2, 3, 4, 7, 8, 64, 100, 333, 512, 777, 1000, 1023, 1024])
def test_memory_imbalance_is_at_most_one_thousandth(world_size: int) -> None:
    """Up to rounding to whole elements, which matters where ranks own few of them."""
    for made in large_models():
        layout = FlatShards().extend(Layout.empty(world_size), made)
        loads = layout.numel_per_rank(trainable=True)
        trained = [bucket for bucket in layout.buckets if layout.params[bucket.params[0]].trainable]
        totals = [sum(piece.in_param.length for piece in bucket.param_shards) for bucket in trained]
        assert sum(totals) == sum(loads) > 960_000
        finest = sum(math.ceil(total / world_size) for total in totals)
        assert max(loads) <= max(1.001 * sum(loads) / world_size, finest), f"{len(made)} parameters, {sum(loads)}"


@steadily
@given(st.lists(st.integers(1, 400_000), min_size=8, max_size=30), st.integers(2, 64))
@example([500_000, 500_000, 1], 64)
def test_memory_imbalance_for_random_sizes(sizes: list[int], world_size: int) -> None:
    made = specs([*sizes, max(1, 1_000_001 - sum(sizes))])
    loads = make_layout(made, world_size).numel_per_rank(trainable=True)
    assert max(loads) <= 1.001 * sum(loads) / world_size


def test_gaps_are_not_counted_as_state() -> None:
    made = [spec(0, (1000, 1000), stride=(2000, 2)), spec(1, (5,))]
    loads = make_layout(made, 4).numel_per_rank(trainable=True)
    assert sum(loads) == pytest.approx(1_000_005, abs=4)


# ---- alignment


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex128])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_large_params_are_aligned(dtype: torch.dtype, world_size: int) -> None:
    large = 2048 * ALIGNMENT_BYTES * world_size
    made = [spec(i, (size,), dtype=dtype) for i, size in enumerate((large + 1, 3, large + 5, large))]
    (bucket,) = make_layout(made, world_size, bucket_bytes=1 << 40).buckets
    starts = {slot.param: slot.span.start for slot in bucket.slots}
    assert all(starts[index] * dtype.itemsize % ALIGNMENT_BYTES == 0 for index in (0, 2, 3))
    assert all(shard.start * dtype.itemsize % ALIGNMENT_BYTES == 0 for shard in bucket.shards)


def test_small_params_of_large_models_are_aligned() -> None:
    """Including those in a small bucket of their own: misaligned biases change the summation order of some kernels."""
    layout = make_layout(specs([700, 490_000, 700, 490_000, 700, 1, 700]), 2, bucket_bytes=2**20)
    starts = [layout.param_shards(index)[0].in_bucket.start * 4 % ALIGNMENT_BYTES for index in range(7)]
    assert len(layout.buckets) == 3
    assert starts == [0] * 7


def test_small_models_are_not_padded_for_alignment() -> None:
    (bucket,) = make_layout(specs([3, 5, 7, 1]), 2).buckets
    assert bucket.numel == 16


# ---- edges


def test_more_ranks_than_elements() -> None:
    layout = make_layout(specs([3, 2]), 9)
    assert layout.numel_per_rank(trainable=True) == [1, 1, 1, 1, 1, 0, 0, 0, 0]


def test_empty_param_has_one_empty_shard() -> None:
    for sizes in ([0], [0, 0], [4, 0], [0, 4], [5, 0, 3]):
        layout = make_layout(specs(sizes), 3)
        for index, size in enumerate(sizes):
            pieces = layout.param_shards(index)
            assert sum(piece.in_param.length for piece in pieces) == size
            assert size or len(pieces) == 1


def test_devices_get_separate_buckets() -> None:
    made = [spec(0, device="cuda:0"), spec(1, device="cpu"), spec(2, device="cuda:0"), spec(3, device="cuda:1")]
    found = {str(bucket.device): bucket.params for bucket in make_layout(made, 1).buckets}
    assert found == {"cuda:0": [2, 0], "cpu": [1], "cuda:1": [3]}


def test_last_param_comes_first() -> None:
    """Its gradient is expected first."""
    layout = make_layout(specs([16] * 6), 1, bucket_bytes=128)
    assert [bucket.params for bucket in layout.buckets] == [[5, 4], [3, 2], [1, 0]]


@pytest.mark.parametrize("bad", [0, -1, 2.5, "8", 1e9, True])
def test_invalid_bucket_bytes(bad: Any) -> None:
    with pytest.raises(ConfigError, match=r"bucket_bytes=.*a number of bytes"):
        FlatShards(bad)


def test_config_takes_an_instance_not_a_class() -> None:
    assert ZeroConfig(partition=FlatShards(5)).partition == FlatShards(bucket_bytes=5)
    wrong: list[Any] = [FlatShards, "flat", 3]
    for given_instead in wrong:
        with pytest.raises(ConfigError, match="partition"):
            ZeroConfig(partition=given_instead)


def test_different_layouts_have_different_digests() -> None:
    usual = specs([16, 8, 5, 40])
    made = {
        "usual": make_layout(usual, 2, 100),
        "other buckets": make_layout(usual, 2, 1000),
        "other ranks": make_layout(usual, 3, 100),
        "other sizes": make_layout(specs([16, 8, 40, 5]), 2, 100),
        "other dtype": make_layout([spec(i, (n,), dtype=torch.bfloat16) for i, n in enumerate([16, 8, 5, 40])], 2, 100),
        "a frozen one": make_layout([*usual[:2], spec(2, (5,), trainable=False), usual[3]], 2, 100),
        "in groups": make_layout([*usual[:2], spec(2, (5,), group=1), usual[3]], 2, 1000),
        "on another device": make_layout(
            [spec(i, (n,), device="cuda:0") for i, n in enumerate([16, 8, 5, 40])], 2, 100
        ),
        "one more": make_layout(specs([16, 8, 5, 40, 1]), 2, 100),
        "extended": FlatShards(100).extend(make_layout(usual[:2], 2, 100), usual[2:]),
    }
    assert len({layout.digest for layout in made.values()}) == len(made)
    assert make_layout(specs([16, 8, 5, 40]), 2, 100).digest == made["usual"].digest
    other_number = make_layout([spec(i, (n,), device="cuda:1") for i, n in enumerate([16, 8, 5, 40])], 2, 100)
    assert other_number.digest == made["on another device"].digest
