"""Write docs/programs.md from the records of all runs."""

from __future__ import annotations

import json
from collections import Counter
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import torch

HEAD = """# Random programs

Written by `make programs`: do not edit. gloo, torch {torch}.

**{programs:,} random training programs at {sizes} ranks: {failures} differences, hangs or aborts.** Each program ran
twice: under zeroshard, and under DDP with the plain optimizer and gradients summed in rank order. Losses, norms,
parameters and buffers were compared after each step, and all optimizer state at the end.

| verdict | {columns} |
|---|{lines}|
{verdicts}
If a program made a call that zeroshard documents as rejected, the call had to raise on all ranks, and the program
continued. The last bits of programs *within tolerance* may differ, for these reasons:

| reason | programs |
|---|---|
{reasons}
## Parts

The number of programs that contained each part.

| part | programs |
|---|---|
{parts}
## Pairs of parts

Of {possible:,} pairs of parts, {seen:,} occurred in the same program. The others exclude each other (two modes, two
optimizers, calls that a mode rejects) or were not drawn. Each pair that occurred was in {least} to {most:,} programs,
with a median of {middle}. By kind of part:

| | {kinds} |
|---|{kind_lines}|
{matrix}
Each cell has the median number of programs per pair of parts of these kinds, and how many of these pairs occurred.
"""

KINDS = ("mode", "model", "optimizer", "loop", "refused")


def append_record(records: Path, record: dict[str, Any]) -> None:
    records.parent.mkdir(parents=True, exist_ok=True)
    with records.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def write_page(records: Path, page: Path) -> None:
    """Write the page from all runs in the file of records."""
    runs = [json.loads(line) for line in records.read_text(encoding="utf-8").splitlines() if line.strip()]
    tallies: list[dict[str, Any]] = [tally for run in runs for tally in run["tallies"]]
    sizes = sorted({tally["ranks"] for tally in tallies if tally["programs"]})
    parts, pairs, reasons = (_add(tallies, name) for name in ("parts", "pairs", "reasons"))
    verdicts = {size: _add([tally for tally in tallies if tally["ranks"] == size], "verdicts") for size in sizes}
    names = [name for name, _ in sum(verdicts.values(), Counter[str]()).most_common()]
    failures = sum(
        verdicts[size][name] for size in sizes for name in names if name not in ("same bits", "within tolerance")
    )
    possible = len(parts) * (len(parts) - 1) // 2
    counts = sorted(pairs.values()) or [0]
    page.write_text(
        HEAD.format(
            torch=" and ".join(sorted({run.get("torch", torch.__version__) for run in runs})),
            programs=sum(tally["programs"] for tally in tallies),
            sizes=" and ".join(map(str, sizes)),
            failures=failures,
            columns=" | ".join(f"{size} ranks" for size in sizes),
            lines="|".join("---" for _ in sizes),
            verdicts="".join(
                f"| {name} | {' | '.join(str(verdicts[size][name]) for size in sizes)} |\n" for name in names
            ),
            reasons="".join(f"| {reason} | {count} |\n" for reason, count in reasons.most_common()),
            parts="".join(f"| {part} | {parts[part]} |\n" for part in sorted(parts)),
            possible=possible,
            seen=len(pairs),
            least=counts[0],
            middle=round(median(counts)),
            most=counts[-1],
            kinds=" | ".join(KINDS),
            kind_lines="|".join("---" for _ in KINDS),
            matrix="".join(_row(kind, parts, pairs) for kind in KINDS),
        ),
        encoding="utf-8",
    )


def _add(tallies: list[dict[str, Any]], name: str) -> Counter[str]:
    total: Counter[str] = Counter()
    for tally in tallies:
        total.update(tally[name])
    return total


def _row(kind: str, parts: Counter[str], pairs: Counter[str]) -> str:
    cells = []
    for other in KINDS:
        names = [name for name in sorted(parts) if _kind(name) in (kind, other)]
        counts = [
            pairs[f"{one} + {two}"] for one, two in combinations(names, 2) if {_kind(one), _kind(two)} == {kind, other}
        ]
        nonzero = [count for count in counts if count]
        cells.append(f"{round(median(nonzero)) if nonzero else 0} ({len(nonzero)} of {len(counts)})")
    return f"| {kind} | {' | '.join(cells)} |\n"


def _kind(part: str) -> str:
    return part.split(":", maxsplit=1)[0]
