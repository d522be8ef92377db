"""Rules: Muon on the matrices of a GPT, AdamW on the rest, against the unsharded pair and torch's ZeRO.

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

from benchmarks.cases.muon import BASELINE, METERED, OURS, TORCH, Result, Size, divided, run_race  # noqa: E402
from benchmarks.harness.report import Appendix, Row, Section, finish, markdown, measure, ratio_row  # noqa: E402
from benchmarks.harness.resources import MIB  # noqa: E402
from benchmarks.harness.timing import ms, ratio  # noqa: E402

TITLE = "Muon and AdamW in one"
NOTE = (
    "One thread a rank, gloo over loopback. Contestants run in turns in the same processes, three iterations a turn of "
    "which the last two are timed; a ratio is the median of the iterations' own quotients, with their quartiles in "
    "parentheses. Bytes on the wire are those of all ranks. State is that of the fullest rank; ideal is 4 bytes for "
    "each element that Muon updates and 8 for each of AdamW's, divided by the ranks. Work is counted: operations of a "
    "step, of the slowest rank over the mean; for torch's ZeRO with the same costs from its own partition. Step times "
    "are CPU times of the inner optimizers' steps, of the slowest rank over the mean. The difference is the largest of "
    f"any parameter to the unsharded pair's after {METERED} steps from equal weights with equal gradients."
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
    ideal = _ideal(size) / world
    rows = [
        ratio_row(f"iteration, {label}", ms(ours.wall), f"{ms(it.wall)} {name}", ratio(ours.wall, it.wall))
        for name, it in results.items()
        if name in (BASELINE, TORCH)
    ]
    rows.append(Row(f"bytes on the wire, {label}", *_of_baseline(results), _wire(ours, results)))
    state, work = f"{_mib(peer.state)} {TORCH}", f"{peer.slowest:.3f} {TORCH}"
    rows.append(Row(f"state on the fullest rank, {label}", _mib(ours.state), state, ours.state / ideal))
    rows.append(Row(f"work of the slowest rank, {label}", f"{ours.slowest:.3f}", work, ours.slowest, bar=1.05))
    rows.append(Row(f"difference, {label}", f"{ours.difference:.2g}", BASELINE, ours.difference, bar=0))
    return rows


def _ideal(size: Size) -> int:
    muon, rest = (sum(param.numel() for param in part) for part in divided(size.build()))
    return 4 * muon + 8 * rest


def _wire(it: Result, results: Mapping[str, Result]) -> float:
    return it.wire / results[BASELINE].wire


def _of_baseline(results: Mapping[str, Result]) -> tuple[str, str]:
    return _mib(results[OURS].wire), f"{_mib(results[BASELINE].wire)} {BASELINE}"


def _mib(count: int) -> str:
    return f"{count / MIB:.1f} MiB"


HEAD = (
    *("ranks", "", "difference", "iteration, of the unsharded pair's", "bytes on the wire, of the unsharded pair's"),
    *("state on the fullest rank, of the ideal", "work of the slowest rank", "step time of the slowest rank"),
)


def table(board: Board, size: Size) -> str:
    lines: list[tuple[str, ...]] = [HEAD]
    for world, results in board.items():
        for name, it in results.items():
            time = ratio(it.wall, results[BASELINE].wall).median
            state = it.state * world / _ideal(size)
            figures = (time, _wire(it, results), state, it.slowest, statistics.median(it.inner))
            lines.append((str(world), name, f"{it.difference:.2g}", *(f"{figure:.3f}" for figure in figures)))
    return "## All\n\n" + markdown(lines)


def main() -> int:
    options = _options()
    board: Board = {}
    rows = measure(sections(options, board))
    record = {"races": {world: {name: asdict(it) for name, it in of.items()} for world, of in board.items()}}
    more = Appendix(table(board, SIZES[options.quick]), record)
    print(more.text)
    return finish(rows, TITLE, NOTE, options.out and options.out / "muon", fail=not options.no_fail, more=more)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model, 2 rounds; writes no results")
    parser.add_argument("--ranks", nargs="+", type=int, help="so many processes; writes no results")
    parser.add_argument("--rounds", type=int, help="so many; writes no results")
    parser.add_argument("--out", type=Path, help="where muon.md and muon.json go, also of a partial run")
    parser.add_argument("--no-fail", action="store_true", help="exit with 0 even where a bar is missed")
    options = parser.parse_args()
    if options.out is None and not (options.quick or options.ranks or options.rounds):
        options.out = ROOT / "benchmarks" / "results"
    options.ranks = options.ranks or [2, 4]
    options.rounds = options.rounds or (2 if options.quick else 6)
    return options


if __name__ == "__main__":
    sys.exit(main())
