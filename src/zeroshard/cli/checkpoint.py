"""`zeroshard checkpoint inspect` and `zeroshard checkpoint convert`.

Conversion reads a `torch.distributed.checkpoint` (DCP) directory or a `torch.save` file into `CheckpointContents` and
writes it as DCP, `torch.save` or safetensors. Tensors stay on disk: each writer lays out its file without tensor data,
records the offset of every tensor, and then copies the data chunk by chunk. Memory use does not grow with the model.
"""

import json
import mmap
import os
import pickle
import re
import shutil
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from uuid import uuid4

import torch
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.serialization import skip_data

from .._torch_compat import (
    dcp_metadata_file_name,
    dcp_storage_info_class,
    make_fake_mode,
    make_file_view,
    open_archive,
)
from .._types import align_up, replace_unprintable
from ..checkpoint.directory import (
    MANIFEST_FILE,
    Manifest,
    build_manifest,
    fsync_dir,
    manifest_fields,
    read_manifest,
    write_and_fsync,
)
from ..checkpoint.loader import PARAM_GROUPS, STATE, SavedOptimizer, find_checkpoint, param_group_entries, set_nested
from ..checkpoint.metadata import CheckpointMetadata, Entry, safe_repr
from ..checkpoint.progress import Progress
from ..checkpoint.reader import iter_chunks, locate_tensor, open_file, read_values
from ..checkpoint.saver import MODEL, OPTIM, RANKS, SCHEDULER, tensor_to_bytes, to_byte_tensor
from ..errors import CheckpointError, ZeroError
from ..state.serialization import loads
from ..state.state_dict import describe_options
from ..state.tensor_utils import map_tensors

# ---------------------------------------------------------------------------------------------------------------------
# Stored tensors, read one chunk at a time.


MAX_CHUNK_BYTES = 16 * 2**20
"""Largest part of a tensor that is in memory at one time."""


class TensorChunk(NamedTuple):
    """A rectangular block of a tensor, and its offset in each dimension."""

    offsets: tuple[int, ...]
    tensor: torch.Tensor


@dataclass(frozen=True)
class StoredTensor(ABC):
    """A tensor of known shape and dtype whose data is read in chunks."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @abstractmethod
    def iter_chunks(self) -> Iterator[TensorChunk]:
        """Yield all elements. Use each chunk before asking for the next: its memory may be reused."""


@dataclass(frozen=True)
class InMemoryTensor(StoredTensor):
    """A tensor in memory, or in a memory-mapped file."""

    tensor: torch.Tensor

    def iter_chunks(self) -> Iterator[TensorChunk]:
        return _split_into_chunks((0,) * len(self.shape), self.tensor)


def wrap_tensor(tensor: torch.Tensor) -> InMemoryTensor:
    """Wrap a dense tensor. Raises `CheckpointError` for sparse and quantized ones."""
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise CheckpointError(f"a tensor of layout {tensor.layout} and dtype {tensor.dtype} cannot be converted")
    plain = tensor.detach().resolve_conj().resolve_neg()
    return InMemoryTensor(tuple(plain.shape), plain.dtype, plain)


def _split_into_chunks(offsets: tuple[int, ...], tensor: torch.Tensor) -> Iterator[TensorChunk]:
    """Halve the tensor until its parts are small, along the dimension that keeps each half contiguous."""
    if tensor.nbytes <= MAX_CHUNK_BYTES:
        yield TensorChunk(offsets, tensor)
        return
    dim = max(range(tensor.dim()), key=lambda axis: (tensor.shape[axis] > 1, tensor.stride(axis)))
    first, second = tensor.tensor_split(2, dim)
    yield from _split_into_chunks(offsets, first)
    yield from _split_into_chunks(
        _add_offsets(offsets, [first.size(dim) if axis == dim else 0 for axis in range(tensor.dim())]), second
    )


@dataclass(frozen=True)
class CheckpointTensor(StoredTensor):
    """A tensor in the files of a DCP checkpoint, stored in one chunk or many."""

    metadata: CheckpointMetadata
    key: str
    chunks: Sequence[ChunkStorageMetadata]

    def iter_chunks(self) -> Iterator[TensorChunk]:
        for chunk in self.chunks:
            if chunk.sizes.numel():
                yield from self._iter_stored_chunk(chunk)

    def _iter_stored_chunk(self, chunk: ChunkStorageMetadata) -> Iterator[TensorChunk]:
        index = MetadataIndex(self.key, chunk.offsets)
        with open_file(self.metadata, self.metadata.storage_info(index).relative_path) as stream:
            start, like = locate_tensor(self.metadata, stream, index)
            blocks = (
                iter_chunks(stream, start, like)
                if like.is_meta
                else _split_into_chunks((0,) * like.dim(), wrap_tensor(like).tensor)
            )
            for offsets, tensor in blocks:
                yield TensorChunk(_add_offsets(chunk.offsets, offsets), tensor)


def make_checkpoint_tensor(metadata: CheckpointMetadata, key: str, tensor: TensorStorageMetadata) -> CheckpointTensor:
    return CheckpointTensor(tuple(tensor.size), tensor.properties.dtype, metadata, key, tensor.chunks)


def _add_offsets(offsets: Sequence[int], delta: Sequence[int]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip(offsets, delta, strict=True))


# ---------------------------------------------------------------------------------------------------------------------
# Contents of a checkpoint, independent of its format, under the names that `zeroshard.checkpoint` uses.


MANIFEST_KEY = "zeroshard"
"""Key of the manifest fields in formats that store everything in one dict."""

LeafPath = tuple[Any, ...]
Leaf = Any
"""A `StoredTensor`, or a small value."""


@dataclass
class CheckpointContents:
    """The contents of a checkpoint in any format. Tensors are not read until they are written out."""

    leaves: dict[LeafPath, Leaf] = field(default_factory=dict)
    """Values by path: (model, name), (optim, state, name, key), and all other entries. Without parameter groups."""
    param_groups: list[dict[str, Any]] | None = None
    """Parameter groups of the optimizer, with parameter names in `params`."""
    manifest: dict[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.leaves.values() if isinstance(leaf, StoredTensor))

    def under(self, *path: Any) -> dict[LeafPath, Leaf]:
        """Return the leaves below `path`, keyed by the rest of their path."""
        return {key[len(path) :]: leaf for key, leaf in self.leaves.items() if key[: len(path)] == path}

    def param_group_leaves(self) -> dict[LeafPath, Leaf]:
        """Return the parameter groups as leaves."""
        groups = enumerate(self.param_groups or ())
        return dict(leaf for number, group in groups for leaf in flatten_leaves((OPTIM, PARAM_GROUPS, number), group))

    def other_leaves(self) -> dict[LeafPath, Leaf]:
        """Return the leaves outside the model and the optimizer state."""
        return {path: leaf for path, leaf in self.leaves.items() if path[0] != MODEL and path[:2] != (OPTIM, STATE)}


class ModelWeights(CheckpointContents):
    """Parameters and buffers only, by their names in the model."""


def flatten_leaves(path: LeafPath, value: Any) -> Iterator[tuple[LeafPath, Leaf]]:
    """Yield the path and value of each leaf of nested dicts."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from flatten_leaves((*path, str(key)), item)
    else:
        yield path, wrap_tensor(value) if isinstance(value, torch.Tensor) else value


def is_serialized(path: LeafPath) -> bool:
    """Return whether `zeroshard.checkpoint.save` stores the value at this path as serialized bytes."""
    return path == (SCHEDULER,) or (path[0] == RANKS and len(path) == 2)


def deserialize_leaf(leaf: Leaf) -> Leaf:
    """Return the deserialized value, or the leaf itself if it holds no bytes of ours."""
    if not isinstance(leaf, InMemoryTensor) or leaf.dtype != torch.uint8:
        return leaf
    try:
        return loads(tensor_to_bytes(leaf.tensor))
    except Exception:  # not serialized by zeroshard
        return leaf


# ---------------------------------------------------------------------------------------------------------------------
# Output files: tensor data at known offsets, atomic rename.


class TensorSlot(NamedTuple):
    """The file offset of a tensor's contiguous data."""

    offset: int
    stored: StoredTensor


def write_tensors(file: Path, slots: Sequence[TensorSlot], progress: Progress) -> None:
    """Write tensors to their offsets in a file that already has its full length, and fsync it."""
    with file.open("r+b") as stream:
        # Hazard: a full disk kills the process (SIGBUS) when a mapped page is written. Allocate the space before.
        if size := file.stat().st_size:
            os.posix_fallocate(stream.fileno(), 0, size)
        for slot in slots:
            if slot.stored.nbytes:
                _write_tensor(stream.fileno(), slot, progress)
        os.fsync(stream.fileno())


def _write_tensor(descriptor: int, slot: TensorSlot, progress: Progress) -> None:
    stored, skipped = slot.stored, slot.offset % mmap.ALLOCATIONGRANULARITY
    window = mmap.mmap(descriptor, skipped + stored.nbytes, offset=slot.offset - skipped)
    flat = torch.frombuffer(window, dtype=torch.uint8, offset=skipped, count=stored.nbytes)
    target = flat.view(stored.dtype).view(stored.shape)
    for offsets, chunk in stored.iter_chunks():
        box = tuple(slice(start, start + size) for start, size in zip(offsets, chunk.shape, strict=True))
        target[box].copy_(chunk)
        window.madvise(mmap.MADV_DONTNEED)  # written pages belong to the page cache: drop them from our RSS
        progress.advance(chunk.nbytes)


@contextmanager
def atomic_output(target: Path) -> Iterator[Path]:
    """Yield a hidden path to write to. Rename it to `target` on success; delete it on error."""
    _reject_existing(target)
    if not target.parent.is_dir():
        raise CheckpointError(f"{target.parent} is no directory: make it first")
    hidden = target.parent / f".{target.name}.converting-{uuid4().hex}"
    try:
        yield hidden
        _reject_existing(target)
        hidden.rename(target)
        fsync_dir(target.parent)
    except OSError as error:
        raise CheckpointError(f"{target} could not be written: {error}") from error
    finally:
        shutil.rmtree(hidden, ignore_errors=True) if hidden.is_dir() else hidden.unlink(missing_ok=True)


def _reject_existing(target: Path) -> None:
    if os.path.lexists(target):
        raise CheckpointError(f"{target} exists already. Remove it first, or give another name.")


# ---------------------------------------------------------------------------------------------------------------------
# Readers: DCP directories and torch.save files.


_OPTIMIZER_KEYS = (OPTIM, "optimizer")


def open_checkpoint(path: Path, progress: Progress) -> CheckpointContents:
    """Open a `torch.save` file, a DCP directory, or the latest checkpoint in a folder of them.

    If the checkpoint has checksums, all its files are read and verified first: corruption must not be copied.
    """
    with wrap_errors_for(path):
        return _open_torch_file(path) if path.is_file() else _open_dcp_directory(find_checkpoint(path), progress)


def select_weights(path: Path, contents: CheckpointContents) -> ModelWeights:
    """Return what `model.load_state_dict` takes. Raises `CheckpointError` if the checkpoint has no model."""
    weights = ModelWeights({name: leaf for name, leaf in contents.under(MODEL).items() if name})
    if not weights.leaves:
        keys = sorted({str(key[0]) for key in contents.leaves} | ({OPTIM} if contents.param_groups else set()))
        raise CheckpointError(
            f"{path} has no weights: they are expected under '{MODEL}', where checkpoint.save(model=...) puts them, "
            f"and there are {safe_repr(keys)}"
        )
    return weights


@contextmanager
def wrap_errors_for(path: Path, *, is_reading: bool = True) -> Iterator[None]:
    """Raise any error as a `CheckpointError` that names `path`.

    With `is_reading=False`, an OSError passes: it comes from the file that is written, not from `path`.
    """
    try:
        yield
    except ZeroError:
        raise
    except OSError as error:
        if not is_reading:
            raise
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except Exception as error:
        raise CheckpointError(f"{path} is not in a form that is known: {type(error).__name__}: {error}") from error


# ---- DCP directories


def _open_dcp_directory(directory: Path, progress: Progress) -> CheckpointContents:
    metadata, manifest = open_metadata(directory), read_manifest(directory)
    if manifest is not None:
        manifest.verify_checksums(directory, slice(None), progress)
    contents = CheckpointContents(manifest=manifest_fields(manifest))
    small = [entry for entry in metadata.entries if entry.tensor is None or is_serialized(entry.path)]
    values = _read_entries(metadata, small)
    for entry in metadata.entries:
        if entry.path[0] == MODEL and len(entry.path) > 1:
            contents.leaves[MODEL, ".".join(map(str, entry.path[1:]))] = _make_leaf(metadata, entry, values)
        elif not _is_optimizer_entry(entry):
            contents.leaves[entry.path] = _make_leaf(metadata, entry, values)
    if any(map(_is_optimizer_entry, metadata.entries)):
        _add_saved_optimizer(metadata, contents, values)
    return contents


def _add_saved_optimizer(metadata: CheckpointMetadata, contents: CheckpointContents, values: Mapping[str, Any]) -> None:
    small = {entry.key: entry.allocate() for entry in param_group_entries(metadata)}
    saved = SavedOptimizer(metadata, read_values(metadata, small))
    contents.param_groups = _read_param_groups(metadata, saved)
    for name, state in saved.state.items():
        for keys, entry in state:
            path = (OPTIM, STATE, name, *keys)
            contents.leaves[path] = _make_leaf(metadata, entry, values)


def open_metadata(directory: Path) -> CheckpointMetadata:
    """Read the metadata of a complete checkpoint, with entries in the order in which they were saved."""
    metadata = CheckpointMetadata(directory)
    metadata.check_files()
    positions = {key: position for position, key in enumerate(metadata.dcp_metadata.planner_data or ())}
    metadata.entries.sort(key=lambda entry: positions.get(entry.key, len(positions)))
    return metadata


def _is_optimizer_entry(entry: Entry) -> bool:
    """Return whether the entry is state or a parameter group, in torch's nested or in its flat (dotted) form."""
    return len(entry.path) > 1 and entry.path[0] == OPTIM and str(entry.path[1]).split(".")[0] in (STATE, PARAM_GROUPS)


def _read_entries(metadata: CheckpointMetadata, entries: Iterable[Entry]) -> dict[str, Any]:
    return read_values(metadata, {entry.key: entry.allocate() for entry in entries})


def _make_leaf(metadata: CheckpointMetadata, entry: Entry, values: Mapping[str, Any]) -> Leaf:
    if entry.tensor is None:
        return values[entry.key]
    return (
        wrap_tensor(values[entry.key])
        if entry.key in values
        else make_checkpoint_tensor(metadata, entry.key, entry.tensor)
    )


def _read_param_groups(metadata: CheckpointMetadata, saved: SavedOptimizer) -> list[dict[str, Any]]:
    """Read the parameter groups. Torch's flat form has no list: parameters with equal options form a group."""
    listed = metadata.under(OPTIM, PARAM_GROUPS)
    if listed:
        values, by_number = _read_entries(metadata, listed), defaultdict[int, dict[str, Any]](dict)
        for entry in listed:
            set_nested(by_number[int(entry.path[2])], entry.path[3:], values[entry.key])
        return [by_number[number] for number in sorted(by_number)]
    groups: dict[str, dict[str, Any]] = {}
    for name, options in saved.options.items():
        groups.setdefault(describe_options(options), {**options, "params": []})["params"].append(name)
    return list(groups.values())


# ---- torch.save files


def _open_torch_file(file: Path) -> CheckpointContents:
    if file.suffix == ".safetensors":
        raise CheckpointError(f"{file}: safetensors are written, but not read. Convert what it was made of.")
    saved = _torch_load(file)
    if not isinstance(saved, dict) or not saved.keys() & {MODEL, *_OPTIMIZER_KEYS}:
        raise CheckpointError(f"{file} has neither a '{MODEL}' nor an '{OPTIM}': expected a dict with both")
    _check_names(file, saved)
    _check_names(file, saved.get(MODEL) or {})
    contents = CheckpointContents(manifest=_parse_manifest(saved.get(MANIFEST_KEY) or {}))
    for name, value in (saved.get(MODEL) or {}).items():
        contents.leaves[MODEL, name] = wrap_tensor(value) if isinstance(value, torch.Tensor) else value
    for key in _OPTIMIZER_KEYS:
        if isinstance(saved.get(key), dict) and {STATE, PARAM_GROUPS} <= saved[key].keys():
            _add_optimizer(file, contents, saved[key])
    for key, value in saved.items():
        if key not in (MODEL, MANIFEST_KEY, *_OPTIMIZER_KEYS):
            contents.leaves.update(_serialize_leaves(key, value))
    return contents


def _parse_manifest(values: dict[str, Any]) -> dict[str, Any]:
    if not values:
        return {}
    return manifest_fields(
        Manifest(int(values["step"]), int(values["world_size"]), {}, float(values["time"]), str(values["torch"]))
    )


def _check_names(file: Path, names: Iterable[Any]) -> None:
    for name in names:
        if not isinstance(name, str):
            raise CheckpointError(f"{file} has {safe_repr(name)} where a name is expected")


def _torch_load(file: Path) -> Any:
    try:
        return torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise CheckpointError(f"{file} cannot be read as a file of torch.save: {reason}") from error


def _add_optimizer(file: Path, contents: CheckpointContents, saved: Mapping[str, Any]) -> None:
    _check_names(file, saved)
    names = _param_names(file, contents, saved)
    contents.param_groups = [
        {
            **{key: value for key, value in group.items() if key != "param_names"},
            "params": [names[number] for number in group["params"]],
        }
        for group in saved[PARAM_GROUPS]
    ]
    for number, state in saved[STATE].items():
        contents.leaves.update(flatten_leaves((OPTIM, STATE, names.get(number, str(number))), state))
    for key, value in saved.items():
        if key not in (STATE, PARAM_GROUPS):
            contents.leaves.update(flatten_leaves((OPTIM, key), value))


def _param_names(file: Path, contents: CheckpointContents, saved: Mapping[str, Any]) -> dict[Any, str]:
    """Map the state dict's parameter ids to names: `param_names` of the groups, else the model's names in order."""
    numbers = [number for group in saved[PARAM_GROUPS] for number in group["params"]]
    group_names = [name for group in saved[PARAM_GROUPS] for name in group.get("param_names") or ()]
    if len(group_names) == len(numbers):
        _check_names(file, group_names)
        return dict(zip(numbers, group_names, strict=True))
    model = {name: leaf for (name,), leaf in contents.under(MODEL).items() if isinstance(leaf, InMemoryTensor)}
    if not model or not all(isinstance(number, int) for number in numbers):
        return {number: str(number) for number in numbers}
    guess = dict(zip(numbers, model, strict=False))
    fits = all(_state_shapes_match(model[name], saved[STATE].get(number, {})) for number, name in guess.items())
    if len(saved[PARAM_GROUPS]) > 1 or len(model) != len(numbers) or not fits:
        raise CheckpointError(
            f"{file} does not say which parameters the optimizer's state belongs to, and they are not the model's in "
            "its order. Save it again with an optimizer that was made of model.named_parameters()."
        )
    return guess


def _state_shapes_match(param: InMemoryTensor, state: Mapping[str, Any]) -> bool:
    tensors = (value for value in state.values() if isinstance(value, torch.Tensor) and value.dim())
    return all(tuple(value.shape) == param.shape for value in tensors)


def _serialize_leaves(key: str, value: Any) -> dict[Any, Leaf]:
    """Return the leaves of one top-level entry, serialized to bytes where `zeroshard.checkpoint.save` does so."""
    if key == SCHEDULER and not isinstance(value, torch.Tensor):
        return {(SCHEDULER,): wrap_tensor(to_byte_tensor(value))}
    if key == RANKS and isinstance(value, dict):
        return {
            (RANKS, str(rank)): wrap_tensor(item if isinstance(item, torch.Tensor) else to_byte_tensor(item))
            for rank, item in value.items()
        }
    return dict(flatten_leaves((key,), value))


# ---------------------------------------------------------------------------------------------------------------------
# Writers: torch.save, DCP and safetensors.


_ALIGNMENT_BYTES = 64
_DATA_FILE = "__0_0.distcp"
_SAFETENSORS_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}

FormatWriter = Callable[[CheckpointContents, Path, Progress], None]


# ---- torch.save


def write_torch(contents: CheckpointContents, file: Path, progress: Progress) -> None:
    """Write a file for `torch.load(weights_only=True)`, with optimizer state as torch's optimizers store it."""
    faker = _TensorFaker()
    tree = faker.replace_tensors(_build_torch_state_dict(contents))
    with file.open("w+b") as stream:
        _save_without_data(tree, stream)
    with file.open("rb") as stream:
        slots = _locate_slots(stream, 0, file.stat().st_size, faker.tensors)
    write_tensors(file, slots, progress)


def _build_torch_state_dict(contents: CheckpointContents) -> dict[str, Any]:
    if isinstance(contents, ModelWeights):
        return {name: leaf for (name,), leaf in contents.leaves.items()}
    tree: dict[str, Any] = {MODEL: {name: leaf for (name,), leaf in contents.under(MODEL).items()}}
    if contents.param_groups is not None:
        tree[OPTIM] = {STATE: _index_state(contents), PARAM_GROUPS: _index_param_groups(contents.param_groups)}
    for path, leaf in contents.other_leaves().items():
        set_nested(tree, path, deserialize_leaf(leaf) if is_serialized(path) else leaf)
    if contents.manifest:
        tree[MANIFEST_KEY] = contents.manifest
    return tree


def _index_param_groups(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    indexed, start = [], 0
    for group in groups:
        names = list(group["params"])
        indices = list(range(start, start + len(names)))
        indexed.append({**group, "params": indices, "param_names": names})
        start += len(names)
    return indexed


def _index_state(contents: CheckpointContents) -> dict[Any, Any]:
    """Return the optimizer state by parameter index. State that belongs to no parameter keeps its name."""
    names = [name for group in contents.param_groups or () for name in group["params"]]
    indices = {name: index for index, name in enumerate(names)}
    state: dict[Any, Any] = {}
    for (name, *keys), leaf in contents.under(OPTIM, STATE).items():
        set_nested(state, (indices.get(name, name), *keys), leaf)
    return dict(sorted(state.items(), key=lambda item: item[0] if isinstance(item[0], int) else len(names)))


class _TensorFaker:
    """Replaces tensors in nested values with fake tensors, which have no memory."""

    def __init__(self) -> None:
        self.tensors: list[StoredTensor] = []
        """The replaced tensors, in the order in which pickle visits them."""
        self._fake_mode = make_fake_mode()

    def replace_tensors(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.replace_tensors(wrap_tensor(value))
        if isinstance(value, StoredTensor):
            self.tensors.append(value)
            with self._fake_mode:
                return torch.empty(value.shape, dtype=value.dtype)
        if isinstance(value, dict):
            return {key: self.replace_tensors(item) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self.replace_tensors(item) for item in value)
        return value


def _save_without_data(tree: Any, stream: BinaryIO) -> None:
    with skip_data(materialize_fake_tensors=True):
        torch.save(tree, stream)


def _locate_slots(stream: BinaryIO, start: int, length: int, tensors: Sequence[StoredTensor]) -> list[TensorSlot]:
    """Return the file offsets of the tensors in one `torch.save` archive, which begins at `start`."""
    reader = open_archive(make_file_view(stream, start, length))
    non_empty = [(record, stored) for record, stored in enumerate(tensors) if stored.nbytes]
    return [TensorSlot(start + reader.get_record_offset(f"data/{record}"), stored) for record, stored in non_empty]


# ---- torch.distributed.checkpoint


def write_dcp(contents: CheckpointContents, directory: Path, progress: Progress) -> None:
    """Write a DCP directory, as if a single rank had saved it."""
    directory.mkdir()
    data, slots = directory / _DATA_FILE, []
    metadata = Metadata({}, {}, {}, StorageMeta(save_id=str(uuid4())), filesystem.CURRENT_DCP_VERSION)
    leaves, faker = {**contents.leaves, **contents.param_group_leaves()}, _TensorFaker()
    with data.open("w+b") as stream:
        extents = {path: _append_leaf(stream, leaf, faker) for path, leaf in leaves.items()}
    with data.open("rb") as stream:
        for path, leaf in leaves.items():
            _add_metadata(metadata, path, leaf, *extents[path])
            slots += _locate_slots(stream, *extents[path], [leaf]) if isinstance(leaf, StoredTensor) else []
    write_tensors(data, slots, progress)
    with (directory / dcp_metadata_file_name()).open("wb") as stream:
        pickle.dump(metadata, stream)
    if contents.manifest:
        write_and_fsync(directory / MANIFEST_FILE, build_manifest(contents.manifest, directory, progress).to_json())
    fsync_dir(directory)


def _append_leaf(stream: BinaryIO, leaf: Any, faker: _TensorFaker) -> tuple[int, int]:
    """Append the leaf to the file, without tensor data, and return its start and length."""
    start = stream.seek(align_up(stream.tell(), _ALIGNMENT_BYTES))
    if isinstance(leaf, StoredTensor):
        _save_without_data(faker.replace_tensors(leaf), stream)
    else:
        torch.save(leaf, stream)
    return start, stream.tell() - start


def _add_metadata(metadata: Metadata, path: tuple[Any, ...], leaf: Any, start: int, length: int) -> None:
    key = ".".join(map(str, path))
    if key in metadata.state_dict_metadata:
        raise CheckpointError(f"two values would have the name '{key}'")
    index = MetadataIndex(key)
    metadata.state_dict_metadata[key] = BytesStorageMetadata()
    if isinstance(leaf, StoredTensor):
        size, first = torch.Size(leaf.shape), torch.Size([0] * len(leaf.shape))
        properties, chunks = TensorProperties(dtype=leaf.dtype), [ChunkStorageMetadata(first, size)]
        metadata.state_dict_metadata[key] = TensorStorageMetadata(properties, size, chunks)
        index = MetadataIndex(key, first)
    metadata.planner_data[key] = path
    metadata.storage_data[index] = dcp_storage_info_class()(_DATA_FILE, start, length)


# ---- safetensors


def write_safetensors(contents: CheckpointContents, file: Path, progress: Progress) -> None:
    """Write tensors under their full names. All other values go into the header as JSON."""
    leaves = {".".join(map(str, path)): leaf for path, leaf in contents.leaves.items()}
    tensors = [(name, leaf) for name, leaf in leaves.items() if isinstance(leaf, StoredTensor)]
    tensors.sort(key=lambda item: -item[1].dtype.itemsize)  # aligns each tensor to its element size
    header: dict[str, Any] = {"__metadata__": _safetensors_metadata(contents, leaves)}
    offsets, end = [], 0
    for name, stored in tensors:
        offsets.append(end)
        end += stored.nbytes
        header[name] = {
            "dtype": _safetensors_dtype(name, stored),
            "shape": stored.shape,
            "data_offsets": [offsets[-1], end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + end)
    slots = [TensorSlot(8 + len(text) + offset, stored) for offset, (_, stored) in zip(offsets, tensors, strict=True)]
    write_tensors(file, slots, progress)


def _safetensors_dtype(name: str, stored: StoredTensor) -> str:
    if stored.dtype not in _SAFETENSORS_DTYPE_NAMES:
        raise CheckpointError(f"'{name}' has dtype {stored.dtype}, for which safetensors has no name")
    return _SAFETENSORS_DTYPE_NAMES[stored.dtype]


def _safetensors_metadata(contents: CheckpointContents, leaves: dict[str, Any]) -> dict[str, str]:
    values = {name: leaf for name, leaf in leaves.items() if not isinstance(leaf, StoredTensor)}
    if contents.param_groups is not None:
        values[PARAM_GROUPS] = contents.param_groups
    if contents.manifest:
        values[MANIFEST_KEY] = contents.manifest
    return {"format": "pt", **{name: _to_json(name, value) for name, value in values.items()}}


def _to_json(name: str, value: Any) -> str:
    try:
        return json.dumps(map_tensors(value, torch.Tensor.tolist))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"'{name}' cannot be written as JSON, as safetensors needs it: {error}") from error


FORMAT_WRITERS: dict[str, FormatWriter] = {"torch": write_torch, "dcp": write_dcp, "safetensors": write_safetensors}


# ---------------------------------------------------------------------------------------------------------------------
# Description: what a checkpoint contains, from its metadata and file sizes.


_DISTCP_FILE = re.compile(r"__(\d+)_\d+\.distcp")


@dataclass(frozen=True)
class EntrySummary:
    """A tensor, or another value: shape and dtype are None."""

    shape: tuple[int, ...] | None
    dtype: str | None
    bytes: int


@dataclass(frozen=True)
class RankFiles:
    """The number and size of the files that one rank wrote."""

    files: int
    bytes: int


@dataclass(frozen=True)
class Totals:
    elements: int
    """Elements of the model."""
    model_bytes: int
    state_bytes: int
    other_bytes: int
    file_bytes: int


@dataclass(frozen=True)
class CheckpointDescription:
    path: str
    step: int | None
    """None if unknown: the checkpoint was not saved by `zeroshard.checkpoint.save`."""
    world_size: int
    """Number of ranks that saved it."""
    torch: str | None
    model: dict[str, EntrySummary]
    state: dict[str, dict[str, EntrySummary]]
    """State by parameter name and key."""
    state_keys: list[str]
    other: dict[str, EntrySummary]
    ranks: dict[int, RankFiles]
    totals: Totals

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def describe_checkpoint(path: Path) -> CheckpointDescription:
    """Describe a checkpoint directory, or the latest checkpoint in a folder. Reads only metadata and file sizes."""
    directory = find_checkpoint(path)
    metadata, manifest = open_metadata(directory), manifest_fields(read_manifest(directory))
    ranks = _files_per_rank(directory)
    model = {".".join(map(str, entry.path[1:])): _summarize_entry(entry) for entry in metadata.under(MODEL)}
    state: dict[str, dict[str, EntrySummary]] = {}
    if metadata.under(OPTIM):
        # No values are read: the keys of the options are enough to find the parameter names.
        saved = SavedOptimizer(metadata, {entry.key: () for entry in param_group_entries(metadata)})
        for name, entries in saved.state.items():
            state[name] = {".".join(map(str, keys)): _summarize_entry(entry) for keys, entry in entries}
    other = {
        entry.key: _summarize_entry(entry)
        for entry in sorted(metadata.entries, key=lambda entry: entry.key)
        if _is_other_entry(entry)
    }
    state_entries = [value for entries in state.values() for value in entries.values()]
    return CheckpointDescription(
        path=str(directory),
        step=manifest.get("step"),
        world_size=manifest.get("world_size") or max(ranks, default=0) + 1,
        torch=manifest.get("torch"),
        model=model,
        state=state,
        state_keys=sorted({key for entries in state.values() for key in entries}),
        other=other,
        ranks=ranks,
        totals=Totals(
            elements=sum(prod(entry.shape) for entry in model.values() if entry.shape is not None),
            model_bytes=_sum_bytes(model.values()),
            state_bytes=_sum_bytes(state_entries),
            other_bytes=_sum_bytes(other.values()),
            file_bytes=sum(files.bytes for files in ranks.values()),
        ),
    )


def _summarize_entry(entry: Entry) -> EntrySummary:
    if entry.tensor is None:
        return EntrySummary(None, None, 0)
    dtype = str(entry.tensor.properties.dtype).removeprefix("torch.")
    return EntrySummary(tuple(entry.tensor.size), dtype, entry.nbytes)


def _is_other_entry(entry: Entry) -> bool:
    if entry.path[0] == OPTIM and len(entry.path) > 1:
        return str(entry.path[1]).partition(".")[0] not in (STATE, PARAM_GROUPS)
    return bool(entry.path[0] != MODEL)


def _files_per_rank(directory: Path) -> dict[int, RankFiles]:
    sizes: dict[int, list[int]] = defaultdict(list)
    for file in directory.iterdir():
        if match := _DISTCP_FILE.fullmatch(file.name):
            sizes[int(match[1])].append(file.stat().st_size)
    return {rank: RankFiles(len(files), sum(files)) for rank, files in sorted(sizes.items())}


def _sum_bytes(entries: Iterable[EntrySummary]) -> int:
    return sum(value.bytes for value in entries)


# ---------------------------------------------------------------------------------------------------------------------
# Description as tables.


_KEY_MEANINGS = {RANKS: "random states of that rank, and its extra", SCHEDULER: "state of the scheduler"}


def print_description(description: CheckpointDescription, console: Console) -> None:
    console.print(_description_headline(description))
    if description.model or description.state:
        console.print(_param_table(description))
    if description.other:
        console.print(_other_entries_table(description.other))
    console.print(_rank_files_table(description.ranks))
    console.print(_totals_text(description))


def _description_headline(description: CheckpointDescription) -> Text:
    step = "step unknown" if description.step is None else f"step {description.step}"
    ranks = "1 rank" if description.world_size == 1 else f"{description.world_size} ranks"
    return _to_text(
        f"{description.path}: {step}, saved by {ranks}"
        + (f" with torch {description.torch}" if description.torch else "")
    )


def _param_table(description: CheckpointDescription) -> Table:
    table = _new_table("model and optimizer", "name", "shape", "dtype", "size", "state", "size of state")
    for name in {**description.model, **description.state}:
        state = description.state.get(name, {})
        size = decimal(sum(value.bytes for value in state.values())) if state else ""
        table.add_row(
            _to_text(name), *_entry_cells(description.model.get(name)), _to_text(", ".join(sorted(state))), size
        )
    return table


def _other_entries_table(entries: Mapping[str, EntrySummary]) -> Table:
    table = _new_table("other contents", "key", "shape", "dtype", "size", "what it is")
    for key, value in entries.items():
        table.add_row(_to_text(key), *_entry_cells(value), _KEY_MEANINGS.get(key.partition(".")[0], ""))
    return table


def _rank_files_table(ranks: Mapping[int, RankFiles]) -> Table:
    table = _new_table("files", "rank", "files", "size")
    for rank, rank_files in ranks.items():
        table.add_row(str(rank), str(rank_files.files), decimal(rank_files.bytes))
    return table


def _totals_text(description: CheckpointDescription) -> Text:
    totals, elements = description.totals, f"{description.totals.elements:,} elements"
    return Text(
        f"{elements}, model {decimal(totals.model_bytes)}, state {decimal(totals.state_bytes)}, other "
        f"{decimal(totals.other_bytes)}; files {decimal(totals.file_bytes)}"
    )


def _new_table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold", justify="right" if "size" in column else "left")
    return table


def _entry_cells(entry: EntrySummary | None) -> tuple[str, str, str]:
    if entry is None or entry.shape is None:
        return "", "", ""
    return " x ".join(map(str, entry.shape)) or "scalar", str(entry.dtype), decimal(entry.bytes)


def _to_text(text: str) -> Text:
    """Return the text without interpreting it as rich markup."""
    return Text(replace_unprintable(text))
