"""ZeRO-1: gradients stay in `param.grad`, and whoever writes there after they have travelled is heard."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks.test_ddp_hook import Hooked, wraps
from tests.support import RankContext, ranks
from tests.support.oracles import ZERO1, ShardTwins, Side, assert_same, average, from_all_ranks, regression


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


def halve(model: nn.Module, _: object) -> None:
    torch._foreach_mul_(grads_of(model), 0.5)


def exchange(model: nn.Module, _: object) -> None:
    for param in model.parameters():
        param.grad = None if param.grad is None else param.grad * 2.0


@ranks(1, 2, 3)
def test_what_was_written_after_a_pass_under_ddp(ctx: RankContext) -> None:
    """Whatever DDP does with its buckets; also where a second pass adds to the first."""
    for wrap in wraps():
        hooked = Hooked(**wrap)
        hooked.train(2, before_step=halve)
        hooked.train(1, before_step=exchange)
        hooked.train(1, local_passes=1, before_step=halve)
        for net, optimizer in hooked.sides:
            for number in (7, 8):
                torch.autograd.backward(regression(net, number))
            halve(net, None)
            optimizer.step()
        # DDP adds the second pass to the average of the first, and so rounds otherwise.
        torch.testing.assert_close(dict(hooked.net.state_dict()), dict(hooked.plain_net.state_dict()))


@ranks(1, 2, 3)
def test_what_was_written_on_one_rank_under_ddp(ctx: RankContext) -> None:
    hooked = Hooked()
    for number in range(3):
        torch.autograd.backward(regression(hooked.net, number))
        if ctx.rank == number % ctx.world_size:
            torch.nn.utils.clip_grad_norm_(hooked.net.parameters(), 0.01)
        for ours, theirs in zip(hooked.net.parameters(), hooked.plain_net.parameters(), strict=True):
            assert ours.grad is not None
            theirs.grad = average(from_all_ranks(ours.grad))
        for _, optimizer in hooked.sides:
            optimizer.step()
            optimizer.zero_grad()
        assert_same(hooked.net.state_dict(), hooked.plain_net.state_dict())


@ranks(1, 2, 3)
def test_what_nobody_wrote_travels_once_under_ddp(ctx: RankContext) -> None:
    for wrap in wraps():
        hooked = Hooked(**wrap)
        engine: Any = hooked.zero.engine
        for clear in (True, False):
            torch.autograd.backward(regression(hooked.net, 0))
            hooked.zero.step()
            assert engine.grads._late == []
            hooked.zero.zero_grad(set_to_none=clear)


@ranks(1, 2, 3)
def test_what_is_written_after_clipping_is_refused_under_ddp(ctx: RankContext) -> None:
    hooked = Hooked()
    torch.autograd.backward(regression(hooked.net, 0))
    hooked.zero.clip_grad_norm_(0.1)
    if ctx.rank == 0:
        halve(hooked.net, None)
    with pytest.raises(RuntimeError, match=r"gradient of .* was changed in param.grad after .*clipped"):
        hooked.zero.step()
    hooked.train(2)
