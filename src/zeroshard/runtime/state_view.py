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
from ..layout.layout import Layout, Piece
from ..layout.specs import ParamSpec
from ..units import Rank
from .parts import Part

_MISSING = object()


class _LiveDict(dict[Any, Any]):
    """A dict for everyone who asks, whose contents are elsewhere.

    Subclasses define `__getitem__`, `__setitem__`, `__delitem__` and `__iter__`, which iterates over a copy of the
    keys: values may be assigned inside a loop.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Code that rebuilds containers by `type(it)(contents)` gets a plain dict."""
        return dict(*args, **kwargs)

    @classmethod
    def _make(cls) -> Any:
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
    setattr(_LiveDict, _name, getattr(MutableMapping, _name))


class ParamState(_LiveDict):
    """The state of one parameter, as far as this rank holds it."""

    _part: Part
    _layout: Layout
    _spec: ParamSpec
    _piece: Piece | None

    @classmethod
    def of(cls, part: Part, layout: Layout, index: int, rank: Rank) -> "ParamState":
        view: ParamState = cls._make()
        view._part, view._layout, view._spec = part, layout, layout.params[index]
        view._piece = layout.piece_of(index, rank)
        return view

    @property
    def is_held(self) -> bool:
        return self._piece is not None

    @property
    def exists(self) -> bool:
        """Whether there is any on this rank, be it empty."""
        return self._piece is not None and self._part.states.has_any(self._optimizer, self._piece)

    def __iter__(self) -> Iterator[Any]:
        return iter([] if self._piece is None else list(self._part.states.present(self._optimizer, self._piece)))

    def __getitem__(self, key: Any) -> Any:
        if self._piece is None:
            raise KeyError(f"{key!r}: this rank holds no part of {self._spec.label}")
        return self._part.states.value(self._optimizer, self._piece, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        fitted = self._fit(key, value)
        if self._piece is not None:
            self._part.states.assign(self._optimizer, self._piece, key, fitted)

    def __delitem__(self, key: Any) -> None:
        if self._piece is not None:
            if key not in self:
                raise KeyError(key)
            self._part.states.delete(self._optimizer, self._piece, key)

    def __contains__(self, key: Any) -> bool:
        return self._piece is not None and key in self._part.states.present(self._optimizer, self._piece)

    def pop(self, key: Any, default: Any = _MISSING) -> Any:
        """Where this rank holds no part of the parameter there is nothing to remove: that is no error."""
        if key not in self:
            if default is _MISSING and self._piece is not None:
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
        fitted = self.fit_all(dict(*args, **kwargs))
        if self._piece is not None:
            for key, value in fitted.items():
                self._part.states.assign(self._optimizer, self._piece, key, value)

    def clear(self) -> None:
        if self:
            self.replace({})

    def fit_all(self, given: Mapping[Any, Any]) -> dict[Any, Any]:
        """What this rank's slice takes of state for the parameter; raises if that does not fit."""
        if not isinstance(given, Mapping):
            raise ConfigError(f"the state of {self._spec.label} must be a dict, got a {type(given).__name__}")
        return {key: self._fit(key, value) for key, value in given.items()}

    def replace(self, fitted: dict[Any, Any] | None) -> dict[Any, Any]:
        """Have other state, or none; returns what was there."""
        if self._piece is None:
            return {}
        return self._part.states.replace(self._optimizer, self._piece, fitted)

    @property
    def _optimizer(self) -> Optimizer:
        return self._part.inner.optimizer

    def _fit(self, key: Any, value: Any) -> Any:
        pieces = self._layout.pieces_of_param(self._spec.index)
        cut = not all(map(self._part.holdings.is_whole, pieces))
        return self._part.states.fitted(self._spec, self._piece, key, value, cut=cut)


class FlatState(_LiveDict):
    """The state of all parameters that this rank holds a part of, and state that belongs to no parameter."""

    _params: Sequence[torch.Tensor]
    _parts: Sequence[Part]
    _find: Callable[[torch.Tensor], ParamState | None]
    _ranks: int

    @classmethod
    def of(
        cls,
        params: Sequence[torch.Tensor],
        parts: Sequence[Part],
        find: Callable[[torch.Tensor], ParamState | None],
        ranks: int,
    ) -> "FlatState":
        """`find`: the state of a parameter; None for any other tensor."""
        view: FlatState = cls._make()
        view._params, view._parts, view._find, view._ranks = params, parts, find, ranks
        return view

    def __iter__(self) -> Iterator[Any]:
        """Parameters in their order, as an unsharded optimizer has them, then what belongs to none."""
        having = (segment for part in self._parts for segment in part if segment.param in part.inner.optimizer.state)
        params = [self._params[index] for index in sorted(it.param for segment in having for it in segment.pieces)]
        return iter([*params, *(key for state in self._inner() for key in state if not isinstance(key, torch.Tensor))])

    def __contains__(self, key: Any) -> bool:
        if isinstance(key, torch.Tensor):
            found = self._find(key)
            return found is not None and found.exists
        return any(key in state for state in self._inner())

    def __getitem__(self, key: Any) -> Any:
        """As of a `defaultdict(dict)`: a parameter without state has an empty one, which may be filled."""
        if isinstance(key, torch.Tensor):
            found = self._find(key)
            return {} if found is None else found
        return self._shared(key)[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._commit({key: self._fit(key, value)})

    def __delitem__(self, key: Any) -> None:
        self.pop(key)

    def get(self, key: Any, default: Any = None) -> Any:
        return self[key] if key in self else default  # noqa: SIM401 (this is `get`)

    def pop(self, key: Any, default: Any = _MISSING) -> Any:
        """Where this rank holds no part of a parameter there is nothing to remove: that is no error."""
        found = self._find(key) if isinstance(key, torch.Tensor) else None
        if key in self:
            return self._shared(key).pop(key) if found is None else found.replace(None)
        if default is not _MISSING:
            return default
        if found is None or found.is_held:
            raise KeyError(key)
        return {}

    def popitem(self) -> tuple[Any, Any]:
        if self._ranks > 1:
            raise ConfigError(
                f"popitem() would remove the state of a different parameter on each of the {self._ranks} ranks, since "
                "each holds its own part of the state. Use pop(param), or clear() to remove everything."
            )
        if not self:
            raise KeyError("popitem(): the state is empty")
        key = next(reversed(self))
        return key, self.pop(key)

    def clear(self) -> None:
        for part in self._parts:
            part.states.clear(part.inner.optimizer)

    def update(self, *args: Any, **kwargs: Any) -> None:
        """All values fit, or none is assigned."""
        self._commit({key: self._fit(key, value) for key, value in dict(*args, **kwargs).items()})

    def replace(self, contents: Any) -> None:
        """`optimizer.state = contents`. All values fit, or nothing changes."""
        if contents is self:
            return
        fitted = {key: self._fit(key, value) for key, value in dict(contents).items()}
        self.clear()
        self._commit(fitted)

    def copy(self) -> dict[Any, Any]:
        found = {key: it.copy() if isinstance(it, ParamState) else it for key, it in self.items()}
        return defaultdict(dict, found)

    def _inner(self) -> list[dict[Any, Any]]:
        return [part.inner.optimizer.state for part in self._parts]

    def _shared(self, key: Any) -> dict[Any, Any]:
        """Where state that belongs to no parameter is, or would be."""
        inner = self._inner()
        for state in inner:
            if key in state:
                return state
        if len(inner) > 1:
            raise KeyError(f"{key!r} is not a parameter: with several classes there is only state of parameters")
        return inner[0]

    def _fit(self, key: Any, value: Any) -> Any:
        if not isinstance(key, torch.Tensor):
            self._shared(key)
            return value
        found = self._find(key)
        if found is None:
            raise ConfigError(
                f"optimizer.state takes no state for a tensor of shape {tuple(key.shape)}: it is not a parameter of "
                "this optimizer. Use one from optimizer.param_groups."
            )
        return found.fit_all(value)

    def _commit(self, fitted: Mapping[Any, Any]) -> None:
        for key, value in fitted.items():
            found = self._find(key) if isinstance(key, torch.Tensor) else None
            if found is None:
                self._shared(key)[key] = value
            else:
                found.replace(value)
