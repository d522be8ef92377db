"""Optimizers of torch and of others: sharded they do what they do alone, or they are refused. A page says which."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support import RankContext, RankFailures, RankPool
from tests.support.optimizers import (
    CASES,
    PAGE,
    Report,
    cases_of,
    packages,
    page,
    section,
    sections_of,
    try_out,
    version_in,
    version_of,
)

TIMEOUT_S = 60.0
FAST_CASES = ["torch.optim.AdamW", "torch.optim.Muon", "torchao.optim.AdamW8bit", "schedulefree.AdamWScheduleFree"]
FAST_CASES += ["pytorch_optimizer.SOAP", "prodigyopt.Prodigy"]
CASE_PARAMS = [
    pytest.param(number, id=case.title, marks=() if case.title in FAST_CASES else pytest.mark.slow)
    for number, case in enumerate(CASES)
]


@pytest.fixture(scope="module")
def reports() -> dict[str, Report]:
    """What was found, by title."""
    return {}


def run_case(ctx: RankContext, number: int, folder: Path) -> Report:
    return try_out(ctx, CASES[number], folder)


@pytest.mark.timeout(2 * TIMEOUT_S)
@pytest.mark.parametrize("number", CASE_PARAMS)
def test_sharded_optimizer_equals_plain_or_is_rejected(
    rank_pool: RankPool, reports: dict[str, Report], number: int, tmp_path: Path
) -> None:
    case = CASES[number]
    if version_of(case.package) is None:
        pytest.skip(f"{case.package} is not installed")
    try:
        first, *others = rank_pool.run(run_case, 3, TIMEOUT_S, {"number": number, "folder": tmp_path})
    except RankFailures as failures:
        raise pytest.fail.Exception(str(failures), pytrace=False) from None
    assert others == [first] * 2
    assert case.is_refused == first.partition.startswith("refused")
    reports[case.title] = first


def test_docs_page_is_up_to_date(reports: dict[str, Report]) -> None:
    """Of packages that are installed, in the versions that the page speaks of."""
    complete = [it for it in packages() if all(case.title in reports for case in cases_of(it))]
    made = {package: section(package, reports) for package in complete}
    written = sections_of(PAGE.read_text(encoding="utf-8")) if PAGE.exists() else {}
    if os.environ.get("ZEROSHARD_TABLE") == "write":
        PAGE.write_text(page([(written | made)[it] for it in packages() if it in written | made]), encoding="utf-8")
        return
    same = [it for it in complete if version_in(written[it]) == version_of(it)]
    if not same:
        pytest.skip("no package was tried as a whole in the version that the page speaks of")
    assert {it: written[it] for it in same} == {it: made[it] for it in same}, "run `make table`"
    assert page(written.values()) == PAGE.read_text(encoding="utf-8")
