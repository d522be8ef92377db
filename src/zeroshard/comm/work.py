"""Asynchronous communication in flight."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch


class Waitable(Protocol):
    def wait(self) -> Any: ...


_POLL_SECONDS = 0.001


def wait_until_completed(work: Any, timeout_s: float) -> bool:
    """Return whether a `torch.distributed.Work` has completed, after `timeout_s` at most. It may have failed."""
    deadline = time.monotonic() + timeout_s
    while not work.is_completed():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


class PendingWork:
    """An asynchronous operation, and the tensor it reads or writes.

    Hazard: the tensor must stay alive, and its memory untouched, until `wait` has returned.
    """

    def __init__(
        self, work: Waitable | None, tensor: torch.Tensor, failure_detector: AbstractContextManager[None]
    ) -> None:
        self._work, self._failure_detector = work, failure_detector
        self._tensor: torch.Tensor | None = tensor

    def wait(self) -> None:
        if self._work is not None:
            with self._failure_detector:
                self._work.wait()
        self._work = self._tensor = None


class WorkList:
    """Several works as one.

    If one fails, `wait` still waits for all others before it raises: they use their memory until then.
    """

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


class InFlightWindow:
    """At most `limit` operations in flight. A callback, if any, runs when its operation is waited for, in order."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._queue: deque[tuple[PendingWork, Callable[[], object] | None]] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def wait_for_capacity(self) -> None:
        """Wait until one more operation may start."""
        while len(self._queue) >= self._limit:
            self._finish_oldest()

    def add(self, work: PendingWork, on_done: Callable[[], object] | None = None) -> None:
        self.wait_for_capacity()
        self._queue.append((work, on_done))

    def drain(self) -> None:
        while self._queue:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        work, on_done = self._queue.popleft()
        work.wait()
        if on_done is not None:
            on_done()
