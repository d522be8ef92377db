"""Ranks are killed and join under torchrun: the job resumes from the last checkpoint and loses nothing.

The final state must match, bit for bit, a plain optimizer in one process that takes the same steps for as many ranks.
`ZEROSHARD_FAULTS` adds the longer cases; `make faults` sets it.
"""

from __future__ import annotations

import os
import random
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.fault_report import Count, keep_count
from tests.support.launch import Agents, Hold, UnshardedRun
from tests.support.oracles import assert_same

STEPS, EVERY = 20, 4
OPTIONS = ("--steps", str(STEPS), "--every", str(EVERY), "--timeout", "30")

pytestmark = pytest.mark.filterwarnings("ignore:.* was saved by .* ranks")
longer = pytest.mark.skipif("ZEROSHARD_FAULTS" not in os.environ, reason="takes longer: make faults")


def check(agents: Agents, case: str, done: str, kills: int) -> None:
    """Check that every step counted once, at its world size, and that the result matches an uninterrupted run."""
    lives, plain = agents.lives(), UnshardedRun()
    assert lives[0].start == 0
    assert all(before.start <= after.start for before, after in pairwise(lives)), lives
    for life, end in zip(lives, [*(life.start for life in lives[1:]), STEPS], strict=True):
        plain.train(range(life.start + 1, end + 1), life.world_size)
    found = UnshardedRun.saved(agents.folder)
    assert_same(found.model.state_dict(), plain.model.state_dict(), f"the model after {lives}")
    assert_same(found.optimizer.state_dict(), plain.optimizer.state_dict(), f"the optimizer after {lives}")
    keep_count(Count("elastic", case, done, kills))


def last_save(step: int) -> set[int]:
    """Steps that may be saved when a process stops before `step`: the last one due, or if unfinished the one before."""
    last = (step - 1) // EVERY * EVERY
    return {last, last - EVERY}


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=longer), pytest.param(2, marks=longer)])
def test_resume_on_three_of_four_ranks(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    hold = Hold(world_size=4, step=draw.randint(2 * EVERY + 1, STEPS), file=str(tmp_path / "held"))
    victim = draw.randrange(1, 4)
    with Agents(tmp_path, *OPTIONS) as agents:
        for number in range(4):
            agents.start(hold if number == victim else None, is_host=number == 0)
        worker, agent = agents.held(hold)
        agents.kill(agent, worker)
        agents.finish()
        lives = agents.lives()
        assert [life.world_size for life in lives][-2:] == [4, 3]
        assert lives[-1].start in last_save(hold.step)
        check(agents, f"4 ranks, and then 3, seed {seed}", "an agent and its worker are killed", 1)


@longer
@pytest.mark.timeout(240)
def test_rank_0_killed(tmp_path: Path) -> None:
    """Rank 0 writes manifests and hosts the workers' store.

    On one host torchrun numbers agents by process, so the agent started first has rank 0.
    """
    hold = Hold(world_size=4, step=2 * EVERY + 1, file=str(tmp_path / "held"))
    with Agents(tmp_path, *OPTIONS) as agents:
        for number in range(4):
            agents.start(hold if number == 0 else None, is_host=number == 3)
        worker, agent = agents.held(hold)
        agents.kill(agent, worker)
        agents.finish()
        assert {line["pid"] for line in agents.events("start") if line["rank"] == 0} >= {worker}
        assert [life.world_size for life in agents.lives()][-2:] == [4, 3]
        check(agents, "4 ranks, and then 3, without the first", "the agent and the worker of rank 0 are killed", 1)


@longer
@pytest.mark.timeout(240)
def test_resume_when_fourth_rank_joins(tmp_path: Path) -> None:
    hold = Hold(world_size=3, step=3 * EVERY + 2, file=str(tmp_path / "held"))
    with Agents(tmp_path, *OPTIONS) as agents:
        for number in range(3):
            agents.start(hold, is_host=number == 0)
        agents.held(hold)
        agents.start()
        agents.finish()
        lives = agents.lives()
        assert [life.world_size for life in lives][-2:] == [3, 4]
        assert lives[-1].start in last_save(hold.step)
        check(agents, "3 ranks, and then 4", "an agent joins", 0)


@longer
@pytest.mark.timeout(240)
def test_one_rank_killed_and_another_joins(tmp_path: Path) -> None:
    """Surviving ranks count one more restart than the new one."""
    first = Hold(world_size=4, step=EVERY + 2, file=str(tmp_path / "first"))
    second = Hold(world_size=3, step=3 * EVERY + 2, file=str(tmp_path / "second"))
    with Agents(tmp_path, *OPTIONS) as agents:
        for number, hold in enumerate((None, first, second, None)):
            agents.start(hold, is_host=number == 0)
        worker, agent = agents.held(first)
        agents.kill(agent, worker)
        agents.held(second)
        agents.start()
        agents.finish()
        assert [life.world_size for life in agents.lives()][-3:] == [4, 3, 4]
        check(agents, "4 ranks, 3, and 4 again", "an agent and its worker are killed, another one joins", 1)


@longer
@pytest.mark.timeout(240)
def test_killed_worker_restarts_all_workers_of_its_host(tmp_path: Path) -> None:
    hold = Hold(world_size=4, step=EVERY + 3, file=str(tmp_path / "held"))
    with Agents(tmp_path, *OPTIONS, fewest=1, per_agent=4) as agents:
        agents.start(hold, is_host=True)
        worker, _ = agents.held(hold)
        agents.kill(worker)
        agents.finish()
        assert [life.world_size for life in agents.lives()] == [4, 4]
        assert agents.lives()[-1].restart == 1
        check(agents, "4 ranks of one agent", "a worker is killed", 1)
