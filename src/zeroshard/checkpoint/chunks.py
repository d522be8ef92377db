"""What a checkpoint's metadata say of a tensor: every element of it is in exactly one chunk.

Where none is torch reads nothing, and says nothing.
"""

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata

from ..errors import CheckpointError
from .showing import shown

_MOST_DIMS = 64
"""That a tensor may have."""


def check_chunks(key: str, tensor: TensorStorageMetadata) -> None:
    dtype: Any = tensor.properties.dtype
    if not _is_size(tensor.size) or not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"'{key}' is of size {shown(tensor.size)} and dtype {shown(dtype)}")
    for chunk in tensor.chunks:
        if not _is_inside(chunk, tensor.size):
            raise CheckpointError(
                f"'{key}' has the size {tuple(tensor.size)}, but a part that goes beyond: {_told(chunk)}"
            )
    # Not numel(), which overflows.
    there, all_of_it = sum(prod(chunk.sizes) for chunk in tensor.chunks), prod(tensor.size)
    if there != all_of_it:
        raise CheckpointError(f"'{key}' has {all_of_it} elements, but parts with {there} of them")
    if len(tensor.chunks) > 1 and _overlap(_boxes(tensor.chunks)):
        raise CheckpointError(f"'{key}' has parts that overlap")


def _is_size(value: Any) -> bool:
    return isinstance(value, torch.Size) and len(value) <= _MOST_DIMS and min(value, default=0) >= 0


def _is_inside(chunk: Any, size: Sequence[int]) -> bool:
    if not isinstance(chunk, ChunkStorageMetadata) or not (_is_size(chunk.offsets) and _is_size(chunk.sizes)):
        return False
    if not len(chunk.offsets) == len(chunk.sizes) == len(size):
        return False
    return all(map(lambda first, count, most: first + count <= most, chunk.offsets, chunk.sizes, size))


def _told(chunk: Any) -> str:
    return f"{shown(getattr(chunk, 'sizes', None))} from {shown(getattr(chunk, 'offsets', None))} on"


class _Box(NamedTuple):
    first: tuple[int, ...]
    end: tuple[int, ...]


def _boxes(chunks: Iterable[ChunkStorageMetadata]) -> list[_Box]:
    ends = ((it, tuple(a + b for a, b in zip(it.offsets, it.sizes, strict=True))) for it in chunks if prod(it.sizes))
    return [_Box(tuple(it.offsets), end) for it, end in ends]


def _overlap(boxes: Sequence[_Box]) -> bool:
    """Goes along the dimension that is cut most often, so that each box is compared with few others."""
    dims = range(len(boxes[0].first)) if boxes else ()
    dim = max(dims, key=lambda it: len({box.first[it] for box in boxes}), default=0)
    near: list[_Box] = []
    for box in sorted(boxes, key=lambda it: it.first[dim : dim + 1]):
        near = [other for other in near if other.end[dim] > box.first[dim]]
        if any(_meet(box, other) for other in near):
            return True
        near.append(box)
    return False


def _meet(a: _Box, b: _Box) -> bool:
    return all(map(lambda first, end, start, stop: first < stop and start < end, *a, *b))
