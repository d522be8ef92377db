"""`optimizer.state` over flat shards: dicts without contents of their own, which read and write the inner state.

A parameter shows this rank's slice of its state, flat. Every operation has the meaning that it has for an unsharded
optimizer, and is local: all ranks make the same edits, and each takes from them what concerns its own slices.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ..errors import ConfigError
from ..layout.layout import Layout, ParamShard
from ..layout.spec import ParamSpec
from .._types import Rank
from .parts import OptimizerShard

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
