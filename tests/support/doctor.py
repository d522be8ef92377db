"""Jobs as the doctor knows them, made up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from zeroshard.doctor.checkup import Checkup, Measured
from zeroshard.doctor.facts import Facts, Gpu
from zeroshard.doctor.links import Link
from zeroshard.doctor.measure import Timing
from zeroshard.doctor.speed import Speed
from zeroshard.doctor.trial import Trial

GIB = 2**30
VERBS = ("all-reduce", "reduce-scatter", "all-gather", "broadcast")


def some_facts(rank: int, ranks_a_host: int = 8, **changes: Any) -> Facts:
    """Of a healthy rank without a GPU."""
    values: dict[str, Any] = {
        "rank": rank,
        "host": f"host{rank // ranks_a_host}",
        "local_rank": rank % ranks_a_host,
        "local_size": ranks_a_host,
        "backend": "",
        "versions": {"python": "3.12.1", "torch": "2.12.0", "zeroshard": "0.1.0"},
        "gpu": None,
        "gpu_trouble": "",
        "host_free": 50 * GIB,
        "host_total": 64 * GIB,
        "cores": tuple(range(4 * rank, 4 * rank + 4)),
        "threads": 4,
        "environment": {"OMP_NUM_THREADS": "4", "CUDA_VISIBLE_DEVICES": str(rank)},
        "settings": {"deterministic algorithms": "False"},
    }
    return Facts(**{**values, **changes})


def some_gpu(number: int, free: int = 79 * GIB) -> Gpu:
    return Gpu(number % 8, "a GPU", f"GPU-{number}", free, 80 * GIB)


def some_measured(rank: int, **changes: Any) -> Measured:
    values: dict[str, Any] = {
        "link": Link(0.0001, 0.0002, 1e9) if rank else None,
        "speed": Speed(1e12, 2e10),
        "timings": tuple(Timing(verb, "a way", 1e-4, 1e-2, 16 * 2**20, 0.75) for verb in VERBS),
        "agreement": 1e-4,
        "rates": None,
        "trial": Trial(1.5, 0.5, 1e-16, "abc"),
    }
    return Measured(**{**values, **changes})


def some_job(ranks: int = 4, backend: str = "gloo", **facts: Any) -> Checkup:
    """A healthy one."""
    return Checkup(
        backend, [some_facts(rank, **facts) for rank in range(ranks)], [some_measured(rank) for rank in range(ranks)]
    )


def with_facts(job: Checkup, rank: int, **changes: Any) -> Checkup:
    return replace(job, facts=_changed(job.facts, rank, changes))


def with_measured(job: Checkup, rank: int, **changes: Any) -> Checkup:
    return replace(job, measured=_changed(job.measured, rank, changes))


def _changed(values: Sequence[Any], rank: int, changes: dict[str, Any]) -> list[Any]:
    return [replace(it, **changes) if number == rank else it for number, it in enumerate(values)]
