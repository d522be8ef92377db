"""The user's optimizer class on this rank's parameters: the only holder of optimizer state."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from ..checkpoint.compat import StateDict
from ..checkpoint.trees import copy_mutable, map_tensors

ParamGroup = dict[str, Any]
Factory = Callable[..., Optimizer]

_PER_RANK = ("params", "param_names")
"""Keys of a group that differ between this rank's view and everyone's."""


@dataclass(frozen=True)
class Recipe:
    """All it takes to make the user's optimizer. `groups` hold the user's own options and no defaults."""

    factory: Factory
    groups: list[ParamGroup]
    plain: bool
    """No dicts were given, and none will be handed on."""
    defaults: dict[str, Any]

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", [dict(group) for group in self.groups])

    @property
    def name(self) -> str:
        made_by = getattr(self.factory, "func", self.factory)
        return getattr(made_by, "__qualname__", type(made_by).__qualname__)

    def build(self, owned: set[int]) -> "ShardOptimizer":
        """An optimizer of the parameters whose ids are in `owned`."""
        return ShardOptimizer(self, owned)


class ShardOptimizer:
    """Steps the inner optimizer, and keeps it fed with what it needs.

    Its groups are those of the user, each with this rank's parameters only. Hyper-parameters belong to the
    outer groups: `push` brings them in before a step, `pull` brings what the step made of them back.
    """

    def __init__(self, recipe: Recipe, owned: set[int]) -> None:
        self._stand_ins: list[torch.Tensor] = []
        own = [self._own_group(group, owned) for group in recipe.groups]
        self.optimizer = recipe.factory(own[0]["params"] if recipe.plain else own, **recipe.defaults)
        self._leave()

    def add_group(self, group: ParamGroup, owned: set[int]) -> None:
        self.optimizer.add_param_group(self._own_group(group, owned))
        self._leave()

    def drop_groups(self, first: int) -> None:
        """Undo `add_group`, also one that failed halfway, for all groups from number `first` on."""
        for group in self.optimizer.param_groups[first:]:
            for param in group["params"]:
                self.optimizer.state.pop(param, None)
        del self.optimizer.param_groups[first:], self._stand_ins[first:]

    @property
    def params(self) -> list[torch.Tensor]:
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    def push(self, outer: Sequence[ParamGroup]) -> None:
        for inner, group in zip(self.optimizer.param_groups, outer, strict=True):
            _copy_options(group, inner)

    def pull(self, outer: Sequence[ParamGroup]) -> None:
        for inner, group in zip(self.optimizer.param_groups, outer, strict=True):
            _copy_options(inner, group)

    def load(self, local: StateDict) -> Callable[[], None]:
        """Load this rank's part as torch's own `load_state_dict` does; returns how to undo it.

        The caller's tensors and containers are neither kept nor changed.
        """
        before = dict(vars(self.optimizer))

        def undo() -> None:
            vars(self.optimizer).clear()
            vars(self.optimizer).update(before)

        try:
            self.optimizer.load_state_dict(_sealed(local, self.params))
            _unseal(self.optimizer.state, foreign=_storages(local["state"]))
        except BaseException:
            undo()
            raise
        return undo

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """The inner optimizer's step. Its own hooks fire, global ones do not: they fire for the outer step."""
        with self._occupied():
            return _call_step(self.optimizer, args, kwargs)

    @contextmanager
    def only(self, chosen: set[int]) -> Iterator[None]:
        """Hide all parameters but those with the ids in `chosen`, and keep the groups' other values as they are."""
        whole = [dict(group) for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["params"] = [param for param in group["params"] if id(param) in chosen]
        try:
            yield
        finally:
            for group, before in zip(self.optimizer.param_groups, whole, strict=True):
                group["params"] = before["params"]

    def _own_group(self, group: ParamGroup, owned: set[int]) -> ParamGroup:
        """The group as its user gave it, with this rank's parameters, or a stand-in where it has none."""
        names = group.get("param_names")
        mine = [i for i, param in enumerate(group["params"]) if id(param) in owned]
        stand_in = _stand_in(group["params"])
        self._stand_ins.append(stand_in)
        params: list[Any] = [group["params"][i] for i in mine] or [stand_in]
        if names is not None:
            params = list(zip([names[i] for i in mine] or ["stand-in"], params, strict=True))
        return {**{k: v for k, v in group.items() if k not in _PER_RANK}, "params": params}

    @contextmanager
    def _occupied(self) -> Iterator[None]:
        """Put a stand-in without a gradient into each empty group: many optimizers refuse or stumble over
        a group of none, while every optimizer knows parameters without gradients."""
        for group, stand_in in zip(self.optimizer.param_groups, self._stand_ins, strict=True):
            if not group["params"]:
                group["params"] = [stand_in]
        try:
            yield
        finally:
            self._leave()

    def _leave(self) -> None:
        for group, stand_in in zip(self.optimizer.param_groups, self._stand_ins, strict=True):
            if len(group["params"]) == 1 and group["params"][0] is stand_in:
                group["params"] = []
                if "param_names" in group:
                    group["param_names"] = []
                self.optimizer.state.pop(stand_in, None)


def _stand_in(params: Sequence[torch.Tensor]) -> torch.Tensor:
    """An empty parameter like those of the group: optimizers look at dtype, device and dimensions."""
    like = params[0] if params else torch.empty(0)
    return torch.nn.Parameter(like.detach().new_empty((0,) * like.dim()), requires_grad=like.is_floating_point())


def _copy_options(source: ParamGroup, target: ParamGroup) -> None:
    """All keys of `source`, and no others, in its order; what differs by rank stays."""
    kept = {key: target[key] for key in _PER_RANK if key in target}
    target.clear()
    target.update(source)
    target.update(kept)


def _call_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    hooked = type(optimizer).step
    unhooked = getattr(hooked, "__wrapped__", None) if getattr(hooked, "hooked", False) else None
    if unhooked is None or "step" in vars(optimizer):
        return optimizer.step(*args, **kwargs)
    args = (optimizer, *args)
    for before in list(optimizer._optimizer_step_pre_hooks.values()):
        args, kwargs = before(optimizer, args, kwargs) or (args, kwargs)
    result = unhooked(*args, **kwargs)
    for after in list(optimizer._optimizer_step_post_hooks.values()):
        after(optimizer, args, kwargs)
    return result


class _Sealed:
    """A value on its way through torch's loading, which would change its type."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _sealed(local: StateDict, params: list[torch.Tensor]) -> StateDict:
    """The dict for torch to load, with what it would spoil sealed, copied and already cast."""
    groups = local["param_groups"]

    def seal(number: Any, key: Any, value: Any) -> Any:
        if _kept_by_torch(value):
            return value
        cast = Optimizer._process_value_according_to_param_policy
        mine = copy_mutable(value)
        return _Sealed(map_tensors(mine, lambda tensor: cast(params[number], tensor, number, groups, key)))

    state: dict[Any, Any] = {}
    for number, value in local["state"].items():
        if not isinstance(number, int) or number >= len(params):
            state[number] = map_tensors(copy_mutable(value), torch.clone)
        elif isinstance(value, Mapping):
            state[number] = {key: seal(number, key, item) for key, item in value.items()}
        else:
            state[number] = seal(number, None, value)
    return {"state": state, "param_groups": groups}


def _kept_by_torch(value: Any) -> bool:
    """Whether torch's loading makes an equal copy: it rebuilds containers, but only the plain ones well."""
    if type(value) is dict:
        return all(map(_kept_by_torch, value.values()))
    if type(value) in (list, tuple, set):
        return all(map(_kept_by_torch, value))
    return isinstance(value, torch.Tensor) or not isinstance(value, Iterable)


def _unseal(state: dict[Any, Any], foreign: set[int]) -> None:
    """Open what was sealed, and copy tensors that torch took over from the caller as they were."""

    def own(value: Any) -> Any:
        opened = value.value if isinstance(value, _Sealed) else value
        return map_tensors(opened, lambda tensor: tensor.clone() if _storage(tensor) in foreign else tensor)

    for param, value in state.items():
        if isinstance(value, dict):
            value.update({key: own(item) for key, item in value.items()})
        else:
            state[param] = own(value)


def _storages(value: Any) -> set[int]:
    found: set[int] = set()
    map_tensors(value, lambda tensor: found.add(_storage(tensor)))
    return found


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
