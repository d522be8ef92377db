"""Graphs of other kinds: kept, checkpointed, compiled."""

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
    ShardTwins,
    Side,
    Twins,
    assert_same,
    batch,
    both_stages,
    mlp,
    regression,
    seeded,
    set_grads,
    some_configs,
)
from zeroshard import FlatShards, ZeroConfig, shard

OVERLAP_CONFIG = ZeroConfig(partition=FlatShards(200), overlap_param_gather=True)


@some_configs
@ranks(1, 2)
def test_retained_graph_with_second_backward(ctx: RankContext, config: ZeroConfig) -> None:
    twins = ShardTwins(config, optimizer_class=torch.optim.SGD, lr=0.1)

    def iterate(side: Side, number: int) -> None:
        loss = regression(side.model, number)
        if side.model is twins.model:
            torch.autograd.backward(loss, retain_graph=True)
            torch.autograd.backward(loss)
        else:  # twice the same gradient, exactly
            torch.autograd.backward(2 * loss)
        side.update()

    twins.run(3, iterate)


@both_stages
@ranks(1, 2)
def test_create_graph_and_autograd_grad(ctx: RankContext, config: ZeroConfig) -> None:
    """`create_graph`, and `autograd.grad`, which tells nobody."""
    twins = ShardTwins(config)

    def iterate(side: Side, number: int) -> None:
        loss = regression(side.model, number)
        torch.autograd.grad(loss, list(side.model.parameters()), retain_graph=True)
        torch.autograd.backward(loss, create_graph=side.model is twins.model)
        side.update()

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*create_graph")
        twins.run(2, iterate)


class CheckpointedNet(nn.Module):
    """Blocks that are computed again in backward; a tied weight is in some of them and outside of them, too."""

    def __init__(self, reentrant: bool | None, *, tied: bool, everything: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(mlp(2) for _ in range(3))
        self._reentrant, self._everything = reentrant, everything
        if tied:
            self.blocks[0][0].weight = self.first.weight  # type: ignore[index]
            self.blocks[1][2].weight = self.last.weight  # type: ignore[index]
            self.blocks[2][0].weight = self.blocks[0][2].weight  # type: ignore[index]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._everything:
            return self._checkpoint(nn.Sequential(self.first, *self.blocks, self.last), x.requires_grad_())
        hidden = self.first(x)
        for block in self.blocks:
            hidden = self._checkpoint(block, hidden)
        result: torch.Tensor = self.last(hidden)
        return result

    def _checkpoint(self, part: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if self._reentrant is None:
            result: torch.Tensor = part(x)
        else:
            result = checkpoint(part, x, use_reentrant=self._reentrant)
        return result


@pytest.mark.parametrize("everything", [False, True], ids=["blocks", "everything"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["once", "reentrant"])
@ranks(1, 2)
def test_activation_checkpointing(ctx: RankContext, reentrant: bool, everything: bool) -> None:
    """DDP cannot do all of it, so it gets the same model without."""
    for tied in (False, True):
        for config in (ZERO2, ZERO1, OVERLAP_CONFIG):
            model = partial(CheckpointedNet, reentrant, tied=tied, everything=everything)
            twins = ShardTwins(config, model, plain_model=partial(CheckpointedNet, None, tied=tied))
            for number in range(3):
                for side in twins.sides:
                    side.iterate(number)
            # Gradients of a tied weight from a re-entrant pass and from the outer one are averaged one by one, and
            # then added: a rounding more.
            twins.compare(exactly=not (tied and reentrant))


@pytest.mark.parametrize("reentrant", [False, True], ids=["once", "reentrant"])
@ranks(2)
def test_activation_checkpointing_with_no_sync(ctx: RankContext, reentrant: bool) -> None:
    for config in (ZERO2, ZERO1):
        model = partial(CheckpointedNet, reentrant, tied=False)
        twins = ShardTwins(config, model, plain_model=partial(CheckpointedNet, None, tied=False))

        def iterate(side: Side, number: int) -> None:
            side.backward_locally(number + 50)
            side.iterate(number)

        twins.run(3, iterate)


class NestedBackward(torch.autograd.Function):
    """A backward inside backward, of a graph that has nothing to do with the outer one."""

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

    ShardTwins(ZERO2).train(3, loss)


def compile_module(model: nn.Module, backend: str) -> nn.Module:
    """In place: the model stays what it is."""
    model.compile(backend=backend)
    return model


def compile_function(model: nn.Module, backend: str) -> nn.Module:
    """A new module around the model."""
    compiled: Any = torch.compile(model, backend=backend)
    assert isinstance(compiled, nn.Module)
    return compiled


def compile_layers(model: nn.Module, backend: str) -> nn.Module:
    for layer in model.get_submodule("body").children():
        layer.compile(backend=backend)
    return model


class Net(nn.Module):
    """torch.compile leaves a bare `nn.Sequential` alone."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.body = mlp(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.body(x * self.scale).sin()
        return result


CompileFn = Callable[[nn.Module, str], nn.Module]
COMPILE_FNS: dict[str, CompileFn] = {"module": compile_module, "function": compile_function, "layers": compile_layers}


def train_compiled(config: ZeroConfig, way: str | None, backend: str, *, compile_first: bool) -> list[torch.Tensor]:
    """Compiled before or after it is sharded; parameters after a few steps."""
    torch._dynamo.reset()
    model = callee = seeded(Net, 0)
    if way and compile_first:
        callee = COMPILE_FNS[way](model, backend)
    optimizer = shard(callee, torch.optim.AdamW, config=config, **ADAMW)
    if way and not compile_first:
        callee = COMPILE_FNS[way](model, backend)
    for number in range(4):
        torch.autograd.backward(regression(callee, number))
        if number == 2:  # a second pass before the step
            torch.autograd.backward(regression(callee, 50))
        optimizer.step()
        optimizer.zero_grad()
    optimizer.wait_for_params()
    return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize(("way", "backend"), [*((way, "eager") for way in COMPILE_FNS), ("module", "aot_eager")])
@ranks(2, timeout=120)
def test_compiled_models_match_eager(ctx: RankContext, way: str, backend: str) -> None:
    for config in (ZERO2, OVERLAP_CONFIG):
        expected = train_compiled(config, None, backend, compile_first=False)
        for before in (True, False):
            found = train_compiled(config, way, backend, compile_first=before)
            for ours, theirs in zip(found, expected, strict=True):
                # A compiled backward may multiply and add in another order.
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@ranks(2, timeout=120)
def test_model_is_compiled_once(ctx: RankContext) -> None:
    """Neither hooks nor parameters that arrive late keep it from that, or make it compile again."""
    for config in (ZERO2, OVERLAP_CONFIG):
        torch._dynamo.reset()
        graphs: list[torch.fx.GraphModule] = []

        def collect(
            graph: torch.fx.GraphModule, _: Any, into: list[torch.fx.GraphModule] = graphs
        ) -> Callable[..., Any]:
            into.append(graph)
            return graph.forward

        model = seeded(Net, 0)
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
    """What updates the model may be compiled; the optimizer's own part runs as it is."""
    torch._dynamo.reset()
    twins = ShardTwins(config)

    @torch.compile(backend="eager")
    def update() -> None:
        twins.zero.clip_grad_norm_(0.1, math.inf)
        twins.zero.clip_grad_value_(0.05)
        twins.zero.step()
        twins.zero.zero_grad()

    def iterate(side: Side, number: int) -> None:
        side.backward(number)
        if side.model is twins.model:
            update()
            return
        nn.utils.clip_grad_norm_(side.model.parameters(), 0.1, math.inf)
        nn.utils.clip_grad_value_(side.model.parameters(), 0.05)
        side.update()

    twins.run(3, iterate)


@pytest.mark.parametrize(
    "zero_only",
    [{}, {"parameters_as_bucket_view": True}, {"config": ZeroConfig(partition=FlatShards())}],
    ids=["whole", "view", "flat"],
)
@ranks(1, 2, timeout=60)
def test_compiled_drop_in_step(ctx: RankContext, zero_only: dict[str, Any]) -> None:
    torch._dynamo.reset()
    twins = Twins(torch.optim.AdamW, zero_only=zero_only, **ADAMW)
    step = torch.compile(twins.zero.step, backend="eager")
    for number in range(3):
        for model, optimizer in twins.sides:
            set_grads(model.parameters(), number)
            step() if optimizer is twins.zero else optimizer.step()
        assert_same(twins.model.state_dict(), twins.plain_model.state_dict(), f"the model after step {number + 1}")
