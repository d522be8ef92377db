"""State of segments as state of parameters, and back."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.optim import Optimizer

from ..errors import CheckpointError
from ..layout.layout import Layout, Piece
from ..layout.specs import ParamSpec
from ..state.compat import SavedState, StateDict, describe
from ..state.records import MASTER, StateRecord, shaped_keys, span_of
from ..state.wrapped import is_wrapped, piece_of
from .inner import Recipe
from .loading import load
from .masters import ShardMemory
from .rooms import CutRooms, Wanted, adjoined
from .segments import Holdings, Segment, State
from .wrapping import put_together


class CutState:
    """The state of a rank's pieces."""

    def __init__(self, holdings: Holdings, memory: ShardMemory, recipe: Recipe, common: frozenset[str]) -> None:
        """`common`: what all pieces have in common of values that are made of several tensors."""
        self._holdings, self._memory, self._recipe, self._common = holdings, memory, recipe, common

    def by_param(self, optimizer: Optimizer, params: Sequence[torch.Tensor]) -> dict[Any, Any]:
        """Views of it, by the user's parameter, and what belongs to no parameter."""
        found = {params[piece.param]: state for piece, state, _ in self._each(optimizer) if state}
        others = {key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}
        return defaultdict(dict, {**found, **others})

    def records(self, optimizer: Optimizer, specs: Sequence[ParamSpec]) -> list[StateRecord]:
        records = []
        for piece, state, cut in self._each(optimizer):
            copy = self._memory.precise(piece)
            if copy is not None and self._holdings.is_whole(piece):
                copy = copy.as_strided(specs[piece.param].shape, specs[piece.param].stride)
            values = state if copy is None else {**state, MASTER: copy}
            if not values:
                continue
            if self._holdings.is_whole(piece):
                records.append(StateRecord(piece.param, None, (), values))
            else:
                records.append(StateRecord(piece.param, piece.in_param, (*cut, MASTER), values, self._common))
        return records

    def rooms(
        self, optimizer: Optimizer, layout: Layout, wanted: Wanted, param_shaped: frozenset[Any], *, in_place: bool
    ) -> CutRooms:
        """Where to read state of pieces to."""
        present = {}
        for piece, state, _ in self._each(optimizer) if in_place else ():
            copy = self._memory.precise(piece)
            present[piece.param] = state if copy is None else {**state, MASTER: copy}
        holdings = self._holdings.knowing(param_shaped)
        return CutRooms(layout, holdings, self._memory, present, wanted, common=self._common)

    def load(
        self, optimizer: Optimizer, saved: SavedState, specs: Sequence[ParamSpec], *, adopt: bool
    ) -> Callable[[], None]:
        """Pieces with equal step counts, and whatever else a parameter has one of, become one segment."""
        self._holdings.learn(shaped_keys(_shapes(saved, specs)))

        for index, state in saved.by_param.items():
            if not isinstance(state, Mapping):
                raise CheckpointError(f"the loaded state of {specs[index].label} is a {type(state).__name__}, no dict")

        def alike(piece: Piece) -> object:
            state, spec = saved.by_param.get(piece.param), specs[piece.param]
            return state and tuple((key, self._mark(key, value, spec)) for key, value in state.items())

        with ExitStack() as undo:  # in the reverse order, also where this fails halfway
            undo.callback(self._holdings.regroup(optimizer, alike))
            local = put_together(self._local_dict(saved, specs), self._recipe, optimizer)
            foreign = None if adopt else saved.tensors
            undo.callback(load(optimizer, local, foreign, on_host=self._memory.hosts is not None))
            self._load_masters(saved, specs, undo, adopt=adopt)
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
                if saved.has(segment.pieces[0].param):
                    state[place] = self._joined(segment, saved, specs)
            numbers = list(range(number, number + len(segments)))
            names = [specs[segment.pieces[0].param].name for segment in segments]
            groups.append({**group, **({"param_names": names} if "param_names" in group else {}), "params": numbers})
            number += len(segments)
        return {**saved.extra, "state": state, "param_groups": groups}

    def _joined(self, segment: Segment, saved: SavedState, specs: Sequence[ParamSpec]) -> Any:
        """The state of a segment, of the states of its parameters."""
        first = {k: v for k, v in saved.by_param[segment.pieces[0].param].items() if k != MASTER}
        if self._holdings.is_whole(segment.pieces[0]):
            return first
        joined = {}
        for key, value in first.items():
            if not self._is_cut(key, value, specs[segment.pieces[0].param]):
                joined[key] = value
                continue
            if is_wrapped(value):  # its pieces are not joined with those of others
                joined[key] = piece_of(value, *segment.pieces[0].in_param, self._common)
                continue
            parts = [span_of(saved.by_param[it.param][key], specs[it.param], it.in_param) for it in segment.pieces]
            joined[key] = self._run(segment, parts)
        return joined

    def _run(self, segment: Segment, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """One tensor of what belongs to the pieces of a segment."""
        places = [segment.within(piece) for piece in segment.pieces]
        run = adjoined(parts, [place.start for place in places])
        if run is None:
            run = torch.zeros_like(segment.param, dtype=parts[0].dtype, device=parts[0].device)
            for part, place in zip(parts, places, strict=True):
                run[slice(*place)] = part
        return run

    def _mark(self, key: Any, value: Any, spec: ParamSpec) -> object:
        """Equal for values that can become one: what is cut is joined, and the rest must be the same."""
        if self._is_cut(key, value, spec):
            return value.dtype
        is_long = isinstance(value, torch.Tensor) and value.numel() > 1
        return id(value) if is_long else describe(value)

    def _is_cut(self, key: Any, value: Any, spec: ParamSpec) -> bool:
        return isinstance(value, torch.Tensor) and self._has_shape(key, tuple(value.shape), spec)

    def _has_shape(self, key: Any, shape: tuple[int, ...], spec: ParamSpec) -> bool:
        return key == MASTER or self._holdings.has_shape(key, shape, spec.shape)

    def _load_masters(self, saved: SavedState, specs: Sequence[ParamSpec], undo: ExitStack, *, adopt: bool) -> None:
        """Copies that are not in the dict are made of the parameters, unless who gives it away sees to that."""
        for piece in (piece for segment in self._holdings for piece in segment.pieces):
            copy = self._memory.precise(piece)
            state = saved.by_param.get(piece.param)
            if copy is not None and isinstance(state, dict) and MASTER in state:
                source = span_of(state[MASTER], specs[piece.param], piece.in_param)
                if source.data_ptr() != copy.data_ptr():  # else it was read in place
                    undo.callback(copy.copy_, copy.clone())
                    copy.copy_(source)
            elif copy is not None and not adopt and piece.param in saved.by_param:
                undo.callback(copy.copy_, copy.clone())
                copy.copy_(self._memory.own(piece))
        self._memory.doubt()


def _shapes(saved: SavedState, specs: Sequence[ParamSpec]) -> Iterator[tuple[ParamSpec, Any, Sequence[int]]]:
    for index, state in saved.by_param.items():
        for key, value in state.items() if isinstance(state, dict) else ():
            if isinstance(value, torch.Tensor):
                yield specs[index], key, value.shape
