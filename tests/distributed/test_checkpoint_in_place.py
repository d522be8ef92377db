"""Loading reads to where values belong: nothing is copied, and each rank reads its own part of what is sharded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from tests.support import RankContext, ranks
from tests.support.checkpoints import ADAMW, WAYS, TrainingRun, Way, dropin, flat, net, one_bucket, train, whole
from tests.support.oracles import assert_same
from tests.support.tiers import sampled
from zeroshard import CheckpointError, ZeroConfig, ZeroRedundancyOptimizer, checkpoint, shard
from zeroshard.checkpoint import reader
from zeroshard.checkpoint.metadata import CheckpointMetadata


def data_pointers(run: TrainingRun) -> set[int]:
    """Where the parameters lie, and the state that has their shapes."""
    assert isinstance(run.optimizer, ZeroRedundancyOptimizer)
    state = [it for param in run.optimizer.optim.state.values() for it in param.values() if it.dim()]
    return {it.data_ptr() for it in (*run.model.parameters(), *state)}


@ranks(1, 2, 3)
@sampled("way", WAYS)
def test_load_writes_in_place(ctx: RankContext, tmp_path: Path, way: Way) -> None:
    run = TrainingRun(way=way)
    run.save(tmp_path)
    expected, before = run.look(), data_pointers(run)
    versions = [param._version for param in run.model.parameters()]
    with torch.no_grad():
        for param in run.model.parameters():
            param.zero_()
    run.load(tmp_path)
    assert data_pointers(run) == before
    assert_same(run.look(), expected)
    assert all(param._version > old for param, old in zip(run.model.parameters(), versions, strict=True))


@ranks(1, 2, 3)
@sampled("way", [flat, one_bucket])
def test_load_merges_split_flat_params(ctx: RankContext, tmp_path: Path, way: Way) -> None:
    """Into an optimizer whose parameters have not all made the same steps."""
    run = TrainingRun(way=way)
    run.save(tmp_path)
    expected = run.look()
    other = TrainingRun(seed=3, way=way)
    for number, param in enumerate(other.model.parameters()):
        param.requires_grad_(number % 2 == 0)
    train(other.model, other.optimizer, 2)
    for param in other.model.parameters():
        param.requires_grad_(True)
    other.load(tmp_path)
    assert_same(other.look(), expected)
    train(run.model, run.optimizer, 3)
    train(other.model, other.optimizer, 3)
    assert_same(other.look(), run.look())


@ranks(2, 3, 4)
@sampled("way", [one_bucket, whole, dropin])
def test_each_rank_writes_and_reads_only_its_shard(ctx: RankContext, tmp_path: Path, way: Way) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(64, 64) for _ in range(12)))

    def step(it: nn.Module, optimizer: Optimizer) -> None:
        torch.autograd.backward(it(torch.ones(2, 64)).sum())
        optimizer.step()

    first = model()
    optimizer = way(first, None)
    step(first, optimizer)
    seen: list[tuple[int, int]] = []
    checkpoint.save(tmp_path, step=1, model=first, optimizer=optimizer, progress=lambda *counts: seen.append(counts))
    everything = 3 * sum(param.nbytes for param in first.parameters())
    share = everything / ctx.world_size
    assert 0.9 * share < seen[-1][1] < 1.2 * share + 4096, "written by this rank"
    sizes = [it.stat().st_size for it in (tmp_path / "step-000000001").glob("*.distcp")]
    assert max(sizes) < 1.5 * everything / ctx.world_size + 65536

    again = model()
    into = way(again, None)
    seen.clear()
    checkpoint.load(tmp_path, model=again, optimizer=into, progress=lambda *counts: seen.append(counts))
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1]
    assert seen[-1][1] < 2.6 * share + 65536, "looked at and read by this rank"
    assert all(map(torch.equal, again.parameters(), first.parameters()))


@ranks(1, 2, 3)
@sampled("way", [flat, dropin])
def test_read_error_after_validation_reports_partial_load(ctx: RankContext, tmp_path: Path, way: Way) -> None:
    """Only this leaves a mixture, which every rank is told; the next load mends it."""
    run = TrainingRun(way=way)
    run.save(tmp_path)
    other = TrainingRun(seed=5, way=way)
    done: list[Any] = []

    def fail(self: reader.ReadPlan, *args: Any) -> None:
        done.append(args)
        if ctx.rank == ctx.world_size - 1 and len(done) > 5:
            raise OSError(5, "Input/output error")
        original(self, *args)

    original = reader.ReadPlan._read_tensor
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader.ReadPlan, "_read_tensor", fail)
        with pytest.raises(CheckpointError, match=r"Input/output error.*loaded in parts now: load a checkpoint before"):
            other.load(tmp_path)
    other.load(tmp_path)
    assert_same(other.look(), run.look())


class ValidatingAdamW(torch.optim.AdamW):
    """Looks at what it loads, and does not like some of it."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if state_dict["param_groups"][0]["lr"] > 1:
            raise ValueError("that is too much")


@ranks(1, 2, 3)
def test_custom_load_state_dict_can_reject_without_side_effects(ctx: RankContext, tmp_path: Path) -> None:
    def run(seed: int, lr: float) -> TrainingRun:
        made = TrainingRun(seed, way=lambda model, _: shard(model, ValidatingAdamW, lr=lr))
        made.optimizer.param_groups[0]["lr"] = lr
        return made

    run(0, 2.0).save(tmp_path / "bad")
    good = run(1, 0.5)
    good.save(tmp_path / "good")
    other = run(2, 0.25)
    before = other.look()
    with pytest.raises(CheckpointError, match="too much"):
        other.load(tmp_path / "bad")
    assert_same(other.look(), before)
    other.load(tmp_path / "good")
    assert_same(other.look(), good.look())


# ---- another precision


def train_run(dtype: torch.dtype, masters: torch.dtype | None, seed: int = 0, steps: int = 3) -> TrainingRun:
    """With gradients that are exact in any precision, so that runs differ only in what they keep."""
    model = net(seed).to(dtype)
    config = ZeroConfig(master_dtype=masters)
    run = TrainingRun(model=model, way=lambda it, _: shard(it, torch.optim.AdamW, config=config, **ADAMW), steps=0)
    for _ in range(steps):
        step_with_exact_grads(run)
    return run


def step_with_exact_grads(run: TrainingRun) -> None:
    torch.autograd.backward([(param * 0.5).sum() for param in run.model.parameters()])
    run.optimizer.step()
    run.optimizer.zero_grad()


def get_master_values(run: TrainingRun) -> dict[str, torch.Tensor]:
    """The most precise values of all parameters, on rank 0."""
    assert isinstance(run.optimizer, ZeroRedundancyOptimizer)
    found = run.optimizer.full_state_dict(to=0)
    if found is None:
        return {}
    names = [name for name, _ in run.model.named_parameters()]
    values = dict(run.model.named_parameters())
    return {
        name: found["state"].get(number, {}).get("master_weights", values[name]).detach().clone()
        for number, name in enumerate(names)
    }


FP32_MASTERS = torch.float32


@ranks(1, 2, 3)
@pytest.mark.parametrize("there", [True, False], ids=["from masters", "to masters"])
def test_no_precision_lost_between_master_weights_and_fp32_params(
    ctx: RankContext, tmp_path: Path, there: bool
) -> None:
    """bf16 parameters with masters, and fp32 parameters without, hold the same numbers."""
    settings = [(torch.bfloat16, FP32_MASTERS), (torch.float32, None)]
    saved, into = settings if there else settings[::-1]
    run = train_run(*saved)
    run.save(tmp_path)
    other = train_run(*into, seed=4)
    other.load(tmp_path)
    assert_same(get_master_values(other), get_master_values(run))
    for _ in range(3):
        step_with_exact_grads(run)
        step_with_exact_grads(other)
    assert_same(get_master_values(other), get_master_values(run))
    assert all(
        torch.equal(mine.bfloat16(), theirs.bfloat16())
        for mine, theirs in zip(other.model.parameters(), run.model.parameters(), strict=True)
    )


@ranks(1, 2)
def test_master_weights_are_saved_in_sync_with_edited_params(ctx: RankContext, tmp_path: Path) -> None:
    """Also where somebody has changed these since the last step."""
    run = train_run(torch.bfloat16, FP32_MASTERS)
    with torch.no_grad():
        for param in run.model.parameters():
            param[...] = 1.25
    run.save(tmp_path)
    other = train_run(torch.float32, None, seed=4)
    other.load(tmp_path)
    assert all((param == 1.25).all() for param in other.model.parameters())


@ranks(2, 3)
def test_files_list_full_tensor_shapes(ctx: RankContext, tmp_path: Path) -> None:
    """However they are cut, anybody reads them by name and shape."""
    run = TrainingRun(way=flat)
    archive = CheckpointMetadata(run.save(tmp_path))
    shapes = {str(it.path[1]): tuple(it.tensor.size) for it in archive.under("model") if it.tensor is not None}
    assert shapes == {name: tuple(value.shape) for name, value in run.model.state_dict().items()}
    dist.barrier()


@ranks(2)
def test_fused_optimizer_resumes_with_channels_last_weights(ctx: RankContext, tmp_path: Path) -> None:
    """Fused kernels walk through the memory of a parameter and its state together, so both need the same strides."""

    def build() -> tuple[nn.Module, ZeroRedundancyOptimizer]:
        torch.manual_seed(0)
        convs = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 5, 3))
        model = convs.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01, fused=True)

    def train(model: nn.Module, optimizer: ZeroRedundancyOptimizer, step: int) -> None:
        images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(step))
        torch.autograd.backward(model(images).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = build()
    train(model, optimizer, 0)
    checkpoint.save(tmp_path, step=1, model=model, optimizer=optimizer)
    train(model, optimizer, 1)
    resumed, loaded = build()
    checkpoint.load(tmp_path, model=resumed, optimizer=loaded)
    train(resumed, loaded, 1)
    for param, expected in zip(resumed.parameters(), model.parameters(), strict=True):
        assert torch.equal(param, expected)
