"""What a running optimizer would keep of a parameter, asked on tensors that have a shape and no memory."""

import inspect
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch.optim import Optimizer

from ..runtime.beginnings import first_state
from ..runtime.inner import Recipe
from ..runtime.selftest import quietly

_WAYS = ("foreach", "fused", "capturable", "differentiable")
"""Ways to do the same, which need memory."""


def expected_state(optimizer: Optimizer, options: Mapping[str, Any], param: torch.Tensor) -> dict[Any, Any]:
    """What it keeps, as tensors of the right shapes; empty if it keeps nothing or cannot be asked."""
    probe = torch.empty(tuple(param.shape), dtype=param.dtype, device="meta")
    plainly = {key: False if key in _WAYS else value for key, value in options.items() if key != "params"}
    recipe = recipe_of(optimizer, plainly)
    with quietly(recipe), suppress(Exception):
        return first_state(recipe, plainly, [probe])[0]
    return {}


def knows(optimizer: Optimizer, options: Mapping[str, Any], param: torch.Tensor, key: str) -> bool:
    """Whether a plain one would use that state of a parameter; also if it cannot be asked."""
    expected = expected_state(optimizer, options, param)
    return not expected or key in expected


def recipe_of(optimizer: Optimizer, options: Mapping[str, Any]) -> Recipe:
    """How to make another one of that class."""
    return Recipe(type(optimizer), [], True, _needed(type(optimizer), options))


def _needed(kind: type[Optimizer], options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that have no default. The others are in the group."""
    wanted = list(inspect.signature(kind).parameters.values())[1:]
    return {it.name: options[it.name] for it in wanted if it.default is it.empty and it.name in options}
