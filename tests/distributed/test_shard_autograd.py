"""Retained graphs, activation checkpointing and compiled models."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support import RankContext, ranks
from tests.support.oracles import (
    ADAMW,
    WIDTH,
    ZERO1,
    ZERO2,
    DdpParityRun,
    ParityRun,
    Side,
    assert_same,
    batch,
    both_stages,
    make_seeded,
    mlp,
    regression,
    set_grads,
    some_configs,
)
from zeroshard import FlatShards, ZeroConfig, shard

OVERLAP_CONFIG = ZeroConfig(partition=FlatShards(200), overlap_param_gather=True)


@some_configs
@ranks(1, 2)
def test_retained_graph_with_second_backward(ctx: RankContext, config: ZeroConfig) -> None:
    parity = DdpParityRun(config, optimizer_class=torch.optim.SGD, lr=0.1)

    def iterate(side: Side, number: int) -> None:
        loss = regression(side.model, number)
        if side.model is parity.model:
            torch.autograd.backward(loss, retain_graph=True)
            torch.autograd.backward(loss)
        else:  # exactly the same gradient twice
            torch.autograd.backward(2 * loss)
        side.update()

    parity.run(3, iterate)


@both_stages
@ranks(1, 2)
def test_create_graph_and_autograd_grad(ctx: RankContext, config: ZeroConfig) -> None:
    """`create_graph`, and `autograd.grad`, which runs no hooks."""
    parity = DdpParityRun(config)

    def iterate(side: Side, number: int) -> None:
        loss = regression(side.model, number)
        torch.autograd.grad(loss, list(side.model.parameters()), retain_graph=True)
        torch.autograd.backward(loss, create_graph=side.model is parity.model)
        side.update()

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*create_graph")
        parity.run(2, iterate)


class CheckpointedNet(nn.Module):
    """Blocks that are recomputed in backward; tied weights are in several blocks, or inside and outside of them."""

    def __init__(self, reentrant: bool | None, *, tied: bool, checkpoint_all: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(mlp(2) for _ in range(3))
        self._reentrant, self._checkpoint_all = reentrant, checkpoint_all
        if tied:
            self.blocks[0][0].weight = self.first.weight  # type: ignore[index]
            self.blocks[1][2].weight = self.last.weight  # type: ignore[index]
            self.blocks[2][0].weight = self.blocks[0][2].weight  # type: ignore[index]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._checkpoint_all:
            return self._checkpoint(nn.Sequential(self.first, *self.blocks, self.last), x.requires_grad_())
        hidden = self.first(x)
        for block in self.blocks:
            hidden = self._checkpoint(block, hidden)
        result: torch.Tensor = self.last(hidden)
        return result

    def _checkpoint(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if self._reentrant is None:
            result: torch.Tensor = module(x)
        else:
            result = checkpoint(module, x, use_reentrant=self._reentrant)
        return result


@pytest.mark.parametrize("checkpoint_all", [False, True], ids=["blocks", "full-model"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@ranks(1, 2)
def test_activation_checkpointing(ctx: RankContext, reentrant: bool, checkpoint_all: bool) -> None:
    """DDP does not support all variants, so it gets the same model without checkpointing."""
    for tied in (False, True):
        for config in (ZERO2, ZERO1, OVERLAP_CONFIG):
            model = partial(CheckpointedNet, reentrant, tied=tied, checkpoint_all=checkpoint_all)
            parity = DdpParityRun(config, model, plain_model=partial(CheckpointedNet, None, tied=tied))
            for number in range(3):
                for side in parity.sides:
                    side.iterate(number)
            # Gradients of a tied weight from the re-entrant and from the outer pass are averaged separately and then
            # added: one more rounding.
            parity.compare(exactly=not (tied and reentrant))


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@ranks(2)
def test_activation_checkpointing_with_no_sync(ctx: RankContext, reentrant: bool) -> None:
    for config in (ZERO2, ZERO1):
        model = partial(CheckpointedNet, reentrant, tied=False)
        parity = DdpParityRun(config, model, plain_model=partial(CheckpointedNet, None, tied=False))

        def iterate(side: Side, number: int) -> None:
            side.backward_locally(number + 50)
            side.iterate(number)

        parity.run(3, iterate)


class NestedBackward(torch.autograd.Function):
    """A backward pass inside backward, over a graph unrelated to the outer one."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, *grads: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            torch.autograd.backward(torch.ones(2, requires_grad=True).sum())
        return grads[0]


@ranks(2)
def test_nested_backward(ctx: RankContext) -> None:
    def loss(model: nn.Module, number: int) -> torch.Tensor:
        hidden = model(batch(number))
        result: torch.Tensor = NestedBackward.apply(hidden).square().mean()  # type: ignore[no-untyped-call]
        return result

    DdpParityRun(ZERO2).train(3, loss)


def compile_module(model: nn.Module, backend: str) -> nn.Module:
    """Compile in place: the module object stays the same."""
    model.compile(backend=backend)
    return model


def compile_function(model: nn.Module, backend: str) -> nn.Module:
    """Return a new module around the model."""
    compiled: Any = torch.compile(model, backend=backend)
    assert isinstance(compiled, nn.Module)
    return compiled


def compile_layers(model: nn.Module, backend: str) -> nn.Module:
    for layer in model.get_submodule("body").children():
        layer.compile(backend=backend)
    return model


class Net(nn.Module):
    """A module class of its own: torch.compile does not compile a bare `nn.Sequential`."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.body = mlp(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.body(x * self.scale).sin()
        return result


CompileFn = Callable[[nn.Module, str], nn.Module]
COMPILE_FNS: dict[str, CompileFn] = {"module": compile_module, "function": compile_function, "layers": compile_layers}


def train_compiled(config: ZeroConfig, target: str | None, backend: str, *, compile_first: bool) -> list[torch.Tensor]:
    """Train a model compiled before or after sharding, or not at all, and return its parameters."""
    torch._dynamo.reset()
    model = compiled_model = make_seeded(Net, 0)
    if target and compile_first:
        compiled_model = COMPILE_FNS[target](model, backend)
    optimizer = shard(compiled_model, torch.optim.AdamW, config=config, **ADAMW)
    if target and not compile_first:
        compiled_model = COMPILE_FNS[target](model, backend)
    for number in range(4):
        torch.autograd.backward(regression(compiled_model, number))
        if number == 2:  # a second pass before the step
            torch.autograd.backward(regression(compiled_model, 50))
        optimizer.step()
        optimizer.zero_grad()
    optimizer.wait_for_params()
    return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize(
    ("target", "backend"), [*((target, "eager") for target in COMPILE_FNS), ("module", "aot_eager")]
)
@ranks(2, timeout=120)
def test_compiled_models_match_eager(ctx: RankContext, target: str, backend: str) -> None:
    for config in (ZERO2, OVERLAP_CONFIG):
        expected = train_compiled(config, None, backend, compile_first=False)
        for compile_first in (True, False):
            found = train_compiled(config, target, backend, compile_first=compile_first)
            for ours, theirs in zip(found, expected, strict=True):
                # A compiled backward pass may multiply and add in a different order.
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@ranks(2, timeout=120)
def test_model_is_compiled_once(ctx: RankContext) -> None:
    """Neither hooks nor parameters that arrive late prevent compilation or cause a recompilation."""
    for config in (ZERO2, OVERLAP_CONFIG):
        torch._dynamo.reset()
        graphs: list[torch.fx.GraphModule] = []

        def collect(
            graph: torch.fx.GraphModule, _: Any, collected: list[torch.fx.GraphModule] = graphs
        ) -> Callable[..., Any]:
            collected.append(graph)
            return graph.forward

        model = make_seeded(Net, 0)
        optimizer = shard(model, torch.optim.AdamW, config=config, lr=0.05)
        model.compile(backend=collect)
        counts = []
        for number in range(4):
            torch.autograd.backward(regression(model, number))
            optimizer.step()
            optimizer.zero_grad()
            counts.append(len(graphs))
        assert counts[0] == counts[-1] > 0, counts


@some_configs
@ranks(1, 2, timeout=60)
def test_compiled_update_matches_ddp(ctx: RankContext, config: ZeroConfig) -> None:
    """The function that updates the model may be compiled; the optimizer itself runs eagerly."""
    torch._dynamo.reset()
    parity = DdpParityRun(config)

    @torch.compile(backend="eager")
    def update() -> None:
        parity.zero.clip_grad_norm_(0.1, math.inf)
        parity.zero.clip_grad_value_(0.05)
        parity.zero.step()
        parity.zero.zero_grad()

    def iterate(side: Side, number: int) -> None:
        side.backward(number)
        if side.model is parity.model:
            update()
            return
        nn.utils.clip_grad_norm_(side.model.parameters(), 0.1, math.inf)
        nn.utils.clip_grad_value_(side.model.parameters(), 0.05)
        side.update()

    parity.run(3, iterate)


@pytest.mark.parametrize(
    "zero_only",
    [{}, {"parameters_as_bucket_view": True}, {"config": ZeroConfig(partition=FlatShards())}],
    ids=["whole", "view", "flat"],
)
@ranks(1, 2, timeout=60)
def test_compiled_drop_in_step(ctx: RankContext, zero_only: dict[str, Any]) -> None:
    torch._dynamo.reset()
    parity = ParityRun(torch.optim.AdamW, zero_only=zero_only, **ADAMW)
    step = torch.compile(parity.zero.step, backend="eager")
    for number in range(3):
        for model, optimizer in parity.sides:
            set_grads(model.parameters(), number)
            step() if optimizer is parity.zero else optimizer.step()
        assert_same(parity.model.state_dict(), parity.plain_model.state_dict(), f"the model after step {number + 1}")
