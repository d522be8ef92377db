"""Training loops with Accelerate on the ranks of a test."""

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
def accelerate_env(context: RankContext, *, cpu: bool = True) -> Iterator[None]:
    """Set the environment variables of torchrun, and reset the state that Accelerate keeps for the whole process.

    On a GPU no ranks are set, so Accelerate runs as a single process: with several it would wait in a way that only
    NCCL supports, not gloo.
    """
    rank_env = {"RANK": context.rank, "LOCAL_RANK": context.rank, "WORLD_SIZE": context.world_size} if cpu else {}
    before = dict(os.environ)
    os.environ.update({key: str(value) for key, value in rank_env.items()}, ACCELERATE_USE_CPU=str(cpu).lower())
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", OMP_NUM_THREADS="1")
    _reset_accelerate_state()
    try:
        yield
    finally:
        _reset_accelerate_state()
        os.environ.clear()
        os.environ.update(before)


def _reset_accelerate_state() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    PartialState._reset_state()


@dataclass
class Loop:
    """A model, its optimizer, scheduler and data; a global batch has the same samples at any world size."""

    accelerator: accelerate.Accelerator
    seed: int
    clip: float | None = None

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        net = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3))
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.02, weight_decay=0.1)
        phases = [LinearLR(optimizer, 0.1, total_iters=3), CosineAnnealingLR(optimizer, 30)]
        scheduler = SequentialLR(optimizer, phases, milestones=[3])
        generator = torch.Generator().manual_seed(5)
        inputs = torch.randn(96, 6, generator=generator)
        data = TensorDataset(inputs, torch.stack([inputs.sum(1), inputs.square().mean(1), inputs[:, 0]], 1))
        loader = DataLoader(data, batch_size=12)
        prepared = self.accelerator.prepare(optimizer, net, loader, scheduler)  # in any order
        self.optimizer, self.model, self.loader, self.scheduler = prepared
        self.losses: list[float] = []
        self.learning_rates: list[float] = []
        self.norms: list[float] = []

    def train_epoch(self) -> None:
        for inputs, targets in self.loader:
            with self.accelerator.accumulate(self.model):
                loss = nn.functional.mse_loss(self.model(inputs), targets)
                self.accelerator.backward(loss)
                if self.clip and self.accelerator.sync_gradients:
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.clip)
                    self.norms.append(norm.item())
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            self.losses.append(loss.item())
            self.learning_rates.append(self.optimizer.param_groups[0]["lr"])

    def values(self) -> dict[str, torch.Tensor]:
        model = self.accelerator.unwrap_model(self.model)
        return {name: value.detach().clone() for name, value in model.state_dict().items()}


def make_accelerator(cls: type[accelerate.Accelerator], **options: Any) -> accelerate.Accelerator:
    return cls(dataloader_config=DataLoaderConfiguration(split_batches=True), **{"cpu": True, **options})
