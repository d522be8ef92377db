"""Several things at once: optimizers, groups and threads side by side make what each makes alone, bit by bit."""

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
    by_drop_in,
    by_shard,
    inputs_of,
    set_mean_grads,
    trained_beside_threads,
    trained_by_two,
    trained_in_threads,
    two_groups,
)
from tests.support.oracles import ZERO1, ZERO2, assert_same, mlp, seeded, some_configs
from tests.support.tiers import sampled
from zeroshard import ZeroConfig, checkpoint
from zeroshard.checkpoint import saver

# ---- several optimizers


@some_configs
@sampled("second", [by_shard, by_drop_in], ids=["shard", "drop-in"])
@ranks(2, 3)
def test_two_optimizers_on_one_model(ctx: RankContext, config: ZeroConfig, second: Callable[..., Optimizer]) -> None:
    """One backward pass for both, and steps in turn: first the one, then the other one."""
    model, _ = trained_by_two(config, second)
    plain_model = seeded(mlp, 0)
    theirs = [*plain_model.parameters()]
    plains: list[Optimizer] = [torch.optim.AdamW(theirs[::2], lr=0.05)]
    plains.append((torch.optim.AdamW if second is by_shard else torch.optim.SGD)(theirs[1::2], lr=0.05))
    for number in range(STEPS):
        set_mean_grads(plain_model, number, list(range(ctx.world_size)))
        for plain in plains:
            plain.step()
    assert_same(model.state_dict(), plain_model.state_dict())


# ---- several groups


@sampled("overlapping", [False, True], ids=["same", "overlapping"])
@some_configs
@ranks(2, 4)
def test_two_process_groups_in_two_threads(ctx: RankContext, config: ZeroConfig, overlapping: bool) -> None:
    for run in trained_in_threads(two_groups(overlapping=overlapping), config):
        run.check()


@sampled("overlapping", [False, True], ids=["same", "overlapping"])
@some_configs
@ranks(3)
def test_two_process_groups_in_one_thread(ctx: RankContext, config: ZeroConfig, overlapping: bool) -> None:
    """In turns, with both backward passes before both steps every other time."""
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
    """In a group of their own, by another thread."""
    groups = two_groups(overlapping=False)
    run = ConcurrentRun(groups[0], ZERO2)
    with ThreadPoolExecutor() as pool:
        making = pool.submit(lambda: [ConcurrentRun(groups[1], ZERO2, number) for number in range(4)])
        run.train(8)
        made = making.result(TIMEOUT_S)
    run.check(8)
    made[-1].train()
    made[-1].check()


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
    """Between two steps, while they are under way: it and the forward pass of this thread both wait for them."""
    run = ConcurrentRun(None, replace(ZERO2, overlap_param_gather=True))
    with ThreadPoolExecutor() as pool:
        for number in range(12):
            reading = pool.submit(lambda: [param.detach().clone() for param in run.model.parameters()])
            out = run.model(inputs_of(number, ctx.rank))
            values = reading.result(TIMEOUT_S)
            assert_same(values, [param.detach() for param in run.model.parameters()])
            torch.autograd.backward(out.square().mean())
            run.zero.step()
            run.zero.zero_grad()
    run.check(12)


# ---- threads that do something else


@some_configs
@ranks(1, 3)
def test_unrelated_threads_during_training(ctx: RankContext, config: ZeroConfig) -> None:
    trained_beside_threads(config).check()


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
    """The pool's processes are not, lest they outlive it."""
    config: dict[str, Any] = vars(multiprocessing.current_process())["_config"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(config, "daemon", False)
        yield


# ---- checkpoints in the background


@contextmanager
def block_writes() -> Iterator[threading.Event]:
    """Saves wait, before they write, until the event is set."""
    go, write_parts = threading.Event(), saver.write_shards

    def wait_and_write(*args: Any) -> Any:
        assert go.wait(TIMEOUT_S)
        return write_parts(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saver, "write_shards", wait_and_write)
        yield go


@some_configs
@ranks(1, 2, 3)
def test_training_continues_during_async_save(ctx: RankContext, tmp_path: Path, config: ZeroConfig) -> None:
    """What is written is what was there when the save began; a load right after goes back to it."""
    run = ConcurrentRun(None, config)
    run.train(2)
    with block_writes() as go:
        begun = checkpoint.async_save(tmp_path, step=2, model=run.model, optimizer=run.zero)
        for number in range(2, STEPS):
            run.step(number)
        assert not begun.done()
        go.set()
        found = checkpoint.load(tmp_path, model=run.model, optimizer=run.zero)
    assert found.step == 2
    run.check(2)
    for number in range(2, STEPS):
        run.step(number)
        set_mean_grads(run.plain_model, number, run.members)
        run.plain.step()
    run.compare()


@ranks(1, 2, 3)
def test_async_save_waits_for_the_previous_one(ctx: RankContext, tmp_path: Path) -> None:
    """It waits for that one; each has what was there when it was called for."""
    run, kept = ConcurrentRun(None, ZERO2), dict[int, Any]()
    with block_writes() as go, ThreadPoolExecutor() as pool:
        for number in range(STEPS):
            run.step(number)
            if number == 1:
                pool.submit(go.set)  # else the second save would wait for the first one, and that for us
            kept[number] = {name: value.clone() for name, value in run.model.state_dict().items()}
            last = checkpoint.async_save(tmp_path, step=number, model=run.model, optimizer=run.zero, keep=None)
        last.wait()
    for path, expected in zip(sorted(tmp_path.glob("step-*")), kept.values(), strict=True):
        checkpoint.load(path, model=run.model, optimizer=run.zero)
        assert_same(dict(run.model.state_dict()), expected)
