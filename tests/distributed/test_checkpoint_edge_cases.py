"""Unusual optimizers, models and uses, each saved and loaded, or refused in time."""

from __future__ import annotations

import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support import RankContext, ranks
from tests.support.checkpoints import (
    ADAMW,
    TrainingRun,
    Way,
    dropin,
    first_ranks,
    flat,
    net,
    one_bucket,
    refused,
    train,
    whole,
)
from tests.support.oracles import assert_same
from tests.support.tiers import sampled
from zeroshard import (
    CheckpointError,
    ConfigError,
    RankMismatchError,
    ZeroConfig,
    ZeroRedundancyOptimizer,
    checkpoint,
    shard,
)


def make_bucket_view_dropin(model: nn.Module, group: dist.ProcessGroup | None = None) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(
        model.named_parameters(), torch.optim.AdamW, group, parameters_as_bucket_view=True, **ADAMW
    )


@ranks(1, 2, 3)
@sampled("way", [flat, one_bucket, whole, make_bucket_view_dropin, dropin])
@sampled("everywhere", [True, False])
def test_load_after_param_data_was_reassigned(ctx: RankContext, tmp_path: Path, way: Way, everywhere: bool) -> None:
    run = TrainingRun(way=way)
    run.save(tmp_path)
    expected = run.look()
    if everywhere or ctx.rank == 0:
        for param in run.model.parameters():
            param.data = torch.zeros_like(param)
    run.load(tmp_path)
    assert_same(run.look(), expected)
    train(run.model, run.optimizer, 1)


@ranks(2, 3)
def test_process_group_other_than_the_optimizers_is_rejected(ctx: RankContext, tmp_path: Path) -> None:
    run = TrainingRun()
    run.save(tmp_path)
    first = first_ranks(1)
    if first is not None:
        with pytest.raises(ConfigError, match=r"by ranks \[0\], but the optimizer is sharded over ranks \[0, 1"):
            run.save(tmp_path, 3, process_group=first, keep=1)
        with pytest.raises(ConfigError, match=r"give it process_group=optimizer.process_group"):
            run.load(tmp_path, process_group=first)
    dist.barrier()
    run.load(tmp_path)


@ranks(3, 4)
def test_subgroup_saves_and_loads_without_other_ranks(ctx: RankContext, tmp_path: Path) -> None:
    """Rank 0 makes no call, and nobody waits for it."""
    group = dist.new_group(list(range(1, ctx.world_size)))
    if ctx.rank:
        run, other = (TrainingRun(seed, lambda model, _: flat(model, group)) for seed in (0, 5))
        run.save(tmp_path, 1)
        run.save(tmp_path, 2, behind=True)
        assert other.load(tmp_path).world_size == ctx.world_size - 1
        for each in (run, other):
            train(each.model, each.optimizer, 2, first=2)
        assert_same(dict(other.model.named_parameters()), dict(run.model.named_parameters()))
        with pytest.raises(RankMismatchError, match=r"rank 0: step 3; ranks? 1.*: step 4"):
            run.save(tmp_path, 3 if ctx.rank == 1 else 4)
    dist.barrier()


# ---- masters


def make_bf16_embedding(
    seed: int, optimizer_class: Any, *, num_embeddings: int = 8, **options: Any
) -> tuple[nn.Embedding, ZeroRedundancyOptimizer]:
    torch.manual_seed(seed)
    model = nn.Embedding(num_embeddings, 16).bfloat16()
    return model, shard(model, optimizer_class, config=ZeroConfig(master_dtype=torch.float32), **options)


def step_on_first_rows(model: nn.Module, optimizer: ZeroRedundancyOptimizer, num_rows: int = 2) -> None:
    torch.autograd.backward(model(torch.arange(num_rows)).float().square().sum())
    optimizer.step()
    optimizer.zero_grad()


@ranks(1, 2, 3)
@sampled("steps", [0, 2])
def test_master_weights_are_the_only_state(ctx: RankContext, tmp_path: Path, steps: int) -> None:
    """Also if only some of them differ from their parameters, or none: nothing is left of what was there before."""
    model, optimizer = make_bf16_embedding(0, torch.optim.SGD, lr=0.01)
    for _ in range(steps):
        step_on_first_rows(model, optimizer)
    checkpoint.save(tmp_path, step=steps, model=model, optimizer=optimizer)
    again, into = make_bf16_embedding(1, torch.optim.SGD, lr=0.01)
    for _ in range(3):
        step_on_first_rows(again, into, num_rows=8)
    checkpoint.load(tmp_path, model=again, optimizer=into)
    for _ in range(3):
        step_on_first_rows(model, optimizer)
        step_on_first_rows(again, into)
    assert torch.equal(again.weight, model.weight)
    assert_same(into.full_state_dict(), optimizer.full_state_dict())


# ---- state of other forms


class ConfigurableStateSGD(torch.optim.Optimizer):
    """Keeps what it is told to keep, and steps as SGD with it."""

    def __init__(self, params: Any, form: str, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "form": form})

    def step(self, _: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._step(param, self.state[param], group)

    def _step(self, param: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        new, old = param.grad, state.get("kept")
        assert new is not None
        forms: dict[str, Any] = {
            "nested": lambda: {"m": new.clone(), "slow": {"m": new.clone() * 2}},
            "list": lambda: [*(old or []), new.clone()][-2:],
            "tuple": lambda: (new.clone(), 2.0),
            "count": lambda: (old or 0) + 1,
            "scalar": lambda: torch.ones(()) * (1 if old is None else float(old) + 1),
        }
        state["kept"] = forms[group["form"]]()
        if group["form"] == "nested":
            state["m"] = new.clone() * 3
        param.data.sub_(new, alpha=group["lr"])


@ranks(1, 2, 3)
@sampled("form", ["nested", "list", "tuple", "count", "scalar"])
@sampled("way", ["shard", "drop-in", "plain"])
@pytest.mark.filterwarnings("ignore:.*looks at whole parameters")
def test_nested_and_scalar_state_round_trips(ctx: RankContext, tmp_path: Path, form: str, way: str) -> None:
    ways: dict[str, Any] = {
        "shard": lambda model, _: shard(model, ConfigurableStateSGD, form=form),
        "drop-in": lambda model, _: ZeroRedundancyOptimizer(model.named_parameters(), ConfigurableStateSGD, form=form),
    }

    def run(seed: int) -> TrainingRun:
        made = TrainingRun(seed, way=ways.get(way))
        if way == "plain":
            made.optimizer = ConfigurableStateSGD(made.model.parameters(), form)
            train(made.model, made.optimizer, 1)
        return made

    first, second = run(0), run(1)
    checkpoint.save(tmp_path, step=1, model=first.model, optimizer=first.optimizer)
    expected = first.look()
    for other in (second, first):
        checkpoint.load(tmp_path, model=other.model, optimizer=other.optimizer)
        found = other.look()
        assert_same({k: found[k] for k in ("model", "optimizer")}, {k: expected[k] for k in ("model", "optimizer")})
    train(first.model, first.optimizer, 2)
    train(second.model, second.optimizer, 2)
    assert_same(second.look()["model"], first.look()["model"])


class Unreadable:
    pass


@ranks(1, 2)
def test_unreadable_types_are_not_saved(ctx: RankContext, tmp_path: Path) -> None:
    run = TrainingRun()
    run.optimizer.param_groups[0]["note"] = Unreadable()
    with pytest.raises(CheckpointError, match=r"optim.param_groups.0.note is a Unreadable, which could not be read"):
        run.save(tmp_path)
    assert checkpoint.latest(tmp_path) is None
    del run.optimizer.param_groups[0]["note"]
    numpy = pytest.importorskip("numpy")
    run.optimizer.param_groups[0]["lr"] = numpy.float64(0.125)
    run.save(tmp_path)
    other = TrainingRun(seed=3)
    other.load(tmp_path)
    assert type(other.optimizer.param_groups[0]["lr"]) is float
    assert other.optimizer.param_groups[0]["lr"] == 0.125


# ---- refused before anything changes


@ranks(1, 2)
def test_manually_edited_param_groups_are_rejected(ctx: RankContext, tmp_path: Path) -> None:
    run = TrainingRun()
    run.save(tmp_path)
    params = run.optimizer.param_groups[0]["params"]
    params[0], params[1] = params[1], params[0]
    before = [param.detach().clone() for param in run.model.parameters()]
    with pytest.raises(CheckpointError, match="changed by hand"):
        run.save(tmp_path, 3)
    with pytest.raises(CheckpointError, match="changed by hand"):
        checkpoint.load(tmp_path, model=run.model, optimizer=run.optimizer)
    assert all(map(torch.equal, run.model.parameters(), before))


@ranks(1, 2)
def test_load_before_ddp_overlap_assigns_owners_is_rejected(ctx: RankContext, tmp_path: Path) -> None:
    TrainingRun(way=dropin).save(tmp_path)
    model = net(4)
    optimizer = ZeroRedundancyOptimizer(model.named_parameters(), torch.optim.AdamW, overlap_with_ddp=True, **ADAMW)
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(CheckpointError, match="DDP's buckets settle"):
        checkpoint.load(tmp_path, model=model, optimizer=optimizer)
    assert all(map(torch.equal, model.parameters(), before))


@ranks(1, 2, 3)
def test_failing_post_load_hook_rolls_back(ctx: RankContext, tmp_path: Path) -> None:
    run, other = TrainingRun(), TrainingRun(seed=4)
    run.save(tmp_path)

    def fail(*_: Any) -> None:
        if ctx.rank == 0 and armed:
            armed.clear()
            raise RuntimeError("I will not")

    armed = [True]
    other.optimizer.register_load_state_dict_post_hook(fail)
    with refused(other, "I will not", tmp_path):
        other.load(tmp_path)
    other.load(tmp_path)
    assert_same(other.look(), run.look())


@ranks(1, 2)
def test_meta_device_model_is_rejected(ctx: RankContext, tmp_path: Path) -> None:
    TrainingRun().save(tmp_path)
    with torch.device("meta"):
        model = net(0)
    with pytest.raises(CheckpointError, match="to_empty"):
        checkpoint.load(tmp_path, model=model)


@ranks(1, 2)
def test_load_right_after_async_save(ctx: RankContext, tmp_path: Path) -> None:
    run, other = TrainingRun(), TrainingRun(seed=4)
    run.save(tmp_path, 1)
    expected = run.look()
    saving = checkpoint.async_save(tmp_path, step=2, **run.parts())
    assert other.load(tmp_path).step == 2
    assert_same(other.look(), expected)
    done, total = saving.progress
    assert 0 < total <= done


@ranks(1, 2)
def test_missing_numpy_is_reported_on_several_ranks(ctx: RankContext, tmp_path: Path) -> None:
    """torch's checkpoints cannot do without it on several ranks."""
    run = TrainingRun()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zeroshard.checkpoint.saver.find_spec", lambda _: None)
        if ctx.world_size == 1:
            run.save(tmp_path)
            return
        with refused(run, "several ranks takes numpy", tmp_path, error=ConfigError):
            run.save(tmp_path)


@ranks(1, 2)
def test_failing_progress_callback_is_ignored(ctx: RankContext, tmp_path: Path) -> None:
    run = TrainingRun()

    def fail(done: int, total: int) -> None:
        raise RuntimeError("no screen")

    run.save(tmp_path, progress=fail)
    run.load(tmp_path, progress=fail)


@ranks(1, 2)
def test_progress_line_on_rank0(ctx: RankContext, tmp_path: Path) -> None:
    told: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", iter(range(10**6)).__next__)
        patch.setattr(sys.stderr, "write", told.append)
        TrainingRun().save(tmp_path, progress=True)
    lines = "".join(told).splitlines()
    assert all(line.startswith("saving step 2: ") for line in lines)
    assert lines[-1:] == (["saving step 2: 100 % of 0 MiB"] if ctx.rank == 0 else [])


@ranks(1, 2)
def test_loading_one_group_into_several_warns_about_lost_options(ctx: RankContext, tmp_path: Path) -> None:
    """Their options become those that were saved, and differences that are lost are named."""
    model = net()
    checkpoint.save(tmp_path, step=1, model=model, optimizer=shard(model, torch.optim.AdamW, lr=0.1, weight_decay=0.01))
    again = net()
    matrices = [param for param in again.parameters() if param.dim() > 1]
    others = [param for param in again.parameters() if param.dim() <= 1]
    groups = [{"params": matrices, "lr": 0.5}, {"params": others, "weight_decay": 0.0}]
    optimizer = shard(again, torch.optim.AdamW, params=groups, lr=0.1, weight_decay=0.01)
    with pytest.warns(UserWarning, match=r"groups 0 and 1 have different options .* weight_decay is 0\.01 in both now"):
        checkpoint.load(tmp_path, model=again, optimizer=optimizer)
    optimizer.param_groups[1]["weight_decay"] = 0.0
    checkpoint.save(tmp_path, step=2, model=again, optimizer=optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint.load(tmp_path, model=again, optimizer=optimizer)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.0]
