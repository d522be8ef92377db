"""Tables in the docs are copied from the files of measurements, or computed by the planner. Rewrite them:

python docs/tables.py
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_TABLE = re.compile(r"^<!-- (table|plan) (.*?) -->\n(?:\n(?:\|.*\n)+)?", re.MULTILINE)
METHODS = ("DDP", "zeroshard 1", "zeroshard 2", "FSDP2")
"""Methods that tables of plans show."""


def filled(markdown: str) -> str:
    """A page, with a table after each comment that asks for one."""
    makers = {"table": table, "plan": plan_table}
    return _TABLE.sub(lambda found: f"<!-- {found[1]} {found[2]} -->\n\n{makers[found[1]](found[2])}\n", markdown)


def table(options: str) -> str:
    """The first table of a file, or of a part of it: some columns, some rows.

    file: its place in the repository. under: the heading before it. columns: from and to, counted without the first.
    rows: patterns of the first cell, with bars between them. header: other names of the shown columns. bold="min": mark
    the smallest number of each column.
    """
    chosen = dict(re.findall(r'(\w+)="([^"]*)"', options))
    text = (ROOT / chosen["file"]).read_text(encoding="utf-8")
    if "under" in chosen:
        _, heading, text = text.partition(f"\n## {chosen['under']}\n")
        if not heading:
            raise ValueError(f"{chosen['file']} has no heading {chosen['under']!r}")
    first_table = re.search(r"^\|.*(?:\n\|.*)*", text, re.MULTILINE)
    assert first_table, f"{chosen['file']} has no table there"
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in first_table[0].splitlines()]
    first, last = map(int, chosen.get("columns", f"1-{len(rows[0])}").split("-"))
    wanted = [pattern.strip() for pattern in chosen.get("rows", "*").split(" | ")]
    kept = [row for row in rows[2:] if any(fnmatchcase(row[0], pattern) for pattern in wanted)]
    if not kept:
        raise ValueError(f"no row of {chosen['file']} is one of {wanted}")
    shown = [[row[0], *row[first : last + 1]] for row in [rows[0], *kept]]
    if "header" in chosen:
        shown[0] = [name.strip() for name in chosen["header"].split(" | ")]
        if len(shown[0]) != len(shown[1]):
            raise ValueError(f"{len(shown[0])} names for {len(shown[1])} columns: {shown[0]}")
    if chosen.get("bold") == "min":
        _mark_smallest(shown[1:])
    shown.insert(1, ["---"] * len(shown[0]))
    return "\n".join(f"| {' | '.join(row)} |" for row in shown)


def _mark_smallest(rows: list[list[str]]) -> None:
    for column in range(1, len(rows[0])):
        smallest = min(float(row[column]) for row in rows)
        for row in rows:
            if float(row[column]) == smallest:
                row[column] = f"**{row[column]}**"


def plan_table(options: str) -> str:
    """A table of plans with bf16 parameters, fp32 master weights and AdamW. A row per model and number of GPUs.

    models, gpus: separated by spaces. show: "memory" for what is kept and the peak, or "card" for the smallest of
    `cards`, in GB, whose share `usable` is at least the peak.
    """
    chosen = dict(re.findall(r'(\w+)="([^"]*)"', options))
    counts = tuple(map(int, chosen["gpus"].split()))
    names = [name.replace("zeroshard", "stage") for name in METHODS]
    shows_memory = chosen["show"] == "memory"
    columns = [f"{name}: {kind}" for name in names for kind in ("kept", "peak")] if shows_memory else names
    lines = [["model", "GPUs", *columns], ["---"] * (2 + len(columns))]
    for model in chosen["models"].split():
        found = _plan(model, counts)
        for count in counts:
            cells = []
            for method in METHODS:
                memory = found.estimate_for(method, count).memory
                if shows_memory:
                    cells += [_gigabytes(memory.total), _gigabytes(memory.peak)]
                else:
                    cards = sorted(map(float, chosen["cards"].split()))
                    fitting = [card for card in cards if memory.peak <= 1e9 * card * float(chosen["usable"])]
                    cells.append(f"{fitting[0]:g}" if fitting else "-")
            lines.append([model, str(count), *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


@cache
def _plan(model: str, counts: tuple[int, ...]) -> Any:
    import torch

    from zeroshard import ZeroConfig
    from zeroshard.planner import plan
    from zeroshard.planner.shapes import load_model_shape

    shape, config = load_model_shape(model).cast(torch.bfloat16), ZeroConfig(master_dtype=torch.float32)
    return plan(shape, torch.optim.AdamW, ranks=counts, config=config)


def _gigabytes(nbytes: int) -> str:
    gigabytes = nbytes / 1e9
    return f"{gigabytes:,.1f}" if gigabytes < 10 else f"{gigabytes:,.0f}"


if __name__ == "__main__":
    for page in sorted((ROOT / "docs").glob("*.md")):
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
