"""Read values from checkpoint files directly into their target tensors, with a few MiB of extra memory.

`ReadPlan` first locates every tensor and compares it with the metadata; only `execute` reads tensors. After a plan has
been made, only I/O errors can make the read fail. Each rank reads on its own; nothing here is collective.
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

from .._torch_compat import make_file_view, storage_offset_in_file
from .._types import Span
from ..errors import CheckpointError
from ..layout.chunks import has_internal_overlap, split_into_chunks, storage_numel
from ..state.serialization import open_torch_archive
from .metadata import CheckpointMetadata, torch_reason
from .progress import Progress

# ---------------------------------------------------------------------------------------------------------------------
# Header of a tensor that `torch.save` wrote: where its memory begins, and its shape and strides.
#
# `torch.load` on the meta device returns the same in ten times the time; it is the fallback for anything unusual.


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
        r"X(?P<key_len>.)\0\0\0(?P<key>[0-9]+)q.X(?P<device_len>.)\0\0\0(?P<device>[a-z0-9:]+)q."
        rf"{_INT_PATTERN}tq.Q(?P<offset>{_INT_PATTERN})(?P<size>{_INT_TUPLE_PATTERN})(?P<stride>{_INT_TUPLE_PATTERN})"
        r"[\x88\x89]ccollections\nOrderedDict\nq.\)Rq.tq.Rq.\."
    ).encode(),
    re.DOTALL,
)
"""The pickle of a plain tensor: `_rebuild_tensor_v2(storage, offset, size, stride, ...)`. Matched, not unpickled."""
_INT_REGEX = re.compile(_INT_PATTERN.encode(), re.DOTALL)


class TensorHeader(NamedTuple):
    data_offset: int
    """Offset of the first element, in bytes from the start of the stream."""
    meta_tensor: torch.Tensor


def parse_tensor_header(stream: Any, dtype: torch.dtype) -> TensorHeader | None:
    """Return the header of the tensor in `stream`, or None unless it is a plain tensor of `dtype`."""
    try:
        reader = open_torch_archive(stream)
        if reader.get_record("byteorder").decode() != sys.byteorder:
            return None
        match = _TENSOR_REGEX.fullmatch(reader.get_record("data.pkl"))
        if match is None or match["storage"].decode() != _STORAGE_NAMES.get(dtype):
            return None
        if (match["key_len"][0], match["device_len"][0]) != (len(match["key"]), len(match["device"])):
            return None
        (offset,), size, stride = (_parse_ints(match[field]) for field in ("offset", "size", "stride"))
        if offset < 0:
            return None
        start = reader.get_record_offset(f"data/{match['key'].decode()}") + offset * dtype.itemsize
        return TensorHeader(start, torch.empty_strided(size, stride, dtype=dtype, device="meta"))
    except Exception:
        return None  # the fallback, torch.load, raises a better error


def _parse_ints(data: bytes) -> list[int]:
    return [_parse_int(token) for token in _INT_REGEX.findall(data.removeprefix(b"("))]


def _parse_int(data: bytes) -> int:
    """Decode an integer of a pickle: opcode, then the value. BININT1 (K) and BININT2 (M) are unsigned."""
    opcode, digits = data[:1], data[2:] if data[:1] == b"\x8a" else data[1:]
    return int.from_bytes(digits, "little", signed=opcode not in b"KM")


# ---------------------------------------------------------------------------------------------------------------------
# Read plan: locate everything, then read.


READ_CHUNK_BYTES = 4 * 2**20
"""Size of one read, where bytes cannot be read directly into the target."""
_SMALL_ENTRY_BYTES = 1 << 16
DISALLOWED_TYPE_MARKER = "GLOBAL"
"""Part of torch's error message for a type that `weights_only=True` does not allow."""


class TensorLocation(NamedTuple):
    """A stored chunk of a tensor."""

    byte_offset: int
    """Where its memory begins in the file."""
    tensor: torch.Tensor
    """A meta tensor with the stored strides. A chunk that cannot be read in place is here with its values."""


class ReadPlan:
    """Reads of one rank: tensors into target tensors, and all other values by `torch.load`."""

    def __init__(self, metadata: CheckpointMetadata, targets: Mapping[str, Any]) -> None:
        """Locate all tensors, and read all other values.

        Args:
            metadata: Metadata of the checkpoint.
            targets: Tensors to read into, by entry key; None for values that are not tensors.

        Raises:
            CheckpointError: A value is missing or does not match the metadata.
        """
        self._metadata = metadata
        self._planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._planner.set_up_planner(dict(targets), metadata.dcp_metadata)
        self._values = dict(targets)
        self._tensor_reads: dict[str, list[tuple[ReadItem, TensorLocation]]] = {}
        """By file name."""
        by_file: dict[str, list[ReadItem]] = defaultdict(list)
        for item in self._planner.create_local_plan().items:
            by_file[metadata.storage_info(item.storage_index).relative_path].append(item)
        for name, items in by_file.items():
            with open_file(metadata, name) as stream:
                self._tensor_reads[name] = self._locate_items(stream, items)

    @property
    def values(self) -> dict[str, Any]:
        """The values, with targets that have not been filled yet."""
        return self._values

    def execute(self, progress: Progress | None = None) -> dict[str, Any]:
        """Read all tensors into their targets, and return all values by entry key."""
        counter = progress or Progress("", False, 0)
        counter.add_expected(sum(_item_nbytes(*read) for reads in self._tensor_reads.values() for read in reads))
        for name, reads in self._tensor_reads.items():
            with open_file(self._metadata, name) as stream:
                for item, location in reads:
                    self._read_tensor(stream, item, location)
                    counter.advance(_item_nbytes(item, location))
        return self._values

    def _locate_items(self, stream: BinaryIO, items: Sequence[ReadItem]) -> list[tuple[ReadItem, TensorLocation]]:
        locations: dict[MetadataIndex, TensorLocation] = {}
        reads = []
        for item in items:
            index = item.storage_index
            if item.type == LoadItemType.BYTE_IO:
                self._values[index.fqn] = _torch_load(self._metadata, stream, index, device="cpu")
                continue
            if index not in locations:
                locations[index] = locate_tensor(self._metadata, stream, index)
            reads.append((item, locations[index]))
        return reads

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
    """Open a file of the checkpoint. I/O errors become a `CheckpointError` that names the file."""
    try:
        with (metadata.directory / name).open("rb", buffering=0) as stream:
            yield stream
    except OSError as error:
        raise CheckpointError(f"{metadata.directory / name} cannot be read: {error}") from error


def locate_tensor(metadata: CheckpointMetadata, stream: BinaryIO, index: MetadataIndex) -> TensorLocation:
    """Return where a chunk lies in its file. Raises `CheckpointError` if it contradicts the metadata."""
    entry: Any = metadata.dcp_metadata.state_dict_metadata[index.fqn]
    info = metadata.storage_info(index)
    start, tensor = parse_tensor_header(_entry_stream(stream, info), entry.properties.dtype) or _locate_with_torch(
        metadata, stream, index
    )
    sizes = next(chunk.sizes for chunk in entry.chunks if chunk.offsets == index.offset)
    if not isinstance(tensor, torch.Tensor) or (tensor.shape, tensor.dtype) != (sizes, entry.properties.dtype):
        raise CheckpointError(
            f"{_format_index(metadata, index)} contradicts the metadata: expected shape {tuple(sizes)} and "
            f"{entry.properties.dtype}, got {_describe(tensor)}. Load another checkpoint."
        )
    if not _is_plain_strided(tensor):
        return TensorLocation(0, _torch_load(metadata, stream, index, device="cpu"))
    if start + storage_numel(tensor.shape, tensor.stride()) * tensor.itemsize > info.length:
        needed = start + storage_numel(tensor.shape, tensor.stride()) * tensor.itemsize
        raise CheckpointError(
            f"{_format_index(metadata, index)} is truncated: expected at least {needed} bytes, got {info.length}. "
            "Load another checkpoint."
        )
    return TensorLocation(info.offset + start, tensor)


def has_contiguous_chunks(metadata: CheckpointMetadata, key: str) -> bool:
    """Return whether all stored chunks of a tensor are contiguous. Spans of others spread over all of their bytes."""
    entry: Any = metadata.dcp_metadata.state_dict_metadata[key]
    for chunk in entry.chunks:
        if 0 in chunk.sizes:
            continue
        index = MetadataIndex(key, chunk.offsets)
        with open_file(metadata, metadata.storage_info(index).relative_path) as stream:
            tensor = locate_tensor(metadata, stream, index).tensor
        if not tensor.is_meta or not tensor.is_contiguous():
            return False
    return True


def _locate_with_torch(metadata: CheckpointMetadata, stream: BinaryIO, index: MetadataIndex) -> tuple[int, Any]:
    """Load a value on the meta device; return the offset of its memory (0 unless a plain tensor) and the value."""
    value = _torch_load(metadata, stream, index, device="meta")
    if not isinstance(value, torch.Tensor) or not _is_plain_strided(value):
        return 0, value
    return storage_offset_in_file(value) + int(value.storage_offset()) * value.itemsize, value


def iter_chunks(
    stream: BinaryIO, byte_offset: int, like: torch.Tensor
) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """Read a tensor that begins at `byte_offset` in chunks: yield the offsets and the values of each.

    Shape, strides and dtype are those of `like`. All chunks share one buffer: use each before advancing.
    """
    numel, max_numel = storage_numel(like.shape, like.stride()), max(1, READ_CHUNK_BYTES // like.itemsize)
    # A buffer and not mmap: in a file, elements may lie at misaligned addresses.
    buffer = bytearray(min(numel, max_numel) * like.itemsize)
    for first in range(0, numel, max_numel):
        span = Span(first, min(numel, first + max_numel))
        data = memoryview(buffer)[: span.length * like.itemsize]
        read_into(stream, byte_offset + first * like.itemsize, data)
        memory = torch.frombuffer(data, dtype=torch.uint8).view(like.dtype)
        for chunk in split_into_chunks(like.shape, like.stride(), span):
            start = sum(offset * stride for offset, stride in zip(chunk.offsets, like.stride(), strict=True))
            yield chunk.offsets, memory.as_strided(chunk.sizes, like.stride(), start - first)


def read_into(stream: BinaryIO, byte_offset: int, buffer: memoryview) -> None:
    """Fill `buffer` from the file. Raises `OSError` if the file ends before."""
    stream.seek(byte_offset)
    done = 0
    while done < len(buffer):
        count = stream.readinto(buffer[done:])  # type: ignore[attr-defined]
        if not count:
            raise OSError(f"truncated: expected {len(buffer)} bytes at offset {byte_offset}, got {done}")
        done += count


def _torch_load(metadata: CheckpointMetadata, stream: BinaryIO, index: MetadataIndex, device: str) -> Any:
    """Load a value with `torch.load`, without executing code. Raises `CheckpointError` if that fails."""
    info = metadata.storage_info(index)
    try:
        open_torch_archive(_entry_stream(stream, info))
        return torch.load(_entry_stream(stream, info), map_location=device, weights_only=True)
    except pickle.UnpicklingError as error:
        if DISALLOWED_TYPE_MARKER not in torch_reason(error):
            raise CheckpointError(f"{_format_index(metadata, index)} cannot be read: {torch_reason(error)}") from error
        raise CheckpointError(
            f"'{index.fqn}' has a type that could run code when it is read, and is not allowed: {torch_reason(error)} "
            "If you trust the file, allow the type with torch.serialization.add_safe_globals."
        ) from error
    except Exception as error:
        raise CheckpointError(f"{_format_index(metadata, index)} cannot be read: {torch_reason(error)}") from error


def _entry_stream(stream: BinaryIO, storage_info: Any) -> Any:
    """Return a stream of one value's bytes. Small values are read into memory, since torch seeks a lot."""
    if storage_info.length > _SMALL_ENTRY_BYTES:
        return make_file_view(stream, storage_info.offset, storage_info.length)
    content = bytearray(storage_info.length)
    read_into(stream, storage_info.offset, memoryview(content))
    return io.BytesIO(content)


def _item_nbytes(item: ReadItem, location: TensorLocation) -> int:
    return item.lengths.numel() * location.tensor.itemsize


def _describe(value: Any) -> str:
    return f"shape {tuple(value.shape)} and {value.dtype}" if isinstance(value, torch.Tensor) else type(value).__name__


def _format_index(metadata: CheckpointMetadata, index: MetadataIndex) -> str:
    return f"'{index.fqn}' in {metadata.directory / metadata.storage_info(index).relative_path}"


def _narrow(tensor: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        if size != tensor.size(dim):
            tensor = tensor.narrow(dim, offset, size)
    return tensor


def _has_same_memory_layout(source: torch.Tensor, target: torch.Tensor) -> bool:
    """Return whether the bytes of `source` can be copied to `target` as one contiguous block."""
    if not _is_plain_strided(target) or target.device.type != "cpu" or target.dtype != source.dtype:
        return False
    strides = [(a, b) for size, a, b in zip(source.shape, source.stride(), target.stride(), strict=True) if size > 1]
    return all(a == b for a, b in strides) and storage_numel(source.shape, source.stride()) == source.numel()


def _writable_memory(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a dense CPU tensor of any dtype."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _is_plain_strided(tensor: torch.Tensor) -> bool:
    """Return whether each element of the tensor is stored as it is, at an address of its own."""
    if type(tensor) is not torch.Tensor or tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
        return False
    return not has_internal_overlap(tensor.shape, tensor.stride())
