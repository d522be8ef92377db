"""Traces of `torch.profiler` have a range for every phase of a step, in order."""

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

from tests.distributed.test_offload import force_offload
from tests.support import RankContext, ranks
from tests.support.oracles import ADAMW, TINY, ZERO2, batch, make_seeded, mlp, regression
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

DOCS_PAGE = Path(__file__).parents[2] / "docs" / "profiling.md"


def trace_phases(action: Callable[[], object], path: Path) -> list[str]:
    """Names of the phases in a trace of `action`, in the order in which they begin."""
    with profile(activities=[ProfilerActivity.CPU]) as traced:
        action()
    traced.export_chrome_trace(str(path))
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    ranges = [event for event in events if event.get("ph") == "X" and event["name"].startswith(TRACE_PREFIX)]
    return [
        event["name"].removeprefix(TRACE_PREFIX)
        for event in sorted(ranges, key=lambda event: (event["ts"], -event["dur"]))
    ]


def strip_phase_suffixes(phases: list[str]) -> set[str]:
    """Names without bucket numbers and class names; each must be the name of a `Phase`."""
    known = {phase.text for phase in Phase}
    stripped = {re.sub(r" of (bucket \d+|[A-Z]\w+)$", "", label) for label in phases}
    assert stripped <= known
    return stripped


def first_index(phases: list[str], name: str) -> int:
    return next(index for index, label in enumerate(phases) if label.startswith(name))


def train_one_step(model: nn.Module, optimizer: Any, number: int, *, clip: bool = True) -> None:
    torch.autograd.backward(model(batch(number).to(next(model.parameters()).dtype)).float().square().mean())
    if clip:
        optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()


def assert_phase_order(phases: list[str], *names: str) -> None:
    indices = [first_index(phases, name) for name in names]
    assert indices == sorted(indices), phases


@ranks(1, 2, 3)
def test_every_phase_of_a_step_is_traced_in_order(ctx: RankContext, tmp_path: Path) -> None:
    config = replace(
        ZERO2,
        overlap_param_gather=True,
        master_dtype=torch.float32,
        consistency_check=ConsistencyCheck(every=1),
        nonfinite=NonFiniteGrads("raise"),
        peer_checkpoint=PeerCheckpoint(every=1),
    )
    model = make_seeded(mlp, 0).bfloat16()
    with pytest.warns(UserWarning, match="no effect on one rank") if ctx.world_size == 1 else nullcontext():
        optimizer = shard(model, torch.optim.AdamW, config=config, **ADAMW)
    train_one_step(model, optimizer, 0)
    labels = trace_phases(lambda: train_one_step(model, optimizer, 1), tmp_path / f"{ctx.rank}.json")
    num_buckets = len(optimizer.layout.buckets)
    assert num_buckets >= 2
    local_phases = ["clip gradients", "synchronize gradients", "step", "check consistency"]
    local_phases += [
        "check for non-finite gradients",
        "assign gradients",
        "inner step of AdamW",
        "round master weights",
    ]
    local_phases += ["peer checkpoint"]
    communication_phases = [
        "wait for module parameters",
        "wait for parameters of bucket 0",
        "send gradients of bucket 0",
    ]
    communication_phases += ["consensus", "receive gradients of bucket 0", "send parameters of bucket 0"]
    assert set(local_phases) <= set(labels)
    assert_phase_order(
        labels, "pack gradients", "clip", "synchronize", "step", "check con", "check for non", "assign", "inner"
    )
    assert_phase_order(labels, "inner step", "round master weights", "peer checkpoint")
    if ctx.world_size == 1:
        assert strip_phase_suffixes(labels).isdisjoint({label.partition(" of ")[0] for label in communication_phases})
        return
    assert set(communication_phases) <= set(labels)
    assert_phase_order(
        labels, "wait for module", "wait for parameters", "pack", "send gradients", "receive gradients", "step"
    )
    assert_phase_order(labels, "round master weights", "send parameters")
    packed = {
        f"pack gradients of bucket {bucket.index}" for bucket in optimizer.layout.buckets if len(bucket.slots) > 1
    }
    assert {label for label in labels if label.startswith("pack")} == packed, "a single gradient is sent without a copy"
    for name in ("send gradients", "receive gradients", "send parameters", "wait for parameters"):
        assert {f"{name} of bucket {number}" for number in range(num_buckets)} <= set(labels)
    strip_phase_suffixes(labels)


@ranks(1, 2)
def test_whole_param_steps_are_traced(ctx: RankContext, tmp_path: Path) -> None:
    model = make_seeded(mlp, 0)
    optimizer = ZeroRedundancyOptimizer(model.named_parameters(), torch.optim.AdamW, **ADAMW)

    def step() -> None:
        torch.autograd.backward(regression(model, 0))
        optimizer.step(lambda: None)

    step()
    labels = trace_phases(step, tmp_path / f"{ctx.rank}.json")
    assert_phase_order(
        labels, "step", "inner step of AdamW", *(["closure", "send parameters"] if ctx.world_size > 1 else [])
    )
    expected = {"step", "inner step"}
    communication_phases = {"closure", "consensus", "send parameters", "wait for parameters"}
    assert strip_phase_suffixes(labels) == expected | (communication_phases if ctx.world_size > 1 else set())


@ranks(1, 2)
def test_offload_transfers_are_traced(ctx: RankContext, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    with force_offload("cpu"):
        config = ZeroConfig(partition=FlatShards(64 * 64 * 4), offload=CPUOffload(), master_dtype=torch.float64)
        optimizer = shard(model, torch.optim.AdamW, config=config, **ADAMW)

        def step() -> None:
            torch.autograd.backward(model(torch.ones(1, 64)).sum())
            optimizer.step()

        step()
        labels = trace_phases(step, tmp_path / f"{ctx.rank}.json")
        nbytes = {memory.category: memory.nbytes for memory in optimizer.report().memory}
        assert nbytes["master weights"] == 8 * 2 * 64 * 64 / ctx.world_size
    transfers = [label for label in labels if label.startswith(("prefetch", "inner", "round", "offload"))]
    update = ["inner step of AdamW", "round master weights"]
    assert transfers == [
        *("prefetch state of bucket 0", "prefetch state of bucket 1", *update, "offload state of bucket 0"),
        *(*update, "offload state of bucket 1", "offload state", "round master weights"),
    ]


@ranks(2)
def test_inner_steps_are_traced_per_optimizer_class(ctx: RankContext, tmp_path: Path) -> None:
    model = make_seeded(mlp, 0)
    rules = [
        ParamRule(matrix_params(), torch.optim.SGD, lr=0.1),
        ParamRule(remaining_params, torch.optim.AdamW, lr=0.1),
    ]
    optimizer = shard(model, rules)
    labels = trace_phases(lambda: train_one_step(model, optimizer, 0), tmp_path / f"{ctx.rank}.json")
    assert [label for label in labels if label.startswith("inner step")] == ["inner step of SGD", "inner step of AdamW"]


@ranks(2)
def test_overlapped_ddp_steps_are_traced(ctx: RankContext, tmp_path: Path) -> None:
    model = DistributedDataParallel(make_seeded(mlp, 0))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
    hook = ddp_hooks.hook_with_zero_step(allreduce_comm_hook, model, optimizer)
    model.register_comm_hook(None, hook)
    for number in range(3):
        torch.autograd.backward(regression(model, number))
    labels = trace_phases(lambda: torch.autograd.backward(regression(model, 3)), tmp_path / f"{ctx.rank}.json")
    assert strip_phase_suffixes(labels) == {
        "wait for DDP",
        "inner step",
        "send parameters",
        "wait for parameters",
        "consensus",
    }
    assert optimizer._engine.profiler.last_step.phases[Phase.INNER_STEP].num_calls >= 1


def allreduce_comm_hook(_: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    return allreduce_hook(None, bucket)  # type: ignore[arg-type]


@ranks(1, 2)
def test_state_dicts_and_checkpoints_are_traced(ctx: RankContext, tmp_path: Path) -> None:
    model = make_seeded(mlp, 0)
    optimizer = shard(model, torch.optim.AdamW, config=ZERO2, **ADAMW)
    train_one_step(model, optimizer, 0)
    folder = ctx.gather(str(tmp_path))[0]

    def save_and_load() -> None:
        state = optimizer.full_state_dict(to=0)
        checkpoint.save(folder, step=1, model=model, optimizer=optimizer)
        checkpoint.load(folder, model=model, optimizer=optimizer)
        if ctx.world_size == 1:
            optimizer.load_state_dict(state or {})

    labels = trace_phases(save_and_load, tmp_path / f"{ctx.rank}.json")
    assert_phase_order(
        labels, "gather state", "save: collect", "save: write", "save: publish", "load: validate", "load: read"
    )
    assert "load state" in labels


@ranks(2)
def test_backward_under_no_sync_traces_no_phases(ctx: RankContext, tmp_path: Path) -> None:
    model = make_seeded(mlp, 0)
    optimizer = shard(model, torch.optim.AdamW, config=ZeroConfig(partition=TINY), **ADAMW)

    def backward_under_no_sync() -> None:
        with optimizer.no_sync():
            torch.autograd.backward(regression(model, 0))
        optimizer.zero_grad()

    assert trace_phases(backward_under_no_sync, tmp_path / f"{ctx.rank}.json") == []


@ranks(1, 2)
def test_profiler_keeps_times_of_the_last_step(ctx: RankContext) -> None:
    model = make_seeded(mlp, 0)
    optimizer = shard(model, torch.optim.AdamW, config=ZERO2, **ADAMW)
    profiler = optimizer._engine.profiler
    assert profiler.last_step.step_s == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grad_reducer, "WAIT_BUDGET_S", 30.0)
        for number in range(3):
            torch.autograd.backward(regression(model, number))
            torch.autograd.backward(regression(model, number))
            optimizer.step()
            optimizer.zero_grad()
    last_step = profiler.last_step
    assert profiler.current_timer is None
    assert 0 < last_step.step_s <= last_step.iteration_s
    assert (
        sum(phase_time.in_step_s + phase_time.outside_step_s for phase_time in last_step.phases.values())
        <= last_step.iteration_s
    )
    assert last_step.phases[Phase.STEP].num_calls == last_step.phases[Phase.INNER_STEP].num_calls == 1
    assert last_step.phases[Phase.INNER_STEP].outside_step_s == 0
    packed = [bucket for bucket in optimizer.layout.buckets if ctx.world_size == 1 or len(bucket.slots) > 1]
    assert last_step.phases[Phase.PACK_GRADS].num_calls == 2 * len(packed)
    assert last_step.phases[Phase.PACK_GRADS].in_step_s == 0, "both passes were sent while backward ran"
    assert last_step.phases[Phase.PACK_GRADS].outside_step_s > 0


@ranks(2)
def test_failed_step_ends_its_phases(ctx: RankContext) -> None:
    model = make_seeded(mlp, 0)
    optimizer = shard(model, torch.optim.AdamW, config=replace(ZERO2, nonfinite=NonFiniteGrads("raise")), **ADAMW)
    torch.autograd.backward(regression(model, 0) * float("nan"))
    with pytest.raises(RuntimeError, match="not finite"):
        optimizer.step()
    profiler = optimizer._engine.profiler
    assert (profiler.current_timer, profiler.is_in_step) == (None, False)
    assert profiler.last_step.phases[Phase.CHECK_NONFINITE].num_calls == 1
    assert Phase.INNER_STEP not in profiler.last_step.phases


def test_docs_page_lists_all_phases() -> None:
    rows = re.findall(r"^\| `zeroshard: ([^`]+)` \| (.+?) \|$", DOCS_PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == [(phase.text, phase.description) for phase in Phase]
