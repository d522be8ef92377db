"""Run a test body on real gloo ranks: the `@ranks` decorator, the pool of worker processes behind it, and the workers.

Workers are started once and play the ranks of many tests. A rank that hangs is ended, and its stacks are reported.
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
    """The place of one process in the run of a test."""

    rank: int
    world_size: int

    def gather(self, value: T) -> list[T]:
        """Every rank's `value`, in rank order; a collective call."""
        values = [value] * self.world_size
        dist.all_gather_object(values, value)
        return values


@dataclass(frozen=True)
class Job:
    """One rank's part in one run."""

    context: RankContext
    run: str
    module: str
    qualname: str
    arguments: bytes
    timeout: float


@dataclass(frozen=True)
class Outcome:
    """How one rank ended: `detail` says why it did not pass, `value` is what a passing body returned."""

    status: Literal["passed", "skipped", "failed", "stuck"]
    detail: str = ""
    value: bytes = b""


# ---- Failures, as the reader sees them


class RankFailures(Exception):  # noqa: N818
    """Some ranks failed or got stuck; `outcomes` has the end of every rank, in the order of arrival."""

    def __init__(self, outcomes: Mapping[int, Outcome]) -> None:
        super().__init__(_describe(outcomes))
        self.outcomes = dict(outcomes)


def raise_unless_passed(outcomes: Mapping[int, Outcome]) -> None:
    """Fail or skip; a rank that waits for one that skipped is no failure."""
    skips = [outcome.detail for outcome in outcomes.values() if outcome.status == "skipped"]
    failing = {"failed"} if skips else {"failed", "stuck"}
    if any(outcome.status in failing for outcome in outcomes.values()):
        raise RankFailures(outcomes)
    if skips:
        pytest.skip(skips[0])


def describe_exit(code: int | None) -> str:
    """Say in words how a process ended."""
    if code is None:
        return "closed its connection"
    return f"died of {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def _describe(outcomes: Mapping[int, Outcome]) -> str:
    summary = [
        f"{status}: rank {', '.join(ranks)}"
        for status in ("failed", "stuck", "skipped", "passed")
        if (ranks := [str(rank) for rank in sorted(outcomes) if outcomes[rank].status == status])
    ]
    sections = [
        f"[rank {rank}] {outcome.status}\n{outcome.detail.strip()}"
        for rank, outcome in outcomes.items()
        if outcome.status != "passed"
    ]
    return "\n\n".join(["; ".join(summary), *sections])


# ---- The worker side: a process that plays one rank of one test after another


def serve(connection: Connection[Outcome, Job | None], port: int, stacks: Path) -> None:
    """Play runs until the pool closes the connection."""
    _prepare(stacks)
    store = connect_store(port)
    connection.send(Outcome("passed"))
    with suppress(EOFError):
        while job := connection.recv():
            outcome = _attempt(partial(_play, job, store))
            connection.send(outcome)
            # Leaving the group breaks the collectives that peers are still in: right after a failure,
            # wrong otherwise, so the other ranks stay until the pool has heard from all.
            if outcome.status != "failed":
                connection.recv()
            connection.send(_attempt(_leave))


def _prepare(stacks: Path) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    file = stacks.open("w")
    faulthandler.enable(file)
    # chain: once the stacks are written, the default action of SIGUSR1 ends the process.
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


def _play(job: Job, store: Store) -> bytes:
    __tracebackhide__ = True
    _reset()
    body = _find(job.module, job.qualname)
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


def _reset() -> None:
    """Undo what a test may have left. Answers of probes stay: they are right in any test, and save time."""
    random.seed(0)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    optimizers._global_optimizer_pre_hooks.clear()
    optimizers._global_optimizer_post_hooks.clear()


def _find(module: str, qualname: str) -> Callable[..., Any]:
    found: Any = reduce(getattr, qualname.split("."), importlib.import_module(module))
    body: Callable[..., Any] = getattr(found, "__rank_body__", found)
    return body


_BUSY = b"busy"
"""Sent by a worker that still has threads of zeroshard, which wait for a test that is over."""


def _leave() -> bytes:
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
    names = [thread.name for thread in threading.enumerate() if thread.name != "zeroshard-watcher"]  # ends by itself
    return _BUSY if any(name.startswith("zeroshard") for name in names) else b""


# ---- One worker process as the pool sees it

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
    """Have ranks find these modules loaded, too. Before the first of them is started."""
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
        """The process's next outcome, or the failure that it has died."""
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            self._process.join(EXIT_TIMEOUT)
            return Outcome("failed", f"{describe_exit(self._process.exitcode)}\n{self._read_stacks()}")

    def interrupt(self) -> None:
        """Have the process write its stacks and end."""
        if self.is_alive() and self._process.pid:
            os.kill(self._process.pid, signal.SIGUSR1)

    def autopsy(self, reason: str) -> Outcome:
        """The outcome of an interrupted process: where it was stuck."""
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

    A worker is replaced if it took part in a failed run, or has threads of the package left afterwards.

    A process is the same rank in all runs, so nothing that torch may cache per device mesh is used by another rank.
    """

    def __init__(self) -> None:
        self._store = open_store()
        self._stacks = TemporaryDirectory()
        self._workers: dict[int, WorkerHandle] = {}
        """By rank."""
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
            left = _collect(workers, timeout)
        self._discard([workers[rank] for rank, outcome in left.items() if outcome.value == _BUSY])
        return [pickle.loads(outcomes[rank].value) for rank in range(world_size)]

    def close(self) -> None:
        self._discard(list(self._workers.values()))
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
        self._discard([worker for worker in self._workers.values() if not worker.is_alive()])
        fresh = [self._start(rank) for rank in range(size) if rank not in self._workers]
        with self._discarded_on_error(fresh):
            _collect(fresh, START_TIMEOUT)
        return [self._workers[rank] for rank in range(size)]

    def _start(self, rank: int) -> WorkerHandle:
        worker = WorkerHandle(self._store.port, Path(self._stacks.name, f"worker{next(self._serial)}"))
        self._workers[rank] = worker
        return worker

    @contextmanager
    def _discarded_on_error(self, workers: Sequence[WorkerHandle]) -> Iterator[None]:
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


# ---- The decorator

START_ALLOWANCE = 60.0


def ranks(*world_sizes: int, timeout: float = DEFAULT_TIMEOUT) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test's body, whose first argument is a `RankContext`, on all ranks of each world size.

    The other arguments are fixtures and parameters as usual; they must be picklable. The fast tier runs one size.
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
    needed = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in ("rank_pool", RANK_COUNT)]
    return inspect.Signature([*needed, *arguments])
