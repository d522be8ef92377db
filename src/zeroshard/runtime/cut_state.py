"""State of segments as state of parameters, and back."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.optim import Optimizer

from ..layout.layout import Piece
from ..layout.specs import ParamSpec
from ..state.compat import SavedState, StateDict, describe
from ..state.dcp import CutTensor, whole
from ..state.records import MASTER, StateRecord, span_of
from ..units import Span
from .loading import load
from .masters import ShardMemory
from .segments import Holdings, Segment, State


class CutState:
    """The state of a rank's pieces."""

    def __init__(self, holdings: Holdings, memory: ShardMemory) -> None:
        self._holdings, self._memory = holdings, memory

    def by_param(self, optimizer: Optimizer, params: Sequence[torch.Tensor]) -> dict[Any, Any]:
        """Views of it, by the user's parameter, and what belongs to no parameter."""
        found = {params[piece.param]: state for piece, state, _ in self._each(optimizer) if state}
        others = {key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}
        return defaultdict(dict, {**found, **others})

    def records(self, optimizer: Optimizer, specs: Sequence[ParamSpec]) -> list[StateRecord]:
        records = []
        for piece, state, cut in self._each(optimizer):
            copy = self._memory.precise(piece, if_it_says_more=not state)
            if copy is not None and not self._holdings.cut:
                copy = copy.as_strided(specs[piece.param].shape, specs[piece.param].stride)
            values = state if copy is None else {**state, MASTER: copy}
            if not values:
                continue
            if self._holdings.cut:
                records.append(StateRecord(piece.param, piece.in_param, (*cut, MASTER), values))
            else:
                records.append(StateRecord(piece.param, None, (), values))
        return records

    def room(self, spec: ParamSpec, span: Span, key: Any, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """New memory for what this rank holds, a span, of a state tensor of a parameter."""
        if not self._holdings.cut:
            return whole(torch.empty(shape, dtype=dtype, device=spec.device))
        if not self._has_shape(key, shape, spec):
            return torch.empty(shape, dtype=dtype, device=spec.device if shape else "cpu")
        return CutTensor(torch.empty(span.length, dtype=dtype, device=spec.device), spec.shape, spec.stride, span.start)

    def load(self, optimizer: Optimizer, saved: SavedState, specs: Sequence[ParamSpec]) -> Callable[[], None]:
        """Pieces with equal step counts, and whatever else a parameter has one of, become one segment."""

        def alike(piece: Piece) -> object:
            state = saved.by_param.get(piece.param)
            spec = specs[piece.param]
            return state and describe({k: v for k, v in state.items() if not self._is_cut(k, v, spec)})

        with ExitStack() as undo:  # in the reverse order, also where this fails halfway
            undo.callback(self._holdings.regroup(optimizer, alike))
            undo.callback(load(optimizer, self._local_dict(saved, specs), foreign=saved.tensors))
            self._load_masters(saved, specs, undo)
            return undo.pop_all().close

    def _each(self, optimizer: Optimizer) -> Iterator[tuple[Piece, State, tuple[str, ...]]]:
        """All pieces with their state, if they have any, and the keys of what is cut."""
        for segment in self._holdings:
            state = optimizer.state.get(segment.param, {})
            cut = tuple(key for key, value in state.items() if self._holdings.is_cut(key, value, segment.param))
            for piece in segment.pieces:
                yield piece, self._holdings.state_of(segment, piece, state), cut

    def _local_dict(self, saved: SavedState, specs: Sequence[ParamSpec]) -> StateDict:
        state: dict[Any, Any] = dict(saved.others)
        groups, number = [], 0
        for group, segments in zip(saved.groups, self._holdings.by_group, strict=True):
            for place, segment in enumerate(segments, number):
                if segment.pieces[0].param in saved.by_param:
                    state[place] = self._joined(segment, saved, specs)
            numbers = list(range(number, number + len(segments)))
            names = [specs[segment.pieces[0].param].name for segment in segments]
            groups.append({**group, **({"param_names": names} if "param_names" in group else {}), "params": numbers})
            number += len(segments)
        return {**saved.extra, "state": state, "param_groups": groups}

    def _joined(self, segment: Segment, saved: SavedState, specs: Sequence[ParamSpec]) -> Any:
        """The state of a segment, of the states of its parameters."""
        first = {k: v for k, v in saved.by_param[segment.pieces[0].param].items() if k != MASTER}
        if not self._holdings.cut:
            return first
        joined = {}
        for key, value in first.items():
            if not self._is_cut(key, value, specs[segment.pieces[0].param]):
                joined[key] = value
                continue
            joined[key] = torch.zeros_like(segment.param, dtype=value.dtype, device=value.device)
            for piece in segment.pieces:
                source = span_of(saved.by_param[piece.param][key], specs[piece.param], piece.in_param)
                joined[key][slice(*segment.within(piece))] = source
        return joined

    def _is_cut(self, key: Any, value: Any, spec: ParamSpec) -> bool:
        return isinstance(value, torch.Tensor) and self._has_shape(key, tuple(value.shape), spec)

    def _has_shape(self, key: Any, shape: tuple[int, ...], spec: ParamSpec) -> bool:
        return key == MASTER or self._holdings.has_shape(key, shape, spec.shape)

    def _load_masters(self, saved: SavedState, specs: Sequence[ParamSpec], undo: ExitStack) -> None:
        for piece in (piece for segment in self._holdings for piece in segment.pieces):
            copy = self._memory.precise(piece)
            state = saved.by_param.get(piece.param)
            if copy is not None and isinstance(state, dict) and MASTER in state:
                undo.callback(copy.copy_, copy.clone())
                copy.copy_(span_of(state[MASTER], specs[piece.param], piece.in_param))
        self._memory.doubt()
