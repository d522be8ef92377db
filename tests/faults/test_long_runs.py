"""Long runs: nothing piles up, and the same run gives the same bits, whatever the timing.

`ZEROSHARD_LONG` says how many steps; `make long` makes 20,000 of them, twice. With `ZEROSHARD_RECORDS`, a folder, the
table of what was found is then written there.
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
from tests.support.long_runs import EVENTS, WAYS, Plan, Record, net, run_long
from tests.support.monitoring import growth

STEPS = int(os.environ.get("ZEROSHARD_LONG", "200"))
RANKS = 4
LAP = len(WAYS)
"""Segments in which every way is gone once. All is compared lap by lap: the first one is also a warm-up."""
SEGMENTS = max(2 * LAP, STEPS // 500)
TIMEOUT = 120 + STEPS / 4
"""Seconds for a run: many times what it takes on 2 cores, which may have other things to do."""

SLACK_OBJECTS = 60
"""However many steps there are. Which parameters train when it is counted, and whether their state was joined by a
load, moves single counts by a hundred, and medians of laps, or of many segments of a way, by 30. The counts themselves,
which are kept, are three objects a segment."""
MANY = 5
"""Segments of a way. The median of fewer may be off by as much as a single one: twice that is allowed."""
OBJECTS_PER_STEP = 0.02
"""On top of that: an object that stays in one step of 25 is found in 20,000 steps, one in each step in 200. (As long as
the optimizer: one in each fourth of 20,000 steps, one in each of 1,600 in long segments.)"""
SLACK_RSS = 24 * 2**20
RSS_PER_STEP = 128
"""Bytes: arenas that fill up in the first laps, whatever their number, by 8 MiB in processes that are new; then less
than an empty tensor in a step."""
SLACK_TENSORS = 8 * len(list(net().parameters()))
"""From the middle of a segment to its end. There state of parameters that were thawed may begin, and what was joined by
a load is split again where a parameter gets no gradient: into a tensor a parameter, with two moments, a count of steps
and views of them. What leaked a tensor a step would leave hundreds in a long run; in a short one laps find it."""
SLACK_LEFT = 3
"""Tensors without any optimizer: that depends on which parameters train. One that each optimizer left makes dozens."""


def plan_of(timing: int) -> Plan:
    """The first run has no pauses, the second has, other ones on each rank."""
    digest = 100 if STEPS >= 1000 else 10
    calm = 480 if STEPS >= 10000 else 80
    return Plan(STEPS, STEPS // SEGMENTS, digest, timing, pauses=0.02 * timing, calm=calm)


@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT + 60)
def test_a_long_run_twice(rank_pool: RankPool, tmp_path: Path) -> None:
    runs: list[list[Record]] = []
    for timing in range(2):
        arguments = {"folder": tmp_path / f"run{timing}", "plan": plan_of(timing)}
        runs.append(rank_pool.run(run_long, RANKS, TIMEOUT, arguments))
    _write([row for number, run in enumerate(runs) for row in rows_of(number, run)])
    for records in runs:
        for rank, record in enumerate(records):
            _check_events(record)
            _check_growth(rank, record, STEPS)
    for first, second in zip(*runs, strict=True):
        assert first.digests == second.digests, "timing has changed the result"
        assert first.events == second.events
        assert [it.exact for it in second.between[1:]] == [it.exact for it in first.between[1:]]


def rows_of(number: int, run: Sequence[Record]) -> list[dict[str, Any]]:
    """What became of each rank of a run."""
    return [
        {
            "run": number,
            "rank": rank,
            "steps": STEPS,
            "seconds": round(record.seconds, 1),
            "cpu": round(record.cpu, 1),
            "events": dict(sorted(record.events.items())),
            "first": vars(record.between[0]),
            "last": vars(record.between[-1]),
            "rss growth": growth([it.rss for it in record.between], LAP),
            "objects": [it.objects for it in record.between],
            "tensors": {
                "midway": [it.tensors for it in record.midway],
                "end": [it.tensors for it in record.at_the_end],
            },
            "digest": record.digests[-1],
        }
        for rank, record in enumerate(run)
    ]


def _write(rows: list[dict[str, Any]]) -> None:
    folder = os.environ.get("ZEROSHARD_RECORDS")
    if folder and "ZEROSHARD_LONG" in os.environ:  # a short one says nothing, and would take the place of a long one
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder, "long_runs.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def _check_events(record: Record) -> None:
    """All that can happen has happened."""
    expected = [*EVENTS, *(way.name for way in WAYS), "added", "with a closure", "clipped", "scheduler"]
    expected += ["a rank without backward", "ranks without the branch", "3 passes", "cleared: zeros", "cleared: model"]
    assert not [it for it in expected if not record.events[it]], record.events


def _check_growth(rank: int, record: Record, steps: int) -> None:
    """The first rank has the oracle beside it, whose state comes and goes: in segments the others are looked at."""
    for number, (midway, end) in enumerate(zip(record.midway, record.at_the_end, strict=True)):
        opened = [(it.files, it.threads, it.process_groups) for it in (midway, end)]
        assert number < LAP or opened[0] == opened[1], (midway, end)  # the first save behind the scenes opens some
        assert rank == 0 or end.tensors - midway.tensors <= SLACK_TENSORS, (midway, end)
    for name in record.between[0].exact if rank else ():
        counts = [getattr(it, name) for it in record.between]
        slack = SLACK_LEFT if name == "tensors" else 0
        assert max(counts[LAP:], default=0) <= max(counts[:LAP]) + slack, f"{name} on rank {rank}: {counts}"
    _check_laps(rank, record, steps)
    if rank:
        _check_segments(record, steps)


def _check_laps(rank: int, record: Record, steps: int) -> None:
    """What is left when an optimizer has gone."""
    segments = len(record.between)
    apart = steps * (segments - LAP) / segments
    objects, memory = ([getattr(it, name) for it in record.between] for name in ("objects", "rss"))
    more = growth(objects, LAP)
    assert more <= SLACK_OBJECTS + OBJECTS_PER_STEP * apart, f"{more} objects more on rank {rank}: {objects}"
    more = growth(memory, LAP)
    assert more <= SLACK_RSS + RSS_PER_STEP * apart, f"{more} bytes more on rank {rank}: {memory}"


def _check_segments(record: Record, steps: int) -> None:
    """What goes with it would be seen in its own time only: in the second halves of all segments of a way."""
    apart, laps = steps / len(record.between) / 2, len(record.between) / LAP
    slack = SLACK_OBJECTS if laps >= MANY else 2 * SLACK_OBJECTS
    found = [end.objects - midway.objects for midway, end in zip(record.midway, record.at_the_end, strict=True)]
    for number, way in enumerate(WAYS):
        more = median(found[number::LAP])
        assert more <= slack + OBJECTS_PER_STEP * apart, f"{more} objects more with {way.name}: {found}"


# ---- would it be found?

SHORT = Plan(200, 20, 100, timing=0, pauses=0.0)
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
def test_an_object_in_each_step(rank_pool: RankPool, tmp_path: Path, plan: Plan) -> None:
    _, record = rank_pool.run(run_long, 2, 240, {"folder": tmp_path / "run", "plan": plan})
    with pytest.raises(AssertionError, match="objects more"):
        _check_growth(1, record, plan.steps)
