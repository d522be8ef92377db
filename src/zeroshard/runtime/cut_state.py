"""State of segments as state of parameters, and back."""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from ..errors import CheckpointError, ConfigError
from ..layout.layout import Layout, Piece
from ..layout.specs import ParamSpec
from ..state.compat import SavedState, StateDict, describe
from ..state.records import MASTER, StateRecord, in_memory_order, shaped_keys, span_of
from ..state.trees import copy_mutable
from ..state.wrapped import is_wrapped, piece_of
from .inner import Recipe
from .loading import load
from .masters import ShardMemory
from .rooms import CutRooms, Wanted, adjoined
from .segments import Holdings, Segment, State
from .wrapping import put_together


class _Loan(NamedTuple):
    """A value that several pieces share, copied for one of them."""

    piece: Piece
    key: Any
    value: torch.Tensor
    base: torch.Tensor


class CutState:
    """The state of a rank's pieces."""

    def __init__(self, holdings: Holdings, memory: ShardMemory, recipe: Recipe, common: frozenset[str]) -> None:
        """`common`: what all pieces have in common of values that are made of several tensors."""
        self._holdings, self._memory, self._recipe, self._common = holdings, memory, recipe, common
        self._loans: dict[tuple[int, Any], _Loan] = {}
        self._has_dropped = False
        """State was removed since segments were last joined."""

    # ---- one piece: what the user reads and writes in `optimizer.state`

    def present(self, optimizer: Optimizer, piece: Piece) -> State:
        """The state of the segment that a piece lies in: its keys are those of the piece."""
        state: State = optimizer.state.get(self._holdings.segment_of(piece).param, {})
        return state

    def has_any(self, optimizer: Optimizer, piece: Piece) -> bool:
        """Whether there is state of a piece, be it empty."""
        return self._holdings.segment_of(piece).param in optimizer.state

    def value(self, optimizer: Optimizer, piece: Piece, key: Any) -> Any:
        """A value of a piece. Whoever changes it in place changes the state of this piece and of no other."""
        segment, value = self._holdings.segment_of(piece), self.present(optimizer, piece)[key]
        if len(segment.pieces) == 1:
            return value
        if self._holdings.is_cut(key, value, segment.param):
            return value.view(-1)[slice(*segment.within(piece))]
        if isinstance(value, torch.Tensor):
            return self._lend(piece, key, value)
        if copy_mutable(value) is value:
            return value
        return self._own_state(optimizer, piece)[key]

    def assign(self, optimizer: Optimizer, piece: Piece, key: Any, value: Any) -> None:
        """Give a piece a value that is `fitted`."""
        present = self.present(optimizer, piece)
        if key not in present or not _is_same(self.value(optimizer, piece, key), value):
            self._own_state(optimizer, piece)[key] = value

    def replace(self, optimizer: Optimizer, piece: Piece, state: State | None) -> State:
        """Give a piece other state, whose values are `fitted`, or none; returns what it had."""
        before = self._own_state(optimizer, piece)
        segment = self._holdings.segment_of(piece)
        if state is None:
            optimizer.state.pop(segment.param, None)
            self._has_dropped = True
        else:
            optimizer.state[segment.param] = state
        return before

    def clear(self, optimizer: Optimizer) -> None:
        """Drop all state, also what belongs to no parameter."""
        optimizer.state.clear()
        self._has_dropped = True

    def join_dropped(self, optimizer: Optimizer) -> None:
        """Pieces that have lost their state are updated as one tensor again."""
        if self._has_dropped:
            self._holdings.join_stateless(optimizer)
            self._has_dropped = False

    def delete(self, optimizer: Optimizer, piece: Piece, key: Any) -> None:
        del self._own_state(optimizer, piece)[key]

    def fitted(self, spec: ParamSpec, piece: Piece | None, key: Any, value: Any, *, cut: bool) -> Any:
        """A value for this rank's piece of a parameter; of a tensor in the shape of the parameter, a copy of the slice.

        Raises if it is none, also on a rank that holds no piece: whatever is wrong is wrong on all of them. `cut`: the
        parameter may be cut.
        """
        if key == MASTER:
            raise ConfigError(
                f"{MASTER!r} of {spec.label} cannot be assigned: it is not kept in optimizer.state. Change the "
                "parameter itself, or load it with load_state_dict()."
            )
        if not isinstance(value, torch.Tensor) or not cut:
            return value
        shape, own = tuple(value.shape), None if piece is None else (piece.in_param.length,)
        if shape == spec.shape and spec.numel > 1:
            self._holdings.learn(frozenset([key]))
        if own is not None and self._holdings.has_shape(key, shape, own):
            return self._as_precise(spec, piece, value)
        if self._holdings.has_shape(key, shape, spec.shape):
            if piece is None:
                return value
            if is_wrapped(value):
                return piece_of(value, *piece.in_param, self._common)
            # A copy, since a view would keep the whole tensor.
            part = in_memory_order(value.detach(), spec)[slice(*piece.in_param)].clone()
            return self._as_precise(spec, piece, part)
        if self._holdings.is_param_shaped(key) or value.numel() > 1:
            here = "this rank holds no part of it" if own is None else f"this rank's slice of it has shape {own}"
            raise ConfigError(
                f"{key!r} in the state of {spec.label} must have the parameter's shape {spec.shape}, got {shape}; "
                f"{here}. Assign a tensor of either shape, such as torch.zeros_like(param)."
            )
        return value

    def take_edits(self, optimizer: Optimizer) -> None:
        """What was lent and changed since becomes the piece's own. So does what somebody still holds: it is expected
        to change with the state from now on."""
        loans = [it for it in self._loans.values() if self.present(optimizer, it.piece).get(it.key) is it.base]
        self._loans.clear()
        while loans:
            piece, key, value, base = loans.pop()
            held = weakref.ref(value)
            if torch.equal(value, base):
                del value
            lent = held()
            if lent is not None:
                segment = self._holdings.isolate(piece, optimizer)
                optimizer.state[segment.param][key] = lent

    def _lend(self, piece: Piece, key: Any, base: torch.Tensor) -> torch.Tensor:
        """Hazard: pieces of a segment share a step count. Each is lent one of its own, which is compared later."""
        loan = self._loans.get((piece.param, key))
        if loan is None or loan.base is not base:
            with torch.inference_mode(False):
                loan = self._loans[piece.param, key] = _Loan(piece, key, base.clone(), base)
        return loan.value

    def _own_state(self, optimizer: Optimizer, piece: Piece) -> State:
        """The state of a piece alone, to be changed."""
        self.take_edits(optimizer)
        segment = self._holdings.isolate(piece, optimizer)
        state: State = optimizer.state.setdefault(segment.param, {})
        return state

    def _as_precise(self, spec: ParamSpec, piece: Piece | None, value: torch.Tensor) -> torch.Tensor:
        """State of master weights has their dtype."""
        copy = None if piece is None else self._memory.precise(piece)
        return value if copy is None or value.dtype != spec.dtype else value.to(copy.dtype)

    # ---- all pieces

    def records(self, optimizer: Optimizer, specs: Sequence[ParamSpec]) -> list[StateRecord]:
        records = []
        for piece, state, cut in self._each(optimizer):
            copy = self._memory.precise(piece)
            if copy is not None and self._holdings.is_whole(piece):
                copy = copy.as_strided(specs[piece.param].shape, specs[piece.param].stride)
            if state is None and copy is None:
                continue
            values = {**(state or {}), **({} if copy is None else {MASTER: copy})}
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
            present[piece.param] = {**(state or {}), **({} if copy is None else {MASTER: copy})}
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

    def _each(self, optimizer: Optimizer) -> Iterator[tuple[Piece, State | None, tuple[str, ...]]]:
        """All pieces with their state, if they have any, and the keys of what is cut."""
        self.take_edits(optimizer)
        for segment in self._holdings:
            state = optimizer.state.get(segment.param)
            items = () if state is None else state.items()
            cut = tuple(key for key, value in items if self._holdings.is_cut(key, value, segment.param))
            for piece in segment.pieces:
                yield piece, None if state is None else self._holdings.state_of(segment, piece, state), cut

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


def _is_same(present: Any, value: Any) -> bool:
    """Whether to assign a value would change nothing: it is there already."""
    if isinstance(present, torch.Tensor) and isinstance(value, torch.Tensor):
        return value is present or (_place(present) == _place(value) and present.numel() > 0)
    return type(present) is type(value) and isinstance(value, (bool, int, float, str)) and present == value


def _place(tensor: torch.Tensor) -> object:
    if type(tensor) is not torch.Tensor or tensor.layout != torch.strided:
        return id(tensor)
    return tensor.data_ptr(), tensor.dtype, tensor.device, tensor.shape, tensor.stride()


def _shapes(saved: SavedState, specs: Sequence[ParamSpec]) -> Iterator[tuple[ParamSpec, Any, Sequence[int]]]:
    for index, state in saved.by_param.items():
        for key, value in state.items() if isinstance(state, dict) else ():
            if isinstance(value, torch.Tensor):
                yield specs[index], key, value.shape
