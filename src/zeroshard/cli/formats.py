"""Formats to convert to. Each lays out a file without the tensors, says where they belong, and has them filled in."""

import json
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
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
from torch.distributed.checkpoint.utils import _create_file_view
from torch.serialization import skip_data

from ..checkpoint.contents import MODEL, OPTIM
from ..checkpoint.folder import fsync_dir, write_and_fsync
from ..checkpoint.directory import MANIFEST_FILE, build_manifest
from ..checkpoint.progress import Progress
from ..checkpoint.saved_optimizer import PARAM_GROUPS, STATE, set_nested
from ..errors import CheckpointError
from ..state.trees import map_tensors
from .._types import align_up
from .contents import MANIFEST_KEY, CheckpointContents, ModelWeights, deserialize_leaf, is_serialized
from .files import TensorSlot, write_tensors
from .stored import StoredTensor, wrap_tensor

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
    """A dict for `torch.load(weights_only=True)`, with the optimizer's state as torch's own optimizers have it."""
    outline = _TensorFaker()
    tree = outline.replace_tensors(_build_torch_state_dict(contents))
    with file.open("w+b") as stream:
        _save_without_data(tree, stream)
    with file.open("rb") as stream:
        slots = _locate_slots(stream, 0, file.stat().st_size, outline.tensors)
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
    numbered, number = [], 0
    for group in groups:
        names = list(group["params"])
        numbers = list(range(number, number + len(names)))
        numbered.append({**group, "params": numbers, "param_names": names})
        number += len(names)
    return numbered


def _index_state(contents: CheckpointContents) -> dict[Any, Any]:
    """By numbers of parameters. What belongs to none of them keeps its name."""
    names = [name for group in contents.param_groups or () for name in group["params"]]
    numbers = {name: number for number, name in enumerate(names)}
    state: dict[Any, Any] = {}
    for (name, *keys), leaf in contents.under(OPTIM, STATE).items():
        set_nested(state, (numbers.get(name, name), *keys), leaf)
    return dict(sorted(state.items(), key=lambda it: it[0] if isinstance(it[0], int) else len(names)))


class _TensorFaker:
    """Values with stand-ins that have no memory in the place of tensors."""

    def __init__(self) -> None:
        self.tensors: list[StoredTensor] = []
        """The tensors, in the order in which pickling will meet them."""
        self._fake_mode = FakeTensorMode()

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
    """Where the tensors of one `torch.save` belong."""
    view: Any = _create_file_view(stream, start, length)  # type: ignore[arg-type]
    reader: Any = torch._C.PyTorchFileReader(view)
    numbered = [(number, stored) for number, stored in enumerate(tensors) if stored.nbytes]
    return [TensorSlot(start + reader.get_record_offset(f"data/{number}"), stored) for number, stored in numbered]


# ---- torch.distributed.checkpoint


def write_dcp(contents: CheckpointContents, directory: Path, progress: Progress) -> None:
    """A directory as if one rank had saved it."""
    directory.mkdir()
    data, slots = directory / _DATA_FILE, []
    metadata = Metadata({}, {}, {}, StorageMeta(save_id=str(uuid4())), filesystem.CURRENT_DCP_VERSION)
    leaves, outline = {**contents.leaves, **contents.param_group_leaves()}, _TensorFaker()
    with data.open("w+b") as stream:
        places = {path: _append_leaf(stream, leaf, outline) for path, leaf in leaves.items()}
    with data.open("rb") as stream:
        for path, leaf in leaves.items():
            _add_metadata(metadata, path, leaf, *places[path])
            slots += _locate_slots(stream, *places[path], [leaf]) if isinstance(leaf, StoredTensor) else []
    write_tensors(data, slots, progress)
    with (directory / filesystem._metadata_fn).open("wb") as stream:
        pickle.dump(metadata, stream)
    if contents.manifest:
        write_and_fsync(directory / MANIFEST_FILE, build_manifest(contents.manifest, directory, progress).to_json())
    fsync_dir(directory)


def _append_leaf(stream: BinaryIO, leaf: Any, faker: _TensorFaker) -> tuple[int, int]:
    """Where it begins in the file, and how long it is."""
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
    metadata.storage_data[index] = filesystem._StorageInfo(_DATA_FILE, start, length)


# ---- safetensors


def write_safetensors(contents: CheckpointContents, file: Path, progress: Progress) -> None:
    """Tensors by their full names; what is not a tensor is JSON in the header."""
    leaves = {".".join(map(str, path)): leaf for path, leaf in contents.leaves.items()}
    tensors = [(name, leaf) for name, leaf in leaves.items() if isinstance(leaf, StoredTensor)]
    tensors.sort(key=lambda it: -it[1].dtype.itemsize)  # so that each lies at a multiple of its elements' size
    header: dict[str, Any] = {"__metadata__": _safetensors_metadata(contents, leaves)}
    places, end = [], 0
    for name, stored in tensors:
        places.append(end)
        end += stored.nbytes
        header[name] = {
            "dtype": _safetensors_dtype(name, stored),
            "shape": stored.shape,
            "data_offsets": [places[-1], end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + end)
    slots = [TensorSlot(8 + len(text) + place, stored) for place, (_, stored) in zip(places, tensors, strict=True)]
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
