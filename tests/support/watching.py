"""What a process does behind the back of a call: programs started, connections, files written elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_DEEDS = ("os.system", "os.exec", "os.fork", "os.posix_spawn", "subprocess.Popen", "socket.connect")
_MOVES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "shutil.rmtree")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

_allowed: list[Path] = []
_seen: list[str] = []
_is_on = False


def _hear(event: str, given: tuple[Any, ...]) -> None:
    if not _is_on:
        return
    if event in _DEEDS:
        _seen.append(f"{event} {given!r:.200}")
    elif (event == "open" and isinstance(given[2], int) and given[2] & _WRITES) or event in _MOVES:
        _note(event, given[0])


def _note(event: str, path: Any) -> None:
    if isinstance(path, int):  # opened before, and noted then
        return
    full = Path(os.path.abspath(os.fsdecode(path)))
    if full != Path("/dev/null") and not any(full.is_relative_to(folder) for folder in _allowed):
        _seen.append(f"{event} {full}")


@contextmanager
def watched(*allowed: Path) -> Iterator[None]:
    """Inside nothing is started or connected to, and nothing is written but below `allowed`."""
    global _is_on
    if not _hooked:
        sys.addaudithook(_hear)
        _hooked.append(True)
    _allowed[:], _seen[:], _is_on = [path.resolve() for path in allowed], [], True
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # of modules that are imported only now
    try:
        yield
    finally:
        _is_on, sys.dont_write_bytecode = False, writes
    assert not _seen, list(_seen)


_hooked: list[bool] = []
