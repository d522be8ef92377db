"""Saved and loaded on through several kinds of optimizers and precisions: the newest values arrive, as precise as they
are; and what differs between ranks is that of the first one."""

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

MASTER = "master_weights"
BF16, FP32 = torch.bfloat16, torch.float32


class Gated(nn.Module):
    """With a parameter of one element."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, dtype=dtype)
        self.gate = nn.Parameter(torch.ones(1, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x) * self.gate
        return out


def gated(dtype: torch.dtype, seed: int = 0) -> Gated:
    torch.manual_seed(seed)
    return Gated(dtype)


def ours(dtype: torch.dtype, *, masters: bool, seed: int = 1) -> tuple[Gated, ZeroRedundancyOptimizer]:
    model = gated(dtype, seed)
    config = ZeroConfig(master_dtype=FP32 if masters else None)
    return model, shard(model, AdamW, lr=1e-2, config=config)


def theirs(kind: str, dtype: torch.dtype, ctx: RankContext, **options: Any) -> tuple[nn.Module, Optimizer]:
    model = gated(dtype, seed=2)
    if kind == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (ctx.world_size,)))
    return model, AdamW(model.parameters(), lr=1e-2, **options)


def go(model: nn.Module, optimizer: Optimizer, steps: int, dtype: torch.dtype) -> None:
    for step in range(steps):
        loss = model(torch.full((2, 8), 1.0 + step, dtype=dtype)).float().square().sum()
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    whole = {n: it.full_tensor() if hasattr(it, "full_tensor") else it for n, it in model.named_parameters()}
    return {name: value.detach().clone() for name, value in whole.items()}


def whole_state(optimizer: ZeroRedundancyOptimizer, ctx: RankContext) -> dict[str, Any]:
    """On all ranks."""
    state = ctx.gather(optimizer.full_state_dict())[0]
    assert state is not None
    return state


def assert_like(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    for name, value in weights(model).items():
        assert torch.equal(value, expected[name].to(value.dtype)), name


@sampled("kind", ["plain", "fsdp2"])
@ranks(1, 2, 3)
def test_master_weights_become_the_model_of_another_optimizer(ctx: RankContext, tmp_path: Path, kind: str) -> None:
    model, optimizer = ours(BF16, masters=True)
    go(model, optimizer, 3, BF16)
    checkpoint.save(tmp_path, step=3, model=model, optimizer=optimizer)
    state = whole_state(optimizer, ctx)
    again, into = theirs(kind, FP32, ctx)
    checkpoint.load(tmp_path, model=again, optimizer=into)
    names = [name for name, _ in model.named_parameters()]
    assert_like(again, {name: state["state"][number][MASTER] for number, name in enumerate(names)})
    assert all(MASTER not in values for values in into.state.values())


@sampled("kind", ["plain", "fsdp2"])
@sampled("between", [FP32, BF16])
@sampled("end", [(FP32, False), (BF16, False), (BF16, True)], ids=str)
@ranks(1, 2)
def test_the_newest_values_arrive_after_a_time_without_master_weights(
    ctx: RankContext, tmp_path: Path, kind: str, between: torch.dtype, end: tuple[torch.dtype, bool]
) -> None:
    model, optimizer = ours(BF16, masters=True)
    go(model, optimizer, 3, BF16)
    checkpoint.save(tmp_path, step=3, model=model, optimizer=optimizer)
    second, plain = theirs(kind, between, ctx)
    checkpoint.load(tmp_path, model=second, optimizer=plain)
    go(second, plain, 10, between)
    checkpoint.save(tmp_path, step=13, model=second, optimizer=plain)
    third, last = ours(end[0], masters=end[1], seed=5)
    assert checkpoint.load(tmp_path, model=third, optimizer=last).step == 13
    assert_like(third, weights(second))
    if end[1]:
        state = whole_state(last, ctx)
        for number, value in enumerate(weights(second).values()):
            assert torch.equal(state["state"][number][MASTER], value.float())


@ranks(1, 2)
def test_state_of_ours_that_a_plain_optimizer_was_given_by_hand(ctx: RankContext, tmp_path: Path) -> None:
    model, optimizer = ours(BF16, masters=True)
    go(model, optimizer, 3, BF16)
    second, plain = theirs("plain", BF16, ctx)
    second.load_state_dict(model.state_dict())
    state = whole_state(optimizer, ctx)
    plain.load_state_dict(state)
    go(second, plain, 10, BF16)
    checkpoint.save(tmp_path, step=13, model=second, optimizer=plain)
    third, last = ours(FP32, masters=False)
    checkpoint.load(tmp_path, model=third, optimizer=last)
    assert_like(third, weights(second))


class KeepsItsOwn(SGD):
    """Has state of that name, too."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param].setdefault(MASTER, torch.full_like(param, 7.0))
        return super().step(closure)


@ranks(1, 2)
def test_what_another_class_calls_master_weights_is_its_own(ctx: RankContext, tmp_path: Path) -> None:
    model = gated(FP32)
    optimizer = KeepsItsOwn(model.parameters(), lr=1e-2, momentum=0.9)
    go(model, optimizer, 2, FP32)
    checkpoint.save(tmp_path, step=2, model=model, optimizer=optimizer)
    again = gated(FP32, seed=3)
    into = KeepsItsOwn(again.parameters(), lr=1e-2, momentum=0.9)
    checkpoint.load(tmp_path, model=again, optimizer=into)
    assert_like(again, weights(model))
    for param in again.parameters():
        assert torch.equal(into.state[param][MASTER], torch.full_like(param, 7.0))


@pytest.mark.parametrize("foreach", [True, False])
@ranks(1, 2, 3)
def test_fsdp2_steps_on_with_parameters_of_one_element(ctx: RankContext, tmp_path: Path, foreach: bool) -> None:
    model, optimizer = theirs("fsdp2", FP32, ctx, foreach=foreach)
    go(model, optimizer, 2, FP32)
    checkpoint.save(tmp_path, step=2, model=model, optimizer=optimizer)
    again, into = theirs("fsdp2", FP32, ctx, foreach=foreach)
    checkpoint.load(tmp_path, model=again, optimizer=into)
    for pair in ((model, optimizer), (again, into)):
        go(*pair, 2, FP32)
    assert_like(again, weights(model))


# ---- what differs between ranks


class Marked(nn.Sequential):
    """Has something beside parameters and buffers."""

    mark = -1

    def get_extra_state(self) -> dict[str, Any]:
        return {"mark": self.mark}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.mark = state["mark"]


def marked(ctx: RankContext) -> Marked:
    torch.manual_seed(0)
    model = Marked(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model.mark = ctx.rank
    return model


def dropin_under_ddp(model: nn.Module) -> tuple[nn.Module, ZeroRedundancyOptimizer]:
    config = ZeroConfig(partition=FlatShards())
    wrapped = DistributedDataParallel(model)
    return wrapped, ZeroRedundancyOptimizer(wrapped.parameters(), AdamW, lr=1e-2, config=config)


WAYS: dict[str, Callable[[nn.Module], tuple[nn.Module, Optimizer]]] = {
    "shard": lambda model: (model, shard(model, AdamW, lr=1e-2)),
    "drop-in": dropin_under_ddp,
    "plain": lambda model: (DistributedDataParallel(model), AdamW(model.parameters(), lr=1e-2)),
}


@sampled("way", WAYS)
@sampled("behind", [False, True])
@ranks(1, 2, 3, 4)
def test_what_differs_is_that_of_the_first_rank(ctx: RankContext, tmp_path: Path, way: str, behind: bool) -> None:
    bare = marked(ctx)
    model, optimizer = WAYS[way](bare)
    scheduler = LambdaLR(optimizer, lambda _: 1.0)
    for step in range(3):
        torch.manual_seed(10 * step + ctx.rank)
        torch.autograd.backward(model(torch.randn(6, 4)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    scheduler.last_epoch = 100 + ctx.rank
    expected = ctx.gather(dict(bare.named_buffers()))[0]
    given: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    save(tmp_path, behind=behind, step=3, extra=ctx.rank, **given)
    assert checkpoint.load(tmp_path, **given).extra == ctx.rank
    for name, buffer in bare.named_buffers():
        assert torch.equal(buffer, expected[name]), name
    assert (bare.mark, scheduler.last_epoch) == (0, 100)
