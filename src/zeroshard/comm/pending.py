"""Work in flight."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch


class Waitable(Protocol):
    def wait(self) -> Any: ...


class Pending:
    """A message under way, and the tensor it reads or writes.

    Hazard: the tensor must stay alive, and its memory untouched, until `wait` has returned.
    """

    def __init__(self, work: Waitable | None, tensor: torch.Tensor) -> None:
        self._work = work
        self._tensor: torch.Tensor | None = tensor

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
        self._work = self._tensor = None


class Together:
    """Several works as one."""

    def __init__(self, works: Sequence[Waitable]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


class Watched:
    """Works that do not tell when they are done, and a thread that waits for them and tells."""

    def __init__(self, works: Sequence[Waitable]) -> None:
        self._works = Together(works)
        self._over = threading.Event()
        self._failure: Exception | None = None

    def done(self, within: float) -> bool:
        """Whether they are, after so many seconds at most."""
        return self._over.wait(within)

    def wait(self) -> None:
        self._over.wait()
        if self._failure is not None:
            raise self._failure

    def see_to_the_end(self) -> None:
        try:
            self._works.wait()
        except Exception as error:
            self._failure = error
        self._over.set()


class Watcher:
    """A thread that lives as long as there is something to wait for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: deque[Watched] = deque()
        self._runs = False

    def watch(self, works: Sequence[Waitable]) -> Watched:
        watched = Watched(works)
        with self._lock:
            self._queue.append(watched)
            if not self._runs:
                self._runs = True
                threading.Thread(target=self._run, name="zeroshard-watcher", daemon=True).start()
        return watched

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._runs = False
                    return
                watched = self._queue.popleft()
            watched.see_to_the_end()


class Window:
    """At most `limit` messages under way; what comes after a message runs once it has arrived."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._queue: deque[tuple[Pending, Callable[[], object] | None]] = deque()

    def make_room(self) -> None:
        """Wait until one more may start."""
        while len(self._queue) >= self._limit:
            self._finish_oldest()

    def add(self, pending: Pending, then: Callable[[], object] | None = None) -> None:
        self.make_room()
        self._queue.append((pending, then))

    def drain(self) -> None:
        while self._queue:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        pending, then = self._queue.popleft()
        pending.wait()
        if then is not None:
            then()
