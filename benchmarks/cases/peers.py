"""Run the contestants of each case and collect the results on the board."""

import sys

from ..harness.ranks import RanksFailedError
from ..harness.report import Row, failed_row
from .peers_memory import UnavailableError, peak_growth
from .peers_race import Case, run_race
from .peers_rows import Board, Peak
from .peers_trainers import BASELINE, CONTESTANTS, PEERS


def measure_memory(board: Board, case: Case, only: list[str]) -> list[Row]:
    """Measure the memory of each contestant. Leave out those that cannot train. Return failures of ours as rows."""
    failures: list[Row] = []
    peaks = board.peaks.setdefault(case, {})
    for name in _available(board, only):
        try:
            peaks[name] = Peak(*(peak_growth(case, name, in_use=in_use) for in_use in (False, True)))
        except (UnavailableError, RanksFailedError) as error:
            board.absent[name] = str(error).strip().splitlines()[-1]
            print(f"{name} is left out: {error}", file=sys.stderr)
            if isinstance(error, RanksFailedError) and name not in PEERS:
                failures.append(failed_row(name, error))
    return failures


def race(board: Board, case: Case, only: list[str], runs: int, rounds: int) -> list[Row]:
    board.races[case] = run_race(case, _available(board, only), runs, rounds)
    return []


def _available(board: Board, only: list[str]) -> list[str]:
    selected = {BASELINE, *(only or CONTESTANTS)}
    return [name for name in CONTESTANTS if name in selected and name not in board.absent]
