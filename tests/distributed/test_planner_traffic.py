"""Compare the traffic of baselines that `plan` estimates with the traffic that torch's profiler records."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer
from torch.profiler import ProfilerActivity, profile

from tests.support import RankContext, ranks
from zeroshard.planner import plan


class Net(nn.Module):
    """All sizes are multiples of 6, so FSDP2 pads nothing on 2 or 3 ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(96, 24)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(24, 48), nn.Linear(48, 24)) for _ in range(3))
        self.head = nn.Linear(24, 6)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(token_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return torch.as_tensor(self.head(hidden))


def setup_ddp(model: Net) -> tuple[nn.Module, Optimizer]:
    return DistributedDataParallel(model), AdamW(model.parameters())


def setup_torch_zero(model: Net) -> tuple[nn.Module, Optimizer]:
    return DistributedDataParallel(model), TorchZero(model.parameters(), AdamW)


def setup_fsdp2(model: Net) -> tuple[nn.Module, Optimizer]:
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model, AdamW(model.parameters())


class SentTraffic(NamedTuple):
    """Traffic of one rank, as the average over all ranks."""

    nbytes: int
    messages: int


def measure_traffic(events: Any, world_size: int) -> SentTraffic:
    """Traffic of float32 tensors. To gather or scatter `numel` elements, a rank sends (N - 1) / N of them."""
    numels: list[int] = []
    uses_reduce_scatter = any(event.name == "c10d::_reduce_scatter_base_" for event in events)
    for event in events:
        shapes = event.input_shapes
        if event.name == "c10d::_allgather_base_":
            numels += [math.prod(shapes[0])]
        elif event.name == "c10d::_reduce_scatter_base_":
            numels += [math.prod(shapes[1])]
        elif event.name == "gloo:broadcast":
            numels += [math.prod(shapes[0])]
        # gloo implements reduce-scatter by all-reduce, so such events are not counted twice.
        elif event.name == "gloo:all_reduce" and not uses_reduce_scatter:
            numels += [math.prod(shapes[0])] * 2  # reduce-scatter and all-gather
    return SentTraffic(sum(4 * numel * (world_size - 1) // world_size for numel in numels), len(numels))


@ranks(2, 3)
@pytest.mark.parametrize(
    ("name", "setup"),
    [("DDP", setup_ddp), ("torch ZeRO", setup_torch_zero), ("FSDP2", setup_fsdp2)],
    ids=["ddp", "zero", "fsdp2"],
)
def test_baseline_traffic_matches_the_plan(
    ctx: RankContext, name: str, setup: Callable[[Net], tuple[nn.Module, Optimizer]]
) -> None:
    expected = plan(Net(), AdamW, ranks=[ctx.world_size], device="cpu").estimate_for(name, ctx.world_size).traffic
    model, optimizer = setup(Net())

    def train() -> None:
        model(torch.arange(5)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()  # Hazard: a profile must not end while a gloo message is in flight

    for _ in range(2):  # DDP rebuilds its buckets after the first pass
        train()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        train()
    found = measure_traffic(profiled.events(), ctx.world_size)
    assert found.messages == expected.messages
    assert found.nbytes == pytest.approx(expected.sent, rel=1e-3)  # each message is rounded down
