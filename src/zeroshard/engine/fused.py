"""The fused implementation of an optimizer, where torch has one."""

import functools
import inspect
from dataclasses import replace
from typing import Any

import torch

from .inner import OptimizerFactory

_IMPL_OPTIONS = ("fused", "foreach", "capturable", "differentiable")


def enable_fused(factory: OptimizerFactory) -> OptimizerFactory:
    """`recipe` with `fused=True`, unless the user has chosen, or there is no such thing for the device.

    Not on the CPU: fused kernels there round in another way than the default loops, and the last elements of a tensor
    in another way than the rest, so that bits would depend on where parameters are cut.
    """
    params = [param for group in factory.groups for param in group["params"]]
    if can_choose_impl(factory, "fused") and all(map(_supports_fused, params)):
        return replace(factory, defaults={**factory.defaults, "fused": True})
    return factory


def can_choose_impl(factory: OptimizerFactory, impl: str) -> bool:
    """Whether there is a `fused`, or a `foreach` implementation, and the user has not chosen any.

    Of torch's own classes only: what others mean by the word, or need for it, nobody knows.
    """
    made: Any = factory.optimizer_class
    preset: dict[str, Any] = {}
    if isinstance(made, functools.partial):
        made, preset = made.func, made.keywords
    given = {*preset, *factory.defaults, *(key for group in factory.groups for key in group)}
    is_torchs = (getattr(made, "__module__", None) or "").startswith("torch.optim.")
    return given.isdisjoint(_IMPL_OPTIONS) and is_torchs and impl in inspect.signature(made).parameters


def _supports_fused(param: torch.Tensor) -> bool:
    return param.is_floating_point() and param.device.type in ("cuda", "xpu", "mps", "mtia")
