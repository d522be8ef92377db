"""What a run that did not pass on every rank looks like to the reader."""

from __future__ import annotations

import signal
from collections.abc import Mapping

import pytest

from tests.support.protocol import Outcome


class RankFailures(Exception):  # noqa: N818
    """Some ranks failed or got stuck; `outcomes` has the end of every rank, in the order of arrival."""

    def __init__(self, outcomes: Mapping[int, Outcome]) -> None:
        super().__init__(_describe(outcomes))
        self.outcomes = dict(outcomes)


def raise_unless_passed(outcomes: Mapping[int, Outcome]) -> None:
    """Fail or skip; a rank that waits for one that skipped is no failure."""
    skips = [outcome.detail for outcome in outcomes.values() if outcome.status == "skipped"]
    failing = {"failed"} if skips else {"failed", "stuck"}
    if any(outcome.status in failing for outcome in outcomes.values()):
        raise RankFailures(outcomes)
    if skips:
        pytest.skip(skips[0])


def describe_exit(code: int | None) -> str:
    """Say in words how a process ended."""
    if code is None:
        return "closed its connection"
    return f"died of {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def _describe(outcomes: Mapping[int, Outcome]) -> str:
    summary = [
        f"{status}: rank {', '.join(ranks)}"
        for status in ("failed", "stuck", "skipped", "passed")
        if (ranks := [str(rank) for rank in sorted(outcomes) if outcomes[rank].status == status])
    ]
    sections = [
        f"[rank {rank}] {outcome.status}\n{outcome.detail.strip()}"
        for rank, outcome in outcomes.items()
        if outcome.status != "passed"
    ]
    return "\n\n".join(["; ".join(summary), *sections])
