"""What the inner optimizer holds of flat buckets: few long tensors instead of one a parameter.

A segment is a run of this rank's pieces of one group in one bucket, all with the same marks. As long as all
parameters in it get gradients it is updated as one tensor. When some do not, it is split, so that those keep their
momenta, their step counts and themselves, as the unsharded optimizer leaves them.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any

import torch
from torch.optim import Optimizer

from ..errors import BindingError
from ..layout.layout import Layout, Piece
from ..state.trees import clone, copy_mutable, map_tensors
from ..units import Rank, Span
from .inner import ParamGroup

Memory = Callable[[int, Span, Sequence[int], Sequence[int]], torch.Tensor]
"""A span of this rank's shard of a bucket, in a shape and with strides."""
State = dict[Any, Any]
Place = tuple[int, torch.Size, tuple[int, ...]]


@dataclass(frozen=True, eq=False)
class Segment:
    """Neighbouring pieces, and the tensor over their memory that the inner optimizer updates."""

    pieces: tuple[Piece, ...]
    group: int
    in_shard: Span
    param: torch.nn.Parameter
    _view: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def bucket(self) -> int:
        return self.pieces[0].bucket

    def within(self, piece: Piece) -> Span:
        """Where a piece lies in the tensor."""
        start = piece.in_bucket.start - self.pieces[0].in_bucket.start
        return Span(start, start + piece.in_bucket.length)

    def of(self, shard: torch.Tensor) -> torch.Tensor:
        """The part of a flat shard that goes with the tensor, in its shape; made once."""
        if self._view is None or self._view[0] is not shard:
            view = shard[slice(*self.in_shard)].as_strided(self.param.shape, self.param.stride())
            object.__setattr__(self, "_view", (shard, view))
        assert self._view is not None
        return self._view[1]


class Holdings:
    """All segments of a rank, and the inner optimizer's view of them."""

    def __init__(self, rank: Rank, memory: Memory, *, joins: bool, param_shaped: frozenset[str]) -> None:
        """`joins`: the optimizer updates a flat run as it would update its parts; else each piece is on its own, and
        one that is a whole parameter has its shape. `param_shaped`: keys of state that has that shape, too."""
        self._rank, self._memory, self._joins, self._param_shaped = rank, memory, joins, param_shaped
        self._layout = Layout.empty(0)
        self.by_group: list[list[Segment]] = []
        """In the order of `_numbers`, each in the order of memory."""
        self._numbers: list[int] = []
        self._bound: list[Place] = []
        """Where all segments lay when they were last where they belong."""

    def __iter__(self) -> Iterator[Segment]:
        return chain.from_iterable(self.by_group)

    def extend(self, layout: Layout, numbers: Sequence[int]) -> None:
        """Add segments for the buckets that `layout` has beyond the present ones. `numbers`: of all groups to hold."""
        known, self._layout, self._numbers = len(self._layout.buckets), layout, list(numbers)
        self.by_group.extend([] for _ in numbers[len(self.by_group) :])
        held = dict(zip(numbers, self.by_group, strict=True))
        for bucket in layout.buckets[known:]:
            mine = (piece for piece in bucket.pieces_of(self._rank) if layout.params[piece.param].group in held)
            for pieces in self._runs(mine, lambda piece: layout.params[piece.param].group):
                segment = self._segment(pieces)
                held[segment.group].append(segment)

    def take_back(self, layout: Layout, group_count: int) -> None:
        """Undo `extend`."""
        self._layout = layout
        del self.by_group[group_count:], self._numbers[group_count:]

    def inner_groups(self, groups: Sequence[ParamGroup]) -> list[ParamGroup]:
        """The user's groups, with segments in the place of parameters. A group without any keeps the user's."""
        own = [dict(group) for group in groups]
        for group, segments in zip(own, self.by_group, strict=True):
            if segments:
                self._fill(group, segments)
        return own

    def ids(self) -> set[int]:
        return {id(segment.param) for segment in self}

    def split(self, present: bytes, optimizer: Optimizer) -> None:
        """Split segments in which only some parameters are flagged, with their state."""
        for segments, group in zip(self.by_group, optimizer.param_groups, strict=True):
            if all(_uniform(segment, present) for segment in segments):
                continue
            parts = [self._parts(segment, present, optimizer) for segment in segments]
            segments[:] = chain.from_iterable(parts)
            self._fill(group, segments)

    def segment_of(self, piece: Piece) -> Segment:
        """The one that a piece of this rank lies in."""
        segments, place = self._find(piece)
        return segments[place]

    def isolate(self, piece: Piece, optimizer: Optimizer) -> Segment:
        """Give a piece a segment of its own, with its state. Other segments keep their tensors."""
        segments, place = self._find(piece)
        pieces = segments[place].pieces
        if len(pieces) == 1:
            return segments[place]
        at = pieces.index(piece)
        runs = [run for run in (pieces[:at], (piece,), pieces[at + 1 :]) if run]
        segments[place : place + 1] = self._divided(segments[place], runs, optimizer)
        self._fill(optimizer.param_groups[self._number(piece)], segments)
        return self.segment_of(piece)

    def join_stateless(self, optimizer: Optimizer) -> None:
        """Join neighbours without state again. Hazard: views of state that is joined would no longer be its memory."""
        for segments, group in self._paired(optimizer) if self._joins else ():
            joined: list[Segment] = []
            for (*_, has_state), run in groupby(segments, key=lambda it: self._likeness(it, optimizer)):
                neighbours = list(run)
                pieces = tuple(piece for segment in neighbours for piece in segment.pieces)
                joined += neighbours if has_state or len(neighbours) == 1 else [self._segment(pieces)]
            if len(joined) < len(segments):
                segments[:] = joined
                self._fill(group, segments)

    def _likeness(self, segment: Segment, optimizer: Optimizer) -> tuple[object, ...]:
        return segment.bucket, self._layout.params[segment.pieces[0].param].marks, segment.param in optimizer.state

    def _find(self, piece: Piece) -> tuple[list[Segment], int]:
        """All segments of its group, and the place among them of the one that it lies in."""
        segments = self.by_group[self._number(piece)]
        place = bisect_right(segments, (piece.bucket, piece.in_bucket.start), key=_start) - 1
        while piece not in segments[place].pieces:  # one without elements starts where the next one does
            place -= 1
        return segments, place

    def _number(self, piece: Piece) -> int:
        return self._numbers.index(self._layout.params[piece.param].group)

    def regroup(self, optimizer: Optimizer, alike: Callable[[Piece], object]) -> Callable[[], None]:
        """Cut anew into runs of pieces that are `alike`, and drop all state; returns how to undo it."""
        before = [list(segments) for segments in self.by_group]
        state = dict(optimizer.state)

        def undo() -> None:
            for (segments, group), kept in zip(self._paired(optimizer), before, strict=True):
                segments[:] = kept
                self._fill(group, segments)
            optimizer.state.clear()
            optimizer.state.update(state)

        for segments, group in self._paired(optimizer):
            pieces = [piece for segment in segments for piece in segment.pieces]
            segments[:] = [self._segment(run) for run in self._runs(pieces, lambda p: (p.bucket, alike(p)))]
            self._fill(group, segments)
        for key in [key for key in optimizer.state if isinstance(key, torch.Tensor)]:
            del optimizer.state[key]
        return undo

    def bind_anew(self) -> None:
        """Notice memory that the optimizer has exchanged (`param.data = ...`): its values come into the shards."""
        if [_place(segment.param) for segment in self] != self._bound:
            self.bind(self)
            self._bound = [_place(segment.param) for segment in self]

    @torch.no_grad()
    def bind(self, segments: Iterable[Segment]) -> None:
        """The same for some of them. What does not fit is dropped, and raised in the end."""
        rooms = ((segment, self._room(segment.pieces[0], segment.in_shard)) for segment in segments)
        away = [(segment, room) for segment, room in rooms if _place(segment.param) != _place(room)]
        shards = {room.untyped_storage().data_ptr() for _, room in away}
        # Hazard: one may lie in the room of another, so what lies in shards is read before any is written.
        values = [_apart_from(shards, segment.param.detach()) for segment, _ in away]
        misfits: list[str] = []
        for (segment, room), value in zip(away, values, strict=True):
            if _kind(value) == _kind(room):
                room.copy_(value)
            else:
                label = self._layout.params[segment.pieces[0].param].label
                misfits.append(f"{_kind(value)} instead of {_kind(room)} for {label}")
            segment.param.data = room
        if misfits:
            raise BindingError(
                f"the optimizer has assigned to `.data` of its parameters what they cannot be: {misfits[0]}. That was "
                "not taken over. Its step() is to keep dtypes, devices and shapes."
            )

    def state_of(self, segment: Segment, piece: Piece, state: State) -> State:
        """The state of one piece of a segment: views of what has the parameter's shape, the rest as it is."""
        if len(segment.pieces) == 1:
            return dict(state)
        span = segment.within(piece)
        return {
            key: value.view(-1)[slice(*span)] if self.is_cut(key, value, segment.param) else value
            for key, value in state.items()
        }

    def is_whole(self, piece: Piece) -> bool:
        """Whether it is a parameter in its own shape, with state that is not cut."""
        return not self._joins and piece.in_param.length == self._layout.params[piece.param].extent

    def is_cut(self, key: Any, value: Any, param: torch.Tensor) -> bool:
        """Whether a value has an element for each of the parameter's."""
        return isinstance(value, torch.Tensor) and self.has_shape(key, tuple(value.shape), tuple(param.shape))

    def learn(self, param_shaped: frozenset[Any]) -> None:
        """Of keys that the self-test did not see: options may have changed since."""
        self._param_shaped |= param_shaped

    def knowing(self, param_shaped: frozenset[Any]) -> "Holdings":
        """One that has learned that, over the same segments."""
        other = copy(self)
        other.learn(param_shaped)
        return other

    def is_param_shaped(self, key: Any) -> bool:
        """Whether values under this key are known to have the parameter's shape."""
        return key in self._param_shaped

    def has_shape(self, key: Any, shape: tuple[int, ...], expected: tuple[int, ...]) -> bool:
        """Of one element the shape says nothing, so the self-test does."""
        return shape == expected and (key in self._param_shaped or math.prod(shape) > 1)

    def _fill(self, group: ParamGroup, segments: Sequence[Segment]) -> None:
        group["params"] = [segment.param for segment in segments]
        if "param_names" in group:
            group["param_names"] = [str(self._layout.params[segment.pieces[0].param].name) for segment in segments]

    def _paired(self, optimizer: Optimizer) -> Iterable[tuple[list[Segment], ParamGroup]]:
        return zip(self.by_group, optimizer.param_groups, strict=True)

    def _runs(self, pieces: Iterable[Piece], key: Callable[[Piece], object]) -> Iterator[tuple[Piece, ...]]:
        if not self._joins:
            return ((piece,) for piece in pieces)
        specs = self._layout.params
        return (tuple(run) for _, run in groupby(pieces, key=lambda piece: (specs[piece.param].marks, key(piece))))

    def _segment(self, pieces: tuple[Piece, ...]) -> Segment:
        first, last = pieces[0], pieces[-1]
        spec = self._layout.params[first.param]
        base = self._layout.buckets[first.bucket].shards[self._rank].start
        span = Span(first.in_bucket.start - base, last.in_bucket.stop - base)
        memory = self._room(first, span)
        param = torch.nn.Parameter(memory, requires_grad=_differentiable(memory))
        vars(param).update(spec.marks)
        return Segment(pieces, spec.group, span, param)

    def _room(self, first: Piece, span: Span) -> torch.Tensor:
        """The memory of a segment that begins with a piece."""
        spec = self._layout.params[first.param]
        shape, stride = (spec.shape, spec.stride) if self.is_whole(first) else ((span.length,), (1,))
        return self._memory(first.bucket, span, shape, stride)

    def _parts(self, segment: Segment, present: bytes, optimizer: Optimizer) -> list[Segment]:
        if _uniform(segment, present):
            return [segment]
        runs = self._runs(segment.pieces, lambda piece: present[piece.param])
        return self._divided(segment, runs, optimizer)

    def _divided(self, segment: Segment, runs: Iterable[tuple[Piece, ...]], optimizer: Optimizer) -> list[Segment]:
        """A segment for each run of its pieces, with their state and, in the middle of a step, their gradients."""
        parts = [self._segment(run) for run in runs]
        state, grad = optimizer.state.pop(segment.param, None), segment.param.grad
        for part in parts:
            if state is not None:
                optimizer.state[part.param] = self._state_of_part(segment, part, state)
            if grad is not None:
                part.param.grad = grad[_span(segment, part)]
        return parts

    def _state_of_part(self, segment: Segment, part: Segment, state: State) -> State:
        span = _span(segment, part)
        return {
            key: value[span] if self.is_cut(key, value, segment.param) else _own(value) for key, value in state.items()
        }


def _place(tensor: torch.Tensor) -> Place:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def _kind(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} on {tensor.device} with shape {tuple(tensor.shape)}"


def _apart_from(shards: set[int], value: torch.Tensor) -> torch.Tensor:
    return value.clone() if value.untyped_storage().data_ptr() in shards else value


def _uniform(segment: Segment, present: bytes) -> bool:
    return len({present[piece.param] for piece in segment.pieces}) == 1


def _start(segment: Segment) -> tuple[int, int]:
    return segment.bucket, segment.pieces[0].in_bucket.start


def _span(segment: Segment, part: Segment) -> slice:
    """Where a part of a segment lies in its tensor."""
    start = part.in_shard.start - segment.in_shard.start
    return slice(start, start + part.in_shard.length)


def _own(value: Any) -> Any:
    """Step counts are tensors that optimizers change in place, as they may change lists: parts must not share them."""
    return map_tensors(copy_mutable(value), clone)


def _differentiable(memory: torch.Tensor) -> bool:
    return memory.is_floating_point() or memory.is_complex()
