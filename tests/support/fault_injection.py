"""Inject faults into jobs of several processes: a kind of fault, at a place in the code, on a rank, in a step."""

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
from zeroshard.engine import grad_bucket, param_memory, param_sync
from zeroshard.state import serialization
from zeroshard.state.tensor_utils import map_tensors

# ---- Faults

DELAY_S = 0.7
"""Delay of a slow rank in seconds, less than any timeout here."""


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
    REDUCTION = "gradient reduction"
    INNER_STEP = "inner step"
    GATHER = "parameter gather"
    CONSOLIDATION = "state consolidation"
    SAVE = "save"
    LOAD = "load"


class InjectedError(Exception):
    """The error of a rank that raises on purpose."""


@dataclass(frozen=True)
class Fault:
    kind: Kind
    place: Place
    rank: int
    step: int
    """Number of steps before the fault. Ignored for constructors and loads, which come first."""


class Trap:
    """Fires once on the rank of the fault, at its place and step. Does nothing on other ranks."""

    def __init__(self, fault: Fault | None, rank: int, store_port: int, before_fault: Callable[[], None]) -> None:
        """`before_fault` is called just before the fault happens."""
        self._fault = fault if fault is not None and fault.rank == rank else None
        self._store_port, self._before_fault = store_port, before_fault
        self.step = 0
        self.is_armed = self.has_fired = False
        self.inner: Any = None
        """The optimizer that did the last step on this rank."""

    def install(self) -> None:
        """Patch the code under test. The process must not be used for anything else afterwards."""
        self._fire_before(build.EngineBuilder, "make_engine", Place.CONSTRUCTOR)
        self._fire_before(grad_bucket.ReduceBucket, "_launch_reduce", Place.REDUCTION)
        self._fire_before(param_sync.ParamAllGather, "start", Place.GATHER)
        self._fire_before(param_sync.ParamBroadcast, "start", Place.GATHER)
        self._fire_before(serialization.StateSender, "send", Place.CONSOLIDATION)
        self._fire_before(serialization, "receive_state", Place.CONSOLIDATION)
        self._fire_before(saver._SavePlanner, "transform_object", Place.SAVE)
        self._fire_before(reader.ReadPlan, "_read_tensor", Place.LOAD)

    def fire(self, place: Place) -> bool:
        """Fire if this is the place. Return whether the caller must produce a wrong shape."""
        fault = self._fault
        if fault is None or self.has_fired or place != fault.place:
            return False
        if place not in (Place.CONSTRUCTOR, Place.LOAD) and self.step < fault.step:
            return False
        self.has_fired = True
        self._before_fault()
        return self._cause(fault.kind)

    def fire_if_misshapen(self, place: Place) -> bool:
        """Like `fire`, for wrong shapes only."""
        return self._fault is not None and self._fault.kind is Kind.MISSHAPEN and self.fire(place)

    def _cause(self, kind: Kind) -> bool:
        if kind is Kind.RAISES:
            raise InjectedError("on purpose")
        if kind is Kind.KILLED:
            os.kill(os.getpid(), signal.SIGKILL)
        if kind is Kind.STOPPED:
            os.kill(os.getpid(), signal.SIGSTOP)
        if kind is Kind.SLOW:
            time.sleep(DELAY_S)
        if kind is Kind.CUT:
            self._cut_connections()
        return kind is Kind.MISSHAPEN

    def _fire_before(self, owner: Any, name: str, place: Place) -> None:
        original = getattr(owner, name)

        def trapped(*arguments: Any, **options: Any) -> Any:
            if self._can_fire(arguments) and self.fire(place):
                arguments = tuple(_misshape(value) if isinstance(value, _SHAPED) else value for value in arguments)
            return original(*arguments, **options)

        setattr(owner, name, trapped)

    def _can_fire(self, arguments: Sequence[Any]) -> bool:
        """A wrong shape needs an argument that has a shape."""
        needs_shape = self._fault is not None and self._fault.kind is Kind.MISSHAPEN
        return not needs_shape or any(isinstance(value, _SHAPED) for value in arguments)

    def _cut_connections(self) -> None:
        """Cut all connections to other ranks, but not those to the store."""
        for entry in os.listdir("/proc/self/fd"):
            with suppress(OSError), socket.socket(fileno=os.dup(int(entry))) as connection:
                is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6)
                if is_tcp and connection.getpeername()[1] != self._store_port:
                    connection.shutdown(socket.SHUT_RDWR)


_SHAPED = (torch.Tensor, reader.TensorLocation, param_memory.BroadcastPlan)


def _misshape(value: Any) -> Any:
    """Remove one element: of a tensor, of a location in a file, or of a parameter that another rank broadcasts."""
    if isinstance(value, reader.TensorLocation):
        return value._replace(tensor=value.tensor[1:] if value.tensor.dim() else value.tensor.reshape(1))
    if isinstance(value, param_memory.BroadcastPlan):
        received: Any = next(message for message in value.messages if message.owner != dist.get_rank())
        received._params = [_misshape(received._params[0].detach()), *received._params[1:]]
        return value
    return value.reshape(-1)[1:]


# ---- Jobs that load a checkpoint when they start, train, consolidate and save

STEPS = 6
SAVE_EVERY = 2
CONSOLIDATION_STEP = 3
JOB_TIMEOUT_S = 60.0
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([*PRELOAD, "tests.support.fault_injection"])
_job_numbers = count()


class RankArgs(NamedTuple):
    """Arguments of a rank's process."""

    port: int
    run: str
    rank: int
    world_size: int
    folder: Path
    mode: str
    timeout: float
    steps: int
    fault: Fault | None


class Message(NamedTuple):
    """Message from a rank.

    `event` is "began", "saved" or "done" with a step, "fired", or "error" with its text and the ranks that it reports
    as lost. All ranks use the same clock for `time`.
    """

    event: str
    time: float
    step: int = 0
    text: str = ""
    lost: tuple[int, ...] = ()


class JobResult(NamedTuple):
    """The result of a job."""

    messages: list[list[Message]]
    """By rank."""
    stuck: list[int]
    """Ranks that neither exited nor finished in time."""
    ended: float
    """Time at which the last rank exited that was not stopped."""

    def messages_of(self, rank: int, event: str) -> list[Message]:
        return [message for message in self.messages[rank] if message.event == event]

    @property
    def is_done(self) -> bool:
        return all(self.messages_of(rank, "done") for rank in range(len(self.messages)))

    @property
    def digests(self) -> set[str]:
        return {message.text for rank in range(len(self.messages)) for message in self.messages_of(rank, "done")}

    @property
    def last_saved_step(self) -> int:
        """The last step that all ranks reported as saved."""
        return min(
            max((message.step for message in self.messages_of(rank, "saved")), default=0)
            for rank in range(len(self.messages))
        )

    @property
    def first_step(self) -> int:
        return min(self.messages_of(rank, "began")[0].step for rank in range(len(self.messages)))

    @property
    def fired_at(self) -> float | None:
        """The time of the fault."""
        return next((message.time for sent in self.messages for message in sent if message.event == "fired"), None)


def run_job(
    port: int,
    folder: Path,
    mode: str,
    world_size: int,
    fault: Fault | None = None,
    *,
    timeout: float = 30.0,
    steps: int = STEPS,
) -> JobResult:
    """Start all ranks and wait until they exit. A stopped rank continues when all others have exited."""
    run, connections, processes = f"job{next(_job_numbers)}", [], []
    for rank in range(world_size):
        mine, theirs = _CONTEXT.Pipe(duplex=False)
        args = RankArgs(port, run, rank, world_size, folder, mode, timeout, steps, fault)
        process = _CONTEXT.Process(target=_run_rank, args=(theirs, args), daemon=True)
        process.start()
        theirs.close()
        connections.append(mine)
        processes.append(process)
    try:
        deadline = time.monotonic() + JOB_TIMEOUT_S
        stopped = {fault.rank} if fault is not None and fault.kind is Kind.STOPPED else set()
        _join([process for rank, process in enumerate(processes) if rank not in stopped], deadline)
        ended = time.monotonic()
        for rank in stopped:
            with suppress(ProcessLookupError):
                os.kill(processes[rank].pid or 0, signal.SIGCONT)
        _join(processes, deadline)
        stuck = [rank for rank, process in enumerate(processes) if process.exitcode is None]
    finally:
        for process in processes:
            process.kill()
            process.join()
    return JobResult([_receive_all(connection) for connection in connections], stuck, ended)


def _join(processes: list[Any], deadline: float) -> None:
    pending = {process.sentinel for process in processes}
    while pending and (ready := wait(list(pending), max(0.0, deadline - time.monotonic()))):
        pending -= set(ready)


def _receive_all(connection: Connection[None, Message]) -> list[Message]:
    messages = []
    with suppress(EOFError, OSError):
        while connection.poll():
            messages.append(connection.recv())
    return messages


# -- on a rank


def _run_rank(connection: Connection[Message, None], args: RankArgs) -> None:
    def report(event: str, step: int = 0, text: str = "", error: BaseException | None = None) -> None:
        text = text if error is None else f"{type(error).__name__}: {error}"
        lost = error.exited + error.unresponsive if isinstance(error, RankLostError) else ()
        connection.send(Message(event, time.monotonic(), step, text, lost))

    store = _init_process_group(args)
    trap = Trap(args.fault, args.rank, args.port, lambda: report("fired"))
    trap.install()
    try:
        _run_with_one_restart(_TrainingScript(args, trap, report), report)
        status = 0
    except BaseException as error:
        report("error", error=error)
        sys.excepthook(type(error), error, None)  # as if the error had ended a script
        status = 1
    atexit._run_exitfuncs()
    del store
    os._exit(status)


def _init_process_group(args: RankArgs) -> TCPStore:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    sys.excepthook = lambda *_: None  # errors are reported to the parent, not printed
    torch.set_num_threads(1)
    store = connect_store(args.port)
    if args.mode == STORE_ON_RANK_0:
        store = _store_on_rank_0(args, store)
    dist.init_process_group(
        "gloo",
        store=PrefixStore(args.run, store),
        rank=args.rank,
        world_size=args.world_size,
        timeout=timedelta(seconds=args.timeout),
    )
    return store


def _store_on_rank_0(args: RankArgs, outside: TCPStore) -> TCPStore:
    """Return a store that ends with rank 0, as without torchrun."""
    if args.rank == 0:
        store = open_store()
        outside.set(f"{args.run}/port", str(store.port))
        return store
    return connect_store(int(outside.get(f"{args.run}/port")))


def _run_with_one_restart(script: _TrainingScript, report: Callable[..., None]) -> None:
    """After an error that all ranks raised, restart once from the last checkpoint."""
    try:
        script.run()
    except (ZeroError, InjectedError, RuntimeError, ValueError) as error:
        if isinstance(error, RankLostError) or script.is_in_user_code:
            raise
        report("error", error=error)
        script.run()


class _TrainingScript:
    """A user's training script."""

    def __init__(self, args: RankArgs, trap: Trap, report: Callable[..., None]) -> None:
        self._args, self._trap, self._report = args, trap, report
        self.is_in_user_code = False
        """Whether an injected error comes from user code: other ranks do not see it."""

    def run(self) -> None:
        torch.manual_seed(0)
        trap, args = self._trap, self._args
        model = nn.Sequential(nn.Linear(10, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 4))
        if trap.fire_if_misshapen(Place.CONSTRUCTOR):
            model[2] = nn.Linear(12, 12, bias=False)
        forward, optimizer = MODES[args.mode](model, _make_trapped_class(trap))
        trap.step = step = self._load(model, optimizer)
        self._report("began", step)
        while step < args.steps:
            self._train(forward, optimizer, step)
            trap.step = step = step + 1
            if step == CONSOLIDATION_STEP:
                if trap.fire_if_misshapen(Place.CONSOLIDATION):
                    trap.inner.misshape_state()
                optimizer.full_state_dict(to=0)
            if step % SAVE_EVERY == 0:
                checkpoint.save(args.folder, step=step, model=model, optimizer=optimizer, keep=2)
                self._report("saved", step)
        self._report("done", step, _digest(model, optimizer))

    def _load(self, model: nn.Module, optimizer: ZeroRedundancyOptimizer) -> int:
        if checkpoint.latest(self._args.folder) is None:
            return 0
        return checkpoint.load(self._args.folder, model=model, optimizer=optimizer).step or 0

    def _train(self, forward: Callable[[torch.Tensor], torch.Tensor], optimizer: Any, step: int) -> None:
        generator = torch.Generator().manual_seed(100 * step + self._args.rank)
        self.is_in_user_code = True
        loss = forward(torch.randn(3, 10, generator=generator).requires_grad_()).square().sum()
        grad = torch.ones(()) if not self._trap.fire(Place.BACKWARD) else torch.ones(3)
        torch.autograd.backward(loss, grad)
        self.is_in_user_code = False
        self._trap.is_armed = True  # not while the library probes the class
        optimizer.step()
        self._trap.is_armed = False
        optimizer.zero_grad()


def _make_trapped_class(trap: Trap) -> type[torch.optim.Optimizer]:
    class TrappedAdamW(torch.optim.AdamW):
        def step(self, *arguments: Any, **options: Any) -> Any:
            if trap.is_armed:
                trap.inner = self
                if trap.fire(Place.INNER_STEP):
                    self.misshape_state()
            return super().step(*arguments, **options)

        def misshape_state(self) -> None:
            """Give a tensor of the state a wrong shape."""
            state = next(iter(self.state.values()))
            state["exp_avg"] = state["exp_avg"][1:]

    return TrappedAdamW


def _digest(model: nn.Module, optimizer: ZeroRedundancyOptimizer) -> str:
    """Return a digest of the parameters, and of the full state on rank 0."""
    params = b"".join(param.detach().numpy().tobytes() for param in model.parameters())
    full_state = map_tensors(optimizer.full_state_dict(to=0), lambda tensor: (tensor.dtype, tensor.numpy().tobytes()))
    state = pickle.dumps(full_state)
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, (hashlib.sha256(params).hexdigest(), hashlib.sha256(state).hexdigest()))
    assert len({first for first, _ in digests}) == 1, "ranks have different parameters"
    return f"{digests[0]}"


ALL_CHECKS: dict[str, Any] = {
    "peer_checkpoint": PeerCheckpoint(every=2),
    "consistency_check": ConsistencyCheck(),
    "nonfinite": NonFiniteGrads("skip"),
}
"""Options with all periodic checks and peer checkpoints."""
STORE_ON_RANK_0 = "store on rank 0"
ForwardAndOptimizer = tuple[Callable[[torch.Tensor], torch.Tensor], ZeroRedundancyOptimizer]


def _make_sharded(model: nn.Module, optimizer_class: Any, **options: Any) -> ForwardAndOptimizer:
    group_options = {key: options.pop(key) for key in ("shard_group_size",) if key in options}
    config = ZeroConfig(partition=FlatShards(bucket_bytes=256), **options)
    return model, shard(model, optimizer_class, lr=0.01, config=config, **group_options)


def _make_drop_in(model: nn.Module, optimizer_class: Any) -> ForwardAndOptimizer:
    # Otherwise DDP rebuilds its buckets after the first pass, which changes the summation order.
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    return wrapped, ZeroRedundancyOptimizer(wrapped.parameters(), optimizer_class, lr=0.01)


MODES: dict[str, Callable[[nn.Module, Any], ForwardAndOptimizer]] = {
    "shard": _make_sharded,
    "overlapped": lambda model, cls: _make_sharded(model, cls, overlap_param_gather=True, **ALL_CHECKS),
    "hybrid": lambda model, cls: _make_sharded(model, cls, shard_group_size=2),
    "drop-in": _make_drop_in,
    STORE_ON_RANK_0: _make_sharded,
}


# ---- The outcome of each fault

RANKS = 4
TIMEOUT = 30.0
"""Timeout of the process group. A rank that raises earlier did not wait for it."""
SHORT_TIMEOUT = 5.0
"""Timeout of the process group if a rank is stopped, which only the timeout detects."""
MARGIN = 15.0
"""Seconds that a busy machine may add. A hanging rank takes longer."""
EXIT_TIMEOUT = 7.0
"""Seconds within which processes exit after all have raised: at most one if a thread never gets its message, plus what
a busy machine adds. No process may wait for the 10 seconds during which threads can still receive."""
_FATAL = (Kind.KILLED, Kind.STOPPED, Kind.CUT)


class Outcome(NamedTuple):
    """The outcome of one fault."""

    fault: Fault
    mode: str
    errors: tuple[str, ...]
    """Error classes on the other ranks."""
    seconds: float
    """Seconds until every other rank had raised; 0 if none had to."""
    restarted: bool


class Matrix:
    """Runs each fault in its own job."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._store = folder, open_store()
        self._run_numbers = count()

    def inject(self, fault: Fault, mode: str) -> Outcome:
        """Run one fault. Raises `AssertionError` if ranks hang, a checkpoint is lost, or results differ."""
        folder = self._make_folder(fault, mode)
        timeout = SHORT_TIMEOUT if fault.kind is Kind.STOPPED else TIMEOUT
        result = run_job(self._store.port, folder, mode, RANKS, fault, timeout=timeout)
        assert result.fired_at is not None, "the fault did not happen"
        assert not result.stuck, f"ranks {result.stuck} hang: {result.messages}"
        others = [rank for rank in range(RANKS) if rank != fault.rank]
        errors = [result.messages_of(rank, "error") for rank in others]
        if fault.kind is Kind.SLOW:
            assert not any(errors), f"a slow rank must not cause errors: {errors}"
        else:
            assert all(errors), f"a rank did not raise: {result.messages}"
        self._assert_same_result(result, folder, mode)
        if fault.kind in _FATAL:
            _assert_lost_rank_is_named(result, fault, mode)
        seconds = max((messages[0].time - result.fired_at for messages in errors if messages), default=0.0)
        # Hazard: gloo does not wake a sender whose own connections have closed. That rank raises at the timeout.
        own = result.messages_of(fault.rank, "error") if fault.kind is Kind.CUT else []
        raised = max((messages[-1].time for messages in [*errors, own] if messages), default=result.ended)
        assert fault.kind not in _FATAL or result.ended - raised < EXIT_TIMEOUT, "ranks that raised do not exit"
        assert seconds < (SHORT_TIMEOUT + MARGIN if fault.kind is Kind.STOPPED else TIMEOUT)
        classes = tuple(sorted({messages[0].text.partition(":")[0] for messages in errors if messages}))
        return Outcome(fault, mode, classes, seconds, restarted=not result.is_done)

    def _assert_same_result(self, result: JobResult, folder: Path, mode: str) -> None:
        if not result.is_done:
            resumed = run_job(self._store.port, folder, mode, RANKS)
            assert resumed.is_done, f"the job does not resume: {resumed.messages}"
            assert resumed.first_step >= result.last_saved_step, "a finished checkpoint was lost"
            result = resumed
        assert result.digests == self.digests_without_fault(mode), "results differ"

    @cache  # noqa: B019 (lives as long as the tests)
    def digests_without_fault(self, mode: str) -> frozenset[str]:
        with TemporaryDirectory(dir=self._folder) as folder:
            return frozenset(run_job(self._store.port, Path(folder, "run"), mode, RANKS).digests)

    def _make_folder(self, fault: Fault, mode: str) -> Path:
        folder = self._folder / f"run{next(self._run_numbers)}"
        if fault.place is Place.LOAD:
            shutil.copytree(self.checkpoint_folder(mode), folder)
        return folder

    @cache  # noqa: B019
    def checkpoint_folder(self, mode: str) -> Path:
        """Return a directory with a checkpoint from the middle of a run."""
        folder = self._folder / f"saved-{mode}"
        run_job(self._store.port, folder, mode, RANKS, steps=2 * SAVE_EVERY)
        return folder


def _assert_lost_rank_is_named(result: JobResult, fault: Fault, mode: str) -> None:
    """Check that our errors name the lost rank. Errors of torch in DDP's backward pass do not."""
    texts = [
        message.text for rank in range(RANKS) if rank != fault.rank for message in result.messages_of(rank, "error")
    ]
    ours = [text for text in texts if text.startswith("RankLostError")]
    assert mode == "drop-in" or len(ours) == len(texts), f"a rank does not name the lost rank: {texts}"
    lost_rank = re.compile(rf"ranks? [\d, ]*\b{fault.rank}\b[\d, ]* of")
    if mode == STORE_ON_RANK_0 and fault.kind in (Kind.KILLED, Kind.STOPPED):
        _assert_no_rank_is_named(result, texts)
        return
    naming = [text for text in ours if lost_rank.search(text.partition("\n")[0])]
    if fault.kind is not Kind.CUT:  # then all ranks are alive
        assert len(naming) == len(ours), f"the lost rank is not named: {texts}"


def _assert_no_rank_is_named(result: JobResult, texts: Sequence[str]) -> None:
    """Check that ranks that lost the store say so, and report no rank as lost."""
    assert all("the job's store does not answer" in text for text in texts), texts
    reporting = [message for messages in result.messages for message in messages if message.lost]
    assert not reporting, f"live ranks are reported as lost: {texts}"


def cells() -> list[tuple[Kind, Place, str]]:
    """Return all cases. Under the drop-in DDP reduces gradients, so faults there are not tested."""
    every = [(kind, place, mode) for mode in MODES for kind in Kind for place in Place]
    return [cell for cell in every if cell[1:] != (Place.REDUCTION, "drop-in")]
