"""Hooks on autograd and on `torch.optim.Optimizer.step`.

- `GradHooks` tells the `GradReducer` when a gradient is ready and when a backward pass ends, without DDP.
- `watch_plain_steps` warns once about a plain optimizer that updates parameters of a sharded one, typically left over
  in a script.
"""

import sys
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import Any, Protocol

import torch
from torch.autograd.graph import get_gradient_edge
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .._logging import warn_at_caller
from .._torch_compat import (
    CUSTOM_BACKWARD_CODE,
    current_graph_task_id,
    post_accumulate_grad_hooks,
    queue_backward_callback,
)
from .base import Engine
from .grad_bucket import drop_placeholder, local_grad
from .grad_reducer import GradReducer
from .inner import is_stepping

# ---------------------------------------------------------------------------------------------------------------------
# Autograd engine: the running backward pass.


NO_BACKWARD = -1


def current_backward_id() -> int:
    """Return the id of the backward pass that runs in this thread, or `NO_BACKWARD`."""
    return current_graph_task_id()


def queue_after_backward(callback: Callable[[], None]) -> None:
    """Queue `callback` for the end of the running backward pass, after callbacks queued before. It may raise."""
    queue_backward_callback(callback)


# ---------------------------------------------------------------------------------------------------------------------
# Plain optimizers that update parameters of a sharded one.
#
# Global step hooks observe the steps of all optimizers. They hold only weak references, and scan an optimizer's
# parameters only when these may have changed. They ignore inner optimizers and their components, and optimizers that
# wrap a sharded one.


class ShardedOptimizerLike(Protocol):
    """The part of the user-facing optimizer that is needed here."""

    _engine: Engine

    @property
    def _is_superseded(self) -> bool:
        """Whether a later optimizer took over its parameters."""


class _PlainOptimizer:
    """Tracks the steps of an optimizer that is not sharded."""

    def __init__(self, optimizer: Optimizer, key: int) -> None:
        self.optimizer_ref = weakref.ref(optimizer, lambda _: _PLAIN_OPTIMIZERS.pop(key, None))
        self.should_ignore = False
        """A warning was emitted, or the optimizer is part of a sharded one, or wraps one."""
        self._lookup_key = -1, -1
        self._shared_params: list[weakref.ref[torch.Tensor]] = []
        self._last_sharded_steps = -1
        self.step_in_progress: _StepInProgress | None = None

    def find_shared_params(self, groups: list[dict[str, Any]]) -> None:
        """Find the parameters that live sharded optimizers manage, too. Does nothing unless they may have changed."""
        lookup_key = _registration_count, sum(len(group["params"]) for group in groups)
        if lookup_key != self._lookup_key:
            optimizer = self.optimizer_ref()
            self.should_ignore = any(
                member.optimizer is optimizer
                for sharded in _live_sharded_optimizers()
                for member in sharded._engine.inner.local_optimizers
            )
            sharded_ids = {id(param) for sharded in _live_sharded_optimizers() for param in sharded._engine.params}
            params = (param for group in groups for param in group["params"])
            self._lookup_key = lookup_key
            self._shared_params = [weakref.ref(param) for param in params if id(param) in sharded_ids]

    def begin_step(self) -> None:
        """Record the version of a parameter that the step may update."""
        self.step_in_progress = None
        if not self._shared_params or self.should_ignore:
            return
        shared = [param for param in (param_ref() for param_ref in self._shared_params) if param is not None]
        param = next((param for param in shared if local_grad(param) is not None), None)
        owner = None if param is None else _find_sharded_owner(param)
        if param is not None and owner is not None:
            self.step_in_progress = _StepInProgress(param, owner, _sharded_step_count)

    def end_step(self, optimizer: Optimizer) -> None:
        """Warn if the step updated a parameter of a sharded optimizer."""
        started, self.step_in_progress = self.step_in_progress, None
        if started is None:
            return
        if started.sharded_step_count != _sharded_step_count:
            self.should_ignore = True  # it wraps a sharded optimizer, which stepped inside
            return
        owner = started.owner_ref()
        if owner is None or not started.has_changed_param() or _is_zero_lr_step(optimizer):
            return
        # Continuing with a plain optimizer after the last step of a sharded one is fine if DDP averages gradients.
        steps, previous_steps = owner._engine.steps, self._last_sharded_steps
        self._last_sharded_steps = steps
        if owner._engine.reduces_grads or steps == 0 or previous_steps not in (-1, steps):
            self._warn(optimizer, owner)

    def _warn(self, optimizer: Optimizer, owner: ShardedOptimizerLike) -> None:
        self.should_ignore = True
        name, sharded = type(optimizer).__name__, type(owner).__name__
        warn_at_caller(
            f"step() of a plain {name} has updated parameters of a {sharded}. Only one optimizer may update a "
            f"parameter: call step() of the {sharded} and remove the {name}."
        )


class _StepInProgress:
    """A running step, and a parameter with a gradient that it may update."""

    def __init__(self, param: torch.Tensor, owner: ShardedOptimizerLike, sharded_step_count: int) -> None:
        self._param_ref, self._version = weakref.ref(param), param._version
        self.owner_ref, self.sharded_step_count = weakref.ref(owner), sharded_step_count

    def has_changed_param(self) -> bool:
        param = self._param_ref()
        return param is not None and param._version != self._version


_SHARDED_OPTIMIZERS: "weakref.WeakValueDictionary[int, ShardedOptimizerLike]" = weakref.WeakValueDictionary()
_PLAIN_OPTIMIZERS: dict[int, _PlainOptimizer] = {}
_registration_count = 0
"""How often parameters were added to a sharded optimizer."""
_sharded_step_count = 0
_step_hook_handles: list[Any] = []


def watch_plain_steps(optimizer: ShardedOptimizerLike) -> None:
    """Warn about plain optimizers that update the parameters of `optimizer`. Call again after parameters were added.

    Hazard: hooks must not be added or removed while torch iterates over them, so these are never removed.
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
    optimizers = (reference() for reference in _SHARDED_OPTIMIZERS.valuerefs())
    return [optimizer for optimizer in optimizers if optimizer is not None and not optimizer._is_superseded]


def _find_sharded_owner(param: torch.Tensor) -> ShardedOptimizerLike | None:
    return next(
        (
            optimizer
            for optimizer in _live_sharded_optimizers()
            if any(managed is param for managed in optimizer._engine.params)
        ),
        None,
    )


def _is_zero_lr_step(optimizer: Optimizer) -> bool:
    """Whether the learning rate is zero: torch's checkpoint helpers use such a step to initialize optimizer state."""
    return all(not group.get("lr", True) for group in optimizer.param_groups)


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
