"""What a load changes, and how it is undone where it fails later, on this rank or on another."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.optim import Optimizer

from ..optimizer import ZeroRedundancyOptimizer
from ..state.compat import StateDict
from ..state.trees import clone, copy_mutable, map_tensors
from .contents import part_of, staged


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


def saved_for_undo(optimizer: Optimizer) -> dict[str, Any]:
    """A copy of a sharded optimizer's state; of others their attributes, which loading exchanges."""
    return staged(part_of(optimizer)) if isinstance(optimizer, ZeroRedundancyOptimizer) else dict(vars(optimizer))


def load_optimizer(optimizer: Optimizer, state: StateDict, before: dict[str, Any], undo: ExitStack) -> None:
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        undo.callback(optimizer.engine.kept_doubts())  # after the next: rows that had parted have, then as before
        undo.callback(optimizer.load_state_dict, before)
        optimizer.adopt_state_dict(state)
        return
    undo.callback(_put_back, vars(optimizer), before)
    optimizer.load_state_dict(state)


def load_model(model: torch.nn.Module, state: Mapping[str, Any], undo: ExitStack, *, strict: bool) -> None:
    mine = get_model_state_dict(model)
    undo.callback(set_model_state_dict, model, staged(mine))
    empty = {name: value for name, value in mine.items() if is_empty(value)}
    set_model_state_dict(model, {**empty, **state}, options=StateDictOptions(strict=strict))


def is_empty(value: Any) -> bool:
    """A container of nothing, which is not written."""
    return isinstance(value, (dict, list, tuple)) and not value


def loads_its_own_way(it: torch.nn.Module | Optimizer) -> bool:
    """Whether loading runs code that is not torch's and may fail. Else it copies what was found to fit."""
    if isinstance(it, torch.nn.Module):
        return any(map(_is_special, it.modules()))
    if not isinstance(it, ZeroRedundancyOptimizer):
        return True
    hooks = [hook for part in (it, *it.optims) for hook in _load_hooks(part)]
    methods = [method for part in it.optims for method in (type(part).load_state_dict, type(part).__setstate__)]
    return bool(hooks) or not _are_torchs(*methods)


def _is_special(part: torch.nn.Module) -> bool:
    hooks = part._load_state_dict_pre_hooks or part._load_state_dict_post_hooks
    kind = type(part)
    return bool(hooks) or not _are_torchs(kind._load_from_state_dict, kind.load_state_dict, kind.set_extra_state)


def _load_hooks(it: Optimizer) -> list[Any]:
    return [*it._optimizer_load_state_dict_pre_hooks.values(), *it._optimizer_load_state_dict_post_hooks.values()]


def _are_torchs(*methods: Any) -> bool:
    return all(method.__module__.startswith("torch.") for method in methods)


def _put_back(attributes: dict[str, Any], before: dict[str, Any]) -> None:
    attributes.clear()
    attributes.update(before)
