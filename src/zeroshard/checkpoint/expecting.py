"""What a running optimizer would keep of a parameter, asked on tensors that have a shape and no memory."""

import inspect
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch.optim import Optimizer

from ..engine.beginnings import probe_initial_state
from ..engine.inner import OptimizerFactory
from ..engine.selftest import isolated_probe

_IMPLEMENTATION_OPTIONS = ("foreach", "fused", "capturable", "differentiable")
"""Ways to do the same, which need memory."""


def probe_expected_state(optimizer: Optimizer, options: Mapping[str, Any], param: torch.Tensor) -> dict[Any, Any]:
    """What it keeps, as tensors of the right shapes; empty if it keeps nothing or cannot be asked."""
    probe = torch.empty(tuple(param.shape), dtype=param.dtype, device="meta")
    plainly = {
        key: False if key in _IMPLEMENTATION_OPTIONS else value for key, value in options.items() if key != "params"
    }
    recipe = make_factory(optimizer, plainly)
    with isolated_probe(recipe), suppress(Exception):
        return probe_initial_state(recipe, plainly, [probe])[0]
    return {}


def can_use_state_key(optimizer: Optimizer, options: Mapping[str, Any], param: torch.Tensor, key: str) -> bool:
    """Whether a plain one would use that state of a parameter; also if it cannot be asked."""
    expected = probe_expected_state(optimizer, options, param)
    return not expected or key in expected


def make_factory(optimizer: Optimizer, options: Mapping[str, Any]) -> OptimizerFactory:
    """How to make another one of that class."""
    return OptimizerFactory(type(optimizer), [], True, _required_arguments(type(optimizer), options))


def _required_arguments(optimizer_class: type[Optimizer], options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that have no default. The others are in the group."""
    wanted = list(inspect.signature(optimizer_class).parameters.values())[1:]
    return {it.name: options[it.name] for it in wanted if it.default is it.empty and it.name in options}
