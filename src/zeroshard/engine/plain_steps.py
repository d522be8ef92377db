"""Warn once about a plain optimizer that updates parameters of a sharded one, typically left over in a script.

Global step hooks observe the steps of all optimizers. They hold only weak references, and scan an optimizer's
parameters only when these may have changed. They ignore inner optimizers and their components, and optimizers that
wrap a sharded one.
"""

import weakref
from typing import Any, Protocol

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .._logging import warn_at_caller
from .base import Engine
from .grad_stage import local_grad
from .inner import is_stepping


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
                local_optimizer.optimizer is optimizer
                for sharded in _live_sharded_optimizers()
                for local_optimizer in sharded._engine.params.inner.local_optimizers
            )
            sharded_ids = {
                id(param) for sharded in _live_sharded_optimizers() for param in sharded._engine.params.tensors
            }
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
        if owner._engine.grads.reduces or steps == 0 or previous_steps not in (-1, steps):
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
            if any(managed is param for managed in optimizer._engine.params.tensors)
        ),
        None,
    )


def _is_zero_lr_step(optimizer: Optimizer) -> bool:
    """Whether the learning rate is zero: torch's checkpoint helpers use such a step to initialize optimizer state."""
    return all(not group.get("lr", True) for group in optimizer.param_groups)
