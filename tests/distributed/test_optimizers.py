"""Optimizers of torch and of other packages: sharded ones equal plain ones, or are rejected. A docs page lists them."""

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
    compare_with_unsharded,
    packages,
    page,
    section,
    sections_of,
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
    """Reports by the title of the case."""
    return {}


def run_case(ctx: RankContext, number: int, folder: Path) -> Report:
    return compare_with_unsharded(ctx, CASES[number], folder)


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
    """Compares the rows of all cases that ran, in the package version that the page names, and all text around rows."""
    text = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    written = sections_of(text)
    if os.environ.get("ZEROSHARD_TABLE") == "write":
        complete = [package for package in packages() if all(case.title in reports for case in cases_of(package))]
        written |= {package: section(package, reports) for package in complete}
        PAGE.write_text(page(written[package] for package in packages() if package in written), encoding="utf-8")
        return
    assert page(written[package] for package in packages() if package in written) == text, "run `make table`"
    tested = {case.package for case in CASES if case.title in reports}
    for package in packages():
        assert package in written or package not in tested, f"{package} is not on the page: run `make table`"
        if package in written and version_in(written[package]) == version_of(package):
            assert written[package] == section(package, reports_on_page(package, written[package]) | reports), (
                "run `make table`"
            )


def reports_on_page(package: str, text: str) -> dict[str, Report]:
    """Read the reports of a package from its section of the page, whose rows are in the order of its cases."""
    cases, rows = cases_of(package), [line for line in text.splitlines() if line.startswith("| `")]
    assert len(rows) == len(cases), f"{package} has {len(rows)} rows, expected {len(cases)}: run `make table`"
    return {case.title: Report(*row.strip("| ").split(" | ")[-3:]) for case, row in zip(cases, rows, strict=True)}
