"""The end of a process, in order, whatever threads are still at work.

Hazard: a thread that Python ends in the middle of torch's code takes the whole process down (SIGABRT).
"""

import atexit
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

RECEIVING = 10.0
"""Seconds that are left to all that is still received: until the other ranks have ended, as a rule."""
IN_VAIN = 1.0
"""The same where an error ends the process, after it has hung up on everyone. Nobody waits for long then, but gloo may
lose sight of a message that was sent while its connection closed, and has whoever waits for it wait for the timeout."""
LETTING_GO = 0.1
"""Seconds in which torch's own threads let go of the tensors of the last collective, which takes the interpreter. They
live on where a group was destroyed and somebody still refers to it."""


class Connected(Protocol):
    def give_up(self, error: BaseException) -> None: ...


_has_hung_up = threading.Event()
is_ending = threading.Event()
"""Others may have ended before, and nobody is left to be told of it."""
_threads: WeakKeyDictionary[threading.Thread, float] = WeakKeyDictionary()
_lines: WeakSet[Connected] = WeakSet()


@cache
def end_in_order() -> None:
    """From now on ranks talk to each other."""
    atexit.register(_let_threads_end)
    sys.excepthook = partial(_tell, sys.excepthook)


def wait_at_exit_for(thread: threading.Thread, seconds: float = RECEIVING) -> None:
    """For so long at most. All are waited for at once."""
    _threads[thread] = seconds


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


def _let_threads_end() -> None:
    is_ending.set()
    start, most = time.monotonic(), IN_VAIN if _has_hung_up.is_set() else RECEIVING
    for thread, seconds in list(_threads.items()):
        thread.join(max(0.0, start + min(seconds, most) - time.monotonic()))
    time.sleep(LETTING_GO)
