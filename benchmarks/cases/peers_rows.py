"""Results of the races: rows with bars, and tables with everything."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..harness.report import Row, markdown, ratio_row
from ..harness.resources import MIB
from ..harness.timing import ms, ratio
from ..harness.workloads import WORKLOADS, sizes
from .peers_race import Case, Result, Results
from .peers_trainers import BASELINE, CONTESTANTS, FLAT, PEERS

SETTINGS = {"fused AdamW": "fused=True"}
"""AdamW's defaults are left out: on the CPU they are so slow that they flatter every contestant that shards them."""


class Peak(NamedTuple):
    """Bytes on the fullest rank beyond those of the built model."""

    resident: int
    in_use: int
    """Without freed memory that the allocator keeps."""


@dataclass
class Board:
    """All measurements."""

    races: dict[Case, Results] = field(default_factory=dict)
    peaks: dict[Case, dict[str, Peak]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    """Contestants that were left out, and why."""

    def names(self) -> list[str]:
        """Return the contestants that took part in a race."""
        return [name for name in CONTESTANTS if any(name in results for results in self.races.values())]

    def record(self) -> dict[str, Any]:
        """Return all measurements as plain values for JSON."""
        return {
            "races": [
                {**case._asdict(), "results": {name: vars(result) for name, result in results.items()}}
                for case, results in self.races.items()
            ],
            "peak_growth": [{**case._asdict(), "bytes": _as_dicts(peaks)} for case, peaks in self.peaks.items()],
            "left_out": self.absent,
        }


def bar_rows(board: Board) -> list[Row]:
    """Return the rows with bars."""
    if not any(name in results for results in board.races.values() for name in FLAT):
        return []
    times = [row for case, results in board.races.items() for row in _time_rows(case, results)]
    return [*times, *_counter_rows(board), *_memory_rows(board)]


def _time_rows(case: Case, results: Results) -> Iterator[Row]:
    flat, peers = ({name: results[name] for name in side if name in results} for side in (FLAT, PEERS))
    label = f"{case.workload}, {case.world} ranks, {SETTINGS[case.recipe]}"
    yield _fastest_row(f"iteration, {label}", flat, peers, lambda result: result.wall, 1.0)
    yield _fastest_row(f"CPU time of an iteration, {label}", flat, peers, lambda result: result.cpu, None)
    torch_zero = {name: result for name, result in peers.items() if name == "torch ZeRO"}
    if case.workload == "small" and torch_zero:
        yield _fastest_row(f"step phase, {label}", flat, torch_zero, lambda result: result.step, 0.1)


def _fastest_row(
    what: str, flat: Results, peers: Results, times: Callable[[Result], list[float]], bar: float | None
) -> Row:
    """Compare the fastest of ours with the fastest peer."""
    ours, theirs = (min(side, key=lambda name: statistics.median(times(side[name]))) for side in (flat, peers))
    our_times, their_times = times(flat[ours]), times(peers[theirs])
    cells = f"{ms(our_times)} {_short(ours)}", f"{ms(their_times)} {theirs}"
    return ratio_row(what, *cells, ratio(our_times, their_times), bar)


Value = Callable[[Case, Result], float]


def _counter_rows(board: Board) -> Iterator[Row]:
    def wire(case: Case, result: Result) -> float:
        return result.wire / board.races[case][BASELINE].wire

    def state(case: Case, result: Result) -> float:
        return result.state / ideal_state(case)

    def calls(case: Case, result: Result) -> float:
        return result.calls / len(sizes(case.workload))

    yield _worst_row(board, "bytes on the wire / DDP's", wire, 1.02)
    yield _worst_row(board, "state on the fullest rank / ideal", state, 1.001)
    if any(case.workload == "small" for case in board.races):
        yield _worst_row(board, "collectives / tensors", calls, 0.02, workload="small")
    yield _worst_row(board, "difference of parameters to DDP's", lambda _, result: result.difference, None)


def _worst_row(board: Board, what: str, value: Value, bar: float | None, workload: str = "") -> Row:
    """Compare our worst value in any case with the worst value of the best peer. DDP is left out: it does not shard."""
    races = {case: results for case, results in board.races.items() if workload in ("", case.workload)}
    worst = {
        name: max(value(case, results[name]) for case, results in races.items())
        for name in (*FLAT, *PEERS)
        if name != BASELINE and all(name in results for results in races.values())
    }
    ours = max((name for name in worst if name in FLAT), key=lambda name: worst[name])
    theirs = min((name for name in worst if name in PEERS), key=lambda name: worst[name], default="")
    our_cell, their_cell = (f"{worst[name]:.4g} {_short(name)}" if name else "" for name in (ours, theirs))
    return Row(f"{what}, worst of {workload or 'all'} cases", our_cell, their_cell, worst[ours], bar=bar)


def _memory_rows(board: Board) -> Iterator[Row]:
    for case, peaks in board.peaks.items():
        if "zeroshard ZeRO-2" in peaks and "FSDP2" in peaks:
            label = f"{case.workload}, {case.world} ranks, {SETTINGS[case.recipe]}"
            ours, theirs = peaks["zeroshard ZeRO-2"], peaks["FSDP2"]
            bar = 1.0 if case.workload == "gpt" else None
            yield _memory_row(f"peak memory growth, resident, {label}", ours.resident, theirs.resident, bar)
            yield _memory_row(f"peak memory growth, in use, {label}", ours.in_use, theirs.in_use, None)


def _memory_row(what: str, ours: int, theirs: int, bar: float | None) -> Row:
    return Row(what, f"{ours / MIB:.0f} MiB ZeRO-2", f"{theirs / MIB:.0f} MiB FSDP2", ours / theirs, bar=bar)


def tables(board: Board) -> str:
    """Format everything in Markdown: the overview first, then a table for each case."""
    parts = ["## Iteration relative to DDP", overview(board)]
    for case, results in board.races.items():
        peaks = board.peaks.get(case, {})
        parts += [f"## {WORKLOADS[case.workload].label}; {case.world} ranks; {SETTINGS[case.recipe]}"]
        parts += [_table(case, results, peaks)]
    if board.absent:
        parts += ["## Left out", *(f"- {name}: {reason}" for name, reason in board.absent.items())]
    return "\n\n".join(parts)


def overview(board: Board) -> str:
    """Format a table with a line for each contestant and a column for each case."""
    head = ("", *(f"{case.workload}, {case.world}, {SETTINGS[case.recipe]}" for case in board.races))
    lines = [(name, *(_relative(results, name) for results in board.races.values())) for name in board.names()]
    return markdown([head, *lines])


def _relative(results: Results, name: str) -> str:
    if name not in results:
        return ""
    return f"{ratio(results[name].wall, results[BASELINE].wall).median:.2f}"


def _table(case: Case, results: Results, peaks: Mapping[str, Peak]) -> str:
    head = ("", "iteration", "/ DDP", "quartiles", "CPU / DDP", "step", "wire MB", "/ DDP", "collectives")
    more = ("state / ideal", "peak growth MiB: resident", "in use", "difference to DDP")
    return markdown([(*head, *more), *(_line(case, name, results, peaks) for name in results)])


def _line(case: Case, name: str, results: Results, peaks: Mapping[str, Peak]) -> Sequence[str]:
    result, base = results[name], results[BASELINE]
    wall = ratio(result.wall, base.wall)
    return (
        name,
        ms(result.wall),
        f"{wall.median:.2f}",
        f"{wall.low:.2f} to {wall.high:.2f}",
        f"{ratio(result.cpu, base.cpu).median:.2f}",
        ms(result.step),
        f"{result.wire / 1e6:.1f}",
        f"{result.wire / base.wire:.3f}",
        str(result.calls),
        f"{result.state / ideal_state(case):.3f}",
        *((f"{peak / MIB:.0f}" for peak in peaks[name]) if name in peaks else ("", "")),
        f"{result.difference:.1g}",
    )


def ideal_state(case: Case) -> float:
    """Return the bytes of two values of 4 bytes for each element, divided by the ranks."""
    return 2 * 4 * sum(sizes(case.workload)) / case.world


def _as_dicts(peaks: Mapping[str, Peak]) -> dict[str, dict[str, int]]:
    return {name: peak._asdict() for name, peak in peaks.items()}


def _short(name: str) -> str:
    return name.removeprefix("zeroshard ")
