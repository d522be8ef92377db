"""Nothing takes for ever: who has waited too long says where, and ends the process."""

import os
import sys
import threading
from types import TracebackType


class Watch:
    """As a context it ends the process when one thing takes longer than `seconds`.

    Hazard: a rank that waits for a GPU cannot be interrupted in any other way.
    """

    def __init__(self, seconds: float, who: str) -> None:
        self._seconds, self._who = seconds, who
        self._timer: threading.Timer | None = None

    def at(self, place: str) -> None:
        """Something new begins."""
        self._stop()
        self._timer = threading.Timer(self._seconds, self._give_up, (place,))
        self._timer.daemon = True
        self._timer.start()

    def __enter__(self) -> "Watch":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _give_up(self, place: str) -> None:
        sys.stderr.write(f"zeroshard doctor: {self._who} gives up {place}, after {self._seconds:g} seconds\n")
        sys.stderr.flush()
        os._exit(1)
