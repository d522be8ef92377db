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
from tests.support.lost_ranks import CHECKED, EVERY, FALLS, End, Order, Survivor, oracle
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
        self.ranks: list[Survivor] = []
        self._sizes: list[int] = []
        """The world size of each step."""
        self._jobs = 0
        self.known = list[float]()
        """Seconds from each kill until all other ranks had detected it."""

    def run(
        self, ranks: Sequence[Survivor], *, begin: bool = False, ends: Mapping[int, End] = MappingProxyType({})
    ) -> int:
        """Compare values after the first steps, let the ranks train on, and return the step they started from."""
        self._tell(ranks, begin=begin, ends=ends)
        begun = [process.hear("begun") for process in ranks]
        (step,) = {news.step for news in begun}
        assert not [path for news in begun for path in news.opened if not path.endswith((".py", ".pyc"))]
        assert step >= EVERY, "a copy that was whole is lost"
        self._sizes = [*(self._sizes[:step] if not begin else [len(ranks)] * step), *[len(ranks)] * CHECKED]
        expected = oracle(self._sizes)
        for process in ranks:
            assert process.hear("trained").values == expected
        self._sizes += [len(ranks)] * 10_000  # as many as there may be until a kill
        return step

    def _tell(
        self,
        ranks: Sequence[Survivor],
        *,
        begin: bool = False,
        ends: Mapping[int, End] = MappingProxyType({}),
        falls: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        self._jobs += 1
        self.ranks = list(ranks)
        for rank, process in enumerate(ranks):
            process.tell(Order(f"job{self._jobs}", rank, len(ranks), begin, ends.get(rank), falls.get(rank, "")))

    def fall(self, ranks: Sequence[Survivor], lost: int, moment: str) -> list[Survivor]:
        """Lose one more rank while all restore from peers; return the others once they have detected it."""
        self._tell(ranks, falls={lost: moment})
        return self.without(lost, ranks[lost].hear("falls").moment)

    def refused(self, ranks: Sequence[Survivor]) -> set[str]:
        """Return the errors of ranks that cannot resume."""
        self._tell(ranks)
        return {process.hear("refused").reason for process in ranks}

    def new(self) -> Survivor:
        return Survivor(self._store.port, overlap=self._overlap)

    def lose(self, lost: int) -> list[Survivor]:
        """Kill a rank and return the others once they have detected it."""
        moment = time.monotonic()
        self.ranks[lost].kill()
        return self.without(lost, moment)

    def without(self, lost: int, moment: float | None = None) -> list[Survivor]:
        left = [process for process in self.ranks if process is not self.ranks[lost]]
        heard = [process.hear("lost").moment for process in left]
        self.known += [] if moment is None else [max(heard) - moment]
        return left


@contextmanager
def job(*, overlap: bool = False, ends: Mapping[int, End] = MappingProxyType({})) -> Iterator[Job]:
    made = Job(overlap=overlap)
    try:
        made.run([made.new() for _ in range(RANKS)], begin=True, ends=ends)
        yield made
    finally:
        for process in made.ranks:
            process.close()


@pytest.mark.timeout(60 + 20 * LOSSES)
@sampled("overlap", [False, True], ids=["plain", "overlap"])
def test_kill_at_random_time_while_training(overlap: bool) -> None:
    """Resume with one rank fewer, or with new processes that replace some or all lost ranks."""
    draw = random.Random(overlap)
    with job(overlap=overlap) as running:
        for _ in range(LOSSES):
            time.sleep(draw.uniform(0, LONGEST))  # the moment; whichever it is, the outcome must be right
            left = running.lose(draw.randrange(len(running.ranks)))
            while len(left) < 2 or (len(left) < RANKS and draw.random() < 0.5):
                left.insert(draw.randrange(len(left) + 1), running.new())
            running.run(left)
    how = ", parameters under way" if overlap else ""
    case, done = f"2 to 4 ranks with a second copy{how}", "one is killed, at any moment; no file is read"
    keep_count(Count("killed", case, done, LOSSES, known=max(running.known)))


@pytest.mark.timeout(60 + 20 * LOSSES)
@sampled("moment", FALLS)
def test_second_rank_killed_during_restore_from_peers(moment: str) -> None:
    """The second rank neither stores the first one's snapshot nor vice versa, so every shard survives."""
    draw, rounds = random.Random(moment), max(1, LOSSES // 10)
    with job() as running:
        for _ in range(rounds):
            lost = draw.randrange(RANKS)
            left = running.lose(lost)
            second = running.ranks[(lost + 2) % RANKS]
            left = running.fall(left, left.index(second), moment)
            while len(left) < RANKS:
                left.insert(draw.randrange(len(left) + 1), running.new())
            running.run(left)
    case, done = f"4 ranks with a second copy, when {moment}", "one is killed, and another one in `restore`"
    keep_count(Count("killed", case, done, 2 * rounds, known=max(running.known)))


@pytest.mark.timeout(120)
@sampled("moment", FALLS)
def test_peer_with_the_snapshot_killed_during_restore(moment: str) -> None:
    """No rank has the shard until the next snapshot is complete: all survivors raise."""
    with job() as running:
        left = running.lose(1)
        left = running.fall(left, 1, moment)
        (reason,) = running.refused(left)
        assert "nobody here holds the share of rank 1" in reason
        assert "Nothing was changed. Load a checkpoint." in reason


SECOND = 3 * EVERY
"""A snapshot that is not the first and is not taken while values are compared."""


@pytest.mark.timeout(120)
@sampled("lost", [0, 2])
def test_rank_killed_while_sending_snapshot(lost: int) -> None:
    """A partial snapshot is unusable, but the previous one is still available."""
    with job(ends={lost: End(SECOND, "in the middle")}) as running:
        assert running.run(running.without(lost)) == SECOND - EVERY


@pytest.mark.timeout(120)
def test_rank_killed_before_snapshot_is_confirmed() -> None:
    """No rank got a confirmation, but the snapshot is complete."""
    with job(ends={0: End(SECOND, "all have it")}) as running:
        assert running.run(running.without(0)) == SECOND
