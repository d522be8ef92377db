"""Rows of results, as a table on the screen, as JSON and as Markdown."""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from .quiet import require_quiet_machine
from .timing import Spread

HEADINGS = ("what", "zeroshard", "peer", "ratio or value", "bar", "met")


@dataclass(frozen=True)
class Row:
    """One comparison. `bar` is the maximum of `value`; a row without a bar is for information."""

    what: str
    zeroshard: str
    peer: str
    value: float | None = None
    spread: tuple[float, float] | None = None
    bar: float | None = None
    failed: bool = False

    @property
    def met(self) -> bool | None:
        if self.failed:
            return False
        return None if self.bar is None or self.value is None else self.value <= self.bar

    def cells(self) -> tuple[str, ...]:
        value = "" if self.value is None else f"{self.value:.3g}"
        if self.spread is not None:
            value += f" ({self.spread[0]:.3g} to {self.spread[1]:.3g})"
        bar = "" if self.bar is None else f"{self.bar:g}"
        verdict = {None: "", True: "yes", False: "NO"}[self.met]
        return (self.what, self.zeroshard, self.peer, value, bar, verdict)


Section = Callable[[], list[Row]]


def ratio_row(what: str, zeroshard: str, peer: str, ratio: Spread, bar: float | None = None) -> Row:
    return Row(what, zeroshard, peer, ratio.median, (ratio.low, ratio.high), bar)


def failed_row(what: str, error: BaseException) -> Row:
    last_line = str(error).strip().splitlines()[-1:] or [type(error).__name__]
    return Row(what, f"failed: {last_line[0]}", "", failed=True)


def measure(sections: Mapping[str, Section], *, writes_results: bool) -> list[Row]:
    """Run all sections and return their rows. A section that fails returns one failed row.

    With `writes_results`, exit instead if other processes are busy before a section or after the last one.
    """
    rows: list[Row] = []
    for name, section in sections.items():
        if writes_results:
            require_quiet_machine()
        start = time.monotonic()
        try:
            rows += section()
        except Exception as error:
            print(f"{name}: {error}", file=sys.stderr)
            rows.append(failed_row(name, error))
        print(f"{name}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    if writes_results:
        require_quiet_machine()
    return rows


@dataclass(frozen=True)
class Appendix:
    """More contents of the result files: Markdown after the table, and values for the JSON."""

    text: str = ""
    record: Mapping[str, Any] = field(default_factory=dict)


def finish(
    rows: Sequence[Row], title: str, note: str, stem: Path | None, *, fail: bool, more: Appendix | None = None
) -> int:
    """Show and write the results. Return the exit status: 1 if a bar was missed."""
    _show(title, rows)
    if stem is not None:
        _write(stem, title, note, rows, more or Appendix())
    return int(fail and any(row.met is False for row in rows))


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """Format a table. The first line is its head."""
    head, *body = lines
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *body))


def _describe_machine() -> dict[str, Any]:
    machine: dict[str, Any] = {"torch": torch.__version__, "cpus": os.cpu_count()}
    if torch.cuda.is_available():
        machine["gpu"] = torch.cuda.get_device_name()
    return machine


def _show(title: str, rows: Sequence[Row]) -> None:
    """Print a table, in plain text if `rich` is not installed."""
    cells = [row.cells() for row in rows]
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(f"\n{title}\n{_plain(cells)}")
        return
    table = Table(*HEADINGS, title=title)
    for row, line in zip(rows, cells, strict=True):
        table.add_row(*line, style={None: "", True: "green", False: "bold red"}[row.met])
    Console(width=max(Console().width, 150)).print(table)


def _write(stem: Path, title: str, note: str, rows: Sequence[Row], more: Appendix) -> None:
    stem.parent.mkdir(parents=True, exist_ok=True)
    machine = _describe_machine()
    contents = {"machine": machine, "rows": [{**asdict(row), "met": row.met} for row in rows], **more.record}
    stem.with_suffix(".json").write_text(json.dumps(contents, indent=2) + "\n")
    described = ", ".join(f"{key} {value}" for key, value in machine.items())
    table = markdown([HEADINGS, *(row.cells() for row in rows)])
    parts = [f"# {title}", f"Measured with {described}. {note}", table, *([more.text] if more.text else [])]
    stem.with_suffix(".md").write_text("\n\n".join(parts) + "\n")


def _plain(cells: Sequence[tuple[str, ...]]) -> str:
    lines = [HEADINGS, *cells]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADINGS))]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
