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
from .._types import format_ranks
from .ending import join_at_exit

REPORT_TIMEOUT_S = 1.0
"""Seconds that others have to leave a word."""
DISCONNECTED_GRACE_S = 0.5
"""Seconds that those have whose connections are closed: who hangs up leaves a word before, but a network may fail."""
STORE_TIMEOUT_S = 1.0
"""Seconds that the store has to answer: whoever serves it may be the one that is gone."""
_UNRESPONSIVE_CAUSES = "stopped, stuck, cut off, or busy with something else"
_MISMATCHED_CALLS_HINT = (
    "But if ranks waited for different things, as said above, one of them has made a call alone, and that would end in "
    "the same way: a step or a save under `if rank == 0`, a forward pass with gradients of a model that has buffers."
)
_UNEVEN_LOOP_HINT = (
    "But if a rank's program had come to its end, its loop was shorter: all ranks make as many steps, or use Join."
)
_MAX_LINES_SHOWN = 8
_MAX_REPORT_CHARS = 600

Ranks = Sequence[int]


class PeerReports:
    """Those of all ranks of a group. Ranks are counted in it."""

    ADVICE = "Nothing more can be sent in this process group. Start again from the last checkpoint."

    def __init__(
        self, group: dist.ProcessGroup, activity: str, error: str, disconnected: Collection[int], *, is_root_cause: bool
    ) -> None:
        """`closed`: global ranks to which there is no connection any more. `own`: the error is this rank's own."""
        members = dist.get_process_group_ranks(group)
        self._rank, self._size = members.index(dist.get_rank()), len(members)
        self._disconnected = {members.index(rank) for rank in disconnected if rank in members}
        self._own_report, self._store_key = (
            f"{activity}: {error}"[:_MAX_REPORT_CHARS],
            f"zeroshard/lost/{group.group_name}",
        )
        self._reports: dict[int, str] = {self._rank: self._own_report}
        self._failed = {self._rank: error[:_MAX_REPORT_CHARS]} if is_root_cause else {}
        self._given_up_by: set[int] = set()
        """Ranks that have given up waiting for this one."""
        self._has_all_reports = False
        """The store has answered to the end: whoever was not heard has said nothing."""

    def publish(self) -> None:
        """For all others to read. Before connections are closed: then who is gone without one has none to leave."""
        word = {
            "word": self._own_report,
            "error": self._failed.get(self._rank, ""),
            "closed": sorted(self._disconnected),
        }
        _run_with_timeout(STORE_TIMEOUT_S, lambda: self._append_to_store(**word))

    def collect_error(self, no_loss_message: str, trace_path: str) -> RankLostError:
        """`all_there`: what to say if nobody is missing; `kept`: where torch's records are, if they were written."""
        _run_with_timeout(REPORT_TIMEOUT_S + STORE_TIMEOUT_S, self._poll_store)
        is_told, missing = self._has_all_reports, self._missing_ranks()
        gone = [rank for rank in missing if rank in self._disconnected]
        silent = [rank for rank in missing if rank not in self._disconnected]
        parts = _describe_failures(self._failed, self._size)
        if is_told:
            parts += [*_describe_losses(gone, silent, self._size), *self._describe_given_up_by()]
        else:
            parts += self._describe_unreachable_store(missing, gone)
            gone = silent = []
        told = [
            f"{'; '.join(parts)}." if parts else f"{no_loss_message}, and all ranks are still there.",
            *self._format_reports(),
        ]
        if trace_path:
            told.append(f"torch's flight recorder is in {trace_path}: see torchfrtrace.")
        told.append(
            f"{self.ADVICE} {_MISMATCHED_CALLS_HINT if not parts else _UNEVEN_LOOP_HINT if gone else ''}".rstrip()
        )
        return RankLostError("\n".join(told), tuple(sorted(self._failed)), tuple(gone), tuple(silent))

    def _append_to_store(self, **entry: Any) -> None:
        _get_store().append(self._store_key, json.dumps({"rank": self._rank, **entry}) + "\n")

    def _missing_ranks(self) -> list[int]:
        return sorted(set(range(self._size)) - dict(self._reports).keys())

    def _poll_store(self) -> None:
        """Until all who can have spoken, or for as long as is sensible."""
        start, pause = time.monotonic(), max(0.01, self._size / 500)
        while True:
            for line in _get_store().get(self._store_key).decode(errors="replace").splitlines():
                self._record(**json.loads(line))
            missing = self._missing_ranks()
            if not missing or time.monotonic() - start > (
                DISCONNECTED_GRACE_S if self._disconnected.issuperset(missing) else REPORT_TIMEOUT_S
            ):
                break
            time.sleep(pause)
        self._has_all_reports = True
        if missing:  # who was only stopped shall know when it wakes up
            self._append_to_store(missed=missing)

    def _record(self, rank: int, word: str = "", error: str = "", closed: Ranks = (), missed: Ranks = ()) -> None:
        self._reports |= {rank: word} if word else {}
        self._failed |= {rank: error} if error else {}
        self._disconnected.update(closed)
        self._given_up_by.update([rank] if self._rank in missed else [])

    def _describe_unreachable_store(self, missing: Ranks, disconnected: Ranks) -> list[str]:
        """A closed connection alone says little: ranks that live have hung up, too."""
        whose = (
            f"; closed are connections to {format_ranks(disconnected)}, which ended, or live and hung up"
            if disconnected
            else ""
        )
        where = "the store of the job does not answer (rank 0 serves it, unless torchrun or you do)"
        return [f"{where}, so nothing is known of {format_ranks(missing)} of {self._size}{whose}"] if missing else []

    def _describe_given_up_by(self) -> list[str]:
        by = sorted(self._given_up_by)
        return (
            [f"{format_ranks(by)} of {self._size} waited for this rank in vain: {_UNRESPONSIVE_CAUSES}"] if by else []
        )

    def _format_reports(self) -> list[str]:
        """What this rank says first, and what several say once."""
        by_word: dict[str, list[int]] = {self._own_report: []}
        for rank, word in sorted(dict(self._reports).items()):
            by_word.setdefault(word, []).append(rank)
        lines = [f"{format_ranks(ranks)}: {word}" for word, ranks in by_word.items()]
        more = len(lines) - _MAX_LINES_SHOWN
        return [*lines[:_MAX_LINES_SHOWN], *([f"... and {more} more"] if more > 0 else [])]


def _describe_failures(failed: dict[int, str], size: int) -> list[str]:
    return [f"rank {rank} of {size} failed with {error}" for rank, error in sorted(failed.items())[:_MAX_LINES_SHOWN]]


def _describe_losses(exited: Ranks, unresponsive: Ranks, size: int) -> list[str]:
    parts = []
    if exited:
        parts.append(f"{format_ranks(exited)} of {size} ended, or lost the network: no connection, and no word left")
    if unresponsive:
        parts.append(f"{format_ranks(unresponsive)} of {size} did not answer: {_UNRESPONSIVE_CAUSES}")
    return parts


def _get_store() -> Any:
    return _get_default_store()


def _run_with_timeout(timeout_s: float, action: Callable[[], object]) -> None:
    """Do it if the store answers in time; it can keep one waiting for ever, whatever its timeout is."""

    def attempt() -> None:
        with suppress(Exception):
            action()

    thread = threading.Thread(target=attempt, name="zeroshard-words", daemon=True)
    thread.start()
    join_at_exit(thread, STORE_TIMEOUT_S)
    thread.join(timeout_s)
