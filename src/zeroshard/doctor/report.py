"""What was found, for people and for programs."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from textwrap import indent
from typing import Any

from .advice import Advice, profile_network, recommend_options, slowest_timings
from .checkup import JobInfo, RankMeasurements
from .facts import RankInfo
from .findings import ERROR, WARNING, Finding, is_healthy
from .checks import run_checks
from .collect import CollectiveTiming
from .places import ranks_by_host
from .trial import TRIAL_STEPS

_MAX_RANKS_SHOWN = 16
"""Ranks in the table; JSON has all."""
_RANK_COLUMNS: tuple[str, ...] = (
    *("rank", "host", "local", "device", "free there", "free on host", "threads/cores", "clock"),
    *("to rank 0", "products", "copies"),
)


@dataclass(frozen=True)
class DoctorReport:
    """The same on all ranks."""

    job: JobInfo
    findings: Sequence[Finding]
    advice: Advice

    @property
    def exit_status(self) -> int:
        """The exit status: 0 where the job is healthy."""
        return 0 if is_healthy(self.findings) else 1

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which knows no numbers that are not finite: these are text."""
        it = self.job
        said = {
            "healthy": self.exit_status == 0,
            "backend": it.backend,
            "world_size": len(it.rank_infos),
            "hosts": ranks_by_host(it.rank_infos),
            "findings": [asdict(finding) for finding in self.findings],
            "advice": asdict(self.advice),
            "collectives": [{**asdict(timing), "rate": timing.rate} for timing in slowest_timings(it)],
            "ranks": [
                {**asdict(facts), **asdict(measured)}
                for facts, measured in zip(it.rank_infos, it.measurements, strict=True)
            ],
        }
        return {key: _to_json_value(value) for key, value in said.items()}

    def as_text(self) -> str:
        parts = [
            self._headline(),
            _format_versions(self.job.rank_infos[0]),
            *_format_section("ranks", _format_rank_table(self.job)),
            *_format_section(
                "collectives, as the slowest rank has timed them (a few bytes: the quickest; else medians)",
                _format_collectives(self.job),
            ),
            *_format_section("sharded steps", _format_trial(self.job)),
            *_format_section("findings", _format_findings(self.findings)),
            *_format_section("advice", [self.advice.call, *(f"- {reason}" for reason in self.advice.reasons)]),
        ]
        return "\n".join(parts) + "\n"

    def _headline(self) -> str:
        errors, warnings = (sum(it.level == level for it in self.findings) for level in (ERROR, WARNING))
        ranks, there = len(self.job.rank_infos), len(ranks_by_host(self.job.rank_infos))
        counts = f"{_pluralize(errors, 'error')}, {_pluralize(warnings, 'warning')}"
        health = f"{'not healthy' if errors else 'healthy'} ({counts})"
        where = f"{_pluralize(ranks, 'rank')} on {_pluralize(there, 'host')}"
        return f"zeroshard doctor: {health}; {where}, {self.job.backend}"


def _to_json_value(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _to_json_value(it) for key, it in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_json_value(it) for it in value]
    return str(value) if isinstance(value, float) and not isfinite(value) else value


def make_report(job: JobInfo) -> DoctorReport:
    return DoctorReport(job, run_checks(job), recommend_options(profile_network(job)))


def _format_section(title: str, lines: Sequence[str]) -> Iterator[str]:
    yield f"\n{title}"
    yield indent("\n".join(lines), "  ")


def _format_versions(rank_info: RankInfo) -> str:
    return ", ".join(f"{name} {version}" for name, version in rank_info.versions.items()) + " on rank 0"


def _format_rank_table(job: JobInfo) -> list[str]:
    rows = [_RANK_COLUMNS]
    both = list(zip(job.rank_infos, job.measurements, strict=True))
    rows += [_format_rank_row(facts, measured, job.backend) for facts, measured in both[:_MAX_RANKS_SHOWN]]
    more = len(both) - _MAX_RANKS_SHOWN
    return _format_table(rows) + ([f"... and {_pluralize(more, 'rank')} more: see --json"] if more > 0 else [])


def _format_rank_row(rank_info: RankInfo, measurements: RankMeasurements, backend: str) -> tuple[str, ...]:
    gpu = rank_info.gpu if backend == "nccl" else None
    local = f"{rank_info.local_rank} of {rank_info.local_size}" if rank_info.local_rank >= 0 else "-"
    clock = (
        f"{measurements.link.ahead * 1e3:+.2f} ± {measurements.link.give_or_take * 1e3:.2f} ms"
        if measurements.link
        else "-"
    )
    return (
        str(rank_info.rank),
        rank_info.host,
        local,
        f"cuda:{gpu.index}" if gpu else "cpu",
        f"{gpu.free / 2**30:.1f} of {gpu.total / 2**30:.1f} GiB" if gpu else "-",
        f"{rank_info.host_free / 2**30:.1f} of {rank_info.host_total / 2**30:.1f} GiB",
        f"{rank_info.threads}/{len(rank_info.cores)}",
        clock,
        f"{measurements.link.rate / 1e9:.2f} GB/s" if measurements.link else "-",
        f"{measurements.speed.product / 1e9:.0f} GFLOP/s",
        f"{measurements.speed.copy / 1e9:.1f} GB/s",
    )


def _format_collectives(job: JobInfo) -> list[str]:
    rows = [("verb", "way", "tiny", "large", "takes", "a rank gets"), *map(_format_timing, slowest_timings(job))]
    agreement = max(it.agreement for it in job.measurements)
    return [*_format_table(rows), f"to agree on something takes all ranks {agreement * 1e3:.3f} ms"]


def _format_timing(timing: CollectiveTiming) -> tuple[str, ...]:
    return (
        timing.verb,
        timing.way,
        f"{timing.small * 1e3:.3f} ms",
        f"{timing.nbytes / 2**20:.1f} MiB",
        f"{timing.large * 1e3:.2f} ms",
        f"{timing.rate / 1e9:.2f} GB/s" if timing.crossing else "-",
    )


def _format_trial(job: JobInfo) -> list[str]:
    trial = job.measurements[0].trial
    if trial is None:
        return ["could not be made"]
    worst = max(it.trial.difference for it in job.measurements if it.trial is not None)
    losses = f"the loss went from {trial.before:.4f} to {trial.after:.4f}"
    return [f"{TRIAL_STEPS} of AdamW: {losses}; the largest difference to the unsharded optimizer is {worst:.1e}"]


def _format_findings(findings: Sequence[Finding]) -> list[str]:
    if not findings:
        return ["none"]
    lines = []
    for it in findings:
        lines += [f"{it.level}: {it.what}: {it.found}", f"    expected: {it.expected}", f"    do: {it.do}"]
    return lines


def _format_table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _pluralize(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
