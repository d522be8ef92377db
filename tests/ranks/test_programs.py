"""Random training programs under zeroshard do what they do under DDP with the plain optimizer."""

from __future__ import annotations

import pytest

from tests.programs.program import MODES, Backward, Block, Clip, Mode, Optimizer, Program, Step, ZeroGrad
from tests.programs.runner import run_program
from tests.programs.script import write_script
from tests.programs.strategies import random_program
from tests.support import RankPool

FAST, SLOW = range(28), range(1000, 1150)
"""Seeds. `make programs` runs thousands of others."""


def check(pool: RankPool, program: Program) -> None:
    verdict = run_program(pool, program)
    if verdict.is_failure:
        pytest.fail(f"{verdict.kind}\n{verdict.detail}\n\n{write_script(program)}", pytrace=False)


@pytest.mark.parametrize("mode", MODES)
def test_some_programs_of_each_mode(rank_pool: RankPool, mode: str) -> None:
    for seed in FAST[:: len(MODES)]:
        check(rank_pool, random_program(seed, 2, [mode]))


def test_unused_experts_between_passes_that_add_to_clipped_gradients(rank_pool: RankPool) -> None:
    """A bucket may be sent before DDP hands over one of its gradients, and writes it once more: no edit of the user."""
    clipped_pass = (Backward(), Clip("inf"))
    program = Program(
        ranks=3,
        mode=Mode("ddp_hook"),
        blocks=(Block("MLP"), Block("MLP"), Block("MLP"), Block("Experts", variant=1)),
        optimizer=Optimizer("SGD", (("lr", 0.01),)),
        loop=(Backward((0, 2, 1)), Clip("inf"), *clipped_pass, *clipped_pass, Step(), ZeroGrad()),
    )
    check(rank_pool, program)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [2, 3])
def test_many_programs(rank_pool: RankPool, ranks: int) -> None:
    for seed in SLOW:
        check(rank_pool, random_program(seed, ranks))
