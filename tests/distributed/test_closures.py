"""Optimizers that move parameters and call their closure again see one model, whoever has which part of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.support import RankContext, ranks
from tests.support.oracles import (
    TINY,
    ZERO2,
    Loss,
    ShardTwins,
    Side,
    all_equal,
    assert_equal_sums,
    batch,
    from_all_ranks,
    mlp,
    regression,
    seeded,
    some_configs,
)
from zeroshard import RankMismatchError, WholeParams, ZeroConfig, ZeroRedundancyOptimizer, shard

Closure = Callable[[], Any]


def noop_closure() -> None:
    """A closure that leaves gradients as they are."""


class ExtraGradient(torch.optim.Optimizer):
    """Updates parameters by gradients of the place where a plain step would lead."""

    def __init__(self, params: Any, lr: float = 0.5) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        closure = closure or noop_closure
        with torch.enable_grad():
            closure()
        begun = [
            (param, group["lr"], param.clone())
            for group in self.param_groups
            for param in group["params"]
            if param.grad is not None
        ]
        for param, lr, _ in begun:
            param.add_(param.grad, alpha=-lr)
        with torch.enable_grad():
            loss = closure()
        for param, lr, before in begun:
            param.copy_(before)
            if param.grad is not None:
                param.add_(param.grad, alpha=-lr)
        return loss


def step_with_closure(side: Side, number: int, loss_of: Loss = regression) -> None:
    def closure() -> Any:
        side.optimizer.zero_grad()
        loss = loss_of(side.model, number)
        torch.autograd.backward(loss)
        return loss.detach()

    side.optimizer.step(closure)


@some_configs
@ranks(1, 2, 3)
def test_extragradient_matches_plain_optimizer(ctx: RankContext, config: ZeroConfig) -> None:
    twins = ShardTwins(config, optimizer_class=ExtraGradient, lr=0.5)
    twins.run(3, step_with_closure)


@ranks(2, 4)
def test_extragradient_with_hybrid_sharding_and_whole_params(ctx: RankContext) -> None:
    for config, where in (
        (ZERO2, {"shard_group_size": ctx.world_size // 2}),
        (ZeroConfig(partition=WholeParams()), {}),
    ):
        twins = ShardTwins(config, optimizer_class=ExtraGradient, where=where, lr=0.5)
        for number in range(3):
            for side in twins.sides:
                step_with_closure(side, number)
        twins.compare(exactly=False)


class SkipsLayerEverySecondPass(nn.Module):
    """Every second pass leaves a layer out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.pass_counter = nn.Linear(8, 8), nn.Linear(8, 4), count()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(x if next(self.pass_counter) % 2 else self.first(x))
        return result


@ranks(1, 2, 3)
def test_params_unused_by_the_second_closure_are_restored(ctx: RankContext) -> None:
    twins = ShardTwins(ZERO2, SkipsLayerEverySecondPass, ExtraGradient, find_unused=True, lr=0.5)

    def loss(model: nn.Module, number: int) -> Tensor:
        torch.manual_seed(10 * number + ctx.rank)
        result: Tensor = model(torch.randn(4, 8)).square().mean()
        return result

    twins.run(3, partial(step_with_closure, loss_of=loss))


@ranks(2, 3)
def test_closures_see_rounded_master_weights_on_all_ranks(ctx: RankContext) -> None:
    """Both closures see the rounded values of all masters."""
    model = seeded(mlp, 0).bfloat16()
    config = ZeroConfig(partition=TINY, master_dtype=torch.float32)
    optimizer = shard(model, ExtraGradient, lr=0.5, config=config)
    seen: list[list[Tensor]] = []

    def closure() -> None:
        seen.append([param.detach().clone() for param in model.parameters()])
        optimizer.zero_grad()
        torch.autograd.backward(model(batch(0).bfloat16()).float().square().mean())

    optimizer.step(closure)
    for values in seen:
        assert all_equal(list(map(list, zip(*map(from_all_ranks, values), strict=True))))
    assert not all_equal(seen)


@pytest.mark.parametrize("rank", [0, 1])
@ranks(2)
def test_flat_shards_under_ddp_match_plain_optimizer(ctx: RankContext, rank: int) -> None:
    """The plain optimizer in one process is right, with what DDP averages of both ranks."""
    ours, plain = seeded(mlp, rank), seeded(mlp, rank)
    ddp, reference = DistributedDataParallel(ours), DistributedDataParallel(plain)
    zero = ZeroRedundancyOptimizer(ddp.parameters(), ExtraGradient, config=ZeroConfig(partition=TINY), lr=0.5)
    sides = Side(ddp, zero, ddp.no_sync), Side(reference, ExtraGradient(plain.parameters()), reference.no_sync)
    for number in range(3):
        for side in sides:
            step_with_closure(side, number)
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        assert_equal_sums(mine, theirs, f"after three steps from seed {rank}")


class FailsBetweenClosures(ExtraGradient):
    """Once, on one rank, between its closures."""

    fails = False

    def step(self, closure: Closure | None = None) -> Any:
        calls = count()

        def between() -> Any:
            if next(calls) and self.fails:
                self.fails = False
                raise ArithmeticError("between closures")
            return None if closure is None else closure()

        return super().step(between)


@pytest.mark.parametrize("rank", [0, 1])
@ranks(2, 3)
def test_failure_between_closures_raises_on_all_ranks(ctx: RankContext, rank: int) -> None:
    """Some have moved what others have not, so that no later step is made either."""
    twins = ShardTwins(ZERO2, optimizer_class=FailsBetweenClosures, lr=0.5)
    twins.run(1, step_with_closure)
    for member in twins.zero._engine.inner.local_optimizers:
        vars(member.optimizer)["fails"] = ctx.rank == rank
    for number in (1, 2):
        with pytest.raises(RankMismatchError, match="different calls"):
            step_with_closure(twins.sides[0], number)
        twins.zero.zero_grad()
