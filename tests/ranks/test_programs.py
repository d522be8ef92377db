"""Random training programs under zeroshard do what they do under DDP with the plain optimizer."""

from __future__ import annotations

import pytest

from tests.programs.program import MODES, Program
from tests.programs.runner import run_program
from tests.programs.script import write_script
from tests.programs.strategies import random_program
from tests.support import RankPool

FAST, SLOW = range(40), range(1000, 1150)
"""Seeds. `make programs` runs thousands of others."""


def check(pool: RankPool, program: Program) -> None:
    verdict = run_program(pool, program)
    if verdict.is_failure:
        pytest.fail(f"{verdict.kind}\n{verdict.detail}\n\n{write_script(program)}", pytrace=False)


@pytest.mark.parametrize("mode", MODES)
def test_some_programs_of_each_mode(rank_pool: RankPool, mode: str) -> None:
    for seed in FAST[:: len(MODES)]:
        check(rank_pool, random_program(seed, 2, [mode]))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [2, 3])
def test_many_programs(rank_pool: RankPool, ranks: int) -> None:
    for seed in SLOW:
        check(rank_pool, random_program(seed, ranks))
