"""Cuts at multiples: pieces are as an optimizer of blocks needs them, and shards as equal as that allows."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.oracles import spec, specs
from tests.unit.test_partition import WORLD_SIZES, steadily
from zeroshard import ConfigError, FlatShards
from zeroshard.layout.grain import Grain
from zeroshard.layout.layout import Layout
from zeroshard.layout.specs import ParamSpec

SIZES = st.lists(st.one_of(st.integers(0, 40), st.integers(0, 30).map(lambda n: 8 * n)), min_size=1, max_size=6)
GRAINS = st.sampled_from([Grain(8, 8), Grain(8, 24), Grain(4, 16), Grain(8, 20), Grain(1, 10)])


def cut(made: Sequence[ParamSpec], ranks: int, grain: Grain, bucket_bytes: int = 1 << 20) -> Layout:
    return FlatShards(bucket_bytes, grain.align, grain.least).extend(Layout.empty(ranks), made)


@steadily
@given(SIZES, WORLD_SIZES, GRAINS, st.sampled_from([100, 600, 1 << 20]))
def test_pieces_are_as_long_as_they_must_be(sizes: list[int], ranks: int, grain: Grain, bucket_bytes: int) -> None:
    made = specs(sizes)
    layout = cut(made, ranks, grain, bucket_bytes)
    for one in made:
        pieces = layout.pieces_of_param(one.index)
        assert sum(piece.in_param.length for piece in pieces) == one.extent
        if len(pieces) > 1:
            assert all(piece.in_param.length % grain.align == 0 for piece in pieces)
            assert all(piece.in_param.length >= grain.least for piece in pieces)


@steadily
@given(st.integers(1, 60), st.integers(1, 9), GRAINS)
def test_shards_of_what_can_be_cut_are_equal_up_to_the_grain(blocks: int, ranks: int, grain: Grain) -> None:
    numel = 8 * blocks
    layout = cut([spec(0, (numel,))], ranks, grain)
    lengths = [shard.length for shard in layout.buckets[0].shards]
    slack = grain.align if numel // ranks >= 2 * grain.shortest else grain.shortest
    enough = numel // ranks >= 2 * grain.shortest
    assert sum(lengths) == numel
    if enough:
        assert max(lengths) - min(lengths) <= 2 * slack


def test_a_large_parameter_is_cut_and_small_ones_are_not() -> None:
    layout = cut(specs([100, 64, 20]), 2, Grain(8, 16))
    assert [len(layout.pieces_of_param(index)) for index in range(3)] == [1, 1, 1]
    layout = cut(specs([20, 800, 12]), 2, Grain(8, 16))
    assert [len(layout.pieces_of_param(index)) for index in range(3)] == [1, 2, 1]


@pytest.mark.parametrize("stride", [(1, 64), (32, 1)])
def test_one_that_does_not_lie_in_order_stays_whole(stride: tuple[int, int]) -> None:
    """Blocks are of neighbours in the order of elements, shards of neighbours in memory."""
    layout = cut([spec(0, (64, 16), stride=stride)], 4, Grain(8, 8))
    assert len(layout.pieces_of_param(0)) == 1
    assert len(cut([spec(0, (64, 16))], 4, Grain(8, 8)).pieces_of_param(0)) == 4


def test_the_finest_grain_is_no_grain() -> None:
    made = specs([100, 64, 20])
    assert cut(made, 3, Grain()) == FlatShards(1 << 20).extend(Layout.empty(3), made)
    assert FlatShards().grain is None
    assert FlatShards(align=64).grain == Grain(64, 64)


@pytest.mark.parametrize("options", [{"align": 0}, {"align": 2.0}, {"least": -1}, {"align": True}], ids=str)
def test_what_is_no_number_of_elements_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="takes a number of elements"):
        FlatShards(**options)


def test_which_grains_suit_others() -> None:
    assert Grain(512, 4096).suits(Grain(256, 4096))
    assert Grain(256, 4096).suits(Grain())
    assert not Grain(256, 256).suits(Grain(256, 4096))
    assert not Grain(384, 4096).suits(Grain(256, 4096))
    assert not Grain().suits(Grain(2, 2))


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
