"""What `shard` warns of: once, on all ranks, at the user's line, and never without reason."""

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
from tests.support.oracles import WIDTH, batch, left_as_it_was, mlp, regression
from zeroshard import (
    FlatShards,
    RankFailedError,
    ShardedOptimizer,
    WholeParams,
    ZeroConfig,
    ZeroRedundancyOptimizer,
    shard,
)


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = nn.Linear(WIDTH, WIDTH), nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.trunk(x))
        return result


@contextmanager
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def backward(model: nn.Module) -> None:
    torch.autograd.backward(model(batch(0)).square().mean())


def iterate(model: nn.Module, *optimizers: optim.Optimizer) -> None:
    backward(model)
    for optimizer in optimizers:
        optimizer.step()
    for optimizer in optimizers:
        optimizer.zero_grad()


def of_trunk(model: Parts, **options: Any) -> ShardedOptimizer:
    return shard(model, optim.SGD, params=model.trunk.parameters(), lr=0.1, **options)


# ---- parameters whose gradients nobody averages


@ranks(2, 3, 4)
@pytest.mark.parametrize("config", [ZeroConfig(), ZeroConfig(overlap_param_gather=True)], ids=["plain", "overlap"])
def test_parameters_that_were_left_out_are_named_once(ctx: RankContext, config: ZeroConfig) -> None:
    model = Parts()
    zero = of_trunk(model, config=config)
    ExponentialLR(zero, 0.5)  # which wraps step()
    backward(model)
    with pytest.warns(UserWarning, match="nobody averages") as caught:
        zero.step()
    (warning,) = caught
    assert warning.filename == __file__
    text = str(warning.message)
    assert "6 parameters" in text
    assert "head.0.weight, head.0.bias, head.1.weight, head.1.bias, head.2.weight, ..." in text
    assert "trunk" not in text
    zero.zero_grad()
    with no_warnings():
        iterate(model, zero)


@ranks(2)
def test_gradients_that_a_closure_makes(ctx: RankContext) -> None:
    model = Parts()
    zero = of_trunk(model)

    def closure() -> float:
        model.zero_grad()
        backward(model)
        return 0.0

    with pytest.warns(UserWarning, match="nobody averages"):
        zero.step(closure)


@ranks(1)
def test_a_rank_alone_has_nobody_to_average_with(ctx: RankContext) -> None:
    model = Parts()
    zero = of_trunk(model)
    with no_warnings():
        iterate(model, zero)


def all_of_it(model: Parts) -> list[Any]:
    return [shard(model, optim.SGD, lr=0.1)]


def two_optimizers(model: Parts) -> list[Any]:
    return [of_trunk(model), shard(model.head, optim.AdamW)]


def frozen_later(model: Parts) -> list[Any]:
    zero = of_trunk(model)
    model.head.requires_grad_(False)
    return [zero]


def with_ddp_inside(model: Parts) -> list[Any]:
    zero = of_trunk(model)
    model.head = DistributedDataParallel(model.head)  # type: ignore[assignment]
    return [zero]


@ranks(2, 3)
@pytest.mark.parametrize("made", [all_of_it, two_optimizers, frozen_later, with_ddp_inside])
def test_what_trains_as_it_should_is_no_news(ctx: RankContext, made: Callable[[Parts], list[Any]]) -> None:
    model = Parts()
    optimizers = made(model)
    with no_warnings():
        for _ in range(2):
            iterate(model, *optimizers)


@ranks(2)
def test_an_optimizer_that_is_gone_averages_nothing(ctx: RankContext) -> None:
    model = Parts()
    shard(model, optim.SGD, lr=0.1)
    zero = of_trunk(model)
    with pytest.warns(UserWarning, match="nobody averages the gradients of 6 parameters"):
        iterate(model, zero)


# ---- gradients that were not cleared


@ranks(1, 2)
def test_gradients_that_were_not_cleared_are_told_of_at_the_users_line(ctx: RankContext) -> None:
    model = Parts()
    zero = shard(model, optim.SGD, lr=0.1)
    ExponentialLR(zero, 0.5)  # which wraps step()
    iterate(model, zero)
    backward(model)
    zero.step()
    with pytest.warns(UserWarning, match="were not cleared") as caught:
        backward(model)
    assert [(it.filename, it.lineno) for it in caught] == [(__file__, backward.__code__.co_firstlineno + 1)]


@ranks(1, 2)
@pytest.mark.parametrize("stage", [2, 1], ids=["zero2", "zero1"])
def test_whoever_clears_gradients_there_is_no_warning(ctx: RankContext, stage: Literal[1, 2]) -> None:
    """Also a larger model, which the optimizer does not know."""
    model = Parts()
    zero = shard(model.head, optim.SGD, lr=0.1, config=ZeroConfig(stage=stage))
    for clear in (model.zero_grad, model.head.zero_grad, zero.zero_grad):
        backward(model)
        zero.step()
        clear()
        with no_warnings():
            backward(model)
        zero.zero_grad()


# ---- optimizers that cannot be cut


def adafactor(model: nn.Module) -> ShardedOptimizer:
    return shard(model, optim.Adafactor, lr=0.1)


@ranks(1, 2, 3)
def test_whole_parameters_are_taken_with_a_word_at_the_users_line(ctx: RankContext) -> None:
    model = Parts()
    with pytest.warns(UserWarning, match="Adafactor looks at whole parameters") as caught:
        zero = adafactor(model)
    (warning,) = caught
    assert (warning.filename, warning.lineno) == (__file__, adafactor.__code__.co_firstlineno + 1)
    with no_warnings():
        iterate(model, zero)
        shard(Parts(), optim.Adafactor, config=ZeroConfig(partition=WholeParams()))
        shard(Parts(), optim.AdamW)


@ranks(2)
def test_a_warning_that_is_an_error_leaves_the_model_as_it_was(ctx: RankContext) -> None:
    model = Parts()
    with left_as_it_was(model), no_warnings(), pytest.raises(UserWarning, match="whole parameters"):
        adafactor(model)


@ranks(1, 2, 3)
@pytest.mark.parametrize("config", [None, ZeroConfig(partition=FlatShards())], ids=["default", "flat"])
def test_arguments_that_the_optimizer_does_not_take_are_its_own_error(
    ctx: RankContext, config: ZeroConfig | None
) -> None:
    """The self-test, which cannot make one either, must not say that it found anything."""
    with no_warnings():
        with pytest.raises(TypeError, match="learning_rate"):
            shard(Parts(), optim.AdamW, learning_rate=1, config=config)
        with pytest.raises(ValueError, match="Invalid learning rate"):
            shard(Parts(), optim.AdamW, lr=-1.0, config=config)
        with pytest.raises(TypeError, match="learning_rate"):
            ZeroRedundancyOptimizer(Parts().parameters(), optim.AdamW, learning_rate=1, config=config)


@ranks(2)
def test_arguments_that_are_wrong_on_one_rank(ctx: RankContext) -> None:
    wrong: dict[str, Any] = {"learning_rate": 1} if ctx.rank else {}
    with no_warnings(), pytest.raises(TypeError if ctx.rank else RankFailedError, match="learning_rate"):
        shard(Parts(), optim.AdamW, **wrong)


@ranks(1, 2)
def test_a_second_optimizer_takes_the_gradients_over(ctx: RankContext) -> None:
    """The first may be alive as long as the garbage collector pleases; none of it is in the way."""
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
    with pytest.raises(RuntimeError, match="another optimizer was made by shard"):
        first.step()
    second.zero_grad()
    torch.autograd.backward(regression(model, 2))
    second.step()
