"""Damaged or malicious DCP directories are rejected without changing anything in the process."""

from __future__ import annotations

import io
import json
import os
import pathlib
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from tests.support.checkpoints import edit_metadata
from zeroshard import CheckpointError, checkpoint
from zeroshard.checkpoint import metadata as checkpoint_metadata
from zeroshard.checkpoint.directory import MANIFEST_FILE, Manifest, read_manifest
from zeroshard.checkpoint.metadata import CheckpointMetadata, check_chunks
from zeroshard.checkpoint.progress import Progress
from zeroshard.checkpoint.reader import parse_tensor_header

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

DATA = "__0_0.distcp"
WEIGHT = "model.weight"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    model = nn.Linear(6, 4)
    dcp_save({"model": model.state_dict(), "note": "text"}, checkpoint_id=tmp_path / "saved", no_dist=True)
    return tmp_path / "saved"


def load_model(directory: Path) -> dict[str, Any]:
    model = nn.Linear(6, 4)
    checkpoint.load(directory, model=model)
    return dict(model.state_dict())


# ---- files cannot modify classes

# Names as `.metadata` spells them, and the objects that they refer to in this process.
ALLOWED_GLOBALS: dict[str, Any] = {
    **{f"{module}\n{kind}Path": pathlib.PosixPath for module in ("pathlib",) for kind in ("Posix", "Windows")},
    **{f"{cls.__module__}\n{cls.__name__}": cls for cls in (Metadata, MetadataIndex, metadata.TensorProperties)},
    f"{filesystem.__name__}\n_StorageInfo": filesystem._StorageInfo,
    f"{metadata.__name__}\n_MEM_FORMAT_ENCODING": metadata._MEM_FORMAT_ENCODING,
    "torch.serialization\n_get_layout": torch.serialization._get_layout,
    "torch\nSize": torch.Size,
    "torch\nfloat32": torch.float32,
    "collections\nOrderedDict": OrderedDict,
}
GUARDED_OBJECTS = (
    *(pathlib.PurePath, pathlib.Path, pathlib.PosixPath, *ALLOWED_GLOBALS.values(), *metadata._MEM_FORMAT_ENCODING),
    *(*checkpoint_metadata._METADATA_CLASSES, *checkpoint_metadata._ALLOWED_GLOBALS.values()),
)


def pickled_text(value: str) -> bytes:
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


def setattr_opcodes(target: str, name: str, value: str, *, slots: bool = True, call: bytes = b"") -> bytes:
    """Pickle opcodes that set an attribute of the global `target`, or of its result after the opcodes `call`."""
    state = b"}" + pickled_text(name) + pickled_text(value) + b"s"
    return b"c" + target.encode() + b"\n" + call + (b"(N" + state + b"t" if slots else state) + b"b0"


def prepend_opcodes(file: Path, opcodes: bytes) -> None:
    body = pickle.dumps(pickle.loads(file.read_bytes()), protocol=2)
    file.write_bytes(body[:2] + opcodes + body[2:])


def snapshot_attributes() -> list[Any]:
    """Attributes of all guarded objects, without `__slotnames__`, which pickling adds to a class."""
    return [
        {k: v for k, v in getattr(guarded, "__dict__", {}).items() if k != "__slotnames__"}
        for guarded in GUARDED_OBJECTS
    ]


@pytest.fixture
def guarded_objects_unchanged() -> Iterator[None]:
    before = snapshot_attributes()
    yield
    for old, new, guarded in zip(before, snapshot_attributes(), GUARDED_OBJECTS, strict=True):
        assert old == new, guarded
    assert Path("/a/b").name == "b"


@pytest.mark.usefixtures("guarded_objects_unchanged")
@pytest.mark.parametrize("slots", [True, False], ids=["slots", "dict"])
@pytest.mark.parametrize("target", ALLOWED_GLOBALS)
def test_metadata_cannot_modify_classes(directory: Path, target: str, slots: bool) -> None:
    good = (directory / ".metadata").read_bytes()
    prepend_opcodes(directory / ".metadata", setattr_opcodes(target, "name", "other", slots=slots))
    with pytest.raises(CheckpointError, match=r"\.metadata cannot be read"):
        CheckpointMetadata(directory)
    (directory / ".metadata").write_bytes(good)
    load_model(directory)


@pytest.mark.usefixtures("guarded_objects_unchanged")
@pytest.mark.parametrize("slots", [True, False], ids=["slots", "dict"])
def test_metadata_cannot_modify_enum_members(directory: Path, slots: bool) -> None:
    target = f"{metadata.__name__}\n_MEM_FORMAT_ENCODING"
    prepend_opcodes(directory / ".metadata", setattr_opcodes(target, "_name_", "x", slots=slots, call=b"(K\x00tR"))
    with pytest.raises(CheckpointError, match=r"\.metadata cannot be read"):
        CheckpointMetadata(directory)


@pytest.mark.usefixtures("guarded_objects_unchanged")
def test_path_check_cannot_be_bypassed(directory: Path) -> None:
    os.rename(directory / DATA, directory.parent / "outside.distcp")

    def escape_directory(dcp_metadata: Metadata) -> None:
        dcp_metadata.storage_data = {
            index: replace(info, relative_path="../outside.distcp") for index, info in dcp_metadata.storage_data.items()
        }

    edit_metadata(directory, escape_directory)
    with pytest.raises(CheckpointError, match="outside its directory"):
        load_model(directory)
    prepend_opcodes(directory / ".metadata", setattr_opcodes("pathlib\nPosixPath", "name", "../outside.distcp"))
    with pytest.raises(CheckpointError, match=r"\.metadata cannot be read: it sets the attribute 'name'"):
        load_model(directory)


@pytest.mark.parametrize("name", ["", ".", "..", "/x", "a/b", "a\\b", "../x", None])
def test_data_file_outside_directory(directory: Path, name: Any) -> None:
    edit_metadata(directory, lambda dcp_metadata: edit_storage_info(dcp_metadata, relative_path=name))
    with pytest.raises(CheckpointError, match=r"\.metadata refers to a file outside its directory"):
        CheckpointMetadata(directory)


def edit_pickle_in_zip(content: bytes, edit: Callable[[bytes], bytes]) -> io.BytesIO:
    """Edit the pickle inside a file that torch.save wrote."""
    edited = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(edited, "w") as new:
        for name in old.namelist():
            new.writestr(name, edit(old.read(name)) if name.endswith("data.pkl") else old.read(name))
    edited.seek(0)
    return edited


@pytest.mark.usefixtures("guarded_objects_unchanged")
@pytest.mark.parametrize("target", ["torch._utils\n_rebuild_tensor_v2", "collections\nOrderedDict"])
def test_data_cannot_modify_classes(target: str) -> None:
    saved = io.BytesIO()
    torch.save(torch.arange(3.0), saved)

    def corrupt(content: bytes) -> bytes:
        return content[:2] + setattr_opcodes(target, "storage", "other") + content[2:]

    assert parse_tensor_header(edit_pickle_in_zip(saved.getvalue(), bytes), torch.float32) is not None
    assert parse_tensor_header(edit_pickle_in_zip(saved.getvalue(), corrupt), torch.float32) is None
    assert parse_tensor_header(edit_pickle_in_zip(saved.getvalue(), bytes), torch.float32) is not None


def test_metadata_equals_what_torch_reads(directory: Path) -> None:
    """Except for the directory that the checkpoint was written to."""
    found, expected = CheckpointMetadata(directory).dcp_metadata, pickle.loads((directory / ".metadata").read_bytes())
    assert found.storage_meta is not None
    expected.storage_meta.checkpoint_id = found.storage_meta.checkpoint_id
    assert found == expected
    assert [type(index) for index in found.storage_data] == [type(index) for index in expected.storage_data]


# ---- checksums


def write_checksums(directory: Path, sums: Any) -> Manifest | None:
    fields = json.loads(Manifest(1, 1, {}, 0.0, "").to_json())
    (directory / MANIFEST_FILE).write_text(json.dumps({**fields, "sums": sums}))
    return read_manifest(directory)


def verify_checksums(directory: Path, sums: Any) -> None:
    manifest = write_checksums(directory, sums)
    assert manifest is not None
    manifest.verify_checksums(directory, slice(None), Progress("", False, 0))


@pytest.mark.parametrize("name", ["/dev/zero", "../x", "..", "", "a\\b"])
def test_checksums_of_files_outside_directory(directory: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match=f"{MANIFEST_FILE} refers to a file outside its directory"):
        write_checksums(directory, {name: 0})


@pytest.mark.parametrize("sums", [None, [], {"a": "b"}, {"a": None}])
def test_malformed_checksums(directory: Path, sums: Any) -> None:
    with pytest.raises(CheckpointError, match=f"{MANIFEST_FILE} cannot be read"):
        write_checksums(directory, sums)


def test_checksums_of_special_or_missing_files(directory: Path) -> None:
    """Reading a pipe without a writer would block, and a device has no end."""
    os.mkfifo(directory / "pipe")
    (directory / "device").symlink_to("/dev/zero")
    for name, reason in {"pipe": "not a regular file", "device": "not a regular file", "nothing": "is missing"}.items():
        with pytest.raises(CheckpointError, match=f"{name} {reason}|{name} is {reason}"):
            verify_checksums(directory, {name: 0})


@pytest.mark.parametrize("sums", [{}, {".metadata": 1}])
def test_checksums_must_cover_all_files(directory: Path, sums: dict[str, int]) -> None:
    manifest = write_checksums(directory, sums)
    assert manifest is not None
    with pytest.raises(CheckpointError, match=f"{MANIFEST_FILE} has no checksums for {DATA}"):
        manifest.check_covers(directory, CheckpointMetadata(directory).min_file_sizes())
    Manifest(1, 1, {DATA: 0}, 0.0, "").check_covers(directory, CheckpointMetadata(directory).min_file_sizes())


# ---- chunks

ChunkList = list[tuple[tuple[int, ...], tuple[int, ...]]]


def tensor_metadata(size: tuple[int, ...], chunk_list: ChunkList) -> metadata.TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in chunk_list]
    return metadata.TensorStorageMetadata(metadata.TensorProperties(torch.float32), torch.Size(size), chunks)


INVALID_CHUNKS: dict[str, tuple[ChunkList, str]] = {
    "gap": ([((0, 0), (2, 6))], "with 24 elements in total, got 12"),
    "no chunks": ([], "with 24 elements in total, got 0"),
    "duplicate": ([((0, 0), (2, 6)), ((0, 0), (2, 6))], "overlap"),
    "overlapping rows": ([((0, 0), (2, 6)), ((1, 0), (2, 6))], "overlap"),
    "overlapping columns": ([((0, 0), (4, 3)), ((0, 2), (4, 3))], "overlap"),
    "overlapping corners": ([((0, 0), (3, 4)), ((2, 3), (2, 3)), ((0, 4), (2, 2)), ((3, 0), (1, 2))], "overlap"),
    "past the end": ([((1, 0), (4, 6))], "exceeds its size"),
    "negative offset": ([((-1, 0), (4, 6))], "exceeds its size"),
    "negative size": ([((0, 0), (-4, -6))], "exceeds its size"),
    "wrong number of dimensions": ([((0,), (24,))], "exceeds its size"),
}


@pytest.mark.parametrize("case", INVALID_CHUNKS)
def test_invalid_chunks(directory: Path, case: str) -> None:
    chunk_list, match = INVALID_CHUNKS[case]

    def corrupt(dcp_metadata: Metadata) -> None:
        old_index = next(index for index in dcp_metadata.storage_data if index.fqn == WEIGHT)
        info = dcp_metadata.storage_data.pop(old_index)
        dcp_metadata.storage_data |= {MetadataIndex(WEIGHT, offsets): info for offsets, _ in chunk_list}
        dcp_metadata.state_dict_metadata[WEIGHT] = tensor_metadata((4, 6), chunk_list)

    edit_metadata(directory, corrupt)
    with pytest.raises(CheckpointError, match=rf"\.metadata is inconsistent: .*'{WEIGHT}' .*{match}"):
        load_model(directory)


VALID_CHUNKS: dict[str, tuple[tuple[int, ...], ChunkList]] = {
    "scalar": ((), [((), ())]),
    "empty": ((0, 3), [((0, 0), (0, 3))]),
    "empty without chunks": ((0, 3), []),
    "empty chunks": ((4,), [((0,), (2,)), ((2,), (0,)), ((2,), (2,)), ((4,), (0,))]),
    "rows": ((5000, 3), [((row, 0), (1, 3)) for row in range(5000)]),
    "columns": ((3, 5000), [((0, column), (3, 1)) for column in range(5000)]),
    "grid": ((64, 64), [((row, column), (1, 8)) for row in range(64) for column in range(0, 64, 8)]),
    "pinwheel": ((3, 3), [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]),
}


@pytest.mark.parametrize("case", VALID_CHUNKS)
def test_valid_chunks(case: str) -> None:
    size, chunk_list = VALID_CHUNKS[case]
    check_chunks("it", tensor_metadata(size, chunk_list))
    check_chunks("it", tensor_metadata(size, chunk_list[::-1]))


# ---- sizes


def edit_storage_info(dcp_metadata: Metadata, **fields: Any) -> None:
    index = next(index for index in dcp_metadata.storage_data if index.fqn == WEIGHT)
    dcp_metadata.storage_data[index] = replace(dcp_metadata.storage_data[index], **fields)


@pytest.mark.parametrize("value", [-5, 10.5, None, "3"])
@pytest.mark.parametrize("field", ["offset", "length"])
def test_invalid_offset_or_length(directory: Path, field: str, value: Any) -> None:
    edit_metadata(directory, lambda dcp_metadata: edit_storage_info(dcp_metadata, **{field: value}))
    with pytest.raises(CheckpointError, match=r"\.metadata is inconsistent: .* bytes at offset"):
        CheckpointMetadata(directory)


@pytest.mark.parametrize("size", [(1 << 38,), (1 << 40, 1 << 40)])
def test_tensor_larger_than_its_data(directory: Path, size: tuple[int, ...]) -> None:
    def corrupt(dcp_metadata: Metadata) -> None:
        origin = (0,) * len(size)
        dcp_metadata.state_dict_metadata[WEIGHT] = tensor_metadata(size, [(origin, size)])
        dcp_metadata.storage_data[MetadataIndex(WEIGHT, origin)] = next(iter(dcp_metadata.storage_data.values()))

    edit_metadata(directory, corrupt)
    with pytest.raises(
        CheckpointError, match=rf"\.metadata is inconsistent: expected \d+ bytes for a chunk of '{WEIGHT}'"
    ):
        CheckpointMetadata(directory)


def test_tensor_without_data(directory: Path) -> None:
    edit_metadata(directory, lambda dcp_metadata: dcp_metadata.storage_data.clear())
    with pytest.raises(CheckpointError, match=r"a chunk of 'model.\w+' is missing from its files"):
        CheckpointMetadata(directory)


WRONG_TYPES: dict[str, Callable[[Metadata], object]] = {
    "dtype": lambda dcp_metadata: setattr(dcp_metadata.state_dict_metadata[WEIGHT].properties, "dtype", 4),  # type: ignore[union-attr]
    "size": lambda dcp_metadata: setattr(dcp_metadata.state_dict_metadata[WEIGHT], "size", (4, 6)),
    "chunks": lambda dcp_metadata: setattr(dcp_metadata.state_dict_metadata[WEIGHT], "chunks", [7]),
    "path": lambda dcp_metadata: dcp_metadata.planner_data.update({WEIGHT: ("model", ["weight"])}),
    "list index": lambda dcp_metadata: dcp_metadata.planner_data.update({WEIGHT: ("model", "weight", 10**9)}),
    "paths": lambda dcp_metadata: setattr(dcp_metadata, "planner_data", 5),
    "entries": lambda dcp_metadata: setattr(dcp_metadata, "state_dict_metadata", []),
}


@pytest.mark.parametrize("case", WRONG_TYPES)
def test_metadata_of_wrong_types(directory: Path, case: str) -> None:
    edit_metadata(directory, WRONG_TYPES[case])
    with pytest.raises(CheckpointError, match=r"\.metadata is inconsistent"):
        CheckpointMetadata(directory)
