"""`zeroshard.json`: what a checkpoint says of itself, with a check sum of every file in it.

Sizes do not tell a file from that of another checkpoint, and torch looks at no check sums when it reads.
"""

import fcntl
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from torch.distributed.checkpoint.filesystem import FileSystem

from ..errors import CheckpointError
from .metadata import reject_path_traversal
from .progress import Progress

# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints in a folder: one directory for each, which is there complete or not at all.
#
# A checkpoint is written beside, under a name that begins with a dot, and renamed when everything is on the disk. A
# crash leaves such a hidden directory at most, and the next save sweeps it away. `latest` names the newest, and the one
# before it: it is written before the newest gets its name, so that the renaming alone decides.


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


# ---------------------------------------------------------------------------------------------------------------------
# `zeroshard.json`: what a checkpoint says of itself, with a check sum of every file in it.
#
# Sizes do not tell a file from that of another checkpoint, and torch looks at no check sums when it reads.


MANIFEST_FILE = "zeroshard.json"

_FORMAT_VERSION = 1
_CHECKSUM_CHUNK_BYTES = 1 << 18


@dataclass(frozen=True)
class Manifest:
    """Of a directory that `save` wrote."""

    step: int
    world_size: int
    """How many ranks saved it."""
    sums: Mapping[str, int]
    """The CRC-32 of each file, by its name."""
    time: float
    torch: str

    def to_json(self) -> str:
        return json.dumps({"format": _FORMAT_VERSION, **asdict(self)}, indent=2) + "\n"

    def check_covers(self, directory: Path, files: Iterable[str]) -> None:
        """A file without a sum could be damaged, and nobody would know."""
        without = sorted(set(files) - self.sums.keys())
        if without:
            names = f"{', '.join(without[:3])}{' and others' if len(without) > 3 else ''}"
            raise CheckpointError(
                f"{directory / MANIFEST_FILE} has no check sums of {names}, which the checkpoint needs: it is "
                "damaged, or "
                "of another one. Restore it, or load another checkpoint. Without this file all is read unchecked."
            )

    def verify_checksums(self, directory: Path, file_slice: slice, progress: Progress) -> None:
        """A share of the files has the content that was written: ranks look at them in turns."""
        names = sorted(self.sums)[file_slice]
        for name in names:
            _check_regular_file(directory / name)
        progress.add_expected(sum((directory / name).stat().st_size for name in names))
        for name in names:
            if _compute_checksum(directory / name, progress) != self.sums[name]:
                raise CheckpointError(
                    f"{directory / name} is damaged, or of another checkpoint: its content is not what was written. "
                    "Restore it, or load another checkpoint."
                )


def read_manifest(directory: Path) -> Manifest | None:
    """None if there is none: `save` did not write this directory."""
    file = directory / MANIFEST_FILE
    if not file.is_file():
        return None
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if found["format"] > _FORMAT_VERSION:
            raise CheckpointError(f"{file} is of a newer version of this package (format {found['format']})")
        sums = {name: int(value) for name, value in found["sums"].items()}
        reject_path_traversal(file, sums)
        return Manifest(int(found["step"]), int(found["world_size"]), sums, float(found["time"]), str(found["torch"]))
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{file} cannot be read: {type(error).__name__}: {error}") from error


class ChecksummingFileSystem(FileSystem):
    """Files whose check sums are taken as they are written, so that none is read again for it."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.checksums: dict[str, int] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            summed = _ChecksummingStream(stream, self._progress)
            try:
                yield summed
            except RuntimeError:
                if summed.failure is not None:  # torch says only that it could not go on
                    raise summed.failure from None
                raise
            self.checksums[Path(path).name] = summed.checksum

    def rename(self, path: Any, new_path: Any) -> None:
        super().rename(path, new_path)
        self.checksums[Path(new_path).name] = self.checksums.pop(Path(path).name)


class _ChecksummingStream:
    """A stream that is written from the beginning to the end."""

    def __init__(self, stream: Any, progress: Progress) -> None:
        self._stream, self._progress, self.checksum = stream, progress, 0
        self.failure: OSError | None = None

    def write(self, data: Any) -> Any:
        self.checksum = zlib.crc32(data, self.checksum)
        try:
            written = self._stream.write(data)
        except OSError as error:
            self.failure = error
            raise
        self._progress.advance(len(data))
        return written

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("seek", "truncate", "writelines")):
            raise AttributeError(name)  # they would go past the sum
        return getattr(self._stream, name)


def _check_regular_file(file: Path) -> None:
    # A pipe or a device may have no end.
    if not file.is_file():
        reason = "is no regular file" if file.exists() else "is missing: the checkpoint is incomplete"
        raise CheckpointError(f"{file} {reason}. Restore it, or load another checkpoint.")


def _compute_checksum(file: Path, progress: Progress) -> int:
    total, buffer = 0, memoryview(bytearray(_CHECKSUM_CHUNK_BYTES))
    with file.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            total = zlib.crc32(buffer[:count], total)
            progress.advance(count)
    return total


def manifest_fields(manifest: Manifest | None) -> dict[str, Any]:
    """What a checkpoint says of itself beside the sums of its files; nothing if it is none of `save`."""
    return {} if manifest is None else {key: value for key, value in asdict(manifest).items() if key != "sums"}


def build_manifest(fields: Mapping[str, Any], directory: Path, progress: Progress) -> Manifest:
    """A manifest for files that were written anew, and not from the beginning to the end: they are read for it."""
    files = sorted(directory.iterdir())
    progress.add_expected(sum(file.stat().st_size for file in files))
    return Manifest(**{**fields, "sums": {file.name: _compute_checksum(file, progress) for file in files}})
