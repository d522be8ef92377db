"""Several things at once in one process: optimizers, groups and threads side by side."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import Queue

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.support.oracle import assert_same
from tests.support.overlap import WIDTH, mlp
from tests.support.pair import average, from_all_ranks
from tests.support.sharded import seeded
from zeroshard import ShardedOptimizer, ZeroConfig, ZeroRedundancyOptimizer, shard

LONG = 30.0
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


class Run:
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
        self.zero.wait()
        assert_same(self.model.state_dict(), self.plain_model.state_dict())


# ---- several optimizers


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


# ---- several groups


def two_groups(*, overlapping: bool) -> list[dist.ProcessGroup | None]:
    """Of all ranks each, or all but the last and all but the first. None where this rank is no member."""
    everyone, me = list(range(dist.get_world_size())), dist.get_rank()
    members = [everyone[:-1], everyone[1:]] if overlapping and len(everyone) > 1 else [everyone, everyone]
    groups = [dist.new_group(ranks) for ranks in members]
    return [group if me in ranks else None for group, ranks in zip(groups, members, strict=True)]


def trained_in_threads(groups: Sequence[dist.ProcessGroup | None], config: ZeroConfig) -> list[Run]:
    """A model for each group that this rank is in, each by a thread of its own."""
    runs = [Run(group, config, seed) for seed, group in enumerate(groups) if group is not None]
    with ThreadPoolExecutor() as pool:
        for done in [pool.submit(run.train) for run in runs]:
            done.result(LONG)
    return runs


# ---- threads that do something else


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
            thread.join(LONG)
    assert not failures


def prefetched(rank: int, steps: int) -> Iterator[Tensor]:
    """Inputs that a thread makes ahead."""
    queue: Queue[Tensor] = Queue(maxsize=2)

    def make() -> None:
        for number in range(steps):
            queue.put(inputs_of(number, rank))

    thread = threading.Thread(target=make)
    thread.start()
    yield from (queue.get(timeout=LONG) for _ in range(steps))
    thread.join(LONG)


def trained_beside_threads(config: ZeroConfig) -> Run:
    """A data loader's thread makes the inputs, and others are busy with their own."""
    run = Run(None, config)
    with busy_threads():
        for number, x in enumerate(prefetched(dist.get_rank(), STEPS)):
            run.step(number, x)
    return run
