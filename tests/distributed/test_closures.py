"""Optimizers that move parameters and call their closure again see one consistent model, however it is sharded."""

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
    DdpParityRun,
    Loss,
    Side,
    all_equal,
    assert_equal_sums,
    batch,
    gather_from_all_ranks,
    make_seeded,
    mlp,
    regression,
    some_configs,
)
from zeroshard import RankMismatchError, WholeParams, ZeroConfig, ZeroRedundancyOptimizer, shard

Closure = Callable[[], Any]


def noop_closure() -> None:
    """A closure that leaves gradients as they are."""


class ExtraGradient(torch.optim.Optimizer):
    """Updates parameters with the gradients at the point that a plain step would reach."""

    def __init__(self, params: Any, lr: float = 0.5) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        closure = closure or noop_closure
        with torch.enable_grad():
            closure()
        saved = [
            (param, group["lr"], param.clone())
            for group in self.param_groups
            for param in group["params"]
            if param.grad is not None
        ]
        for param, lr, _ in saved:
            param.add_(param.grad, alpha=-lr)
        with torch.enable_grad():
            loss = closure()
        for param, lr, before in saved:
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
    parity = DdpParityRun(config, optimizer_class=ExtraGradient, lr=0.5)
    parity.run(3, step_with_closure)


@ranks(2, 4)
def test_extragradient_with_hybrid_sharding_and_whole_params(ctx: RankContext) -> None:
    for config, group_options in (
        (ZERO2, {"shard_group_size": ctx.world_size // 2}),
        (ZeroConfig(partition=WholeParams()), {}),
    ):
        parity = DdpParityRun(config, optimizer_class=ExtraGradient, group_options=group_options, lr=0.5)
        for number in range(3):
            for side in parity.sides:
                step_with_closure(side, number)
        parity.compare(exactly=False)


class SkipsLayerEverySecondPass(nn.Module):
    """Every second pass skips the first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.pass_counter = nn.Linear(8, 8), nn.Linear(8, 4), count()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(x if next(self.pass_counter) % 2 else self.first(x))
        return result


@ranks(1, 2, 3)
def test_params_unused_by_the_second_closure_are_restored(ctx: RankContext) -> None:
    parity = DdpParityRun(ZERO2, SkipsLayerEverySecondPass, ExtraGradient, find_unused=True, lr=0.5)

    def loss(model: nn.Module, number: int) -> Tensor:
        torch.manual_seed(10 * number + ctx.rank)
        result: Tensor = model(torch.randn(4, 8)).square().mean()
        return result

    parity.run(3, partial(step_with_closure, loss_of=loss))


@ranks(2, 3)
def test_closures_see_rounded_master_weights_on_all_ranks(ctx: RankContext) -> None:
    """Both closures see the rounded values of all masters."""
    model = make_seeded(mlp, 0).bfloat16()
    config = ZeroConfig(partition=TINY, master_dtype=torch.float32)
    optimizer = shard(model, ExtraGradient, lr=0.5, config=config)
    params_by_call: list[list[Tensor]] = []

    def closure() -> None:
        params_by_call.append([param.detach().clone() for param in model.parameters()])
        optimizer.zero_grad()
        torch.autograd.backward(model(batch(0).bfloat16()).float().square().mean())

    optimizer.step(closure)
    for values in params_by_call:
        assert all_equal(list(map(list, zip(*map(gather_from_all_ranks, values), strict=True))))
    assert not all_equal(params_by_call)


@pytest.mark.parametrize("seed", [0, 1])
@ranks(2)
def test_flat_shards_under_ddp_match_plain_optimizer(ctx: RankContext, seed: int) -> None:
    """The oracle is the unsharded optimizer on the gradients that DDP averages."""
    ours, plain = make_seeded(mlp, seed), make_seeded(mlp, seed)
    ddp, reference = DistributedDataParallel(ours), DistributedDataParallel(plain)
    zero = ZeroRedundancyOptimizer(ddp.parameters(), ExtraGradient, config=ZeroConfig(partition=TINY), lr=0.5)
    sides = Side(ddp, zero, ddp.no_sync), Side(reference, ExtraGradient(plain.parameters()), reference.no_sync)
    for number in range(3):
        for side in sides:
            step_with_closure(side, number)
    for param, expected in zip(ours.parameters(), plain.parameters(), strict=True):
        assert_equal_sums(param, expected, f"after three steps from seed {seed}")


class FailsBetweenClosures(ExtraGradient):
    """Fails once, on one rank, between its closure calls."""

    should_fail = False

    def step(self, closure: Closure | None = None) -> Any:
        calls = count()

        def fail_or_call() -> Any:
            if next(calls) and self.should_fail:
                self.should_fail = False
                raise ArithmeticError("between closures")
            return None if closure is None else closure()

        return super().step(fail_or_call)


@pytest.mark.parametrize("failing_rank", [0, 1])
@ranks(2, 3)
def test_failure_between_closures_raises_on_all_ranks(ctx: RankContext, failing_rank: int) -> None:
    """Some ranks have moved parameters that others have not, so later steps are rejected too."""
    parity = DdpParityRun(ZERO2, optimizer_class=FailsBetweenClosures, lr=0.5)
    parity.run(1, step_with_closure)
    for member in parity.zero._engine.params.inner.local_optimizers:
        vars(member.optimizer)["should_fail"] = ctx.rank == failing_rank
    for number in (1, 2):
        with pytest.raises(RankMismatchError, match="different calls"):
            step_with_closure(parity.sides[0], number)
        parity.zero.zero_grad()
