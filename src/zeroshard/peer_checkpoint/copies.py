"""A rank's share of state and parameters as a value: taken, divided anew for other ranks, put together there."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..errors import CheckpointError
from ..layout.spec import ParamSpec
from .._types import Span
from ..state.shard_tensor import ShardTensor
from ..state.records import MASTER_KEY, StateShard, flatten_in_memory_order
from ..state.tensor_utils import inner_tensors, is_wrapper_subclass, slice_subclass

ShardData = dict[str, Any]
"""Of plain containers and tensors, to be sent as it is."""
STATE_KEY, WEIGHTS_KEY = "records", "weights"


def make_shard_data(state_shards: Sequence[StateShard], weights: Mapping[int, ShardTensor]) -> ShardData:
    """What a rank holds, by parameter. `weights` are left out where a record has a more precise copy."""
    held = {record.param: record.to_portable() for record in state_shards}
    precise = {record.param for record in state_shards if MASTER_KEY in record.state}
    plain = {index: (it.start, it.local) for index, it in weights.items() if index not in precise}
    return {STATE_KEY: held, WEIGHTS_KEY: plain}


def slice_shard(shard: ShardData, specs: Sequence[ParamSpec], spans: Mapping[int, Span]) -> ShardData:
    """What of a share belongs to a rank that owns these spans of parameters; views wherever that is possible."""
    records: dict[int, Any] = {}
    for param, (span, cut, common, state) in shard[STATE_KEY].items():
        if param in spans:
            wanted, spec = spans[param], specs[param]
            if span is None:
                records[param] = (
                    (None, cut, common, state)
                    if _is_full_span(wanted, spec)
                    else _shard_full_state(spec, wanted, state)
                )
            elif (both := _intersect_spans(Span(*span), wanted)) is not None:
                records[param] = (
                    list(both),
                    cut,
                    common,
                    _slice_state(state, Span(*span), both, cut, frozenset(common)),
                )
    weights: dict[int, Any] = {}
    for param, (start, flat) in shard[WEIGHTS_KEY].items():
        both = _intersect_spans(Span(start, start + flat.numel()), spans[param]) if param in spans else None
        if both is not None:
            weights[param] = (both.start, flat[both.start - start : both.stop - start])
    return {STATE_KEY: records, WEIGHTS_KEY: weights}


class AssembledShard(NamedTuple):
    """What a rank holds, put together."""

    state: dict[int, Any]
    """In the format of `sharded_state_dict`."""
    weights: dict[int, torch.Tensor]
    """Flat, the most precise values there are."""


class ShardAssembler:
    """Puts portions together, from whichever shares they come."""

    def __init__(self, specs: Sequence[ParamSpec], spans: Mapping[int, Span]) -> None:
        self._specs, self._spans = specs, spans
        self._state: dict[int, dict[Any, Any]] = defaultdict(dict)
        self._shared_inner_names: dict[int, frozenset[str]] = {}
        self._state_slices: dict[tuple[int, Any], list[tuple[Span, torch.Tensor]]] = defaultdict(list)
        self._weight_slices: dict[int, list[tuple[Span, torch.Tensor]]] = defaultdict(list)

    def add(self, shard: ShardData) -> None:
        for param, (span, cut, common, state) in shard[STATE_KEY].items():
            self._shared_inner_names[param] = frozenset(common)
            for key, value in state.items():
                if span is None or key not in cut:
                    self._state[param].setdefault(key, value)
                else:
                    self._state[param].setdefault(key, None)  # for the order of keys
                    self._state_slices[param, key].append((Span(*span), value))
        for param, (start, flat) in shard[WEIGHTS_KEY].items():
            self._weight_slices[param].append((Span(start, start + flat.numel()), flat))

    def assemble(self) -> AssembledShard:
        for (param, key), pieces in self._state_slices.items():
            self._state[param][key] = self._join_slices(param, key, sorted(pieces, key=lambda piece: piece[0]))
        weights = {param: self._concat_flat(param, "values", pieces) for param, pieces in self._weight_slices.items()}
        for param, state in self._state.items():
            if MASTER_KEY in state:
                weights[param] = self._local_slice(param, state[MASTER_KEY])
        for param in self._spans.keys() - weights.keys():
            raise CheckpointError(f"the copies have no values of {self._specs[param].label}")
        return AssembledShard(dict(self._state), weights)

    def _join_slices(self, param: int, key: Any, slices: list[tuple[Span, torch.Tensor]]) -> Any:
        spec, values = self._specs[param], [value for _, value in slices]
        if is_wrapper_subclass(values[0]):
            return _concat_inner_tensors(values, self._shared_inner_names[param])
        whole = ShardTensor(
            self._concat_flat(param, f"'{key}'", slices), spec.shape, spec.stride, self._spans[param].start
        )
        return whole.to_full().clone() if whole.is_full and spec.storage_numel > spec.numel else whole

    def _concat_flat(self, param: int, label: str, slices: list[tuple[Span, torch.Tensor]]) -> torch.Tensor:
        """Of overlapping pieces, which replicas have, each is as good as the other."""
        mine = self._spans[param]
        flat = slices[0][1].new_empty(mine.length)
        covered = mine.start
        for span, value in sorted(slices, key=lambda piece: piece[0]):
            flat[span.start - mine.start : span.stop - mine.start] = value
            covered = max(covered, span.stop) if span.start <= covered else covered
        if covered != mine.stop:
            raise CheckpointError(
                f"the copies have {label} of {self._specs[param].label} up to element {covered} only, and not up to "
                f"{mine.stop}"
            )
        return flat

    def _local_slice(self, param: int, value: torch.Tensor) -> torch.Tensor:
        if isinstance(value, ShardTensor):
            return value.local
        return flatten_in_memory_order(value, self._specs[param])[slice(*self._spans[param])]


def _is_full_span(span: Span, spec: ParamSpec) -> bool:
    return span.length == spec.storage_numel


def _intersect_spans(one: Span, other: Span) -> Span | None:
    """None if there is none. What has no elements is in both."""
    both = Span(max(one.start, other.start), min(one.stop, other.stop))
    return both if both.length > 0 or one.length == other.length == 0 else None


def _slice_state(
    state: ShardData, span: Span, overlap: Span, sharded_keys: Sequence[str], shared_inner_names: frozenset[str]
) -> ShardData:
    start, stop = overlap.start - span.start, overlap.stop - span.start

    def slice_value(value: torch.Tensor) -> torch.Tensor:
        return (
            slice_subclass(value, start, stop, shared_inner_names) if is_wrapper_subclass(value) else value[start:stop]
        )

    return {key: slice_value(value) if key in sharded_keys else value for key, value in state.items()}


def _shard_full_state(spec: ParamSpec, span: Span, state: ShardData) -> Any:
    """A span of the state of a whole parameter. What is made of several tensors is left to the loading rank."""
    shaped = [key for key, value in state.items() if _is_param_shaped(value, spec)]
    values = {
        key: flatten_in_memory_order(it, spec)[slice(*span)] if key in shaped else it for key, it in state.items()
    }
    return list(span), shaped, [], values


def _is_param_shaped(value: Any, spec: ParamSpec) -> bool:
    return isinstance(value, torch.Tensor) and not is_wrapper_subclass(value) and tuple(value.shape) == spec.shape


def _concat_inner_tensors(
    tensors: Sequence[torch.Tensor], shared_inner_names: frozenset[str]
) -> dict[str, torch.Tensor]:
    """The plain tensors that a value is made of, flat, of neighbouring pieces of it."""
    found = [inner_tensors(piece) for piece in tensors]
    return {
        name: it if name in shared_inner_names else torch.cat([part[name].reshape(-1) for part in found])
        for name, it in found[0].items()
    }
