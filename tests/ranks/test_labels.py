"""A trace of `torch.profiler` reads like the source: every part of the work has its label, in the order of the work."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from tests.ranks.test_offload import everything_is_far
from tests.support import RankContext, ranks
from tests.support.oracles import ADAMW, TINY, ZERO2, batch, mlp, regression, seeded
from zeroshard import (
    ConsistencyCheck,
    CPUOffload,
    FlatShards,
    NonFiniteGrads,
    ParamRule,
    PeerCheckpoint,
    ZeroConfig,
    ZeroRedundancyOptimizer,
    checkpoint,
    ddp_hooks,
    matrix_params,
    remaining_params,
    shard,
)
from zeroshard.engine import grad_reducer
from zeroshard.profiling import TRACE_PREFIX, Phase

PAGE = Path(__file__).parents[2] / "docs" / "profiling.md"


def labels_of(action: Callable[[], object], path: Path) -> list[str]:
    """Those in a trace of it, in the order in which they begin."""
    with profile(activities=[ProfilerActivity.CPU]) as traced:
        action()
    traced.export_chrome_trace(str(path))
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    found = [it for it in events if it.get("ph") == "X" and it["name"].startswith(TRACE_PREFIX)]
    return [it["name"].removeprefix(TRACE_PREFIX) for it in sorted(found, key=lambda it: (it["ts"], -it["dur"]))]


def known(labels: list[str]) -> set[str]:
    """The labels without buckets and classes, all of which must be among those that there are."""
    names = {it.text for it in Phase}
    plain = {re.sub(r" of (bucket \d+|[A-Z]\w+)$", "", label) for label in labels}
    assert plain <= names
    return plain


def first(labels: list[str], name: str) -> int:
    return next(place for place, label in enumerate(labels) if label.startswith(name))


def iterate(model: nn.Module, optimizer: Any, number: int, *, clip: bool = True) -> None:
    torch.autograd.backward(model(batch(number).to(next(model.parameters()).dtype)).float().square().mean())
    if clip:
        optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()


def in_order(labels: list[str], *names: str) -> None:
    places = [first(labels, name) for name in names]
    assert places == sorted(places), labels


@ranks(1, 2, 3)
def test_every_part_of_a_step_has_a_label_in_its_place(ctx: RankContext, tmp_path: Path) -> None:
    config = replace(
        ZERO2,
        overlap_param_gather=True,
        master_dtype=torch.float32,
        consistency_check=ConsistencyCheck(every=1),
        nonfinite=NonFiniteGrads("raise"),
        peer_checkpoint=PeerCheckpoint(every=1),
    )
    model = seeded(mlp, 0).bfloat16()
    with pytest.warns(UserWarning, match="no other to keep a copy") if ctx.world_size == 1 else nullcontext():
        optimizer = shard(model, torch.optim.AdamW, config=config, **ADAMW)
    iterate(model, optimizer, 0)
    labels = labels_of(lambda: iterate(model, optimizer, 1), tmp_path / f"{ctx.rank}.json")
    buckets = len(optimizer.layout.buckets)
    assert buckets >= 2
    ours = ["clip gradients", "synchronize gradients", "step", "check consistency"]
    ours += ["check for non-finite gradients", "assign gradients", "inner step of AdamW", "round master weights"]
    ours += ["peer checkpoint"]
    shared = ["wait for module parameters", "wait for parameters of bucket 0", "send gradients of bucket 0"]
    shared += ["consensus", "receive gradients of bucket 0", "send parameters of bucket 0"]
    assert set(ours) <= set(labels)
    in_order(labels, "pack gradients", "clip", "synchronize", "step", "check con", "check for non", "assign", "inner")
    in_order(labels, "inner step", "round master weights", "peer checkpoint")
    if ctx.world_size == 1:
        assert known(labels).isdisjoint({label.partition(" of ")[0] for label in shared})
        return
    assert set(shared) <= set(labels)
    in_order(labels, "wait for module", "wait for parameters", "pack", "send gradients", "receive gradients", "step")
    in_order(labels, "round master weights", "send parameters")
    packed = {f"pack gradients of bucket {it.index}" for it in optimizer.layout.buckets if len(it.slots) > 1}
    assert {label for label in labels if label.startswith("pack")} == packed, "one alone is sent as it lies"
    for name in ("send gradients", "receive gradients", "send parameters", "wait for parameters"):
        assert {f"{name} of bucket {number}" for number in range(buckets)} <= set(labels)
    known(labels)


@ranks(1, 2)
def test_steps_of_whole_parameters_have_labels(ctx: RankContext, tmp_path: Path) -> None:
    model = seeded(mlp, 0)
    optimizer = ZeroRedundancyOptimizer(model.named_parameters(), torch.optim.AdamW, **ADAMW)

    def step() -> None:
        torch.autograd.backward(regression(model, 0))
        optimizer.step(lambda: None)

    step()
    labels = labels_of(step, tmp_path / f"{ctx.rank}.json")
    in_order(labels, "step", "inner step of AdamW", *(["closure", "send parameters"] if ctx.world_size > 1 else []))
    expected = {"step", "inner step"}
    shared = {"closure", "consensus", "send parameters", "wait for parameters"}
    assert known(labels) == expected | (shared if ctx.world_size > 1 else set())


@ranks(1, 2)
def test_state_that_rests_elsewhere_comes_and_goes(ctx: RankContext, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    with everything_is_far("cpu"):
        config = ZeroConfig(partition=FlatShards(64 * 64 * 4), offload=CPUOffload(), master_dtype=torch.float64)
        optimizer = shard(model, torch.optim.AdamW, config=config, **ADAMW)

        def step() -> None:
            torch.autograd.backward(model(torch.ones(1, 64)).sum())
            optimizer.step()

        step()
        labels = labels_of(step, tmp_path / f"{ctx.rank}.json")
        held = {it.category: it.nbytes for it in optimizer.report().memory}
        assert held["master weights"] == 8 * 2 * 64 * 64 / ctx.world_size
    chosen = [label for label in labels if label.startswith(("prefetch", "inner", "round", "offload"))]
    update = ["inner step of AdamW", "round master weights"]
    assert chosen == [
        *("prefetch state of bucket 0", "prefetch state of bucket 1", *update, "offload state of bucket 0"),
        *(*update, "offload state of bucket 1", "offload state", "round master weights"),
    ]


@ranks(2)
def test_classes_are_told_apart(ctx: RankContext, tmp_path: Path) -> None:
    model = seeded(mlp, 0)
    rules = [
        ParamRule(matrix_params(), torch.optim.SGD, lr=0.1),
        ParamRule(remaining_params, torch.optim.AdamW, lr=0.1),
    ]
    optimizer = shard(model, rules)
    labels = labels_of(lambda: iterate(model, optimizer, 0), tmp_path / f"{ctx.rank}.json")
    assert [it for it in labels if it.startswith("inner step")] == ["inner step of SGD", "inner step of AdamW"]


@ranks(2)
def test_steps_inside_ddp_have_labels(ctx: RankContext, tmp_path: Path) -> None:
    model = DistributedDataParallel(seeded(mlp, 0))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
    hook = ddp_hooks.hook_with_zero_step(ddp_hooks_allreduce, model, optimizer)
    model.register_comm_hook(None, hook)
    for number in range(3):
        torch.autograd.backward(regression(model, number))
    labels = labels_of(lambda: torch.autograd.backward(regression(model, 3)), tmp_path / f"{ctx.rank}.json")
    assert known(labels) == {"wait for DDP", "inner step", "send parameters", "wait for parameters", "consensus"}
    assert optimizer._engine.comm.profiler.last_step.phases[Phase.INNER_STEP].num_calls >= 1


def ddp_hooks_allreduce(_: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    return allreduce_hook(None, bucket)  # type: ignore[arg-type]


@ranks(1, 2)
def test_state_and_checkpoints_have_labels(ctx: RankContext, tmp_path: Path) -> None:
    model = seeded(mlp, 0)
    optimizer = shard(model, torch.optim.AdamW, config=ZERO2, **ADAMW)
    iterate(model, optimizer, 0)
    folder = ctx.gather(str(tmp_path))[0]

    def work() -> None:
        state = optimizer.full_state_dict(to=0)
        checkpoint.save(folder, step=1, model=model, optimizer=optimizer)
        checkpoint.load(folder, model=model, optimizer=optimizer)
        if ctx.world_size == 1:
            optimizer.load_state_dict(state or {})

    labels = labels_of(work, tmp_path / f"{ctx.rank}.json")
    in_order(labels, "gather state", "save: collect", "save: write", "save: publish", "load: validate", "load: read")
    assert "load state" in labels


@ranks(2)
def test_nothing_is_labelled_where_nothing_is_done(ctx: RankContext, tmp_path: Path) -> None:
    model = seeded(mlp, 0)
    optimizer = shard(model, torch.optim.AdamW, config=ZeroConfig(partition=TINY), **ADAMW)

    def alone() -> None:
        with optimizer.no_sync():
            torch.autograd.backward(regression(model, 0))
        optimizer.zero_grad()

    assert labels_of(alone, tmp_path / f"{ctx.rank}.json") == []


@ranks(1, 2)
def test_times_of_the_last_step_are_kept(ctx: RankContext) -> None:
    model = seeded(mlp, 0)
    optimizer = shard(model, torch.optim.AdamW, config=ZERO2, **ADAMW)
    clock = optimizer._engine.comm.profiler
    assert clock.last_step.step_s == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grad_reducer, "WAIT_TIMEOUT_S", 30.0)
        for number in range(3):
            torch.autograd.backward(regression(model, number))
            torch.autograd.backward(regression(model, number))
            optimizer.step()
            optimizer.zero_grad()
    last = clock.last_step
    assert clock.current_timer is None
    assert 0 < last.step_s <= last.iteration_s
    assert sum(it.in_step_s + it.outside_step_s for it in last.phases.values()) <= last.iteration_s
    assert last.phases[Phase.STEP].num_calls == last.phases[Phase.INNER_STEP].num_calls == 1
    assert last.phases[Phase.INNER_STEP].outside_step_s == 0
    packed = [it for it in optimizer.layout.buckets if ctx.world_size == 1 or len(it.slots) > 1]
    assert last.phases[Phase.PACK_GRADS].num_calls == 2 * len(packed)
    assert last.phases[Phase.PACK_GRADS].in_step_s == 0, "both passes were sent while backward ran"
    assert last.phases[Phase.PACK_GRADS].outside_step_s > 0


@ranks(2)
def test_a_step_that_fails_ends_its_parts(ctx: RankContext) -> None:
    model = seeded(mlp, 0)
    optimizer = shard(model, torch.optim.AdamW, config=replace(ZERO2, nonfinite=NonFiniteGrads("raise")), **ADAMW)
    torch.autograd.backward(regression(model, 0) * float("nan"))
    with pytest.raises(RuntimeError, match="not finite"):
        optimizer.step()
    clock = optimizer._engine.comm.profiler
    assert (clock.current_timer, clock.is_in_step) == (None, False)
    assert clock.last_step.phases[Phase.CHECK_NONFINITE].num_calls == 1
    assert Phase.INNER_STEP not in clock.last_step.phases


def test_the_page_lists_all_labels() -> None:
    rows = re.findall(r"^\| `zeroshard: ([^`]+)` \| (.+?) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == [(it.text, it.description) for it in Phase]
