"""Processes killed while saving: the last finished checkpoint is always complete and correct.

`ZEROSHARD_KILLS` sets the number of kills; `make faults` runs a few hundred.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.support.fault_report import Count, keep_count
from tests.support.lost_ranks import Crew
from tests.support.pool import open_store
from tests.support.tiers import sampled

KILLS = int(os.environ.get("ZEROSHARD_KILLS", "30"))
LONGEST = 0.15
"""Maximum seconds until a kill: long enough for several saves."""


@pytest.mark.timeout(60 + 10 * KILLS)
@sampled("world_size", [1, 2])
def test_kill_at_random_time_while_saving(tmp_path: Path, world_size: int) -> None:
    draw, store, folder = random.Random(world_size), open_store(), tmp_path / "run"
    saved, in_the_middle = 0, 0
    for number in range(KILLS + 1):
        crew = Crew(store.port, f"crew{number}", world_size, folder, behind=bool(number % 2))
        found = crew.loaded()
        assert saved <= found <= saved + 1, "a finished checkpoint was lost, or one appeared"
        saved = max(found, crew.kill(draw, LONGEST))
        hidden = [it.name for it in folder.iterdir() if it.name.startswith((".writing", ".leaving"))] if saved else []
        assert len(hidden) <= 3, "what kills have left piles up"
        in_the_middle += bool(hidden)
    assert in_the_middle >= KILLS // 10, "hardly any save was interrupted"
    case = f"{world_size} rank{'s' if world_size > 1 else ''}, saving all the time"
    keep_count(Count("killed", case, "one or all are killed, at any moment", KILLS, is_watched=False))
