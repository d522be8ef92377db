"""What a load changes, and how it is undone where it fails later, on this rank or on another."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

from ..state.trees import clone, copy_mutable, map_tensors
from .staging import staged


@contextmanager
def all_or_nothing() -> Iterator[ExitStack]:
    """A place for ways to undo what was done: they are taken, the last first, if the block raises."""
    with ExitStack() as undo:
        yield undo
        undo.pop_all()


def load_scheduler(scheduler: Any, state: Any, undo: ExitStack) -> None:
    before = map_tensors(copy_mutable(scheduler.state_dict()), clone)
    undo.callback(scheduler.load_state_dict, before)
    scheduler.load_state_dict(state)


def load_model(model: torch.nn.Module, state: Mapping[str, Any], undo: ExitStack, *, strict: bool) -> None:
    mine = get_model_state_dict(model)
    undo.callback(set_model_state_dict, model, staged(mine))
    empty = {name: value for name, value in mine.items() if is_empty(value)}
    set_model_state_dict(model, {**empty, **state}, options=StateDictOptions(strict=strict))


def is_empty(value: Any) -> bool:
    """A container of nothing, which is not written."""
    return isinstance(value, (dict, list, tuple)) and not value


def loads_its_own_way(model: torch.nn.Module) -> bool:
    """Whether loading runs code that is not torch's and may fail. Else it copies what was found to fit."""
    return any(map(_is_special, model.modules()))


def _is_special(part: torch.nn.Module) -> bool:
    hooks = part._load_state_dict_pre_hooks or part._load_state_dict_post_hooks
    kind = type(part)
    return bool(hooks) or not are_torchs(kind._load_from_state_dict, kind.load_state_dict, kind.set_extra_state)


def are_torchs(*methods: Any) -> bool:
    return all(method.__module__.startswith("torch.") for method in methods)
