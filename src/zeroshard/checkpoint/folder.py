"""Checkpoints in a folder: one directory for each, which is there complete or not at all.

A checkpoint is written beside, under a name that begins with a dot, and renamed when everything is on the disk. A
crash leaves such a hidden directory at most, and the next save sweeps it away. `latest` names the newest, and the one
before it: it is written before the newest gets its name, so that the renaming alone decides.
"""

import fcntl
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from ..errors import CheckpointError

_STEP_DIR_PATTERN = re.compile(r"step-([0-9]+)")
_STEP_DIGITS = 9
_MAX_NAME_LENGTH = 255
"""Of the name of a file."""
_LATEST_FILE = "latest"
_LOCK_FILE = ".lock"
_WRITING_PREFIX, _REMOVING_PREFIX = ".writing-", ".leaving-"


class CheckpointDir:
    """One process works on it at a time: rank 0."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def steps(self) -> list[int]:
        """Of all checkpoints, oldest first."""
        if not self.path.is_dir():
            return []
        names = (_STEP_DIR_PATTERN.fullmatch(entry.name) for entry in self.path.iterdir() if entry.is_dir())
        steps = {int(match[1]): match[0] for match in names if match}
        return sorted(step for step, name in steps.items() if name == self.step_path(step).name)

    def step_path(self, step: int) -> Path:
        return self.path / f"step-{step:0{_STEP_DIGITS}d}"

    def latest(self) -> Path | None:
        """The newest checkpoint. What `latest` says counts if it is there: steps may have been counted anew."""
        named = self.path / _LATEST_FILE
        names = named.read_text(encoding="utf-8", errors="replace").split() if named.is_file() else []
        for name in names:
            if len(name) <= _MAX_NAME_LENGTH and _STEP_DIR_PATTERN.fullmatch(name) and (self.path / name).is_dir():
                return self.path / name
        steps = self.steps()
        return self.step_path(steps[-1]) if steps else None

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Nobody else writes here meanwhile. The lock ends with the process that holds it."""
        if self.path.exists() and not self.path.is_dir():
            raise CheckpointError(f"{self.path} is a file: checkpoints need a folder. Give another path, or remove it.")
        self.path.mkdir(parents=True, exist_ok=True)
        # What a link leads to is not made, nor changed.
        with open(os.open(self.path / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise CheckpointError(
                    f"{self.path}: another process is writing a checkpoint here. Give each job a folder of its own."
                ) from None
            try:
                yield
            finally:
                # Hazard: processes that were forked meanwhile have the file open, too, and would keep the lock.
                fcntl.flock(lock, fcntl.LOCK_UN)

    def create_staging_dir(self, step: int) -> Path:
        """A new directory to write a checkpoint to, hidden until it is published."""
        if self.step_path(step).exists():
            raise CheckpointError(
                f"{self.step_path(step)} exists already. Give each job a folder of its own, go on from load()'s step, "
                "or remove what is not wanted any more."
            )
        self._remove_leftovers()
        directory = self.path / f"{_WRITING_PREFIX}{uuid4().hex}"
        directory.mkdir()
        return directory

    def publish(self, directory: Path, step: int) -> Path:
        """Make what was written visible, at once."""
        final, before = self.step_path(step), self.latest()
        fsync_dir(directory)
        self._write_latest([final.name] if before is None else [final.name, before.name])
        directory.rename(final)
        fsync_dir(self.path)
        return final

    def prune(self, keep: int | None) -> None:
        """Remove all but the newest `keep`, and never the latest."""
        latest, steps = self.latest(), self.steps()
        for step in steps[:-keep] if keep is not None else ():
            if self.step_path(step) != latest:
                self._remove(self.step_path(step))

    def discard(self, directory: Path) -> None:
        shutil.rmtree(directory, ignore_errors=True)

    def _remove_leftovers(self) -> None:
        """What crashes have left behind."""
        for entry in self.path.iterdir():
            if entry.name.startswith((_WRITING_PREFIX, _REMOVING_PREFIX)):
                shutil.rmtree(entry, ignore_errors=True) if entry.is_dir() else entry.unlink()

    def _remove(self, directory: Path) -> None:
        hidden = self.path / f"{_REMOVING_PREFIX}{uuid4().hex}"
        directory.rename(hidden)  # so that nobody ever finds a part of it
        shutil.rmtree(hidden, ignore_errors=True)

    def _write_latest(self, names: Sequence[str]) -> None:
        new = self.path / f"{_WRITING_PREFIX}{uuid4().hex}"
        write_and_fsync(new, "\n".join(names) + "\n")
        new.replace(self.path / _LATEST_FILE)
        fsync_dir(self.path)


def write_and_fsync(path: Path, text: str) -> None:
    """Onto the disk, not only to the system."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def fsync_dir(directory: Path) -> None:
    """Names of files in a directory are on the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
