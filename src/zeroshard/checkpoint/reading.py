"""Values straight from the files of a checkpoint to where they belong, with a few MiB of memory in between.

First everything is looked up: that it is there, in the form that the metadata promise. Only then are tensors read, and
nothing can go wrong any more but the disk. Each rank reads for itself; nothing here is collective.
"""

import ctypes
import io
import pickle
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.checkpoint.utils import _create_file_view

from ..errors import CheckpointError
from ..layout.boxes import boxes, extent, overlaps
from ..state.codec import open_records
from ..units import Span
from .archive import Archive, why
from .outline import outline
from .progress import Progress

PIECE = 4 * 2**20
"""Bytes that are read at once, unless they can go straight to where they belong."""
_SMALL = 1 << 16
_STRANGER = "GLOBAL"
"""In what torch says of types that it does not read."""


class Located(NamedTuple):
    """A stored part of a tensor."""

    start: int
    """The byte of the file where its memory begins."""
    like: torch.Tensor
    """As it lies there, on the meta device. What cannot be read in pieces is here with its values."""


class Reading:
    """What a rank is going to read: tensors into given ones, and whatever values there are for None."""

    def __init__(self, archive: Archive, targets: Mapping[str, Any]) -> None:
        """`targets` by keys of the archive. Raises if one could not be read."""
        self._archive = archive
        self._planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._planner.set_up_planner(dict(targets), archive.metadata)
        self._values = dict(targets)
        self._tensors: dict[str, list[tuple[ReadItem, Located]]] = {}
        """By file."""
        by_file: dict[str, list[ReadItem]] = defaultdict(list)
        for item in self._planner.create_local_plan().items:
            by_file[archive.place_of(item.storage_index).relative_path].append(item)
        for name, items in by_file.items():
            with open_file(archive, name) as stream:
                self._tensors[name] = self._looked_up(stream, items)

    @property
    def found(self) -> dict[str, Any]:
        """The targets, not filled yet, and the other values."""
        return self._values

    def run(self, progress: Progress | None = None) -> dict[str, Any]:
        """The targets, filled, and the other values."""
        counted = progress or Progress("", False, 0)
        counted.expect(sum(_nbytes(*it) for found in self._tensors.values() for it in found))
        for name, found in self._tensors.items():
            with open_file(self._archive, name) as stream:
                for item, place in found:
                    self._read(stream, item, place)
                    counted.add(_nbytes(item, place))
        return self._values

    def _looked_up(self, stream: BinaryIO, items: Sequence[ReadItem]) -> list[tuple[ReadItem, Located]]:
        known: dict[MetadataIndex, Located] = {}
        found = []
        for item in items:
            index = item.storage_index
            if item.type == LoadItemType.BYTE_IO:
                self._values[index.fqn] = _loaded(self._archive, stream, index, device="cpu")
                continue
            if index not in known:
                known[index] = locate(self._archive, stream, index)
            found.append((item, known[index]))
        return found

    @torch.no_grad()
    def _read(self, stream: BinaryIO, item: ReadItem, place: Located) -> None:
        target = self._planner.resolve_tensor(item).detach()
        source = _part(place.like, item.storage_offsets, item.lengths)
        if not source.is_meta:
            target.copy_(source)
            return
        start = place.start + int(source.storage_offset() - place.like.storage_offset()) * source.itemsize
        if _lie_alike(source, target):
            fill(stream, start, _memory(target))
            return
        for offsets, tensor in pieces(stream, start, source):
            _part(target, offsets, tensor.shape).copy_(tensor)


def read(archive: Archive, targets: Mapping[str, Any]) -> dict[str, Any]:
    return Reading(archive, targets).run()


@contextmanager
def open_file(archive: Archive, name: str) -> Iterator[BinaryIO]:
    """A file of the archive. Whatever cannot be read there is an error that names it."""
    try:
        with (archive.directory / name).open("rb", buffering=0) as stream:
            yield stream
    except OSError as error:
        raise CheckpointError(f"{archive.directory / name} cannot be read: {error}") from error


def locate(archive: Archive, stream: BinaryIO, index: MetadataIndex) -> Located:
    """Where a part of a tensor lies in its file."""
    entry: Any = archive.metadata.state_dict_metadata[index.fqn]
    place = archive.place_of(index)
    start, found = outline(_view(stream, place), entry.properties.dtype) or _asked(archive, stream, index)
    sizes = next(chunk.sizes for chunk in entry.chunks if chunk.offsets == index.offset)
    if not isinstance(found, torch.Tensor) or (found.shape, found.dtype) != (sizes, entry.properties.dtype):
        raise CheckpointError(f"{_told(archive, index)} is not what the checkpoint's metadata say of it")
    if not _is_plain(found):
        return Located(0, _loaded(archive, stream, index, device="cpu"))
    if start + extent(found.shape, found.stride()) * found.itemsize > place.length:
        raise CheckpointError(f"{_told(archive, index)} goes beyond its place in the file")
    return Located(place.offset + start, found)


def _asked(archive: Archive, stream: BinaryIO, index: MetadataIndex) -> tuple[int, Any]:
    """What torch says of a value, and where in it the memory begins if it is a plain tensor."""
    found = _loaded(archive, stream, index, device="meta")
    if not isinstance(found, torch.Tensor) or not _is_plain(found):
        return 0, found
    start: Any = found.untyped_storage()._checkpoint_offset
    return start + int(found.storage_offset()) * found.itemsize, found


def pieces(stream: BinaryIO, start: int, like: torch.Tensor) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """A tensor whose memory begins at `start` in a file: boxes of its elements, by their offsets.

    Each is to be used up before the next is taken.
    """
    count, most = extent(like.shape, like.stride()), max(1, PIECE // like.itemsize)
    # Memory of its own and not a map of the file: there elements may lie at odd addresses.
    buffer = bytearray(min(count, most) * like.itemsize)
    for first in range(0, count, most):
        span = Span(first, min(count, first + most))
        piece = memoryview(buffer)[: span.length * like.itemsize]
        fill(stream, start + first * like.itemsize, piece)
        memory = torch.frombuffer(piece, dtype=torch.uint8).view(like.dtype)
        for box in boxes(like.shape, like.stride(), span):
            place = sum(offset * step for offset, step in zip(box.offsets, like.stride(), strict=True))
            yield box.offsets, memory.as_strided(box.sizes, like.stride(), place - first)


def fill(stream: BinaryIO, start: int, memory: memoryview) -> None:
    stream.seek(start)
    done = 0
    while done < len(memory):
        count = stream.readinto(memory[done:])  # type: ignore[attr-defined]
        if not count:
            raise OSError("it is truncated. Use another checkpoint.")
        done += count


def _loaded(archive: Archive, stream: BinaryIO, index: MetadataIndex, device: str) -> Any:
    """What torch reads, without running code. On the meta device: without values."""
    place = archive.place_of(index)
    try:
        open_records(_view(stream, place))
        return torch.load(_view(stream, place), map_location=device, weights_only=True)
    except pickle.UnpicklingError as error:
        if _STRANGER not in why(error):
            raise CheckpointError(f"{_told(archive, index)} cannot be read: {why(error)}") from error
        raise CheckpointError(
            f"'{index.fqn}' holds a type that is not read from files, since reading it could run code ({why(error)}) "
            "Allow it with torch.serialization.add_safe_globals if you trust the file."
        ) from error
    except Exception as error:
        raise CheckpointError(f"{_told(archive, index)} cannot be read: {why(error)}") from error


def _view(stream: BinaryIO, place: Any) -> Any:
    """A part of a file. Torch looks at it here and there, for which a small one is better in memory."""
    if place.length > _SMALL:
        return _create_file_view(stream, place.offset, place.length)  # type: ignore[arg-type]
    content = bytearray(place.length)
    fill(stream, place.offset, memoryview(content))
    return io.BytesIO(content)


def _nbytes(item: ReadItem, place: Located) -> int:
    return item.lengths.numel() * place.like.itemsize


def _told(archive: Archive, index: MetadataIndex) -> str:
    return f"'{index.fqn}' in {archive.directory / archive.place_of(index).relative_path}"


def _part(tensor: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        if size != tensor.size(dim):
            tensor = tensor.narrow(dim, offset, size)
    return tensor


def _lie_alike(source: torch.Tensor, target: torch.Tensor) -> bool:
    """Whether bytes of one, in the order in which they lie, are those of the other, without gaps."""
    if not _is_plain(target) or target.device.type != "cpu" or target.dtype != source.dtype:
        return False
    steps = [(a, b) for size, a, b in zip(source.shape, source.stride(), target.stride(), strict=True) if size > 1]
    return all(a == b for a, b in steps) and extent(source.shape, source.stride()) == source.numel()


def _memory(tensor: torch.Tensor) -> memoryview:
    """Of a tensor without gaps, to write to. Without numpy, which torch can do without."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether its values are what lies in its memory, each at a place of its own."""
    if type(tensor) is not torch.Tensor or tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
        return False
    return not overlaps(tensor.shape, tensor.stride())
