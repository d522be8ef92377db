"""LoRA adapters of PEFT trained with `shard` and with our `Trainer`, compared with DDP and the plain optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.nn.parallel import DistributedDataParallel

from tests.integrations.accelerate_runs import accelerate_env
from tests.integrations.closeness import assert_same
from tests.integrations.transformers_runs import BATCH_SIZE, TokenDataset, make_arguments, make_gpt, train_and_log
from tests.support import RankContext, ranks
from zeroshard import ShardedOptimizer, checkpoint, shard
from zeroshard.integrations.transformers import Trainer

LORA: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True}
OPTIONS: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}


def make_model(seed: int = 0, dropout: float = 0.0) -> Any:
    """Return a GPT with new adapters."""
    return peft.get_peft_model(make_gpt(seed), peft.LoraConfig(lora_dropout=dropout, **LORA))


def load_model(adapters: Path) -> Any:
    """Return a GPT with saved adapters."""
    return peft.PeftModel.from_pretrained(make_gpt(0), adapters, is_trainable=True).train()


def trainable(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: param for name, param in model.named_parameters() if param.requires_grad}


def copy_of(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def make_optimizer(model: torch.nn.Module) -> ShardedOptimizer:
    return shard(model, torch.optim.AdamW, params=list(trainable(model).items()), **OPTIONS)


def train(context: RankContext, model: Any, optimizer: torch.optim.Optimizer, steps: range) -> None:
    data, size = TokenDataset(), BATCH_SIZE // context.world_size
    for step in steps:
        first = step * BATCH_SIZE + context.rank * size
        samples = [data[number % len(data)] for number in range(first, first + size)]
        model(**{key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@ranks(1, 2, 3)
def test_adapters_match_ddp(context: RankContext) -> None:
    ours, theirs = make_model(context.rank), make_model(0)
    before = copy_of(dict(theirs.named_parameters()))
    train(context, ours, make_optimizer(ours), range(6))
    ddp = DistributedDataParallel(theirs)
    train(context, ddp, torch.optim.AdamW(trainable(theirs).values(), **OPTIONS), range(6))
    assert_same(trainable(ours), trainable(theirs), exactly=context.world_size <= 2)
    for name, param in theirs.named_parameters():
        assert torch.equal(param, before[name]) != param.requires_grad, name


@ranks(2)
def test_checkpoint_has_only_what_is_trained(context: RankContext, tmp_path: Path) -> None:
    model = make_model()
    optimizer = make_optimizer(model)
    train(context, model, optimizer, range(2))
    if context.rank == 0:
        model.save_pretrained(tmp_path / "adapters")
    path = checkpoint.save(tmp_path / "checkpoints", step=2, optimizer=optimizer)
    if context.rank == 0:
        tensors = [name for name in FileSystemReader(path).read_metadata().state_dict_metadata if ".exp_avg" in name]
        assert len(tensors) == 2 * len(trainable(model))
        assert all("lora_" in name for name in tensors)
        assert_same(trainable(load_model(tmp_path / "adapters")), trainable(model), exactly=True)


@ranks(2)
def test_resumed_run_equals_an_uninterrupted_one(context: RankContext, tmp_path: Path) -> None:
    """Also with dropout: a checkpoint has the random states of its ranks."""
    torch.manual_seed(context.rank)
    model = make_model(dropout=0.3)
    optimizer = make_optimizer(model)
    train(context, model, optimizer, range(3))
    if context.rank == 0:
        model.save_pretrained(tmp_path / "adapters")
    checkpoint.save(tmp_path / "checkpoints", step=3, optimizer=optimizer)
    train(context, model, optimizer, range(3, 6))

    resumed = load_model(tmp_path / "adapters")
    optimizer = make_optimizer(resumed)
    assert checkpoint.load(tmp_path / "checkpoints", optimizer=optimizer).step == 3
    train(context, resumed, optimizer, range(3, 6))
    assert_same(trainable(resumed), trainable(model), exactly=True)


@ranks(2)
def test_trainer_saves_and_resumes_adapters(context: RankContext, tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 4, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}

    def run(cls: type[transformers.Trainer], steps: int, resume: bool = False) -> list[dict[str, float]]:
        with accelerate_env(context):
            args = make_arguments(context, tmp_path / cls.__module__, max_steps=steps, **saving)
            return train_and_log(cls, args, make_model(), resume)

    expected = run(transformers.Trainer, 8)
    found = run(Trainer, 4) + run(Trainer, 8, resume=True)
    assert [step["loss"] for step in found] == [step["loss"] for step in expected]
    saved = tmp_path / Trainer.__module__ / "checkpoint-8"
    assert (saved / "adapter_model.safetensors").is_file()
    assert not (saved / "model.safetensors").exists()
