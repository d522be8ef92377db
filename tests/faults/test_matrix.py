"""Every kind of fault in every phase: no rank hangs, nothing is lost, and results match an undisturbed run bit for bit.

A few always run. `make faults` runs all of them `ZEROSHARD_FAULTS` times and writes docs/faults.md.
"""

from __future__ import annotations

import os
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.fault_injection import STEPS, STORE_ON_RANK_0, Fault, Kind, Matrix, Outcome, Place, cells
from tests.support.fault_report import keep_outcomes

ROUNDS = int(os.environ.get("ZEROSHARD_FAULTS", "0"))
CONCURRENT_JOBS = max(1, (os.cpu_count() or 2) // 2)
CONCURRENT_STOPPED_JOBS = 4 * CONCURRENT_JOBS
"""Concurrent jobs with a stopped rank: they mostly wait for a timeout."""
SINGLE_FAULTS = [
    *((Kind.KILLED, place, "shard") for place in Place),
    (Kind.KILLED, Place.INNER_STEP, "drop-in"),
    (Kind.KILLED, Place.BACKWARD, "hybrid"),
    (Kind.KILLED, Place.BACKWARD, "overlapped"),
    (Kind.STOPPED, Place.BACKWARD, "shard"),
    (Kind.KILLED, Place.BACKWARD, STORE_ON_RANK_0),
    (Kind.STOPPED, Place.INNER_STEP, STORE_ON_RANK_0),
    (Kind.CUT, Place.REDUCTION, "shard"),
    (Kind.RAISES, Place.GATHER, "shard"),
    (Kind.RAISES, Place.CONSOLIDATION, "shard"),
    (Kind.MISSHAPEN, Place.REDUCTION, "shard"),
    (Kind.MISSHAPEN, Place.LOAD, "shard"),
    (Kind.SLOW, Place.GATHER, "overlapped"),
]


FAST_FAULTS = [(Kind.KILLED, Place.BACKWARD, "shard"), (Kind.RAISES, Place.GATHER, "shard")]
FAST_FAULTS += [(Kind.MISSHAPEN, Place.REDUCTION, "shard"), (Kind.KILLED, Place.INNER_STEP, "drop-in")]
CELLS = [pytest.param(*cell, marks=() if cell in FAST_FAULTS else pytest.mark.slow) for cell in SINGLE_FAULTS]


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(tmp_path_factory.mktemp("matrix"))


def draw_fault(kind: Kind, place: Place, mode: str, round_number: int) -> Fault:
    """Draw a rank, and a step in which this phase occurs."""
    draw = random.Random(f"{kind} {place} {mode} {round_number}")
    steps = range(2 if place is Place.CONSOLIDATION else STEPS - 1)
    # Ranks of other shard groups have nothing to send.
    ranks = range(2 if (place, mode) == (Place.CONSOLIDATION, "hybrid") else 4)
    rank, step = draw.choice(ranks), draw.choice(steps)
    return Fault(kind, place, 0 if mode == STORE_ON_RANK_0 else rank, step)


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("kind", "place", "mode"), CELLS, ids=lambda value: getattr(value, "name", value))
def test_single_fault(matrix: Matrix, kind: Kind, place: Place, mode: str) -> None:
    outcome = matrix.inject(draw_fault(kind, place, mode, 0), mode)
    assert outcome.restarted or kind in (Kind.RAISES, Kind.MISSHAPEN, Kind.SLOW), "a job cannot continue without a rank"
    if kind is Kind.MISSHAPEN:
        assert not outcome.restarted, "all ranks got the error and could continue"


@pytest.mark.timeout(120 + 60 * ROUNDS * len(cells()))
@pytest.mark.skipif(not ROUNDS, reason="takes long: make faults")
def test_all_faults(matrix: Matrix) -> None:
    def attempt(cell: tuple[Kind, Place, str, int]) -> Outcome | str:
        *_, mode, _ = cell
        fault = draw_fault(*cell)
        try:
            return matrix.inject(fault, mode)
        except AssertionError as error:
            return f"{fault} in {mode}: {error}"

    for mode in {mode for *_, mode in cells()}:  # before concurrent threads would compute them several times
        matrix.digests_without_fault(mode)
        matrix.checkpoint_folder(mode)
    repeated = [(*cell, number) for number in range(ROUNDS) for cell in cells()]
    results = list[Outcome | str]()
    for is_stopped, num_jobs in ((False, CONCURRENT_JOBS), (True, CONCURRENT_STOPPED_JOBS)):
        with ThreadPoolExecutor(num_jobs) as pool:
            results += pool.map(attempt, [cell for cell in repeated if (cell[0] is Kind.STOPPED) == is_stopped])
    failed = [result for result in results if isinstance(result, str)]
    assert not failed, "\n".join([f"{len(failed)} of {len(results)} failed:", *failed])
    keep_outcomes([result for result in results if isinstance(result, Outcome)])
