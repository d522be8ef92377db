"""Several hosts, simulated as network namespaces with their own links: slow links, cut links and lost hosts.

`ZEROSHARD_FAULTS` adds the longer cases; `make faults` sets it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.fault_report import Record
from tests.support.hosts import LONG, Exchange, Hosts, Job, News, Place, Plan, Stop, why_not
from tests.support.launch import Average, UnshardedRun, fingerprint
from tests.support.oracles import assert_same, average, average_by_rows
from zeroshard import RankLostError, ZeroConfig

TIMEOUT = 5.0
MARGIN = 10.0
"""Extra seconds on a busy machine. A rank that hangs would take longer than the timeout and this margin."""

ENDING = 7.0
"""Seconds for processes to exit after raising: about one, even if the store is cut off, where they once took 10."""

OVERHEAD = 1.15
"""Factor for headers, building the optimizer, saving, and control messages between ranks."""

pytestmark = pytest.mark.filterwarnings("ignore:.* was saved by .* ranks")
longer = pytest.mark.skipif("ZEROSHARD_FAULTS" not in os.environ, reason="takes longer: make faults")

Seats = Sequence[int]
TWO, TWO_BY_TWO, THREE = (0, 1), (0, 0, 1, 1), (0, 1, 2)


@cache
def _why_not() -> str | None:
    return why_not()


@contextmanager
def made(seats: Seats) -> Iterator[Hosts]:
    reason = _why_not()
    if reason is not None:
        pytest.skip(f"this machine does not permit network namespaces: {reason}")
    with Hosts(max(seats) + 1) as hosts, closing(Exchange(hosts)):
        yield hosts


def trained(hosts: Hosts, name: str, seats: Seats, plan: Plan) -> tuple[int, str]:
    """Return the step that all ranks resumed from and the fingerprint of the final model, the same on all ranks."""
    with Job(hosts, name, seats, plan) as job:
        ((start, text),) = {
            (loaded.step, done.text) for loaded, done in zip(job.from_all("loaded"), job.from_all("done"), strict=True)
        }
        return start, text


def expected(plan: Plan, seats: Seats, average: Average = average) -> UnshardedRun:
    plain = UnshardedRun(plan.width)
    plain.train(range(1, plan.steps + 1), len(seats), average)
    return plain


def check(plan: Plan, seats: Seats, text: str, average: Average = average) -> None:
    """Check that parameters on all ranks and the saved checkpoint match a single process bit for bit."""
    plain, found = expected(plan, seats, average), UnshardedRun.saved(plan.folder, plan.width)
    assert text == fingerprint(plain.model)
    assert_same(found.model.state_dict(), plain.model.state_dict(), "the saved model")
    assert_same(found.optimizer.state_dict(), plain.optimizer.state_dict(), "the saved optimizer")


@pytest.mark.timeout(180)
@pytest.mark.parametrize("seats", [TWO_BY_TWO, pytest.param(THREE, marks=longer)], ids=str)
def test_training_across_hosts_matches_one_host(tmp_path: Path, seats: Seats) -> None:
    with made(seats) as hosts:
        _, across = trained(hosts, "across", seats, Plan(tmp_path / "across"))
        _, alone = trained(hosts, "alone", [0] * len(seats), Plan(tmp_path / "alone"))
    assert across == alone
    check(Plan(tmp_path / "across"), seats, across)


@longer
@pytest.mark.timeout(180)
def test_slow_link_does_not_change_results(tmp_path: Path) -> None:
    plan = Plan(tmp_path, steps=4, width=1024)
    with made(TWO_BY_TWO) as hosts:
        hosts.slow_down(1, "20mbit")
        _, text = trained(hosts, "slow", TWO_BY_TWO, plan)
        assert hosts.times_held_back(1) > 0, "the link was not slow"
    check(plan, TWO_BY_TWO, text)
    Record("a slow link", "20 Mbit/s to and from one of two hosts", "nothing; same bits").keep()


Blow = Callable[[Hosts, Job, int], object]
"""The failure injected into the last host."""


def cut(hosts: Hosts, _: Job, host: int) -> None:
    hosts.cut(host)


def vanish(hosts: Hosts, job: Job, host: int) -> None:
    """Cut the link first, so that no failure report reaches the other hosts."""
    hosts.cut(host)
    job.kill(host)


class Outcome(NamedTuple):
    """What surviving ranks raised, and the seconds until all of them had raised it and had exited."""

    seen: str
    known: float
    ended: float


def struck(hosts: Hosts, seats: Seats, plan: Plan, blow: Blow) -> Outcome:
    assert plan.stop is not None
    last = max(seats)
    with Job(hosts, "struck", seats, plan) as job:
        job.wait_for("stopped", plan.stop.rank)
        blow(hosts, job, last)
        moment = hosts.last_cut
        alive = job.ranks_of(*(range(last) if blow is vanish else range(last + 1)))
        if plan.stop.rank in alive:
            job.go_on(plan.stop.rank)
        failures = job.from_all("failed", alive)
        ended = job.ended(alive)
    assert all(RankLostError.__name__ in failure.kinds for failure in failures), failures
    return Outcome(in_short(failures), max(failure.moment for failure in failures) - moment, ended - moment)


def in_short(failures: Sequence[News]) -> str:
    """Return the first sentences without files and addresses."""
    sentences = {re.split(r"\. |\.?\n", re.sub(r"\[\S*\]:?\d* ?", "", failure.text))[0] for failure in failures}
    return "; ".join(sorted(sentences))


def check_blow(seats: Seats, blow: Blow, plan: Plan) -> Outcome:
    """Check that no rank hangs, and that all resume from the last checkpoint once the link is back."""
    with made(seats) as hosts:
        outcome = struck(hosts, seats, plan, blow)
        assert outcome.known < TIMEOUT + MARGIN, outcome
        assert outcome.ended - outcome.known < ENDING, outcome
        hosts.mend(max(seats))
        start, text = trained(hosts, "again", seats, replace(plan, timeout=LONG, stop=None))
    assert start == 4
    grid = (max(seats) + 1, len(seats) // (max(seats) + 1))
    check(plan, seats, text, partial(average_by_rows, grid=grid) if "shard_group_size" in plan.options else average)
    return outcome


def on(seats: Seats) -> str:
    return f"{len(seats)} ranks on {max(seats) + 1} hosts"


def keep(case: str, injected: str, outcome: Outcome) -> None:
    Record(case, injected, outcome.seen, round(outcome.known, 2), round(outcome.ended, 2)).keep()


def planned(folder: Path, seats: Seats, step: int, place: Place, **more: Any) -> Plan:
    """Make a plan in which the last rank stops in a step or while saving it."""
    return Plan(folder, timeout=TIMEOUT, stop=Stop(len(seats) - 1, step, place), **more)


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("seats", "place"),
    [
        (TWO, "step"),
        pytest.param(TWO, "forward", marks=longer),
        pytest.param(TWO_BY_TWO, "forward", marks=longer),
        pytest.param(THREE, "step", marks=longer),
    ],
    ids=str,
)
def test_cut_link_is_detected_on_both_sides(tmp_path: Path, seats: Seats, place: Place) -> None:
    outcome = check_blow(seats, cut, planned(tmp_path, seats, 7, place))
    keep(f"cut link, {on(seats)}, {place}", f"the link of the last host is cut in step 7, before its {place}", outcome)


@longer
@pytest.mark.timeout(180)
@pytest.mark.parametrize("seats", [TWO, THREE, TWO_BY_TWO], ids=str)
def test_lost_host_is_detected_by_the_others(tmp_path: Path, seats: Seats) -> None:
    outcome = check_blow(seats, vanish, planned(tmp_path, seats, 7, "forward"))
    keep(f"vanished host, {on(seats)}", "the last host is cut off in step 7, and its ranks are killed", outcome)


@longer
@pytest.mark.timeout(180)
@pytest.mark.parametrize("place", ["forward", "step"])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"shard_group_size": "node"}, id="rows within hosts"),
        pytest.param({"config": ZeroConfig(overlap_param_gather=True)}, id="overlap"),
    ],
)
def test_lost_host_with_other_options(
    tmp_path: Path, options: dict[str, Any], place: Place, request: pytest.FixtureRequest
) -> None:
    outcome = check_blow(TWO_BY_TWO, vanish, planned(tmp_path, TWO_BY_TWO, 7, place, options=options))
    case = f"vanished host, {on(TWO_BY_TWO)}, {request.node.callspec.id}"
    keep(case, "the last host is cut off in step 7, and its ranks are killed", outcome)


@longer
@pytest.mark.timeout(180)
@pytest.mark.parametrize("behind", [False, True], ids=["at once", "in the background"])
def test_lost_host_while_saving(tmp_path: Path, behind: bool) -> None:
    outcome = check_blow(THREE, vanish, planned(tmp_path, THREE, 8, "save", behind=behind))
    how = "in the background" if behind else "at once"
    keep(f"vanished host, {on(THREE)}, saving {how}", "the last host is cut off and killed while all save", outcome)


@longer
@pytest.mark.timeout(180)
def test_hybrid_sharding_halves_traffic_between_hosts(tmp_path: Path) -> None:
    """With two hosts of two ranks, each host sends twice the gradient size without hybrid sharding and once with it."""
    plain = Plan(tmp_path / "plain", steps=8, every=8, width=8192)
    rows = Plan(tmp_path / "rows", steps=8, every=8, width=8192, options={"shard_group_size": "node"})
    sent = []
    with made(TWO_BY_TWO) as hosts:
        for plan in (plain, rows):
            before = hosts.bytes_sent(1)
            _, text = trained(hosts, plan.folder.name, TWO_BY_TWO, plan)
            sent.append(hosts.bytes_sent(1) - before)
            add = average if plan is plain else partial(average_by_rows, grid=(2, 2))
            check(plan, TWO_BY_TWO, text, add)
    once = plain.steps * sum(param.nbytes for param in UnshardedRun(plain.width).model.parameters())
    assert 2 * once < sent[0] < 2 * once * OVERHEAD, (sent, once)
    assert once < sent[1] < once * OVERHEAD, (sent, once)
    seen = f"{sent[1] / sent[0]:.2f} of the bytes between hosts; bits as expected"
    Record("rows within hosts", "shard_group_size='node', two hosts of two ranks", seen).keep()
