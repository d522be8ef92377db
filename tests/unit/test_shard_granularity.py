"""Cuts at multiples: pieces are as an optimizer of blocks needs them, and shards as equal as that allows."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.oracles import spec, specs
from tests.unit.test_partition import WORLD_SIZES, steadily
from zeroshard import ConfigError, FlatShards
from zeroshard.layout.layout import Layout
from zeroshard.layout.partition import ShardGranularity
from zeroshard.layout.spec import ParamSpec

SIZES = st.lists(st.one_of(st.integers(0, 40), st.integers(0, 30).map(lambda n: 8 * n)), min_size=1, max_size=6)
GRAINS = st.sampled_from(
    [
        ShardGranularity(8, 8),
        ShardGranularity(8, 24),
        ShardGranularity(4, 16),
        ShardGranularity(8, 20),
        ShardGranularity(1, 10),
    ]
)


def cut(made: Sequence[ParamSpec], ranks: int, grain: ShardGranularity, bucket_bytes: int = 1 << 20) -> Layout:
    return FlatShards(bucket_bytes, grain.align, grain.min_numel).extend(Layout.empty(ranks), made)


@steadily
@given(SIZES, WORLD_SIZES, GRAINS, st.sampled_from([100, 600, 1 << 20]))
def test_pieces_are_as_long_as_they_must_be(
    sizes: list[int], ranks: int, grain: ShardGranularity, bucket_bytes: int
) -> None:
    made = specs(sizes)
    layout = cut(made, ranks, grain, bucket_bytes)
    for one in made:
        pieces = layout.param_shards(one.index)
        assert sum(piece.in_param.length for piece in pieces) == one.storage_numel
        if len(pieces) > 1:
            assert all(piece.in_param.length % grain.align == 0 for piece in pieces)
            assert all(piece.in_param.length >= grain.min_numel for piece in pieces)


@steadily
@given(st.integers(1, 60), st.integers(1, 9), GRAINS)
def test_shards_of_what_can_be_cut_are_equal_up_to_the_grain(blocks: int, ranks: int, grain: ShardGranularity) -> None:
    numel = 8 * blocks
    layout = cut([spec(0, (numel,))], ranks, grain)
    lengths = [shard.length for shard in layout.buckets[0].shards]
    slack = grain.align if numel // ranks >= 2 * grain.min_shard_numel else grain.min_shard_numel
    enough = numel // ranks >= 2 * grain.min_shard_numel
    assert sum(lengths) == numel
    if enough:
        assert max(lengths) - min(lengths) <= 2 * slack


def test_a_large_parameter_is_cut_and_small_ones_are_not() -> None:
    layout = cut(specs([100, 64, 20]), 2, ShardGranularity(8, 16))
    assert [len(layout.param_shards(index)) for index in range(3)] == [1, 1, 1]
    layout = cut(specs([20, 800, 12]), 2, ShardGranularity(8, 16))
    assert [len(layout.param_shards(index)) for index in range(3)] == [1, 2, 1]


@pytest.mark.parametrize("stride", [(1, 64), (32, 1)])
def test_one_that_does_not_lie_in_order_stays_whole(stride: tuple[int, int]) -> None:
    """Blocks are of neighbours in the order of elements, shards of neighbours in memory."""
    layout = cut([spec(0, (64, 16), stride=stride)], 4, ShardGranularity(8, 8))
    assert len(layout.param_shards(0)) == 1
    assert len(cut([spec(0, (64, 16))], 4, ShardGranularity(8, 8)).param_shards(0)) == 4


def test_the_finest_grain_is_no_grain() -> None:
    made = specs([100, 64, 20])
    assert cut(made, 3, ShardGranularity()) == FlatShards(1 << 20).extend(Layout.empty(3), made)
    assert FlatShards().granularity is None
    assert FlatShards(align=64).granularity == ShardGranularity(64, 64)


@pytest.mark.parametrize("options", [{"align": 0}, {"align": 2.0}, {"min_numel": -1}, {"align": True}], ids=str)
def test_what_is_no_number_of_elements_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="takes a number of elements"):
        FlatShards(**options)


def test_which_grains_suit_others() -> None:
    assert ShardGranularity(512, 4096).satisfies(ShardGranularity(256, 4096))
    assert ShardGranularity(256, 4096).satisfies(ShardGranularity())
    assert not ShardGranularity(256, 256).satisfies(ShardGranularity(256, 4096))
    assert not ShardGranularity(384, 4096).satisfies(ShardGranularity(256, 4096))
    assert not ShardGranularity().satisfies(ShardGranularity(2, 2))


def test_contiguous() -> None:
    for tensor in (
        torch.empty(3, 1, 5),
        torch.empty(3, 5).t(),
        torch.empty(4, 6)[:, :5],
        torch.empty(0, 3),
        torch.ones(()),
    ):
        assert (
            spec(0, tuple(tensor.shape), stride=tensor.stride()).is_contiguous == tensor.is_contiguous()
            or not tensor.numel()
        )
