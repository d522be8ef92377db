"""The user's optimizer class on this rank's parameters: the only holder of optimizer state."""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import local
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from ..comm.consensus import rollback_on_error
from ..errors import CheckpointError, ConfigError
from ..profiling import Phase, StepProfiler
from ..state.shard_tensor import ShardTensor
from ..state.state_dict import StateDict
from ..state.tensor_utils import (
    clone_tensor,
    deepcopy_except_tensors,
    inner_tensors,
    is_wrapper_subclass,
    map_inner_tensors,
    map_tensors,
)
from .host_buffers import is_offloadable

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


# ---------------------------------------------------------------------------------------------------------------------
# Loading as torch's optimizers do it, without what torch's loading spoils.


def load_state(
    optimizer: Optimizer, state_dict: StateDict, caller_tensors: Any, *, keep_on_host: bool = False
) -> Callable[[], None]:
    """Load a dict through the optimizer's own `load_state_dict`; returns how to undo it.

    `on_host`: state stays in host memory, if it is not small; else it goes where torch puts it.
    Hooks, overrides and `__setstate__` of the class see what they would see unsharded. Of the tensors in `local` those
    that are also in `foreign` are the caller's: they are copied. Nothing of his is changed.
    """
    before = dict(vars(optimizer))

    def undo() -> None:
        vars(optimizer).clear()
        vars(optimizer).update(before)

    with rollback_on_error(undo):
        with _preserve_types(optimizer, keep_on_host=keep_on_host):
            optimizer.load_state_dict(deepcopy_except_tensors(state_dict))
        _copy_shared(optimizer, _collect_storages(caller_tensors))
    return undo


def has_builtin_load(optimizer: Optimizer) -> bool:
    """Whether no code of others runs while it loads."""
    hooks = (*optimizer._optimizer_load_state_dict_pre_hooks, *optimizer._optimizer_load_state_dict_post_hooks)
    methods = (type(optimizer).load_state_dict, type(optimizer).__setstate__)
    return not hooks and all(method.__module__.startswith("torch.") for method in methods)


class _Opaque:
    """A value on its way through torch's loading, which would change its type."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _make_opaque(state_dict: StateDict, params: list[torch.Tensor], *, keep_on_host: bool) -> StateDict:
    """The dict for torch to load, with what it would spoil sealed, copied and already cast."""
    groups = state_dict["param_groups"]

    def wrap(param_id: Any, key: Any, value: Any) -> Any:
        if _is_preserved_by_torch(value) and not keep_on_host:
            return value

        def cast(tensor: torch.Tensor) -> torch.Tensor:
            stays = keep_on_host and tensor is value and is_offloadable(tensor)
            like = torch.empty(0, dtype=params[param_id].dtype, device="cpu") if stays else params[param_id]
            return Optimizer._process_value_according_to_param_policy(like, tensor, param_id, groups, key)

        return _Opaque(map_tensors(deepcopy_except_tensors(value), cast))

    state: dict[Any, Any] = {}
    for number, value in state_dict["state"].items():
        if not isinstance(number, int) or number >= len(params):
            state[number] = map_tensors(deepcopy_except_tensors(value), clone_tensor)
        elif isinstance(value, Mapping):
            state[number] = {key: wrap(number, key, item) for key, item in value.items()}
        else:
            state[number] = wrap(number, None, value)
    return {**state_dict, "state": state}


def _is_preserved_by_torch(value: Any) -> bool:
    """Whether torch's loading makes an equal copy: it rebuilds containers, but only the plain ones well."""
    if type(value) is dict:
        return all(map(_is_preserved_by_torch, value.values()))
    if type(value) in (list, tuple, set):
        return all(map(_is_preserved_by_torch, value))
    return isinstance(value, torch.Tensor) or not isinstance(value, Iterable)


def _unwrap_state(state: dict[Any, Any]) -> None:
    for param, value in state.items():
        if isinstance(value, dict):
            value.update({key: _unwrap(item) for key, item in value.items()})
        else:
            state[param] = _unwrap(value)


def _unwrap(value: Any) -> Any:
    return value.value if isinstance(value, _Opaque) else value


@contextmanager
def _preserve_types(optimizer: Optimizer, *, keep_on_host: bool) -> Iterator[None]:
    """While torch loads: seal what it would spoil at the last moment, and open it before `__setstate__` sees it."""

    def set_state(state: StateDict) -> None:
        _unwrap_state(state["state"])
        type(optimizer).__setstate__(optimizer, state)

    params = [param for group in optimizer.param_groups for param in group["params"]]
    handle = optimizer.register_load_state_dict_pre_hook(
        lambda _, saved: _make_opaque(saved, params, keep_on_host=keep_on_host)
    )
    vars(optimizer)["__setstate__"] = set_state
    try:
        yield
    finally:
        handle.remove()
        vars(optimizer).pop("__setstate__", None)


def _copy_shared(optimizer: Optimizer, shared_storages: set[int]) -> None:
    """Copy tensors that were taken over from the caller as they were."""

    def copy_if_shared(tensor: torch.Tensor) -> torch.Tensor:
        shared = tensor.layout != torch.strided or _storage_ptr(tensor) in shared_storages
        return tensor.clone() if shared else tensor

    for param, value in optimizer.state.items():
        optimizer.state[param] = map_tensors(value, lambda tensor: map_inner_tensors(tensor, copy_if_shared))


def _collect_storages(value: Any) -> set[int]:
    found: set[int] = set()

    def add(tensor: torch.Tensor) -> None:
        if is_wrapper_subclass(tensor):
            map_tensors(inner_tensors(tensor), add)
        elif tensor.layout == torch.strided:
            found.add(_storage_ptr(tensor.local if isinstance(tensor, ShardTensor) else tensor))

    map_tensors(value, add)
    return found


def _storage_ptr(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


# ---------------------------------------------------------------------------------------------------------------------
# Optimizers of several classes that work as one.


OPTIMIZER_KEY = "optimizer"
"""The option of a group that names its class, where there are several."""


class CompositeMember(Protocol):
    name: str
    group_ids: list[int]
    """Of the groups that it has."""
    inner: LocalOptimizer


class CompositeOptimizer:
    """This rank's inner optimizers, one for each kind that the user has given. Each sees its own groups only."""

    def __init__(self, members: Sequence[CompositeMember], profiler: StepProfiler) -> None:
        self._members, self._profiler = members, profiler

    @property
    def local_optimizers(self) -> list[LocalOptimizer]:
        return [member.inner for member in self._members]

    def push_options(self, outer_groups: Sequence[ParamGroup]) -> None:
        for member, groups in self._iter_members(outer_groups):
            member.inner.push_options(groups)

    def pull_options(self, outer_groups: Sequence[ParamGroup]) -> None:
        for member, groups in self._iter_members(outer_groups):
            member.inner.pull_options(groups)
            self._set_optimizer_key(member, groups)

    def pull_added_options(self, outer_groups: Sequence[ParamGroup], first_group: int) -> None:
        for member, groups in self._iter_members(outer_groups):
            member.inner.pull_added_options(groups, sum(number < first_group for number in member.group_ids))
            self._set_optimizer_key(member, groups)

    def _set_optimizer_key(self, member: CompositeMember, groups: Sequence[ParamGroup]) -> None:
        for group in groups if len(self._members) > 1 else ():
            group[OPTIMIZER_KEY] = member.name  # a loaded dict of other origin does not have it

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """All step. A closure is called once, for all of them."""
        if len(self._members) == 1:
            return self._step_member(self._members[0], *args, **kwargs)
        loss = None
        for closure in args:
            with torch.enable_grad():
                loss = closure()
        for member in self._members:
            self._step_member(member, **kwargs)
        return loss

    def _step_member(self, member: CompositeMember, *args: Any, **kwargs: Any) -> Any:
        with self._profiler.phase(Phase.INNER_STEP, member.name):
            return member.inner.step(*args, **kwargs)

    def check_optimizer_classes(self, saved_groups: Sequence[Mapping[str, Any]]) -> None:
        """Refuse groups of a loaded dict that say that they are of other classes."""
        for member in self._members if len(self._members) > 1 else ():
            for number in member.group_ids:
                found = saved_groups[number].get(OPTIMIZER_KEY, member.name)
                if _strip_rule_number(found) != _strip_rule_number(member.name):
                    raise CheckpointError(
                        f"group {number} of the loaded state dict is of {found}, but {member.name} updates it here. "
                        "Give shard() rules with the classes that it was saved with"
                    )

    def extra_state(self) -> StateDict:
        """What a class adds to torch's state dict. Those that do are refused where there are several."""
        return self._members[0].inner.extra_state() if len(self._members) == 1 else {}

    def _iter_members(self, outer_groups: Sequence[ParamGroup]) -> Iterator[tuple[CompositeMember, list[ParamGroup]]]:
        for member in self._members:
            yield member, [outer_groups[number] for number in member.group_ids]


def _strip_rule_number(name: str) -> str:
    """Without the number that tells rules of the same class apart."""
    return name.partition(" ")[0]


# ---------------------------------------------------------------------------------------------------------------------
# The fused implementation of an optimizer, where torch has one.


_IMPL_OPTIONS = ("fused", "foreach", "capturable", "differentiable")


def enable_fused(factory: OptimizerFactory) -> OptimizerFactory:
    """`recipe` with `fused=True`, unless the user has chosen, or there is no such thing for the device.

    Not on the CPU: fused kernels there round in another way than the default loops, and the last elements of a tensor
    in another way than the rest, so that bits would depend on where parameters are cut.
    """
    params = [param for group in factory.groups for param in group["params"]]
    if can_choose_impl(factory, "fused") and all(map(_supports_fused, params)):
        return replace(factory, defaults={**factory.defaults, "fused": True})
    return factory


def can_choose_impl(factory: OptimizerFactory, impl: str) -> bool:
    """Whether there is a `fused`, or a `foreach` implementation, and the user has not chosen any.

    Of torch's own classes only: what others mean by the word, or need for it, nobody knows.
    """
    made: Any = factory.optimizer_class
    preset: dict[str, Any] = {}
    if isinstance(made, functools.partial):
        made, preset = made.func, made.keywords
    given = {*preset, *factory.defaults, *(key for group in factory.groups for key in group)}
    is_torchs = (getattr(made, "__module__", None) or "").startswith("torch.optim.")
    return given.isdisjoint(_IMPL_OPTIONS) and is_torchs and impl in inspect.signature(made).parameters


def _supports_fused(param: torch.Tensor) -> bool:
    return param.is_floating_point() and param.device.type in ("cuda", "xpu", "mps", "mtia")
