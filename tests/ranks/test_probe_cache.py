"""What a rank remembers of an optimizer class is its own affair: others see no difference."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.optim import SGD

from tests.support import RankContext, ranks
from tests.support.monitoring import recorded
from tests.support.oracles import Pair, mlp
from zeroshard import shard
from zeroshard.runtime import probe_cache


@ranks(2, 3)
def test_a_hit_on_one_rank_and_a_miss_on_another(ctx: RankContext) -> None:
    """The same messages and the same numbers."""
    probe_cache.clear()
    verbs = []
    for _ in range(2):
        with recorded() as traffic:
            Pair(torch.optim.AdamW, lr=0.05).train(2)
        verbs.append(sorted(traffic.verbs))
        if ctx.rank == 1:
            probe_cache.clear()
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


@ranks(2, timeout=20)
def test_an_optimizer_that_communicates_is_probed_by_all_ranks(ctx: RankContext) -> None:
    for _ in range(2):
        shard(mlp(), AveragingSGD, lr=0.1)
        if ctx.rank == 1:
            probe_cache.clear()
