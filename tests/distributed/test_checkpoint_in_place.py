"""Loading reads values in place, without copies, and each rank reads only its shard of sharded tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from tests.support import RankContext, ranks
from tests.support.checkpoints import (
    ADAMW,
    OPTIMIZER_FACTORIES,
    MakeOptimizer,
    TrainingRun,
    dropin,
    flat,
    net,
    one_bucket,
    train,
    whole,
)
from tests.support.oracles import assert_same
from tests.support.tiers import sampled
from zeroshard import CheckpointError, ZeroConfig, ZeroRedundancyOptimizer, checkpoint, shard
from zeroshard.checkpoint import reader
from zeroshard.checkpoint.metadata import CheckpointMetadata


def data_pointers(run: TrainingRun) -> set[int]:
    """Return the addresses of the parameters and of the state tensors that have their shapes."""
    assert isinstance(run.optimizer, ZeroRedundancyOptimizer)
    tensors = [value for state in run.optimizer.optim.state.values() for value in state.values() if value.dim()]
    return {tensor.data_ptr() for tensor in (*run.model.parameters(), *tensors)}


@ranks(1, 2, 3)
@sampled("make_optimizer", OPTIMIZER_FACTORIES)
def test_load_writes_in_place(ctx: RankContext, tmp_path: Path, make_optimizer: MakeOptimizer) -> None:
    run = TrainingRun(make_optimizer=make_optimizer)
    run.save(tmp_path)
    expected, before = run.capture(), data_pointers(run)
    versions = [param._version for param in run.model.parameters()]
    with torch.no_grad():
        for param in run.model.parameters():
            param.zero_()
    run.load(tmp_path)
    assert data_pointers(run) == before
    assert_same(run.capture(), expected)
    assert all(param._version > old for param, old in zip(run.model.parameters(), versions, strict=True))


@ranks(1, 2, 3)
@sampled("make_optimizer", [flat, one_bucket])
def test_load_merges_split_flat_params(ctx: RankContext, tmp_path: Path, make_optimizer: MakeOptimizer) -> None:
    """Into an optimizer whose parameters have made different numbers of steps."""
    run = TrainingRun(make_optimizer=make_optimizer)
    run.save(tmp_path)
    expected = run.capture()
    other = TrainingRun(seed=3, make_optimizer=make_optimizer)
    for number, param in enumerate(other.model.parameters()):
        param.requires_grad_(number % 2 == 0)
    train(other.model, other.optimizer, 2)
    for param in other.model.parameters():
        param.requires_grad_(True)
    other.load(tmp_path)
    assert_same(other.capture(), expected)
    train(run.model, run.optimizer, 3)
    train(other.model, other.optimizer, 3)
    assert_same(other.capture(), run.capture())


@ranks(2, 3, 4)
@sampled("make_optimizer", [one_bucket, whole, dropin])
def test_each_rank_writes_and_reads_only_its_shard(
    ctx: RankContext, tmp_path: Path, make_optimizer: MakeOptimizer
) -> None:
    def make_model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(64, 64) for _ in range(12)))

    def step(model: nn.Module, optimizer: Optimizer) -> None:
        torch.autograd.backward(model(torch.ones(2, 64)).sum())
        optimizer.step()

    model = make_model()
    optimizer = make_optimizer(model, None)
    step(model, optimizer)
    reported: list[tuple[int, int]] = []
    checkpoint.save(
        tmp_path, step=1, model=model, optimizer=optimizer, progress=lambda *counts: reported.append(counts)
    )
    total_bytes = 3 * sum(param.nbytes for param in model.parameters())
    shard_bytes = total_bytes / ctx.world_size
    assert 0.9 * shard_bytes < reported[-1][1] < 1.2 * shard_bytes + 4096, "bytes written by this rank"
    sizes = [file.stat().st_size for file in (tmp_path / "step-000000001").glob("*.distcp")]
    assert max(sizes) < 1.5 * total_bytes / ctx.world_size + 65536

    new_model = make_model()
    new_optimizer = make_optimizer(new_model, None)
    reported.clear()
    checkpoint.load(
        tmp_path, model=new_model, optimizer=new_optimizer, progress=lambda *counts: reported.append(counts)
    )
    assert reported == sorted(reported)
    assert reported[-1][0] == reported[-1][1]
    assert reported[-1][1] < 2.6 * shard_bytes + 65536, "bytes checked and read by this rank"
    assert all(map(torch.equal, new_model.parameters(), model.parameters()))


@ranks(1, 2, 3)
@sampled("make_optimizer", [flat, dropin])
def test_read_error_after_validation_reports_partial_load(
    ctx: RankContext, tmp_path: Path, make_optimizer: MakeOptimizer
) -> None:
    """Only such an error leaves a partial load. Every rank raises, and the next load repairs it."""
    run = TrainingRun(make_optimizer=make_optimizer)
    run.save(tmp_path)
    other = TrainingRun(seed=5, make_optimizer=make_optimizer)
    reads: list[Any] = []

    def fail(self: reader.ReadPlan, *args: Any) -> None:
        reads.append(args)
        if ctx.rank == ctx.world_size - 1 and len(reads) > 5:
            raise OSError(5, "Input/output error")
        original(self, *args)

    original = reader.ReadPlan._read_tensor
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader.ReadPlan, "_read_tensor", fail)
        with pytest.raises(CheckpointError, match=r"Input/output error.*partially loaded: load a checkpoint before"):
            other.load(tmp_path)
    other.load(tmp_path)
    assert_same(other.capture(), run.capture())


class ValidatingAdamW(torch.optim.AdamW):
    """Rejects a loaded learning rate above 1."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if state_dict["param_groups"][0]["lr"] > 1:
            raise ValueError("that is too much")


@ranks(1, 2, 3)
def test_custom_load_state_dict_can_reject_without_side_effects(ctx: RankContext, tmp_path: Path) -> None:
    def make_run(seed: int, lr: float) -> TrainingRun:
        run = TrainingRun(seed, make_optimizer=lambda model, _: shard(model, ValidatingAdamW, lr=lr))
        run.optimizer.param_groups[0]["lr"] = lr
        return run

    make_run(0, 2.0).save(tmp_path / "bad")
    good = make_run(1, 0.5)
    good.save(tmp_path / "good")
    other = make_run(2, 0.25)
    before = other.capture()
    with pytest.raises(CheckpointError, match="too much"):
        other.load(tmp_path / "bad")
    assert_same(other.capture(), before)
    other.load(tmp_path / "good")
    assert_same(other.capture(), good.capture())


# ---- another precision


def train_run(dtype: torch.dtype, masters: torch.dtype | None, seed: int = 0, steps: int = 3) -> TrainingRun:
    """Train with gradients that are exact in any precision, so that runs differ only in the precision of weights."""
    model = net(seed).to(dtype)
    config = ZeroConfig(master_dtype=masters)
    run = TrainingRun(
        model=model, make_optimizer=lambda module, _: shard(module, torch.optim.AdamW, config=config, **ADAMW), steps=0
    )
    for _ in range(steps):
        step_with_exact_grads(run)
    return run


def step_with_exact_grads(run: TrainingRun) -> None:
    torch.autograd.backward([(param * 0.5).sum() for param in run.model.parameters()])
    run.optimizer.step()
    run.optimizer.zero_grad()


def get_master_values(run: TrainingRun) -> dict[str, torch.Tensor]:
    """Return the most precise values of all parameters, on rank 0."""
    assert isinstance(run.optimizer, ZeroRedundancyOptimizer)
    found = run.optimizer.full_state_dict(to=0)
    if found is None:
        return {}
    names = [name for name, _ in run.model.named_parameters()]
    values = dict(run.model.named_parameters())
    return {
        name: found["state"].get(index, {}).get("master_weights", values[name]).detach().clone()
        for index, name in enumerate(names)
    }


FP32_MASTERS = torch.float32


@ranks(1, 2, 3)
@pytest.mark.parametrize("from_masters", [True, False], ids=["from masters", "to masters"])
def test_no_precision_lost_between_master_weights_and_fp32_params(
    ctx: RankContext, tmp_path: Path, from_masters: bool
) -> None:
    """bf16 parameters with masters, and fp32 parameters without, hold the same numbers."""
    settings = [(torch.bfloat16, FP32_MASTERS), (torch.float32, None)]
    source, target = settings if from_masters else settings[::-1]
    run = train_run(*source)
    run.save(tmp_path)
    other = train_run(*target, seed=4)
    other.load(tmp_path)
    assert_same(get_master_values(other), get_master_values(run))
    for _ in range(3):
        step_with_exact_grads(run)
        step_with_exact_grads(other)
    assert_same(get_master_values(other), get_master_values(run))
    assert all(
        torch.equal(ours.bfloat16(), theirs.bfloat16())
        for ours, theirs in zip(other.model.parameters(), run.model.parameters(), strict=True)
    )


@ranks(1, 2)
def test_master_weights_are_saved_in_sync_with_edited_params(ctx: RankContext, tmp_path: Path) -> None:
    """The user has changed parameters since the last step."""
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
    """However tensors are sharded, any reader finds them by name and full shape."""
    run = TrainingRun(make_optimizer=flat)
    metadata = CheckpointMetadata(run.save(tmp_path))
    shapes = {
        str(entry.path[1]): tuple(entry.tensor.size) for entry in metadata.under("model") if entry.tensor is not None
    }
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
    resumed_model, resumed_optimizer = build()
    checkpoint.load(tmp_path, model=resumed_model, optimizer=resumed_optimizer)
    train(resumed_model, resumed_optimizer, 1)
    for param, expected in zip(resumed_model.parameters(), model.parameters(), strict=True):
        assert torch.equal(param, expected)
