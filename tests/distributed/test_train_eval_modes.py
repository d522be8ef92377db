"""Optimizers that train and evaluate with different weights: sharded they do so with the same ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from tests.support import RankContext, ranks
from tests.support.oracles import (
    TINY,
    ShardTwins,
    Twins,
    all_equal,
    assert_same,
    mlp,
    regression,
    small_model,
    some_configs,
    values_of,
)
from tests.support.tiers import sampled
from zeroshard import FlatShards, RankFailedError, WholeParams, ZeroConfig, checkpoint, shard


class AveragingOptimizer(Optimizer):
    """Evaluates with the mean of all weights so far, and must be told to train, as schedule-free optimizers must."""

    fails = False

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "trains": False, "steps": 0})

    def train(self) -> None:
        self._swap(trains=True)

    def eval(self) -> None:
        if self.fails:
            raise LookupError("no mean today")
        self._swap(trains=False)

    @torch.no_grad()
    def _swap(self, *, trains: bool) -> None:
        for group in self.param_groups:
            for param in group["params"] if group["trains"] != trains else ():
                if "other" in self.state[param]:
                    other: Tensor = self.state[param]["other"]
                    kept = param.clone()
                    param.copy_(other)
                    other.copy_(kept)
            group["trains"] = trains

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            assert group["trains"], "tell it to train"
            group["steps"] += 1
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    if "other" not in state:
                        state["other"] = param.clone()
                    param.sub_(param.grad, alpha=group["lr"])
                    state["other"].lerp_(param, 1 / (group["steps"] + 1))


def set_mode(mode: str, *optimizers: Any) -> None:
    for optimizer in optimizers:
        getattr(optimizer, mode)()


@some_configs
@ranks(1, 2, 3)
def test_eval_weights_equal_those_of_the_plain_optimizer(ctx: RankContext, config: ZeroConfig) -> None:
    twins = ShardTwins(config, optimizer_class=AveragingOptimizer, lr=0.1)
    set_mode("train", twins.zero, twins.plain)
    for _ in range(2):
        twins.train(2)
        trained = values_of(twins.model)
        set_mode("eval", twins.zero, twins.plain)
        twins.compare()
        assert not all_equal([trained, values_of(twins.model)])
        set_mode("eval", twins.zero, twins.plain)
        twins.compare()
        set_mode("train", twins.zero, twins.plain)
        twins.compare()
        assert all_equal([trained, values_of(twins.model)])


@sampled("partition", [WholeParams(), TINY, FlatShards()], ids=["whole", "tiny", "flat"])
@ranks(1, 2, 3)
def test_drop_in_switches_modes(ctx: RankContext, partition: Any) -> None:
    twins = Twins(AveragingOptimizer, zero_only={"config": ZeroConfig(partition=partition)})
    set_mode("train", twins.zero, twins.plain)
    twins.train(3)
    for mode in ("eval", "train"):
        set_mode(mode, twins.zero, twins.plain)
        twins.check()
    twins.train(2)


@ranks(1, 2, 3)
def test_master_weights_switch_modes(ctx: RankContext) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return mlp().bfloat16()

    def loss(model: nn.Module, number: int) -> Tensor:
        draw = torch.Generator().manual_seed(number)
        out: Tensor = model(torch.randn(4, 6, generator=draw).bfloat16())
        return out.float().square().mean()

    model, precise = make(), make().float()
    zero = shard(model, AveragingOptimizer, lr=0.1, config=ZeroConfig(master_dtype=torch.float32))
    plain = AveragingOptimizer(list(precise.parameters()), lr=0.1)
    set_mode("train", zero, plain)
    for number in range(3):
        torch.autograd.backward(loss(model, number))  # the same on all ranks
        again = make()
        again.load_state_dict(precise.state_dict())
        torch.autograd.backward(loss(again, number))
        for param, source in zip(precise.parameters(), again.parameters(), strict=True):
            assert source.grad is not None
            param.grad = source.grad.float()
        for optimizer in (zero, plain):
            optimizer.step()
            optimizer.zero_grad()
    for mode in ("eval", "train"):
        set_mode(mode, zero, plain)
        for ours, theirs in zip(model.parameters(), precise.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs.bfloat16())


@ranks(1, 2)
def test_optimizers_without_modes_have_no_train_or_eval(ctx: RankContext) -> None:
    zero = shard(mlp(), AdamW, lr=0.1)
    assert not hasattr(zero, "train")
    assert not hasattr(zero, "eval")
    with pytest.raises(AttributeError, match="has no eval"):
        zero.eval()


@ranks(2, 3)
def test_failed_mode_switch_raises_on_all_and_ranks_stay_identical(ctx: RankContext) -> None:
    model = small_model()
    zero = shard(model, AveragingOptimizer, lr=0.1)
    zero.train()
    torch.autograd.backward(model(torch.ones(2, 5)).sum())
    zero.step()
    inner = zero.optim
    assert isinstance(inner, AveragingOptimizer)
    before = values_of(model)
    inner.fails = ctx.rank == 1
    with pytest.raises(LookupError if inner.fails else RankFailedError, match="no mean today"):
        zero.eval()
    assert_same(values_of(model), before)
    inner.fails = False
    zero.train()
    torch.autograd.backward(model(torch.ones(2, 5)).sum())
    zero.step()
    zero.eval()
    assert all_equal(ctx.gather(values_of(model)))


@ranks(2)
def test_saving_before_the_first_step_creates_no_stale_param_copies(ctx: RankContext, tmp_path: Path) -> None:
    """Saving makes state that the first step would make. A copy of a weight would be an old one once weights load."""
    folder = ctx.gather(tmp_path)[0]
    twins = ShardTwins(optimizer_class=AveragingOptimizer, lr=0.1)
    set_mode("train", twins.zero, twins.plain)
    checkpoint.save(folder, step=0, model=twins.model, optimizer=twins.zero)
    others = [param.detach() + 1 for param in twins.plain_model.parameters()]
    with torch.no_grad():
        for model in (twins.model, twins.plain_model):
            for param, other in zip(model.parameters(), others, strict=True):
                param.copy_(other)
    twins.train(2)
    set_mode("eval", twins.zero, twins.plain)
    twins.compare()


@ranks(1, 2)
def test_only_inner_optimizers_with_modes_are_switched(ctx: RankContext) -> None:
    from zeroshard import ParamRule, matrix_params, remaining_params

    model = mlp()
    zero = shard(
        model, [ParamRule(matrix_params(), AveragingOptimizer, lr=0.1), ParamRule(remaining_params, SGD, lr=0.1)]
    )
    zero.train()
    torch.autograd.backward(regression(model, 0))
    zero.step()
    before = [param.detach().clone() for param in model.parameters()]
    zero.eval()
    changed = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    assert changed == [param.dim() == 2 for param in model.parameters()]
    assert all_equal(ctx.gather(values_of(model)))
