"""`optimizer.state` over flat shards: dicts without contents of their own, which read and write the inner state.

A parameter shows this rank's slice of its state, flat. Every operation has the meaning that it has for an unsharded
optimizer, and is local: all ranks make the same edits, and each takes from them what concerns its own slices.
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
from ..layout.partition import Partitioner
from ..layout.spec import ParamSpec
from ..state.state_dict import SavedState, StateShard
from .flat_params import FlatParam, FlatParams, ShardStorage
from .inner import LocalOptimizer, OptimizerFactory, ParamGroup
from .probe import FlopCost, OptimizerTraits, SplitRule, probe_split_rule, probe_traits
from .state import ShardedState, StateKeys

# ---------------------------------------------------------------------------------------------------------------------
# One kind of optimizer: what is known of it, and what this rank holds for it.


ShardStateAllocatorFn = Callable[[ParamShard, Any, tuple[int, ...], torch.dtype], torch.Tensor]
"""Memory for state of a piece: of a key, a shape and a dtype."""


class OptimizerSpec:
    """A class with the user's options for it, and what the self-test finds."""

    def __init__(self, name: str, factory: OptimizerFactory, partitioner: Partitioner | None = None) -> None:
        """`partition`: what its user wants for it alone."""
        self.name, self.factory, self.partitioner = name, factory, partitioner

    @cached_property
    def traits(self) -> OptimizerTraits:
        return probe_traits(self.factory)

    @cached_property
    def split_rule(self) -> SplitRule | None:
        """How it updates pieces of a parameter as it would update the whole; None if it does not."""
        return None if self.traits.couples_params else probe_split_rule(self.factory)

    @cached_property
    def step_cost(self) -> FlopCost:
        """What it takes to update a parameter as a whole."""
        return FlopCost(self.factory)

    def check_constructible(self) -> None:
        """A self-test of an optimizer that cannot, since its arguments are wrong, says nothing: raise its own error."""
        self.factory.build({id(param) for group in self.factory.groups for param in group["params"]})


class OptimizerShard:
    """The parameters of one kind: the inner optimizer, the segments that it updates, their state."""

    inner: LocalOptimizer

    def __init__(self, rank: Rank, spec: OptimizerSpec, storage: ShardStorage, *, splits_params: bool) -> None:
        self.name, self.traits, self._factory = spec.name, spec.traits, spec.factory
        self.group_ids: list[int] = []
        """Of its groups."""
        cutting = spec.split_rule if splits_params else None
        joins = cutting is not None and cutting.granularity.is_elementwise
        self.flat_params = FlatParams(
            rank, storage.view, can_join_shards=joins, param_shaped_keys=spec.traits.param_shaped_keys
        )
        self.sharded_state = ShardedState(
            self.flat_params, storage, spec.factory, frozenset() if cutting is None else cutting.shared_inner_names
        )

    def __iter__(self) -> Iterator[FlatParam]:
        return iter(self.flat_params)

    def prepare(self, layout: Layout, groups: Sequence[ParamGroup], group_ids: Sequence[int]) -> None:
        """Have all groups with these numbers."""
        known, self.group_ids = len(self.group_ids), list(group_ids)
        mine = [groups[number] for number in group_ids]
        self.flat_params.extend(layout, self.group_ids)
        own = self.flat_params.make_inner_groups(mine)
        if not known:
            self.inner = replace(self._factory, groups=own).build(self.flat_params.param_ids())
            return
        self.inner.add_groups(mine[:known], own[known:], self.flat_params.param_ids())

    def rollback(self, layout: Layout, first_group: int) -> None:
        """Undo `prepare`, also one that failed halfway, for the groups from a number on."""
        self.group_ids = [number for number in self.group_ids if number < first_group]
        self.inner.drop_groups(len(self.group_ids))
        self.flat_params.rollback(layout, len(self.group_ids))

    def split_by_mask(self, mask: bytes) -> None:
        self.flat_params.split_by_mask(mask, self.inner.optimizer)

    def sync_user_edits(self) -> None:
        """Take over what was done to `optimizer.state` since the last step."""
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
        """Take this rank's part of it; returns how to undo it."""
        return self.sharded_state.load(
            self.inner.optimizer, saved.select_groups(self.group_ids, specs), specs, assign=assign
        )


# ---------------------------------------------------------------------------------------------------------------------
# `optimizer.state` over flat shards: dicts without contents of their own, which read and write the inner state.
#
# A parameter shows this rank's slice of its state, flat. Every operation has the meaning that it has for an unsharded
# optimizer, and is local: all ranks make the same edits, and each takes from them what concerns its own slices.


_MISSING = object()


class _DictView(dict[Any, Any]):
    """A dict for everyone who asks, whose contents are elsewhere.

    Subclasses define `__getitem__`, `__setitem__`, `__delitem__` and `__iter__`, which iterates over a copy of the
    keys: values may be assigned inside a loop.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Code that rebuilds containers by `type(it)(contents)` gets a plain dict."""
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


# Hazard: what a dict has of its own would read its own, empty contents.
for _name in ("__contains__", "__eq__", "clear", "get", "items", "keys", "pop", "update", "values"):
    setattr(_DictView, _name, getattr(MutableMapping, _name))


class ParamStateView(_DictView):
    """The state of one parameter, as far as this rank holds it."""

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
        """Whether there is any on this rank, be it empty."""
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
            raise KeyError(f"{key!r}: this rank holds no part of {self._spec.label}")
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
        """Where this rank holds no part of the parameter there is nothing to remove: that is no error."""
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
        """All values fit, or none is assigned."""
        fitted = self.fit_values(dict(*args, **kwargs))
        if self._param_shard is not None:
            for key, value in fitted.items():
                self._optimizer_shard.sharded_state.set_value(self._optimizer, self._param_shard, key, value)

    def clear(self) -> None:
        if self:
            self.replace_state({})

    def fit_values(self, values: Mapping[Any, Any]) -> dict[Any, Any]:
        """What this rank's slice takes of state for the parameter; raises if that does not fit."""
        if not isinstance(values, Mapping):
            raise ConfigError(f"the state of {self._spec.label} must be a dict, got a {type(values).__name__}")
        return {key: self._fit_value(key, value) for key, value in values.items()}

    def replace_state(self, fitted: dict[Any, Any] | None) -> dict[Any, Any]:
        """Have other state, or none; returns what was there."""
        if self._param_shard is None:
            return {}
        return self._optimizer_shard.sharded_state.replace_state(self._optimizer, self._param_shard, fitted)

    @property
    def _optimizer(self) -> Optimizer:
        return self._optimizer_shard.inner.optimizer

    def _fit_value(self, key: Any, value: Any) -> Any:
        pieces = self._layout.param_shards(self._spec.index)
        cut = not all(map(self._optimizer_shard.flat_params.is_full_param, pieces))
        return self._optimizer_shard.sharded_state.fit_value(self._spec, self._param_shard, key, value, is_sharded=cut)


class OptimizerStateView(_DictView):
    """The state of all parameters that this rank holds a part of, and state that belongs to no parameter."""

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
        """`find`: the state of a parameter; None for any other tensor."""
        view: OptimizerStateView = cls._new_view()
        view._params, view._optimizer_shards, view._find_param_state, view._world_size = (
            params,
            optimizer_shards,
            find_param_state,
            world_size,
        )
        return view

    def __iter__(self) -> Iterator[Any]:
        """Parameters in their order, as an unsharded optimizer has them, then what belongs to none."""
        having = (
            segment
            for part in self._optimizer_shards
            for segment in part
            if segment.param in part.inner.optimizer.state
        )
        params = [
            self._params[index] for index in sorted(it.param for segment in having for it in segment.param_shards)
        ]
        return iter(
            [*params, *(key for state in self._inner_states() for key in state if not isinstance(key, torch.Tensor))]
        )

    def __contains__(self, key: Any) -> bool:
        if isinstance(key, torch.Tensor):
            found = self._find_param_state(key)
            return found is not None and found.has_state
        return any(key in state for state in self._inner_states())

    def __getitem__(self, key: Any) -> Any:
        """As of a `defaultdict(dict)`: a parameter without state has an empty one, which may be filled."""
        if isinstance(key, torch.Tensor):
            found = self._find_param_state(key)
            return {} if found is None else found
        return self._shared_state_for(key)[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._commit({key: self._fit_value(key, value)})

    def __delitem__(self, key: Any) -> None:
        self.pop(key)

    def get(self, key: Any, default: Any = None) -> Any:
        return self[key] if key in self else default  # noqa: SIM401 (this is `get`)

    def pop(self, key: Any, default: Any = _MISSING) -> Any:
        """Where this rank holds no part of a parameter there is nothing to remove: that is no error."""
        found = self._find_param_state(key) if isinstance(key, torch.Tensor) else None
        if key in self:
            return self._shared_state_for(key).pop(key) if found is None else found.replace_state(None)
        if default is not _MISSING:
            return default
        if found is None or found.has_shard:
            raise KeyError(key)
        return {}

    def popitem(self) -> tuple[Any, Any]:
        if self._world_size > 1:
            raise ConfigError(
                f"popitem() would remove the state of a different parameter on each of the {self._world_size} ranks, "
                "since each holds its own part of the state. Use pop(param), or clear() to remove everything."
            )
        if not self:
            raise KeyError("popitem(): the state is empty")
        key = next(reversed(self))
        return key, self.pop(key)

    def clear(self) -> None:
        for part in self._optimizer_shards:
            part.sharded_state.clear(part.inner.optimizer)

    def update(self, *args: Any, **kwargs: Any) -> None:
        """All values fit, or none is assigned."""
        self._commit({key: self._fit_value(key, value) for key, value in dict(*args, **kwargs).items()})

    def replace_state(self, contents: Any) -> None:
        """`optimizer.state = contents`. All values fit, or nothing changes."""
        if contents is self:
            return
        fitted = {key: self._fit_value(key, value) for key, value in dict(contents).items()}
        self.clear()
        self._commit(fitted)

    def copy(self) -> dict[Any, Any]:
        found = {key: it.copy() if isinstance(it, ParamStateView) else it for key, it in self.items()}
        return defaultdict(dict, found)

    def _inner_states(self) -> list[dict[Any, Any]]:
        return [part.inner.optimizer.state for part in self._optimizer_shards]

    def _shared_state_for(self, key: Any) -> dict[Any, Any]:
        """Where state that belongs to no parameter is, or would be."""
        inner = self._inner_states()
        for state in inner:
            if key in state:
                return state
        if len(inner) > 1:
            raise KeyError(f"{key!r} is not a parameter: with several classes there is only state of parameters")
        return inner[0]

    def _fit_value(self, key: Any, value: Any) -> Any:
        if not isinstance(key, torch.Tensor):
            self._shared_state_for(key)
            return value
        found = self._find_param_state(key)
        if found is None:
            raise ConfigError(
                f"optimizer.state takes no state for a tensor of shape {tuple(key.shape)}: it is not a parameter of "
                "this optimizer. Use one from optimizer.param_groups."
            )
        return found.fit_values(value)

    def _commit(self, fitted: Mapping[Any, Any]) -> None:
        for key, value in fitted.items():
            found = self._find_param_state(key) if isinstance(key, torch.Tensor) else None
            if found is None:
                self._shared_state_for(key)[key] = value
            else:
                found.replace_state(value)
