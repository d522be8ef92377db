"""Gradient hooks without DDP: autograd says when a gradient is there, and when a backward pass is over."""

import sys
import weakref
from collections.abc import Sequence
from functools import partial
from types import CodeType, FrameType
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge

from ..runtime.grad_sync import GradSync
from ..runtime.sharded_grad import drop_placeholder
from .engine_events import NO_BACKWARD, at_end_of_backward, running_backward

_ALIVE: "weakref.WeakValueDictionary[int, GradHooks]" = weakref.WeakValueDictionary()


class GradHooks:
    """Hooks on parameters, which live as long as the `GradSync` that they tell."""

    def __init__(self, sync: GradSync) -> None:
        self._sync = sync
        self._params: Sequence[torch.Tensor] = ()
        self._hooked = 0
        self._frozen: dict[int, torch.Tensor] = {}
        self._pass = NO_BACKWARD
        self.is_replaced = False
        """Another optimizer was made for some of the parameters since, and gets their gradients."""
        _ALIVE[id(self)] = self

    def attach(self, params: Sequence[torch.Tensor]) -> None:
        """Hook all parameters that train and have no hook yet. `params` are all of them."""
        waiting = {**self._frozen, **dict(enumerate(params[self._hooked :], self._hooked))}
        self._params, self._hooked = params, len(params)
        self._frozen = {index: param for index, param in waiting.items() if not param.requires_grad}
        self._take_from_others(set(map(id, waiting.values())))
        for index in waiting.keys() - self._frozen.keys():
            _remove_the_dead(waiting[index])
            hook = partial(_tell, weakref.ref(self), index)
            waiting[index].register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            hook_accumulation(self._sync, index, waiting[index])

    def _take_from_others(self, mine: set[int]) -> None:
        for other in _alive():
            taken = other is not self and any(id(param) in mine for param in other._params)
            other.is_replaced = other.is_replaced or taken

    def ready(self, index: int) -> None:
        if self.is_replaced:
            return
        running = running_backward()
        if running != self._pass:
            self._pass = running
            # The end of a backward pass inside another one (checkpointing that is re-entrant) ends nothing.
            if not _inside_custom_backward():
                at_end_of_backward(self._end)
        self._sync.ready(index)

    def _end(self) -> None:
        self._pass = NO_BACKWARD
        self._sync.end_round()


def hook_accumulation(sync: GradSync, index: int, param: torch.Tensor) -> None:
    """Tell `sync` before a backward pass adds to `param.grad`."""
    if index in sync.accumulators:
        return
    if not sync.has_placeholder(index):
        drop_placeholder(param)  # of an optimizer that this one supersedes
    # Hazard: a hook on the parameter would also run for torch.autograd.grad(), which accumulates nothing.
    accumulator = get_gradient_edge(param).node
    accumulator.register_prehook(partial(_before_accumulation, weakref.ref(sync), index))
    sync.accumulators[index] = accumulator


def _before_accumulation(sync: "weakref.ref[GradSync]", index: int, _: Any) -> None:
    alive = sync()
    if alive is not None:
        alive.before_accumulation(index, running_backward())


def _alive() -> "list[GradHooks]":
    """Hazard: other threads may make optimizers meanwhile, so that what knows them must not be iterated over."""
    found = (reference() for reference in _ALIVE.valuerefs())
    return [hooks for hooks in found if hooks is not None]


def hooked_params() -> set[int]:
    """The ids of all parameters whose gradients are sent by hooks, whichever optimizer they belong to."""
    return {id(param) for hooks in _alive() if not hooks.is_replaced for param in hooks._params}


def _remove_the_dead(param: torch.Tensor) -> None:
    """Hooks of optimizers that are gone: else they would pile up where one is made after the other."""
    known: Any = param._post_accumulate_grad_hooks or {}
    for key, hook in list(known.items()):
        if isinstance(hook, partial) and hook.func is _tell and hook.args[0]() is None:
            del known[key]


def _tell(hooks: "weakref.ref[GradHooks]", index: int, _: torch.Tensor) -> None:
    alive = hooks()
    if alive is not None:
        alive.ready(index)


_CUSTOM_BACKWARD: CodeType = BackwardCFunction.apply.__code__


def _inside_custom_backward() -> bool:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is _CUSTOM_BACKWARD:
            return True
        frame = frame.f_back
    return False
