"""Warnings that point at the user's own line, and the log.

The logger is `zeroshard`. INFO: what was sharded how, once, on rank 0. DEBUG: buckets, agreements, saves and loads, on
every rank. Every record has its `rank`.
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
    """Says nothing but warnings and errors, and these only where nobody has set up logging: they may be the last thing
    that a process says."""

    def handle(self, record: logging.LogRecord) -> bool:
        unheard = not logging.root.handlers and _LOGGER.handlers == [self]
        if unheard and record.levelno >= logging.WARNING and logging.lastResort is not None:
            return bool(logging.lastResort.handle(record))
        return True


_LOGGER = logging.getLogger("zeroshard")
_LOGGER.addHandler(_LastResortHandler())


def log_rank(level: int, rank: int, text: str, *args: object, exc_info: BaseException | None = None) -> None:
    """`rank`: that of this process among all that train. `failure`: to be shown with its trace."""
    if _LOGGER.isEnabledFor(level):
        _LOGGER.log(level, f"rank %d: {text}", rank, *args, extra={"rank": rank}, stacklevel=2, exc_info=exc_info)


def is_enabled_for(level: int) -> bool:
    """Whether somebody listens: else what it takes to say something can be spared."""
    return _LOGGER.isEnabledFor(level)


def warn_at_caller(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn of the nearest line that is neither in this package nor in torch, however deep the call is."""
    level, frame = 2, sys._getframe(1)
    while _is_internal_frame(frame) and frame.f_back is not None:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)


def _is_internal_frame(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_INTERNAL_PATHS)
