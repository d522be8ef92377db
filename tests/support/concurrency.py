"""Several optimizers, process groups and threads in one process, and random delays in what the package does."""

from __future__ import annotations

import random
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from queue import Queue
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.support.oracles import WIDTH, assert_same, average, from_all_ranks, mlp, seeded
from zeroshard import ShardedOptimizer, ZeroConfig, ZeroRedundancyOptimizer, shard

# ---- Several things at once

TIMEOUT_S = 30.0
STEPS = 4


def inputs_of(number: int, rank: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * number + rank))


def backward(model: nn.Module, x: Tensor) -> None:
    torch.autograd.backward(model(x).square().mean())


def set_mean_grads(model: nn.Module, number: int, members: list[int]) -> None:
    """Those of all members, added up in the order of ranks."""
    grads: list[list[Tensor]] = []
    for rank in members:
        model.zero_grad()
        backward(model, inputs_of(number, rank))
        grads.append([param.grad for param in model.parameters() if param.grad is not None])
    for param, parts in zip(model.parameters(), zip(*grads, strict=True), strict=True):
        param.grad = average(list(parts))


class ConcurrentRun:
    """A model that some ranks train, and what the plain optimizer makes of it."""

    def __init__(self, group: dist.ProcessGroup | None, config: ZeroConfig, seed: int = 0) -> None:
        self.members = dist.get_process_group_ranks(group or dist.group.WORLD)
        self.model, self.plain_model = (seeded(mlp, seed) for _ in range(2))
        self.zero: ShardedOptimizer = shard(self.model, torch.optim.AdamW, process_group=group, config=config, lr=0.05)
        self.plain = torch.optim.AdamW(self.plain_model.parameters(), lr=0.05)

    def step(self, number: int, x: Tensor | None = None) -> None:
        backward(self.model, inputs_of(number, dist.get_rank()) if x is None else x)
        self.zero.step()
        self.zero.zero_grad()

    def train(self, steps: int = STEPS) -> None:
        for number in range(steps):
            self.step(number)

    def check(self, steps: int = STEPS) -> None:
        for number in range(steps):
            set_mean_grads(self.plain_model, number, self.members)
            self.plain.step()
        self.compare()

    def compare(self) -> None:
        self.zero.wait_for_params()
        assert_same(self.model.state_dict(), self.plain_model.state_dict())


# -- several optimizers


def by_shard(model: nn.Module, params: list[nn.Parameter], config: ZeroConfig) -> Optimizer:
    return shard(model, torch.optim.AdamW, params=params, config=config, lr=0.05)


def by_drop_in(_: nn.Module, params: list[nn.Parameter], __: ZeroConfig) -> Optimizer:
    return ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.05)


def trained_by_two(config: ZeroConfig, second: Callable[..., Optimizer]) -> tuple[nn.Module, list[Optimizer]]:
    """A model of which each optimizer has every other parameter: one backward pass for both, and steps in turn."""
    model = seeded(mlp, 0)
    params = [*model.parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first one's of what the drop-in has
        zeros = [by_shard(model, params[::2], config), second(model, params[1::2], config)]
        for number in range(STEPS):
            backward(model, inputs_of(number, dist.get_rank()))
            if second is by_drop_in:
                average_grads(params[1::2])
            for zero in zeros if number % 2 else reversed(zeros):
                zero.step()
            model.zero_grad()
    return model, zeros


def average_grads(params: list[nn.Parameter]) -> None:
    for param in params:
        assert param.grad is not None
        param.grad = average(from_all_ranks(param.grad))


# -- several groups


def two_groups(*, overlapping: bool) -> list[dist.ProcessGroup | None]:
    """Of all ranks each, or all but the last and all but the first. None where this rank is no member."""
    everyone, me = list(range(dist.get_world_size())), dist.get_rank()
    members = [everyone[:-1], everyone[1:]] if overlapping and len(everyone) > 1 else [everyone, everyone]
    groups = [dist.new_group(ranks) for ranks in members]
    return [group if me in ranks else None for group, ranks in zip(groups, members, strict=True)]


def trained_in_threads(groups: Sequence[dist.ProcessGroup | None], config: ZeroConfig) -> list[ConcurrentRun]:
    """A model for each group that this rank is in, each by a thread of its own."""
    runs = [ConcurrentRun(group, config, seed) for seed, group in enumerate(groups) if group is not None]
    with ThreadPoolExecutor() as pool:
        for done in [pool.submit(run.train) for run in runs]:
            done.result(TIMEOUT_S)
    return runs


# -- threads that do something else


@contextmanager
def busy_threads() -> Iterator[None]:
    """Threads that compute, allocate and free, with and without gradients, until the end."""
    over, failures = threading.Event(), list[BaseException]()

    def work(seed: int) -> None:
        try:
            draw = torch.Generator().manual_seed(seed)
            while not over.is_set():
                own = torch.randn(32, 32, generator=draw, requires_grad=True)
                torch.autograd.backward((own @ own).tanh().sum())
                assert own.grad is not None
                [torch.empty(1000 * n) for n in range(8)]
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(TIMEOUT_S)
    assert not failures


def prefetched(rank: int, steps: int) -> Iterator[Tensor]:
    """Inputs that a thread makes ahead."""
    queue: Queue[Tensor] = Queue(maxsize=2)

    def make() -> None:
        for number in range(steps):
            queue.put(inputs_of(number, rank))

    thread = threading.Thread(target=make)
    thread.start()
    yield from (queue.get(timeout=TIMEOUT_S) for _ in range(steps))
    thread.join(TIMEOUT_S)


def trained_beside_threads(config: ZeroConfig) -> ConcurrentRun:
    """A data loader's thread makes the inputs, and others are busy with their own."""
    run = ConcurrentRun(None, config)
    with busy_threads():
        for number, x in enumerate(prefetched(dist.get_rank(), STEPS)):
            run.step(number, x)
    return run


# ---- Random delays of messages, threads and locks

LONGEST = 0.003
"""Seconds of a delay."""
OFTEN = 0.25
SWITCH = 1e-5
"""Seconds after which Python lets another thread go on."""
VERBS = (
    *("irecv", "all_reduce", "broadcast", "all_gather", "gather"),
    *("all_gather_into_tensor", "all_to_all_single", "reduce_scatter_tensor"),
)


class Delays:
    """Draws them, and counts."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self.count = 0

    def pause(self) -> None:
        self.count += 1
        if self._draw.random() < OFTEN:
            time.sleep(self._draw.uniform(0, LONGEST))


@contextmanager
def shuffled(seed: int) -> Iterator[Delays]:
    """While it is open, here and now. Locks are delayed in objects that are made inside."""
    delays, interval = Delays(1000 * seed + dist.get_rank()), sys.getswitchinterval()
    late = ThreadPoolExecutor(1)
    verbs = {verb: _slow_verb(getattr(dist, verb), delays) for verb in VERBS}
    slow_dist = _Altered(dist, {**verbs, "isend": _late_verb(dist.isend, delays, late)})
    slow_threading = _Altered(threading, _slow_threads(delays))
    with late, pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if name.startswith("zeroshard."):
                _replace(patch, module, {"dist": (dist, slow_dist), "threading": (threading, slow_threading)})
                _replace(patch, module, {"RLock": (threading.RLock, slow_threading.RLock)})
        sys.setswitchinterval(SWITCH)
        try:
            yield delays
        finally:
            sys.setswitchinterval(interval)


def _replace(patch: pytest.MonkeyPatch, module: Any, names: Mapping[str, tuple[Any, Any]]) -> None:
    for name, (plain, slow) in names.items():
        if vars(module).get(name) is plain:
            patch.setattr(module, name, slow)


class _Altered:
    """A module with some of its functions exchanged."""

    def __init__(self, module: Any, exchanged: Mapping[str, Any]) -> None:
        self._module = module
        vars(self).update(exchanged)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _SlowWork:
    def __init__(self, work: Any, delays: Delays) -> None:
        self._work, self._delays = work, delays

    def wait(self, *args: Any) -> Any:
        self._delays.pause()
        done = self._work.wait(*args)
        self._delays.pause()
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


class _SlowLock:
    def __init__(self, lock: Any, delays: Delays) -> None:
        self._lock, self._delays = lock, delays

    def __enter__(self) -> None:
        self._delays.pause()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        self._delays.pause()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lock, name)


def _slow_verb(verb: Callable[..., Any], delays: Delays) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        delays.pause()
        work = verb(*args, **kwargs)
        return _SlowWork(work, delays) if hasattr(work, "wait") else work

    return call


def _late_verb(verb: Callable[..., Any], delays: Delays, pool: ThreadPoolExecutor) -> Callable[..., Any]:
    """Messages leave later than they are sent, one after the other, as in a network that is slow."""

    def leave(*args: Any, **kwargs: Any) -> Any:
        delays.pause()
        return verb(*args, **kwargs)

    return lambda *args, **kwargs: _Late(pool.submit(leave, *args, **kwargs))


class _Late:
    def __init__(self, left: Future[Any]) -> None:
        self._left = left

    def wait(self, *args: Any) -> Any:
        return self._left.result().wait(*args)


def _slow_threads(delays: Delays) -> dict[str, Any]:
    class Thread(threading.Thread):
        def start(self) -> None:
            delays.pause()
            super().start()
            delays.pause()

        def run(self) -> None:
            delays.pause()
            super().run()

    class Event(threading.Event):
        def set(self) -> None:
            delays.pause()
            super().set()

    return {
        "Thread": Thread,
        "Event": Event,
        "Lock": lambda: _SlowLock(threading.Lock(), delays),
        "RLock": lambda: _SlowLock(threading.RLock(), delays),
    }
