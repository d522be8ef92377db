"""Odd values for every option, parameter and group: all ranks raise a helpful error, or the call works."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tests.support import RankContext, ranks
from tests.support.checkpoints import TrainingRun, dropin, flat, net, train
from tests.support.fuzzing import ODD, rounds, time_limit
from tests.support.oracles import assert_same
from tests.support.tiers import sampled
from zeroshard import (
    ConsistencyCheck,
    CPUOffload,
    FlatShards,
    NonFiniteGrads,
    ParamRule,
    PeerCheckpoint,
    WholeParams,
    ZeroConfig,
    ZeroError,
    ZeroRedundancyOptimizer,
    matrix_params,
    remaining_params,
    shard,
)

pytestmark = pytest.mark.filterwarnings("ignore")

odd_values = st.sampled_from(range(len(ODD))).map(lambda index: ODD[index]())
values = odd_values | st.integers() | st.floats() | st.text(max_size=5)


def catch_error(call: Callable[[], Any]) -> Exception | None:
    try:
        call()
    except Exception as error:
        return error
    return None


def assert_helpful_error(failure: Exception | None) -> None:
    if failure is not None:
        assert isinstance(failure, (ZeroError, TypeError, ValueError)), repr(failure)
        assert not isinstance(failure, UnicodeError), repr(failure)
        assert len(str(failure)) > 10, repr(failure)


def check_call(call: Callable[[], Any]) -> None:
    assert_helpful_error(catch_error(call))


@given(values, st.sampled_from(list(ZeroConfig.__dataclass_fields__)))
def test_config_fields(value: Any, name: str) -> None:
    check_call(lambda: ZeroConfig(**{name: value}))


@given(values, values, values)
def test_policy_arguments(one: Any, two: Any, three: Any) -> None:
    check_call(lambda: ConsistencyCheck(one))
    check_call(lambda: NonFiniteGrads(one, two))
    check_call(lambda: PeerCheckpoint(one, two))
    check_call(lambda: CPUOffload(one, two))
    check_call(lambda: FlatShards(one, two, three))
    check_call(lambda: WholeParams(one))


@given(values, values, values)
def test_rule_arguments(one: Any, two: Any, three: Any) -> None:
    check_call(lambda: ParamRule(one, two, partition=three))
    check_call(lambda: matrix_params(one))
    check_call(lambda: matrix_params([one, two]))


def make_odd_params(rng: Random, params: Sequence[torch.Tensor]) -> Any:
    """Return something odd in place of parameters or parameter groups."""
    odd = rng.choice(ODD)()
    return rng.choice(
        (
            odd,
            [odd],
            [*params, odd],
            [*params, params[0]],
            [{"params": params}, odd],
            [{"params": odd}],
            [{"params": params, "lr": odd}],
            [{"params": params, rng.choice(("param_names", "params", "x", 5)): odd}],
            [("a", params[0]), (odd, params[1])],
            {"params": params},
            iter(params),
            (param for param in [*params, odd]),
        )
    )


def is_torch_error(failure: Exception | None) -> bool:
    """Whether the optimizer class itself failed on an option that is a tensor."""
    return type(failure) is RuntimeError and "Boolean value of Tensor" in str(failure)


def failed_on_all_ranks(failure: Exception | None) -> bool:
    """Return whether the call failed, after asserting that it did so on all ranks or on none."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, failure is not None)
    assert len(set(found)) == 1, failure
    return bool(found[0])


def attach_note(error: BaseException, example: str) -> None:
    if hasattr(error, "add_note"):
        error.add_note(example)


@ranks(1, 2, timeout=time_limit(100))
def test_odd_params(ctx: RankContext) -> None:
    for seed in range(rounds(30)):
        rng = Random(seed)
        odd_rank, params = rng.choice((None, 0, ctx.world_size - 1)), list(net().parameters())
        odd_params = make_odd_params(rng, params)
        local_params = odd_params if odd_rank in (None, ctx.rank) else params
        try:
            failure = catch_error(partial(ZeroRedundancyOptimizer, local_params, torch.optim.AdamW))
            failed_on_all_ranks(failure)
            if not is_torch_error(failure):
                assert_helpful_error(failure)
        except BaseException as error:
            attach_note(error, f"example {seed}, on rank {odd_rank}")
            raise


@ranks(1, 2, timeout=time_limit(100))
@sampled("make_optimizer", [flat, dropin])
def test_add_odd_param_group(ctx: RankContext, make_optimizer: Any) -> None:
    run = TrainingRun(make_optimizer=make_optimizer)
    for seed in range(rounds(30)):
        rng = Random(seed)
        odd_rank = rng.choice((None, 0, ctx.world_size - 1))
        params = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2, 2))]
        odd_params = make_odd_params(rng, params)
        odd_group = rng.choice((odd_params, {"params": odd_params}, {"params": params, "lr": rng.choice(ODD)()}))
        group = odd_group if odd_rank in (None, ctx.rank) else {"params": params}
        try:
            before = run.capture()
            failure = catch_error(partial(run.optimizer.add_param_group, group))
            if not failed_on_all_ranks(failure):
                run = TrainingRun(make_optimizer=make_optimizer)
                continue
            if not is_torch_error(failure):
                assert_helpful_error(failure)
            assert_same(run.capture(), before, "the run")
        except BaseException as error:
            attach_note(error, f"example {seed}, on rank {odd_rank}")
            raise
    train(run.model, run.optimizer, 1)


@ranks(2, timeout=time_limit(100))
def test_odd_sharding_arguments(ctx: RankContext) -> None:
    for seed in range(rounds(30)):
        rng = Random(seed)
        name, value, odd_rank = (
            rng.choice(("mesh", "shard_group_size", "params")),
            rng.choice(ODD)(),
            rng.choice((None, 0, 1)),
        )
        options = {name: value} if odd_rank in (None, ctx.rank) else {}
        try:
            failure = catch_error(partial(shard, net(), torch.optim.AdamW, **options))
            failed_on_all_ranks(failure)
            assert_helpful_error(failure)
        except BaseException as error:
            attach_note(error, f"example {seed}: {name}={value!r:.100} on rank {odd_rank}")
            raise


@ranks(1, timeout=time_limit(60))
def test_odd_rule_lists(ctx: RankContext) -> None:
    for seed in range(rounds(30)):
        rng = Random(seed)
        odd = rng.choice(ODD)()
        good = [ParamRule(matrix_params(), torch.optim.SGD, lr=0.1), ParamRule(remaining_params, torch.optim.AdamW)]
        rule = ParamRule(lambda *_, value=odd: value, torch.optim.AdamW)
        failure = catch_error(partial(shard, net(), rng.choice(([*good, odd], [odd], good[:1], good[1:] * 2, [rule]))))
        if not is_torch_error(failure):
            assert_helpful_error(failure)
