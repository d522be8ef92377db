"""Optimizers that train and evaluate with different weights use the same weights when they are sharded."""

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
    DdpParityRun,
    ParityRun,
    all_equal,
    assert_same,
    clone_values,
    mlp,
    regression,
    small_model,
    some_configs,
)
from tests.support.tiers import sampled
from zeroshard import (
    FlatShards,
    RankFailedError,
    RankLostError,
    WholeParams,
    ZeroConfig,
    ZeroRedundancyOptimizer,
    checkpoint,
    shard,
)
from zeroshard.engine.param_memory import ParamMemory


class AveragingOptimizer(Optimizer):
    """Evaluates with the mean of all weights so far; needs `train()` before a step, as schedule-free optimizers do."""

    should_fail = False

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "is_training": False, "steps": 0})

    def train(self) -> None:
        self._swap(is_training=True)

    def eval(self) -> None:
        if self.should_fail:
            raise LookupError("on purpose")
        self._swap(is_training=False)

    @torch.no_grad()
    def _swap(self, *, is_training: bool) -> None:
        for group in self.param_groups:
            for param in group["params"] if group["is_training"] != is_training else ():
                if "other" in self.state[param]:
                    other: Tensor = self.state[param]["other"]
                    current = param.clone()
                    param.copy_(other)
                    other.copy_(current)
            group["is_training"] = is_training

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            assert group["is_training"], "call train() before step()"
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
    parity = DdpParityRun(config, optimizer_class=AveragingOptimizer, lr=0.1)
    set_mode("train", parity.zero, parity.plain)
    for _ in range(2):
        parity.train(2)
        trained = clone_values(parity.model)
        set_mode("eval", parity.zero, parity.plain)
        parity.compare()
        assert not all_equal([trained, clone_values(parity.model)])
        set_mode("eval", parity.zero, parity.plain)
        parity.compare()
        set_mode("train", parity.zero, parity.plain)
        parity.compare()
        assert all_equal([trained, clone_values(parity.model)])


@sampled("partition", [WholeParams(), TINY, FlatShards()], ids=["whole", "tiny", "flat"])
@ranks(1, 2, 3)
def test_drop_in_switches_modes(ctx: RankContext, partition: Any) -> None:
    parity = ParityRun(AveragingOptimizer, zero_only={"config": ZeroConfig(partition=partition)})
    set_mode("train", parity.zero, parity.plain)
    parity.train(3)
    for mode in ("eval", "train"):
        set_mode(mode, parity.zero, parity.plain)
        parity.check()
    parity.train(2)


@ranks(1, 2, 3)
def test_master_weights_switch_modes(ctx: RankContext) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return mlp().bfloat16()

    def loss(model: nn.Module, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(number)
        out: Tensor = model(torch.randn(4, 6, generator=generator).bfloat16())
        return out.float().square().mean()

    model, fp32_model = make(), make().float()
    zero = shard(model, AveragingOptimizer, lr=0.1, config=ZeroConfig(master_dtype=torch.float32))
    plain = AveragingOptimizer(list(fp32_model.parameters()), lr=0.1)
    set_mode("train", zero, plain)
    for number in range(3):
        torch.autograd.backward(loss(model, number))  # the same on all ranks
        rounded_model = make()
        rounded_model.load_state_dict(fp32_model.state_dict())
        torch.autograd.backward(loss(rounded_model, number))
        for param, source in zip(fp32_model.parameters(), rounded_model.parameters(), strict=True):
            assert source.grad is not None
            param.grad = source.grad.float()
        for optimizer in (zero, plain):
            optimizer.step()
            optimizer.zero_grad()
    for mode in ("eval", "train"):
        set_mode(mode, zero, plain)
        for ours, theirs in zip(model.parameters(), fp32_model.parameters(), strict=True):
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
    before = clone_values(model)
    inner.should_fail = ctx.rank == 1
    with pytest.raises(LookupError if inner.should_fail else RankFailedError, match="on purpose"):
        zero.eval()
    assert_same(clone_values(model), before)
    inner.should_fail = False
    zero.train()
    torch.autograd.backward(model(torch.ones(2, 5)).sum())
    zero.step()
    zero.eval()
    assert all_equal(ctx.gather(clone_values(model)))


@ranks(2)
def test_saving_before_the_first_step_creates_no_stale_param_copies(ctx: RankContext, tmp_path: Path) -> None:
    """Saving initializes state as the first step would. Copies of weights would be stale once weights are loaded."""
    directory = ctx.gather(tmp_path)[0]
    parity = DdpParityRun(optimizer_class=AveragingOptimizer, lr=0.1)
    set_mode("train", parity.zero, parity.plain)
    checkpoint.save(directory, step=0, model=parity.model, optimizer=parity.zero)
    new_values = [param.detach() + 1 for param in parity.plain_model.parameters()]
    with torch.no_grad():
        for model in (parity.model, parity.plain_model):
            for param, value in zip(model.parameters(), new_values, strict=True):
                param.copy_(value)
    parity.train(2)
    set_mode("eval", parity.zero, parity.plain)
    parity.compare()


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
    assert all_equal(ctx.gather(clone_values(model)))


@ranks(2, timeout=20)
def test_out_of_memory_while_weights_are_sent_raises_on_all_ranks(
    ctx: RankContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the drop-in, which stages small parameters for its broadcasts."""
    model = small_model()
    zero = ZeroRedundancyOptimizer(model.parameters(), AveragingOptimizer, lr=0.1)
    zero.train()
    with monkeypatch.context() as patch:
        if ctx.rank == 1:

            def fail(*_: Any) -> None:
                raise torch.OutOfMemoryError("on purpose")

            patch.setattr(ParamMemory, "plan_broadcast", fail)
        with pytest.raises((torch.OutOfMemoryError, RankLostError), match="on purpose") as caught:
            zero.eval()
    assert caught.type is (torch.OutOfMemoryError if ctx.rank == 1 else RankLostError)
