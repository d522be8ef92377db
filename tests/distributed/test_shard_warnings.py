"""Warnings of `shard`: once, on all ranks, at the user's line, and never for correct code."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import pytest
import torch
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ExponentialLR

from tests.support import RankContext, ranks
from tests.support.oracles import WIDTH, assert_params_unchanged, batch, mlp, regression
from zeroshard import (
    FlatShards,
    RankFailedError,
    ShardedOptimizer,
    WholeParams,
    ZeroConfig,
    ZeroRedundancyOptimizer,
    shard,
)


class TrunkAndHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = nn.Linear(WIDTH, WIDTH), nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.trunk(x))
        return result


@contextmanager
def assert_no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def backward(model: nn.Module) -> None:
    torch.autograd.backward(model(batch(0)).square().mean())


def train_step(model: nn.Module, *optimizers: optim.Optimizer) -> None:
    backward(model)
    for optimizer in optimizers:
        optimizer.step()
    for optimizer in optimizers:
        optimizer.zero_grad()


def shard_trunk(model: TrunkAndHead, **options: Any) -> ShardedOptimizer:
    return shard(model, optim.SGD, params=model.trunk.parameters(), lr=0.1, **options)


# ---- parameters whose gradients are not averaged


@ranks(2, 3, 4)
@pytest.mark.parametrize("config", [ZeroConfig(), ZeroConfig(overlap_param_gather=True)], ids=["plain", "overlap"])
def test_params_without_averaged_grads_are_named_once(ctx: RankContext, config: ZeroConfig) -> None:
    model = TrunkAndHead()
    zero = shard_trunk(model, config=config)
    ExponentialLR(zero, 0.5)  # wraps step()
    backward(model)
    with pytest.warns(UserWarning, match="belong to no sharded optimizer") as caught:
        zero.step()
    (warning,) = caught
    assert warning.filename == __file__
    text = str(warning.message)
    assert "6 parameters" in text
    assert "head.0.weight, head.0.bias, head.1.weight, head.1.bias, head.2.weight, head.2.bias" in text
    assert "trunk" not in text
    zero.zero_grad()
    with assert_no_warnings():
        train_step(model, zero)


@ranks(2)
def test_unaveraged_grads_from_a_closure_warn(ctx: RankContext) -> None:
    model = TrunkAndHead()
    zero = shard_trunk(model)

    def closure() -> float:
        model.zero_grad()
        backward(model)
        return 0.0

    with pytest.warns(UserWarning, match="belong to no sharded optimizer"):
        zero.step(closure)


@ranks(1)
def test_single_rank_does_not_warn_of_unaveraged_grads(ctx: RankContext) -> None:
    model = TrunkAndHead()
    zero = shard_trunk(model)
    with assert_no_warnings():
        train_step(model, zero)


def shard_full_model(model: TrunkAndHead) -> list[Any]:
    return [shard(model, optim.SGD, lr=0.1)]


def shard_trunk_and_head(model: TrunkAndHead) -> list[Any]:
    return [shard_trunk(model), shard(model.head, optim.AdamW)]


def freeze_head_later(model: TrunkAndHead) -> list[Any]:
    zero = shard_trunk(model)
    model.head.requires_grad_(False)
    return [zero]


def wrap_head_in_ddp(model: TrunkAndHead) -> list[Any]:
    zero = shard_trunk(model)
    model.head = DistributedDataParallel(model.head)  # type: ignore[assignment]
    return [zero]


@ranks(2, 3)
@pytest.mark.parametrize("prepare", [shard_full_model, shard_trunk_and_head, freeze_head_later, wrap_head_in_ddp])
def test_correct_training_does_not_warn(ctx: RankContext, prepare: Callable[[TrunkAndHead], list[Any]]) -> None:
    model = TrunkAndHead()
    optimizers = prepare(model)
    with assert_no_warnings():
        for _ in range(2):
            train_step(model, *optimizers)


@ranks(2)
def test_dead_optimizer_averages_nothing(ctx: RankContext) -> None:
    model = TrunkAndHead()
    shard(model, optim.SGD, lr=0.1)
    zero = shard_trunk(model)
    with pytest.warns(UserWarning, match="6 parameters have gradients but belong to no sharded optimizer"):
        train_step(model, zero)


# ---- gradients that were not cleared


@ranks(1, 2)
def test_uncleared_grads_warn_at_the_users_line(ctx: RankContext) -> None:
    model = TrunkAndHead()
    zero = shard(model, optim.SGD, lr=0.1)
    ExponentialLR(zero, 0.5)  # wraps step()
    train_step(model, zero)
    backward(model)
    zero.step()
    with pytest.warns(UserWarning, match="were not cleared") as caught:
        backward(model)
    assert [(warning.filename, warning.lineno) for warning in caught] == [
        (__file__, backward.__code__.co_firstlineno + 1)
    ]


@ranks(1, 2)
@pytest.mark.parametrize("stage", [2, 1], ids=["zero2", "zero1"])
def test_any_way_of_clearing_grads_avoids_the_warning(ctx: RankContext, stage: Literal[1, 2]) -> None:
    """Also through a larger model to which the optimizer has no reference."""
    model = TrunkAndHead()
    zero = shard(model.head, optim.SGD, lr=0.1, config=ZeroConfig(stage=stage))
    for clear in (model.zero_grad, model.head.zero_grad, zero.zero_grad):
        backward(model)
        zero.step()
        clear()
        with assert_no_warnings():
            backward(model)
        zero.zero_grad()


@ranks(2, timeout=30)
def test_warning_raised_as_error_in_step_is_raised_on_all_ranks(ctx: RankContext) -> None:
    """A gradient set by hand on one rank warns there alone that those of the last step were not cleared."""
    model = TrunkAndHead()
    zero = shard(model, optim.SGD, lr=0.1)
    backward(model)
    zero.step()
    if ctx.rank == 0:
        model.trunk.bias.grad = torch.ones_like(model.trunk.bias)
    expected = UserWarning if ctx.rank == 0 else RankFailedError
    with assert_no_warnings(), pytest.raises(expected, match="were not cleared"):
        zero.step()
    with assert_no_warnings():
        train_step(model, zero)


# ---- optimizers that need whole parameters


def shard_with_adafactor(model: nn.Module) -> ShardedOptimizer:
    return shard(model, optim.Adafactor, lr=0.1)


@ranks(1, 2, 3)
def test_fallback_to_whole_params_warns_at_the_users_line(ctx: RankContext) -> None:
    model = TrunkAndHead()
    with pytest.warns(UserWarning, match=r"Adafactor needs whole parameters, so each .* a single rank") as caught:
        zero = shard_with_adafactor(model)
    (warning,) = caught
    assert (warning.filename, warning.lineno) == (__file__, shard_with_adafactor.__code__.co_firstlineno + 1)
    with assert_no_warnings():
        train_step(model, zero)
        shard(TrunkAndHead(), optim.Adafactor, config=ZeroConfig(partition=WholeParams()))
        shard(TrunkAndHead(), optim.AdamW)


@ranks(2)
def test_warning_raised_as_error_leaves_model_unchanged(ctx: RankContext) -> None:
    model = TrunkAndHead()
    with assert_params_unchanged(model), assert_no_warnings(), pytest.raises(UserWarning, match="whole parameters"):
        shard_with_adafactor(model)


@ranks(1, 2, 3)
@pytest.mark.parametrize("config", [None, ZeroConfig(partition=FlatShards())], ids=["default", "flat"])
def test_invalid_optimizer_arguments_raise_the_optimizers_error(ctx: RankContext, config: ZeroConfig | None) -> None:
    """The probe cannot construct the optimizer either and must not warn about it."""
    with assert_no_warnings():
        with pytest.raises(TypeError, match="learning_rate"):
            shard(TrunkAndHead(), optim.AdamW, learning_rate=1, config=config)
        with pytest.raises(ValueError, match="Invalid learning rate"):
            shard(TrunkAndHead(), optim.AdamW, lr=-1.0, config=config)
        with pytest.raises(TypeError, match="learning_rate"):
            ZeroRedundancyOptimizer(TrunkAndHead().parameters(), optim.AdamW, learning_rate=1, config=config)


@ranks(2)
def test_invalid_optimizer_arguments_on_one_rank_are_raised_on_all(ctx: RankContext) -> None:
    wrong: dict[str, Any] = {"learning_rate": 1} if ctx.rank else {}
    with assert_no_warnings(), pytest.raises(TypeError if ctx.rank else RankFailedError, match="learning_rate"):
        shard(TrunkAndHead(), optim.AdamW, **wrong)


@ranks(1, 2)
def test_second_optimizer_supersedes_the_first(ctx: RankContext) -> None:
    """The first may stay alive until it is garbage-collected; it must not interfere."""
    model = mlp()
    first = shard(model, torch.optim.SGD, lr=0.1)
    torch.autograd.backward(regression(model, 0))
    first.step()
    first.zero_grad()
    second = shard(model, torch.optim.SGD, lr=0.1)
    before = [param.detach().clone() for param in model.parameters()]
    torch.autograd.backward(regression(model, 1))
    assert second.clip_grad_norm_(1e9) > 0
    second.step()
    assert not any(map(torch.equal, before, model.parameters()))
    with pytest.raises(RuntimeError, match=r"a later shard\(\) call .* Call step\(\) of the later optimizer"):
        first.step()
    second.zero_grad()
    torch.autograd.backward(regression(model, 2))
    second.step()
