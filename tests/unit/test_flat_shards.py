"""Flat shards: owners and offsets of all elements, for any parameters and world size."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.oracles import spec, specs
from tests.unit.test_partition import GROUPS, WORLD_SIZES, Groups, deterministic_examples
from zeroshard import ConfigError, FlatShards, ZeroConfig
from zeroshard._types import MIB
from zeroshard.layout.layout import Bucket, Layout
from zeroshard.layout.partition import ALIGNMENT_BYTES, default_bucket_bytes
from zeroshard.layout.spec import ParamSpec, make_param_specs

BUCKET_BYTES = st.sampled_from([1, 4, 40, 100, 333, 1000, 8 * MIB])


def make_layout(param_specs: Sequence[ParamSpec], world_size: int, bucket_bytes: int = 8 * MIB) -> Layout:
    return FlatShards(bucket_bytes).extend(Layout.empty(world_size), param_specs)


def bucket_key(param_spec: ParamSpec) -> tuple[bool, torch.dtype, torch.device]:
    return param_spec.trainable, param_spec.dtype, param_spec.device


def nbytes(param_spec: ParamSpec) -> int:
    return param_spec.storage_numel * param_spec.dtype.itemsize


def params_in(layout: Layout, bucket: Bucket) -> list[ParamSpec]:
    """The parameters of a bucket, in memory order."""
    return [layout.params[index] for index in bucket.params]


@deterministic_examples
@given(GROUPS, WORLD_SIZES, BUCKET_BYTES)
def test_each_element_has_one_owner_and_one_offset(groups: Groups, world_size: int, bucket_bytes: int) -> None:
    param_specs = make_param_specs(groups)
    layout = make_layout(param_specs, world_size, bucket_bytes)
    owners: dict[int, Counter[int]] = defaultdict(Counter)
    elements: Counter[tuple[int, int]] = Counter()
    for bucket in layout.buckets:
        for param_shard in bucket.param_shards:
            owners[param_shard.param].update(range(*param_shard.in_param))
            elements.update((bucket.index, element) for element in range(*param_shard.in_bucket))
            assert bucket.shards[param_shard.owner].contains(param_shard.in_bucket)
    assert [owners[param_spec.index] for param_spec in param_specs] == [
        Counter(range(param_spec.storage_numel)) for param_spec in param_specs
    ]
    assert set(elements.values()) <= {1}


@deterministic_examples
@given(GROUPS, WORLD_SIZES, BUCKET_BYTES)
def test_each_param_is_contiguous_in_one_bucket(groups: Groups, world_size: int, bucket_bytes: int) -> None:
    """A parameter can therefore be a view of the bucket, regardless of how it is sharded."""
    param_specs = make_param_specs(groups)
    layout = make_layout(param_specs, world_size, bucket_bytes)
    for param_shards in map(layout.param_shards, range(len(param_specs))):
        assert len({param_shard.bucket for param_shard in param_shards}) == 1
        assert all(a.in_bucket.stop == b.in_bucket.start and a.owner < b.owner for a, b in pairwise(param_shards))


@deterministic_examples
@given(GROUPS, WORLD_SIZES, BUCKET_BYTES)
def test_shards_have_equal_length(groups: Groups, world_size: int, bucket_bytes: int) -> None:
    for bucket in make_layout(make_param_specs(groups), world_size, bucket_bytes).buckets:
        length = bucket.numel // world_size
        assert list(bucket.shards) == [(rank * length, (rank + 1) * length) for rank in range(world_size)]


@deterministic_examples
@given(GROUPS, WORLD_SIZES, BUCKET_BYTES)
def test_assignment_of_params_to_buckets(groups: Groups, world_size: int, bucket_bytes: int) -> None:
    """Last parameter first, into the current bucket of its dtype and device if it fits; large parameters are alone."""
    param_specs = make_param_specs(groups)
    layout = make_layout(param_specs, world_size, bucket_bytes)
    buckets = [params_in(layout, bucket) for bucket in layout.buckets]
    assert all(len({bucket_key(param_spec) for param_spec in members}) == 1 for members in buckets)
    for key in {bucket_key(param_spec) for param_spec in param_specs}:
        matching = [members for members in buckets if bucket_key(members[0]) == key]
        shared = [members for members in matching if nbytes(members[0]) < bucket_bytes]
        alone = [members for members in matching if nbytes(members[0]) >= bucket_bytes]
        assert all(len(members) == 1 for members in alone)
        assert all(sum(map(nbytes, members)) <= bucket_bytes for members in shared)
        for before, after in pairwise(shared):
            first = max(after, key=lambda param_spec: param_spec.index)
            assert first.index < min(param_spec.index for param_spec in before)
            assert sum(map(nbytes, before)) + nbytes(first) > bucket_bytes


@deterministic_examples
@given(GROUPS, WORLD_SIZES, BUCKET_BYTES)
def test_frozen_buckets_come_last(groups: Groups, world_size: int, bucket_bytes: int) -> None:
    layout = make_layout(make_param_specs(groups), world_size, bucket_bytes)
    trainable = [params_in(layout, bucket)[0].trainable for bucket in layout.buckets]
    assert trainable == sorted(trainable, reverse=True)


@deterministic_examples
@given(GROUPS, WORLD_SIZES, BUCKET_BYTES)
def test_groups_are_contiguous(groups: Groups, world_size: int, bucket_bytes: int) -> None:
    """A shard has at most one contiguous range of each group."""
    layout = make_layout(make_param_specs(groups), world_size, bucket_bytes)
    for bucket in layout.buckets:
        runs = [group for group, _ in groupby(param_spec.group for param_spec in params_in(layout, bucket))]
        assert len(set(runs)) == len(runs)


@deterministic_examples
@given(GROUPS, GROUPS, WORLD_SIZES, BUCKET_BYTES)
def test_extend_keeps_existing_buckets(first: Groups, second: Groups, world_size: int, bucket_bytes: int) -> None:
    param_specs = make_param_specs([*first, *second])
    num_existing = sum(len(group["params"]) for group in first)
    before = make_layout(param_specs[:num_existing], world_size, bucket_bytes)
    after = FlatShards(bucket_bytes).extend(before, param_specs[num_existing:])
    assert after.params == param_specs
    assert after.buckets[: len(before.buckets)] == before.buckets
    assert {
        param_shard.param for bucket in after.buckets[len(before.buckets) :] for param_shard in bucket.param_shards
    } == set(range(num_existing, len(param_specs)))


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
    """Up to rounding to whole elements, which matters if ranks own few of them."""
    for param_specs in large_models():
        layout = FlatShards().extend(Layout.empty(world_size), param_specs)
        loads = layout.numel_per_rank(trainable=True)
        trained = [bucket for bucket in layout.buckets if layout.params[bucket.params[0]].trainable]
        totals = [sum(param_shard.in_param.length for param_shard in bucket.param_shards) for bucket in trained]
        assert sum(totals) == sum(loads) > 960_000
        largest_equal_shard = sum(math.ceil(total / world_size) for total in totals)
        assert max(loads) <= max(1.001 * sum(loads) / world_size, largest_equal_shard), (
            f"{len(param_specs)} parameters, {sum(loads)}"
        )


@deterministic_examples
@given(st.lists(st.integers(1, 400_000), min_size=8, max_size=30), st.integers(2, 64))
@example([500_000, 500_000, 1], 64)
def test_memory_imbalance_for_random_sizes(sizes: list[int], world_size: int) -> None:
    param_specs = specs([*sizes, max(1, 1_000_001 - sum(sizes))])
    loads = make_layout(param_specs, world_size).numel_per_rank(trainable=True)
    assert max(loads) <= 1.001 * sum(loads) / world_size


def test_gaps_are_not_counted_as_state() -> None:
    param_specs = [spec(0, (1000, 1000), stride=(2000, 2)), spec(1, (5,))]
    loads = make_layout(param_specs, 4).numel_per_rank(trainable=True)
    assert sum(loads) == pytest.approx(1_000_005, abs=4)


# ---- alignment


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex128])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_large_params_are_aligned(dtype: torch.dtype, world_size: int) -> None:
    large = 2048 * ALIGNMENT_BYTES * world_size
    param_specs = [spec(i, (size,), dtype=dtype) for i, size in enumerate((large + 1, 3, large + 5, large))]
    (bucket,) = make_layout(param_specs, world_size, bucket_bytes=1 << 40).buckets
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
            param_shards = layout.param_shards(index)
            assert sum(param_shard.in_param.length for param_shard in param_shards) == size
            assert size or len(param_shards) == 1


def test_devices_get_separate_buckets() -> None:
    param_specs = [spec(0, device="cuda:0"), spec(1, device="cpu"), spec(2, device="cuda:0"), spec(3, device="cuda:1")]
    found = {str(bucket.device): bucket.params for bucket in make_layout(param_specs, 1).buckets}
    assert found == {"cuda:0": [2, 0], "cpu": [1], "cuda:1": [3]}


def test_last_param_comes_first() -> None:
    """Its gradient is expected first."""
    layout = make_layout(specs([16] * 6), 1, bucket_bytes=128)
    assert [bucket.params for bucket in layout.buckets] == [[5, 4], [3, 2], [1, 0]]


@pytest.mark.parametrize("value", [0, -1, 2.5, "8", 1e9, True])
def test_invalid_bucket_bytes(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"bucket_bytes=.*positive number of bytes"):
        FlatShards(value)


def test_config_takes_an_instance_not_a_class() -> None:
    assert ZeroConfig(partition=FlatShards(5)).partition == FlatShards(bucket_bytes=5)
    invalid: list[Any] = [FlatShards, "flat", 3]
    for value in invalid:
        with pytest.raises(ConfigError, match="partition"):
            ZeroConfig(partition=value)


def test_different_layouts_have_different_digests() -> None:
    usual = specs([16, 8, 5, 40])
    layouts = {
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
    assert len({layout.digest for layout in layouts.values()}) == len(layouts)
    assert make_layout(specs([16, 8, 5, 40]), 2, 100).digest == layouts["usual"].digest
    other_number = make_layout([spec(i, (n,), device="cuda:1") for i, n in enumerate([16, 8, 5, 40])], 2, 100)
    assert other_number.digest == layouts["on another device"].digest


@pytest.mark.parametrize(
    ("device", "model_mib", "world_size", "expected_mib"),
    [
        ("cpu", 1, 2, 8),
        ("cpu", 160, 2, 10),
        ("cpu", 160, 64, 16),  # 256 KiB for each rank
        ("cpu", 10_000, 2, 25),
        ("cpu", 1, 1024, 25),
        ("cpu", 1, 1, 200),
        ("cuda", 1, 8, 25),
        ("cuda", 800, 8, 50),
        ("cuda", 10_000, 8, 128),
        ("cuda", 1, 1024, 128),
    ],
)
def test_bucket_size_depends_on_model_and_ranks(
    device: str, model_mib: int, world_size: int, expected_mib: int
) -> None:
    assert default_bucket_bytes(torch.device(device), model_mib * MIB, world_size) == expected_mib * MIB


def test_default_buckets_of_a_layout() -> None:
    param_specs = [replace(each, device=torch.device("cuda")) for each in specs([MIB] * 160)]  # 640 MiB
    layout = FlatShards().extend(Layout.empty(4), param_specs)
    assert [len(bucket.slots) for bucket in layout.buckets] == [10] * 16  # 40 MiB each
