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

from ..notices import log

RECEIVING = 10.0
"""Seconds that are left to all that is still received: until the other ranks have ended, as a rule."""
IN_VAIN = 1.0
"""The same where an error ends the process, after it has hung up on everyone. Nobody waits for long then, but gloo may
lose sight of a message that was sent while its connection closed, and has whoever waits for it wait for the timeout."""
LETTING_GO = 0.1
"""Seconds in which torch's own threads let go of the tensors of the last collective, which takes the interpreter. They
live on where a group was destroyed and somebody still refers to it."""
ABANDONING = 2.0
"""Seconds that are left to what is received in a process group that was destroyed: its other ranks may be slower."""
CHECK_INTERVAL = 0.1
"""Seconds between two checks whether a process group was destroyed, while threads receive."""


class Connected(Protocol):
    @property
    def is_destroyed(self) -> bool: ...

    def give_up(self, error: BaseException) -> None: ...

    def hang_up(self, *, destroyed_only: bool) -> None: ...


class _Waiting(NamedTuple):
    seconds: float
    line: Connected | None


class UnusedBuckets:
    """Count the gradient buckets that a rank has sent, as long as neither a step nor `zero_grad` follows.

    It outlives its optimizer: whoever forgets that one drops its gradients without a word, too.
    """

    def __init__(self, rank: int, line: Connected) -> None:
        self.rank, self.line, self.count = rank, line, 0

    def add(self) -> None:
        self.count += 1
        _unused.add(self)

    def reset(self) -> None:
        self.count = 0
        _unused.discard(self)


_has_hung_up = threading.Event()
is_ending = threading.Event()
"""Others may have ended before, and nobody is left to be told of it."""
_threads: WeakKeyDictionary[threading.Thread, _Waiting] = WeakKeyDictionary()
_lines: WeakSet[Connected] = WeakSet()
_unused: set[UnusedBuckets] = set()
_lock = threading.Lock()
_watcher: threading.Thread | None = None


@cache
def end_in_order() -> None:
    """From now on ranks talk to each other."""
    atexit.register(_let_threads_end)
    sys.excepthook = partial(_tell, sys.excepthook)


def wait_at_exit_for(thread: threading.Thread, seconds: float = RECEIVING, line: Connected | None = None) -> None:
    """For so long at most. All are waited for at once.

    `line`: what the thread communicates through. It is hung up at exit when the time is over, and `ABANDONING` seconds
    after its process group was destroyed.
    """
    with _lock:
        _threads[thread] = _Waiting(seconds, line)
        if line is not None:
            _start_watcher()


def tell_at_exit(line: Connected) -> None:
    """Of a process that an error ends: others need not wait until it is gone, nor it for them."""
    _lines.add(line)


def _tell(then: Callable[..., object], kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """When an exception ends the process, before Python waits for threads that save."""
    then(kind, error, trace)
    for line in list(_lines):
        with suppress(Exception):
            line.give_up(error)
    _has_hung_up.set()


def _start_watcher() -> None:
    """A thread that hangs up on process groups that were destroyed. It lives as long as others communicate."""
    global _watcher  # noqa: PLW0603
    if _watcher is None and not is_ending.is_set():
        # Hazard: torch offers nothing that runs when a process group is destroyed, so the thread has to ask.
        thread = threading.Thread(target=_watch, name="zeroshard-watcher", daemon=True)
        thread.start()
        _watcher = thread


def _watch() -> None:
    global _watcher  # noqa: PLW0603
    since: WeakKeyDictionary[Connected, float] = WeakKeyDictionary()
    while not is_ending.wait(CHECK_INTERVAL):
        with _lock:
            lines = _active_lines()
            if not lines:
                _watcher = None
                return
        now = time.monotonic()
        for line in lines:
            if line.is_destroyed and now - since.setdefault(line, now) >= ABANDONING:
                with suppress(Exception):  # the other lines, and the end of the process, need this thread
                    line.hang_up(destroyed_only=True)
                _report_unused([it for it in list(_unused) if it.line is line])


def _active_lines() -> list[Connected]:
    """Those that threads communicate through."""
    lines = {id(it.line): it.line for thread, it in list(_threads.items()) if it.line is not None and thread.is_alive()}
    return list(lines.values())


def _report_unused(unused: list[UnusedBuckets]) -> None:
    """In one line."""
    count = sum(it.count for it in unused)
    if count:
        text = "dropped %d gradient buckets: backward passes sent them, but neither step() nor zero_grad() followed"
        log(logging.WARNING, unused[0].rank, text, count)
    for it in unused:
        it.reset()


def _let_threads_end() -> None:
    is_ending.set()
    if _watcher is not None:
        _watcher.join()
    failed = _has_hung_up.is_set()
    if not failed:
        _report_unused(list(_unused))
    _join_threads(IN_VAIN if failed else RECEIVING)
    if not failed and (lines := _active_lines()):
        for line in lines:
            line.hang_up(destroyed_only=False)
        _join_threads(IN_VAIN)
    time.sleep(LETTING_GO)


def _join_threads(most: float) -> None:
    start = time.monotonic()
    for thread, (seconds, line) in list(_threads.items()):
        limit = ABANDONING if line is not None and line.is_destroyed else seconds
        thread.join(max(0.0, start + min(limit, most) - time.monotonic()))
