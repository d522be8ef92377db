"""Nothing takes for ever: who has waited too long says where, and ends the process."""

import os
import sys
import threading
from types import TracebackType


class Watchdog:
    """As a context it ends the process when one thing takes longer than `seconds`.

    Hazard: a rank that waits for a GPU cannot be interrupted in any other way.
    """

    def __init__(self, timeout_s: float, process_name: str) -> None:
        self._timeout_s, self._process_name = timeout_s, process_name
        self._timer: threading.Timer | None = None

    def set_phase(self, phase: str) -> None:
        """Something new begins."""
        self._cancel_timer()
        self._timer = threading.Timer(self._timeout_s, self._abort, (phase,))
        self._timer.daemon = True
        self._timer.start()

    def __enter__(self) -> "Watchdog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cancel_timer()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _abort(self, phase: str) -> None:
        sys.stderr.write(
            f"zeroshard doctor: {self._process_name} gives up {phase}, after {self._timeout_s:g} seconds\n"
        )
        sys.stderr.flush()
        os._exit(1)
