"""A directory that `torch.distributed.checkpoint` wrote, read without running code from it.

torch's own reader unpickles whatever the files say. Here only the classes that make up DCP's metadata are known, values
are read as `torch.load(weights_only=True)` reads them, and no name in the metadata leads outside the directory.
"""

import io
import pickle
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from ..comm.group import Group
from ..errors import CheckpointError
from .chunks import check_chunks
from .sealed import Sealed, Unpickler, sealed
from .showing import shown

_METADATA = ".metadata"
_LONG_LIST = 1024
"""Of which most elements may be missing, since they were empty."""
_MOST_BYTES = 1 << 63
"""Of a file."""


class _Encoding(int, metaclass=Sealed):
    """Equals a member of the enum that torch compares it with."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return int(self) == getattr(other, "value", other)

    __hash__ = int.__hash__


_RECORDS = (
    *(metadata.Metadata, metadata.MetadataIndex, metadata.StorageMeta, metadata.TensorProperties),
    *(metadata.TensorStorageMetadata, metadata.BytesStorageMetadata, metadata.ChunkStorageMetadata),
    *(filesystem._StorageInfo, filesystem._StoragePrefix),
)


def _plain_dict() -> dict[Any, Any]:
    """In the place of an ordered one, which takes attributes: they would come before its methods."""
    return {}


_OURS: dict[str, type] = {
    **{f"{it.__module__}.{it.__name__}": sealed(partial(object.__new__, it)) for it in _RECORDS},
    f"{metadata.__name__}._MEM_FORMAT_ENCODING": _Encoding,
    "torch.Size": sealed(torch.Size),
    "torch.serialization._get_layout": sealed(torch.serialization._get_layout),
    "collections.OrderedDict": sealed(_plain_dict),
    # The directory as it was given to the writer; never looked at. Its class depends on system and version.
    **{
        f"{module}.{kind}Path": sealed(lambda *_: None)
        for module in ("pathlib", "pathlib._local")
        for kind in ("Posix", "Windows")
    },
}


def is_archive(directory: Path) -> bool:
    return (directory / _METADATA).is_file()


class Entry(NamedTuple):
    """One value in the archive."""

    key: str
    path: tuple[Any, ...]
    """Where it was in the nested dict that was saved."""
    tensor: TensorStorageMetadata | None
    """None for what is not a tensor."""

    def room(self) -> torch.Tensor | None:
        """New memory for the whole of it, if it is a tensor."""
        return None if self.tensor is None else torch.empty(self.tensor.size, dtype=self.tensor.properties.dtype)

    @property
    def nbytes(self) -> int:
        return 0 if self.tensor is None else self.tensor.size.numel() * self.tensor.properties.dtype.itemsize


class Archive:
    """What is in a directory, and where."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.metadata = _read_metadata(directory)
        try:
            self.entries = _entries(self.metadata)
            for key, tensor in self._tensors():
                check_chunks(key, tensor)
        except Exception as error:
            raise CheckpointError(f"{directory / _METADATA} contradicts itself: {error}") from error
        self._check_lengths()
        _refuse_overlaps(directory / _METADATA, self.metadata.storage_data.values())

    def below(self, *path: Any) -> list[Entry]:
        """All entries whose path begins like that."""
        return [entry for entry in self.entries if entry.path[: len(path)] == path]

    def files(self) -> dict[str, int]:
        """All files that the metadata names, and how long they must be at least."""
        found: dict[str, int] = {}
        for info in self.metadata.storage_data.values():
            found[info.relative_path] = max(found.get(info.relative_path, 0), info.offset + info.length)
        return found

    def check_files(self) -> None:
        """All that was saved is there, as far as sizes can tell."""
        for name, least in self.files().items():
            file = self.directory / name
            if not file.is_file():
                raise CheckpointError(f"{file} is missing: the checkpoint is incomplete. Restore it, or load another.")
            if file.stat().st_size < least:
                raise CheckpointError(
                    f"{file} is truncated: it has {file.stat().st_size} bytes, and {least} were written. Load another "
                    "checkpoint."
                )

    def _tensors(self) -> Iterator[tuple[str, TensorStorageMetadata]]:
        return ((key, tensor) for key, _, tensor in self.entries if tensor is not None)

    def _check_lengths(self) -> None:
        """Memory is made for what the metadata say: no tensor may be larger than what was written of it."""
        for key, tensor in self._tensors():
            for chunk in tensor.chunks:
                least = prod(chunk.sizes) * tensor.properties.dtype.itemsize
                if least and (length := self.place_of(MetadataIndex(key, chunk.offsets)).length) < least:
                    raise CheckpointError(
                        f"{self.directory / _METADATA} contradicts itself: a part of '{key}' has {least} bytes, but "
                        f"{length} in its file"
                    )

    def place_of(self, index: MetadataIndex) -> Any:
        """In which file a value lies, from which byte on, and for how many."""
        place = self.metadata.storage_data.get(index)
        if place is None or place.transform_descriptors:
            reason = (
                "is not in its files" if place is None else f"was written with {shown(place.transform_descriptors)}"
            )
            raise CheckpointError(f"{self.directory}: a part of '{index.fqn}' {reason}")
        return place


@contextmanager
def ranks_for_dcp(group: Group) -> Iterator[dict[str, Any]]:
    """How to call DCP on these ranks. On one alone it warns that there are no others."""
    if group.size > 1:
        yield {"process_group": group.control}
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield {"no_dist": True}


class _Unpickler(Unpickler):
    def is_key(self, value: Any) -> bool:
        if type(value) is not MetadataIndex:
            return super().is_key(value)
        return type(value.fqn) is str and type(value.offset) in (torch.Size, type(None))

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full in _OURS:
            return _OURS[full]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it names {full}, which is no part of a checkpoint's metadata")


def _entries(metadata: Metadata) -> list[Entry]:
    paths = metadata.planner_data or {}
    entries = [
        Entry(key, tuple(paths.get(key, (key,))), it if isinstance(it, TensorStorageMetadata) else None)
        for key, it in metadata.state_dict_metadata.items()
    ]
    most = max(len(entries), _LONG_LIST)
    for key, path, _ in entries:
        if not isinstance(key, str) or not all(isinstance(it, str) or _is_place(it, most) for it in path):
            raise CheckpointError(f"{shown(key)} was at {shown(path)}")
    return entries


def _is_place(value: Any, most: int) -> bool:
    """A place in a list, which is made that long when it is read."""
    return type(value) is int and 0 <= value < most


def _read_metadata(directory: Path) -> Metadata:
    file = directory / _METADATA
    if not file.is_file():
        raise CheckpointError(f"{directory} has no {_METADATA}: it is no checkpoint, or an incomplete one")
    try:
        found = _Unpickler(io.BytesIO(file.read_bytes())).load()
    except Exception as error:
        raise CheckpointError(f"{file} cannot be read: {error or type(error).__name__}") from error
    if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
        raise CheckpointError(f"{file} is not the metadata of a checkpoint")
    for info in found.storage_data.values():
        _check_place(file, info)
    return found


def _check_place(file: Path, info: Any) -> None:
    if not isinstance(info, filesystem._StorageInfo):
        raise CheckpointError(f"{file} is not the metadata of a checkpoint in files")
    refuse_ways_out(file, [getattr(info, "relative_path", None)])
    offset, length = getattr(info, "offset", None), getattr(info, "length", None)
    if not all(type(it) is int and 0 <= it < _MOST_BYTES for it in (offset, length)):
        raise CheckpointError(f"{file} contradicts itself: {shown(length)} bytes from byte {shown(offset)} on")


def _refuse_overlaps(file: Path, places: Iterable[Any]) -> None:
    """Memory is made for every value: many in one place would take many times the memory that their file has."""
    name, end = "", 0
    for info in sorted(places, key=lambda it: (it.relative_path, it.offset, it.length)):
        if info.relative_path == name and info.length and info.offset < end:
            raise CheckpointError(f"{file} contradicts itself: two values begin before byte {end} of {shown(name)}")
        name, end = info.relative_path, max(info.offset + info.length, end if info.relative_path == name else 0)


def refuse_ways_out(file: Path, names: Iterable[Any]) -> None:
    """`file` names other files, of its own directory."""
    for name in names:
        if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\\" in name:
            raise CheckpointError(f"{file} names a file outside its directory: {shown(name)}")


def why(error: BaseException) -> str:
    """What torch could not read, without its advice, which is to trust the file."""
    parts = [part.strip() for part in str(error).rpartition("WeightsUnpickler error: ")[2].split("\n\n")]
    told = [part for part in parts if part and not part.startswith(("Weights only load failed", "Check the docu"))]
    return told[0].partition("\n")[0] if told else type(error).__name__


def reasons(error: CheckpointException) -> str:
    """What went wrong on which rank, without the traces that torch puts in front."""
    reasons = {rank: failure[0] for rank, failure in error.failures.items()}
    return "; ".join(f"rank {rank}: {type(it).__name__}: {it}" for rank, it in reasons.items())
