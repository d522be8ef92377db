"""A plain optimizer that updates parameters of a sharded one, as it is left over in a script: a warning, once.

Hooks that all optimizers have in common see every step. They hold weak references only, and look at an optimizer's
parameters once. Inner optimizers, and what these consist of, are none of these, nor is one that steps a sharded one.
"""

import sys
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import CodeType, FrameType
from typing import Any, Protocol

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .._logging import warn_at_caller
from .base import Engine
from .grad_bucket import drop_placeholder, local_grad
from .grad_reducer import GradReducer
from .inner import is_stepping

# ---------------------------------------------------------------------------------------------------------------------
# What autograd's engine tells of the backward pass that runs.


NO_BACKWARD = -1


def current_backward_id() -> int:
    """A number for the backward pass that runs in this thread."""
    return torch._C._current_graph_task_id()


def queue_after_backward(callback: Callable[[], None]) -> None:
    """Queue `action` behind all that is queued for the end of the running backward; it may raise there."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


# ---------------------------------------------------------------------------------------------------------------------
# A plain optimizer that updates parameters of a sharded one, as it is left over in a script: a warning, once.
#
# Hooks that all optimizers have in common see every step. They hold weak references only, and look at an optimizer's
# parameters once. Inner optimizers, and what these consist of, are none of these, nor is one that steps a sharded one.


class ShardedOptimizerLike(Protocol):
    """An optimizer as users hold it."""

    _engine: Engine

    @property
    def _is_superseded(self) -> bool:
        """Another one was made for its parameters."""


class _PlainOptimizer:
    """What is known of an optimizer that is not sharded."""

    def __init__(self, optimizer: Optimizer, key: int) -> None:
        self.optimizer_ref = weakref.ref(optimizer, lambda _: _PLAIN_OPTIMIZERS.pop(key, None))
        self.should_ignore = False
        """It was warned of, or is part of a sharded optimizer, or steps one."""
        self._lookup_key = -1, -1
        self._shared_params: list[weakref.ref[torch.Tensor]] = []
        self._last_sharded_steps = -1
        self.step_in_progress: _StepInProgress | None = None

    def find_shared_params(self, groups: list[dict[str, Any]]) -> None:
        """Which parameters live sharded optimizers have, too. Looked for when there may be others than before."""
        known = _registration_count, sum(len(group["params"]) for group in groups)
        if known != self._lookup_key:
            optimizer = self.optimizer_ref()
            self.should_ignore = any(
                it.optimizer is optimizer
                for one in _live_sharded_optimizers()
                for it in one._engine.inner.local_optimizers
            )
            owned = {id(param) for it in _live_sharded_optimizers() for param in it._engine.params}
            params = (param for group in groups for param in group["params"])
            self._lookup_key = known
            self._shared_params = [weakref.ref(param) for param in params if id(param) in owned]

    def begin_step(self) -> None:
        """A step begins: note what it may change."""
        self.step_in_progress = None
        if not self._shared_params or self.should_ignore:
            return
        shared = [param for param in (it() for it in self._shared_params) if param is not None]
        param = next((it for it in shared if local_grad(it) is not None), None)
        owner = None if param is None else _find_sharded_owner(param)
        if param is not None and owner is not None:
            self.step_in_progress = _StepInProgress(param, owner, _sharded_step_count)

    def end_step(self, optimizer: Optimizer) -> None:
        """A step is over: did it change what it should not?"""
        started, self.step_in_progress = self.step_in_progress, None
        if started is None:
            return
        if started.sharded_step_count != _sharded_step_count:
            self.should_ignore = True  # it wraps a sharded one
            return
        owner = started.owner_ref()
        if owner is None or not started.has_changed_param() or _is_zero_lr_step(optimizer):
            return
        # Who goes on with a plain optimizer where a sharded one has ended, on averaged gradients, makes no mistake.
        steps, before = owner._engine.steps, self._last_sharded_steps
        self._last_sharded_steps = steps
        if owner._engine.reduces_grads or steps == 0 or before not in (-1, steps):
            self._warn(optimizer, owner)

    def _warn(self, optimizer: Optimizer, owner: ShardedOptimizerLike) -> None:
        self.should_ignore = True
        name, sharded = type(optimizer).__name__, type(owner).__name__
        warn_at_caller(
            f"step() of a plain {name} has updated parameters of a {sharded}. Only one optimizer may update a "
            f"parameter: call step() of the {sharded} and remove the {name}."
        )


class _StepInProgress:
    """A step that has begun, and a parameter with a gradient that it may change."""

    def __init__(self, param: torch.Tensor, owner: ShardedOptimizerLike, sharded_step_count: int) -> None:
        self._param_ref, self._version = weakref.ref(param), param._version
        self.owner_ref, self.sharded_step_count = weakref.ref(owner), sharded_step_count

    def has_changed_param(self) -> bool:
        param = self._param_ref()
        return param is not None and param._version != self._version


_SHARDED_OPTIMIZERS: "weakref.WeakValueDictionary[int, ShardedOptimizerLike]" = weakref.WeakValueDictionary()
_PLAIN_OPTIMIZERS: dict[int, _PlainOptimizer] = {}
_registration_count = 0
"""Counts the times at which parameters have become those of a sharded optimizer."""
_sharded_step_count = 0
_step_hook_handles: list[Any] = []


def watch_plain_steps(optimizer: ShardedOptimizerLike) -> None:
    """Notice plain optimizers that update its parameters, from now on. To be called again when it gets more of them.

    Hazard: hooks must not come and go while torch calls one after the other, so these stay.
    """
    global _registration_count  # noqa: PLW0603
    _SHARDED_OPTIMIZERS[id(optimizer)] = optimizer
    _registration_count += 1
    if not all(handle.id in (handle.hooks_dict_ref() or {}) for handle in _step_hook_handles) or not _step_hook_handles:
        _step_hook_handles[:] = [
            register_optimizer_step_pre_hook(_step_pre_hook),
            register_optimizer_step_post_hook(_step_post_hook),
        ]


def _step_pre_hook(optimizer: Optimizer, *_: Any) -> None:
    global _sharded_step_count  # noqa: PLW0603
    if torch.compiler.is_compiling() or not _SHARDED_OPTIMIZERS or is_stepping():
        return
    key = id(optimizer)
    sharded: object = _SHARDED_OPTIMIZERS.get(key)
    if sharded is optimizer:
        _sharded_step_count += 1
        return
    plain = _PLAIN_OPTIMIZERS.get(key)
    if plain is None or plain.optimizer_ref() is not optimizer:
        plain = _PLAIN_OPTIMIZERS[key] = _PlainOptimizer(optimizer, key)
    if not plain.should_ignore:
        plain.find_shared_params(optimizer.param_groups)
        plain.begin_step()


def _step_post_hook(optimizer: Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling() or not _SHARDED_OPTIMIZERS or is_stepping():
        return
    plain = _PLAIN_OPTIMIZERS.get(id(optimizer))
    if plain is not None and not plain.should_ignore and plain.optimizer_ref() is optimizer:
        plain.end_step(optimizer)


def _live_sharded_optimizers() -> list[ShardedOptimizerLike]:
    found = (reference() for reference in _SHARDED_OPTIMIZERS.valuerefs())
    return [it for it in found if it is not None and not it._is_superseded]


def _find_sharded_owner(param: torch.Tensor) -> ShardedOptimizerLike | None:
    return next((it for it in _live_sharded_optimizers() if any(mine is param for mine in it._engine.params)), None)


def _is_zero_lr_step(optimizer: Optimizer) -> bool:
    """A step with a learning rate of zero, by which torch's checkpoint helpers have an optimizer make its state."""
    return all(not group.get("lr", True) for group in optimizer.param_groups)


# ---------------------------------------------------------------------------------------------------------------------
# Gradient hooks without DDP: autograd says when a gradient is there, and when a backward pass is over.


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
