"""One fault after the other, and what came of each."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from functools import cache
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from tests.support.faults import Fault, Kind, Place
from tests.support.jobs import MODES, SAVED_EVERY, STORE_ON_RANK_0, Told, run_job
from tests.support.store import open_store

RANKS = 4
TIMEOUT = 30.0
"""Of the process group. Whoever knows earlier has not waited for it."""
SHORT = 5.0
"""The same where a rank is stopped, which is known by waiting only."""
MARGIN = 15.0
"""Seconds that a busy machine may add. A rank that hangs would take longer."""
ENDING = 7.0
"""Seconds in which processes end once all of them have raised: one at most, if a thread waits in vain; the rest is what
a busy machine may add. Nobody is to wait for the 10 seconds in which something may still be received."""
_FATAL = (Kind.KILLED, Kind.STOPPED, Kind.CUT)


class Outcome(NamedTuple):
    """What came of one fault."""

    fault: Fault
    mode: str
    saw: tuple[str, ...]
    """Kinds of errors on the other ranks."""
    seconds: float
    """Until every other rank knew; 0 if nobody had to know."""
    restarted: bool


class Matrix:
    """Runs faults, each in a job of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._store = folder, open_store()
        self._numbers = count()

    def inject(self, fault: Fault, mode: str) -> Outcome:
        """Raises `AssertionError` where something hung, was lost, or came out different."""
        folder = self._fresh_folder(fault, mode)
        timeout = SHORT if fault.kind is Kind.STOPPED else TIMEOUT
        told = run_job(self._store.port, folder, mode, RANKS, fault, timeout=timeout)
        assert told.fired is not None, "it did not happen"
        assert not told.stuck, f"ranks {told.stuck} hang: {told.news}"
        others = [rank for rank in range(RANKS) if rank != fault.rank]
        errors = [told.of(rank, "error") for rank in others]
        if fault.kind is Kind.SLOW:
            assert not any(errors), f"slowness is no error: {errors}"
        else:
            assert all(errors), f"a rank knows of nothing: {told.news}"
        self._require_the_same_end(told, folder, mode)
        if fault.kind in _FATAL:
            _require_names(told, fault, mode)
        seconds = max((news[0].time - told.fired for news in errors if news), default=0.0)
        raised = max((news[-1].time for news in errors if news), default=told.ended)
        assert fault.kind not in _FATAL or told.ended - raised < ENDING, "ranks that have raised do not end"
        assert seconds < (SHORT + MARGIN if fault.kind is Kind.STOPPED else TIMEOUT)
        saw = tuple(sorted({news[0].text.partition(":")[0] for news in errors if news}))
        return Outcome(fault, mode, saw, seconds, restarted=not told.is_done)

    def _require_the_same_end(self, told: Told, folder: Path, mode: str) -> None:
        if not told.is_done:
            again = run_job(self._store.port, folder, mode, RANKS)
            assert again.is_done, f"it does not go on: {again.news}"
            assert again.began >= told.saved, "a finished checkpoint was lost"
            told = again
        assert told.digests == self.undisturbed(mode), "it came out different"

    @cache  # noqa: B019 (lives as long as the tests)
    def undisturbed(self, mode: str) -> frozenset[str]:
        with TemporaryDirectory(dir=self._folder) as folder:
            return frozenset(run_job(self._store.port, Path(folder, "run"), mode, RANKS).digests)

    def _fresh_folder(self, fault: Fault, mode: str) -> Path:
        folder = self._folder / f"run{next(self._numbers)}"
        if fault.place is Place.LOAD:
            shutil.copytree(self.saved(mode), folder)
        return folder

    @cache  # noqa: B019
    def saved(self, mode: str) -> Path:
        """A folder with a checkpoint from the middle of a run."""
        folder = self._folder / f"saved-{mode}"
        run_job(self._store.port, folder, mode, RANKS, steps=2 * SAVED_EVERY)
        return folder


def _require_names(told: Told, fault: Fault, mode: str) -> None:
    """Who is missing is named where ranks learn it from us, and not by an error of torch's in DDP's backward pass."""
    texts = [it.text for rank in range(RANKS) if rank != fault.rank for it in told.of(rank, "error")]
    lost = [text for text in texts if text.startswith("RankLostError")]
    assert mode == "drop-in" or len(lost) == len(texts), f"a rank was not told who is missing: {texts}"
    named = re.compile(rf"ranks? [\d, ]*\b{fault.rank}\b[\d, ]* of")
    if mode == STORE_ON_RANK_0 and fault.kind in (Kind.KILLED, Kind.STOPPED):
        _require_no_verdict(told, texts)
        return
    told_of = [text for text in lost if named.search(text.partition("\n")[0])]
    if fault.kind is not Kind.CUT:  # in which all ranks are there
        assert len(told_of) == len(lost), f"the missing rank is not named: {texts}"


def _require_no_verdict(told: Told, texts: Sequence[str]) -> None:
    """Ranks that cannot hear of each other say so, and take nobody for lost."""
    assert all("the store of the job does not answer" in text for text in texts), texts
    assert not [it for news in told.news for it in news if it.lost], f"ranks that live are taken for lost: {texts}"


def cells() -> list[tuple[Kind, Place, str]]:
    """DDP reduces gradients of the drop-in: what happens there is not ours."""
    every = [(kind, place, mode) for mode in MODES for kind in Kind for place in Place]
    return [it for it in every if it[1:] != (Place.REDUCTION, "drop-in")]
