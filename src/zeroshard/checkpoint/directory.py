"""`zeroshard.json`: what a checkpoint says of itself, with a check sum of every file in it.

Sizes do not tell a file from that of another checkpoint, and torch looks at no check sums when it reads.
"""

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem

from ..errors import CheckpointError
from .metadata import reject_path_traversal
from .progress import Progress

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
