"""The end of a process, in order, whatever threads are still at work.

Hazard: a thread that Python ends in the middle of torch's code takes the whole process down (SIGABRT).

Threads receive what others have sent also after the process group was destroyed, since a message that nobody receives
keeps its sender waiting. What does not come soon is abandoned: the connections of the group are closed, which ends all
waiting. So no thread is left after the end of a process, nor for long after that of a process group.
"""

import atexit
import logging
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary, WeakSet

from .._logging import log_rank

DRAIN_TIMEOUT_S = 10.0
"""Seconds that are left to all that is still received: until the other ranks have ended, as a rule."""
ABORT_TIMEOUT_S = 1.0
"""The same where an error ends the process, after it has hung up on everyone. Nobody waits for long then, but gloo may
lose sight of a message that was sent while its connection closed, and has whoever waits for it wait for the timeout."""
SETTLE_TIME_S = 0.1
"""Seconds in which torch's own threads let go of the tensors of the last collective, which takes the interpreter. They
live on where a group was destroyed and somebody still refers to it."""
DESTROYED_GROUP_TIMEOUT_S = 2.0
"""Seconds that are left to what is received in a process group that was destroyed: its other ranks may be slower."""
WATCHER_INTERVAL_S = 0.1
"""Seconds between two checks whether a process group was destroyed, while threads receive."""


class Abortable(Protocol):
    @property
    def is_destroyed(self) -> bool: ...

    def abort(self, error: BaseException) -> None: ...

    def close_connections(self, *, destroyed_only: bool) -> None: ...


class _ExitJoin(NamedTuple):
    timeout_s: float
    failure_detector: Abortable | None


class UnusedBuckets:
    """Count the gradient buckets that a rank has sent, as long as neither a step nor `zero_grad` follows.

    It outlives its optimizer: whoever forgets that one drops its gradients without a word, too.
    """

    def __init__(self, rank: int, failure_detector: Abortable) -> None:
        self.rank, self.failure_detector, self.count = rank, failure_detector, 0

    def add(self) -> None:
        self.count += 1
        _unused_buckets.add(self)

    def reset(self) -> None:
        self.count = 0
        _unused_buckets.discard(self)


_has_aborted = threading.Event()
is_shutting_down = threading.Event()
"""Others may have ended before, and nobody is left to be told of it."""
_threads_to_join: WeakKeyDictionary[threading.Thread, _ExitJoin] = WeakKeyDictionary()
_detectors_to_abort: WeakSet[Abortable] = WeakSet()
_unused_buckets: set[UnusedBuckets] = set()
_exit_lock = threading.Lock()
_watcher: threading.Thread | None = None


@cache
def install_exit_handlers() -> None:
    """From now on ranks talk to each other."""
    atexit.register(_shut_down)
    sys.excepthook = partial(_abort_on_uncaught_error, sys.excepthook)


def join_at_exit(
    thread: threading.Thread, timeout_s: float = DRAIN_TIMEOUT_S, failure_detector: Abortable | None = None
) -> None:
    """For so long at most. All are waited for at once.

    `line`: what the thread communicates through. It is hung up at exit when the time is over, and `ABANDONING` seconds
    after its process group was destroyed.
    """
    with _exit_lock:
        _threads_to_join[thread] = _ExitJoin(timeout_s, failure_detector)
        if failure_detector is not None:
            _start_watcher()


def abort_at_exit(failure_detector: Abortable) -> None:
    """Of a process that an error ends: others need not wait until it is gone, nor it for them."""
    _detectors_to_abort.add(failure_detector)


def _abort_on_uncaught_error(
    previous_hook: Callable[..., object], error_type: type[BaseException], error: BaseException, traceback: Any
) -> None:
    """When an exception ends the process, before Python waits for threads that save."""
    previous_hook(error_type, error, traceback)
    for line in list(_detectors_to_abort):
        with suppress(Exception):
            line.abort(error)
    _has_aborted.set()


def _start_watcher() -> None:
    """A thread that hangs up on process groups that were destroyed. It lives as long as others communicate."""
    global _watcher  # noqa: PLW0603
    if _watcher is None and not is_shutting_down.is_set():
        # Hazard: torch offers nothing that runs when a process group is destroyed, so the thread has to ask.
        thread = threading.Thread(target=_watch_destroyed_groups, name="zeroshard-watcher", daemon=True)
        thread.start()
        _watcher = thread


def _watch_destroyed_groups() -> None:
    global _watcher  # noqa: PLW0603
    since: WeakKeyDictionary[Abortable, float] = WeakKeyDictionary()
    while not is_shutting_down.wait(WATCHER_INTERVAL_S):
        with _exit_lock:
            lines = _active_detectors()
            if not lines:
                _watcher = None
                return
        now = time.monotonic()
        for line in lines:
            if line.is_destroyed and now - since.setdefault(line, now) >= DESTROYED_GROUP_TIMEOUT_S:
                with suppress(Exception):  # the other lines, and the end of the process, need this thread
                    line.close_connections(destroyed_only=True)
                _warn_of_unused_buckets([it for it in list(_unused_buckets) if it.failure_detector is line])


def _active_detectors() -> list[Abortable]:
    """Those that threads communicate through."""
    lines = {
        id(it.failure_detector): it.failure_detector
        for thread, it in list(_threads_to_join.items())
        if it.failure_detector is not None and thread.is_alive()
    }
    return list(lines.values())


def _warn_of_unused_buckets(unused_buckets: list[UnusedBuckets]) -> None:
    """In one line."""
    count = sum(it.count for it in unused_buckets)
    if count:
        text = "dropped %d gradient buckets: backward passes sent them, but neither step() nor zero_grad() followed"
        log_rank(logging.WARNING, unused_buckets[0].rank, text, count)
    for it in unused_buckets:
        it.reset()


def _shut_down() -> None:
    is_shutting_down.set()
    if _watcher is not None:
        _watcher.join()
    failed = _has_aborted.is_set()
    if not failed:
        _warn_of_unused_buckets(list(_unused_buckets))
    _join_threads(ABORT_TIMEOUT_S if failed else DRAIN_TIMEOUT_S)
    if not failed and (lines := _active_detectors()):
        for line in lines:
            line.close_connections(destroyed_only=False)
        _join_threads(ABORT_TIMEOUT_S)
    time.sleep(SETTLE_TIME_S)


def _join_threads(max_timeout_s: float) -> None:
    start = time.monotonic()
    for thread, (seconds, line) in list(_threads_to_join.items()):
        limit = DESTROYED_GROUP_TIMEOUT_S if line is not None and line.is_destroyed else seconds
        thread.join(max(0.0, start + min(limit, max_timeout_s) - time.monotonic()))
