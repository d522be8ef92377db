"""Adapters that save and load a sharded optimizer and any other optimizer through one interface.

This is the only module of the package that distinguishes the two. It also has the helpers around them: copies to host
memory, a probe for the state that an optimizer expects, and loading that can be undone.
"""

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.optim import Optimizer

from .._torch_compat import has_load_hooks, load_state_dict_hooks
from ..engine.base import Engine
from ..engine.inner import OptimizerFactory
from ..engine.param_store import StateAllocator
from ..engine.probe import isolated_probe, probe_initial_state
from ..engine.state import StateKeys, rebuild_subclass_state
from ..optimizer import ZeroRedundancyOptimizer
from ..state.state_dict import MASTER_KEY, StateDict, infer_param_shaped_keys
from ..state.tensor_utils import clone_tensor, deepcopy_except_tensors, flatten_subclasses, map_tensors
from ..state_dict_mixin import local_state_dict

# ---------------------------------------------------------------------------------------------------------------------
# Copies in host memory.


def copy_to_host(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a copy in host memory, which training does not modify."""
    copied: dict[str, Any] = map_tensors(state_dict, _copy_tensor_to_host)
    return copied


def _copy_tensor_to_host(tensor: torch.Tensor) -> torch.Tensor:
    if not hasattr(tensor, "to_local"):  # not a DTensor
        copy = tensor.detach().to("cpu")
        return copy.clone() if tensor.device.type == "cpu" else copy
    return tensor.detach().clone().cpu()


# ---------------------------------------------------------------------------------------------------------------------
# State that an optimizer keeps for a parameter, probed on meta tensors.


_IMPLEMENTATION_OPTIONS = ("foreach", "fused", "capturable", "differentiable")
"""Options that select an implementation, which may not run on meta tensors."""


def probe_expected_state(optimizer: Optimizer, options: Mapping[str, Any], param: torch.Tensor) -> dict[Any, Any]:
    """Return the state for `param` as meta tensors; empty if there is none or the probe fails."""
    probe = torch.empty(tuple(param.shape), dtype=param.dtype, device="meta")
    probe_options = {
        key: False if key in _IMPLEMENTATION_OPTIONS else value for key, value in options.items() if key != "params"
    }
    factory = make_factory(optimizer, probe_options)
    with isolated_probe(factory), suppress(Exception):
        return probe_initial_state(factory, probe_options, [probe])[0]
    return {}


def can_use_state_key(optimizer: Optimizer, options: Mapping[str, Any], param: torch.Tensor, key: str) -> bool:
    """Return whether the optimizer uses `key` in the state of `param`; True if the probe fails."""
    expected = probe_expected_state(optimizer, options, param)
    return not expected or key in expected


def make_factory(optimizer: Optimizer, options: Mapping[str, Any]) -> OptimizerFactory:
    """Return a factory for optimizers of the same class."""
    return OptimizerFactory(type(optimizer), [], True, _required_arguments(type(optimizer), options))


def _required_arguments(optimizer_class: type[Optimizer], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the constructor arguments without a default. All others are options of the group."""
    arguments = list(inspect.signature(optimizer_class).parameters.values())[1:]
    return {arg.name: options[arg.name] for arg in arguments if arg.default is arg.empty and arg.name in options}


# ---------------------------------------------------------------------------------------------------------------------
# Loading with rollback, for failures later in the load, on this rank or on another.


@contextmanager
def transaction() -> Iterator[ExitStack]:
    """Yield a stack for undo callbacks, which run in reverse order if the block raises."""
    with ExitStack() as undo:
        yield undo
        undo.pop_all()


def load_scheduler(scheduler: Any, state: Any, undo: ExitStack) -> None:
    snapshot = map_tensors(deepcopy_except_tensors(scheduler.state_dict()), clone_tensor)
    undo.callback(scheduler.load_state_dict, snapshot)
    scheduler.load_state_dict(state)


def load_model(model: torch.nn.Module, state: Mapping[str, Any], undo: ExitStack, *, strict: bool) -> None:
    current = get_model_state_dict(model)
    undo.callback(set_model_state_dict, model, copy_to_host(current))
    empty = {name: value for name, value in current.items() if is_empty_container(value)}
    set_model_state_dict(model, {**empty, **state}, options=StateDictOptions(strict=strict))


def is_empty_container(value: Any) -> bool:
    """Return whether `value` is an empty container, which DCP does not write."""
    return isinstance(value, (dict, list, tuple)) and not value


def has_custom_load(model: torch.nn.Module) -> bool:
    """Return whether loading runs code other than torch's, which may fail after values have been validated."""
    return any(map(_has_load_overrides, model.modules()))


def _has_load_overrides(module: torch.nn.Module) -> bool:
    cls = type(module)
    methods = (cls._load_from_state_dict, cls.load_state_dict, cls.set_extra_state)
    return has_load_hooks(module) or not are_torch_methods(*methods)


def are_torch_methods(*methods: Any) -> bool:
    return all(method.__module__.startswith("torch.") for method in methods)


# ---------------------------------------------------------------------------------------------------------------------
# Adapters.


StateShapes = Iterable[tuple[int, Any, torch.Size]]
"""State tensors as (index of the parameter, state key, shape)."""


class OptimizerAdapter(Protocol):
    """What saving and loading need from an optimizer. `index` counts parameters in the order of groups."""

    @property
    def optimizer(self) -> Optimizer: ...

    params: list[torch.Tensor]

    @property
    def class_names(self) -> list[str]:
        """The names of the user's optimizer classes."""

    @property
    def can_load_in_place(self) -> bool:
        """Whether state is read directly into the present state's memory.

        Otherwise it is read into new memory and passed to the optimizer's `load_state_dict`.
        """

    def check_ready(self) -> None:
        """Raise if the optimizer cannot be loaded into now."""

    def inner_optimizer_of(self, index: int, /) -> Optimizer:
        """Return the user's optimizer that updates a parameter."""

    def local_state_dict(self) -> StateDict:
        """Return this rank's part of the state. Its tensors are not copies."""

    def can_load_master_weights(self, known_keys: Collection[Any], /) -> bool:
        """Return whether master weights can be loaded. `known_keys`: keys found by the probe, empty if it failed."""

    def is_param_shaped(self, index: int, key: Any, /) -> bool:
        """Return whether a state tensor must have the shape of its parameter."""

    def owns_state(self, index: int, key: Any, /) -> bool:
        """Return whether this rank keeps all or part of a state value."""

    def param_shaped_keys(self, shapes: StateShapes, /) -> frozenset[Any]:
        """Return the keys of state tensors that have the shape of their parameter and may be sharded."""

    def state_allocator(self, state_keys: StateKeys, param_shaped_keys: frozenset[Any], /) -> StateAllocator:
        """Return an allocator of tensors to read into. `state_keys`: everything that will be requested from it."""

    def to_loadable(self, state_dict: StateDict, /) -> StateDict:
        """Convert a state dict to the form that `load` and `load_in_place` take."""

    def validate(self, make_state_dict: Callable[[], StateDict], /) -> None:
        """Raise if the optimizer would reject the state dict, as far as can be determined before loading."""

    def snapshot(self) -> dict[str, Any]:
        """Return what `load` needs to undo itself. Call on all ranks."""

    def load(self, state_dict: StateDict, snapshot: dict[str, Any], undo: ExitStack) -> None:
        """Load through the optimizer's `load_state_dict`, and add the rollback to `undo`. Call on all ranks."""

    def load_in_place(self, read_state_dict: Callable[[], StateDict], param_shaped_keys: frozenset[Any], /) -> None:
        """Call `read_state_dict`, which fills the allocated tensors, and load its result. Call on all ranks."""


class PlainAdapter:
    """Any optimizer but a sharded one, including one over FSDP2's parameters."""

    can_load_in_place = False

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.params = optimizer, _all_params(optimizer)

    @property
    def class_names(self) -> list[str]:
        return [type(self.optimizer).__name__]

    def check_ready(self) -> None:
        pass

    def inner_optimizer_of(self, _: int, /) -> Optimizer:
        return self.optimizer

    def local_state_dict(self) -> StateDict:
        saved = self.optimizer.state_dict()
        state = {**saved["state"], **self._without_stale_masters(saved["state"])}
        return {**saved, "state": {key: flatten_subclasses(values) for key, values in state.items()}}

    def can_load_master_weights(self, known_keys: Collection[Any], /) -> bool:
        """Return False if the class does not use master weights: it would keep them unchanged forever."""
        return not known_keys or MASTER_KEY in known_keys

    def is_param_shaped(self, _: int, __: Any, /) -> bool:
        return False

    def owns_state(self, _: int, __: Any, /) -> bool:
        return True

    def param_shaped_keys(self, _: StateShapes, /) -> frozenset[Any]:
        return frozenset()

    def state_allocator(self, _: StateKeys, __: frozenset[Any], /) -> StateAllocator:
        return self._allocate

    def to_loadable(self, state_dict: StateDict, /) -> StateDict:
        groups = state_dict["param_groups"]
        return (
            rebuild_subclass_state(state_dict, make_factory(self.optimizer, groups[0]), self.optimizer)
            if groups
            else state_dict
        )

    def validate(self, _: Callable[[], StateDict], /) -> None:
        pass

    def snapshot(self) -> dict[str, Any]:
        """Return the optimizer's attributes, which `load_state_dict` replaces."""
        return dict(vars(self.optimizer))

    def load(self, state_dict: StateDict, snapshot: dict[str, Any], undo: ExitStack) -> None:
        undo.callback(_restore_attributes, vars(self.optimizer), snapshot)
        self.optimizer.load_state_dict(state_dict)

    def load_in_place(self, _: Callable[[], StateDict], __: frozenset[Any], /) -> None:
        raise AssertionError("nothing is read in its place")

    def _without_stale_masters(self, state: dict[Any, Any]) -> dict[int, Any]:
        """Return the state of parameters with stale master weights, without these.

        A plain optimizer that loaded a sharded one's state dict keeps the master weights but never updates them.
        """
        params = enumerate((group, param) for group in self.optimizer.param_groups for param in group["params"])
        stale = [
            index
            for index, (group, param) in params
            if MASTER_KEY in state.get(index, ()) and not can_use_state_key(self.optimizer, group, param, MASTER_KEY)
        ]
        return {index: {key: value for key, value in state[index].items() if key != MASTER_KEY} for index in stale}

    def _allocate(self, index: int, _: Any, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        param = self.params[index]
        if size == param.shape and param.dim():  # same sharding and strides as the parameter
            return torch.empty_like(param, dtype=dtype, requires_grad=False)
        return torch.empty(size, dtype=dtype)


class ShardedAdapter:
    """An optimizer of this package, whose state is sharded over ranks."""

    def __init__(self, optimizer: ZeroRedundancyOptimizer) -> None:
        self.optimizer, self.params, self._engine = optimizer, _all_params(optimizer), optimizer._engine

    @property
    def class_names(self) -> list[str]:
        return list(dict.fromkeys(type(optimizer).__name__ for optimizer in self.optimizer.inner_optimizers))

    @cached_property
    def can_load_in_place(self) -> bool:
        inner = self.optimizer.inner_optimizers
        hooks = [hook for optimizer in (self.optimizer, *inner) for hook in _load_hooks(optimizer)]
        methods = [
            method for optimizer in inner for method in (type(optimizer).load_state_dict, type(optimizer).__setstate__)
        ]
        return not hooks and are_torch_methods(*methods)

    def check_ready(self) -> None:
        self.optimizer._require_final_layout("checkpoint.load")
        self._engine.params.groups.check(self.optimizer.param_groups)

    def inner_optimizer_of(self, index: int, /) -> Optimizer:
        return self._engine.state.local_optimizer_of(index).optimizer

    def local_state_dict(self) -> StateDict:
        self.optimizer._require_final_layout("checkpoint.save")
        return local_state_dict(self._engine, self.optimizer.param_groups, include_initial=False)

    def can_load_master_weights(self, _: Collection[Any], /) -> bool:
        return True

    def is_param_shaped(self, index: int, key: Any, /) -> bool:
        return key in self._engine.state.param_shaped_keys(index)

    def owns_state(self, index: int, key: Any, /) -> bool:
        return self._engine.state.owns(index, key)

    def param_shaped_keys(self, shapes: StateShapes, /) -> frozenset[Any]:
        specs = self.optimizer.layout.params
        return infer_param_shaped_keys((specs[index], key, size) for index, key, size in shapes)

    def state_allocator(self, state_keys: StateKeys, param_shaped_keys: frozenset[Any], /) -> StateAllocator:
        return self._engine.state.allocator(
            state_keys, in_place=self.can_load_in_place, param_shaped_keys=param_shaped_keys
        )

    def to_loadable(self, state_dict: StateDict, /) -> StateDict:
        return state_dict

    def validate(self, make_state_dict: Callable[[], StateDict], /) -> None:
        self.optimizer._check_state_dict(make_state_dict())

    def snapshot(self) -> dict[str, Any]:
        return copy_to_host(self.local_state_dict())

    def load(self, state_dict: StateDict, snapshot: dict[str, Any], undo: ExitStack) -> None:
        # Runs after the next callback, since that marks replicas as consistent even if they had diverged before.
        undo.callback(self._engine.state.snapshot_replica_status())
        undo.callback(self.optimizer.load_state_dict, snapshot)
        self.optimizer.load_state_dict(state_dict, assign=True)

    def load_in_place(self, read_state_dict: Callable[[], StateDict], param_shaped_keys: frozenset[Any], /) -> None:
        self._engine.state.add_param_shaped_keys(param_shaped_keys)
        self.optimizer.load_state_dict(read_state_dict(), assign=True)


def make_adapter(optimizer: Optimizer) -> OptimizerAdapter:
    return ShardedAdapter(optimizer) if isinstance(optimizer, ZeroRedundancyOptimizer) else PlainAdapter(optimizer)


def get_engine(optimizer: Optimizer | None) -> Engine | None:
    """Return the engine of a sharded optimizer, or None."""
    return optimizer._engine if isinstance(optimizer, ZeroRedundancyOptimizer) else None


def _all_params(optimizer: Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _load_hooks(optimizer: Optimizer) -> list[Any]:
    return [hook for hooks in load_state_dict_hooks(optimizer) for hook in hooks.values()]


def _restore_attributes(attributes: dict[str, Any], snapshot: dict[str, Any]) -> None:
    attributes.clear()
    attributes.update(snapshot)
