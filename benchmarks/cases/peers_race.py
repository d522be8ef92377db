"""Train the same model with all contestants in the same processes: a few iterations each, in turns."""

import time
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..harness.calls import count_calls
from ..harness.models import RECIPES
from ..harness.ranks import run_ranks
from ..harness.resources import sent_bytes
from ..harness.timing import turns
from ..harness.workloads import WORKLOADS
from .peers_trainers import BASELINE, CONTESTANTS, Trainer


class Case(NamedTuple):
    """A workload, a world size and an optimizer recipe; by name."""

    workload: str
    world: int
    recipe: str


class Lap(NamedTuple):
    """One iteration on one rank, in seconds."""

    wall: float
    cpu: float
    step: float


class Meters(NamedTuple):
    """Measurements of one rank that are the same in every run."""

    sent: int
    calls: int
    state: int
    difference: float


@dataclass(frozen=True)
class Result:
    """The result of a contestant in a case over all ranks: seconds of each round, and counts of one iteration."""

    wall: list[float]
    """Time of the slowest rank."""
    cpu: list[float]
    """CPU time of all threads of all ranks."""
    step: list[float]
    """Time of `step()` on the slowest rank."""
    wire: int
    """Bytes sent by all ranks."""
    calls: int
    """Calls into process groups, by the rank with most of them."""
    state: int
    """Bytes on the fullest rank."""
    difference: float
    """Largest difference of any parameter from the baseline's, after `METERED_STEPS` steps from equal weights on equal
    data."""


Results = dict[str, Result]
METERED_STEPS = 3
"""Steps before the race. Only the last one is measured; DDP rebuilds its buckets in the second."""
LAPS_PER_TURN = 2
"""Timed iterations per turn."""


def run_race(case: Case, names: Sequence[str], runs: int, rounds: int) -> Results:
    """Return each contestant's result over several runs, each in new processes.

    The baseline must be the first of `names`. Where memory lies, and how processes are scheduled, differs between runs
    more than between the rounds of one run.
    """
    results = []
    for _ in range(runs):
        by_rank = run_ranks(case.world, _compete, case, list(names), rounds, limit_s=900, start="forkserver")
        results.append({name: _combine_ranks([results[name] for results in by_rank]) for name in names})
    return {name: _combine_runs([result[name] for result in results]) for name in names}


def _combine_runs(runs: Sequence[Result]) -> Result:
    """Collect the times of all runs. Counts are equal in all of them."""
    return replace(
        runs[-1],
        wall=[seconds for run in runs for seconds in run.wall],
        cpu=[seconds for run in runs for seconds in run.cpu],
        step=[seconds for run in runs for seconds in run.step],
    )


def _combine_ranks(ranks: Sequence[tuple[Meters, list[Lap]]]) -> Result:
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
        laps[name] += _time_laps(trainers[name], batch)
    return {name: (meters[name], laps[name]) for name in names}


def _meter(trainer: Trainer, batch: Tensor, reference: Sequence[Tensor]) -> Meters:
    for _ in range(METERED_STEPS - 1):
        trainer.iterate(batch)
    trainer.finish()
    before = _read_sent_bytes()
    with count_calls() as calls:
        trainer.iterate(batch)
        trainer.finish()
    sent = _read_sent_bytes() - before
    return Meters(sent, len(calls), trainer.state_bytes(), _largest_difference(trainer.params(), reference))


def _read_sent_bytes() -> int:
    dist.barrier()
    time.sleep(0.1)  # the last messages are acknowledged late
    return sent_bytes()


@torch.no_grad()
def _largest_difference(params: Sequence[Tensor], reference: Sequence[Tensor]) -> float:
    pairs = zip(params, reference, strict=True) if reference else ()
    return max((float((ours - theirs).abs().max()) for ours, theirs in pairs), default=0.0)


def _time_laps(trainer: Trainer, batch: Tensor) -> list[Lap]:
    """Time iterations after a warm-up, which leaves as many messages in flight as each timed iteration."""
    trainer.iterate(batch)
    laps = [_time_lap(trainer, batch) for _ in range(LAPS_PER_TURN)]
    trainer.finish()
    return laps


def _time_lap(trainer: Trainer, batch: Tensor) -> Lap:
    start, cpu_start = time.perf_counter(), time.process_time()
    trainer.backward(trainer.loss(batch))
    step_start = time.perf_counter()
    trainer.step()
    step_end = time.perf_counter()
    trainer.zero_grad()
    return Lap(time.perf_counter() - start, time.process_time() - cpu_start, step_end - step_start)
