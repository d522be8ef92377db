"""Processes killed while saving: the last finished checkpoint is always complete and correct.

`ZEROSHARD_KILLS` sets the number of kills; `make faults` runs a few hundred.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.support.fault_report import Count, keep_count
from tests.support.lost_ranks import SavingJob
from tests.support.pool import open_store
from tests.support.tiers import sampled

KILLS = int(os.environ.get("ZEROSHARD_KILLS", "30"))
LONGEST = 0.15
"""Maximum seconds until a kill: long enough for several saves."""


@pytest.mark.timeout(60 + 10 * KILLS)
@sampled("world_size", [1, 2])
def test_kill_at_random_time_while_saving(tmp_path: Path, world_size: int) -> None:
    draw, store, folder = random.Random(world_size), open_store(), tmp_path / "run"
    saved, interrupted = 0, 0
    for number in range(KILLS + 1):
        job = SavingJob(store.port, f"job{number}", world_size, folder, in_background=bool(number % 2))
        loaded = job.loaded_step()
        assert saved <= loaded <= saved + 1, "a finished checkpoint was lost, or one appeared"
        saved = max(loaded, job.kill(draw, LONGEST))
        entries = folder.iterdir() if saved else ()
        leftovers = [entry.name for entry in entries if entry.name.startswith((".writing", ".leaving"))]
        assert len(leftovers) <= 3, "leftovers of killed saves pile up"
        interrupted += bool(leftovers)
    assert interrupted >= KILLS // 10, "hardly any save was interrupted"
    case = f"{world_size} rank{'s' if world_size > 1 else ''}"
    keep_count(Count("killed", case, "one rank or all ranks are killed at a random time", KILLS, is_watched=False))
