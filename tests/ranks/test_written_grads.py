"""ZeRO-1: gradients stay in `param.grad`, and whoever writes there after they have travelled is heard."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support import RankContext, ranks
from tests.support.overlap import regression
from tests.support.pair import average, from_all_ranks
from tests.support.sharded import ZERO1, ShardTwins, Side


def local_grads(model: nn.Module, number: int) -> list[torch.Tensor]:
    return list(torch.autograd.grad(regression(model, number), list(model.parameters())))


def grads_of(model: nn.Module) -> list[torch.Tensor]:
    return [param.grad for param in model.parameters() if param.grad is not None]


@ranks(1, 2, 3)
def test_zero1_sends_what_was_written_into_gradients_that_stay(ctx: RankContext) -> None:
    """By the user, who cleared them in place; on one rank more than on the others."""
    twins = ShardTwins(ZERO1)
    twins.train(1)
    for number in range(3):
        for model in (twins.model, twins.plain_model):
            for param, grad in zip(model.parameters(), local_grads(model, number), strict=True):
                param.grad = torch.zeros_like(param) if param.grad is None else param.grad
                param.grad.add_(grad, alpha=2.0 if ctx.rank == number else 1.0)
        for grad in grads_of(twins.plain_model):
            grad.copy_(average(from_all_ranks(grad)))
        for side in twins.sides:
            side.optimizer.step()
            side.optimizer.zero_grad(set_to_none=False)
        twins.compare()


@ranks(1, 2, 3)
def test_zero1_sends_what_was_scaled_after_a_pass(ctx: RankContext) -> None:
    """What has travelled by then does not count. What `zero_grad` writes needs no second journey."""
    twins = ShardTwins(ZERO1)

    def iterate(side: Side, number: int) -> None:
        side.backward(number)
        torch._foreach_mul_(grads_of(side.model), 0.5)
        side.optimizer.step()
        side.optimizer.zero_grad(set_to_none=False)

    twins.run(3, iterate)
    twins.zero.step()
    assert twins.zero._grad_sync._late == []


@ranks(1, 2, 3)
def test_zero1_refuses_what_is_written_after_clipping(ctx: RankContext) -> None:
    """On one rank; averaging anew would undo the clipping without a word."""
    twins = ShardTwins(ZERO1)
    twins.sides[0].backward(7)
    twins.zero.clip_grad_norm_(0.1)
    if ctx.rank == 0:
        torch._foreach_mul_(grads_of(twins.model), 0.5)
    with pytest.raises(RuntimeError, match=r"gradient of .* was changed in param.grad after .*clipped"):
        twins.zero.step()
    twins.train(2)
