"""Unusual optimizers, models and calls: each is saved and loaded, or rejected before anything changes."""

from __future__ import annotations

import re
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
    MakeOptimizer,
    TrainingRun,
    assert_rejected,
    dropin,
    first_ranks,
    flat,
    net,
    one_bucket,
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
@sampled("make_optimizer", [flat, one_bucket, whole, make_bucket_view_dropin, dropin])
@sampled("on_all_ranks", [True, False])
def test_load_after_param_data_was_reassigned(
    ctx: RankContext, tmp_path: Path, make_optimizer: MakeOptimizer, on_all_ranks: bool
) -> None:
    run = TrainingRun(make_optimizer=make_optimizer)
    run.save(tmp_path)
    expected = run.capture()
    if on_all_ranks or ctx.rank == 0:
        for param in run.model.parameters():
            param.data = torch.zeros_like(param)
    run.load(tmp_path)
    assert_same(run.capture(), expected)
    train(run.model, run.optimizer, 1)


@ranks(2, 3)
def test_process_group_other_than_the_optimizers_is_rejected(ctx: RankContext, tmp_path: Path) -> None:
    run = TrainingRun()
    run.save(tmp_path)
    first_rank_group = first_ranks(1)
    if first_rank_group is not None:
        with pytest.raises(
            ConfigError, match=r"expects the ranks that the optimizer is sharded over, \[0, 1.*got \[0\]"
        ):
            run.save(tmp_path, 3, process_group=first_rank_group, keep=1)
        with pytest.raises(ConfigError, match=r"Pass process_group=optimizer.process_group"):
            run.load(tmp_path, process_group=first_rank_group)
    dist.barrier()
    run.load(tmp_path)


@ranks(3, 4)
def test_subgroup_saves_and_loads_without_other_ranks(ctx: RankContext, tmp_path: Path) -> None:
    """Rank 0 makes no call, and no rank waits for it."""
    group = dist.new_group(list(range(1, ctx.world_size)))
    if ctx.rank:
        run, other = (TrainingRun(seed, lambda model, _: flat(model, group)) for seed in (0, 5))
        run.save(tmp_path, 1)
        run.save(tmp_path, 2, in_background=True)
        assert other.load(tmp_path).world_size == ctx.world_size - 1
        for each_run in (run, other):
            train(each_run.model, each_run.optimizer, 2, first=2)
        assert_same(dict(other.model.named_parameters()), dict(run.model.named_parameters()))
        with pytest.raises(RankMismatchError, match=r"rank 0: step 3; ranks? 1.*: step 4"):
            run.save(tmp_path, 3 if ctx.rank == 1 else 4)
    dist.barrier()


# ---- master weights


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
    """Loading leaves nothing of the earlier masters, also if some or all saved masters equal their parameters."""
    model, optimizer = make_bf16_embedding(0, torch.optim.SGD, lr=0.01)
    for _ in range(steps):
        step_on_first_rows(model, optimizer)
    checkpoint.save(tmp_path, step=steps, model=model, optimizer=optimizer)
    new_model, new_optimizer = make_bf16_embedding(1, torch.optim.SGD, lr=0.01)
    for _ in range(3):
        step_on_first_rows(new_model, new_optimizer, num_rows=8)
    checkpoint.load(tmp_path, model=new_model, optimizer=new_optimizer)
    for _ in range(3):
        step_on_first_rows(model, optimizer)
        step_on_first_rows(new_model, new_optimizer)
    assert torch.equal(new_model.weight, model.weight)
    assert_same(new_optimizer.full_state_dict(), optimizer.full_state_dict())


# ---- state of other types


class ConfigurableStateSGD(torch.optim.Optimizer):
    """SGD that also keeps state of the given form."""

    def __init__(self, params: Any, form: str, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "form": form})

    def step(self, _: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._step(param, self.state[param], group)

    def _step(self, param: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        grad, previous = param.grad, state.get("kept")
        assert grad is not None
        forms: dict[str, Any] = {
            "nested": lambda: {"m": grad.clone(), "slow": {"m": grad.clone() * 2}},
            "list": lambda: [*(previous or []), grad.clone()][-2:],
            "tuple": lambda: (grad.clone(), 2.0),
            "count": lambda: (previous or 0) + 1,
            "scalar": lambda: torch.ones(()) * (1 if previous is None else float(previous) + 1),
        }
        state["kept"] = forms[group["form"]]()
        if group["form"] == "nested":
            state["m"] = grad.clone() * 3
        param.data.sub_(grad, alpha=group["lr"])


@ranks(1, 2, 3)
@sampled("form", ["nested", "list", "tuple", "count", "scalar"])
@sampled("kind", ["shard", "drop-in", "plain"])
@pytest.mark.filterwarnings("ignore:.*needs whole parameters")
def test_nested_and_scalar_state_round_trips(ctx: RankContext, tmp_path: Path, form: str, kind: str) -> None:
    factories: dict[str, Any] = {
        "shard": lambda model, _: shard(model, ConfigurableStateSGD, form=form),
        "drop-in": lambda model, _: ZeroRedundancyOptimizer(model.named_parameters(), ConfigurableStateSGD, form=form),
    }

    def make_run(seed: int) -> TrainingRun:
        run = TrainingRun(seed, make_optimizer=factories.get(kind))
        if kind == "plain":
            run.optimizer = ConfigurableStateSGD(run.model.parameters(), form)
            train(run.model, run.optimizer, 1)
        return run

    first, second = make_run(0), make_run(1)
    checkpoint.save(tmp_path, step=1, model=first.model, optimizer=first.optimizer)
    expected = first.capture()
    for other in (second, first):
        checkpoint.load(tmp_path, model=other.model, optimizer=other.optimizer)
        found = other.capture()
        assert_same(
            {key: found[key] for key in ("model", "optimizer")}, {key: expected[key] for key in ("model", "optimizer")}
        )
    train(first.model, first.optimizer, 2)
    train(second.model, second.optimizer, 2)
    assert_same(second.capture()["model"], first.capture()["model"])


class Unreadable:
    pass


@ranks(1, 2)
def test_unreadable_types_are_not_saved(ctx: RankContext, tmp_path: Path) -> None:
    run = TrainingRun()
    run.optimizer.param_groups[0]["note"] = Unreadable()
    with pytest.raises(CheckpointError, match=r"param_groups.0.note is a Unreadable, which load\(\) could not read"):
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


# ---- rejected before anything changes


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
    TrainingRun(make_optimizer=dropin).save(tmp_path)
    model = net(4)
    optimizer = ZeroRedundancyOptimizer(model.named_parameters(), torch.optim.AdamW, overlap_with_ddp=True, **ADAMW)
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(CheckpointError, match="before DDP has rebuilt its buckets"):
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
    with assert_rejected(other, "I will not", tmp_path):
        other.load(tmp_path)
    other.load(tmp_path)
    assert_same(other.capture(), run.capture())


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
    expected = run.capture()
    save_handle = checkpoint.async_save(tmp_path, step=2, **run.parts())
    assert other.load(tmp_path).step == 2
    assert_same(other.capture(), expected)
    done, total = save_handle.progress
    assert 0 < total <= done


@ranks(1, 2)
def test_failing_progress_callback_is_ignored(ctx: RankContext, tmp_path: Path) -> None:
    run = TrainingRun()

    def fail(done: int, total: int) -> None:
        raise RuntimeError("no screen")

    run.save(tmp_path, progress=fail)
    run.load(tmp_path, progress=fail)


@ranks(1, 2)
def test_progress_line_on_rank0(ctx: RankContext, tmp_path: Path) -> None:
    written: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", iter(range(10**6)).__next__)
        patch.setattr(sys.stderr, "write", written.append)
        TrainingRun().save(tmp_path, progress=True)
    lines = "".join(written).splitlines()
    assert all(line.startswith("saving step 2: ") for line in lines)
    assert [re.sub(r"[\d.]+ kB", "... kB", line) for line in lines[-1:]] == (
        ["saving step 2: 100 % of ... kB"] if ctx.rank == 0 else []
    )


@ranks(1, 2)
def test_loading_one_group_into_several_warns_about_lost_options(ctx: RankContext, tmp_path: Path) -> None:
    """All groups get the saved options, and the warning names the differences that are lost."""
    model = net()
    checkpoint.save(tmp_path, step=1, model=model, optimizer=shard(model, torch.optim.AdamW, lr=0.1, weight_decay=0.01))
    new_model = net()
    matrices = [param for param in new_model.parameters() if param.dim() > 1]
    vectors = [param for param in new_model.parameters() if param.dim() <= 1]
    groups = [{"params": matrices, "lr": 0.5}, {"params": vectors, "weight_decay": 0.0}]
    new_optimizer = shard(new_model, torch.optim.AdamW, params=groups, lr=0.1, weight_decay=0.01)
    with pytest.warns(UserWarning, match=r"groups 0 and 1 had different values of 'weight_decay'.* both to 0\.01"):
        checkpoint.load(tmp_path, model=new_model, optimizer=new_optimizer)
    new_optimizer.param_groups[1]["weight_decay"] = 0.0
    checkpoint.save(tmp_path, step=2, model=new_model, optimizer=new_optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint.load(tmp_path, model=new_model, optimizer=new_optimizer)
    assert [group["weight_decay"] for group in new_optimizer.param_groups] == [0.01, 0.0]
