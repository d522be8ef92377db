"""The parts of the multi-rank test support that need no ranks."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from tests.support import RankContext, RankFailures, ranks
from tests.support.pool import Outcome, describe_exit, raise_unless_passed


def body(ctx: RankContext, word: str, tmp_path: Path) -> None:
    pass


def test_signature_has_fixtures_and_parameters_but_no_context() -> None:
    assert list(inspect.signature(ranks(2)(body)).parameters) == [
        "rank_pool",
        "rank_count",
        "word",
        "tmp_path",
    ]


def test_body_is_accessible() -> None:
    assert vars(ranks(2)(body))["__rank_body__"] is body


def test_failures_are_reported_in_order_of_arrival() -> None:
    outcomes = {2: Outcome("passed"), 1: Outcome("failed", "the cause"), 0: Outcome("stuck", "the stack")}
    summary, *sections = str(RankFailures(outcomes)).split("\n\n")
    assert summary == "failed: rank 1; stuck: rank 0; passed: rank 2"
    assert sections == ["[rank 1] failed\nthe cause", "[rank 0] stuck\nthe stack"]


def test_failure_takes_precedence_over_skip() -> None:
    with pytest.raises(RankFailures):
        raise_unless_passed({0: Outcome("skipped", "reason"), 1: Outcome("failed", "cause")})


def test_rank_waiting_for_skipped_rank_is_not_a_failure() -> None:
    with pytest.raises(pytest.skip.Exception, match="reason"):
        raise_unless_passed({0: Outcome("skipped", "reason"), 1: Outcome("stuck", "stack")})


@pytest.mark.parametrize(
    ("code", "text"), [(3, "exited with code 3"), (-11, "died of SIGSEGV"), (None, "closed its connection")]
)
def test_describe_exit(code: int | None, text: str) -> None:
    assert describe_exit(code) == text
