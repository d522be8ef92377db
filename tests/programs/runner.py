"""Run programs on a pool of worker processes, and say how each ended."""

from __future__ import annotations

import linecache
import logging
import warnings
from dataclasses import dataclass
from itertools import count
from typing import Any

from tests.programs.program import Program
from tests.programs.script import write_script
from tests.support import RankContext, RankFailures, RankPool

TIMEOUT_S = 120.0
SAME, CLOSE, REFUSED = "same bits", "within tolerance", "refused alike"
DIFFERENT, ERROR, ONE_RANK, HANG, ABORT = "different", "error", "error on some ranks only", "hang", "abort"
FAILURES = (DIFFERENT, ERROR, ONE_RANK, HANG, ABORT)


@dataclass(frozen=True)
class Verdict:
    """How a program ended, and why it failed if it did."""

    kind: str
    detail: str = ""

    @property
    def is_failure(self) -> bool:
        return self.kind in FAILURES


def run_program(pool: RankPool, program: Program, timeout: float = TIMEOUT_S) -> Verdict:
    """Run its script on so many ranks. Workers that fail or hang are replaced."""
    try:
        found = pool.run(execute, program.ranks, timeout, {"source": write_script(program)})
    except RankFailures as failures:
        return _classify(failures)
    return Verdict(SAME if set(found) == {SAME} else CLOSE)


_serial = count()


def execute(ctx: RankContext, source: str) -> str:
    """On a rank: what the script does, in the process group that is there."""
    name = f"<program {next(_serial)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    namespace: dict[str, Any] = {"__name__": "program"}
    logging.getLogger("zeroshard").setLevel(logging.CRITICAL)  # refusals log errors, which are expected
    try:
        exec(compile(source, name, "exec"), namespace)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
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
