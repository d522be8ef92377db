"""The same training at other timings, over and over: every bit is the same.

`ZEROSHARD_FAULTS` makes many more of them; `make faults` sets it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.support import RankContext, ranks
from tests.support.concurrency import (
    ConcurrentRun,
    by_drop_in,
    by_shard,
    shuffled,
    trained_beside_threads,
    trained_by_two,
    trained_in_threads,
    two_groups,
)
from tests.support.fault_report import Count, keep_count
from tests.support.oracles import ZERO1, ZERO2, all_equal, mlp, regression, seeded, values_of
from tests.support.tiers import sampled
from zeroshard import (
    ConsistencyCheck,
    NonFiniteGrads,
    ParamRule,
    PeerCheckpoint,
    ShardedOptimizer,
    WholeParams,
    ZeroConfig,
    checkpoint,
    matrix_params,
    remaining_params,
    shard,
)
from zeroshard.comm.transport import ThreadedWork
from zeroshard.comm.work import PendingWork
from zeroshard.engine.param_gather import ParamAllGather

NUM_SEEDS = 20 if os.environ.get("ZEROSHARD_FAULTS") else 2
NUM_STEPS = 4
OVERLAP = replace(ZERO2, overlap_param_gather=True)
ALL_CHECKS = replace(
    OVERLAP,
    peer_checkpoint=PeerCheckpoint(every=1),
    consistency_check=ConsistencyCheck(every=1),
    nonfinite=NonFiniteGrads("skip"),
)

CONFIGS = {"zero2": ZERO2, "zero1": ZERO1, "overlap": OVERLAP}
few_configs = sampled("config", CONFIGS)

MakeOptimizer = Callable[[nn.Module], ShardedOptimizer]


def make_adamw(config: ZeroConfig, **where: Any) -> MakeOptimizer:
    return lambda model: shard(model, torch.optim.AdamW, config=config, lr=0.05, **where)


def make_with_rules(model: nn.Module) -> ShardedOptimizer:
    rules = [
        ParamRule(matrix_params(), torch.optim.Muon, lr=0.02),
        ParamRule(remaining_params, torch.optim.AdamW, lr=0.05),
    ]
    return shard(model, rules, config=ZERO2)


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "zero2": make_adamw(ZERO2),
    "zero1": make_adamw(ZERO1),
    "one-bucket": make_adamw(ZeroConfig()),
    "overlap": make_adamw(OVERLAP),
    "whole": make_adamw(replace(ZERO2, partition=WholeParams())),
    "hybrid": make_adamw(ZERO2, shard_group_size=2),
    "hybrid-overlap": make_adamw(OVERLAP, shard_group_size=2),
    "rules": make_with_rules,
    "copies": make_adamw(ALL_CHECKS),
}


def train(ctx: RankContext, make: MakeOptimizer, folder: Path | None = None) -> list[Tensor]:
    """Two passes for every other step, one of them local in turn, and unused layers; a save in the background after
    each step if there is a folder."""
    model = seeded(mlp, 0)
    optimizer = make(model)
    for number in range(NUM_STEPS):
        for turn in range(1 + number % 2):
            with optimizer.no_sync() if turn < number // 3 else nullcontext():
                part = model[:4] if (ctx.rank + number) % 3 == 0 else model  # type: ignore[index]
                torch.autograd.backward(regression(part, 10 * number + turn))
        optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        if folder:
            saving = checkpoint.async_save(folder, step=number, model=model, optimizer=optimizer, keep=1)
    optimizer.wait_for_params()
    if folder:
        saving.wait()
        checkpoint.load(folder, model=model, optimizer=optimizer)
    return [*values_of(model), *optimizer_state(optimizer)]


def optimizer_state(optimizer: Any) -> list[Tensor]:
    held = [entry for inner in optimizer.inner_optimizers for entry in inner.state.values()]
    return [value.clone() for entry in held for value in entry.values() if isinstance(value, Tensor)]


@sampled("way", OPTIMIZERS)
@ranks(4, timeout=60 + 3 * NUM_SEEDS)
def test_results_do_not_depend_on_timing(ctx: RankContext, way: str) -> None:
    expected = train(ctx, OPTIMIZERS[way])
    for seed in range(NUM_SEEDS):
        with shuffled(seed) as delays:
            found = train(ctx, OPTIMIZERS[way])
        assert all_equal([expected, found]), f"at the timing of seed {seed}"
        assert delays.count > 50, "hardly anything was delayed"
    record_count(ctx, way, NUM_SEEDS)


def record_count(ctx: RankContext, case: str, count: int) -> None:
    if ctx.rank == 0:
        keep_count(Count("timings", f"{ctx.world_size} ranks, {case}", "all parameters and all state compared", count))


@sampled("way", ["zero2", "overlap", "hybrid"])
@ranks(4, timeout=60 + 6 * NUM_SEEDS)
def test_async_save_results_do_not_depend_on_timing(ctx: RankContext, tmp_path: Path, way: str) -> None:
    expected, seeds = train(ctx, OPTIMIZERS[way]), max(1, NUM_SEEDS // 2)
    for seed in range(seeds):
        with shuffled(seed):
            found = train(ctx, OPTIMIZERS[way], tmp_path / str(seed))
        assert all_equal([expected, found]), f"at the timing of seed {seed}"
    record_count(ctx, f"{way}, saves in the background", seeds)


# ---- several things at once


def train_two_optimizers(config: ZeroConfig, second: Callable[..., Optimizer]) -> list[Tensor]:
    model, optimizers = trained_by_two(config, second)
    return [*values_of(model), *(value for it in optimizers for value in optimizer_state(it))]


def values_of_runs(*runs: ConcurrentRun) -> list[Tensor]:
    for run in runs:
        run.zero.wait_for_params()
    return [value for run in runs for value in (*values_of(run.model), *optimizer_state(run.zero))]


def assert_independent_of_timing(ctx: RankContext, case: str, make: Callable[[], list[Tensor]]) -> None:
    """At every timing, made anew each time, as without delays."""
    expected, seeds = make(), max(2, NUM_SEEDS // 2)
    for seed in range(seeds):
        with shuffled(seed) as delays:
            found = make()
        assert all_equal([expected, found]), f"at the timing of seed {seed}"
        assert delays.count > 50, "hardly anything was delayed"
    record_count(ctx, case, seeds)


@sampled("second", [by_shard, by_drop_in], ids=["shard", "drop-in"])
@few_configs
@ranks(3, timeout=60 + 6 * NUM_SEEDS)
def test_two_optimizers_do_not_depend_on_timing(
    ctx: RankContext, config: str, second: Callable[..., Optimizer]
) -> None:
    case = f"two optimizers on one model{'' if second is by_shard else ', one of them the drop-in'}, {config}"
    assert_independent_of_timing(ctx, case, lambda: train_two_optimizers(CONFIGS[config], second))


@sampled("overlapping", [False, True], ids=["same", "overlapping"])
@few_configs
@ranks(4, timeout=60 + 6 * NUM_SEEDS)
def test_two_groups_in_two_threads_do_not_depend_on_timing(ctx: RankContext, config: str, overlapping: bool) -> None:
    groups = two_groups(overlapping=overlapping)
    case = f"two groups {'that share ranks' if overlapping else 'of all ranks'}, in two threads, {config}"
    assert_independent_of_timing(ctx, case, lambda: values_of_runs(*trained_in_threads(groups, CONFIGS[config])))


@few_configs
@ranks(3, timeout=60 + 6 * NUM_SEEDS)
def test_training_beside_threads_does_not_depend_on_timing(ctx: RankContext, config: str) -> None:
    assert_independent_of_timing(
        ctx,
        f"beside a data loader's and other threads, {config}",
        lambda: values_of_runs(trained_beside_threads(CONFIGS[config])),
    )


# ---- would one be found?


def skip_reduce_wait(_: ThreadedWork) -> None:
    """They are read as they are."""


def skip_param_wait(sync: ParamAllGather, buckets: Iterable[int]) -> None:
    """They are still on their way, and stay alive."""
    UNWAITED_WORK.extend(sync._in_flight.pop(bucket) for bucket in list(buckets) if bucket in sync._in_flight)


UNWAITED_WORK: list[PendingWork] = []


@pytest.mark.parametrize(
    ("owner", "careless", "threads"),
    [
        (ThreadedWork, skip_reduce_wait, 1),
        (ParamAllGather, skip_param_wait, 1),
        (ParamAllGather, skip_param_wait, 2),
    ],
)
@ranks(4)
def test_injected_race_is_detected(
    ctx: RankContext, owner: Any, careless: Any, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At one of a few timings."""
    groups = two_groups(overlapping=False)

    def make() -> list[Tensor]:
        return train(ctx, OPTIMIZERS["zero2"]) if threads == 1 else values_of_runs(*trained_in_threads(groups, ZERO2))

    expected = make()
    for seed in range(20):
        with monkeypatch.context() as patch, shuffled(seed):
            patch.setattr(owner, "wait", careless)
            if owner is ThreadedWork:
                patch.setattr(owner, "is_ready", lambda *_: True)  # which a backward pass waits for as well
            mine = make()
        for pending in UNWAITED_WORK:
            pending.wait()
        UNWAITED_WORK.clear()
        if not all(ctx.gather(all_equal([expected, mine]))):
            return
    pytest.fail("a race went unnoticed")
