"""A plain optimizer that updates parameters of a sharded one, as it is left over in a script: a warning, once.

Hooks that all optimizers have in common see every step. They hold weak references only, and look at an optimizer's
parameters once. Inner optimizers, and what these consist of, are none of these, nor is one that steps a sharded one.
"""

import weakref
from typing import Any, Protocol

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..notices import warn_user
from ..runtime.inner import is_stepping
from ..runtime.sharded_grad import local_grad
from ..runtime.step import Engine


class Sharded(Protocol):
    """An optimizer as users hold it."""

    engine: Engine

    @property
    def _is_superseded(self) -> bool:
        """Another one was made for its parameters."""


class _Plain:
    """What is known of an optimizer that is not sharded."""

    def __init__(self, optimizer: Optimizer, key: int) -> None:
        self.optimizer = weakref.ref(optimizer, lambda _: _PLAIN.pop(key, None))
        self.is_done = False
        """It was warned of, or is part of a sharded optimizer, or steps one."""
        self._known = -1, -1
        self._shared: list[weakref.ref[torch.Tensor]] = []
        self._seen_steps = -1
        self.started: _Started | None = None

    def find_shared(self, groups: list[dict[str, Any]]) -> None:
        """Which parameters live sharded optimizers have, too. Looked for when there may be others than before."""
        known = _generation, sum(len(group["params"]) for group in groups)
        if known != self._known:
            optimizer = self.optimizer()
            self.is_done = any(it.optimizer is optimizer for one in _live() for it in one.engine.inner.members)
            owned = {id(param) for it in _live() for param in it.engine.params}
            params = (param for group in groups for param in group["params"])
            self._known = known
            self._shared = [weakref.ref(param) for param in params if id(param) in owned]

    def start(self) -> None:
        """A step begins: note what it may change."""
        self.started = None
        if not self._shared or self.is_done:
            return
        shared = [param for param in (it() for it in self._shared) if param is not None]
        param = next((it for it in shared if local_grad(it) is not None), None)
        owner = None if param is None else _owner_of(param)
        if param is not None and owner is not None:
            self.started = _Started(param, owner, _sharded_steps)

    def end(self, optimizer: Optimizer) -> None:
        """A step is over: did it change what it should not?"""
        started, self.started = self.started, None
        if started is None:
            return
        if started.sharded_steps != _sharded_steps:
            self.is_done = True  # it wraps a sharded one
            return
        owner = started.owner()
        if owner is None or not started.has_moved() or _is_rehearsal(optimizer):
            return
        # Who goes on with a plain optimizer where a sharded one has ended, on averaged gradients, makes no mistake.
        steps, before = owner.engine.steps, self._seen_steps
        self._seen_steps = steps
        if owner.engine.reduces or steps == 0 or before not in (-1, steps):
            self._warn(optimizer, owner)

    def _warn(self, optimizer: Optimizer, owner: Sharded) -> None:
        self.is_done = True
        name, sharded = type(optimizer).__name__, type(owner).__name__
        warn_user(
            f"step() of a plain {name} has updated parameters of a {sharded}. Only one optimizer may update a "
            f"parameter: call step() of the {sharded} and remove the {name}."
        )


class _Started:
    """A step that has begun, and a parameter with a gradient that it may change."""

    def __init__(self, param: torch.Tensor, owner: Sharded, sharded_steps: int) -> None:
        self._param, self._version = weakref.ref(param), param._version
        self.owner, self.sharded_steps = weakref.ref(owner), sharded_steps

    def has_moved(self) -> bool:
        param = self._param()
        return param is not None and param._version != self._version


_LIVE: "weakref.WeakValueDictionary[int, Sharded]" = weakref.WeakValueDictionary()
_PLAIN: dict[int, _Plain] = {}
_generation = 0
"""Counts the times at which parameters have become those of a sharded optimizer."""
_sharded_steps = 0
_handles: list[Any] = []


def watch_plain_steps(sharded: Sharded) -> None:
    """Notice plain optimizers that update its parameters, from now on. To be called again when it gets more of them.

    Hazard: hooks must not come and go while torch calls one after the other, so these stay.
    """
    global _generation  # noqa: PLW0603
    _LIVE[id(sharded)] = sharded
    _generation += 1
    if not all(handle.id in (handle.hooks_dict_ref() or {}) for handle in _handles) or not _handles:
        _handles[:] = [register_optimizer_step_pre_hook(_before), register_optimizer_step_post_hook(_after)]


def _before(optimizer: Optimizer, *_: Any) -> None:
    global _sharded_steps  # noqa: PLW0603
    if torch.compiler.is_compiling() or not _LIVE or is_stepping():
        return
    key = id(optimizer)
    sharded: object = _LIVE.get(key)
    if sharded is optimizer:
        _sharded_steps += 1
        return
    plain = _PLAIN.get(key)
    if plain is None or plain.optimizer() is not optimizer:
        plain = _PLAIN[key] = _Plain(optimizer, key)
    if not plain.is_done:
        plain.find_shared(optimizer.param_groups)
        plain.start()


def _after(optimizer: Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling() or not _LIVE or is_stepping():
        return
    plain = _PLAIN.get(id(optimizer))
    if plain is not None and not plain.is_done and plain.optimizer() is optimizer:
        plain.end(optimizer)


def _live() -> list[Sharded]:
    found = (reference() for reference in _LIVE.valuerefs())
    return [it for it in found if it is not None and not it._is_superseded]


def _owner_of(param: torch.Tensor) -> Sharded | None:
    return next((it for it in _live() if any(mine is param for mine in it.engine.params)), None)


def _is_rehearsal(optimizer: Optimizer) -> bool:
    """A step with a learning rate of zero, by which torch's checkpoint helpers have an optimizer make its state."""
    return all(not group.get("lr", True) for group in optimizer.param_groups)
