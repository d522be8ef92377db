"""What a step costs: counted on tensors that have a shape and no memory, or measured."""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ..errors import ConfigError
from ..layout.partition import Cost, checked
from ..layout.specs import ParamSpec
from .beginnings import built_for
from .inner import Recipe, ShardOptimizer
from .probe_cache import memoize_probe
from .selftest import quietly, step_once

PER_ELEMENT = 1000
"""Operations that an element is worth, for its way through memory: some hundred on CPUs, some thousand on GPUs."""
_WARM_UP, _MEASURED = 3, 5
_STEPS = 2
"""Some optimizers do in the second step what they do not in the first."""


class CountedWork:
    """The operations of a step on a parameter, by its shape."""

    def __init__(self, recipe: Recipe) -> None:
        # Without its parameters, which do not matter here, and which may be thousands.
        self._recipe = replace(recipe, groups=[{**group, "params": []} for group in recipe.groups[:1]])
        self._known: dict[tuple[int, ...], int] = {}

    def __call__(self, spec: ParamSpec) -> int:
        if spec.shape not in self._known:
            self._known[spec.shape] = PER_ELEMENT * spec.numel + _operations(self._recipe, spec.shape, spec.dtype)
        return self._known[spec.shape]


def by_elements(spec: ParamSpec) -> int:
    """For optimizers that treat every element by itself."""
    return PER_ELEMENT * spec.numel


Shape = tuple[tuple[int, ...], torch.dtype]


def kind_of(spec: ParamSpec) -> Shape:
    """Parameters of which it is equal cost the same."""
    return spec.shape, spec.dtype


@dataclass(frozen=True)
class MeasuredWork:
    """The seconds of a step on a parameter, by its shape and dtype."""

    seconds: Mapping[Shape, float]

    def __call__(self, spec: ParamSpec) -> float:
        if kind_of(spec) not in self.seconds:
            known = ", ".join(str(shape) for shape, _ in self.seconds)
            raise ConfigError(
                f"no step was measured on a parameter like {spec.label}, of shape {spec.shape} and {spec.dtype}, but "
                f"on those of {known}: measure with the selector of the rule"
            )
        return self.seconds[kind_of(spec)]


def seconds(recipe: Recipe, spec: ParamSpec) -> float:
    """Of a step on a parameter like this one, on its device: the median of a few, after others."""
    with quietly(recipe):
        param = torch.nn.Parameter(torch.randn(spec.shape, device=spec.device).to(spec.dtype))
        param.grad = torch.randn_like(param)
        inner = built_for(recipe, recipe.groups[0], [param])
        times = [_timed(inner, spec.device) for _ in range(_WARM_UP + _MEASURED)]
    return statistics.median(times[_WARM_UP:])


def _timed(inner: ShardOptimizer, device: torch.device) -> float:
    _wait_for(device)
    start = time.perf_counter()
    step_once(inner)
    _wait_for(device)
    return time.perf_counter() - start


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def in_operations(cost: Cost, specs: Sequence[ParamSpec], counted: Sequence[Cost]) -> Cost:
    """A cost in a unit of its own, such as seconds, in operations, so that it can stand beside others.

    It says how the work on `specs` is divided among them. How much that is in all is `counted`, by group.
    """
    trained = [spec for spec in specs if spec.trainable]
    total = sum(map(checked(cost), trained))
    factor = sum(counted[spec.group](spec) for spec in trained) / total if total else 1.0
    return lambda spec: factor * cost(spec)


@memoize_probe(on_failure=0)
def _operations(recipe: Recipe, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Those of products of matrices; none if the optimizer cannot be asked."""
    from torch.utils.flop_counter import FlopCounterMode  # takes a second

    with quietly(recipe):
        param = torch.nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
        inner = built_for(recipe, recipe.groups[0], [param])
        with FlopCounterMode(display=False) as counter:
            for _ in range(_STEPS):
                param.grad = torch.empty_like(param)
                step_once(inner)
        return int(counter.get_total_flops()) // _STEPS
