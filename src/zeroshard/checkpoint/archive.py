"""A directory that `torch.distributed.checkpoint` wrote, read without running code from it.

torch's own reader unpickles whatever the files say. Here only the classes that make up DCP's metadata are known, values
are read as `torch.load(weights_only=True)` reads them, and no name in the metadata leads outside the directory.
"""

import io
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.futures import Future

from ..comm.group import Group
from ..errors import CheckpointError

_METADATA = ".metadata"
_STRANGER = "GLOBAL"
"""In what torch says of types that it does not read."""
_OURS: dict[str, Any] = {
    **{
        f"{metadata.__name__}.{name}": getattr(metadata, name)
        for name in (
            *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata"),
            *("BytesStorageMetadata", "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING"),
        )
    },
    **{f"{filesystem.__name__}.{name}": getattr(filesystem, name) for name in ("_StorageInfo", "_StoragePrefix")},
    "torch.Size": torch.Size,
    "torch.serialization._get_layout": torch.serialization._get_layout,
    "collections.OrderedDict": OrderedDict,
    # The directory as it was given to the writer; never looked at. Its class depends on system and version.
    **{f"{module}.{kind}Path": PurePath for module in ("pathlib", "pathlib._local") for kind in ("Posix", "Windows")},
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
    """What is in a directory, and the way to read it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.metadata = _read_metadata(directory)
        try:
            self.entries = _entries(self.metadata)
            _check_chunks(self.entries)
            self.files()
        except Exception as error:
            raise CheckpointError(f"{directory / _METADATA} contradicts itself: {error}") from error

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

    def read(self, targets: dict[str, Any], group: Group) -> dict[str, Any]:
        """The values of some entries, by key. Tensors are read into the given ones, other values are returned.

        Called on all ranks of the group, each with the keys that it needs.
        """
        values = dict(targets)
        planner = _Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
        try:
            with ranks_for_dcp(group) as ranks:
                load(values, storage_reader=_Reader(self), planner=planner, **ranks)
        except CheckpointException as error:
            raise CheckpointError(f"{self.directory}: {reasons(error)}") from error
        return values


@contextmanager
def ranks_for_dcp(group: Group) -> Iterator[dict[str, Any]]:
    """How to call DCP on these ranks. On one alone it warns that there are no others."""
    if group.size > 1:
        yield {"process_group": group.control}
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield {"no_dist": True}


class _Reader(filesystem.FileSystemReader):
    def __init__(self, archive: Archive) -> None:
        super().__init__(archive.directory)
        self._archive = archive

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self._archive.metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        try:
            return super().read_data(plan, planner)
        except Exception:
            for item in plan.items:  # once more, to say which it is
                self._read_one(replace(plan, items=[item]), planner)
            raise

    def _read_one(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        key = plan.items[0].storage_index
        try:
            super().read_data(plan, planner)
        except CheckpointError:
            raise
        except Exception as error:
            file = self._archive.metadata.storage_data[key].relative_path
            raise CheckpointError(f"'{key.fqn}' in {file} cannot be read: {why(error)}") from error


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        key = read_item.dest_index.fqn
        try:
            self.state_dict[key] = torch.load(value, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            if _STRANGER not in why(error):
                raise
            raise CheckpointError(
                f"'{key}' holds a type that is not read from files, since reading it could run code ({why(error)}) "
                "Allow it with torch.serialization.add_safe_globals if you trust the file."
            ) from error


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full in _OURS:
            return _OURS[full]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it names {full}, which is no part of a checkpoint's metadata")


def _entries(metadata: Metadata) -> list[Entry]:
    paths = metadata.planner_data or {}
    return [
        Entry(key, tuple(paths.get(key, (key,))), it if isinstance(it, TensorStorageMetadata) else None)
        for key, it in metadata.state_dict_metadata.items()
    ]


def _check_chunks(entries: Iterable[Entry]) -> None:
    """Where a part is not there torch reads nothing, and says nothing."""
    for key, _, tensor in entries:
        if tensor is not None:
            there = sum(chunk.sizes.numel() for chunk in tensor.chunks)
            if there != tensor.size.numel():
                raise CheckpointError(f"'{key}' has {tensor.size.numel()} elements, but parts with {there} of them")


def _read_metadata(directory: Path) -> Metadata:
    file = directory / _METADATA
    if not file.is_file():
        raise CheckpointError(f"{directory} has no {_METADATA}: it is no checkpoint, or an incomplete one")
    try:
        with file.open("rb") as stream:
            found = _Unpickler(stream).load()
    except Exception as error:
        raise CheckpointError(f"{file} cannot be read: {error or type(error).__name__}") from error
    if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
        raise CheckpointError(f"{file} is not the metadata of a checkpoint")
    _refuse_ways_out(file, (getattr(info, "relative_path", None) for info in found.storage_data.values()))
    return found


def _refuse_ways_out(file: Path, names: Iterable[Any]) -> None:
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or name in ("", ".", ".."):
            raise CheckpointError(f"{file} names a file outside its directory: {name!r}")


def why(error: BaseException) -> str:
    """What torch could not read, without its advice, which is to trust the file."""
    parts = [part.strip() for part in str(error).rpartition("WeightsUnpickler error: ")[2].split("\n\n")]
    told = [part for part in parts if part and not part.startswith(("Weights only load failed", "Check the docu"))]
    return told[0].partition("\n")[0] if told else type(error).__name__


def reasons(error: CheckpointException) -> str:
    """What went wrong on which rank, without the traces that torch puts in front."""
    reasons = {rank: failure[0] for rank, failure in error.failures.items()}
    return "; ".join(f"rank {rank}: {type(it).__name__}: {it}" for rank, it in reasons.items())
