"""One worker process as the pool sees it."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

from tests.support.protocol import Job, Outcome
from tests.support.report import describe_exit
from tests.support.worker import exit_with_parent, serve

# torch._dynamo: the first optimizer of a process imports it, which takes seconds.
PRELOAD = [
    "pytest",
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "torch.nn.parallel.distributed",
    "zeroshard",
    "zeroshard.checkpoint",
]
EXIT_TIMEOUT = 5.0

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(PRELOAD)


def preload(modules: list[str]) -> None:
    """Have ranks find these modules loaded, too. Before the first of them is started."""
    _CONTEXT.set_forkserver_preload([*PRELOAD, *modules])


class WorkerHandle:
    """A worker process and the connection to it."""

    def __init__(self, port: int, stacks: Path) -> None:
        self.connection: Connection[Job | None, Outcome]
        self.connection, remote = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=serve, args=(remote, port, stacks), daemon=True)
        self._process.start()
        remote.close()
        self._stacks = stacks

    def is_alive(self) -> bool:
        return self._process.is_alive()

    def receive(self) -> Outcome:
        """The process's next outcome, or the failure that it has died."""
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            self._process.join(EXIT_TIMEOUT)
            return Outcome("failed", f"{describe_exit(self._process.exitcode)}\n{self._read_stacks()}")

    def interrupt(self) -> None:
        """Have the process write its stacks and end."""
        if self.is_alive() and self._process.pid:
            os.kill(self._process.pid, signal.SIGUSR1)

    def autopsy(self, reason: str) -> Outcome:
        """The outcome of an interrupted process: where it was stuck."""
        self._process.join(EXIT_TIMEOUT)
        return Outcome("stuck", f"{reason}; its stacks:\n{self._read_stacks()}")

    def close(self) -> None:
        if self.is_alive():
            self._process.kill()
        self._process.join()
        self._process.close()
        self.connection.close()

    def _read_stacks(self) -> str:
        if not self._stacks.exists():
            return ""
        threads = self._stacks.read_text().split("\n\n")
        return "\n\n".join(thread for thread in threads if exit_with_parent.__name__ not in thread)
