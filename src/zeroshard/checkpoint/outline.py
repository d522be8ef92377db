"""Where `torch.save` has put the memory of a plain tensor, seen without reading it.

`torch.load` on the meta device says the same in ten times the time, and is asked wherever this does not know.
"""

import re
import sys
from typing import Any, NamedTuple

import torch

from ..state.codec import open_records

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


_LONGS = "|".join(rf"\x8a\x{size:02x}.{{{size}}}" for size in range(1, 9))
_INT = rf"(?:K.|M..|J.{{4}}|{_LONGS})"
_INTS = rf"(?:\)|{_INT}\x85q.|{_INT}{{2}}\x86q.|{_INT}{{3}}\x87q.|\({_INT}{{4,64}}tq.)"
_TENSOR = re.compile(
    (
        r"\x80\x02ctorch\._utils\n_rebuild_tensor_v2\nq.\(\("
        r"X\x07\0\0\0storageq.ctorch\n(?P<storage>\w+)\nq."
        r"X(?P<keys>.)\0\0\0(?P<key>[0-9]+)q.X(?P<places>.)\0\0\0(?P<place>[a-z0-9:]+)q."
        rf"{_INT}tq.Q(?P<offset>{_INT})(?P<size>{_INTS})(?P<stride>{_INTS})"
        r"[\x88\x89]ccollections\nOrderedDict\nq.\)Rq.tq.Rq.\."
    ).encode(),
    re.DOTALL,
)
"""How torch pickles one: `_rebuild_tensor_v2` is called with storage, offset, size and stride. It is not unpickled."""
_NUMBER = re.compile(_INT.encode(), re.DOTALL)


class Outline(NamedTuple):
    start: int
    """The first byte of its first element."""
    like: torch.Tensor
    """On the meta device."""


def outline(view: Any, dtype: torch.dtype) -> Outline | None:
    """Of a tensor of that dtype, in a file that begins where `view` does; None if it is something else."""
    try:
        reader = open_records(view)
        if reader.get_record("byteorder").decode() != sys.byteorder:
            return None
        found = _TENSOR.fullmatch(reader.get_record("data.pkl"))
        if found is None or found["storage"].decode() != _STORAGES.get(dtype):
            return None
        if (found["keys"][0], found["places"][0]) != (len(found["key"]), len(found["place"])):
            return None
        (offset,), size, stride = (_numbers(found[part]) for part in ("offset", "size", "stride"))
        if offset < 0:
            return None
        start = reader.get_record_offset(f"data/{found['key'].decode()}") + offset * dtype.itemsize
        return Outline(start, torch.empty_strided(size, stride, dtype=dtype, device="meta"))
    except Exception:
        return None  # torch says better what is wrong with it


def _numbers(text: bytes) -> list[int]:
    return [_number(it) for it in _NUMBER.findall(text.removeprefix(b"("))]


def _number(text: bytes) -> int:
    """As pickle writes it: those of one and two bytes have no sign."""
    kind, digits = text[:1], text[2:] if text[:1] == b"\x8a" else text[1:]
    return int.from_bytes(digits, "little", signed=kind not in b"KM")
