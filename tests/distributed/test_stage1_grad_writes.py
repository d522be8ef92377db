"""ZeRO-1 keeps gradients in `param.grad`. Writes count before the gradients are reduced, and are rejected after."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.test_ddp_hook import DdpHookParityRun, ddp_options
from tests.support import RankContext, ranks
from tests.support.oracles import ZERO1, DdpParityRun, average, gather_from_all_ranks, regression


def compute_local_grads(model: nn.Module, number: int) -> list[torch.Tensor]:
    return list(torch.autograd.grad(regression(model, number), list(model.parameters())))


def grads_of(model: nn.Module) -> list[torch.Tensor]:
    return [param.grad for param in model.parameters() if param.grad is not None]


@ranks(1, 2, 3)
def test_zero1_averages_manual_writes_to_grads(ctx: RankContext) -> None:
    """The user adds to gradients that were cleared in place, on one rank twice as much as on the others."""
    parity = DdpParityRun(ZERO1)
    parity.train(1)
    for number in range(3):
        for model in (parity.model, parity.plain_model):
            for param, grad in zip(model.parameters(), compute_local_grads(model, number), strict=True):
                param.grad = torch.zeros_like(param) if param.grad is None else param.grad
                param.grad.add_(grad, alpha=2.0 if ctx.rank == number else 1.0)
        for grad in grads_of(parity.plain_model):
            grad.copy_(average(gather_from_all_ranks(grad)))
        for side in parity.sides:
            side.optimizer.step()
            side.optimizer.zero_grad(set_to_none=False)
        parity.compare()


@ranks(1, 2, 3)
def test_zero1_averages_grads_clipped_before_reduce(ctx: RankContext) -> None:
    """Each rank may edit its gradients of `no_sync` passes. The zeros that `zero_grad` writes are not sent again."""
    parity = DdpParityRun(ZERO1)
    for number in range(3):
        with parity.zero.no_sync():
            torch.autograd.backward(regression(parity.model, number))
        torch.nn.utils.clip_grad_norm_(parity.model.parameters(), 0.01)
        for ours, theirs in zip(parity.model.parameters(), parity.plain_model.parameters(), strict=True):
            assert ours.grad is not None
            theirs.grad = average(gather_from_all_ranks(ours.grad))
        for side in parity.sides:
            side.optimizer.step()
            side.optimizer.zero_grad(set_to_none=False)
        parity.compare()
    parity.zero.step()
    assert parity.zero._model_binding.reducer._params_to_send == []


def replace_grads(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad = None if param.grad is None else param.grad * 2.0


Edit = Callable[[nn.Module], object]
GRAD_EDITS: dict[str, Edit] = {
    "torch's clipping by norm": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.01),
    "torch's clipping below the norm": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1e9),
    "torch's clipping by value": lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.01),
    "scaling": lambda model: torch._foreach_mul_(grads_of(model), 0.5),
    "new tensors": replace_grads,
}


@ranks(1, 2, 3)
def test_zero1_rejects_grad_edits_after_reduce(ctx: RankContext) -> None:
    """Edits on all ranks or on one: each rank would clip by its own norm. Reading and zeroing are allowed."""
    parity = DdpParityRun(ZERO1)
    for edit in GRAD_EDITS.values():
        for editing_ranks in (range(ctx.world_size), [ctx.world_size - 1]):
            parity.sides[0].backward(7)
            nn.utils.get_total_norm(grads_of(parity.model))
            if ctx.rank in editing_ranks:
                edit(parity.model)
            with pytest.raises(RuntimeError, match=r"gradient of .* was changed in param.grad after it was reduced"):
                parity.zero.step()
            parity.train(1)
    parity.sides[0].backward(7)
    parity.model.zero_grad(set_to_none=False)
    parity.train(1)


@ranks(1, 2, 3)
def test_zero1_rejects_grad_edits_after_clipping(ctx: RankContext) -> None:
    """An edit on one rank; averaging again would silently undo the clipping."""
    parity = DdpParityRun(ZERO1)
    parity.sides[0].backward(7)
    parity.zero.clip_grad_norm_(0.1)
    if ctx.rank == 0:
        torch._foreach_mul_(grads_of(parity.model), 0.5)
    with pytest.raises(RuntimeError, match=r"gradient of .* was changed in param.grad after .*clipped"):
        parity.zero.step()
    parity.train(2)


@ranks(1, 2, 3)
def test_ddp_hook_rejects_grad_edits_after_reduce(ctx: RankContext) -> None:
    """With all bucket options of DDP, also when a second pass adds to the first."""
    for ddp_kwargs in ddp_options():
        hooked = DdpHookParityRun(**ddp_kwargs)
        hooked.train(2)
        for edit in GRAD_EDITS.values():
            for passes in (1, 2):
                for number in range(passes):
                    torch.autograd.backward(regression(hooked.net, number))
                if ctx.rank == 0 or passes == 2:
                    edit(hooked.net)
                with pytest.raises(RuntimeError, match=r"was changed in param.grad after it was reduced"):
                    hooked.zero.step()
            hooked.train(1)


@ranks(1, 2, 3)
def test_ddp_hook_does_not_treat_no_sync_passes_as_edits(ctx: RankContext) -> None:
    """Views of a DDP bucket share a version counter, and a local pass adds to only some of them."""
    for view in (False, True):
        hooked = DdpHookParityRun(gradient_as_bucket_view=view)
        hooked.train(2)
        for should_clip in (False, True):
            torch.autograd.backward(regression(hooked.net, 3))
            if should_clip:
                hooked.zero.clip_grad_norm_(0.1)
            with hooked.net.no_sync():
                *_, last = hooked.net.parameters()
                torch.autograd.backward(last.square().sum())
            hooked.zero.step()
            hooked.zero.zero_grad()
        hooked.zero.check_consistency()


@ranks(1, 2, 3)
def test_ddp_hook_reduces_unedited_grads_once(ctx: RankContext) -> None:
    for ddp_kwargs in ddp_options():
        hooked = DdpHookParityRun(**ddp_kwargs)
        engine: Any = hooked.zero._engine
        for set_to_none in (True, False):
            torch.autograd.backward(regression(hooked.net, 0))
            hooked.zero.step()
            assert engine.grads._params_to_send == []
            hooked.zero.zero_grad(set_to_none=set_to_none)


@ranks(1, 2, 3)
def test_ddp_hook_rejects_grad_edits_after_clipping(ctx: RankContext) -> None:
    hooked = DdpHookParityRun()
    torch.autograd.backward(regression(hooked.net, 0))
    hooked.zero.clip_grad_norm_(0.1)
    if ctx.rank == 0:
        torch._foreach_mul_(grads_of(hooked.net), 0.5)
    with pytest.raises(RuntimeError, match=r"gradient of .* was changed in param.grad after .*clipped"):
        hooked.zero.step()
    hooked.train(2)


def clear_each_param(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad = None


CLEAR_FNS: dict[str, Edit] = {
    "by the model": lambda model: model.zero_grad(),
    "in place": lambda model: model.zero_grad(set_to_none=False),
    "one by one": clear_each_param,
}


@ranks(1, 2)
def test_ddp_hook_grads_cleared_without_optimizer_after_clipping(ctx: RankContext) -> None:
    """The optimizer has no reference to the model. A pass after clipping adds to the average unless it is cleared."""
    for ddp_kwargs in ddp_options():
        hooked = DdpHookParityRun(**ddp_kwargs)
        for clear in CLEAR_FNS.values():
            for number in range(2):
                for net, optimizer in hooked.sides:
                    torch.autograd.backward(regression(net, number))
                    if optimizer is hooked.zero:
                        hooked.zero.clip_grad_norm_(0.05, math.inf)
                    else:
                        nn.utils.clip_grad_norm_(net.parameters(), 0.05, math.inf)
                    if number == 0:
                        optimizer.step()
                    clear(net)
            hooked.train(1)
