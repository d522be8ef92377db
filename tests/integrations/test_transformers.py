"""Transformers with our `Trainer`, beside its own with DDP and the plain optimizer."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers

from tests.integrations.accelerate_runs import accelerated
from tests.integrations.closeness import assert_same
from tests.integrations.transformers_runs import LENGTH, Rows, arguments, gpt, trained
from tests.support import RankContext, RankPool, ranks
from tests.support.monitoring import recorded
from tests.support.tiers import sampled
from zeroshard import CheckpointError, ConfigError, FlatShards, ShardedOptimizer, ZeroConfig, shard
from zeroshard.integrations.transformers import Trainer

CASES: dict[str, dict[str, Any]] = {
    "unclipped": {"max_grad_norm": 0.0},
    "clipped": {"max_grad_norm": 0.1},
    "all of it": {"gradient_accumulation_steps": 2, "bf16": True, "eval_strategy": "steps", "eval_steps": 4},
}
SMALL = ZeroConfig(partition=FlatShards(bucket_bytes=2000))


def assert_alike(found: list[dict[str, float]], expected: list[dict[str, float]], rel: float = 1e-4) -> None:
    assert [list(step) for step in found] == [list(step) for step in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=rel)


@sampled("case", CASES)
@ranks(2)
def test_the_same_numbers_as_with_ddp(context: RankContext, tmp_path: Path, case: str) -> None:
    compare_with_ddp(context, tmp_path, case)


@ranks(1, 3)
def test_the_same_numbers_as_with_ddp_on_other_ranks(context: RankContext, tmp_path: Path) -> None:
    for case in ("unclipped", "all of it"):
        compare_with_ddp(context, tmp_path, case)


def compare_with_ddp(context: RankContext, tmp_path: Path, case: str) -> None:
    models, logs = [gpt(context.rank), gpt(0)], []
    for kind, model in zip((Trainer, transformers.Trainer), models, strict=True):
        options = {"config": SMALL} if kind is Trainer else {}
        with accelerated(context):
            logs.append(trained(kind, arguments(context, tmp_path, **CASES[case]), model, **options))
    ours, theirs = (dict(model.state_dict()) for model in models)
    if "bf16" not in CASES[case]:
        assert_same(ours, theirs, exactly=case == "unclipped" and context.world_size <= 2)
    assert_alike(logs[0], logs[1], rel=1e-2 if "bf16" in CASES[case] else 1e-4)
    assert logs[0][7]["loss"] < logs[0][0]["loss"]


@ranks(2)
def test_a_plain_optimizer_and_scheduler_of_ones_own(context: RankContext, tmp_path: Path) -> None:
    logs = []
    for kind in (Trainer, transformers.Trainer):
        with accelerated(context):
            model = gpt(0)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizers = (optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
            args = arguments(context, tmp_path, max_steps=4)
            logs.append(trained(kind, args, model, optimizers=optimizers))
            assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**4
    assert_alike(logs[0], logs[1], rel=1e-6)


@ranks(4)
def test_an_optimizer_of_ones_own(context: RankContext, tmp_path: Path) -> None:
    """And training goes on when `train` is called again."""
    logs = []
    for kind in (Trainer, transformers.Trainer):
        with accelerated(context):
            model = gpt(0)
            make = shard if kind is Trainer else lambda model, of, **given: of(model.parameters(), **given)
            args = arguments(context, tmp_path, max_steps=3, lr_scheduler_type="constant")
            optimizers = (make(model, torch.optim.SGD, lr=0.1, momentum=0.9), None)
            trainer = kind(model=model, args=args, train_dataset=Rows(), optimizers=optimizers)
            losses = [trainer.train().training_loss for _ in range(2)]
            assert isinstance(trainer.optimizer.optimizer, ShardedOptimizer) == (kind is Trainer)
            logs.append([{"loss": loss} for loss in losses])
    assert_alike(logs[0], logs[1])


class Looking(transformers.TrainerCallback):
    """The first rank uses the model alone, after each step."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def on_step_end(self, *_: Any, **given: Any) -> None:
        model = given["model"]
        if dist.get_rank() == 0:
            model.eval()
            with torch.no_grad(), recorded() as traffic:
                self.seen.append(model(input_ids=torch.arange(LENGTH)[None]).logits)
            model.train()
            assert not traffic


@ranks(2)
def test_one_rank_may_use_the_model_without_gradients(context: RankContext, tmp_path: Path) -> None:
    with accelerated(context):
        model, looking = gpt(0), Looking()
        model.register_buffer("any", torch.zeros(2))
        args = arguments(context, tmp_path, max_steps=2)
        Trainer(model=model, args=args, train_dataset=Rows(), callbacks=[looking]).train()
        assert len(looking.seen) == (2 if context.rank == 0 else 0)


def train(context: RankContext, folder: Path, steps: int, how: Any, config: Any) -> list[Any]:
    """`how`: whether by the plain Trainer, and from which checkpoint."""
    plain, resume = how
    with accelerated(context):
        dtype = torch.float32 if config is None else torch.bfloat16
        model = gpt(context.rank).to(dtype)
        args = arguments(context, folder, max_steps=steps, save_strategy="steps", save_steps=4, save_total_limit=2)
        args.lr_scheduler_type = transformers.SchedulerType.CONSTANT_WITH_WARMUP  # which knows no last step
        kind, options = (transformers.Trainer, {}) if plain else (Trainer, {"config": config})
        logs = trained(kind, args, model, resume, **options)
        return [{name: value.detach().clone() for name, value in model.named_parameters()}, logs]


def without_noise(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Biases of keys change nothing: their gradients are noise, of which AdamW makes much."""
    return {name: value for name, value in values.items() if not name.endswith("c_attn.bias")}


@sampled("config", [None, ZeroConfig(master_dtype=torch.float32)], ids=["", "masters"])
@pytest.mark.filterwarnings("ignore:.* was saved by .* ranks")
def test_who_is_stopped_goes_on_at_another_number_of_ranks(rank_pool: RankPool, tmp_path: Path, config: Any) -> None:
    def run(size: int, name: str, steps: int, plain: bool = False, resume: Any = None) -> list[Any]:
        given = {"folder": tmp_path / name, "steps": steps, "how": (plain, resume), "config": config}
        result: list[Any] = rank_pool.run(train, size, 120, given)[0]
        return result

    straight, first = run(2, "straight", 12), run(2, "stopped", 4)
    again = run(2, "again", 8, resume=str(tmp_path / "stopped" / "checkpoint-4"))
    assert first[1] + again[1] == straight[1][:8], "on as many ranks to the last bit"
    second, third = run(3, "stopped", 8, resume=True), run(1, "stopped", 12, resume=True)
    assert_alike(first[1] + second[1] + third[1], straight[1], rel=1e-4 if config is None else 0.05)
    assert sorted(entry.name for entry in (tmp_path / "stopped").iterdir()) == ["checkpoint-12", "checkpoint-8"]
    assert [path.name for path in (tmp_path / "stopped").glob("checkpoint-8/zeroshard/step-*")] == ["step-000000008"]
    if config is None:
        plain = run(2, "plain", 12, plain=True)
        ours, theirs, others = map(without_noise, (third[0], plain[0], straight[0]))
        assert_same(ours, theirs)
        assert_same(ours, others)
        moved = run(3, "moved", 12, resume=str(tmp_path / "plain" / "checkpoint-8"))  # of the plain Trainer
        assert_alike(moved[1], plain[1][8:])


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@ranks(1)
def test_on_a_gpu(context: RankContext, tmp_path: Path, precision: str) -> None:
    """Stopped and gone on, beside the plain Trainer without a stop."""
    mixed = {} if precision == "fp32" else {precision: True}

    def run(kind: type[transformers.Trainer], steps: int, resume: Any = None) -> tuple[dict[str, Any], list[float]]:
        options = {"use_cpu": False, "save_strategy": "steps", "save_steps": 4, **mixed}
        with accelerated(context, cpu=False):
            model = gpt(0)
            args = arguments(context, tmp_path / kind.__module__, max_steps=steps, **options)
            args.lr_scheduler_type = transformers.SchedulerType.CONSTANT_WITH_WARMUP  # which knows no last step
            args._n_gpu = 1  # also where there are more
            logs = trained(kind, args, model, resume)
        return dict(model.named_parameters()), [step["loss"] for step in logs]

    plain, expected = run(transformers.Trainer, 8)
    _, first = run(Trainer, 4)
    ours, second = run(Trainer, 8, resume=True)
    assert {value.device.type for value in ours.values()} == {"cuda"}
    assert first + second == pytest.approx(expected, rel=1e-4 if precision == "fp32" else 1e-2)
    if precision == "fp32":
        assert_same(without_noise(ours), without_noise(plain))


@ranks(1, 2)
def test_a_checkpoint_without_the_folder_of_the_state_is_refused(context: RankContext, tmp_path: Path) -> None:
    def train(steps: int, resume: str | None = None) -> None:
        with accelerated(context):
            args = arguments(context, tmp_path, max_steps=steps, save_strategy="steps", save_steps=2)
            trained(Trainer, args, gpt(0), resume)

    train(2)
    if context.rank == 0:
        shutil.move(tmp_path / "checkpoint-2" / "zeroshard", tmp_path / "aside")
    context.gather(None)
    with pytest.raises(CheckpointError, match=r"zeroshard is missing.*optimizer\.pt says only that it is there"):
        train(4, str(tmp_path / "checkpoint-2"))
    context.gather(None)
    if context.rank == 0:
        shutil.move(tmp_path / "aside", tmp_path / "checkpoint-2" / "zeroshard")
    context.gather(None)
    train(4, str(tmp_path / "checkpoint-2"))


@pytest.mark.parametrize("name", ["_save_optimizer_and_scheduler", "_load_optimizer_and_scheduler"])
@ranks(1)
def test_a_trainer_that_would_not_call_ours_is_refused(context: RankContext, tmp_path: Path, name: str) -> None:
    with accelerated(context), pytest.MonkeyPatch.context() as patch:
        patch.delattr(transformers.Trainer, name)
        with pytest.raises(ConfigError, match=f"has no {name}, in the place of which"):
            Trainer(model=gpt(0), args=arguments(context, tmp_path), train_dataset=Rows())


@ranks(1)
def test_mistakes(context: RankContext, tmp_path: Path) -> None:
    with accelerated(context):
        args = arguments(context, tmp_path)
        args.fsdp = True
        with pytest.raises(ConfigError, match="leave fsdp out of the arguments"):
            Trainer(model=gpt(0), args=args, train_dataset=Rows())
    with accelerated(context):
        args = arguments(context, tmp_path, ddp_broadcast_buffers=False)
        with pytest.raises(ConfigError, match=r"give ZeroConfig\(broadcast_buffers=False\)"):
            Trainer(model=gpt(0), args=args, train_dataset=Rows())
    with accelerated(context):
        args = arguments(context, tmp_path)
        args._n_gpu = 2
        with pytest.raises(ConfigError, match="one process has 2 GPUs here"):
            Trainer(model=gpt(0), args=args, train_dataset=Rows())
