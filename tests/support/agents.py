"""torchrun with restarts: agents that start and end their workers, and are killed with them."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple
from uuid import uuid4

from tests.support.held import Hold
from tests.support.store import LOOPBACK

ROOT = Path(__file__).parents[2]
LONG = 120.0
"""Seconds: no job takes longer."""
JOB = "ZEROSHARD_JOB"
QUICKLY = "join_timeout=60,last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"
"""Who has died is known after 3 seconds instead of 15, and the rest waits 3 seconds for more instead of 30."""


class Life(NamedTuple):
    """What one set of ranks began with."""

    world_size: int
    start: int
    restart: int


def command_in_docs() -> tuple[dict[str, str], list[str]]:
    """What it says to set, and to start on each host."""
    text = (ROOT / "docs" / "keeping-going.md").read_text(encoding="utf-8")
    found = re.search(
        r"^((?:\w+=\S+ )*torchrun [^\n]*\\\n(?:[^\n]*\\\n)*[^\n]*examples/elastic\.py)", text, re.MULTILINE
    )
    assert found, "the docs show how examples/elastic.py is started"
    words = shlex.split(found[1].replace("\\\n", " "))
    start = words.index("torchrun")
    return dict(word.split("=", 1) for word in words[:start]), words[start + 1 : -1]


class Agents:
    """One job. One agent hosts the store through which agents find each other, and must live on.

    All write to one file, in the order in which things happen.
    """

    def __init__(self, folder: Path, *options: str, fewest: int = 2, per_agent: int = 1) -> None:
        self._mark, self._options = uuid4().hex, options
        self._numbers = {"--nnodes": f"{fewest}:4", "--nproc-per-node": str(per_agent)}
        self.folder, self._log = folder / "checkpoints", (folder / "log").open("a+", encoding="utf-8")
        self._port = _free_port()
        self._agents: list[subprocess.Popen[str]] = []
        self._killed: list[int] = []

    def __enter__(self) -> Agents:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for pid in self._processes():
            _kill(pid)
        for agent in self._agents:
            agent.wait(LONG)
        if error is not None:
            sys.stderr.write(f"What all ranks and agents have printed:\n{self.printed()}\n")
        self._log.close()

    def start(self, hold: Hold | None = None, *, is_host: bool = False) -> None:
        """An agent more; `hold` is for its workers, `is_host` for the one that hosts the store."""
        settings, options = command_in_docs()
        for name, value in {"--rdzv-endpoint": f"{LOOPBACK}:{self._port}", **self._numbers}.items():
            options[options.index(name) + 1] = value
        options += ["--local-addr", LOOPBACK, "--rdzv-conf", f"is_host={int(is_host)},{QUICKLY}"]
        script = ["-m", "tests.support.held", "--folder", str(self.folder), *self._options]
        paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        settings |= {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": paths,
        }
        settings |= {JOB: self._mark, **(hold.setting() if hold else {})}
        agent = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *options, *script],
            env={**os.environ, **settings},
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
            text=True,
        )
        self._agents.append(agent)

    def kill(self, *pids: int) -> None:
        self._killed += pids
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    def wait_for(self, what: str, found: Callable[[], bool]) -> None:
        end = time.monotonic() + LONG
        while not found():
            assert time.monotonic() < end, f"{what}: not within {LONG} seconds"
            assert any(agent.poll() is None for agent in self._agents), f"all agents have ended before {what}"
            time.sleep(0.05)

    def held(self, hold: Hold) -> tuple[int, int]:
        """The process that has stopped there, and its agent."""
        self.wait_for(f"a rank at {hold}", Path(hold.file).exists)
        worker, agent = map(int, Path(hold.file).read_text(encoding="ascii").split())
        return worker, agent

    def finish(self) -> None:
        """All agents that were not killed end well."""
        end = time.monotonic() + LONG
        for agent in self._agents:
            status = agent.wait(max(0.0, end - time.monotonic()))
            assert status == (-signal.SIGKILL if agent.pid in self._killed else 0)

    def lives(self) -> list[Life]:
        """In their order, as rank 0 tells it."""
        starts = [line for line in self.events("start") if line["rank"] == 0]
        return [Life(line["world_size"], line["step"], line["restart"]) for line in starts]

    def events(self, event: str) -> list[dict[str, Any]]:
        lines = (json.loads(line) for line in self.printed().splitlines() if line.startswith('{"event"'))
        return [line for line in lines if line["event"] == event]

    def printed(self) -> str:
        return Path(self._log.name).read_text(encoding="utf-8", errors="replace")

    def _processes(self) -> list[int]:
        """Of this job and no other, also workers whose agent is gone."""
        mark, found = f"{JOB}={self._mark}".encode(), []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return found


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
