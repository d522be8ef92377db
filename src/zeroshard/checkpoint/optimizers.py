"""Optimizers that are saved, or loaded into: ours, whose state is spread over ranks, and all others.

The only place in this folder that tells them apart.
"""

from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack
from functools import cached_property
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from .. import state_dicts
from ..optimizer import ZeroRedundancyOptimizer
from ..runtime.rooms import Wanted
from ..runtime.step import Engine, Room
from ..runtime.wrapping import put_together
from ..state.compat import StateDict
from ..state.records import MASTER, shaped_keys
from ..state.wrapped import apart
from .changing import are_torchs
from .expecting import knows, recipe_of
from .staging import staged

Shapes = Iterable[tuple[int, Any, torch.Size]]
"""Of state tensors: the number of a parameter, the key, the shape."""


class Running(Protocol):
    @property
    def optimizer(self) -> Optimizer: ...

    params: list[torch.Tensor]

    @property
    def in_place(self) -> bool:
        """State is read to where the present one lies; else to new memory, for the optimizer to load in its own way."""

    def require_ready(self) -> None:
        """Raise if nothing can be loaded now."""

    def kind_of(self, index: int, /) -> Optimizer:
        """The user's own optimizer, of a parameter."""

    def part(self) -> StateDict:
        """What this rank has of the state, with the tensors themselves and not copies."""

    def knows_masters(self, known: Collection[Any], /) -> bool:
        """Whether it takes master weights. `known`: the keys that its class would make, if that could be asked."""

    def is_shaped(self, index: int, key: Any, /) -> bool:
        """Whether that state of a parameter must have the parameter's shape."""

    def holds(self, index: int, key: Any, /) -> bool:
        """Whether this rank keeps that state of a parameter, all or a part of it."""

    def shaped(self, found: Shapes, /) -> frozenset[Any]:
        """Keys of state that has the shape of its parameter, and may be divided among ranks."""

    def rooms(self, wanted: Wanted, shaped: frozenset[Any], /) -> Room:
        """Memory to read to. `wanted`: all that it will be asked for."""

    def completed(self, saved: StateDict, /) -> StateDict:
        """In the form in which it is loaded."""

    def try_out(self, saved: Callable[[], StateDict], /) -> None:
        """Raise if it would be refused, as far as that is known before."""

    def for_undo(self) -> dict[str, Any]:
        """What `load` takes back. On all ranks."""

    def load(self, saved: StateDict, before: dict[str, Any], undo: ExitStack) -> None:
        """In the optimizer's own way. On all ranks."""

    def overwrite(self, read: Callable[[], StateDict], shaped: frozenset[Any], /) -> None:
        """Read `in_place`, and take it. On all ranks."""


class Plain:
    """Also one over parameters of FSDP2."""

    in_place = False

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.params = optimizer, _params_of(optimizer)

    def require_ready(self) -> None:
        pass

    def kind_of(self, _: int, /) -> Optimizer:
        return self.optimizer

    def part(self) -> StateDict:
        saved = self.optimizer.state_dict()
        state = {**saved["state"], **self._without_old_copies(saved["state"])}
        return {**saved, "state": {key: apart(values) for key, values in state.items()}}

    def knows_masters(self, known: Collection[Any], /) -> bool:
        """Not if it would keep them for ever as they are."""
        return not known or MASTER in known

    def is_shaped(self, _: int, __: Any, /) -> bool:
        return False

    def holds(self, _: int, __: Any, /) -> bool:
        return True

    def shaped(self, _: Shapes, /) -> frozenset[Any]:
        return frozenset()

    def rooms(self, _: Wanted, __: frozenset[Any], /) -> Room:
        return self._room

    def completed(self, saved: StateDict, /) -> StateDict:
        groups = saved["param_groups"]
        return put_together(saved, recipe_of(self.optimizer, groups[0]), self.optimizer) if groups else saved

    def try_out(self, _: Callable[[], StateDict], /) -> None:
        pass

    def for_undo(self) -> dict[str, Any]:
        """Its attributes, which loading exchanges."""
        return dict(vars(self.optimizer))

    def load(self, saved: StateDict, before: dict[str, Any], undo: ExitStack) -> None:
        undo.callback(_put_back, vars(self.optimizer), before)
        self.optimizer.load_state_dict(saved)

    def overwrite(self, _: Callable[[], StateDict], __: frozenset[Any], /) -> None:
        raise AssertionError("nothing is read in its place")

    def _without_old_copies(self, state: dict[Any, Any]) -> dict[int, Any]:
        """One that was given state of ours keeps master weights as they were, while the model goes on."""
        places = enumerate((group, param) for group in self.optimizer.param_groups for param in group["params"])
        old = [i for i, it in places if MASTER in state.get(i, ()) and not knows(self.optimizer, *it, MASTER)]
        return {i: {key: value for key, value in state[i].items() if key != MASTER} for i in old}

    def _room(self, index: int, _: Any, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        param = self.params[index]
        if size == param.shape and param.dim():  # divided and laid out alike
            return torch.empty_like(param, dtype=dtype, requires_grad=False)
        return torch.empty(size, dtype=dtype)


class Sharded:
    def __init__(self, optimizer: ZeroRedundancyOptimizer) -> None:
        self.optimizer, self.params, self._engine = optimizer, _params_of(optimizer), optimizer.engine

    @cached_property
    def in_place(self) -> bool:
        inner = self.optimizer.optims
        hooks = [hook for part in (self.optimizer, *inner) for hook in _load_hooks(part)]
        methods = [method for part in inner for method in (type(part).load_state_dict, type(part).__setstate__)]
        return not hooks and are_torchs(*methods)

    def require_ready(self) -> None:
        self.optimizer.require_settled("checkpoint.load")
        self._engine.check_groups(self.optimizer.param_groups)

    def kind_of(self, index: int, /) -> Optimizer:
        return self._engine.inner_of(index).optimizer

    def part(self) -> StateDict:
        self.optimizer.require_settled("checkpoint.save")
        return state_dicts.part(self._engine, self.optimizer.param_groups, initial=False)

    def knows_masters(self, _: Collection[Any], /) -> bool:
        return True

    def is_shaped(self, index: int, key: Any, /) -> bool:
        return key in self._engine.param_shaped(index)

    def holds(self, index: int, key: Any, /) -> bool:
        return self._engine.holds(index, key)

    def shaped(self, found: Shapes, /) -> frozenset[Any]:
        specs = self.optimizer.layout.params
        return shaped_keys((specs[index], key, size) for index, key, size in found)

    def rooms(self, wanted: Wanted, shaped: frozenset[Any], /) -> Room:
        return self._engine.rooms(wanted, in_place=self.in_place, param_shaped=shaped)

    def completed(self, saved: StateDict, /) -> StateDict:
        return saved

    def try_out(self, saved: Callable[[], StateDict], /) -> None:
        self.optimizer._check_state_dict(saved())

    def for_undo(self) -> dict[str, Any]:
        return staged(self.part())

    def load(self, saved: StateDict, before: dict[str, Any], undo: ExitStack) -> None:
        undo.callback(self._engine.kept_doubts())  # after the next: rows that had parted have, then as before
        undo.callback(self.optimizer.load_state_dict, before)
        self.optimizer.load_state_dict(saved, assign=True)

    def overwrite(self, read: Callable[[], StateDict], shaped: frozenset[Any], /) -> None:
        self._engine.learn(shaped)
        self.optimizer.load_state_dict(read(), assign=True)


def running(optimizer: Optimizer) -> Running:
    return Sharded(optimizer) if isinstance(optimizer, ZeroRedundancyOptimizer) else Plain(optimizer)


def engine_of(optimizer: Optimizer | None) -> Engine | None:
    """That of a sharded one."""
    return optimizer.engine if isinstance(optimizer, ZeroRedundancyOptimizer) else None


def _params_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _load_hooks(it: Optimizer) -> list[Any]:
    return [*it._optimizer_load_state_dict_pre_hooks.values(), *it._optimizer_load_state_dict_post_hooks.values()]


def _put_back(attributes: dict[str, Any], before: dict[str, Any]) -> None:
    attributes.clear()
    attributes.update(before)
