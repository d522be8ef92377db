"""A pool of worker processes that are started once and play the ranks of many runs."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

from tests.support.handle import WorkerHandle
from tests.support.protocol import Job, Outcome, RankContext
from tests.support.report import raise_unless_passed
from tests.support.store import open_store

DEFAULT_TIMEOUT = 60.0
START_TIMEOUT = 60.0
GRACE_AFTER_FAILURE = 3.0
NO_ARGUMENTS: Mapping[str, Any] = MappingProxyType({})


class RankPool:
    """Runs functions on real gloo ranks; a worker that took part in a failed run is replaced."""

    def __init__(self) -> None:
        self._store = open_store()
        self._stacks = TemporaryDirectory()
        self._workers: list[WorkerHandle] = []
        self._serial = count()

    def run(
        self,
        body: Callable[..., Any],
        world_size: int,
        timeout: float = DEFAULT_TIMEOUT,
        arguments: Mapping[str, Any] = NO_ARGUMENTS,
    ) -> list[Any]:
        """Call `body(context, **arguments)` on every rank at once; what they return, by rank.

        Raises `RankFailures`, or skips the test where a rank skipped.
        """
        jobs = self._jobs(body, world_size, timeout, arguments)
        workers = self._claim(world_size)
        with self._discarded_on_error(workers):
            _send(workers, jobs)
            outcomes = _collect(workers, timeout)
            _send(workers, [None] * world_size)
            _collect(workers, timeout)
        return [pickle.loads(outcomes[rank].value) for rank in range(world_size)]

    def close(self) -> None:
        self._discard(list(self._workers))
        self._stacks.cleanup()

    def _jobs(
        self, body: Callable[..., Any], world_size: int, timeout: float, arguments: Mapping[str, Any]
    ) -> list[Job]:
        run, payload = f"run{next(self._serial)}", pickle.dumps(dict(arguments))
        return [
            Job(RankContext(rank, world_size), run, body.__module__, body.__qualname__, payload, 2 * timeout)
            for rank in range(world_size)
        ]

    def _claim(self, size: int) -> list[WorkerHandle]:
        self._discard([worker for worker in self._workers if not worker.is_alive()])
        fresh = [self._start() for _ in range(size - len(self._workers))]
        with self._discarded_on_error(fresh):
            _collect(fresh, START_TIMEOUT)
        return self._workers[:size]

    def _start(self) -> WorkerHandle:
        worker = WorkerHandle(self._store.port, Path(self._stacks.name, f"worker{next(self._serial)}"))
        self._workers.append(worker)
        return worker

    @contextmanager
    def _discarded_on_error(self, workers: Sequence[WorkerHandle]) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._discard(workers)
            raise

    def _discard(self, workers: Sequence[WorkerHandle]) -> None:
        for worker in workers:
            self._workers.remove(worker)
            worker.close()


def _send(workers: Sequence[WorkerHandle], requests: Sequence[Job | None]) -> None:
    for worker, request in zip(workers, requests, strict=True):
        worker.connection.send(request)


def _collect(workers: Sequence[WorkerHandle], timeout: float) -> dict[int, Outcome]:
    """The outcome of every rank, in the order of arrival; raises unless all of them passed."""
    outcomes: dict[int, Outcome] = {}
    pending = {worker.connection: rank for rank, worker in enumerate(workers)}
    deadline = time.monotonic() + timeout
    while pending and (ready := wait(pending, max(0.0, deadline - time.monotonic()))):
        for rank in [rank for connection, rank in pending.items() if connection in ready]:
            outcomes[rank] = workers[rank].receive()
            del pending[workers[rank].connection]
            if outcomes[rank].status != "passed":
                deadline = min(deadline, time.monotonic() + GRACE_AFTER_FAILURE)
    outcomes |= _autopsies({rank: workers[rank] for rank in pending.values()}, _why_stuck(outcomes, timeout))
    raise_unless_passed(outcomes)
    return outcomes


def _why_stuck(outcomes: Mapping[int, Outcome], timeout: float) -> str:
    for rank, outcome in outcomes.items():
        if outcome.status != "passed":
            return f"did not finish within {GRACE_AFTER_FAILURE:g} s of the end of rank {rank}"
    return f"did not finish within {timeout:g} s"


def _autopsies(stuck: Mapping[int, WorkerHandle], reason: str) -> dict[int, Outcome]:
    for worker in stuck.values():
        worker.interrupt()
    return {rank: worker.autopsy(reason) for rank, worker in stuck.items()}
