"""Tensors where they are stored, read a few MiB at a time."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata

from ..checkpoint.archive import Archive
from ..checkpoint.reading import locate, open_file, pieces
from ..errors import CheckpointError

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
        for chunk in self.chunks:
            if chunk.sizes.numel():
                yield from self._parts_of(chunk)

    def _parts_of(self, chunk: ChunkStorageMetadata) -> Iterator[Part]:
        index = MetadataIndex(self.key, chunk.offsets)
        with open_file(self.archive, self.archive.place_of(index).relative_path) as stream:
            start, like = locate(self.archive, stream, index)
            boxes = pieces(stream, start, like) if like.is_meta else _divided((0,) * like.dim(), held(like).tensor)
            for offsets, tensor in boxes:
                yield Part(_moved(chunk.offsets, offsets), tensor)


def in_archive(archive: Archive, key: str, tensor: TensorStorageMetadata) -> InArchive:
    return InArchive(tuple(tensor.size), tensor.properties.dtype, archive, key, tensor.chunks)


def _moved(offsets: Sequence[int], by: Sequence[int]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip(offsets, by, strict=True))
