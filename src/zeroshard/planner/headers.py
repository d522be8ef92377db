"""Shapes from files of safetensors: only their headers are read, and nothing in them is believed."""

import json
from collections.abc import Iterable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError
from .shapes import ModelShape, ParamShape

_MAX_HEADER_BYTES = 100 * 10**6
"""Of a header, as the format itself allows, and of an index."""
_MODEL_PREFIX, _STATE_PREFIX = "model.", "optim.state."
"""In files of `zeroshard checkpoint convert`, which have the state of an optimizer beside the model."""
_SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}


def read_safetensors(path: Path) -> ModelShape:
    """Of one `.safetensors` file. Tensors that cannot train, since they hold integers, count as buffers."""
    return _make_model_shape(path, path.stem, _read_tensor_shapes(path))


def read_safetensors_index(path: Path) -> ModelShape:
    """Of a `model.safetensors.index.json`, whose files are next to it."""
    if path.stat().st_size > _MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{path} has {path.stat().st_size:,} bytes: expected an index of {_MAX_HEADER_BYTES:,} at most"
        )
    listed = _parse_json_object(path, path.read_bytes()).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise CheckpointError(f"{path} has no 'weight_map' of names to files: expected an index of safetensors")
    files = {name: _resolve_weight_file(path, file) for name, file in listed.items()}
    shapes = {file: {it.name: it for it in _read_tensor_shapes(file)} for file in dict.fromkeys(files.values())}
    missing = [name for name, file in files.items() if name not in shapes[file]]
    if missing:
        raise CheckpointError(
            f"{path} says that {_short_repr(missing[0])} is in {files[missing[0]].name}, which has none"
        )
    return _make_model_shape(path, path.parent.resolve().name, [shapes[file][name] for name, file in files.items()])


def _resolve_weight_file(index: Path, file: Any) -> Path:
    if not isinstance(file, str) or not file.isprintable() or file != Path(file).name:
        raise CheckpointError(f"{index} names a file {_short_repr(file)}: expected the plain name of one next to it")
    if not (index.parent / file).is_file():
        raise CheckpointError(
            f"{index} names {_short_repr(file)}, which is not next to it. Download all files of the model."
        )
    return index.parent / file


def _make_model_shape(path: Path, name: str, tensors: Iterable[ParamShape]) -> ModelShape:
    found = list(tensors)
    trains = [it for it in found if it.dtype.is_floating_point or it.dtype.is_complex]
    if not trains:
        raise CheckpointError(f"{path} holds no tensor of floating-point numbers: there is nothing to train")
    return ModelShape(name, tuple(trains), sum(it.nbytes for it in found) - sum(it.nbytes for it in trains))


def _read_tensor_shapes(path: Path) -> list[ParamShape]:
    header, room = _read_header(path)
    header.pop("__metadata__", None)
    if not header:
        raise CheckpointError(f"{path} holds no tensors")
    found = [_parse_tensor_entry(path, name, entry, room) for name, entry in header.items()]
    if not any(it.name.startswith(_STATE_PREFIX) for it in found):
        return found
    return [replace(it, name=it.name.removeprefix(_MODEL_PREFIX)) for it in found if it.name.startswith(_MODEL_PREFIX)]


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """With the bytes that follow it."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        start = stream.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
            raise CheckpointError(
                f"{path} is no file of safetensors: its first 8 bytes claim a header of {length:,} bytes, expected 2 "
                f"to {max(2, min(size - 8, _MAX_HEADER_BYTES)):,} in a file of {size:,}"
            )
        return _parse_json_object(path, stream.read(length)), size - 8 - length


def _parse_json_object(path: Path, text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text.decode("utf-8"), object_pairs_hook=_reject_duplicate_keys)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} has no JSON where it should have: {_error_reason(error)}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} has a JSON {type(found).__name__} where names of tensors are expected")
    return found


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _parse_tensor_entry(path: Path, name: str, entry: Any, data_nbytes: int) -> ParamShape:
    found: dict[str, Any] = entry if isinstance(entry, dict) else {}
    dtype, shape, span = (found.get(key, "nothing") for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in _SAFETENSORS_DTYPES:
        raise CheckpointError(
            f"{path}: {_short_repr(name)} has the dtype {_short_repr(dtype)}: expected one of "
            f"{', '.join(_SAFETENSORS_DTYPES)}"
        )
    if not _are_sizes(shape) or not _are_sizes(span) or len(span) != 2:
        raise CheckpointError(
            f"{path}: {_short_repr(name)} has no shape, or no place in the file, that is made of numbers"
        )
    tensor = ParamShape(name, tuple(shape), _SAFETENSORS_DTYPES[dtype])
    if not span[0] <= span[1] <= data_nbytes or prod(tensor.shape) * tensor.dtype.itemsize != span[1] - span[0]:
        raise CheckpointError(
            f"{path}: {_short_repr(name)} of shape {_short_repr(shape)} and dtype {dtype} is said to lie at "
            f"{_short_repr(span)} of "
            f"the {data_nbytes:,} bytes that there are, where it does not fit. Download the file again."
        )
    return tensor


def _are_sizes(values: Any) -> bool:
    """Bounded, so that products of many stay small numbers."""
    return isinstance(values, list) and len(values) <= 64 and all(type(it) is int and 0 <= it < 2**63 for it in values)


def _short_repr(value: Any) -> str:
    text = repr(value)[:80] if isinstance(value, (str, int, float, type(None))) else f"{type(value).__name__}"
    if isinstance(value, list) and len(value) <= 8:
        text = "[" + ", ".join(map(_short_repr, value)) + "]"
    return text[:200]


def _error_reason(error: Exception) -> str:
    return (str(error) or type(error).__name__)[:200]
