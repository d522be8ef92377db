"""Train a small GPT with Lightning and a sharded optimizer. Run it again, on any number of ranks, to resume.

torchrun --nproc-per-node 2 examples/lightning_gpt.py
torchrun --nproc-per-node 3 examples/lightning_gpt.py --epochs 10
"""

import argparse
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Subset, TensorDataset

from gpt import GPT  # type: ignore[import-not-found]
from zeroshard.integrations.lightning import ZeroShardStrategy

FOLDER = Path("checkpoints-lightning")
TEXT = Path(__file__).parent / "data" / "sonnets.txt"
CONTEXT = 64
BATCH = 12  # passages per step, over all ranks: the world size must divide it


class LitGPT(pl.LightningModule):
    """The module that any other strategy trains, with a plain optimizer and a plain scheduler."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.gpt = GPT(vocabulary, CONTEXT, width=width)

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        (ids,) = batch
        loss = cross_entropy(self.gpt(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        self.log("loss", loss, sync_dist=True, on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        loss = self.trainer.callback_metrics["loss"].item()
        self.print(f"step {self.trainer.global_step}, {self.trainer.world_size} ranks: loss {loss:.4f}")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=2e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def passages(count: int) -> tuple[int, Subset[Any]]:
    """Return the vocabulary size and `count` passages of the text."""
    text = TEXT.read_text(encoding="ascii")
    vocabulary = sorted(set(text))
    ids = torch.tensor([vocabulary.index(character) for character in text]).unfold(0, CONTEXT + 1, 7)
    return len(vocabulary), Subset(TensorDataset(ids), range(count))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small GPT with Lightning, or resume.")
    parser.add_argument("--epochs", type=int, default=5, help="total number of epochs")
    parser.add_argument("--steps", type=int, default=20, help="steps per epoch")
    parser.add_argument("--width", type=int, default=128)
    options = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(0)
    vocabulary, data = passages(options.steps * BATCH)
    trainer = pl.Trainer(
        strategy=ZeroShardStrategy(),  # the only changed line
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        max_epochs=options.epochs,
        gradient_clip_val=1.0,
        callbacks=[ModelCheckpoint(FOLDER, filename="gpt-{epoch}", save_last=True)],
        logger=False,
        enable_progress_bar=False,
    )
    last = FOLDER / "last.ckpt"
    loader = DataLoader(data, batch_size=BATCH // ranks)
    trainer.fit(LitGPT(vocabulary, options.width), loader, ckpt_path=last if last.exists() else None)


if __name__ == "__main__":
    main()
