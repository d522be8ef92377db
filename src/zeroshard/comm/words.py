"""What ranks have to say when they have lost each other, through the store in which they once found each other."""

import json
import threading
import time
from collections.abc import Callable, Collection
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
_SHOWN = 8
_LONGEST = 400


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

    def leave(self) -> None:
        """For all others to read. Before connections are closed: then who is gone without one has none to leave."""
        entry = json.dumps([self._me, self._word, self._failed.get(self._me), sorted(self._closed)]) + "\n"
        _in_time(ANSWER, lambda: _store().append(self._key, entry))

    def report(self, all_there: str, kept: str) -> RankLostError:
        """`all_there`: what to say if nobody is missing; `kept`: where torch's records are, if they were written."""
        _in_time(PATIENCE + ANSWER, self._listen)
        missing = [rank for rank in range(self._size) if rank not in self._heard]
        gone = [rank for rank in missing if rank in self._closed]
        silent = [rank for rank in missing if rank not in self._closed]
        first = _sentence(self._failed, gone, silent, self._size) or f"{all_there}, and all ranks are still there."
        told = [first, *self._told()]
        if kept:
            told.append(f"torch's flight recorder is in {kept}: see torchfrtrace.")
        return RankLostError("\n".join([*told, self.ADVICE]), tuple(sorted(self._failed)), tuple(gone), tuple(silent))

    def _listen(self) -> None:
        """Until all who can have spoken, or for as long as is sensible."""
        start, pause, everyone = time.monotonic(), max(0.01, self._size / 500), set(range(self._size))
        while True:
            for line in _store().get(self._key).decode(errors="replace").splitlines():
                rank, word, error, closed = json.loads(line)
                self._heard[rank] = word
                self._failed |= {rank: error} if error else {}
                self._closed.update(closed)
            missing = everyone - self._heard.keys()
            if not missing or time.monotonic() - start > (GRACE if missing <= self._closed else PATIENCE):
                return
            time.sleep(pause)

    def _told(self) -> list[str]:
        """What this rank says first, and what several say once."""
        by_word: dict[str, list[int]] = {self._word: []}
        for rank, word in sorted(self._heard.items()):
            by_word.setdefault(word, []).append(rank)
        lines = [f"{name_ranks(ranks)}: {word}" for word, ranks in by_word.items()]
        more = len(lines) - _SHOWN
        return [*lines[:_SHOWN], *([f"... and {more} more"] if more > 0 else [])]


def _sentence(failed: dict[int, str], gone: list[int], silent: list[int], size: int) -> str:
    parts = [f"rank {rank} of {size} failed with {error}" for rank, error in sorted(failed.items())[:_SHOWN]]
    if gone:
        parts.append(f"{name_ranks(gone)} of {size} ended, or lost the network: no connection, and no word left")
    if silent:
        parts.append(
            f"{name_ranks(silent)} of {size} did not answer: stopped, stuck, cut off, or busy with something else"
        )
    return "; ".join(parts) + "." * bool(parts)


def _store() -> Any:
    return _get_default_store()


def _in_time(seconds: float, action: Callable[[], object]) -> None:
    """Do it if the store answers in time; it can keep one waiting for ever, whatever its timeout is."""

    def attempt() -> None:
        with suppress(Exception):
            action()

    thread = threading.Thread(target=attempt, name="zeroshard-words", daemon=True)
    thread.start()
    wait_at_exit_for(thread)
    thread.join(seconds)
