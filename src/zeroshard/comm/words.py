"""What ranks have to say when they have lost each other, through the store in which they once found each other."""

import json
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from ..errors import RankLostError
from ..units import name_ranks
from .ending import wait_at_exit_for

PATIENCE = 1.0
"""Seconds that others have to leave a word."""
GRACE = 0.5
"""Seconds that those have whose connections are closed: who hangs up leaves a word before, but a network may fail."""
ANSWER = 1.0
"""Seconds that the store has to answer: whoever serves it may be the one that is gone."""
_WHY_SILENT = "stopped, stuck, cut off, or busy with something else"
_ALONE = (
    "But if ranks waited for different things, as said above, one of them has made a call alone, and that would end in "
    "the same way: a step or a save under `if rank == 0`, a forward pass with gradients of a model that has buffers."
)
_SHORTER = (
    "But if a rank's program had come to its end, its loop was shorter: all ranks make as many steps, or use Join."
)
_SHOWN = 8
_LONGEST = 600

Ranks = Sequence[int]


class Words:
    """Those of all ranks of a group. Ranks are counted in it."""

    ADVICE = "Nothing more can be sent in this process group. Start again from the last checkpoint."

    def __init__(self, group: dist.ProcessGroup, place: str, error: str, closed: Collection[int], *, own: bool) -> None:
        """`closed`: global ranks to which there is no connection any more. `own`: the error is this rank's own."""
        members = dist.get_process_group_ranks(group)
        self._me, self._size = members.index(dist.get_rank()), len(members)
        self._closed = {members.index(rank) for rank in closed if rank in members}
        self._word, self._key = f"{place}: {error}"[:_LONGEST], f"zeroshard/lost/{group.group_name}"
        self._heard: dict[int, str] = {self._me: self._word}
        self._failed = {self._me: error[:_LONGEST]} if own else {}
        self._missed_by: set[int] = set()
        """Ranks that have given up waiting for this one."""
        self._is_told = False
        """The store has answered to the end: whoever was not heard has said nothing."""

    def leave(self) -> None:
        """For all others to read. Before connections are closed: then who is gone without one has none to leave."""
        word = {"word": self._word, "error": self._failed.get(self._me, ""), "closed": sorted(self._closed)}
        _in_time(ANSWER, lambda: self._say(**word))

    def report(self, all_there: str, kept: str) -> RankLostError:
        """`all_there`: what to say if nobody is missing; `kept`: where torch's records are, if they were written."""
        _in_time(PATIENCE + ANSWER, self._listen)
        is_told, missing = self._is_told, self._missing()
        gone = [rank for rank in missing if rank in self._closed]
        silent = [rank for rank in missing if rank not in self._closed]
        parts = _failures(self._failed, self._size)
        if is_told:
            parts += [*_losses(gone, silent, self._size), *self._missed()]
        else:
            parts += self._unknown(missing, gone)
            gone = silent = []
        told = [f"{'; '.join(parts)}." if parts else f"{all_there}, and all ranks are still there.", *self._told()]
        if kept:
            told.append(f"torch's flight recorder is in {kept}: see torchfrtrace.")
        told.append(f"{self.ADVICE} {_ALONE if not parts else _SHORTER if gone else ''}".rstrip())
        return RankLostError("\n".join(told), tuple(sorted(self._failed)), tuple(gone), tuple(silent))

    def _say(self, **what: Any) -> None:
        _store().append(self._key, json.dumps({"rank": self._me, **what}) + "\n")

    def _missing(self) -> list[int]:
        return sorted(set(range(self._size)) - dict(self._heard).keys())

    def _listen(self) -> None:
        """Until all who can have spoken, or for as long as is sensible."""
        start, pause = time.monotonic(), max(0.01, self._size / 500)
        while True:
            for line in _store().get(self._key).decode(errors="replace").splitlines():
                self._hear(**json.loads(line))
            missing = self._missing()
            if not missing or time.monotonic() - start > (GRACE if self._closed.issuperset(missing) else PATIENCE):
                break
            time.sleep(pause)
        self._is_told = True
        if missing:  # who was only stopped shall know when it wakes up
            self._say(missed=missing)

    def _hear(self, rank: int, word: str = "", error: str = "", closed: Ranks = (), missed: Ranks = ()) -> None:
        self._heard |= {rank: word} if word else {}
        self._failed |= {rank: error} if error else {}
        self._closed.update(closed)
        self._missed_by.update([rank] if self._me in missed else [])

    def _unknown(self, missing: Ranks, closed: Ranks) -> list[str]:
        """A closed connection alone says little: ranks that live have hung up, too."""
        whose = f"; closed are connections to {name_ranks(closed)}, which ended, or live and hung up" if closed else ""
        where = "the store of the job does not answer (rank 0 serves it, unless torchrun or you do)"
        return [f"{where}, so nothing is known of {name_ranks(missing)} of {self._size}{whose}"] if missing else []

    def _missed(self) -> list[str]:
        by = sorted(self._missed_by)
        return [f"{name_ranks(by)} of {self._size} waited for this rank in vain: {_WHY_SILENT}"] if by else []

    def _told(self) -> list[str]:
        """What this rank says first, and what several say once."""
        by_word: dict[str, list[int]] = {self._word: []}
        for rank, word in sorted(dict(self._heard).items()):
            by_word.setdefault(word, []).append(rank)
        lines = [f"{name_ranks(ranks)}: {word}" for word, ranks in by_word.items()]
        more = len(lines) - _SHOWN
        return [*lines[:_SHOWN], *([f"... and {more} more"] if more > 0 else [])]


def _failures(failed: dict[int, str], size: int) -> list[str]:
    return [f"rank {rank} of {size} failed with {error}" for rank, error in sorted(failed.items())[:_SHOWN]]


def _losses(gone: Ranks, silent: Ranks, size: int) -> list[str]:
    parts = []
    if gone:
        parts.append(f"{name_ranks(gone)} of {size} ended, or lost the network: no connection, and no word left")
    if silent:
        parts.append(f"{name_ranks(silent)} of {size} did not answer: {_WHY_SILENT}")
    return parts


def _store() -> Any:
    return _get_default_store()


def _in_time(seconds: float, action: Callable[[], object]) -> None:
    """Do it if the store answers in time; it can keep one waiting for ever, whatever its timeout is."""

    def attempt() -> None:
        with suppress(Exception):
            action()

    thread = threading.Thread(target=attempt, name="zeroshard-words", daemon=True)
    thread.start()
    wait_at_exit_for(thread, ANSWER)
    thread.join(seconds)
