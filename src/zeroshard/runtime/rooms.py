"""Memory for state that is about to be loaded: the present state's own wherever it will do, else new."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..layout.layout import Layout, Piece
from ..layout.specs import ParamSpec
from ..state.dcp import CutTensor, whole
from ..state.records import MASTER
from ..state.trees import dense_memory
from .masters import ShardMemory
from .segments import Holdings, State

CPU = torch.device("cpu")


def whole_room(present: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """For a value of which a rank has all."""
    if _will_do(present, shape, dtype) and dense_memory(present) is not None:
        return whole(present)
    return whole(torch.empty(shape, dtype=dtype, device=device if shape else "cpu"))


class CutRooms:
    """For the pieces of a rank. New memory is one run a bucket, so that segments need not be put together."""

    def __init__(
        self,
        layout: Layout,
        holdings: Holdings,
        memory: ShardMemory,
        present: Mapping[int, State],
        common: frozenset[str],
    ) -> None:
        """`present`: the state of each parameter that may be overwritten; `common`: see `StateRecord`."""
        self._layout, self._holdings, self._memory, self._present = layout, holdings, memory, present
        self._common = common
        self._new: dict[tuple[int, Any, torch.dtype], torch.Tensor] = {}

    def __call__(self, piece: Piece, key: Any, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        spec = self._layout.params[piece.param]
        present: Any = self._present.get(piece.param, {}).get(key)
        if self._holdings.is_whole(piece):
            return whole_room(present, shape, dtype, spec.device if self._memory.hosts is None else CPU)
        if isinstance(key, tuple) and self._common.isdisjoint(key) and len(shape) == 1 and shape[0] > 1:
            return _inside_room(piece, spec, shape[0], dtype)
        if key != MASTER and not self._holdings.has_shape(key, shape, spec.shape):
            # Several pieces may share the present value, a step count for example.
            return torch.empty(shape, dtype=dtype, device=spec.device if shape else "cpu")
        suits = _will_do(present, (piece.in_param.length,), dtype)
        memory: torch.Tensor = present.detach() if suits else self._run(piece, key, dtype)
        return CutTensor(memory, spec.shape, spec.stride, piece.in_param.start)

    def _run(self, piece: Piece, key: Any, dtype: torch.dtype) -> torch.Tensor:
        mark = (piece.bucket, key, dtype)
        if mark not in self._new:
            self._new[mark] = self._memory.zeros(piece.bucket, dtype)
        return self._new[mark][self._memory.span(piece)]


def _inside_room(piece: Piece, spec: ParamSpec, numel: int, dtype: torch.dtype) -> CutTensor:
    """For what one of the tensors that make up a value has of a piece."""
    per = spec.numel // numel
    start, stop = (place // per for place in piece.in_param)
    return CutTensor(torch.empty(stop - start, dtype=dtype, device=spec.device), (numel,), (1,), start)


def adjoined(parts: Sequence[torch.Tensor], starts: Sequence[int]) -> torch.Tensor | None:
    """The flat tensor that has `parts` from those places on, if that is how they lie in memory."""
    first, last = parts[0], parts[-1]
    for part, start in zip(parts, starts, strict=True):
        if part.dtype != first.dtype or _storage(part) != _storage(first):
            return None
        if part.storage_offset() != first.storage_offset() + start - starts[0]:
            return None
    return first.as_strided((starts[-1] - starts[0] + last.numel(),), (1,))


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _will_do(present: Any, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    return type(present) is torch.Tensor and tuple(present.shape) == shape and present.dtype == dtype
