"""Tensors where they are stored, read a few MiB at a time."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata

from ..checkpoint.metadata import CheckpointMetadata
from ..checkpoint.reader import iter_chunks, locate_tensor, open_file
from ..errors import CheckpointError

MAX_CHUNK_BYTES = 16 * 2**20
"""Of a tensor, in memory at one time."""


class TensorChunk(NamedTuple):
    """A box of a tensor's elements."""

    offsets: tuple[int, ...]
    tensor: torch.Tensor


@dataclass(frozen=True)
class StoredTensor(ABC):
    """A tensor somewhere, of known shape."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @abstractmethod
    def iter_chunks(self) -> Iterator[TensorChunk]:
        """All elements, each part to be used up before the next is taken."""


@dataclass(frozen=True)
class InMemoryTensor(StoredTensor):
    """In memory, or in a file that is mapped there."""

    tensor: torch.Tensor

    def iter_chunks(self) -> Iterator[TensorChunk]:
        return _split_into_chunks((0,) * len(self.shape), self.tensor)


def wrap_tensor(tensor: torch.Tensor) -> InMemoryTensor:
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise CheckpointError(f"a tensor of layout {tensor.layout} and dtype {tensor.dtype} cannot be converted")
    plain = tensor.detach().resolve_conj().resolve_neg()
    return InMemoryTensor(tuple(plain.shape), plain.dtype, plain)


def _split_into_chunks(offsets: tuple[int, ...], tensor: torch.Tensor) -> Iterator[TensorChunk]:
    """In halves until they are small, along the dimension that keeps each half together in memory."""
    if tensor.nbytes <= MAX_CHUNK_BYTES:
        yield TensorChunk(offsets, tensor)
        return
    dim = max(range(tensor.dim()), key=lambda it: (tensor.shape[it] > 1, tensor.stride(it)))
    first, second = tensor.tensor_split(2, dim)
    yield from _split_into_chunks(offsets, first)
    yield from _split_into_chunks(
        _add_offsets(offsets, [first.size(dim) if it == dim else 0 for it in range(tensor.dim())]), second
    )


@dataclass(frozen=True)
class CheckpointTensor(StoredTensor):
    """In the files of a checkpoint, in one chunk or many."""

    metadata: CheckpointMetadata
    key: str
    chunks: Sequence[ChunkStorageMetadata]

    def iter_chunks(self) -> Iterator[TensorChunk]:
        for chunk in self.chunks:
            if chunk.sizes.numel():
                yield from self._iter_stored_chunk(chunk)

    def _iter_stored_chunk(self, chunk: ChunkStorageMetadata) -> Iterator[TensorChunk]:
        index = MetadataIndex(self.key, chunk.offsets)
        with open_file(self.metadata, self.metadata.storage_info(index).relative_path) as stream:
            start, like = locate_tensor(self.metadata, stream, index)
            boxes = (
                iter_chunks(stream, start, like)
                if like.is_meta
                else _split_into_chunks((0,) * like.dim(), wrap_tensor(like).tensor)
            )
            for offsets, tensor in boxes:
                yield TensorChunk(_add_offsets(chunk.offsets, offsets), tensor)


def make_checkpoint_tensor(metadata: CheckpointMetadata, key: str, tensor: TensorStorageMetadata) -> CheckpointTensor:
    return CheckpointTensor(tuple(tensor.size), tensor.properties.dtype, metadata, key, tensor.chunks)


def _add_offsets(offsets: Sequence[int], delta: Sequence[int]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip(offsets, delta, strict=True))
