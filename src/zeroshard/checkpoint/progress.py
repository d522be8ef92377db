"""How far a save or a load has come on this rank."""

import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from torch.nn import Module

from .._logging import log_rank
from .._types import MIB, Rank
from ..comm.collectives import Comm
from ..comm.consensus import Prepared, prepare_all
from ..errors import CheckpointError, ConfigError, RankFailedError, RankLostError, RankMismatchError

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


# ---------------------------------------------------------------------------------------------------------------------
# What goes wrong with a checkpoint is the same error on all ranks.


@contextmanager
def errors_as_checkpoint_error(path: object) -> Iterator[None]:
    """A job that catches it and falls back to something else must do so on all ranks."""
    try:
        yield
    except (CheckpointError, ConfigError, RankMismatchError, RankLostError):
        raise
    except RankFailedError as error:
        raise CheckpointError(str(error)) from error
    except OSError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except Exception as error:
        raise CheckpointError(f"{path}: {type(error).__name__}: {error}") from error


def check_components(components: Mapping[str, Any], method: str, progress: object) -> None:
    """Raise if a model, an optimizer, a scheduler or a display is none. `method`: of theirs that will be called."""
    model, optimizer, scheduler = components["model"], components["optimizer"], components["scheduler"]
    odd = [
        (model, isinstance(model, Module), "model= must be a torch.nn.Module"),
        (
            optimizer,
            _has_attributes(optimizer, "param_groups", method),
            f"optimizer= must have param_groups and {method}()",
        ),
        (scheduler, _has_attributes(scheduler, method), f"scheduler= must have {method}()"),
        (progress, isinstance(progress, bool) or callable(progress), "progress= must be True, False or a function"),
    ]
    for it, fits, text in odd:
        if it is not None and not fits:
            raise ConfigError(f"{text}, or be None; it is a {type(it).__name__}")


def _has_attributes(obj: object, *names: str) -> bool:
    return all(hasattr(obj, name) for name in names)


def run_on_rank0(comm: Comm, call: str, action: Callable[[], Path], must_match: Sequence[str] = ()) -> Path:
    """What rank 0 makes of it, on all ranks; what fails there is raised on all."""
    mine = comm.group.rank == 0
    made = prepare_all(comm, call, lambda: Prepared(action() if mine else Path(), must_match))
    if comm.group.size == 1:
        return made
    return Path(comm.broadcast_bytes(str(made).encode() if mine else None, Rank(0)).decode())
