"""The fused implementation of an optimizer, where torch has one and it gives the same numbers."""

import inspect
from dataclasses import replace
from typing import Any

import torch

from .inner import Recipe
from .selftest import same_bits

_CHOICES = ("fused", "foreach", "capturable", "differentiable")


def with_fused(recipe: Recipe) -> Recipe:
    """`recipe` with `fused=True`, unless the user has chosen, or nothing is known to be fused.

    On the CPU the fused kernels of some optimizers round in another way than their loops; those are not taken.
    """
    given = {*recipe.defaults, *(key for group in recipe.groups for key in group)}
    params = [param for group in recipe.groups for param in group["params"]]
    if not given.isdisjoint(_CHOICES) or not _takes_fused(recipe.factory) or not all(map(_is_supported, params)):
        return recipe
    fused = replace(recipe, defaults={**recipe.defaults, "fused": True})
    on_cpu = any(param.device.type == "cpu" for param in params)
    return fused if not on_cpu or same_bits(recipe, fused) else recipe


def _takes_fused(factory: Any) -> bool:
    try:
        return "fused" in inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return False


def _is_supported(param: torch.Tensor) -> bool:
    return param.is_floating_point() and param.device.type in ("cpu", "cuda", "xpu", "mps", "mtia")
