"""Jobs of several processes into which faults are injected: what happens, where, on which rank and in which step."""

from __future__ import annotations

import atexit
import hashlib
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from functools import cache
from itertools import count
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore
from torch.nn.parallel import DistributedDataParallel

from tests.support.pool import PRELOAD, connect_store, open_store
from zeroshard import (
    ConsistencyCheck,
    FlatShards,
    NonFiniteGrads,
    PeerCheckpoint,
    RankLostError,
    ZeroConfig,
    ZeroError,
    ZeroRedundancyOptimizer,
    build,
    checkpoint,
    shard,
)
from zeroshard.checkpoint import reader, saver
from zeroshard.engine import grad_bucket, param_gather, param_store
from zeroshard.state import serialization
from zeroshard.state.tensor_utils import map_tensors

# ---- Faults

SLOW = 0.7
"""Seconds, less than any timeout here."""


class Kind(Enum):
    RAISES = "raises an exception"
    KILLED = "is killed (SIGKILL)"
    STOPPED = "is stopped (SIGSTOP)"
    SLOW = "is slow"
    MISSHAPEN = "has a wrong shape"
    CUT = "loses its connections"


class Place(Enum):
    CONSTRUCTOR = "constructor"
    BACKWARD = "backward"
    REDUCTION = "reduction"
    INNER_STEP = "inner step"
    GATHER = "gather"
    CONSOLIDATION = "consolidation"
    SAVE = "save"
    LOAD = "load"


class InjectedError(Exception):
    """What a rank raises on purpose."""


@dataclass(frozen=True)
class Fault:
    kind: Kind
    place: Place
    rank: int
    step: int
    """Steps that have been made before; for a constructor and for a load, which come first, of no meaning."""


class Trap:
    """On the rank of the fault: fires once, at its place, in its step. On others: nothing."""

    def __init__(self, fault: Fault | None, rank: int, store_port: int, tell: Callable[[], None]) -> None:
        """`tell` is called before it happens."""
        self._fault = fault if fault is not None and fault.rank == rank else None
        self._store_port, self._tell = store_port, tell
        self.step = 0
        self.is_armed = self.has_fired = False
        self.inner: Any = None
        """The optimizer that made the last step here."""

    def set(self) -> None:
        """Into the code that all ranks go through. The process is not used for anything else afterwards."""
        self._before(build.EngineBuilder, "make_engine", Place.CONSTRUCTOR)
        self._before(grad_bucket.GradBucket, "_launch_reduce", Place.REDUCTION)
        self._before(param_gather.ParamAllGather, "start", Place.GATHER)
        self._before(param_gather.ParamBroadcast, "start", Place.GATHER)
        self._before(serialization.StateSender, "send", Place.CONSOLIDATION)
        self._before(serialization, "receive_state", Place.CONSOLIDATION)
        self._before(saver._SavePlanner, "transform_object", Place.SAVE)
        self._before(reader.ReadPlan, "_read_tensor", Place.LOAD)

    def spring(self, place: Place) -> bool:
        """Whether the caller is to make a wrong shape."""
        fault = self._fault
        if fault is None or self.has_fired or place != fault.place:
            return False
        if place not in (Place.CONSTRUCTOR, Place.LOAD) and self.step < fault.step:
            return False
        self.has_fired = True
        self._tell()
        return self._act(fault.kind)

    def misshapes(self, place: Place) -> bool:
        """As `spring`, for a fault of that kind only."""
        return self._fault is not None and self._fault.kind is Kind.MISSHAPEN and self.spring(place)

    def _act(self, kind: Kind) -> bool:
        if kind is Kind.RAISES:
            raise InjectedError("on purpose")
        if kind is Kind.KILLED:
            os.kill(os.getpid(), signal.SIGKILL)
        if kind is Kind.STOPPED:
            os.kill(os.getpid(), signal.SIGSTOP)
        if kind is Kind.SLOW:
            time.sleep(SLOW)
        if kind is Kind.CUT:
            self._cut_connections()
        return kind is Kind.MISSHAPEN

    def _before(self, owner: Any, name: str, place: Place) -> None:
        original = getattr(owner, name)

        def trapped(*arguments: Any, **options: Any) -> Any:
            if self._can_act(arguments) and self.spring(place):
                arguments = tuple(_misshapen(it) if isinstance(it, _SPOILED) else it for it in arguments)
            return original(*arguments, **options)

        setattr(owner, name, trapped)

    def _can_act(self, arguments: Sequence[Any]) -> bool:
        """A wrong shape needs something that has one."""
        is_shape = self._fault is not None and self._fault.kind is Kind.MISSHAPEN
        return not is_shape or any(isinstance(it, _SPOILED) for it in arguments)

    def _cut_connections(self) -> None:
        """All to other ranks, and not those to the store."""
        for entry in os.listdir("/proc/self/fd"):
            with suppress(OSError), socket.socket(fileno=os.dup(int(entry))) as end:
                if end.family in (socket.AF_INET, socket.AF_INET6) and end.getpeername()[1] != self._store_port:
                    end.shutdown(socket.SHUT_RDWR)


_SPOILED = (torch.Tensor, reader.TensorLocation, param_store.BroadcastPlan)


def _misshapen(value: Any) -> Any:
    """One element too few: of a tensor, of what a file has, of a parameter that another rank sends."""
    if isinstance(value, reader.TensorLocation):
        return value._replace(tensor=value.tensor[1:] if value.tensor.dim() else value.tensor.reshape(1))
    if isinstance(value, param_store.BroadcastPlan):
        parcel: Any = next(it for it in value.messages if it.owner != dist.get_rank())
        parcel._params = [_misshapen(parcel._params[0].detach()), *parcel._params[1:]]
        return value
    return value.reshape(-1)[1:]


# ---- Jobs that train, save, consolidate, and load at their start

STEPS = 6
SAVED_EVERY = 2
CONSOLIDATED = 3
"""In this step."""
LONG = 60.0
"""No job takes longer, whatever happens in it."""
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([*PRELOAD, "tests.support.fault_injection"])
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


# -- on a rank


def _play(end: Connection[News, None], post: Post) -> None:
    def tell(what: str, step: int = 0, text: str = "", error: BaseException | None = None) -> None:
        text = text if error is None else f"{type(error).__name__}: {error}"
        lost = error.exited + error.unresponsive if isinstance(error, RankLostError) else ()
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
                checkpoint.save(post.folder, step=step, model=model, optimizer=optimizer, keep=2)
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


LOOKING: dict[str, Any] = {
    "peer_checkpoint": PeerCheckpoint(every=2),
    "consistency_check": ConsistencyCheck(),
    "nonfinite": NonFiniteGrads("skip"),
}
"""With all that looks, and copies, in between."""
STORE_ON_RANK_0 = "store on rank 0"
Made = tuple[Callable[[torch.Tensor], torch.Tensor], ZeroRedundancyOptimizer]


def _sharded(model: nn.Module, optimizer_class: Any, **options: Any) -> Made:
    ranks = {key: options.pop(key) for key in ("shard_group_size",) if key in options}
    config = ZeroConfig(partition=FlatShards(bucket_bytes=256), **options)
    return model, shard(model, optimizer_class, lr=0.01, config=config, **ranks)


def _drop_in(model: nn.Module, optimizer_class: Any) -> Made:
    # Else DDP divides gradients anew after its first pass, and adds up in another order from then on.
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    return wrapped, ZeroRedundancyOptimizer(wrapped.parameters(), optimizer_class, lr=0.01)


MODES: dict[str, Callable[[nn.Module, Any], Made]] = {
    "shard": _sharded,
    "overlapped": lambda model, kind: _sharded(model, kind, overlap_param_gather=True, **LOOKING),
    "hybrid": lambda model, kind: _sharded(model, kind, shard_group_size=2),
    "drop-in": _drop_in,
    STORE_ON_RANK_0: _sharded,
}


# ---- One fault after the other, and the outcome of each

RANKS = 4
TIMEOUT = 30.0
"""Of the process group. Whoever knows earlier has not waited for it."""
SHORT = 5.0
"""The same where a rank is stopped, which is known by waiting only."""
MARGIN = 15.0
"""Seconds that a busy machine may add. A rank that hangs would take longer."""
ENDING = 7.0
"""Seconds in which processes end once all of them have raised: one at most, if a thread waits in vain; the rest is what
a busy machine may add. Nobody is to wait for the 10 seconds in which something may still be received."""
_FATAL = (Kind.KILLED, Kind.STOPPED, Kind.CUT)


class Outcome(NamedTuple):
    """What came of one fault."""

    fault: Fault
    mode: str
    saw: tuple[str, ...]
    """Kinds of errors on the other ranks."""
    seconds: float
    """Until every other rank knew; 0 if nobody had to know."""
    restarted: bool


class Matrix:
    """Runs faults, each in a job of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._store = folder, open_store()
        self._numbers = count()

    def inject(self, fault: Fault, mode: str) -> Outcome:
        """Raises `AssertionError` where something hung, was lost, or came out different."""
        folder = self._fresh_folder(fault, mode)
        timeout = SHORT if fault.kind is Kind.STOPPED else TIMEOUT
        told = run_job(self._store.port, folder, mode, RANKS, fault, timeout=timeout)
        assert told.fired is not None, "it did not happen"
        assert not told.stuck, f"ranks {told.stuck} hang: {told.news}"
        others = [rank for rank in range(RANKS) if rank != fault.rank]
        errors = [told.of(rank, "error") for rank in others]
        if fault.kind is Kind.SLOW:
            assert not any(errors), f"slowness is no error: {errors}"
        else:
            assert all(errors), f"a rank knows of nothing: {told.news}"
        self._require_the_same_end(told, folder, mode)
        if fault.kind in _FATAL:
            _require_names(told, fault, mode)
        seconds = max((news[0].time - told.fired for news in errors if news), default=0.0)
        # Hazard: gloo does not wake a sender whose own connections have closed. That rank raises at the timeout.
        own = told.of(fault.rank, "error") if fault.kind is Kind.CUT else []
        raised = max((news[-1].time for news in [*errors, own] if news), default=told.ended)
        assert fault.kind not in _FATAL or told.ended - raised < ENDING, "ranks that have raised do not end"
        assert seconds < (SHORT + MARGIN if fault.kind is Kind.STOPPED else TIMEOUT)
        saw = tuple(sorted({news[0].text.partition(":")[0] for news in errors if news}))
        return Outcome(fault, mode, saw, seconds, restarted=not told.is_done)

    def _require_the_same_end(self, told: Told, folder: Path, mode: str) -> None:
        if not told.is_done:
            again = run_job(self._store.port, folder, mode, RANKS)
            assert again.is_done, f"it does not go on: {again.news}"
            assert again.began >= told.saved, "a finished checkpoint was lost"
            told = again
        assert told.digests == self.undisturbed(mode), "it came out different"

    @cache  # noqa: B019 (lives as long as the tests)
    def undisturbed(self, mode: str) -> frozenset[str]:
        with TemporaryDirectory(dir=self._folder) as folder:
            return frozenset(run_job(self._store.port, Path(folder, "run"), mode, RANKS).digests)

    def _fresh_folder(self, fault: Fault, mode: str) -> Path:
        folder = self._folder / f"run{next(self._numbers)}"
        if fault.place is Place.LOAD:
            shutil.copytree(self.saved(mode), folder)
        return folder

    @cache  # noqa: B019
    def saved(self, mode: str) -> Path:
        """A folder with a checkpoint from the middle of a run."""
        folder = self._folder / f"saved-{mode}"
        run_job(self._store.port, folder, mode, RANKS, steps=2 * SAVED_EVERY)
        return folder


def _require_names(told: Told, fault: Fault, mode: str) -> None:
    """Who is missing is named where ranks learn it from us, and not by an error of torch's in DDP's backward pass."""
    texts = [it.text for rank in range(RANKS) if rank != fault.rank for it in told.of(rank, "error")]
    lost = [text for text in texts if text.startswith("RankLostError")]
    assert mode == "drop-in" or len(lost) == len(texts), f"a rank was not told who is missing: {texts}"
    named = re.compile(rf"ranks? [\d, ]*\b{fault.rank}\b[\d, ]* of")
    if mode == STORE_ON_RANK_0 and fault.kind in (Kind.KILLED, Kind.STOPPED):
        _require_no_verdict(told, texts)
        return
    told_of = [text for text in lost if named.search(text.partition("\n")[0])]
    if fault.kind is not Kind.CUT:  # in which all ranks are there
        assert len(told_of) == len(lost), f"the missing rank is not named: {texts}"


def _require_no_verdict(told: Told, texts: Sequence[str]) -> None:
    """Ranks that cannot hear of each other say so, and take nobody for lost."""
    assert all("the store of the job does not answer" in text for text in texts), texts
    assert not [it for news in told.news for it in news if it.lost], f"ranks that live are taken for lost: {texts}"


def cells() -> list[tuple[Kind, Place, str]]:
    """DDP reduces gradients of the drop-in: what happens there is not ours."""
    every = [(kind, place, mode) for mode in MODES for kind in Kind for place in Place]
    return [it for it in every if it[1:] != (Place.REDUCTION, "drop-in")]
