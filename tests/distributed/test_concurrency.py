"""Concurrent optimizers, process groups and threads: bit for bit, each computes what it computes alone."""

from __future__ import annotations

import itertools
import multiprocessing
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from tests.support import RankContext, ranks
from tests.support.concurrency import (
    STEPS,
    TIMEOUT_S,
    ConcurrentRun,
    backward,
    dropin_sgd,
    inputs_of,
    set_mean_grads,
    shard_adamw,
    train_beside_threads,
    train_in_threads,
    train_with_two_optimizers,
    two_groups,
)
from tests.support.oracles import ZERO1, ZERO2, assert_same, make_seeded, mlp, some_configs
from tests.support.tiers import sampled
from zeroshard import ZeroConfig, checkpoint
from zeroshard.checkpoint import saver

# ---- several optimizers


@some_configs
@sampled("second", [shard_adamw, dropin_sgd], ids=["shard", "drop-in"])
@ranks(2, 3)
def test_two_optimizers_on_one_model(ctx: RankContext, config: ZeroConfig, second: Callable[..., Optimizer]) -> None:
    """One backward pass for both, then both steps, in alternating order."""
    model, _ = train_with_two_optimizers(config, second)
    plain_model = make_seeded(mlp, 0)
    plain_params = [*plain_model.parameters()]
    plain_optimizers: list[Optimizer] = [torch.optim.AdamW(plain_params[::2], lr=0.05)]
    plain_optimizers.append(
        (torch.optim.AdamW if second is shard_adamw else torch.optim.SGD)(plain_params[1::2], lr=0.05)
    )
    for number in range(STEPS):
        set_mean_grads(plain_model, number, list(range(ctx.world_size)))
        for plain_optimizer in plain_optimizers:
            plain_optimizer.step()
    assert_same(model.state_dict(), plain_model.state_dict())


# ---- several groups


@sampled("overlapping", [False, True], ids=["same", "overlapping"])
@some_configs
@ranks(2, 4)
def test_two_process_groups_in_two_threads(ctx: RankContext, config: ZeroConfig, overlapping: bool) -> None:
    for run in train_in_threads(two_groups(overlapping=overlapping), config):
        run.check()


@sampled("overlapping", [False, True], ids=["same", "overlapping"])
@some_configs
@ranks(3)
def test_two_process_groups_in_one_thread(ctx: RankContext, config: ZeroConfig, overlapping: bool) -> None:
    """Alternately; every other iteration makes both backward passes before both steps."""
    groups = two_groups(overlapping=overlapping)
    runs = [ConcurrentRun(group, config, seed) for seed, group in enumerate(groups) if group is not None]
    for number in range(STEPS):
        if number % 2:
            for run in runs:
                run.step(number)
            continue
        for run in runs:
            backward(run.model, inputs_of(number, ctx.rank))
        for run in runs:
            run.zero.step()
            run.zero.zero_grad()
    for run in runs:
        run.check()


@ranks(2, 3)
def test_optimizer_construction_while_another_steps(ctx: RankContext) -> None:
    """Another thread constructs them, in a separate process group."""
    groups = two_groups(overlapping=False)
    run = ConcurrentRun(groups[0], ZERO2)
    with ThreadPoolExecutor() as pool:
        future = pool.submit(lambda: [ConcurrentRun(groups[1], ZERO2, number) for number in range(4)])
        run.train(8)
        constructed = future.result(TIMEOUT_S)
    run.check(8)
    constructed[-1].train()
    constructed[-1].check()


@ranks(1, 2, 3)
def test_step_waits_for_param_gathers_of_two_models(ctx: RankContext) -> None:
    """A third optimizer's step waits for both."""
    runs = [ConcurrentRun(None, replace(ZERO2, overlap_param_gather=True), seed) for seed in range(2)]
    other = nn.Parameter(torch.ones(3))
    for number in range(2):
        for run in runs:
            run.step(number)
        other.grad = torch.ones(3)
        torch.optim.SGD([other], lr=0.1).step()
        assert not any(run.zero._engine.param_sync.is_in_flight for run in runs)
    for run in runs:
        run.check(2)


@ranks(2, 3)
def test_param_reads_from_another_thread_wait_for_the_gather(ctx: RankContext) -> None:
    """Between two steps, while parameters are in flight. That thread and this thread's forward pass wait for them."""
    run = ConcurrentRun(None, replace(ZERO2, overlap_param_gather=True))
    with ThreadPoolExecutor() as pool:
        for number in range(12):
            future = pool.submit(lambda: [param.detach().clone() for param in run.model.parameters()])
            out = run.model(inputs_of(number, ctx.rank))
            values = future.result(TIMEOUT_S)
            assert_same(values, [param.detach() for param in run.model.parameters()])
            torch.autograd.backward(out.square().mean())
            run.zero.step()
            run.zero.zero_grad()
    run.check(12)


# ---- unrelated threads


@some_configs
@ranks(1, 3)
def test_unrelated_threads_during_training(ctx: RankContext, config: ZeroConfig) -> None:
    train_beside_threads(config).check()


class InputDataset(Dataset[Tensor]):
    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, number: int) -> Tensor:
        return inputs_of(number, self._rank)


@sampled("config", [ZERO2, ZERO1], ids=["zero2", "zero1"])
@ranks(2)
def test_data_loader_with_worker_processes(ctx: RankContext, config: ZeroConfig) -> None:
    run = ConcurrentRun(None, config)
    run.train(1)
    with allow_child_processes():
        loader = DataLoader(InputDataset(ctx.rank), batch_size=None, num_workers=2)
        for number, x in itertools.islice(enumerate(loader), 1, None):
            run.step(number, x)
    run.check()


@contextmanager
def allow_child_processes() -> Iterator[None]:
    """Let this process start children. Pool processes are daemons, which cannot: children could outlive the pool."""
    config: dict[str, Any] = vars(multiprocessing.current_process())["_config"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(config, "daemon", False)
        yield


# ---- checkpoints in the background


@contextmanager
def block_writes() -> Iterator[threading.Event]:
    """Make saves wait, before they write, until the event is set."""
    may_write, write_shards = threading.Event(), saver.write_shards

    def wait_and_write(*args: Any) -> Any:
        assert may_write.wait(TIMEOUT_S)
        return write_shards(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saver, "write_shards", wait_and_write)
        yield may_write


@some_configs
@ranks(1, 2, 3)
def test_training_continues_during_async_save(ctx: RankContext, tmp_path: Path, config: ZeroConfig) -> None:
    """The files hold the state at the start of the save; a load right after it restores that state."""
    run = ConcurrentRun(None, config)
    run.train(2)
    with block_writes() as may_write:
        save_handle = checkpoint.async_save(tmp_path, step=2, model=run.model, optimizer=run.zero)
        for number in range(2, STEPS):
            run.step(number)
        assert not save_handle.done()
        may_write.set()
        loaded = checkpoint.load(tmp_path, model=run.model, optimizer=run.zero)
    assert loaded.step == 2
    run.check(2)
    for number in range(2, STEPS):
        run.step(number)
        set_mean_grads(run.plain_model, number, run.members)
        run.plain.step()
    run.compare()


@ranks(1, 2, 3)
def test_async_save_waits_for_the_previous_one(ctx: RankContext, tmp_path: Path) -> None:
    """Each save holds the state at the time of its call."""
    run, expected_by_step = ConcurrentRun(None, ZERO2), dict[int, Any]()
    with block_writes() as may_write, ThreadPoolExecutor() as pool:
        for number in range(STEPS):
            run.step(number)
            if number == 1:
                # Otherwise the second save would wait for the first one, and that one for this thread.
                pool.submit(may_write.set)
            expected_by_step[number] = {name: value.clone() for name, value in run.model.state_dict().items()}
            save_handle = checkpoint.async_save(tmp_path, step=number, model=run.model, optimizer=run.zero, keep=None)
        save_handle.wait()
    for path, expected in zip(sorted(tmp_path.glob("step-*")), expected_by_step.values(), strict=True):
        checkpoint.load(path, model=run.model, optimizer=run.zero)
        assert_same(dict(run.model.state_dict()), expected)
