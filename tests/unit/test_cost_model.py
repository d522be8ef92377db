"""Cost of a step: counted FLOPs, measured time, and user costs in other units."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adafactor, AdamW, Muon, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.support.oracles import spec
from zeroshard import ConfigError
from zeroshard.engine.inner import OptimizerFactory
from zeroshard.engine.probe import (
    FLOPS_PER_ELEMENT,
    FlopCost,
    MeasuredCost,
    convert_cost_to_flops,
    measure_step_seconds,
    numel_cost,
)
from zeroshard.layout.spec import ParamSpec


def make_factory(factory: Any, shape: tuple[int, ...] = (4, 3), **options: Any) -> OptimizerFactory:
    return OptimizerFactory(factory, [{"params": [torch.nn.Parameter(torch.ones(shape))]}], True, options)


def newton_schulz_flops(rows: int, columns: int, steps: int) -> int:
    """A Gram matrix, its square, and their product with the matrix, at two FLOPs per multiply-add."""
    short, long = sorted((rows, columns))
    return steps * (2 * short * short * long + 2 * short**3 + 2 * short * short * long)


@pytest.mark.parametrize("shape", [(6, 8), (8, 6), (1, 5), (64, 64), (768, 3072), (50257, 768)])
@pytest.mark.parametrize("steps", [1, 5, 7])
def test_muon_flops_match_newton_schulz(shape: tuple[int, int], steps: int) -> None:
    flops = FlopCost(make_factory(Muon, ns_steps=steps))(spec(0, shape))
    assert flops == FLOPS_PER_ELEMENT * math.prod(shape) + newton_schulz_flops(*shape, steps)


def test_flops_ignore_dtype_and_names() -> None:
    named = OptimizerFactory(Muon, [{"params": [torch.ones(4, 3)], "param_names": ["weight"]}], True, {})
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        assert FlopCost(named)(spec(0, (4, 3), dtype=dtype)) == FlopCost(make_factory(Muon))(spec(0, (4, 3)))


@pytest.mark.parametrize("factory", [SGD, AdamW, Adafactor])
@pytest.mark.parametrize("shape", [(), (7,), (6, 8), (2, 3, 4), (0, 3)])
def test_elementwise_optimizers_cost_their_numel(factory: Any, shape: tuple[int, ...]) -> None:
    param_spec = spec(0, shape)
    assert (
        FlopCost(make_factory(factory, lr=0.1))(param_spec)
        == numel_cost(param_spec)
        == FLOPS_PER_ELEMENT * math.prod(shape)
    )


class ReadsValue(Optimizer):
    """Reads a value, which meta tensors do not have."""

    num_steps = 0

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, _: Any = None) -> None:  # type: ignore[override]
        ReadsValue.num_steps += 1
        for group in self.param_groups:
            for param in group["params"]:
                param @ param.T
                param.grad.norm().item()


def test_optimizer_that_fails_on_fake_tensors_costs_numel() -> None:
    cost, before = FlopCost(make_factory(ReadsValue)), ReadsValue.num_steps
    assert cost(spec(0, (4, 3))) == cost(spec(1, (4, 3))) == numel_cost(spec(0, (4, 3)))
    assert ReadsValue.num_steps == before + 1, "probed once per shape"


def test_probing_draws_no_random_numbers_and_fires_no_hooks() -> None:
    class Noisy(SGD):
        def step(self, closure: Any = None) -> Any:
            torch.rand(3)
            return super().step(closure)

    fired: list[int] = []
    hook = register_optimizer_step_post_hook(lambda *_: fired.append(1))
    try:
        state = torch.get_rng_state()
        FlopCost(make_factory(Noisy, lr=0.1))(spec(0, (4, 3)))
        measure_step_seconds(make_factory(Noisy, lr=0.1), spec(0, (4, 3)))
        assert torch.equal(torch.get_rng_state(), state)
        assert not fired
    finally:
        hook.remove()


def test_cost_in_seconds_is_converted_to_flops() -> None:
    """The user's cost only distributes the counted FLOPs among the parameters."""
    specs = [spec(0, (4,)), spec(1, (6,)), spec(2, (9,), trainable=False), spec(3, (100,), group=1)]
    seconds = {0: 1e-6, 1: 3e-6, 2: 5e-6}
    cost = convert_cost_to_flops(lambda param_spec: seconds[param_spec.index], specs[:3], [numel_cost, numel_cost])
    assert [cost(param_spec) for param_spec in specs[:2]] == pytest.approx([2500, 7500])
    assert cost(specs[2]) == pytest.approx(12500), "frozen parameters use the same rate and are not counted"


def test_zero_cost_stays_zero() -> None:
    assert convert_cost_to_flops(lambda _: 0, [spec(0)], [numel_cost])(spec(0)) == 0


def make_measured_cost(*shapes: tuple[int, ...]) -> MeasuredCost:
    return MeasuredCost({(shape, torch.float32): 1.0 + index for index, shape in enumerate(shapes)})


def test_measured_cost_is_looked_up() -> None:
    cost = make_measured_cost((4, 3), (3, 4))
    assert [cost(spec(0, (4, 3))), cost(spec(7, (3, 4), name="b"))] == [1.0, 2.0]
    for unknown in (spec(2, (5, 3), name="late"), spec(2, (4, 3), dtype=torch.float64, name="late")):
        with pytest.raises(ConfigError, match=r"like parameter 2 \(late\), of shape .* only for \(4, 3\), \(3"):
            cost(unknown)


def test_steps_are_timed_on_tensors_of_the_spec() -> None:
    seen: list[Any] = []

    class Recording(Muon):
        def step(self, closure: Any = None) -> Any:
            seen.extend((tuple(param.shape), param.dtype) for group in self.param_groups for param in group["params"])
            return super().step(closure)  # type: ignore[no-untyped-call]

    param_spec = spec(0, (5, 3), dtype=torch.bfloat16)
    assert measure_step_seconds(make_factory(Recording), param_spec) > 0
    assert set(seen) == {((5, 3), torch.bfloat16)}
    assert len(seen) > 3, "warm-up steps and several timed ones"


def test_failing_optimizer_is_not_timed() -> None:
    with pytest.raises(ValueError, match="2D"):
        measure_step_seconds(make_factory(Muon), spec(0, (3,)))


def test_equal_specs_are_probed_once() -> None:
    counts = itertools.count()

    class Counting(SGD):
        def step(self, closure: Any = None) -> Any:
            next(counts)
            return super().step(closure)

    cost = FlopCost(make_factory(Counting, lr=0.1))
    specs: list[ParamSpec] = [spec(index, (3, 2)) for index in range(50)]
    assert len({cost(param_spec) for param_spec in specs}) == 1
    assert next(counts) <= 3
