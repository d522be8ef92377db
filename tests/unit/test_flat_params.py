"""What a rank holds of flat buckets: few long tensors, cut where gradients are missing, with all their state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import optim

from tests.support.oracles import spec, specs
from zeroshard import FlatShards
from zeroshard._types import Rank, Span
from zeroshard.engine.flat_params import FlatParam, FlatParams
from zeroshard.layout.layout import Layout
from zeroshard.layout.spec import ParamSpec

MOMENTA = frozenset({"exp_avg", "exp_avg_sq"})


class Shards:
    """The memory of a rank's shards."""

    def __init__(self, layout: Layout, rank: int) -> None:
        self.flat = [torch.arange(float(bucket.shards[rank].length)) for bucket in layout.buckets]

    def view(self, bucket: int, span: Span, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
        return self.flat[bucket][slice(*span)].as_strided(shape, stride)


def held(made: list[ParamSpec], rank: int = 0, ranks: int = 1, bucket_bytes: int = 1 << 20) -> FlatParams:
    layout = FlatShards(bucket_bytes).extend(Layout.empty(ranks), made)
    holdings = FlatParams(Rank(rank), Shards(layout, rank).view, can_join_shards=True, param_shaped_keys=MOMENTA)
    holdings.extend(layout, range(1 + max(one.group for one in made)))
    return holdings


def stepped(holdings: FlatParams, steps: int = 1) -> optim.Adam:
    optimizer = optim.Adam([{"params": [segment.param for segment in group]} for group in holdings.by_group])
    for _ in range(steps):
        for segment in holdings:
            segment.param.grad = segment.param.detach().sin()
        optimizer.step()
    return optimizer


def params_of(segments: list[FlatParam]) -> list[list[int]]:
    return [[piece.param for piece in segment.param_shards] for segment in segments]


def test_a_group_is_one_tensor_a_bucket() -> None:
    made = [spec(i, (4,), group=i % 2) for i in range(6)]
    holdings = held(made)
    assert [params_of(segments) for segments in holdings.by_group] == [[[4, 2, 0]], [[5, 3, 1]]]
    assert [segment.param.shape for segment in holdings] == [(12,), (12,)]
    assert [len(group) for group in held(made, bucket_bytes=48).by_group] == [2, 2]


def test_they_are_views_of_the_shards() -> None:
    made = specs([5, 3, 7])
    layout = FlatShards(1 << 20).extend(Layout.empty(2), made)
    for rank in range(2):
        shards = Shards(layout, rank)
        holdings = FlatParams(Rank(rank), shards.view, can_join_shards=True, param_shaped_keys=MOMENTA)
        holdings.extend(layout, [0])
        (segment,) = holdings
        assert segment.param.data_ptr() == shards.flat[0].data_ptr()
        assert torch.equal(segment.view_of(torch.arange(8.0)), torch.arange(float(segment.param.numel())))


def test_a_rank_may_hold_nothing_of_a_group() -> None:
    holdings = held(specs([1, 1]), rank=3, ranks=4)
    assert holdings.by_group == [[]]
    assert not holdings.param_ids()


PRESENT = st.lists(st.booleans(), min_size=6, max_size=6)


@settings(max_examples=40, derandomize=True, deadline=None, database=None)
@given(st.lists(PRESENT, min_size=1, max_size=4), st.integers(1, 3))
def test_splits_follow_the_gradients_and_lose_nothing(patterns: list[list[bool]], ranks: int) -> None:
    for rank in range(ranks):
        holdings = held(specs([4, 1, 6, 3, 5, 2]), rank, ranks)
        optimizer = stepped(holdings)
        before = elements(holdings, optimizer)
        for present in patterns:
            holdings.split_by_mask(bytes(present), optimizer)
            assert optimizer.param_groups[0]["params"] == [segment.param for segment in holdings]
            for segment in holdings:
                assert len({present[piece.param] for piece in segment.param_shards}) == 1
        assert elements(holdings, optimizer) == before
        assert set(optimizer.state) == {segment.param for segment in holdings}


def elements(holdings: FlatParams, optimizer: optim.Optimizer) -> dict[tuple[int, int], tuple[float, ...]]:
    """Value, momenta and step count of each element, by parameter and place in it."""
    found = {}
    for segment in holdings:
        state = optimizer.state[segment.param]
        for piece in segment.param_shards:
            rows = [segment.param.detach(), state["exp_avg"], state["exp_avg_sq"]]
            values = torch.stack(rows)[:, slice(*segment.span_of(piece))].T.tolist()
            for place, row in zip(range(*piece.in_param), values, strict=True):
                found[piece.param, place] = (*row, float(state["step"]))
    return found


def test_parts_share_no_step_count() -> None:
    holdings = held(specs([4, 4, 4]))
    optimizer = stepped(holdings)
    holdings.split_by_mask(b"\1\0\1", optimizer)
    counts = [optimizer.state[segment.param]["step"] for segment in holdings]
    assert len({count.data_ptr() for count in counts}) == len(counts) == 3


def test_parts_share_the_memory_of_the_momenta() -> None:
    """A split copies nothing."""
    holdings = held(specs([4, 4]))
    optimizer = stepped(holdings)
    (whole,) = holdings
    pointer = optimizer.state[whole.param]["exp_avg"].data_ptr()
    holdings.split_by_mask(b"\1\0", optimizer)
    assert [optimizer.state[segment.param]["exp_avg"].data_ptr() - pointer for segment in holdings] == [0, 16]


def test_nothing_is_split_that_need_not_be() -> None:
    holdings = held([*specs([4, 4]), *specs([4], group=1, first=2)])
    optimizer = stepped(holdings)
    before = list(holdings)
    for present in (b"\1\1\1", b"\0\0\0", b"\1\1\0"):
        holdings.split_by_mask(present, optimizer)
    assert list(holdings) == before


def test_regrouping_joins_and_can_be_undone() -> None:
    holdings = held(specs([4, 4, 4]))
    optimizer = stepped(holdings)
    holdings.split_by_mask(b"\1\0\1", optimizer)
    before, kept = list(holdings), {param: dict(state) for param, state in optimizer.state.items()}
    undo = holdings.reflatten(optimizer, lambda piece: piece.param == 0)
    assert params_of(list(holdings)) == [[2, 1], [0]]
    assert not optimizer.state
    assert optimizer.param_groups[0]["params"] == [segment.param for segment in holdings]
    undo()
    assert list(holdings) == before
    assert optimizer.param_groups[0]["params"] == [segment.param for segment in before]
    assert {param: dict(state) for param, state in optimizer.state.items()} == kept


def test_extending_adds_and_can_be_taken_back() -> None:
    made = specs([4, 4])
    first = FlatShards(1 << 20).extend(Layout.empty(1), made)
    second = FlatShards(1 << 20).extend(first, specs([3], group=1, first=2))
    holdings = FlatParams(Rank(0), Shards(second, 0).view, can_join_shards=True, param_shaped_keys=MOMENTA)
    holdings.extend(first, [0])
    before = list(holdings)
    holdings.extend(second, [0, 1])
    assert params_of(list(holdings)) == [[1, 0], [2]]
    holdings.rollback(first, 1)
    assert list(holdings) == before
    holdings.extend(second, [0, 1])
    assert params_of(list(holdings)) == [[1, 0], [2]]


def test_the_state_of_a_piece_is_a_view() -> None:
    holdings = held(specs([4, 3]))
    optimizer = stepped(holdings)
    (segment,) = holdings
    state: dict[Any, Any] = optimizer.state[segment.param]
    found = [holdings.shard_state(segment, piece, state) for piece in segment.param_shards]
    assert [one["exp_avg"].tolist() for one in found] == [
        state["exp_avg"][slice(*segment.span_of(piece))].tolist() for piece in segment.param_shards
    ]
    found[0]["exp_avg"].zero_()
    assert not state["exp_avg"][slice(*segment.span_of(segment.param_shards[0]))].any()
    assert found[0]["step"] is found[1]["step"] is state["step"]


def test_of_one_element_the_self_test_says_what_is_cut() -> None:
    holdings = held(specs([1]))
    one = torch.zeros(1)
    assert holdings.is_sharded("exp_avg", one, one)
    assert not holdings.is_sharded("other", one, one)
    assert not holdings.is_sharded("step", torch.zeros(()), one)
    assert not holdings.is_sharded("exp_avg", 3.0, one)


def test_uncut_parameters_keep_their_shapes() -> None:
    made = [spec(0, (2, 3)), spec(1, (4,))]
    layout = FlatShards(1 << 20).extend(Layout.empty(1), made)
    holdings = FlatParams(Rank(0), Shards(layout, 0).view, can_join_shards=False, param_shaped_keys=MOMENTA)
    holdings.extend(layout, [0])
    assert sorted(tuple(segment.param.shape) for segment in holdings) == [(2, 3), (4,)]
