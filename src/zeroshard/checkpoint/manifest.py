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
from .archive import refuse_ways_out
from .progress import Progress

MANIFEST = "zeroshard.json"

_FORMAT = 1
_PIECE = 1 << 18


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

    def text(self) -> str:
        return json.dumps({"format": _FORMAT, **asdict(self)}, indent=2) + "\n"

    def require_all(self, directory: Path, files: Iterable[str]) -> None:
        """A file without a sum could be damaged, and nobody would know."""
        without = sorted(set(files) - self.sums.keys())
        if without:
            names = f"{', '.join(without[:3])}{' and others' if len(without) > 3 else ''}"
            raise CheckpointError(
                f"{directory / MANIFEST} has no check sums of {names}, which the checkpoint needs: it is damaged, or "
                "of another one. Restore it, or load another checkpoint. Without this file all is read unchecked."
            )

    def check_sums(self, directory: Path, share: slice, progress: Progress) -> None:
        """A share of the files has the content that was written: ranks look at them in turns."""
        names = sorted(self.sums)[share]
        for name in names:
            _require_file(directory / name)
        progress.expect(sum((directory / name).stat().st_size for name in names))
        for name in names:
            if _sum_of(directory / name, progress) != self.sums[name]:
                raise CheckpointError(
                    f"{directory / name} is damaged, or of another checkpoint: its content is not what was written. "
                    "Restore it, or load another checkpoint."
                )


def read_manifest(directory: Path) -> Manifest | None:
    """None if there is none: `save` did not write this directory."""
    file = directory / MANIFEST
    if not file.is_file():
        return None
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if found["format"] > _FORMAT:
            raise CheckpointError(f"{file} is of a newer version of this package (format {found['format']})")
        sums = {name: int(value) for name, value in found["sums"].items()}
        refuse_ways_out(file, sums)
        return Manifest(int(found["step"]), int(found["world_size"]), sums, float(found["time"]), str(found["torch"]))
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{file} cannot be read: {type(error).__name__}: {error}") from error


class SummingFiles(FileSystem):
    """Files whose check sums are taken as they are written, so that none is read again for it."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.sums: dict[str, int] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            summed = _Summed(stream, self._progress)
            try:
                yield summed
            except RuntimeError:
                if summed.failure is not None:  # torch says only that it could not go on
                    raise summed.failure from None
                raise
            self.sums[Path(path).name] = summed.sum

    def rename(self, path: Any, new_path: Any) -> None:
        super().rename(path, new_path)
        self.sums[Path(new_path).name] = self.sums.pop(Path(path).name)


class _Summed:
    """A stream that is written from the beginning to the end."""

    def __init__(self, stream: Any, progress: Progress) -> None:
        self._stream, self._progress, self.sum = stream, progress, 0
        self.failure: OSError | None = None

    def write(self, data: Any) -> Any:
        self.sum = zlib.crc32(data, self.sum)
        try:
            written = self._stream.write(data)
        except OSError as error:
            self.failure = error
            raise
        self._progress.add(len(data))
        return written

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("seek", "truncate", "writelines")):
            raise AttributeError(name)  # they would go past the sum
        return getattr(self._stream, name)


def _require_file(file: Path) -> None:
    # A pipe or a device may have no end.
    if not file.is_file():
        reason = "is no regular file" if file.exists() else "is missing: the checkpoint is incomplete"
        raise CheckpointError(f"{file} {reason}. Restore it, or load another checkpoint.")


def _sum_of(file: Path, progress: Progress) -> int:
    total, buffer = 0, memoryview(bytearray(_PIECE))
    with file.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            total = zlib.crc32(buffer[:count], total)
            progress.add(count)
    return total


def said_by(found: Manifest | None) -> dict[str, Any]:
    """What a checkpoint says of itself beside the sums of its files; nothing if it is none of `save`."""
    return {} if found is None else {key: value for key, value in asdict(found).items() if key != "sums"}


def summed(said: Mapping[str, Any], directory: Path, progress: Progress) -> Manifest:
    """A manifest for files that were written anew, and not from the beginning to the end: they are read for it."""
    files = sorted(directory.iterdir())
    progress.expect(sum(file.stat().st_size for file in files))
    return Manifest(**{**said, "sums": {file.name: _sum_of(file, progress) for file in files}})
