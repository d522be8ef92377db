"""`Report`, which `optimizer.report()` returns: shard ownership, memory, communication volume and step times.

A report is a snapshot of one rank. Creating it does not communicate: numbers of other ranks are derived from the
layout, which is the same on all ranks. It prints as text, converts to JSON (`as_dict`) and draws a plot (`save_plot`).
"""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from textwrap import wrap
from typing import Any, NamedTuple

import torch

from ._formatting import format_bytes, format_count, format_names, format_seconds, format_table
from ._plotting import new_figure, save_figure
from ._types import Rank
from .build import EngineBuilder
from .engine.base import Engine
from .engine.inner import ParamGroup
from .layout.layout import Bucket, Layout
from .layout.partition import Balance
from .layout.spec import ParamSpec
from .peer_checkpoint.snapshot import PeerSnapshots
from .profiling import Phase, StepTimes
from .state.tensor_utils import collect_plain_tensors
from .summary import describe_setup

__all__ = ["Report"]

# ---------------------------------------------------------------------------------------------------------------------
# Values of a report.


class RankSummary(NamedTuple):
    """The shard of one rank."""

    rank: int
    elements: int
    """Trainable elements that the rank owns."""
    parameters: int
    """Parameters that the rank owns fully or partly."""
    cost_fraction: float
    """Fraction of the total update cost of all ranks."""
    state_bytes: int | None
    """Measured on the reporting rank; for other ranks estimated from its bytes per element. None if unknown."""


class BucketSummary(NamedTuple):
    """A bucket and its shards."""

    bucket_index: int
    dtype: str
    device: str
    elements: int
    nbytes: int
    padding: int
    """Elements that belong to no parameter."""
    parameters: tuple[str, ...]
    sharding: str
    """How the bucket is split: equal shards, aligned shards, or whole parameters."""
    shards: tuple[tuple[int, int, int], ...]
    """(rank, start, stop) in elements, for each rank with a non-empty shard."""


class MemoryUse(NamedTuple):
    """Bytes of one category on one device of this rank."""

    category: str
    device: str
    nbytes: int


class CommVolume(NamedTuple):
    """Bytes that this rank sends per step: one gradient reduction and one parameter all-gather.

    Assumes bandwidth-optimal collectives. Small control messages are not counted.
    """

    grad_bytes: int | None
    """None if DDP reduces the gradients."""
    param_bytes: int


class Counters(NamedTuple):
    steps: int
    """Completed steps."""
    nonfinite_found: int = 0
    nonfinite_skipped: int = 0
    consistency_checks: int = 0
    peer_snapshot_step: int | None = None
    """Step of the last peer snapshot that is complete on all ranks."""
    peer_snapshot_bytes: int = 0
    """Bytes sent for that snapshot."""


@dataclass(frozen=True)
class ReportData:
    """The values of a report, without their presentation."""

    rank: int
    """Data-parallel rank of this process."""
    shard_rank: int
    """Rank within the shard group."""
    world_size: int
    """Size of the shard group."""
    num_replicas: int
    """Number of shard groups; each holds the full optimizer state."""
    optimizer_classes: tuple[str, ...]
    config: tuple[str, ...]
    """Human-readable lines, one per option."""
    is_layout_final: bool
    """Whether ownership is final. False until DDP has built its buckets."""
    balance: Balance
    state_bytes: tuple[int | None, ...]
    """State bytes of each rank, as in `RankSummary`."""
    memory: tuple[MemoryUse, ...]
    comm_volume: CommVolume
    times: StepTimes
    counters: Counters
    layout: Layout = field(repr=False)

    @cached_property
    def ranks(self) -> list[RankSummary]:
        """Summarize the shard of each rank, from the layout."""
        num_params = self.layout.sum_per_rank(lambda spec, elements: 1 if elements or not spec.storage_numel else 0)
        total = sum(self.balance.cost_per_rank) or 1.0
        cost_fractions = [cost / total for cost in self.balance.cost_per_rank]
        columns = zip(self.balance.numel_per_rank, num_params, cost_fractions, self.state_bytes, strict=True)
        return [RankSummary(rank, *values) for rank, values in enumerate(columns)]

    @cached_property
    def buckets(self) -> list[BucketSummary]:
        return [self._summarize_bucket(bucket) for bucket in self.layout.buckets]

    @property
    def elements(self) -> int:
        """Elements of all parameters."""
        return sum(spec.numel for spec in self.layout.params)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as values that JSON can represent."""
        fields = {key: value for key, value in vars(self).items() if key in _PLAIN_FIELDS}
        times = [
            {"phase": phase.text, "calls": time.num_calls, "in_step": time.in_step_s, "outside": time.outside_step_s}
            for phase, time in self.times.phases.items()
        ]
        return {
            **{key: list(value) if isinstance(value, tuple) else value for key, value in fields.items()},
            "elements": self.elements,
            "parameters": len(self.layout.params),
            "balance": {
                "memory_imbalance": self.balance.memory_imbalance,
                "compute_imbalance": self.balance.compute_imbalance,
            },
            "ranks": [rank._asdict() for rank in self.ranks],
            "buckets": [_tuples_to_lists(bucket._asdict()) for bucket in self.buckets],
            "memory": [use._asdict() for use in self.memory],
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
    return "equal shards" if bucket.has_equal_shards else "aligned shards"


def _tuples_to_lists(value: Any) -> Any:
    """Convert tuples to lists, recursively."""
    if isinstance(value, dict):
        return {key: _tuples_to_lists(item) for key, item in value.items()}
    return [_tuples_to_lists(item) for item in value] if isinstance(value, (list, tuple)) else value


# ---------------------------------------------------------------------------------------------------------------------
# Text: plain, at most 100 columns, short for any model size.


_TEXT_WIDTH = 100
_MB = 1e6
_NUM_FIRST_SHOWN, _NUM_LAST_SHOWN = 5, 2
"""Lines shown at the beginning and at the end of a long list."""


def format_report(report: ReportData) -> str:
    sections = (
        _format_header,
        _format_config,
        _format_owners,
        _format_buckets,
        _format_memory,
        _format_comm_volume,
        _format_times,
        _format_counters,
    )
    return "\n\n".join("\n".join(section(report)) for section in sections)


def _format_header(report: ReportData) -> Iterator[str]:
    replicas = f", in {report.num_replicas} replicas" if report.num_replicas > 1 else ""
    yield f"zeroshard: rank {report.rank}, after {format_count(report.counters.steps, 'step')}"
    elements = f"{report.elements:,} elements of {format_count(len(report.layout.params), 'parameter')}"
    ranks = f"shared by {format_count(report.world_size, 'rank')}{replicas}"
    yield from wrap(f"{' and '.join(report.optimizer_classes)} on {elements}, {ranks}", _TEXT_WIDTH)
    if not report.is_layout_final:
        yield "DDP's buckets are not known yet: owners will change"


def _format_config(report: ReportData) -> Iterator[str]:
    yield "Configuration"
    for line in report.config:
        yield from wrap(line, _TEXT_WIDTH, initial_indent="  ", subsequent_indent="    ")


def _format_owners(report: ReportData) -> Iterator[str]:
    total = sum(rank.elements for rank in report.ranks) or 1

    def format_rank(summary: RankSummary) -> tuple[str, ...]:
        size = "?" if summary.state_bytes is None else format_bytes(summary.state_bytes)
        state = size if summary.rank == report.shard_rank or summary.state_bytes is None else f"~{size}"
        share, work = f"{100 * summary.elements / total:.1f} %", f"{100 * summary.cost_fraction:.1f} %"
        return f"  rank {summary.rank}", f"{summary.elements:,}", share, f"{summary.parameters:,}", work, state

    columns = ("Ownership", "elements", "share", "params", "compute", "state")
    yield from _format_long_table(columns, map(format_rank, report.ranks), "ranks", "<>>>>>")
    memory, compute = report.balance.memory_imbalance, report.balance.compute_imbalance
    yield f"  imbalance (max / mean): memory {memory:.3f}, compute {compute:.3f}"


def _format_buckets(report: ReportData) -> Iterator[str]:
    columns = ("Buckets", "dtype", "device", "size", "padding", "shards, parameters")
    lines = _format_long_table(columns, map(_format_bucket, report.buckets), "buckets", "<<<>><")
    return (_truncate(line, _TEXT_WIDTH) for line in lines)


def _format_bucket(bucket: BucketSummary) -> tuple[str, ...]:
    names = format_names(bucket.parameters, 3)
    contents = f"{bucket.sharding}, {format_count(len(bucket.parameters), 'parameter')}: {names}"
    size, padding = format_bytes(bucket.nbytes), f"{bucket.padding:,}"
    return f"  {bucket.bucket_index}", bucket.dtype, bucket.device, size, padding, contents


def _format_memory(report: ReportData) -> Iterator[str]:
    total = sum(use.nbytes for use in report.memory)
    rows = [(f"  {use.category}", format_bytes(use.nbytes), use.device) for use in report.memory]
    yield "Memory of this rank"
    yield from format_table([*rows, ("  total", format_bytes(total), "")], "<><")


def _format_comm_volume(report: ReportData) -> Iterator[str]:
    grads = "by DDP" if report.comm_volume.grad_bytes is None else format_bytes(report.comm_volume.grad_bytes)
    yield "Sent by this rank when all gradients and parameters are sent once"
    yield from format_table(
        [("  gradients", grads), ("  parameters", format_bytes(report.comm_volume.param_bytes))], "<>"
    )


def _format_times(report: ReportData) -> Iterator[str]:
    times = report.times
    if not times.phases:
        yield "Times of the last step: no step yet"
        return
    step, iteration = format_seconds(times.step_s), format_seconds(times.iteration_s)
    yield f"The last step took {step}, and {iteration} since the one before"
    ordered = sorted(times.phases.items(), key=lambda item: -(item[1].in_step_s + item[1].outside_step_s))
    rows = [("  host time", "calls", "in step()", "outside")]
    for phase, time in ordered:
        inside, outside = (format_seconds(value) if value else "-" for value in (time.in_step_s, time.outside_step_s))
        name = "other" if phase.text == "step" else phase.text
        rows.append((f"  {name}", f"{time.num_calls:,}", inside, outside))
    yield from format_table(rows, "<>>>")


def _format_counters(report: ReportData) -> Iterator[str]:
    counters = report.counters
    yield f"Counters: {format_count(counters.steps, 'step')}"
    if counters.nonfinite_found:
        skipped = f"{counters.nonfinite_skipped:,} skipped"
        yield f"  {counters.nonfinite_found:,} with non-finite gradients, {skipped}"
    if counters.consistency_checks:
        yield f"  {format_count(counters.consistency_checks, 'consistency check')}"
    if counters.peer_snapshot_step is not None:
        sent = format_bytes(counters.peer_snapshot_bytes)
        yield f"  peer checkpoint: of step {counters.peer_snapshot_step:,}, {sent} sent"


def _format_long_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], noun: str, alignment: str
) -> Iterator[str]:
    """Yield a table with a line per row, or only the first and the last rows of many."""
    head, *lines = format_table([columns, *rows], alignment)
    between = len(lines) - _NUM_FIRST_SHOWN - _NUM_LAST_SHOWN
    yield head
    if between < 2:
        yield from lines
        return
    yield from lines[:_NUM_FIRST_SHOWN]
    yield f"  ... and {between:,} more {noun} ..."
    yield from lines[-_NUM_LAST_SHOWN:]


def _truncate(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 3]}..."


# ---------------------------------------------------------------------------------------------------------------------
# Plot: ownership, memory, step times. Needs matplotlib.


_COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
"""The Okabe-Ito palette, which is safe for colour-blind readers."""
_DPI = 120
_MAX_BUCKETS_DRAWN = 16
_MAX_SHARDS_DRAWN = 256
_MAX_RANKS_LABELED = 16
"""Up to this world size, shards are labeled with their rank."""


def draw_report(report: ReportData, path: Path) -> Path:
    """Draw ownership, memory and step times, and return the path of the file."""
    buckets = _select_buckets(report.buckets)
    num_rows = max(len(report.times.phases), len(report.memory) + 1, 3)
    height = 1.6 + 0.34 * len(buckets)
    figure = new_figure("save_plot()", figsize=(12, height + 1.6 + 0.3 * num_rows), dpi=_DPI)
    upper, lower = figure.subfigures(2, 1, height_ratios=(height, 1.6 + 0.3 * num_rows))
    _draw_owners(upper.subplots(), report, buckets)
    memory, times = lower.subplots(1, 2, width_ratios=(1, 1.6))
    _draw_memory(memory, report, num_rows)
    _draw_times(times, report, num_rows)
    return save_figure(figure, path)


def _select_buckets(buckets: list[BucketSummary]) -> list[BucketSummary | None]:
    """Return all buckets, or the first and the last ones of many with None in between."""
    if len(buckets) <= _MAX_BUCKETS_DRAWN:
        return list(buckets)
    half = _MAX_BUCKETS_DRAWN // 2
    return [*buckets[:half], None, *buckets[-half:]]


def _draw_owners(axes: Any, report: ReportData, buckets: list[BucketSummary | None]) -> None:
    longest = max((bucket.nbytes for bucket in report.buckets), default=1)
    labels = []
    for y, bucket in enumerate(buckets):
        labels.append("..." if bucket is None else _bucket_label(bucket))
        if bucket is None:
            hidden = len(report.buckets) - len(buckets) + 1
            axes.text(0, y, f" {format_count(hidden, 'more bucket')}", va="center", fontsize=9, color="#444444")
            continue
        _draw_bucket(axes, y, bucket, report, longest)
    axes.set_yticks(range(len(buckets)), labels, fontsize=8)
    axes.set_ylim(len(buckets) - 0.4, -0.6)
    axes.set_xlim(0, longest / _MB * 1.01)
    axes.set_xlabel("MB")
    axes.spines[["top", "right"]].set_visible(False)
    replicas = f", {report.num_replicas} replicas" if report.num_replicas > 1 else ""
    axes.set_title(
        f"Ownership: {' and '.join(report.optimizer_classes)}, {report.elements:,} elements, "
        f"{format_count(report.world_size, 'rank')}{replicas}",
        loc="left",
        fontsize=11,
    )
    _draw_legend(axes, report)


def _draw_bucket(axes: Any, y: int, bucket: BucketSummary, report: ReportData, max_nbytes: int) -> None:
    unit = bucket.nbytes / max(bucket.elements, 1) / _MB
    own = [shard for shard in bucket.shards if shard[0] == report.shard_rank]
    for (rank, start, stop), edge, depth in [
        *((shard, ("white", 0.3), 2) for shard in _merge_neighbors(bucket.shards)),
        *((shard, ("black", 1.2), 3) for shard in own),
    ]:
        color, width = _rank_color(rank, report.world_size), (stop - start) * unit
        style = {"color": color, "edgecolor": edge[0], "linewidth": edge[1], "zorder": depth}
        axes.barh(y, width, left=start * unit, height=0.72, **style)
        if report.world_size <= _MAX_RANKS_LABELED and width * _MB > max_nbytes * 0.025:
            middle = (start + stop) / 2 * unit
            axes.text(middle, y, str(rank), ha="center", va="center", fontsize=8, color=_text_color(color), zorder=4)


def _merge_neighbors(shards: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Merge neighbouring shards if there are too many to distinguish."""
    step = -(-len(shards) // _MAX_SHARDS_DRAWN) or 1
    runs = [shards[start : start + step] for start in range(0, len(shards), step)]
    return [(run[0][0], run[0][1], run[-1][2]) for run in runs]


def _rank_color(rank: int, world_size: int) -> Any:
    """Return a palette colour or, for many ranks, a colour of a continuous scale."""
    if world_size <= len(_COLORS):
        return _COLORS[rank]
    from matplotlib import colormaps

    return colormaps["viridis"](0.15 + 0.85 * rank / (world_size - 1))


def _text_color(color: Any) -> str:
    """Return black or white, whichever is readable on `color`."""
    from matplotlib.colors import to_rgb

    red, green, blue = to_rgb(color)
    return "white" if 0.3 * red + 0.59 * green + 0.11 * blue < 0.5 else "black"


def _draw_legend(axes: Any, report: ReportData) -> None:
    """Label the ranks, or about five of many."""
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
    names = [f"{use.category} ({use.device})" for use in report.memory]
    sizes = [use.nbytes / _MB for use in report.memory]
    axes.barh(range(len(names)), sizes, height=0.7, color=_COLORS[0])
    _label_bars(axes, names, sizes, [format_bytes(use.nbytes) for use in report.memory], num_rows)
    axes.set_xlabel("MB")
    axes.set_title(f"Memory of rank {report.rank}", loc="left", fontsize=11)


def _draw_times(axes: Any, report: ReportData, num_rows: int) -> None:
    ordered = sorted(report.times.phases.items(), key=lambda item: -(item[1].in_step_s + item[1].outside_step_s))
    names = ["other" if phase is Phase.STEP else phase.text for phase, _ in ordered]
    inside = [time.in_step_s * 1e3 for _, time in ordered]
    outside = [time.outside_step_s * 1e3 for _, time in ordered]
    totals = [format_seconds(time.in_step_s + time.outside_step_s) for _, time in ordered]
    axes.barh(range(len(names)), inside, height=0.7, color=_COLORS[5], label="in step()")
    passes = "outside: backward, forward, between"
    axes.barh(range(len(names)), outside, left=inside, height=0.7, color=_COLORS[4], label=passes)
    _label_bars(axes, names, [a + b for a, b in zip(inside, outside, strict=True)], totals, num_rows)
    axes.set_xlabel("host time, ms")
    took = f"{format_seconds(report.times.step_s)} of {format_seconds(report.times.iteration_s)}"
    title = f"The last step: {took}" if names else "No step yet"
    axes.set_title(title, loc="left", fontsize=11)
    if names:
        axes.legend(frameon=False, fontsize=9, loc="lower right")


def _label_bars(axes: Any, names: list[str], sizes: list[float], texts: list[str], num_rows: int) -> None:
    for y, (size, text) in enumerate(zip(sizes, texts, strict=True)):
        axes.text(size, y, f" {text}", va="center", fontsize=8)
    axes.set_yticks(range(len(names)), names, fontsize=9)
    axes.set_ylim(num_rows - 0.4, -0.6)
    axes.set_xlim(0, 1.18 * max(sizes, default=1.0) or 1.0)
    axes.spines[["top", "right"]].set_visible(False)


# ---------------------------------------------------------------------------------------------------------------------
# Public class.


@dataclass(frozen=True)
class Report(ReportData):
    """An immutable snapshot of shard ownership, this rank's memory use and the times of the last step.

    `print(report)` shows it as text, `as_dict()` returns values for JSON, `save_plot(path)` draws it. Creating a
    report does not communicate, so any rank may do it alone; values of other ranks come from the layout.
    """

    def __str__(self) -> str:
        return format_report(self)

    def save_plot(self, path: str | os.PathLike[str]) -> Path:
        """Draw the report and return the path of the file.

        The suffix of `path` selects the format, such as `.svg`; the default is PNG. Needs matplotlib
        (`zeroshard[plot]`).
        """
        return draw_report(self, Path(path))


# ---------------------------------------------------------------------------------------------------------------------
# Construction of a report.


def make_report(
    builder: EngineBuilder,
    engine: Engine,
    groups: Sequence[ParamGroup],
    peer_snapshots: PeerSnapshots | None,
    *,
    is_layout_final: bool,
) -> Report:
    """Create the report of this rank. Does not communicate.

    Args:
        builder: describes the configuration.
        engine: provides layout, memory use and counters.
        groups: parameter groups of the optimizer, for the cost balance.
        peer_snapshots: peer snapshots that this rank stores, if peer checkpoints are enabled.
        is_layout_final: whether ownership can no longer change.
    """
    comm, states = engine.comm, dict(_collect_state_by_group(engine))
    params, grads = engine.params.memory_usage(), engine.grads
    tensors_by_category = {
        **params,
        "gradients": [*params["gradients"], *grads.shard_tensors()],
        "staging": [*params["staging"], *grads.staging_buffers()],
        "state": [tensor for tensors in states.values() for tensor in tensors],
    }
    return Report(
        rank=comm.data_parallel.group.rank,
        shard_rank=comm.group.rank,
        world_size=comm.group.size,
        num_replicas=comm.data_parallel.group.size // comm.group.size,
        optimizer_classes=tuple(spec.name for spec in builder.optimizer_specs),
        config=describe_setup(builder, engine),
        is_layout_final=is_layout_final,
        balance=builder.compute_balance(engine.layout, groups),
        state_bytes=_estimate_state_bytes(engine.layout, comm.group.rank, states),
        memory=(
            *_measure_memory(tensors_by_category),
            *([] if peer_snapshots is None else [MemoryUse("peer snapshots", "cpu", peer_snapshots.nbytes)]),
        ),
        comm_volume=CommVolume(grads.bytes_to_send(), engine.param_sync.bytes_to_send()),
        times=engine.profiler.last_step,
        counters=_read_counters(engine, peer_snapshots),
        layout=engine.layout,
    )


def _collect_state_by_group(engine: Engine) -> Iterator[tuple[int, list[torch.Tensor]]]:
    """Yield this rank's state tensors by group index; -1 for state that belongs to no parameter."""
    shared: list[Any] = []
    for group_ids, inner in [(member.group_ids, member.inner) for member in engine.params.members]:
        shared += collect_plain_tensors(inner.shared_state())
        for group_id, group in zip(group_ids, inner.optimizer.param_groups, strict=True):
            state = [inner.optimizer.state.get(param, {}) for param in group["params"]]
            yield (
                group_id,
                collect_plain_tensors([dict(entry) if isinstance(entry, Mapping) else entry for entry in state]),
            )
    yield -1, shared


def _estimate_state_bytes(
    layout: Layout, rank: Rank, state_by_group: Mapping[int, list[torch.Tensor]]
) -> tuple[int | None, ...]:
    """Estimate the state bytes of each rank from this rank's bytes per element in each group.

    None for a rank that owns elements of a group in which this rank owns none.
    """
    owned: Counter[int] = Counter()
    for bucket in layout.buckets:
        for shard in bucket.param_shards_of_rank(rank):
            owned[layout.params[shard.param].group] += _count_trainable(
                layout.params[shard.param], shard.in_param.length
            )
    sizes = {group: sum(tensor.nbytes for tensor in tensors) for group, tensors in state_by_group.items()}
    rates = {group: sizes.get(group, 0) / elements for group, elements in owned.items() if elements}
    sizes_per_rank = layout.sum_per_rank(
        lambda spec, elements: rates.get(spec.group, 0.0) * _count_trainable(spec, elements)
    )
    unknown_per_rank = layout.sum_per_rank(
        lambda spec, elements: 0 if spec.group in rates else _count_trainable(spec, elements)
    )
    estimates = [
        None if unknown else round(size) for size, unknown in zip(sizes_per_rank, unknown_per_rank, strict=True)
    ]
    estimates[rank] = sum(sizes.values())
    return tuple(estimates)


def _count_trainable(spec: ParamSpec, elements: int) -> int:
    """Return the trainable elements, without gaps between strides."""
    return elements * spec.numel // spec.storage_numel if spec.trainable and spec.storage_numel else 0


def _measure_memory(tensors_by_category: Mapping[str, Sequence[torch.Tensor]]) -> Iterator[MemoryUse]:
    order = ("parameters", "gradients", "state", "master weights", "staging")
    for category in order:
        sizes: Counter[str] = Counter()
        for tensor in tensors_by_category.get(category, ()):
            sizes[tensor.device.type] += tensor.nbytes
        for device, nbytes in sorted(sizes.items()):
            yield MemoryUse(category, device, nbytes)


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
