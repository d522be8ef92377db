"""zeroshard against its peers: whole iterations on three models, in turns within the same processes.

python benchmarks/peers.py [--quick] [--models NAME ...] [--ranks N ...] [--rounds N] [--contestants NAME ...]
                           [--out DIR] [--no-fail]
"""

import argparse
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.cases.peers import race, train_alone  # noqa: E402
from benchmarks.cases.peers_plots import draw  # noqa: E402
from benchmarks.cases.peers_race import METERED, Case  # noqa: E402
from benchmarks.cases.peers_rows import SETTINGS, Board, bar_rows, tables  # noqa: E402
from benchmarks.cases.peers_trainers import CONTESTANTS  # noqa: E402
from benchmarks.harness.report import Appendix, Section, finish, measure  # noqa: E402

TITLE = "zeroshard and its peers"
NOTE = (
    "One thread a rank, gloo over loopback. All contestants of a case run in turns in the same processes, three "
    "iterations a turn of which the last two are timed; a ratio is the median of the iterations' own quotients, with "
    "their quartiles in parentheses. A row on time compares the fastest of ZeRO-1, ZeRO-2 and ZeRO-2 with overlap to "
    "the fastest of all others; the tables below have each. CPU time is of all threads of all ranks. Bytes on the wire "
    "are those of all ranks; collectives, with every send and receive, those of the rank that makes most. State is "
    "that of the fullest rank; ideal is 8 bytes an element, divided by the ranks. Peak growth is what the fullest rank "
    "takes beyond the model as built, in processes of its own: resident memory with the allocator as it is, and memory "
    "in use, for which freed blocks of 1 MiB and more are given back at once. The difference is the largest of any "
    f"parameter after {METERED} steps from equal weights on equal data."
)
MODELS = ("gpt", "embedding", "small")
ROUNDS = {2: 3, 4: 2}


def sections(options: argparse.Namespace, board: Board) -> Mapping[str, Section]:
    """Memory first: it also tells who can take part."""
    alone = [Case(options.models[0], world, "AdamW") for world in options.ranks]
    races = [Case(name, world, recipe) for recipe in SETTINGS for name in options.models for world in options.ranks]
    only = options.contestants
    return {f"memory, {_label(case)}": partial(train_alone, board, case, only) for case in alone} | {
        f"race, {_label(case)}": partial(race, board, case, only, options.rounds or ROUNDS.get(case.world, 2))
        for case in races
    }


def main() -> int:
    options = _options()
    board = Board()
    failures = measure(sections(options, board))
    rows = [*bar_rows(board), *failures]
    more = Appendix(tables(board), board.record())
    status = finish(rows, TITLE, NOTE, options.out and options.out / "peers", fail=not options.no_fail, more=more)
    if options.out is not None:
        draw(board, options.out)
    return status


def _label(case: Case) -> str:
    return f"{case.workload}, {case.world} ranks, {SETTINGS[case.recipe]}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one model, 2 ranks, 2 rounds; writes no results")
    parser.add_argument("--models", nargs="+", choices=MODELS, help="these; writes no results")
    parser.add_argument("--ranks", nargs="+", type=int, help="so many processes; writes no results")
    parser.add_argument("--rounds", type=int, help="so many; writes no results")
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, help="these and DDP; writes no results")
    parser.add_argument("--out", type=Path, help="where peers.md, peers.json and plots go, also of a partial run")
    parser.add_argument("--no-fail", action="store_true", help="exit with 0 even where a bar is missed")
    options = parser.parse_args()
    partial_run = options.quick or options.models or options.ranks or options.rounds or options.contestants
    if options.out is None and not partial_run:
        options.out = ROOT / "benchmarks" / "results"
    options.models = options.models or (MODELS[:1] if options.quick else MODELS)
    options.ranks = options.ranks or ([2] if options.quick else [2, 4])
    options.rounds = options.rounds or (2 if options.quick else None)
    return options


if __name__ == "__main__":
    sys.exit(main())
