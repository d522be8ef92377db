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

SEEDS = 20 if os.environ.get("ZEROSHARD_FAULTS") else 2
STEPS = 4
OVERLAP = replace(ZERO2, overlap_param_gather=True)
LOOKING = replace(
    OVERLAP,
    peer_checkpoint=PeerCheckpoint(every=1),
    consistency_check=ConsistencyCheck(every=1),
    nonfinite=NonFiniteGrads("skip"),
)

CONFIGS = {"zero2": ZERO2, "zero1": ZERO1, "overlap": OVERLAP}
few_configs = sampled("config", CONFIGS)

Make = Callable[[nn.Module], ShardedOptimizer]


def adamw(config: ZeroConfig, **where: Any) -> Make:
    return lambda model: shard(model, torch.optim.AdamW, config=config, lr=0.05, **where)


def by_rules(model: nn.Module) -> ShardedOptimizer:
    rules = [
        ParamRule(matrix_params(), torch.optim.Muon, lr=0.02),
        ParamRule(remaining_params, torch.optim.AdamW, lr=0.05),
    ]
    return shard(model, rules, config=ZERO2)


WAYS: dict[str, Make] = {
    "zero2": adamw(ZERO2),
    "zero1": adamw(ZERO1),
    "one-bucket": adamw(ZeroConfig()),
    "overlap": adamw(OVERLAP),
    "whole": adamw(replace(ZERO2, partition=WholeParams())),
    "hybrid": adamw(ZERO2, shard_group_size=2),
    "hybrid-overlap": adamw(OVERLAP, shard_group_size=2),
    "rules": by_rules,
    "copies": adamw(LOOKING),
}


def trained(ctx: RankContext, make: Make, folder: Path | None = None) -> list[Tensor]:
    """Two passes for every other step, one of them local in turn, and unused layers; a save in the background after
    each step if there is a folder."""
    model = seeded(mlp, 0)
    optimizer = make(model)
    for number in range(STEPS):
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
    return [*values_of(model), *state_of_all(optimizer)]


def state_of_all(optimizer: Any) -> list[Tensor]:
    held = [entry for inner in optimizer.inner_optimizers for entry in inner.state.values()]
    return [value.clone() for entry in held for value in entry.values() if isinstance(value, Tensor)]


@sampled("way", WAYS)
@ranks(4, timeout=60 + 3 * SEEDS)
def test_any_timing(ctx: RankContext, way: str) -> None:
    expected = trained(ctx, WAYS[way])
    for seed in range(SEEDS):
        with shuffled(seed) as delays:
            found = trained(ctx, WAYS[way])
        assert all_equal([expected, found]), f"at the timing of seed {seed}"
        assert delays.count > 50, "hardly anything was delayed"
    keep(ctx, way, SEEDS)


def keep(ctx: RankContext, case: str, count: int) -> None:
    if ctx.rank == 0:
        keep_count(Count("timings", f"{ctx.world_size} ranks, {case}", "all parameters and all state compared", count))


@sampled("way", ["zero2", "overlap", "hybrid"])
@ranks(4, timeout=60 + 6 * SEEDS)
def test_any_timing_of_saves_in_the_background(ctx: RankContext, tmp_path: Path, way: str) -> None:
    expected, seeds = trained(ctx, WAYS[way]), max(1, SEEDS // 2)
    for seed in range(seeds):
        with shuffled(seed):
            found = trained(ctx, WAYS[way], tmp_path / str(seed))
        assert all_equal([expected, found]), f"at the timing of seed {seed}"
    keep(ctx, f"{way}, saves in the background", seeds)


# ---- several things at once


def of_two_optimizers(config: ZeroConfig, second: Callable[..., Optimizer]) -> list[Tensor]:
    model, optimizers = trained_by_two(config, second)
    return [*values_of(model), *(value for it in optimizers for value in state_of_all(it))]


def of_runs(*runs: ConcurrentRun) -> list[Tensor]:
    for run in runs:
        run.zero.wait_for_params()
    return [value for run in runs for value in (*values_of(run.model), *state_of_all(run.zero))]


def require_the_same(ctx: RankContext, case: str, make: Callable[[], list[Tensor]]) -> None:
    """At every timing, made anew each time, as without delays."""
    expected, seeds = make(), max(2, SEEDS // 2)
    for seed in range(seeds):
        with shuffled(seed) as delays:
            found = make()
        assert all_equal([expected, found]), f"at the timing of seed {seed}"
        assert delays.count > 50, "hardly anything was delayed"
    keep(ctx, case, seeds)


@sampled("second", [by_shard, by_drop_in], ids=["shard", "drop-in"])
@few_configs
@ranks(3, timeout=60 + 6 * SEEDS)
def test_any_timing_of_two_optimizers(ctx: RankContext, config: str, second: Callable[..., Optimizer]) -> None:
    case = f"two optimizers on one model{'' if second is by_shard else ', one of them the drop-in'}, {config}"
    require_the_same(ctx, case, lambda: of_two_optimizers(CONFIGS[config], second))


@sampled("overlapping", [False, True], ids=["same", "overlapping"])
@few_configs
@ranks(4, timeout=60 + 6 * SEEDS)
def test_any_timing_of_two_groups_in_two_threads(ctx: RankContext, config: str, overlapping: bool) -> None:
    groups = two_groups(overlapping=overlapping)
    case = f"two groups {'that share ranks' if overlapping else 'of all ranks'}, in two threads, {config}"
    require_the_same(ctx, case, lambda: of_runs(*trained_in_threads(groups, CONFIGS[config])))


@few_configs
@ranks(3, timeout=60 + 6 * SEEDS)
def test_any_timing_beside_threads(ctx: RankContext, config: str) -> None:
    require_the_same(
        ctx,
        f"beside a data loader's and other threads, {config}",
        lambda: of_runs(trained_beside_threads(CONFIGS[config])),
    )


# ---- would one be found?


def nobody_waits_for_sums(_: ThreadedWork) -> None:
    """They are read as they are."""


def nobody_waits_for_params(sync: ParamAllGather, buckets: Iterable[int]) -> None:
    """They are still on their way, and stay alive."""
    RACING.extend(sync._in_flight.pop(bucket) for bucket in list(buckets) if bucket in sync._in_flight)


RACING: list[PendingWork] = []


@pytest.mark.parametrize(
    ("owner", "careless", "threads"),
    [
        (ThreadedWork, nobody_waits_for_sums, 1),
        (ParamAllGather, nobody_waits_for_params, 1),
        (ParamAllGather, nobody_waits_for_params, 2),
    ],
)
@ranks(4)
def test_a_race_would_be_found(
    ctx: RankContext, owner: Any, careless: Any, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At one of a few timings."""
    groups = two_groups(overlapping=False)

    def make() -> list[Tensor]:
        return trained(ctx, WAYS["zero2"]) if threads == 1 else of_runs(*trained_in_threads(groups, ZERO2))

    expected = make()
    for seed in range(20):
        with monkeypatch.context() as patch, shuffled(seed):
            patch.setattr(owner, "wait", careless)
            if owner is ThreadedWork:
                patch.setattr(owner, "is_ready", lambda *_: True)  # which a backward pass waits for as well
            mine = make()
        for pending in RACING:
            pending.wait()
        RACING.clear()
        if not all(ctx.gather(all_equal([expected, mine]))):
            return
    pytest.fail("a race went unnoticed")
