"""Rules, rows of ranks, state elsewhere, master weights and late parameters, all at once: the same numbers."""

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
    return [{"shard_group_size": number} for number in range(1, ctx.world_size + 1) if ctx.world_size % number == 0]


def make_net(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(1)
    layers = [nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 4)]
    return nn.Sequential(*layers).to(dtype)


class ShardedRun:
    def __init__(self, config: ZeroConfig, **where: Any) -> None:
        dtype = torch.bfloat16 if config.master_dtype else torch.float32
        self.model, self.steps = make_net(dtype), 0
        self.optimizer: ShardedOptimizer = shard(self.model, RULES, config=config, **where)

    def train(self, steps: int) -> None:
        """Two passes a step, the first without messages. All ranks have equal gradients: sums of these are exact in
        any order, on a number of ranks that is a power of two."""
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


def train_plain(steps: int) -> list[torch.Tensor]:
    """The two plain optimizers, on one rank's gradients."""
    model = make_net(torch.float32)
    chosen = [name for name, param in model.named_parameters() if param.dim() == 2 and not name.startswith("0.")]
    named = dict(model.named_parameters())
    pair = [
        optim.Muon([named[name] for name in chosen], lr=0.02),
        optim.AdamW([it for name, it in named.items() if name not in chosen], lr=0.01, weight_decay=0.1),
    ]
    run = ShardedRun.__new__(ShardedRun)
    run.model, run.steps = model, 0
    for _ in range(steps):
        run._backward(0)
        run._backward(1)
        for it in pair:
            it.step()
            it.zero_grad()
        run.steps += 1
    return [param.detach() for param in model.parameters()]


@ranks(1, 2, 4)
def test_all_feature_combinations_match_plain_optimizers(ctx: RankContext) -> None:
    expected = {None: train_plain(5)}
    with force_offload("cpu"):
        for where, config in product(shard_group_options(ctx), all_configs()):
            run = ShardedRun(config, **where)
            run.train(5)
            assert_same(run.values, expected.setdefault(config.master_dtype, run.values), f"{where} {config}")


@ranks(2, 4)
@sampled("masters", [None, torch.float32], ids=["plain", "masters"])
def test_feature_combinations_load_each_others_checkpoints(
    ctx: RankContext, masters: torch.dtype | None, tmp_path: Path
) -> None:
    config = replace(BASE_CONFIG, master_dtype=masters)
    straight = ShardedRun(config)
    straight.train(5)
    with force_offload("cpu"):
        places = shard_group_options(ctx)
        for number, where in enumerate(places):
            first = ShardedRun(replace(config, offload=CPUOffload()), **where)
            first.train(3)
            checkpoint.save(tmp_path / str(number), step=3, model=first.model, optimizer=first.optimizer)
            second = ShardedRun(replace(config, overlap_param_gather=True), **places[number - 1])
            second.train(1)
            checkpoint.load(tmp_path / str(number), model=second.model, optimizer=second.optimizer)
            second.steps = 3
            second.train(2)
            assert_same(second.values, straight.values, f"{where} to {places[number - 1]}")
