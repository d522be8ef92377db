"""State of segments as state of parameters, and back."""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from ..errors import CheckpointError, ConfigError
from ..layout.layout import Layout, ParamShard
from ..layout.spec import ParamSpec
from ..state.shard_tensor import ShardTensor, make_full_shard
from ..state.state_dict import (
    MASTER_KEY,
    SavedState,
    StateDict,
    StateShard,
    describe_value,
    flatten_in_memory_order,
    infer_param_shaped_keys,
    slice_span,
)
from ..state.tensor_utils import (
    deepcopy_except_tensors,
    dense_flat_view,
    inner_tensors,
    is_wrapper_subclass,
    rebuild_subclass,
    slice_subclass,
)
from .flat_params import FlatParam, FlatParams, ShardStorage, State
from .inner import OptimizerFactory, load_state
from .probe import isolated_probe, probe_initial_state

# ---------------------------------------------------------------------------------------------------------------------
# State that files have in plain tensors, put together as the optimizer would have made it.
#
# Files need not say which class that is, and no code comes from them: the running optimizer shows what it keeps.


def rebuild_subclass_state(
    state_dict: StateDict, factory: OptimizerFactory, optimizer: torch.optim.Optimizer
) -> StateDict:
    """The dict with values of the optimizer's own classes, where it has what is inside them."""
    places = [(param, group) for group in optimizer.param_groups for param in group["params"]]
    state = dict(state_dict["state"])
    for number, found in state.items():
        if isinstance(number, int) and isinstance(found, dict) and any(isinstance(it, dict) for it in found.values()):
            param, options = places[number]
            with isolated_probe(factory):
                # Of a parameter whose values may be elsewhere only the kind is known here, and that is enough.
                (expected,) = probe_initial_state(factory, options, [torch.zeros_like(param)])
            state[number] = {key: _rebuild_like(expected.get(key), value, key) for key, value in found.items()}
    return {**state_dict, "state": state}


def _rebuild_like(like: Any, value: Any, key: Any) -> Any:
    if not is_wrapper_subclass(like) or not isinstance(value, Mapping):
        return value
    wanted = inner_tensors(like)
    found = {name: it.local if isinstance(it, ShardTensor) else it for name, it in value.items()}
    if {name: it.numel() for name, it in found.items()} != {name: it.numel() for name, it in wanted.items()}:
        raise CheckpointError(
            f"the loaded state '{key}' is made of {_format_sizes(found)}, but {type(like).__name__} has "
            f"{_format_sizes(wanted)}: it was saved by an optimizer of another class, or with other options"
        )
    return rebuild_subclass(
        like, {name: it.to(wanted[name].device).view(wanted[name].shape) for name, it in found.items()}
    )


def _format_sizes(inner: Mapping[str, torch.Tensor]) -> str:
    return ", ".join(f"{name} of {it.numel()} elements" for name, it in inner.items())


# ---------------------------------------------------------------------------------------------------------------------
# Memory for state that is about to be loaded: the present state's own wherever it will do, else new.


CPU = torch.device("cpu")
StateKeys = Set[tuple[int, Any]]
"""State to be loaded: parameters and keys."""


def allocate_full(current: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """For a value of which a rank has all."""
    if _is_reusable(current, shape, dtype) and dense_flat_view(current) is not None:
        return make_full_shard(current)
    return make_full_shard(torch.empty(shape, dtype=dtype, device=device if shape else "cpu"))


class ShardStateAllocator:
    """For the pieces of a rank. Neighbouring pieces share new memory, so that segments need not be put together."""

    def __init__(
        self,
        layout: Layout,
        flat_params: FlatParams,
        storage: ShardStorage,
        current_state: Mapping[int, State],
        state_keys: StateKeys,
        *,
        shared_inner_names: frozenset[str],
    ) -> None:
        """`present`: the state of each parameter that may be overwritten; `wanted`: all that memory will be asked for;
        `common`: see `StateRecord`."""
        self._layout, self._flat_params, self._storage, self._current_state = (
            layout,
            flat_params,
            storage,
            current_state,
        )
        self._shared_inner_names, self._state_keys = shared_inner_names, state_keys
        self._allocated: dict[tuple[int, Any, torch.dtype], dict[int, torch.Tensor]] = {}

    def __call__(self, param_shard: ParamShard, key: Any, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        spec = self._layout.params[param_shard.param]
        present: Any = self._current_state.get(param_shard.param, {}).get(key)
        if self._flat_params.is_full_param(param_shard):
            return allocate_full(present, shape, dtype, spec.device if self._storage.host_transfers is None else CPU)
        if isinstance(key, tuple) and self._shared_inner_names.isdisjoint(key) and len(shape) == 1 and shape[0] > 1:
            return _allocate_inner(param_shard, spec, shape[0], dtype)
        if key != MASTER_KEY and not self._flat_params.has_param_shape(key, shape, spec.shape):
            # Several pieces may share the present value, a step count for example.
            return torch.empty(shape, dtype=dtype, device=spec.device if shape else "cpu")
        memory = (
            present.detach()
            if self._can_reuse(param_shard, key, dtype)
            else self._get_or_allocate(param_shard, key, dtype)
        )
        return ShardTensor(memory, spec.shape, spec.stride, param_shard.in_param.start)

    def _can_reuse(self, param_shard: ParamShard, key: Any, dtype: torch.dtype) -> bool:
        return _is_reusable(
            self._current_state.get(param_shard.param, {}).get(key), (param_shard.in_param.length,), dtype
        )

    def _get_or_allocate(self, param_shard: ParamShard, key: Any, dtype: torch.dtype) -> torch.Tensor:
        mark = (param_shard.bucket, key, dtype)
        if mark not in self._allocated:
            self._allocated[mark] = self._allocate_bucket(*mark)
        return self._allocated[mark][param_shard.param]

    def _allocate_bucket(self, bucket: int, key: Any, dtype: torch.dtype) -> dict[int, torch.Tensor]:
        """For all pieces of a bucket whose state of that key needs new memory, by parameter."""

        def needs_allocation(param_shard: ParamShard) -> bool:
            is_wanted = (param_shard.param, key) in self._state_keys and not self._flat_params.is_full_param(
                param_shard
            )
            return is_wanted and not self._can_reuse(param_shard, key, dtype)

        new: dict[int, torch.Tensor] = {}
        for needed, run in groupby(
            self._layout.buckets[bucket].param_shards_of_rank(self._storage.rank), key=needs_allocation
        ):
            places = [(piece.param, self._storage.slice_in_shard(piece)) for piece in run if needed]
            if places:
                start, stop = places[0][1].start, places[-1][1].stop
                memory = self._storage.allocate_state(bucket, slice(start, stop), dtype)
                new |= {param: memory[span.start - start : span.stop - start] for param, span in places}
        return new


def _allocate_inner(param_shard: ParamShard, spec: ParamSpec, numel: int, dtype: torch.dtype) -> ShardTensor:
    """For what one of the tensors that make up a value has of a piece."""
    per = spec.numel // numel
    start, stop = (place // per for place in param_shard.in_param)
    return ShardTensor(torch.empty(stop - start, dtype=dtype, device=spec.device), (numel,), (1,), start)


def join_views(views: Sequence[torch.Tensor], starts: Sequence[int]) -> torch.Tensor | None:
    """The flat tensor that has `parts` from those places on, if that is how they lie in memory."""
    first, last = views[0], views[-1]
    for part, start in zip(views, starts, strict=True):
        if part.dtype != first.dtype or _storage_ptr(part) != _storage_ptr(first):
            return None
        if part.storage_offset() != first.storage_offset() + start - starts[0]:
            return None
    return first.as_strided((starts[-1] - starts[0] + last.numel(),), (1,))


def _storage_ptr(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_reusable(current: Any, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    return type(current) is torch.Tensor and tuple(current.shape) == shape and current.dtype == dtype


# ---------------------------------------------------------------------------------------------------------------------
# State of segments as state of parameters, and back.


class _PrivateCopy(NamedTuple):
    """A value that several pieces share, copied for one of them."""

    param_shard: ParamShard
    key: Any
    value: torch.Tensor
    shared: torch.Tensor


class ShardedState:
    """The state of a rank's pieces."""

    def __init__(
        self,
        flat_params: FlatParams,
        storage: ShardStorage,
        factory: OptimizerFactory,
        shared_inner_names: frozenset[str],
    ) -> None:
        """`common`: what all pieces have in common of values that are made of several tensors."""
        self._flat_params, self._storage, self._factory, self._shared_inner_names = (
            flat_params,
            storage,
            factory,
            shared_inner_names,
        )
        self._private_copies: dict[tuple[int, Any], _PrivateCopy] = {}
        self._has_removed_state = False
        """State was removed since segments were last joined."""

    # ---- one piece: what the user reads and writes in `optimizer.state`

    def flat_param_state(self, optimizer: Optimizer, param_shard: ParamShard) -> State:
        """The state of the segment that a piece lies in: its keys are those of the piece."""
        state: State = optimizer.state.get(self._flat_params.flat_param_of(param_shard).param, {})
        return state

    def has_state(self, optimizer: Optimizer, param_shard: ParamShard) -> bool:
        """Whether there is state of a piece, be it empty."""
        return self._flat_params.flat_param_of(param_shard).param in optimizer.state

    def get_value(self, optimizer: Optimizer, param_shard: ParamShard, key: Any) -> Any:
        """A value of a piece. Whoever changes it in place changes the state of this piece and of no other."""
        segment, value = (
            self._flat_params.flat_param_of(param_shard),
            self.flat_param_state(optimizer, param_shard)[key],
        )
        if len(segment.param_shards) == 1:
            return value
        if self._flat_params.is_sharded(key, value, segment.param):
            return value.view(-1)[slice(*segment.span_of(param_shard))]
        if isinstance(value, torch.Tensor):
            return self._get_private_copy(param_shard, key, value)
        if deepcopy_except_tensors(value) is value:
            return value
        return self._isolate_state(optimizer, param_shard)[key]

    def set_value(self, optimizer: Optimizer, param_shard: ParamShard, key: Any, value: Any) -> None:
        """Give a piece a value that is `fitted`."""
        present = self.flat_param_state(optimizer, param_shard)
        if key not in present or not _is_same_value(self.get_value(optimizer, param_shard, key), value):
            self._isolate_state(optimizer, param_shard)[key] = value

    def replace_state(self, optimizer: Optimizer, param_shard: ParamShard, state: State | None) -> State:
        """Give a piece other state, whose values are `fitted`, or none; returns what it had."""
        before = self._isolate_state(optimizer, param_shard)
        segment = self._flat_params.flat_param_of(param_shard)
        if state is None:
            optimizer.state.pop(segment.param, None)
            self._has_removed_state = True
        else:
            optimizer.state[segment.param] = state
        return before

    def clear(self, optimizer: Optimizer) -> None:
        """Drop all state, also what belongs to no parameter."""
        optimizer.state.clear()
        self._has_removed_state = True

    def rejoin_stateless(self, optimizer: Optimizer) -> None:
        """Pieces that have lost their state are updated as one tensor again."""
        if self._has_removed_state:
            self._flat_params.join_stateless(optimizer)
            self._has_removed_state = False

    def delete_value(self, optimizer: Optimizer, param_shard: ParamShard, key: Any) -> None:
        del self._isolate_state(optimizer, param_shard)[key]

    def fit_value(
        self, spec: ParamSpec, param_shard: ParamShard | None, key: Any, value: Any, *, is_sharded: bool
    ) -> Any:
        """A value for this rank's piece of a parameter; of a tensor in the shape of the parameter, a copy of the slice.

        Raises if it is none, also on a rank that holds no piece: whatever is wrong is wrong on all of them. `cut`: the
        parameter may be cut.
        """
        if key == MASTER_KEY:
            raise ConfigError(
                f"{MASTER_KEY!r} of {spec.label} cannot be assigned: it is not kept in optimizer.state. Change the "
                "parameter itself, or load it with load_state_dict()."
            )
        if not isinstance(value, torch.Tensor) or not is_sharded:
            return value
        shape, own = tuple(value.shape), None if param_shard is None else (param_shard.in_param.length,)
        if shape == spec.shape and spec.numel > 1:
            self._flat_params.add_param_shaped_keys(frozenset([key]))
        if own is not None and self._flat_params.has_param_shape(key, shape, own):
            return self._to_master_dtype(spec, param_shard, value)
        if self._flat_params.has_param_shape(key, shape, spec.shape):
            if param_shard is None:
                return value
            if is_wrapper_subclass(value):
                return slice_subclass(value, *param_shard.in_param, self._shared_inner_names)
            # A copy, since a view would keep the whole tensor.
            part = flatten_in_memory_order(value.detach(), spec)[slice(*param_shard.in_param)].clone()
            return self._to_master_dtype(spec, param_shard, part)
        if self._flat_params.is_param_shaped(key) or value.numel() > 1:
            here = "this rank holds no part of it" if own is None else f"this rank's slice of it has shape {own}"
            raise ConfigError(
                f"{key!r} in the state of {spec.label} must have the parameter's shape {spec.shape}, got {shape}; "
                f"{here}. Assign a tensor of either shape, such as torch.zeros_like(param)."
            )
        return value

    def sync_user_edits(self, optimizer: Optimizer) -> None:
        """What was lent and changed since becomes the piece's own. So does what somebody still holds: it is expected
        to change with the state from now on."""
        loans = [
            it
            for it in self._private_copies.values()
            if self.flat_param_state(optimizer, it.param_shard).get(it.key) is it.shared
        ]
        self._private_copies.clear()
        while loans:
            piece, key, value, base = loans.pop()
            held = weakref.ref(value)
            if torch.equal(value, base):
                del value
            lent = held()
            if lent is not None:
                segment = self._flat_params.isolate(piece, optimizer)
                optimizer.state[segment.param][key] = lent

    def _get_private_copy(self, param_shard: ParamShard, key: Any, shared: torch.Tensor) -> torch.Tensor:
        """Hazard: pieces of a segment share a step count. Each is lent one of its own, which is compared later."""
        loan = self._private_copies.get((param_shard.param, key))
        if loan is None or loan.shared is not shared:
            with torch.inference_mode(False):
                loan = self._private_copies[param_shard.param, key] = _PrivateCopy(
                    param_shard, key, shared.clone(), shared
                )
        return loan.value

    def _isolate_state(self, optimizer: Optimizer, param_shard: ParamShard) -> State:
        """The state of a piece alone, to be changed."""
        self.sync_user_edits(optimizer)
        segment = self._flat_params.isolate(param_shard, optimizer)
        state: State = optimizer.state.setdefault(segment.param, {})
        return state

    def _to_master_dtype(self, spec: ParamSpec, param_shard: ParamShard | None, value: torch.Tensor) -> torch.Tensor:
        """State of master weights has their dtype."""
        copy = None if param_shard is None else self._storage.master_view(param_shard)
        return value if copy is None or value.dtype != spec.dtype else value.to(copy.dtype)

    # ---- all pieces

    def state_shards(self, optimizer: Optimizer, specs: Sequence[ParamSpec]) -> list[StateShard]:
        records = []
        for piece, state, cut in self._iter_param_shards(optimizer):
            copy = self._storage.master_view(piece)
            if copy is not None and self._flat_params.is_full_param(piece):
                copy = copy.as_strided(specs[piece.param].shape, specs[piece.param].stride)
            if state is None and copy is None:
                continue
            values = {**(state or {}), **({} if copy is None else {MASTER_KEY: copy})}
            if self._flat_params.is_full_param(piece):
                records.append(StateShard(piece.param, None, (), values))
            else:
                records.append(
                    StateShard(piece.param, piece.in_param, (*cut, MASTER_KEY), values, self._shared_inner_names)
                )
        return records

    def state_allocator(
        self,
        optimizer: Optimizer,
        layout: Layout,
        state_keys: StateKeys,
        param_shaped_keys: frozenset[Any],
        *,
        in_place: bool,
    ) -> ShardStateAllocator:
        """Where to read state of pieces to."""
        present = {}
        for piece, state, _ in self._iter_param_shards(optimizer) if in_place else ():
            copy = self._storage.master_view(piece)
            present[piece.param] = {**(state or {}), **({} if copy is None else {MASTER_KEY: copy})}
        holdings = self._flat_params.with_param_shaped_keys(param_shaped_keys)
        return ShardStateAllocator(
            layout, holdings, self._storage, present, state_keys, shared_inner_names=self._shared_inner_names
        )

    def load(
        self, optimizer: Optimizer, saved: SavedState, specs: Sequence[ParamSpec], *, assign: bool
    ) -> Callable[[], None]:
        """Pieces with equal step counts, and whatever else a parameter has one of, become one segment."""
        self._flat_params.add_param_shaped_keys(infer_param_shaped_keys(_iter_state_shapes(saved, specs)))

        for index, state in saved.by_param.items():
            if not isinstance(state, Mapping):
                raise CheckpointError(f"the loaded state of {specs[index].label} is a {type(state).__name__}, no dict")

        def merge_key_of(param_shard: ParamShard) -> object:
            state, spec = saved.by_param.get(param_shard.param), specs[param_shard.param]
            return state and tuple((key, self._merge_key(key, value, spec)) for key, value in state.items())

        with ExitStack() as undo:  # in the reverse order, also where this fails halfway
            undo.callback(self._flat_params.reflatten(optimizer, merge_key_of))
            local = rebuild_subclass_state(self._build_local_state_dict(saved, specs), self._factory, optimizer)
            foreign = None if assign else saved.tensor_containers
            undo.callback(load_state(optimizer, local, foreign, keep_on_host=self._storage.host_transfers is not None))
            self._load_master_weights(saved, specs, undo, assign=assign)
            return undo.pop_all().close

    def _iter_param_shards(self, optimizer: Optimizer) -> Iterator[tuple[ParamShard, State | None, tuple[str, ...]]]:
        """All pieces with their state, if they have any, and the keys of what is cut."""
        self.sync_user_edits(optimizer)
        for segment in self._flat_params:
            state = optimizer.state.get(segment.param)
            items = () if state is None else state.items()
            cut = tuple(key for key, value in items if self._flat_params.is_sharded(key, value, segment.param))
            for piece in segment.param_shards:
                yield piece, None if state is None else self._flat_params.shard_state(segment, piece, state), cut

    def _build_local_state_dict(self, saved: SavedState, specs: Sequence[ParamSpec]) -> StateDict:
        state: dict[Any, Any] = dict(saved.shared_state)
        groups, number = [], 0
        for group, segments in zip(saved.groups, self._flat_params.by_group, strict=True):
            for place, segment in enumerate(segments, number):
                if saved.has_state(segment.param_shards[0].param):
                    state[place] = self._join_flat_param_state(segment, saved, specs)
            numbers = list(range(number, number + len(segments)))
            names = [specs[segment.param_shards[0].param].name for segment in segments]
            groups.append({**group, **({"param_names": names} if "param_names" in group else {}), "params": numbers})
            number += len(segments)
        return {**saved.extra, "state": state, "param_groups": groups}

    def _join_flat_param_state(self, flat_param: FlatParam, saved: SavedState, specs: Sequence[ParamSpec]) -> Any:
        """The state of a segment, of the states of its parameters."""
        first = {k: v for k, v in saved.by_param[flat_param.param_shards[0].param].items() if k != MASTER_KEY}
        if self._flat_params.is_full_param(flat_param.param_shards[0]):
            return first
        joined = {}
        for key, value in first.items():
            if not self._is_param_shaped(key, value, specs[flat_param.param_shards[0].param]):
                joined[key] = value
                continue
            if is_wrapper_subclass(value):  # its pieces are not joined with those of others
                joined[key] = slice_subclass(value, *flat_param.param_shards[0].in_param, self._shared_inner_names)
                continue
            parts = [
                slice_span(saved.by_param[it.param][key], specs[it.param], it.in_param)
                for it in flat_param.param_shards
            ]
            joined[key] = self._concat_for_flat_param(flat_param, parts)
        return joined

    def _concat_for_flat_param(self, flat_param: FlatParam, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """One tensor of what belongs to the pieces of a segment."""
        places = [flat_param.span_of(piece) for piece in flat_param.param_shards]
        run = join_views(shards, [place.start for place in places])
        if run is None:
            run = torch.zeros_like(flat_param.param, dtype=shards[0].dtype, device=shards[0].device)
            for part, place in zip(shards, places, strict=True):
                run[slice(*place)] = part
        return run

    def _merge_key(self, key: Any, value: Any, spec: ParamSpec) -> object:
        """Equal for values that can become one: what is cut is joined, and the rest must be the same."""
        if self._is_param_shaped(key, value, spec):
            return value.dtype
        is_long = isinstance(value, torch.Tensor) and value.numel() > 1
        return id(value) if is_long else describe_value(value)

    def _is_param_shaped(self, key: Any, value: Any, spec: ParamSpec) -> bool:
        return isinstance(value, torch.Tensor) and self._has_param_shape(key, tuple(value.shape), spec)

    def _has_param_shape(self, key: Any, shape: tuple[int, ...], spec: ParamSpec) -> bool:
        return key == MASTER_KEY or self._flat_params.has_param_shape(key, shape, spec.shape)

    def _load_master_weights(
        self, saved: SavedState, specs: Sequence[ParamSpec], undo: ExitStack, *, assign: bool
    ) -> None:
        """Copies that are not in the dict are made of the parameters, unless who gives it away sees to that."""
        for piece in (piece for segment in self._flat_params for piece in segment.param_shards):
            copy = self._storage.master_view(piece)
            state = saved.by_param.get(piece.param)
            if copy is not None and isinstance(state, dict) and MASTER_KEY in state:
                source = slice_span(state[MASTER_KEY], specs[piece.param], piece.in_param)
                if source.data_ptr() != copy.data_ptr():  # else it was read in place
                    undo.callback(copy.copy_, copy.clone())
                    copy.copy_(source)
            elif copy is not None and not assign and piece.param in saved.by_param:
                undo.callback(copy.copy_, copy.clone())
                copy.copy_(self._storage.param_view(piece))
        self._storage.invalidate_masters()


def _is_same_value(current: Any, value: Any) -> bool:
    """Whether to assign a value would change nothing: it is there already."""
    if isinstance(current, torch.Tensor) and isinstance(value, torch.Tensor):
        return value is current or (_memory_key(current) == _memory_key(value) and current.numel() > 0)
    return type(current) is type(value) and isinstance(value, (bool, int, float, str)) and current == value


def _memory_key(tensor: torch.Tensor) -> object:
    if type(tensor) is not torch.Tensor or tensor.layout != torch.strided:
        return id(tensor)
    return tensor.data_ptr(), tensor.dtype, tensor.device, tensor.shape, tensor.stride()


def _iter_state_shapes(saved: SavedState, specs: Sequence[ParamSpec]) -> Iterator[tuple[ParamSpec, Any, Sequence[int]]]:
    for index, state in saved.by_param.items():
        for key, value in state.items() if isinstance(state, dict) else ():
            if isinstance(value, torch.Tensor):
                yield specs[index], key, value.shape
