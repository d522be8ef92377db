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
from weakref import WeakSet

RECEIVING = 10.0
"""Seconds that are left to what is still received: until the other ranks have ended, as a rule."""
LETTING_GO = 0.1
"""Seconds in which torch's own threads let go of the tensors of the last collective, which takes the interpreter. They
live on where a group was destroyed and somebody still refers to it."""


class Connected(Protocol):
    def give_up(self, error: BaseException) -> None: ...


is_ending = threading.Event()
"""Others may have ended before, and nobody is left to be told of it."""
_threads: WeakSet[threading.Thread] = WeakSet()
_lines: WeakSet[Connected] = WeakSet()


@cache
def end_in_order() -> None:
    """From now on ranks talk to each other."""
    atexit.register(_let_threads_end)
    sys.excepthook = partial(_tell, sys.excepthook)


def wait_at_exit_for(thread: threading.Thread) -> None:
    _threads.add(thread)


def tell_at_exit(line: Connected) -> None:
    """Of a process that an error ends: others need not wait until it is gone, nor it for them."""
    _lines.add(line)


def _tell(then: Callable[..., object], kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """When an exception ends the process, before Python waits for threads that save."""
    then(kind, error, trace)
    for line in list(_lines):
        with suppress(Exception):
            line.give_up(error)


def _let_threads_end() -> None:
    is_ending.set()
    for thread in list(_threads):
        if thread.is_alive():
            thread.join(RECEIVING)
    time.sleep(LETTING_GO)
