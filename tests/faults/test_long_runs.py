"""Long runs: nothing leaks, and repeating a run gives the same bits regardless of timing.

`ZEROSHARD_LONG` sets the number of steps; `make long` takes 20,000 of them, twice. The results are then written to the
directory in `ZEROSHARD_RECORDS`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tests.support import RankPool
from tests.support.long_runs import EVENTS, TRAINING_MODES, Plan, Record, net, run_long
from tests.support.monitoring import growth

STEPS = int(os.environ.get("ZEROSHARD_LONG", "200"))
RANKS = 4
LAP = len(TRAINING_MODES)
"""Segments until each configuration has run once. Counts are compared lap by lap; the first lap is also a warm-up."""
SEGMENTS = max(2 * LAP, STEPS // 500)
TIMEOUT = 120 + STEPS / 4
"""Seconds for a run: many times what it takes on 2 cores, which may be busy."""

SLACK_OBJECTS = 60
"""Independent of the number of steps. Single counts vary by a hundred with the parameters that train at the time and
with whether a load joined their state. Medians over laps, or over many segments of a configuration, vary by 30. The
recorded counts themselves add three objects per segment."""
MIN_SEGMENTS_FOR_MEDIAN = 5
"""Segments of a configuration. The median of fewer may vary as much as a single count: twice the slack is allowed."""
OBJECTS_PER_STEP = 0.02
"""In addition to the slack. 20,000 steps detect one leaked object per 25 steps; 200 steps detect one per step. (For
objects that live as long as the optimizer: one per 4 steps in 20,000, one per step in 1,600 with long segments.)"""
SLACK_RSS = 24 * 2**20
RSS_PER_STEP = 128
"""Bytes. Arenas fill up in the first laps by 8 MiB in new processes, however many laps there are. Later growth is less
than an empty tensor per step."""
SLACK_TENSORS = 12 * len(list(net().parameters()))
"""From the middle of a segment to its end. Unfrozen parameters may get state, and state joined by a load is split again
if a parameter gets no gradient: one tensor per parameter, with two moments, a step count and views of them. With whole
parameters, up to four cached broadcast plans hold views of parameters, too. A leak of one tensor per step would leave
250 in a long run; in a short run, comparing laps detects it."""
SLACK_TENSORS_BETWEEN = 3
"""Tensors left without any optimizer. Their number depends on the parameters that train. One leaked tensor per
optimizer would leave dozens."""


def make_plan(timing: int) -> Plan:
    """Make a plan. The first run has no pauses; the second has different ones on each rank."""
    digest_every = 100 if STEPS >= 1000 else 10
    nothing_weight = 480 if STEPS >= 10000 else 80
    pauses = 0.02 * timing
    return Plan(STEPS, STEPS // SEGMENTS, digest_every, timing, pause_probability=pauses, nothing_weight=nothing_weight)


@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT + 60)
def test_long_run_is_reproducible_and_does_not_leak(rank_pool: RankPool, tmp_path: Path) -> None:
    runs: list[list[Record]] = []
    for timing in range(2):
        arguments = {"folder": tmp_path / f"run{timing}", "plan": make_plan(timing)}
        runs.append(rank_pool.run(run_long, RANKS, TIMEOUT, arguments))
    _write_results([result for number, run in enumerate(runs) for result in summarize_run(number, run)])
    for records in runs:
        for rank, record in enumerate(records):
            _check_events(record)
            _check_growth(rank, record, STEPS)
    for first, second in zip(*runs, strict=True):
        assert first.digests == second.digests, "timing has changed the result"
        assert first.events == second.events
        counts = [[footprint.exact for footprint in record.between_segments[1:]] for record in (first, second)]
        assert counts[1] == counts[0]


def summarize_run(number: int, run: Sequence[Record]) -> list[dict[str, Any]]:
    """Return the results of each rank of a run."""
    return [
        {
            "run": number,
            "rank": rank,
            "steps": STEPS,
            "seconds": round(record.seconds, 1),
            "cpu": round(record.cpu, 1),
            "events": dict(sorted(record.events.items())),
            "first": vars(record.between_segments[0]),
            "last": vars(record.between_segments[-1]),
            "rss growth": growth([footprint.rss for footprint in record.between_segments], LAP),
            "objects": [footprint.objects for footprint in record.between_segments],
            "tensors": {
                "midway": [footprint.tensors for footprint in record.segment_middles],
                "end": [footprint.tensors for footprint in record.segment_ends],
            },
            "digest": record.digests[-1],
        }
        for rank, record in enumerate(run)
    ]


def _write_results(results: list[dict[str, Any]]) -> None:
    folder = os.environ.get("ZEROSHARD_RECORDS")
    if folder and "ZEROSHARD_LONG" in os.environ:  # a short run must not overwrite the results of a long one
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder, "long_runs.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def _check_events(record: Record) -> None:
    """Check that every kind of event has occurred."""
    expected = [*EVENTS, *(mode.name for mode in TRAINING_MODES), "added", "with a closure", "clipped", "scheduler"]
    expected += ["a rank without backward", "ranks without the branch", "3 passes", "cleared: zeros", "cleared: model"]
    assert not [event for event in expected if not record.events[event]], record.events


def _check_growth(rank: int, record: Record, steps: int) -> None:
    """Skip rank 0 within segments: it also runs the oracle, whose state comes and goes."""
    for number, (middle, end) in enumerate(zip(record.segment_middles, record.segment_ends, strict=True)):
        opened = [(footprint.files, footprint.threads, footprint.process_groups) for footprint in (middle, end)]
        assert number < LAP or opened[0] == opened[1], (middle, end)  # the first asynchronous save opens some
        assert rank == 0 or end.tensors - middle.tensors <= SLACK_TENSORS, (middle, end)
    for name in record.between_segments[0].exact if rank else ():
        counts = [getattr(footprint, name) for footprint in record.between_segments]
        slack = SLACK_TENSORS_BETWEEN if name == "tensors" else 0
        assert max(counts[LAP:], default=0) <= max(counts[:LAP]) + slack, f"{name} on rank {rank}: {counts}"
    _check_laps(rank, record, steps)
    if rank:
        _check_segments(record, steps)


def _check_laps(rank: int, record: Record, steps: int) -> None:
    """Check what remains after an optimizer is deleted."""
    segments = len(record.between_segments)
    steps_between = steps * (segments - LAP) / segments
    objects, memory = (
        [getattr(footprint, name) for footprint in record.between_segments] for name in ("objects", "rss")
    )
    increase = growth(objects, LAP)
    limit = SLACK_OBJECTS + OBJECTS_PER_STEP * steps_between
    assert increase <= limit, f"{increase} objects more on rank {rank}: {objects}"
    increase = growth(memory, LAP)
    limit = SLACK_RSS + RSS_PER_STEP * steps_between
    assert increase <= limit, f"{increase} bytes more on rank {rank}: {memory}"


def _check_segments(record: Record, steps: int) -> None:
    """Check objects that die with the optimizer: they show only in the second half of a configuration's segments."""
    segments = len(record.between_segments)
    steps_between, laps = steps / segments / 2, segments / LAP
    slack = SLACK_OBJECTS if laps >= MIN_SEGMENTS_FOR_MEDIAN else 2 * SLACK_OBJECTS
    footprints = zip(record.segment_middles, record.segment_ends, strict=True)
    increases = [end.objects - middle.objects for middle, end in footprints]
    for number, mode in enumerate(TRAINING_MODES):
        increase = median(increases[number::LAP])
        limit = slack + OBJECTS_PER_STEP * steps_between
        assert increase <= limit, f"{increase} objects more with {mode.name}: {increases}"


# ---- are leaks detected?

SHORT = Plan(200, 20, 100, timing=0, pause_probability=0.0)
longer = pytest.mark.skipif("ZEROSHARD_LONG" not in os.environ, reason="takes longer: make long")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "plan",
    [
        replace(SHORT, leak="process"),
        pytest.param(replace(SHORT, leak="optimizer", steps=1600, segment=320), marks=longer),
    ],
    ids=lambda plan: plan.leak,
)
def test_injected_leak_is_detected(rank_pool: RankPool, tmp_path: Path, plan: Plan) -> None:
    _, record = rank_pool.run(run_long, 2, 240, {"folder": tmp_path / "run", "plan": plan})
    with pytest.raises(AssertionError, match="objects more"):
        _check_growth(1, record, plan.steps)
