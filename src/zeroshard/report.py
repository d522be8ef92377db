"""`Report`: what `optimizer.report()` returns."""

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from textwrap import wrap
from typing import Any, NamedTuple, TypeVar

import torch

from ._logging import is_enabled_for, log_rank
from ._plotting import new_figure, save_figure
from ._types import MIB, Rank
from .build import EngineBuilder
from .config import ZeroConfig
from .engine.base import Engine
from .engine.flat_engine import FlatShardEngine
from .engine.inner import ParamGroup
from .layout.layout import Bucket, Layout
from .layout.partition import Balance, FlatShards, WholeParams
from .layout.spec import ParamSpec
from .peer_checkpoint.snapshot import PeerSnapshots
from .profiling import Phase, StepTimes
from .state.tensor_utils import collect_plain_tensors

# ---------------------------------------------------------------------------------------------------------------------
# What a report consists of: plain values, of one rank at one moment.


class RankSummary(NamedTuple):
    """What one rank owns."""

    rank: int
    elements: int
    """That are trained."""
    parameters: int
    """Of which it owns all or a piece."""
    cost_fraction: float
    """Of an update, as a part of that of all ranks."""
    state_bytes: int | None
    """Counted on the rank that reports, and for the others as much for each element; None if that is not known."""


class BucketSummary(NamedTuple):
    """One flat run of memory, and how it is divided."""

    bucket_index: int
    dtype: str
    device: str
    elements: int
    nbytes: int
    padding: int
    """Elements that belong to no parameter."""
    parameters: tuple[str, ...]
    sharding: str
    """What shards are: equal slices, slices cut at multiples, or whole parameters."""
    shards: tuple[tuple[int, int, int], ...]
    """Rank, first element and the one behind the last, of all ranks that have some of it."""


class MemoryUse(NamedTuple):
    """Memory of this rank."""

    category: str
    device: str
    nbytes: int


class CommVolume(NamedTuple):
    """Bytes that this rank sends when gradients travel once and parameters come back, if the backend sends none in
    vain. Agreements of a few words are not among them."""

    grad_bytes: int | None
    """None if DDP sends them."""
    param_bytes: int


class Counters(NamedTuple):
    steps: int
    """That were made."""
    nonfinite_found: int = 0
    nonfinite_skipped: int = 0
    consistency_checks: int = 0
    peer_snapshot_step: int | None = None
    """Of the last copy that all ranks have."""
    peer_snapshot_bytes: int = 0
    """Bytes, for that copy."""


@dataclass(frozen=True)
class ReportData:
    """All that a report says."""

    rank: int
    """Of this process, among all that train."""
    shard_rank: int
    """Among those that share the state."""
    world_size: int
    """How many these are."""
    num_replicas: int
    """Groups of such ranks, each of which has all of it."""
    optimizer_classes: tuple[str, ...]
    config: tuple[str, ...]
    """In words, a line each."""
    is_layout_final: bool
    """Who owns what will not change; else DDP's buckets are yet to come."""
    balance: Balance
    state_bytes: tuple[int | None, ...]
    """Of each rank."""
    memory: tuple[MemoryUse, ...]
    comm_volume: CommVolume
    times: StepTimes
    counters: Counters
    layout: Layout = field(repr=False)

    @cached_property
    def ranks(self) -> list[RankSummary]:
        """What all ranks own, as the layout says."""
        pieces = self.layout.sum_per_rank(lambda spec, elements: 1 if elements or not spec.storage_numel else 0)
        total = sum(self.balance.cost_per_rank) or 1.0
        work = [it / total for it in self.balance.cost_per_rank]
        shares = zip(self.balance.numel_per_rank, pieces, work, self.state_bytes, strict=True)
        return [RankSummary(rank, *it) for rank, it in enumerate(shares)]

    @cached_property
    def buckets(self) -> list[BucketSummary]:
        return [self._summarize_bucket(bucket) for bucket in self.layout.buckets]

    @property
    def elements(self) -> int:
        """Of all parameters."""
        return sum(spec.numel for spec in self.layout.params)

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain values that JSON knows."""
        facts = {key: value for key, value in vars(self).items() if key in _PLAIN_FIELDS}
        times = [
            {"phase": label.text, "calls": it.num_calls, "in_step": it.in_step_s, "outside": it.outside_step_s}
            for label, it in self.times.phases.items()
        ]
        return {
            **{key: list(it) if isinstance(it, tuple) else it for key, it in facts.items()},
            "elements": self.elements,
            "parameters": len(self.layout.params),
            "balance": {
                "memory_imbalance": self.balance.memory_imbalance,
                "compute_imbalance": self.balance.compute_imbalance,
            },
            "ranks": [it._asdict() for it in self.ranks],
            "buckets": [_tuples_to_lists(it._asdict()) for it in self.buckets],
            "memory": [it._asdict() for it in self.memory],
            "comm_volume": self.comm_volume._asdict(),
            "times": {"iteration": self.times.iteration_s, "step": self.times.step_s, "phases": times},
            "counters": self.counters._asdict(),
        }

    def _summarize_bucket(self, bucket: Bucket) -> BucketSummary:
        specs = [self.layout.params[index] for index in bucket.params]
        padding = bucket.numel - sum(spec.numel for spec in specs)
        names = tuple(spec.name or f"parameter {spec.index}" for spec in specs)
        shards = tuple((int(rank), *span) for rank, span in bucket.shards.non_empty())
        return BucketSummary(
            bucket.index,
            str(bucket.dtype).removeprefix("torch."),
            str(bucket.device),
            bucket.numel,
            bucket.numel * bucket.dtype.itemsize,
            padding,
            names,
            _describe_sharding(bucket),
            shards,
        )


_PLAIN_FIELDS = ("rank", "shard_rank", "world_size", "num_replicas", "optimizer_classes", "config", "is_layout_final")


def _describe_sharding(bucket: Bucket) -> str:
    if bucket.has_whole_params:
        return "whole parameters"
    return "equal slices" if bucket.has_equal_shards else "slices at multiples"


def _tuples_to_lists(value: Any) -> Any:
    """Tuples as lists, as JSON has them."""
    if isinstance(value, dict):
        return {key: _tuples_to_lists(it) for key, it in value.items()}
    return [_tuples_to_lists(it) for it in value] if isinstance(value, (list, tuple)) else value


# ---------------------------------------------------------------------------------------------------------------------
# How an optimizer is set up, in words.


def describe_setup(builder: EngineBuilder) -> tuple[str, ...]:
    """A line for each choice that makes a difference."""
    return (
        *_describe_owners(builder),
        *_describe_grads(builder),
        *_describe_params(builder),
        *_describe_policies(builder.config),
    )


def _describe_owners(builder: EngineBuilder) -> Iterator[str]:
    for kind, partition in zip(builder.optimizer_specs, builder.partitioning.partitioners, strict=True):
        if isinstance(partition, FlatShards):
            grain = partition.granularity
            cuts = "" if grain is None or grain.is_elementwise else f", cut at multiples of {grain.align} elements"
            yield f"{kind.name}: every rank updates a slice of every bucket{cuts}"
        elif isinstance(partition, WholeParams):
            yield f"{kind.name}: every parameter is updated by one rank"
        else:
            yield f"{kind.name}: owners are chosen by {type(partition).__qualname__}"


def _describe_grads(builder: EngineBuilder) -> Iterator[str]:
    if not builder.reduces_grads:
        yield "gradients: those in param.grad, which must be equal on all ranks"
        return
    kept = "freed when they are on their way (ZeRO-2)" if builder.config._stage_policy.frees else "kept, too (ZeRO-1)"
    yield f"gradients: each slice is averaged at its owner; those in param.grad are {kept}"
    if builder.config.reduce_dtype is not None:
        yield f"reduce_dtype={builder.config.reduce_dtype}"
    if builder.config.deterministic_reduce:
        yield "deterministic_reduce=True"


def _describe_params(builder: EngineBuilder) -> Iterator[str]:
    if builder.overlap_with_ddp:
        yield "parameters: updated and sent inside DDP's backward pass"
    elif builder.config.overlap_param_gather:
        yield "parameters: come back while the next forward pass runs"
    else:
        yield "parameters: come back at the end of step()"
    if builder.parameters_as_bucket_view and not builder.overlap_with_ddp and not builder.partitioning.is_flat:
        yield "they lie in flat buffers (parameters_as_bucket_view=True)"


def _describe_policies(config: ZeroConfig) -> Iterator[str]:
    if config.master_dtype is not None:
        yield f"master_dtype={config.master_dtype}"
    for policy in (config.offload, config.consistency_check, config.nonfinite, config.peer_checkpoint):
        if policy is not None:
            yield repr(policy)
    if not config.broadcast_buffers:
        yield "broadcast_buffers=False"


# ---------------------------------------------------------------------------------------------------------------------
# A report as text: plain, no wider than 100 characters, short however large the model is.


_TEXT_WIDTH = 100
_NUM_FIRST_SHOWN, _NUM_LAST_SHOWN = 5, 2
"""Of many, those are shown."""

T = TypeVar("T")


def format_report(report: ReportData) -> str:
    parts = (
        _format_header,
        _format_config,
        _format_owners,
        _format_buckets,
        _format_memory,
        _format_comm_volume,
        _format_times,
        _format_counters,
    )
    return "\n\n".join("\n".join(part(report)) for part in parts)


def format_bytes(nbytes: float) -> str:
    """With a unit that leaves three digits or so."""
    for unit, size in (("GiB", 1024 * MIB), ("MiB", MIB), ("KiB", 1024)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes:.0f} B"


def format_seconds(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


def format_count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _format_header(report: ReportData) -> Iterator[str]:
    rows = f", in {report.num_replicas} rows that hold the same" if report.num_replicas > 1 else ""
    yield f"zeroshard: rank {report.rank}, after {format_count(report.counters.steps, 'step')}"
    what = f"{report.elements:,} elements of {format_count(len(report.layout.params), 'parameter')}"
    who = f"shared by {format_count(report.world_size, 'rank')}{rows}"
    yield from wrap(f"{' and '.join(report.optimizer_classes)} on {what}, {who}", _TEXT_WIDTH)
    if not report.is_layout_final:
        yield "DDP's buckets are not known yet: owners will change"


def _format_config(report: ReportData) -> Iterator[str]:
    yield "How"
    for line in report.config:
        yield from wrap(line, _TEXT_WIDTH, initial_indent="  ", subsequent_indent="    ")


def _format_owners(report: ReportData) -> Iterator[str]:
    yield f"{'Who owns what':<16}{'elements':>16}{'share':>9}{'pieces':>10}{'work':>9}{'state':>13}"
    total = sum(it.elements for it in report.ranks) or 1

    def format_rank(summary: RankSummary) -> str:
        known = "?" if summary.state_bytes is None else format_bytes(summary.state_bytes)
        state = known if summary.rank == report.shard_rank or summary.state_bytes is None else f"~{known}"
        share, work = f"{100 * summary.elements / total:.1f} %", f"{100 * summary.cost_fraction:.1f} %"
        return f"  rank {summary.rank:<9}{summary.elements:>16,}{share:>9}{summary.parameters:>10,}{work:>9}{state:>13}"

    yield from _format_first_and_last(report.ranks, format_rank, "ranks")
    peaks = f"{report.balance.memory_imbalance:.3f} of the mean, of work {report.balance.compute_imbalance:.3f}"
    yield f"  the fullest rank has {peaks}"


def _format_buckets(report: ReportData) -> Iterator[str]:
    yield f"{'Buckets':<10}{'dtype':<10}{'device':<9}{'size':>11}{'padding':>10}  shards, parameters"
    yield from _format_first_and_last(report.buckets, _format_bucket, "buckets")


def _format_bucket(bucket: BucketSummary) -> str:
    size = format_bytes(bucket.nbytes)
    head = f"  {bucket.bucket_index:<8}{bucket.dtype:<10}{bucket.device:<9}{size:>11}{bucket.padding:>10,}  "
    names = ", ".join(bucket.parameters[:3]) + ("" if len(bucket.parameters) <= 3 else ", ...")
    return head + _truncate(
        f"{bucket.sharding}, {format_count(len(bucket.parameters), 'parameter')}: {names}", _TEXT_WIDTH - len(head)
    )


def _format_memory(report: ReportData) -> Iterator[str]:
    yield "Memory of this rank"
    for it in report.memory:
        yield f"  {it.category:<18}{format_bytes(it.nbytes):>12}  {it.device}"
    yield f"  {'in all':<18}{format_bytes(sum(it.nbytes for it in report.memory)):>12}"


def _format_comm_volume(report: ReportData) -> Iterator[str]:
    yield "Sent by this rank, each time that gradients travel and parameters come back"
    grads = "by DDP" if report.comm_volume.grad_bytes is None else format_bytes(report.comm_volume.grad_bytes)
    yield f"  {'gradients':<18}{grads:>12}"
    yield f"  {'parameters':<18}{format_bytes(report.comm_volume.param_bytes):>12}"


def _format_times(report: ReportData) -> Iterator[str]:
    times = report.times
    if not times.phases:
        yield "Times of the last step: there was none yet"
        return
    step, iteration = format_seconds(times.step_s), format_seconds(times.iteration_s)
    yield f"The last step took {step}, and {iteration} since the one before"
    yield f"  {'time of the host':<34}{'calls':>8}{'in step()':>14}{'outside it':>14}"
    ordered = sorted(times.phases.items(), key=lambda it: -(it[1].in_step_s + it[1].outside_step_s))
    for label, it in ordered:
        inside, outside = (format_seconds(value) if value else "-" for value in (it.in_step_s, it.outside_step_s))
        name = "other" if label.text == "step" else label.text
        yield f"  {name:<34}{it.num_calls:>8,}{inside:>14}{outside:>14}"


def _format_counters(report: ReportData) -> Iterator[str]:
    it = report.counters
    yield f"Counted: {format_count(it.steps, 'step')}"
    if it.nonfinite_found:
        skipped = f"of which {it.nonfinite_skipped:,} were left out"
        yield f"  {it.nonfinite_found:,} with gradients that were not finite, {skipped}"
    if it.consistency_checks:
        yield f"  {format_count(it.consistency_checks, 'look')} for drift"
    if it.peer_snapshot_step is not None:
        sent = format_bytes(it.peer_snapshot_bytes)
        yield f"  peer checkpoint: of step {it.peer_snapshot_step:,}, for which {sent} were sent"


def _format_first_and_last(values: Sequence[T], format_line: Callable[[T], str], noun: str) -> Iterator[str]:
    """Lines for all of them, or for the first and the last."""
    between = len(values) - _NUM_FIRST_SHOWN - _NUM_LAST_SHOWN
    if between < 2:
        yield from map(format_line, values)
        return
    yield from map(format_line, values[:_NUM_FIRST_SHOWN])
    yield f"  ... and {between:,} more {noun} ..."
    yield from map(format_line, values[-_NUM_LAST_SHOWN:])


def _truncate(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 3]}..."


# ---------------------------------------------------------------------------------------------------------------------
# What the log says of an optimizer that was made.


def log_summary(builder: EngineBuilder, engine: Engine) -> None:
    """One line, on rank 0; with DEBUG one more for each bucket, on every rank."""
    rank = engine.comm.data_parallel.group.rank
    if rank == 0 and is_enabled_for(logging.INFO):
        log_rank(logging.INFO, rank, "%s", format_summary_line(builder, engine))
    for bucket in engine.layout.buckets if is_enabled_for(logging.DEBUG) else ():
        mine = bucket.shards[engine.comm.group.rank]
        what = engine.layout.describe_bucket(bucket.index, "elements") if bucket.slots else f"bucket {bucket.index}"
        log_rank(logging.DEBUG, rank, "owns %d of %d %s, %s", mine.length, bucket.numel, what, bucket.dtype)


def format_summary_line(builder: EngineBuilder, engine: Engine) -> str:
    """What was sharded, and how."""
    layout, names = engine.layout, " and ".join(kind.name for kind in builder.optimizer_specs)
    elements, ranks = sum(spec.numel for spec in layout.params), engine.comm.group.size
    rows = engine.comm.data_parallel.group.size // ranks
    where = f"{ranks} ranks" + (f" in each of {rows} rows" if rows > 1 else "")
    what = f"{names} on {elements:,} elements of {len(layout.params)} parameters in {len(layout.buckets)} buckets"
    return f"{what}, shared by {where}. {'. '.join(describe_setup(builder))}"


# ---------------------------------------------------------------------------------------------------------------------
# A report as a picture: who owns what, what it takes, what the last step took. Needs matplotlib.


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
    names = ["other" if label is Phase.STEP else label.text for label, _ in ordered]
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


# ---------------------------------------------------------------------------------------------------------------------
# `Report`: what `optimizer.report()` returns.


@dataclass(frozen=True)
class Report(ReportData):
    """Who owns what, what it takes on this rank, and what the last step took. Of one moment: it does not change.

    `print(report)` shows it as text, `as_dict()` has all of it for JSON, `picture(path)` draws it. What it says of
    other ranks is what the layout says: making it sends nothing.
    """

    def __str__(self) -> str:
        return format_report(self)

    def save_plot(self, path: str | os.PathLike[str]) -> Path:
        """Draw it into a file, and return its path. The ending says which kind, as `.svg`; without one it is a PNG.

        Needs matplotlib: `zeroshard[plot]`.
        """
        return draw_report(self, Path(path))


# ---------------------------------------------------------------------------------------------------------------------
# A report of an optimizer: all that is counted, on this rank alone. Nothing is sent.


def make_report(
    builder: EngineBuilder,
    engine: Engine,
    groups: Sequence[ParamGroup],
    peer_snapshots: PeerSnapshots | None,
    *,
    is_layout_final: bool,
) -> Report:
    """`settled`: owners will not change any more."""
    comm, states = engine.comm, dict(_collect_state_by_group(engine))
    held = {**engine.memory_usage(), "state": [tensor for tensors in states.values() for tensor in tensors]}
    return Report(
        rank=comm.data_parallel.group.rank,
        shard_rank=comm.group.rank,
        world_size=comm.group.size,
        num_replicas=comm.data_parallel.group.size // comm.group.size,
        optimizer_classes=tuple(kind.name for kind in builder.optimizer_specs),
        config=describe_setup(builder),
        is_layout_final=is_layout_final,
        balance=builder.compute_balance(engine.layout, groups),
        state_bytes=_estimate_state_bytes(engine.layout, comm.group.rank, states),
        memory=(
            *_measure_memory(held),
            *([] if peer_snapshots is None else [MemoryUse("second copies", "cpu", peer_snapshots.nbytes)]),
        ),
        comm_volume=CommVolume(*engine.bytes_to_send()),
        times=comm.profiler.last_step,
        counters=_read_counters(engine, peer_snapshots),
        layout=engine.layout,
    )


def _collect_state_by_group(engine: Engine) -> Iterator[tuple[int, list[torch.Tensor]]]:
    """Tensors of this rank's state, by the number of their group; -1 for those that belong to no parameter."""
    alone = [(list(range(len(it.optimizer.param_groups))), it) for it in engine.inner.local_optimizers]
    parts = (
        [(part.group_ids, part.inner) for part in engine.optimizer_shards]
        if isinstance(engine, FlatShardEngine)
        else alone
    )
    others: list[Any] = []
    for numbers, inner in parts:
        others += collect_plain_tensors(inner.shared_state())
        for number, group in zip(numbers, inner.optimizer.param_groups, strict=True):
            state = [inner.optimizer.state.get(param, {}) for param in group["params"]]
            yield number, collect_plain_tensors([dict(it) if isinstance(it, Mapping) else it for it in state])
    yield -1, others


def _estimate_state_bytes(
    layout: Layout, rank: Rank, state_by_group: Mapping[int, list[torch.Tensor]]
) -> tuple[int | None, ...]:
    """Of each rank: as many bytes for each element of a group as there are here, if there are elements of it here."""
    mine: Counter[int] = Counter()
    for bucket in layout.buckets:
        for piece in bucket.param_shards_of_rank(rank):
            mine[layout.params[piece.param].group] += _count_trainable(
                layout.params[piece.param], piece.in_param.length
            )
    sizes = {group: sum(it.nbytes for it in tensors) for group, tensors in state_by_group.items()}
    rates = {group: sizes.get(group, 0) / elements for group, elements in mine.items() if elements}
    found = layout.sum_per_rank(lambda spec, elements: rates.get(spec.group, 0.0) * _count_trainable(spec, elements))
    unknown = layout.sum_per_rank(lambda spec, elements: 0 if spec.group in rates else _count_trainable(spec, elements))
    estimates = [None if lacking else round(size) for size, lacking in zip(found, unknown, strict=True)]
    estimates[rank] = sum(sizes.values())
    return tuple(estimates)


def _count_trainable(spec: ParamSpec, elements: int) -> int:
    """Gaps that strides leave do not count."""
    return elements * spec.numel // spec.storage_numel if spec.trainable and spec.storage_numel else 0


def _measure_memory(tensors_by_category: Mapping[str, Sequence[torch.Tensor]]) -> Iterator[MemoryUse]:
    order = ("parameters", "gradients", "state", "master weights", "staging")
    for what in order:
        sizes: Counter[str] = Counter()
        for tensor in tensors_by_category.get(what, ()):
            sizes[tensor.device.type] += tensor.nbytes
        for device, nbytes in sorted(sizes.items()):
            yield MemoryUse(what, device, nbytes)


def _read_counters(engine: Engine, peer_snapshots: PeerSnapshots | None) -> Counters:
    nonfinite = engine.checks.nonfinite
    return Counters(
        engine.steps,
        nonfinite.detected,
        nonfinite.skipped,
        engine.checks.num_consistency_checks,
        None if peer_snapshots is None else peer_snapshots.step,
        0 if peer_snapshots is None else peer_snapshots.bytes_sent,
    )
