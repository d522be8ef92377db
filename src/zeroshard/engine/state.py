"""Optimizer state of flat params as state of parameters, and back.

The inner optimizer keeps one state per flat param; users, state dicts and checkpoints see state per parameter::

    flat param           | p1 ......... | p2 ... | p3 ........ |
    state "exp_avg"      | one tensor of the same length       |   sharded: each param shard has a slice
    state "step"         | one value                           |   shared by all param shards

A write to the state of one parameter isolates its param shard in a flat param of its own. Loading joins param shards
whose shared values are equal.
"""

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
from ..state.shard_tensor import ShardTensor, local_memory, make_full_shard
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
    allocate_state,
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
# Tensor subclasses, which files store as plain inner tensors.
#
# Files neither name the subclass nor contain code. The initial state of the running optimizer shows which one it uses.


def rebuild_subclass_state(
    state_dict: StateDict, factory: OptimizerFactory, optimizer: torch.optim.Optimizer
) -> StateDict:
    """Return the state dict with dicts of inner tensors replaced by the optimizer's tensor subclasses."""
    params = [(param, group) for group in optimizer.param_groups for param in group["params"]]
    state = dict(state_dict["state"])
    for index, values in state.items():
        if isinstance(index, int) and isinstance(values, dict) and any(isinstance(v, dict) for v in values.values()):
            param, options = params[index]
            with isolated_probe(factory):
                # The values of the parameter may be offloaded. Its shape, dtype and device are enough.
                (expected,) = probe_initial_state(factory, options, [torch.zeros_like(param)])
            state[index] = {key: _rebuild_like(expected.get(key), value, key) for key, value in values.items()}
    return {**state_dict, "state": state}


def _rebuild_like(like: Any, value: Any, key: Any) -> Any:
    if not is_wrapper_subclass(like) or not isinstance(value, Mapping):
        return value
    expected = inner_tensors(like)
    loaded = {name: local_memory(inner) for name, inner in value.items()}
    if {name: inner.numel() for name, inner in loaded.items()} != {
        name: inner.numel() for name, inner in expected.items()
    }:
        raise CheckpointError(
            f"the loaded state {key!r} consists of {_format_sizes(loaded)}, but this optimizer's "
            f"{type(like).__name__} has {_format_sizes(expected)}: it was saved by another optimizer class, or with "
            "other options"
        )
    return rebuild_subclass(
        like, {name: inner.to(expected[name].device).view(expected[name].shape) for name, inner in loaded.items()}
    )


def _format_sizes(tensors: Mapping[str, torch.Tensor]) -> str:
    return ", ".join(f"{name} of {tensor.numel()} elements" for name, tensor in tensors.items())


# ---------------------------------------------------------------------------------------------------------------------
# Memory to load state into: that of the current state where it fits, otherwise new memory.


CPU = torch.device("cpu")
StateKeys = Set[tuple[int, Any]]
"""State entries to load: (parameter index, state key)."""


def allocate_full(
    current: Any,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    *,
    param: torch.Tensor | ParamSpec,
) -> torch.Tensor:
    """Return memory for a value that this rank holds in full, as part of the state of `param`."""
    if _is_reusable(current, shape, dtype) and dense_flat_view(current) is not None:
        return make_full_shard(current)
    stride = param.stride if isinstance(param, ParamSpec) else param.stride()
    return make_full_shard(allocate_state(shape, dtype, device, param_shape=tuple(param.shape), param_stride=stride))


class ShardStateAllocator:
    """Allocates memory for the state of this rank's param shards.

    Neighbouring param shards get slices of one tensor, so that the state of a flat param need not be concatenated.
    """

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
        """Create an allocator for one load.

        Args:
            layout: The layout of all parameters.
            flat_params: The flat params of this rank.
            storage: The storage of this rank's shards.
            current_state: State by parameter index that may be overwritten.
            state_keys: All entries for which memory will be requested.
            shared_inner_names: See `StateShard`.
        """
        self._layout, self._flat_params, self._storage = layout, flat_params, storage
        self._current_state, self._state_keys = current_state, state_keys
        self._shared_inner_names = shared_inner_names
        self._allocated: dict[tuple[int, Any, torch.dtype], dict[int, torch.Tensor]] = {}

    def __call__(self, param_shard: ParamShard, key: Any, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return memory for the `key` state of a param shard. `shape` and `dtype` are those of the saved tensor."""
        spec = self._layout.params[param_shard.param]
        current: Any = self._current_state.get(param_shard.param, {}).get(key)
        if self._flat_params.is_full_param(param_shard):
            device = spec.device if self._storage.host_transfers is None else CPU
            return allocate_full(current, shape, dtype, device, param=spec)
        if isinstance(key, tuple) and self._shared_inner_names.isdisjoint(key) and len(shape) == 1 and shape[0] > 1:
            return _allocate_inner(param_shard, spec, shape[0], dtype)
        if key != MASTER_KEY and not self._flat_params.has_param_shape(key, shape, spec.shape):
            # Not the current value: several param shards may share it, a step count for example.
            return torch.empty(shape, dtype=dtype, device=spec.device if shape else "cpu")
        memory = (
            current.detach()
            if self._can_reuse(param_shard, key, dtype)
            else self._get_or_allocate(param_shard, key, dtype)
        )
        return ShardTensor(memory, spec.shape, spec.stride, param_shard.in_param.start)

    def _can_reuse(self, param_shard: ParamShard, key: Any, dtype: torch.dtype) -> bool:
        return _is_reusable(
            self._current_state.get(param_shard.param, {}).get(key), (param_shard.in_param.length,), dtype
        )

    def _get_or_allocate(self, param_shard: ParamShard, key: Any, dtype: torch.dtype) -> torch.Tensor:
        bucket_key = (param_shard.bucket, key, dtype)
        if bucket_key not in self._allocated:
            self._allocated[bucket_key] = self._allocate_bucket(*bucket_key)
        return self._allocated[bucket_key][param_shard.param]

    def _allocate_bucket(self, bucket: int, key: Any, dtype: torch.dtype) -> dict[int, torch.Tensor]:
        """Allocate memory for all param shards of a bucket whose `key` state needs it; return it by parameter."""

        def needs_allocation(param_shard: ParamShard) -> bool:
            return (
                (param_shard.param, key) in self._state_keys
                and not self._flat_params.is_full_param(param_shard)
                and not self._can_reuse(param_shard, key, dtype)
            )

        by_param: dict[int, torch.Tensor] = {}
        for is_needed, run in groupby(
            self._layout.buckets[bucket].param_shards_of_rank(self._storage.rank), key=needs_allocation
        ):
            slices = [(shard.param, self._storage.slice_in_shard(shard)) for shard in run if is_needed]
            if slices:
                start, stop = slices[0][1].start, slices[-1][1].stop
                memory = self._storage.allocate_state(bucket, slice(start, stop), dtype)
                by_param |= {param: memory[span.start - start : span.stop - start] for param, span in slices}
        return by_param


def _allocate_inner(param_shard: ParamShard, spec: ParamSpec, numel: int, dtype: torch.dtype) -> ShardTensor:
    """Allocate a param shard's slice of an inner tensor that has `numel` elements for the full parameter."""
    elements_per_item = spec.numel // numel
    start, stop = (offset // elements_per_item for offset in param_shard.in_param)
    return ShardTensor(torch.empty(stop - start, dtype=dtype, device=spec.device), (numel,), (1,), start)


def join_views(views: Sequence[torch.Tensor], starts: Sequence[int]) -> torch.Tensor | None:
    """Return one flat tensor that has the `views` at offsets `starts`, or None if they do not lie so in memory."""
    first, last = views[0], views[-1]
    storage_ptr = first.untyped_storage().data_ptr()
    for view, start in zip(views, starts, strict=True):
        if view.dtype != first.dtype or view.untyped_storage().data_ptr() != storage_ptr:
            return None
        if view.storage_offset() != first.storage_offset() + start - starts[0]:
            return None
    return first.as_strided((starts[-1] - starts[0] + last.numel(),), (1,))


def _is_reusable(current: Any, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    return type(current) is torch.Tensor and tuple(current.shape) == shape and current.dtype == dtype


# ---------------------------------------------------------------------------------------------------------------------
# State of flat params as state of parameters, and back.


class _PrivateCopy(NamedTuple):
    """A copy, for one param shard, of a value that several param shards share."""

    param_shard: ParamShard
    key: Any
    value: torch.Tensor
    shared: torch.Tensor


class ShardedState:
    """The optimizer state of this rank's param shards.

    Values that are written must come from `fit_value`.
    """

    def __init__(
        self,
        flat_params: FlatParams,
        storage: ShardStorage,
        factory: OptimizerFactory,
        shared_inner_names: frozenset[str],
    ) -> None:
        """Create the view of the state. `shared_inner_names`: inner tensors of subclasses that all shards share."""
        self._flat_params, self._storage = flat_params, storage
        self._factory, self._shared_inner_names = factory, shared_inner_names
        self._private_copies: dict[tuple[int, Any], _PrivateCopy] = {}
        self._has_removed_state = False
        """State was removed since flat params were last joined."""

    # ---- one param shard: what the user reads and writes in `optimizer.state`

    def flat_param_state(self, optimizer: Optimizer, param_shard: ParamShard) -> State:
        """Return the state of the flat param that contains a param shard. Both have the same keys."""
        state: State = optimizer.state.get(self._flat_params.flat_param_of(param_shard).param, {})
        return state

    def has_state(self, optimizer: Optimizer, param_shard: ParamShard) -> bool:
        """Return whether a param shard has state, even if it is empty."""
        return self._flat_params.flat_param_of(param_shard).param in optimizer.state

    def get_value(self, optimizer: Optimizer, param_shard: ParamShard, key: Any) -> Any:
        """Return a value of a param shard. Changing it in place changes the state of this param shard only."""
        flat_param = self._flat_params.flat_param_of(param_shard)
        value = self.flat_param_state(optimizer, param_shard)[key]
        if len(flat_param.param_shards) == 1:
            return value
        if self._flat_params.is_sharded(key, value, flat_param.param):
            return value.view(-1)[slice(*flat_param.span_of(param_shard))]
        if isinstance(value, torch.Tensor):
            return self._get_private_copy(param_shard, key, value)
        if deepcopy_except_tensors(value) is value:
            return value
        return self._isolate_state(optimizer, param_shard)[key]

    def set_value(self, optimizer: Optimizer, param_shard: ParamShard, key: Any, value: Any) -> None:
        """Set a value of a param shard."""
        current = self.flat_param_state(optimizer, param_shard)
        if key not in current or not _is_same_value(self.get_value(optimizer, param_shard, key), value):
            self._isolate_state(optimizer, param_shard)[key] = value

    def replace_state(self, optimizer: Optimizer, param_shard: ParamShard, state: State | None) -> State:
        """Replace all state of a param shard, or remove it if `state` is None. Return the previous state."""
        previous = self._isolate_state(optimizer, param_shard)
        flat_param = self._flat_params.flat_param_of(param_shard)
        if state is None:
            optimizer.state.pop(flat_param.param, None)
            self._has_removed_state = True
        else:
            optimizer.state[flat_param.param] = state
        return previous

    def clear(self, optimizer: Optimizer) -> None:
        """Remove all state, including state that belongs to no parameter."""
        optimizer.state.clear()
        self._has_removed_state = True

    def rejoin_stateless(self, optimizer: Optimizer) -> None:
        """Join param shards whose state was removed, so that they are updated as one tensor again."""
        if self._has_removed_state:
            self._flat_params.join_stateless(optimizer)
            self._has_removed_state = False

    def delete_value(self, optimizer: Optimizer, param_shard: ParamShard, key: Any) -> None:
        del self._isolate_state(optimizer, param_shard)[key]

    def fit_value(
        self, spec: ParamSpec, param_shard: ParamShard | None, key: Any, value: Any, *, is_sharded: bool
    ) -> Any:
        """Return `value` as this rank's param shard stores it: of a param-shaped tensor, a copy of the slice.

        `is_sharded`: the parameter may be split.

        Raises:
            ConfigError: The value does not fit. Ranks without a shard of the parameter (`param_shard` is None) raise,
                too, because the mistake is the same on all ranks.
        """
        if key == MASTER_KEY:
            raise ConfigError(
                f"{MASTER_KEY!r} of {spec.label} cannot be assigned through optimizer.state. Change the parameter "
                "itself, or call load_state_dict()."
            )
        if not isinstance(value, torch.Tensor) or not is_sharded:
            return value
        shape, shard_shape = tuple(value.shape), None if param_shard is None else (param_shard.in_param.length,)
        if shape == spec.shape and spec.numel > 1:
            self._flat_params.add_param_shaped_keys(frozenset([key]))
        if shard_shape is not None and self._flat_params.has_param_shape(key, shape, shard_shape):
            return self._to_master_dtype(spec, param_shard, value)
        if self._flat_params.has_param_shape(key, shape, spec.shape):
            if param_shard is None:
                return value
            if is_wrapper_subclass(value):
                return slice_subclass(value, *param_shard.in_param, self._shared_inner_names)
            # Copy: a view would keep the full tensor alive.
            shard = flatten_in_memory_order(value.detach(), spec)[slice(*param_shard.in_param)].clone()
            return self._to_master_dtype(spec, param_shard, shard)
        if self._flat_params.is_param_shaped(key) or value.numel() > 1:
            here = (
                "this rank holds no part of it"
                if shard_shape is None
                else f"this rank's slice of it has shape {shard_shape}"
            )
            raise ConfigError(
                f"expected {key!r} in the state of {spec.label} to have the parameter's shape {spec.shape}, got "
                f"{shape}; {here}. Assign a tensor of either shape, such as torch.zeros_like(param)."
            )
        return value

    def sync_user_edits(self, optimizer: Optimizer) -> None:
        """Store private copies that users changed as state of their param shards.

        Copies that users still hold are stored, too: users expect them to change with the state from now on.
        """
        copies = [
            copy
            for copy in self._private_copies.values()
            if self.flat_param_state(optimizer, copy.param_shard).get(copy.key) is copy.shared
        ]
        self._private_copies.clear()
        while copies:
            # Hazard: `value` must be our only reference to the copy, so that the weak reference shows whether a user
            # holds it. Bind neither the tuple nor the tensor to another name.
            param_shard, key, value, shared = copies.pop()
            value_ref = weakref.ref(value)
            if torch.equal(value, shared):
                del value
            private = value_ref()
            if private is not None:
                flat_param = self._flat_params.isolate(param_shard, optimizer)
                optimizer.state[flat_param.param][key] = private

    def _get_private_copy(self, param_shard: ParamShard, key: Any, shared: torch.Tensor) -> torch.Tensor:
        """Return this param shard's copy of a shared value.

        Hazard: the param shards of a flat param share tensors such as a step count. Users get a private copy instead,
        which `sync_user_edits` compares with the shared value later.
        """
        private = self._private_copies.get((param_shard.param, key))
        if private is None or private.shared is not shared:
            with torch.inference_mode(False):
                private = self._private_copies[param_shard.param, key] = _PrivateCopy(
                    param_shard, key, shared.clone(), shared
                )
        return private.value

    def _isolate_state(self, optimizer: Optimizer, param_shard: ParamShard) -> State:
        """Give a param shard a flat param of its own and return its state, which the caller may change."""
        self.sync_user_edits(optimizer)
        flat_param = self._flat_params.isolate(param_shard, optimizer)
        state: State = optimizer.state.setdefault(flat_param.param, {})
        return state

    def _to_master_dtype(self, spec: ParamSpec, param_shard: ParamShard | None, value: torch.Tensor) -> torch.Tensor:
        """Cast a value in the parameter's dtype to that of its master weights, if there are any."""
        master = None if param_shard is None else self._storage.master_view(param_shard)
        return value if master is None or value.dtype != spec.dtype else value.to(master.dtype)

    # ---- all param shards

    def state_shards(self, optimizer: Optimizer, specs: Sequence[ParamSpec]) -> list[StateShard]:
        """Return the state of all param shards of this rank, including master weights."""
        state_shards = []
        for shard, state, sharded_keys in self._iter_param_shards(optimizer):
            master = self._storage.master_view(shard)
            is_full = self._flat_params.is_full_param(shard)
            if master is not None and is_full:
                master = master.as_strided(specs[shard.param].shape, specs[shard.param].stride)
            if state is None and master is None:
                continue
            values = {**(state or {}), **({} if master is None else {MASTER_KEY: master})}
            if is_full:
                state_shards.append(StateShard(shard.param, None, (), values))
            else:
                keys = (*sharded_keys, MASTER_KEY)
                state_shards.append(StateShard(shard.param, shard.in_param, keys, values, self._shared_inner_names))
        return state_shards

    def state_allocator(
        self,
        optimizer: Optimizer,
        layout: Layout,
        state_keys: StateKeys,
        param_shaped_keys: frozenset[Any],
        *,
        in_place: bool,
    ) -> ShardStateAllocator:
        """Return the allocator of memory to load state into. `in_place`: the current state may be overwritten."""
        current_state = {}
        for shard, state, _ in self._iter_param_shards(optimizer) if in_place else ():
            master = self._storage.master_view(shard)
            current_state[shard.param] = {**(state or {}), **({} if master is None else {MASTER_KEY: master})}
        flat_params = self._flat_params.with_param_shaped_keys(param_shaped_keys)
        return ShardStateAllocator(
            layout, flat_params, self._storage, current_state, state_keys, shared_inner_names=self._shared_inner_names
        )

    def load(
        self, optimizer: Optimizer, saved: SavedState, specs: Sequence[ParamSpec], *, assign: bool
    ) -> Callable[[], None]:
        """Load saved state and return a function that undoes it. A failed load is undone before it raises.

        Param shards whose shared values (step counts, for example) are equal are joined into one flat param.
        `assign`: take over the tensors of `saved` instead of copying them.
        """
        self._flat_params.add_param_shaped_keys(infer_param_shaped_keys(_iter_state_shapes(saved, specs)))

        for index, state in saved.by_param.items():
            if not isinstance(state, Mapping):
                raise CheckpointError(
                    f"expected the loaded state of {specs[index].label} to be a dict, got {type(state).__name__}"
                )

        def merge_key_of(param_shard: ParamShard) -> object:
            state, spec = saved.by_param.get(param_shard.param), specs[param_shard.param]
            return state and tuple((key, self._merge_key(key, value, spec)) for key, value in state.items())

        with ExitStack() as undo:  # runs in reverse order, also if this fails halfway
            undo.callback(self._flat_params.reflatten(optimizer, merge_key_of))
            local = rebuild_subclass_state(self._build_local_state_dict(saved, specs), self._factory, optimizer)
            caller_tensors = None if assign else saved.tensor_containers
            keep_on_host = self._storage.host_transfers is not None
            undo.callback(load_state(optimizer, local, caller_tensors, keep_on_host=keep_on_host))
            self._load_master_weights(saved, specs, undo, assign=assign)
            return undo.pop_all().close

    def _iter_param_shards(self, optimizer: Optimizer) -> Iterator[tuple[ParamShard, State | None, tuple[str, ...]]]:
        """Yield all param shards with their state (None if there is none) and the keys of sharded values."""
        self.sync_user_edits(optimizer)
        for flat_param in self._flat_params:
            state = optimizer.state.get(flat_param.param)
            items = () if state is None else state.items()
            sharded_keys = tuple(
                key for key, value in items if self._flat_params.is_sharded(key, value, flat_param.param)
            )
            for shard in flat_param.param_shards:
                shard_state = None if state is None else self._flat_params.shard_state(flat_param, shard, state)
                yield shard, shard_state, sharded_keys

    def _build_local_state_dict(self, saved: SavedState, specs: Sequence[ParamSpec]) -> StateDict:
        """Return the state dict of this rank's flat params, in torch's format."""
        state: dict[Any, Any] = dict(saved.shared_state)
        groups, first_index = [], 0
        for group, flat_params in zip(saved.groups, self._flat_params.by_group, strict=True):
            for index, flat_param in enumerate(flat_params, first_index):
                if saved.has_state(flat_param.param_shards[0].param):
                    state[index] = self._join_flat_param_state(flat_param, saved, specs)
            indices = list(range(first_index, first_index + len(flat_params)))
            names = [specs[flat_param.param_shards[0].param].name for flat_param in flat_params]
            groups.append({**group, **({"param_names": names} if "param_names" in group else {}), "params": indices})
            first_index += len(flat_params)
        return {**saved.extra, "state": state, "param_groups": groups}

    def _join_flat_param_state(self, flat_param: FlatParam, saved: SavedState, specs: Sequence[ParamSpec]) -> Any:
        """Return the state of a flat param, joined from the saved states of its parameters."""
        first_shard = flat_param.param_shards[0]
        first_state = {key: value for key, value in saved.by_param[first_shard.param].items() if key != MASTER_KEY}
        if self._flat_params.is_full_param(first_shard):
            return first_state
        joined = {}
        for key, value in first_state.items():
            if not self._is_param_shaped(key, value, specs[first_shard.param]):
                joined[key] = value
                continue
            if is_wrapper_subclass(value):  # never joined with the state of other parameters
                joined[key] = slice_subclass(value, *first_shard.in_param, self._shared_inner_names)
                continue
            value_shards = [
                slice_span(saved.by_param[shard.param][key], specs[shard.param], shard.in_param)
                for shard in flat_param.param_shards
            ]
            joined[key] = self._concat_for_flat_param(flat_param, value_shards)
        return joined

    def _concat_for_flat_param(self, flat_param: FlatParam, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return one tensor with the values of all param shards of a flat param: a view where possible, else a copy."""
        spans = [flat_param.span_of(param_shard) for param_shard in flat_param.param_shards]
        joined = join_views(shards, [span.start for span in spans])
        if joined is None:
            joined = torch.zeros_like(flat_param.param, dtype=shards[0].dtype, device=shards[0].device)
            for shard, span in zip(shards, spans, strict=True):
                joined[slice(*span)] = shard
        return joined

    def _merge_key(self, key: Any, value: Any, spec: ParamSpec) -> object:
        """Return a key that is equal for values that can be joined: sharded values of a dtype, or equal shared ones."""
        if self._is_param_shaped(key, value, spec):
            return value.dtype
        is_large = isinstance(value, torch.Tensor) and value.numel() > 1
        return id(value) if is_large else describe_value(value)

    def _is_param_shaped(self, key: Any, value: Any, spec: ParamSpec) -> bool:
        return isinstance(value, torch.Tensor) and self._has_param_shape(key, tuple(value.shape), spec)

    def _has_param_shape(self, key: Any, shape: tuple[int, ...], spec: ParamSpec) -> bool:
        return key == MASTER_KEY or self._flat_params.has_param_shape(key, shape, spec.shape)

    def _load_master_weights(
        self, saved: SavedState, specs: Sequence[ParamSpec], undo: ExitStack, *, assign: bool
    ) -> None:
        """Load master weights. Those that were not saved are copied from the parameters, unless `assign` is set.

        With `assign` the caller takes care of them.
        """
        for shard in (shard for flat_param in self._flat_params for shard in flat_param.param_shards):
            master = self._storage.master_view(shard)
            state = saved.by_param.get(shard.param)
            if master is not None and isinstance(state, dict) and MASTER_KEY in state:
                source = slice_span(state[MASTER_KEY], specs[shard.param], shard.in_param)
                if source.data_ptr() != master.data_ptr():  # otherwise it was read in place
                    undo.callback(master.copy_, master.clone())
                    master.copy_(source)
            elif master is not None and not assign and shard.param in saved.by_param:
                undo.callback(master.copy_, master.clone())
                master.copy_(self._storage.param_view(shard))
        self._storage.invalidate_masters()


def _is_same_value(current: Any, value: Any) -> bool:
    """Return whether assigning `value` would change nothing because it is the current value already."""
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
