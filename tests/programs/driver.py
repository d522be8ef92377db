"""Run random programs: `python -m tests.programs --count 5000 --seed 1 --ranks 2,3 --minutes 60`.

Exits with 1 if a program failed, and prints each failing one as a script, made small. Appends what was run to a file of
records, and writes docs/programs.md from all of them.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from queue import Empty, Queue
from random import Random
from threading import Thread
from typing import Any

from tests.programs import report
from tests.programs.program import Program
from tests.programs.runner import Verdict, run_program
from tests.programs.script import write_script
from tests.programs.shrink import shrink
from tests.programs.strategies import Draws, draw_program
from tests.support import RankPool

ROOT = Path(__file__).parents[2]
POOLS = 2
MOST_FAILURES = 5
"""Per pool: it stops after so many, each of which takes minutes to make small."""


@dataclass
class Tally:
    """What a pool has run."""

    ranks: int
    programs: int = 0
    seconds: float = 0.0
    verdicts: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    parts: Counter[str] = field(default_factory=Counter)
    pairs: Counter[str] = field(default_factory=Counter)

    def add(self, program: Program, verdict: Verdict) -> None:
        parts = program.parts()
        self.programs += 1
        self.verdicts[verdict.kind] += 1
        self.parts.update(parts)
        self.pairs.update(f"{one} + {other}" for one, other in combinations(parts, 2))
        if verdict.kind == "within tolerance":
            self.reasons.update(program.tolerances())


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    started = time.time()
    results: Queue[tuple[Any, ...]] = Queue()
    with tempfile.TemporaryDirectory(prefix="zeroshard-programs-") as folder:
        os.environ.update(TMPDIR=folder, OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="ERROR")
        workers = [
            Thread(target=_run_pool, args=(number, options, results), daemon=True) for number in range(options.pools)
        ]
        for worker in workers:
            worker.start()
        tallies, failures = _collect(workers, results, options)
    record = {
        "started": int(started),
        "seed": options.seed,
        "seconds": round(time.time() - started),
        "failures": [failure["program"] for failure in failures],
        "tallies": [vars(tally) for tally in tallies],
    }
    if options.records:
        report.append_record(options.records, record)
        if options.page:
            report.write_page(options.records, options.page)
    done = sum(tally.programs for tally in tallies)
    print(f"{done} of {options.count} programs in {record['seconds']} s, {len(failures)} failures")  # noqa: T201
    return 1 if failures else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.programs", description=__doc__)
    parser.add_argument("--count", type=int, default=5000, help="programs in all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", default="2,3", help="world sizes")
    parser.add_argument(
        "--minutes",
        type=float,
        default=60.0,
        help="start no program after so many; shrinking a failing one may take longer",
    )
    parser.add_argument("--pools", type=int, default=POOLS, help="pools of worker processes, side by side")
    parser.add_argument("--records", type=Path, help="append what was run to this file")
    parser.add_argument("--page", type=Path, help="write this page from all records")
    parser.add_argument("--failures", type=Path, default=ROOT / ".programs", help="folder for failing scripts")
    parser.add_argument("--no-shrink", action="store_true")
    options = parser.parse_args(arguments)
    options.ranks = [int(size) for size in options.ranks.split(",")]
    return options


# ---- A pool, driven by a thread of its own


def _run_pool(number: int, options: argparse.Namespace, results: Queue[tuple[Any, ...]]) -> None:
    """Every `options.pools`-th program. Sends a tally for each world size, and failures as they come."""
    tallies = {ranks: Tally(ranks) for ranks in options.ranks}
    deadline, failures = time.monotonic() + 60 * options.minutes, 0
    with closing(RankPool()) as pool:
        for index in range(number, options.count, options.pools):
            if time.monotonic() > deadline or failures >= MOST_FAILURES:
                break
            ranks = options.ranks[(index // options.pools) % len(options.ranks)]
            draws = Draws(random=Random(f"{options.seed} {index}"))
            program, begun = draw_program(draws, ranks), time.monotonic()
            verdict = run_program(pool, program)
            tallies[ranks].add(program, verdict)
            tallies[ranks].seconds += time.monotonic() - begun
            results.put(("progress", index, verdict.kind))
            if verdict.is_failure:
                failures += 1
                results.put(
                    (
                        "failure",
                        _make_failure(
                            pool, index, draws.made, program=program, verdict=verdict, shrinks=not options.no_shrink
                        ),
                    )
                )
    for tally in tallies.values():
        results.put(("tally", tally))
    results.put(("end", number))


def _make_failure(
    pool: RankPool, index: int, choices: list[int], *, program: Program, verdict: Verdict, shrinks: bool
) -> dict[str, Any]:
    last = verdict

    def fails(candidate: Program) -> bool:
        nonlocal last
        found = run_program(pool, candidate)
        if found.kind == verdict.kind:
            last = found
        return found.kind == verdict.kind

    if shrinks and fails(program):
        program = shrink(choices, program.ranks, fails)
    return {"index": index, "kind": verdict.kind, "detail": last.detail, "program": program.to_json()}


# ---- The process that the user has started


def _collect(
    workers: list[Thread], results: Queue[tuple[Any, ...]], options: argparse.Namespace
) -> tuple[list[Tally], list[dict[str, Any]]]:
    tallies: list[Tally] = []
    failures: list[dict[str, Any]] = []
    ended, done, shown = 0, 0, time.monotonic()
    while ended < len(workers):
        try:
            kind, *rest = results.get(timeout=5.0)
        except Empty:
            if not any(worker.is_alive() for worker in workers):
                raise RuntimeError("a thread that runs a pool has died") from None
            continue
        if kind == "progress":
            done += 1
            if time.monotonic() - shown > 30:
                shown = time.monotonic()
                print(f"{done} of {options.count} programs, {len(failures)} failures", flush=True)  # noqa: T201
        elif kind == "failure":
            failures.append(rest[0])
            _print_failure(rest[0], options)
        elif kind == "tally":
            tallies.append(rest[0])
        else:
            ended += 1
    for worker in workers:
        worker.join()
    return tallies, failures


def _print_failure(failure: dict[str, Any], options: argparse.Namespace) -> None:
    program = Program.from_json(failure["program"])
    options.failures.mkdir(parents=True, exist_ok=True)
    name = f"seed{options.seed}_program{failure['index']}"
    script, data = options.failures / f"{name}.py", options.failures / f"{name}.json"
    script.write_text(write_script(program), encoding="utf-8")
    data.write_text(failure["program"], encoding="utf-8")
    (options.failures / f"{name}.txt").write_text(failure["detail"], encoding="utf-8")
    print(f"\n==== {failure['kind']}: {script}\n{_shorten(failure['detail'])}\n\n{write_script(program)}", flush=True)  # noqa: T201


def _shorten(detail: str) -> str:
    """Return what one rank reports; the rest is in the folder of failures."""
    head, *ranks = detail.split("\n[rank ")
    return "\n[rank ".join([head, *ranks[:1]])[:4000]
