"""Hooks on autograd: they tell the `GradReducer`, without DDP, when a gradient is ready and when backward ends."""

import sys
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from .._torch_compat import (
    CUSTOM_BACKWARD_CODE,
    current_graph_task_id,
    post_accumulate_grad_hooks,
    queue_backward_callback,
)
from .grad_reducer import GradReducer
from .grad_stage import drop_placeholder

# ---------------------------------------------------------------------------------------------------------------------
# Autograd engine: the running backward pass.


NO_BACKWARD = -1


current_backward_id = current_graph_task_id
"""Returns the id of the backward pass that runs in this thread, or `NO_BACKWARD`."""


def queue_after_backward(callback: Callable[[], None]) -> None:
    """Queue `callback` for the end of the running backward pass, after callbacks queued before. It may raise."""
    queue_backward_callback(callback)


# ---------------------------------------------------------------------------------------------------------------------
# Gradient hooks: autograd reports ready gradients and the end of backward passes.


_LIVE_HOOKS: "weakref.WeakValueDictionary[int, GradHooks]" = weakref.WeakValueDictionary()


class GradHooks:
    """Post-accumulate-grad hooks that mark gradients ready in a `GradReducer`.

    Hooks on parameters refer to this object weakly, so they become inactive with the optimizer that owns it.
    """

    def __init__(self, reducer: GradReducer) -> None:
        self._reducer = reducer
        self._params: Sequence[torch.Tensor] = ()
        self._num_hooked = 0
        self._frozen: dict[int, torch.Tensor] = {}
        self._backward_id = NO_BACKWARD
        self.is_superseded = False
        """A later optimizer took over some of the parameters and receives their gradients."""
        _LIVE_HOOKS[id(self)] = self

    def attach(self, params: Sequence[torch.Tensor]) -> None:
        """Hook all trainable parameters that have no hook yet. `params` are all parameters of the optimizer."""
        unhooked = {**self._frozen, **dict(enumerate(params[self._num_hooked :], self._num_hooked))}
        self._params, self._num_hooked = params, len(params)
        self._frozen = {index: param for index, param in unhooked.items() if not param.requires_grad}
        self._supersede_others(set(map(id, unhooked.values())))
        for index in unhooked.keys() - self._frozen.keys():
            _remove_dead_hooks(unhooked[index])
            hook = partial(_post_accumulate_hook, weakref.ref(self), index)
            unhooked[index].register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            register_accumulation_hook(self._reducer, index, unhooked[index])

    def _supersede_others(self, param_ids: set[int]) -> None:
        for other in _get_live_hooks():
            overlaps = other is not self and any(id(param) in param_ids for param in other._params)
            other.is_superseded = other.is_superseded or overlaps

    def mark_ready(self, index: int) -> None:
        """Mark the gradient of a parameter ready. Called by autograd after it was accumulated."""
        if self.is_superseded:
            return
        backward_id = current_backward_id()
        if backward_id != self._backward_id:
            self._backward_id = backward_id
            # A nested backward pass (reentrant activation checkpointing) does not end the outer one.
            if not _is_in_custom_backward():
                queue_after_backward(self._finish_backward)
        self._reducer.mark_ready(index)

    def _finish_backward(self) -> None:
        self._backward_id = NO_BACKWARD
        self._reducer.finish_backward()


def register_accumulation_hook(reducer: GradReducer, index: int, param: torch.Tensor) -> None:
    """Make autograd notify `reducer` before a backward pass accumulates into `param.grad`."""
    if index in reducer.grad_accumulators:
        return
    drop_placeholder(param)  # of an optimizer that this one supersedes
    # Hazard: a hook on the parameter itself would also run for torch.autograd.grad(), which accumulates nothing.
    accumulator = get_gradient_edge(param).node
    accumulator.register_prehook(partial(_accumulation_pre_hook, weakref.ref(reducer), index))
    reducer.grad_accumulators[index] = accumulator


def _accumulation_pre_hook(reducer_ref: "weakref.ref[GradReducer]", index: int, _: Any) -> None:
    reducer = reducer_ref()
    if reducer is not None:
        reducer.prepare_accumulation(index, current_backward_id())


def _get_live_hooks() -> "list[GradHooks]":
    # Hazard: another thread may construct an optimizer at the same time, so do not iterate over the dict itself.
    references = _LIVE_HOOKS.valuerefs()
    return [hooks for hooks in (reference() for reference in references) if hooks is not None]


def hooked_param_ids() -> set[int]:
    """Return the ids of all parameters whose gradients are reduced by hooks of any live optimizer."""
    return {id(param) for hooks in _get_live_hooks() if not hooks.is_superseded for param in hooks._params}


def _remove_dead_hooks(param: torch.Tensor) -> None:
    """Remove hooks of optimizers that no longer exist; otherwise they would accumulate with every new optimizer."""
    registered = post_accumulate_grad_hooks(param)
    for key, hook in list(registered.items()):
        if isinstance(hook, partial) and hook.func is _post_accumulate_hook and hook.args[0]() is None:
            del registered[key]


def _post_accumulate_hook(hooks_ref: "weakref.ref[GradHooks]", index: int, _: torch.Tensor) -> None:
    hooks = hooks_ref()
    if hooks is not None:
        hooks.mark_ready(index)


def _is_in_custom_backward() -> bool:
    """Whether this thread runs inside the backward of an `autograd.Function`, as nested backward passes do."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is CUSTOM_BACKWARD_CODE:
            return True
        frame = frame.f_back
    return False
