"""`zeroshard checkpoint inspect` and `zeroshard checkpoint convert`.

`convert` reads a `torch.distributed.checkpoint` (DCP) directory or a `torch.save` file into `Contents`, and writes DCP,
`torch.save` or safetensors. Tensors stay on disk: each writer lays out its file without tensor data, then reads every
tensor, a span at a time, into a memory map of its place in that file. Memory use does not grow with the model.
"""

import json
import mmap
import os
import pickle
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp
from torch.serialization import skip_data

from .._formatting import format_bytes, format_count, replace_unprintable
from .._torch_compat import (
    dcp_metadata_file_name,
    dcp_storage_info_class,
    make_fake_mode,
    make_file_view,
    open_archive,
)
from .._types import MIB, align_up
from ..checkpoint.directory import (
    MANIFEST_FILE,
    CheckpointDir,
    build_manifest,
    fsync_dir,
    manifest_fields,
    parse_manifest,
    read_manifest,
    write_and_fsync,
)
from ..checkpoint.loader import PARAM_GROUPS, STATE, SavedOptimizer, find_checkpoint, optimizer_section, set_nested
from ..checkpoint.metadata import CheckpointMetadata, Entry, safe_repr, torch_reason
from ..checkpoint.progress import Progress, errors_as_checkpoint_error
from ..checkpoint.reader import DISALLOWED_TYPE_MARKER, has_contiguous_chunks, read_values
from ..checkpoint.saver import MODEL, OPTIM, RANKS, SCHEDULER, tensor_to_bytes, to_byte_tensor
from ..errors import CheckpointError, ConfigError
from ..planner.shapes import SAFETENSORS_DTYPES
from ..state.serialization import check_record_sizes, loads
from ..state.shard_tensor import ShardTensor
from ..state.state_dict import describe_options
from ..state.tensor_utils import map_tensors

# ---------------------------------------------------------------------------------------------------------------------
# Contents of a checkpoint, independent of its format, under the names that `zeroshard.checkpoint` uses.


MANIFEST_KEY = "zeroshard"
"""Key of the manifest fields in formats that store everything in one dict."""
_ARCHIVE_MAGIC = b"PK"
"""How each `torch.save` archive begins."""
_SHOWN_PATH_PARTS = 4

LeafPath = tuple[Any, ...]


class StoredTensor(torch.Tensor):
    """A meta tensor that stands for a tensor in the files of a DCP directory."""

    read_into: Callable[[torch.Tensor], object]
    can_read_spans: Callable[[], bool]
    """Return whether spans can be read without reading any byte twice."""


def require_dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor without lazy bits. Raises `CheckpointError` for sparse and quantized ones."""
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise CheckpointError(
            f"expected a dense tensor, got {tensor.layout} with dtype {tensor.dtype}. Convert it with to_dense() (or "
            "dequantize it) before saving."
        )
    return tensor if isinstance(tensor, StoredTensor) else tensor.detach().resolve_conj().resolve_neg()


@dataclass
class Contents:
    """The contents of a checkpoint in any format."""

    leaves: dict[LeafPath, Any] = field(default_factory=dict)
    """Values by path: (model, name), (optim, state, name, key), and all other entries. Without parameter groups."""
    param_groups: list[dict[str, Any]] | None = None
    """Parameter groups of the optimizer, with parameter names in `params`."""
    manifest: dict[str, Any] = field(default_factory=dict)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [leaf for leaf in self.leaves.values() if isinstance(leaf, torch.Tensor)]

    def select_weights(self, source: Path) -> "Contents":
        """Return what `model.load_state_dict` takes. Raises `CheckpointError` if there is no model."""
        leaves = {path[1:]: leaf for path, leaf in self.leaves.items() if path[0] == MODEL and len(path) > 1}
        if not leaves:
            found = sorted({str(path[0]) for path in self.leaves} | ({OPTIM} if self.param_groups else set()))
            raise CheckpointError(
                f"{source} has no model weights: expected names under '{MODEL}', got {safe_repr(found)}. Save with "
                "checkpoint.save(model=...), or convert without --weights-only."
            )
        return Contents(leaves)

    def to_torch_state_dict(self) -> dict[str, Any]:
        """Return nested dicts as torch saves them: optimizer state by parameter index, and nothing serialized."""
        names = [name for group in self.param_groups or () for name in group["params"]]
        indices = {name: index for index, name in enumerate(names)}
        tree: dict[str, Any] = {}
        state: dict[Any, Any] = {}
        for path, leaf in self.leaves.items():
            if path[:2] == (OPTIM, STATE) and self.param_groups is not None:
                set_nested(state, (indices.get(path[2], path[2]), *path[3:]), leaf)
            else:
                set_nested(tree, path, _deserialize(path, leaf) if _is_serialized(path) else leaf)
        _restore_param_numbers(tree)
        if self.param_groups is not None:
            in_order = sorted(state.items(), key=lambda item: item[0] if isinstance(item[0], int) else len(names))
            groups, start = [], 0
            for group in self.param_groups:
                params = list(group["params"])
                groups.append({**group, "params": [*range(start, start + len(params))], "param_names": params})
                start += len(params)
            tree[OPTIM] = {STATE: dict(in_order), PARAM_GROUPS: groups, **tree.get(OPTIM, {})}
        return {**tree, MANIFEST_KEY: self.manifest} if self.manifest else tree


def flatten_leaves(path: LeafPath, value: Any) -> Iterator[tuple[LeafPath, Any]]:
    """Yield the path and value of each leaf of nested dicts."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from flatten_leaves((*path, str(key)), item)
    else:
        yield path, require_dense(value) if isinstance(value, torch.Tensor) else value


def _is_torch_optimizer(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(groups := value.get(PARAM_GROUPS), list):
        return False
    return isinstance(value.get(STATE), dict) and all(isinstance(group, dict) and "params" in group for group in groups)


def _restore_param_numbers(value: Any) -> None:
    """Restore the numbers of parameters in nested state dicts of optimizers, since all parts of a path are strings."""
    if not isinstance(value, dict):
        return
    for child in value.values():
        _restore_param_numbers(child)
    if _is_torch_optimizer(value):
        numbers = {str(number): number for group in value[PARAM_GROUPS] for number in group["params"]}
        value[STATE] = {numbers.get(key, key): state for key, state in value[STATE].items()}


def _is_serialized(path: LeafPath) -> bool:
    """Return whether `zeroshard.checkpoint.save` stores the value at this path as serialized bytes."""
    return path == (SCHEDULER,) or (path[0] == RANKS and len(path) == 2)


def _deserialize(path: LeafPath, leaf: Any) -> Any:
    """Return the deserialized value, or the leaf itself if `zeroshard.checkpoint.save` did not serialize it.

    A value with types that are not allowed here stays serialized. Raises `CheckpointError` if the value is damaged.
    """
    is_byte_tensor = type(leaf) is torch.Tensor and leaf.dtype == torch.uint8 and leaf.dim() == 1
    if not is_byte_tensor or not (data := tensor_to_bytes(leaf)).startswith(_ARCHIVE_MAGIC):
        return leaf
    name = ".".join(map(str, path))
    try:
        value = loads(data)
    except Exception as error:
        if DISALLOWED_TYPE_MARKER in torch_reason(error):
            return leaf
        raise CheckpointError(f"'{name}' is damaged: {torch_reason(error)}. Convert another checkpoint.") from error
    _reject_expansion(f"'{name}'", value, len(data), len(data))
    return value


def _reject_expansion(source: str, value: Any, max_items: int, max_bytes: int) -> None:
    """Raise `CheckpointError` if `value` is much larger than what is stored of it.

    Hazard: a dict that contains the same dict twice, nested many times, is small in a file and exponentially large once
    it is flattened. A tensor made by `expand()` stores a single element for any number of elements.
    """
    items, expanded_bytes = 0, 0
    pending: list[tuple[LeafPath, Any]] = [((), value)]
    while pending:
        path, item = pending.pop()
        items += 1
        if items > max_items:
            raise CheckpointError(
                f"{source} contains the same containers many times: expected at most {max_items:,} values, its size in "
                "bytes, got more. Save a copy of each container instead of references to one."
            )
        if isinstance(item, dict):
            pending += [(path, key) for key in item]
            pending += [((*path, key)[-_SHOWN_PATH_PARTS:], child) for key, child in item.items()]
        elif isinstance(item, (list, tuple, set)):
            pending += [(path, child) for child in item]
        elif type(item) in (torch.Tensor, torch.nn.Parameter) and item.layout == torch.strided:
            numel, stored_bytes = prod(item.shape), item.untyped_storage().nbytes()
            expanded_bytes += numel * item.itemsize if numel * item.itemsize > stored_bytes else 0
            if expanded_bytes > max_bytes:
                name = ".".join(key if isinstance(key, str) else safe_repr(key) for key in path)
                raise CheckpointError(
                    f"{source} is smaller than its tensors: expected {stored_bytes // item.itemsize:,} elements in "
                    f"'{name}', as many as are stored, got {numel:,}. Save tensor.contiguous() instead of the result "
                    "of expand()."
                )


# ---------------------------------------------------------------------------------------------------------------------
# Readers: DCP directories and torch.save files.


_OPTIMIZER_KEYS = (OPTIM, "optimizer")


def open_checkpoint(path: Path, progress: Progress) -> Contents:
    """Open a `torch.save` file, a DCP directory, or the latest checkpoint in a folder of them.

    If the checkpoint has checksums, all its files are read and verified first: corruption must not be copied.
    """
    with errors_as_checkpoint_error(f"{path} cannot be read"):
        return _open_torch_file(path) if path.is_file() else _open_dcp_directory(find_checkpoint(path), progress)


def _open_dcp_directory(directory: Path, progress: Progress) -> Contents:
    metadata, manifest = _open_metadata(directory), read_manifest(directory)
    if manifest is not None:
        manifest.verify_checksums(directory, slice(None), progress)
    small = [entry for entry in metadata.entries if entry.tensor is None or _is_serialized(entry.path)]
    small += [entry for entry in metadata.under(OPTIM) if optimizer_section(entry) == PARAM_GROUPS]
    values = read_values(metadata, {entry.key: entry.allocate() for entry in small})
    for entry in small:
        if entry.tensor is None:
            nbytes = metadata.storage_info(dcp.MetadataIndex(entry.key)).length
            _reject_expansion(f"'{entry.key}' in {directory}", values[entry.key], nbytes, nbytes)

    def make_leaf(entry: Entry) -> Any:
        if entry.tensor is None or entry.key in values:
            return values[entry.key]
        meta = torch.empty(entry.tensor.size, dtype=entry.tensor.properties.dtype, device="meta")
        stored = meta.as_subclass(StoredTensor)
        stored.read_into = lambda target: read_values(metadata, {entry.key: target})
        stored.can_read_spans = lambda: has_contiguous_chunks(metadata, entry.key)
        return stored

    contents = Contents(manifest=manifest_fields(manifest))
    for entry in metadata.entries:
        if entry.path[0] == MODEL and len(entry.path) > 1:
            contents.leaves[MODEL, ".".join(map(str, entry.path[1:]))] = make_leaf(entry)
        elif not _is_optimizer_entry(entry):
            contents.leaves[entry.path] = make_leaf(entry)
    if any(map(_is_optimizer_entry, metadata.entries)):
        saved = SavedOptimizer(metadata, values)
        contents.param_groups = _read_param_groups(metadata, saved, values)
        for name, state in saved.state.items():
            contents.leaves |= {(OPTIM, STATE, name, *keys): make_leaf(entry) for keys, entry in state}
    return contents


def _open_metadata(directory: Path) -> CheckpointMetadata:
    """Read the metadata of a complete checkpoint, with entries in the order in which they were saved."""
    metadata = CheckpointMetadata(directory)
    metadata.check_files()
    positions = {key: position for position, key in enumerate(metadata.dcp_metadata.planner_data or ())}
    metadata.entries.sort(key=lambda entry: positions.get(entry.key, len(positions)))
    return metadata


def _is_optimizer_entry(entry: Entry) -> bool:
    """Return whether the entry is state or a parameter group, in torch's nested or in its flat (dotted) form."""
    return bool(entry.path[0] == OPTIM) and optimizer_section(entry) in (STATE, PARAM_GROUPS)


def _read_param_groups(
    metadata: CheckpointMetadata, saved: SavedOptimizer, values: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return the parameter groups. Torch's flat form has no list: parameters with equal options form a group."""
    if listed := metadata.under(OPTIM, PARAM_GROUPS):
        by_number = defaultdict[int, dict[str, Any]](dict)
        for entry in listed:
            set_nested(by_number[int(entry.path[2])], entry.path[3:], values[entry.key])
        return [by_number[number] for number in sorted(by_number)]
    groups: dict[str, dict[str, Any]] = {}
    for name, options in saved.options.items():
        groups.setdefault(describe_options(options), {**options, "params": []})["params"].append(name)
    return list(groups.values())


def _open_torch_file(file: Path) -> Contents:
    if file.suffix == ".safetensors":
        raise CheckpointError(f"{file}: safetensors files can be written, but not read. Convert the original instead.")
    try:
        with file.open("rb") as stream:
            check_record_sizes(stream)
        saved = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise CheckpointError(f"{file} cannot be read as a torch.save file: {reason}") from error
    max_items = len(open_archive(str(file)).get_record("data.pkl"))  # no value takes less than a byte of it
    _reject_expansion(str(file), saved, max_items, file.stat().st_size)
    if not isinstance(saved, dict) or not saved.keys() & {MODEL, *_OPTIMIZER_KEYS}:
        found = safe_repr(sorted(map(str, saved))) if isinstance(saved, dict) else f"a {type(saved).__name__}"
        raise CheckpointError(f"{file} is not a checkpoint: expected a dict with '{MODEL}' or '{OPTIM}', got {found}")
    model, manifest = saved.get(MODEL) or {}, saved.get(MANIFEST_KEY)
    _check_names(file, [*saved, *model])
    contents = Contents(manifest=manifest_fields(parse_manifest({**manifest, "sums": {}})) if manifest else {})
    for name, value in model.items():
        contents.leaves[MODEL, name] = require_dense(value) if isinstance(value, torch.Tensor) else value
    optimizer_keys = [key for key in _OPTIMIZER_KEYS if _is_torch_optimizer(saved.get(key))]
    if (
        OPTIM not in optimizer_keys
        and isinstance(saved.get(OPTIM), dict)
        and saved[OPTIM].keys() & {STATE, PARAM_GROUPS}
    ):
        raise CheckpointError(
            f"'{OPTIM}' in {file} is malformed: expected '{STATE}', a dict, and '{PARAM_GROUPS}', a list of dicts with "
            f"'params', got {safe_repr(sorted(map(str, saved[OPTIM])))}. Save the result of optimizer.state_dict()."
        )
    for key in optimizer_keys:
        _add_optimizer(file, contents, saved[key])
    for key, value in saved.items():
        if key == SCHEDULER:
            contents.leaves[SCHEDULER,] = _serialize(value)
        elif key == RANKS and isinstance(value, dict):
            contents.leaves |= {(RANKS, str(rank)): _serialize(item) for rank, item in value.items()}
        elif key not in (MODEL, MANIFEST_KEY, *optimizer_keys):
            contents.leaves |= flatten_leaves((key,), value)
    return contents


def _serialize(value: Any) -> torch.Tensor:
    return require_dense(value) if isinstance(value, torch.Tensor) else to_byte_tensor(value)


def _check_names(file: Path, names: Iterable[Any]) -> None:
    for name in names:
        if not isinstance(name, str):
            raise CheckpointError(f"{file} is not a checkpoint: expected names as keys, got {safe_repr(name)}")


def _add_optimizer(file: Path, contents: Contents, saved: Mapping[str, Any]) -> None:
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
        contents.leaves |= flatten_leaves((OPTIM, STATE, names.get(number, str(number))), state)
    for key, value in saved.items():
        if key not in (STATE, PARAM_GROUPS):
            contents.leaves |= flatten_leaves((OPTIM, key), value)


def _param_names(file: Path, contents: Contents, saved: Mapping[str, Any]) -> dict[Any, str]:
    """Map the state dict's parameter ids to names: `param_names` of the groups, else the model's names in order."""
    numbers = [number for group in saved[PARAM_GROUPS] for number in group["params"]]
    group_names = [name for group in saved[PARAM_GROUPS] for name in group.get("param_names") or ()]
    if len(group_names) == len(numbers):
        _check_names(file, group_names)
        return dict(zip(numbers, group_names, strict=True))
    tensors = [(path, leaf) for path, leaf in contents.leaves.items() if isinstance(leaf, torch.Tensor)]
    model = {path[1]: leaf for path, leaf in tensors if path[0] == MODEL}
    if not model or not all(isinstance(number, int) for number in numbers):
        return {number: str(number) for number in numbers}
    names = dict(zip(numbers, model, strict=False))
    state = [(model[name], value) for number, name in names.items() for value in saved[STATE].get(number, {}).values()]
    fits = all(value.shape == param.shape for param, value in state if isinstance(value, torch.Tensor) and value.dim())
    if len(saved[PARAM_GROUPS]) > 1 or len(model) != len(numbers) or not fits:
        raise CheckpointError(
            f"{file} does not name the optimizer's parameters, and its {len(numbers)} parameters do not match the "
            f"{len(model)} tensors of the model in order. Save it with an optimizer made from model.named_parameters()."
        )
    return names


# ---------------------------------------------------------------------------------------------------------------------
# Writers: torch.save, DCP and safetensors.


_ALIGNMENT_BYTES = 64
_DATA_FILE = "__0_0.distcp"
_FORMAT_BY_SUFFIX = {".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", "": "dcp"}
_SAFETENSORS_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}

SPAN_BYTES = 16 * MIB
"""How much of a tensor is read at a time."""
TensorSlot = tuple[int, torch.Tensor]
"""A tensor, and the file offset of its contiguous data."""


def infer_format(target: Path) -> str:
    """Return the format that the suffix of `target` stands for; no suffix stands for a DCP directory."""
    if target.suffix not in _FORMAT_BY_SUFFIX:
        raise ConfigError(
            f"cannot infer the format of {target}: expected .safetensors, .pt, .pth or no suffix (a DCP directory), "
            f"got {target.suffix}. Pass --to."
        )
    return _FORMAT_BY_SUFFIX[target.suffix]


def convert_checkpoint(source: Path, target: Path, to: str, progress: Progress, *, weights_only: bool) -> str:
    """Write `source` to `target` in the format `to`, completely or not at all. Return a sentence about the result."""
    _reject_existing(target)
    if not target.parent.is_dir():
        raise CheckpointError(f"{target.parent} is not a directory. Create it first.")
    hidden = target.parent / f".{target.name}.converting-{uuid4().hex}"
    contents = open_checkpoint(source, progress)
    if weights_only:
        contents = contents.select_weights(source)
    progress.add_expected(sum(tensor.nbytes for tensor in contents.tensors))
    try:
        with errors_as_checkpoint_error(f"{target} could not be written"):
            _FORMAT_WRITERS[to](contents, hidden, progress)
            nbytes = sum(file.stat().st_size for file in (hidden.iterdir() if hidden.is_dir() else [hidden]))
            _reject_existing(target)
            hidden.rename(target)
            fsync_dir(target.parent)
    finally:
        if hidden.is_dir():
            shutil.rmtree(hidden, ignore_errors=True)
        else:
            hidden.unlink(missing_ok=True)
    return f"Wrote {target}: format {to}, {format_count(len(contents.tensors), 'tensor')}, {nbytes:,} bytes"


def _reject_existing(target: Path) -> None:
    if os.path.lexists(target):
        raise CheckpointError(f"{target} already exists. Remove it, or choose another name.")


def _write_tensors(file: Path, slots: Iterable[TensorSlot], progress: Progress) -> None:
    """Write tensors to their offsets in a file that already has its full length, and fsync it."""
    with file.open("r+b") as stream:
        # Hazard: a full disk kills the process (SIGBUS) when a mapped page is written. Allocate the space before.
        if size := file.stat().st_size:
            os.posix_fallocate(stream.fileno(), 0, size)
        for offset, tensor in slots:
            if not tensor.nbytes:
                continue
            skipped = offset % mmap.ALLOCATIONGRANULARITY
            window = mmap.mmap(stream.fileno(), skipped + tensor.nbytes, offset=offset - skipped)
            memory = torch.frombuffer(window, dtype=torch.uint8, offset=skipped, count=tensor.nbytes)
            flat = memory.view(tensor.dtype)
            stored = tensor if isinstance(tensor, StoredTensor) else None
            can_split = tensor.is_contiguous if stored is None else stored.can_read_spans
            is_split = tensor.nbytes > SPAN_BYTES and can_split()
            step = max(1, SPAN_BYTES // tensor.itemsize) if is_split else tensor.numel()
            for start in range(0, tensor.numel(), step):
                span = flat[start : start + step]
                if stored is not None:
                    shard = ShardTensor(span, tensor.shape, tensor.stride(), start)
                    stored.read_into(shard if is_split else span.view(tensor.shape))
                elif is_split:
                    span.copy_(tensor.view(-1)[start : start + step])
                else:
                    span.view(tensor.shape).copy_(tensor)
                window.madvise(mmap.MADV_DONTNEED)  # written pages belong to the page cache: drop them from our RSS
                progress.advance(span.nbytes)
        os.fsync(stream.fileno())


def _append_archive(value: Any, stream: BinaryIO) -> tuple[int, int, list[TensorSlot]]:
    """Append a `torch.save` archive without tensor data. Return its offset and length, and where its tensors belong."""
    tensors: list[torch.Tensor] = []
    fake_mode, start = make_fake_mode(), stream.seek(align_up(stream.tell(), _ALIGNMENT_BYTES))

    def make_fake(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(require_dense(tensor))  # records are numbered in this order
        with fake_mode:
            return torch.empty(tensor.shape, dtype=tensor.dtype)

    with skip_data(materialize_fake_tensors=True):
        torch.save(map_tensors(value, make_fake), stream)
    end = stream.tell()
    reader = open_archive(make_file_view(stream, start, end - start))
    data_records = sum(name.startswith("data/") for name in reader.get_all_records())
    if data_records != len(tensors):  # their data would be missing, and all others would get another's
        raise CheckpointError(
            f"expected all tensors in dicts, lists and tuples, got {data_records - len(tensors)} in other types (sets, "
            "custom classes). Use --to dcp, or save them in dicts, lists or tuples."
        )
    records = [(number, tensor) for number, tensor in enumerate(tensors) if tensor.nbytes]
    slots = [(start + reader.get_record_offset(f"data/{number}"), tensor) for number, tensor in records]
    stream.seek(end)
    return start, end - start, slots


def write_torch(contents: Contents, file: Path, progress: Progress) -> None:
    """Write a file for `torch.load(weights_only=True)`, with optimizer state as torch's optimizers store it."""
    with file.open("w+b") as stream:
        _, _, slots = _append_archive(contents.to_torch_state_dict(), stream)
    _write_tensors(file, slots, progress)


def write_dcp(contents: Contents, directory: Path, progress: Progress) -> None:
    """Write a DCP directory, as if a single rank had saved it. Each value is an archive of its own."""
    directory.mkdir()
    metadata = dcp.Metadata({}, {}, {}, dcp.StorageMeta(save_id=str(uuid4())), filesystem.CURRENT_DCP_VERSION)
    groups = {str(number): group for number, group in enumerate(contents.param_groups or ())}
    group_leaves = dict(flatten_leaves((OPTIM, PARAM_GROUPS), groups)) if groups else {}
    slots: list[TensorSlot] = []
    with (directory / _DATA_FILE).open("w+b") as stream:
        for path, leaf in {**contents.leaves, **group_leaves}.items():
            key = ".".join(map(str, path))
            if key in metadata.state_dict_metadata:
                raise CheckpointError(f"two values have the name '{key}'. Rename one of them, and save again.")
            if isinstance(leaf, torch.Tensor):
                start, length, tensors = _append_archive(leaf, stream)
                slots += tensors
            else:
                start = stream.seek(align_up(stream.tell(), _ALIGNMENT_BYTES))
                torch.save(leaf, stream)
                length = stream.tell() - start
            offset = torch.Size([0] * leaf.dim()) if isinstance(leaf, torch.Tensor) else None
            metadata.state_dict_metadata[key] = (
                dcp.BytesStorageMetadata()
                if offset is None
                else dcp.TensorStorageMetadata(
                    dcp.TensorProperties(dtype=leaf.dtype), leaf.shape, [dcp.ChunkStorageMetadata(offset, leaf.shape)]
                )
            )
            metadata.planner_data[key] = path
            metadata.storage_data[dcp.MetadataIndex(key, offset)] = dcp_storage_info_class()(_DATA_FILE, start, length)
    _write_tensors(directory / _DATA_FILE, slots, progress)
    with (directory / dcp_metadata_file_name()).open("wb") as stream:
        pickle.dump(metadata, stream)
    if contents.manifest:
        write_and_fsync(directory / MANIFEST_FILE, build_manifest(contents.manifest, directory, progress).to_json())
    fsync_dir(directory)


def write_safetensors(contents: Contents, file: Path, progress: Progress) -> None:
    """Write tensors under their full names. All other values go into the header as JSON.

    torch's `hf_storage` does not suffice: see docs/decisions/0012-checkpoints-through-dcp.md.
    """
    leaves = {".".join(map(str, path)): leaf for path, leaf in contents.leaves.items()}
    tensors = [(name, leaf) for name, leaf in leaves.items() if isinstance(leaf, torch.Tensor)]
    others = {name: leaf for name, leaf in leaves.items() if not isinstance(leaf, torch.Tensor)}
    others |= {} if contents.param_groups is None else {PARAM_GROUPS: contents.param_groups}
    others |= {MANIFEST_KEY: contents.manifest} if contents.manifest else {}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for name, value in others.items():
        try:
            header["__metadata__"][name] = json.dumps(map_tensors(value, torch.Tensor.tolist))
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"'{name}' cannot be written as JSON in the safetensors header: {error}. Use --to dcp."
            ) from error
    slots, end = list[TensorSlot](), 0
    for name, tensor in sorted(tensors, key=lambda item: -item[1].dtype.itemsize):  # aligns each to its element size
        if tensor.dtype not in _SAFETENSORS_NAMES:
            raise CheckpointError(f"'{name}' has dtype {tensor.dtype}, which safetensors does not have. Use --to dcp.")
        slots.append((end, tensor))
        header[name] = {"dtype": _SAFETENSORS_NAMES[tensor.dtype], "shape": list(tensor.shape)}
        header[name]["data_offsets"] = [end, end := end + tensor.nbytes]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + end)
    _write_tensors(file, [(8 + len(text) + offset, tensor) for offset, tensor in slots], progress)


_FORMAT_WRITERS = {"torch": write_torch, "dcp": write_dcp, "safetensors": write_safetensors}


# ---------------------------------------------------------------------------------------------------------------------
# Description: what a checkpoint contains, from its metadata and file sizes.


_DISTCP_FILE = re.compile(r"__(\d+)_\d+\.distcp")
_KEY_MEANINGS = {RANKS: "random states of that rank, and its extra", SCHEDULER: "state of the scheduler"}


def describe_checkpoint(path: Path) -> dict[str, Any]:
    """Return what `inspect --json` prints, of a checkpoint directory or of the latest checkpoint in a folder.

    Reads only metadata and file sizes. Values are None if unknown, as in directories that `dcp.save` wrote.
    """
    directory = find_checkpoint(path)
    metadata, manifest = _open_metadata(directory), read_manifest(directory)
    fields = defaultdict(lambda: None, manifest_fields(manifest))
    ranks: dict[int, dict[str, int]] = defaultdict(lambda: {"files": 0, "bytes": 0})
    for file in directory.iterdir():
        if match := _DISTCP_FILE.fullmatch(file.name):
            ranks[int(match[1])]["files"] += 1
            ranks[int(match[1])]["bytes"] += file.stat().st_size
    model = {".".join(map(str, entry.path[1:])): _describe_entry(entry) for entry in metadata.under(MODEL)}
    tied = {name: first for name, first in (fields["tied"] or {}).items() if {name, first} <= model.keys()}
    # No values are read: the keys of the options are enough to find the parameter names.
    options = {entry.key: () for entry in metadata.under(OPTIM) if optimizer_section(entry) == PARAM_GROUPS}
    state = {
        name: {".".join(map(str, keys)): _describe_entry(entry) for keys, entry in entries}
        for name, entries in SavedOptimizer(metadata, options).state.items()
    }
    others = [entry for entry in metadata.entries if entry.path[0] != MODEL and not _is_optimizer_entry(entry)]
    other = {entry.key: _describe_entry(entry) for entry in sorted(others, key=lambda entry: entry.key)}
    counted = [value for name, value in model.items() if name not in tied]
    return {
        "path": str(directory),
        "format": f"DCP directory {'without' if manifest is None else 'with'} checksums",
        "step": fields["step"],
        "steps": CheckpointDir(directory.parent).steps(),
        "world_size": fields["world_size"] or max(ranks, default=0) + 1,
        "torch": fields["torch"],
        "model_class": fields["model"],
        "optimizer_classes": list(fields["optimizers"] or ()),
        "model": model,
        "tied": tied,
        "state": state,
        "state_keys": sorted({key for entries in state.values() for key in entries}),
        "other": other,
        "ranks": dict(sorted(ranks.items())),
        "totals": {
            "elements": sum(prod(value["shape"]) for value in counted if value["shape"] is not None),
            "model_bytes": _sum_bytes(counted),
            "state_bytes": sum(_sum_bytes(entries.values()) for entries in state.values()),
            "other_bytes": _sum_bytes(other.values()),
            "file_bytes": _sum_bytes(ranks.values()),
        },
    }


def _describe_entry(entry: Entry) -> dict[str, Any]:
    """Return shape, dtype and bytes of a tensor; None, None and 0 for any other value."""
    if entry.tensor is None:
        return {"shape": None, "dtype": None, "bytes": 0}
    dtype = str(entry.tensor.properties.dtype).removeprefix("torch.")
    return {"shape": list(entry.tensor.size), "dtype": dtype, "bytes": entry.nbytes}


def _sum_bytes(values: Iterable[Mapping[str, Any]]) -> int:
    return sum(value["bytes"] for value in values)


def print_description(found: Mapping[str, Any], console: Console) -> None:
    """Print a summary, then tables of all values and files."""
    summary = Table.grid(padding=(0, 2))
    for label, text in _summarize(found):
        summary.add_row(label, _to_text(text))
    console.print(summary)
    params = _make_table("model and optimizer", "name", "shape", "dtype", "size", "state", "size of state")
    for name in {**found["model"], **found["state"]}:
        state, (shape, dtype, size) = found["state"].get(name, {}), _format_entry(found["model"].get(name))
        size = f"tied to {found['tied'][name]}" if name in found["tied"] else size
        state_size = format_bytes(_sum_bytes(state.values())) if state else ""
        params.add_row(*map(_to_text, (name, shape, dtype, size, ", ".join(sorted(state)), state_size)))
    other = _make_table("other contents", "key", "shape", "dtype", "size", "meaning")
    for key, value in found["other"].items():
        other.add_row(_to_text(key), *_format_entry(value), _KEY_MEANINGS.get(key.partition(".")[0], ""))
    files = _make_table("files", "rank", "files", "size")
    for rank, written in found["ranks"].items():
        files.add_row(str(rank), str(written["files"]), format_bytes(written["bytes"]))
    for table in (params, other, files):
        if table.row_count:
            console.print(table)


def _summarize(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    totals, tied = found["totals"], found["tied"]
    steps = f" (in folder: {', '.join(map(str, found['steps']))})" if found["steps"] else ""
    dtypes = ", ".join(sorted({value["dtype"] for value in found["model"].values() if value["dtype"]})) or "no tensors"
    yield "checkpoint", found["path"]
    yield "format", found["format"] + (f", torch {found['torch']}" if found["torch"] else "")
    yield "step", f"{'unknown' if found['step'] is None else found['step']}{steps}"
    yield "saved by", format_count(found["world_size"], "rank")
    size = f"{format_count(totals['elements'], 'element')}, {format_bytes(totals['model_bytes'])}, {dtypes}"
    ties = f", {format_count(len(tied), 'tied weight')} counted once" if tied else ""
    yield "model", f"{found['model_class'] or 'class unknown'}: {size}{ties}"
    size = f"{format_bytes(totals['state_bytes'])}, {', '.join(found['state_keys']) or 'no state'}"
    yield "optimizer", f"{' + '.join(found['optimizer_classes']) or 'class unknown'}: {size}"
    yield "other", format_bytes(totals["other_bytes"])
    yield "files", f"{sum(files['files'] for files in found['ranks'].values())}, {format_bytes(totals['file_bytes'])}"


def _make_table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold", justify="right" if "size" in column else "left")
    return table


def _format_entry(value: Mapping[str, Any] | None) -> tuple[str, str, str]:
    if value is None or value["shape"] is None:
        return "", "", ""
    return " x ".join(map(str, value["shape"])) or "scalar", value["dtype"], format_bytes(value["bytes"])


def _to_text(text: str) -> Text:
    """Return the text without interpreting it as rich markup."""
    return Text(replace_unprintable(text))
