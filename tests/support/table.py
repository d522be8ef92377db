"""The page docs/optimizers.md, made of what trials have found."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.support.optimizers import CASES, Case, version_of
from tests.support.trials import MORE, NOTHING, STEPS, Report

PAGE = Path(__file__).parents[2] / "docs" / "optimizers.md"

# ruff: noqa: E501 (a page)
HEAD = f"""# Optimizers

Written by `make table`, which runs `tests/ranks/test_optimizers.py`. Do not edit: that test fails where this page is not what it finds.

Each optimizer is made by `zeroshard.shard` on 1, 2 and 3 processes (gloo, CPU, float32) beside itself unsharded, which gets the mean
of all ranks' gradients. *Training*: all parameters have the same bits after each of {STEPS} steps and, where it has `train()` and `eval()`, after
each change of mode. *State*: `full_state_dict` takes it from 2 ranks to 3 and from there to the plain optimizer, and
`zeroshard.checkpoint` from 3 ranks to 2, with {MORE} further steps after each that have the same bits again.

How it is *cut* is found by stepping the class on small tensors when it is made; see
[decision 3](decisions/0003-ask-the-optimizer.md) and [decision 14](decisions/0014-cuts-at-multiples.md). So a class that is not listed
here is treated in the same way. What draws random numbers is right, and yet not what it would be unsharded: each rank draws its own.
Steps that are compiled (torchao) are taken without the compiler here, which needs minutes. bitsandbytes is no part of `zeroshard[dev]`, for its size: it is tried where it is installed.
"""
COLUMNS = "| optimizer | options | how it is cut | training | state |\n|---|---|---|---|---|"


def packages() -> list[str]:
    return list(dict.fromkeys(case.package for case in CASES))


def cases_of(package: str) -> list[Case]:
    return [case for case in CASES if case.package == package]


def section(package: str, reports: Mapping[str, Report]) -> str:
    """What was found of the classes of one package."""
    rows = [_row(case, reports[case.title]) for case in cases_of(package)]
    return "\n".join([f"## {package} {version_of(package)}", "", COLUMNS, *rows]) + "\n"


def page(sections: Iterable[str]) -> str:
    return "\n".join([HEAD, *sections])


def sections_of(text: str) -> dict[str, str]:
    """Those of a page, by package."""
    found = re.split(r"^(?=## )", text, flags=re.MULTILINE)[1:]
    return {part.split()[1]: part.rstrip("\n") + "\n" for part in found}


def version_in(section: str) -> str:
    return section.split()[2]


def _row(case: Case, report: Report) -> str:
    options = ", ".join(f"{key}={value}" for key, value in case.options.items()) or NOTHING
    return f"| `{case.name}` | {options} | {report.partition} | {report.training} | {report.state} |"
