"""Muon on the matrices of a GPT and AdamW on the rest: rules, the unsharded pair, and torch's ZeRO twice."""

import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from examples.gpt import Block
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Muon, Optimizer

from zeroshard import ParamRule, ZeroConfig, matrix_params, remaining_params, shard
from zeroshard.engine.inner import OptimizerFactory
from zeroshard.engine.probe import FlopCost, numel_cost
from zeroshard.layout.partition import CostFn
from zeroshard.layout.spec import make_param_specs

from ..harness.ranks import run_ranks
from ..harness.resources import sent_bytes
from ..harness.timing import turns
from ..harness.workloads import LanguageModel

BASELINE = "DDP, Muon + AdamW"
OURS = "zeroshard, rules"
OVERLAP = "zeroshard, rules, overlap_param_gather"
TORCH = "torch ZeRO, twice"
MUON: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}
ADAMW: dict[str, Any] = {"lr": 3e-4, "weight_decay": 0.1}
METERED = 3
"""Steps before the race. DDP settles on its buckets in the second."""
LAPS = 2
EXCLUDED = ("tokens", "positions")


class Size(NamedTuple):
    """A GPT: four matrices a layer."""

    vocabulary: int = 1024
    context: int = 64
    width: int = 256
    heads: int = 4
    layers: int = 9

    def build(self) -> LanguageModel:
        torch.manual_seed(0)
        return LanguageModel(*self)

    def batch(self, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(1 + rank)
        return torch.randint(self.vocabulary, (2, self.context + 1), generator=generator)


@dataclass(frozen=True)
class Contestant:
    """A model with its optimizers, trained by one call after the other."""

    net: nn.Module
    model: nn.Module
    optimizers: Sequence[Any]
    work: Callable[[], tuple[float, ...]]
    """What each rank's update takes, counted."""
    finish: Callable[[], object] = lambda: None

    def backward(self, batch: Tensor) -> None:
        torch.autograd.backward(self.net(batch))

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def inner(self) -> list[Optimizer]:
        """What this rank updates its part with."""
        found: list[Optimizer] = []
        for optimizer in self.optimizers:
            found += getattr(optimizer, "inner_optimizers", None) or [getattr(optimizer, "optim", optimizer)]
        return found

    def state_bytes(self) -> int:
        states = [state for optimizer in self.inner() for state in optimizer.state.values()]
        return sum(it.nbytes for state in states for it in state.values() if isinstance(it, Tensor) and it.dim())


def divided(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """The matrices for Muon, and the rest, without the code under test."""
    inside = {id(param) for module in model.modules() if isinstance(module, Block) for param in module.parameters()}
    params: list[Tensor] = list(model.parameters())
    chosen = [param for param in params if param.dim() == 2 and id(param) in inside]
    known = {id(param) for param in chosen}
    return chosen, [param for param in params if id(param) not in known]


def _counted(model: nn.Module) -> tuple[FlopCost, float]:
    """What Muon takes for a parameter, and AdamW for all of its own."""
    muon, rest = divided(model)
    work = FlopCost(OptimizerFactory(Muon, [{"params": muon}], True, MUON))
    return work, sum(map(numel_cost, make_param_specs([{"params": rest}])))


def _baseline(model: nn.Module) -> Contestant:
    muon, rest = divided(model)
    work, others = _counted(model)
    total = sum(map(work, make_param_specs([{"params": muon}]))) + others
    pair = [Muon(muon, **MUON), AdamW(rest, **ADAMW)]
    return Contestant(DistributedDataParallel(model), model, pair, lambda: (total,) * dist.get_world_size())


def _torch_zero(model: nn.Module) -> Contestant:
    muon, rest = divided(model)
    zeros: list[Any] = [TorchZero(muon, Muon, **MUON), TorchZero(rest, AdamW, **ADAMW)]
    work, _ = _counted(model)

    def loads() -> tuple[float, ...]:
        costs: list[CostFn] = [work, numel_cost]
        found = [0.0] * dist.get_world_size()
        for zero, cost in zip(zeros, costs, strict=True):
            for rank, groups in enumerate(zero._partition_parameters()):
                found[rank] += sum(map(cost, make_param_specs(groups)))
        return tuple(found)

    return Contestant(DistributedDataParallel(model), model, zeros, loads)


def _rules(model: nn.Module, *, overlap: bool = False) -> Contestant:
    given = [ParamRule(matrix_params(EXCLUDED), Muon, **MUON), ParamRule(remaining_params, AdamW, **ADAMW)]
    optimizer = shard(model, given, config=ZeroConfig(overlap_param_gather=overlap))
    return Contestant(model, model, [optimizer], lambda: optimizer.balance.cost_per_rank, optimizer.wait_for_params)


CONTESTANTS: dict[str, Callable[[nn.Module], Contestant]] = {
    BASELINE: _baseline,
    TORCH: _torch_zero,
    OURS: _rules,
    OVERLAP: lambda model: _rules(model, overlap=True),
}


class Lap(NamedTuple):
    """One iteration on one rank, in seconds."""

    wall: float
    inner: float
    """The inner optimizers' own steps: what a rank waits for is the slowest one's."""


class Meters(NamedTuple):
    sent: int
    state: int
    difference: float
    work: tuple[float, ...]


@dataclass(frozen=True)
class Result:
    """A contestant, over all ranks."""

    wall: list[float]
    inner: list[float]
    """Of the slowest rank over the mean, in each round."""
    wire: int
    state: int
    difference: float
    work: tuple[float, ...]

    @property
    def slowest(self) -> float:
        return max(self.work) * len(self.work) / sum(self.work)


def run_race(size: Size, world: int, rounds: int) -> dict[str, Result]:
    by_rank = run_ranks(world, _compete, size, rounds, limit_s=900, start="forkserver")
    return {name: _over_ranks([of_rank[name] for of_rank in by_rank]) for name in CONTESTANTS}


def _over_ranks(ranks: Sequence[tuple[Meters, list[Lap]]]) -> Result:
    meters = [meter for meter, _ in ranks]
    rounds = list(zip(*(laps for _, laps in ranks), strict=True))
    return Result(
        wall=[max(lap.wall for lap in laps) for laps in rounds],
        inner=[max(lap.inner for lap in laps) * len(laps) / sum(lap.inner for lap in laps) for laps in rounds],
        wire=sum(meter.sent for meter in meters),
        state=max(meter.state for meter in meters),
        difference=max(meter.difference for meter in meters),
        work=meters[0].work,
    )


def _compete(size: Size, rounds: int) -> dict[str, tuple[Meters, list[Lap]]]:
    batch, model = size.batch(dist.get_rank()), size.build()
    contestants, meters = dict[str, Contestant](), dict[str, Meters]()
    reference: list[Tensor] = []
    for name, make in CONTESTANTS.items():
        contestants[name] = make(deepcopy(model))
        meters[name] = _meter(contestants[name], size.batch(0), reference)  # with it all gradients are the same
        reference = reference or [param.detach().clone() for param in contestants[name].model.parameters()]
    laps: dict[str, list[Lap]] = {name: [] for name in CONTESTANTS}
    for _, name in turns(list(CONTESTANTS), rounds):
        _iterate(contestants[name], batch)  # leaves under way what the timed ones leave
        laps[name] += [_lap(contestants[name], batch) for _ in range(LAPS)]
        contestants[name].finish()
    return {name: (meters[name], laps[name]) for name in CONTESTANTS}


def _meter(contestant: Contestant, batch: Tensor, reference: Sequence[Tensor]) -> Meters:
    for _ in range(METERED - 1):
        _iterate(contestant, batch)
    contestant.finish()
    before = _all_sent()
    _iterate(contestant, batch)
    contestant.finish()
    sent = _all_sent() - before
    pairs = zip(contestant.model.parameters(), reference, strict=True) if reference else ()
    difference = max((float((a.detach() - b).abs().max()) for a, b in pairs), default=0.0)
    return Meters(sent, contestant.state_bytes(), difference, contestant.work())


def _all_sent() -> int:
    dist.barrier()
    time.sleep(0.1)  # what was received last is acknowledged late
    return sent_bytes()


def _iterate(contestant: Contestant, batch: Tensor) -> None:
    contestant.backward(batch)
    contestant.step()
    contestant.zero_grad()


def _lap(contestant: Contestant, batch: Tensor) -> Lap:
    clocks = [_Clock(optimizer) for optimizer in contestant.inner()]
    start = time.perf_counter()
    _iterate(contestant, batch)
    wall = time.perf_counter() - start
    for clock in clocks:
        clock.remove()
    return Lap(wall, sum(clock.seconds for clock in clocks))


class _Clock:
    """CPU time of an inner optimizer's steps on this rank: on shared cores the wall says who was interrupted."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.seconds = self._start = 0.0
        self._hooks = [
            optimizer.register_step_pre_hook(lambda *_: self._begin()),
            optimizer.register_step_post_hook(lambda *_: self._end()),
        ]

    def _begin(self) -> None:
        self._start = time.thread_time()

    def _end(self) -> None:
        self.seconds += time.thread_time() - self._start

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
