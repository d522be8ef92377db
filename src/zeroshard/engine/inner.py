"""The user's optimizer class on this rank's parameters: the only holder of optimizer state."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import local
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from ..errors import ConfigError
from ..state.state_dict import StateDict
from ..state.trees import clone_tensor, deepcopy_except_tensors, map_tensors

ParamGroup = dict[str, Any]
OptimizerConstructor = Callable[..., Optimizer]

PER_RANK_KEYS = ("params", "param_names")
"""Keys of a group that differ between this rank's view and everyone's."""


@dataclass(frozen=True)
class OptimizerFactory:
    """All it takes to make the user's optimizer. `groups` hold the user's own options and no defaults."""

    optimizer_class: OptimizerConstructor
    groups: list[ParamGroup]
    has_plain_params: bool
    """No dicts were given, and none will be handed on."""
    defaults: dict[str, Any]

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", [dict(group) for group in self.groups])

    @property
    def name(self) -> str:
        made_by = getattr(self.optimizer_class, "func", self.optimizer_class)
        return getattr(made_by, "__qualname__", type(made_by).__qualname__)

    def build(self, owned_ids: set[int]) -> "LocalOptimizer":
        """An optimizer of the parameters whose ids are in `owned`."""
        return LocalOptimizer(self, owned_ids)


class InnerOptimizer(Protocol):
    """The optimizers that a rank has, of one class or of several."""

    @property
    def local_optimizers(self) -> "list[LocalOptimizer]": ...

    def push_options(self, outer_groups: Sequence[ParamGroup]) -> None: ...

    def pull_options(self, outer_groups: Sequence[ParamGroup]) -> None: ...

    def pull_added_options(self, outer_groups: Sequence[ParamGroup], first_group: int) -> None: ...

    def step(self, *args: Any, **kwargs: Any) -> Any: ...

    def check_optimizer_classes(self, saved_groups: Sequence[Mapping[str, Any]]) -> None: ...

    def extra_state(self) -> StateDict: ...


class LocalOptimizer:
    """Steps the inner optimizer, and keeps it fed with what it needs.

    Its groups are those of the user, each with this rank's parameters only. Hyper-parameters belong to the
    outer groups: `push` brings them in before a step, `pull` brings what the step made of them back.
    """

    def __init__(self, factory: OptimizerFactory, owned_ids: set[int]) -> None:
        self.factory = factory
        self._placeholders: list[torch.Tensor] = []
        own = [self._make_local_group(group, owned_ids) for group in factory.groups]
        self.optimizer = factory.optimizer_class(
            own[0]["params"] if factory.has_plain_params else own, **factory.defaults
        )
        made = len(self.optimizer.param_groups)
        if made != len(own):
            raise ConfigError(
                f"{factory.name} made {made} parameter groups of the {len(own)} it was given: "
                "group the parameters before they are handed to the sharded optimizer"
            )
        self._remove_placeholders()

    @property
    def local_optimizers(self) -> "list[LocalOptimizer]":
        return [self]

    def add_groups(
        self, outer_groups: Sequence[ParamGroup], new_groups: Sequence[ParamGroup], owned_ids: set[int]
    ) -> None:
        """Add the `new` groups. `outer`: those that it has."""
        if self._overrides_add_param_group:
            self.push_options(outer_groups)
        first = len(self._placeholders)
        for group in new_groups:
            self.optimizer.add_param_group(self._make_local_group(group, owned_ids))
        self._remove_placeholders(first)

    def drop_groups(self, first_group: int) -> None:
        """Undo `add_groups`, also where it failed halfway, for all groups from number `first` on."""
        for group in self.optimizer.param_groups[first_group:]:
            for param in group["params"]:
                self.optimizer.state.pop(param, None)
        del self.optimizer.param_groups[first_group:], self._placeholders[first_group:]

    def push_options(self, outer_groups: Sequence[ParamGroup]) -> None:
        for inner, group in zip(self.optimizer.param_groups, outer_groups, strict=True):
            _copy_options(group, inner)

    def pull_options(self, outer_groups: Sequence[ParamGroup]) -> None:
        for inner, group in zip(self.optimizer.param_groups, outer_groups, strict=True):
            _copy_options(inner, group)

    def pull_added_options(self, outer_groups: Sequence[ParamGroup], first_group: int) -> None:
        """Bring back what adding the groups from number `first` on made of their options."""
        if self._overrides_add_param_group:
            self.pull_options(outer_groups)
            return
        for inner, group in zip(self.optimizer.param_groups[first_group:], outer_groups[first_group:], strict=True):
            _copy_options(inner, group)

    @property
    def _overrides_add_param_group(self) -> bool:
        """Whether adding a group may read or change the options of others. If not, it costs no look at them."""
        return type(self.optimizer).add_param_group is not Optimizer.add_param_group

    def check_optimizer_classes(self, saved_groups: Sequence[Mapping[str, Any]]) -> None:
        """There is one, and groups do not name it."""

    def extra_state(self) -> StateDict:
        """What the optimizer's class adds to torch's state dict."""
        if type(self.optimizer).state_dict is Optimizer.state_dict:
            return {}
        return {k: v for k, v in self.optimizer.state_dict().items() if k not in ("state", "param_groups")}

    def shared_state(self) -> dict[Any, Any]:
        """State that belongs to no parameter."""
        return {key: value for key, value in self.optimizer.state.items() if not isinstance(key, torch.Tensor)}

    def snapshot_counters(self) -> Callable[[], None]:
        """How to undo what steps do to numbers on the optimizer itself, to tensors in its groups, and to state that
        belongs to no parameter."""
        counts = {key: it for key, it in vars(self.optimizer).items() if isinstance(it, (int, float, torch.Tensor))}
        options = [value for group in self.optimizer.param_groups for value in group.values()]
        tensors = [it for it in (*counts.values(), *options) if isinstance(it, torch.Tensor)]
        values = [tensor.detach().clone() for tensor in tensors]
        shared = _copy_state(self.shared_state())

        def restore() -> None:
            vars(self.optimizer).update(counts)
            with torch.no_grad():
                for tensor, value in zip(tensors, values, strict=True):
                    tensor.copy_(value)
            for key in self.shared_state():
                del self.optimizer.state[key]
            self.optimizer.state.update(_copy_state(shared))

        return restore

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """The inner optimizer's step. Its own hooks fire, global ones do not: they fire for the outer step."""
        with self._with_placeholders(), _track_step():
            return _step_without_global_hooks(self.optimizer, args, kwargs)

    def has_mode(self, mode: str) -> bool:
        """Whether it wants to be told that it shall `train` or `eval`."""
        return callable(getattr(self.optimizer, mode, None))

    def set_mode(self, mode: str) -> None:
        if self.has_mode(mode):
            with self._with_placeholders():
                getattr(self.optimizer, mode)()

    @contextmanager
    def restrict_to(self, param_ids: set[int]) -> Iterator[None]:
        """Hide all parameters but those with the ids in `chosen`, and keep the groups' other values as they are."""
        whole = [dict(group) for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["params"] = [param for param in group["params"] if id(param) in param_ids]
        try:
            yield
        finally:
            for group, before in zip(self.optimizer.param_groups, whole, strict=True):
                group.update({key: before[key] for key in PER_RANK_KEYS if key in before})

    def _make_local_group(self, group: ParamGroup, owned_ids: set[int]) -> ParamGroup:
        """The group as its user gave it, with this rank's parameters, or a stand-in where it has none."""
        names = group.get("param_names")
        mine = [i for i, param in enumerate(group["params"]) if id(param) in owned_ids]
        stand_in = _make_placeholder(group["params"])
        self._placeholders.append(stand_in)
        params: list[Any] = [group["params"][i] for i in mine] or [stand_in]
        if names is not None:
            params = list(zip([names[i] for i in mine] or ["stand-in"], params, strict=True))
        return {**{k: v for k, v in group.items() if k not in PER_RANK_KEYS}, "params": params}

    @contextmanager
    def _with_placeholders(self) -> Iterator[None]:
        """Put a stand-in without a gradient into each empty group: many optimizers refuse or stumble over
        a group of none, while every optimizer knows parameters without gradients."""
        for group, stand_in in zip(self.optimizer.param_groups, self._placeholders, strict=True):
            if not group["params"]:
                group["params"] = [stand_in]
        try:
            yield
        finally:
            self._remove_placeholders()

    def _remove_placeholders(self, first_group: int = 0) -> None:
        """Take the stand-ins out again, in groups from number `first` on."""
        for group, stand_in in zip(
            self.optimizer.param_groups[first_group:], self._placeholders[first_group:], strict=True
        ):
            if len(group["params"]) == 1 and group["params"][0] is stand_in:
                group["params"] = []
                if "param_names" in group:
                    group["param_names"] = []
                self.optimizer.state.pop(stand_in, None)


_THREAD_LOCAL = local()


def is_stepping() -> bool:
    """Whether this thread is inside the step of an inner optimizer, which may consist of others."""
    return getattr(_THREAD_LOCAL, "steps", 0) > 0


@contextmanager
def _track_step() -> Iterator[None]:
    before = getattr(_THREAD_LOCAL, "steps", 0)
    _THREAD_LOCAL.steps = before + 1
    try:
        yield
    finally:
        _THREAD_LOCAL.steps = before


def _copy_state(state: dict[Any, Any]) -> dict[Any, Any]:
    copied: dict[Any, Any] = map_tensors(deepcopy_except_tensors(state), clone_tensor)
    return copied


def _make_placeholder(params: Sequence[torch.Tensor]) -> torch.Tensor:
    """An empty parameter like those of the group: optimizers look at dtype, device and dimensions."""
    like = params[0] if params else torch.empty(0)
    return torch.nn.Parameter(like.detach().new_empty((0,) * like.dim()), requires_grad=like.is_floating_point())


def _copy_options(source: ParamGroup, target: ParamGroup) -> None:
    """All keys of `source`, and no others, in its order; what differs by rank stays."""
    kept = {key: target[key] for key in PER_RANK_KEYS if key in target}
    target.clear()
    target.update(source)
    target.update(kept)


def _step_without_global_hooks(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
