"""Random training programs give the same results under zeroshard as under DDP with the plain optimizer."""

from __future__ import annotations

import pytest

from tests.programs.injected_bugs import INJECTED_BUGS
from tests.programs.program import MODES, Backward, Block, Clip, Mode, Optimizer, Program, Step, ZeroGrad
from tests.programs.runner import DIFFERENT, run_program
from tests.programs.script import write_script
from tests.programs.strategies import random_program
from tests.support import RankPool

FAST_SEEDS, SLOW_SEEDS = range(28), range(1000, 1150)
"""Seeds. `make programs` runs thousands of others."""


def check_program(pool: RankPool, program: Program) -> None:
    verdict = run_program(pool, program)
    if verdict.is_failure:
        pytest.fail(f"{verdict.kind}\n{verdict.detail}\n\n{write_script(program)}", pytrace=False)


@pytest.mark.parametrize("mode", MODES)
def test_random_programs_of_each_mode_match_ddp(rank_pool: RankPool, mode: str) -> None:
    for seed in FAST_SEEDS[:: len(MODES)]:
        check_program(rank_pool, random_program(seed, 2, [mode]))


def test_ddp_hook_with_unused_experts_and_passes_after_clipping(rank_pool: RankPool) -> None:
    """DDP may write a gradient of a bucket again after the bucket was sent. That is not an edit by the user."""
    clipped_pass = (Backward(), Clip("inf"))
    program = Program(
        ranks=3,
        mode=Mode("ddp_hook"),
        blocks=(Block("MLP"), Block("MLP"), Block("MLP"), Block("Experts", variant=1)),
        optimizer=Optimizer("SGD", (("lr", 0.01),)),
        loop=(Backward((0, 2, 1)), Clip("inf"), *clipped_pass, *clipped_pass, Step(), ZeroGrad()),
    )
    check_program(rank_pool, program)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [2, 3])
def test_many_random_programs_match_ddp(rank_pool: RankPool, ranks: int) -> None:
    for seed in SLOW_SEEDS:
        check_program(rank_pool, random_program(seed, ranks))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("injected_bug", INJECTED_BUGS)
def test_injected_bug_is_found_within_200_programs(rank_pool: RankPool, injected_bug: str) -> None:
    programs = (random_program(seed, 2 + seed % 2) for seed in range(2000, 2200))
    assert any(run_program(rank_pool, program, injected_bug=injected_bug).kind == DIFFERENT for program in programs)
