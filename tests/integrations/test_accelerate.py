"""Training loops with our `Accelerator`, compared with Accelerate's own with DDP and the plain optimizer."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.integrations.accelerate_runs import Loop, accelerate_env, make_accelerator
from tests.integrations.closeness import assert_same
from tests.support import RankContext, RankPool, ranks
from tests.support.monitoring import recorded
from tests.support.tiers import sampled
from zeroshard import CheckpointError, ConfigError, FlatShards, ShardedOptimizer, ZeroConfig, shard
from zeroshard.integrations.accelerate import Accelerator

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 3},
    "clipped": {},
    "clipped, accumulation, bf16": {"mixed_precision": "bf16", "gradient_accumulation_steps": 2},
}
SMALL_BUCKETS = ZeroConfig(partition=FlatShards(bucket_bytes=200))


@sampled("case", CASES)
@ranks(2)
def test_results_match_ddp(context: RankContext, case: str) -> None:
    compare_with_ddp(context, case)


@ranks(1, 3)
def test_results_match_ddp_at_other_world_sizes(context: RankContext) -> None:
    for case in ("plain", "clipped, accumulation, bf16"):
        compare_with_ddp(context, case)


def compare_with_ddp(context: RankContext, case: str) -> None:
    clip = 0.1 if "clipped" in case else None
    with accelerate_env(context):
        ours = Loop(make_accelerator(Accelerator, config=SMALL_BUCKETS, **CASES[case]), context.rank, clip)
        assert isinstance(ours.optimizer.optimizer, ShardedOptimizer)
        ours.train_epoch()
    with accelerate_env(context):
        theirs = Loop(make_accelerator(accelerate.Accelerator, **CASES[case]), 0, clip)
        theirs.train_epoch()
    assert_same(ours.values(), theirs.values(), exactly=context.world_size <= 2 and clip is None)
    assert ours.learning_rates == theirs.learning_rates
    assert len(set(ours.learning_rates)) > 2
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-4)
    assert bool(ours.norms) == bool(clip)
    assert ours.norms == pytest.approx(theirs.norms, rel=1e-4)


@ranks(4)
def test_shard_groups_with_value_clipping_match_ddp(context: RankContext) -> None:
    values = []
    for cls, options in ((Accelerator, {"shard_group_size": 2}), (accelerate.Accelerator, {})):
        with accelerate_env(context):
            loop = Loop(make_accelerator(cls, **options), 0)
            for inputs, targets in loop.loader:
                loop.accelerator.backward(nn.functional.mse_loss(loop.model(inputs), targets))
                loop.accelerator.clip_grad_value_(loop.model.parameters(), 0.01)
                loop.optimizer.step()
                loop.optimizer.zero_grad()
            values.append(loop.values())
    ours, theirs = values
    assert_same(ours, theirs)


@ranks(1, 2)
def test_scaler_skips_the_same_steps_on_all_ranks(context: RankContext) -> None:
    """Accelerate creates scalers only on GPUs, so the test sets one on both accelerators."""
    found = []
    for cls in (Accelerator, accelerate.Accelerator):
        with accelerate_env(context):
            accelerator = make_accelerator(cls)
            accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
            if isinstance(accelerator, Accelerator):
                accelerator.enable_sharding(None, None)
            loop, learning_rates = Loop(accelerator, 0), []
            for number, (inputs, targets) in enumerate(loop.loader):
                loss = nn.functional.mse_loss(loop.model(inputs), targets)
                is_infinite = number == 2 and context.rank == context.world_size - 1
                accelerator.backward(loss * float("inf") if is_infinite else loss)
                loop.optimizer.step()
                loop.scheduler.step()
                loop.optimizer.zero_grad()
                learning_rates.append(loop.optimizer.param_groups[0]["lr"])
            found.append((loop.values(), learning_rates, accelerator.scaler.get_scale()))
    (ours, *our_rest), (theirs, *their_rest) = found
    assert_same(ours, theirs)
    assert our_rest == their_rest
    assert our_rest[-1] == 2.0**9


@ranks(1, 2, 3)
def test_one_rank_can_run_the_model_without_gradients(context: RankContext) -> None:
    """If all ranks run it, they use the buffers of rank 0, as with DDP."""
    outputs_by_side: list[list[torch.Tensor]] = []
    for cls in (Accelerator, accelerate.Accelerator):
        with accelerate_env(context):
            accelerator, outputs = make_accelerator(cls), []
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
            model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
            for number in range(3):
                generator = torch.Generator().manual_seed(10 * number + context.rank)
                accelerator.backward(model.train()(torch.randn(4, 6, generator=generator)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    outputs.append(model.eval()(torch.ones(1, 6)))
                    with recorded() as traffic:
                        if context.rank == 0:
                            outputs.append(accelerator.unwrap_model(model)(torch.ones(2, 6)))
                    assert not traffic
                with recorded() as traffic, accelerator.no_sync(model):
                    if context.rank == 0:
                        outputs.append(accelerator.unwrap_model(model)(torch.ones(3, 6)).detach())
                assert not traffic
            outputs_by_side.append(outputs)
    for ours, theirs in zip(*outputs_by_side, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@ranks(2)
def test_two_optimizers_with_different_process_groups_in_one_backward(context: RankContext) -> None:
    values = []
    for cls in (Accelerator, accelerate.Accelerator):
        with accelerate_env(context):
            accelerator = make_accelerator(cls)
            torch.manual_seed(0)
            first, second = nn.Linear(4, 5), nn.Linear(5, 2)
            plain = torch.optim.AdamW(first.parameters(), lr=0.1)
            if cls is Accelerator:
                other: Any = shard(second, torch.optim.AdamW, lr=0.1, process_group=dist.new_group())
            else:
                other = torch.optim.AdamW(second.parameters(), lr=0.1)
            first, second, plain, other = accelerator.prepare(first, second, plain, other)
            for number in range(2):
                accelerator.backward(second(first(torch.full((2, 4), number + context.rank + 1.0))).square().mean())
                for optimizer in (plain, other):
                    optimizer.step()
                    optimizer.zero_grad()
            values.append([param.detach().clone() for module in (first, second) for param in module.parameters()])
    for ours, theirs in zip(*values, strict=True):
        assert torch.equal(ours, theirs)


def train(
    context: RankContext,
    directory: Path,
    first: int,
    last: int,
    plain: bool,
    *,
    cpu: bool = True,
    precision: str = "no",
) -> list[Any]:
    """Train epochs `first` to `last`, from the checkpoint of the epoch before. Return values, losses and rates."""
    cls = accelerate.Accelerator if plain else Accelerator
    with accelerate_env(context, cpu=cpu):
        loop = Loop(make_accelerator(cls, cpu=cpu, mixed_precision=precision), context.rank, 0.5)
        if first > 1:
            loop.accelerator.load_state(str(directory / f"epoch {first - 1}"))
        for number in range(first, last + 1):
            loop.train_epoch()
            loop.accelerator.save_state(str(directory / f"epoch {number}"))
            loop.accelerator.save_state(str(directory / f"epoch {number}"))  # replaces the one before
        return [loop.values(), loop.losses, loop.learning_rates]


@pytest.mark.filterwarnings("ignore:.* was saved by .* ranks")
def test_resume_at_another_world_size(rank_pool: RankPool, tmp_path: Path) -> None:
    def run(size: int, name: str, first: int, last: int, plain: bool = False) -> list[Any]:
        arguments = {"directory": tmp_path / name, "first": first, "last": last, "plain": plain}
        result: list[Any] = rank_pool.run(train, size, 120, arguments)[0]
        return result

    uninterrupted, plain = run(2, "uninterrupted", 1, 3), run(2, "plain", 1, 3, plain=True)
    first, same_size = run(2, "resumed", 1, 1), run(2, "resumed", 2, 2)
    assert first[1] + same_size[1] == uninterrupted[1][:16], "resuming at the same world size is not bitwise equal"
    second, third = run(3, "resumed", 2, 2), run(1, "resumed", 3, 3)
    assert first[2] + second[2] + third[2] == uninterrupted[2] == plain[2]
    assert_same(third[0], uninterrupted[0])
    assert_same(third[0], plain[0])
    assert_same(run(3, "plain", 3, 3)[0], plain[0])  # from a checkpoint that Accelerate itself has saved
    assert not list((tmp_path / "resumed" / "epoch 1").glob("*.safetensors")), "the full model was written"


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["no", "fp16", "bf16"])
@ranks(1)
def test_on_a_gpu(context: RankContext, tmp_path: Path, precision: str) -> None:
    """An interrupted and resumed run equals Accelerate's own without an interruption."""

    def run(first: int, last: int, plain: bool = False) -> list[Any]:
        directory = tmp_path / ("plain" if plain else "ours")
        return train(context, directory, first, last, plain, cpu=False, precision=precision)

    plain, first, second = run(1, 2, plain=True), run(1, 1), run(2, 2)
    assert {value.device.type for value in second[0].values()} == {"cuda"}
    assert_same(second[0], plain[0])
    assert first[2] + second[2] == plain[2]
    assert first[1] + second[1] == pytest.approx(plain[1], rel=1e-4)


@ranks(1, 2)
def test_checkpoint_without_the_shard_directory_is_rejected(context: RankContext, tmp_path: Path) -> None:
    with accelerate_env(context):
        loop = Loop(make_accelerator(Accelerator), 0)
        loop.accelerator.save_state(str(tmp_path))
        if context.rank == 0:
            shutil.rmtree(tmp_path / "zeroshard_0")
            loop.accelerator.save_model(loop.model, tmp_path)
        context.gather(None)
        with pytest.raises(CheckpointError, match=r"zeroshard_0 is missing.*optimizer\.bin is only a placeholder"):
            loop.accelerator.load_state(str(tmp_path))
        path = tmp_path if context.rank == 0 else tmp_path / "missing"
        assert loop.optimizer.detect_shard_dir(path, tmp_path / "any.bin"), "rank 0 decides"
        assert not loop.optimizer.detect_shard_dir(
            tmp_path / "none" if context.rank == 0 else tmp_path, tmp_path / "any.bin"
        )
        with pytest.raises(CheckpointError, match=r"this state dict is a placeholder.*full_state_dict"):
            loop.optimizer.load_state_dict(loop.optimizer.state_dict())


@ranks(2)
def test_mistakes_raise_on_all_ranks(context: RankContext) -> None:
    with accelerate_env(context):
        accelerator, model = make_accelerator(Accelerator), nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ConfigError, match="SGD to belong to one prepared model, got 0 of 0"):
            accelerator.prepare(optimizer)
        model = accelerator.prepare(model)
        with pytest.raises(ConfigError, match="gradients of Linear are not averaged"):
            accelerator.backward(model(torch.ones(1, 3)).sum())
        model.zero_grad()
        accelerator.prepare(optimizer)
        with pytest.raises(ConfigError, match="Linear already has an optimizer"):
            accelerator.prepare(torch.optim.SGD([model.bias]))
        with pytest.raises(ConfigError, match="clipped for all parameters of one optimizer"):
            accelerator.clip_grad_norm_([model.weight], 1.0)
        prepared = make_accelerator(accelerate.Accelerator).prepare(torch.optim.SGD(model.parameters()))
        with pytest.raises(ConfigError, match="was prepared by Accelerate's own Accelerator"):
            accelerator.prepare(prepared)
        os.environ["WORLD_SIZE"] = "7"
        with pytest.raises(ConfigError, match=r"expected 7 processes, .* but Accelerate uses 2"):
            make_accelerator(Accelerator)
        plugin = accelerate.FullyShardedDataParallelPlugin(fsdp_version=2)
        with pytest.raises(ConfigError, match="leave out fsdp_plugin"):
            make_accelerator(Accelerator, fsdp_plugin=plugin)
        del os.environ["WORLD_SIZE"]
        with pytest.raises(ConfigError, match="leave out DistributedDataParallelKwargs"):
            make_accelerator(Accelerator, kwargs_handlers=[accelerate.DistributedDataParallelKwargs()])


class Own(torch.optim.SGD):
    """Does not store one of its arguments."""

    def __init__(self, params: Any, lr: float, secret: int) -> None:  # noqa: ARG002
        super().__init__(params, lr)


@ranks(2)
def test_state_hooks_and_options_of_the_plain_optimizer_are_kept(context: RankContext) -> None:
    with accelerate_env(context):
        model, accelerator, calls = (
            nn.Linear(3, 3),
            make_accelerator(Accelerator, config=ZeroConfig(stage=1)),
            [],
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
        handle = optimizer.register_step_post_hook(lambda *_: calls.append(1))
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)  # not prepared
        model, prepared = accelerator.prepare(model, optimizer)
        assert prepared.param_groups[0]["nesterov"]
        scheduler.step()
        assert prepared.param_groups[0]["lr"] == 0.05
        state = prepared.optimizer.full_state_dict()
        if context.rank == 0:
            assert state is not None
            assert [entry["momentum_buffer"].unique().item() for entry in state["state"].values()] == [1.0, 1.0]
        accelerator.backward(model(torch.ones(1, 3)).sum())
        prepared.step()
        handle.remove()
        prepared.step()
        assert len(calls) == 2
        other = nn.Linear(2, 2)
        with pytest.raises(ConfigError, match="Own does not store its arguments secret"):
            make_accelerator(Accelerator).prepare(other, Own(other.parameters(), 0.1, 1))
