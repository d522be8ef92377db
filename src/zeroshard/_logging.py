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
from typing import Any

import torch
import torch.distributed as dist

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


def warn_at_caller(text: str, category: type[Warning] = UserWarning, *, on_all_ranks: bool = False) -> None:
    """Warn with the innermost stack frame outside this package and torch as the location.

    The warning is displayed on rank 0 only, unless it may concern this rank alone (`on_all_ranks`). Filters apply on
    every rank, so that ranks which turn warnings into errors all raise.
    """
    stacklevel, frame = 2, sys._getframe(1)
    while _is_internal_frame(frame) and frame.f_back is not None:
        stacklevel, frame = stacklevel + 1, frame.f_back
    if on_all_ranks or _is_first_rank() or not _are_warnings_displayed():
        warnings.warn(text, category, stacklevel=stacklevel)
        return
    show, warnings.showwarning = warnings.showwarning, _display_nothing
    try:
        warnings.warn(text, category, stacklevel=stacklevel)
    finally:
        warnings.showwarning = show


_is_first_in_group = False


def show_warnings() -> None:
    """Display warnings in this process: it is the first rank of a sharded optimizer, perhaps not of the job."""
    global _is_first_in_group  # noqa: PLW0603
    _is_first_in_group = True


def _is_first_rank() -> bool:
    return _is_first_in_group or not dist.is_available() or not dist.is_initialized() or dist.get_rank() == 0


def _are_warnings_displayed() -> bool:
    """Whether Python prints warnings, rather than a program or a test recording them."""
    functions: list[Any] = [warnings.showwarning, getattr(warnings, "_showwarnmsg_impl", warnings.showwarning)]
    return all(str(getattr(function, "__module__", "")).endswith("warnings") for function in functions)


def _display_nothing(*_: Any, **__: Any) -> None:
    pass


def _is_internal_frame(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_INTERNAL_PATHS)
