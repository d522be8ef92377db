"""A rank's share of state and parameters as a value: taken, divided anew for other ranks, put together there."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..errors import CheckpointError
from ..layout.specs import ParamSpec
from ..units import Span
from .dcp import CutTensor
from .records import MASTER, StateRecord, in_memory_order
from .wrapped import insides, is_wrapped, piece_of

Value = dict[str, Any]
"""Of plain containers and tensors, to be sent as it is."""
RECORDS, WEIGHTS = "records", "weights"


def share_of(records: Sequence[StateRecord], weights: Mapping[int, CutTensor]) -> Value:
    """What a rank holds, by parameter. `weights` are left out where a record has a more precise copy."""
    held = {record.param: record.portable() for record in records}
    precise = {record.param for record in records if MASTER in record.state}
    plain = {index: (it.start, it.local) for index, it in weights.items() if index not in precise}
    return {RECORDS: held, WEIGHTS: plain}


def portion(share: Value, specs: Sequence[ParamSpec], spans: Mapping[int, Span]) -> Value:
    """What of a share belongs to a rank that owns these spans of parameters; views wherever that is possible."""
    records: dict[int, Any] = {}
    for param, (span, cut, common, state) in share[RECORDS].items():
        if param in spans:
            wanted, spec = spans[param], specs[param]
            if span is None:
                records[param] = (None, cut, common, state) if _is_all(wanted, spec) else _cut(spec, wanted, state)
            elif (both := _overlap(Span(*span), wanted)) is not None:
                records[param] = (list(both), cut, common, _part(state, Span(*span), both, cut, frozenset(common)))
    weights: dict[int, Any] = {}
    for param, (start, flat) in share[WEIGHTS].items():
        both = _overlap(Span(start, start + flat.numel()), spans[param]) if param in spans else None
        if both is not None:
            weights[param] = (both.start, flat[both.start - start : both.stop - start])
    return {RECORDS: records, WEIGHTS: weights}


class Rebuilt(NamedTuple):
    """What a rank holds, put together."""

    state: dict[int, Any]
    """In the format of `sharded_state_dict`."""
    weights: dict[int, torch.Tensor]
    """Flat, the most precise values there are."""


class Rebuilding:
    """Puts portions together, from whichever shares they come."""

    def __init__(self, specs: Sequence[ParamSpec], spans: Mapping[int, Span]) -> None:
        self._specs, self._spans = specs, spans
        self._state: dict[int, dict[Any, Any]] = defaultdict(dict)
        self._common: dict[int, frozenset[str]] = {}
        self._pieces: dict[tuple[int, Any], list[tuple[Span, torch.Tensor]]] = defaultdict(list)
        self._weights: dict[int, list[tuple[Span, torch.Tensor]]] = defaultdict(list)

    def add(self, found: Value) -> None:
        for param, (span, cut, common, state) in found[RECORDS].items():
            self._common[param] = frozenset(common)
            for key, value in state.items():
                if span is None or key not in cut:
                    self._state[param].setdefault(key, value)
                else:
                    self._state[param].setdefault(key, None)  # for the order of keys
                    self._pieces[param, key].append((Span(*span), value))
        for param, (start, flat) in found[WEIGHTS].items():
            self._weights[param].append((Span(start, start + flat.numel()), flat))

    def result(self) -> Rebuilt:
        for (param, key), pieces in self._pieces.items():
            self._state[param][key] = self._joined(param, key, sorted(pieces, key=lambda piece: piece[0]))
        weights = {param: self._flat(param, "values", pieces) for param, pieces in self._weights.items()}
        for param, state in self._state.items():
            if MASTER in state:
                weights[param] = self._of_mine(param, state[MASTER])
        for param in self._spans.keys() - weights.keys():
            raise CheckpointError(f"the copies have no values of {self._specs[param].label}")
        return Rebuilt(dict(self._state), weights)

    def _joined(self, param: int, key: Any, pieces: list[tuple[Span, torch.Tensor]]) -> Any:
        spec, values = self._specs[param], [value for _, value in pieces]
        if is_wrapped(values[0]):
            return _insides_of_all(values, self._common[param])
        whole = CutTensor(self._flat(param, f"'{key}'", pieces), spec.shape, spec.stride, self._spans[param].start)
        return whole.uncut().clone() if whole.is_whole and spec.extent > spec.numel else whole

    def _flat(self, param: int, what: str, pieces: list[tuple[Span, torch.Tensor]]) -> torch.Tensor:
        """Of overlapping pieces, which replicas have, each is as good as the other."""
        mine = self._spans[param]
        flat = pieces[0][1].new_empty(mine.length)
        covered = mine.start
        for span, value in sorted(pieces, key=lambda piece: piece[0]):
            flat[span.start - mine.start : span.stop - mine.start] = value
            covered = max(covered, span.stop) if span.start <= covered else covered
        if covered != mine.stop:
            raise CheckpointError(
                f"the copies have {what} of {self._specs[param].label} up to element {covered} only, and not up to "
                f"{mine.stop}"
            )
        return flat

    def _of_mine(self, param: int, value: torch.Tensor) -> torch.Tensor:
        if isinstance(value, CutTensor):
            return value.local
        return in_memory_order(value, self._specs[param])[slice(*self._spans[param])]


def _is_all(span: Span, spec: ParamSpec) -> bool:
    return span.length == spec.extent


def _overlap(one: Span, other: Span) -> Span | None:
    """None if there is none. What has no elements is in both."""
    both = Span(max(one.start, other.start), min(one.stop, other.stop))
    return both if both.length > 0 or one.length == other.length == 0 else None


def _part(state: Value, span: Span, both: Span, cut: Sequence[str], common: frozenset[str]) -> Value:
    start, stop = both.start - span.start, both.stop - span.start

    def part(value: torch.Tensor) -> torch.Tensor:
        return piece_of(value, start, stop, common) if is_wrapped(value) else value[start:stop]

    return {key: part(value) if key in cut else value for key, value in state.items()}


def _cut(spec: ParamSpec, wanted: Span, state: Value) -> Any:
    """A span of the state of a whole parameter. What is made of several tensors is left to the loading rank."""
    shaped = [key for key, value in state.items() if _has_shape(value, spec)]
    values = {key: in_memory_order(it, spec)[slice(*wanted)] if key in shaped else it for key, it in state.items()}
    return list(wanted), shaped, [], values


def _has_shape(value: Any, spec: ParamSpec) -> bool:
    return isinstance(value, torch.Tensor) and not is_wrapped(value) and tuple(value.shape) == spec.shape


def _insides_of_all(pieces: Sequence[torch.Tensor], common: frozenset[str]) -> dict[str, torch.Tensor]:
    """The plain tensors that a value is made of, flat, of neighbouring pieces of it."""
    found = [insides(piece) for piece in pieces]
    return {
        name: it if name in common else torch.cat([part[name].reshape(-1) for part in found])
        for name, it in found[0].items()
    }
