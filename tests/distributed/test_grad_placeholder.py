"""Under ZeRO-2 `param.grad` is a placeholder after a backward pass: using it raises an error that says what to do."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.support import RankContext, ranks
from tests.support.oracles import (
    TINY,
    WIDTH,
    ZERO2,
    Branches,
    DdpParityRun,
    batch,
    branches_loss,
    make_seeded,
    mlp,
    regression,
)
from zeroshard import GradScaler, ShardedOptimizer, ZeroConfig, shard
from zeroshard.engine.grad_stage import GradPlaceholder

GRAD_USES: dict[str, Callable[[nn.Module], object]] = {
    "clip_grad_norm_": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "clip_grad_value_": lambda model: nn.utils.clip_grad_value_(model.parameters(), 1.0),
    "get_total_norm": lambda model: nn.utils.get_total_norm([_grad_of(param) for param in model.parameters()]),
    "norm": lambda model: [_grad_of(param).norm() for param in model.parameters()],
    "div_": lambda model: [_grad_of(param).div_(2) for param in model.parameters()],
    "add_": lambda model: [_grad_of(param).add_(torch.ones_like(param)) for param in model.parameters()],
    "isfinite": lambda model: all(_grad_of(param).isfinite().all() for param in model.parameters()),
    "clone": lambda model: [_grad_of(param).clone() for param in model.parameters()],
    "plain optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1).step(),
}


def _grad_of(param: torch.Tensor) -> torch.Tensor:
    assert param.grad is not None
    return param.grad


@ranks(1, 2)
def test_placeholder_use_raises_and_training_continues(ctx: RankContext) -> None:
    parity = DdpParityRun(ZERO2)
    for number, (name, use) in enumerate(GRAD_USES.items()):
        for side in parity.sides:
            side.backward(number)
        with pytest.raises(RuntimeError, match=r"parameter 0 .*sharded across ranks.*optimizer\.clip_grad_norm_"):
            use(parity.model)
        assert all(tuple(_grad_of(param).shape) == tuple(param.shape) for param in parity.model.parameters()), name
        for side in parity.sides:
            side.update()
        parity.compare()
        assert all(param.grad is None for param in parity.model.parameters()), name


@ranks(1, 2, 3)
def test_only_existing_grads_have_placeholders(ctx: RankContext) -> None:
    """After a step: gradients that any rank has. Before it: those of this rank."""
    model = make_seeded(Branches)
    zero = shard(model, torch.optim.SGD, lr=0.1, config=ZERO2)
    torch.autograd.backward(branches_loss(model, 1))
    zero.step()
    branches_with_grads = {name.partition(".")[0] for name, param in model.named_parameters() if param.grad is not None}
    assert branches_with_grads == {"first", "sometimes", "final", *(["odd"] if ctx.world_size > 1 else [])}
    zero.zero_grad(set_to_none=False)
    assert all(
        (param.grad is not None) == (name.partition(".")[0] in branches_with_grads)
        for name, param in model.named_parameters()
    )
    model.zero_grad(set_to_none=False)
    model.zero_grad()
    assert all(param.grad is None for param in model.parameters())


@ranks(1, 2)
def test_placeholders_do_not_affect_accumulation_or_closures(ctx: RankContext) -> None:
    """Autograd accumulates as if there were no placeholder, and users' own hooks see real gradients."""
    parity, seen_types = DdpParityRun(ZERO2), list[type]()
    first_param = next(parity.model.parameters())
    first_param.register_post_accumulate_grad_hook(lambda param: seen_types.append(type(param.grad)))  # type: ignore[no-untyped-call]
    for number in range(3):
        for side in parity.sides:
            side.backward(3 * number)
            side.backward_locally(3 * number + 1)
            side.backward(3 * number + 2)
            side.update()
        parity.compare(exactly=False)  # zeroshard adds several averages, DDP averages again in each pass
    assert GradPlaceholder not in seen_types

    def closure() -> torch.Tensor:
        parity.zero.zero_grad()
        loss = regression(parity.model, 50)
        torch.autograd.backward(loss)
        return loss

    parity.zero.step(closure)


class CheckpointedBlocks(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self._reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(lambda x, layer=layer: layer(x).tanh(), x, use_reentrant=self._reentrant)
        return x


@ranks(2)
@pytest.mark.parametrize("variant", ["checkpoint", "reentrant", "compiled", "graph"])
def test_placeholders_with_checkpointing_compile_and_create_graph(ctx: RankContext, variant: str) -> None:
    """Without `zero_grad` in between, each pass finds the placeholders of the previous one."""
    model: nn.Module = CheckpointedBlocks(variant == "reentrant") if variant in ("checkpoint", "reentrant") else mlp()
    reference = copy.deepcopy(model)
    zero = shard(model, torch.optim.SGD, lr=0.1, config=ZERO2)
    ddp = DistributedDataParallel(reference)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    forward: Any = torch.compile(model, backend="eager") if variant == "compiled" else model
    for net, optimizer in ((forward, zero), (ddp, plain)):
        for number in range(3):
            x = batch(number).requires_grad_(variant == "reentrant")
            torch.autograd.backward(net(x).square().mean(), create_graph=variant == "graph" and net is not ddp)
            optimizer.step()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)  # DDP averages once more in each pass


@ranks(1, 2)
def test_placeholders_are_not_copied_and_are_removed_with_the_optimizer(ctx: RankContext) -> None:
    model = mlp()
    zero: ShardedOptimizer | None = shard(model, torch.optim.SGD, lr=0.1)
    torch.autograd.backward(regression(model, 0))
    copied = copy.deepcopy(model)
    assert all(param.grad is None and not param._backward_hooks for param in copied.parameters())
    torch.save(model, io.BytesIO())
    model.to("cpu").share_memory()
    model.to(torch.float64).to(torch.float32)
    assert all(isinstance(param.grad, GradPlaceholder) for param in model.parameters())
    del zero
    gc.collect()
    assert all(param.grad is None for param in model.parameters())
    torch.autograd.backward(regression(model, 0))
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    shard(model, torch.optim.SGD, lr=0.1)


@ranks(1, 2)
def test_second_optimizer_replaces_placeholders(ctx: RankContext) -> None:
    model = make_seeded(mlp)
    first = shard(model, torch.optim.SGD, lr=0.1)
    torch.autograd.backward(regression(model, 0))
    second = shard(model, torch.optim.SGD, lr=0.1)
    assert all(param.grad is None for param in model.parameters())
    torch.autograd.backward(regression(model, 1))
    second.step()
    del first
    gc.collect()
    assert all(isinstance(param.grad, GradPlaceholder) for param in model.parameters())


@ranks(1, 2)
def test_scaler_and_clipping_do_not_need_param_grad(ctx: RankContext) -> None:
    parity = DdpParityRun(ZeroConfig(partition=TINY))
    scaler = GradScaler("cpu", init_scale=4.0)
    for number in range(2):
        torch.autograd.backward(scaler.scale(regression(parity.model, number)))
        scaler.unscale_(parity.zero)
        parity.zero.clip_grad_norm_(100.0)
        scaler.step(parity.zero)
        scaler.update()
        parity.zero.zero_grad()
        parity.sides[1].iterate(number)
        parity.compare()
