"""Training gives the same bits with any timing of messages, threads and locks.

`ZEROSHARD_FAULTS` tries many more timings; `make faults` sets it.
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
    dropin_sgd,
    random_delays,
    shard_adamw,
    train_beside_threads,
    train_in_threads,
    train_with_two_optimizers,
    two_groups,
)
from tests.support.fault_report import Count, keep_count
from tests.support.oracles import ZERO1, ZERO2, all_equal, clone_values, make_seeded, mlp, regression
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
from zeroshard.engine.param_sync import ParamAllGather

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


def make_adamw(config: ZeroConfig, **group_options: Any) -> MakeOptimizer:
    return lambda model: shard(model, torch.optim.AdamW, config=config, lr=0.05, **group_options)


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


def train(ctx: RankContext, make: MakeOptimizer, directory: Path | None = None) -> list[Tensor]:
    """Train with one or two passes per step, some of them local, and with unused layers. Return values and state.

    With a directory, save in the background after each step and load the last save at the end.
    """
    model = make_seeded(mlp, 0)
    optimizer = make(model)
    for number in range(NUM_STEPS):
        for pass_number in range(1 + number % 2):
            with optimizer.no_sync() if pass_number < number // 3 else nullcontext():
                used_layers = model[:4] if (ctx.rank + number) % 3 == 0 else model  # type: ignore[index]
                torch.autograd.backward(regression(used_layers, 10 * number + pass_number))
        optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        if directory:
            save_handle = checkpoint.async_save(directory, step=number, model=model, optimizer=optimizer, keep=1)
    optimizer.wait_for_params()
    if directory:
        save_handle.wait()
        checkpoint.load(directory, model=model, optimizer=optimizer)
    return [*clone_values(model), *optimizer_state(optimizer)]


def optimizer_state(optimizer: Any) -> list[Tensor]:
    entries = [entry for inner in optimizer.inner_optimizers for entry in inner.state.values()]
    return [value.clone() for entry in entries for value in entry.values() if isinstance(value, Tensor)]


@sampled("name", OPTIMIZERS)
@ranks(4, timeout=60 + 3 * NUM_SEEDS)
def test_results_do_not_depend_on_timing(ctx: RankContext, name: str) -> None:
    expected = train(ctx, OPTIMIZERS[name])
    for seed in range(NUM_SEEDS):
        with random_delays(seed) as delays:
            found = train(ctx, OPTIMIZERS[name])
        assert all_equal([expected, found]), f"results differ with the delays of seed {seed}"
        assert delays.count > 50, "too few delays"
    record_count(ctx, name, NUM_SEEDS)


def record_count(ctx: RankContext, case: str, count: int) -> None:
    if ctx.rank == 0:
        keep_count(Count("timings", f"{ctx.world_size} ranks, {case}", "all parameters and all state", count))


@sampled("name", ["zero2", "overlap", "hybrid"])
@ranks(4, timeout=60 + 6 * NUM_SEEDS)
def test_async_save_results_do_not_depend_on_timing(ctx: RankContext, tmp_path: Path, name: str) -> None:
    expected, seeds = train(ctx, OPTIMIZERS[name]), max(1, NUM_SEEDS // 2)
    for seed in range(seeds):
        with random_delays(seed):
            found = train(ctx, OPTIMIZERS[name], tmp_path / str(seed))
        assert all_equal([expected, found]), f"results differ with the delays of seed {seed}"
    record_count(ctx, f"{name}, asynchronous saves", seeds)


# ---- several optimizers, process groups and threads


def train_two_optimizers(config: ZeroConfig, second: Callable[..., Optimizer]) -> list[Tensor]:
    model, optimizers = train_with_two_optimizers(config, second)
    return [*clone_values(model), *(value for optimizer in optimizers for value in optimizer_state(optimizer))]


def values_of_runs(*runs: ConcurrentRun) -> list[Tensor]:
    for run in runs:
        run.zero.wait_for_params()
    return [value for run in runs for value in (*clone_values(run.model), *optimizer_state(run.zero))]


def assert_independent_of_timing(ctx: RankContext, case: str, run: Callable[[], list[Tensor]]) -> None:
    """Check that results with random delays equal those without, for several seeds."""
    expected, seeds = run(), max(2, NUM_SEEDS // 2)
    for seed in range(seeds):
        with random_delays(seed) as delays:
            found = run()
        assert all_equal([expected, found]), f"results differ with the delays of seed {seed}"
        assert delays.count > 50, "too few delays"
    record_count(ctx, case, seeds)


@sampled("second", [shard_adamw, dropin_sgd], ids=["shard", "drop-in"])
@few_configs
@ranks(3, timeout=60 + 6 * NUM_SEEDS)
def test_two_optimizers_do_not_depend_on_timing(
    ctx: RankContext, config: str, second: Callable[..., Optimizer]
) -> None:
    case = f"two optimizers on one model{'' if second is shard_adamw else ', one is the drop-in'}, {config}"
    assert_independent_of_timing(ctx, case, lambda: train_two_optimizers(CONFIGS[config], second))


@sampled("overlapping", [False, True], ids=["same", "overlapping"])
@few_configs
@ranks(4, timeout=60 + 6 * NUM_SEEDS)
def test_two_groups_in_two_threads_do_not_depend_on_timing(ctx: RankContext, config: str, overlapping: bool) -> None:
    groups = two_groups(overlapping=overlapping)
    case = f"two groups {'that overlap' if overlapping else 'of all ranks'} in two threads, {config}"
    assert_independent_of_timing(ctx, case, lambda: values_of_runs(*train_in_threads(groups, CONFIGS[config])))


@few_configs
@ranks(3, timeout=60 + 6 * NUM_SEEDS)
def test_training_beside_threads_does_not_depend_on_timing(ctx: RankContext, config: str) -> None:
    assert_independent_of_timing(
        ctx,
        f"next to data-loader and other threads, {config}",
        lambda: values_of_runs(train_beside_threads(CONFIGS[config])),
    )


# ---- would these tests detect a race?


def skip_reduce_wait(_: ThreadedWork) -> None:
    """Return although the reduced gradients may not have arrived yet."""


def skip_param_wait(gather: ParamAllGather, buckets: Iterable[int]) -> None:
    """Return although the parameters are still in flight; keep the work alive."""
    UNWAITED_WORK.extend(gather._in_flight.pop(bucket) for bucket in list(buckets) if bucket in gather._in_flight)


UNWAITED_WORK: list[PendingWork] = []


@pytest.mark.parametrize(
    ("cls", "broken_wait", "threads"),
    [
        (ThreadedWork, skip_reduce_wait, 1),
        (ParamAllGather, skip_param_wait, 1),
        (ParamAllGather, skip_param_wait, 2),
    ],
)
@ranks(4)
def test_injected_race_is_detected(
    ctx: RankContext, cls: Any, broken_wait: Any, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Delays of at least one of a few seeds expose the race."""
    groups = two_groups(overlapping=False)

    def run() -> list[Tensor]:
        return train(ctx, OPTIMIZERS["zero2"]) if threads == 1 else values_of_runs(*train_in_threads(groups, ZERO2))

    expected = run()
    for seed in range(20):
        with monkeypatch.context() as patch, random_delays(seed):
            patch.setattr(cls, "wait", broken_wait)
            if cls is ThreadedWork:
                patch.setattr(cls, "is_ready", lambda *_: True)  # backward waits for it, too
            found = run()
        for pending in UNWAITED_WORK:
            pending.wait()
        UNWAITED_WORK.clear()
        if not all(ctx.gather(all_equal([expected, found]))):
            return
    pytest.fail("a race went unnoticed")
