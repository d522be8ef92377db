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
    preset = recipe.factory.keywords if isinstance(recipe.factory, functools.partial) else {}
    given = {*preset, *recipe.defaults, *(key for group in recipe.groups for key in group)}
    params = [param for group in recipe.groups for param in group["params"]]
    if given.isdisjoint(_CHOICES) and _takes_fused(recipe.factory) and all(map(_is_supported, params)):
        return replace(recipe, defaults={**recipe.defaults, "fused": True})
    return recipe


def _takes_fused(factory: Any) -> bool:
    """Of torch's own classes only: what others mean by the word, or need for it, nobody knows."""
    made = factory.func if isinstance(factory, functools.partial) else factory
    is_torchs = (getattr(made, "__module__", None) or "").startswith("torch.optim.")
    return is_torchs and "fused" in inspect.signature(made).parameters


def _is_supported(param: torch.Tensor) -> bool:
    return param.is_floating_point() and param.device.type in ("cuda", "xpu", "mps", "mtia")
