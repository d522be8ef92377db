"""Where `torch.save` has put the memory of a plain tensor, seen without reading it.

`torch.load` on the meta device says the same in ten times the time, and is asked wherever this does not know.
"""

import io
import pickle
import sys
from collections import OrderedDict
from typing import Any, NamedTuple

import torch

from .sealed import sealed

_STORAGES = {
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


class Outline(NamedTuple):
    start: int
    """The first byte of its first element."""
    like: torch.Tensor
    """On the meta device."""


def outline(view: Any, dtype: torch.dtype) -> Outline | None:
    """Of a tensor of that dtype, in a file that begins where `view` does; None if it is something else."""
    try:
        reader: Any = torch._C.PyTorchFileReader(view)
        if reader.get_record("byteorder").decode() != sys.byteorder:
            return None
        found = _Unpickler(io.BytesIO(reader.get_record("data.pkl"))).load()
        _, storage, key, _, _ = found.storage
        if storage != _STORAGES.get(dtype) or found.turned or found.offset < 0:
            return None
        start = reader.get_record_offset(f"data/{key}") + found.offset * dtype.itemsize
        return Outline(start, torch.empty_strided(found.size, found.stride, dtype=dtype, device="meta"))
    except Exception:
        return None  # torch says better what is wrong with it


class _Saved(NamedTuple):
    """The arguments by which torch makes a tensor again."""

    storage: tuple[str, str, str, str, int]
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool
    hooks: Any
    turned: Any = None
    """Whether it is conjugate or negative to what lies in its memory."""


_MADE = {("torch._utils", "_rebuild_tensor_v2"): sealed(_Saved), ("collections", "OrderedDict"): sealed(OrderedDict)}


class _Unpickler(pickle.Unpickler):
    """Makes nothing but such a description."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _MADE:
            return _MADE[module, name]
        if module == "torch" and name in _STORAGES.values():
            return name
        raise pickle.UnpicklingError(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        return pid
