"""Transformers with our `Trainer`, compared with its own `Trainer` with DDP and the plain optimizer."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers

from tests.integrations.accelerate_runs import accelerate_env
from tests.integrations.closeness import assert_same
from tests.integrations.transformers_runs import LENGTH, TokenDataset, make_arguments, make_gpt, train_and_log
from tests.support import RankContext, RankPool, ranks
from tests.support.monitoring import recorded
from tests.support.tiers import sampled
from tests.support.tools import status_of
from zeroshard import CheckpointError, ConfigError, FlatShards, ShardedOptimizer, ZeroConfig, shard
from zeroshard.integrations.transformers import Trainer

DOCS = Path(__file__).parents[2] / "docs"
CASES: dict[str, dict[str, Any]] = {
    "unclipped": {"max_grad_norm": 0.0},
    "clipped": {"max_grad_norm": 0.1},
    "all-options": {
        "gradient_accumulation_steps": 2,
        "bf16": True,
        "eval_strategy": "steps",
        "eval_steps": 4,
    },
}
SMALL_BUCKETS = ZeroConfig(partition=FlatShards(bucket_bytes=2000))


def assert_same_logs(found: list[dict[str, float]], expected: list[dict[str, float]], rel: float = 1e-4) -> None:
    assert [list(step) for step in found] == [list(step) for step in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=rel)


@sampled("case", CASES)
@ranks(2)
def test_results_match_ddp(context: RankContext, tmp_path: Path, case: str) -> None:
    compare_with_ddp(context, tmp_path, case)


@ranks(1, 3)
def test_results_match_ddp_at_other_world_sizes(context: RankContext, tmp_path: Path) -> None:
    for case in ("unclipped", "all-options"):
        compare_with_ddp(context, tmp_path, case)


def compare_with_ddp(context: RankContext, tmp_path: Path, case: str) -> None:
    models, logs = [make_gpt(context.rank), make_gpt(0)], []
    for cls, model in zip((Trainer, transformers.Trainer), models, strict=True):
        options = {"config": SMALL_BUCKETS} if cls is Trainer else {}
        with accelerate_env(context):
            logs.append(train_and_log(cls, make_arguments(context, tmp_path, **CASES[case]), model, **options))
    ours, theirs = (dict(model.state_dict()) for model in models)
    if "bf16" not in CASES[case]:
        assert_same(ours, theirs, exactly=case == "unclipped" and context.world_size <= 2)
    assert_same_logs(logs[0], logs[1], rel=1e-2 if "bf16" in CASES[case] else 1e-4)
    assert logs[0][7]["loss"] < logs[0][0]["loss"]


@ranks(2)
def test_plain_optimizer_and_scheduler_made_by_the_user(context: RankContext, tmp_path: Path) -> None:
    logs = []
    for cls in (Trainer, transformers.Trainer):
        with accelerate_env(context):
            model = make_gpt(0)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizers = (optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
            args = make_arguments(context, tmp_path, max_steps=4)
            logs.append(train_and_log(cls, args, model, optimizers=optimizers))
            assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**4
    assert_same_logs(logs[0], logs[1], rel=1e-6)


@ranks(4)
def test_sharded_optimizer_made_by_the_user(context: RankContext, tmp_path: Path) -> None:
    """A second call of `train` continues training."""
    logs = []
    for cls in (Trainer, transformers.Trainer):
        with accelerate_env(context):
            model = make_gpt(0)
            make = shard if cls is Trainer else lambda model, inner, **options: inner(model.parameters(), **options)
            args = make_arguments(context, tmp_path, max_steps=3, lr_scheduler_type="constant")
            optimizers = (make(model, torch.optim.SGD, lr=0.1, momentum=0.9), None)
            trainer = cls(model=model, args=args, train_dataset=TokenDataset(), optimizers=optimizers)
            losses = [trainer.train().training_loss for _ in range(2)]
            assert isinstance(trainer.optimizer.optimizer, ShardedOptimizer) == (cls is Trainer)
            logs.append([{"loss": loss} for loss in losses])
    assert_same_logs(logs[0], logs[1])


class EvaluatesOnRank0(transformers.TrainerCallback):
    """Rank 0 runs the model alone after each step."""

    def __init__(self) -> None:
        self.outputs: list[torch.Tensor] = []

    def on_step_end(self, *_: Any, **kwargs: Any) -> None:
        model = kwargs["model"]
        if dist.get_rank() == 0:
            model.eval()
            with torch.no_grad(), recorded() as traffic:
                self.outputs.append(model(input_ids=torch.arange(LENGTH)[None]).logits)
            model.train()
            assert not traffic


@ranks(2)
def test_one_rank_can_run_the_model_without_gradients(context: RankContext, tmp_path: Path) -> None:
    with accelerate_env(context):
        model, callback = make_gpt(0), EvaluatesOnRank0()
        model.register_buffer("any", torch.zeros(2))
        args = make_arguments(context, tmp_path, max_steps=2)
        Trainer(model=model, args=args, train_dataset=TokenDataset(), callbacks=[callback]).train()
        assert len(callback.outputs) == (2 if context.rank == 0 else 0)


def train(context: RankContext, directory: Path, steps: int, setup: Any, config: Any) -> list[Any]:
    """Train up to `steps`. `setup`: whether to use the plain Trainer, and the checkpoint to resume from."""
    plain, resume = setup
    with accelerate_env(context):
        dtype = torch.float32 if config is None else torch.bfloat16
        model = make_gpt(context.rank).to(dtype)
        args = make_arguments(
            context, directory, max_steps=steps, save_strategy="steps", save_steps=4, save_total_limit=2
        )
        args.lr_scheduler_type = transformers.SchedulerType.CONSTANT_WITH_WARMUP  # independent of the last step
        cls, options = (transformers.Trainer, {}) if plain else (Trainer, {"config": config})
        logs = train_and_log(cls, args, model, resume, **options)
        return [{name: value.detach().clone() for name, value in model.named_parameters()}, logs]


def without_key_biases(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Drop attention biases: those of keys do not affect the output, so AdamW amplifies noise in their gradients."""
    return {name: value for name, value in values.items() if not name.endswith("c_attn.bias")}


@sampled("config", [None, ZeroConfig(master_dtype=torch.float32)], ids=["default", "master-weights"])
@pytest.mark.filterwarnings("ignore:.* was saved by .* ranks")
def test_resume_at_another_world_size(rank_pool: RankPool, tmp_path: Path, config: Any) -> None:
    def run(size: int, name: str, steps: int, plain: bool = False, resume: Any = None) -> list[Any]:
        arguments = {"directory": tmp_path / name, "steps": steps, "setup": (plain, resume), "config": config}
        result: list[Any] = rank_pool.run(train, size, 120, arguments)[0]
        return result

    uninterrupted, first = run(2, "uninterrupted", 12), run(2, "resumed", 4)
    same_size = run(2, "same-size", 8, resume=str(tmp_path / "resumed" / "checkpoint-4"))
    assert first[1] + same_size[1] == uninterrupted[1][:8], "resuming at the same world size is not bitwise equal"
    second, third = run(3, "resumed", 8, resume=True), run(1, "resumed", 12, resume=True)
    assert_same_logs(first[1] + second[1] + third[1], uninterrupted[1], rel=1e-4 if config is None else 0.05)
    assert sorted(entry.name for entry in (tmp_path / "resumed").iterdir()) == ["checkpoint-12", "checkpoint-8"]
    assert [path.name for path in (tmp_path / "resumed").glob("checkpoint-8/zeroshard/step-*")] == ["step-000000008"]
    if config is None:
        plain = run(2, "plain", 12, plain=True)
        ours, theirs, expected = map(without_key_biases, (third[0], plain[0], uninterrupted[0]))
        assert_same(ours, theirs)
        assert_same(ours, expected)
        from_plain = run(3, "from-plain", 12, resume=str(tmp_path / "plain" / "checkpoint-8"))
        assert_same_logs(from_plain[1], plain[1][8:])


@sampled("config", [None, ZeroConfig(master_dtype=torch.float32)], ids=["default", "master-weights"])
@ranks(2)
def test_plain_trainer_resumes_from_a_converted_checkpoint(
    context: RankContext, tmp_path: Path, config: ZeroConfig | None
) -> None:
    """With the command and the code of docs/frameworks.md."""

    def run(cls: type[transformers.Trainer], directory: str, steps: int, resume: str | None = None) -> list[float]:
        options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 4, "max_grad_norm": 0.0}
        with accelerate_env(context):
            model = make_gpt(0).to(torch.float32 if config is None else torch.bfloat16)
            args = make_arguments(context, tmp_path / directory, max_steps=steps, **options)
            args.lr_scheduler_type = transformers.SchedulerType.CONSTANT_WITH_WARMUP  # independent of the last step
            logs = train_and_log(cls, args, model, resume, **({"config": config} if cls is Trainer else {}))
        return [step["loss"] for step in logs]

    saved = tmp_path / "out" / "checkpoint-4"
    first = run(Trainer, "out", 4)
    context.gather(None)
    with pytest.raises(KeyError, match="param_groups"):
        run(transformers.Trainer, "other", 8, str(saved))
    context.gather(None)
    if context.rank == 0:
        section = (DOCS / "frameworks.md").read_text(encoding="utf-8").partition("\n### Back to the plain Trainer\n")[2]
        command, code = (section.split(f"```{language}\n")[1].split("```")[0] for language in ("console", "python"))
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(tmp_path)
            assert status_of(*command.split()[1:]) == 0
            exec(compile(code, "docs/frameworks.md", "exec"), {})
        state = torch.load(saved / "optimizer.pt", weights_only=True)["state"]
        assert {tuple(sorted(values)) for values in state.values()} == {("exp_avg", "exp_avg_sq", "step")}
    context.gather(None)
    second = run(transformers.Trainer, "out", 8, str(saved))
    if config is None:
        assert first + second == run(transformers.Trainer, "plain", 8)
    else:
        assert second == pytest.approx(run(Trainer, "sharded", 8)[4:], rel=0.05)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@ranks(1)
def test_on_a_gpu(context: RankContext, tmp_path: Path, precision: str) -> None:
    """An interrupted and resumed run equals the plain Trainer without an interruption."""
    mixed = {} if precision == "fp32" else {precision: True}

    def run(cls: type[transformers.Trainer], steps: int, resume: Any = None) -> tuple[dict[str, Any], list[float]]:
        options = {"use_cpu": False, "save_strategy": "steps", "save_steps": 4, **mixed}
        with accelerate_env(context, cpu=False):
            model = make_gpt(0)
            args = make_arguments(context, tmp_path / cls.__module__, max_steps=steps, **options)
            args.lr_scheduler_type = transformers.SchedulerType.CONSTANT_WITH_WARMUP  # independent of the last step
            args._n_gpu = 1  # also on machines with more
            logs = train_and_log(cls, args, model, resume)
        return dict(model.named_parameters()), [step["loss"] for step in logs]

    plain, expected = run(transformers.Trainer, 8)
    _, first = run(Trainer, 4)
    ours, second = run(Trainer, 8, resume=True)
    assert {value.device.type for value in ours.values()} == {"cuda"}
    assert first + second == pytest.approx(expected, rel=1e-4 if precision == "fp32" else 1e-2)
    if precision == "fp32":
        assert_same(without_key_biases(ours), without_key_biases(plain))


@ranks(1, 2)
def test_checkpoint_without_the_shard_directory_is_rejected(context: RankContext, tmp_path: Path) -> None:
    def train(steps: int, resume: str | None = None) -> None:
        with accelerate_env(context):
            args = make_arguments(context, tmp_path, max_steps=steps, save_strategy="steps", save_steps=2)
            train_and_log(Trainer, args, make_gpt(0), resume)

    train(2)
    if context.rank == 0:
        shutil.move(tmp_path / "checkpoint-2" / "zeroshard", tmp_path / "aside")
    context.gather(None)
    with pytest.raises(CheckpointError, match=r"zeroshard is missing.*optimizer\.pt is only a placeholder"):
        train(4, str(tmp_path / "checkpoint-2"))
    context.gather(None)
    if context.rank == 0:
        shutil.move(tmp_path / "aside", tmp_path / "checkpoint-2" / "zeroshard")
    context.gather(None)
    train(4, str(tmp_path / "checkpoint-2"))


@pytest.mark.parametrize("name", ["_save_optimizer_and_scheduler", "_load_optimizer_and_scheduler"])
@ranks(1)
def test_trainer_without_the_overridden_methods_is_rejected(context: RankContext, tmp_path: Path, name: str) -> None:
    with accelerate_env(context), pytest.MonkeyPatch.context() as patch:
        patch.delattr(transformers.Trainer, name)
        with pytest.raises(ConfigError, match=f"has no {name}, which zeroshard overrides"):
            Trainer(model=make_gpt(0), args=make_arguments(context, tmp_path), train_dataset=TokenDataset())


@ranks(1)
def test_mistakes(context: RankContext, tmp_path: Path) -> None:
    with accelerate_env(context):
        args = make_arguments(context, tmp_path)
        args.fsdp = True
        with pytest.raises(ConfigError, match="Leave out fsdp"):
            Trainer(model=make_gpt(0), args=args, train_dataset=TokenDataset())
    with accelerate_env(context):
        args = make_arguments(context, tmp_path, ddp_broadcast_buffers=False)
        with pytest.raises(ConfigError, match=r"Pass ZeroConfig\(broadcast_buffers=False\)"):
            Trainer(model=make_gpt(0), args=args, train_dataset=TokenDataset())
    with accelerate_env(context):
        args = make_arguments(context, tmp_path)
        args._n_gpu = 2
        with pytest.raises(ConfigError, match="got one process with 2 GPUs"):
            Trainer(model=make_gpt(0), args=args, train_dataset=TokenDataset())
