"""Values straight from the files of a checkpoint to where they belong, with a few MiB of memory in between.

First everything is looked up: that it is there, in the form that the metadata promise. Only then are tensors read, and
nothing can go wrong any more but the disk. Each rank reads for itself; nothing here is collective.
"""

import ctypes
import io
import pickle
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.checkpoint.utils import _create_file_view

from .._types import Span
from ..errors import CheckpointError
from ..layout.chunks import has_internal_overlap, split_into_chunks, storage_numel
from ..state.serialization import open_torch_archive
from .metadata import CheckpointMetadata, torch_reason
from .progress import Progress

# ---------------------------------------------------------------------------------------------------------------------
# Where `torch.save` has put the memory of a plain tensor, seen without reading it.
#
# `torch.load` on the meta device says the same in ten times the time, and is asked wherever this does not know.


_STORAGE_NAMES = {
    torch.float64: "DoubleStorage",
    torch.float32: "FloatStorage",
    torch.float16: "HalfStorage",
    torch.bfloat16: "BFloat16Storage",
    torch.int64: "LongStorage",
    torch.int32: "IntStorage",
    torch.int16: "ShortStorage",
    torch.int8: "CharStorage",
    torch.uint8: "ByteStorage",
    torch.bool: "BoolStorage",
}


_LONG_PATTERN = "|".join(rf"\x8a\x{size:02x}.{{{size}}}" for size in range(1, 9))
_INT_PATTERN = rf"(?:K.|M..|J.{{4}}|{_LONG_PATTERN})"
_INT_TUPLE_PATTERN = (
    rf"(?:\)|{_INT_PATTERN}\x85q.|{_INT_PATTERN}{{2}}\x86q.|{_INT_PATTERN}{{3}}\x87q.|\({_INT_PATTERN}{{4,64}}tq.)"
)
_TENSOR_REGEX = re.compile(
    (
        r"\x80\x02ctorch\._utils\n_rebuild_tensor_v2\nq.\(\("
        r"X\x07\0\0\0storageq.ctorch\n(?P<storage>\w+)\nq."
        r"X(?P<keys>.)\0\0\0(?P<key>[0-9]+)q.X(?P<places>.)\0\0\0(?P<place>[a-z0-9:]+)q."
        rf"{_INT_PATTERN}tq.Q(?P<offset>{_INT_PATTERN})(?P<size>{_INT_TUPLE_PATTERN})(?P<stride>{_INT_TUPLE_PATTERN})"
        r"[\x88\x89]ccollections\nOrderedDict\nq.\)Rq.tq.Rq.\."
    ).encode(),
    re.DOTALL,
)
"""How torch pickles one: `_rebuild_tensor_v2` is called with storage, offset, size and stride. It is not unpickled."""
_INT_REGEX = re.compile(_INT_PATTERN.encode(), re.DOTALL)


class TensorHeader(NamedTuple):
    data_offset: int
    """The first byte of its first element."""
    meta_tensor: torch.Tensor
    """On the meta device."""


def parse_tensor_header(stream: Any, dtype: torch.dtype) -> TensorHeader | None:
    """Of a tensor of that dtype, in a file that begins where `view` does; None if it is something else."""
    try:
        reader = open_torch_archive(stream)
        if reader.get_record("byteorder").decode() != sys.byteorder:
            return None
        found = _TENSOR_REGEX.fullmatch(reader.get_record("data.pkl"))
        if found is None or found["storage"].decode() != _STORAGE_NAMES.get(dtype):
            return None
        if (found["keys"][0], found["places"][0]) != (len(found["key"]), len(found["place"])):
            return None
        (offset,), size, stride = (_parse_ints(found[part]) for part in ("offset", "size", "stride"))
        if offset < 0:
            return None
        start = reader.get_record_offset(f"data/{found['key'].decode()}") + offset * dtype.itemsize
        return TensorHeader(start, torch.empty_strided(size, stride, dtype=dtype, device="meta"))
    except Exception:
        return None  # torch says better what is wrong with it


def _parse_ints(data: bytes) -> list[int]:
    return [_parse_int(it) for it in _INT_REGEX.findall(data.removeprefix(b"("))]


def _parse_int(data: bytes) -> int:
    """As pickle writes it: those of one and two bytes have no sign."""
    kind, digits = data[:1], data[2:] if data[:1] == b"\x8a" else data[1:]
    return int.from_bytes(digits, "little", signed=kind not in b"KM")


# ---------------------------------------------------------------------------------------------------------------------
# Values straight from the files of a checkpoint to where they belong, with a few MiB of memory in between.
#
# First everything is looked up: that it is there, in the form that the metadata promise. Only then are tensors read,
# and
# nothing can go wrong any more but the disk. Each rank reads for itself; nothing here is collective.


READ_CHUNK_BYTES = 4 * 2**20
"""Bytes that are read at once, unless they can go straight to where they belong."""
_SMALL_ENTRY_BYTES = 1 << 16
_DISALLOWED_TYPE_MARKER = "GLOBAL"
"""In what torch says of types that it does not read."""


class TensorLocation(NamedTuple):
    """A stored part of a tensor."""

    byte_offset: int
    """The byte of the file where its memory begins."""
    tensor: torch.Tensor
    """As it lies there, on the meta device. What cannot be read in pieces is here with its values."""


class ReadPlan:
    """What a rank is going to read: tensors into given ones, and whatever values there are for None."""

    def __init__(self, metadata: CheckpointMetadata, targets: Mapping[str, Any]) -> None:
        """`targets` by keys of the archive. Raises if one could not be read."""
        self._metadata = metadata
        self._planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._planner.set_up_planner(dict(targets), metadata.dcp_metadata)
        self._values = dict(targets)
        self._tensor_reads: dict[str, list[tuple[ReadItem, TensorLocation]]] = {}
        """By file."""
        by_file: dict[str, list[ReadItem]] = defaultdict(list)
        for item in self._planner.create_local_plan().items:
            by_file[metadata.storage_info(item.storage_index).relative_path].append(item)
        for name, items in by_file.items():
            with open_file(metadata, name) as stream:
                self._tensor_reads[name] = self._locate_items(stream, items)

    @property
    def values(self) -> dict[str, Any]:
        """The targets, not filled yet, and the other values."""
        return self._values

    def execute(self, progress: Progress | None = None) -> dict[str, Any]:
        """The targets, filled, and the other values."""
        counted = progress or Progress("", False, 0)
        counted.add_expected(sum(_item_nbytes(*it) for found in self._tensor_reads.values() for it in found))
        for name, found in self._tensor_reads.items():
            with open_file(self._metadata, name) as stream:
                for item, place in found:
                    self._read_tensor(stream, item, place)
                    counted.advance(_item_nbytes(item, place))
        return self._values

    def _locate_items(self, stream: BinaryIO, items: Sequence[ReadItem]) -> list[tuple[ReadItem, TensorLocation]]:
        known: dict[MetadataIndex, TensorLocation] = {}
        found = []
        for item in items:
            index = item.storage_index
            if item.type == LoadItemType.BYTE_IO:
                self._values[index.fqn] = _torch_load(self._metadata, stream, index, device="cpu")
                continue
            if index not in known:
                known[index] = locate_tensor(self._metadata, stream, index)
            found.append((item, known[index]))
        return found

    @torch.no_grad()
    def _read_tensor(self, stream: BinaryIO, item: ReadItem, location: TensorLocation) -> None:
        target = self._planner.resolve_tensor(item).detach()
        source = _narrow(location.tensor, item.storage_offsets, item.lengths)
        if not source.is_meta:
            target.copy_(source)
            return
        start = location.byte_offset + int(source.storage_offset() - location.tensor.storage_offset()) * source.itemsize
        if _has_same_memory_layout(source, target):
            read_into(stream, start, _writable_memory(target))
            return
        for offsets, tensor in iter_chunks(stream, start, source):
            _narrow(target, offsets, tensor.shape).copy_(tensor)


def read_values(metadata: CheckpointMetadata, targets: Mapping[str, Any]) -> dict[str, Any]:
    return ReadPlan(metadata, targets).execute()


@contextmanager
def open_file(metadata: CheckpointMetadata, name: str) -> Iterator[BinaryIO]:
    """A file of the archive. Whatever cannot be read there is an error that names it."""
    try:
        with (metadata.directory / name).open("rb", buffering=0) as stream:
            yield stream
    except OSError as error:
        raise CheckpointError(f"{metadata.directory / name} cannot be read: {error}") from error


def locate_tensor(metadata: CheckpointMetadata, stream: BinaryIO, index: MetadataIndex) -> TensorLocation:
    """Where a part of a tensor lies in its file."""
    entry: Any = metadata.dcp_metadata.state_dict_metadata[index.fqn]
    place = metadata.storage_info(index)
    start, found = parse_tensor_header(_entry_stream(stream, place), entry.properties.dtype) or _locate_with_torch(
        metadata, stream, index
    )
    sizes = next(chunk.sizes for chunk in entry.chunks if chunk.offsets == index.offset)
    if not isinstance(found, torch.Tensor) or (found.shape, found.dtype) != (sizes, entry.properties.dtype):
        raise CheckpointError(f"{_format_index(metadata, index)} is not what the checkpoint's metadata say of it")
    if not _is_plain_strided(found):
        return TensorLocation(0, _torch_load(metadata, stream, index, device="cpu"))
    if start + storage_numel(found.shape, found.stride()) * found.itemsize > place.length:
        raise CheckpointError(f"{_format_index(metadata, index)} goes beyond its place in the file")
    return TensorLocation(place.offset + start, found)


def _locate_with_torch(metadata: CheckpointMetadata, stream: BinaryIO, index: MetadataIndex) -> tuple[int, Any]:
    """What torch says of a value, and where in it the memory begins if it is a plain tensor."""
    found = _torch_load(metadata, stream, index, device="meta")
    if not isinstance(found, torch.Tensor) or not _is_plain_strided(found):
        return 0, found
    start: Any = found.untyped_storage()._checkpoint_offset
    return start + int(found.storage_offset()) * found.itemsize, found


def iter_chunks(
    stream: BinaryIO, byte_offset: int, like: torch.Tensor
) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """A tensor whose memory begins at `start` in a file: boxes of its elements, by their offsets.

    Each is to be used up before the next is taken.
    """
    count, most = storage_numel(like.shape, like.stride()), max(1, READ_CHUNK_BYTES // like.itemsize)
    # Memory of its own and not a map of the file: there elements may lie at odd addresses.
    buffer = bytearray(min(count, most) * like.itemsize)
    for first in range(0, count, most):
        span = Span(first, min(count, first + most))
        piece = memoryview(buffer)[: span.length * like.itemsize]
        read_into(stream, byte_offset + first * like.itemsize, piece)
        memory = torch.frombuffer(piece, dtype=torch.uint8).view(like.dtype)
        for box in split_into_chunks(like.shape, like.stride(), span):
            place = sum(offset * step for offset, step in zip(box.offsets, like.stride(), strict=True))
            yield box.offsets, memory.as_strided(box.sizes, like.stride(), place - first)


def read_into(stream: BinaryIO, byte_offset: int, buffer: memoryview) -> None:
    stream.seek(byte_offset)
    done = 0
    while done < len(buffer):
        count = stream.readinto(buffer[done:])  # type: ignore[attr-defined]
        if not count:
            raise OSError("it is truncated. Use another checkpoint.")
        done += count


def _torch_load(metadata: CheckpointMetadata, stream: BinaryIO, index: MetadataIndex, device: str) -> Any:
    """What torch reads, without running code. On the meta device: without values."""
    place = metadata.storage_info(index)
    try:
        open_torch_archive(_entry_stream(stream, place))
        return torch.load(_entry_stream(stream, place), map_location=device, weights_only=True)
    except pickle.UnpicklingError as error:
        if _DISALLOWED_TYPE_MARKER not in torch_reason(error):
            raise CheckpointError(f"{_format_index(metadata, index)} cannot be read: {torch_reason(error)}") from error
        raise CheckpointError(
            f"'{index.fqn}' holds a type that is not read from files, since reading it could run code "
            f"({torch_reason(error)}) Allow it with torch.serialization.add_safe_globals if you trust the file."
        ) from error
    except Exception as error:
        raise CheckpointError(f"{_format_index(metadata, index)} cannot be read: {torch_reason(error)}") from error


def _entry_stream(stream: BinaryIO, storage_info: Any) -> Any:
    """A part of a file. Torch looks at it here and there, for which a small one is better in memory."""
    if storage_info.length > _SMALL_ENTRY_BYTES:
        return _create_file_view(stream, storage_info.offset, storage_info.length)  # type: ignore[arg-type]
    content = bytearray(storage_info.length)
    read_into(stream, storage_info.offset, memoryview(content))
    return io.BytesIO(content)


def _item_nbytes(item: ReadItem, location: TensorLocation) -> int:
    return item.lengths.numel() * location.tensor.itemsize


def _format_index(metadata: CheckpointMetadata, index: MetadataIndex) -> str:
    return f"'{index.fqn}' in {metadata.directory / metadata.storage_info(index).relative_path}"


def _narrow(tensor: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        if size != tensor.size(dim):
            tensor = tensor.narrow(dim, offset, size)
    return tensor


def _has_same_memory_layout(source: torch.Tensor, target: torch.Tensor) -> bool:
    """Whether bytes of one, in the order in which they lie, are those of the other, without gaps."""
    if not _is_plain_strided(target) or target.device.type != "cpu" or target.dtype != source.dtype:
        return False
    steps = [(a, b) for size, a, b in zip(source.shape, source.stride(), target.stride(), strict=True) if size > 1]
    return all(a == b for a, b in steps) and storage_numel(source.shape, source.stride()) == source.numel()


def _writable_memory(tensor: torch.Tensor) -> memoryview:
    """Of a tensor without gaps, to write to. Without numpy, which torch can do without."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _is_plain_strided(tensor: torch.Tensor) -> bool:
    """Whether its values are what lies in its memory, each at a place of its own."""
    if type(tensor) is not torch.Tensor or tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
        return False
    return not has_internal_overlap(tensor.shape, tensor.stride())
