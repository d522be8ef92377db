"""Lightning's Trainer with `ZeroShardStrategy`, beside its own DDPStrategy with the plain optimizer."""

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
from tests.integrations.lightning_runs import Module, Ranks, Run
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
    "accumulated": {"accumulate_grad_batches": 3},
    "clipped": {"gradient_clip_val": 0.05},
    "all of it": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "precision": "bf16-mixed"},
}
SMALL = ZeroConfig(partition=FlatShards(bucket_bytes=200))


@sampled("case", CASES)
@ranks(2)
def test_the_same_numbers_as_ddp(context: RankContext, case: str) -> None:
    compare_with_ddp(context, case)


@ranks(1, 3)
def test_the_same_numbers_as_ddp_on_other_ranks(context: RankContext) -> None:
    for case in ("plain", "all of it"):
        compare_with_ddp(context, case)


def compare_with_ddp(context: RankContext, case: str) -> None:
    ours, theirs = Module(context.rank), Module(0)
    trainer = Run(ZeroShardStrategy(config=SMALL), options=CASES[case]).fit(ours)
    Run(options=CASES[case]).fit(theirs)
    assert_same(
        ours.state_dict(),
        theirs.state_dict(),
        exactly=context.world_size <= 2 and "gradient_clip_val" not in CASES[case],
    )
    assert ours.rates == theirs.rates
    assert len(set(ours.rates)) > 1
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-4)
    assert ours.checks == pytest.approx(theirs.checks, rel=1e-4)
    assert trainer.optimizers[0].world_size == context.world_size


@ranks(4)
def test_by_its_name_with_values_clipped_and_every_pass_sent(context: RankContext) -> None:
    options = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value", "accumulate_grad_batches": 2}
    ours, named, theirs = Module(context.rank), Module(context.rank), Module(0)
    Run(ZeroShardStrategy(sync_every_pass=True), options=options).fit(ours)
    Run("zeroshard", options=options).fit(named)
    Run(options=options).fit(theirs)
    assert_same(ours.state_dict(), theirs.state_dict(), exactly=False)
    assert_same(named.state_dict(), theirs.state_dict(), exactly=False)


@ranks(2)
def test_buffers_are_those_of_the_first_rank_and_parameters_may_come_late(context: RankContext) -> None:
    ours, theirs = Module(context.rank, averaged=True), Module(0, averaged=True)
    Run(ZeroShardStrategy(config=ZeroConfig(overlap_param_gather=True))).fit(ours)
    Run().fit(theirs)
    assert_same(ours.state_dict(), theirs.state_dict(), exactly=True)
    assert ours.checks == theirs.checks


class Looking(Module):
    """The first rank uses the model alone, after each step."""

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
def test_one_rank_may_use_the_module_without_gradients(context: RankContext) -> None:
    """As it does where rows for `predict` are not as many on each rank."""
    found = []
    for strategy in (ZeroShardStrategy(), DDPStrategy()):
        module = Looking(0, averaged=True)
        trainer = Run(strategy).fit(module)
        rows: Any = torch.linspace(0, 1, 18).view(3, 6)
        sampler = UnrepeatedDistributedSampler(rows, shuffle=False)
        predicted = trainer.predict(module, DataLoader(rows, batch_size=1, sampler=sampler))
        assert predicted is not None
        assert len(predicted) == 2 - context.rank
        found.append((dict(module.state_dict()), module.checks, predicted))
    (ours, our_checks, our_rows), (theirs, their_checks, their_rows) = found
    assert_same(ours, theirs, exactly=True)
    assert our_checks == their_checks
    assert all(map(torch.equal, our_rows, their_rows))


class Scaled(Module):
    """Gradients of one rank are not finite in its third step."""

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        loss = super().training_step(batch, number)
        return loss * float("inf") if number == 2 and dist.get_rank() == dist.get_world_size() - 1 else loss


@ranks(1, 2)
def test_a_scaler_leaves_the_same_steps_out_on_all_ranks(context: RankContext) -> None:
    """DDP spreads what is not finite, so that the plain scaler sees it everywhere."""

    def run() -> Run:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        plugins = [Ranks(), MixedPrecision("16-mixed", "cpu", scaler)]
        return Run(options={"plugins": plugins, "gradient_clip_val": 0.5, "limit_train_batches": 5})

    ours, theirs, mine = Scaled(context.rank), Scaled(0), run()
    mine.strategy = ZeroShardStrategy()
    trainer = mine.fit(ours)
    plain = run().fit(theirs)
    assert_same(ours.state_dict(), theirs.state_dict(), exactly=False)
    assert trainer.precision_plugin.scaler.get_scale() == plain.precision_plugin.scaler.get_scale() == 2.0**9


class ByHand(Module):
    """Manual optimization."""

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
def test_optimization_by_hand(context: RankContext) -> None:
    ours, theirs = ByHand(context.rank), ByHand(0)
    Run(ZeroShardStrategy()).fit(ours)
    Run().fit(theirs)
    assert_same(ours.state_dict(), theirs.state_dict(), exactly=False)
    assert ours.rates == theirs.rates


class Ruled(Module):
    """Makes the sharded optimizer itself."""

    def configure_optimizers(self) -> Any:
        muon = ParamRule(matrix_params(), torch.optim.Muon, lr=0.02)
        return shard(self, [muon, ParamRule(remaining_params, torch.optim.AdamW, lr=0.01)])


def train(
    context: RankContext, folder: Path, epochs: int, how: str = "ours", path: str | Path | None = None
) -> list[Any]:
    """Parameters, losses and rates of a training that goes on from `path`, up to an epoch."""
    strategy = ZeroShardStrategy() if how != "ddp" else DDPStrategy()
    module = Ruled(context.rank) if how == "rules" else Module(context.rank)
    options = {"max_epochs": epochs, "gradient_clip_val": 0.2}
    trainer = Run(strategy, folder, options=options).fit(module, str(folder / path) if path else None)
    assert trainer.global_step == 4 * epochs
    return [dict(module.state_dict()), module.losses, module.rates]


@sampled("how", ["ours", "rules"])
@pytest.mark.filterwarnings("ignore:.* was saved by .* ranks")
def test_who_is_stopped_goes_on_at_another_number_of_ranks(rank_pool: RankPool, tmp_path: Path, how: str) -> None:
    def run(size: int, name: str, epochs: int, how: str, path: str | Path | None = None) -> list[Any]:
        arguments = {"folder": tmp_path / name, "epochs": epochs, "how": how, "path": path}
        result: list[Any] = rank_pool.run(train, size, 120, arguments)[0]
        return result

    straight = run(2, "straight", 3, how)
    plain = run(2, "plain", 3, "ddp") if how == "ours" else straight
    first = run(2, "stopped", 1, how)
    again = run(2, "again", 2, how, tmp_path / "stopped" / "last.ckpt")
    second = run(3, "stopped", 2, how, "last.ckpt")
    third = run(1, "stopped", 3, how, "epoch=1-step=8.ckpt")
    assert first[1] + again[1] == straight[1][:8], "on as many ranks to the last bit"
    assert first[2] + second[2] + third[2] == straight[2] == plain[2]
    assert_same(third[0], straight[0])
    assert_same(third[0], plain[0])
    assert sorted(entry.name for entry in (tmp_path / "stopped").iterdir()) == [
        *("epoch=0-step=4.ckpt", "epoch=1-step=8.ckpt", "epoch=2-step=12.ckpt", "last.ckpt")
    ]
    assert [path.name for path in (tmp_path / "stopped").glob("epoch=1*/step-*")] == ["step-000000008"]


@ranks(2)
def test_files_of_ddp_load_and_weights_alone_are_saved(context: RankContext, tmp_path: Path) -> None:
    plain, ours = Module(0), Module(context.rank)
    Run(folder=tmp_path / "ddp").fit(plain)
    both = {"max_epochs": 2}
    Run(ZeroShardStrategy(), options=both).fit(ours, str(tmp_path / "ddp" / "last.ckpt"))
    expected = Module(0)
    Run(options=both).fit(expected, str(tmp_path / "ddp" / "last.ckpt"))
    assert_same(ours.state_dict(), expected.state_dict(), exactly=True)
    trainer = Run(ZeroShardStrategy(), options=both).fit(ours, str(tmp_path / "ddp" / "last.ckpt"))
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    fresh, looking = Module(7), Run(ZeroShardStrategy())
    looking.trainer().validate(fresh, looking.loader(), ckpt_path=str(tmp_path / "weights.ckpt"), verbose=False)
    assert_same(fresh.state_dict(), trainer.lightning_module.state_dict(), exactly=True)
    with pytest.raises(ValueError, match="has no optimizer in it"):
        Run(ZeroShardStrategy(), options={"max_epochs": 3}).fit(fresh, str(tmp_path / "weights.ckpt"))


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "bf16-mixed"])
@ranks(1)
def test_on_a_gpu(context: RankContext, tmp_path: Path, precision: str) -> None:
    """Lightning has moved the module to the CPU when it saves after training."""

    def fit(strategy: Any, epochs: int, path: Path | None = None) -> tuple[Module, pl.Trainer]:
        options = {"max_epochs": epochs, "precision": precision, "gradient_clip_val": 0.2}
        module = Module(0)
        return module, Run(strategy, options=options, accelerator="gpu").fit(module, path)

    plain, _ = fit(DDPStrategy(), 2)
    half, trainer = fit(ZeroShardStrategy(), 1)
    before = {name: value.clone() for name, value in half.state_dict().items()}
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    assert_same(half.state_dict(), before, exactly=True)
    assert {param.device.type for param in half.parameters()} == {"cpu"}
    ours, _ = fit(ZeroShardStrategy(), 2, tmp_path / "half.ckpt")
    assert_same(ours.state_dict(), plain.state_dict())


@pytest.mark.parametrize("weights", [True, False])
@ranks(1, 2)
def test_looking_at_a_checkpoint_after_training_leaves_the_optimizer(
    context: RankContext, tmp_path: Path, weights: bool
) -> None:
    saves = ModelCheckpoint(tmp_path, save_weights_only=weights, save_top_k=-1)
    module, run = Module(0), Run(ZeroShardStrategy(), tmp_path, options={"max_epochs": 2, "callbacks": [saves]})
    trainer = run.fit(module)
    steps = {float(entry["step"]) for entry in trainer.optimizers[0].state.values() if "step" in entry}
    trainer.validate(module, run.loader(), ckpt_path=str(tmp_path / "epoch=0-step=4.ckpt"), verbose=False)
    fresh, looking = Module(7), Run(ZeroShardStrategy())
    looking.trainer().validate(fresh, run.loader(), ckpt_path=str(tmp_path / "epoch=0-step=4.ckpt"), verbose=False)
    assert_same(module.state_dict(), fresh.state_dict(), exactly=True)
    assert steps == {8.0}
    assert {float(entry["step"]) for entry in trainer.optimizers[0].state.values() if "step" in entry} == steps


class Odd(pl.Callback):
    """Puts something into checkpoints that one rank, or nobody, can save."""

    def __init__(self) -> None:
        self.rank: int | None = None
        self.others: dict[str, Any] = {}

    def on_save_checkpoint(self, trainer: Any, _: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint.update(self.others)
        if trainer.global_rank == self.rank:
            checkpoint["state_dict"]["net.0.bias"] = torch.zeros(12)


@ranks(1, 2)
def test_a_file_stays_until_the_directory_in_its_place_is_complete(context: RankContext, tmp_path: Path) -> None:
    path, odd, last = tmp_path / "a.ckpt", Odd(), context.world_size - 1
    trainer = Run(ZeroShardStrategy(), options={"limit_train_batches": 1, "callbacks": [odd]}).fit(Module(0))
    if context.rank == 0:
        path.write_bytes(b"another strategy's")
    context.gather(None)
    for odd.rank in (0, last):
        kind = ConfigError if context.rank == odd.rank else RankFailedError
        with pytest.raises(kind, match=r"on_save_checkpoint has changed the 'state_dict' at net\.0\.bias"):
            trainer.save_checkpoint(path)
        assert context.gather([it.name for it in tmp_path.iterdir()])[0] == ["a.ckpt"]
    odd.rank, odd.others = None, {"strange": Odd}
    with pytest.raises(ZeroError):
        trainer.save_checkpoint(path)
    context.gather(None)
    assert path.read_bytes() == b"another strategy's"
    odd.others = {}
    trainer.save_checkpoint(path)
    context.gather(None)
    assert path.is_dir()
    assert [it.name for it in tmp_path.iterdir()] == ["a.ckpt"]


@ranks(1, 2)
def test_a_former_file_that_cannot_be_removed_is_warned_of(context: RankContext, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    trainer = Run(ZeroShardStrategy(), options={"limit_train_batches": 1}).fit(Module(0))
    if context.rank == 0:
        path.write_bytes(b"another strategy's")
    context.gather(None)
    unlink = Path.unlink

    def refuse(it: Path, missing_ok: bool = False) -> None:
        if it.name.endswith(".former"):
            raise PermissionError("on purpose")
        unlink(it, missing_ok)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.setattr(Path, "unlink", refuse)
        trainer.save_checkpoint(path)
    told = [str(it.message) for it in caught if "could not be removed: on purpose" in str(it.message)]
    assert len(told) == (context.rank == 0)
    context.gather(None)
    assert path.is_dir()


class Two(Module):
    automatic_optimization = False

    def configure_optimizers(self) -> Any:
        first, *others = self.parameters()
        return [torch.optim.AdamW([first]), torch.optim.AdamW(others)]


class Strange(Module):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(torch.nn.Linear(2, 2).parameters())


class Average(pl.Callback):
    def on_save_checkpoint(self, _: Any, __: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {key: value / 2 for key, value in checkpoint["state_dict"].items()}


@ranks(2)
def test_mistakes_are_told_on_all_ranks(context: RankContext, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no use for find_unused_parameters"):
        ZeroShardStrategy(find_unused_parameters=True)
    with pytest.raises(ConfigError, match=r"returned 2 optimizers.*zeroshard\.shard\(self, \[ParamRule"):
        Run(ZeroShardStrategy()).fit(Two(0))
    with pytest.raises(ConfigError, match="2 parameters of the SGD are not those of the Strange"):
        Run(ZeroShardStrategy()).fit(Strange(0))
    with pytest.raises(ConfigError, match="leave out the AsyncCheckpointIO"):
        Run(ZeroShardStrategy(), options={"plugins": [Ranks(), AsyncCheckpointIO()]}).fit(Module(0))
    trainer = Run(ZeroShardStrategy(), options={"limit_train_batches": 1, "callbacks": [Average()]}).fit(Module(0))
    with pytest.raises(ConfigError, match="on_save_checkpoint has changed the 'state_dict' at net"):
        trainer.save_checkpoint(tmp_path / "averaged.ckpt")
    look = Path.is_file
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "is_file", lambda path: look(path) or (path.name == "nothing" and context.rank == 1))
        with pytest.raises(CheckpointError, match="nothing"):  # a file that the first rank does not see is none
            trainer.strategy.load_checkpoint(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="not s3://bucket/file"):
        trainer.save_checkpoint("s3://bucket/file")
    assert not list(tmp_path.iterdir())
