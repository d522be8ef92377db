"""The report of `zeroshard doctor`, as text and JSON, and the command itself. Needs only torch."""

import argparse
import json
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from statistics import median
from textwrap import indent
from typing import Any

from .._formatting import format_bytes, format_count, format_error, format_table
from ..comm.process_group import init_from_env, is_launched_by_torchrun
from ..errors import ZeroError
from .checks import Advice, Finding, clock_offset, combine_ranks, recommend_options, run_checks, summarize_collectives
from .collect import TRIAL_STEPS, JobInfo, collect_job_info, ranks_by_host

_MAX_RANKS_SHOWN = 16
"""Ranks in the text table. JSON lists all."""
_GRACE_PERIOD_S = 15.0
"""Extra time of the watchdog, so that the process-group timeout fires first: its error says more."""


@dataclass(frozen=True)
class DoctorReport:
    """Measurements, findings and advice. The same on all ranks."""

    job: JobInfo
    findings: Sequence[Finding]
    advice: Advice

    @property
    def is_healthy(self) -> bool:
        return all(finding.level != "error" for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """Return values for JSON. Non-finite numbers, which JSON cannot represent, become strings."""
        job = self.job
        values = {
            "healthy": self.is_healthy,
            "backend": job.backend,
            "world_size": len(job.ranks),
            "hosts": ranks_by_host(job.ranks),
            "findings": list(map(asdict, self.findings)),
            "advice": asdict(self.advice),
            "collectives": list(map(asdict, summarize_collectives(job))),
            "ranks": [
                {**asdict(info), **asdict(measured)} for info, measured in zip(job.ranks, job.measurements, strict=True)
            ],
        }
        copied: dict[str, Any] = json.loads(json.dumps(values), parse_constant=str)
        return copied

    def as_text(self) -> str:
        errors, warnings = (sum(finding.level == level for finding in self.findings) for level in ("error", "warning"))
        ranks, hosts = self.job.ranks, ranks_by_host(self.job.ranks)
        health = f"{'healthy' if self.is_healthy else 'not healthy'} ({format_count(errors, 'error')}, "
        where = f"{format_count(len(ranks), 'rank')} on {format_count(len(hosts), 'host')}, {self.job.backend}"
        findings = [
            f"{finding.level}: {finding.what}: {finding.found}\n    expected: {finding.expected}\n    do: {finding.do}"
            for finding in self.findings
        ]
        sections = {
            "ranks (speeds: median of all rounds)": _format_ranks(self.job),
            "collectives on the slowest rank (median of all rounds, and its 96 % confidence interval)": (
                _format_collectives(self.job)
            ),
            "sharded steps": [_format_trial(self.job)],
            "findings": findings or ["none"],
            "advice": [self.advice.call, *(f"- {reason}" for reason in self.advice.reasons)],
        }
        text = f"zeroshard doctor: {health}{format_count(warnings, 'warning')}); {where}\n"
        text += ", ".join(f"{name} {version}" for name, version in ranks[0].versions.items()) + " on rank 0\n"
        return text + "".join(
            f"\n{title}\n" + indent("\n".join(lines), "  ") + "\n" for title, lines in sections.items()
        )


def make_report(job: JobInfo) -> DoctorReport:
    """Run all checks on the collected data."""
    return DoctorReport(job, run_checks(job), recommend_options(job))


def _format_ranks(job: JobInfo) -> list[str]:
    rows = []
    for info, measured in list(zip(job.ranks, job.measurements, strict=True))[:_MAX_RANKS_SHOWN]:
        gpu, samples, clock, link = info.gpu if job.backend == "nccl" else None, measured.samples, "-", "-"
        if "link" in samples:
            offset, error = clock_offset(samples)
            clock, link = f"{offset * 1e3:+.2f} ± {error * 1e3:.2f} ms", f"{median(samples['link']) / 1e9:.2f} GB/s"
        row = {
            "rank": str(info.rank),
            "host": info.host,
            "local rank": f"{info.local_rank} of {info.local_size}" if info.local_rank >= 0 else "-",
            "device": f"cuda:{gpu.index}" if gpu else "cpu",
            "free GPU memory": _format_free(gpu.free, gpu.total) if gpu else "-",
            "free host memory": _format_free(info.host_free, info.host_total),
            "threads/cores": f"{info.threads}/{len(info.cores)}",
            "clock offset": clock,
            "link to rank 0": link,
            "matmul": f"{median(samples['matmul']) / 1e9:.0f} GFLOP/s",
            "memcpy": f"{median(samples['memcpy']) / 1e9:.1f} GB/s",
        }
        rows.append(row)
    hidden = len(job.ranks) - len(rows)
    return _format_rows(rows) + ([f"... and {format_count(hidden, 'rank')} more: see --json"] if hidden else [])


def _format_rows(rows: Sequence[dict[str, str]]) -> list[str]:
    """Format a table whose columns are named by the keys."""
    return format_table([list(rows[0]), *(list(row.values()) for row in rows)])


def _format_free(free: int, total: int) -> str:
    return f"{format_bytes(free, binary=True)} of {format_bytes(total, binary=True)}"


def _format_collectives(job: JobInfo) -> list[str]:
    rows = [
        {
            "collective": row.collective,
            "transport": row.transport,
            "latency": f"{row.latency_s.median * 1e3:.3f} ms",
            "message": format_bytes(row.nbytes, binary=True),
            "time": f"{row.duration_s.median * 1e3:.2f} ms",
            "interval": f"{row.duration_s.low * 1e3:.2f} to {row.duration_s.high * 1e3:.2f} ms",
            "received": f"{row.bandwidth / 1e9:.2f} GB/s" if row.received_fraction else "-",
        }
        for row in summarize_collectives(job)
    ]
    consensus_s = median(combine_ranks(job, max, "consensus"))
    return [*_format_rows(rows), f"consensus of all ranks: {consensus_s * 1e3:.3f} ms"]


def _format_trial(job: JobInfo) -> str:
    trials = [measured.trial for measured in job.measurements]
    if any(trial.error for trial in trials):
        return "failed"
    losses = f"the loss went from {trials[0].initial_loss:.4f} to {trials[0].final_loss:.4f}"
    worst = max(trial.max_difference for trial in trials)
    return f"{TRIAL_STEPS} steps of AdamW: {losses}; the largest difference from the unsharded optimizer is {worst:.1e}"


# ---------------------------------------------------------------------------------------------------------------------
# The command, which `torchrun ... -m zeroshard doctor` runs on every rank.


class Watchdog:
    """Ends the process if a single phase takes longer than `timeout_s`.

    Hazard: `os._exit` is the only way to interrupt a rank that waits for a GPU.
    """

    def __init__(self, timeout_s: float, process_name: str) -> None:
        self._timeout_s, self._process_name = timeout_s, process_name
        self._timer: threading.Timer | None = None

    def set_phase(self, phase: str) -> None:
        """Start a phase, and the time for it."""
        self.stop()
        self._timer = threading.Timer(self._timeout_s, self._exit, (phase,))
        self._timer.daemon = True
        self._timer.start()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _exit(self, phase: str) -> None:
        sys.stderr.write(
            f"zeroshard doctor: {self._process_name} timed out after {self._timeout_s:g} s while {phase}\n"
        )
        sys.stderr.flush()
        os._exit(1)


def main(arguments: Sequence[str]) -> int:
    """Run the command and return the exit status, the same on all ranks: 0 healthy, 1 not. Wrong usage exits with 2."""
    options = _parse(arguments)
    process_name = "this process"
    if is_launched_by_torchrun():
        process_name = f"rank {os.environ['RANK']} of {os.environ.get('WORLD_SIZE', '?')}"
    watchdog = Watchdog(options.timeout + _GRACE_PERIOD_S, process_name)
    try:
        watchdog.set_phase("looking for the other ranks")
        with init_from_env(timedelta(seconds=options.timeout)) as group:

            def set_phase(phase: str) -> None:
                watchdog.set_phase(phase)
                group.failure_detector.set_activity(phase)

            report = make_report(collect_job_info(group, options.backend or "", set_phase))
            if group.rank == 0:
                text = json.dumps(report.as_dict(), indent=2) + "\n" if options.json else report.as_text()
                sys.stdout.write(text)
                sys.stdout.flush()
            watchdog.set_phase("leaving")
    except Exception as error:
        reason = str(error) if isinstance(error, ZeroError) else format_error(error)
        sys.stderr.write(f"zeroshard doctor: not healthy: {process_name}: {reason}\n")
        return 1
    finally:
        watchdog.stop()
    return 0 if report.is_healthy else 1


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="zeroshard doctor",
        description="Check whether a job is ready for training, and recommend options. Start it like the training "
        "script: torchrun [options] -m zeroshard doctor. Exit status: 0 healthy, 1 not, 2 wrong usage.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, with all facts and measurements of each rank")
    backend_help = "what to measure (default: nccl if every rank has its own GPU, else gloo on the CPU)"
    parser.add_argument("--backend", choices=("gloo", "nccl"), help=backend_help)
    timeout_help = "how long ranks wait for each other (60)"
    parser.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS", help=timeout_help)
    options = parser.parse_args(arguments)
    if not 0 < options.timeout < 1e6:
        parser.error(f"argument --timeout: expected a positive number of seconds, got {options.timeout:g}")
    return options
