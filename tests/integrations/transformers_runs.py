"""A tiny GPT-2 and a trainer for it on the ranks of a test. Nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from tests.support import RankContext

VOCAB_SIZE, LENGTH, NUM_SAMPLES, BATCH_SIZE = 32, 8, 96, 12


class TokenDataset(Dataset[dict[str, torch.Tensor]]):
    """Token sequences of different lengths, in which each token determines the next."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(LENGTH) * (1 + number % 3) + number) % VOCAB_SIZE
        labels = torch.where(torch.arange(LENGTH) < LENGTH - number % 4, tokens, -100)
        return {"input_ids": tokens, "labels": labels}


def make_gpt(seed: int) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    sizes = {"n_positions": LENGTH, "n_embd": 16, "n_layer": 2, "n_head": 2}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB_SIZE, **sizes, **no_dropout))


def make_arguments(context: RankContext, directory: Path, **options: Any) -> TrainingArguments:
    """Return arguments for a small run. The global batch of a step is the same at any world size."""
    accumulation_steps = options.get("gradient_accumulation_steps", 1)
    defaults: dict[str, Any] = {
        "per_device_train_batch_size": BATCH_SIZE // context.world_size // accumulation_steps,
        "max_steps": 8,
        "learning_rate": 0.01,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 3,
        "weight_decay": 0.1,
        "optim": "adamw_torch",
        "logging_steps": 1,
        "save_strategy": "no",
        "eval_strategy": "no",
        "per_device_eval_batch_size": 8,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(str(directory), **{**defaults, **options})


class Recorder(transformers.TrainerCallback):
    """Records the values that are logged at each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def on_log(self, *_: Any, logs: Any = None, **__: Any) -> None:
        if logs and ("loss" in logs or "eval_loss" in logs):
            names = ("loss", "eval_loss", "grad_norm", "learning_rate")
            self.steps.append({name: float(logs[name]) for name in names if name in logs})


def train_and_log(
    cls: type[transformers.Trainer], args: TrainingArguments, model: Any, resume: Any = None, **options: Any
) -> list[dict[str, float]]:
    """Train and return the logged values of each step."""
    recorder = Recorder()
    trainer = cls(
        model=model,
        args=args,
        train_dataset=TokenDataset(),
        eval_dataset=TokenDataset(),
        callbacks=[recorder],
        **options,
    )
    trainer.train(resume_from_checkpoint=resume)
    return recorder.steps
