"""`zeroshard.GradScaler` with sharded gradients matches torch's scaler with DDP and the plain optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.amp.grad_scaler import GradScaler as TorchScaler
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from tests.support import RankContext, ranks
from tests.support.oracles import TINY, WIDTH, ParityRun, ShardParityRun, assert_same, mlp, regression, set_grads
from tests.support.tiers import sampled
from zeroshard import (
    GradScaler,
    RankMismatchError,
    ShardedOptimizer,
    ZeroConfig,
    ZeroRedundancyOptimizer,
    shard,
)

Options = dict[str, Any]
SCALER_OPTIONS: Options = {"device": "cpu", "init_scale": 1024.0, "growth_interval": 2}
CONFIGS = (ZeroConfig(partition=TINY), ZeroConfig(stage=1), ZeroConfig(overlap_param_gather=True))
INNER_OPTIMIZERS: list[tuple[type[optim.Optimizer], Options]] = [
    (optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (optim.AdamW, {"lr": 0.05}),
    (optim.AdamW, {"lr": 0.05, "fused": True}),
]


class ScaledParityRun(ShardParityRun):
    """A parity run with a scaler on each side."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.scalers = [GradScaler(**SCALER_OPTIONS), TorchScaler(**SCALER_OPTIONS)]

    def train_scaled(self, steps: int = 1, *, factor: float = 1.0, clip: bool = False) -> None:
        """Train both sides. `factor` multiplies this rank's loss, in addition to the scale."""
        for _ in range(steps):
            for side, scaler in zip(self.sides, self.scalers, strict=True):
                torch.autograd.backward(scaler.scale(factor * self.loss(side.net, self.steps)))
                if clip:
                    scaler.unscale_(side.optimizer)
                    _clip_by_inf_norm(side.model, side.optimizer)
                scaler.step(side.optimizer)
                scaler.update()
                side.model.zero_grad()
            self.steps += 1
            self.check()
            ours, theirs = (scaler.state_dict() for scaler in self.scalers)
            assert_same(ours, theirs, "the scaler")

    def check(self) -> None:
        if not self.zero.param_groups[0].get("fused"):
            super().check()
        # Fused kernels round the last few elements of a tensor differently, and our shards end elsewhere.
        for ours, theirs in zip(self.model.parameters(), self.plain_model.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def _clip_by_inf_norm(model: nn.Module, optimizer: Any) -> None:
    """Clip by the largest element: its value does not depend on a summation order."""
    if isinstance(optimizer, ShardedOptimizer):
        optimizer.clip_grad_norm_(0.01, math.inf)
    else:
        clip_grad_norm_(model.parameters(), 0.01, math.inf)


def make_scaled_run(config: ZeroConfig, inner: tuple[type[optim.Optimizer], Options]) -> ScaledParityRun:
    factory, options = inner
    return ScaledParityRun(factory, config=config, **options)


@ranks(1, 2, 3, 4)
def test_scaled_training_matches_ddp(ctx: RankContext) -> None:
    for config, inner in zip(CONFIGS, INNER_OPTIMIZERS, strict=True):
        for clip in (False, True):
            scaled = make_scaled_run(config, inner)
            scaled.train_scaled(3, clip=clip)
            assert scaled.scalers[0].get_scale() == 2048.0


@ranks(1, 2, 3, 4)
@sampled("clip", [False, True])
def test_all_ranks_skip_if_one_rank_overflows(ctx: RankContext, clip: bool) -> None:
    for config, inner in zip(CONFIGS, INNER_OPTIMIZERS, strict=True):
        scaled = make_scaled_run(config, inner)
        scaled.train_scaled(1, clip=clip)
        before = [param.detach().clone() for param in scaled.model.parameters()]
        is_last_rank = ctx.rank == ctx.world_size - 1
        scaled.train_scaled(1, factor=math.inf if is_last_rank else 1.0, clip=clip)
        scaled.train_scaled(1, factor=math.nan if is_last_rank else 1.0, clip=clip)
        assert_same([param.detach() for param in scaled.model.parameters()], before)
        assert ctx.gather(scaled.scalers[0].get_scale()) == [256.0] * ctx.world_size
        scaled.train_scaled(3, clip=clip)


@ranks(2, 3)
def test_inf_in_one_shard_skips_step_on_all_ranks(ctx: RankContext) -> None:
    """Only the owner of the shard sees it."""
    for inner in INNER_OPTIMIZERS[::2]:
        for index in (0, 20, WIDTH * WIDTH - 1):
            scaled = make_scaled_run(CONFIGS[0], inner)
            for side in scaled.sides:
                weight = next(side.model.parameters())
                corruption = (
                    torch.zeros(WIDTH * WIDTH).index_fill(0, torch.tensor([index]), math.inf).view(WIDTH, WIDTH)
                )
                if ctx.rank == 0:
                    weight.register_hook(lambda grad, corruption=corruption: grad + corruption)  # type: ignore[no-untyped-call]
            before = [param.detach().clone() for param in scaled.model.parameters()]
            scaled.train_scaled(1)
            assert_same([param.detach() for param in scaled.model.parameters()], before)
            assert ctx.gather(scaled.scalers[0].get_scale()) == [512.0] * ctx.world_size


@ranks(1, 2, 3)
def test_fused_kernel_that_unscales_grads(ctx: RankContext) -> None:
    """Fused kernels unscale exactly, because scales are powers of 2: steps equal those with unscaled gradients."""
    for config in CONFIGS:
        torch.manual_seed(0)
        scaled, plain = mlp(), mlp()
        plain.load_state_dict(scaled.state_dict())
        optimizers = [shard(model, optim.AdamW, lr=0.05, fused=True, config=config) for model in (scaled, plain)]
        scaler = GradScaler(**SCALER_OPTIONS)
        for step in range(3):
            torch.autograd.backward(scaler.scale(regression(scaled, step)))
            scaler.step(optimizers[0])
            scaler.update()
            torch.autograd.backward(regression(plain, step))
            optimizers[1].step()
            for optimizer in optimizers:
                optimizer.zero_grad()
            assert_same(scaled.state_dict(), plain.state_dict())


@ranks(1, 2, 3)
def test_fp16_overflow_leaves_master_weights_unchanged(ctx: RankContext) -> None:
    """Overflows in float16 are detected, and the step leaves the master weights unchanged."""
    model = mlp().half()
    zero = shard(model, optim.AdamW, lr=0.05, config=ZeroConfig(partition=TINY, master_dtype=torch.float32))
    scaler = GradScaler("cpu", init_scale=2.0**20)
    before = [param.detach().clone() for param in model.parameters()]
    scales = []
    for _ in range(8):
        set_grads(model.parameters(), 0)
        for param in model.parameters():
            assert param.grad is not None
            param.grad.copy_(scaler.scale(param.grad.float()))  # infinite above 65504
        scaler.step(zero)
        scaler.update()
        zero.zero_grad()
        scales.append(scaler.get_scale())
        if scales[-1] >= 2.0**16:
            assert_same([param.detach() for param in model.parameters()], before)
    assert scales[:4] == [2.0**19, 2.0**18, 2.0**17, 2.0**16]
    assert scales[-1] == scales[-2] < 2.0**17
    assert all(param.isfinite().all() for param in model.parameters())
    assert any((param != old).any() for param, old in zip(model.parameters(), before, strict=True))
    assert len(set(ctx.gather(tuple(scales)))) == 1


@ranks(1, 2, 3)
@sampled("unscale", [False, True])
def test_torch_scaler_is_rejected(ctx: RankContext, unscale: bool) -> None:
    for config in CONFIGS:
        model = mlp()
        zero = shard(model, optim.SGD, lr=0.1, config=config)
        scaler = TorchScaler(**SCALER_OPTIONS)
        torch.autograd.backward(scaler.scale(regression(model, 0)))
        if unscale:
            scaler.unscale_(zero)
        with pytest.raises(RuntimeError, match=r"use zeroshard\.GradScaler"):
            scaler.step(zero)
        torch.autograd.backward(regression(model, 0))
        zero.step()  # the optimizer still works


@ranks(2, 3, timeout=60)
def test_torch_scaler_on_one_rank_is_reported_on_all(ctx: RankContext) -> None:
    model = mlp()
    zero = shard(model, optim.SGD, lr=0.1)
    scaler = (TorchScaler if ctx.rank == 1 else GradScaler)(**SCALER_OPTIONS)
    torch.autograd.backward(scaler.scale(regression(model, 0)))
    with pytest.raises(RankMismatchError, match=r"different calls.*a step that torch's GradScaler drives"):
        scaler.step(zero)
    zero.zero_grad()
    torch.autograd.backward(regression(model, 0))
    zero.step()


@ranks(1, 2, 3)
def test_torch_scaler_is_rejected_after_unscaled_step(ctx: RankContext) -> None:
    """Attributes left by a step of zeroshard's scaler do not make torch's scaler pass for it."""
    model = mlp()
    zero = shard(model, optim.SGD, lr=0.1)
    ours, theirs = GradScaler(**SCALER_OPTIONS), TorchScaler(**SCALER_OPTIONS)
    torch.autograd.backward(ours.scale(regression(model, 0)))
    ours.unscale_(zero)
    zero.step()
    zero.zero_grad()
    torch.autograd.backward(theirs.scale(regression(model, 1)))
    with pytest.raises(RuntimeError, match=r"use zeroshard\.GradScaler"):
        theirs.step(zero)


def seeded_mlp() -> nn.Module:
    torch.manual_seed(0)
    return mlp()


def wrap_in_ddp(parity: ParityRun) -> list[tuple[nn.Module, Any]]:
    return [(DistributedDataParallel(model), optimizer) for model, optimizer in parity.sides]


def train_under_ddp(parity: ParityRun, scalers: list[Any], factor: Callable[[int], float]) -> None:
    sides = wrap_in_ddp(parity)
    for step in range(5):
        for (net, optimizer), scaler in zip(sides, scalers, strict=True):
            torch.autograd.backward(scaler.scale(factor(step) * regression(net, step)))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        parity.check()
    assert_same(scalers[0].state_dict(), scalers[1].state_dict())


@ranks(1, 2, 3, 4)
def test_flat_drop_in_under_ddp_works_with_either_scaler(ctx: RankContext) -> None:
    def factor(step: int) -> float:
        return math.inf if step == 2 and ctx.rank == 0 else 1.0

    for scaler_class in (TorchScaler, GradScaler):
        for factory, options in INNER_OPTIMIZERS[:2]:
            zero_only = {"config": ZeroConfig(partition=TINY)}
            parity = ParityRun(factory, model=seeded_mlp, zero_only=zero_only, foreach=True, **options)
            train_under_ddp(parity, [scaler_class(**SCALER_OPTIONS), TorchScaler(**SCALER_OPTIONS)], factor)


@ranks(1, 2, 3)
def test_grads_from_ddp_hook_are_treated_as_sharded(ctx: RankContext) -> None:
    torch.manual_seed(0)
    net = DistributedDataParallel(mlp())
    zero = ZeroRedundancyOptimizer(net.parameters(), optim.SGD, lr=0.1, config=ZeroConfig(partition=TINY))
    net.register_comm_hook(None, zero.ddp_hook())
    parity = ScaledParityRun(optim.SGD, lr=0.1)
    scaler = GradScaler(**SCALER_OPTIONS)
    for step in range(3):
        factor = math.inf if step == 1 and ctx.rank == ctx.world_size - 1 else 1.0
        torch.autograd.backward(scaler.scale(factor * regression(net, step)))
        scaler.step(zero)
        scaler.update()
        zero.zero_grad()
        parity.train_scaled(1, factor=factor)
        assert_same(net.module.state_dict(), parity.model.state_dict())
    theirs = TorchScaler(**SCALER_OPTIONS)
    torch.autograd.backward(theirs.scale(regression(net, 3)))
    with pytest.raises(RuntimeError, match=r"use zeroshard\.GradScaler"):
        theirs.step(zero)
