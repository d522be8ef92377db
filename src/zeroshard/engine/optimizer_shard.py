"""An inner optimizer over flat shards, and the dict views behind the user's `optimizer.state`.

`OptimizerShard` has what this rank holds for one optimizer class: the inner optimizer, its flat params and their state.
The views make that state look like the state of an unsharded optimizer.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch.optim import Optimizer

from .._types import Rank
from ..errors import ConfigError
from ..layout.layout import Layout, ParamShard
from ..layout.partition import PartitionStrategy
from ..layout.spec import ParamSpec
from ..state.state_dict import SavedState, StateShard
from .flat_params import FlatParam, FlatParams, ShardStorage
from .inner import LocalOptimizer, OptimizerFactory, ParamGroup
from .probe import FlopCost, OptimizerTraits, SplitRule, probe_split_rule, probe_traits
from .state import ShardedState, StateKeys

# ---------------------------------------------------------------------------------------------------------------------
# One optimizer class: its probed properties, and this rank's shard of its parameters.


ShardStateAllocatorFn = Callable[[ParamShard, Any, tuple[int, ...], torch.dtype], torch.Tensor]
"""Returns memory for state of a param shard: (param shard, key, shape, dtype)."""


class OptimizerSpec:
    """An optimizer class with the user's options, and what the probes find out about it."""

    def __init__(self, name: str, factory: OptimizerFactory, partitioner: PartitionStrategy | None = None) -> None:
        """`partitioner`: set by the user for this optimizer only; None uses the default."""
        self.name, self.factory, self.partitioner = name, factory, partitioner

    @cached_property
    def traits(self) -> OptimizerTraits:
        return probe_traits(self.factory)

    @cached_property
    def split_rule(self) -> SplitRule | None:
        """How parameters may be split without changing their update; None if they must not be."""
        return None if self.traits.couples_params else probe_split_rule(self.factory)

    @cached_property
    def step_cost(self) -> FlopCost:
        """Cost model of updating an unsplit parameter."""
        return FlopCost(self.factory)

    def check_constructible(self) -> None:
        """Build the optimizer once, so wrong arguments raise its own error and not a misleading probe result."""
        self.factory.build({id(param) for group in self.factory.groups for param in group["params"]})


class OptimizerShard:
    """This rank's shard of one optimizer: the inner optimizer, the flat params that it updates, and their state."""

    inner: LocalOptimizer

    def __init__(self, rank: Rank, spec: OptimizerSpec, storage: ShardStorage, *, splits_params: bool) -> None:
        self.name, self.traits, self._factory = spec.name, spec.traits, spec.factory
        self.group_ids: list[int] = []
        """Indices of its groups among the user's groups."""
        split_rule = spec.split_rule if splits_params else None
        can_join = split_rule is not None and split_rule.granularity.is_elementwise
        self.flat_params = FlatParams(
            rank, storage.view, can_join_shards=can_join, param_shaped_keys=spec.traits.param_shaped_keys
        )
        shared_inner_names = frozenset() if split_rule is None else split_rule.shared_inner_names
        self.sharded_state = ShardedState(self.flat_params, storage, spec.factory, shared_inner_names)

    def __iter__(self) -> Iterator[FlatParam]:
        return iter(self.flat_params)

    def prepare(self, layout: Layout, groups: Sequence[ParamGroup], group_ids: Sequence[int]) -> None:
        """Build the inner optimizer for these groups, or add the new ones. `group_ids` includes the present groups."""
        num_known, self.group_ids = len(self.group_ids), list(group_ids)
        user_groups = [groups[group_id] for group_id in group_ids]
        self.flat_params.extend(layout, self.group_ids)
        inner_groups = self.flat_params.make_inner_groups(user_groups)
        if not num_known:
            self.inner = replace(self._factory, groups=inner_groups).build(self.flat_params.param_ids())
            return
        self.inner.add_groups(user_groups[:num_known], inner_groups[num_known:], self.flat_params.param_ids())

    def rollback(self, layout: Layout, first_group: int) -> None:
        """Undo `prepare` for the groups from `first_group` on, even if it failed halfway."""
        self.group_ids = [group_id for group_id in self.group_ids if group_id < first_group]
        self.inner.drop_groups(len(self.group_ids))
        self.flat_params.rollback(layout, len(self.group_ids))

    def split_by_mask(self, mask: bytes) -> None:
        """Split flat params, and their state, in which `mask` is set for some parameters only."""
        self.flat_params.split_by_mask(mask, self.inner.optimizer)

    def sync_user_edits(self) -> None:
        """Apply the user's edits of `optimizer.state` since the last step, and join flat params without state."""
        self.sharded_state.sync_user_edits(self.inner.optimizer)
        self.sharded_state.rejoin_stateless(self.inner.optimizer)

    def state_shards(self, specs: Sequence[ParamSpec]) -> list[StateShard]:
        return self.sharded_state.state_shards(self.inner.optimizer, specs)

    def state_allocator(
        self, layout: Layout, state_keys: StateKeys, param_shaped_keys: frozenset[Any], *, in_place: bool
    ) -> ShardStateAllocatorFn:
        return self.sharded_state.state_allocator(
            self.inner.optimizer, layout, state_keys, param_shaped_keys, in_place=in_place
        )

    def load_state(self, saved: SavedState, specs: Sequence[ParamSpec], *, assign: bool) -> Callable[[], None]:
        """Load this rank's part of saved state. Returns a function that undoes it."""
        return self.sharded_state.load(
            self.inner.optimizer, saved.select_groups(self.group_ids, specs), specs, assign=assign
        )


# ---------------------------------------------------------------------------------------------------------------------
# `optimizer.state` over flat shards: dict views that read and write the state of the inner optimizers.
#
# A parameter's state shows this rank's shard, flat. Every operation means the same as on an unsharded optimizer, and is
# local: all ranks make the same edits, and each rank applies what concerns its own shards.


_MISSING = object()


class _DictView(dict[Any, Any]):
    """A dict for `isinstance`, whose contents are stored elsewhere.

    Subclasses define `__getitem__`, `__setitem__`, `__delitem__` and `__iter__`. `__iter__` iterates over a copy of the
    keys, so values may be assigned inside a loop.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return a plain dict, for code that rebuilds containers with `type(container)(contents)`."""
        return dict(*args, **kwargs)

    @classmethod
    def _new_view(cls) -> Any:
        return dict.__new__(cls)

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __reversed__(self) -> Any:
        return reversed(list(self))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.copy()

    def __ior__(self, other: Any) -> Any:
        self.update(other)
        return self

    def __repr__(self) -> str:
        return repr(self.copy())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.copy().__reduce_ex__(protocol)

    def copy(self) -> dict[Any, Any]:
        return dict(self.items())

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]


# Hazard: methods inherited from `dict` would read its own, empty contents.
for _name in ("__contains__", "__eq__", "clear", "get", "items", "keys", "pop", "update", "values"):
    setattr(_DictView, _name, getattr(MutableMapping, _name))


class ParamStateView(_DictView):
    """This rank's shard of the state of one parameter; empty if this rank owns no shard of it."""

    _optimizer_shard: OptimizerShard
    _layout: Layout
    _spec: ParamSpec
    _param_shard: ParamShard | None

    @classmethod
    def create(cls, optimizer_shard: OptimizerShard, layout: Layout, index: int, rank: Rank) -> "ParamStateView":
        view: ParamStateView = cls._new_view()
        view._optimizer_shard, view._layout, view._spec = optimizer_shard, layout, layout.params[index]
        view._param_shard = layout.param_shard(index, rank)
        return view

    @property
    def has_shard(self) -> bool:
        return self._param_shard is not None

    @property
    def has_state(self) -> bool:
        """Whether this rank has an entry for the parameter, even an empty one."""
        return self._param_shard is not None and self._optimizer_shard.sharded_state.has_state(
            self._optimizer, self._param_shard
        )

    def __iter__(self) -> Iterator[Any]:
        return iter(
            []
            if self._param_shard is None
            else list(self._optimizer_shard.sharded_state.flat_param_state(self._optimizer, self._param_shard))
        )

    def __getitem__(self, key: Any) -> Any:
        if self._param_shard is None:
            raise KeyError(f"{key!r}: this rank owns no shard of {self._spec.label}")
        return self._optimizer_shard.sharded_state.get_value(self._optimizer, self._param_shard, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        fitted = self._fit_value(key, value)
        if self._param_shard is not None:
            self._optimizer_shard.sharded_state.set_value(self._optimizer, self._param_shard, key, fitted)

    def __delitem__(self, key: Any) -> None:
        if self._param_shard is not None:
            if key not in self:
                raise KeyError(key)
            self._optimizer_shard.sharded_state.delete_value(self._optimizer, self._param_shard, key)

    def __contains__(self, key: Any) -> bool:
        return self._param_shard is not None and key in self._optimizer_shard.sharded_state.flat_param_state(
            self._optimizer, self._param_shard
        )

    def pop(self, key: Any, default: Any = _MISSING) -> Any:
        """Remove and return a value. Does not raise if this rank owns no shard of the parameter."""
        if key not in self:
            if default is _MISSING and self._param_shard is not None:
                raise KeyError(key)
            return None if default is _MISSING else default
        value = self[key]
        del self[key]
        return value

    def popitem(self) -> tuple[Any, Any]:
        if not self:
            raise KeyError("popitem(): the state is empty")
        key = next(reversed(self))
        return key, self.pop(key)

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Assign all values, or none if one does not fit."""
        fitted = self.fit_values(dict(*args, **kwargs))
        if self._param_shard is not None:
            for key, value in fitted.items():
                self._optimizer_shard.sharded_state.set_value(self._optimizer, self._param_shard, key, value)

    def clear(self) -> None:
        if self:
            self.replace_state({})

    def fit_values(self, values: Mapping[Any, Any]) -> dict[Any, Any]:
        """Return this rank's shard of each state value; raises if a value does not fit the parameter."""
        if not isinstance(values, Mapping):
            raise ConfigError(f"expected the state of {self._spec.label} to be a dict, got {type(values).__name__}")
        return {key: self._fit_value(key, value) for key, value in values.items()}

    def replace_state(self, fitted: dict[Any, Any] | None) -> dict[Any, Any]:
        """Replace the state by values from `fit_values`, or remove it (None). Returns the former state."""
        if self._param_shard is None:
            return {}
        return self._optimizer_shard.sharded_state.replace_state(self._optimizer, self._param_shard, fitted)

    @property
    def _optimizer(self) -> Optimizer:
        return self._optimizer_shard.inner.optimizer

    def _fit_value(self, key: Any, value: Any) -> Any:
        shards = self._layout.param_shards(self._spec.index)
        is_sharded = not all(map(self._optimizer_shard.flat_params.is_full_param, shards))
        return self._optimizer_shard.sharded_state.fit_value(
            self._spec, self._param_shard, key, value, is_sharded=is_sharded
        )


class OptimizerStateView(_DictView):
    """The state of all parameters that this rank has a shard of, and state under keys that are not parameters."""

    _params: Sequence[torch.Tensor]
    _optimizer_shards: Sequence[OptimizerShard]
    _find_param_state: Callable[[torch.Tensor], ParamStateView | None]
    _world_size: int

    @classmethod
    def create(
        cls,
        params: Sequence[torch.Tensor],
        optimizer_shards: Sequence[OptimizerShard],
        find_param_state: Callable[[torch.Tensor], ParamStateView | None],
        world_size: int,
    ) -> "OptimizerStateView":
        """Return a view. `find_param_state` returns the state of a parameter, and None for any other tensor."""
        view: OptimizerStateView = cls._new_view()
        view._params, view._optimizer_shards = params, optimizer_shards
        view._find_param_state, view._world_size = find_param_state, world_size
        return view

    def __iter__(self) -> Iterator[Any]:
        """Iterate over parameters in their order, as an unsharded optimizer has them, then over all other keys."""
        indices = sorted(
            shard.param
            for optimizer_shard in self._optimizer_shards
            for flat_param in optimizer_shard
            if flat_param.param in optimizer_shard.inner.optimizer.state
            for shard in flat_param.param_shards
        )
        other_keys = (key for state in self._inner_states() for key in state if not isinstance(key, torch.Tensor))
        return iter([*(self._params[index] for index in indices), *other_keys])

    def __contains__(self, key: Any) -> bool:
        if isinstance(key, torch.Tensor):
            param_state = self._find_param_state(key)
            return param_state is not None and param_state.has_state
        return any(key in state for state in self._inner_states())

    def __getitem__(self, key: Any) -> Any:
        """Return the state under a key. As with `defaultdict(dict)`, a parameter without state has an empty one."""
        if isinstance(key, torch.Tensor):
            param_state = self._find_param_state(key)
            return {} if param_state is None else param_state
        return self._shared_state_for(key)[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._commit({key: self._fit_value(key, value)})

    def __delitem__(self, key: Any) -> None:
        self.pop(key)

    def get(self, key: Any, default: Any = None) -> Any:
        return self[key] if key in self else default  # noqa: SIM401 (this is `get`)

    def pop(self, key: Any, default: Any = _MISSING) -> Any:
        """Remove and return state. Does not raise if this rank owns no shard of the parameter."""
        param_state = self._find_param_state(key) if isinstance(key, torch.Tensor) else None
        if key in self:
            return self._shared_state_for(key).pop(key) if param_state is None else param_state.replace_state(None)
        if default is not _MISSING:
            return default
        if param_state is None or param_state.has_shard:
            raise KeyError(key)
        return {}

    def popitem(self) -> tuple[Any, Any]:
        if self._world_size > 1:
            raise ConfigError(
                f"popitem() would remove the state of different parameters on the {self._world_size} ranks, since "
                "each holds its own shard. Use pop(param), or clear() to remove everything."
            )
        if not self:
            raise KeyError("popitem(): the state is empty")
        key = next(reversed(self))
        return key, self.pop(key)

    def clear(self) -> None:
        for optimizer_shard in self._optimizer_shards:
            optimizer_shard.sharded_state.clear(optimizer_shard.inner.optimizer)

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Assign all values, or none if one does not fit."""
        self._commit({key: self._fit_value(key, value) for key, value in dict(*args, **kwargs).items()})

    def replace_state(self, contents: Any) -> None:
        """Implement `optimizer.state = contents`. Nothing changes if a value does not fit."""
        if contents is self:
            return
        fitted = {key: self._fit_value(key, value) for key, value in dict(contents).items()}
        self.clear()
        self._commit(fitted)

    def copy(self) -> dict[Any, Any]:
        """Return a plain `defaultdict` with plain dicts."""
        items = {key: value.copy() if isinstance(value, ParamStateView) else value for key, value in self.items()}
        return defaultdict(dict, items)

    def _inner_states(self) -> list[dict[Any, Any]]:
        return [optimizer_shard.inner.optimizer.state for optimizer_shard in self._optimizer_shards]

    def _shared_state_for(self, key: Any) -> dict[Any, Any]:
        """Return the inner state that has, or would get, a key that is not a parameter."""
        inner_states = self._inner_states()
        for state in inner_states:
            if key in state:
                return state
        if len(inner_states) > 1:
            raise KeyError(f"{key!r} is not a parameter: with several optimizer classes, only parameters have state")
        return inner_states[0]

    def _fit_value(self, key: Any, value: Any) -> Any:
        if not isinstance(key, torch.Tensor):
            self._shared_state_for(key)
            return value
        param_state = self._find_param_state(key)
        if param_state is None:
            raise ConfigError(
                f"a tensor of shape {tuple(key.shape)} is not a parameter of this optimizer, so it has no state. Use "
                "a parameter from optimizer.param_groups."
            )
        return param_state.fit_values(value)

    def _commit(self, fitted: Mapping[Any, Any]) -> None:
        for key, value in fitted.items():
            param_state = self._find_param_state(key) if isinstance(key, torch.Tensor) else None
            if param_state is None:
                self._shared_state_for(key)[key] = value
            else:
                param_state.replace_state(value)
