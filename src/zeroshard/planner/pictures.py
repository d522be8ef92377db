"""A plan as an interactive HTML page and as a plot."""

import json
import re
from dataclasses import asdict, replace
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from .._formatting import format_bytes, format_count, replace_unprintable
from .._plotting import new_figure, save_figure
from ..errors import ConfigError, ZeroError
from .plan import Plan
from .request import MUON_ADAMW, OptimizerChoice, PlanRequest

MEMORY_COLOURS = {
    "parameters": "#0072b2",
    "gradients": "#e69f00",
    "state": "#009e73",
    "masters": "#cc79a7",
    "activations": "#56b4e9",
    "temporary": "#8c8c8c",
}
"""Colours of memory categories, the same everywhere and safe for colour-blind readers."""


def display_unit(plan: Plan) -> tuple[str, float]:
    """Return one unit for all numbers of a plan, which makes them comparable."""
    return ("GB", 1e9) if max(estimate.memory.peak for estimate in plan) >= 2e9 else ("MB", 1e6)


# ---------------------------------------------------------------------------------------------------------------------
# Interactive page: numbers for a grid of choices, embedded into page.html.


PAGE_WORLD_SIZES = tuple(2**power for power in range(13))
COMMON_OPTIMIZERS = (
    *(OptimizerChoice("AdamW"), OptimizerChoice("SGD", {"momentum": 0.9})),
    *(OptimizerChoice(MUON_ADAMW), OptimizerChoice("Adafactor")),
)
PAGE_PRECISIONS = ("fp32", "bf16-autocast", "bf16", "bf16+fp32")
PAGE_FIELDS = ("parameters", "gradients", "state", "masters", "host", "activations")
PAGE_PEAKS = ("construction", "backward", "step")
"""Peaks of the phases. The page adds the activations of the user to the second one."""


def write_page(request: PlanRequest, optimizer: OptimizerChoice, precision: str | None, target: Path) -> None:
    if not target.parent.is_dir():
        raise ConfigError(f"{target} could not be written: there is no directory {target.parent}")
    try:
        target.write_text(render_page(request, optimizer, precision), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{target} could not be written: {error}") from error


def render_page(request: PlanRequest, optimizer: OptimizerChoice, precision: str | None) -> str:
    """Return a self-contained HTML page. The page adds up and draws; all numbers are computed here."""
    data = json.dumps(collect_page_data(request, optimizer, precision), separators=(",", ":"), ensure_ascii=True)
    # Hazard: a model's name must not close the script element.
    data = data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    values = {"title": escape(f"{request.model.name}: will it fit?"), "data": data}
    template = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    # One pass over the template: a model's name may itself look like a placeholder.
    return re.sub(r"\{\{(title|data)\}\}", lambda match: values[match[1]], template)


def collect_page_data(request: PlanRequest, optimizer: OptimizerChoice, precision: str | None) -> dict[str, Any]:
    """Compute all numbers of the page. Common optimizers that cannot be planned for this model are omitted."""
    group_size = request.shard_group_size or 1
    sizes = (group_size * size for size in PAGE_WORLD_SIZES if group_size * size <= PAGE_WORLD_SIZES[-1])
    worlds = sorted({*sizes, *request.ranks})
    every_size = replace(request, ranks=worlds, activations=0)
    precisions = dict.fromkeys([precision, *PAGE_PRECISIONS])
    plans: dict[str, dict[str, Plan]] = {}
    for choice in [optimizer, *(other for other in COMMON_OPTIMIZERS if other != optimizer)]:
        try:
            plans[choice.label] = {
                name or "dtype of the model": every_size.make_plan(choice, name) for name in precisions
            }
        except ZeroError:
            if choice == optimizer:
                raise
    first = next(iter(plans[optimizer.label].values()))
    return {
        "model": {"name": request.model.name, "parameters": request.model.numel, "tensors": len(request.model.params)},
        "worlds": worlds,
        "start": request.ranks[len(request.ranks) // 2],
        "methods": first.methods,
        "optimizers": list(plans),
        "precisions": list(plans[optimizer.label]),
        "memory": request.memory,
        "activations": request.activations,
        "shard_group_size": request.shard_group_size,
        "unit": display_unit(first),
        "network": asdict(request.network),
        "colours": MEMORY_COLOURS,
        "fields": [*PAGE_FIELDS, *PAGE_PEAKS, "balance", "sent", "seconds", "peer_checkpoint_sent"],
        "rows": {label: {name: _page_rows(plan) for name, plan in plans[label].items()} for label in plans},
    }


def _page_rows(plan: Plan) -> list[list[float]]:
    """Return one row for each estimate, in the order of the page's "fields"."""
    return [
        [
            *(getattr(estimate.memory, name) for name in PAGE_FIELDS),
            *(estimate.memory.phase_peaks[phase] for phase in PAGE_PEAKS),
            round(estimate.state_imbalance, 6),
            *(estimate.traffic.sent, float(f"{estimate.traffic.seconds:.6g}"), estimate.peer_checkpoint_bytes),
        ]
        for estimate in plan
    ]


# ---------------------------------------------------------------------------------------------------------------------
# Plot: one panel per number of ranks, one bar per method, a line at the memory limit.


def draw_plan(plan: Plan, target: Path) -> Path:
    """Draw the plan and return the path of the file."""
    figure = new_figure("--picture", figsize=(10, 1.3 + 1.55 * len(plan.rank_counts)), dpi=150)
    panels = figure.subplots(len(plan.rank_counts), 1, sharex=True, squeeze=False)[:, 0]
    for panel, ranks in zip(panels, plan.rank_counts, strict=True):
        _draw_panel(panel, plan, ranks)
    panels[-1].set_xlabel(f"peak memory of the fullest rank ({display_unit(plan)[0]})")
    name = replace_unprintable(plan.model.name).replace("$", r"\$")
    figure.suptitle(f"{name}: {plan.headline}", fontsize=12)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9)
    return save_figure(figure, target)


def _draw_panel(panel: Any, plan: Plan, ranks: int) -> None:
    _, unit = display_unit(plan)
    parts = {estimate.method: estimate.memory.breakdown for estimate in plan if estimate.ranks == ranks}
    ends = dict.fromkeys(parts, 0.0)
    for category, colour in MEMORY_COLOURS.items():
        if category in ("masters", "activations") and not any(estimate.memory.breakdown[category] for estimate in plan):
            continue
        widths, style = [breakdown[category] / unit for breakdown in parts.values()], {"edgecolor": "white"}
        panel.barh(list(parts), widths, left=list(ends.values()), color=colour, label=category, height=0.72, **style)
        ends = {method: end + width for (method, end), width in zip(ends.items(), widths, strict=True)}
    for y, end in enumerate(ends.values()):
        panel.annotate(f"{end:,.1f}", (end, y), (4, 0), textcoords="offset points", va="center", fontsize=8)
    if plan.memory is not None:
        label = f"{format_bytes(plan.memory)} of memory"
        panel.axvline(plan.memory / unit, color="#d55e00", linestyle="--", linewidth=1.4, label=label)
    panel.set_title(format_count(ranks, "rank"), loc="left", fontsize=10, fontweight="bold")
    panel.invert_yaxis()
    panel.margins(x=0.08)
    panel.grid(axis="x", color="#dddddd", linewidth=0.6)
    panel.set_axisbelow(True)
    panel.spines[["top", "right", "left"]].set_visible(False)
