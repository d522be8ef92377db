"""Jobs on several hosts: network namespaces with names, addresses and links of their own, joined by a bridge.

The bridge has a namespace of its own, so nothing of the machine's network is touched. A namespace ends with the process
that was started for it, and that one ends with the test: a test that is killed leaves nothing behind.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from examples.elastic import loss_of, make_model, part_of_batch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore

from tests.support.launch import fingerprint
from tests.support.pool import PRELOAD
from zeroshard import checkpoint, shard
from zeroshard.checkpoint import saver

# ---- Hosts

DEVICE = "eth0"
"""What a host calls its link."""
_PREFIX = "10.77.0"
HUB = f"{_PREFIX}.1"
"""The address of the bridge, which all hosts reach."""
_NEW_UTS, _NEW_NET = 0x04000000, 0x40000000


class NotPermittedError(Exception):
    """The machine does not allow it, and why."""


class Namespace:
    """A host name and a network, with the loopback interface alone at first."""

    def __init__(self, name: str) -> None:
        self.name = name
        begin = f"set -e; echo {name} > /proc/sys/kernel/hostname; ip link set lo up; echo ready; exec cat"
        self._keeper = _started(["unshare", "--net", "--uts", "sh", "-c", begin])

    @property
    def pid(self) -> int:
        return self._keeper.pid

    def run(self, *command: str) -> str:
        """What a command prints that runs inside."""
        within = ["nsenter", "--target", str(self.pid), "--net", "--uts", *command]
        done = subprocess.run(within, capture_output=True, text=True, check=False, timeout=20)
        if done.returncode:
            raise NotPermittedError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def close(self) -> None:
        self._keeper.kill()
        self._keeper.communicate()


def _started(command: list[str]) -> subprocess.Popen[str]:
    """Once it has printed a line."""
    try:
        pipes: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        process = subprocess.Popen(command, text=True, start_new_session=True, **pipes)
    except OSError as error:
        raise NotPermittedError(f"{command[0]}: {error}") from None
    assert process.stdout is not None
    if not process.stdout.readline():
        raise NotPermittedError(f"{command[0]}: {process.communicate()[1].strip()}")
    return process


def enter(pid: int) -> None:
    """Move this thread, and all that it starts, to where that process is."""
    libc = ctypes.CDLL(None, use_errno=True)
    for kind, flag in (("net", _NEW_NET), ("uts", _NEW_UTS)):
        with open(f"/proc/{pid}/ns/{kind}") as there:
            if libc.setns(there.fileno(), flag):
                raise OSError(ctypes.get_errno(), f"setns {kind} of {pid}")


class Hosts:
    """So many of them, each linked to the hub."""

    def __init__(self, count: int) -> None:
        self._all: list[Namespace] = []
        self.last_cut = 0.0
        """The moment, as `time.monotonic` has it."""
        try:
            self.hub = self._made("hub")
            self.hub.run(*_ip("link add br0 type bridge"))
            self.hub.run(*_ip(f"addr add {HUB}/24 dev br0"))
            self.hub.run(*_ip("link set br0 up"))
            self.hosts = [self._linked(number) for number in range(count)]
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        for namespace in self._all:
            with suppress(ProcessLookupError):
                namespace.close()

    def cut(self, host: int) -> None:
        """Its link carries nothing from now on. No connection is closed by that: whoever waits just hears nothing."""
        self.hub.run(*_ip(f"link set {_port(host)} down"))
        self.last_cut = time.monotonic()

    def mend(self, host: int) -> None:
        self.hub.run(*_ip(f"link set {_port(host)} up"))

    def slow_down(self, host: int, rate: str) -> None:
        """Its link carries no more than `rate`, in both directions."""
        limit = f"root tbf rate {rate} burst 16kb latency 400ms".split()
        self.hub.run("tc", "qdisc", "add", "dev", _port(host), *limit)
        self.hosts[host].run("tc", "qdisc", "add", "dev", DEVICE, *limit)

    def times_held_back(self, host: int) -> int:
        """How often its link had to wait because it is slow."""
        (found,) = json.loads(self.hosts[host].run("tc", "-s", "-j", "qdisc", "show", "dev", DEVICE))
        return int(found["overlimits"])

    def bytes_sent(self, host: int) -> int:
        """By a host to all others."""
        (found,) = json.loads(self.hosts[host].run(*_ip(f"-s -j link show {DEVICE}")))
        return int(found["stats64"]["tx"]["bytes"])

    def _made(self, name: str) -> Namespace:
        namespace = Namespace(name)
        self._all.append(namespace)
        return namespace

    def _linked(self, number: int) -> Namespace:
        host, port = self._made(f"host{number}"), _port(number)
        self.hub.run(*_ip(f"link add {port} type veth peer name far{number}"))
        self.hub.run(*_ip(f"link set far{number} netns {host.pid} name {DEVICE}"))
        self.hub.run(*_ip(f"link set {port} master br0 up"))
        host.run(*_ip(f"addr add {_PREFIX}.{number + 2}/24 dev {DEVICE}"))
        host.run(*_ip(f"link set {DEVICE} up"))
        return host


def _port(host: int) -> str:
    """Its end of the link, at the hub."""
    return f"port{host}"


def _ip(words: str) -> list[str]:
    return ["ip", *words.split()]


def why_not() -> str | None:
    """Why this machine cannot have such hosts; None if it can. Found by making two."""
    if os.name != "posix":
        return "no namespaces here"
    try:
        with Hosts(2) as hosts:
            hosts.slow_down(0, "100mbit")
            hosts.cut(1)
    except (NotPermittedError, OSError) as error:
        return str(error)
    return None


# ---- A job on them, which trains as `examples/elastic.py` does

LONG = 60.0
"""Seconds: no wait is longer."""
_PORT = 29500
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(PRELOAD)

Place = Literal["forward", "step", "save"]
"""Before a forward pass, between backward and the step, or while a checkpoint is written."""


class Stop(NamedTuple):
    """Where a rank waits until it is told to go on."""

    rank: int
    step: int
    place: Place


@dataclass(frozen=True)
class Plan:
    """What all ranks do. `timeout`: seconds that a rank waits for another; `behind`: saves go on in the background;
    `options`: arguments for `shard`."""

    folder: Path
    steps: int = 12
    every: int = 4
    width: int = 128
    timeout: float = LONG
    stop: Stop | None = None
    behind: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


class News(NamedTuple):
    """From a rank: `what` is "loaded" or "stopped", with a step, "done", with a fingerprint of the model, or "failed",
    with the error and the names of its classes."""

    what: str
    moment: float
    step: int = 0
    text: str = ""
    kinds: tuple[str, ...] = ()


class Seat(NamedTuple):
    """Where a rank works."""

    run: str
    rank: int
    world_size: int
    local_rank: int
    local_size: int
    namespace: int


class Exchange:
    """The store of a job, at the hub: all hosts reach it while their links hold."""

    def __init__(self, hosts: Hosts) -> None:
        self._end, theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=_serve, args=(theirs, hosts.hub.pid), daemon=True)
        self._process.start()
        theirs.close()
        assert self._end.poll(LONG), "the store did not begin"
        self._end.recv()

    def close(self) -> None:
        self._process.kill()
        self._process.join(LONG)


def _serve(end: Connection[bool, None], namespace: int) -> None:
    enter(namespace)
    store = TCPStore(HUB, _PORT, is_master=True, wait_for_workers=False)
    end.send(True)
    with suppress(EOFError):
        end.recv()
    del store


class Job:
    """`seats` names the host of each rank; ranks of one host follow each other."""

    def __init__(self, hosts: Hosts, name: str, seats: Sequence[int], plan: Plan) -> None:
        self.seats, self.plan = seats, plan
        self._ends: list[Connection[str, News]] = []
        self._ranks: list[ForkServerProcess] = []
        self._news: list[list[News]] = [[] for _ in seats]
        for rank, host in enumerate(seats):
            mine, theirs = _CONTEXT.Pipe()
            size, place = seats.count(host), rank - seats.index(host)
            seat = Seat(name, rank, len(seats), place, size, hosts.hosts[host].pid)
            process = _CONTEXT.Process(target=_work, args=(theirs, seat, plan), daemon=True)
            process.start()
            theirs.close()
            self._ends.append(mine)
            self._ranks.append(process)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for process in self._ranks:
            process.kill()
            process.join(LONG)
        if error is not None:
            for rank, host in enumerate(self.seats):
                sys.stderr.write(f"rank {rank} on host {host} has told: {self._news[rank]}\n")

    def wait_for(self, what: str, rank: int) -> News:
        """The news of a rank that is the first of its kind."""
        while not (found := [news for news in self._news[rank] if news.what == what]):
            assert self._ends[rank].poll(LONG), f"rank {rank} did not tell that it has {what}"
            try:
                self._news[rank].append(self._ends[rank].recv())
            except EOFError:
                raise AssertionError(f"rank {rank} has ended and did not tell that it has {what}") from None
        return found[0]

    def go_on(self, rank: int) -> None:
        self._ends[rank].send("go")

    def kill(self, host: int) -> None:
        """All ranks of a host."""
        for rank in self.ranks_of(host):
            self._ranks[rank].kill()
        for rank in self.ranks_of(host):
            self._ranks[rank].join(LONG)

    def ranks_of(self, *hosts: int) -> list[int]:
        return [rank for rank, host in enumerate(self.seats) if host in hosts]

    def from_all(self, what: str, ranks: Sequence[int] | None = None) -> list[News]:
        return [self.wait_for(what, rank) for rank in (range(len(self.seats)) if ranks is None else ranks)]

    def ended(self, ranks: Sequence[int]) -> float:
        """When the last of these processes has ended, by itself."""
        for rank in ranks:
            self._ranks[rank].join(LONG)
            assert self._ranks[rank].exitcode is not None, f"rank {rank} has not ended"
        return time.monotonic()


def _work(end: Connection[News, str], seat: Seat, plan: Plan) -> None:
    enter(seat.namespace)
    local = {"LOCAL_RANK": str(seat.local_rank), "LOCAL_WORLD_SIZE": str(seat.local_size)}
    os.environ.update(GLOO_SOCKET_IFNAME=DEVICE, **local)
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            store=PrefixStore(seat.run, TCPStore(HUB, _PORT, is_master=False)),
            rank=seat.rank,
            world_size=seat.world_size,
            timeout=timedelta(seconds=plan.timeout),
        )
        text = _train(end, plan)
        dist.destroy_process_group()
        end.send(News("done", time.monotonic(), plan.steps, text))
    except Exception as error:
        kinds = tuple(kind.__name__ for kind in type(error).__mro__)
        end.send(News("failed", time.monotonic(), text=f"{type(error).__name__}: {error}", kinds=kinds))
    atexit._run_exitfuncs()  # as where no process has forked this one


def _train(end: Connection[News, str], plan: Plan) -> str:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = make_model(plan.width)
    optimizer = shard(model, torch.optim.AdamW, lr=1e-2, **plan.options)
    start, handle, parts = 0, None, dict[str, Any](model=model, optimizer=optimizer)
    if checkpoint.latest(plan.folder) is not None:
        start = checkpoint.load(plan.folder, **parts).step or 0
    end.send(News("loaded", time.monotonic(), start))

    def stop(step: int, place: Place) -> None:
        if plan.stop == Stop(rank, step, place):
            end.send(News("stopped", time.monotonic(), step))
            end.recv()

    write_shards = saver.write_shards

    def stop_and_write(*args: Any) -> Any:
        stop(step // plan.every * plan.every, "save")
        return write_shards(*args)

    setattr(saver, "write_shards", stop_and_write)  # noqa: B010 (mypy knows it as another's)
    for step in range(start + 1, plan.steps + 1):
        stop(step, "forward")
        torch.autograd.backward(loss_of(model, part_of_batch(step, rank, world_size), world_size))
        stop(step, "step")
        optimizer.step()
        optimizer.zero_grad()
        if step % plan.every == 0:
            if plan.behind:
                handle = checkpoint.async_save(plan.folder, step=step, **parts)
            else:
                checkpoint.save(plan.folder, step=step, **parts)
    if handle is not None:
        handle.wait()
    return fingerprint(model)
