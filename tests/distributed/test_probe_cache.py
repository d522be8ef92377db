"""The probe cache: a hit on one rank and a miss on another look the same to other ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim import SGD

from tests.support import RankContext, ranks
from tests.support.launch import torchrun
from tests.support.monitoring import recorded
from tests.support.oracles import ShardParityRun, mlp
from zeroshard import shard
from zeroshard.engine import probe


@ranks(2, 3)
def test_cache_hit_on_one_rank_and_miss_on_another_send_the_same_messages(ctx: RankContext) -> None:
    """Both runs send the same messages and give the same results."""
    shard(mlp(), SGD, lr=0.05)  # the first optimizer makes the group for control messages
    probe.clear_probe_cache()
    verbs = []
    for _ in range(2):
        with recorded() as traffic:
            ShardParityRun(torch.optim.AdamW, lr=0.05).train(2)
        verbs.append(sorted(traffic.verbs))
        if ctx.rank == 1:
            probe.clear_probe_cache()
    assert verbs[0] == verbs[1]


class AveragingSGD(SGD):
    """Averages gradients itself, as some published optimizers do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    dist.all_reduce(param.grad)
                    param.grad /= dist.get_world_size()
        return super().step(closure)


SINGLE_RANK_THEN_TWO_RANKS_SCRIPT = """
import os
from datetime import timedelta
import torch.distributed as dist
from torch import nn
from torch.optim import SGD
from zeroshard import shard

class AveragesInLargeGroups(SGD):
    def step(self, closure=None):
        for param in self.param_groups[0]["params"] if dist.get_world_size() > 1 else ():
            if param.grad is not None:
                dist.all_reduce(param.grad)
        return super().step(closure)

if os.environ["RANK"] == "0":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    shard(nn.Linear(3, 3), AveragesInLargeGroups, lr=0.1)
    dist.destroy_process_group()
dist.init_process_group("gloo", timeout=timedelta(seconds=30))
shard(nn.Linear(3, 3), AveragesInLargeGroups, lr=0.1)
print("built")
dist.destroy_process_group()
"""


@pytest.mark.timeout(180)
def test_single_rank_probe_result_is_not_reused_in_larger_group(tmp_path: Path) -> None:
    """Rank 0 has probed in a single-rank group before. If it reused that result, rank 1's probe would wait for it."""
    script = tmp_path / "script.py"
    script.write_text(SINGLE_RANK_THEN_TWO_RANKS_SCRIPT)
    assert torchrun(script, 2, tmp_path).splitlines() == ["built"] * 2


@ranks(2, timeout=20)
def test_optimizer_with_collectives_is_probed_on_all_ranks(ctx: RankContext) -> None:
    for _ in range(2):
        shard(mlp(), AveragingSGD, lr=0.1)
        if ctx.rank == 1:
            probe.clear_probe_cache()
