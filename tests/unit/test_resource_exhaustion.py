"""Malicious files that would exhaust memory or time, or bypass a check, are rejected quickly."""

from __future__ import annotations

import io
import pickle
import resource
import tracemalloc
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from tests.support.checkpoints import edit_metadata
from tests.support.tools import status_of
from zeroshard import CheckpointError
from zeroshard.checkpoint.metadata import CheckpointMetadata, safe_repr
from zeroshard.checkpoint.reader import parse_tensor_header, read_values
from zeroshard.state.serialization import loads

pytestmark = [pytest.mark.filterwarnings("ignore:torch.distributed is disabled"), pytest.mark.timeout(60)]

MIB = 2**20
WEIGHT = "model.weight"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    contents = {"model": {"weight": torch.ones(4, 6), "bias": torch.zeros(6)}, "note": "text"}
    dcp_save(contents, checkpoint_id=tmp_path / "saved", no_dist=True)
    return tmp_path / "saved"


@pytest.fixture(autouse=True)
def bounded_memory() -> Iterator[None]:
    tracemalloc.start()
    yield
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 50 * MIB


def nested(depth: int) -> Any:
    """Return a tuple with 2**depth leaves that is pickled in a few bytes per level."""
    value: Any = ()
    for _ in range(depth):
        value = (value, value)
    return value


def assert_metadata_rejected(directory: Path, content: bytes, match: str) -> None:
    (directory / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match=match):
        CheckpointMetadata(directory)
    assert status_of("checkpoint", "inspect", directory) == 1


@pytest.mark.parametrize("content", [b"\x80\x02Nr\xff\xff\xff\x07.", b"\x80\x02Np123456789\n.", b"Np123456789\n."])
def test_large_memo_indices_allocate_no_memory(directory: Path, content: bytes) -> None:
    assert_metadata_rejected(directory, content, r"not checkpoint metadata|cannot be read")


@pytest.mark.parametrize("opcode", [b"\x8e", b"\x96", b"\x8d", b"\x95", b"B", b"\x8b"])
def test_lengths_beyond_end_of_file_are_rejected(directory: Path, opcode: bytes) -> None:
    assert_metadata_rejected(directory, b"\x80\x05" + opcode + b"\xff\xff\xff\x7f\x01\0\0\0.", r"cannot be read")


@pytest.mark.parametrize("depth", [100, 50_000])
def test_nested_keys_are_rejected_before_hashing(directory: Path, depth: int) -> None:
    """Hashing a deep key would overflow the stack."""
    deep = b")" + (b"\x85" if depth > 1000 else b"2\x86") * depth
    for content in (b"}" + deep + b"Ns.", b"}(" + deep + b"Nu.", b"\x8f(" + deep + b"\x90.", b"(" + deep + b"Nd."):
        assert_metadata_rejected(directory, b"\x80\x04" + content, r"cannot be read")
    index = b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n)\x81}X\x03\0\0\0fqn" + deep + b"sb"
    assert_metadata_rejected(directory, b"\x80\x04}" + index + b"Ns.", "got MetadataIndex|cannot be read")
    pairs = b"ccollections\nOrderedDict\n]" + deep + b"N\x86a\x85R."
    assert_metadata_rejected(directory, b"\x80\x04" + pairs, "cannot be read")


def set_storage_field(dcp_metadata: Metadata, field: str, value: Any) -> None:
    for info in dcp_metadata.storage_data.values():
        setattr(info, field, value)


CORRUPTIONS: dict[str, Callable[[Metadata], object]] = {
    "path": lambda dcp_metadata: dcp_metadata.planner_data.update({WEIGHT: nested(60)}),
    "name": lambda dcp_metadata: set_storage_field(dcp_metadata, "relative_path", nested(60)),
    "offset": lambda dcp_metadata: set_storage_field(dcp_metadata, "offset", nested(60)),
    "length": lambda dcp_metadata: set_storage_field(dcp_metadata, "length", 1 << 100_000),
    "transforms": lambda dcp_metadata: set_storage_field(dcp_metadata, "transform_descriptors", nested(60)),
    "size": lambda dcp_metadata: setattr(dcp_metadata.state_dict_metadata[WEIGHT], "size", nested(60)),
    "dimensions": lambda dcp_metadata: setattr(
        dcp_metadata.state_dict_metadata[WEIGHT], "size", torch.Size([1 << 62] * 100_000)
    ),
    "chunks": lambda dcp_metadata: setattr(dcp_metadata.state_dict_metadata[WEIGHT], "chunks", [nested(60)]),
    "chunk": lambda dcp_metadata: setattr(dcp_metadata.state_dict_metadata[WEIGHT].chunks[0], "sizes", nested(60)),  # type: ignore[union-attr]
    "dtype": lambda dcp_metadata: setattr(dcp_metadata.state_dict_metadata[WEIGHT].properties, "dtype", nested(60)),  # type: ignore[union-attr]
}


@pytest.mark.parametrize("case", CORRUPTIONS)
def test_error_messages_are_short(directory: Path, case: str) -> None:
    edit_metadata(directory, CORRUPTIONS[case])
    with pytest.raises(CheckpointError) as caught:
        CheckpointMetadata(directory)
    assert len(str(caught.value)) < 1000 + len(str(directory))


def test_safe_repr() -> None:
    assert safe_repr((1, "a", torch.Size([2, 3]))) == "(1, 'a', (2, 3))"
    assert (safe_repr(None), safe_repr(True), safe_repr(-5), safe_repr("x")) == ("None", "True", "-5", "'x'")
    assert len(safe_repr("x" * 10_000)) < 100
    assert len(safe_repr(nested(60))) < 2000
    assert safe_repr(1 << 100_000) == "a number of 100001 bits"
    assert safe_repr(CheckpointMetadata) == "a type"


def test_overlapping_values_are_rejected(directory: Path) -> None:
    """Otherwise each value would allocate its own memory."""

    def duplicate_weight(dcp_metadata: Metadata) -> None:
        index, info = next((index, info) for index, info in dcp_metadata.storage_data.items() if index.fqn == WEIGHT)
        for number in range(1000):
            dcp_metadata.state_dict_metadata[f"scheduler.{number}"] = dcp_metadata.state_dict_metadata[WEIGHT]
            dcp_metadata.storage_data[replace(index, fqn=f"scheduler.{number}")] = info

    edit_metadata(directory, duplicate_weight)
    with pytest.raises(CheckpointError, match=r"is inconsistent: two values overlap before byte \d+ of '__0_0"):
        CheckpointMetadata(directory)


def test_attributes_cannot_bypass_path_check(directory: Path) -> None:
    """OrderedDict accepts instance attributes, which take precedence over its methods."""
    (directory / "__0_0.distcp").rename(directory.parent / "outside")

    def hide_values_method(dcp_metadata: Metadata) -> None:
        storage_data = {
            index: replace(info, relative_path="../outside") for index, info in dcp_metadata.storage_data.items()
        }
        dcp_metadata.storage_data = OrderedDict(storage_data)
        dcp_metadata.storage_data.values = torch.Size

    edit_metadata(directory, hide_values_method)
    with pytest.raises(CheckpointError, match=r"\.metadata cannot be read"):
        CheckpointMetadata(directory)


def compress_records(content: bytes) -> bytes:
    compressed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(compressed, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    return compressed.getvalue()


def torch_save_bytes(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def test_compressed_records_are_rejected() -> None:
    content = compress_records(torch_save_bytes(torch.zeros(4 * MIB)))
    assert len(content) < MIB
    with pytest.raises(CheckpointError, match=r"expected records of at most \d+ bytes, the size of the file, got 1\d+"):
        loads(content)
    assert parse_tensor_header(io.BytesIO(content), torch.float32) is None


def test_compressed_value_in_checkpoint_is_rejected(directory: Path) -> None:
    content = compress_records(torch_save_bytes(["x" * 4 * MIB]))
    (directory / "__0_0.distcp").write_bytes(content)

    def keep_only_note(dcp_metadata: Metadata) -> None:
        index, info = next((index, info) for index, info in dcp_metadata.storage_data.items() if index.fqn == "note")
        dcp_metadata.state_dict_metadata = {"note": dcp_metadata.state_dict_metadata["note"]}
        dcp_metadata.storage_data = {index: replace(info, offset=0, length=len(content))}

    edit_metadata(directory, keep_only_note)
    with pytest.raises(CheckpointError, match=r"'note' in .* cannot be read: expected records of at most"):
        read_values(CheckpointMetadata(directory), {"note": None})


def test_claimed_record_sizes_are_checked_before_torch_opens_an_archive() -> None:
    """Torch's reader allocates the claimed size of the record `version` when it opens the archive."""
    content = torch_save_bytes(torch.zeros(3))
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        version = next(record.filename for record in archive.infolist() if record.filename.endswith("/version"))
    name_at = content.rindex(version.encode())  # in the central directory
    edited = bytearray(content)
    edited[name_at - 22 : name_at - 18] = (2**32 - 2**20).to_bytes(4, "little")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(
        CheckpointError, match=r"expected records of at most \d+ bytes, the size of the file, got 42\d+"
    ):
        loads(bytes(edited))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 100 * 1024


def test_other_file_formats_are_rejected() -> None:
    legacy = io.BytesIO()
    torch.save(torch.ones(3), legacy, _use_new_zipfile_serialization=False)
    for content in (b"", b"PK", legacy.getvalue(), pickle.dumps(3)):
        with pytest.raises(CheckpointError, match=r"expected an archive of .*, got another format"):
            loads(content)


@pytest.mark.parametrize(("shape", "stride"), [((30, 30), (1, 1)), ((4, 9), (3, 1)), ((5, 2, 2), (2, 1, 2))])
def test_overlapping_elements_are_read_like_torch(
    tmp_path: Path, shape: tuple[int, ...], stride: tuple[int, ...]
) -> None:
    """No DCP chunk describes such elements, so they are read through torch."""
    overlapping = torch.arange(2000.0).as_strided(shape, stride)
    dcp_save({"it": overlapping.clone()}, checkpoint_id=tmp_path / "it", no_dist=True)
    content = torch_save_bytes(overlapping)
    (tmp_path / "it" / "__0_0.distcp").write_bytes(content)
    edit_metadata(
        tmp_path / "it",
        lambda dcp_metadata: dcp_metadata.storage_data.update(
            {index: replace(info, offset=0, length=len(content)) for index, info in dcp_metadata.storage_data.items()}
        ),
    )
    target = torch.full(shape, -1.0)
    read_values(CheckpointMetadata(tmp_path / "it"), {"it": target})
    assert torch.equal(target, overlapping)
