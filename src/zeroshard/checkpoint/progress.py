"""Progress display of saves and loads, argument checks, and errors that are the same on all ranks."""

import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from torch.nn import Module

from .._formatting import format_bytes, format_error
from .._logging import log_rank
from .._types import Rank
from ..comm.collectives import Comm
from ..comm.consensus import Prepared, prepare_all
from ..errors import CheckpointError, ConfigError, RankFailedError, RankLostError, RankMismatchError

ProgressFn = Callable[[int, int], object]
"""Called with the bytes done so far and the total known so far."""


class Progress:
    """Counts this rank's bytes and reports them to a callback or as a line on stderr."""

    def __init__(self, label: str, show: bool | ProgressFn | None, rank: int) -> None:
        """`show`: True for a line on rank 0; None for one if stderr is a terminal; or a callback for every rank."""
        self.show, self.done_bytes, self.total_bytes, self._rank = show, 0, 0, rank
        self._callback: ProgressFn | None = None
        if callable(show):
            self._callback = show
        elif rank == 0 and (sys.stderr.isatty() if show is None else show is True):
            self._callback = _ProgressLine(label, sys.stderr, initial_delay_s=1.0 if show is None else 0.0)

    def add_expected(self, nbytes: int) -> None:
        """Increase the total."""
        self.total_bytes += nbytes

    def advance(self, nbytes: int) -> None:
        # Headers of files are written, too, but are not part of the total.
        self._report_progress(min(self.done_bytes + nbytes, self.total_bytes))

    def finish(self) -> None:
        if self.done_bytes < self.total_bytes:
            self._report_progress(self.total_bytes)

    def _report_progress(self, done_bytes: int) -> None:
        self.done_bytes = done_bytes
        try:
            if self._callback is not None:
                self._callback(self.done_bytes, self.total_bytes)
        except Exception as error:  # a broken display must neither fail a save nor interrupt a load
            log_rank(logging.ERROR, self._rank, "the progress callback failed and is disabled", exc_info=error)
            self._callback = None


class _ProgressLine:
    """Overwrites one line on a terminal; writes a line every few seconds to a file.

    Nothing is shown if the work is done within `initial_delay_s`.
    """

    def __init__(self, label: str, stream: TextIO, initial_delay_s: float) -> None:
        self._label, self._stream = label, stream
        self._interval_s = 0.2 if stream.isatty() else 5.0
        self._line_end = "\r" if stream.isatty() else "\n"
        self._next_update_s = time.monotonic() + initial_delay_s
        self._is_shown = initial_delay_s == 0

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        now, is_done = time.monotonic(), done_bytes >= total_bytes
        if now < self._next_update_s and not (is_done and self._is_shown):
            return
        self._next_update_s, self._is_shown = now + self._interval_s, not is_done
        text = f"{self._label}: {100 * done_bytes // max(1, total_bytes)} % of {format_bytes(total_bytes)}"
        self._stream.write(text + ("\n" if is_done else self._line_end))
        self._stream.flush()


# ---------------------------------------------------------------------------------------------------------------------
# The same error on all ranks.


@contextmanager
def errors_as_checkpoint_error(path: object) -> Iterator[None]:
    """Turn unexpected errors into `CheckpointError`: all ranks catch the same class, and can fall back together."""
    try:
        yield
    except (CheckpointError, ConfigError, RankMismatchError, RankLostError):
        raise
    except RankFailedError as error:
        raise CheckpointError(str(error)) from error
    except OSError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except Exception as error:
        raise CheckpointError(f"{path}: {format_error(error)}") from error


def check_components(components: Mapping[str, Any], method: str, progress: object) -> None:
    """Raise `ConfigError` if an argument of `save` or `load` has the wrong type.

    Args:
        components: Model, optimizer and scheduler; each may be None.
        method: The method that optimizer and scheduler must have, "state_dict" or "load_state_dict".
        progress: The argument of that name.
    """
    model, optimizer, scheduler = components["model"], components["optimizer"], components["scheduler"]
    requirements = [
        (model, isinstance(model, Module), "model= to be a torch.nn.Module"),
        (
            optimizer,
            _has_attributes(optimizer, "param_groups", method),
            f"optimizer= to have param_groups and {method}()",
        ),
        (scheduler, _has_attributes(scheduler, method), f"scheduler= to have {method}()"),
        (progress, isinstance(progress, bool) or callable(progress), "progress= to be True, False, a function"),
    ]
    for value, is_valid, requirement in requirements:
        if value is not None and not is_valid:
            raise ConfigError(f"expected {requirement} or None, got {type(value).__name__}")


def _has_attributes(obj: object, *names: str) -> bool:
    return all(hasattr(obj, name) for name in names)


def run_on_rank0(comm: Comm, call: str, action: Callable[[], Path], must_match: Sequence[str] = ()) -> Path:
    """Run `action` on rank 0 and return its result on all ranks. Call on all ranks; all raise if it fails."""
    is_rank0 = comm.group.rank == 0
    path = prepare_all(comm, call, lambda: Prepared(action() if is_rank0 else Path(), must_match))
    if comm.group.size == 1:
        return path
    return Path(comm.broadcast_bytes(str(path).encode() if is_rank0 else None, Rank(0)).decode())
