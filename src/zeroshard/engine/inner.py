"""The user's optimizer, built on this rank's parameters. It is the only holder of optimizer state.

The sharded optimizer keeps the user's parameter groups ("outer groups") with all parameters and all options. The inner
optimizer has the same groups, each with this rank's parameters only. Options are pushed to it before a step and pulled
back afterwards.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import local
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from .._torch_compat import cast_loaded_state, load_state_dict_hooks, step_hooks, unhooked_step
from ..comm.consensus import rollback_on_error
from ..errors import CheckpointError, ConfigError
from ..profiling import Phase, StepProfiler
from ..state.shard_tensor import local_memory
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
"""Keys of a parameter group whose values differ between ranks."""


@dataclass(frozen=True)
class OptimizerFactory:
    """Everything needed to build the user's optimizer. `groups` hold the options that the user set, no defaults."""

    optimizer_class: OptimizerConstructor
    groups: list[ParamGroup]
    has_plain_params: bool
    """The user passed parameters instead of group dicts, so `optimizer_class` gets parameters, too."""
    defaults: dict[str, Any]

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", [dict(group) for group in self.groups])

    @property
    def name(self) -> str:
        constructor = getattr(self.optimizer_class, "func", self.optimizer_class)
        return getattr(constructor, "__qualname__", type(constructor).__qualname__)

    def build(self, owned_ids: set[int]) -> "LocalOptimizer":
        """Build an optimizer for the parameters whose ids are in `owned_ids`."""
        return LocalOptimizer(self, owned_ids)


class LocalOptimizer:
    """An instance of the user's optimizer class that holds this rank's parameters.

    It has all groups of the user, each with this rank's parameters only. Hyper-parameters belong to the outer groups:
    `push_options` copies them in before a step, `pull_options` copies back what the step changed.
    """

    def __init__(self, factory: OptimizerFactory, owned_ids: set[int]) -> None:
        self.factory = factory
        self._stand_ins: list[torch.Tensor] = []
        local_groups = [self._make_local_group(group, owned_ids) for group in factory.groups]
        try:
            self.optimizer = factory.optimizer_class(
                local_groups[0]["params"] if factory.has_plain_params else local_groups, **factory.defaults
            )
        except TypeError as error:
            if error.__traceback__ is not None and error.__traceback__.tb_next is None:
                # The call itself failed: an option does not exist, or a required one is missing. Raise it explicitly:
                # `_tracebacks` then hides zeroshard's frames.
                raise error.with_traceback(None) from None
            raise
        num_groups = len(self.optimizer.param_groups)
        if num_groups != len(local_groups):
            raise ConfigError(
                f"{factory.name} made {num_groups} parameter groups from {len(local_groups)}. Create the groups "
                "yourself and pass them to the sharded optimizer."
            )
        self._remove_stand_ins()

    def add_groups(
        self, outer_groups: Sequence[ParamGroup], new_groups: Sequence[ParamGroup], owned_ids: set[int]
    ) -> None:
        """Add `new_groups`. `outer_groups` are the groups that exist already."""
        if self._overrides_add_param_group:
            self.push_options(outer_groups)
        first_group = len(self._stand_ins)
        for group in new_groups:
            self.optimizer.add_param_group(self._make_local_group(group, owned_ids))
        self._remove_stand_ins(first_group)

    def drop_groups(self, first_group: int) -> None:
        """Remove all groups from index `first_group` on: undoes `add_groups`, even one that failed halfway."""
        for group in self.optimizer.param_groups[first_group:]:
            for param in group["params"]:
                self.optimizer.state.pop(param, None)
        del self.optimizer.param_groups[first_group:], self._stand_ins[first_group:]

    def push_options(self, outer_groups: Sequence[ParamGroup]) -> None:
        """Copy the options of the outer groups into the inner optimizer."""
        for inner, outer in zip(self.optimizer.param_groups, outer_groups, strict=True):
            _copy_options(outer, inner)

    def pull_options(self, outer_groups: Sequence[ParamGroup]) -> None:
        """Copy the options of the inner optimizer, which steps may change, back to the outer groups."""
        for inner, outer in zip(self.optimizer.param_groups, outer_groups, strict=True):
            _copy_options(inner, outer)

    def pull_added_options(self, outer_groups: Sequence[ParamGroup], first_group: int) -> None:
        """Copy back options (such as defaults) that were set when the groups from `first_group` on were added."""
        if self._overrides_add_param_group:
            self.pull_options(outer_groups)
            return
        for inner, outer in zip(self.optimizer.param_groups[first_group:], outer_groups[first_group:], strict=True):
            _copy_options(inner, outer)

    @property
    def _overrides_add_param_group(self) -> bool:
        """Whether adding a group may read or change options of other groups. If not, copying those is skipped."""
        return type(self.optimizer).add_param_group is not Optimizer.add_param_group

    def extra_state(self) -> StateDict:
        """Return what the optimizer class adds to torch's state dict."""
        if type(self.optimizer).state_dict is Optimizer.state_dict:
            return {}
        return {k: v for k, v in self.optimizer.state_dict().items() if k not in ("state", "param_groups")}

    def shared_state(self) -> dict[Any, Any]:
        """Return the state that belongs to no parameter."""
        return {key: value for key, value in self.optimizer.state.items() if not isinstance(key, torch.Tensor)}

    def snapshot_counters(self) -> Callable[[], None]:
        """Return a function that undoes what steps change besides parameters and their state.

        That is: numbers and tensors that are attributes of the optimizer, tensors in its groups, and shared state.
        """
        attrs = {
            name: value for name, value in vars(self.optimizer).items() if isinstance(value, (int, float, torch.Tensor))
        }
        options = [option for group in self.optimizer.param_groups for option in group.values()]
        tensors = [value for value in (*attrs.values(), *options) if isinstance(value, torch.Tensor)]
        saved_tensors = [tensor.detach().clone() for tensor in tensors]
        saved_state = _copy_state(self.shared_state())

        def restore() -> None:
            vars(self.optimizer).update(attrs)
            with torch.no_grad():
                for tensor, saved in zip(tensors, saved_tensors, strict=True):
                    tensor.copy_(saved)
            for key in self.shared_state():
                del self.optimizer.state[key]
            self.optimizer.state.update(_copy_state(saved_state))

        return restore

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Step the inner optimizer. Its own hooks run; global hooks do not, because they run for the outer step."""
        with self._with_stand_ins(), _track_step():
            return _step_without_global_hooks(self.optimizer, args, kwargs)

    def has_mode(self, mode: str) -> bool:
        """Return whether the optimizer has a method to enter `mode` ("train" or "eval"), as schedule-free ones do."""
        return callable(getattr(self.optimizer, mode, None))

    def set_mode(self, mode: str) -> None:
        if self.has_mode(mode):
            with self._with_stand_ins():
                getattr(self.optimizer, mode)()

    @contextmanager
    def restrict_to(self, param_ids: set[int]) -> Iterator[None]:
        """Hide all parameters except those whose ids are in `param_ids`. Changes to options are kept."""
        full_groups = [dict(group) for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["params"] = [param for param in group["params"] if id(param) in param_ids]
        try:
            yield
        finally:
            for group, full_group in zip(self.optimizer.param_groups, full_groups, strict=True):
                group.update({key: full_group[key] for key in PER_RANK_KEYS if key in full_group})

    def _make_local_group(self, group: ParamGroup, owned_ids: set[int]) -> ParamGroup:
        """Return the user's group with this rank's parameters, or with a stand-in if it owns none of them."""
        names = group.get("param_names")
        owned = [i for i, param in enumerate(group["params"]) if id(param) in owned_ids]
        stand_in = _make_stand_in(group["params"])
        self._stand_ins.append(stand_in)
        params: list[Any] = [group["params"][i] for i in owned] or [stand_in]
        if names is not None:
            params = list(zip([names[i] for i in owned] or ["stand-in"], params, strict=True))
        return {**{key: value for key, value in group.items() if key not in PER_RANK_KEYS}, "params": params}

    @contextmanager
    def _with_stand_ins(self) -> Iterator[None]:
        """Put a stand-in without a gradient into each empty group.

        Many optimizers reject an empty group or fail on it; all of them handle parameters without gradients.
        """
        for group, stand_in in zip(self.optimizer.param_groups, self._stand_ins, strict=True):
            if not group["params"]:
                group["params"] = [stand_in]
        try:
            yield
        finally:
            self._remove_stand_ins()

    def _remove_stand_ins(self, first_group: int = 0) -> None:
        """Remove the stand-ins, and any state they got, from the groups from `first_group` on."""
        for group, stand_in in zip(
            self.optimizer.param_groups[first_group:], self._stand_ins[first_group:], strict=True
        ):
            if len(group["params"]) == 1 and group["params"][0] is stand_in:
                group["params"] = []
                if "param_names" in group:
                    group["param_names"] = []
                self.optimizer.state.pop(stand_in, None)


_THREAD_LOCAL = local()


def is_stepping() -> bool:
    """Return whether this thread is inside the step of an inner optimizer, which may call other optimizers' steps."""
    return getattr(_THREAD_LOCAL, "steps", 0) > 0


@contextmanager
def _track_step() -> Iterator[None]:
    depth = getattr(_THREAD_LOCAL, "steps", 0)
    _THREAD_LOCAL.steps = depth + 1
    try:
        yield
    finally:
        _THREAD_LOCAL.steps = depth


def _copy_state(state: dict[Any, Any]) -> dict[Any, Any]:
    copied: dict[Any, Any] = map_tensors(deepcopy_except_tensors(state), clone_tensor)
    return copied


def _make_stand_in(params: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return an empty parameter with the dtype, device and number of dimensions that optimizers check."""
    like = params[0] if params else torch.empty(0)
    return torch.nn.Parameter(like.detach().new_empty((0,) * like.dim()), requires_grad=like.is_floating_point())


def _copy_options(source: ParamGroup, target: ParamGroup) -> None:
    """Give `target` exactly the keys of `source`, in the same order, but keep the target's `PER_RANK_KEYS`."""
    kept = {key: target[key] for key in PER_RANK_KEYS if key in target}
    target.clear()
    target.update(source)
    target.update(kept)


def _step_without_global_hooks(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    plain_step = unhooked_step(type(optimizer))
    if plain_step is None or "step" in vars(optimizer):
        return optimizer.step(*args, **kwargs)
    args = (optimizer, *args)
    for pre_hook in list(step_hooks(optimizer).pre.values()):
        args, kwargs = pre_hook(optimizer, args, kwargs) or (args, kwargs)
    result = plain_step(*args, **kwargs)
    for post_hook in list(step_hooks(optimizer).post.values()):
        post_hook(optimizer, args, kwargs)
    return result


# ---------------------------------------------------------------------------------------------------------------------
# Loading through `Optimizer.load_state_dict`, with the types of all values preserved.


def load_state(
    optimizer: Optimizer, state_dict: StateDict, caller_tensors: Any, *, keep_on_host: bool = False
) -> Callable[[], None]:
    """Load `state_dict` through the optimizer's own `load_state_dict` and return a function that undoes it.

    Hooks, overrides and `__setstate__` of the class see what they would see unsharded. The caller's dict and tensors
    are not changed.

    Args:
        optimizer: The inner optimizer.
        state_dict: The state of this rank's parameters, in torch's format.
        caller_tensors: A tree with the tensors that belong to the caller. Tensors of `state_dict` that share memory
            with them are copied; all others are taken over.
        keep_on_host: Keep state in host memory unless it is small. Otherwise it goes where torch puts it.
    """
    saved_attrs = dict(vars(optimizer))

    def undo() -> None:
        vars(optimizer).clear()
        vars(optimizer).update(saved_attrs)

    with rollback_on_error(undo):
        with _preserve_types(optimizer, keep_on_host=keep_on_host):
            optimizer.load_state_dict(deepcopy_except_tensors(state_dict))
        _copy_shared(optimizer, _collect_storages(caller_tensors))
    return undo


def has_builtin_load(optimizer: Optimizer) -> bool:
    """Return whether loading runs torch's own code only: no hooks and no overrides."""
    has_hooks = any(load_state_dict_hooks(optimizer))
    methods = (type(optimizer).load_state_dict, type(optimizer).__setstate__)
    return not has_hooks and all(method.__module__.startswith("torch.") for method in methods)


class _Opaque:
    """Wraps a value whose type torch's loading would change, so that it passes through unchanged."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _make_opaque(state_dict: StateDict, params: list[torch.Tensor], *, keep_on_host: bool) -> StateDict:
    """Return the dict for torch to load. Values that torch would change are copied, cast and wrapped in `_Opaque`."""
    groups = state_dict["param_groups"]

    def wrap(param_id: Any, key: Any, value: Any) -> Any:
        if _is_preserved_by_torch(value) and not keep_on_host:
            return value

        def cast(tensor: torch.Tensor) -> torch.Tensor:
            is_host_state = keep_on_host and tensor is value and is_offloadable(tensor)
            like = torch.empty(0, dtype=params[param_id].dtype, device="cpu") if is_host_state else params[param_id]
            return cast_loaded_state(like, tensor, param_id, groups, key)

        return _Opaque(map_tensors(deepcopy_except_tensors(value), cast))

    state: dict[Any, Any] = {}
    for param_id, value in state_dict["state"].items():
        if not isinstance(param_id, int) or param_id >= len(params):
            state[param_id] = map_tensors(deepcopy_except_tensors(value), clone_tensor)
        elif isinstance(value, Mapping):
            state[param_id] = {key: wrap(param_id, key, item) for key, item in value.items()}
        else:
            state[param_id] = wrap(param_id, None, value)
    return {**state_dict, "state": state}


def _is_preserved_by_torch(value: Any) -> bool:
    """Return whether torch's loading makes an equal copy. It rebuilds containers, but only plain ones correctly."""
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
    """Wrap values in `_Opaque` after all other pre-hooks of a load, and unwrap them before `__setstate__` runs."""

    def set_state(state: StateDict) -> None:
        _unwrap_state(state["state"])
        type(optimizer).__setstate__(optimizer, state)

    params = [param for group in optimizer.param_groups for param in group["params"]]
    handle = optimizer.register_load_state_dict_pre_hook(
        lambda _, state_dict: _make_opaque(state_dict, params, keep_on_host=keep_on_host)
    )
    vars(optimizer)["__setstate__"] = set_state
    try:
        yield
    finally:
        handle.remove()
        vars(optimizer).pop("__setstate__", None)


def _copy_shared(optimizer: Optimizer, shared_storages: set[int]) -> None:
    """Copy the state tensors whose memory is in `shared_storages`, which belongs to the caller."""

    def copy_if_shared(tensor: torch.Tensor) -> torch.Tensor:
        is_shared = tensor.layout != torch.strided or _storage_ptr(tensor) in shared_storages
        return tensor.clone() if is_shared else tensor

    for param, value in optimizer.state.items():
        optimizer.state[param] = map_tensors(value, lambda tensor: map_inner_tensors(tensor, copy_if_shared))


def _collect_storages(value: Any) -> set[int]:
    storages: set[int] = set()

    def add(tensor: torch.Tensor) -> None:
        if is_wrapper_subclass(tensor):
            map_tensors(inner_tensors(tensor), add)
        elif tensor.layout == torch.strided:
            storages.add(_storage_ptr(local_memory(tensor)))

    map_tensors(value, add)
    return storages


def _storage_ptr(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


# ---------------------------------------------------------------------------------------------------------------------
# Several optimizer classes behind one interface.


OPTIMIZER_KEY = "optimizer"
"""The group option that names the optimizer class of the group, if there are several classes."""


class InnerMember(Protocol):
    """One optimizer class of an `InnerOptimizer`."""

    name: str
    group_ids: list[int]
    """Indices of its groups among the outer groups."""
    inner: LocalOptimizer


class InnerOptimizer:
    """This rank's inner optimizers, one per optimizer rule of the user. Each sees its own groups only."""

    def __init__(self, members: Sequence[InnerMember], profiler: StepProfiler) -> None:
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
            member.inner.pull_added_options(groups, sum(index < first_group for index in member.group_ids))
            self._set_optimizer_key(member, groups)

    def _set_optimizer_key(self, member: InnerMember, groups: Sequence[ParamGroup]) -> None:
        for group in groups if len(self._members) > 1 else ():
            group[OPTIMIZER_KEY] = member.name  # missing in state dicts that another optimizer saved

    def run(self, outer_groups: Sequence[ParamGroup], closure: Callable[[], Any] | None, kwargs: dict[str, Any]) -> Any:
        """Copy options in, step, and copy options back."""
        self.push_options(outer_groups)
        result = self._step(closure, kwargs)
        self.pull_options(outer_groups)
        return result

    def _step(self, closure: Callable[[], Any] | None, kwargs: dict[str, Any]) -> Any:
        """Step all members. A closure is called once, not once per member."""
        if len(self._members) == 1:
            return self._step_member(self._members[0], *([] if closure is None else [closure]), **kwargs)
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for member in self._members:
            self._step_member(member, **kwargs)
        return loss

    def _step_member(self, member: InnerMember, *args: Any, **kwargs: Any) -> Any:
        with self._profiler.phase(Phase.INNER_STEP, member.name):
            return member.inner.step(*args, **kwargs)

    def check_optimizer_classes(self, saved_groups: Sequence[Mapping[str, Any]]) -> None:
        """Raise `CheckpointError` if loaded groups name other optimizer classes than those that update them here."""
        for member in self._members if len(self._members) > 1 else ():
            for index in member.group_ids:
                saved_name = saved_groups[index].get(OPTIMIZER_KEY, member.name)
                if _strip_rule_number(saved_name) != _strip_rule_number(member.name):
                    raise CheckpointError(
                        f"group {index} of the loaded state dict belongs to {saved_name}, but this optimizer updates "
                        f"it with {member.name}. Call shard() with the rules of the saved optimizer."
                    )

    def extra_state(self) -> StateDict:
        """Return what a single class adds to torch's state dict. Classes that do are rejected if there are several."""
        return self._members[0].inner.extra_state() if len(self._members) == 1 else {}

    def _iter_members(self, outer_groups: Sequence[ParamGroup]) -> Iterator[tuple[InnerMember, list[ParamGroup]]]:
        for member in self._members:
            yield member, [outer_groups[index] for index in member.group_ids]


def _strip_rule_number(name: str) -> str:
    """Remove the suffix that distinguishes rules with the same class."""
    return name.partition(" ")[0]


# ---------------------------------------------------------------------------------------------------------------------
# Fused and foreach implementations.


_IMPL_OPTIONS = ("fused", "foreach", "capturable", "differentiable")


def enable_fused(factory: OptimizerFactory) -> OptimizerFactory:
    """Return the factory with `fused=True`, unless the user chose an implementation or the device has no fused one.

    Never on the CPU. Fused CPU kernels round differently from the default loops, and they round the last elements of a
    tensor differently from the rest, so results would depend on where parameters are split.
    """
    params = [param for group in factory.groups for param in group["params"]]
    if can_choose_impl(factory, "fused") and all(map(_supports_fused, params)):
        return replace(factory, defaults={**factory.defaults, "fused": True})
    return factory


def can_choose_impl(factory: OptimizerFactory, impl: str) -> bool:
    """Return whether the class has an `impl` ("fused" or "foreach") option and the user chose no implementation.

    Only for torch's own classes: other classes may give these options another meaning or further requirements.
    """
    constructor: Any = factory.optimizer_class
    partial_options: dict[str, Any] = {}
    if isinstance(constructor, functools.partial):
        constructor, partial_options = constructor.func, constructor.keywords
    chosen = {*partial_options, *factory.defaults, *(key for group in factory.groups for key in group)}
    is_torch_class = (getattr(constructor, "__module__", None) or "").startswith("torch.optim.")
    return chosen.isdisjoint(_IMPL_OPTIONS) and is_torch_class and impl in inspect.signature(constructor).parameters


def _supports_fused(param: torch.Tensor) -> bool:
    return param.is_floating_point() and param.device.type in ("cuda", "xpu", "mps", "mtia")
