"""The `zeroshard` logger, and warnings that point at the user's line.

INFO: what is sharded and how, once, on rank 0. DEBUG: buckets, consensus calls, saves and loads, on every rank. Every
record has a `rank` attribute.
"""

import logging
import os
import sys
import warnings
from pathlib import Path
from types import FrameType

import torch

_INTERNAL_PATHS = tuple(str(Path(file).parent) + os.sep for file in (__file__, torch.__file__))


class _LastResortHandler(logging.NullHandler):
    """Prints warnings and errors if the user has not configured logging: they may be the last output of a process."""

    def handle(self, record: logging.LogRecord) -> bool:
        is_unconfigured = not logging.root.handlers and _LOGGER.handlers == [self]
        if is_unconfigured and record.levelno >= logging.WARNING and logging.lastResort is not None:
            return bool(logging.lastResort.handle(record))
        return True


_LOGGER = logging.getLogger("zeroshard")
_LOGGER.addHandler(_LastResortHandler())


def log_rank(level: int, rank: int, text: str, *args: object, exc_info: BaseException | None = None) -> None:
    """Log `text % args` with the data-parallel `rank` of this process; `exc_info` adds a traceback."""
    if _LOGGER.isEnabledFor(level):
        _LOGGER.log(level, f"rank %d: {text}", rank, *args, extra={"rank": rank}, stacklevel=2, exc_info=exc_info)


def is_enabled_for(level: int) -> bool:
    """Return whether records of `level` are logged, to skip the work of building them."""
    return _LOGGER.isEnabledFor(level)


def warn_at_caller(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn with the innermost stack frame outside this package and torch as the location."""
    stacklevel, frame = 2, sys._getframe(1)
    while _is_internal_frame(frame) and frame.f_back is not None:
        stacklevel, frame = stacklevel + 1, frame.f_back
    warnings.warn(text, category, stacklevel=stacklevel)


def _is_internal_frame(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_INTERNAL_PATHS)
