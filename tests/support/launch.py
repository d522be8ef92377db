"""Start scripts as users do: under `torchrun`, once or with elastic agents that restart their workers.

Run as `-m tests.support.launch`, it is `examples/elastic.py` with an optional `Hold`: one process stops before a step
and waits to be killed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple
from uuid import uuid4

import torch
from examples import elastic
from examples.elastic import loss_of, make_model, part_of_batch
from torch import Tensor, nn

from tests.support.oracles import average
from tests.support.pool import LOOPBACK
from zeroshard import checkpoint

# ---- Scripts under torchrun

# How a warning begins that is as it should be: a checkpoint was saved by other ranks.
EXPECTED = "default:checkpoints"


def torchrun(
    script: Path | str,
    ranks: int,
    folder: Path,
    *options: str,
    status: int = 0,
    warnings: str = f"error,{EXPECTED}",
) -> str:
    """What the script prints, or with "-m" a module, run in `folder`, which ends with this status.

    `warnings` says what becomes of them. Each rank prints into a file of its own: torchrun has Python write a line and
    its end apart, so that lines of ranks that share a pipe get into each other.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", str(ranks)]
    settings = {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONWARNINGS": warnings,
    }
    env = {**os.environ, **settings}
    with tempfile.TemporaryDirectory() as logs:
        command += ["--redirects", "1", "--log-dir", logs, str(script), *options]
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stderr
        printed = sorted(Path(logs).rglob("stdout.log"), key=lambda file: int(file.parent.name))
        assert len(printed) == ranks
        return "".join(file.read_text(encoding="utf-8") for file in printed)


# ---- A process that stops at a step

HOLD_VARIABLE = "ZEROSHARD_HOLD"
HOLD_TIMEOUT_S = 240.0
"""Seconds: nobody is held longer."""


@dataclass(frozen=True)
class Hold:
    """Where the first that comes there stops, among so many ranks. It writes its process and that one's parent into
    `file`; once that is there nobody stops any more."""

    world_size: int
    step: int
    file: str

    def setting(self) -> dict[str, str]:
        return {HOLD_VARIABLE: json.dumps(asdict(self))}

    def meet(self, step: int, world_size: int) -> None:
        if (step, world_size) == (self.step, self.world_size) and self._is_first():
            time.sleep(HOLD_TIMEOUT_S)
            os._exit(1)

    def _is_first(self) -> bool:
        mine = Path(f"{self.file}.{os.getpid()}")
        mine.write_text(f"{os.getpid()} {os.getppid()}", encoding="ascii")
        with suppress(FileExistsError):
            os.link(mine, self.file)
            return True
        return False


def main() -> None:
    part, asked = elastic.part_of_batch, os.environ.get(HOLD_VARIABLE)
    hold = Hold(**json.loads(asked)) if asked else None

    def part_of_batch(step: int, rank: int, world_size: int) -> Tensor:
        if hold is not None:
            hold.meet(step, world_size)
        return part(step, rank, world_size)

    elastic.part_of_batch = part_of_batch
    elastic.main()


if __name__ == "__main__":
    main()


# ---- Elastic agents

ROOT = Path(__file__).parents[2]
JOB_TIMEOUT_S = 120.0
"""Seconds: no job takes longer."""
JOB_VARIABLE = "ZEROSHARD_JOB"
SHORT_TIMEOUTS = "join_timeout=60,last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"
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
            agent.wait(JOB_TIMEOUT_S)
        if error is not None:
            sys.stderr.write(f"What all ranks and agents have printed:\n{self.printed()}\n")
        self._log.close()

    def start(self, hold: Hold | None = None, *, is_host: bool = False) -> None:
        """An agent more; `hold` is for its workers, `is_host` for the one that hosts the store."""
        settings, options = command_in_docs()
        for name, value in {"--rdzv-endpoint": f"{LOOPBACK}:{self._port}", **self._numbers}.items():
            options[options.index(name) + 1] = value
        options += ["--local-addr", LOOPBACK, "--rdzv-conf", f"is_host={int(is_host)},{SHORT_TIMEOUTS}"]
        script = ["-m", "tests.support.launch", "--folder", str(self.folder), *self._options]
        paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        settings |= {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": paths,
        }
        settings |= {JOB_VARIABLE: self._mark, **(hold.setting() if hold else {})}
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
        end = time.monotonic() + JOB_TIMEOUT_S
        while not found():
            assert time.monotonic() < end, f"{what}: not within {JOB_TIMEOUT_S} seconds"
            assert any(agent.poll() is None for agent in self._agents), f"all agents have ended before {what}"
            time.sleep(0.05)

    def held(self, hold: Hold) -> tuple[int, int]:
        """The process that has stopped there, and its agent."""
        self.wait_for(f"a rank at {hold}", Path(hold.file).exists)
        worker, agent = map(int, Path(hold.file).read_text(encoding="ascii").split())
        return worker, agent

    def finish(self) -> None:
        """All agents that were not killed end well."""
        end = time.monotonic() + JOB_TIMEOUT_S
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
        mark, found = f"{JOB_VARIABLE}={self._mark}".encode(), []
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


# ---- The steps of `examples/elastic.py` in one process, for any number of ranks

Average = Callable[[list[Tensor]], Tensor]
"""Of gradients of all ranks, in their order."""


class UnshardedRun:
    """The model and the optimizer of the example, unsharded."""

    def __init__(self, width: int = 128) -> None:
        self.model = make_model(width)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    @classmethod
    def saved(cls, folder: Path, width: int = 128) -> UnshardedRun:
        """As the last checkpoint in `folder` has it."""
        plain = cls(width)
        for param in plain.model.parameters():
            nn.init.constant_(param, float("nan"))
        checkpoint.load(folder, model=plain.model, optimizer=plain.optimizer)
        return plain

    def train(self, steps: range, world_size: int, average: Average = average) -> None:
        with _one_thread():
            for step in steps:
                shares = [self._grads(step, rank, world_size) for rank in range(world_size)]
                for param, *parts in zip(self.model.parameters(), *shares, strict=True):
                    param.grad = average(parts)
                self.optimizer.step()

    def _grads(self, step: int, rank: int, world_size: int) -> Sequence[Tensor]:
        loss = loss_of(self.model, part_of_batch(step, rank, world_size), world_size)
        return torch.autograd.grad(loss, list(self.model.parameters()))


@contextmanager
def _one_thread() -> Iterator[None]:
    """As ranks compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def fingerprint(model: nn.Module) -> str:
    """Of every bit of its parameters."""
    digest = hashlib.sha256()
    for param in model.parameters():
        digest.update(param.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
