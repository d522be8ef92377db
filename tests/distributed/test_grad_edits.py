"""Edits of `param.grad` between backward passes and steps: the same results as DDP, or an error on all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.support import RankContext, ranks
from tests.support.oracles import TINY, ZERO1, ZERO2, batch, make_seeded, mlp, regression
from zeroshard import NonFiniteGrads, RankFailedError, RankMismatchError, ZeroConfig, ZeroRedundancyOptimizer, shard

SETUPS = ("ddp_hook", "zero1", "zero2")


class TrainingSetup:
    """A model and its optimizer: DDP with the plain optimizer, or zeroshard in one of `SETUPS`."""

    def __init__(self, setup: str, make_model: Callable[[], nn.Module] = mlp) -> None:
        self.model = make_seeded(make_model)
        self.net: Any = self.model
        if setup in ("plain", "ddp_hook"):
            self.net = DistributedDataParallel(self.model)
        self.optimizer: Any
        if setup == "plain":
            self.optimizer = optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        elif setup == "ddp_hook":
            config = ZeroConfig(partition=TINY)
            self.optimizer = ZeroRedundancyOptimizer(
                self.model.parameters(), optim.SGD, config=config, lr=0.1, momentum=0.9
            )
            self.net.register_comm_hook(None, self.optimizer.ddp_hook())
        else:
            config = ZERO1 if setup == "zero1" else ZERO2
            self.optimizer = shard(self.model, optim.SGD, config=config, lr=0.1, momentum=0.9)
        self.no_sync = getattr(self.net, "no_sync", None) or self.optimizer.no_sync

    @property
    def params(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def backward(self, number: int) -> None:
        torch.autograd.backward(regression(self.net, number))

    def clip(self) -> None:
        if isinstance(self.optimizer, ZeroRedundancyOptimizer):
            self.optimizer.clip_grad_norm_(0.05, math.inf)
        else:
            nn.utils.clip_grad_norm_(self.params, 0.05, math.inf)

    def clear_grads(self) -> None:
        for param in self.params:
            param.grad = None

    def fill_grads(self, value: float) -> None:
        for param in self.params:
            param.grad = torch.full_like(param, value)

    def step(self) -> None:
        self.optimizer.step()


def call_autograd_grad(run: TrainingSetup) -> None:
    run.backward(0)
    run.clip()
    torch.autograd.grad(regression(run.model, 1), run.params)
    run.step()


def clear_one_grad_before_clipping(run: TrainingSetup) -> None:
    run.backward(0)
    run.params[2].grad = None
    run.clip()
    run.step()


def clear_one_grad_after_clipping(run: TrainingSetup) -> None:
    run.backward(0)
    run.clip()
    run.params[2].grad = None
    run.step()


def clear_grads_between_passes(run: TrainingSetup) -> None:
    run.backward(0)
    run.clear_grads()
    run.backward(1)
    run.clip()
    run.step()
    run.clear_grads()
    run.backward(2)
    run.step()


def assign_grads_each_step(run: TrainingSetup) -> None:
    for number in range(1, 4):
        run.fill_grads(0.1 * number)
        run.clip()
        run.step()


def assign_grads_after_zero_grad(run: TrainingSetup) -> None:
    run.backward(0)
    run.optimizer.zero_grad()
    run.fill_grads(0.1)
    run.step()


VALID_PROGRAMS = (
    call_autograd_grad,
    clear_one_grad_before_clipping,
    clear_one_grad_after_clipping,
    clear_grads_between_passes,
    assign_grads_each_step,
    assign_grads_after_zero_grad,
)


@pytest.mark.parametrize("setup", SETUPS)
@ranks(1, 2)
def test_grad_edits_valid_under_ddp_give_the_same_result(ctx: RankContext, setup: str) -> None:
    for program in VALID_PROGRAMS:
        ours, plain = TrainingSetup(setup), TrainingSetup("plain")
        for run in (ours, plain):
            program(run)
            run.optimizer.zero_grad()
            run.backward(7)
            run.step()
        for found, expected in zip(ours.params, plain.params, strict=True):
            assert torch.equal(found, expected), program.__name__


def make_mlp_with_zero_last_layer() -> nn.Module:
    model = mlp()
    *_, last = (layer for layer in model.children() if isinstance(layer, nn.Linear))
    nn.init.zeros_(last.weight)
    return model


@pytest.mark.parametrize("setup", SETUPS)
@ranks(2)
def test_zero_gradients_are_not_mistaken_for_cleared_ones(ctx: RankContext, setup: str) -> None:
    """LoRA's first step has such gradients. DDP rounds differently: it adds the last pass before it averages."""
    ours, plain = (
        TrainingSetup(setup, make_mlp_with_zero_last_layer),
        TrainingSetup("plain", make_mlp_with_zero_last_layer),
    )
    for run in (ours, plain):
        run.backward(0)
        run.clip()
        with run.no_sync():
            run.backward(1)
        run.backward(2)
        run.step()
    for found, expected in zip(ours.params, plain.params, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("setup", SETUPS)
@ranks(2)
def test_invalid_grad_edits_are_rejected_on_all_ranks(ctx: RankContext, setup: str) -> None:
    """Only one rank edits its gradients."""
    run = TrainingSetup(setup)

    def assert_step_rejected(message: str) -> None:
        with pytest.raises(RuntimeError if ctx.rank == 0 else RankFailedError, match=message):
            run.step()

    def assign_grad(grad: torch.Tensor) -> None:
        run.params[2].grad = grad

    for grad in (torch.ones_like(run.params[2]), torch.eye(*run.params[2].shape).to_sparse()):
        run.backward(0)
        if ctx.rank == 0:
            assign_grad(grad)
        assert_step_rejected("changed in param.grad after it was reduced")
    run.backward(0)
    run.clip()
    if ctx.rank == 0:
        run.params[2].grad = None
        torch.autograd.grad(regression(run.model, 1), run.params)
    run.backward(1)
    assert_step_rejected("removed from param.grad")
    run.backward(0)
    run.step()


@ranks(2)
def test_assigned_gradients_after_a_skipped_step(ctx: RankContext) -> None:
    model = make_seeded(mlp)
    for stage in (ZERO1.stage, ZERO2.stage):
        config = ZeroConfig(stage=stage, nonfinite=NonFiniteGrads("skip"))
        optimizer = shard(model, optim.SGD, config=config, lr=0.1)
        torch.autograd.backward(regression(model, 0) * math.inf)
        optimizer.step()
        before = [param.detach().clone() for param in model.parameters()]
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        for param, value in zip(model.parameters(), before, strict=True):
            torch.testing.assert_close(param.detach(), value - 0.1)


@ranks(2)
@pytest.mark.parametrize("fails", [False, True])
def test_grads_cleared_by_hand_after_a_pass_that_was_nested_or_failed(ctx: RankContext, fails: bool) -> None:
    """Such a pass does not end by `finish_backward`: reentrant checkpointing nests it, or an input's hook raises."""

    def fail(_: torch.Tensor) -> None:
        raise ValueError("injected")

    plain, ours = TrainingSetup("plain"), TrainingSetup("zero2")
    for number in range(3):
        for run in (plain, ours):
            run.clear_grads()
            hidden = batch(number).requires_grad_() * 1.0
            if fails and run is ours:
                hidden.register_hook(fail)  # type: ignore[no-untyped-call]
            output = checkpoint(run.net, hidden, use_reentrant=True) if run is ours and not fails else run.net(hidden)
            with pytest.raises(ValueError, match="injected") if fails and run is ours else nullcontext():
                output.square().sum().backward()
            run.step()
        for ours_param, plain_param in zip(ours.params, plain.params, strict=True):
            torch.testing.assert_close(ours_param, plain_param)


@ranks(2)
def test_gradient_set_on_a_group_added_after_backward_is_averaged(ctx: RankContext) -> None:
    model = make_seeded(mlp)
    first, second, *_ = model.parameters()
    for config in (ZERO1, ZERO2):
        optimizer = shard(model, optim.SGD, params=[first], config=config, lr=0.1)
        for param in model.parameters():
            param.requires_grad_(param is first)
        torch.autograd.backward(regression(model, 0))
        before = second.detach().clone()
        second.requires_grad_(True)
        optimizer.add_param_group({"params": [second]})
        second.grad = torch.full_like(second, ctx.rank + 1.0)
        optimizer.step()
        torch.testing.assert_close(second.detach(), before - 0.1 * 1.5)
        optimizer.zero_grad()


@ranks(2)
def test_ddp_hook_supports_groups_added_later(ctx: RankContext) -> None:
    nets = [DistributedDataParallel(make_seeded(mlp)) for _ in range(2)]
    first, *rest = zip(*(net.parameters() for net in nets), strict=True)
    plain = optim.SGD([first[1]], lr=0.1)
    zero = ZeroRedundancyOptimizer([first[0]], optim.SGD, config=ZeroConfig(partition=TINY), lr=0.1)
    nets[0].register_comm_hook(None, zero.ddp_hook())
    zero.add_param_groups([{"params": [ours]} for ours, _ in rest])
    for _, theirs in rest:
        plain.add_param_group({"params": [theirs]})
    for number in range(3):
        for net, optimizer in zip(nets, (zero, plain), strict=True):
            torch.autograd.backward(regression(net, number))
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in (first, *rest):
        assert torch.equal(ours, theirs)


@ranks(2, 3)
def test_grads_cleared_on_one_rank_only_are_rejected_on_all_ranks(ctx: RankContext) -> None:
    run = TrainingSetup("zero2")
    run.backward(0)
    if ctx.rank == 0:
        run.clear_grads()
    with pytest.raises(RankMismatchError, match="after different backward passes"):
        run.step()
    run.backward(1)
    run.step()
