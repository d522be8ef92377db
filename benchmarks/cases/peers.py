"""Who takes part, in which cases, and what goes onto the board."""

import sys

from ..harness.ranks import RanksFailedError
from ..harness.report import Row, failed_row
from .peers_memory import NotHereError, peak_growth
from .peers_race import Case, run_race
from .peers_rows import Board, Peak
from .peers_trainers import BASELINE, CONTESTANTS, PEERS


def train_alone(board: Board, case: Case, only: list[str]) -> list[Row]:
    """Memory of each contestant. One that cannot train is left out of all that follows: a miss if it is ours."""
    missed: list[Row] = []
    peaks = board.peaks.setdefault(case, {})
    for name in _present(board, only):
        try:
            peaks[name] = Peak(*(peak_growth(case, name, in_use=in_use) for in_use in (False, True)))
        except (NotHereError, RanksFailedError) as error:
            board.absent[name] = str(error).strip().splitlines()[-1]
            print(f"{name} is left out: {error}", file=sys.stderr)
            if isinstance(error, RanksFailedError) and name not in PEERS:
                missed.append(failed_row(name, error))
    return missed


def race(board: Board, case: Case, only: list[str], rounds: int) -> list[Row]:
    board.races[case] = run_race(case, _present(board, only), rounds)
    return []


def _present(board: Board, only: list[str]) -> list[str]:
    wanted = {BASELINE, *(only or CONTESTANTS)}
    return [name for name in CONTESTANTS if name in wanted and name not in board.absent]
