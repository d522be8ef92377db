"""What `plan` says that peers send, against what torch's profiler sees them send."""

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
    """All sizes are multiples of 6, so that FSDP2 pads nothing on 2 or 3 ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(96, 24)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(24, 48), nn.Linear(48, 24)) for _ in range(3))
        self.head = nn.Linear(24, 6)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(words)
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
    """In bytes, on average of all ranks."""

    nbytes: int
    messages: int


def measure_traffic(events: Any, world_size: int) -> SentTraffic:
    """Of float32. What a rank sends of `whole` elements to gather or to scatter them is a part of (N - 1) / N."""
    wholes: list[int] = []
    scatters = any(event.name == "c10d::_reduce_scatter_base_" for event in events)
    for event in events:
        shapes = event.input_shapes
        if event.name == "c10d::_allgather_base_":
            wholes += [math.prod(shapes[0])]
        elif event.name == "c10d::_reduce_scatter_base_":
            wholes += [math.prod(shapes[1])]
        elif event.name == "gloo:broadcast":
            wholes += [math.prod(shapes[0])]
        elif event.name == "gloo:all_reduce" and not scatters:  # gloo scatters by a sum of everything
            wholes += [math.prod(shapes[0])] * 2  # sums to their owners, and back
    return SentTraffic(sum(4 * whole * (world_size - 1) // world_size for whole in wholes), len(wholes))


@ranks(2, 3)
@pytest.mark.parametrize(
    ("name", "arranged"),
    [("DDP", setup_ddp), ("torch ZeRO", setup_torch_zero), ("FSDP2", setup_fsdp2)],
    ids=["ddp", "zero", "fsdp2"],
)
def test_baseline_traffic_matches_the_plan(
    ctx: RankContext, name: str, arranged: Callable[[Net], tuple[nn.Module, Optimizer]]
) -> None:
    expected = plan(Net(), AdamW, ranks=[ctx.world_size], device="cpu").estimate_for(name, ctx.world_size).traffic
    model, optimizer = arranged(Net())

    def train() -> None:
        model(torch.arange(5)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()  # hazard: a profile must not end while a message of gloo is under way

    for _ in range(2):  # DDP arranges its buckets anew after the first
        train()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        train()
    found = measure_traffic(profiled.events(), ctx.world_size)
    assert found.messages == expected.messages
    assert found.nbytes == pytest.approx(expected.sent, rel=1e-3)  # each message rounds down by itself
