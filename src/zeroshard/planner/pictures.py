"""A plan as sentences, as an interactive HTML page and as a plot."""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from .._plotting import new_figure, save_figure
from .._types import replace_unprintable
from ..errors import ConfigError, ZeroError
from .plan import Plan
from .request import MUON_ADAMW, OptimizerChoice, PlanRequest, format_bytes

# ---------------------------------------------------------------------------------------------------------------------
# Sentences.


MEMORY_COLOURS = {
    "parameters": "#0072b2",
    "gradients": "#e69f00",
    "state": "#009e73",
    "masters": "#cc79a7",
    "activations": "#56b4e9",
    "on top": "#8c8c8c",
}
"""Colours of memory categories, the same everywhere and safe for colour-blind readers."""
PHASE_LABELS = {"making the optimizer": "making", "backward": "backward", "step": "step"}


def display_unit(plan: Plan) -> tuple[str, float]:
    """Return one unit for all numbers of a plan, so that they can be compared."""
    return ("GB", 1e9) if max(estimate.memory.peak for estimate in plan) >= 2e9 else ("MB", 1e6)


def format_headline(plan: Plan) -> str:
    """Describe model, optimizer and precision. The model's name is untrusted text and not included."""
    buffers = f", {format_bytes(plan.model.buffer_bytes)} of buffers" if plan.model.buffer_bytes else ""
    frozen = sum(param.numel for param in plan.model.params if not param.trainable)
    frozen_text = f", {frozen:,} of them frozen" if frozen else ""
    groups = "" if plan.shard_group_size is None else f"; zeroshard in shard groups of {plan.shard_group_size} ranks"
    return f"{plan.model.numel:,} parameters{frozen_text}{buffers}, {plan.optimizer}, {plan.precision}{groups}"


def format_min_ranks(plan: Plan) -> str | None:
    """Say from how many ranks each method fits: "With 80 GB a rank, ...: DDP never, torch ZeRO from 64 ranks, ..."."""
    if plan.memory is None:
        return None
    rank_counts = sorted({estimate.ranks for estimate in plan})
    methods = ", ".join(
        f"{method} {_format_min_ranks_of_method(min_ranks, rank_counts)}"
        for method, min_ranks in plan.min_ranks().items()
    )
    before = "" if any(estimate.memory.activations for estimate in plan) else ", before activations"
    where = (
        f", on {' and '.join(f'{count:,}' for count in rank_counts)} ranks"
        if len(rank_counts) < 4
        else ", of the planned ranks"
    )
    return f"With {format_bytes(plan.memory)} a rank{where}{before}: {methods}."


def _format_min_ranks_of_method(min_ranks: int | None, planned_ranks: list[int]) -> str:
    if min_ranks is None:
        return "never" if len(planned_ranks) > 1 else "does not fit"
    if min_ranks == planned_ranks[0]:
        return "always" if len(planned_ranks) > 1 else "fits"
    return f"from {min_ranks:,} ranks"


def format_peer_checkpoint_traffic(plan: Plan) -> str | None:
    """Say what a rank sends for each peer checkpoint."""
    sent = {estimate.ranks: estimate.peer_checkpoint_bytes for estimate in plan if estimate.peer_checkpoint_bytes}
    if not sent:
        return None
    words = ", ".join(f"{format_bytes(count)} on {ranks:,} ranks" for ranks, count in sent.items())
    return f"Peer checkpoints: for each a rank sends {words}. Host memory includes the next one in flight."


def format_exclusions(plan: Plan) -> str:
    nbytes = max(estimate.memory.activations for estimate in plan)
    counted = f"Counted are {format_bytes(nbytes)} of activations, in backward. " if nbytes else ""
    activations = "" if nbytes else "activations (--activations says how much they take), "
    return (
        f"{counted}Not counted: {activations}memory that the allocator loses to fragmentation, and the CUDA context "
        "(around half a GB)."
    )


def format_network_assumptions(plan: Plan) -> str:
    network = plan.network
    within = "" if network.within is None else f" ({format_bytes(network.within)}/s inside a shard group)"
    return (
        f"Network time: what a step sends, at {format_bytes(network.bandwidth)}/s{within} and "
        f"{network.latency * 1e6:g} us a message, if nothing overlaps; at best, with log2 N messages one after the "
        "other in a collective."
    )


def breakdown_at_peak(row: Mapping[str, int], phase: str) -> dict[str, int]:
    """Return categories that add up to the peak: persistent memory, and what that phase needs on top."""
    categories = {name: row[name] for name in ("parameters", "gradients", "state", "masters")}
    categories["activations"] = row["activations"] if phase == "backward" else 0
    return {**categories, "on top": row["peak"] - sum(categories.values())}


# ---------------------------------------------------------------------------------------------------------------------
# Interactive page: numbers for a grid of choices, embedded into page.html.


PAGE_WORLD_SIZES = tuple(2**power for power in range(13))
PAGE_FIELDS = ("parameters", "gradients", "state", "masters", "buffers", "activations", "peak", "host", "total")
"""Leading fields of each row, in bytes; `_page_row` appends the others."""
COMMON_OPTIMIZERS = (
    OptimizerChoice("AdamW"),
    OptimizerChoice("SGD", {"momentum": 0.9}),
    OptimizerChoice(MUON_ADAMW),
    OptimizerChoice("Adafactor"),
)
PAGE_PRECISIONS = ("fp32", "bf16", "bf16+fp32")
_OPTIMIZER_LABELS = {"SGD": "SGD, momentum 0.9", MUON_ADAMW: "Muon + AdamW"}
_MODEL_PRECISION_LABEL = "as the model is"


@dataclass(frozen=True)
class ControlChoice:
    """One choice of a control on the page."""

    label: str
    value: Any


def write_page(request: PlanRequest, optimizer: OptimizerChoice, precision: str | None, target: Path) -> None:
    if not target.parent.is_dir():
        raise ConfigError(f"{target} could not be written: {target.parent} is no directory")
    try:
        target.write_text(render_page(request, optimizer, precision), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{target} could not be written: {error}") from error


def render_page(request: PlanRequest, optimizer: OptimizerChoice, precision: str | None) -> str:
    """Return a self-contained HTML page. The page selects and draws; all numbers are computed here."""
    data = _dump_inert_json(collect_page_data(request, optimizer, precision))
    values = {"title": escape(f"{request.model.name}: will it fit?"), "data": data}
    template = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    # One pass over the template: a model's name may itself look like a placeholder.
    return re.sub(r"\{\{(title|data)\}\}", lambda match: values[match[1]], template)


def collect_page_data(request: PlanRequest, optimizer: OptimizerChoice, precision: str | None) -> dict[str, Any]:
    """Compute all numbers of the page. Common optimizers that cannot be planned for this model are omitted."""
    group_size = request.shard_group_size or 1
    worlds = sorted(
        {*(group_size * n for n in PAGE_WORLD_SIZES if group_size * n <= PAGE_WORLD_SIZES[-1]), *request.ranks}
    )
    plans: dict[str, dict[str, Plan]] = {}
    for choice in _optimizer_choices(optimizer):
        try:
            plans[choice.label] = {
                precision_choice.label: request.make_plan(choice.value, precision_choice.value, worlds)
                for precision_choice in _precision_choices(precision)
            }
        except ZeroError:
            if choice.value == optimizer:
                raise
    first = next(iter(next(iter(plans.values())).values()))
    return {
        "model": {"name": request.model.name, "parameters": request.model.numel, "tensors": len(request.model.params)},
        "worlds": worlds,
        "activations": request.activations,
        "start": request.ranks[len(request.ranks) // 2],
        "methods": list(dict.fromkeys(estimate.method for estimate in first)),
        "optimizers": list(plans),
        "precisions": [choice.label for choice in _precision_choices(precision)],
        "memory": request.memory,
        "shard_group_size": request.shard_group_size,
        "unit": display_unit(first),
        "network": asdict(request.network),
        "colours": MEMORY_COLOURS,
        "note": format_exclusions(first),
        "fields": [*PAGE_FIELDS, "on_top", "at_peak", "phase", "balance", "sent", "messages", "seconds", "copies"],
        "rows": {
            label: {
                precision_label: [_page_row(row) for row in plan.as_dict()["estimates"]]
                for precision_label, plan in by_precision.items()
            }
            for label, by_precision in plans.items()
        },
    }


def _page_row(row: dict[str, Any]) -> list[Any]:
    categories = breakdown_at_peak(row, row["peak_phase"])
    peak = [categories["on top"], categories["activations"], row["peak_phase"]]
    traffic = [row["sent"], row["messages"], float(f"{row['seconds']:.6g}"), row["peer_checkpoint_sent"]]
    return [*(row[name] for name in PAGE_FIELDS), *peak, round(row["balance"], 6), *traffic]


def _optimizer_choices(chosen: OptimizerChoice) -> list[ControlChoice]:
    """Return the chosen optimizer first, then the common ones."""
    others = [optimizer for optimizer in COMMON_OPTIMIZERS if optimizer != chosen]
    options = ", ".join(f"{name}={value}" for name, value in chosen.options.items())
    label = f"{chosen.name} ({options})" if options else _OPTIMIZER_LABELS.get(chosen.name.lower(), chosen.name)
    label = label if chosen not in COMMON_OPTIMIZERS else _OPTIMIZER_LABELS.get(chosen.name, chosen.name)
    return [
        ControlChoice(label, chosen),
        *(ControlChoice(_OPTIMIZER_LABELS.get(other.name, other.name), other) for other in others),
    ]


def _precision_choices(chosen: str | None) -> list[ControlChoice]:
    others = [ControlChoice(precision, precision) for precision in PAGE_PRECISIONS if precision != chosen]
    return [ControlChoice(chosen or _MODEL_PRECISION_LABEL, chosen), *others]


def _dump_inert_json(data: dict[str, Any]) -> str:
    """Return JSON that cannot close its script element, whatever the model is called."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


# ---------------------------------------------------------------------------------------------------------------------
# Plot: one panel per number of ranks, one bar per method, a line at the memory limit.


_DPI = 150


def draw_plan(plan: Plan, target: Path) -> Path:
    """Draw the plan and return the path of the file."""
    rank_counts = sorted({estimate.ranks for estimate in plan})
    figure = new_figure("--picture", figsize=(10, 1.3 + 1.55 * len(rank_counts)), dpi=_DPI)
    panels = figure.subplots(len(rank_counts), 1, sharex=True, squeeze=False)[:, 0]
    unit = display_unit(plan)
    for panel, ranks in zip(panels, rank_counts, strict=True):
        _draw_panel(panel, plan, ranks, unit)
    panels[-1].set_xlabel(f"memory of the rank that has most, at the peak ({unit[0]})")
    name = replace_unprintable(plan.model.name).replace("$", r"\$")
    figure.suptitle(f"{name}: {plan.model.numel:,} parameters, {plan.optimizer}, {plan.precision}", fontsize=12)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9)
    return save_figure(figure, target)


def _draw_panel(panel: Any, plan: Plan, ranks: int, unit: tuple[str, float]) -> None:
    rows = [row for row in plan.as_dict()["estimates"] if row["ranks"] == ranks]
    names, left = [row["method"] for row in rows], [0.0] * len(rows)
    breakdowns = [breakdown_at_peak(row, row["peak_phase"]) for row in rows]
    for category, colour in MEMORY_COLOURS.items():
        widths = [breakdown[category] / unit[1] for breakdown in breakdowns]
        if category in ("masters", "activations") and not any(row[category] for row in plan.as_dict()["estimates"]):
            continue
        panel.barh(
            names, widths, left=left, color=colour, label=category, height=0.72, edgecolor="white", linewidth=0.6
        )
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for y, end in enumerate(left):
        panel.annotate(f"{end:,.1f}", (end, y), (4, 0), textcoords="offset points", va="center", fontsize=8)
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
