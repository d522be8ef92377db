"""Checkpoints passed on between several kinds of optimizers and precisions.

The newest values arrive in full precision. Where ranks differ, the values of rank 0 are saved.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from tests.support import RankContext, ranks
from tests.support.checkpoints import save
from tests.support.tiers import sampled
from zeroshard import FlatShards, ZeroConfig, ZeroRedundancyOptimizer, checkpoint, shard

MASTER_KEY = "master_weights"
BF16, FP32 = torch.bfloat16, torch.float32


class GatedLinear(nn.Module):
    """A linear layer with a gate of one element."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, dtype=dtype)
        self.gate = nn.Parameter(torch.ones(1, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x) * self.gate
        return out


def make_gated(dtype: torch.dtype, seed: int = 0) -> GatedLinear:
    torch.manual_seed(seed)
    return GatedLinear(dtype)


def make_sharded(dtype: torch.dtype, *, masters: bool, seed: int = 1) -> tuple[GatedLinear, ZeroRedundancyOptimizer]:
    model = make_gated(dtype, seed)
    config = ZeroConfig(master_dtype=FP32 if masters else None)
    return model, shard(model, AdamW, lr=1e-2, config=config)


def make_baseline(kind: str, dtype: torch.dtype, ctx: RankContext, **options: Any) -> tuple[nn.Module, Optimizer]:
    model = make_gated(dtype, seed=2)
    if kind == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (ctx.world_size,)))
    return model, AdamW(model.parameters(), lr=1e-2, **options)


def train(model: nn.Module, optimizer: Optimizer, steps: int, dtype: torch.dtype) -> None:
    for step in range(steps):
        loss = model(torch.full((2, 8), 1.0 + step, dtype=dtype)).float().square().sum()
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def full_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    full = {
        name: param.full_tensor() if hasattr(param, "full_tensor") else param
        for name, param in model.named_parameters()
    }
    return {name: value.detach().clone() for name, value in full.items()}


def gather_full_state(optimizer: ZeroRedundancyOptimizer, ctx: RankContext) -> dict[str, Any]:
    """Return the full state dict on all ranks."""
    state = ctx.gather(optimizer.full_state_dict())[0]
    assert state is not None
    return state


def assert_weights_equal(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    for name, value in full_weights(model).items():
        assert torch.equal(value, expected[name].to(value.dtype)), name


@sampled("kind", ["plain", "fsdp2"])
@ranks(1, 2, 3)
def test_master_weights_load_into_fp32_params_of_other_optimizers(ctx: RankContext, tmp_path: Path, kind: str) -> None:
    model, optimizer = make_sharded(BF16, masters=True)
    train(model, optimizer, 3, BF16)
    checkpoint.save(tmp_path, step=3, model=model, optimizer=optimizer)
    state = gather_full_state(optimizer, ctx)
    new_model, new_optimizer = make_baseline(kind, FP32, ctx)
    checkpoint.load(tmp_path, model=new_model, optimizer=new_optimizer)
    names = [name for name, _ in model.named_parameters()]
    assert_weights_equal(new_model, {name: state["state"][index][MASTER_KEY] for index, name in enumerate(names)})
    assert all(MASTER_KEY not in values for values in new_optimizer.state.values())


@sampled("kind", ["plain", "fsdp2"])
@sampled("second_dtype", [FP32, BF16])
@sampled("third_setup", [(FP32, False), (BF16, False), (BF16, True)], ids=str)
@ranks(1, 2)
def test_stale_master_weights_are_not_restored(
    ctx: RankContext, tmp_path: Path, kind: str, second_dtype: torch.dtype, third_setup: tuple[torch.dtype, bool]
) -> None:
    model, optimizer = make_sharded(BF16, masters=True)
    train(model, optimizer, 3, BF16)
    checkpoint.save(tmp_path, step=3, model=model, optimizer=optimizer)
    second_model, second_optimizer = make_baseline(kind, second_dtype, ctx)
    checkpoint.load(tmp_path, model=second_model, optimizer=second_optimizer)
    train(second_model, second_optimizer, 10, second_dtype)
    checkpoint.save(tmp_path, step=13, model=second_model, optimizer=second_optimizer)
    third_model, third_optimizer = make_sharded(third_setup[0], masters=third_setup[1], seed=5)
    assert checkpoint.load(tmp_path, model=third_model, optimizer=third_optimizer).step == 13
    assert_weights_equal(third_model, full_weights(second_model))
    if third_setup[1]:
        state = gather_full_state(third_optimizer, ctx)
        for index, value in enumerate(full_weights(second_model).values()):
            assert torch.equal(state["state"][index][MASTER_KEY], value.float())


@ranks(1, 2)
def test_sharded_state_loaded_into_plain_optimizer_directly(ctx: RankContext, tmp_path: Path) -> None:
    model, optimizer = make_sharded(BF16, masters=True)
    train(model, optimizer, 3, BF16)
    second_model, second_optimizer = make_baseline("plain", BF16, ctx)
    second_model.load_state_dict(model.state_dict())
    state = gather_full_state(optimizer, ctx)
    second_optimizer.load_state_dict(state)
    train(second_model, second_optimizer, 10, BF16)
    checkpoint.save(tmp_path, step=13, model=second_model, optimizer=second_optimizer)
    third_model, third_optimizer = make_sharded(FP32, masters=False)
    checkpoint.load(tmp_path, model=third_model, optimizer=third_optimizer)
    assert_weights_equal(third_model, full_weights(second_model))


class SGDWithOwnMasterKey(SGD):
    """Has its own state named like zeroshard's master weights."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param].setdefault(MASTER_KEY, torch.full_like(param, 7.0))
        return super().step(closure)


@ranks(1, 2)
def test_foreign_state_named_master_weights_is_untouched(ctx: RankContext, tmp_path: Path) -> None:
    model = make_gated(FP32)
    optimizer = SGDWithOwnMasterKey(model.parameters(), lr=1e-2, momentum=0.9)
    train(model, optimizer, 2, FP32)
    checkpoint.save(tmp_path, step=2, model=model, optimizer=optimizer)
    new_model = make_gated(FP32, seed=3)
    new_optimizer = SGDWithOwnMasterKey(new_model.parameters(), lr=1e-2, momentum=0.9)
    checkpoint.load(tmp_path, model=new_model, optimizer=new_optimizer)
    assert_weights_equal(new_model, full_weights(model))
    for param in new_model.parameters():
        assert torch.equal(new_optimizer.state[param][MASTER_KEY], torch.full_like(param, 7.0))


@pytest.mark.parametrize("foreach", [True, False])
@ranks(1, 2, 3)
def test_fsdp2_resumes_with_single_element_params(ctx: RankContext, tmp_path: Path, foreach: bool) -> None:
    model, optimizer = make_baseline("fsdp2", FP32, ctx, foreach=foreach)
    train(model, optimizer, 2, FP32)
    checkpoint.save(tmp_path, step=2, model=model, optimizer=optimizer)
    new_model, new_optimizer = make_baseline("fsdp2", FP32, ctx, foreach=foreach)
    checkpoint.load(tmp_path, model=new_model, optimizer=new_optimizer)
    for run in ((model, optimizer), (new_model, new_optimizer)):
        train(*run, 2, FP32)
    assert_weights_equal(new_model, full_weights(model))


# ---- values that differ between ranks


class ModelWithExtraState(nn.Sequential):
    """Has extra state besides parameters and buffers."""

    saving_rank = -1

    def get_extra_state(self) -> dict[str, Any]:
        return {"saving_rank": self.saving_rank}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.saving_rank = state["saving_rank"]


def make_model_with_extra_state(ctx: RankContext) -> ModelWithExtraState:
    torch.manual_seed(0)
    model = ModelWithExtraState(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model.saving_rank = ctx.rank
    return model


def make_dropin_under_ddp(model: nn.Module) -> tuple[nn.Module, ZeroRedundancyOptimizer]:
    config = ZeroConfig(partition=FlatShards())
    wrapped = DistributedDataParallel(model)
    return wrapped, ZeroRedundancyOptimizer(wrapped.parameters(), AdamW, lr=1e-2, config=config)


SETUPS: dict[str, Callable[[nn.Module], tuple[nn.Module, Optimizer]]] = {
    "shard": lambda model: (model, shard(model, AdamW, lr=1e-2)),
    "drop-in": make_dropin_under_ddp,
    "plain": lambda model: (DistributedDataParallel(model), AdamW(model.parameters(), lr=1e-2)),
}


@sampled("setup", SETUPS)
@sampled("in_background", [False, True])
@ranks(1, 2, 3, 4)
def test_rank0_buffers_and_scheduler_are_saved_where_ranks_differ(
    ctx: RankContext, tmp_path: Path, setup: str, in_background: bool
) -> None:
    unwrapped = make_model_with_extra_state(ctx)
    model, optimizer = SETUPS[setup](unwrapped)
    scheduler = LambdaLR(optimizer, lambda _: 1.0)
    for step in range(3):
        torch.manual_seed(10 * step + ctx.rank)
        torch.autograd.backward(model(torch.randn(6, 4)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    scheduler.last_epoch = 100 + ctx.rank
    expected = ctx.gather(dict(unwrapped.named_buffers()))[0]
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    save(tmp_path, in_background=in_background, step=3, extra=ctx.rank, **parts)
    assert checkpoint.load(tmp_path, **parts).extra == ctx.rank
    for name, buffer in unwrapped.named_buffers():
        assert torch.equal(buffer, expected[name]), name
    assert (unwrapped.saving_rank, scheduler.last_epoch) == (0, 100)
