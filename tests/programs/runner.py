"""Run programs on a pool of worker processes and classify how each ends."""

from __future__ import annotations

import linecache
import logging
import warnings
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest

from tests.programs.injected_bugs import INJECTED_BUGS
from tests.programs.program import Program
from tests.programs.script import write_script
from tests.support import RankContext, RankFailures, RankPool

TIMEOUT_S = 120.0
SAME, CLOSE = "same bits", "within tolerance"
DIFFERENT, ERROR, ONE_RANK, HANG, ABORT = "different", "error", "error on some ranks only", "hang", "abort"
FAILURES = (DIFFERENT, ERROR, ONE_RANK, HANG, ABORT)


@dataclass(frozen=True)
class Verdict:
    """How a program ended, and details of a failure."""

    kind: str
    detail: str = ""

    @property
    def is_failure(self) -> bool:
        return self.kind in FAILURES


def run_program(
    pool: RankPool, program: Program, timeout: float = TIMEOUT_S, *, injected_bug: str | None = None
) -> Verdict:
    """Run the script of the program on its number of ranks. The pool replaces workers that fail or hang.

    `injected_bug` is a key of `INJECTED_BUGS`.
    """
    arguments = {"source": write_script(program), "injected_bug": injected_bug}
    try:
        found = pool.run(execute, program.ranks, timeout, arguments)
    except RankFailures as failures:
        return _classify(failures)
    return Verdict(SAME if set(found) == {SAME} else CLOSE)


_run_ids = count()


def execute(ctx: RankContext, source: str, injected_bug: str | None) -> str:
    """Execute the script on this rank, in the existing process group."""
    name = f"<program {next(_run_ids)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    namespace: dict[str, Any] = {"__name__": "program"}
    logging.getLogger("zeroshard").setLevel(logging.CRITICAL)  # rejected calls log errors, which are expected
    try:
        exec(compile(source, name, "exec"), namespace)
        with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
            warnings.simplefilter("ignore")
            if injected_bug is not None:
                INJECTED_BUGS[injected_bug](patch)
            verdict: str = namespace["judge"](namespace["train"], namespace["TOLERANCES"])
        return verdict
    finally:
        logging.getLogger("zeroshard").setLevel(logging.NOTSET)
        del linecache.cache[name]
        namespace.clear()


def _classify(failures: RankFailures) -> Verdict:
    outcomes, text = failures.outcomes.values(), str(failures)
    if any(outcome.status == "failed" and "died of" in outcome.detail[:20] for outcome in outcomes):
        return Verdict(ABORT, text)
    if any("DIFFERENT: " in outcome.detail for outcome in outcomes):
        return Verdict(DIFFERENT, text)
    statuses = {outcome.status for outcome in outcomes}
    if statuses == {"failed"}:
        return Verdict(ERROR, text)
    return Verdict(HANG if statuses == {"stuck"} else ONE_RANK, text)
