"""Compare full training iterations of zeroshard and its peers on three models, in turns in the same processes.

python benchmarks/peers.py [--quick] [--models NAME ...] [--ranks N ...] [--runs N] [--rounds N]
                           [--contestants NAME ...] [--out DIR] [--no-fail]
"""

import argparse
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.cases.peers import measure_memory, race  # noqa: E402
from benchmarks.cases.peers_plots import draw  # noqa: E402
from benchmarks.cases.peers_race import METERED_STEPS, Case  # noqa: E402
from benchmarks.cases.peers_rows import SETTINGS, Board, bar_rows, tables  # noqa: E402
from benchmarks.cases.peers_trainers import CONTESTANTS  # noqa: E402
from benchmarks.harness.report import Appendix, Section, finish, measure  # noqa: E402

TITLE = "zeroshard and its peers"
NOTE = (
    "One thread per rank, gloo over loopback. All contestants of a case run in turns in the same processes, in three "
    "runs with new processes each. A turn is three iterations; the last two are timed. Ratios are computed per "
    "iteration; the table shows their median over all runs, with the quartiles in parentheses. Rows about time compare "
    "the fastest of ZeRO-1, ZeRO-2 and ZeRO-2 with overlap with the fastest of all others; the tables below list each "
    "contestant. CPU time is that of all threads of all ranks. Bytes on the wire are those of all ranks. Collectives "
    "include every send and receive, and are those of the rank with most of them. State is that of the fullest rank; "
    "ideal is 8 bytes per element, divided by the ranks. Peak growth is the memory of the fullest rank beyond the "
    "built model, in separate processes: resident memory with the default allocator, and memory in use, where freed "
    "blocks of 1 MiB and more are returned immediately. The difference is the largest difference of any parameter from "
    f"DDP's after {METERED_STEPS} steps from equal weights on equal data."
)
MODELS = ("gpt", "embedding", "small")
RUNS = 3
ROUNDS = 2


def sections(options: argparse.Namespace, board: Board) -> Mapping[str, Section]:
    """Measure memory first: contestants that cannot train are then left out."""
    memory_cases = [Case(options.models[0], world, recipe) for recipe in SETTINGS for world in options.ranks]
    races = [Case(name, world, recipe) for recipe in SETTINGS for name in options.models for world in options.ranks]
    only = options.contestants
    return {f"memory, {_label(case)}": partial(measure_memory, board, case, only) for case in memory_cases} | {
        f"race, {_label(case)}": partial(race, board, case, only, options.runs, options.rounds) for case in races
    }


def main() -> int:
    options = _parse_options()
    board = Board()
    failures = measure(sections(options, board), writes_results=options.out is not None)
    rows = [*bar_rows(board), *failures]
    more = Appendix(tables(board), board.record())
    status = finish(rows, TITLE, NOTE, options.out and options.out / "peers", fail=not options.no_fail, more=more)
    if options.out is not None:
        draw(board, options.out)
    return status


def _label(case: Case) -> str:
    return f"{case.workload}, {case.world} ranks, {SETTINGS[case.recipe]}"


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one model, 2 ranks, 1 run; write no results")
    parser.add_argument("--models", nargs="+", choices=MODELS, help="only these models; write no results")
    parser.add_argument("--ranks", nargs="+", type=int, help="numbers of processes; write no results")
    parser.add_argument("--runs", type=int, help="number of runs, each in new processes; write no results")
    parser.add_argument("--rounds", type=int, help="number of rounds in a run; write no results")
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, help="only these and DDP; write no results")
    parser.add_argument("--out", type=Path, help="directory for peers.md, peers.json and plots, even of a partial run")
    parser.add_argument("--no-fail", action="store_true", help="exit with 0 even if a bar is missed")
    options = parser.parse_args()
    is_partial = (
        options.quick or options.models or options.ranks or options.runs or options.rounds or options.contestants
    )
    if options.out is None and not is_partial:
        options.out = ROOT / "benchmarks" / "results"
    options.models = options.models or (MODELS[:1] if options.quick else MODELS)
    options.ranks = options.ranks or ([2] if options.quick else [2, 4])
    options.runs = options.runs or (1 if options.quick else RUNS)
    options.rounds = options.rounds or ROUNDS
    return options


if __name__ == "__main__":
    sys.exit(main())
