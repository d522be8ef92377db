"""What a load changes, and how it is undone where it fails later, on this rank or on another."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.optim import Optimizer

from ..optimizer import ZeroRedundancyOptimizer
from ..state.compat import StateDict
from ..state.trees import copy_mutable, map_tensors
from .contents import part_of, staged


@contextmanager
def all_or_nothing() -> Iterator[ExitStack]:
    """A place for ways to undo what was done: they are taken, the last first, if the block raises."""
    with ExitStack() as undo:
        yield undo
        undo.pop_all()


def load_scheduler(scheduler: Any, state: Any, undo: ExitStack) -> None:
    before = map_tensors(copy_mutable(scheduler.state_dict()), torch.clone)
    undo.callback(scheduler.load_state_dict, before)
    scheduler.load_state_dict(state)


def load_optimizer(optimizer: Optimizer, state: StateDict, undo: ExitStack, *, may_be_undone: bool) -> None:
    """Ours loads on all ranks or on none, and is copied only if something that may fail comes after it."""
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        before = staged(part_of(optimizer)) if may_be_undone else None
        optimizer.load_state_dict(state)
        if before is not None:
            undo.callback(optimizer.load_state_dict, before)
        return
    undo.callback(_put_back, vars(optimizer), dict(vars(optimizer)))
    optimizer.load_state_dict(state)


def load_model(model: torch.nn.Module, state: Mapping[str, Any], undo: ExitStack, *, strict: bool) -> None:
    mine = get_model_state_dict(model)
    if may_fail(model):
        undo.callback(set_model_state_dict, model, staged(mine))
    empty = {name: value for name, value in mine.items() if is_empty(value)}
    set_model_state_dict(model, {**empty, **state}, options=StateDictOptions(strict=strict))


def is_empty(value: Any) -> bool:
    """A container of nothing, which is not written."""
    return isinstance(value, (dict, list, tuple)) and not value


def may_fail(model: torch.nn.Module | None) -> bool:
    """Whether loading runs code that is not torch's. Else it copies, one after the other, what was found to fit."""
    return model is not None and any(map(_loads_its_own_way, model.modules()))


def _loads_its_own_way(part: torch.nn.Module) -> bool:
    methods = (type(part)._load_from_state_dict, type(part).load_state_dict, type(part).set_extra_state)
    hooks = part._load_state_dict_pre_hooks or part._load_state_dict_post_hooks
    return bool(hooks) or not all(method.__module__.startswith("torch.") for method in methods)


def _put_back(attributes: dict[str, Any], before: dict[str, Any]) -> None:
    attributes.clear()
    attributes.update(before)
