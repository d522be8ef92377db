"""Hosts with names, addresses and links of their own: network namespaces, joined by a bridge.

The bridge lies in a namespace of its own, too, so that nothing of the machine's network is touched and nothing leads
out. A namespace lives as long as the process that was made for it, and that one ends with whoever holds its input:
also a test that is killed leaves nothing behind.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import time
from contextlib import suppress
from types import TracebackType
from typing import Any

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
