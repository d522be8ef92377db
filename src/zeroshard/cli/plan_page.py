"""A plan as one page to explore: numbers made here, for a grid of choices; the page selects and draws."""

import json
import re
from dataclasses import asdict, dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..errors import ConfigError, ZeroError
from ..planning.plan import Plan
from .plan_options import PAIR, Optimizer, Wish
from .plan_words import COLOURS, at_the_peak, not_counted, unit_of

WORLDS = tuple(2**power for power in range(13))
FIELDS = ("parameters", "gradients", "state", "masters", "buffers", "activations", "peak", "host", "total")
"""Of each row, in bytes; then what `_row` adds."""
USUAL = (
    Optimizer("AdamW"),
    Optimizer("SGD", {"momentum": 0.9}),
    Optimizer(PAIR),
    Optimizer("Adafactor"),
)
PRECISIONS = ("fp32", "bf16", "bf16+fp32")
_LABELS = {"SGD": "SGD, momentum 0.9", PAIR: "Muon + AdamW"}
_AS_IT_IS = "as the model is"


@dataclass(frozen=True)
class Choice:
    """A value of a control."""

    label: str
    value: Any


def write_page(wish: Wish, optimizer: Optimizer, precision: str | None, target: Path) -> None:
    if not target.parent.is_dir():
        raise ConfigError(f"{target} could not be written: {target.parent} is no directory")
    try:
        target.write_text(page(wish, optimizer, precision), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{target} could not be written: {error}") from error


def page(wish: Wish, optimizer: Optimizer, precision: str | None) -> str:
    """HTML that needs nothing else."""
    data = _inert(numbers(wish, optimizer, precision))
    parts = {"title": escape(f"{wish.model.name}: will it fit?"), "data": data}
    template = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    return re.sub(
        r"\{\{(title|data)\}\}", lambda found: parts[found[1]], template
    )  # once: names may look like this, too


def numbers(wish: Wish, optimizer: Optimizer, precision: str | None) -> dict[str, Any]:
    """All that the page shows. A usual class that cannot be planned for this model is left out."""
    row = wish.shard_within or 1
    worlds = sorted({*(row * it for it in WORLDS if row * it <= WORLDS[-1]), *wish.ranks})
    plans: dict[str, dict[str, Plan]] = {}
    for kind in _optimizers(optimizer):
        try:
            plans[kind.label] = {it.label: wish.planned(kind.value, it.value, worlds) for it in _precisions(precision)}
        except ZeroError:
            if kind.value == optimizer:
                raise
    first = next(iter(next(iter(plans.values())).values()))
    return {
        "model": {"name": wish.model.name, "parameters": wish.model.elements, "tensors": len(wish.model.params)},
        "worlds": worlds,
        "activations": wish.activations,
        "start": wish.ranks[len(wish.ranks) // 2],
        "methods": list(dict.fromkeys(it.method for it in first)),
        "optimizers": list(plans),
        "precisions": [it.label for it in _precisions(precision)],
        "memory": wish.memory,
        "shard_within": wish.shard_within,
        "unit": unit_of(first),
        "network": asdict(wish.network),
        "colours": COLOURS,
        "note": not_counted(first),
        "fields": [*FIELDS, "on_top", "at_peak", "phase", "balance", "sent", "messages", "seconds", "copies"],
        "rows": {
            kind: {it: [_row(row) for row in plan.as_dict()["estimates"]] for it, plan in made.items()}
            for kind, made in plans.items()
        },
    }


def _row(row: dict[str, Any]) -> list[Any]:
    parts = at_the_peak(row, row["peak_phase"])
    peak = [parts["on top"], parts["activations"], row["peak_phase"]]
    traffic = [row["sent"], row["messages"], float(f"{row['seconds']:.6g}"), row["second_copy_sent"]]
    return [*(row[name] for name in FIELDS), *peak, round(row["balance"], 6), *traffic]


def _optimizers(chosen: Optimizer) -> list[Choice]:
    """The chosen one first."""
    others = [it for it in USUAL if it != chosen]
    options = ", ".join(f"{name}={value}" for name, value in chosen.options.items())
    label = f"{chosen.name} ({options})" if options else _LABELS.get(chosen.name.lower(), chosen.name)
    label = label if chosen not in USUAL else _LABELS.get(chosen.name, chosen.name)
    return [Choice(label, chosen), *(Choice(_LABELS.get(it.name, it.name), it) for it in others)]


def _precisions(chosen: str | None) -> list[Choice]:
    others = [Choice(it, it) for it in PRECISIONS if it != chosen]
    return [Choice(chosen or _AS_IT_IS, chosen), *others]


def _inert(data: dict[str, Any]) -> str:
    """JSON in which nothing ends the element that it stands in, whatever the model is called."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
