"""Jobs of several processes in which something goes wrong: each trains, saves, consolidates, and loads at its start."""

from __future__ import annotations

import atexit
import hashlib
import multiprocessing
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from itertools import count
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore
from torch.nn.parallel import DistributedDataParallel

from tests.support import handle  # what the server has loaded before it forks
from tests.support.faults import Fault, InjectedError, Kind, Place, Trap
from tests.support.store import connect_store, open_store
from zeroshard import (
    Drift,
    FlatShards,
    NonFinite,
    RankLostError,
    SecondCopy,
    ZeroConfig,
    ZeroError,
    ZeroRedundancyOptimizer,
    checkpoint,
    shard,
)
from zeroshard.state.trees import map_tensors

STEPS = 6
SAVED_EVERY = 2
CONSOLIDATED = 3
"""In this step."""
LONG = 60.0
"""No job takes longer, whatever happens in it."""
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([*handle.PRELOAD, "tests.support.faults"])
_numbers = count()


class Post(NamedTuple):
    """Where a rank works, and how."""

    port: int
    run: str
    rank: int
    world_size: int
    folder: Path
    mode: str
    timeout: float
    steps: int
    fault: Fault | None


class News(NamedTuple):
    """From a rank, with the time, which is the same clock for all: "began", "saved" or "done" with a step, "fired",
    "error" with what it is, and with the ranks that it says are lost."""

    what: str
    time: float
    step: int = 0
    text: str = ""
    lost: tuple[int, ...] = ()


class Told(NamedTuple):
    """What came of a job."""

    news: list[list[News]]
    """By rank."""
    stuck: list[int]
    """Ranks that had neither ended nor finished in time."""
    ended: float
    """When the last rank that was not stopped had ended."""

    def of(self, rank: int, what: str) -> list[News]:
        return [it for it in self.news[rank] if it.what == what]

    @property
    def is_done(self) -> bool:
        return all(self.of(rank, "done") for rank in range(len(self.news)))

    @property
    def digests(self) -> set[str]:
        return {it.text for rank in range(len(self.news)) for it in self.of(rank, "done")}

    @property
    def saved(self) -> int:
        """The last step that all ranks know to be saved."""
        return min(max((it.step for it in self.of(rank, "saved")), default=0) for rank in range(len(self.news)))

    @property
    def began(self) -> int:
        return min(self.of(rank, "began")[0].step for rank in range(len(self.news)))

    @property
    def fired(self) -> float | None:
        return next((it.time for news in self.news for it in news if it.what == "fired"), None)


def run_job(
    port: int,
    folder: Path,
    mode: str,
    world_size: int,
    fault: Fault | None = None,
    *,
    timeout: float = 30.0,
    steps: int = STEPS,
) -> Told:
    """Start all ranks, and stay until they have ended. One that was stopped goes on when all others have ended."""
    run, ends, ranks = f"job{next(_numbers)}", [], []
    for rank in range(world_size):
        mine, theirs = _CONTEXT.Pipe(duplex=False)
        post = Post(port, run, rank, world_size, folder, mode, timeout, steps, fault)
        process = _CONTEXT.Process(target=_play, args=(theirs, post), daemon=True)
        process.start()
        theirs.close()
        ends.append(mine)
        ranks.append(process)
    try:
        deadline = time.monotonic() + LONG
        stopped = {fault.rank} if fault is not None and fault.kind is Kind.STOPPED else set()
        _join([it for rank, it in enumerate(ranks) if rank not in stopped], deadline)
        ended = time.monotonic()
        for rank in stopped:
            with suppress(ProcessLookupError):
                os.kill(ranks[rank].pid or 0, signal.SIGCONT)
        _join(ranks, deadline)
        stuck = [rank for rank, process in enumerate(ranks) if process.exitcode is None]
    finally:
        for process in ranks:
            process.kill()
            process.join()
    return Told([_news(end) for end in ends], stuck, ended)


def _join(processes: list[Any], deadline: float) -> None:
    pending = {process.sentinel for process in processes}
    while pending and (ready := wait(list(pending), max(0.0, deadline - time.monotonic()))):
        pending -= set(ready)


def _news(end: Connection[None, News]) -> list[News]:
    found = []
    with suppress(EOFError, OSError):
        while end.poll():
            found.append(end.recv())
    return found


# ---- on a rank


def _play(end: Connection[News, None], post: Post) -> None:
    def tell(what: str, step: int = 0, text: str = "", error: BaseException | None = None) -> None:
        text = text if error is None else f"{type(error).__name__}: {error}"
        lost = error.gone + error.silent if isinstance(error, RankLostError) else ()
        end.send(News(what, time.monotonic(), step, text, lost))

    store = _prepare(post)
    trap = Trap(post.fault, post.rank, post.port, lambda: tell("fired"))
    trap.set()
    try:
        _insist(_Work(post, trap, tell), tell)
        status = 0
    except BaseException as error:
        tell("error", error=error)
        sys.excepthook(type(error), error, None)  # as where a script ends by it
        status = 1
    atexit._run_exitfuncs()
    del store
    os._exit(status)


def _prepare(post: Post) -> TCPStore:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    sys.excepthook = lambda *_: None  # errors are told, not printed
    torch.set_num_threads(1)
    store = connect_store(post.port)
    if post.mode == STORE_ON_RANK_0:
        store = _served_by_rank_0(post, store)
    dist.init_process_group(
        "gloo",
        store=PrefixStore(post.run, store),
        rank=post.rank,
        world_size=post.world_size,
        timeout=timedelta(seconds=post.timeout),
    )
    return store


def _served_by_rank_0(post: Post, outside: TCPStore) -> TCPStore:
    """One that ends with it, as where torchrun does not serve it."""
    if post.rank == 0:
        store = open_store()
        outside.set(f"{post.run}/port", str(store.port))
        return store
    return connect_store(int(outside.get(f"{post.run}/port")))


def _insist(work: _Work, tell: Callable[..., None]) -> None:
    """Begin anew from the last checkpoint after what all ranks have been told of: once."""
    try:
        work.run()
    except (ZeroError, InjectedError, RuntimeError, ValueError) as error:
        if isinstance(error, RankLostError) or work.is_users_own:
            raise
        tell("error", error=error)
        work.run()


class _Work:
    """What a script of a user does."""

    def __init__(self, post: Post, trap: Trap, tell: Callable[..., None]) -> None:
        self._post, self._trap, self._tell = post, trap, tell
        self.is_users_own = False
        """What is raised is raised by the user's own code, and no other rank knows of it."""

    def run(self) -> None:
        torch.manual_seed(0)
        trap, post = self._trap, self._post
        model = nn.Sequential(nn.Linear(10, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 4))
        if trap.misshapes(Place.CONSTRUCTOR):
            model[2] = nn.Linear(12, 12, bias=False)
        forward, optimizer = MODES[post.mode](model, _fragile(trap))
        trap.step = step = self._load(model, optimizer)
        self._tell("began", step)
        while step < post.steps:
            self._train(forward, optimizer, step)
            trap.step = step = step + 1
            if step == CONSOLIDATED:
                if trap.misshapes(Place.CONSOLIDATION):
                    trap.inner.spoil()
                optimizer.full_state_dict(to=0)
            if step % SAVED_EVERY == 0:
                checkpoint.save(post.folder, step=step, model=model, optimizer=optimizer, keep=2).wait()
                self._tell("saved", step)
        self._tell("done", step, _digest(model, optimizer))

    def _load(self, model: nn.Module, optimizer: ZeroRedundancyOptimizer) -> int:
        if checkpoint.latest(self._post.folder) is None:
            return 0
        return checkpoint.load(self._post.folder, model=model, optimizer=optimizer).step or 0

    def _train(self, forward: Callable[[torch.Tensor], torch.Tensor], optimizer: Any, step: int) -> None:
        draw = torch.Generator().manual_seed(100 * step + self._post.rank)
        self.is_users_own = True
        loss = forward(torch.randn(3, 10, generator=draw).requires_grad_()).square().sum()
        grad = torch.ones(()) if not self._trap.spring(Place.BACKWARD) else torch.ones(3)
        torch.autograd.backward(loss, grad)
        self.is_users_own = False
        self._trap.is_armed = True  # not for steps by which the library gets to know the class
        optimizer.step()
        self._trap.is_armed = False
        optimizer.zero_grad()


def _fragile(trap: Trap) -> type[torch.optim.Optimizer]:
    class Fragile(torch.optim.AdamW):
        def step(self, *arguments: Any, **options: Any) -> Any:
            if trap.is_armed:
                trap.inner = self
                if trap.spring(Place.INNER_STEP):
                    self.spoil()
            return super().step(*arguments, **options)

        def spoil(self) -> None:
            """State that has a wrong shape."""
            state = next(iter(self.state.values()))
            state["exp_avg"] = state["exp_avg"][1:]

    return Fragile


def _digest(model: nn.Module, optimizer: ZeroRedundancyOptimizer) -> str:
    """Of parameters on every rank, of all state on rank 0."""
    params = b"".join(param.detach().numpy().tobytes() for param in model.parameters())
    state = pickle.dumps(map_tensors(optimizer.full_state_dict(to=0), lambda it: (it.dtype, it.numpy().tobytes())))
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, (hashlib.sha256(params).hexdigest(), hashlib.sha256(state).hexdigest()))
    assert len({first for first, _ in digests}) == 1, "ranks have different parameters"
    return f"{digests[0]}"


LOOKING: dict[str, Any] = {"second_copy": SecondCopy(every=2), "drift": Drift(), "nonfinite": NonFinite("skip")}
"""With all that looks, and copies, in between."""
STORE_ON_RANK_0 = "store on rank 0"
Made = tuple[Callable[[torch.Tensor], torch.Tensor], ZeroRedundancyOptimizer]


def _sharded(model: nn.Module, optimizer_class: Any, **options: Any) -> Made:
    ranks = {key: options.pop(key) for key in ("shard_within",) if key in options}
    config = ZeroConfig(partition=FlatShards(bucket_bytes=256), **options)
    return model, shard(model, optimizer_class, lr=0.01, config=config, **ranks)


def _drop_in(model: nn.Module, optimizer_class: Any) -> Made:
    # Else DDP divides gradients anew after its first pass, and adds up in another order from then on.
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    return wrapped, ZeroRedundancyOptimizer(wrapped.parameters(), optimizer_class, lr=0.01)


MODES: dict[str, Callable[[nn.Module, Any], Made]] = {
    "shard": _sharded,
    "overlapped": lambda model, kind: _sharded(model, kind, overlap_gather=True, **LOOKING),
    "hybrid": lambda model, kind: _sharded(model, kind, shard_within=2),
    "drop-in": _drop_in,
    STORE_ON_RANK_0: _sharded,
}
