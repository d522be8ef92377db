"""The fused implementation of an optimizer, where torch has one."""

import functools
import inspect
from dataclasses import replace
from typing import Any

import torch

from .inner import Recipe

_CHOICES = ("fused", "foreach", "capturable", "differentiable")


def with_fused(recipe: Recipe) -> Recipe:
    """`recipe` with `fused=True`, unless the user has chosen, or there is no such thing for the device.

    Not on the CPU: fused kernels there round in another way than the default loops, and the last elements of a tensor
    in another way than the rest, so that bits would depend on where parameters are cut.
    """
    params = [param for group in recipe.groups for param in group["params"]]
    if leaves_open(recipe, "fused") and all(map(_is_supported, params)):
        return replace(recipe, defaults={**recipe.defaults, "fused": True})
    return recipe


def leaves_open(recipe: Recipe, way: str) -> bool:
    """Whether there is a `fused`, or a `foreach` implementation, and the user has not chosen any.

    Of torch's own classes only: what others mean by the word, or need for it, nobody knows.
    """
    made: Any = recipe.factory
    preset: dict[str, Any] = {}
    if isinstance(made, functools.partial):
        made, preset = made.func, made.keywords
    given = {*preset, *recipe.defaults, *(key for group in recipe.groups for key in group)}
    is_torchs = (getattr(made, "__module__", None) or "").startswith("torch.optim.")
    return given.isdisjoint(_CHOICES) and is_torchs and way in inspect.signature(made).parameters


def _is_supported(param: torch.Tensor) -> bool:
    return param.is_floating_point() and param.device.type in ("cuda", "xpu", "mps", "mtia")
