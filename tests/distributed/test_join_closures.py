"""Uneven inputs, with steps through a closure or a GradScaler."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

from tests.support import RankContext, ranks
from tests.support.oracles import ParityRun, assert_same, set_grads, small_model
from tests.support.tiers import sampled
from zeroshard import BindingError, RankFailedError, ZeroRedundancyOptimizer

TrainFn = Callable[[nn.Module, Optimizer, int], None]
OVERFLOW_STEP = 1


def compute_loss(model: nn.Module, step: int) -> torch.Tensor:
    loss: torch.Tensor = model(torch.arange(10.0).add_(step).sin_().view(2, 5)).square().mean()
    return loss


def train_with_closure(model: nn.Module, optimizer: Optimizer, steps: int) -> None:
    for step in range(steps):

        def closure(step: int = step) -> float:
            optimizer.zero_grad()
            loss = compute_loss(model, step)
            torch.autograd.backward(loss)
            return loss.item()

        assert isinstance(optimizer.step(closure), float)


def train_with_grad_scaler(model: nn.Module, optimizer: Optimizer, steps: int) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    for step in range(steps):
        optimizer.zero_grad()
        factor = torch.inf if step == OVERFLOW_STEP else 1.0
        torch.autograd.backward(scaler.scale(compute_loss(model, step) * factor))
        scaler.step(optimizer)
        scaler.update()


@ranks(2, 3, 4)
@sampled("train", [train_with_closure, train_with_grad_scaler])
@pytest.mark.parametrize(("factory", "options"), [(SGD, {"momentum": 0.9}), (AdamW, {"fused": True})])
def test_closure_and_grad_scaler_parity_under_join(
    ctx: RankContext, train: TrainFn, factory: Callable[..., Optimizer], options: dict[str, Any]
) -> None:
    for counts in ([3 + rank for rank in range(4)], [4, 3, 2, 4], [0, 4, 1, 3]):
        ours, theirs = (DistributedDataParallel(small_model()) for _ in range(2))
        zero = ZeroRedundancyOptimizer(ours.parameters(), factory, lr=0.1, **options)
        plain = factory(theirs.parameters(), lr=0.1, **options)
        with Join([theirs]):
            train(theirs, plain, counts[ctx.rank])
        with Join([ours, zero]):
            train(ours, zero, counts[ctx.rank])
        assert_same(ours.state_dict(), theirs.state_dict(), f"the model with {counts}")


@ranks(2, 3)
def test_failing_closure_under_join_raises_on_all_ranks(ctx: RankContext) -> None:
    parity = ParityRun(SGD, lr=0.1)

    def closure() -> None:
        set_grads(parity.model.parameters(), 0)
        raise ArithmeticError("out of luck")

    def train() -> None:
        with Join([parity.zero]):
            if is_last_rank:
                parity.zero.step(closure)

    is_last_rank = ctx.rank == ctx.world_size - 1
    with pytest.raises(ArithmeticError if is_last_rank else RankFailedError, match="out of luck"):
        train()
    parity.check()


@ranks(2, 3)
def test_replaced_param_data_under_join_raises_on_all_ranks(ctx: RankContext) -> None:
    """Ranks without inputs wait for the messages of the first closure call, which the failing rank must send."""
    model = small_model()
    zero = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1)

    def train() -> None:
        with Join([zero]):
            if is_last_rank:
                weight = next(model.parameters())
                weight.grad, weight.data = None, weight.data.double()
                zero.step(lambda: 0.5)

    is_last_rank = ctx.rank == ctx.world_size - 1
    with pytest.raises(BindingError if is_last_rank else RankFailedError, match="float64"):
        train()
