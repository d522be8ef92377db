"""What a load changes, and how it is undone where it fails later, on this rank or on another."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

from ..state.trees import clone_tensor, deepcopy_except_tensors, map_tensors
from .staging import copy_to_host


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
