"""Loading as torch's optimizers do it, without what torch's loading spoils."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from ..comm.consensus import rollback_on_error
from ..state.state_dict import StateDict
from ..state.shard_tensor import ShardTensor
from ..state.trees import clone_tensor, deepcopy_except_tensors, map_tensors
from ..state.tensor_utils import inner_tensors, is_wrapper_subclass, map_inner_tensors
from .host_buffers import is_offloadable


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
