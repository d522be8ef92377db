"""Rules, shard groups, CPU offload, master weights and overlapped parameter all-gathers combined: the same numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn, optim

from tests.distributed.test_offload import force_offload
from tests.support import RankContext, ranks
from tests.support.oracles import assert_same
from tests.support.tiers import sampled
from zeroshard import (
    CPUOffload,
    FlatShards,
    ParamRule,
    ShardedOptimizer,
    ZeroConfig,
    checkpoint,
    matrix_params,
    remaining_params,
    shard,
)

RULES = [
    ParamRule(matrix_params(exclude=("0",)), optim.Muon, lr=0.02),
    ParamRule(remaining_params, optim.AdamW, lr=0.01, weight_decay=0.1),
]
BASE_CONFIG = ZeroConfig(partition=FlatShards(bucket_bytes=3000))


def all_configs() -> Iterator[ZeroConfig]:
    for masters, offload, overlap in product((None, torch.float32), (None, CPUOffload()), (False, True)):
        stage = 1 if overlap else BASE_CONFIG.stage
        yield replace(BASE_CONFIG, master_dtype=masters, offload=offload, overlap_param_gather=overlap, stage=stage)


def shard_group_options(ctx: RankContext) -> list[dict[str, Any]]:
    return [{"shard_group_size": size} for size in range(1, ctx.world_size + 1) if ctx.world_size % size == 0]


def make_net(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(1)
    layers = [nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 4)]
    return nn.Sequential(*layers).to(dtype)


class ShardedRun:
    def __init__(self, config: ZeroConfig, **group_options: Any) -> None:
        dtype = torch.bfloat16 if config.master_dtype else torch.float32
        self.model, self.steps = make_net(dtype), 0
        self.optimizer: ShardedOptimizer = shard(self.model, RULES, config=config, **group_options)

    def train(self, steps: int) -> None:
        """Run two passes per step, the first without communication. All ranks have equal gradients, whose sums are
        exact in any order if the number of ranks is a power of two."""
        for _ in range(steps):
            with self.optimizer.no_sync():
                self._backward(0)
            self._backward(1)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.steps += 1

    def _backward(self, micro_step: int) -> None:
        inputs = torch.randn(6, 12, generator=torch.Generator().manual_seed(10 * self.steps + micro_step))
        model = self.model if self.steps % 3 else self.model[:4]  # some parameters get no gradients now and then
        torch.autograd.backward(model(inputs.to(next(self.model.parameters()).dtype)).float().square().mean())

    @property
    def values(self) -> list[torch.Tensor]:
        self.optimizer.wait_for_params()
        return [param.detach().clone() for param in self.model.parameters()]


def train_plain(steps: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Train float32 copies of the parameters with two plain optimizers, on the gradients of one rank."""
    model = make_net(dtype)
    masters = {
        name: nn.Parameter(param.detach().to(torch.float32, copy=True)) for name, param in model.named_parameters()
    }
    is_muon = {name: param.dim() == 2 and not name.startswith("0.") for name, param in masters.items()}
    optimizers = [
        optim.Muon([master for name, master in masters.items() if is_muon[name]], lr=0.02),
        optim.AdamW([master for name, master in masters.items() if not is_muon[name]], lr=0.01, weight_decay=0.1),
    ]
    run = ShardedRun.__new__(ShardedRun)
    run.model, run.steps = model, 0
    for _ in range(steps):
        run._backward(0)
        run._backward(1)
        for name, param in model.named_parameters():
            masters[name].grad = None if param.grad is None else param.grad.float()
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(masters[name])
        model.zero_grad()
        run.steps += 1
    return [param.detach() for param in model.parameters()]


@ranks(1, 2, 4)
def test_all_feature_combinations_match_plain_optimizers(ctx: RankContext) -> None:
    expected = {None: train_plain(5, torch.float32), torch.float32: train_plain(5, torch.bfloat16)}  # by master_dtype
    with force_offload("cpu"):
        for group_options, config in product(shard_group_options(ctx), all_configs()):
            run = ShardedRun(config, **group_options)
            run.train(5)
            assert_same(run.values, expected[config.master_dtype], f"{group_options} {config}")


@ranks(2, 4)
@sampled("masters", [None, torch.float32], ids=["plain", "masters"])
def test_feature_combinations_load_each_others_checkpoints(
    ctx: RankContext, masters: torch.dtype | None, tmp_path: Path
) -> None:
    config = replace(BASE_CONFIG, master_dtype=masters)
    uninterrupted = ShardedRun(config)
    uninterrupted.train(5)
    with force_offload("cpu"):
        option_sets = shard_group_options(ctx)
        for number, group_options in enumerate(option_sets):
            first = ShardedRun(replace(config, offload=CPUOffload()), **group_options)
            first.train(3)
            checkpoint.save(tmp_path / str(number), step=3, model=first.model, optimizer=first.optimizer)
            second = ShardedRun(replace(config, overlap_param_gather=True), **option_sets[number - 1])
            second.train(1)
            checkpoint.load(tmp_path / str(number), model=second.model, optimizer=second.optimizer)
            second.steps = 3
            second.train(2)
            assert_same(second.values, uninterrupted.values, f"{group_options} to {option_sets[number - 1]}")
