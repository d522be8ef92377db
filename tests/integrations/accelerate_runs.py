"""Loops with Accelerate on the ranks of a test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import accelerate
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DataLoaderConfiguration
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader, TensorDataset

from tests.support import RankContext


@contextmanager
def accelerated(context: RankContext, *, cpu: bool = True) -> Iterator[None]:
    """As torchrun has its processes find their place. Accelerate keeps it, for the life of a process.

    On a GPU it finds none, and is alone: where there are others, it waits for them as only NCCL does, not gloo.
    """
    place = {"RANK": context.rank, "LOCAL_RANK": context.rank, "WORLD_SIZE": context.world_size} if cpu else {}
    before = dict(os.environ)
    os.environ.update({key: str(value) for key, value in place.items()}, ACCELERATE_USE_CPU=str(cpu).lower())
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", OMP_NUM_THREADS="1")
    _forget()
    try:
        yield
    finally:
        _forget()
        os.environ.clear()
        os.environ.update(before)


def _forget() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    PartialState._reset_state()


@dataclass
class Loop:
    """A model, its optimizer, scheduler and data; a batch holds the same rows on any number of ranks."""

    accelerator: accelerate.Accelerator
    seed: int
    clip: float | None = None

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        net = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3))
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.02, weight_decay=0.1)
        parts = [LinearLR(optimizer, 0.1, total_iters=3), CosineAnnealingLR(optimizer, 30)]
        schedule = SequentialLR(optimizer, parts, milestones=[3])
        draw = torch.Generator().manual_seed(5)
        inputs = torch.randn(96, 6, generator=draw)
        data = TensorDataset(inputs, torch.stack([inputs.sum(1), inputs.square().mean(1), inputs[:, 0]], 1))
        loader = DataLoader(data, batch_size=12)
        prepared = self.accelerator.prepare(optimizer, net, loader, schedule)  # the order is anybody's
        self.optimizer, self.model, self.loader, self.schedule = prepared
        self.losses: list[float] = []
        self.rates: list[float] = []
        self.norms: list[float] = []

    def epoch(self) -> None:
        for inputs, targets in self.loader:
            with self.accelerator.accumulate(self.model):
                loss = nn.functional.mse_loss(self.model(inputs), targets)
                self.accelerator.backward(loss)
                if self.clip and self.accelerator.sync_gradients:
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.clip)
                    self.norms.append(norm.item())
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
            self.losses.append(loss.item())
            self.rates.append(self.optimizer.param_groups[0]["lr"])

    def values(self) -> dict[str, torch.Tensor]:
        bare = self.accelerator.unwrap_model(self.model)
        return {name: value.detach().clone() for name, value in bare.state_dict().items()}


def accelerator(kind: type[accelerate.Accelerator], **options: Any) -> accelerate.Accelerator:
    return kind(dataloader_config=DataLoaderConfiguration(split_batches=True), **{"cpu": True, **options})
