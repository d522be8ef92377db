"""How far a save or a load has come on this rank."""

import logging
import sys
import time
from collections.abc import Callable
from typing import TextIO

from ..notices import log
from ..units import MIB

Report = Callable[[int, int], object]
"""Called with the bytes that are done and those that there are in all."""


class Progress:
    """Counts bytes, and tells whoever wants to know."""

    def __init__(self, label: str, show: bool | Report | None, rank: int) -> None:
        """`show`: None for a line on rank 0 if somebody sits at the terminal."""
        self.show, self.done, self.total, self._rank = show, 0, 0, rank
        self._report: Report | None = None
        if callable(show):
            self._report = show
        elif rank == 0 and (sys.stderr.isatty() if show is None else show is True):
            self._report = _Line(label, sys.stderr, patience=1.0 if show is None else 0.0)

    def expect(self, nbytes: int) -> None:
        """There is so much more to do."""
        self.total += nbytes

    def add(self, nbytes: int) -> None:
        self._tell(min(self.done + nbytes, self.total))  # what surrounds the data in files is not expected

    def finish(self) -> None:
        if self.done < self.total:
            self._tell(self.total)

    def _tell(self, done: int) -> None:
        self.done = done
        try:
            if self._report is not None:
                self._report(self.done, self.total)
        except Exception as failure:  # a checkpoint must not fail, nor be loaded in parts, for the sake of a display
            text = "what shall show the progress has failed, and is not called any more"
            log(logging.ERROR, self._rank, text, failure=failure)
            self._report = None


class _Line:
    """Written over and over on a terminal, and now and then to a file."""

    def __init__(self, label: str, stream: TextIO, patience: float) -> None:
        """`patience`: seconds; what is done sooner needs no telling."""
        self._label, self._stream = label, stream
        self._every = 0.2 if stream.isatty() else 5.0
        self._end = "\r" if stream.isatty() else "\n"
        self._next = time.monotonic() + patience
        self._told = patience == 0

    def __call__(self, done: int, total: int) -> None:
        now, over = time.monotonic(), done >= total
        if now < self._next and not (over and self._told):
            return
        self._next, self._told = now + self._every, not over
        text = f"{self._label}: {100 * done // max(1, total)} % of {total / MIB:.0f} MiB"
        self._stream.write(text + ("\n" if over else self._end))
        self._stream.flush()
