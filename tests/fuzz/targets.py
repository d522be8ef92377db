"""What reads bytes of files, each as a function of bytes that raises if a promise is broken."""

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

_folder = tempfile.TemporaryDirectory()
FOLDERS = [Path(_folder.name)]
_HERE = FOLDERS[0]


def _write(directory: str, name: str, data: bytes) -> Path:
    (_HERE / directory).mkdir(exist_ok=True)
    (_HERE / directory / name).write_bytes(data)
    return _HERE / directory


def _check_length(error: CheckpointError) -> None:
    assert len(str(error)) < 5000


def archive(data: bytes) -> None:
    """`.metadata` of a directory without files."""
    try:
        found = CheckpointMetadata(_write("archive", ".metadata", data))
    except CheckpointError as error:
        _check_length(error)
        return
    assert all("/" not in name and name not in ("", ".", "..") for name in found.min_file_sizes())
    assert sum(entry.nbytes for entry in found.entries) <= sum(found.min_file_sizes().values())


def directory(data: bytes) -> None:
    """The data of a good directory."""
    place = _good()
    (place / "__0_0.distcp").write_bytes(data)
    try:
        found = CheckpointMetadata(place)
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


def codec(data: bytes) -> None:
    memory = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    try:
        from_byte_tensor(memory, "it", _HERE)
    except CheckpointError:
        return


def outlined(data: bytes) -> None:
    """What the outline says is what torch says."""
    found = parse_tensor_header(io.BytesIO(data), torch.float32)
    if found is None:
        return
    try:
        expected = torch.load(io.BytesIO(data), map_location="meta", weights_only=True)
    except Exception:  # it looks at records that the outline does not need
        return
    assert (found.meta_tensor.shape, found.meta_tensor.stride()) == (expected.shape, expected.stride())


def headers(data: bytes) -> None:
    """A file of safetensors: what is said to be in it fits into it."""
    place = _write("headers", "it.safetensors", data) / "it.safetensors"
    try:
        found = read_safetensors(place)
    except CheckpointError as error:
        _check_length(error)
        return
    assert all(0 <= it.nbytes <= len(data) for it in found.params)


TARGETS: dict[str, Callable[[bytes], None]] = {
    "archive": archive,
    "directory": directory,
    "manifest": manifest,
    "codec": codec,
    "outline": outlined,
    "headers": headers,
}


def _good() -> Path:
    place = _HERE / "good"
    if not place.exists():
        values = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(1).expand(4), "note": {"x": [1, "y"]}}
        dcp_save(values, checkpoint_id=place, no_dist=True)
        (place / "__0_0.distcp").replace(_HERE / "data")
    return place


_HEADER: dict[str, Any] = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b.c": {"dtype": "BF16", "shape": [], "data_offsets": [24, 26]},
    "d": {"dtype": "I64", "shape": [1], "data_offsets": [26, 34]},
}


def safetensors_of(header: Any, room: int = 34) -> bytes:
    """A file with that header, and so many bytes after it."""
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(room)


def spoiled_header(place: str, key: str, value: Any) -> bytes:
    """A good one in which one thing is something else."""
    return safetensors_of({**_HEADER, place: {**_HEADER.get(place, {}), key: value} if key else value})


def seeds(target: str) -> list[bytes]:
    """Good ones to begin with."""
    good = _good()
    saved = io.BytesIO()
    torch.save(torch.arange(24.0).view(2, 3, 4).permute(1, 0, 2), saved)
    return {
        "archive": [(good / ".metadata").read_bytes()],
        "directory": [(_HERE / "data").read_bytes()],
        "manifest": [Manifest(3, 2, {".metadata": 1, "__0_0.distcp": 2}, 0.5, "2.13").to_json().encode()],
        "codec": [bytes(to_byte_tensor({"random": [1, 2.5], "extra": torch.ones(3)}).tolist()), saved.getvalue()],
        "outline": [saved.getvalue()],
        "headers": [safetensors_of(_HEADER)],
    }[target]
