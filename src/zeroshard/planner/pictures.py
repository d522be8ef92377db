"""A plan as one page to explore: numbers made here, for a grid of choices; the page selects and draws."""

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
# What a plan means, in sentences.


MEMORY_COLOURS = {
    "parameters": "#0072b2",
    "gradients": "#e69f00",
    "state": "#009e73",
    "masters": "#cc79a7",
    "activations": "#56b4e9",
    "on top": "#8c8c8c",
}
"""Of parts, everywhere the same. They differ also for the colour-blind."""
PHASE_LABELS = {"making the optimizer": "making", "backward": "backward", "step": "step"}


def display_unit(plan: Plan) -> tuple[str, float]:
    """One for everything that is shown, so that numbers can be compared."""
    return ("GB", 1e9) if max(it.memory.peak for it in plan) >= 2e9 else ("MB", 1e6)


def format_headline(plan: Plan) -> str:
    """Without the name of the model, which comes from others."""
    buffers = f", {format_bytes(plan.model.buffer_bytes)} of buffers" if plan.model.buffer_bytes else ""
    frozen = sum(it.numel for it in plan.model.params if not it.trainable)
    still = f", {frozen:,} of them frozen" if frozen else ""
    rows = "" if plan.shard_group_size is None else f"; zeroshard in rows of {plan.shard_group_size} ranks"
    return f"{plan.model.numel:,} parameters{still}{buffers}, {plan.optimizer}, {plan.precision}{rows}"


def format_min_ranks(plan: Plan) -> str | None:
    """With 80 GB a rank, on the planned ranks: DDP never, torch ZeRO from 64 ranks, ..."""
    if plan.memory is None:
        return None
    numbers = sorted({it.ranks for it in plan})
    words = ", ".join(
        f"{method} {_format_min_ranks_of_method(least, numbers)}" for method, least in plan.min_ranks().items()
    )
    before = "" if any(it.memory.activations for it in plan) else ", before activations"
    where = f", on {' and '.join(f'{it:,}' for it in numbers)} ranks" if len(numbers) < 4 else ", of the planned ranks"
    return f"With {format_bytes(plan.memory)} a rank{where}{before}: {words}."


def _format_min_ranks_of_method(min_ranks: int | None, planned_ranks: list[int]) -> str:
    if min_ranks is None:
        return "never" if len(planned_ranks) > 1 else "does not fit"
    if min_ranks == planned_ranks[0]:
        return "always" if len(planned_ranks) > 1 else "fits"
    return f"from {min_ranks:,} ranks"


def format_peer_checkpoint_traffic(plan: Plan) -> str | None:
    """Second copies: for each a rank sends 1.5 GB on 8 ranks, 188 MB on 64 ranks."""
    sent = {it.ranks: it.peer_checkpoint_bytes for it in plan if it.peer_checkpoint_bytes}
    if not sent:
        return None
    words = ", ".join(f"{format_bytes(count)} on {ranks:,} ranks" for ranks, count in sent.items())
    return f"Second copies: for each a rank sends {words}. Host memory is that while the next is under way."


def format_exclusions(plan: Plan) -> str:
    said = max(it.memory.activations for it in plan)
    counted = f"Counted are {format_bytes(said)} of activations, in backward. " if said else ""
    activations = "" if said else "activations (--activations says how much they take), "
    return (
        f"{counted}Not counted: {activations}memory that the allocator loses to fragmentation, and the CUDA context "
        "(around half a GB)."
    )


def format_network_assumptions(plan: Plan) -> str:
    network = plan.network
    row = "" if network.within is None else f" ({format_bytes(network.within)}/s inside a row)"
    return (
        f"Network time: what a step sends, at {format_bytes(network.bandwidth)}/s{row} and {network.latency * 1e6:g} "
        "us a message, if nothing overlaps; at best, with log2 N messages one after the other in a collective."
    )


def breakdown_at_peak(row: Mapping[str, int], phase: str) -> dict[str, int]:
    """Parts that add up to the peak: what is kept, and what is on top of it in that phase."""
    parts = {part: row[part] for part in ("parameters", "gradients", "state", "masters")}
    parts["activations"] = row["activations"] if phase == "backward" else 0
    return {**parts, "on top": row["peak"] - sum(parts.values())}


# ---------------------------------------------------------------------------------------------------------------------
# A plan as one page to explore: numbers made here, for a grid of choices; the page selects and draws.


PAGE_WORLD_SIZES = tuple(2**power for power in range(13))
PAGE_FIELDS = ("parameters", "gradients", "state", "masters", "buffers", "activations", "peak", "host", "total")
"""Of each row, in bytes; then what `_row` adds."""
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
    """A value of a control."""

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
    """HTML that needs nothing else."""
    data = _dump_inert_json(collect_page_data(request, optimizer, precision))
    parts = {"title": escape(f"{request.model.name}: will it fit?"), "data": data}
    template = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    return re.sub(
        r"\{\{(title|data)\}\}", lambda found: parts[found[1]], template
    )  # once: names may look like this, too


def collect_page_data(request: PlanRequest, optimizer: OptimizerChoice, precision: str | None) -> dict[str, Any]:
    """All that the page shows. A usual class that cannot be planned for this model is left out."""
    row = request.shard_group_size or 1
    worlds = sorted({*(row * it for it in PAGE_WORLD_SIZES if row * it <= PAGE_WORLD_SIZES[-1]), *request.ranks})
    plans: dict[str, dict[str, Plan]] = {}
    for kind in _optimizer_choices(optimizer):
        try:
            plans[kind.label] = {
                it.label: request.make_plan(kind.value, it.value, worlds) for it in _precision_choices(precision)
            }
        except ZeroError:
            if kind.value == optimizer:
                raise
    first = next(iter(next(iter(plans.values())).values()))
    return {
        "model": {"name": request.model.name, "parameters": request.model.numel, "tensors": len(request.model.params)},
        "worlds": worlds,
        "activations": request.activations,
        "start": request.ranks[len(request.ranks) // 2],
        "methods": list(dict.fromkeys(it.method for it in first)),
        "optimizers": list(plans),
        "precisions": [it.label for it in _precision_choices(precision)],
        "memory": request.memory,
        "shard_group_size": request.shard_group_size,
        "unit": display_unit(first),
        "network": asdict(request.network),
        "colours": MEMORY_COLOURS,
        "note": format_exclusions(first),
        "fields": [*PAGE_FIELDS, "on_top", "at_peak", "phase", "balance", "sent", "messages", "seconds", "copies"],
        "rows": {
            kind: {it: [_page_row(row) for row in plan.as_dict()["estimates"]] for it, plan in made.items()}
            for kind, made in plans.items()
        },
    }


def _page_row(row: dict[str, Any]) -> list[Any]:
    parts = breakdown_at_peak(row, row["peak_phase"])
    peak = [parts["on top"], parts["activations"], row["peak_phase"]]
    traffic = [row["sent"], row["messages"], float(f"{row['seconds']:.6g}"), row["peer_checkpoint_sent"]]
    return [*(row[name] for name in PAGE_FIELDS), *peak, round(row["balance"], 6), *traffic]


def _optimizer_choices(chosen: OptimizerChoice) -> list[ControlChoice]:
    """The chosen one first."""
    others = [it for it in COMMON_OPTIMIZERS if it != chosen]
    options = ", ".join(f"{name}={value}" for name, value in chosen.options.items())
    label = f"{chosen.name} ({options})" if options else _OPTIMIZER_LABELS.get(chosen.name.lower(), chosen.name)
    label = label if chosen not in COMMON_OPTIMIZERS else _OPTIMIZER_LABELS.get(chosen.name, chosen.name)
    return [
        ControlChoice(label, chosen),
        *(ControlChoice(_OPTIMIZER_LABELS.get(it.name, it.name), it) for it in others),
    ]


def _precision_choices(chosen: str | None) -> list[ControlChoice]:
    others = [ControlChoice(it, it) for it in PAGE_PRECISIONS if it != chosen]
    return [ControlChoice(chosen or _MODEL_PRECISION_LABEL, chosen), *others]


def _dump_inert_json(data: dict[str, Any]) -> str:
    """JSON in which nothing ends the element that it stands in, whatever the model is called."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


# ---------------------------------------------------------------------------------------------------------------------
# A plan as a picture: a panel a number of ranks, a bar a method, and a line where the memory ends.


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
