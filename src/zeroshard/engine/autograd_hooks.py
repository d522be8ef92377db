"""A plain optimizer that updates parameters of a sharded one, as it is left over in a script: a warning, once.

Hooks that all optimizers have in common see every step. They hold weak references only, and look at an optimizer's
parameters once. Inner optimizers, and what these consist of, are none of these, nor is one that steps a sharded one.
"""

import weakref
from typing import Any, Protocol

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .._logging import warn_at_caller
from .inner import is_stepping
from .sharded_grad import local_grad
from .base import Engine


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
