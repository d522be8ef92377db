"""`zeroshard doctor`, as `torchrun ... -m zeroshard doctor` starts it on every rank. Needs torch alone."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

from ..comm.joining import is_started, joined
from ..errors import ZeroError
from .checkup import examine
from .report import Report, report_on
from .watch import Watch

_GRACE = 15.0
"""Seconds beyond the timeout of messages, which tells more when it is over."""


def main(arguments: Sequence[str]) -> int:
    """The exit status, the same on all ranks: 0 healthy, 1 not. Wrong usage exits with 2."""
    options = _parser().parse_args(arguments)
    who = f"rank {os.environ['RANK']} of {os.environ.get('WORLD_SIZE', '?')}" if is_started() else "this process"
    with Watch(options.timeout + _GRACE, who) as watch:
        try:
            report = _examined(options, watch)
        except Exception as error:
            reason = str(error) if isinstance(error, ZeroError) else f"{type(error).__name__}: {error}"
            sys.stderr.write(f"zeroshard doctor: not healthy: {who}: {reason}\n")
            return 1
    return report.status


def _examined(options: argparse.Namespace, watch: Watch) -> Report:
    watch.at("looking for the other ranks")
    with joined(timedelta(seconds=options.timeout)) as group:

        def at(place: str) -> None:
            watch.at(place)
            group.line.at(place)

        report = report_on(examine(group, options.backend or "", at))
        if group.rank == 0:
            _print(report, as_json=options.json)
        watch.at("leaving")
    return report


def _print(report: Report, *, as_json: bool) -> None:
    sys.stdout.write(json.dumps(report.as_dict(), indent=2) + "\n" if as_json else report.as_text())
    sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
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
        "--timeout", type=_seconds, default=60.0, metavar="SECONDS", help="how long ranks wait for each other (60)"
    )
    return parser


def _seconds(text: str) -> float:
    with suppress(ValueError):
        value = float(text)
        if 0 < value < 1e6:
            return value
    raise argparse.ArgumentTypeError(f"takes a number of seconds above 0, not {text}")
