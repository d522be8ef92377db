"""Start scripts as users do: under `torchrun`, once or with elastic agents that restart their workers.

`python -m tests.support.launch` runs `examples/elastic.py` with an optional `Hold`: one process stops before a step
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

# Do not turn this warning into an error: a checkpoint was saved by other ranks.
EXPECTED_WARNING = "default:checkpoints"


def torchrun(
    script: Path | str,
    ranks: int,
    folder: Path,
    *options: str,
    status: int = 0,
    warnings: str = f"error,{EXPECTED_WARNING}",
) -> str:
    """Run a script, or with "-m" a module, in `folder`. Check its exit status and return what its ranks printed.

    `warnings` is the value of PYTHONWARNINGS. Each rank prints to its own file: under torchrun Python writes a line and
    its newline separately, so lines of ranks that share a pipe would be interleaved.
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
        result = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
        assert result.returncode == status, result.stderr
        printed = sorted(Path(logs).rglob("stdout.log"), key=lambda file: int(file.parent.name))
        assert len(printed) == ranks
        return "".join(file.read_text(encoding="utf-8") for file in printed)


# ---- A process that stops at a step

HOLD_VARIABLE = "ZEROSHARD_HOLD"
HOLD_TIMEOUT_S = 240.0
"""Maximum seconds of a hold."""


@dataclass(frozen=True)
class Hold:
    """A step at which one process stops, if there are `world_size` ranks.

    The first process that reaches the step stops, and writes its process id and its parent's to `file`. Once the file
    exists, no other process stops.
    """

    world_size: int
    step: int
    file: str

    def as_environment(self) -> dict[str, str]:
        return {HOLD_VARIABLE: json.dumps(asdict(self))}

    def stop_if_due(self, step: int, world_size: int) -> None:
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
    original, setting = elastic.part_of_batch, os.environ.get(HOLD_VARIABLE)
    hold = Hold(**json.loads(setting)) if setting else None

    def part_of_batch(step: int, rank: int, world_size: int) -> Tensor:
        if hold is not None:
            hold.stop_if_due(step, world_size)
        return original(step, rank, world_size)

    elastic.part_of_batch = part_of_batch
    elastic.main()


if __name__ == "__main__":
    main()


# ---- Elastic agents

ROOT = Path(__file__).parents[2]
JOB_TIMEOUT_S = 120.0
"""Timeout of a job in seconds."""
JOB_VARIABLE = "ZEROSHARD_JOB"
SHORT_TIMEOUTS = "join_timeout=60,last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"
"""Detect a dead agent after 3 seconds instead of 15, and wait 3 seconds for more agents instead of 30."""


class WorkerStart(NamedTuple):
    """A start of all workers: the number of ranks, the step that they resume from, and the number of restarts."""

    world_size: int
    step: int
    restart: int


def command_in_docs() -> tuple[dict[str, str], list[str]]:
    """Return the environment and the torchrun options that the docs show for each host."""
    text = (ROOT / "docs" / "keeping-going.md").read_text(encoding="utf-8")
    command = re.search(
        r"^((?:\w+=\S+ )*torchrun [^\n]*\\\n(?:[^\n]*\\\n)*[^\n]*examples/elastic\.py)", text, re.MULTILINE
    )
    assert command, "docs/keeping-going.md must show how to start examples/elastic.py"
    words = shlex.split(command[1].replace("\\\n", " "))
    start = words.index("torchrun")
    return dict(word.split("=", 1) for word in words[:start]), words[start + 1 : -1]


class Agents:
    """The elastic agents of one job. One agent hosts the store through which agents find each other: do not kill it.

    All agents and ranks append to one log file.
    """

    def __init__(self, folder: Path, *options: str, min_agents: int = 2, workers_per_agent: int = 1) -> None:
        self._job_id, self._options = uuid4().hex, options
        self._sizes = {"--nnodes": f"{min_agents}:4", "--nproc-per-node": str(workers_per_agent)}
        self.folder, self._log = folder / "checkpoints", (folder / "log").open("a+", encoding="utf-8")
        self._port = free_port()
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
            sys.stderr.write(f"Output of all ranks and agents:\n{self.read_log()}\n")
        self._log.close()

    def start(self, hold: Hold | None = None, *, is_host: bool = False) -> None:
        """Start another agent. `hold`: where its workers stop; `is_host`: it hosts the store."""
        settings, options = command_in_docs()
        for name, value in {"--rdzv-endpoint": f"{LOOPBACK}:{self._port}", **self._sizes}.items():
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
        settings |= {JOB_VARIABLE: self._job_id, **(hold.as_environment() if hold else {})}
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

    def wait_for(self, event: str, has_happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + JOB_TIMEOUT_S
        while not has_happened():
            assert time.monotonic() < deadline, f"{event}: not within {JOB_TIMEOUT_S} seconds"
            assert any(agent.poll() is None for agent in self._agents), f"all agents exited before {event}"
            time.sleep(0.05)

    def wait_for_hold(self, hold: Hold) -> tuple[int, int]:
        """Return the ids of the process that stopped at the hold, and of its agent."""
        self.wait_for(f"a rank at {hold}", Path(hold.file).exists)
        worker, agent = map(int, Path(hold.file).read_text(encoding="ascii").split())
        return worker, agent

    def finish(self) -> None:
        """Wait until all agents that were not killed exit successfully."""
        deadline = time.monotonic() + JOB_TIMEOUT_S
        for agent in self._agents:
            status = agent.wait(max(0.0, deadline - time.monotonic()))
            assert status == (-signal.SIGKILL if agent.pid in self._killed else 0)

    def worker_starts(self) -> list[WorkerStart]:
        """Return all starts of the workers in order, as rank 0 reported them."""
        starts = [line for line in self.events("start") if line["rank"] == 0]
        return [WorkerStart(line["world_size"], line["step"], line["restart"]) for line in starts]

    def events(self, event: str) -> list[dict[str, Any]]:
        lines = (json.loads(line) for line in self.read_log().splitlines() if line.startswith('{"event"'))
        return [line for line in lines if line["event"] == event]

    def read_log(self) -> str:
        return Path(self._log.name).read_text(encoding="utf-8", errors="replace")

    def _processes(self) -> list[int]:
        """Return the ids of this job's processes, including workers whose agent is gone."""
        setting, pids = f"{JOB_VARIABLE}={self._job_id}".encode(), []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdigit() and setting in (entry / "environ").read_bytes().split(b"\0"):
                    pids.append(int(entry.name))
        return pids


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def free_port() -> int:
    """Return a port on which nothing listens."""
    with socket.create_server((LOOPBACK, 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


# ---- The steps of `examples/elastic.py` in one process, for any number of ranks

Average = Callable[[list[Tensor]], Tensor]
"""Averages the gradients of all ranks, given in rank order."""


class UnshardedRun:
    """Model and optimizer of the example, without sharding."""

    def __init__(self, width: int = 128) -> None:
        self.model = make_model(width)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    @classmethod
    def load(cls, folder: Path, width: int = 128) -> UnshardedRun:
        """Load the latest checkpoint in `folder`."""
        run = cls(width)
        for param in run.model.parameters():
            nn.init.constant_(param, float("nan"))
        checkpoint.load(folder, model=run.model, optimizer=run.optimizer)
        return run

    def train(self, steps: range, world_size: int, average: Average = average) -> None:
        with _one_thread():
            for step in steps:
                by_rank = [self._grads(step, rank, world_size) for rank in range(world_size)]
                for param, *grads in zip(self.model.parameters(), *by_rank, strict=True):
                    param.grad = average(grads)
                self.optimizer.step()

    def _grads(self, step: int, rank: int, world_size: int) -> Sequence[Tensor]:
        loss = loss_of(self.model, part_of_batch(step, rank, world_size), world_size)
        return torch.autograd.grad(loss, list(self.model.parameters()))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread, as the ranks do."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def fingerprint(model: nn.Module) -> str:
    """Return a digest of all parameters."""
    digest = hashlib.sha256()
    for param in model.parameters():
        digest.update(param.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
