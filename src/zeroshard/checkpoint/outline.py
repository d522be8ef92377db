"""Where `torch.save` has put the memory of a plain tensor, seen without reading it.

`torch.load` on the meta device says the same in ten times the time, and is asked wherever this does not know.
"""

import re
import sys
from typing import Any, NamedTuple

import torch

from ..state.codec import open_torch_archive

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
        r"X(?P<keys>.)\0\0\0(?P<key>[0-9]+)q.X(?P<places>.)\0\0\0(?P<place>[a-z0-9:]+)q."
        rf"{_INT_PATTERN}tq.Q(?P<offset>{_INT_PATTERN})(?P<size>{_INT_TUPLE_PATTERN})(?P<stride>{_INT_TUPLE_PATTERN})"
        r"[\x88\x89]ccollections\nOrderedDict\nq.\)Rq.tq.Rq.\."
    ).encode(),
    re.DOTALL,
)
"""How torch pickles one: `_rebuild_tensor_v2` is called with storage, offset, size and stride. It is not unpickled."""
_INT_REGEX = re.compile(_INT_PATTERN.encode(), re.DOTALL)


class TensorHeader(NamedTuple):
    data_offset: int
    """The first byte of its first element."""
    meta_tensor: torch.Tensor
    """On the meta device."""


def parse_tensor_header(stream: Any, dtype: torch.dtype) -> TensorHeader | None:
    """Of a tensor of that dtype, in a file that begins where `view` does; None if it is something else."""
    try:
        reader = open_torch_archive(stream)
        if reader.get_record("byteorder").decode() != sys.byteorder:
            return None
        found = _TENSOR_REGEX.fullmatch(reader.get_record("data.pkl"))
        if found is None or found["storage"].decode() != _STORAGE_NAMES.get(dtype):
            return None
        if (found["keys"][0], found["places"][0]) != (len(found["key"]), len(found["place"])):
            return None
        (offset,), size, stride = (_parse_ints(found[part]) for part in ("offset", "size", "stride"))
        if offset < 0:
            return None
        start = reader.get_record_offset(f"data/{found['key'].decode()}") + offset * dtype.itemsize
        return TensorHeader(start, torch.empty_strided(size, stride, dtype=dtype, device="meta"))
    except Exception:
        return None  # torch says better what is wrong with it


def _parse_ints(data: bytes) -> list[int]:
    return [_parse_int(it) for it in _INT_REGEX.findall(data.removeprefix(b"("))]


def _parse_int(data: bytes) -> int:
    """As pickle writes it: those of one and two bytes have no sign."""
    kind, digits = data[:1], data[2:] if data[:1] == b"\x8a" else data[1:]
    return int.from_bytes(digits, "little", signed=kind not in b"KM")
