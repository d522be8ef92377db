"""Print how long a test run took and which tests were slowest, and warn when it was over its budget.

Run by `make test` as `python -m tests.budget`. It reads the JUnit files that pytest has written. It never fails a
build, because a busy machine is not a defect.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree


class Timing(NamedTuple):
    seconds: float
    test: str


def read_timings(report: Path) -> list[Timing]:
    """Return the time of every test in a JUnit file, including its fixtures."""
    cases = ElementTree.parse(report).getroot().iter("testcase")
    return [Timing(float(case.get("time", "0")), f"{case.get('classname')}::{case.get('name')}") for case in cases]


def summarize(timings: list[Timing], seconds: float, budget_minutes: float, count: int = 15) -> str:
    lines = [f"{len(timings)} tests, {seconds / 60:.1f} of {budget_minutes:g} minutes. The slowest:"]
    lines += [f"{timing.seconds:7.1f} s  {timing.test}" for timing in sorted(timings, reverse=True)[:count]]
    if seconds > 60 * budget_minutes:
        lines.append(
            f"WARNING: over the budget of {budget_minutes:g} minutes. On a quiet machine, mark slow tests with "
            "@pytest.mark.slow or use sampled(); see CONTRIBUTING.md."
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("reports", nargs="+", type=Path, help="JUnit files")
    parser.add_argument("--since", type=Path, required=True, help="a file that was touched when the run started")
    parser.add_argument("--minutes", type=float, required=True, help="the budget")
    options = parser.parse_args()
    timings = [timing for report in options.reports for timing in read_timings(report)]
    print(summarize(timings, time.time() - options.since.stat().st_mtime, options.minutes))  # noqa: T201


if __name__ == "__main__":
    main()
