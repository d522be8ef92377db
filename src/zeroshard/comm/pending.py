"""Work in flight."""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch


class Waitable(Protocol):
    def wait(self) -> Any: ...


class Pending:
    """A message under way, and the tensor it reads or writes.

    Hazard: the tensor must stay alive, and its memory untouched, until `wait` has returned.
    """

    def __init__(self, work: Waitable | None, tensor: torch.Tensor, line: AbstractContextManager[None]) -> None:
        self._work, self._line = work, line
        self._tensor: torch.Tensor | None = tensor

    def wait(self) -> None:
        if self._work is not None:
            with self._line:
                self._work.wait()
        self._work = self._tensor = None


class Together:
    """Several works as one. Also where one fails, all are over before that is raised: they use memory until then."""

    def __init__(self, works: Sequence[Waitable]) -> None:
        self._works = works

    def wait(self) -> None:
        failure: Exception | None = None
        for work in self._works:
            try:
                work.wait()
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure


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
