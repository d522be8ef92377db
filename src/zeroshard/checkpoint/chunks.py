"""What a checkpoint's metadata say of a tensor: every element of it is in exactly one chunk.

Where none is torch reads nothing, and says nothing.
"""

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata

from ..errors import CheckpointError
from .showing import safe_repr

_MAX_DIMS = 64
"""That a tensor may have."""


def check_chunks(key: str, tensor: TensorStorageMetadata) -> None:
    dtype: Any = tensor.properties.dtype
    if not _is_valid_size(tensor.size) or not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"'{key}' is of size {safe_repr(tensor.size)} and dtype {safe_repr(dtype)}")
    for chunk in tensor.chunks:
        if not _is_chunk_inside(chunk, tensor.size):
            raise CheckpointError(
                f"'{key}' has the size {tuple(tensor.size)}, but a part that goes beyond: {_format_chunk(chunk)}"
            )
    # Not numel(), which overflows.
    there, all_of_it = sum(prod(chunk.sizes) for chunk in tensor.chunks), prod(tensor.size)
    if there != all_of_it:
        raise CheckpointError(f"'{key}' has {all_of_it} elements, but parts with {there} of them")
    if len(tensor.chunks) > 1 and _has_overlap(_chunk_bounds(tensor.chunks)):
        raise CheckpointError(f"'{key}' has parts that overlap")


def _is_valid_size(value: Any) -> bool:
    return isinstance(value, torch.Size) and len(value) <= _MAX_DIMS and min(value, default=0) >= 0


def _is_chunk_inside(chunk: Any, size: Sequence[int]) -> bool:
    if not isinstance(chunk, ChunkStorageMetadata) or not (
        _is_valid_size(chunk.offsets) and _is_valid_size(chunk.sizes)
    ):
        return False
    if not len(chunk.offsets) == len(chunk.sizes) == len(size):
        return False
    return all(map(lambda first, count, most: first + count <= most, chunk.offsets, chunk.sizes, size))


def _format_chunk(chunk: Any) -> str:
    return f"{safe_repr(getattr(chunk, 'sizes', None))} from {safe_repr(getattr(chunk, 'offsets', None))} on"


class _ChunkBounds(NamedTuple):
    start: tuple[int, ...]
    stop: tuple[int, ...]


def _chunk_bounds(chunks: Iterable[ChunkStorageMetadata]) -> list[_ChunkBounds]:
    ends = ((it, tuple(a + b for a, b in zip(it.offsets, it.sizes, strict=True))) for it in chunks if prod(it.sizes))
    return [_ChunkBounds(tuple(it.offsets), end) for it, end in ends]


def _has_overlap(chunk_bounds: Sequence[_ChunkBounds]) -> bool:
    """Goes along the dimension that is cut most often, so that each box is compared with few others."""
    dims = range(len(chunk_bounds[0].start)) if chunk_bounds else ()
    dim = max(dims, key=lambda it: len({box.start[it] for box in chunk_bounds}), default=0)
    near: list[_ChunkBounds] = []
    for box in sorted(chunk_bounds, key=lambda it: it.start[dim : dim + 1]):
        near = [other for other in near if other.stop[dim] > box.start[dim]]
        if any(_intersects(box, other) for other in near):
            return True
        near.append(box)
    return False


def _intersects(a: _ChunkBounds, b: _ChunkBounds) -> bool:
    return all(map(lambda first, end, start, stop: first < stop and start < end, *a, *b))
