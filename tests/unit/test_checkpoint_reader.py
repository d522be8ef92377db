"""Reading a DCP directory returns what was saved, for any shapes, strides and shards."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from tests.unit.test_chunks import Dims, extent_of, strided_dims
from zeroshard import CheckpointError
from zeroshard._types import Span
from zeroshard.checkpoint import reader
from zeroshard.checkpoint.metadata import CheckpointMetadata
from zeroshard.checkpoint.progress import Progress
from zeroshard.checkpoint.reader import ReadPlan, parse_tensor_header, read_values
from zeroshard.state.shard_tensor import ShardTensor

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(autouse=True, params=["parsed header", "torch.load"])
def read_mode(request: pytest.FixtureRequest) -> Iterator[None]:
    """Read in small chunks, several per tensor. Locate tensors by the parsed header or by torch.load."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "READ_CHUNK_BYTES", 24)
        if request.param == "torch.load":
            patch.setattr(reader, "parse_tensor_header", lambda *_: None)
        yield


PLAIN_TENSORS = {
    "rows": torch.randn(4, 3),
    "transposed": torch.randn(4, 3).t(),
    "strided": torch.randn(9, 9)[2:5, 1::3],
    "bfloat16": torch.randn(5).bfloat16(),
    "flags": torch.tensor([True, False]),
    "bytes": torch.arange(7, dtype=torch.uint8),
    "scalar": torch.tensor(3.5, dtype=torch.float64),
    "empty": torch.zeros(0, 4),
}
UNSUPPORTED_VALUES = {
    "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
    "sparse": torch.eye(3).to_sparse(),
    "parameter": nn.Parameter(torch.ones(2)),
    "list": [torch.ones(2)],
    "float8": torch.ones(4).to(torch.float8_e4m3fn),
}


def save_to_buffer(value: Any) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer


@pytest.mark.parametrize("kind", PLAIN_TENSORS)
def test_parsed_header_matches_torch(kind: str) -> None:
    """Fails if a version of torch writes tensors differently, which would make loading slow."""
    buffer = save_to_buffer(PLAIN_TENSORS[kind])
    header = parse_tensor_header(buffer, PLAIN_TENSORS[kind].dtype)
    assert header is not None
    buffer.seek(0)
    expected = torch.load(buffer, map_location="meta", weights_only=True)
    assert (header.meta_tensor.shape, header.meta_tensor.stride()) == (expected.shape, expected.stride())
    offset = expected.untyped_storage()._checkpoint_offset + expected.storage_offset() * expected.itemsize
    assert header.data_offset == offset


@pytest.mark.parametrize("kind", [*UNSUPPORTED_VALUES, "wrong dtype", "noise"])
def test_unsupported_headers(kind: str) -> None:
    buffer = (
        save_to_buffer(UNSUPPORTED_VALUES.get(kind, PLAIN_TENSORS["rows"]))
        if kind != "noise"
        else io.BytesIO(b"noise" * 100)
    )
    assert parse_tensor_header(buffer, torch.float64) is None
    assert parse_tensor_header(buffer, torch.complex64) is None


def make_tensor(dims: Dims, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    memory = torch.arange(1, extent_of(dims) + 1).to(dtype)
    return memory.as_strided([size for size, _ in dims], [stride for _, stride in dims])


def save_checkpoint(tmp: Path, **values: Any) -> CheckpointMetadata:
    dcp_save(values, checkpoint_id=tmp, no_dist=True)
    return CheckpointMetadata(tmp)


@st.composite
def saved_and_loaded_shards(draw: st.DrawFn) -> tuple[Dims, Dims, Span]:
    """Dimensions of a saved tensor and of its target, and the span of the target's memory that is loaded."""
    saved_dims = draw(strided_dims())
    order = draw(st.permutations(range(len(saved_dims))))
    target_dims, block = [(0, 0)] * len(saved_dims), 1
    for dim in order:
        size = saved_dims[dim][0]
        stride = block + draw(st.integers(0, 2))
        target_dims[dim], block = (size, stride), (max(size, 1) - 1) * stride + block
    start = draw(st.integers(0, extent_of(target_dims)))
    return saved_dims, target_dims, Span(start, draw(st.integers(start, extent_of(target_dims))))


@given(saved_and_loaded_shards(), st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_read_any_shard(case: tuple[Dims, Dims, Span], dtype: torch.dtype) -> None:
    saved_dims, target_dims, span = case
    source = make_tensor(saved_dims)
    full = torch.zeros(extent_of(target_dims), dtype=dtype)
    local = full[slice(*span)]
    target = ShardTensor(local, [size for size, _ in target_dims], [stride for _, stride in target_dims], span.start)
    with tempfile.TemporaryDirectory() as folder:
        read_values(save_checkpoint(Path(folder), it=source), {"it": target})
    expected = torch.zeros_like(full)
    expected.as_strided(target.shape, target.full_stride).copy_(source)
    assert torch.equal(local, expected[slice(*span)])
    outside = torch.cat([full[: span.start], full[span.stop :]])
    assert not outside.any(), "elements outside the shard stay unchanged"


@given(strided_dims(), st.booleans())
def test_read_full_tensors(dims: Dims, like_saved: bool) -> None:
    source = make_tensor(dims)
    target = torch.zeros_like(source) if like_saved else torch.zeros(source.shape, dtype=torch.float64)
    with tempfile.TemporaryDirectory() as folder:
        read_values(save_checkpoint(Path(folder), it=source), {"it": target})
    assert torch.equal(target, source.to(target.dtype))


def test_same_memory_layout_is_read_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = save_checkpoint(
        tmp_path, rows=torch.randn(6, 8), turned=torch.randn(8, 6).t(), columns=torch.randn(6, 8)
    )
    monkeypatch.setattr(reader, "iter_chunks", lambda *_: pytest.fail("read in pieces"))
    targets = {"rows": torch.zeros(6, 8), "turned": torch.zeros(8, 6).t()}
    values = read_values(metadata, targets)
    assert values["rows"] is targets["rows"]
    assert targets["rows"].all()
    assert targets["turned"].all()
    with pytest.raises(pytest.fail.Exception, match="in pieces"):
        read_values(metadata, {"columns": torch.zeros(8, 6).t()})


def test_expanded_tensor(tmp_path: Path) -> None:
    metadata = save_checkpoint(tmp_path, it=torch.tensor([3.0]).expand(5))
    target = torch.zeros(5)
    read_values(metadata, {"it": target})
    assert target.tolist() == [3.0] * 5


def test_non_tensor_values(tmp_path: Path) -> None:
    metadata = save_checkpoint(tmp_path, number=3, text="x", items={"a": [1, 2.5]})
    targets = {entry.key: entry.allocate() for entry in metadata.entries}
    assert read_values(metadata, targets) == {"number": 3, "text": "x", "items.a": [1, 2.5]}


def test_error_names_missing_or_truncated_file(tmp_path: Path) -> None:
    metadata = save_checkpoint(tmp_path, it=torch.ones(3))
    plan = ReadPlan(metadata, {"it": torch.zeros(3)})
    (file,) = tmp_path.glob("*.distcp")
    file.unlink()
    with pytest.raises(CheckpointError, match=f"{file} cannot be read: .*No such file"):
        plan.execute()
    file.write_bytes(b"short")
    with pytest.raises(CheckpointError, match=f"{file} cannot be read: truncated"):
        plan.execute()


def test_shape_differs_from_metadata(tmp_path: Path) -> None:
    metadata = save_checkpoint(tmp_path / "a", it=torch.ones(3))
    other = save_checkpoint(tmp_path / "b", it=torch.ones(4))
    (file,), (source,) = (tuple(saved.directory.glob("*.distcp")) for saved in (metadata, other))
    file.write_bytes(source.read_bytes())
    with pytest.raises(CheckpointError, match=f"'it' in {file} contradicts the metadata: expected shape"):
        ReadPlan(metadata, {"it": torch.zeros(3)})


def test_progress_counts_bytes(tmp_path: Path) -> None:
    metadata = save_checkpoint(tmp_path, a=torch.ones(3), b=torch.ones(5, 2))
    seen: list[tuple[int, int]] = []
    ReadPlan(metadata, {"a": torch.zeros(3), "b": torch.zeros(5, 2)}).execute(
        Progress("", lambda done, total: seen.append((done, total)), 0)
    )
    assert sorted(seen) == seen
    assert seen[-1] == (52, 52)
    assert len(seen) == 2
