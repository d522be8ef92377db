"""Memory for state that is about to be loaded: the present state's own wherever it will do, else new."""

from collections.abc import Mapping, Sequence, Set
from itertools import groupby
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
Wanted = Set[tuple[int, Any]]
"""State to be loaded: parameters and keys."""


def whole_room(present: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """For a value of which a rank has all."""
    if _will_do(present, shape, dtype) and dense_memory(present) is not None:
        return whole(present)
    return whole(torch.empty(shape, dtype=dtype, device=device if shape else "cpu"))


class CutRooms:
    """For the pieces of a rank. Neighbouring pieces share new memory, so that segments need not be put together."""

    def __init__(
        self,
        layout: Layout,
        holdings: Holdings,
        memory: ShardMemory,
        present: Mapping[int, State],
        wanted: Wanted,
        *,
        common: frozenset[str],
    ) -> None:
        """`present`: the state of each parameter that may be overwritten; `wanted`: all that memory will be asked for;
        `common`: see `StateRecord`."""
        self._layout, self._holdings, self._memory, self._present = layout, holdings, memory, present
        self._common, self._wanted = common, wanted
        self._new: dict[tuple[int, Any, torch.dtype], dict[int, torch.Tensor]] = {}

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
        memory = present.detach() if self._is_present(piece, key, dtype) else self._get_new(piece, key, dtype)
        return CutTensor(memory, spec.shape, spec.stride, piece.in_param.start)

    def _is_present(self, piece: Piece, key: Any, dtype: torch.dtype) -> bool:
        return _will_do(self._present.get(piece.param, {}).get(key), (piece.in_param.length,), dtype)

    def _get_new(self, piece: Piece, key: Any, dtype: torch.dtype) -> torch.Tensor:
        mark = (piece.bucket, key, dtype)
        if mark not in self._new:
            self._new[mark] = self._allocate(*mark)
        return self._new[mark][piece.param]

    def _allocate(self, bucket: int, key: Any, dtype: torch.dtype) -> dict[int, torch.Tensor]:
        """For all pieces of a bucket whose state of that key needs new memory, by parameter."""

        def needs_new(piece: Piece) -> bool:
            is_wanted = (piece.param, key) in self._wanted and not self._holdings.is_whole(piece)
            return is_wanted and not self._is_present(piece, key, dtype)

        new: dict[int, torch.Tensor] = {}
        for needed, run in groupby(self._layout.buckets[bucket].pieces_of(self._memory.rank), key=needs_new):
            places = [(piece.param, self._memory.span(piece)) for piece in run if needed]
            if places:
                start, stop = places[0][1].start, places[-1][1].stop
                memory = self._memory.zeros(bucket, slice(start, stop), dtype)
                new |= {param: memory[span.start - start : span.stop - start] for param, span in places}
        return new


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
