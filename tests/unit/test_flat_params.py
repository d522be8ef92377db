"""Flat parameters: shards joined into long tensors, which are split with their state where gradients are missing."""

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

MOMENT_KEYS = frozenset({"exp_avg", "exp_avg_sq"})


class ShardBuffers:
    """The memory of a rank's shards."""

    def __init__(self, layout: Layout, rank: int) -> None:
        self.flat = [torch.arange(float(bucket.shards[rank].length)) for bucket in layout.buckets]

    def view(self, bucket: int, span: Span, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
        return self.flat[bucket][slice(*span)].as_strided(shape, stride)


def make_flat_params(
    param_specs: list[ParamSpec], rank: int = 0, ranks: int = 1, bucket_bytes: int = 1 << 20
) -> FlatParams:
    layout = FlatShards(bucket_bytes).extend(Layout.empty(ranks), param_specs)
    flat_params = FlatParams(
        Rank(rank), ShardBuffers(layout, rank).view, can_join_shards=True, param_shaped_keys=MOMENT_KEYS
    )
    flat_params.extend(layout, range(1 + max(param_spec.group for param_spec in param_specs)))
    return flat_params


def run_steps(flat_params: FlatParams, steps: int = 1) -> optim.Adam:
    optimizer = optim.Adam([{"params": [flat_param.param for flat_param in group]} for group in flat_params.by_group])
    for _ in range(steps):
        for flat_param in flat_params:
            flat_param.param.grad = flat_param.param.detach().sin()
        optimizer.step()
    return optimizer


def param_indices(members: list[FlatParam]) -> list[list[int]]:
    return [[param_shard.param for param_shard in flat_param.param_shards] for flat_param in members]


def test_one_flat_param_per_group_and_bucket() -> None:
    param_specs = [spec(i, (4,), group=i % 2) for i in range(6)]
    flat_params = make_flat_params(param_specs)
    assert [param_indices(members) for members in flat_params.by_group] == [[[4, 2, 0]], [[5, 3, 1]]]
    assert [flat_param.param.shape for flat_param in flat_params] == [(12,), (12,)]
    assert [len(group) for group in make_flat_params(param_specs, bucket_bytes=48).by_group] == [2, 2]


def test_flat_params_are_views_of_the_shards() -> None:
    param_specs = specs([5, 3, 7])
    layout = FlatShards(1 << 20).extend(Layout.empty(2), param_specs)
    for rank in range(2):
        shards = ShardBuffers(layout, rank)
        flat_params = FlatParams(Rank(rank), shards.view, can_join_shards=True, param_shaped_keys=MOMENT_KEYS)
        flat_params.extend(layout, [0])
        (flat_param,) = flat_params
        assert flat_param.param.data_ptr() == shards.flat[0].data_ptr()
        assert torch.equal(flat_param.view_of(torch.arange(8.0)), torch.arange(float(flat_param.param.numel())))


def test_rank_without_elements_of_a_group() -> None:
    flat_params = make_flat_params(specs([1, 1]), rank=3, ranks=4)
    assert flat_params.by_group == [[]]
    assert not flat_params.param_ids()


GRAD_MASKS = st.lists(st.booleans(), min_size=6, max_size=6)


@settings(max_examples=40, derandomize=True, deadline=None, database=None)
@given(st.lists(GRAD_MASKS, min_size=1, max_size=4), st.integers(1, 3))
def test_split_by_mask_keeps_values_and_state(masks: list[list[bool]], ranks: int) -> None:
    for rank in range(ranks):
        flat_params = make_flat_params(specs([4, 1, 6, 3, 5, 2]), rank, ranks)
        optimizer = run_steps(flat_params)
        before = values_by_element(flat_params, optimizer)
        for mask in masks:
            flat_params.split_by_mask(bytes(mask), optimizer)
            assert optimizer.param_groups[0]["params"] == [flat_param.param for flat_param in flat_params]
            for flat_param in flat_params:
                assert len({mask[param_shard.param] for param_shard in flat_param.param_shards}) == 1
        assert values_by_element(flat_params, optimizer) == before
        assert set(optimizer.state) == {flat_param.param for flat_param in flat_params}


def values_by_element(flat_params: FlatParams, optimizer: optim.Optimizer) -> dict[tuple[int, int], tuple[float, ...]]:
    """Value, moments and step count of each element, by parameter and offset."""
    found = {}
    for flat_param in flat_params:
        state = optimizer.state[flat_param.param]
        for param_shard in flat_param.param_shards:
            tensors = [flat_param.param.detach(), state["exp_avg"], state["exp_avg_sq"]]
            values = torch.stack(tensors)[:, slice(*flat_param.span_of(param_shard))].T.tolist()
            for offset, element_values in zip(range(*param_shard.in_param), values, strict=True):
                found[param_shard.param, offset] = (*element_values, float(state["step"]))
    return found


def test_split_params_have_separate_step_counts() -> None:
    flat_params = make_flat_params(specs([4, 4, 4]))
    optimizer = run_steps(flat_params)
    flat_params.split_by_mask(b"\1\0\1", optimizer)
    counts = [optimizer.state[flat_param.param]["step"] for flat_param in flat_params]
    assert len({count.data_ptr() for count in counts}) == len(counts) == 3


def test_split_params_share_memory_of_moments() -> None:
    """Splitting copies nothing."""
    flat_params = make_flat_params(specs([4, 4]))
    optimizer = run_steps(flat_params)
    (flat_param,) = flat_params
    pointer = optimizer.state[flat_param.param]["exp_avg"].data_ptr()
    flat_params.split_by_mask(b"\1\0", optimizer)
    assert [optimizer.state[flat_param.param]["exp_avg"].data_ptr() - pointer for flat_param in flat_params] == [0, 16]


def test_no_unnecessary_splits() -> None:
    flat_params = make_flat_params([*specs([4, 4]), *specs([4], group=1, first=2)])
    optimizer = run_steps(flat_params)
    before = list(flat_params)
    for mask in (b"\1\1\1", b"\0\0\0", b"\1\1\0"):
        flat_params.split_by_mask(mask, optimizer)
    assert list(flat_params) == before


def test_reflatten_and_undo() -> None:
    flat_params = make_flat_params(specs([4, 4, 4]))
    optimizer = run_steps(flat_params)
    flat_params.split_by_mask(b"\1\0\1", optimizer)
    before, state_before = list(flat_params), {param: dict(state) for param, state in optimizer.state.items()}
    undo = flat_params.reflatten(optimizer, lambda param_shard: param_shard.param == 0)
    assert param_indices(list(flat_params)) == [[2, 1], [0]]
    assert not optimizer.state
    assert optimizer.param_groups[0]["params"] == [flat_param.param for flat_param in flat_params]
    undo()
    assert list(flat_params) == before
    assert optimizer.param_groups[0]["params"] == [flat_param.param for flat_param in before]
    assert {param: dict(state) for param, state in optimizer.state.items()} == state_before


def test_extend_and_rollback() -> None:
    param_specs = specs([4, 4])
    first = FlatShards(1 << 20).extend(Layout.empty(1), param_specs)
    second = FlatShards(1 << 20).extend(first, specs([3], group=1, first=2))
    flat_params = FlatParams(Rank(0), ShardBuffers(second, 0).view, can_join_shards=True, param_shaped_keys=MOMENT_KEYS)
    flat_params.extend(first, [0])
    before = list(flat_params)
    flat_params.extend(second, [0, 1])
    assert param_indices(list(flat_params)) == [[1, 0], [2]]
    flat_params.rollback(first, 1)
    assert list(flat_params) == before
    flat_params.extend(second, [0, 1])
    assert param_indices(list(flat_params)) == [[1, 0], [2]]


def test_shard_state_is_a_view() -> None:
    flat_params = make_flat_params(specs([4, 3]))
    optimizer = run_steps(flat_params)
    (flat_param,) = flat_params
    state: dict[Any, Any] = optimizer.state[flat_param.param]
    shard_states = [flat_params.shard_state(flat_param, param_shard, state) for param_shard in flat_param.param_shards]
    assert [shard_state["exp_avg"].tolist() for shard_state in shard_states] == [
        state["exp_avg"][slice(*flat_param.span_of(param_shard))].tolist() for param_shard in flat_param.param_shards
    ]
    shard_states[0]["exp_avg"].zero_()
    assert not state["exp_avg"][slice(*flat_param.span_of(flat_param.param_shards[0]))].any()
    assert shard_states[0]["step"] is shard_states[1]["step"] is state["step"]


def test_is_sharded_for_single_element() -> None:
    flat_params = make_flat_params(specs([1]))
    param = torch.zeros(1)
    assert flat_params.is_sharded("exp_avg", param, param)
    assert not flat_params.is_sharded("other", param, param)
    assert not flat_params.is_sharded("step", torch.zeros(()), param)
    assert not flat_params.is_sharded("exp_avg", 3.0, param)


def test_unjoined_params_keep_their_shapes() -> None:
    param_specs = [spec(0, (2, 3)), spec(1, (4,))]
    layout = FlatShards(1 << 20).extend(Layout.empty(1), param_specs)
    flat_params = FlatParams(
        Rank(0), ShardBuffers(layout, 0).view, can_join_shards=False, param_shaped_keys=MOMENT_KEYS
    )
    flat_params.extend(layout, [0])
    assert sorted(tuple(flat_param.param.shape) for flat_param in flat_params) == [(2, 3), (4,)]
