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

from .grad_reducer import GradReducer
from .sharded_grad import drop_placeholder
from .engine_events import NO_BACKWARD, current_backward_id, queue_after_backward

_LIVE_HOOKS: "weakref.WeakValueDictionary[int, GradHooks]" = weakref.WeakValueDictionary()


class GradHooks:
    """Hooks on parameters, which live as long as the `GradSync` that they tell."""

    def __init__(self, reducer: GradReducer) -> None:
        self._reducer = reducer
        self._params: Sequence[torch.Tensor] = ()
        self._num_hooked = 0
        self._frozen: dict[int, torch.Tensor] = {}
        self._backward_id = NO_BACKWARD
        self.is_superseded = False
        """Another optimizer was made for some of the parameters since, and gets their gradients."""
        _LIVE_HOOKS[id(self)] = self

    def attach(self, params: Sequence[torch.Tensor]) -> None:
        """Hook all parameters that train and have no hook yet. `params` are all of them."""
        waiting = {**self._frozen, **dict(enumerate(params[self._num_hooked :], self._num_hooked))}
        self._params, self._num_hooked = params, len(params)
        self._frozen = {index: param for index, param in waiting.items() if not param.requires_grad}
        self._supersede_others(set(map(id, waiting.values())))
        for index in waiting.keys() - self._frozen.keys():
            _remove_dead_hooks(waiting[index])
            hook = partial(_post_accumulate_hook, weakref.ref(self), index)
            waiting[index].register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            register_accumulation_hook(self._reducer, index, waiting[index])

    def _supersede_others(self, param_ids: set[int]) -> None:
        for other in _get_live_hooks():
            taken = other is not self and any(id(param) in param_ids for param in other._params)
            other.is_superseded = other.is_superseded or taken

    def mark_ready(self, index: int) -> None:
        if self.is_superseded:
            return
        running = current_backward_id()
        if running != self._backward_id:
            self._backward_id = running
            # The end of a backward pass inside another one (checkpointing that is re-entrant) ends nothing.
            if not _is_in_custom_backward():
                queue_after_backward(self._finish_backward)
        self._reducer.mark_ready(index)

    def _finish_backward(self) -> None:
        self._backward_id = NO_BACKWARD
        self._reducer.finish_backward()


def register_accumulation_hook(reducer: GradReducer, index: int, param: torch.Tensor) -> None:
    """Tell `sync` before a backward pass adds to `param.grad`."""
    if index in reducer.grad_accumulators:
        return
    if not reducer.has_placeholder(index):
        drop_placeholder(param)  # of an optimizer that this one supersedes
    # Hazard: a hook on the parameter would also run for torch.autograd.grad(), which accumulates nothing.
    accumulator = get_gradient_edge(param).node
    accumulator.register_prehook(partial(_accumulation_pre_hook, weakref.ref(reducer), index))
    reducer.grad_accumulators[index] = accumulator


def _accumulation_pre_hook(reducer_ref: "weakref.ref[GradReducer]", index: int, _: Any) -> None:
    alive = reducer_ref()
    if alive is not None:
        alive.prepare_accumulation(index, current_backward_id())


def _get_live_hooks() -> "list[GradHooks]":
    """Hazard: other threads may make optimizers meanwhile, so that what knows them must not be iterated over."""
    found = (reference() for reference in _LIVE_HOOKS.valuerefs())
    return [hooks for hooks in found if hooks is not None]


def hooked_param_ids() -> set[int]:
    """The ids of all parameters whose gradients are sent by hooks, whichever optimizer they belong to."""
    return {id(param) for hooks in _get_live_hooks() if not hooks.is_superseded for param in hooks._params}


def _remove_dead_hooks(param: torch.Tensor) -> None:
    """Hooks of optimizers that are gone: else they would pile up where one is made after the other."""
    known: Any = param._post_accumulate_grad_hooks or {}
    for key, hook in list(known.items()):
        if isinstance(hook, partial) and hook.func is _post_accumulate_hook and hook.args[0]() is None:
            del known[key]


def _post_accumulate_hook(hooks_ref: "weakref.ref[GradHooks]", index: int, _: torch.Tensor) -> None:
    alive = hooks_ref()
    if alive is not None:
        alive.mark_ready(index)


_CUSTOM_BACKWARD_CODE: CodeType = BackwardCFunction.apply.__code__


def _is_in_custom_backward() -> bool:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is _CUSTOM_BACKWARD_CODE:
            return True
        frame = frame.f_back
    return False
