"""Real processes for a measurement: started, waited for within a limit, and gone afterwards."""

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


class Place(NamedTuple):
    """Where a rank stands, and how long it may take."""

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
    """What `body(*args)` returned on each of `world` ranks. No rank outlives the call.

    With `start="forkserver"`, ranks are forked from a process that has imported all that this one has at its start, and
    that ends with this one: much faster, and new enough, but not for CUDA.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["OMP_NUM_THREADS"] = "1"
    context: Any = mp.get_context(start)
    with tempfile.TemporaryDirectory() as folder:
        places = [Place(rank, world, backend, f"{folder}/store", limit_s) for rank in range(world)]
        pipes = [context.Pipe(duplex=False) for _ in places]
        processes = [
            context.Process(target=_rank, args=(place, sender, body, args), daemon=True)
            for place, (_, sender) in zip(places, pipes, strict=True)
        ]
        for process, (_, sender) in zip(processes, pipes, strict=True):
            process.start()
            sender.close()
        try:
            return _collect([receiver for receiver, _ in pipes], time.monotonic() + limit_s)
        finally:
            for process in processes:
                _end(process)


@contextmanager
def fake_group(world: int) -> Iterator[None]:
    """This process as rank 0 of `world` ranks whose messages go nowhere."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _collect(receivers: list[Connection], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(receivers):
        left = {receiver: rank for rank, receiver in enumerate(receivers) if rank not in results}
        ready = wait(list(left), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RanksFailedError(f"ranks {sorted(left.values())} took too long")
        for receiver in ready:
            assert isinstance(receiver, Connection)
            results[left[receiver]] = _receive(receiver, left[receiver])
    return [results[rank] for rank in range(len(receivers))]


def _receive(receiver: Connection, rank: int) -> Any:
    try:
        ok, value = receiver.recv()
    except EOFError:
        raise RanksFailedError(f"rank {rank} died") from None
    if not ok:
        raise RanksFailedError(f"rank {rank} failed:\n{value}")
    return value


def _end(process: Any) -> None:
    process.join(5)
    if process.is_alive():
        process.kill()
        process.join()


def _rank(place: Place, sender: Connection, body: Body, args: tuple[Any, ...]) -> None:
    _end_with_parent(place.limit_s)
    torch.set_num_threads(1)
    try:
        with _group(place):
            result = body(*args)
        sender.send((True, result))
    except BaseException:
        sender.send((False, traceback.format_exc()))


@contextmanager
def _group(place: Place) -> Iterator[None]:
    if place.backend == "none":
        yield
        return
    dist.init_process_group(
        place.backend,
        init_method=f"file://{place.store}",
        rank=place.rank,
        world_size=place.world,
        timeout=timedelta(seconds=place.limit_s),
    )
    yield
    dist.barrier()
    dist.destroy_process_group()


def _end_with_parent(limit_s: float) -> None:
    """Leave no process behind, whatever happens to the one that started it."""

    def watch() -> None:
        parent = mp.parent_process()
        if parent is not None:
            parent.join(limit_s + 10)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
