"""Lightning's Trainer with `ZeroShardStrategy`, compared with its DDPStrategy and the plain optimizer."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSampler
from lightning.pytorch.plugins import AsyncCheckpointIO, MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from tests.integrations.closeness import assert_same
from tests.integrations.lightning_runs import Module, RankEnvironment, Run
from tests.support import RankContext, RankPool, ranks
from tests.support.monitoring import recorded
from tests.support.tiers import sampled
from zeroshard import (
    CheckpointError,
    ConfigError,
    FlatShards,
    ParamRule,
    RankFailedError,
    ZeroConfig,
    ZeroError,
    matrix_params,
    remaining_params,
    shard,
)
from zeroshard.integrations.lightning import ZeroShardStrategy

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"accumulate_grad_batches": 3},
    "clipped": {"gradient_clip_val": 0.05},
    "all-options": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "precision": "bf16-mixed"},
}
SMALL_BUCKETS = ZeroConfig(partition=FlatShards(bucket_bytes=200))


@sampled("case", CASES)
@ranks(2)
def test_results_match_ddp(context: RankContext, case: str) -> None:
    compare_with_ddp(context, case)


@ranks(1, 3)
def test_results_match_ddp_at_other_world_sizes(context: RankContext) -> None:
    for case in ("plain", "all-options"):
        compare_with_ddp(context, case)


def compare_with_ddp(context: RankContext, case: str) -> None:
    ours, theirs = Module(context.rank), Module(0)
    trainer = Run(ZeroShardStrategy(config=SMALL_BUCKETS), options=CASES[case]).fit(ours)
    Run(options=CASES[case]).fit(theirs)
    assert_same(
        ours.state_dict(),
        theirs.state_dict(),
        exactly=context.world_size <= 2 and "gradient_clip_val" not in CASES[case],
    )
    assert ours.learning_rates == theirs.learning_rates
    assert len(set(ours.learning_rates)) > 1
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-4)
    assert ours.validation_losses == pytest.approx(theirs.validation_losses, rel=1e-4)
    assert trainer.optimizers[0].world_size == context.world_size


@ranks(4)
def test_strategy_by_name_with_value_clipping_and_sync_every_pass(context: RankContext) -> None:
    options = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value", "accumulate_grad_batches": 2}
    ours, named, theirs = Module(context.rank), Module(context.rank), Module(0)
    Run(ZeroShardStrategy(sync_every_pass=True), options=options).fit(ours)
    Run("zeroshard", options=options).fit(named)
    Run(options=options).fit(theirs)
    assert_same(ours.state_dict(), theirs.state_dict(), exactly=False)
    assert_same(named.state_dict(), theirs.state_dict(), exactly=False)


@ranks(2)
def test_buffers_of_rank_0_with_overlapped_param_gather(context: RankContext) -> None:
    ours, theirs = Module(context.rank, batch_norm=True), Module(0, batch_norm=True)
    Run(ZeroShardStrategy(config=ZeroConfig(overlap_param_gather=True))).fit(ours)
    Run().fit(theirs)
    assert_same(ours.state_dict(), theirs.state_dict(), exactly=True)
    assert ours.validation_losses == theirs.validation_losses


class EvaluatesOnRank0(Module):
    """Rank 0 runs the model alone after each step."""

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.net(inputs)

    def predict_step(self, batch: Any, _: int) -> Any:
        return self(batch)

    def on_train_batch_end(self, *_: Any) -> None:
        super().on_train_batch_end()
        if self.global_rank == 0:
            self.eval()
            with torch.no_grad(), recorded() as traffic:
                self(torch.ones(2, 6))
            self.train()
            assert not traffic


@ranks(2)
def test_one_rank_can_run_the_module_without_gradients(context: RankContext) -> None:
    """In `predict`, too, if ranks have different numbers of samples."""
    found = []
    for strategy in (ZeroShardStrategy(), DDPStrategy()):
        module = EvaluatesOnRank0(0, batch_norm=True)
        trainer = Run(strategy).fit(module)
        samples: Any = torch.linspace(0, 1, 18).view(3, 6)
        sampler = UnrepeatedDistributedSampler(samples, shuffle=False)
        predictions = trainer.predict(module, DataLoader(samples, batch_size=1, sampler=sampler))
        assert predictions is not None
        assert len(predictions) == 2 - context.rank
        found.append((dict(module.state_dict()), module.validation_losses, predictions))
    (ours, our_losses, our_predictions), (theirs, their_losses, their_predictions) = found
    assert_same(ours, theirs, exactly=True)
    assert our_losses == their_losses
    assert all(map(torch.equal, our_predictions, their_predictions))


class NonFiniteOnLastRank(Module):
    """The loss of the last rank is infinite in the third step."""

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        loss = super().training_step(batch, number)
        return loss * float("inf") if number == 2 and dist.get_rank() == dist.get_world_size() - 1 else loss


@ranks(1, 2)
def test_scaler_skips_the_same_steps_on_all_ranks(context: RankContext) -> None:
    """DDP averages non-finite gradients into those of all ranks, where the plain scaler finds them."""

    def make_run() -> Run:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        plugins = [RankEnvironment(), MixedPrecision("16-mixed", "cpu", scaler)]
        return Run(options={"plugins": plugins, "gradient_clip_val": 0.5, "limit_train_batches": 5})

    ours, theirs, run = NonFiniteOnLastRank(context.rank), NonFiniteOnLastRank(0), make_run()
    run.strategy = ZeroShardStrategy()
    trainer = run.fit(ours)
    plain_trainer = make_run().fit(theirs)
    assert_same(ours.state_dict(), theirs.state_dict(), exactly=False)
    assert trainer.precision_plugin.scaler.get_scale() == plain_trainer.precision_plugin.scaler.get_scale() == 2.0**9


class ManualOptimization(Module):
    """Calls the optimizer itself."""

    automatic_optimization = False

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, number)
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.1)
        optimizer.step()
        self.lr_schedulers().step()
        return loss


@ranks(2)
def test_manual_optimization(context: RankContext) -> None:
    ours, theirs = ManualOptimization(context.rank), ManualOptimization(0)
    Run(ZeroShardStrategy()).fit(ours)
    Run().fit(theirs)
    assert_same(ours.state_dict(), theirs.state_dict(), exactly=False)
    assert ours.learning_rates == theirs.learning_rates


class ShardsWithRules(Module):
    """Returns a sharded optimizer with rules."""

    def configure_optimizers(self) -> Any:
        muon = ParamRule(matrix_params(), torch.optim.Muon, lr=0.02)
        return shard(self, [muon, ParamRule(remaining_params, torch.optim.AdamW, lr=0.01)])


def train(
    context: RankContext, directory: Path, epochs: int, variant: str = "ours", path: str | Path | None = None
) -> list[Any]:
    """Train up to `epochs`, resuming from `path` if given. Return parameters, losses and learning rates."""
    strategy = ZeroShardStrategy() if variant != "ddp" else DDPStrategy()
    module = ShardsWithRules(context.rank) if variant == "rules" else Module(context.rank)
    options = {"max_epochs": epochs, "gradient_clip_val": 0.2}
    trainer = Run(strategy, directory, options=options).fit(module, str(directory / path) if path else None)
    assert trainer.global_step == 4 * epochs
    return [dict(module.state_dict()), module.losses, module.learning_rates]


@sampled("variant", ["ours", "rules"])
@pytest.mark.filterwarnings("ignore:.* was saved by .* ranks")
def test_resume_at_another_world_size(rank_pool: RankPool, tmp_path: Path, variant: str) -> None:
    def run(size: int, name: str, epochs: int, variant: str, path: str | Path | None = None) -> list[Any]:
        arguments = {"directory": tmp_path / name, "epochs": epochs, "variant": variant, "path": path}
        result: list[Any] = rank_pool.run(train, size, 120, arguments)[0]
        return result

    uninterrupted = run(2, "uninterrupted", 3, variant)
    plain = run(2, "plain", 3, "ddp") if variant == "ours" else uninterrupted
    first = run(2, "resumed", 1, variant)
    same_size = run(2, "same-size", 2, variant, tmp_path / "resumed" / "last.ckpt")
    second = run(3, "resumed", 2, variant, "last.ckpt")
    third = run(1, "resumed", 3, variant, "epoch=1-step=8.ckpt")
    assert first[1] + same_size[1] == uninterrupted[1][:8], "resuming at the same world size is not bitwise equal"
    assert first[2] + second[2] + third[2] == uninterrupted[2] == plain[2]
    assert_same(third[0], uninterrupted[0])
    assert_same(third[0], plain[0])
    assert sorted(entry.name for entry in (tmp_path / "resumed").iterdir()) == [
        *("epoch=0-step=4.ckpt", "epoch=1-step=8.ckpt", "epoch=2-step=12.ckpt", "last.ckpt")
    ]
    assert [path.name for path in (tmp_path / "resumed").glob("epoch=1*/step-*")] == ["step-000000008"]


@ranks(2)
def test_ddp_checkpoints_load_and_weights_only_checkpoints_are_saved(context: RankContext, tmp_path: Path) -> None:
    plain, ours = Module(0), Module(context.rank)
    Run(directory=tmp_path / "ddp").fit(plain)
    options = {"max_epochs": 2}
    Run(ZeroShardStrategy(), options=options).fit(ours, str(tmp_path / "ddp" / "last.ckpt"))
    expected = Module(0)
    Run(options=options).fit(expected, str(tmp_path / "ddp" / "last.ckpt"))
    assert_same(ours.state_dict(), expected.state_dict(), exactly=True)
    trainer = Run(ZeroShardStrategy(), options=options).fit(ours, str(tmp_path / "ddp" / "last.ckpt"))
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    loaded, run = Module(7), Run(ZeroShardStrategy())
    run.make_trainer().validate(loaded, run.make_loader(), ckpt_path=str(tmp_path / "weights.ckpt"), verbose=False)
    assert_same(loaded.state_dict(), trainer.lightning_module.state_dict(), exactly=True)
    with pytest.raises(ValueError, match="contains no optimizer"):
        Run(ZeroShardStrategy(), options={"max_epochs": 3}).fit(loaded, str(tmp_path / "weights.ckpt"))


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "bf16-mixed"])
@ranks(1)
def test_on_a_gpu(context: RankContext, tmp_path: Path, precision: str) -> None:
    """Lightning moves the module to the CPU before it saves a checkpoint after training."""

    def fit(strategy: Any, epochs: int, path: Path | None = None) -> tuple[Module, pl.Trainer]:
        options = {"max_epochs": epochs, "precision": precision, "gradient_clip_val": 0.2}
        module = Module(0)
        return module, Run(strategy, options=options, accelerator="gpu").fit(module, path)

    plain, _ = fit(DDPStrategy(), 2)
    interrupted, trainer = fit(ZeroShardStrategy(), 1)
    before = {name: value.clone() for name, value in interrupted.state_dict().items()}
    trainer.save_checkpoint(tmp_path / "interrupted.ckpt")
    assert_same(interrupted.state_dict(), before, exactly=True)
    assert {param.device.type for param in interrupted.parameters()} == {"cpu"}
    ours, _ = fit(ZeroShardStrategy(), 2, tmp_path / "interrupted.ckpt")
    assert_same(ours.state_dict(), plain.state_dict())


@pytest.mark.parametrize("weights_only", [True, False])
@ranks(1, 2)
def test_validating_a_checkpoint_after_training_keeps_the_optimizer(
    context: RankContext, tmp_path: Path, weights_only: bool
) -> None:
    checkpoints = ModelCheckpoint(tmp_path, save_weights_only=weights_only, save_top_k=-1)
    module, run = Module(0), Run(ZeroShardStrategy(), tmp_path, options={"max_epochs": 2, "callbacks": [checkpoints]})
    trainer = run.fit(module)
    steps = {float(entry["step"]) for entry in trainer.optimizers[0].state.values() if "step" in entry}
    trainer.validate(module, run.make_loader(), ckpt_path=str(tmp_path / "epoch=0-step=4.ckpt"), verbose=False)
    loaded, loading_run = Module(7), Run(ZeroShardStrategy())
    loading_run.make_trainer().validate(
        loaded, run.make_loader(), ckpt_path=str(tmp_path / "epoch=0-step=4.ckpt"), verbose=False
    )
    assert_same(module.state_dict(), loaded.state_dict(), exactly=True)
    assert steps == {8.0}
    assert {float(entry["step"]) for entry in trainer.optimizers[0].state.values() if "step" in entry} == steps


class SpoilsCheckpoints(pl.Callback):
    """Adds entries to checkpoints that cannot be saved, on all ranks or by a changed state dict on one rank."""

    def __init__(self) -> None:
        self.rank: int | None = None
        self.extra: dict[str, Any] = {}

    def on_save_checkpoint(self, trainer: Any, _: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint.update(self.extra)
        if trainer.global_rank == self.rank:
            checkpoint["state_dict"]["net.0.bias"] = torch.zeros(12)


@ranks(1, 2)
def test_replaced_file_is_kept_until_the_new_directory_is_complete(context: RankContext, tmp_path: Path) -> None:
    path, callback, last_rank = tmp_path / "a.ckpt", SpoilsCheckpoints(), context.world_size - 1
    trainer = Run(ZeroShardStrategy(), options={"limit_train_batches": 1, "callbacks": [callback]}).fit(Module(0))
    if context.rank == 0:
        path.write_bytes(b"another strategy's")
    context.gather(None)
    for callback.rank in (0, last_rank):
        error = ConfigError if context.rank == callback.rank else RankFailedError
        with pytest.raises(error, match=r"on_save_checkpoint changed 'state_dict' at net\.0\.bias"):
            trainer.save_checkpoint(path)
        assert context.gather([entry.name for entry in tmp_path.iterdir()])[0] == ["a.ckpt"]
    callback.rank, callback.extra = None, {"unsupported": SpoilsCheckpoints}
    with pytest.raises(ZeroError):
        trainer.save_checkpoint(path)
    context.gather(None)
    assert path.read_bytes() == b"another strategy's"
    callback.extra = {}
    trainer.save_checkpoint(path)
    context.gather(None)
    assert path.is_dir()
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.ckpt"]


@ranks(1, 2)
def test_replaced_file_that_cannot_be_removed_warns(context: RankContext, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    trainer = Run(ZeroShardStrategy(), options={"limit_train_batches": 1}).fit(Module(0))
    if context.rank == 0:
        path.write_bytes(b"another strategy's")
    context.gather(None)
    unlink = Path.unlink

    def unlink_or_fail(path: Path, missing_ok: bool = False) -> None:
        if path.name.endswith(".former"):
            raise PermissionError("on purpose")
        unlink(path, missing_ok)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.setattr(Path, "unlink", unlink_or_fail)
        trainer.save_checkpoint(path)
    found = [str(warning.message) for warning in caught if "failed: on purpose" in str(warning.message)]
    assert len(found) == (context.rank == 0)
    context.gather(None)
    assert path.is_dir()


class TwoOptimizers(Module):
    automatic_optimization = False

    def configure_optimizers(self) -> Any:
        first, *others = self.parameters()
        return [torch.optim.AdamW([first]), torch.optim.AdamW(others)]


class Strange(Module):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(torch.nn.Linear(2, 2).parameters())


class EditsSavedValues(pl.Callback):
    def on_save_checkpoint(self, _: Any, __: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {key: value / 2 for key, value in checkpoint["state_dict"].items()}


@ranks(2)
def test_mistakes_raise_on_all_ranks(context: RankContext, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not support find_unused_parameters"):
        ZeroShardStrategy(find_unused_parameters=True)
    with pytest.raises(ConfigError, match=r"got 2\. .*zeroshard\.shard\(self, \[ParamRule"):
        Run(ZeroShardStrategy()).fit(TwoOptimizers(0))
    with pytest.raises(
        ConfigError, match="expected SGD to update parameters of Strange, got 2 parameters not in the model"
    ):
        Run(ZeroShardStrategy()).fit(Strange(0))
    with pytest.raises(ConfigError, match="does not support AsyncCheckpointIO"):
        Run(ZeroShardStrategy(), options={"plugins": [RankEnvironment(), AsyncCheckpointIO()]}).fit(Module(0))
    trainer = Run(ZeroShardStrategy(), options={"limit_train_batches": 1, "callbacks": [EditsSavedValues()]}).fit(
        Module(0)
    )
    with pytest.raises(ConfigError, match="on_save_checkpoint changed 'state_dict' at net"):
        trainer.save_checkpoint(tmp_path / "changed.ckpt")
    is_file = Path.is_file
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "is_file", lambda path: is_file(path) or (path.name == "nothing" and context.rank == 1))
        with pytest.raises(CheckpointError, match="nothing"):  # a file that rank 0 does not see does not exist
            trainer.strategy.load_checkpoint(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="got s3://bucket/file"):
        trainer.save_checkpoint("s3://bucket/file")
    assert not list(tmp_path.iterdir())
