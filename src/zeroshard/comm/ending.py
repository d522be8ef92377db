"""The end of a process, in order, whatever threads are still at work.

Hazard: a thread that Python ends in the middle of torch's code takes the whole process down (SIGABRT).
"""

import atexit
import threading
import time
from functools import cache
from weakref import WeakSet

RECEIVING = 10.0
"""Seconds that are left to what is still received: until the other ranks have ended, as a rule."""
LETTING_GO = 0.1
"""Seconds in which torch's own threads let go of the tensors of the last collective, which takes the interpreter. They
live on where a group was destroyed and somebody still refers to it."""

_threads: WeakSet[threading.Thread] = WeakSet()


@cache
def end_in_order() -> None:
    """From now on ranks talk to each other."""
    atexit.register(_let_threads_end)


def wait_at_exit_for(thread: threading.Thread) -> None:
    _threads.add(thread)


def _let_threads_end() -> None:
    for thread in list(_threads):
        thread.join(RECEIVING)
    time.sleep(LETTING_GO)
