"""Compare rules (Muon on the matrices of a GPT, AdamW on the rest) with the unsharded pair and torch's ZeRO.

python benchmarks/muon.py [--quick] [--ranks N ...] [--rounds N] [--out DIR] [--no-fail]
"""

import argparse
import statistics
import sys
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.cases.muon import (  # noqa: E402
    BASELINE,
    METERED_STEPS,
    OURS,
    TORCH,
    Result,
    Size,
    run_race,
    split_params,
)
from benchmarks.harness.report import Appendix, Row, Section, finish, markdown, measure, ratio_row  # noqa: E402
from benchmarks.harness.resources import MIB  # noqa: E402
from benchmarks.harness.timing import ms, ratio  # noqa: E402

TITLE = "Muon and AdamW in one optimizer"
NOTE = (
    "One thread per rank, gloo over loopback. Contestants run in turns in the same processes. A turn is three "
    "iterations; the last two are timed. Ratios are computed per iteration; the table shows their median, with the "
    "quartiles in parentheses. Bytes on the wire are those of all ranks. State is that of the fullest rank; ideal is 4 "
    "bytes for each element that Muon updates and 8 for each of AdamW's, divided by the ranks. Work is the counted "
    "operations of a step: the slowest rank relative to the mean. For torch's ZeRO it is counted with the same costs "
    "and torch's own partition. Step times are CPU times of the inner optimizers' steps: the slowest rank relative to "
    "the mean. The difference is the largest difference of any parameter from the unsharded pair's after "
    f"{METERED_STEPS} steps from equal weights with equal gradients."
)
SIZES = {False: Size(), True: Size(vocabulary=64, context=16, width=32, layers=9)}
Board = dict[int, dict[str, Result]]


def sections(options: argparse.Namespace, board: Board) -> Mapping[str, Section]:
    size = SIZES[options.quick]
    return {f"{world} ranks": partial(_race, board, size, world, options.rounds) for world in options.ranks}


def _race(board: Board, size: Size, world: int, rounds: int) -> list[Row]:
    results = board[world] = run_race(size, world, rounds)
    ours, peer = results[OURS], results[TORCH]
    label = f"GPT, {world} ranks"
    ideal = _ideal_state(size) / world
    rows = [
        ratio_row(f"iteration, {label}", ms(ours.wall), f"{ms(other.wall)} {name}", ratio(ours.wall, other.wall))
        for name, other in results.items()
        if name in (BASELINE, TORCH)
    ]
    rows.append(Row(f"bytes on the wire, {label}", *_wire_cells(results), _wire_ratio(ours, results)))
    state, work = f"{_mib(peer.state)} {TORCH}", f"{peer.slowest:.3f} {TORCH}"
    rows.append(Row(f"state on the fullest rank, {label}", _mib(ours.state), state, ours.state / ideal))
    rows.append(Row(f"work of the slowest rank, {label}", f"{ours.slowest:.3f}", work, ours.slowest, bar=1.05))
    rows.append(Row(f"difference, {label}", f"{ours.difference:.2g}", BASELINE, ours.difference, bar=0))
    return rows


def _ideal_state(size: Size) -> int:
    """Return the bytes of state of all ranks."""
    muon, adamw = (sum(param.numel() for param in params) for params in split_params(size.build()))
    return 4 * muon + 8 * adamw


def _wire_ratio(result: Result, results: Mapping[str, Result]) -> float:
    return result.wire / results[BASELINE].wire


def _wire_cells(results: Mapping[str, Result]) -> tuple[str, str]:
    return _mib(results[OURS].wire), f"{_mib(results[BASELINE].wire)} {BASELINE}"


def _mib(count: int) -> str:
    return f"{count / MIB:.1f} MiB"


HEAD = (
    *("ranks", "", "difference", "iteration / unsharded pair", "bytes on the wire / unsharded pair"),
    *("state on the fullest rank / ideal", "work, slowest rank / mean", "step time, slowest rank / mean"),
)


def table(board: Board, size: Size) -> str:
    lines: list[tuple[str, ...]] = [HEAD]
    for world, results in board.items():
        for name, result in results.items():
            time = ratio(result.wall, results[BASELINE].wall).median
            state = result.state * world / _ideal_state(size)
            ratios = (time, _wire_ratio(result, results), state, result.slowest, statistics.median(result.inner))
            lines.append((str(world), name, f"{result.difference:.2g}", *(f"{value:.3f}" for value in ratios)))
    return "## All\n\n" + markdown(lines)


def main() -> int:
    options = _parse_options()
    board: Board = {}
    rows = measure(sections(options, board), writes_results=options.out is not None)
    races = {world: {name: asdict(result) for name, result in results.items()} for world, results in board.items()}
    record = {"races": races}
    more = Appendix(table(board, SIZES[options.quick]), record)
    print(more.text)
    return finish(rows, TITLE, NOTE, options.out and options.out / "muon", fail=not options.no_fail, more=more)


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model, 2 rounds; write no results")
    parser.add_argument("--ranks", nargs="+", type=int, help="numbers of processes; write no results")
    parser.add_argument("--rounds", type=int, help="number of rounds; write no results")
    parser.add_argument("--out", type=Path, help="directory for muon.md and muon.json, even of a partial run")
    parser.add_argument("--no-fail", action="store_true", help="exit with 0 even if a bar is missed")
    options = parser.parse_args()
    if options.out is None and not (options.quick or options.ranks or options.rounds):
        options.out = ROOT / "benchmarks" / "results"
    options.ranks = options.ranks or [2, 4]
    options.rounds = options.rounds or (2 if options.quick else 6)
    return options


if __name__ == "__main__":
    sys.exit(main())
