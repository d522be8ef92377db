"""The page docs/faults.md, written by `make faults` from what the fault tests have recorded.

With `--forget`, records of earlier runs are deleted and nothing is written.
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

from tests.support.fault_injection import MODES, RANKS, SHORT, TIMEOUT, Fault, Kind, Outcome, Place

# ---- Records

FOLDER = "ZEROSHARD_RECORDS"
_ENDING = ".record.json"


@dataclass(frozen=True)
class Record:
    """`known`, `ended`: seconds from what was done until all ranks that live had raised an error, and had ended; None
    where nothing was to be known."""

    case: str
    injected: str
    seen: str
    known: float | None = None
    ended: float | None = None

    def keep(self) -> None:
        """One file a case, so that each can be renewed alone."""
        folder = os.environ.get(FOLDER)
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            name = "".join(letter if letter.isalnum() else "-" for letter in self.case)
            (Path(folder) / f"{name}{_ENDING}").write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def read_records(folder: Path) -> list[Record]:
    """All that were kept, by case."""
    found = (json.loads(path.read_text(encoding="utf-8")) for path in folder.glob(f"*{_ENDING}"))
    return sorted((Record(**it) for it in found), key=lambda record: record.case)


# ---- The page

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"
_OUTCOMES, _COUNTS, _LONG = "outcomes.json", "counts.json", "long_runs.json"
FEWEST = 500
"""Faults whose survivors were watched until they had raised an error, or had ended."""
SLOWEST = 2.0
"""Seconds until all others know of a rank that was killed, and whose connections the kernel has closed."""

# ruff: noqa: E501 (a page)
_HEAD = f"""# Faults

Written by `make faults`, which puts faults into real jobs: do not edit. gloo, torch {torch.__version__}, {os.cpu_count()} cores.

**{{count}} faults: 0 silent differences, 0 lost checkpoints. In {{watched}} of them all survivors were watched until they had raised an error or ended: 0 hangs beyond the timeout. A rank that was killed was known to all others after {{worst:.2f}} s at most.** A hang, a difference or a lost checkpoint would have failed the run. No page is written of fewer than {FEWEST} faults that were watched, or if a killed rank was known after {SLOWEST:g} s or later.

## One rank out of {RANKS}

Each job trains, consolidates and saves in turn, in one of {len(MODES)} ways ({", ".join(MODES)}). At some step one rank has a fault, somewhere. *What the others saw* are the errors on all other ranks, with the ways in brackets where not all of them saw it; *until all knew* the seconds from
the fault until the last of them had its error in hand: median and worst. A rank that is stopped can only be known by waiting: the timeout of the process group is {SHORT:g} s there, and {TIMEOUT:g} s in all other rows.
A `RuntimeError` is torch's own, of DDP. Where the error was one for all ranks and connections are whole, the job goes on by itself, from the last checkpoint; else all processes are started again. Either way its end is
compared with that of a job that nothing happened to: parameters and state have the same bits. What is slow is waited for; a wrong shape is that of a tensor.
The way named overlapped has `ConsistencyCheck`, `NonFiniteGrads` and `PeerCheckpoint` on top.

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
_NO_HOSTS = "| none | this machine permits no network namespaces | | | |\n"
_SECTIONS = {
    "killed": """
## Killed while saving, and with a second copy

Ranks that save all the time are killed with all others moments later, which are not watched: what counts is the folder that they leave. Those with a second copy are watched until they have raised `RankLostError`, and go on in their processes.

| jobs | what was done | kills | until all knew, s | lost |
|---|---|---|---|---|
""",
    "elastic": """
## Fewer ranks, and more

Under torchrun. The job goes on from its last checkpoint with the ranks that are there; its end has the bits of the plain optimizer that took the same steps for as many ranks.

| jobs | what was done | kills | until all knew, s | lost |
|---|---|---|---|---|
""",
    "flips": """
## Flipped bits

Of parameters, at any place, on one rank, and none of them a fault that is counted above.

| jobs | what was done | bits | | found |
|---|---|---|---|---|
""",
    "timings": """
## Other timings

The same training with messages, threads and locks delayed at random, apart on each rank. No faults, and not counted above.

| jobs | what was done | timings | | different bits |
|---|---|---|---|---|
""",
}
_ENDS = {"went on": False, "restarted": True}
_END = {"killed": "nothing", "elastic": "nothing", "flips": "all", "timings": "none"}
_LONG_RUN = """
## A long run

{steps:,} steps at 4 ranks, twice, with other pauses on each rank; written by `make long`. In their order, which a seed decides: {events}. Digests of all parameters and all state every 100 steps were the same in both runs, on all ranks.

| run | rank | seconds | memory at first, MiB | in the end, MiB | open files | threads | tensors |
|---|---|---|---|---|---|---|---|
"""


class Count(NamedTuple):
    """That nothing was lost, so many times."""

    section: str
    case: str
    done: str
    number: int
    is_watched: bool = True
    """All that were left were waited for. Else nobody could have seen one that hangs."""
    known: float | None = None
    """Seconds until all knew, at worst."""

    @property
    def faults(self) -> int:
        return self.number if self.section in ("killed", "elastic") else 0

    @property
    def row(self) -> str:
        known = "" if self.known is None else f"{self.known:.2f}"
        return f"| {self.case} | {self.done} | {self.number} | {known} | {_END[self.section]} |\n"


def keep_outcomes(outcomes: Sequence[Outcome]) -> None:
    """For the page, if a folder for that is named."""
    _write(_OUTCOMES, [[it.fault.kind.name, it.fault.place.name, *it[1:]] for it in outcomes])


def keep_count(count: Count) -> None:
    """In the place of an earlier one of that case."""
    found = [it for it in _counts() if (it.section, it.case) != (count.section, count.case)]
    _write(_COUNTS, [*found, count])


def forget() -> None:
    """All but the long run, which is a run of its own."""
    for file in _folder().glob("*.json") if os.environ.get(FOLDER) else ():
        if file.name != _LONG:
            file.unlink()


def write_page(target: Path = PAGE) -> None:
    """Ends with a sentence where there is nothing to be shown, or not what is promised."""
    outcomes = [_outcome(*it) for it in _read(_OUTCOMES) or []]
    counts, hosts = _counts(), read_records(_folder())
    numbers = _numbers(outcomes, counts, [it for it in hosts if it.known is not None])
    parts = [_HEAD.format(**numbers), *_matrix(outcomes), _HOSTS, *map(_host_row, hosts)]
    if not any(it.known is not None for it in hosts):
        parts.append(_NO_HOSTS)
    for section, head in _SECTIONS.items():
        rows = [it.row for it in counts if it.section == section]
        parts += [head, *rows] if rows else []
    target.write_text("".join([*parts, *_long_run(target)]), encoding="utf-8")


def _numbers(outcomes: Sequence[Outcome], counts: Sequence[Count], hosts: Sequence[Record]) -> dict[str, Any]:
    if not outcomes:
        sys.exit("no faults were recorded: run `make faults`")
    killed = [it.seconds for it in outcomes if it.fault.kind is Kind.KILLED]
    worst = max([*killed, *(it.known for it in counts if it.known is not None)], default=0.0)
    watched = len(outcomes) + len(hosts) + sum(it.faults for it in counts if it.is_watched)
    if watched < FEWEST:
        sys.exit(f"only {watched} faults were watched: expected {FEWEST} or more. No page is written.")
    if worst >= SLOWEST:
        sys.exit(
            f"a killed rank was known to all after {worst:.2f} s: expected less than {SLOWEST:g} s. No page is written."
        )
    return {"count": watched + sum(it.faults for it in counts if not it.is_watched), "watched": watched, "worst": worst}


def _counts() -> list[Count]:
    return [Count(*it) for it in _read(_COUNTS) or []]


def _host_row(it: Record) -> str:
    known, ended = ("" if seconds is None else f"{seconds:.1f}" for seconds in (it.known, it.ended))
    return f"| {it.case} | {it.injected} | {it.seen} | {known} | {ended} |\n"


def _outcome(kind: str, place: str, *rest: Any) -> Outcome:
    return Outcome(Fault(Kind[kind], Place[place], 0, 0), *rest)


def _matrix(outcomes: Sequence[Outcome]) -> list[str]:
    by_cell: dict[tuple[Kind, Place], list[Outcome]] = defaultdict(list)
    for it in outcomes:
        by_cell[it.fault.kind, it.fault.place].append(it)
    return [_row(kind, place, by_cell[kind, place]) for kind in Kind for place in Place if by_cell[kind, place]]


def _row(kind: Kind, place: Place, outcomes: Sequence[Outcome]) -> str:
    names = sorted({name for it in outcomes for name in it.saw})
    times = [it.seconds for it in outcomes]
    known = f"{median(times):.2f} / {max(times):.2f}" if names else ""
    saw = [(f"`{name}`", [it for it in outcomes if name in it.saw]) for name in names]
    saw.append(("nothing", [it for it in outcomes if not it.saw]))
    ends = [(end, [it for it in outcomes if it.restarted == is_so]) for end, is_so in _ENDS.items()]
    return f"| {kind.value} | {place.value} | {len(outcomes)} | {_ways(saw, outcomes)} | {known} | {_ways(ends, outcomes)} | nothing |\n"


def _ways(shown: Sequence[tuple[str, Sequence[Outcome]]], outcomes: Sequence[Outcome]) -> str:
    """What there was, with the ways in which it was so if that is not all of them, each time."""
    every, texts = Counter(it.mode for it in outcomes), []
    for text, those in shown:
        found = Counter(it.mode for it in those)
        ways = [
            way if found[way] == every[way] else f"{way} {found[way]} of {every[way]}" for way in MODES if found[way]
        ]
        if those:
            texts.append(text if found == every else f"{text} ({', '.join(ways)})")
    return ", ".join(texts)


def _long_run(target: Path) -> list[str]:
    """As recorded; else what the page had of an earlier one stays."""
    rows = _read(_LONG)
    if not rows:
        heading = "\n## A long run\n"
        before = target.read_text(encoding="utf-8") if target.is_file() else ""
        return [heading, before.partition(heading)[2]] if heading in before else []
    events = ", ".join(f"{name} {count}" for name, count in rows[0]["events"].items())
    return [_LONG_RUN.format(steps=rows[0]["steps"], events=events), *map(_long_row, rows)]


def _long_row(row: dict[str, Any]) -> str:
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
