"""Loading as torch's optimizers do it, without what torch's loading spoils."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from ..comm.agreement import undone_on_failure
from ..state.compat import StateDict
from ..state.dcp import CutTensor
from ..state.trees import clone, copy_mutable, map_tensors
from ..state.wrapped import insides, is_wrapped, on_plain
from .host import is_movable


def load(optimizer: Optimizer, local: StateDict, foreign: Any, *, on_host: bool = False) -> Callable[[], None]:
    """Load a dict through the optimizer's own `load_state_dict`; returns how to undo it.

    `on_host`: state stays in host memory, if it is not small; else it goes where torch puts it.
    Hooks, overrides and `__setstate__` of the class see what they would see unsharded. Of the tensors in `local` those
    that are also in `foreign` are the caller's: they are copied. Nothing of his is changed.
    """
    before = dict(vars(optimizer))

    def undo() -> None:
        vars(optimizer).clear()
        vars(optimizer).update(before)

    with undone_on_failure(undo):
        with _types_kept(optimizer, on_host=on_host):
            optimizer.load_state_dict(copy_mutable(local))
        _disown(optimizer, _storages(foreign))
    return undo


def loads_as_torch_does(optimizer: Optimizer) -> bool:
    """Whether no code of others runs while it loads."""
    hooks = (*optimizer._optimizer_load_state_dict_pre_hooks, *optimizer._optimizer_load_state_dict_post_hooks)
    methods = (type(optimizer).load_state_dict, type(optimizer).__setstate__)
    return not hooks and all(method.__module__.startswith("torch.") for method in methods)


class _Sealed:
    """A value on its way through torch's loading, which would change its type."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _sealed(local: StateDict, params: list[torch.Tensor], *, on_host: bool) -> StateDict:
    """The dict for torch to load, with what it would spoil sealed, copied and already cast."""
    groups = local["param_groups"]

    def seal(number: Any, key: Any, value: Any) -> Any:
        if _kept_by_torch(value) and not on_host:
            return value

        def cast(tensor: torch.Tensor) -> torch.Tensor:
            stays = on_host and tensor is value and is_movable(tensor)
            like = torch.empty(0, dtype=params[number].dtype, device="cpu") if stays else params[number]
            return Optimizer._process_value_according_to_param_policy(like, tensor, number, groups, key)

        return _Sealed(map_tensors(copy_mutable(value), cast))

    state: dict[Any, Any] = {}
    for number, value in local["state"].items():
        if not isinstance(number, int) or number >= len(params):
            state[number] = map_tensors(copy_mutable(value), clone)
        elif isinstance(value, Mapping):
            state[number] = {key: seal(number, key, item) for key, item in value.items()}
        else:
            state[number] = seal(number, None, value)
    return {**local, "state": state}


def _kept_by_torch(value: Any) -> bool:
    """Whether torch's loading makes an equal copy: it rebuilds containers, but only the plain ones well."""
    if type(value) is dict:
        return all(map(_kept_by_torch, value.values()))
    if type(value) in (list, tuple, set):
        return all(map(_kept_by_torch, value))
    return isinstance(value, torch.Tensor) or not isinstance(value, Iterable)


def _unseal(state: dict[Any, Any]) -> None:
    for param, value in state.items():
        if isinstance(value, dict):
            value.update({key: _open(item) for key, item in value.items()})
        else:
            state[param] = _open(value)


def _open(value: Any) -> Any:
    return value.value if isinstance(value, _Sealed) else value


@contextmanager
def _types_kept(optimizer: Optimizer, *, on_host: bool) -> Iterator[None]:
    """While torch loads: seal what it would spoil at the last moment, and open it before `__setstate__` sees it."""

    def set_state(state: StateDict) -> None:
        _unseal(state["state"])
        type(optimizer).__setstate__(optimizer, state)

    params = [param for group in optimizer.param_groups for param in group["params"]]
    handle = optimizer.register_load_state_dict_pre_hook(lambda _, saved: _sealed(saved, params, on_host=on_host))
    vars(optimizer)["__setstate__"] = set_state
    try:
        yield
    finally:
        handle.remove()
        vars(optimizer).pop("__setstate__", None)


def _disown(optimizer: Optimizer, foreign: set[int]) -> None:
    """Copy tensors that were taken over from the caller as they were."""

    def own(tensor: torch.Tensor) -> torch.Tensor:
        shared = tensor.layout != torch.strided or _storage(tensor) in foreign
        return tensor.clone() if shared else tensor

    for param, value in optimizer.state.items():
        optimizer.state[param] = map_tensors(value, lambda tensor: on_plain(tensor, own))


def _storages(value: Any) -> set[int]:
    found: set[int] = set()

    def note(tensor: torch.Tensor) -> None:
        if is_wrapped(tensor):
            map_tensors(insides(tensor), note)
        elif tensor.layout == torch.strided:
            found.add(_storage(tensor.local if isinstance(tensor, CutTensor) else tensor))

    map_tensors(value, note)
    return found


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
