"""Jobs whose ranks are killed: while they save, or while they train with peer checkpoints."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore

from tests.support.checkpoints import save
from tests.support.oracles import sum_in_order
from tests.support.pool import PRELOAD, connect_store
from zeroshard import (
    CheckpointError,
    FlatShards,
    PeerCheckpoint,
    RankLostError,
    ShardedOptimizer,
    ZeroConfig,
    ZeroRedundancyOptimizer,
    checkpoint,
    shard,
)
from zeroshard._types import Rank
from zeroshard.comm.collectives import BackgroundComm, Comm
from zeroshard.peer_checkpoint import restore
from zeroshard.peer_checkpoint.restore import restore_from_peers
from zeroshard.peer_checkpoint.snapshot import PeerCheckpointer, PeerSnapshots
from zeroshard.state.serialization import StateSender

# ---- Jobs that save continuously

MAX_WAIT_S = 60.0
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(PRELOAD)


class SaveMessage(NamedTuple):
    """Message from a rank: `event` is "loaded" or "saved" with a step, or "failed" with a reason."""

    event: str
    step: int
    reason: str = ""


class RankArgs(NamedTuple):
    """Arguments of a rank's process."""

    port: int
    run: str
    rank: int
    world_size: int
    folder: Path
    in_background: bool


class SavingJob:
    """The ranks of one job. It resumes from the latest checkpoint, verifies its contents and saves continuously."""

    def __init__(self, port: int, name: str, world_size: int, folder: Path, *, in_background: bool) -> None:
        self._connections: list[Connection[None, SaveMessage]] = []
        self._processes = []
        for rank in range(world_size):
            mine, theirs = _CONTEXT.Pipe(duplex=False)
            args = RankArgs(port, name, rank, world_size, folder, in_background)
            process = _CONTEXT.Process(target=_run_rank, args=(theirs, args), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(mine)
            self._processes.append(process)

    def loaded_step(self) -> int:
        """Return the step from which all ranks resumed."""
        steps = set()
        for connection in self._connections:
            assert connection.poll(MAX_WAIT_S), "a rank did not start"
            message = connection.recv()
            assert message.event == "loaded", message
            steps.add(message.step)
        assert len(steps) == 1
        return int(steps.pop())

    def kill(self, draw: random.Random, longest: float) -> int:
        """Kill one or all ranks at a random time, then the rest. Return the last step that all of them had saved."""
        time.sleep(draw.uniform(0, longest))  # the outcome must be right at any time
        first = draw.choice([self._processes, [draw.choice(self._processes)]])
        self._check_messages_before_kill()
        for process in first:
            process.kill()
        for process in self._processes:
            if process not in first:
                process.join(draw.uniform(0, 0.1))  # it may detect the loss and clean up before it is killed
                process.kill()
            process.join(MAX_WAIT_S)
            assert process.exitcode is not None
        return min(self._last_saved_step(connection) for connection in self._connections)

    def _check_messages_before_kill(self) -> None:
        self._steps = [0 for _ in self._connections]
        for rank, connection in enumerate(self._connections):
            while connection.poll():
                message = connection.recv()
                assert message.event == "saved", message
                self._steps[rank] = message.step

    def _last_saved_step(self, connection: Connection[None, SaveMessage]) -> int:
        last = self._steps[self._connections.index(connection)]
        with suppress(EOFError, OSError):
            while connection.poll():
                message = connection.recv()
                last = message.step if message.event == "saved" else last
        return last


def _run_rank(connection: Connection[SaveMessage, None], args: RankArgs) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=PrefixStore(args.run, connect_store(args.port)),
        rank=args.rank,
        world_size=args.world_size,
        timeout=timedelta(seconds=MAX_WAIT_S),
    )
    try:
        _save_continuously(partial(_report, connection), args)
    except BaseException as error:
        _report(connection, "failed", 0, repr(error))
        os._exit(1)


def _report(connection: Connection[SaveMessage, None], event: str, step: int, reason: str = "") -> None:
    connection.send(SaveMessage(event, step, reason))


def _save_continuously(report: partial[None], args: RankArgs) -> None:
    model = nn.Sequential(nn.Linear(50, 40), nn.Linear(40, 30))
    optimizer = shard(model, torch.optim.AdamW)
    torch.autograd.backward(model(torch.ones(1, 50)).sum())
    optimizer.step()
    step, folder = 0, args.folder
    if checkpoint.latest(folder) is not None:
        step = checkpoint.load(folder, model=model, optimizer=optimizer).step or 0
        assert step
        _check_values(model, optimizer, step)
    dist.barrier()
    report("loaded", step)
    while True:
        step += 1
        _fill_with_step(model, optimizer, step)
        save(folder, in_background=args.in_background, step=step, model=model, optimizer=optimizer, keep=2)
        assert_no_leftovers(folder)
        report("saved", step)
        dist.barrier()


def assert_no_leftovers(folder: Path) -> None:
    """Check that the directory contains only checkpoints, and at most two of them."""
    names = sorted(entry.name for entry in folder.iterdir())
    steps = [name for name in names if name.startswith("step-")]
    assert names == [".lock", "latest", *steps], names
    assert len(steps) <= 2, names


def _fill_with_step(model: nn.Module, optimizer: ZeroRedundancyOptimizer, step: int) -> None:
    """Set all values to the step."""
    for tensor in _tensors(model, optimizer):
        tensor.fill_(step)


def _check_values(model: nn.Module, optimizer: ZeroRedundancyOptimizer, step: int) -> None:
    for tensor in _tensors(model, optimizer):
        assert bool((tensor == step).all()), f"step {step} has values of another step"


def _tensors(model: nn.Module, optimizer: ZeroRedundancyOptimizer) -> list[torch.Tensor]:
    values = [value for entry in optimizer.state.values() for value in entry.values()]
    return [param.detach() for param in model.parameters()] + [
        value for value in values if isinstance(value, torch.Tensor)
    ]


# ---- Jobs with peer checkpoints that resume in the remaining processes

GROUP_TIMEOUT = timedelta(seconds=10)
"""How long ranks wait for each other."""
EVERY = 3
"""Steps from one snapshot to the next."""
ADAMW: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1, "foreach": True}

COMPARED_STEPS = 4
"""Steps after a start or a restore. Then values are compared."""

Values = dict[str, list[Any]]
"""Values of parameters. Not tensors: a dead process could not send those."""


class SnapshotKill(NamedTuple):
    """When a process kills itself: while it takes the snapshot of a step."""

    step: int
    moment: Literal["partly sent", "all reported"]
    """After it has sent a part of its snapshot, or, as rank 0, after all others reported that they have theirs."""


RESTORE_KILLS: dict[str, tuple[Any, str]] = {
    "comparing snapshots": (restore, "_take_inventory"),
    "sending shards": (StateSender, "send"),
    "writing restored parameters": (restore, "_write_params_and_buffers"),
    "taking the next snapshot": (PeerCheckpointer, "capture"),
}
"""Phases of a restore, each with the function that kills the process instead of running."""


class Order(NamedTuple):
    """Message to a process: act as this rank of a job. Start, or restore from peers, and train until a rank is lost."""

    run: str
    rank: int
    world_size: int
    is_start: bool
    snapshot_kill: SnapshotKill | None = None
    restore_kill: str = ""
    """One of `RESTORE_KILLS`, or none."""


class Message(NamedTuple):
    """Message from a process.

    `event` is "started" or "trained" with a step, "lost" when another rank is gone, "dying" when it is about to kill
    itself, "rejected" or "failed" with a reason.
    """

    event: str
    step: int = 0
    values: Values | None = None
    reason: str = ""
    opened: Sequence[str] = ()
    """Files that `restore_from_peers` opened."""
    time: float = 0.0
    """Time of the loss or of the kill, on a clock that all processes share."""


class RankProcess:
    """A process that is a rank of one job after another, and the connection to it."""

    def __init__(self, port: int, *, overlap: bool) -> None:
        self._connection: Connection[Order | None, Message]
        self._connection, remote = _CONTEXT.Pipe()
        self.process = _CONTEXT.Process(target=_follow_orders, args=(remote, port, overlap), daemon=True)
        self.process.start()
        remote.close()

    def send(self, order: Order) -> None:
        self._connection.send(order)

    def receive(self, event: str) -> Message:
        assert self._connection.poll(MAX_WAIT_S), f"no message: expected {event!r}"
        message = self._connection.recv()
        assert message.event == event, message
        return message

    def kill(self) -> None:
        self.process.kill()
        self.process.join(MAX_WAIT_S)

    def close(self) -> None:
        self.kill()
        self._connection.close()


def train_reference(world_sizes: Sequence[int]) -> Values:
    """Train a plain model in one process, without interruption. `world_sizes`: how many ranks' data each step uses."""
    torch.set_num_threads(1)  # as on the ranks: more threads change the summation order
    model = _make_model(0)
    plain = torch.optim.AdamW(model.parameters(), **ADAMW)
    for step, world_size in enumerate(world_sizes):
        by_rank = []
        for rank in range(world_size):
            plain.zero_grad()
            _loss(model, step, rank).backward()  # type: ignore[no-untyped-call]
            by_rank.append([param.grad for param in model.parameters()])
        for param, *grads in zip(model.parameters(), *by_rank, strict=True):
            param.grad = sum_in_order([grad * (1 / world_size) for grad in grads if grad is not None])
        plain.step()
    return _values(model)


def _values(model: nn.Module) -> Values:
    return {name: value.tolist() for name, value in sorted(model.named_parameters())}


def _make_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 30), nn.Tanh(), nn.BatchNorm1d(30), nn.Linear(30, 3)
    )


def _loss(model: nn.Module, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    out: Tensor = model(torch.randn(4, 6, generator=generator))
    return (out - torch.randn(4, 3, generator=generator)).square().mean()


def _follow_orders(connection: Connection[Message, Order | None], port: int, overlap: bool) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    trainer = _Trainer(connection, port, overlap=overlap)
    try:
        while order := connection.recv():
            trainer.follow(order)
    except BaseException as error:
        connection.send(Message("failed", reason=repr(error)))
        os._exit(1)


class _Trainer:
    """Follows orders. Keeps its model and its peers' snapshots from job to job."""

    def __init__(self, connection: Connection[Message, Order | None], port: int, *, overlap: bool) -> None:
        self._connection, self._port = connection, port
        partition = FlatShards(bucket_bytes=400)
        self._config = ZeroConfig(
            partition=partition, peer_checkpoint=PeerCheckpoint(every=EVERY), overlap_param_gather=overlap
        )
        self._model = _make_model(os.getpid())
        self._snapshots: PeerSnapshots | None = None
        self._opened: list[str] = []
        self._records_opens = False
        sys.addaudithook(self._audit)

    def follow(self, order: Order) -> None:
        store = PrefixStore(order.run, connect_store(self._port))
        size = order.world_size
        dist.init_process_group("gloo", store=store, rank=order.rank, world_size=size, timeout=GROUP_TIMEOUT)
        try:
            self._train(order)
        except RankLostError as error:
            self._connection.send(Message("lost", reason=repr(error), time=time.monotonic()))
        except CheckpointError as error:
            self._connection.send(Message("rejected", reason=str(error)))
        dist.destroy_process_group()

    def _train(self, order: Order) -> None:
        if order.is_start:
            self._model = _make_model(order.rank)
        optimizer = shard(self._model, torch.optim.AdamW, config=self._config, **ADAMW)
        if order.snapshot_kill is not None:
            _kill_in_snapshot(order.snapshot_kill, optimizer)
        if order.restore_kill:
            self._kill_instead_of(*RESTORE_KILLS[order.restore_kill])
        step = self._start(optimizer) if order.is_start else self._restore(optimizer)
        self._snapshots = optimizer.peer_snapshots
        self._connection.send(Message("started", step, opened=self._opened))
        for number in range(step, step + COMPARED_STEPS):
            self._iterate(optimizer, number)
        self._connection.send(Message("trained", step + COMPARED_STEPS, _values(self._model)))
        for number in count(step + COMPARED_STEPS):
            self._iterate(optimizer, number)

    def _start(self, optimizer: ShardedOptimizer) -> int:
        for number in range(EVERY):
            self._iterate(optimizer, number)
        assert optimizer._peer_checkpointer is not None
        optimizer._peer_checkpointer.wait()
        return EVERY

    def _restore(self, optimizer: ShardedOptimizer) -> int:
        self._opened, self._records_opens = [], True
        step = restore_from_peers(optimizer, self._snapshots)
        self._records_opens = False
        return step

    def _kill_instead_of(self, owner: Any, name: str) -> None:
        def report_and_die(*_: Any, **__: Any) -> NoReturn:
            self._connection.send(Message("dying", time=time.monotonic()))
            _die()

        setattr(owner, name, report_and_die)

    def _iterate(self, optimizer: ShardedOptimizer, number: int) -> None:
        torch.autograd.backward(_loss(self._model, number, dist.get_rank()))
        optimizer.step()
        optimizer.zero_grad()

    def _audit(self, event: str, details: tuple[Any, ...]) -> None:
        if self._records_opens and event == "open":
            self._opened.append(str(details[0]))


def _die() -> NoReturn:
    signal.raise_signal(signal.SIGKILL)
    raise AssertionError("not reached")


def _kill_in_snapshot(kill: SnapshotKill, optimizer: ShardedOptimizer) -> None:
    """Make this process kill itself while it takes the snapshot."""

    def is_due() -> bool:
        # Not the step of the optimizer: it trains on while a thread exchanges the snapshot.
        incoming = None if optimizer.peer_snapshots is None else optimizer.peer_snapshots._incoming
        return incoming is not None and incoming.step == kill.step

    send, send_flag = StateSender.send, BackgroundComm._send_flag

    def send_part_and_die(self: StateSender, comm: Comm, to: Rank) -> None:
        if is_due():
            comm.send(torch.tensor([1000]), to).wait()
            _die()
        send(self, comm, to)

    def die_before_confirming(self: BackgroundComm, flag: Tensor, rank: Rank) -> None:
        return _die() if is_due() else send_flag(self, flag, rank)

    if kill.moment == "partly sent":
        StateSender.send = send_part_and_die  # type: ignore[method-assign]
    else:
        BackgroundComm._send_flag = die_before_confirming  # type: ignore[method-assign]
