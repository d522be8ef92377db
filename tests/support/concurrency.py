"""Several optimizers, process groups and threads in one process, and random delays inside the package."""

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

from tests.support.oracles import WIDTH, assert_same, average, gather_from_all_ranks, make_seeded, mlp
from zeroshard import ShardedOptimizer, ZeroConfig, ZeroRedundancyOptimizer, shard

# ---- Concurrent training

TIMEOUT_S = 30.0
STEPS = 4


def inputs_of(number: int, rank: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * number + rank))


def backward(model: nn.Module, x: Tensor) -> None:
    torch.autograd.backward(model(x).square().mean())


def set_mean_grads(model: nn.Module, number: int, members: list[int]) -> None:
    """Set gradients to the mean over all members, summed in rank order."""
    grads: list[list[Tensor]] = []
    for rank in members:
        model.zero_grad()
        backward(model, inputs_of(number, rank))
        grads.append([param.grad for param in model.parameters() if param.grad is not None])
    for param, by_rank in zip(model.parameters(), zip(*grads, strict=True), strict=True):
        param.grad = average(list(by_rank))


class ConcurrentRun:
    """A model trained by the ranks of a group, and the same model trained by the plain optimizer."""

    def __init__(self, group: dist.ProcessGroup | None, config: ZeroConfig, seed: int = 0) -> None:
        self.members = dist.get_process_group_ranks(group or dist.group.WORLD)
        self.model, self.plain_model = (make_seeded(mlp, seed) for _ in range(2))
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


def shard_adamw(model: nn.Module, params: list[nn.Parameter], config: ZeroConfig) -> Optimizer:
    return shard(model, torch.optim.AdamW, params=params, config=config, lr=0.05)


def dropin_sgd(_: nn.Module, params: list[nn.Parameter], __: ZeroConfig) -> Optimizer:
    return ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.05)


def train_with_two_optimizers(
    config: ZeroConfig, second: Callable[..., Optimizer]
) -> tuple[nn.Module, list[Optimizer]]:
    """Train a model with two optimizers, each with every other parameter: one backward pass, then both steps."""
    model = make_seeded(mlp, 0)
    params = [*model.parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first optimizer warns about parameters of the drop-in
        zeros = [shard_adamw(model, params[::2], config), second(model, params[1::2], config)]
        for number in range(STEPS):
            backward(model, inputs_of(number, dist.get_rank()))
            if second is dropin_sgd:
                average_grads(params[1::2])
            for zero in zeros if number % 2 else reversed(zeros):
                zero.step()
            model.zero_grad()
    return model, zeros


def average_grads(params: list[nn.Parameter]) -> None:
    for param in params:
        assert param.grad is not None
        param.grad = average(gather_from_all_ranks(param.grad))


# -- several groups


def two_groups(*, overlapping: bool) -> list[dist.ProcessGroup | None]:
    """Two groups of all ranks, or of all but the last and all but the first. None if this rank is not a member."""
    all_ranks, rank = list(range(dist.get_world_size())), dist.get_rank()
    members = [all_ranks[:-1], all_ranks[1:]] if overlapping and len(all_ranks) > 1 else [all_ranks, all_ranks]
    groups = [dist.new_group(ranks) for ranks in members]
    return [group if rank in ranks else None for group, ranks in zip(groups, members, strict=True)]


def train_in_threads(groups: Sequence[dist.ProcessGroup | None], config: ZeroConfig) -> list[ConcurrentRun]:
    """Train one model for each group of this rank, each in its own thread."""
    runs = [ConcurrentRun(group, config, seed) for seed, group in enumerate(groups) if group is not None]
    with ThreadPoolExecutor() as pool:
        for future in [pool.submit(run.train) for run in runs]:
            future.result(TIMEOUT_S)
    return runs


# -- threads with other work


@contextmanager
def busy_threads() -> Iterator[None]:
    """Run threads that compute, allocate and free, with and without gradients, while the context is open."""
    is_over, failures = threading.Event(), list[BaseException]()

    def work(seed: int) -> None:
        try:
            generator = torch.Generator().manual_seed(seed)
            while not is_over.is_set():
                matrix = torch.randn(32, 32, generator=generator, requires_grad=True)
                torch.autograd.backward((matrix @ matrix).tanh().sum())
                assert matrix.grad is not None
                [torch.empty(1000 * n) for n in range(8)]
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join(TIMEOUT_S)
    assert not failures


def prefetch_inputs(rank: int, steps: int) -> Iterator[Tensor]:
    """Yield inputs that a thread prefetches."""
    queue: Queue[Tensor] = Queue(maxsize=2)

    def make() -> None:
        for number in range(steps):
            queue.put(inputs_of(number, rank))

    thread = threading.Thread(target=make)
    thread.start()
    yield from (queue.get(timeout=TIMEOUT_S) for _ in range(steps))
    thread.join(TIMEOUT_S)


def train_beside_threads(config: ZeroConfig) -> ConcurrentRun:
    """Train with inputs from a prefetching thread, next to busy threads."""
    run = ConcurrentRun(None, config)
    with busy_threads():
        for number, x in enumerate(prefetch_inputs(dist.get_rank(), STEPS)):
            run.step(number, x)
    return run


# ---- Random delays of messages, threads and locks

MAX_DELAY_S = 0.003
DELAY_PROBABILITY = 0.25
SWITCH_INTERVAL_S = 1e-5
"""Switch interval of Python threads."""
COLLECTIVES = (
    *("irecv", "all_reduce", "broadcast", "all_gather", "gather"),
    *("all_gather_into_tensor", "all_to_all_single", "reduce_scatter_tensor"),
)


class Delays:
    """Draws random delays and counts them."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self.count = 0

    def pause(self) -> None:
        self.count += 1
        if self._draw.random() < DELAY_PROBABILITY:
            time.sleep(self._draw.uniform(0, MAX_DELAY_S))


@contextmanager
def random_delays(seed: int) -> Iterator[Delays]:
    """Delay messages, threads and locks while the context is open; locks only in objects created inside it."""
    delays, interval = Delays(1000 * seed + dist.get_rank()), sys.getswitchinterval()
    sender = ThreadPoolExecutor(1)
    collectives = {name: _delay_collective(getattr(dist, name), delays) for name in COLLECTIVES}
    slow_dist = _PatchedModule(dist, {**collectives, "isend": _delay_send(dist.isend, delays, sender)})
    slow_threading = _PatchedModule(threading, _slow_threads(delays))
    with sender, pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if name.startswith("zeroshard."):
                _replace(patch, module, {"dist": (dist, slow_dist), "threading": (threading, slow_threading)})
                _replace(patch, module, {"RLock": (threading.RLock, slow_threading.RLock)})
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        try:
            yield delays
        finally:
            sys.setswitchinterval(interval)


def _replace(patch: pytest.MonkeyPatch, module: Any, names: Mapping[str, tuple[Any, Any]]) -> None:
    for name, (original, slow) in names.items():
        if vars(module).get(name) is original:
            patch.setattr(module, name, slow)


class _PatchedModule:
    """A module with some of its attributes replaced."""

    def __init__(self, module: Any, replacements: Mapping[str, Any]) -> None:
        self._module = module
        vars(self).update(replacements)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _SlowWork:
    def __init__(self, work: Any, delays: Delays) -> None:
        self._work, self._delays = work, delays

    def wait(self, *args: Any) -> Any:
        self._delays.pause()
        result = self._work.wait(*args)
        self._delays.pause()
        return result

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


def _delay_collective(collective: Callable[..., Any], delays: Delays) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        delays.pause()
        work = collective(*args, **kwargs)
        return _SlowWork(work, delays) if hasattr(work, "wait") else work

    return call


def _delay_send(send: Callable[..., Any], delays: Delays, sender: ThreadPoolExecutor) -> Callable[..., Any]:
    """Delay each message and send them one after the other, as a slow network does."""

    def send_late(*args: Any, **kwargs: Any) -> Any:
        delays.pause()
        return send(*args, **kwargs)

    return lambda *args, **kwargs: _DelayedSend(sender.submit(send_late, *args, **kwargs))


class _DelayedSend:
    def __init__(self, work: Future[Any]) -> None:
        self._work = work

    def wait(self, *args: Any) -> Any:
        return self._work.result().wait(*args)


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
