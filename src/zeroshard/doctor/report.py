"""The report of `zeroshard doctor`, as text and JSON, and the command itself."""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from math import isfinite
from textwrap import indent
from typing import Any

from ..comm.process_group import init_from_env, is_launched_by_torchrun
from ..errors import ZeroError
from .checks import (
    ERROR,
    WARNING,
    Advice,
    Finding,
    is_healthy,
    profile_network,
    recommend_options,
    run_checks,
    slowest_timings,
)
from .collect import (
    TRIAL_STEPS,
    CollectiveTiming,
    JobInfo,
    RankInfo,
    RankMeasurements,
    Watchdog,
    collect_job_info,
    ranks_by_host,
)

_MAX_RANKS_SHOWN = 16
"""Ranks in the text table. JSON lists all."""
_RANK_COLUMNS: tuple[str, ...] = (
    *("rank", "host", "local", "device", "free there", "free on host", "threads/cores", "clock"),
    *("to rank 0", "products", "copies"),
)


@dataclass(frozen=True)
class DoctorReport:
    """Measurements, findings and advice. The same on all ranks."""

    job: JobInfo
    findings: Sequence[Finding]
    advice: Advice

    @property
    def exit_status(self) -> int:
        """0 if the job is healthy, else 1."""
        return 0 if is_healthy(self.findings) else 1

    def as_dict(self) -> dict[str, Any]:
        """Return values for JSON. Non-finite numbers, which JSON cannot represent, become strings."""
        job = self.job
        values = {
            "healthy": self.exit_status == 0,
            "backend": job.backend,
            "world_size": len(job.rank_infos),
            "hosts": ranks_by_host(job.rank_infos),
            "findings": [asdict(finding) for finding in self.findings],
            "advice": asdict(self.advice),
            "collectives": [{**asdict(timing), "rate": timing.rate} for timing in slowest_timings(job)],
            "ranks": [
                {**asdict(info), **asdict(measured)}
                for info, measured in zip(job.rank_infos, job.measurements, strict=True)
            ],
        }
        return {key: _to_json_value(value) for key, value in values.items()}

    def as_text(self) -> str:
        lines = [
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
        return "\n".join(lines) + "\n"

    def _headline(self) -> str:
        errors, warnings = (sum(finding.level == level for finding in self.findings) for level in (ERROR, WARNING))
        ranks, hosts = len(self.job.rank_infos), len(ranks_by_host(self.job.rank_infos))
        counts = f"{_pluralize(errors, 'error')}, {_pluralize(warnings, 'warning')}"
        health = f"{'not healthy' if errors else 'healthy'} ({counts})"
        where = f"{_pluralize(ranks, 'rank')} on {_pluralize(hosts, 'host')}"
        return f"zeroshard doctor: {health}; {where}, {self.job.backend}"


def _to_json_value(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _to_json_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_json_value(item) for item in value]
    return str(value) if isinstance(value, float) and not isfinite(value) else value


def make_report(job: JobInfo) -> DoctorReport:
    """Run all checks on the collected data."""
    return DoctorReport(job, run_checks(job), recommend_options(profile_network(job)))


def _format_section(title: str, lines: Sequence[str]) -> Iterator[str]:
    yield f"\n{title}"
    yield indent("\n".join(lines), "  ")


def _format_versions(rank_info: RankInfo) -> str:
    return ", ".join(f"{name} {version}" for name, version in rank_info.versions.items()) + " on rank 0"


def _format_rank_table(job: JobInfo) -> list[str]:
    rows = [_RANK_COLUMNS]
    ranks = list(zip(job.rank_infos, job.measurements, strict=True))
    rows += [_format_rank_row(info, measured, job.backend) for info, measured in ranks[:_MAX_RANKS_SHOWN]]
    num_hidden = len(ranks) - _MAX_RANKS_SHOWN
    return _format_table(rows) + (
        [f"... and {_pluralize(num_hidden, 'rank')} more: see --json"] if num_hidden > 0 else []
    )


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
    agreement = max(measured.agreement for measured in job.measurements)
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
    worst = max(measured.trial.difference for measured in job.measurements if measured.trial is not None)
    losses = f"the loss went from {trial.before:.4f} to {trial.after:.4f}"
    return [f"{TRIAL_STEPS} of AdamW: {losses}; the largest difference to the unsharded optimizer is {worst:.1e}"]


def _format_findings(findings: Sequence[Finding]) -> list[str]:
    if not findings:
        return ["none"]
    lines = []
    for finding in findings:
        lines += [
            f"{finding.level}: {finding.what}: {finding.found}",
            f"    expected: {finding.expected}",
            f"    do: {finding.do}",
        ]
    return lines


def _format_table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _pluralize(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


# ---------------------------------------------------------------------------------------------------------------------
# The command, which `torchrun ... -m zeroshard doctor` runs on every rank. Needs only torch.


_GRACE_PERIOD_S = 15.0
"""Extra time of the watchdog, so that the process-group timeout fires first: its error says more."""


def main(arguments: Sequence[str]) -> int:
    """Run the command and return the exit status, the same on all ranks: 0 healthy, 1 not. Wrong usage exits with 2."""
    options = _make_parser().parse_args(arguments)
    process_name = (
        f"rank {os.environ['RANK']} of {os.environ.get('WORLD_SIZE', '?')}"
        if is_launched_by_torchrun()
        else "this process"
    )
    with Watchdog(options.timeout + _GRACE_PERIOD_S, process_name) as watchdog:
        try:
            report = _run_doctor(options, watchdog)
        except Exception as error:
            reason = str(error) if isinstance(error, ZeroError) else f"{type(error).__name__}: {error}"
            sys.stderr.write(f"zeroshard doctor: not healthy: {process_name}: {reason}\n")
            return 1
    return report.exit_status


def _run_doctor(options: argparse.Namespace, watchdog: Watchdog) -> DoctorReport:
    watchdog.set_phase("looking for the other ranks")
    with init_from_env(timedelta(seconds=options.timeout)) as group:

        def set_phase(phase: str) -> None:
            watchdog.set_phase(phase)
            group.failure_detector.set_activity(phase)

        report = make_report(collect_job_info(group, options.backend or "", set_phase))
        if group.rank == 0:
            _print_report(report, as_json=options.json)
        watchdog.set_phase("leaving")
    return report


def _print_report(report: DoctorReport, *, as_json: bool) -> None:
    sys.stdout.write(json.dumps(report.as_dict(), indent=2) + "\n" if as_json else report.as_text())
    sys.stdout.flush()


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="zeroshard doctor",
        description="Look whether a job is fit for training, and recommend options. Start it as training is started: "
        "torchrun [options] -m zeroshard doctor. Exit status: 0 healthy, 1 not, 2 wrong usage.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, with all that each rank knows and measured")
    parser.add_argument(
        "--backend",
        choices=("gloo", "nccl"),
        help="what to measure; by default nccl where every rank has a GPU of its own, else gloo on the CPU",
    )
    parser.add_argument(
        "--timeout",
        type=_parse_timeout,
        default=60.0,
        metavar="SECONDS",
        help="how long ranks wait for each other (60)",
    )
    return parser


def _parse_timeout(text: str) -> float:
    with suppress(ValueError):
        value = float(text)
        if 0 < value < 1e6:
            return value
    raise argparse.ArgumentTypeError(f"takes a number of seconds above 0, not {text}")
