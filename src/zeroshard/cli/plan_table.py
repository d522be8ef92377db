"""A plan as a table for terminals: a section a number of ranks, a row a method."""

from collections.abc import Callable
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..planning.plan import Plan
from ..planning.usage import Estimate
from .plan_quantities import in_bytes, in_seconds
from .plan_words import COLOURS, PHASES, assumed, at_the_peak, copies, headline, not_counted, unit_of, what_fits
from .show import printable

_WIDE = 140
"""Columns, from which on there is room for bars."""
_BAR = 24


@dataclass(frozen=True)
class Column:
    """`cell`: of an estimate. `narrow`: its heading where there is little room."""

    heading: str
    narrow: str
    cell: Callable[[Estimate], Text | str]
    justify: str = "right"


def show_plan(plan: Plan, console: Console) -> None:
    wide = console.width >= _WIDE
    unit = unit_of(plan)
    console.print(Text.assemble((printable(plan.model.name), "bold"), ": ", headline(plan)), soft_wrap=False)
    console.print(_table(plan, unit, wide))
    if wide:
        console.print(_legend(plan))
    for sentence in (what_fits(plan), copies(plan), assumed(plan), not_counted(plan)):
        if sentence:
            console.print(Text(sentence, style="bold" if sentence.startswith("With") else "dim"))


def _table(plan: Plan, unit: tuple[str, float], wide: bool) -> Table:
    columns = _columns(plan, unit, wide)
    table = Table(box=SIMPLE_HEAD, padding=(0, 0, 0, 1 if wide else 0), pad_edge=False, header_style="bold")
    table.title, table.title_justify = f"{unit[0]} on the rank that has most", "left"
    for column in columns:
        table.add_column(
            column.heading if wide else column.narrow,
            justify="left" if column.justify == "left" else "right",
            no_wrap=True,
        )
    for number in sorted({it.ranks for it in plan}):
        words = "1 rank" if number == 1 else f"{number:,} ranks"
        table.add_row(Text(words, style="bold cyan"), *[""] * (len(columns) - 1))
        for it in plan:
            if it.ranks == number:
                table.add_row(*(column.cell(it) for column in columns))
        table.add_section()
    return table


def _columns(plan: Plan, unit: tuple[str, float], wide: bool) -> list[Column]:
    def part(name: str) -> Callable[[Estimate], str]:
        return lambda it: _in(unit, getattr(it.usage, name))

    return [
        Column("method", "method", lambda it: f"  {it.method}", "left"),
        Column("parameters", "params", part("parameters")),
        Column("gradients", "grads", part("gradients")),
        Column("state", "state", part("state")),
        *([Column("masters", "masters", part("masters"))] if _has(plan, "masters") else []),
        Column("total", "total", part("total")),
        Column("buffers", "buffers", part("buffers")),
        Column("peak", "peak", lambda it: Text(_in(unit, it.usage.peak), style="bold")),
        Column("in", "in", lambda it: PHASES[it.usage.peak_phase], "left"),
        *([Column(_bar_heading(plan), "", lambda it: _bar(plan, it), "left")] if wide else []),
        *([Column("host", "host", part("host"))] if _has(plan, "host") else []),
        Column("balance", "bal.", lambda it: f"{it.balance:.2f}"),
        Column("sent a step", "sent", lambda it: in_bytes(it.traffic.sent)),
        *([Column("network", "network", _network)] if wide or not _has(plan, "host") else []),
        *([Column("fits", "fits", lambda it: _verdict(plan.fits(it)))] if plan.memory is not None else []),
    ]


def _network(it: Estimate) -> str:
    return in_seconds(it.traffic.seconds)


def _in(unit: tuple[str, float], count: int) -> str:
    value = count / unit[1]
    if count and value < 0.01:
        return "<0.01"
    return f"{value:,.1f}" if value >= 99.95 else f"{value:.2f}"


def _verdict(fits: bool | None) -> Text:
    return Text("yes", style="bold green") if fits else Text("no", style="red")


def _largest(plan: Plan) -> int:
    return max(1, plan.memory or max(it.usage.peak for it in plan))


def _bar_heading(plan: Plan) -> str:
    return f"of {in_bytes(_largest(plan))}"


def _bar(plan: Plan, it: Estimate) -> Text:
    """As long as the memory; a longer one ends in an arrow."""
    row = {
        name: getattr(it.usage, name) for name in ("parameters", "gradients", "state", "masters", "activations", "peak")
    }
    bar, done, drawn = Text(), 0, 0
    for name, count in at_the_peak(row, it.usage.peak_phase).items():
        done += count
        end = min(_BAR, round(done * _BAR / _largest(plan)))
        bar.append("█" * (end - drawn), style=COLOURS[name])
        drawn = max(drawn, end)
    bar.append("·" * (_BAR - drawn), style="dim")
    return bar.append("▶" if it.usage.peak > _largest(plan) else " ", style="red")


def _legend(plan: Plan) -> Text:
    drawn = [it for it in COLOURS if it in ("parameters", "gradients", "state", "on top") or _has(plan, it)]
    return Text("   ").join(Text.assemble(("█ ", COLOURS[it]), it) for it in drawn)


def _has(plan: Plan, part: str) -> bool:
    return any(getattr(it.usage, part) for it in plan)
