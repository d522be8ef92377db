"""State of split parameters: full in the state dict of the unsharded optimizer, and back, at any world size."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

from tests.distributed.test_flat_parity import (
    flat_options,
    make_mixed_dtype_params,
    make_param_groups,
    make_strided_params,
    random_params,
)
from tests.support import RankContext, ranks
from tests.support.oracles import ParityRun, assert_same, set_grads
from zeroshard import (
    CheckpointError,
    RankFailedError,
    RankMismatchError,
    WholeParams,
    ZeroConfig,
    broadcast_object,
)

StateDict = dict[str, Any]
SHAPES: list[tuple[int, ...]] = [(7, 5), (11,), (), (2, 3, 2), (1, 9), (19,)]
make_model = partial(random_params, *SHAPES)


def make_trained_run(make: Callable[..., ParityRun], steps: int = 2, **options: Any) -> ParityRun:
    parity = make(**options)
    parity.train(steps)
    return parity


def assert_full_state_matches(parity: ParityRun, to: int = 0) -> None:
    found = parity.zero.full_state_dict(to=to)
    assert (found is not None) == (parity.zero.rank == to)
    if found is not None:
        assert_same(found, parity.plain.state_dict(), "the state dict")


def resume(make: Callable[..., ParityRun], before: ParityRun, saved: StateDict, **options: Any) -> ParityRun:
    """Resume a new sharded optimizer from `saved`, beside the plain one that was never interrupted."""
    after = make(**options)
    after.model.load_state_dict(before.plain_model.state_dict())
    after.plain_model, after.plain = copy.deepcopy((before.plain_model, before.plain))
    after.steps = before.steps
    after.zero.load_state_dict(saved)
    return after


CASES: list[Callable[..., ParityRun]] = [
    partial(ParityRun, optim.AdamW, model=make_model, lr=0.05, amsgrad=True),
    partial(ParityRun, optim.SGD, model=make_model, lr=0.05, momentum=0.9, get_params=make_param_groups),
    partial(ParityRun, optim.Adagrad, model=make_model, lr=0.05, get_params=nn.Module.named_parameters),
    partial(ParityRun, optim.NAdam, model=make_model, lr=torch.tensor(0.05)),
    partial(ParityRun, optim.ASGD, model=make_model, lr=0.05),
    partial(ParityRun, optim.AdamW, model=make_strided_params, lr=0.05, get_params=nn.Module.named_parameters),
]


@pytest.mark.parametrize("number", range(len(CASES)))
@ranks(1, 2, 3, 4)
def test_full_state_dict_equals_unsharded(ctx: RankContext, number: int) -> None:
    parity = CASES[number](zero_only=flat_options(100 if number % 2 else 1 << 20))
    assert_full_state_matches(parity)
    for steps in (1, 2):
        parity.train(steps)
        assert_full_state_matches(parity, to=ctx.world_size - 1)


@ranks(1, 2, 3)
def test_full_state_dict_with_mixed_dtypes(ctx: RankContext) -> None:
    parity = make_trained_run(
        partial(
            ParityRun, optim.AdamW, model=make_mixed_dtype_params, zero_only=flat_options(20, allow_mixed_dtypes=True)
        )
    )
    assert_full_state_matches(parity)
    saved = copy.deepcopy(parity.plain.state_dict())
    parity.zero.load_state_dict(saved)
    assert_full_state_matches(parity)
    parity.train(3)


@pytest.mark.parametrize("shapes", [[(0,)], [(0,), (3, 0), (2,)], [()], [(), ()], [(1,)], [(1,), (1, 1)]], ids=str)
@ranks(1, 3)
def test_full_state_dict_of_scalar_and_empty_params(ctx: RankContext, shapes: list[tuple[int, ...]]) -> None:
    make = partial(ParityRun, optim.AdamW, model=partial(random_params, *shapes), zero_only=flat_options())
    parity = make_trained_run(make)
    assert_full_state_matches(parity)
    resumed = resume(make, parity, parity.plain.state_dict())
    assert_full_state_matches(resumed)
    resumed.train(2)


@ranks(1, 2, 3)
def test_consolidated_state_dict_exists_on_the_target_rank_only(ctx: RankContext) -> None:
    parity = make_trained_run(CASES[0], zero_only=flat_options())
    last = ctx.world_size - 1
    with pytest.raises(RuntimeError, match="consolidate_state_dict"):
        parity.zero.state_dict()
    parity.zero.consolidate_state_dict(to=last)
    if ctx.rank == last:
        consolidated = parity.zero.state_dict()
        assert_same(consolidated, parity.plain.state_dict())
        expected = copy.deepcopy(consolidated)
    else:
        with pytest.raises(RuntimeError, match="consolidate_state_dict"):
            parity.zero.state_dict()
    parity.train(1)
    if ctx.rank == last:
        assert_same(consolidated, expected)
        with pytest.warns(UserWarning, match="of 1 step ago"):
            assert_same(parity.zero.state_dict(), expected)


@ranks(1, 2, 3, 4)
def test_param_state_is_the_shard_of_this_rank(ctx: RankContext) -> None:
    parity = make_trained_run(CASES[0], zero_only=flat_options())
    state, layout = parity.zero.state, parity.zero.layout
    for index, (ours, theirs) in enumerate(
        zip(parity.model.parameters(), parity.plain_model.parameters(), strict=True)
    ):
        local_shards = [param_shard for param_shard in layout.param_shards(index) if param_shard.owner == ctx.rank]
        assert (ours in state) == bool(local_shards)
        for param_shard in local_shards:
            expected = parity.plain.state[theirs]
            assert state[ours]["step"] == expected["step"]
            for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
                assert_same(state[ours][key], expected[key].view(-1)[slice(*param_shard.in_param)], key)


@ranks(1, 2, 3)
def test_writes_to_param_state_take_effect(ctx: RankContext) -> None:
    """State values are views, not copies."""
    parity = make_trained_run(CASES[0], zero_only=flat_options())
    for state in (parity.zero.state, parity.plain.state):
        for values in state.values():
            values["exp_avg"].mul_(0.5)
    parity.train(2)
    assert_full_state_matches(parity)


# ---- loading


# Not the last case: deepcopy makes its strided parameters dense.
@pytest.mark.parametrize("number", range(len(CASES) - 1))
@ranks(1, 2, 3, 4)
def test_resumes_bitwise_from_a_plain_state_dict(ctx: RankContext, number: int) -> None:
    before = make_trained_run(CASES[number], zero_only=flat_options())
    saved = before.plain.state_dict()
    expected = copy.deepcopy(saved)
    after = resume(CASES[number], before, saved, zero_only=flat_options(1 << 20 if number % 2 else 100))
    assert_same(saved, expected)
    assert_full_state_matches(after)
    after.train(5)


@ranks(4)
def test_resumes_at_any_world_size(ctx: RankContext) -> None:
    make = partial(CASES[0], zero_only=flat_options())
    groups = {size: dist.new_group(list(range(size))) for size in (1, 3, 4)}
    options_by_size = {
        size: {"process_group": group, **flat_options(100)} for size, group in groups.items() if ctx.rank < size
    }
    before = {size: make_trained_run(make, zero_only=options) for size, options in options_by_size.items()}
    state_by_size = {size: parity.zero.full_state_dict() for size, parity in before.items()}
    saved: dict[int, StateDict] = broadcast_object(state_by_size, 0)
    for size, options in options_by_size.items():
        for saved_size in groups:
            resume(make, before[size], saved[saved_size], zero_only=options).train(5)


@ranks(1, 2, 3)
def test_resumes_between_whole_params_and_flat_shards(ctx: RankContext) -> None:
    whole = {"config": ZeroConfig(partition=WholeParams())}
    for make in CASES[:2]:
        for first, second in ((whole, flat_options()), (flat_options(), whole)):
            before = make_trained_run(make, zero_only=first)
            saved: StateDict = broadcast_object(before.zero.full_state_dict(), 0)
            resume(make, before, saved, zero_only=second).train(5)


@ranks(1, 2, 3)
def test_load_preserves_different_step_counts(ctx: RankContext) -> None:
    before = CASES[0](zero_only=flat_options(1 << 20))
    for step in range(3):
        for module, optimizer in before.sides:
            set_grads(module.parameters(), step)
            for index, param in enumerate(module.parameters()):
                param.grad = None if step and index in (1, 4) else param.grad
            optimizer.step()
    saved = before.plain.state_dict()
    after = resume(CASES[0], before, saved, zero_only=flat_options(1 << 20))
    assert_full_state_matches(after)
    after.train(5)


@ranks(1, 2, 3)
def test_load_merges_split_flat_params(ctx: RankContext) -> None:
    parity = make_trained_run(CASES[0], zero_only=flat_options(1 << 20))
    set_grads(parity.model.parameters(), 2)
    list(parity.model.parameters())[3].grad = None
    parity.zero.step()
    parity.model.load_state_dict(parity.plain_model.state_dict())
    parity.zero.load_state_dict(parity.plain.state_dict())
    (group,) = parity.zero.optim.param_groups
    assert len(group["params"]) == 1
    parity.train(2)


@ranks(1, 2, 3)
def test_load_drops_state_missing_from_the_dict(ctx: RankContext) -> None:
    parity = make_trained_run(CASES[0], zero_only=flat_options(1 << 20))
    for missing in ([0, 3], range(6)):
        saved = copy.deepcopy(parity.plain.state_dict())
        for index in missing:
            saved["state"].pop(index, None)
        parity.plain.load_state_dict(copy.deepcopy(saved))
        parity.zero.load_state_dict(saved)
        assert_full_state_matches(parity)
    parity.train(3)


def invalid_state_dicts(saved: StateDict) -> Iterator[tuple[str, StateDict]]:
    def with_changes(index: int, **changes: Any) -> StateDict:
        result = copy.deepcopy(saved)
        result["state"][index].update(changes)
        return result

    yield "'exp_avg' of parameter 0 does not match", with_changes(0, exp_avg=torch.ones(5, 7))
    yield "'exp_avg_sq' of parameter 5 does not match", with_changes(5, exp_avg_sq=torch.ones(3))
    yield "different number of parameter groups", {**copy.deepcopy(saved), "param_groups": []}


@ranks(1, 2, 3)
def test_invalid_state_dict_is_rejected_on_all_ranks(ctx: RankContext) -> None:
    parity = make_trained_run(CASES[0], zero_only=flat_options())
    other = make_trained_run(CASES[0], 3, zero_only=flat_options()).plain.state_dict()
    for message, invalid in invalid_state_dicts(other):
        with pytest.raises(CheckpointError, match=message):
            parity.zero.load_state_dict(invalid)
        for culprit in range(ctx.world_size):
            is_culprit = ctx.rank == culprit
            with pytest.raises(CheckpointError if is_culprit else RankFailedError, match=message):
                parity.zero.load_state_dict(invalid if is_culprit else other)
        assert_full_state_matches(parity)
        parity.train(1)
    if ctx.world_size > 1:
        other_lr = copy.deepcopy(other)
        other_lr["param_groups"][0]["lr"] = 9.0
        with pytest.raises(RankMismatchError, match=r"load_state_dict.*lr=9\.0"):
            parity.zero.load_state_dict(other_lr if ctx.rank else other)
    assert_full_state_matches(parity)
    parity.train(1)


class FailsInSetState(optim.AdamW):
    """Fails after it has set the state, if `should_fail` is set."""

    should_fail = False

    def __setstate__(self, state: StateDict) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if self.should_fail:
            raise LookupError("not to my taste")


@ranks(1, 2, 3)
def test_failed_load_on_one_rank_is_rolled_back_on_all(ctx: RankContext) -> None:
    make = partial(ParityRun, FailsInSetState, model=make_model, zero_only=flat_options(1 << 20))
    parity, other = make_trained_run(make), make_trained_run(make, 3).plain.state_dict()
    for culprit in range(ctx.world_size):
        inner = parity.zero.optim
        assert isinstance(inner, FailsInSetState)
        inner.should_fail = ctx.rank == culprit
        with pytest.raises(LookupError if inner.should_fail else RankFailedError, match="not to my taste"):
            parity.zero.load_state_dict(other)
        inner.should_fail = False
        assert_full_state_matches(parity)
        parity.train(1)


# ---- added groups


@ranks(1, 2, 3, 4)
def test_add_param_group_during_training(ctx: RankContext) -> None:
    def first_three(module: nn.Module) -> list[nn.Parameter]:
        return list(module.parameters())[:3]

    for bucket_bytes in (100, 1 << 20):
        parity = ParityRun(
            optim.AdamW, model=make_model, get_params=first_three, zero_only=flat_options(bucket_bytes), lr=0.1
        )
        parity.train(2)
        before = parity.zero.layout
        for module, optimizer in parity.sides:
            others = list(module.parameters())[3:]
            optimizer.add_param_group({"params": others[:2], "lr": 0.3})
            optimizer.add_param_group({"params": others[2:], "weight_decay": 0.5})
        assert parity.zero.layout.buckets[: len(before.buckets)] == before.buckets
        parity.train(2)
        assert_full_state_matches(parity)
        parity.zero.load_state_dict(parity.plain.state_dict())
        parity.train(2)


@ranks(2, 3)
def test_failed_add_param_group_changes_nothing(ctx: RankContext) -> None:
    parity = make_trained_run(CASES[0], zero_only=flat_options())
    layout = parity.zero.layout
    fresh = random_params((4, 4), (3,))
    with pytest.raises(ValueError, match="dtype"):
        parity.zero.add_param_group({"params": [nn.Parameter(torch.ones(2).double())]})
    with pytest.raises(ValueError if ctx.rank else RankFailedError, match="more than one"):
        parity.zero.add_param_group({"params": list((parity.model if ctx.rank else fresh).parameters())})
    assert parity.zero.layout == layout
    assert len(parity.zero.param_groups) == len(parity.zero.optim.param_groups) == 1
    parity.train(1)
    assert_full_state_matches(parity)
