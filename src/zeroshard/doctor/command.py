"""`zeroshard doctor`, as `torchrun ... -m zeroshard doctor` starts it on every rank. Needs torch alone."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

from ..comm.joining import init_from_env, is_launched_by_torchrun
from ..errors import ZeroError
from .checkup import collect_job_info
from .report import DoctorReport, make_report
from .watch import Watchdog

_GRACE_PERIOD_S = 15.0
"""Seconds beyond the timeout of messages, which tells more when it is over."""


def main(arguments: Sequence[str]) -> int:
    """The exit status, the same on all ranks: 0 healthy, 1 not. Wrong usage exits with 2."""
    options = _make_parser().parse_args(arguments)
    who = (
        f"rank {os.environ['RANK']} of {os.environ.get('WORLD_SIZE', '?')}"
        if is_launched_by_torchrun()
        else "this process"
    )
    with Watchdog(options.timeout + _GRACE_PERIOD_S, who) as watch:
        try:
            report = _run_doctor(options, watch)
        except Exception as error:
            reason = str(error) if isinstance(error, ZeroError) else f"{type(error).__name__}: {error}"
            sys.stderr.write(f"zeroshard doctor: not healthy: {who}: {reason}\n")
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
