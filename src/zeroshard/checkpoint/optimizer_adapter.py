"""Optimizers that are saved, or loaded into: ours, whose state is spread over ranks, and all others.

The only place in this folder that tells them apart.
"""

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.optim import Optimizer

from ..engine.base import Engine, StateAllocator
from ..engine.inner import OptimizerFactory
from ..engine.probe import isolated_probe, probe_initial_state
from ..engine.state import StateKeys, rebuild_subclass_state
from ..optimizer import ZeroRedundancyOptimizer
from ..state.shard_tensor import ShardTensor
from ..state.state_dict import MASTER_KEY, StateDict, infer_param_shaped_keys
from ..state.tensor_utils import clone_tensor, deepcopy_except_tensors, flatten_subclasses, map_tensors
from ..state_dict_mixin import local_state_dict

# ---------------------------------------------------------------------------------------------------------------------
# Copies in host memory.


def copy_to_host(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A copy that stays as it is while training goes on."""
    result: dict[str, Any] = map_tensors(state_dict, _copy_tensor_to_host)
    return result


def _copy_tensor_to_host(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, ShardTensor) or not hasattr(tensor, "to_local"):
        copy = tensor.detach().to("cpu")
        return copy.clone() if tensor.device.type == "cpu" else copy
    return tensor.detach().clone().cpu()


# ---------------------------------------------------------------------------------------------------------------------
# What a running optimizer would keep of a parameter, asked on tensors that have a shape and no memory.


_IMPLEMENTATION_OPTIONS = ("foreach", "fused", "capturable", "differentiable")
"""Ways to do the same, which need memory."""


def probe_expected_state(optimizer: Optimizer, options: Mapping[str, Any], param: torch.Tensor) -> dict[Any, Any]:
    """What it keeps, as tensors of the right shapes; empty if it keeps nothing or cannot be asked."""
    probe = torch.empty(tuple(param.shape), dtype=param.dtype, device="meta")
    plainly = {
        key: False if key in _IMPLEMENTATION_OPTIONS else value for key, value in options.items() if key != "params"
    }
    recipe = make_factory(optimizer, plainly)
    with isolated_probe(recipe), suppress(Exception):
        return probe_initial_state(recipe, plainly, [probe])[0]
    return {}


def can_use_state_key(optimizer: Optimizer, options: Mapping[str, Any], param: torch.Tensor, key: str) -> bool:
    """Whether a plain one would use that state of a parameter; also if it cannot be asked."""
    expected = probe_expected_state(optimizer, options, param)
    return not expected or key in expected


def make_factory(optimizer: Optimizer, options: Mapping[str, Any]) -> OptimizerFactory:
    """How to make another one of that class."""
    return OptimizerFactory(type(optimizer), [], True, _required_arguments(type(optimizer), options))


def _required_arguments(optimizer_class: type[Optimizer], options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that have no default. The others are in the group."""
    wanted = list(inspect.signature(optimizer_class).parameters.values())[1:]
    return {it.name: options[it.name] for it in wanted if it.default is it.empty and it.name in options}


# ---------------------------------------------------------------------------------------------------------------------
# What a load changes, and how it is undone where it fails later, on this rank or on another.


@contextmanager
def transaction() -> Iterator[ExitStack]:
    """A place for ways to undo what was done: they are taken, the last first, if the block raises."""
    with ExitStack() as undo:
        yield undo
        undo.pop_all()


def load_scheduler(scheduler: Any, state: Any, undo: ExitStack) -> None:
    before = map_tensors(deepcopy_except_tensors(scheduler.state_dict()), clone_tensor)
    undo.callback(scheduler.load_state_dict, before)
    scheduler.load_state_dict(state)


def load_model(model: torch.nn.Module, state: Mapping[str, Any], undo: ExitStack, *, strict: bool) -> None:
    mine = get_model_state_dict(model)
    undo.callback(set_model_state_dict, model, copy_to_host(mine))
    empty = {name: value for name, value in mine.items() if is_empty_container(value)}
    set_model_state_dict(model, {**empty, **state}, options=StateDictOptions(strict=strict))


def is_empty_container(value: Any) -> bool:
    """A container of nothing, which is not written."""
    return isinstance(value, (dict, list, tuple)) and not value


def has_custom_load(model: torch.nn.Module) -> bool:
    """Whether loading runs code that is not torch's and may fail. Else it copies what was found to fit."""
    return any(map(_has_load_overrides, model.modules()))


def _has_load_overrides(module: torch.nn.Module) -> bool:
    hooks = module._load_state_dict_pre_hooks or module._load_state_dict_post_hooks
    kind = type(module)
    return bool(hooks) or not are_torch_methods(kind._load_from_state_dict, kind.load_state_dict, kind.set_extra_state)


def are_torch_methods(*methods: Any) -> bool:
    return all(method.__module__.startswith("torch.") for method in methods)


# ---------------------------------------------------------------------------------------------------------------------
# Optimizers that are saved, or loaded into: ours, whose state is spread over ranks, and all others.
#
# The only place in this folder that tells them apart.


StateShapes = Iterable[tuple[int, Any, torch.Size]]
"""Of state tensors: the number of a parameter, the key, the shape."""


class OptimizerAdapter(Protocol):
    @property
    def optimizer(self) -> Optimizer: ...

    params: list[torch.Tensor]

    @property
    def can_load_in_place(self) -> bool:
        """State is read to where the present one lies; else to new memory, for the optimizer to load in its own way."""

    def check_ready(self) -> None:
        """Raise if nothing can be loaded now."""

    def inner_optimizer_of(self, index: int, /) -> Optimizer:
        """The user's own optimizer, of a parameter."""

    def local_state_dict(self) -> StateDict:
        """What this rank has of the state, with the tensors themselves and not copies."""

    def can_load_master_weights(self, known_keys: Collection[Any], /) -> bool:
        """Whether it takes master weights. `known`: the keys that its class would make, if that could be asked."""

    def is_param_shaped(self, index: int, key: Any, /) -> bool:
        """Whether that state of a parameter must have the parameter's shape."""

    def owns_state(self, index: int, key: Any, /) -> bool:
        """Whether this rank keeps that state of a parameter, all or a part of it."""

    def param_shaped_keys(self, shapes: StateShapes, /) -> frozenset[Any]:
        """Keys of state that has the shape of its parameter, and may be divided among ranks."""

    def state_allocator(self, state_keys: StateKeys, param_shaped_keys: frozenset[Any], /) -> StateAllocator:
        """Memory to read to. `wanted`: all that it will be asked for."""

    def to_loadable(self, state_dict: StateDict, /) -> StateDict:
        """In the form in which it is loaded."""

    def validate(self, make_state_dict: Callable[[], StateDict], /) -> None:
        """Raise if it would be refused, as far as that is known before."""

    def snapshot(self) -> dict[str, Any]:
        """What `load` takes back. On all ranks."""

    def load(self, state_dict: StateDict, snapshot: dict[str, Any], undo: ExitStack) -> None:
        """In the optimizer's own way. On all ranks."""

    def load_in_place(self, read_state_dict: Callable[[], StateDict], param_shaped_keys: frozenset[Any], /) -> None:
        """Read `in_place`, and take it. On all ranks."""


class PlainAdapter:
    """Also one over parameters of FSDP2."""

    can_load_in_place = False

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.params = optimizer, _all_params(optimizer)

    def check_ready(self) -> None:
        pass

    def inner_optimizer_of(self, _: int, /) -> Optimizer:
        return self.optimizer

    def local_state_dict(self) -> StateDict:
        saved = self.optimizer.state_dict()
        state = {**saved["state"], **self._without_stale_masters(saved["state"])}
        return {**saved, "state": {key: flatten_subclasses(values) for key, values in state.items()}}

    def can_load_master_weights(self, known_keys: Collection[Any], /) -> bool:
        """Not if it would keep them for ever as they are."""
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
        """Its attributes, which loading exchanges."""
        return dict(vars(self.optimizer))

    def load(self, state_dict: StateDict, snapshot: dict[str, Any], undo: ExitStack) -> None:
        undo.callback(_restore_attributes, vars(self.optimizer), snapshot)
        self.optimizer.load_state_dict(state_dict)

    def load_in_place(self, _: Callable[[], StateDict], __: frozenset[Any], /) -> None:
        raise AssertionError("nothing is read in its place")

    def _without_stale_masters(self, state: dict[Any, Any]) -> dict[int, Any]:
        """One that was given state of ours keeps master weights as they were, while the model goes on."""
        places = enumerate((group, param) for group in self.optimizer.param_groups for param in group["params"])
        old = [
            i
            for i, it in places
            if MASTER_KEY in state.get(i, ()) and not can_use_state_key(self.optimizer, *it, MASTER_KEY)
        ]
        return {i: {key: value for key, value in state[i].items() if key != MASTER_KEY} for i in old}

    def _allocate(self, index: int, _: Any, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        param = self.params[index]
        if size == param.shape and param.dim():  # divided and laid out alike
            return torch.empty_like(param, dtype=dtype, requires_grad=False)
        return torch.empty(size, dtype=dtype)


class ShardedAdapter:
    def __init__(self, optimizer: ZeroRedundancyOptimizer) -> None:
        self.optimizer, self.params, self._engine = optimizer, _all_params(optimizer), optimizer._engine

    @cached_property
    def can_load_in_place(self) -> bool:
        inner = self.optimizer.inner_optimizers
        hooks = [hook for part in (self.optimizer, *inner) for hook in _load_hooks(part)]
        methods = [method for part in inner for method in (type(part).load_state_dict, type(part).__setstate__)]
        return not hooks and are_torch_methods(*methods)

    def check_ready(self) -> None:
        self.optimizer._require_final_layout("checkpoint.load")
        self._engine.check_groups(self.optimizer.param_groups)

    def inner_optimizer_of(self, index: int, /) -> Optimizer:
        return self._engine.local_optimizer_of(index).optimizer

    def local_state_dict(self) -> StateDict:
        self.optimizer._require_final_layout("checkpoint.save")
        return local_state_dict(self._engine, self.optimizer.param_groups, include_initial=False)

    def can_load_master_weights(self, _: Collection[Any], /) -> bool:
        return True

    def is_param_shaped(self, index: int, key: Any, /) -> bool:
        return key in self._engine.param_shaped_keys(index)

    def owns_state(self, index: int, key: Any, /) -> bool:
        return self._engine.owns_state(index, key)

    def param_shaped_keys(self, shapes: StateShapes, /) -> frozenset[Any]:
        specs = self.optimizer.layout.params
        return infer_param_shaped_keys((specs[index], key, size) for index, key, size in shapes)

    def state_allocator(self, state_keys: StateKeys, param_shaped_keys: frozenset[Any], /) -> StateAllocator:
        return self._engine.state_allocator(
            state_keys, in_place=self.can_load_in_place, param_shaped_keys=param_shaped_keys
        )

    def to_loadable(self, state_dict: StateDict, /) -> StateDict:
        return state_dict

    def validate(self, make_state_dict: Callable[[], StateDict], /) -> None:
        self.optimizer._check_state_dict(make_state_dict())

    def snapshot(self) -> dict[str, Any]:
        return copy_to_host(self.local_state_dict())

    def load(self, state_dict: StateDict, snapshot: dict[str, Any], undo: ExitStack) -> None:
        undo.callback(
            self._engine.snapshot_replica_status()
        )  # after the next: rows that had parted have, then as before
        undo.callback(self.optimizer.load_state_dict, snapshot)
        self.optimizer.load_state_dict(state_dict, assign=True)

    def load_in_place(self, read_state_dict: Callable[[], StateDict], param_shaped_keys: frozenset[Any], /) -> None:
        self._engine.add_param_shaped_keys(param_shaped_keys)
        self.optimizer.load_state_dict(read_state_dict(), assign=True)


def make_adapter(optimizer: Optimizer) -> OptimizerAdapter:
    return ShardedAdapter(optimizer) if isinstance(optimizer, ZeroRedundancyOptimizer) else PlainAdapter(optimizer)


def get_engine(optimizer: Optimizer | None) -> Engine | None:
    """That of a sharded one."""
    return optimizer._engine if isinstance(optimizer, ZeroRedundancyOptimizer) else None


def _all_params(optimizer: Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _load_hooks(optimizer: Optimizer) -> list[Any]:
    return [
        *optimizer._optimizer_load_state_dict_pre_hooks.values(),
        *optimizer._optimizer_load_state_dict_post_hooks.values(),
    ]


def _restore_attributes(attributes: dict[str, Any], snapshot: dict[str, Any]) -> None:
    attributes.clear()
    attributes.update(snapshot)
