"""Train a GPT with Muon on its matrices and AdamW on the rest: rules, the unsharded pair, and two of torch's ZeRO."""

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
METERED_STEPS = 3
"""Steps before the race. DDP rebuilds its buckets in the second."""
LAPS_PER_TURN = 2
EXCLUDED = ("tokens", "positions")


class Size(NamedTuple):
    """The size of a GPT with four matrices per layer."""

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
    """A model with its optimizers."""

    net: nn.Module
    """The module whose forward pass is called: DDP or the model itself."""
    model: nn.Module
    optimizers: Sequence[Any]
    work: Callable[[], tuple[float, ...]]
    """Returns the counted operations of each rank's update."""
    finish: Callable[[], object] = lambda: None
    """Waits for messages that the last step left in flight."""

    def backward(self, batch: Tensor) -> None:
        torch.autograd.backward(self.net(batch))

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def inner_optimizers(self) -> list[Optimizer]:
        """Return the optimizers that update this rank's shards."""
        inner: list[Optimizer] = []
        for optimizer in self.optimizers:
            inner += getattr(optimizer, "inner_optimizers", None) or [getattr(optimizer, "optim", optimizer)]
        return inner

    def state_bytes(self) -> int:
        entries = [entry for optimizer in self.inner_optimizers() for entry in optimizer.state.values()]
        values = [value for entry in entries for value in entry.values()]
        return sum(value.nbytes for value in values if isinstance(value, Tensor) and value.dim())


def split_params(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Return the matrices for Muon and the other parameters, without the code under test."""
    in_blocks = {id(param) for module in model.modules() if isinstance(module, Block) for param in module.parameters()}
    params: list[Tensor] = list(model.parameters())
    matrices = [param for param in params if param.dim() == 2 and id(param) in in_blocks]
    matrix_ids = {id(param) for param in matrices}
    return matrices, [param for param in params if id(param) not in matrix_ids]


def _count_work(model: nn.Module) -> tuple[FlopCost, float]:
    """Return Muon's cost per parameter, and AdamW's cost for all of its parameters."""
    muon, adamw = split_params(model)
    muon_cost = FlopCost(OptimizerFactory(Muon, [{"params": muon}], True, MUON))
    return muon_cost, sum(map(numel_cost, make_param_specs([{"params": adamw}])))


def _baseline(model: nn.Module) -> Contestant:
    muon, adamw = split_params(model)
    muon_cost, adamw_work = _count_work(model)
    total = sum(map(muon_cost, make_param_specs([{"params": muon}]))) + adamw_work
    pair = [Muon(muon, **MUON), AdamW(adamw, **ADAMW)]
    return Contestant(DistributedDataParallel(model), model, pair, lambda: (total,) * dist.get_world_size())


def _torch_zero(model: nn.Module) -> Contestant:
    muon, adamw = split_params(model)
    zeros: list[Any] = [TorchZero(muon, Muon, **MUON), TorchZero(adamw, AdamW, **ADAMW)]
    muon_cost, _ = _count_work(model)

    def work_per_rank() -> tuple[float, ...]:
        costs: list[CostFn] = [muon_cost, numel_cost]
        work = [0.0] * dist.get_world_size()
        for zero, cost in zip(zeros, costs, strict=True):
            for rank, groups in enumerate(zero._partition_parameters()):
                work[rank] += sum(map(cost, make_param_specs(groups)))
        return tuple(work)

    return Contestant(DistributedDataParallel(model), model, zeros, work_per_rank)


def _rules(model: nn.Module, *, overlap: bool = False) -> Contestant:
    rules = [ParamRule(matrix_params(EXCLUDED), Muon, **MUON), ParamRule(remaining_params, AdamW, **ADAMW)]
    optimizer = shard(model, rules, config=ZeroConfig(overlap_param_gather=overlap))
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
    """CPU time of the inner optimizers' steps. All ranks wait for the slowest one."""


class Meters(NamedTuple):
    sent: int
    state: int
    difference: float
    work: tuple[float, ...]


@dataclass(frozen=True)
class Result:
    """The result of a contestant over all ranks."""

    wall: list[float]
    inner: list[float]
    """The slowest rank's `Lap.inner` relative to the mean, in each round."""
    wire: int
    state: int
    difference: float
    work: tuple[float, ...]

    @property
    def slowest(self) -> float:
        """The slowest rank's work relative to the mean."""
        return max(self.work) * len(self.work) / sum(self.work)


def run_race(size: Size, world: int, rounds: int) -> dict[str, Result]:
    by_rank = run_ranks(world, _compete, size, rounds, limit_s=900, start="forkserver")
    return {name: _combine_ranks([results[name] for results in by_rank]) for name in CONTESTANTS}


def _combine_ranks(ranks: Sequence[tuple[Meters, list[Lap]]]) -> Result:
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
        meters[name] = _meter(contestants[name], size.batch(0), reference)  # one batch: all ranks have equal gradients
        reference = reference or [param.detach().clone() for param in contestants[name].model.parameters()]
    laps: dict[str, list[Lap]] = {name: [] for name in CONTESTANTS}
    for _, name in turns(list(CONTESTANTS), rounds):
        _iterate(contestants[name], batch)  # warm-up: leaves the same messages in flight as a timed iteration
        laps[name] += [_time_lap(contestants[name], batch) for _ in range(LAPS_PER_TURN)]
        contestants[name].finish()
    return {name: (meters[name], laps[name]) for name in CONTESTANTS}


def _meter(contestant: Contestant, batch: Tensor, reference: Sequence[Tensor]) -> Meters:
    for _ in range(METERED_STEPS - 1):
        _iterate(contestant, batch)
    contestant.finish()
    before = _read_sent_bytes()
    _iterate(contestant, batch)
    contestant.finish()
    sent = _read_sent_bytes() - before
    pairs = zip(contestant.model.parameters(), reference, strict=True) if reference else ()
    difference = max((float((a.detach() - b).abs().max()) for a, b in pairs), default=0.0)
    return Meters(sent, contestant.state_bytes(), difference, contestant.work())


def _read_sent_bytes() -> int:
    dist.barrier()
    time.sleep(0.1)  # the last messages are acknowledged late
    return sent_bytes()


def _iterate(contestant: Contestant, batch: Tensor) -> None:
    contestant.backward(batch)
    contestant.step()
    contestant.zero_grad()


def _time_lap(contestant: Contestant, batch: Tensor) -> Lap:
    clocks = [_StepClock(optimizer) for optimizer in contestant.inner_optimizers()]
    start = time.perf_counter()
    _iterate(contestant, batch)
    wall = time.perf_counter() - start
    for clock in clocks:
        clock.remove()
    return Lap(wall, sum(clock.seconds for clock in clocks))


class _StepClock:
    """CPU time of an inner optimizer's steps on this rank. On shared cores, wall time would depend on interruptions."""

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
