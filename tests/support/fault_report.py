"""Write docs/faults.md from the records of the fault tests. Run by `make faults`.

With `--forget`, delete the records of earlier runs and write nothing.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from tests.support.fault_injection import MODES, RANKS, SHORT_TIMEOUT, TIMEOUT, Fault, Kind, Outcome, Place

# ---- Records

FOLDER = "ZEROSHARD_RECORDS"
_RECORD_SUFFIX = ".record.json"


@dataclass(frozen=True)
class Record:
    """The result of a case with several hosts.

    `known`, `ended`: seconds from the fault until all surviving ranks had raised an error, and until they had exited.
    None if there was no fault to detect.
    """

    case: str
    injected: str
    seen: str
    known: float | None = None
    ended: float | None = None

    def keep(self) -> None:
        """Write one file per case, so that each can be recorded separately."""
        folder = os.environ.get(FOLDER)
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            name = "".join(char if char.isalnum() else "-" for char in self.case)
            (Path(folder) / f"{name}{_RECORD_SUFFIX}").write_text(
                json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8"
            )


def read_records(folder: Path) -> list[Record]:
    """Return all records, sorted by case."""
    contents = (json.loads(path.read_text(encoding="utf-8")) for path in folder.glob(f"*{_RECORD_SUFFIX}"))
    return sorted((Record(**values) for values in contents), key=lambda record: record.case)


# ---- The page

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"
_OUTCOMES_FILE, _COUNTS_FILE, _LONG_RUNS_FILE = "outcomes.json", "counts.json", "long_runs.json"
FEWEST = 500
"""Minimum number of faults whose survivors were observed until they had raised an error or exited."""
SLOWEST = 2.0
"""Maximum seconds until all others detect a killed rank, whose connections the kernel has closed."""

# ruff: noqa: E501 (a page)
_HEAD = f"""# Faults

Written by `make faults`, which injects faults into real jobs. Do not edit. gloo, torch {torch.__version__}, {os.cpu_count()} cores.

**{{count}} faults: 0 silent differences, 0 lost checkpoints.** In {{watched}} of them the test observed all survivors until they had raised an error or exited: 0 hangs beyond the timeout. A killed rank was detected by all others within {{worst:.2f}} s.

A hang, a difference or a lost checkpoint fails the run. The page is written only if at least {FEWEST} faults were observed and every killed rank was detected in less than {SLOWEST:g} s.

## One faulty rank out of {RANKS}

Each job trains, consolidates its state and saves checkpoints, in one of {len(MODES)} modes: {", ".join(MODES)}. In a random step, a fault is injected into one rank, in the phase that the table names.

- *Errors on the other ranks*: if only some modes raised an error, they are listed in parentheses. `RuntimeError` comes from torch's DDP.
- *Detected after*: seconds from the fault until all other ranks had raised an error, median / maximum. A stopped rank is detected only by the process-group timeout, which is {SHORT_TIMEOUT:g} s in those rows and {TIMEOUT:g} s in all others.
- *Then*: if all ranks raised the same error and their connections still work, the job continues from the last checkpoint in the same processes. Otherwise all processes are restarted.

Either way, the final parameters and state are bit-identical to those of a job without faults. The other ranks wait for a slow rank and raise no error. *Has a wrong shape* refers to the shape of a tensor.
The overlapped mode also uses `ConsistencyCheck`, `NonFiniteGrads` and `PeerCheckpoint`.

| one rank | phase | faults | errors on the other ranks | detected after, s | then | lost |
|---|---|---|---|---|---|---|
"""
_HOSTS = """
## Hosts

Hosts are network namespaces with their own addresses. The process-group timeout is 5 s. A cut link or a lost host closes no connection, so the other ranks detect it at the timeout. *Exited after*: seconds until all processes had exited.
After a restart, all parameters and state are bit-identical to those of an uninterrupted run.

| case | fault or option | result | detected after, s | exited after, s |
|---|---|---|---|---|
"""
_NO_HOSTS = "| none | this machine permits no network namespaces | | | |\n"
_SECTIONS = {
    "killed": """
## Killed while saving

All ranks save continuously. One rank or all ranks are killed at a random time, and any survivors moments later. The test does not observe these survivors: it checks the directory that the job leaves behind.

| job | fault | kills | detected after, s | lost |
|---|---|---|---|---|
""",
    "peers": """
## Peer checkpoints

Ranks with peer checkpoints are killed while they train. The test observes the survivors until they raise `RankLostError`. The survivors then resume in the same processes, from their peers' snapshots.

| job | fault | kills | detected after, s | lost |
|---|---|---|---|---|
""",
    "elastic": """
## Elastic jobs

Jobs under torchrun lose and gain ranks. Each job resumes from its last checkpoint on the ranks that are left or have joined. Its final state is bit-identical to that of a plain optimizer that takes the same steps with the same world sizes.

| job | fault | kills | detected after, s | lost |
|---|---|---|---|---|
""",
    "flips": """
## Flipped bits

One bit of a parameter is flipped on one rank, at a random position. These are not counted as faults above.

| job | fault | bits | | detected |
|---|---|---|---|---|
""",
    "timings": """
## Random delays

The same training runs with random delays of messages, threads and locks, which differ between ranks. Delays are not counted as faults above.

| job | compared | runs | | different bits |
|---|---|---|---|---|
""",
}
_ENDS = {"continued": False, "restarted": True}
_LAST_CELLS = {"killed": "nothing", "peers": "nothing", "elastic": "nothing", "flips": "all", "timings": "none"}
_LONG_RUN = """
## A long run

Written by `make long`, which runs {steps:,} steps on 4 ranks twice, with different random pauses on each rank. A seed determines the order of the events: {events}. Digests of all parameters and state, taken every 100 steps, were identical in both runs and on all ranks.

| run | rank | seconds | memory at the start, MiB | memory at the end, MiB | open files | threads | tensors |
|---|---|---|---|---|---|---|---|
"""


class Count(NamedTuple):
    """The number of faults of a case. Nothing was lost after any of them."""

    section: str
    case: str
    done: str
    number: int
    is_watched: bool = True
    """Whether the test waited for all survivors, so a hang would have been noticed."""
    known: float | None = None
    """Seconds until all other ranks had raised, at worst."""

    @property
    def faults(self) -> int:
        return self.number if self.section in ("killed", "peers", "elastic") else 0

    @property
    def row(self) -> str:
        known = "" if self.known is None else f"{self.known:.2f}"
        return f"| {self.case} | {self.done} | {self.number} | {known} | {_LAST_CELLS[self.section]} |\n"


def keep_outcomes(outcomes: Sequence[Outcome]) -> None:
    """Record outcomes for the page, if a directory is set."""
    _write(_OUTCOMES_FILE, [[outcome.fault.kind.name, outcome.fault.place.name, *outcome[1:]] for outcome in outcomes])


def keep_count(count: Count) -> None:
    """Record a count. Replaces an earlier one of the same case."""
    others = [other for other in _read_counts() if (other.section, other.case) != (count.section, count.case)]
    _write(_COUNTS_FILE, [*others, count])


def forget() -> None:
    """Delete all records except that of the long run."""
    for file in _folder().glob("*.json") if os.environ.get(FOLDER) else ():
        if file.name != _LONG_RUNS_FILE:
            file.unlink()


def write_page(target: Path = PAGE) -> None:
    """Write the page. Exit with a message if records are missing or below the promised numbers."""
    outcomes = [_make_outcome(*fields) for fields in _read(_OUTCOMES_FILE) or []]
    counts, hosts = _read_counts(), read_records(_folder())
    totals = _sum_up(outcomes, counts, [record for record in hosts if record.known is not None])
    parts = [_HEAD.format(**totals), *_matrix_rows(outcomes), _HOSTS, *map(_host_row, hosts)]
    if not any(record.known is not None for record in hosts):
        parts.append(_NO_HOSTS)
    for section, head in _SECTIONS.items():
        rows = [count.row for count in counts if count.section == section]
        parts += [head, *rows] if rows else []
    target.write_text("".join([*parts, *_long_run_section(target)]), encoding="utf-8")


def _sum_up(outcomes: Sequence[Outcome], counts: Sequence[Count], hosts: Sequence[Record]) -> dict[str, Any]:
    if not outcomes:
        sys.exit("no faults were recorded: run `make faults`")
    killed = [outcome.seconds for outcome in outcomes if outcome.fault.kind is Kind.KILLED]
    worst = max([*killed, *(count.known for count in counts if count.known is not None)], default=0.0)
    watched = len(outcomes) + len(hosts) + sum(count.faults for count in counts if count.is_watched)
    if watched < FEWEST:
        sys.exit(f"only {watched} faults were observed: expected {FEWEST} or more. The page is not written.")
    if worst >= SLOWEST:
        sys.exit(
            f"a killed rank was detected after {worst:.2f} s: expected less than {SLOWEST:g} s. "
            "The page is not written."
        )
    unwatched = sum(count.faults for count in counts if not count.is_watched)
    return {"count": watched + unwatched, "watched": watched, "worst": worst}


def _read_counts() -> list[Count]:
    return [Count(*fields) for fields in _read(_COUNTS_FILE) or []]


def _host_row(record: Record) -> str:
    known, ended = ("" if seconds is None else f"{seconds:.1f}" for seconds in (record.known, record.ended))
    return f"| {record.case} | {record.injected} | {record.seen} | {known} | {ended} |\n"


def _make_outcome(kind: str, place: str, *others: Any) -> Outcome:
    return Outcome(Fault(Kind[kind], Place[place], 0, 0), *others)


def _matrix_rows(outcomes: Sequence[Outcome]) -> list[str]:
    by_cell: dict[tuple[Kind, Place], list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        by_cell[outcome.fault.kind, outcome.fault.place].append(outcome)
    return [_matrix_row(kind, place, by_cell[kind, place]) for kind in Kind for place in Place if by_cell[kind, place]]


def _matrix_row(kind: Kind, place: Place, outcomes: Sequence[Outcome]) -> str:
    names = sorted({name for outcome in outcomes for name in outcome.errors})
    times = [outcome.seconds for outcome in outcomes]
    known = f"{median(times):.2f} / {max(times):.2f}" if names else ""
    errors = [(f"`{name}`", [outcome for outcome in outcomes if name in outcome.errors]) for name in names]
    errors.append(("none", [outcome for outcome in outcomes if not outcome.errors]))
    ends = [(end, [outcome for outcome in outcomes if outcome.restarted == flag]) for end, flag in _ENDS.items()]
    return f"| {kind.value} | {place.value} | {len(outcomes)} | {_list_with_modes(errors, outcomes)} | {known} | {_list_with_modes(ends, outcomes)} | nothing |\n"


def _list_with_modes(results: Sequence[tuple[str, Sequence[Outcome]]], outcomes: Sequence[Outcome]) -> str:
    """List results. Those that not all outcomes had are followed by their modes."""
    total, texts = Counter(outcome.mode for outcome in outcomes), []
    for text, matching in results:
        found = Counter(outcome.mode for outcome in matching)
        modes = [
            mode if found[mode] == total[mode] else f"{mode} {found[mode]} of {total[mode]}"
            for mode in MODES
            if found[mode]
        ]
        if matching:
            texts.append(text if found == total else f"{text} ({', '.join(modes)})")
    return ", ".join(texts)


def _long_run_section(target: Path) -> list[str]:
    """Return the recorded long run. Without a record, keep the section of the existing page."""
    rows = _read(_LONG_RUNS_FILE)
    if not rows:
        heading = "\n## A long run\n"
        page = target.read_text(encoding="utf-8") if target.is_file() else ""
        return [heading, page.partition(heading)[2]] if heading in page else []
    events = ", ".join(f"{name} {count}" for name, count in rows[0]["events"].items())
    return [_LONG_RUN.format(steps=rows[0]["steps"], events=events), *map(_long_run_row, rows)]


def _long_run_row(row: dict[str, Any]) -> str:
    first, last = row["first"], row["last"]
    counts = " | ".join(f"{first[name]} → {last[name]}" for name in ("files", "threads", "tensors"))
    return f"| {row['run'] + 1} | {row['rank']} | {row['seconds']:.0f} | {first['rss'] / 2**20:.0f} | {last['rss'] / 2**20:.0f} | {counts} |\n"


def _folder() -> Path:
    return Path(os.environ.get(FOLDER, ""))


def _read(name: str) -> Any:
    file = _folder() / name
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def _write(name: str, value: Any) -> None:
    if os.environ.get(FOLDER):
        _folder().mkdir(parents=True, exist_ok=True)
        (_folder() / name).write_text(json.dumps(value), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] == ["--forget"]:
        forget()
    else:
        write_page()
