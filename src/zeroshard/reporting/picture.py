"""A report as a picture: who owns what, what it takes, what the last step took. Needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..profiling import Phase
from .._plotting import new_figure, save_figure
from .._types import MIB
from .text import format_bytes, format_count, format_seconds
from .values import BucketSummary, ReportData

_COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
"""Of Okabe and Ito: told apart by those who see few colours, too."""
_DPI = 120
_MAX_BUCKETS_DRAWN = 16
_MAX_SHARDS_DRAWN = 256
_MAX_RANKS_LABELED = 16
"""Ranks whose numbers are written into their slices."""


def draw_report(report: ReportData, path: Path) -> Path:
    buckets = _select_buckets(report.buckets)
    rows = max(len(report.times.phases), len(report.memory) + 1, 3)
    tall = 1.6 + 0.34 * len(buckets)
    figure = new_figure("picture()", figsize=(12, tall + 1.6 + 0.3 * rows), dpi=_DPI)
    upper, lower = figure.subfigures(2, 1, height_ratios=(tall, 1.6 + 0.3 * rows))
    _draw_owners(upper.subplots(), report, buckets)
    memory, times = lower.subplots(1, 2, width_ratios=(1, 1.6))
    _draw_memory(memory, report, rows)
    _draw_times(times, report, rows)
    return save_figure(figure, path)


def _select_buckets(buckets: list[BucketSummary]) -> list[BucketSummary | None]:
    """The first and the last of many, and None for what is between them."""
    if len(buckets) <= _MAX_BUCKETS_DRAWN:
        return list(buckets)
    half = _MAX_BUCKETS_DRAWN // 2
    return [*buckets[:half], None, *buckets[-half:]]


def _draw_owners(axes: Any, report: ReportData, buckets: list[BucketSummary | None]) -> None:
    longest = max((it.nbytes for it in report.buckets), default=1)
    labels = []
    for place, it in enumerate(buckets):
        labels.append("..." if it is None else _bucket_label(it))
        if it is None:
            hidden = len(report.buckets) - len(buckets) + 1
            axes.text(0, place, f" {format_count(hidden, 'more bucket')}", va="center", fontsize=9, color="#444444")
            continue
        _draw_bucket(axes, place, it, report, longest)
    axes.set_yticks(range(len(buckets)), labels, fontsize=8)
    axes.set_ylim(len(buckets) - 0.4, -0.6)
    axes.set_xlim(0, longest / MIB * 1.01)
    axes.set_xlabel("MiB")
    axes.spines[["top", "right"]].set_visible(False)
    rows = f", {report.num_replicas} rows that hold the same" if report.num_replicas > 1 else ""
    axes.set_title(
        f"Who owns what: {' and '.join(report.optimizer_classes)}, {report.elements:,} elements, "
        f"{format_count(report.world_size, 'rank')}{rows}",
        loc="left",
        fontsize=11,
    )
    _draw_legend(axes, report)


def _draw_bucket(axes: Any, y: int, bucket: BucketSummary, report: ReportData, max_nbytes: int) -> None:
    unit = bucket.nbytes / max(bucket.elements, 1) / MIB
    own = [shard for shard in bucket.shards if shard[0] == report.shard_rank]
    for (rank, start, stop), edge, depth in [
        *((shard, ("white", 0.3), 2) for shard in _merge_neighbors(bucket.shards)),
        *((shard, ("black", 1.2), 3) for shard in own),
    ]:
        color, width = _rank_color(rank, report.world_size), (stop - start) * unit
        style = {"color": color, "edgecolor": edge[0], "linewidth": edge[1], "zorder": depth}
        axes.barh(y, width, left=start * unit, height=0.72, **style)
        if report.world_size <= _MAX_RANKS_LABELED and width * MIB > max_nbytes * 0.025:
            middle = (start + stop) / 2 * unit
            axes.text(middle, y, str(rank), ha="center", va="center", fontsize=8, color=_text_color(color), zorder=4)


def _merge_neighbors(shards: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Neighbours together where there are more than could be told apart."""
    step = -(-len(shards) // _MAX_SHARDS_DRAWN) or 1
    runs = [shards[start : start + step] for start in range(0, len(shards), step)]
    return [(run[0][0], run[0][1], run[-1][2]) for run in runs]


def _rank_color(rank: int, world_size: int) -> Any:
    """One of a few that differ or, for many ranks, one of a scale from dark to bright."""
    if world_size <= len(_COLORS):
        return _COLORS[rank]
    from matplotlib import colormaps

    return colormaps["viridis"](0.15 + 0.85 * rank / (world_size - 1))


def _text_color(color: Any) -> str:
    """What can be read on it."""
    from matplotlib.colors import to_rgb

    red, green, blue = to_rgb(color)
    return "white" if 0.3 * red + 0.59 * green + 0.11 * blue < 0.5 else "black"


def _draw_legend(axes: Any, report: ReportData) -> None:
    """What colours mean: a few ranks are named, of many the first and the last."""
    from matplotlib.patches import Patch

    ranks = range(report.world_size)
    shown = list(ranks) if len(ranks) <= len(_COLORS) else sorted({*ranks[:: len(ranks) // 4], ranks[-1]})
    handles = [Patch(color=_rank_color(rank, report.world_size), label=f"rank {rank}") for rank in shown]
    handles.append(Patch(facecolor="white", edgecolor="black", label="this rank"))
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=9)


def _bucket_label(bucket: BucketSummary) -> str:
    first = bucket.parameters[0] if bucket.parameters else "nothing"
    short = first if len(first) <= 40 else f"{first[:20]}...{first[-17:]}"
    more = f" + {len(bucket.parameters) - 1}" if len(bucket.parameters) > 1 else ""
    return f"{bucket.bucket_index}: {short}{more}"


def _draw_memory(axes: Any, report: ReportData, num_rows: int) -> None:
    names = [f"{it.category} ({it.device})" for it in report.memory]
    sizes = [it.nbytes / MIB for it in report.memory]
    axes.barh(range(len(names)), sizes, height=0.7, color=_COLORS[0])
    _label_bars(axes, names, sizes, [format_bytes(it.nbytes) for it in report.memory], num_rows)
    axes.set_xlabel("MiB")
    axes.set_title(f"Memory of rank {report.rank}", loc="left", fontsize=11)


def _draw_times(axes: Any, report: ReportData, num_rows: int) -> None:
    ordered = sorted(report.times.phases.items(), key=lambda it: -(it[1].in_step_s + it[1].outside_step_s))
    names = ["all else in step()" if label is Phase.STEP else label.text for label, _ in ordered]
    inside, outside = [it.in_step_s * 1e3 for _, it in ordered], [it.outside_step_s * 1e3 for _, it in ordered]
    totals = [format_seconds(it.in_step_s + it.outside_step_s) for _, it in ordered]
    axes.barh(range(len(names)), inside, height=0.7, color=_COLORS[5], label="in step()")
    passes = "outside: backward, forward, between"
    axes.barh(range(len(names)), outside, left=inside, height=0.7, color=_COLORS[4], label=passes)
    _label_bars(axes, names, [a + b for a, b in zip(inside, outside, strict=True)], totals, num_rows)
    axes.set_xlabel("milliseconds of the host")
    took = f"{format_seconds(report.times.step_s)} of {format_seconds(report.times.iteration_s)}"
    title = f"The last step: {took}" if names else "No step was made yet"
    axes.set_title(title, loc="left", fontsize=11)
    if names:
        axes.legend(frameon=False, fontsize=9, loc="lower right")


def _label_bars(axes: Any, names: list[str], sizes: list[float], texts: list[str], num_rows: int) -> None:
    for place, (size, text) in enumerate(zip(sizes, texts, strict=True)):
        axes.text(size, place, f" {text}", va="center", fontsize=8)
    axes.set_yticks(range(len(names)), names, fontsize=9)
    axes.set_ylim(num_rows - 0.4, -0.6)
    axes.set_xlim(0, 1.18 * max(sizes, default=1.0) or 1.0)
    axes.spines[["top", "right"]].set_visible(False)
