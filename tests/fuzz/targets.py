"""Fuzz targets: one function per file reader. It takes bytes, and raises if the reader breaks a guarantee."""

from __future__ import annotations

import io
import json
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from zeroshard.checkpoint.directory import MANIFEST_FILE, Manifest, read_manifest
from zeroshard.checkpoint.metadata import CheckpointMetadata
from zeroshard.checkpoint.reader import parse_tensor_header, read_values
from zeroshard.checkpoint.saver import from_byte_tensor, to_byte_tensor
from zeroshard.errors import CheckpointError
from zeroshard.planner.shapes import read_safetensors

_temporary_dir = tempfile.TemporaryDirectory()
DIRECTORIES = [Path(_temporary_dir.name)]
_ROOT_DIR = DIRECTORIES[0]


def _write(directory: str, name: str, data: bytes) -> Path:
    (_ROOT_DIR / directory).mkdir(exist_ok=True)
    (_ROOT_DIR / directory / name).write_bytes(data)
    return _ROOT_DIR / directory


def _check_length(error: CheckpointError) -> None:
    assert len(str(error)) < 5000


def metadata(data: bytes) -> None:
    """Read `.metadata` of a directory without data files."""
    try:
        found = CheckpointMetadata(_write("metadata", ".metadata", data))
    except CheckpointError as error:
        _check_length(error)
        return
    assert all("/" not in name and name not in ("", ".", "..") for name in found.min_file_sizes())
    assert sum(entry.nbytes for entry in found.entries) <= sum(found.min_file_sizes().values())


def directory(data: bytes) -> None:
    """Read a data file of an otherwise valid directory."""
    path = _valid_checkpoint()
    (path / "__0_0.distcp").write_bytes(data)
    try:
        found = CheckpointMetadata(path)
        found.check_files()
        read_values(found, {entry.key: entry.allocate() for entry in found.entries})
    except CheckpointError as error:
        _check_length(error)


def manifest(data: bytes) -> None:
    try:
        found = read_manifest(_write("manifest", MANIFEST_FILE, data))
    except CheckpointError:
        return
    assert isinstance(found, Manifest)
    assert all("/" not in name for name in found.sums)


def serialization(data: bytes) -> None:
    buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    try:
        from_byte_tensor(buffer, "value", _ROOT_DIR)
    except CheckpointError:
        return


def tensor_header(data: bytes) -> None:
    """Read a tensor header: its shape and strides match those that torch loads."""
    found = parse_tensor_header(io.BytesIO(data), torch.float32)
    if found is None:
        return
    try:
        expected = torch.load(io.BytesIO(data), map_location="meta", weights_only=True)
    except Exception:  # torch also reads records that the header does not need
        return
    assert (found.meta_tensor.shape, found.meta_tensor.stride()) == (expected.shape, expected.stride())


def safetensors(data: bytes) -> None:
    """Read a safetensors file: no tensor in its header is larger than the file."""
    path = _write("safetensors", "model.safetensors", data) / "model.safetensors"
    try:
        found = read_safetensors(path)
    except CheckpointError as error:
        _check_length(error)
        return
    assert all(0 <= param.nbytes <= len(data) for param in found.params)


TARGETS: dict[str, Callable[[bytes], None]] = {
    "metadata": metadata,
    "directory": directory,
    "manifest": manifest,
    "serialization": serialization,
    "tensor_header": tensor_header,
    "safetensors": safetensors,
}


def _valid_checkpoint() -> Path:
    directory = _ROOT_DIR / "valid"
    if not directory.exists():
        values = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(1).expand(4), "note": {"x": [1, "y"]}}
        dcp_save(values, checkpoint_id=directory, no_dist=True)
        (directory / "__0_0.distcp").replace(_ROOT_DIR / "data")
    return directory


_HEADER: dict[str, Any] = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b.c": {"dtype": "BF16", "shape": [], "data_offsets": [24, 26]},
    "d": {"dtype": "I64", "shape": [1], "data_offsets": [26, 34]},
}


def safetensors_file(header: Any, data_nbytes: int = 34) -> bytes:
    """Return a file with this header, followed by `data_nbytes` zeros."""
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(data_nbytes)


def corrupted_header(name: str, key: str, value: Any) -> bytes:
    """Return a file whose header is valid, except that one entry or one of its keys is replaced by `value`."""
    return safetensors_file({**_HEADER, name: {**_HEADER.get(name, {}), key: value} if key else value})


def seeds(target: str) -> list[bytes]:
    """Return valid inputs from which fuzzing starts."""
    valid = _valid_checkpoint()
    saved = io.BytesIO()
    torch.save(torch.arange(24.0).view(2, 3, 4).permute(1, 0, 2), saved)
    return {
        "metadata": [(valid / ".metadata").read_bytes()],
        "directory": [(_ROOT_DIR / "data").read_bytes()],
        "manifest": [Manifest(3, 2, {".metadata": 1, "__0_0.distcp": 2}, 0.5, "2.13").to_json().encode()],
        "serialization": [
            bytes(to_byte_tensor({"random": [1, 2.5], "extra": torch.ones(3)}).tolist()),
            saved.getvalue(),
        ],
        "tensor_header": [saved.getvalue()],
        "safetensors": [safetensors_file(_HEADER)],
    }[target]
