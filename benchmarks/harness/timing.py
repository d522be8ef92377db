"""Time contestants in turns: other load on the machine then affects them alike."""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

Run = Callable[[], object]
Times = dict[str, list[float]]
"""Seconds of each round, by contestant."""
Clock = Callable[[Run], float]
"""Runs something and returns how many seconds it took."""


def wall_clock(run: Run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def cuda_clock(run: Run) -> float:
    """Measure from an idle device to the end of all work that `run` launched on it."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def race(contestants: Mapping[str, Run], rounds: int, *, warmup: int = 2, clock: Clock = wall_clock) -> Times:
    """Time all contestants `rounds` times in turns."""
    times: Times = {name: [] for name in contestants}
    for turn, name in turns(list(contestants), warmup + rounds):
        seconds = clock(contestants[name])
        if turn >= warmup:
            times[name].append(seconds)
    return times


def turns(names: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Yield each name once per round, in reverse order every other round. All ranks start a turn together."""
    with _no_garbage_collection():
        for turn in range(rounds):
            for name in names if turn % 2 else reversed(names):
                if dist.is_initialized() and dist.get_world_size() > 1:
                    dist.barrier()
                yield turn, name


def slowest(by_rank: Sequence[Times]) -> Times:
    """Return the slowest rank's time of each round."""
    return {name: [max(turn) for turn in zip(*(times[name] for times in by_rank), strict=True)] for name in by_rank[0]}


@dataclass(frozen=True)
class Spread:
    """A median and the quartiles around it."""

    low: float
    median: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> "Spread":
        if len(values) == 1:
            return Spread(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return Spread(low, median, high)


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Return the spread of each round's own ratio: load that slows a whole round down cancels out."""
    return Spread.of([a / b for a, b in zip(ours, theirs, strict=True)])


def minus(left: Sequence[float], right: Sequence[float]) -> list[float]:
    return [a - b for a, b in zip(left, right, strict=True)]


def ms(seconds: Sequence[float]) -> str:
    """Format the median of a measurement, to three digits."""
    value = 1e3 * statistics.median(seconds)
    return f"{value:.0f} ms" if abs(value) >= 100 else f"{value:.3g} ms"


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
