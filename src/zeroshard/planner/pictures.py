"""A plan as one page to explore: numbers made here, for a grid of choices; the page selects and draws."""

import json
import re
from dataclasses import asdict, dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..errors import ConfigError, ZeroError
from .plan import Plan
from .request import MUON_ADAMW, OptimizerChoice, PlanRequest
from .plan_words import MEMORY_COLOURS, breakdown_at_peak, display_unit, format_exclusions

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
