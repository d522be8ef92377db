"""A plan as a table for terminals: a section a number of ranks, a row a method."""

from collections.abc import Callable
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..planner.plan import Plan
from ..planner.usage import Estimate
from ..planner.plan_quantities import format_bytes, format_seconds
from ..planner.plan_words import MEMORY_COLOURS, PHASE_LABELS, breakdown_at_peak, display_unit, format_exclusions, format_headline, format_min_ranks, format_network_assumptions, format_peer_checkpoint_traffic
from .show import replace_unprintable

_MIN_WIDE_COLUMNS = 140
"""Columns, from which on there is room for bars."""
_BAR_COLUMNS = 24


@dataclass(frozen=True)
class Column:
    """`cell`: of an estimate. `narrow`: its heading where there is little room."""

    heading: str
    narrow_heading: str
    cell: Callable[[Estimate], Text | str]
    justify: str = "right"


def print_plan(plan: Plan, console: Console) -> None:
    wide = console.width >= _MIN_WIDE_COLUMNS
    unit = display_unit(plan)
    console.print(
        Text.assemble((replace_unprintable(plan.model.name), "bold"), ": ", format_headline(plan)), soft_wrap=False
    )
    console.print(_plan_table(plan, unit, wide))
    if wide:
        console.print(_bar_legend(plan))
    for sentence in (
        format_min_ranks(plan),
        format_peer_checkpoint_traffic(plan),
        format_network_assumptions(plan),
        format_exclusions(plan),
    ):
        if sentence:
            console.print(Text(sentence, style="bold" if sentence.startswith("With") else "dim"))


def _plan_table(plan: Plan, unit: tuple[str, float], is_wide: bool) -> Table:
    columns = _plan_columns(plan, unit, is_wide)
    table = Table(box=SIMPLE_HEAD, padding=(0, 0, 0, 1 if is_wide else 0), pad_edge=False, header_style="bold")
    table.title, table.title_justify = f"{unit[0]} on the rank that has most", "left"
    for column in columns:
        table.add_column(
            column.heading if is_wide else column.narrow_heading,
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


def _plan_columns(plan: Plan, unit: tuple[str, float], is_wide: bool) -> list[Column]:
    def memory_cell(name: str) -> Callable[[Estimate], str]:
        return lambda it: _format_in_unit(unit, getattr(it.memory, name))

    return [
        Column("method", "method", lambda it: f"  {it.method}", "left"),
        Column("parameters", "params", memory_cell("parameters")),
        Column("gradients", "grads", memory_cell("gradients")),
        Column("state", "state", memory_cell("state")),
        *([Column("masters", "masters", memory_cell("masters"))] if _has_memory(plan, "masters") else []),
        Column("total", "total", memory_cell("total")),
        Column("buffers", "buffers", memory_cell("buffers")),
        Column("peak", "peak", lambda it: Text(_format_in_unit(unit, it.memory.peak), style="bold")),
        Column("in", "in", lambda it: PHASE_LABELS[it.memory.peak_phase], "left"),
        *([Column(_bar_heading(plan), "", lambda it: _memory_bar(plan, it), "left")] if is_wide else []),
        *([Column("host", "host", memory_cell("host"))] if _has_memory(plan, "host") else []),
        Column("balance", "bal.", lambda it: f"{it.state_imbalance:.2f}"),
        Column("sent a step", "sent", lambda it: format_bytes(it.traffic.sent)),
        *([Column("network", "network", _network_cell)] if is_wide or not _has_memory(plan, "host") else []),
        *([Column("fits", "fits", lambda it: _fits_cell(plan.fits(it)))] if plan.memory is not None else []),
    ]


def _network_cell(estimate: Estimate) -> str:
    return format_seconds(estimate.traffic.seconds)


def _format_in_unit(unit: tuple[str, float], nbytes: int) -> str:
    value = nbytes / unit[1]
    if nbytes and value < 0.01:
        return "<0.01"
    return f"{value:,.1f}" if value >= 99.95 else f"{value:.2f}"


def _fits_cell(fits: bool | None) -> Text:
    return Text("yes", style="bold green") if fits else Text("no", style="red")


def _bar_scale_bytes(plan: Plan) -> int:
    return max(1, plan.memory or max(it.memory.peak for it in plan))


def _bar_heading(plan: Plan) -> str:
    return f"of {format_bytes(_bar_scale_bytes(plan))}"


def _memory_bar(plan: Plan, estimate: Estimate) -> Text:
    """As long as the memory; a longer one ends in an arrow."""
    row = {
        name: getattr(estimate.memory, name)
        for name in ("parameters", "gradients", "state", "masters", "activations", "peak")
    }
    bar, done, drawn = Text(), 0, 0
    for name, count in breakdown_at_peak(row, estimate.memory.peak_phase).items():
        done += count
        end = min(_BAR_COLUMNS, round(done * _BAR_COLUMNS / _bar_scale_bytes(plan)))
        bar.append("█" * (end - drawn), style=MEMORY_COLOURS[name])
        drawn = max(drawn, end)
    bar.append("·" * (_BAR_COLUMNS - drawn), style="dim")
    return bar.append("▶" if estimate.memory.peak > _bar_scale_bytes(plan) else " ", style="red")


def _bar_legend(plan: Plan) -> Text:
    drawn = [
        it for it in MEMORY_COLOURS if it in ("parameters", "gradients", "state", "on top") or _has_memory(plan, it)
    ]
    return Text("   ").join(Text.assemble(("█ ", MEMORY_COLOURS[it]), it) for it in drawn)


def _has_memory(plan: Plan, name: str) -> bool:
    return any(getattr(it.memory, name) for it in plan)
