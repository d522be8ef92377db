"""Short tracebacks for errors that end the process.

An uncaught error prints the frames of the user, and of the optimizer or other code that raised it, without zeroshard's
in between. If another rank explains the same error, only the user's call is printed. Set `ZEROSHARD_FULL_TRACEBACK=1`
to see everything. Only what Python prints is shortened: code that catches an exception sees its whole traceback, and so
does an `excepthook` of the program.
"""

import contextlib
import linecache
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import TracebackType

import torch

from ._torch_compat import wrapped_excepthook
from .errors import RankFailedError, ZeroError

FULL_TRACEBACK_VARIABLE = "ZEROSHARD_FULL_TRACEBACK"
_PACKAGE, _TORCH = (f"{Path(str(file)).parent}{os.sep}" for file in (__file__, torch.__file__))
_EXPLAINING_RANK = "_zeroshard_explaining_rank"


def mark_explained_by(error: BaseException, rank: int) -> None:
    """Record that `rank` raises the same error in the same call."""
    vars(error)[_EXPLAINING_RANK] = rank


@cache
def install() -> None:
    """Make `sys.excepthook` print short tracebacks, unless the program has a hook of its own. Once per process."""
    previous_hook = sys.excepthook

    def hook(error_type: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if os.environ.get(FULL_TRACEBACK_VARIABLE) or not _is_plain_hook(previous_hook):
            previous_hook(error_type, error, traceback)
            return
        with _shortened(error, traceback) as short_traceback:
            previous_hook(error_type, error, short_traceback)

    sys.excepthook = hook


def _is_plain_hook(hook: Callable[..., object]) -> bool:
    """Whether the hook is Python's own, perhaps wrapped by torch to print the rank."""
    while (wrapped := wrapped_excepthook(hook)) is not None:
        hook = wrapped
    return hook is sys.__excepthook__


@contextmanager
def _shortened(error: BaseException, traceback: TracebackType | None) -> Iterator[TracebackType | None]:
    """Context manager that shortens the traceback of `error`, yields it, and restores `error` on exit."""
    attributes = ("__cause__", "__context__", "__suppress_context__", "__traceback__")
    original = {name: getattr(error, name) for name in attributes}
    notes = list(getattr(error, "__notes__", ()))
    with suppress(Exception):  # then it prints in full
        traceback = _shorten(error, traceback)
    try:
        yield traceback
    finally:
        with suppress(Exception):
            for name, value in original.items():  # setting the cause sets __suppress_context__, which comes later
                setattr(error, name, value)
            if hasattr(error, "__notes__"):
                error.__notes__[:] = notes


def _shorten(error: BaseException, traceback: TracebackType | None) -> TracebackType | None:
    """Return the traceback to print, and set it in `error`, which gets a note about what is left out.

    An error that looks like a bug of zeroshard keeps all frames.
    """
    frames: list[TracebackType] = []
    rest = traceback
    while rest is not None:
        frames.append(rest)
        rest = rest.tb_next
    if not any(map(_is_internal, frames)):
        return traceback
    if _is_internal(frames[-1]):
        if not _is_raised_on_purpose(error, frames[-1]):
            return traceback
        while frames and (_is_internal(frames[-1]) or _file(frames[-1]).startswith((_TORCH, contextlib.__file__))):
            frames.pop()
    frames = [frame for caller, frame in pairwise([None, *frames]) if frame and not _is_hidden(frame, caller)]
    explaining_rank = vars(error).get(_EXPLAINING_RANK)
    note = f"{FULL_TRACEBACK_VARIABLE}=1 shows the whole traceback."
    if explaining_rank is not None:
        frames, note = frames[-1:], f"Rank {explaining_rank} has the same error."
    elif isinstance(error, RankFailedError) or isinstance(error.__cause__, RankFailedError):
        frames, note = frames[-1:], ""
    if note and hasattr(error, "add_note"):  # Python 3.11
        error.add_note(note)
    if isinstance(error, ZeroError):  # its message includes the cause
        context = _context_to_print(error)
        error.__cause__ = None
        error.__context__, error.__suppress_context__ = context, context is None
    error.__traceback__ = _join(frames)
    return error.__traceback__


def _context_to_print(error: BaseException) -> BaseException | None:
    """Return the exception that the user's code was handling when zeroshard raised `error`, if any."""
    context = error.__context__
    while context is not None and (context is error.__cause__ or _was_raised_inside(context)):
        context = context.__context__
    return context


def _was_raised_inside(error: BaseException) -> bool:
    """Whether zeroshard has raised and caught this exception itself."""
    traceback = error.__traceback__
    return traceback is not None and _is_internal(traceback)


def _is_raised_on_purpose(error: BaseException, last_frame: TracebackType) -> bool:
    """Whether a `raise` statement has raised the error, which a user can therefore understand without frames."""
    line = linecache.getline(_file(last_frame), last_frame.tb_lineno).strip()
    return isinstance(error, ZeroError) or line.startswith("raise ")


def _file(frame: TracebackType) -> str:
    return frame.tb_frame.f_code.co_filename


def _is_internal(frame: TracebackType) -> bool:
    is_generated = _file(frame).startswith("<")  # such as the `__init__` of a dataclass
    module = str(frame.tb_frame.f_globals.get("__name__")) if is_generated else ""
    return _file(frame).startswith(_PACKAGE) or module.startswith(f"{__package__}.")


def _is_hidden(frame: TracebackType, caller: TracebackType | None) -> bool:
    """Whether a frame is zeroshard's, or belongs to one of its context managers."""
    is_context_manager = caller is not None and _is_internal(caller) and _file(frame) == contextlib.__file__
    return is_context_manager or _is_internal(frame)


def _join(frames: Sequence[TracebackType]) -> TracebackType | None:
    joined: TracebackType | None = None
    for frame in reversed(frames):
        joined = TracebackType(joined, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return joined
