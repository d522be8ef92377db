"""A plan as a picture: a panel a number of ranks, a bar a method, and a line where the memory ends."""

from pathlib import Path
from typing import Any

from .._plotting import new_figure, save_figure
from .plan import Plan
from .plan_quantities import format_bytes
from .plan_words import MEMORY_COLOURS, breakdown_at_peak, display_unit
from ..cli.show import replace_unprintable

_DPI = 150


def draw_plan(plan: Plan, target: Path) -> Path:
    """The file that was written."""
    numbers = sorted({it.ranks for it in plan})
    figure = new_figure("--picture", figsize=(10, 1.3 + 1.55 * len(numbers)), dpi=_DPI)
    panels = figure.subplots(len(numbers), 1, sharex=True, squeeze=False)[:, 0]
    unit = display_unit(plan)
    for panel, number in zip(panels, numbers, strict=True):
        _draw_panel(panel, plan, number, unit)
    panels[-1].set_xlabel(f"memory of the rank that has most, at the peak ({unit[0]})")
    name = replace_unprintable(plan.model.name).replace("$", r"\$")
    figure.suptitle(f"{name}: {plan.model.numel:,} parameters, {plan.optimizer}, {plan.precision}", fontsize=12)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9)
    return save_figure(figure, target)


def _draw_panel(panel: Any, plan: Plan, ranks: int, unit: tuple[str, float]) -> None:
    rows = [row for row in plan.as_dict()["estimates"] if row["ranks"] == ranks]
    names, left = [row["method"] for row in rows], [0.0] * len(rows)
    parts = [breakdown_at_peak(row, row["peak_phase"]) for row in rows]
    for part, colour in MEMORY_COLOURS.items():
        widths = [it[part] / unit[1] for it in parts]
        if part in ("masters", "activations") and not any(row[part] for row in plan.as_dict()["estimates"]):
            continue
        panel.barh(names, widths, left=left, color=colour, label=part, height=0.72, edgecolor="white", linewidth=0.6)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for place, end in enumerate(left):
        panel.annotate(f"{end:,.1f}", (end, place), (4, 0), textcoords="offset points", va="center", fontsize=8)
    if plan.memory is not None:
        label = f"{format_bytes(plan.memory)} of memory"
        panel.axvline(plan.memory / unit[1], color="#d55e00", linestyle="--", linewidth=1.4, label=label)
    _style_panel(panel, ranks)


def _style_panel(panel: Any, ranks: int) -> None:
    panel.set_title("1 rank" if ranks == 1 else f"{ranks:,} ranks", loc="left", fontsize=10, fontweight="bold")
    panel.invert_yaxis()
    panel.margins(x=0.08)
    panel.tick_params(axis="y", length=0)
    panel.grid(axis="x", color="#dddddd", linewidth=0.6)
    panel.set_axisbelow(True)
    for side in ("top", "right", "left"):
        panel.spines[side].set_visible(False)
