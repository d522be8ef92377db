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
from tests.support.hosts import MAX_WAIT_S, Hosts, Job, Message, Place, Plan, Stop, StoreServer, find_obstacle
from tests.support.launch import Average, UnshardedRun, fingerprint
from tests.support.oracles import assert_same, average, average_by_shard_group
from zeroshard import RankLostError, ZeroConfig

TIMEOUT = 5.0
MARGIN = 10.0
"""Extra seconds on a busy machine. A rank that hangs would take longer than the timeout and this margin."""

EXIT_TIMEOUT = 7.0
"""Seconds for processes to exit after raising: about one, even if the store is cut off. They once took 10."""

OVERHEAD = 1.15
"""Factor for headers, building the optimizer, saving, and control messages between ranks."""

pytestmark = pytest.mark.filterwarnings("ignore:.* was saved by .* ranks")
longer = pytest.mark.skipif("ZEROSHARD_FAULTS" not in os.environ, reason="takes longer: make faults")

Placement = Sequence[int]
"""The host of each rank."""
TWO, TWO_BY_TWO, THREE = (0, 1), (0, 0, 1, 1), (0, 1, 2)


@cache
def _find_obstacle() -> str | None:
    return find_obstacle()


@contextmanager
def make_hosts(placement: Placement) -> Iterator[Hosts]:
    reason = _find_obstacle()
    if reason is not None:
        pytest.skip(f"this machine does not permit network namespaces: {reason}")
    with Hosts(max(placement) + 1) as hosts, closing(StoreServer(hosts)):
        yield hosts


def train(hosts: Hosts, name: str, placement: Placement, plan: Plan) -> tuple[int, str]:
    """Return the step that all ranks resumed from and the fingerprint of the final model, the same on all ranks."""
    with Job(hosts, name, placement, plan) as job:
        loaded, done = job.wait_for_all("loaded"), job.wait_for_all("done")
        ((start, digest),) = {(first.step, last.text) for first, last in zip(loaded, done, strict=True)}
        return start, digest


def train_unsharded(plan: Plan, placement: Placement, average: Average = average) -> UnshardedRun:
    plain = UnshardedRun(plan.width)
    plain.train(range(1, plan.steps + 1), len(placement), average)
    return plain


def check(plan: Plan, placement: Placement, digest: str, average: Average = average) -> None:
    """Check that parameters on all ranks and the saved checkpoint match a single process bit for bit."""
    plain, saved = train_unsharded(plan, placement, average), UnshardedRun.load(plan.folder, plan.width)
    assert digest == fingerprint(plain.model)
    assert_same(saved.model.state_dict(), plain.model.state_dict(), "the saved model")
    assert_same(saved.optimizer.state_dict(), plain.optimizer.state_dict(), "the saved optimizer")


@pytest.mark.timeout(180)
@pytest.mark.parametrize("placement", [TWO_BY_TWO, pytest.param(THREE, marks=longer)], ids=str)
def test_training_across_hosts_matches_one_host(tmp_path: Path, placement: Placement) -> None:
    with make_hosts(placement) as hosts:
        _, across = train(hosts, "across", placement, Plan(tmp_path / "across"))
        _, on_one_host = train(hosts, "one-host", [0] * len(placement), Plan(tmp_path / "one-host"))
    assert across == on_one_host
    check(Plan(tmp_path / "across"), placement, across)


@longer
@pytest.mark.timeout(180)
def test_slow_link_does_not_change_results(tmp_path: Path) -> None:
    plan = Plan(tmp_path, steps=4, width=1024)
    with make_hosts(TWO_BY_TWO) as hosts:
        hosts.limit_bandwidth(1, "20mbit")
        _, digest = train(hosts, "slow", TWO_BY_TWO, plan)
        assert hosts.packets_delayed(1) > 0, "the link was not slow"
    check(plan, TWO_BY_TWO, digest)
    Record("slow link", "one of two hosts sends and receives at 20 Mbit/s", "no error; bit-identical").keep()


Failure = Callable[[Hosts, Job, int], object]
"""The failure injected into the last host."""


def cut_link(hosts: Hosts, _: Job, host: int) -> None:
    hosts.cut_link(host)


def lose_host(hosts: Hosts, job: Job, host: int) -> None:
    """Cut the link first, so that no failure report reaches the other hosts."""
    hosts.cut_link(host)
    job.kill(host)


class Outcome(NamedTuple):
    """The errors of surviving ranks, and the seconds until all of them had raised and had exited."""

    errors: str
    raised: float
    exited: float


def train_with_failure(hosts: Hosts, placement: Placement, plan: Plan, failure: Failure) -> Outcome:
    assert plan.stop is not None
    last = max(placement)
    with Job(hosts, "failing", placement, plan) as job:
        job.wait_for("stopped", plan.stop.rank)
        failure(hosts, job, last)
        start = hosts.last_cut
        alive = job.ranks_of(*(range(last) if failure is lose_host else range(last + 1)))
        if plan.stop.rank in alive:
            job.let_continue(plan.stop.rank)
        errors = job.wait_for_all("failed", alive)
        exited = job.wait_for_exit(alive)
    assert all(RankLostError.__name__ in error.classes for error in errors), errors
    return Outcome(summarize(errors), max(error.time for error in errors) - start, exited - start)


def summarize(errors: Sequence[Message]) -> str:
    """Return the first sentences without files and addresses."""
    sentences = {re.split(r"\. |\.?\n", re.sub(r"\[\S*\]:?\d* ?", "", error.text))[0] for error in errors}
    return "; ".join(sorted(sentences))


def check_failure(placement: Placement, failure: Failure, plan: Plan) -> Outcome:
    """Check that no rank hangs, and that all resume from the last checkpoint once the link is back."""
    with make_hosts(placement) as hosts:
        outcome = train_with_failure(hosts, placement, plan, failure)
        assert outcome.raised < TIMEOUT + MARGIN, outcome
        assert outcome.exited - outcome.raised < EXIT_TIMEOUT, outcome
        hosts.restore_link(max(placement))
        start, digest = train(hosts, "resumed", placement, replace(plan, timeout=MAX_WAIT_S, stop=None))
    assert start == 4
    grid = (max(placement) + 1, len(placement) // (max(placement) + 1))
    is_hybrid = "shard_group_size" in plan.options
    check(plan, placement, digest, partial(average_by_shard_group, grid=grid) if is_hybrid else average)
    return outcome


def describe(placement: Placement) -> str:
    return f"{len(placement)} ranks on {max(placement) + 1} hosts"


def record(case: str, injected: str, outcome: Outcome) -> None:
    Record(case, injected, outcome.errors, round(outcome.raised, 2), round(outcome.exited, 2)).keep()


def make_plan(folder: Path, placement: Placement, step: int, place: Place, **options: Any) -> Plan:
    """Make a plan in which the last rank stops in a step or while saving it."""
    return Plan(folder, timeout=TIMEOUT, stop=Stop(len(placement) - 1, step, place), **options)


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("placement", "place"),
    [
        (TWO, "step"),
        pytest.param(TWO, "forward", marks=longer),
        pytest.param(TWO_BY_TWO, "forward", marks=longer),
        pytest.param(THREE, "step", marks=longer),
    ],
    ids=str,
)
def test_cut_link_is_detected_on_both_sides(tmp_path: Path, placement: Placement, place: Place) -> None:
    outcome = check_failure(placement, cut_link, make_plan(tmp_path, placement, 7, place))
    injected = f"the link of the last host is cut in step 7, before `{place}()`"
    record(f"cut link, {describe(placement)}, {place}", injected, outcome)


@longer
@pytest.mark.timeout(180)
@pytest.mark.parametrize("placement", [TWO, THREE, TWO_BY_TWO], ids=str)
def test_lost_host_is_detected_by_the_others(tmp_path: Path, placement: Placement) -> None:
    outcome = check_failure(placement, lose_host, make_plan(tmp_path, placement, 7, "forward"))
    record(f"lost host, {describe(placement)}", "the last host loses its link in step 7 and is killed", outcome)


@longer
@pytest.mark.timeout(180)
@pytest.mark.parametrize("place", ["forward", "step"])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"shard_group_size": "node"}, id="shard groups within hosts"),
        pytest.param({"config": ZeroConfig(overlap_param_gather=True)}, id="overlap"),
    ],
)
def test_lost_host_with_other_options(
    tmp_path: Path, options: dict[str, Any], place: Place, request: pytest.FixtureRequest
) -> None:
    outcome = check_failure(TWO_BY_TWO, lose_host, make_plan(tmp_path, TWO_BY_TWO, 7, place, options=options))
    case = f"lost host, {describe(TWO_BY_TWO)}, {request.node.callspec.id}"
    record(case, "the last host loses its link in step 7 and is killed", outcome)


@longer
@pytest.mark.timeout(180)
@pytest.mark.parametrize("in_background", [False, True], ids=["synchronous", "asynchronous"])
def test_lost_host_while_saving(tmp_path: Path, in_background: bool) -> None:
    outcome = check_failure(THREE, lose_host, make_plan(tmp_path, THREE, 8, "save", in_background=in_background))
    kind = "asynchronous" if in_background else "synchronous"
    case = f"lost host, {describe(THREE)}, {kind} save"
    record(case, "the last host loses its link and is killed while all ranks save", outcome)


@longer
@pytest.mark.timeout(180)
def test_hybrid_sharding_halves_traffic_between_hosts(tmp_path: Path) -> None:
    """With two hosts of two ranks, each host sends twice the gradient size without hybrid sharding and once with it."""
    plain = Plan(tmp_path / "plain", steps=8, save_every=8, width=8192)
    hybrid = Plan(tmp_path / "hybrid", steps=8, save_every=8, width=8192, options={"shard_group_size": "node"})
    sent = []
    with make_hosts(TWO_BY_TWO) as hosts:
        for plan in (plain, hybrid):
            before = hosts.bytes_sent(1)
            _, digest = train(hosts, plan.folder.name, TWO_BY_TWO, plan)
            sent.append(hosts.bytes_sent(1) - before)
            mean = average if plan is plain else partial(average_by_shard_group, grid=(2, 2))
            check(plan, TWO_BY_TWO, digest, mean)
    grad_bytes = plain.steps * sum(param.nbytes for param in UnshardedRun(plain.width).model.parameters())
    assert 2 * grad_bytes < sent[0] < 2 * grad_bytes * OVERHEAD, (sent, grad_bytes)
    assert grad_bytes < sent[1] < grad_bytes * OVERHEAD, (sent, grad_bytes)
    result = f"{sent[1] / sent[0]:.2f}x the bytes between hosts; bit-identical"
    Record("shard groups within hosts", "`shard_group_size='node'`, two hosts of two ranks", result).keep()
