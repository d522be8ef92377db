"""How far a save or a load has come on this rank."""

import logging
import sys
import time
from collections.abc import Callable
from typing import TextIO

from .._logging import log_rank
from .._types import MIB

ProgressFn = Callable[[int, int], object]
"""Called with the bytes that are done and those that there are in all."""


class Progress:
    """Counts bytes, and tells whoever wants to know."""

    def __init__(self, label: str, show: bool | ProgressFn | None, rank: int) -> None:
        """`show`: None for a line on rank 0 if somebody sits at the terminal."""
        self.show, self.done_bytes, self.total_bytes, self._rank = show, 0, 0, rank
        self._callback: ProgressFn | None = None
        if callable(show):
            self._callback = show
        elif rank == 0 and (sys.stderr.isatty() if show is None else show is True):
            self._callback = _ProgressLine(label, sys.stderr, initial_delay_s=1.0 if show is None else 0.0)

    def add_expected(self, nbytes: int) -> None:
        """There is so much more to do."""
        self.total_bytes += nbytes

    def advance(self, nbytes: int) -> None:
        self._report_progress(
            min(self.done_bytes + nbytes, self.total_bytes)
        )  # what surrounds the data in files is not expected

    def finish(self) -> None:
        if self.done_bytes < self.total_bytes:
            self._report_progress(self.total_bytes)

    def _report_progress(self, done_bytes: int) -> None:
        self.done_bytes = done_bytes
        try:
            if self._callback is not None:
                self._callback(self.done_bytes, self.total_bytes)
        except Exception as failure:  # a checkpoint must not fail, nor be loaded in parts, for the sake of a display
            text = "what shall show the progress has failed, and is not called any more"
            log_rank(logging.ERROR, self._rank, text, exc_info=failure)
            self._callback = None


class _ProgressLine:
    """Written over and over on a terminal, and now and then to a file."""

    def __init__(self, label: str, stream: TextIO, initial_delay_s: float) -> None:
        """`patience`: seconds; what is done sooner needs no telling."""
        self._label, self._stream = label, stream
        self._interval_s = 0.2 if stream.isatty() else 5.0
        self._line_end = "\r" if stream.isatty() else "\n"
        self._next_update_s = time.monotonic() + initial_delay_s
        self._is_shown = initial_delay_s == 0

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        now, over = time.monotonic(), done_bytes >= total_bytes
        if now < self._next_update_s and not (over and self._is_shown):
            return
        self._next_update_s, self._is_shown = now + self._interval_s, not over
        text = f"{self._label}: {100 * done_bytes // max(1, total_bytes)} % of {total_bytes / MIB:.0f} MiB"
        self._stream.write(text + ("\n" if over else self._line_end))
        self._stream.flush()
