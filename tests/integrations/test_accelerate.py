"""Accelerate's loop with our `Accelerator`, beside its own with DDP and the plain optimizer."""

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

from tests.integrations.accelerate_runs import Loop, accelerated, accelerator
from tests.integrations.closeness import assert_same
from tests.support import RankContext, RankPool, ranks
from tests.support.monitoring import recorded
from tests.support.tiers import sampled
from zeroshard import CheckpointError, ConfigError, FlatShards, ShardedOptimizer, ZeroConfig, shard
from zeroshard.integrations.accelerate import Accelerator

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"gradient_accumulation_steps": 3},
    "clipped": {},
    "clipped and all": {"mixed_precision": "bf16", "gradient_accumulation_steps": 2},
}
SMALL = ZeroConfig(partition=FlatShards(bucket_bytes=200))


@sampled("case", CASES)
@ranks(2)
def test_the_same_numbers_as_with_ddp(context: RankContext, case: str) -> None:
    compare_with_ddp(context, case)


@ranks(1, 3)
def test_the_same_numbers_as_with_ddp_on_other_ranks(context: RankContext) -> None:
    for case in ("plain", "clipped and all"):
        compare_with_ddp(context, case)


def compare_with_ddp(context: RankContext, case: str) -> None:
    clip = 0.1 if "clipped" in case else None
    with accelerated(context):
        ours = Loop(accelerator(Accelerator, config=SMALL, **CASES[case]), context.rank, clip)
        assert isinstance(ours.optimizer.optimizer, ShardedOptimizer)
        ours.epoch()
    with accelerated(context):
        theirs = Loop(accelerator(accelerate.Accelerator, **CASES[case]), 0, clip)
        theirs.epoch()
    assert_same(ours.values(), theirs.values(), exactly=context.world_size <= 2 and clip is None)
    assert ours.rates == theirs.rates
    assert len(set(ours.rates)) > 2
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-4)
    assert bool(ours.norms) == bool(clip)
    assert ours.norms == pytest.approx(theirs.norms, rel=1e-4)


@ranks(4)
def test_in_rows_with_values_clipped(context: RankContext) -> None:
    values = []
    for kind, options in ((Accelerator, {"shard_group_size": 2}), (accelerate.Accelerator, {})):
        with accelerated(context):
            loop = Loop(accelerator(kind, **options), 0)
            for inputs, targets in loop.loader:
                loop.accelerator.backward(nn.functional.mse_loss(loop.model(inputs), targets))
                loop.accelerator.clip_grad_value_(loop.model.parameters(), 0.01)
                loop.optimizer.step()
                loop.optimizer.zero_grad()
            values.append(loop.values())
    ours, theirs = values
    assert_same(ours, theirs)


@ranks(1, 2)
def test_a_scaler_leaves_the_same_steps_out_on_all_ranks(context: RankContext) -> None:
    """Accelerate has scalers on GPUs only: one is put in its place, in both."""
    found = []
    for kind in (Accelerator, accelerate.Accelerator):
        with accelerated(context):
            chosen = accelerator(kind)
            chosen.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
            if isinstance(chosen, Accelerator):
                chosen.enable_sharding(None, None)
            loop, rates = Loop(chosen, 0), []
            for number, (inputs, targets) in enumerate(loop.loader):
                loss = nn.functional.mse_loss(loop.model(inputs), targets)
                is_bad = number == 2 and context.rank == context.world_size - 1
                chosen.backward(loss * float("inf") if is_bad else loss)
                loop.optimizer.step()
                loop.schedule.step()
                loop.optimizer.zero_grad()
                rates.append(loop.optimizer.param_groups[0]["lr"])
            found.append((loop.values(), rates, chosen.scaler.get_scale()))
    (ours, *our_rest), (theirs, *their_rest) = found
    assert_same(ours, theirs)
    assert our_rest == their_rest
    assert our_rest[-1] == 2.0**9


@ranks(1, 2, 3)
def test_one_rank_may_use_the_model_without_gradients(context: RankContext) -> None:
    """And where all do, they see the buffers of the first, as with DDP."""
    seen: list[list[torch.Tensor]] = []
    for kind in (Accelerator, accelerate.Accelerator):
        with accelerated(context):
            chosen, found = accelerator(kind), []
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
            model, optimizer = chosen.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
            for number in range(3):
                draw = torch.Generator().manual_seed(10 * number + context.rank)
                chosen.backward(model.train()(torch.randn(4, 6, generator=draw)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    found.append(model.eval()(torch.ones(1, 6)))
                    with recorded() as traffic:
                        if context.rank == 0:
                            found.append(chosen.unwrap_model(model)(torch.ones(2, 6)))
                    assert not traffic
                with recorded() as traffic, chosen.no_sync(model):
                    if context.rank == 0:
                        found.append(chosen.unwrap_model(model)(torch.ones(3, 6)).detach())
                assert not traffic
            seen.append(found)
    for ours, theirs in zip(*seen, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@ranks(2)
def test_two_optimizers_in_one_pass_with_a_group_each(context: RankContext) -> None:
    values = []
    for kind in (Accelerator, accelerate.Accelerator):
        with accelerated(context):
            chosen = accelerator(kind)
            torch.manual_seed(0)
            first, second = nn.Linear(4, 5), nn.Linear(5, 2)
            plain = torch.optim.AdamW(first.parameters(), lr=0.1)
            if kind is Accelerator:
                other: Any = shard(second, torch.optim.AdamW, lr=0.1, process_group=dist.new_group())
            else:
                other = torch.optim.AdamW(second.parameters(), lr=0.1)
            first, second, plain, other = chosen.prepare(first, second, plain, other)
            for number in range(2):
                chosen.backward(second(first(torch.full((2, 4), number + context.rank + 1.0))).square().mean())
                for optimizer in (plain, other):
                    optimizer.step()
                    optimizer.zero_grad()
            values.append([param.detach().clone() for it in (first, second) for param in it.parameters()])
    for ours, theirs in zip(*values, strict=True):
        assert torch.equal(ours, theirs)


def train(
    context: RankContext, folder: Path, first: int, last: int, plain: bool, *, cpu: bool = True, precision: str = "no"
) -> list[Any]:
    """Epochs `first` to `last`, from what is there of the one before."""
    kind = accelerate.Accelerator if plain else Accelerator
    with accelerated(context, cpu=cpu):
        loop = Loop(accelerator(kind, cpu=cpu, mixed_precision=precision), context.rank, 0.5)
        if first > 1:
            loop.accelerator.load_state(str(folder / f"epoch {first - 1}"))
        for number in range(first, last + 1):
            loop.epoch()
            loop.accelerator.save_state(str(folder / f"epoch {number}"))
            loop.accelerator.save_state(str(folder / f"epoch {number}"))  # in the place of the one before
        return [loop.values(), loop.losses, loop.rates]


@pytest.mark.filterwarnings("ignore:.* was saved by .* ranks")
def test_who_is_stopped_goes_on_at_another_number_of_ranks(rank_pool: RankPool, tmp_path: Path) -> None:
    def run(size: int, name: str, first: int, last: int, plain: bool = False) -> list[Any]:
        arguments = {"folder": tmp_path / name, "first": first, "last": last, "plain": plain}
        result: list[Any] = rank_pool.run(train, size, 120, arguments)[0]
        return result

    straight, plain = run(2, "straight", 1, 3), run(2, "plain", 1, 3, plain=True)
    first, again = run(2, "stopped", 1, 1), run(2, "stopped", 2, 2)
    assert first[1] + again[1] == straight[1][:16], "on as many ranks to the last bit"
    second, third = run(3, "stopped", 2, 2), run(1, "stopped", 3, 3)
    assert first[2] + second[2] + third[2] == straight[2] == plain[2]
    assert_same(third[0], straight[0])
    assert_same(third[0], plain[0])
    assert_same(run(3, "plain", 3, 3)[0], plain[0])  # from what Accelerate itself has saved
    assert not list((tmp_path / "stopped" / "epoch 1").glob("*.safetensors")), "nothing was written as a whole"


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["no", "fp16", "bf16"])
@ranks(1)
def test_on_a_gpu(context: RankContext, tmp_path: Path, precision: str) -> None:
    """Stopped and gone on, beside Accelerate's own without a stop."""

    def run(first: int, last: int, plain: bool = False) -> list[Any]:
        folder = tmp_path / ("plain" if plain else "ours")
        return train(context, folder, first, last, plain, cpu=False, precision=precision)

    plain, first, second = run(1, 2, plain=True), run(1, 1), run(2, 2)
    assert {value.device.type for value in second[0].values()} == {"cuda"}
    assert_same(second[0], plain[0])
    assert first[2] + second[2] == plain[2]
    assert first[1] + second[1] == pytest.approx(plain[1], rel=1e-4)


@ranks(1, 2)
def test_a_checkpoint_without_the_folder_of_the_state_is_refused(context: RankContext, tmp_path: Path) -> None:
    with accelerated(context):
        loop = Loop(accelerator(Accelerator), 0)
        loop.accelerator.save_state(str(tmp_path))
        if context.rank == 0:
            shutil.rmtree(tmp_path / "zeroshard_0")
            loop.accelerator.save_model(loop.model, tmp_path)
        context.gather(None)
        with pytest.raises(CheckpointError, match=r"zeroshard_0 is missing.*optimizer\.bin says only that it is there"):
            loop.accelerator.load_state(str(tmp_path))
        seen = tmp_path if context.rank == 0 else tmp_path / "not yet here"
        assert loop.optimizer.detect_shard_dir(seen, tmp_path / "any.bin"), "as the first rank sees it"
        assert not loop.optimizer.detect_shard_dir(
            tmp_path / "none" if context.rank == 0 else tmp_path, tmp_path / "any.bin"
        )
        with pytest.raises(CheckpointError, match=r"this has no state in it.*full_state_dict"):
            loop.optimizer.load_state_dict(loop.optimizer.state_dict())


@ranks(2)
def test_mistakes_are_told_on_all_ranks(context: RankContext) -> None:
    with accelerated(context):
        chosen, model = accelerator(Accelerator), nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ConfigError, match="the SGD belong to 0 of the 0 models that were prepared"):
            chosen.prepare(optimizer)
        model = chosen.prepare(model)
        with pytest.raises(ConfigError, match="nobody averages the gradients of the Linear: prepare its optimizer"):
            chosen.backward(model(torch.ones(1, 3)).sum())
        model.zero_grad()
        chosen.prepare(optimizer)
        with pytest.raises(ConfigError, match="the Linear has an optimizer already"):
            chosen.prepare(torch.optim.SGD([model.bias]))
        with pytest.raises(ConfigError, match="clipped for all parameters of one optimizer at a time"):
            chosen.clip_grad_norm_([model.weight], 1.0)
        foreign = accelerator(accelerate.Accelerator).prepare(torch.optim.SGD(model.parameters()))
        with pytest.raises(ConfigError, match="was prepared by an Accelerator of Accelerate's own"):
            chosen.prepare(foreign)
        os.environ["WORLD_SIZE"] = "7"
        with pytest.raises(ConfigError, match="7 processes were started, and Accelerate sees 2"):
            accelerator(Accelerator)
        plugin = accelerate.FullyShardedDataParallelPlugin(fsdp_version=2)
        with pytest.raises(ConfigError, match="leave out fsdp_plugin"):
            accelerator(Accelerator, fsdp_plugin=plugin)
        del os.environ["WORLD_SIZE"]
        with pytest.raises(ConfigError, match="leave out DistributedDataParallelKwargs"):
            accelerator(Accelerator, kwargs_handlers=[accelerate.DistributedDataParallelKwargs()])


class Own(torch.optim.SGD):
    """Keeps an argument to itself."""

    def __init__(self, params: Any, lr: float, secret: int) -> None:  # noqa: ARG002
        super().__init__(params, lr)


@ranks(2)
def test_state_hooks_and_options_of_the_plain_optimizer_are_taken_over(context: RankContext) -> None:
    with accelerated(context):
        model, chosen, seen = (
            nn.Linear(3, 3),
            accelerator(Accelerator, config=ZeroConfig(stage=1)),
            [],
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
        handle = optimizer.register_step_post_hook(lambda *_: seen.append(1))
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)  # which nobody prepares
        model, made = chosen.prepare(model, optimizer)
        assert made.param_groups[0]["nesterov"]
        schedule.step()
        assert made.param_groups[0]["lr"] == 0.05
        state = made.optimizer.full_state_dict()
        if context.rank == 0:
            assert state is not None
            assert [entry["momentum_buffer"].unique().item() for entry in state["state"].values()] == [1.0, 1.0]
        chosen.backward(model(torch.ones(1, 3)).sum())
        made.step()
        handle.remove()
        made.step()
        assert len(seen) == 2
        other = nn.Linear(2, 2)
        with pytest.raises(ConfigError, match="a Own does not say what it was made with as secret"):
            accelerator(Accelerator).prepare(other, Own(other.parameters(), 0.1, 1))
