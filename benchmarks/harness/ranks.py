"""Run a measurement on several processes, with a time limit. No process outlives the call."""

import os
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Body = Callable[..., Any]
"""A module-level function: each rank calls it with the given arguments, inside the process group."""


class RankArgs(NamedTuple):
    """Arguments of a rank's process."""

    rank: int
    world: int
    backend: str
    """One of torch's, or `none` for no process group."""
    store: str
    limit_s: float


class RanksFailedError(RuntimeError):
    """A rank raised, died or took too long."""


def run_ranks(
    world: int, body: Body, *args: Any, backend: str = "gloo", limit_s: float = 400, start: str = "spawn"
) -> list[Any]:
    """Call `body(*args)` on each of `world` ranks and return the results. No rank outlives the call.

    With `start="forkserver"`, ranks are forked from a server process that has already imported the modules that this
    process had imported at its start. That is much faster, and the processes are new enough, but it cannot use CUDA.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["OMP_NUM_THREADS"] = "1"
    context: Any = mp.get_context(start)
    with tempfile.TemporaryDirectory() as folder:
        all_rank_args = [RankArgs(rank, world, backend, f"{folder}/store", limit_s) for rank in range(world)]
        pipes = [context.Pipe(duplex=False) for _ in all_rank_args]
        processes = [
            context.Process(target=_run_rank, args=(rank_args, sender, body, args), daemon=True)
            for rank_args, (_, sender) in zip(all_rank_args, pipes, strict=True)
        ]
        for process, (_, sender) in zip(processes, pipes, strict=True):
            process.start()
            sender.close()
        try:
            return _collect([receiver for receiver, _ in pipes], time.monotonic() + limit_s)
        finally:
            for process in processes:
                _stop(process)


@contextmanager
def fake_group(world: int) -> Iterator[None]:
    """Make this process rank 0 of `world` ranks. The other ranks do not exist: messages are dropped."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _collect(receivers: list[Connection], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(receivers):
        pending = {receiver: rank for rank, receiver in enumerate(receivers) if rank not in results}
        ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RanksFailedError(f"ranks {sorted(pending.values())} took too long")
        for receiver in ready:
            assert isinstance(receiver, Connection)
            results[pending[receiver]] = _receive(receiver, pending[receiver])
    return [results[rank] for rank in range(len(receivers))]


def _receive(receiver: Connection, rank: int) -> Any:
    try:
        ok, value = receiver.recv()
    except EOFError:
        raise RanksFailedError(f"rank {rank} died") from None
    if not ok:
        raise RanksFailedError(f"rank {rank} failed:\n{value}")
    return value


def _stop(process: Any) -> None:
    process.join(5)
    if process.is_alive():
        process.kill()
        process.join()


def _run_rank(rank_args: RankArgs, sender: Connection, body: Body, args: tuple[Any, ...]) -> None:
    _exit_with_parent(rank_args.limit_s)
    torch.set_num_threads(1)
    try:
        with _process_group(rank_args):
            result = body(*args)
        sender.send((True, result))
    except BaseException:
        sender.send((False, traceback.format_exc()))


@contextmanager
def _process_group(rank_args: RankArgs) -> Iterator[None]:
    if rank_args.backend == "none":
        yield
        return
    dist.init_process_group(
        rank_args.backend,
        init_method=f"file://{rank_args.store}",
        rank=rank_args.rank,
        world_size=rank_args.world,
        timeout=timedelta(seconds=rank_args.limit_s),
    )
    yield
    dist.barrier()
    dist.destroy_process_group()


def _exit_with_parent(limit_s: float) -> None:
    """Exit when the process that started this one exits, for whatever reason."""

    def watch() -> None:
        parent = mp.parent_process()
        if parent is not None:
            parent.join(limit_s + 10)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
