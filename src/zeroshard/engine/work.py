"""What a step costs: counted on tensors that have a shape and no memory, or measured."""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ..errors import ConfigError
from ..layout.partition import CostFn, validate_cost
from ..layout.spec import ParamSpec
from .beginnings import build_for_probes
from .inner import LocalOptimizer, OptimizerFactory
from .probe_cache import memoize_probe
from .selftest import isolated_probe, step_once

FLOPS_PER_ELEMENT = 1000
"""Operations that an element is worth, for its way through memory: some hundred on CPUs, some thousand on GPUs."""
_WARMUP_STEPS, _MEASURED_STEPS = 3, 5
_FLOP_COUNT_STEPS = 2
"""Some optimizers do in the second step what they do not in the first."""


class FlopCost:
    """The operations of a step on a parameter, by its shape."""

    def __init__(self, factory: OptimizerFactory) -> None:
        # Without its parameters, which do not matter here, and which may be thousands.
        self._factory = replace(factory, groups=[{**group, "params": []} for group in factory.groups[:1]])
        self._cost_by_shape: dict[tuple[int, ...], int] = {}

    def __call__(self, spec: ParamSpec) -> int:
        if spec.shape not in self._cost_by_shape:
            self._cost_by_shape[spec.shape] = FLOPS_PER_ELEMENT * spec.numel + _count_flops(
                self._factory, spec.shape, spec.dtype
            )
        return self._cost_by_shape[spec.shape]


def numel_cost(spec: ParamSpec) -> int:
    """For optimizers that treat every element by itself."""
    return FLOPS_PER_ELEMENT * spec.numel


CostKey = tuple[tuple[int, ...], torch.dtype]


def cost_key(spec: ParamSpec) -> CostKey:
    """Parameters of which it is equal cost the same."""
    return spec.shape, spec.dtype


@dataclass(frozen=True)
class MeasuredCost:
    """The seconds of a step on a parameter, by its shape and dtype."""

    seconds: Mapping[CostKey, float]

    def __call__(self, spec: ParamSpec) -> float:
        if cost_key(spec) not in self.seconds:
            known = ", ".join(str(shape) for shape, _ in self.seconds)
            raise ConfigError(
                f"no step was measured on a parameter like {spec.label}, of shape {spec.shape} and {spec.dtype}, but "
                f"on those of {known}: measure with the selector of the rule"
            )
        return self.seconds[cost_key(spec)]


def measure_step_seconds(factory: OptimizerFactory, spec: ParamSpec) -> float:
    """Of a step on a parameter like this one, on its device: the median of a few, after others."""
    with isolated_probe(factory):
        param = torch.nn.Parameter(torch.randn(spec.shape, device=spec.device).to(spec.dtype))
        param.grad = torch.randn_like(param)
        inner = build_for_probes(factory, factory.groups[0], [param])
        times = [_time_step(inner, spec.device) for _ in range(_WARMUP_STEPS + _MEASURED_STEPS)]
    return statistics.median(times[_WARMUP_STEPS:])


def _time_step(inner: LocalOptimizer, device: torch.device) -> float:
    _synchronize_device(device)
    start = time.perf_counter()
    step_once(inner)
    _synchronize_device(device)
    return time.perf_counter() - start


def _synchronize_device(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def convert_cost_to_flops(cost: CostFn, specs: Sequence[ParamSpec], flop_costs: Sequence[CostFn]) -> CostFn:
    """A cost in a unit of its own, such as seconds, in operations, so that it can stand beside others.

    It says how the work on `specs` is divided among them. How much that is in all is `counted`, by group.
    """
    trained = [spec for spec in specs if spec.trainable]
    total = sum(map(validate_cost(cost), trained))
    factor = sum(flop_costs[spec.group](spec) for spec in trained) / total if total else 1.0
    return lambda spec: factor * cost(spec)


@memoize_probe(on_failure=0)
def _count_flops(factory: OptimizerFactory, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Those of products of matrices; none if the optimizer cannot be asked."""
    from torch.utils.flop_counter import FlopCounterMode  # takes a second

    with isolated_probe(factory):
        param = torch.nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
        inner = build_for_probes(factory, factory.groups[0], [param])
        with FlopCounterMode(display=False) as counter:
            for _ in range(_FLOP_COUNT_STEPS):
                param.grad = torch.empty_like(param)
                step_once(inner)
        return int(counter.get_total_flops()) // _FLOP_COUNT_STEPS
