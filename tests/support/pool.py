"""Run a test body on real gloo ranks: the `@ranks` decorator, the pool of worker processes behind it, and the workers.

Workers start once and are the ranks of many tests. A rank that hangs is killed, and its stacks are reported.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import inspect
import multiprocessing
import os
import pickle
import random
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial, reduce, wraps
from inspect import Parameter
from itertools import count
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, Literal, TypeVar

import pytest
import torch
import torch.distributed as dist
from _pytest.assertion import install_importhook
from _pytest.config import get_config
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not re-exported
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.optim import optimizer as optimizers

from tests.support.tiers import RANK_COUNT, sampled

# ---- The key-value store through which ranks find each other, on the loopback interface only

LOOPBACK = "127.0.0.1"


def open_store() -> TCPStore:
    """Serve a store on a free port."""
    # A store that opens its own socket listens on every interface.
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    return TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def connect_store(port: int) -> TCPStore:
    return TCPStore(LOOPBACK, port, is_master=False)


# ---- Messages between the pool and its workers

T = TypeVar("T")


@dataclass(frozen=True)
class RankContext:
    """Rank and world size of a process in a test."""

    rank: int
    world_size: int

    def gather(self, value: T) -> list[T]:
        """Return every rank's `value` in rank order. Call on all ranks."""
        values = [value] * self.world_size
        dist.all_gather_object(values, value)
        return values


@dataclass(frozen=True)
class Job:
    """The work of one rank in one run."""

    context: RankContext
    run: str
    module: str
    qualname: str
    arguments: bytes
    timeout: float


@dataclass(frozen=True)
class Outcome:
    """The outcome of one rank: `detail` says why it did not pass, `value` is the return value of a passing body."""

    status: Literal["passed", "skipped", "failed", "stuck"]
    detail: str = ""
    value: bytes = b""


# ---- Failure reports


class RankFailures(Exception):  # noqa: N818
    """Some ranks failed or got stuck; `outcomes` has the outcome of every rank, in the order of arrival."""

    def __init__(self, outcomes: Mapping[int, Outcome]) -> None:
        super().__init__(_describe(outcomes))
        self.outcomes = dict(outcomes)


def raise_unless_passed(outcomes: Mapping[int, Outcome]) -> None:
    """Raise if a rank failed; skip if one skipped. A rank that is stuck because another one skipped has not failed."""
    skips = [outcome.detail for outcome in outcomes.values() if outcome.status == "skipped"]
    failing = {"failed"} if skips else {"failed", "stuck"}
    if any(outcome.status in failing for outcome in outcomes.values()):
        raise RankFailures(outcomes)
    if skips:
        pytest.skip(skips[0])


def describe_exit(code: int | None) -> str:
    """Describe how a process ended."""
    if code is None:
        return "closed its connection"
    return f"died of {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def _describe(outcomes: Mapping[int, Outcome]) -> str:
    summary = [
        f"{status}: rank {', '.join(ranks)}"
        for status in ("failed", "stuck", "skipped", "passed")
        if (ranks := [str(rank) for rank in sorted(outcomes) if outcomes[rank].status == status])
    ]
    details = [
        f"[rank {rank}] {outcome.status}\n{outcome.detail.strip()}"
        for rank, outcome in outcomes.items()
        if outcome.status != "passed"
    ]
    return "\n\n".join(["; ".join(summary), *details])


# ---- The worker side: a process that is a rank of one test after another


def serve(connection: Connection[Outcome, Job | None], port: int, stacks: Path) -> None:
    """Run jobs until the pool closes the connection."""
    _prepare(stacks)
    store = connect_store(port)
    connection.send(Outcome("passed"))
    with suppress(EOFError):
        while job := connection.recv():
            outcome = _attempt(partial(_run_job, job, store))
            connection.send(outcome)
            # Leaving the group breaks collectives that peers are still in. After a failure this is wanted. Otherwise
            # stay until the pool has the outcomes of all ranks.
            if outcome.status != "failed":
                connection.recv()
            connection.send(_attempt(_leave_group))


def _prepare(stacks: Path) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    file = stacks.open("w")
    faulthandler.enable(file)
    # chain: once the stacks are written, the default action of SIGUSR1 kills the process.
    faulthandler.register(signal.SIGUSR1, file, all_threads=True, chain=True)
    threading.Thread(target=exit_with_parent, daemon=True).start()
    install_importhook(get_config())
    gc.freeze()


def exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _attempt(action: Callable[[], bytes]) -> Outcome:
    __tracebackhide__ = True
    try:
        return Outcome("passed", value=action())
    except pytest.skip.Exception as skip:
        return Outcome("skipped", str(skip))
    except BaseException as error:
        return Outcome("failed", str(pytest.ExceptionInfo.from_exception(error).getrepr(style="short")))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _run_job(job: Job, store: Store) -> bytes:
    __tracebackhide__ = True
    _reset_global_state()
    body = _find_body(job.module, job.qualname)
    arguments = pickle.loads(job.arguments)
    dist.init_process_group(
        "gloo",
        store=PrefixStore(job.run, store),
        rank=job.context.rank,
        world_size=job.context.world_size,
        timeout=timedelta(seconds=job.timeout),
    )
    with warnings.catch_warnings():
        return pickle.dumps(body(job.context, **arguments))


def _reset_global_state() -> None:
    """Reset global state, except cached probe results: they are valid in any test and save time."""
    random.seed(0)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    optimizers._global_optimizer_pre_hooks.clear()
    optimizers._global_optimizer_post_hooks.clear()


def _find_body(module: str, qualname: str) -> Callable[..., Any]:
    function: Any = reduce(getattr, qualname.split("."), importlib.import_module(module))
    body: Callable[..., Any] = getattr(function, "__rank_body__", function)
    return body


_BUSY = b"busy"
"""Sent by a worker that still has zeroshard threads of a finished test."""


def _leave_group() -> bytes:
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
    names = [thread.name for thread in threading.enumerate() if thread.name != "zeroshard-watcher"]  # exits by itself
    return _BUSY if any(name.startswith("zeroshard") for name in names) else b""


# ---- The pool's side of one worker process

# torch._dynamo: the first optimizer of a process imports it, which takes seconds.
PRELOAD = [
    "pytest",
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "torch.nn.parallel.distributed",
    "zeroshard",
    "zeroshard.checkpoint",
]
EXIT_TIMEOUT = 5.0

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(PRELOAD)


def preload(modules: list[str]) -> None:
    """Also preload these modules in workers. Call before the first worker starts."""
    _CONTEXT.set_forkserver_preload([*PRELOAD, *modules])


class WorkerHandle:
    """A worker process and the connection to it."""

    def __init__(self, port: int, stacks: Path) -> None:
        self.connection: Connection[Job | None, Outcome]
        self.connection, remote = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=serve, args=(remote, port, stacks), daemon=True)
        self._process.start()
        remote.close()
        self._stacks = stacks

    def is_alive(self) -> bool:
        return self._process.is_alive()

    def receive(self) -> Outcome:
        """Return the next outcome of the process, or a failure if it died."""
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            self._process.join(EXIT_TIMEOUT)
            return Outcome("failed", f"{describe_exit(self._process.exitcode)}\n{self._read_stacks()}")

    def interrupt(self) -> None:
        """Make the process write its stacks and exit."""
        if self.is_alive() and self._process.pid:
            os.kill(self._process.pid, signal.SIGUSR1)

    def stuck_outcome(self, reason: str) -> Outcome:
        """Return the outcome of an interrupted process: where it was stuck."""
        self._process.join(EXIT_TIMEOUT)
        return Outcome("stuck", f"{reason}; its stacks:\n{self._read_stacks()}")

    def close(self) -> None:
        if self.is_alive():
            self._process.kill()
        self._process.join()
        self._process.close()
        self.connection.close()

    def _read_stacks(self) -> str:
        if not self._stacks.exists():
            return ""
        threads = self._stacks.read_text().split("\n\n")
        return "\n\n".join(thread for thread in threads if exit_with_parent.__name__ not in thread)


# ---- The pool

DEFAULT_TIMEOUT = 60.0
START_TIMEOUT = 60.0
GRACE_AFTER_FAILURE = 3.0
NO_ARGUMENTS: Mapping[str, Any] = MappingProxyType({})


class RankPool:
    """Runs functions on real gloo ranks.

    A worker is replaced if it took part in a failed run, or if threads of the package are left afterwards.

    A process is the same rank in all runs: torch may cache values per device mesh, which another rank must not use.
    """

    def __init__(self) -> None:
        self._store = open_store()
        self._stacks = TemporaryDirectory()
        self._workers: dict[int, WorkerHandle] = {}
        """By rank."""
        self._numbers = count()

    def run(
        self,
        body: Callable[..., Any],
        world_size: int,
        timeout: float = DEFAULT_TIMEOUT,
        arguments: Mapping[str, Any] = NO_ARGUMENTS,
    ) -> list[Any]:
        """Call `body(context, **arguments)` on all ranks concurrently. Return the results by rank.

        Raises `RankFailures` if a rank fails. Skips the test if a rank skips.
        """
        jobs = self._make_jobs(body, world_size, timeout, arguments)
        workers = self._get_workers(world_size)
        with self._discard_on_error(workers):
            _send(workers, jobs)
            outcomes = _collect(workers, timeout)
            _send(workers, [None] * world_size)
            leave_outcomes = _collect(workers, timeout)
        self._discard([workers[rank] for rank, outcome in leave_outcomes.items() if outcome.value == _BUSY])
        return [pickle.loads(outcomes[rank].value) for rank in range(world_size)]

    def close(self) -> None:
        self._discard(list(self._workers.values()))
        self._stacks.cleanup()

    def _make_jobs(
        self, body: Callable[..., Any], world_size: int, timeout: float, arguments: Mapping[str, Any]
    ) -> list[Job]:
        run, payload = f"run{next(self._numbers)}", pickle.dumps(dict(arguments))
        return [
            Job(RankContext(rank, world_size), run, body.__module__, body.__qualname__, payload, 2 * timeout)
            for rank in range(world_size)
        ]

    def _get_workers(self, size: int) -> list[WorkerHandle]:
        self._discard([worker for worker in self._workers.values() if not worker.is_alive()])
        started = [self._start(rank) for rank in range(size) if rank not in self._workers]
        with self._discard_on_error(started):
            _collect(started, START_TIMEOUT)
        return [self._workers[rank] for rank in range(size)]

    def _start(self, rank: int) -> WorkerHandle:
        worker = WorkerHandle(self._store.port, Path(self._stacks.name, f"worker{next(self._numbers)}"))
        self._workers[rank] = worker
        return worker

    @contextmanager
    def _discard_on_error(self, workers: Sequence[WorkerHandle]) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._discard(workers)
            raise

    def _discard(self, workers: Sequence[WorkerHandle]) -> None:
        for rank, worker in list(self._workers.items()):
            if worker in workers:
                del self._workers[rank]
                worker.close()


def _send(workers: Sequence[WorkerHandle], requests: Sequence[Job | None]) -> None:
    for worker, request in zip(workers, requests, strict=True):
        worker.connection.send(request)


def _collect(workers: Sequence[WorkerHandle], timeout: float) -> dict[int, Outcome]:
    """Return the outcome of every rank, in the order of arrival. Raise unless all ranks passed."""
    outcomes: dict[int, Outcome] = {}
    pending = {worker.connection: rank for rank, worker in enumerate(workers)}
    deadline = time.monotonic() + timeout
    while pending and (ready := wait(pending, max(0.0, deadline - time.monotonic()))):
        for rank in [rank for connection, rank in pending.items() if connection in ready]:
            outcomes[rank] = workers[rank].receive()
            del pending[workers[rank].connection]
            if outcomes[rank].status != "passed":
                deadline = min(deadline, time.monotonic() + GRACE_AFTER_FAILURE)
    stuck = {rank: workers[rank] for rank in pending.values()}
    outcomes |= _interrupt_all(stuck, _describe_timeout(outcomes, timeout))
    raise_unless_passed(outcomes)
    return outcomes


def _describe_timeout(outcomes: Mapping[int, Outcome], timeout: float) -> str:
    for rank, outcome in outcomes.items():
        if outcome.status != "passed":
            return f"did not finish within {GRACE_AFTER_FAILURE:g} s of the end of rank {rank}"
    return f"did not finish within {timeout:g} s"


def _interrupt_all(stuck: Mapping[int, WorkerHandle], reason: str) -> dict[int, Outcome]:
    for worker in stuck.values():
        worker.interrupt()
    return {rank: worker.stuck_outcome(reason) for rank, worker in stuck.items()}


# ---- The decorator

START_ALLOWANCE = 60.0


def ranks(*world_sizes: int, timeout: float = DEFAULT_TIMEOUT) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test's body on all ranks, once per world size. Its first argument is a `RankContext`.

    The other arguments are ordinary fixtures and parameters; they must be picklable. The fast tier runs one world size.
    """
    sizes = sampled(RANK_COUNT, world_sizes, ids=[f"{size}ranks" for size in world_sizes])
    limit = pytest.mark.timeout(timeout + START_ALLOWANCE)

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @wraps(body)
        def test(rank_pool: RankPool, rank_count: int, **arguments: Any) -> None:
            try:
                rank_pool.run(body, rank_count, timeout, arguments)
            except RankFailures as failures:
                raise pytest.fail.Exception(str(failures), pytrace=False) from None

        vars(test).update(__rank_body__=body, __signature__=_without_context(body))
        marked: Callable[..., None] = limit(sizes(test))
        return marked

    return decorate


def _without_context(body: Callable[..., None]) -> inspect.Signature:
    _, *arguments = inspect.signature(body).parameters.values()
    fixtures = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in ("rank_pool", RANK_COUNT)]
    return inspect.Signature([*fixtures, *arguments])
