"""Ranks killed while training: the others resume in their processes from peer snapshots, with unchanged results.

`ZEROSHARD_LOSSES` sets the number of kills; `make faults` runs a few hundred.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType

import pytest

from tests.support.fault_report import Count, keep_count
from tests.support.lost_ranks import (
    COMPARED_STEPS,
    EVERY,
    RESTORE_KILLS,
    Order,
    RankProcess,
    SnapshotKill,
    train_reference,
)
from tests.support.pool import open_store
from tests.support.tiers import sampled

LOSSES = int(os.environ.get("ZEROSHARD_LOSSES", "2"))
LONGEST = 0.2
"""Maximum seconds until a kill: long enough for several steps and snapshots."""
RANKS = 4


class Job:
    """Processes that serve as ranks of consecutive jobs, and the expected model of an undisturbed run."""

    def __init__(self, *, overlap: bool) -> None:
        self._store, self._overlap = open_store(), overlap
        self.ranks: list[RankProcess] = []
        self._world_sizes: list[int] = []
        """The world size of each step."""
        self._num_runs = 0
        self.detection_times = list[float]()
        """Seconds from each kill until all other ranks had detected it."""

    def run(
        self,
        ranks: Sequence[RankProcess],
        *,
        is_start: bool = False,
        kills: Mapping[int, SnapshotKill] = MappingProxyType({}),
    ) -> int:
        """Compare values after the first steps, let the ranks train on, and return the step they started from."""
        self._send_orders(ranks, is_start=is_start, snapshot_kills=kills)
        started = [process.receive("started") for process in ranks]
        (step,) = {message.step for message in started}
        assert not [path for message in started for path in message.opened if not path.endswith((".py", ".pyc"))]
        assert step >= EVERY, "a complete snapshot was lost"
        earlier = self._world_sizes[:step] if not is_start else [len(ranks)] * step
        self._world_sizes = [*earlier, *[len(ranks)] * COMPARED_STEPS]
        expected = train_reference(self._world_sizes)
        for process in ranks:
            assert process.receive("trained").values == expected
        self._world_sizes += [len(ranks)] * 10_000  # more steps than there can be until a kill
        return step

    def _send_orders(
        self,
        ranks: Sequence[RankProcess],
        *,
        is_start: bool = False,
        snapshot_kills: Mapping[int, SnapshotKill] = MappingProxyType({}),
        restore_kills: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        self._num_runs += 1
        self.ranks = list(ranks)
        for rank, process in enumerate(ranks):
            kills = snapshot_kills.get(rank), restore_kills.get(rank, "")
            process.send(Order(f"job{self._num_runs}", rank, len(ranks), is_start, *kills))

    def lose_in_restore(self, ranks: Sequence[RankProcess], lost: int, phase: str) -> list[RankProcess]:
        """Lose one more rank while all restore from peers; return the others once they have detected it."""
        self._send_orders(ranks, restore_kills={lost: phase})
        return self.survivors(lost, ranks[lost].receive("dying").time)

    def restore_errors(self, ranks: Sequence[RankProcess]) -> set[str]:
        """Return the errors of ranks that cannot resume."""
        self._send_orders(ranks)
        return {process.receive("rejected").reason for process in ranks}

    def start_process(self) -> RankProcess:
        return RankProcess(self._store.port, overlap=self._overlap)

    def lose(self, lost: int) -> list[RankProcess]:
        """Kill a rank and return the others once they have detected it."""
        killed_at = time.monotonic()
        self.ranks[lost].kill()
        return self.survivors(lost, killed_at)

    def survivors(self, lost: int, killed_at: float | None = None) -> list[RankProcess]:
        """Return the other ranks once they have detected the loss."""
        survivors = [process for process in self.ranks if process is not self.ranks[lost]]
        detected_at = [process.receive("lost").time for process in survivors]
        self.detection_times += [] if killed_at is None else [max(detected_at) - killed_at]
        return survivors


@contextmanager
def start_job(*, overlap: bool = False, kills: Mapping[int, SnapshotKill] = MappingProxyType({})) -> Iterator[Job]:
    job = Job(overlap=overlap)
    try:
        job.run([job.start_process() for _ in range(RANKS)], is_start=True, kills=kills)
        yield job
    finally:
        for process in job.ranks:
            process.close()


@pytest.mark.timeout(60 + 20 * LOSSES)
@sampled("overlap", [False, True], ids=["plain", "overlap"])
def test_kill_at_random_time_while_training(overlap: bool) -> None:
    """Resume with one rank fewer, or with new processes that replace some or all of the lost ranks."""
    draw = random.Random(overlap)
    with start_job(overlap=overlap) as job:
        for _ in range(LOSSES):
            time.sleep(draw.uniform(0, LONGEST))  # the outcome must be right at any time
            ranks = job.lose(draw.randrange(len(job.ranks)))
            while len(ranks) < 2 or (len(ranks) < RANKS and draw.random() < 0.5):
                ranks.insert(draw.randrange(len(ranks) + 1), job.start_process())
            job.run(ranks)
    option = ", overlapped all-gather" if overlap else ""
    case, done = f"2 to 4 ranks{option}", "one rank is killed at a random time; no file is read"
    keep_count(Count("peers", case, done, LOSSES, known=max(job.detection_times)))


@pytest.mark.timeout(60 + 20 * LOSSES)
@sampled("phase", RESTORE_KILLS)
def test_second_rank_killed_during_restore_from_peers(phase: str) -> None:
    """Neither of the two lost ranks stored the other's snapshot, so every shard survives."""
    draw, rounds = random.Random(phase), max(1, LOSSES // 10)
    with start_job() as job:
        for _ in range(rounds):
            lost = draw.randrange(RANKS)
            ranks = job.lose(lost)
            second = job.ranks[(lost + 2) % RANKS]
            ranks = job.lose_in_restore(ranks, ranks.index(second), phase)
            while len(ranks) < RANKS:
                ranks.insert(draw.randrange(len(ranks) + 1), job.start_process())
            job.run(ranks)
    case, done = f"4 ranks, second kill while {phase}", "one rank is killed, then another in `restore_from_peers`"
    keep_count(Count("peers", case, done, 2 * rounds, known=max(job.detection_times)))


@pytest.mark.timeout(120)
@sampled("phase", RESTORE_KILLS)
def test_peer_with_the_snapshot_killed_during_restore(phase: str) -> None:
    """No rank has the shard until the next snapshot is complete: all survivors raise."""
    with start_job() as job:
        ranks = job.lose(1)
        ranks = job.lose_in_restore(ranks, 1, phase)
        (reason,) = job.restore_errors(ranks)
        assert "no remaining rank holds the shards of rank 1" in reason
        assert "Nothing was changed. Load a checkpoint." in reason


KILL_STEP = 3 * EVERY
"""The step of a snapshot that is not the first and is not taken while values are compared."""


@pytest.mark.timeout(120)
@sampled("lost", [0, 2])
def test_rank_killed_while_sending_snapshot(lost: int) -> None:
    """A partial snapshot is unusable, but the previous one is still available."""
    with start_job(kills={lost: SnapshotKill(KILL_STEP, "partly sent")}) as job:
        assert job.run(job.survivors(lost)) == KILL_STEP - EVERY


@pytest.mark.timeout(120)
def test_rank_killed_before_snapshot_is_confirmed() -> None:
    """No rank got a confirmation, but the snapshot is complete."""
    with start_job(kills={0: SnapshotKill(KILL_STEP, "all reported")}) as job:
        assert job.run(job.survivors(0)) == KILL_STEP
