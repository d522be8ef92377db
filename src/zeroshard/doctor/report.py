"""What was found, for people and for programs."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from textwrap import indent
from typing import Any

from .advice import Advice, advise, situation, timings
from .checkup import Checkup, Measured
from .facts import Facts
from .findings import ERROR, WARNING, Finding, is_healthy
from .judging import judge
from .measure import Timing
from .places import hosts
from .trial import STEPS

_SHOWN = 16
"""Ranks in the table; JSON has all."""
_COLUMNS: tuple[str, ...] = (
    *("rank", "host", "local", "device", "free there", "free on host", "threads/cores", "clock"),
    *("to rank 0", "products", "copies"),
)


@dataclass(frozen=True)
class Report:
    """The same on all ranks."""

    checkup: Checkup
    findings: Sequence[Finding]
    advice: Advice

    @property
    def status(self) -> int:
        """The exit status: 0 where the job is healthy."""
        return 0 if is_healthy(self.findings) else 1

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which knows no numbers that are not finite: these are text."""
        it = self.checkup
        said = {
            "healthy": self.status == 0,
            "backend": it.backend,
            "world_size": len(it.facts),
            "hosts": hosts(it.facts),
            "findings": [asdict(finding) for finding in self.findings],
            "advice": asdict(self.advice),
            "collectives": [{**asdict(timing), "rate": timing.rate} for timing in timings(it)],
            "ranks": [
                {**asdict(facts), **asdict(measured)} for facts, measured in zip(it.facts, it.measured, strict=True)
            ],
        }
        return {key: _speakable(value) for key, value in said.items()}

    def as_text(self) -> str:
        parts = [
            self._headline(),
            _versions(self.checkup.facts[0]),
            *_titled("ranks", _ranks(self.checkup)),
            *_titled(
                "collectives, as the slowest rank has timed them (a few bytes: the quickest; else medians)",
                _collectives(self.checkup),
            ),
            *_titled("sharded steps", _trial(self.checkup)),
            *_titled("findings", _findings(self.findings)),
            *_titled("advice", [self.advice.call, *(f"- {reason}" for reason in self.advice.reasons)]),
        ]
        return "\n".join(parts) + "\n"

    def _headline(self) -> str:
        errors, warnings = (sum(it.level == level for it in self.findings) for level in (ERROR, WARNING))
        ranks, there = len(self.checkup.facts), len(hosts(self.checkup.facts))
        health = f"{'not healthy' if errors else 'healthy'} ({_count(errors, 'error')}, {_count(warnings, 'warning')})"
        return f"zeroshard doctor: {health}; {_count(ranks, 'rank')} on {_count(there, 'host')}, {self.checkup.backend}"


def _speakable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _speakable(it) for key, it in value.items()}
    if isinstance(value, (list, tuple)):
        return [_speakable(it) for it in value]
    return str(value) if isinstance(value, float) and not isfinite(value) else value


def report_on(checkup: Checkup) -> Report:
    return Report(checkup, judge(checkup), advise(situation(checkup)))


def _titled(title: str, lines: Sequence[str]) -> Iterator[str]:
    yield f"\n{title}"
    yield indent("\n".join(lines), "  ")


def _versions(facts: Facts) -> str:
    return ", ".join(f"{name} {version}" for name, version in facts.versions.items()) + " on rank 0"


def _ranks(checkup: Checkup) -> list[str]:
    rows = [_COLUMNS]
    both = list(zip(checkup.facts, checkup.measured, strict=True))
    rows += [_rank(facts, measured, checkup.backend) for facts, measured in both[:_SHOWN]]
    more = len(both) - _SHOWN
    return _table(rows) + ([f"... and {_count(more, 'rank')} more: see --json"] if more > 0 else [])


def _rank(facts: Facts, measured: Measured, backend: str) -> tuple[str, ...]:
    gpu = facts.gpu if backend == "nccl" else None
    local = f"{facts.local_rank} of {facts.local_size}" if facts.local_rank >= 0 else "-"
    clock = f"{measured.link.ahead * 1e3:+.2f} ± {measured.link.give_or_take * 1e3:.2f} ms" if measured.link else "-"
    return (
        str(facts.rank),
        facts.host,
        local,
        f"cuda:{gpu.index}" if gpu else "cpu",
        f"{gpu.free / 2**30:.1f} of {gpu.total / 2**30:.1f} GiB" if gpu else "-",
        f"{facts.host_free / 2**30:.1f} of {facts.host_total / 2**30:.1f} GiB",
        f"{facts.threads}/{len(facts.cores)}",
        clock,
        f"{measured.link.rate / 1e9:.2f} GB/s" if measured.link else "-",
        f"{measured.speed.product / 1e9:.0f} GFLOP/s",
        f"{measured.speed.copy / 1e9:.1f} GB/s",
    )


def _collectives(checkup: Checkup) -> list[str]:
    rows = [("verb", "way", "tiny", "large", "takes", "a rank gets"), *map(_timing, timings(checkup))]
    agreement = max(it.agreement for it in checkup.measured)
    return [*_table(rows), f"to agree on something takes all ranks {agreement * 1e3:.3f} ms"]


def _timing(it: Timing) -> tuple[str, ...]:
    return (
        it.verb,
        it.way,
        f"{it.small * 1e3:.3f} ms",
        f"{it.nbytes / 2**20:.1f} MiB",
        f"{it.large * 1e3:.2f} ms",
        f"{it.rate / 1e9:.2f} GB/s" if it.crossing else "-",
    )


def _trial(checkup: Checkup) -> list[str]:
    trial = checkup.measured[0].trial
    if trial is None:
        return ["could not be made"]
    worst = max(it.trial.difference for it in checkup.measured if it.trial is not None)
    losses = f"the loss went from {trial.before:.4f} to {trial.after:.4f}"
    return [f"{STEPS} of AdamW: {losses}; the largest difference to the unsharded optimizer is {worst:.1e}"]


def _findings(findings: Sequence[Finding]) -> list[str]:
    if not findings:
        return ["none"]
    lines = []
    for it in findings:
        lines += [f"{it.level}: {it.what}: {it.found}", f"    expected: {it.expected}", f"    do: {it.do}"]
    return lines


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
