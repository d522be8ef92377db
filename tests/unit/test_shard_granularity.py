"""Aligned shards satisfy the granularity of a blockwise optimizer and are as equal as it allows."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.oracles import spec, specs
from tests.unit.test_partition import WORLD_SIZES, deterministic_examples
from zeroshard import ConfigError, FlatShards
from zeroshard.layout.layout import Layout
from zeroshard.layout.partition import ShardGranularity
from zeroshard.layout.spec import ParamSpec

SIZES = st.lists(st.one_of(st.integers(0, 40), st.integers(0, 30).map(lambda n: 8 * n)), min_size=1, max_size=6)
GRANULARITIES = st.sampled_from(
    [
        ShardGranularity(8, 8),
        ShardGranularity(8, 24),
        ShardGranularity(4, 16),
        ShardGranularity(8, 20),
        ShardGranularity(1, 10),
    ]
)


def make_layout(
    param_specs: Sequence[ParamSpec], ranks: int, granularity: ShardGranularity, bucket_bytes: int = 1 << 20
) -> Layout:
    return FlatShards(bucket_bytes, granularity.align, granularity.min_numel).extend(Layout.empty(ranks), param_specs)


@deterministic_examples
@given(SIZES, WORLD_SIZES, GRANULARITIES, st.sampled_from([100, 600, 1 << 20]))
def test_shards_satisfy_granularity(
    sizes: list[int], ranks: int, granularity: ShardGranularity, bucket_bytes: int
) -> None:
    param_specs = specs(sizes)
    layout = make_layout(param_specs, ranks, granularity, bucket_bytes)
    for param_spec in param_specs:
        param_shards = layout.param_shards(param_spec.index)
        assert sum(param_shard.in_param.length for param_shard in param_shards) == param_spec.storage_numel
        if len(param_shards) > 1:
            assert all(param_shard.in_param.length % granularity.align == 0 for param_shard in param_shards)
            assert all(param_shard.in_param.length >= granularity.min_numel for param_shard in param_shards)


@deterministic_examples
@given(st.integers(1, 60), st.integers(1, 9), GRANULARITIES)
def test_shards_are_equal_up_to_granularity(blocks: int, ranks: int, granularity: ShardGranularity) -> None:
    numel = 8 * blocks
    layout = make_layout([spec(0, (numel,))], ranks, granularity)
    lengths = [shard.length for shard in layout.buckets[0].shards]
    shortest = granularity.min_shard_numel
    is_large = numel // ranks >= 2 * shortest
    assert (len(lengths), sum(lengths)) == (ranks, numel)
    assert max(lengths) - min(lengths) <= (granularity.align if is_large else 2 * shortest)


def test_only_large_params_are_split() -> None:
    layout = make_layout(specs([100, 64, 20]), 2, ShardGranularity(8, 16))
    assert [len(layout.param_shards(index)) for index in range(3)] == [1, 1, 1]
    layout = make_layout(specs([20, 800, 12]), 2, ShardGranularity(8, 16))
    assert [len(layout.param_shards(index)) for index in range(3)] == [1, 2, 1]


@pytest.mark.parametrize("stride", [(1, 64), (32, 1)])
def test_non_contiguous_param_is_not_split(stride: tuple[int, int]) -> None:
    """Blocks are contiguous in element order, shards are contiguous in memory."""
    layout = make_layout([spec(0, (64, 16), stride=stride)], 4, ShardGranularity(8, 8))
    assert len(layout.param_shards(0)) == 1
    assert len(make_layout([spec(0, (64, 16))], 4, ShardGranularity(8, 8)).param_shards(0)) == 4


def test_default_granularity_is_elementwise() -> None:
    param_specs = specs([100, 64, 20])
    assert make_layout(param_specs, 3, ShardGranularity()) == FlatShards(1 << 20).extend(Layout.empty(3), param_specs)
    assert FlatShards().granularity is None
    assert FlatShards(align=64).granularity == ShardGranularity(64, 64)


@pytest.mark.parametrize("options", [{"align": 0}, {"align": 2.0}, {"min_numel": -1}, {"align": True}], ids=str)
def test_invalid_options_are_rejected(options: dict[str, int]) -> None:
    (name,) = options
    with pytest.raises(ConfigError, match=rf"FlatShards\({name}=\.\.\.\) to be a positive number of elements"):
        FlatShards(**options)


def test_satisfies() -> None:
    assert ShardGranularity(512, 4096).satisfies(ShardGranularity(256, 4096))
    assert ShardGranularity(256, 4096).satisfies(ShardGranularity())
    assert not ShardGranularity(256, 256).satisfies(ShardGranularity(256, 4096))
    assert not ShardGranularity(384, 4096).satisfies(ShardGranularity(256, 4096))
    assert not ShardGranularity().satisfies(ShardGranularity(2, 2))


def test_spec_is_contiguous() -> None:
    for tensor in (
        torch.empty(3, 1, 5),
        torch.empty(3, 5).t(),
        torch.empty(4, 6)[:, :5],
        torch.empty(0, 3),
        torch.ones(()),
    ):
        assert spec(0, tuple(tensor.shape), stride=tensor.stride()).is_contiguous == tensor.is_contiguous()
