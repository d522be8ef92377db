"""All contestants train the same model in the same processes, a few iterations each in turns."""

import time
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..harness.calls import counted_calls
from ..harness.models import RECIPES
from ..harness.ranks import run_ranks
from ..harness.resources import sent_bytes
from ..harness.timing import turns
from ..harness.workloads import WORKLOADS
from .peers_trainers import BASELINE, CONTESTANTS, Trainer


class Case(NamedTuple):
    """What the contestants have to do; by names."""

    workload: str
    world: int
    recipe: str


class Lap(NamedTuple):
    """One iteration on one rank, in seconds."""

    wall: float
    cpu: float
    step: float


class Meters(NamedTuple):
    """What does not depend on the weather, on one rank."""

    sent: int
    calls: int
    state: int
    difference: float


@dataclass(frozen=True)
class Result:
    """A contestant in a case: seconds of each round, and the rest of one iteration, over all ranks."""

    wall: list[float]
    """Of the slowest rank."""
    cpu: list[float]
    """Of all threads of all ranks together."""
    step: list[float]
    wire: int
    """Bytes sent by all ranks together."""
    calls: int
    """Into process groups, by the rank that makes most of them."""
    state: int
    """Bytes on the fullest rank."""
    difference: float
    """The largest of any parameter to the baseline's, after `METERED` steps from equal weights on equal data."""


Results = dict[str, Result]
METERED = 3
"""Steps before the race. The last is the one with the meters on; DDP settles on its buckets in the second."""
LAPS = 2
"""Iterations timed in a turn."""


def run_race(case: Case, names: Sequence[str], rounds: int) -> Results:
    """Each contestant's result. The baseline must be the first of `names`."""
    by_rank = run_ranks(case.world, _compete, case, list(names), rounds, limit_s=900, start="forkserver")
    return {name: _over_ranks([of_rank[name] for of_rank in by_rank]) for name in names}


def _over_ranks(ranks: Sequence[tuple[Meters, list[Lap]]]) -> Result:
    meters = [meter for meter, _ in ranks]
    rounds = list(zip(*(laps for _, laps in ranks), strict=True))
    return Result(
        wall=[max(lap.wall for lap in laps) for laps in rounds],
        cpu=[sum(lap.cpu for lap in laps) for laps in rounds],
        step=[max(lap.step for lap in laps) for laps in rounds],
        wire=sum(meter.sent for meter in meters),
        calls=max(meter.calls for meter in meters),
        state=max(meter.state for meter in meters),
        difference=max(meter.difference for meter in meters),
    )


def _compete(case: Case, names: list[str], rounds: int) -> dict[str, tuple[Meters, list[Lap]]]:
    workload = WORKLOADS[case.workload]
    batch = workload.batch(dist.get_rank())
    model = workload.build()
    trainers: dict[str, Trainer] = {}
    meters: dict[str, Meters] = {}
    reference: list[Tensor] = []
    for name in names:
        trainers[name] = CONTESTANTS[name].make(deepcopy(model), workload, RECIPES[case.recipe])
        meters[name] = _meter(trainers[name], batch, reference)
        if name == BASELINE:
            reference = [param.detach().clone() for param in trainers[name].params()]
    del model, reference
    laps: dict[str, list[Lap]] = {name: [] for name in names}
    for _, name in turns(names, rounds):
        laps[name] += _laps(trainers[name], batch)
    return {name: (meters[name], laps[name]) for name in names}


def _meter(trainer: Trainer, batch: Tensor, reference: Sequence[Tensor]) -> Meters:
    for _ in range(METERED - 1):
        trainer.iterate(batch)
    trainer.finish()
    before = _all_sent()
    with counted_calls() as calls:
        trainer.iterate(batch)
        trainer.finish()
    sent = _all_sent() - before
    return Meters(sent, len(calls), trainer.state_bytes(), _difference(trainer.params(), reference))


def _all_sent() -> int:
    dist.barrier()
    time.sleep(0.1)  # what was received last is acknowledged late
    return sent_bytes()


@torch.no_grad()
def _difference(params: Sequence[Tensor], reference: Sequence[Tensor]) -> float:
    pairs = zip(params, reference, strict=True) if reference else ()
    return max((float((ours - theirs).abs().max()) for ours, theirs in pairs), default=0.0)


def _laps(trainer: Trainer, batch: Tensor) -> list[Lap]:
    """The first iteration only leads, so that each timed one finds under way what it will itself leave so."""
    trainer.iterate(batch)
    laps = [_lap(trainer, batch) for _ in range(LAPS)]
    trainer.finish()
    return laps


def _lap(trainer: Trainer, batch: Tensor) -> Lap:
    start, cpu = time.perf_counter(), time.process_time()
    trainer.backward(trainer.loss(batch))
    ready = time.perf_counter()
    trainer.step()
    stepped = time.perf_counter()
    trainer.zero_grad()
    return Lap(time.perf_counter() - start, time.process_time() - cpu, stepped - ready)
