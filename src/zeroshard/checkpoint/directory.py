"""Checkpoint folders: atomic publication, retention, and a manifest with checksums.

::

    latest                names of the newest checkpoint and of its predecessor
    step-000000100/       one directory per checkpoint, complete or absent
        zeroshard.json    the manifest
    .writing-...          staging directory or file; a crash may leave one behind, and the next save removes it

Each checkpoint is written to a hidden staging directory, which is renamed once all files are on disk. `latest` is
written before the rename, and a name in it counts only if its directory exists: the rename alone publishes.
"""

import fcntl
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from torch.distributed.checkpoint.filesystem import FileSystem

from .._formatting import format_error, format_names
from ..errors import CheckpointError
from .metadata import reject_path_traversal
from .progress import Progress

# ---------------------------------------------------------------------------------------------------------------------
# Folder: staging, atomic rename, retention.


_STEP_DIR_PATTERN = re.compile(r"step-([0-9]+)")
_STEP_DIGITS = 9
_MAX_NAME_LENGTH = 255
_LATEST_FILE = "latest"
_LOCK_FILE = ".lock"
_WRITING_PREFIX, _REMOVING_PREFIX = ".writing-", ".leaving-"


class CheckpointDir:
    """A folder with the checkpoints of one job. Only rank 0 writes; all ranks may read."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, oldest first."""
        if not self.path.is_dir():
            return []
        matches = (_STEP_DIR_PATTERN.fullmatch(entry.name) for entry in self.path.iterdir() if entry.is_dir())
        steps = {int(match[1]): match[0] for match in matches if match}
        return sorted(step for step, name in steps.items() if name == self.step_path(step).name)

    def step_path(self, step: int) -> Path:
        return self.path / f"step-{step:0{_STEP_DIGITS}d}"

    def latest(self) -> Path | None:
        """Return the newest checkpoint, or None.

        The file `latest` takes precedence over step numbers, since a job may have restarted its step count.
        """
        file = self.path / _LATEST_FILE
        names = file.read_text(encoding="utf-8", errors="replace").split() if file.is_file() else []
        for name in names:
            if len(name) <= _MAX_NAME_LENGTH and _STEP_DIR_PATTERN.fullmatch(name) and (self.path / name).is_dir():
                return self.path / name
        steps = self.steps()
        return self.step_path(steps[-1]) if steps else None

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the exclusive lock for writing. The system releases it if the process dies.

        Raises:
            CheckpointError: Another process holds the lock, or the path is a file.
        """
        if self.path.exists() and not self.path.is_dir():
            raise CheckpointError(
                f"expected a folder for checkpoints, got the file {self.path}. Pass another path, or remove the file."
            )
        self.path.mkdir(parents=True, exist_ok=True)
        # O_NOFOLLOW: do not create or modify the target of a symbolic link.
        with open(os.open(self.path / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise CheckpointError(
                    f"another process is writing a checkpoint to {self.path}. Use a separate folder for each job."
                ) from None
            try:
                yield
            finally:
                # Hazard: processes forked while the lock was held inherit the open file and would keep the lock.
                fcntl.flock(lock, fcntl.LOCK_UN)

    def create_staging_dir(self, step: int) -> Path:
        """Create the hidden directory that a checkpoint is written to, and remove leftovers of crashed saves."""
        if self.step_path(step).exists():
            raise CheckpointError(
                f"{self.step_path(step)} already exists. Use a separate folder for each job, continue from the step "
                "that load() returns, or remove the old checkpoint."
            )
        self._remove_leftovers()
        directory = self.path / f"{_WRITING_PREFIX}{uuid4().hex}"
        directory.mkdir()
        return directory

    def publish(self, directory: Path, step: int) -> Path:
        """Atomically rename a staging directory to its final name, and return that path."""
        final, previous = self.step_path(step), self.latest()
        fsync_dir(directory)
        self._write_latest([final.name] if previous is None else [final.name, previous.name])
        directory.rename(final)
        fsync_dir(self.path)
        return final

    def prune(self, keep: int | None) -> None:
        """Remove all checkpoints but the `keep` newest; None keeps all. The latest is never removed."""
        latest, steps = self.latest(), self.steps()
        for step in steps[:-keep] if keep is not None else ():
            if self.step_path(step) != latest:
                self._remove(self.step_path(step))

    def discard(self, directory: Path) -> None:
        shutil.rmtree(directory, ignore_errors=True)

    def _remove_leftovers(self) -> None:
        """Remove what crashed saves left behind."""
        for entry in self.path.iterdir():
            if entry.name.startswith((_WRITING_PREFIX, _REMOVING_PREFIX)):
                shutil.rmtree(entry, ignore_errors=True) if entry.is_dir() else entry.unlink()

    def _remove(self, directory: Path) -> None:
        hidden = self.path / f"{_REMOVING_PREFIX}{uuid4().hex}"
        directory.rename(hidden)  # readers never see a partially removed checkpoint
        shutil.rmtree(hidden, ignore_errors=True)

    def _write_latest(self, names: Sequence[str]) -> None:
        staged = self.path / f"{_WRITING_PREFIX}{uuid4().hex}"
        write_and_fsync(staged, "\n".join(names) + "\n")
        staged.replace(self.path / _LATEST_FILE)
        fsync_dir(self.path)


def write_and_fsync(path: Path, text: str) -> None:
    """Write a file and flush it to disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def fsync_dir(directory: Path) -> None:
    """Flush the names of a directory's files to disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---------------------------------------------------------------------------------------------------------------------
# Manifest: checksums, since DCP verifies none and file sizes do not reveal a file of another checkpoint.


MANIFEST_FILE = "zeroshard.json"

_FORMAT_VERSION = 1
_CHECKSUM_CHUNK_BYTES = 1 << 18


@dataclass(frozen=True)
class Manifest:
    """Content of `zeroshard.json`, which `save` writes into each checkpoint."""

    step: int
    world_size: int
    """Number of ranks that saved the checkpoint."""
    sums: Mapping[str, int]
    """CRC-32 of each file, by file name."""
    time: float
    torch: str
    """Version of torch."""
    model: str | None = None
    """Class of the model; None if there is none, or if it is unknown."""
    optimizers: Sequence[str] = ()
    """Classes of the optimizer, several with rules; empty if there is none, or if they are unknown."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """Further names of tied weights, with their first name."""

    def to_json(self) -> str:
        return json.dumps({"format": _FORMAT_VERSION, **asdict(self)}, indent=2) + "\n"

    def check_covers(self, directory: Path, files: Iterable[str]) -> None:
        """Raise `CheckpointError` if a file has no checksum, since damage to it would go unnoticed."""
        missing = sorted(set(files) - self.sums.keys())
        if missing:
            raise CheckpointError(
                f"{directory / MANIFEST_FILE} has no checksums for {format_names(missing, 3)}: it is damaged or "
                "belongs to another checkpoint. Restore it, load another checkpoint, or delete it to skip verification."
            )

    def verify_checksums(self, directory: Path, file_slice: slice, progress: Progress) -> None:
        """Raise `CheckpointError` if a file of `file_slice` differs from what was written.

        `file_slice` selects from the sorted file names: the ranks divide the work.
        """
        names = sorted(self.sums)[file_slice]
        for name in names:
            _check_regular_file(directory / name)
        progress.add_expected(sum((directory / name).stat().st_size for name in names))
        for name in names:
            if (checksum := _compute_checksum(directory / name, progress)) != self.sums[name]:
                raise CheckpointError(
                    f"{directory / name} is damaged or belongs to another checkpoint: expected CRC-32 "
                    f"{self.sums[name]}, got {checksum}. Restore it, or load another checkpoint."
                )


def read_manifest(directory: Path) -> Manifest | None:
    """Return the manifest, or None if `save` did not write this directory."""
    file = directory / MANIFEST_FILE
    if not file.is_file():
        return None
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
        if fields["format"] > _FORMAT_VERSION:
            raise CheckpointError(
                f"{file} was written by a newer zeroshard: expected format {_FORMAT_VERSION} or older, got "
                f"{fields['format']}. Upgrade zeroshard."
            )
        manifest = parse_manifest(fields)
        reject_path_traversal(file, manifest.sums)
        return manifest
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{file} cannot be read: {format_error(error)}") from error


def parse_manifest(fields: Mapping[str, Any]) -> Manifest:
    """Return the manifest with these fields, which may come from an untrusted file."""
    return Manifest(
        int(fields["step"]),
        int(fields["world_size"]),
        {name: int(value) for name, value in fields["sums"].items()},
        float(fields["time"]),
        str(fields["torch"]),
        None if fields.get("model") is None else str(fields["model"]),
        tuple(map(str, fields.get("optimizers", ()))),
        {str(name): str(first) for name, first in fields.get("tied", {}).items()},
    )


class ChecksummingFileSystem(FileSystem):
    """Computes checksums while DCP writes files, without reading files back."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.checksums: dict[str, int] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            checksumming = _ChecksummingStream(stream, self._progress)
            try:
                yield checksumming
            except RuntimeError:
                if checksumming.failure is not None:  # torch's own error does not name the cause
                    raise checksumming.failure from None
                raise
            self.checksums[Path(path).name] = checksumming.checksum

    def rename(self, path: Any, new_path: Any) -> None:
        super().rename(path, new_path)
        self.checksums[Path(new_path).name] = self.checksums.pop(Path(path).name)


class _ChecksummingStream:
    """A sequential, write-only stream that updates a checksum."""

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
            raise AttributeError(name)  # these would bypass the checksum
        return getattr(self._stream, name)


def _check_regular_file(file: Path) -> None:
    # Reading a pipe or a device may never end.
    if not file.is_file():
        reason = "is not a regular file" if file.exists() else "is missing: the checkpoint is incomplete"
        raise CheckpointError(f"{file} {reason}. Restore it, or load another checkpoint.")


def _compute_checksum(file: Path, progress: Progress) -> int:
    checksum, buffer = 0, memoryview(bytearray(_CHECKSUM_CHUNK_BYTES))
    with file.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            checksum = zlib.crc32(buffer[:count], checksum)
            progress.advance(count)
    return checksum


def manifest_fields(manifest: Manifest | None) -> dict[str, Any]:
    """Return the manifest's fields without the checksums; empty if there is no manifest."""
    return {} if manifest is None else {key: value for key, value in asdict(manifest).items() if key != "sums"}


def build_manifest(fields: Mapping[str, Any], directory: Path, progress: Progress) -> Manifest:
    """Return a manifest with `fields` for files that something else wrote: each is read for its checksum."""
    files = sorted(directory.iterdir())
    progress.add_expected(sum(file.stat().st_size for file in files))
    return Manifest(**{**fields, "sums": {file.name: _compute_checksum(file, progress) for file in files}})
