"""Run random programs: `python -m tests.programs --count 5000 --seed 1 --ranks 2,3 --minutes 60`.

Exits with 1 if a program failed, and prints each failing program as a script after shrinking it. Appends a record of
the run to a file, and writes docs/programs.md from all records.
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

import torch

from tests.programs import report
from tests.programs.program import Program
from tests.programs.runner import Verdict, run_program
from tests.programs.script import write_script
from tests.programs.shrink import shrink
from tests.programs.strategies import Draws, draw_program
from tests.support import RankPool

ROOT = Path(__file__).parents[2]
POOLS = 2
MAX_FAILURES = 5
"""A pool stops after this number of failures: shrinking each takes minutes."""


@dataclass
class Tally:
    """Counts of the programs that a pool has run, by verdict and by part."""

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
    with tempfile.TemporaryDirectory(prefix="zeroshard-programs-") as directory:
        os.environ.update(TMPDIR=directory, OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="ERROR")
        workers = [
            Thread(target=_run_pool, args=(number, options, results), daemon=True) for number in range(options.pools)
        ]
        for worker in workers:
            worker.start()
        tallies, failures = _collect(workers, results, options)
    record = {
        "started": int(started),
        "seed": options.seed,
        "torch": torch.__version__,
        "seconds": round(time.time() - started),
        "failures": [failure["program"] for failure in failures],
        "tallies": [vars(tally) for tally in tallies],
    }
    if options.records:
        report.append_record(options.records, record)
        if options.page:
            report.write_page(options.records, options.page)
    num_programs = sum(tally.programs for tally in tallies)
    print(f"{num_programs} of {options.count} programs in {record['seconds']} s, {len(failures)} failures")  # noqa: T201
    return 1 if failures else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.programs", description=__doc__)
    parser.add_argument("--count", type=int, default=5000, help="total number of programs")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", default="2,3", help="world sizes")
    parser.add_argument(
        "--minutes",
        type=float,
        default=60.0,
        help="start no program after this time; shrinking a failing program may take longer",
    )
    parser.add_argument("--pools", type=int, default=POOLS, help="pools of worker processes, side by side")
    parser.add_argument("--records", type=Path, help="append a record of this run to this file")
    parser.add_argument("--page", type=Path, help="write this page from all records")
    parser.add_argument("--failures", type=Path, default=ROOT / ".programs", help="directory for failing scripts")
    parser.add_argument("--no-shrink", action="store_true")
    options = parser.parse_args(arguments)
    options.ranks = [int(size) for size in options.ranks.split(",")]
    return options


# ---- Worker pools, each driven by a thread


def _run_pool(number: int, options: argparse.Namespace, results: Queue[tuple[Any, ...]]) -> None:
    """Run every `options.pools`-th program. Send failures when they occur, and a tally per world size at the end."""
    tallies = {ranks: Tally(ranks) for ranks in options.ranks}
    deadline, failures = time.monotonic() + 60 * options.minutes, 0
    with closing(RankPool()) as pool:
        for index in range(number, options.count, options.pools):
            if time.monotonic() > deadline or failures >= MAX_FAILURES:
                break
            ranks = options.ranks[(index // options.pools) % len(options.ranks)]
            draws = Draws(random=Random(f"{options.seed} {index}"))
            program, started = draw_program(draws, ranks), time.monotonic()
            verdict = run_program(pool, program)
            tallies[ranks].add(program, verdict)
            tallies[ranks].seconds += time.monotonic() - started
            results.put(("progress", index, verdict.kind))
            if verdict.is_failure:
                failures += 1
                results.put(
                    (
                        "failure",
                        _make_failure(
                            pool,
                            index,
                            draws.made,
                            program=program,
                            verdict=verdict,
                            should_shrink=not options.no_shrink,
                        ),
                    )
                )
    for tally in tallies.values():
        results.put(("tally", tally))
    results.put(("end", number))


def _make_failure(
    pool: RankPool, index: int, choices: list[int], *, program: Program, verdict: Verdict, should_shrink: bool
) -> dict[str, Any]:
    last_verdict = verdict

    def fails(candidate: Program) -> bool:
        nonlocal last_verdict
        found = run_program(pool, candidate)
        if found.kind == verdict.kind:
            last_verdict = found
        return found.kind == verdict.kind

    if should_shrink and fails(program):
        program = shrink(choices, program.ranks, fails)
    return {"index": index, "kind": verdict.kind, "detail": last_verdict.detail, "program": program.to_json()}


# ---- The main thread


def _collect(
    workers: list[Thread], results: Queue[tuple[Any, ...]], options: argparse.Namespace
) -> tuple[list[Tally], list[dict[str, Any]]]:
    tallies: list[Tally] = []
    failures: list[dict[str, Any]] = []
    num_ended, num_programs, last_printed = 0, 0, time.monotonic()
    while num_ended < len(workers):
        try:
            kind, *rest = results.get(timeout=5.0)
        except Empty:
            if not any(worker.is_alive() for worker in workers):
                raise RuntimeError("a thread that runs a pool has died") from None
            continue
        if kind == "progress":
            num_programs += 1
            if time.monotonic() - last_printed > 30:
                last_printed = time.monotonic()
                print(f"{num_programs} of {options.count} programs, {len(failures)} failures", flush=True)  # noqa: T201
        elif kind == "failure":
            failures.append(rest[0])
            _print_failure(rest[0], options)
        elif kind == "tally":
            tallies.append(rest[0])
        else:
            num_ended += 1
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
    """Return the report of one rank; the others are in the directory of failures."""
    head, *ranks = detail.split("\n[rank ")
    return "\n[rank ".join([head, *ranks[:1]])[:4000]
