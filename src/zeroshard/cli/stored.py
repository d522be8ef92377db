"""Tensors where they are stored, read a few MiB at a time."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.utils import _create_file_view

from ..checkpoint.archive import Archive
from ..errors import CheckpointError
from ..layout.boxes import boxes
from ..units import Span

MOST_BYTES = 16 * 2**20
"""Of a tensor, in memory at one time."""


class Part(NamedTuple):
    """A box of a tensor's elements."""

    offsets: tuple[int, ...]
    tensor: torch.Tensor


@dataclass(frozen=True)
class Stored(ABC):
    """A tensor somewhere, of known shape."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @abstractmethod
    def parts(self) -> Iterator[Part]:
        """All elements, each part to be used up before the next is taken."""


@dataclass(frozen=True)
class Held(Stored):
    """In memory, or in a file that is mapped there."""

    tensor: torch.Tensor

    def parts(self) -> Iterator[Part]:
        return _divided((0,) * len(self.shape), self.tensor)


def held(tensor: torch.Tensor) -> Held:
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise CheckpointError(f"a tensor of layout {tensor.layout} and dtype {tensor.dtype} cannot be converted")
    plain = tensor.detach().resolve_conj().resolve_neg()
    return Held(tuple(plain.shape), plain.dtype, plain)


def _divided(offsets: tuple[int, ...], tensor: torch.Tensor) -> Iterator[Part]:
    """In halves until they are small, along the dimension that keeps each half together in memory."""
    if tensor.nbytes <= MOST_BYTES:
        yield Part(offsets, tensor)
        return
    dim = max(range(tensor.dim()), key=lambda it: (tensor.shape[it] > 1, tensor.stride(it)))
    first, second = tensor.tensor_split(2, dim)
    yield from _divided(offsets, first)
    yield from _divided(_moved(offsets, [first.size(dim) if it == dim else 0 for it in range(tensor.dim())]), second)


@dataclass(frozen=True)
class InArchive(Stored):
    """In the files of a checkpoint, in one chunk or many."""

    archive: Archive
    key: str
    chunks: Sequence[ChunkStorageMetadata]

    def parts(self) -> Iterator[Part]:
        if sum(chunk.sizes.numel() for chunk in self.chunks) < prod(self.shape):
            raise CheckpointError(f"{self.archive.directory} has only some parts of '{self.key}'")
        for chunk in self.chunks:
            if chunk.sizes.numel():
                yield from self._parts_of(chunk)

    def _parts_of(self, chunk: ChunkStorageMetadata) -> Iterator[Part]:
        info = self.archive.metadata.storage_data.get(MetadataIndex(self.key, chunk.offsets))
        if info is None or info.transform_descriptors:
            why = "is not in its files" if info is None else f"was written with {info.transform_descriptors}"
            raise CheckpointError(f"{self.archive.directory}: a part of '{self.key}' {why}")
        file = self.archive.directory / info.relative_path
        with file.open("rb") as stream:
            found = self._located(stream, file, info, chunk)
            start = info.offset + found.untyped_storage()._checkpoint_offset
            start += found.storage_offset() * self.dtype.itemsize
            for box, tensor in _boxes_in(stream, file, start, found):
                yield Part(_moved(chunk.offsets, box), tensor)

    def _located(self, stream: BinaryIO, file: Path, info: Any, chunk: ChunkStorageMetadata) -> torch.Tensor:
        """The tensor as it lies in the file, without its memory."""
        view: Any = _create_file_view(stream, info.offset, info.length)  # type: ignore[arg-type]
        try:
            found = torch.load(view, map_location="meta", weights_only=True)
        except Exception as error:
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise CheckpointError(f"{file}: '{self.key}' cannot be read: {reason}") from error
        if not isinstance(found, torch.Tensor) or (found.shape, found.dtype) != (chunk.sizes, self.dtype):
            raise CheckpointError(f"{file}: '{self.key}' is not what the checkpoint's metadata say of it")
        if any(step == 0 for size, step in zip(found.shape, found.stride(), strict=True) if size > 1):
            raise CheckpointError(f"{file}: elements of '{self.key}' share their memory, which is not supported")
        return found


def in_archive(archive: Archive, key: str, tensor: TensorStorageMetadata) -> InArchive:
    return InArchive(tuple(tensor.size), tensor.properties.dtype, archive, key, tensor.chunks)


def _boxes_in(
    stream: BinaryIO, file: Path, start: int, like: torch.Tensor
) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """A tensor whose memory begins at `start` in a file: span after span of that memory, as boxes of elements."""
    extent = 1 + sum((size - 1) * step for size, step in zip(like.shape, like.stride(), strict=True))
    most = max(1, MOST_BYTES // like.dtype.itemsize)
    for first in range(0, extent, most):
        span = Span(first, min(extent, first + most))
        memory = _read(stream, file, start + first * like.dtype.itemsize, span.length, like.dtype)
        for box in boxes(like.shape, like.stride(), span):
            place = sum(offset * step for offset, step in zip(box.offsets, like.stride(), strict=True))
            yield box.offsets, memory.as_strided(box.sizes, like.stride(), place - first)


def _read(stream: BinaryIO, file: Path, start: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    # Memory of its own and not a map of the file: there elements may lie at odd addresses.
    memory = bytearray(count * dtype.itemsize)
    stream.seek(start)
    if stream.readinto(memory) != len(memory):  # type: ignore[attr-defined]
        raise CheckpointError(f"{file} is truncated. Use another checkpoint.")
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype)


def _moved(offsets: Sequence[int], by: Sequence[int]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip(offsets, by, strict=True))
