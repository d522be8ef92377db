"""The fast tier runs one variant of each sampled test, the same one in every run."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.budget import Timing, read_timings, summarize

CONFTEST = """
import pytest
from tests.support.tiers import mark_slow_variants

@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    mark_slow_variants(items)
"""
TESTS = """
import pytest
from tests.support import RankContext, ranks
from tests.support.tiers import sampled

@pytest.mark.parametrize("number", range(40))
@ranks(1, 2, 3, 4)
def test_sizes(ctx: RankContext, number: int): ...

@ranks(2, 3)
@sampled("config", ["a", "b"])
def test_product(ctx: RankContext, config: str): ...

@ranks(1)
def test_alone(ctx: RankContext): ...

@pytest.mark.parametrize("value", [1, 2])
def test_difference(value: int): ...

@pytest.mark.slow
def test_long(): ...
"""


def collect(pytester: pytest.Pytester, file: str, *options: str) -> list[str]:
    pytester.makeconftest(CONFTEST)
    pytester.makeini("[pytest]\nmarkers =\n    sampled\n    slow\n")
    pytester.makepyfile(**{file: TESTS})
    output = pytester.runpytest("--collect-only", "-q", f"{file}.py", *options).stdout.str()
    return re.findall(rf"{file}\.py::(\S+)", output)


def test_one_variant_of_each_test_is_fast(pytester: pytest.Pytester) -> None:
    fast = collect(pytester, "test_one", "-m", "not slow")
    sizes = Counter(re.findall(r"test_sizes\[.*(\d)ranks", "\n".join(fast)))
    assert sizes.total() == 40
    assert sizes.keys() == {"2", "3", "4"}
    assert Counter(name.partition("[")[0] for name in fast) == {
        "test_sizes": 40,
        "test_product": 1,
        "test_alone": 1,
        "test_difference": 2,
    }
    assert len(collect(pytester, "test_one")) == 4 * 40 + 4 + 1 + 2 + 1
    assert collect(pytester, "test_elsewhere", "-m", "not slow") == fast, "the choice must not depend on the file name"


def test_summary_lists_slowest_tests_and_warns_over_budget(tmp_path: Path) -> None:
    (tmp_path / "junit.xml").write_text(
        '<testsuites><testsuite><testcase classname="a" name="x" time="1.5"/>'
        '<testcase classname="b" name="y[1]" time="30"/></testsuite></testsuites>'
    )
    timings = read_timings(tmp_path / "junit.xml")
    assert timings == [Timing(1.5, "a::x"), Timing(30.0, "b::y[1]")]
    assert summarize(timings, seconds=60, budget_minutes=2).splitlines()[1:] == [
        "   30.0 s  b::y[1]",
        "    1.5 s  a::x",
    ]
    assert "over the budget of 2 minutes" in summarize(timings, seconds=121, budget_minutes=2)
