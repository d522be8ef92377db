"""The page docs/faults.md, made of what the tests of faults have recorded. `make faults` writes it."""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from tests.support import records
from tests.support.fault_matrix import RANKS, SHORT, TIMEOUT, Outcome
from tests.support.faults import Fault, Kind, Place
from tests.support.jobs import MODES

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"
_OUTCOMES, _COUNTS, _LONG = "outcomes.json", "counts.json", "long_runs.json"

# ruff: noqa: E501 (a page)
_HEAD = f"""# Faults

Written by `make faults`, which puts faults into real jobs: do not edit. gloo, torch {torch.__version__}, {os.cpu_count()} cores.

**{{count}} faults: 0 hangs beyond the timeout, 0 silent differences, 0 lost checkpoints. A rank that was killed was known to all others after {{worst:.2f}} s at most.** A hang, a difference or a lost checkpoint would have failed the run, and left no page.

## One rank out of {RANKS}

Each job trains, consolidates and saves in turn, in one of {len(MODES)} ways ({", ".join(MODES)}). At some step one rank has a fault, somewhere. *What the others saw* are the errors on all other ranks, *until all knew* the seconds from
the fault until the last of them had its error in hand: median and worst. A rank that is stopped can only be known by waiting: the timeout of the process group is {SHORT:g} s there, and {TIMEOUT:g} s in all other rows.
A `RuntimeError` is torch's own, of DDP. Where the error was one for all ranks and connections are whole, the job goes on by itself, from the last checkpoint; else all processes are started again. Either way its end is
compared with that of a job that nothing happened to: parameters and state have the same bits. What is slow is waited for. A wrong shape is that of a tensor, or an error as torch raises it where there is none to be spoiled.
The way named overlapped has `Drift`, `NonFinite` and `SecondCopy` on top.

| one rank | in | faults | what the others saw | until all knew, s | afterwards | lost |
|---|---|---|---|---|---|---|
"""
_HOSTS = """
## Hosts

Hosts are network namespaces with addresses of their own; the timeout of the process group is 5 s. A link that is cut, or a host that vanishes, closes no connection: the others know when the timeout is over. *Ended*: until all processes had.
After a restart all parameters and all state have the bits of a run without a break.

| hosts | what was done | what ranks saw | until all knew, s | ended, s |
|---|---|---|---|---|
"""
_MORE = """
## Killed while saving, and with a second copy

| jobs | what was done | kills | lost |
|---|---|---|---|
"""
_LONG_RUN = """
## A long run

{steps:,} steps at 4 ranks, twice, with other pauses on each rank; written by `make long`. In their order, which a seed decides: {events}. Digests of all parameters and all state every 100 steps were the same in both runs, on all ranks.

| run | rank | seconds | memory at first, MiB | in the end, MiB | open files | threads | tensors |
|---|---|---|---|---|---|---|---|
"""


def keep_outcomes(outcomes: Sequence[Outcome]) -> None:
    """For the page, if a folder for that is named."""
    _write(_OUTCOMES, [[it.fault.kind.name, it.fault.place.name, *it[1:]] for it in outcomes])


def keep_count(case: str, done: str, count: int) -> None:
    """That nothing was lost, so many times."""
    found: dict[str, Any] = _read(_COUNTS) or {}
    _write(_COUNTS, {**found, case: [done, count]})


def write_page(target: Path = PAGE) -> None:
    outcomes = [_outcome(*it) for it in _read(_OUTCOMES) or []]
    if not outcomes:
        sys.exit("no faults were recorded: run `make faults`")
    counts: dict[str, Any] = _read(_COUNTS) or {}
    hosts = [it for it in records.rows(_folder()) if it.known is not None]
    killed = max((it.seconds for it in outcomes if it.fault.kind is Kind.KILLED), default=0.0)
    count = len(outcomes) + len(hosts) + sum(number for _, number in counts.values())
    parts = [_HEAD.format(count=count, worst=killed), *_matrix(outcomes)]
    parts += [
        _HOSTS,
        *(f"| {it.case} | {it.injected} | {it.seen} | {it.known:.1f} | {it.ended or 0:.1f} |\n" for it in hosts),
    ]
    parts += [_MORE, *(f"| {case} | {done} | {number} | nothing |\n" for case, (done, number) in counts.items())]
    target.write_text("".join([*parts, *_long_run()]), encoding="utf-8")


def _outcome(kind: str, place: str, *rest: Any) -> Outcome:
    return Outcome(Fault(Kind[kind], Place[place], 0, 0), *rest)


def _matrix(outcomes: Sequence[Outcome]) -> list[str]:
    by_cell: dict[tuple[Kind, Place], list[Outcome]] = defaultdict(list)
    for it in outcomes:
        by_cell[it.fault.kind, it.fault.place].append(it)
    return [_row(kind, place, by_cell[kind, place]) for kind in Kind for place in Place if by_cell[kind, place]]


def _row(kind: Kind, place: Place, outcomes: Sequence[Outcome]) -> str:
    saw = sorted({name for it in outcomes for name in it.saw})
    times = [it.seconds for it in outcomes]
    known = f"{median(times):.2f} / {max(times):.2f}" if saw else ""
    restarted = sum(it.restarted for it in outcomes)
    after = "went on" if not restarted else "restarted" if restarted == len(outcomes) else f"{restarted} restarted"
    shown = ", ".join(f"`{name}`" for name in saw) or "nothing"
    return f"| {kind.value} | {place.value} | {len(outcomes)} | {shown} | {known} | {after} | nothing |\n"


def _long_run() -> list[str]:
    rows = _read(_LONG)
    if not rows:
        return []
    events = ", ".join(f"{name} {count}" for name, count in rows[0]["events"].items())
    return [_LONG_RUN.format(steps=rows[0]["steps"], events=events), *map(_long_row, rows)]


def _long_row(row: dict[str, Any]) -> str:
    first, last = row["first"], row["last"]
    counts = " | ".join(f"{first[name]} → {last[name]}" for name in ("files", "threads", "tensors"))
    return f"| {row['run'] + 1} | {row['rank']} | {row['seconds']:.0f} | {first['rss'] / 2**20:.0f} | {last['rss'] / 2**20:.0f} | {counts} |\n"


def _folder() -> Path:
    return Path(os.environ.get(records.FOLDER, ""))


def _read(name: str) -> Any:
    file = _folder() / name
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def _write(name: str, value: Any) -> None:
    if os.environ.get(records.FOLDER):
        _folder().mkdir(parents=True, exist_ok=True)
        (_folder() / name).write_text(json.dumps(value), encoding="utf-8")


if __name__ == "__main__":
    write_page()
