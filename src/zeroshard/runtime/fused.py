"""The fused implementation of an optimizer, where torch has one."""

import inspect
from dataclasses import replace
from typing import Any

import torch

from ..policies import MasterWeights
from .inner import Recipe
from .selftest import is_separable

_CHOICES = ("fused", "foreach", "capturable", "differentiable")


def with_fused(recipe: Recipe, masters: MasterWeights | None) -> Recipe:
    """`recipe` with `fused=True`, unless the user has chosen, or there is no such thing.

    Some fused kernels round an element in another way where it is near the end of its tensor (SGD's on the CPU): they
    are not taken, since results would then depend on where parameters are cut.
    """
    given = {*recipe.defaults, *(key for group in recipe.groups for key in group)}
    params = [param for group in recipe.groups for param in group["params"]]
    if (
        not given.isdisjoint(_CHOICES)
        or not _takes_fused(recipe.factory)
        or not all(_is_supported(param, masters) for param in params)
    ):
        return recipe
    fused = replace(recipe, defaults={**recipe.defaults, "fused": True})
    return fused if is_separable(fused, exactly=True) else recipe


def _takes_fused(factory: Any) -> bool:
    try:
        return "fused" in inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return False


def _is_supported(param: torch.Tensor, masters: MasterWeights | None) -> bool:
    dtype = masters.dtype if masters is not None and masters.covers(param.dtype) else param.dtype
    # Hazard: on the CPU fused SGD writes garbage into half-precision parameters (torch 2.13).
    if param.device.type == "cpu" and dtype not in (torch.float32, torch.float64):
        return False
    return dtype.is_floating_point and param.device.type in ("cpu", "cuda", "xpu", "mps", "mtia")
