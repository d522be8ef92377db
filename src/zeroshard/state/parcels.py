"""Nested values with thousands of tensors as a few long ones: copied to host memory, and sent, in a few pieces."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from ..units import MIB
from .codec import pack, pack_plain, unpack
from .readers import types_in
from .trees import dense_memory, snapshot
from .wrapped import is_wrapped

Packed = dict[str, Any]
_PLACE = "zeroshard.place"
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype)
_BATCH = 32 * MIB
"""What is put together on a device at once."""


def packed(value: Any) -> Packed:
    """A copy in host memory that nothing changes later: an outline of it, as bytes, with places in `flats`.

    Raises if it could not be read back without running code.
    """
    packing = _Packing()
    outline = packing.walked(value)
    data = pack(outline) if packing.is_odd else pack_plain(outline)
    flats = [_gathered(parts) for parts in packing.parts.values()]
    types = types_in(data) if packing.is_odd else []
    return {"outline": torch.frombuffer(bytearray(data), dtype=torch.uint8), "flats": flats, "types": types}


def unpacked(found: Packed) -> Any:
    """The value, whose tensors are views of those in `flats`."""
    flats = found["flats"]

    def view(place: tuple[Any, ...]) -> torch.Tensor:
        _, kind, start, shape, stride = place
        tensor: torch.Tensor = flats[kind].as_strided(shape, stride, flats[kind].storage_offset() + start)
        return tensor

    return _found(unpack(bytes(found["outline"].tolist())), view)


class _Packing:
    def __init__(self) -> None:
        self.parts: dict[torch.dtype, list[torch.Tensor]] = {}
        self.is_odd = False
        """There is more in it than plain containers, numbers and tensors."""
        self._ends: dict[torch.dtype, int] = defaultdict(int)
        self._kinds: dict[torch.dtype, int] = {}

    def walked(self, value: Any) -> Any:
        kind = type(value)
        if isinstance(value, torch.Tensor):
            return self._place(value)
        if kind is dict:
            return {key: self.walked(item) for key, item in value.items()}
        if kind is list or kind is tuple:
            return kind([self.walked(item) for item in value])
        return value if kind in _PLAIN else self._odd(value)

    def _place(self, tensor: torch.Tensor) -> Any:
        memory = _memory(tensor)
        if memory is None:
            return self._odd(tensor)
        dtype = tensor.dtype
        number = self._kinds.setdefault(dtype, len(self._kinds))
        self.parts.setdefault(dtype, []).append(memory)
        start = self._ends[dtype]
        self._ends[dtype] += memory.numel()
        return (_PLACE, number, start, tuple(tensor.shape), tensor.stride())

    def _odd(self, value: Any) -> Any:
        self.is_odd = True
        return snapshot(value)


def _memory(tensor: torch.Tensor) -> torch.Tensor | None:
    """The flat memory of a plain tensor; None for others, and for what has gaps."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    if not plain or is_wrapped(tensor) or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return None
    return dense_memory(tensor) if tensor.numel() else None


def _found(value: Any, view: Callable[[tuple[Any, ...]], torch.Tensor]) -> Any:
    kind = type(value)
    if kind is dict:
        return {key: _found(item, view) for key, item in value.items()}
    if kind is tuple and value and type(value[0]) is str and value[0] == _PLACE:
        return view(value)
    return kind([_found(item, view) for item in value]) if kind in (list, tuple) else value


def _gathered(parts: list[torch.Tensor]) -> torch.Tensor:
    flat = torch.empty(sum(part.numel() for part in parts), dtype=parts[0].dtype, device="cpu")
    start, room, batch = 0, _BATCH, list[torch.Tensor]()
    for part in parts:
        if batch and (part.device != batch[0].device or part.nbytes > room):
            start, room = _put(batch, flat, start), _BATCH
        batch.append(part)
        room -= part.nbytes
    _put(batch, flat, start)
    return flat


def _put(batch: list[torch.Tensor], flat: torch.Tensor, start: int) -> int:
    """Copies, and empties the batch; where the next begins."""
    target = flat[start : start + sum(part.numel() for part in batch)]
    if batch[0].device.type == "cpu":
        torch.cat(batch, out=target)
    else:
        target.copy_(batch[0] if len(batch) == 1 else torch.cat(batch))
    batch.clear()
    return start + target.numel()
