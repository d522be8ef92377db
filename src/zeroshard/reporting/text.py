"""A report as text: plain, no wider than 100 characters, short however large the model is."""

from collections.abc import Callable, Iterator, Sequence
from textwrap import wrap
from typing import TypeVar

from .._types import MIB
from .values import BucketSummary, RankSummary, ReportData

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
        name = "all else in step()" if label.text == "step" else label.text
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
