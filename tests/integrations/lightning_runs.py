"""A small LightningModule, and trainers for it on the ranks of a test."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader, TensorDataset

NUM_SAMPLES = 48


class RankEnvironment(LightningEnvironment):
    """A cluster environment of the ranks that the test runs on."""

    @property
    def creates_processes_externally(self) -> bool:
        return True

    def world_size(self) -> int:
        return dist.get_world_size()

    def set_world_size(self, size: int) -> None:
        assert size == dist.get_world_size()

    def global_rank(self) -> int:
        return dist.get_rank()

    def set_global_rank(self, rank: int) -> None:
        assert rank == dist.get_rank()

    def local_rank(self) -> int:
        return dist.get_rank()


class Module(pl.LightningModule):
    """A small model that records losses, learning rates and validation losses.

    With `batch_norm` it has buffers, which differ between ranks.
    """

    def __init__(self, seed: int, *, batch_norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        norm = nn.BatchNorm1d(12) if batch_norm else nn.LayerNorm(12)
        self.net = nn.Sequential(nn.Linear(6, 12), norm, nn.GELU(), nn.Linear(12, 3))
        self.losses: list[float] = []
        self.learning_rates: list[float] = []
        self.validation_losses: list[float] = []

    def loss(self, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(self.net(inputs), targets)

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.learning_rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def validation_step(self, batch: Any, _: int) -> None:
        self.log("validation_loss", self.loss(batch), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.validation_losses.append(self.trainer.callback_metrics["validation_loss"].item())

    def configure_optimizers(self) -> Any:
        decay = [param for param in self.parameters() if param.dim() > 1]
        others = [param for param in self.parameters() if param.dim() <= 1]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 0.01}]
        optimizer = torch.optim.AdamW(groups, lr=0.02, betas=(0.8, 0.99))
        warmup, decay_lr = LinearLR(optimizer, 0.1, total_iters=3), CosineAnnealingLR(optimizer, 20)
        scheduler = SequentialLR(optimizer, [warmup, decay_lr], milestones=[3])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


@dataclass
class Run:
    """Options of one training run. The global batch of a step is the same at any world size."""

    strategy: Strategy | None = None
    directory: Path | None = None
    batch_size: int = 12
    options: dict[str, Any] = field(default_factory=dict)
    accelerator: str = "cpu"

    def make_trainer(self) -> pl.Trainer:
        checkpoints = ModelCheckpoint(self.directory, save_top_k=-1, save_last=True) if self.directory else None
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        options = {
            "max_epochs": 1,
            "callbacks": [checkpoints] if checkpoints else [],
            "plugins": [RankEnvironment()],
            **self.options,
        }
        return pl.Trainer(
            accelerator=self.accelerator,
            devices=dist.get_world_size(),
            strategy=self.strategy or DDPStrategy(),
            enable_checkpointing=checkpoints is not None,
            num_sanity_val_steps=0,
            **quiet,
            **options,
        )

    def fit(self, module: pl.LightningModule, ckpt_path: Any = None) -> pl.Trainer:
        trainer = self.make_trainer()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*does not have many workers.*")
            warnings.filterwarnings("ignore", ".*exists and is not empty.*")
            trainer.fit(module, self.make_loader(), self.make_loader(), ckpt_path=ckpt_path)
        return trainer

    def make_loader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(5)
        inputs = torch.randn(NUM_SAMPLES, 6, generator=generator)
        targets = torch.stack([inputs.sum(1), inputs.square().mean(1), inputs[:, 0]], 1)
        return DataLoader(
            TensorDataset(inputs, targets), batch_size=self.batch_size // dist.get_world_size(), shuffle=False
        )
