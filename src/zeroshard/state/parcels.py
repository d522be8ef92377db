"""Nested values with thousands of tensors as a few long ones: copied to host memory, and sent, in a few pieces."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from .._types import MIB
from .codec import dumps, dumps_unchecked, loads
from .readers import find_custom_types
from .trees import dense_flat_view, snapshot_to_host
from .tensor_utils import is_wrapper_subclass

PackedValue = dict[str, Any]
_TENSOR_TAG = "zeroshard.place"
_PLAIN_TYPES = (bool, int, float, complex, str, bytes, type(None), torch.dtype)
_COPY_BATCH_BYTES = 32 * MIB
"""What is put together on a device at once."""


def pack_into_buffers(value: Any) -> PackedValue:
    """A copy in host memory that nothing changes later: an outline of it, as bytes, with places in `flats`.

    Raises if it could not be read back without running code.
    """
    packing = _BufferPacker()
    outline = packing.pack(value)
    data = dumps(outline) if packing.has_non_plain_values else dumps_unchecked(outline)
    flats = [_concat_on_host(parts) for parts in packing.tensors_by_dtype.values()]
    types = find_custom_types(data) if packing.has_non_plain_values else []
    return {"outline": torch.frombuffer(bytearray(data), dtype=torch.uint8), "flats": flats, "types": types}


def unpack_from_buffers(packed: PackedValue) -> Any:
    """The value, whose tensors are views of those in `flats`."""
    flats = packed["flats"]

    def view(tensor_ref: tuple[Any, ...]) -> torch.Tensor:
        _, kind, start, shape, stride = tensor_ref
        tensor: torch.Tensor = flats[kind].as_strided(shape, stride, flats[kind].storage_offset() + start)
        return tensor

    return _restore_tensors(loads(bytes(packed["outline"].tolist())), view)


class _BufferPacker:
    def __init__(self) -> None:
        self.tensors_by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        self.has_non_plain_values = False
        """There is more in it than plain containers, numbers and tensors."""
        self._numel_by_dtype: dict[torch.dtype, int] = defaultdict(int)
        self._buffer_index: dict[torch.dtype, int] = {}

    def pack(self, value: Any) -> Any:
        kind = type(value)
        if isinstance(value, torch.Tensor):
            return self._pack_tensor(value)
        if kind is dict:
            return {key: self.pack(item) for key, item in value.items()}
        if kind is list or kind is tuple:
            return kind([self.pack(item) for item in value])
        return value if kind in _PLAIN_TYPES else self._pack_non_plain(value)

    def _pack_tensor(self, tensor: torch.Tensor) -> Any:
        memory = _plain_flat_view(tensor)
        if memory is None:
            return self._pack_non_plain(tensor)
        dtype = tensor.dtype
        number = self._buffer_index.setdefault(dtype, len(self._buffer_index))
        self.tensors_by_dtype.setdefault(dtype, []).append(memory)
        start = self._numel_by_dtype[dtype]
        self._numel_by_dtype[dtype] += memory.numel()
        return (_TENSOR_TAG, number, start, tuple(tensor.shape), tensor.stride())

    def _pack_non_plain(self, value: Any) -> Any:
        self.has_non_plain_values = True
        return snapshot_to_host(value)


def _plain_flat_view(tensor: torch.Tensor) -> torch.Tensor | None:
    """The flat memory of a plain tensor; None for others, and for what has gaps."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    if not plain or is_wrapper_subclass(tensor) or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return None
    return dense_flat_view(tensor) if tensor.numel() else None


def _restore_tensors(value: Any, view: Callable[[tuple[Any, ...]], torch.Tensor]) -> Any:
    kind = type(value)
    if kind is dict:
        return {key: _restore_tensors(item, view) for key, item in value.items()}
    if kind is tuple and value and type(value[0]) is str and value[0] == _TENSOR_TAG:
        return view(value)
    return kind([_restore_tensors(item, view) for item in value]) if kind in (list, tuple) else value


def _concat_on_host(tensors: list[torch.Tensor]) -> torch.Tensor:
    flat = torch.empty(sum(part.numel() for part in tensors), dtype=tensors[0].dtype, device="cpu")
    start, room, batch = 0, _COPY_BATCH_BYTES, list[torch.Tensor]()
    for part in tensors:
        if batch and (part.device != batch[0].device or part.nbytes > room):
            start, room = _copy_batch(batch, flat, start), _COPY_BATCH_BYTES
        batch.append(part)
        room -= part.nbytes
    _copy_batch(batch, flat, start)
    return flat


def _copy_batch(batch: list[torch.Tensor], buffer: torch.Tensor, start: int) -> int:
    """Copies, and empties the batch; where the next begins."""
    target = buffer[start : start + sum(part.numel() for part in batch)]
    if batch[0].device.type == "cpu":
        torch.cat(batch, out=target)
    else:
        target.copy_(batch[0] if len(batch) == 1 else torch.cat(batch))
    batch.clear()
    return start + target.numel()
