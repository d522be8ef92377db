"""`zeroshard.json`: what a checkpoint says of itself, with a check sum of every file in it.

Sizes do not tell a file from that of another checkpoint, and torch looks at no check sums when it reads.
"""

import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem

from ..errors import CheckpointError

MANIFEST = "zeroshard.json"

_FORMAT = 1
_PIECE = 1 << 22


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

    def check_sums(self, directory: Path, share: slice) -> None:
        """A share of the files has the content that was written: ranks look at them in turns."""
        for name in sorted(self.sums)[share]:
            if _sum_of(directory / name) != self.sums[name]:
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
        sums = {str(name): int(value) for name, value in found["sums"].items()}
        return Manifest(int(found["step"]), int(found["world_size"]), sums, float(found["time"]), str(found["torch"]))
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{file} cannot be read: {type(error).__name__}: {error}") from error


class SummingFiles(FileSystem):
    """Files whose check sums are taken as they are written, so that none is read again for it."""

    def __init__(self) -> None:
        self.sums: dict[str, int] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            summed = _Summed(stream)
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

    def __init__(self, stream: Any) -> None:
        self._stream, self.sum = stream, 0
        self.failure: OSError | None = None

    def write(self, data: Any) -> Any:
        self.sum = zlib.crc32(data, self.sum)
        try:
            return self._stream.write(data)
        except OSError as error:
            self.failure = error
            raise

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("seek", "truncate", "writelines")):
            raise AttributeError(name)  # they would go past the sum
        return getattr(self._stream, name)


def _sum_of(file: Path) -> int:
    total = 0
    with file.open("rb") as stream:
        while piece := stream.read(_PIECE):
            total = zlib.crc32(piece, total)
    return total


def said_by(directory: Path) -> dict[str, Any]:
    """What a checkpoint says of itself beside the sums of its files; nothing if it is none of `save`."""
    found = read_manifest(directory)
    return {} if found is None else {key: value for key, value in asdict(found).items() if key != "sums"}


def unsummed(said: Mapping[str, Any]) -> Manifest:
    """A manifest for files that were written anew."""
    return Manifest(**{**said, "sums": {}})
