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
    starts, plain = agents.worker_starts(), UnshardedRun()
    assert starts[0].step == 0
    assert all(before.step <= after.step for before, after in pairwise(starts)), starts
    for start, end in zip(starts, [*(start.step for start in starts[1:]), STEPS], strict=True):
        plain.train(range(start.step + 1, end + 1), start.world_size)
    saved = UnshardedRun.load(agents.folder)
    assert_same(saved.model.state_dict(), plain.model.state_dict(), f"the model after {starts}")
    assert_same(saved.optimizer.state_dict(), plain.optimizer.state_dict(), f"the optimizer after {starts}")
    keep_count(Count("elastic", case, done, kills))


def possible_saves(step: int) -> set[int]:
    """Return the steps of the checkpoint to resume from if a process stops before `step`.

    It is the last one that was due, or the one before if that was not finished.
    """
    last = (step - 1) // EVERY * EVERY
    return {last, last - EVERY}


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=longer), pytest.param(2, marks=longer)])
def test_resume_on_three_of_four_ranks(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    hold = Hold(world_size=4, step=draw.randint(2 * EVERY + 1, STEPS), file=str(tmp_path / "hold"))
    victim = draw.randrange(1, 4)
    with Agents(tmp_path, *OPTIONS) as agents:
        for number in range(4):
            agents.start(hold if number == victim else None, is_host=number == 0)
        worker, agent = agents.wait_for_hold(hold)
        agents.kill(agent, worker)
        agents.finish()
        starts = agents.worker_starts()
        assert [start.world_size for start in starts][-2:] == [4, 3]
        assert starts[-1].step in possible_saves(hold.step)
        check(agents, f"4 ranks, then 3, seed {seed}", "an agent and its worker are killed", 1)


@longer
@pytest.mark.timeout(240)
def test_rank_0_killed(tmp_path: Path) -> None:
    """Rank 0 writes manifests and hosts the workers' store.

    On one host torchrun numbers agents by process, so the agent started first has rank 0.
    """
    hold = Hold(world_size=4, step=2 * EVERY + 1, file=str(tmp_path / "hold"))
    with Agents(tmp_path, *OPTIONS) as agents:
        for number in range(4):
            agents.start(hold if number == 0 else None, is_host=number == 3)
        worker, agent = agents.wait_for_hold(hold)
        agents.kill(agent, worker)
        agents.finish()
        assert {line["pid"] for line in agents.events("start") if line["rank"] == 0} >= {worker}
        assert [start.world_size for start in agents.worker_starts()][-2:] == [4, 3]
        check(agents, "4 ranks, then 3 without rank 0", "the agent and the worker of rank 0 are killed", 1)


@longer
@pytest.mark.timeout(240)
def test_resume_when_fourth_rank_joins(tmp_path: Path) -> None:
    hold = Hold(world_size=3, step=3 * EVERY + 2, file=str(tmp_path / "hold"))
    with Agents(tmp_path, *OPTIONS) as agents:
        for number in range(3):
            agents.start(hold, is_host=number == 0)
        agents.wait_for_hold(hold)
        agents.start()
        agents.finish()
        starts = agents.worker_starts()
        assert [start.world_size for start in starts][-2:] == [3, 4]
        assert starts[-1].step in possible_saves(hold.step)
        check(agents, "3 ranks, then 4", "an agent joins", 0)


@longer
@pytest.mark.timeout(240)
def test_one_rank_killed_and_another_joins(tmp_path: Path) -> None:
    """Surviving ranks count one restart more than the new one."""
    first = Hold(world_size=4, step=EVERY + 2, file=str(tmp_path / "first"))
    second = Hold(world_size=3, step=3 * EVERY + 2, file=str(tmp_path / "second"))
    with Agents(tmp_path, *OPTIONS) as agents:
        for number, hold in enumerate((None, first, second, None)):
            agents.start(hold, is_host=number == 0)
        worker, agent = agents.wait_for_hold(first)
        agents.kill(agent, worker)
        agents.wait_for_hold(second)
        agents.start()
        agents.finish()
        assert [start.world_size for start in agents.worker_starts()][-3:] == [4, 3, 4]
        check(agents, "4 ranks, then 3, then 4", "an agent and its worker are killed, then another agent joins", 1)


@longer
@pytest.mark.timeout(240)
def test_killed_worker_restarts_all_workers_of_its_host(tmp_path: Path) -> None:
    hold = Hold(world_size=4, step=EVERY + 3, file=str(tmp_path / "hold"))
    with Agents(tmp_path, *OPTIONS, min_agents=1, workers_per_agent=4) as agents:
        agents.start(hold, is_host=True)
        worker, _ = agents.wait_for_hold(hold)
        agents.kill(worker)
        agents.finish()
        assert [start.world_size for start in agents.worker_starts()] == [4, 4]
        assert agents.worker_starts()[-1].restart == 1
        check(agents, "4 ranks under one agent", "a worker is killed", 1)
