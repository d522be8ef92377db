"""Jobs on several simulated hosts: network namespaces with their own names, addresses and links, joined by a bridge.

The bridge has its own namespace, so the machine's network is not touched. A namespace ends with the process that was
started for it, and that process ends with the test. A test that is killed leaves nothing behind.
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
"""Name of the network device on each host."""
_PREFIX = "10.77.0"
HUB = f"{_PREFIX}.1"
"""Address of the bridge, which all hosts can reach."""
_NEW_UTS, _NEW_NET = 0x04000000, 0x40000000


class NotPermittedError(Exception):
    """Raised if this machine does not permit network namespaces. The message says why."""


class Namespace:
    """A namespace with its own host name and network, initially only with a loopback interface."""

    def __init__(self, name: str) -> None:
        self.name = name
        script = f"set -e; echo {name} > /proc/sys/kernel/hostname; ip link set lo up; echo ready; exec cat"
        self._keeper = _start_process(["unshare", "--net", "--uts", "sh", "-c", script])

    @property
    def pid(self) -> int:
        return self._keeper.pid

    def run(self, *command: str) -> str:
        """Run a command inside the namespace and return its output."""
        full_command = ["nsenter", "--target", str(self.pid), "--net", "--uts", *command]
        result = subprocess.run(full_command, capture_output=True, text=True, check=False, timeout=20)
        if result.returncode:
            raise NotPermittedError(f"{' '.join(command)}: {result.stderr.strip()}")
        return result.stdout

    def close(self) -> None:
        self._keeper.kill()
        self._keeper.communicate()


def _start_process(command: list[str]) -> subprocess.Popen[str]:
    """Start a process and wait until it has printed a line."""
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
    """Move this thread, and all processes that it starts, into the namespaces of a process."""
    libc = ctypes.CDLL(None, use_errno=True)
    for kind, flag in (("net", _NEW_NET), ("uts", _NEW_UTS)):
        with open(f"/proc/{pid}/ns/{kind}") as namespace:
            if libc.setns(namespace.fileno(), flag):
                raise OSError(ctypes.get_errno(), f"setns {kind} of {pid}")


class Hosts:
    """Several hosts, each linked to the bridge."""

    def __init__(self, count: int) -> None:
        self._namespaces: list[Namespace] = []
        self.last_cut = 0.0
        """Time of the last cut, from `time.monotonic`."""
        try:
            self.hub = self._make_namespace("hub")
            self.hub.run(*_ip("link add br0 type bridge"))
            self.hub.run(*_ip(f"addr add {HUB}/24 dev br0"))
            self.hub.run(*_ip("link set br0 up"))
            self.hosts = [self._make_host(number) for number in range(count)]
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        for namespace in self._namespaces:
            with suppress(ProcessLookupError):
                namespace.close()

    def cut_link(self, host: int) -> None:
        """Drop all packets on a host's link. Connections stay open: ranks that wait receive nothing."""
        self.hub.run(*_ip(f"link set {_port(host)} down"))
        self.last_cut = time.monotonic()

    def restore_link(self, host: int) -> None:
        self.hub.run(*_ip(f"link set {_port(host)} up"))

    def limit_bandwidth(self, host: int, rate: str) -> None:
        """Limit the bandwidth of a host's link to `rate` in both directions."""
        limit = f"root tbf rate {rate} burst 16kb latency 400ms".split()
        self.hub.run("tc", "qdisc", "add", "dev", _port(host), *limit)
        self.hosts[host].run("tc", "qdisc", "add", "dev", DEVICE, *limit)

    def packets_delayed(self, host: int) -> int:
        """Return the number of packets that the bandwidth limit delayed."""
        (stats,) = json.loads(self.hosts[host].run("tc", "-s", "-j", "qdisc", "show", "dev", DEVICE))
        return int(stats["overlimits"])

    def bytes_sent(self, host: int) -> int:
        """Return the number of bytes that a host sent to all others."""
        (stats,) = json.loads(self.hosts[host].run(*_ip(f"-s -j link show {DEVICE}")))
        return int(stats["stats64"]["tx"]["bytes"])

    def _make_namespace(self, name: str) -> Namespace:
        namespace = Namespace(name)
        self._namespaces.append(namespace)
        return namespace

    def _make_host(self, number: int) -> Namespace:
        host, port = self._make_namespace(f"host{number}"), _port(number)
        self.hub.run(*_ip(f"link add {port} type veth peer name far{number}"))
        self.hub.run(*_ip(f"link set far{number} netns {host.pid} name {DEVICE}"))
        self.hub.run(*_ip(f"link set {port} master br0 up"))
        host.run(*_ip(f"addr add {_PREFIX}.{number + 2}/24 dev {DEVICE}"))
        host.run(*_ip(f"link set {DEVICE} up"))
        return host


def _port(host: int) -> str:
    """Return the name of the bridge's end of a host's link."""
    return f"port{host}"


def _ip(arguments: str) -> list[str]:
    return ["ip", *arguments.split()]


def find_obstacle() -> str | None:
    """Try to create two hosts. Return why this machine cannot, or None if it can."""
    if os.name != "posix":
        return "no namespaces on this operating system"
    try:
        with Hosts(2) as hosts:
            hosts.limit_bandwidth(0, "100mbit")
            hosts.cut_link(1)
    except (NotPermittedError, OSError) as error:
        return str(error)
    return None


# ---- A job on these hosts, which trains as `examples/elastic.py` does

MAX_WAIT_S = 60.0
_PORT = 29500
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(PRELOAD)

Place = Literal["forward", "step", "save"]
"""Before a forward pass, between backward and the step, or while a checkpoint is written."""


class Stop(NamedTuple):
    """Where a rank waits until the test lets it continue."""

    rank: int
    step: int
    place: Place


@dataclass(frozen=True)
class Plan:
    """The training run of all ranks.

    `timeout`: seconds that a rank waits for another; `in_background`: save asynchronously; `options`: arguments for
    `shard`.
    """

    folder: Path
    steps: int = 12
    save_every: int = 4
    width: int = 128
    timeout: float = MAX_WAIT_S
    stop: Stop | None = None
    in_background: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


class Message(NamedTuple):
    """Message from a rank.

    `event` is "loaded" or "stopped" with a step, "done" with a fingerprint of the model, or "failed" with the error and
    the names of its classes.
    """

    event: str
    time: float
    step: int = 0
    text: str = ""
    classes: tuple[str, ...] = ()


class RankArgs(NamedTuple):
    """Arguments of a rank's process. `namespace` is the process whose namespaces it enters."""

    run: str
    rank: int
    world_size: int
    local_rank: int
    local_size: int
    namespace: int


class StoreServer:
    """The store of a job, on the bridge: hosts reach it while their links work."""

    def __init__(self, hosts: Hosts) -> None:
        self._connection, theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=_serve, args=(theirs, hosts.hub.pid), daemon=True)
        self._process.start()
        theirs.close()
        assert self._connection.poll(MAX_WAIT_S), "the store did not start"
        self._connection.recv()

    def close(self) -> None:
        self._process.kill()
        self._process.join(MAX_WAIT_S)


def _serve(connection: Connection[bool, None], namespace: int) -> None:
    enter(namespace)
    store = TCPStore(HUB, _PORT, is_master=True, wait_for_workers=False)
    connection.send(True)
    with suppress(EOFError):
        connection.recv()
    del store


class Job:
    """A job. `placement` holds the host of each rank; ranks of one host are consecutive."""

    def __init__(self, hosts: Hosts, name: str, placement: Sequence[int], plan: Plan) -> None:
        self.placement, self.plan = placement, plan
        self._connections: list[Connection[str, Message]] = []
        self._processes: list[ForkServerProcess] = []
        self._messages: list[list[Message]] = [[] for _ in placement]
        for rank, host in enumerate(placement):
            mine, theirs = _CONTEXT.Pipe()
            local_size, local_rank = placement.count(host), rank - placement.index(host)
            args = RankArgs(name, rank, len(placement), local_rank, local_size, hosts.hosts[host].pid)
            process = _CONTEXT.Process(target=_run_rank, args=(theirs, args, plan), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(mine)
            self._processes.append(process)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for process in self._processes:
            process.kill()
            process.join(MAX_WAIT_S)
        if error is not None:
            for rank, host in enumerate(self.placement):
                sys.stderr.write(f"rank {rank} on host {host} reported: {self._messages[rank]}\n")

    def wait_for(self, event: str, rank: int) -> Message:
        """Return the first message about this event from a rank."""
        while not (matching := [message for message in self._messages[rank] if message.event == event]):
            assert self._connections[rank].poll(MAX_WAIT_S), f"rank {rank} did not report {event!r}"
            try:
                self._messages[rank].append(self._connections[rank].recv())
            except EOFError:
                raise AssertionError(f"rank {rank} exited without reporting {event!r}") from None
        return matching[0]

    def let_continue(self, rank: int) -> None:
        self._connections[rank].send("continue")

    def kill(self, host: int) -> None:
        """Kill all ranks of a host."""
        for rank in self.ranks_of(host):
            self._processes[rank].kill()
        for rank in self.ranks_of(host):
            self._processes[rank].join(MAX_WAIT_S)

    def ranks_of(self, *hosts: int) -> list[int]:
        return [rank for rank, host in enumerate(self.placement) if host in hosts]

    def wait_for_all(self, event: str, ranks: Sequence[int] | None = None) -> list[Message]:
        return [self.wait_for(event, rank) for rank in (range(len(self.placement)) if ranks is None else ranks)]

    def wait_for_exit(self, ranks: Sequence[int]) -> float:
        """Wait until these processes exit by themselves. Return the time of the last exit."""
        for rank in ranks:
            self._processes[rank].join(MAX_WAIT_S)
            assert self._processes[rank].exitcode is not None, f"rank {rank} has not exited"
        return time.monotonic()


def _run_rank(connection: Connection[Message, str], args: RankArgs, plan: Plan) -> None:
    enter(args.namespace)
    local = {"LOCAL_RANK": str(args.local_rank), "LOCAL_WORLD_SIZE": str(args.local_size)}
    os.environ.update(GLOO_SOCKET_IFNAME=DEVICE, **local)
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            store=PrefixStore(args.run, TCPStore(HUB, _PORT, is_master=False)),
            rank=args.rank,
            world_size=args.world_size,
            timeout=timedelta(seconds=plan.timeout),
        )
        text = _train(connection, plan)
        dist.destroy_process_group()
        connection.send(Message("done", time.monotonic(), plan.steps, text))
    except Exception as error:
        classes = tuple(cls.__name__ for cls in type(error).__mro__)
        connection.send(Message("failed", time.monotonic(), text=f"{type(error).__name__}: {error}", classes=classes))
    atexit._run_exitfuncs()  # as in a process that was not forked


def _train(connection: Connection[Message, str], plan: Plan) -> str:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = make_model(plan.width)
    optimizer = shard(model, torch.optim.AdamW, lr=1e-2, **plan.options)
    start, handle, parts = 0, None, dict[str, Any](model=model, optimizer=optimizer)
    if checkpoint.latest(plan.folder) is not None:
        start = checkpoint.load(plan.folder, **parts).step or 0
    connection.send(Message("loaded", time.monotonic(), start))

    def stop_if_due(step: int, place: Place) -> None:
        if plan.stop == Stop(rank, step, place):
            connection.send(Message("stopped", time.monotonic(), step))
            connection.recv()

    write_shards = saver.write_shards

    def stop_and_write(*args: Any) -> Any:
        stop_if_due(step // plan.save_every * plan.save_every, "save")
        return write_shards(*args)

    setattr(saver, "write_shards", stop_and_write)  # noqa: B010 (mypy: the module does not export this name)
    for step in range(start + 1, plan.steps + 1):
        stop_if_due(step, "forward")
        torch.autograd.backward(loss_of(model, part_of_batch(step, rank, world_size), world_size))
        stop_if_due(step, "step")
        optimizer.step()
        optimizer.zero_grad()
        if step % plan.save_every == 0:
            if plan.in_background:
                handle = checkpoint.async_save(plan.folder, step=step, **parts)
            else:
                checkpoint.save(plan.folder, step=step, **parts)
    if handle is not None:
        handle.wait()
    return fingerprint(model)
