"""A report as a picture: who owns what, what it takes, what the last step took. Needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..labels import Label
from ..pictures import new_figure, save
from ..units import MIB
from .text import count, in_bytes, in_seconds
from .values import BucketShare, Facts

COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
"""Of Okabe and Ito: told apart by those who see few colours, too."""
_DPI = 120
MOST_BUCKETS = 16
MOST_SLICES = 256
MOST_NAMED = 16
"""Ranks whose numbers are written into their slices."""


def draw(facts: Facts, path: Path) -> Path:
    buckets = _chosen(facts.buckets)
    rows = max(len(facts.times.parts), len(facts.memory) + 1, 3)
    tall = 1.6 + 0.34 * len(buckets)
    figure = new_figure("picture()", figsize=(12, tall + 1.6 + 0.3 * rows), dpi=_DPI)
    upper, lower = figure.subfigures(2, 1, height_ratios=(tall, 1.6 + 0.3 * rows))
    _draw_owners(upper.subplots(), facts, buckets)
    memory, times = lower.subplots(1, 2, width_ratios=(1, 1.6))
    _draw_memory(memory, facts, rows)
    _draw_times(times, facts, rows)
    return save(figure, path)


def _chosen(buckets: list[BucketShare]) -> list[BucketShare | None]:
    """The first and the last of many, and None for what is between them."""
    if len(buckets) <= MOST_BUCKETS:
        return list(buckets)
    half = MOST_BUCKETS // 2
    return [*buckets[:half], None, *buckets[-half:]]


def _draw_owners(axes: Any, facts: Facts, buckets: list[BucketShare | None]) -> None:
    longest = max((it.nbytes for it in facts.buckets), default=1)
    labels = []
    for place, it in enumerate(buckets):
        labels.append("..." if it is None else _name(it))
        if it is None:
            hidden = len(facts.buckets) - len(buckets) + 1
            axes.text(0, place, f" {count(hidden, 'more bucket')}", va="center", fontsize=9, color="#444444")
            continue
        _draw_bucket(axes, place, it, facts, longest)
    axes.set_yticks(range(len(buckets)), labels, fontsize=8)
    axes.set_ylim(len(buckets) - 0.4, -0.6)
    axes.set_xlim(0, longest / MIB * 1.01)
    axes.set_xlabel("MiB")
    axes.spines[["top", "right"]].set_visible(False)
    rows = f", {facts.rows} rows that hold the same" if facts.rows > 1 else ""
    axes.set_title(
        f"Who owns what: {' and '.join(facts.classes)}, {facts.elements:,} elements, "
        f"{count(facts.world_size, 'rank')}{rows}",
        loc="left",
        fontsize=11,
    )
    _draw_legend(axes, facts)


def _draw_bucket(axes: Any, place: int, it: BucketShare, facts: Facts, longest: int) -> None:
    unit = it.nbytes / max(it.elements, 1) / MIB
    own = [shard for shard in it.shards if shard[0] == facts.place]
    for (rank, start, stop), edge, depth in [
        *((shard, ("white", 0.3), 2) for shard in _merged(it.shards)),
        *((shard, ("black", 1.2), 3) for shard in own),
    ]:
        color, width = _color(rank, facts.world_size), (stop - start) * unit
        style = {"color": color, "edgecolor": edge[0], "linewidth": edge[1], "zorder": depth}
        axes.barh(place, width, left=start * unit, height=0.72, **style)
        if facts.world_size <= MOST_NAMED and width * MIB > longest * 0.025:
            middle = (start + stop) / 2 * unit
            axes.text(middle, place, str(rank), ha="center", va="center", fontsize=8, color=_ink(color), zorder=4)


def _merged(shards: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Neighbours together where there are more than could be told apart."""
    step = -(-len(shards) // MOST_SLICES) or 1
    runs = [shards[start : start + step] for start in range(0, len(shards), step)]
    return [(run[0][0], run[0][1], run[-1][2]) for run in runs]


def _color(rank: int, ranks: int) -> Any:
    """One of a few that differ or, for many ranks, one of a scale from dark to bright."""
    if ranks <= len(COLORS):
        return COLORS[rank]
    from matplotlib import colormaps

    return colormaps["viridis"](0.15 + 0.85 * rank / (ranks - 1))


def _ink(color: Any) -> str:
    """What can be read on it."""
    from matplotlib.colors import to_rgb

    red, green, blue = to_rgb(color)
    return "white" if 0.3 * red + 0.59 * green + 0.11 * blue < 0.5 else "black"


def _draw_legend(axes: Any, facts: Facts) -> None:
    """What colours mean: a few ranks are named, of many the first and the last."""
    from matplotlib.patches import Patch

    ranks = range(facts.world_size)
    shown = list(ranks) if len(ranks) <= len(COLORS) else sorted({*ranks[:: len(ranks) // 4], ranks[-1]})
    handles = [Patch(color=_color(rank, facts.world_size), label=f"rank {rank}") for rank in shown]
    handles.append(Patch(facecolor="white", edgecolor="black", label="this rank"))
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=9)


def _name(it: BucketShare) -> str:
    first = it.parameters[0] if it.parameters else "nothing"
    short = first if len(first) <= 40 else f"{first[:20]}...{first[-17:]}"
    more = f" + {len(it.parameters) - 1}" if len(it.parameters) > 1 else ""
    return f"{it.number}: {short}{more}"


def _draw_memory(axes: Any, facts: Facts, rows: int) -> None:
    names = [f"{it.what} ({it.device})" for it in facts.memory]
    sizes = [it.nbytes / MIB for it in facts.memory]
    axes.barh(range(len(names)), sizes, height=0.7, color=COLORS[0])
    _finish_bars(axes, names, sizes, [in_bytes(it.nbytes) for it in facts.memory], rows)
    axes.set_xlabel("MiB")
    axes.set_title(f"Memory of rank {facts.rank}", loc="left", fontsize=11)


def _draw_times(axes: Any, facts: Facts, rows: int) -> None:
    ordered = sorted(facts.times.parts.items(), key=lambda it: -(it[1].in_step + it[1].outside))
    names = ["all else in step()" if label is Label.STEP else label.text for label, _ in ordered]
    inside, outside = [it.in_step * 1e3 for _, it in ordered], [it.outside * 1e3 for _, it in ordered]
    totals = [in_seconds(it.in_step + it.outside) for _, it in ordered]
    axes.barh(range(len(names)), inside, height=0.7, color=COLORS[5], label="in step()")
    passes = "outside: backward, forward, between"
    axes.barh(range(len(names)), outside, left=inside, height=0.7, color=COLORS[4], label=passes)
    _finish_bars(axes, names, [a + b for a, b in zip(inside, outside, strict=True)], totals, rows)
    axes.set_xlabel("milliseconds of the host")
    took = f"{in_seconds(facts.times.step)} of {in_seconds(facts.times.iteration)}"
    title = f"The last step: {took}" if names else "No step was made yet"
    axes.set_title(title, loc="left", fontsize=11)
    if names:
        axes.legend(frameon=False, fontsize=9, loc="lower right")


def _finish_bars(axes: Any, names: list[str], sizes: list[float], texts: list[str], rows: int) -> None:
    for place, (size, text) in enumerate(zip(sizes, texts, strict=True)):
        axes.text(size, place, f" {text}", va="center", fontsize=8)
    axes.set_yticks(range(len(names)), names, fontsize=9)
    axes.set_ylim(rows - 0.4, -0.6)
    axes.set_xlim(0, 1.18 * max(sizes, default=1.0) or 1.0)
    axes.spines[["top", "right"]].set_visible(False)
