"""The probe that decides whether an optimizer is elementwise, which allows splitting its parameters anywhere."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, optim
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from zeroshard.engine.inner import OptimizerFactory
from zeroshard.engine.probe import probe_split_rule

Shapes = list[tuple[int, ...]]
SHAPES: Shapes = [(4, 3), (7,), (2, 3, 2)]

pytestmark = pytest.mark.usefixtures("one_thread")


def is_elementwise(factory: OptimizerFactory) -> bool:
    """Return whether parameters may be split anywhere."""
    rule = probe_split_rule(factory)
    return rule is not None and rule.granularity.is_elementwise


def make_factory(
    factory: Callable[..., Optimizer], shapes: Shapes = SHAPES, dtype: torch.dtype = torch.float32, **defaults: Any
) -> OptimizerFactory:
    params = [torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in shapes]
    return OptimizerFactory(factory, [{"params": params}], True, defaults)


ELEMENTWISE: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (optim.SGD, {"lr": 0.1}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True, "foreach": False}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    (optim.Adam, {"amsgrad": True, "foreach": True}),
    (optim.Adam, {"fused": True}),
    (optim.AdamW, {"lr": torch.tensor(0.1)}),
    (optim.AdamW, {"lr": 0.0}),
    (optim.Adagrad, {}),
    (optim.Adagrad, {"fused": True}),
    (optim.Adadelta, {}),
    (optim.Adamax, {}),
    (optim.NAdam, {}),
    (optim.RAdam, {}),
    (optim.RMSprop, {"centered": True, "momentum": 0.9}),
    (optim.Rprop, {}),
    (optim.ASGD, {"t0": 1.0}),
]


@pytest.mark.parametrize(("cls", "options"), ELEMENTWISE, ids=lambda case: getattr(case, "__name__", None))
def test_elementwise_torch_optimizers(cls: type[Optimizer], options: dict[str, Any]) -> None:
    assert is_elementwise(make_factory(cls, **options))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.complex64])
def test_elementwise_in_every_dtype(dtype: torch.dtype) -> None:
    for cls in (optim.SGD, optim.AdamW):
        assert is_elementwise(make_factory(cls, dtype=dtype, lr=0.1))


@pytest.mark.parametrize("shapes", [[()], [(0,)], [(3,)], [(2, 0)], [(2, 3, 2, 2, 2)]], ids=str)
def test_elementwise_for_any_shape(shapes: Shapes) -> None:
    assert is_elementwise(make_factory(optim.AdamW, shapes))


@pytest.mark.parametrize("cls", [optim.Adafactor, optim.Muon, optim.SparseAdam, optim.LBFGS])
def test_other_torch_optimizers_are_not_elementwise(cls: type[Optimizer]) -> None:
    matrices: Shapes = [(4, 3), (5, 5)]
    assert not is_elementwise(make_factory(cls, matrices))


# ---- custom optimizers


def norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor))


class GradientDescent(Optimizer):
    """Gradient descent in a direction that subclasses define."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(self.direction(param) * group["lr"])

    def direction(self, param: Tensor) -> Tensor:
        assert param.grad is not None
        return param.grad


class ElementClipping(GradientDescent):
    def direction(self, param: Tensor) -> Tensor:
        return super().direction(param).clamp(-1, 1)


class Lion(GradientDescent):
    """Updates by the sign of a moving average."""

    def direction(self, param: Tensor) -> Tensor:
        grad = super().direction(param)
        average: Tensor = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
        update = average.mul(0.9).add_(grad, alpha=0.1).sign_()
        average.lerp_(grad, 0.01)
        return update


class Lamb(GradientDescent):
    """Scales the update of a layer by the norm of its weights."""

    def direction(self, param: Tensor) -> Tensor:
        grad = super().direction(param)
        update = grad / (grad.abs() + 1e-6)
        return update * (norm(param) / norm(update))


class NormClipping(GradientDescent):
    """Uses a norm only above a threshold."""

    def direction(self, param: Tensor) -> Tensor:
        grad = super().direction(param)
        return grad * min(1.0, 1000 / norm(grad))


class SmallMeanBoost(GradientDescent):
    """Uses a mean only below a threshold."""

    def direction(self, param: Tensor) -> Tensor:
        grad = super().direction(param)
        mean = grad.abs().mean()
        return grad / mean if mean < 0.1 else grad


class ByDimensions(GradientDescent):
    """Applies weight decay to parameters with two or more dimensions, as is usual for transformers."""

    def direction(self, param: Tensor) -> Tensor:
        grad = super().direction(param)
        return grad + 0.1 * param if param.dim() >= 2 else grad


class MatricesOnly(GradientDescent):
    """Treats matrices differently, but neither vectors nor convolution kernels."""

    def direction(self, param: Tensor) -> Tensor:
        grad = super().direction(param)
        return grad / grad.abs().sum(dim=1, keepdim=True) if param.dim() == 2 else grad


class ScalarsOnly(GradientDescent):
    """Treats scalars (temperatures, gates) differently."""

    def direction(self, param: Tensor) -> Tensor:
        grad = super().direction(param)
        return grad if param.dim() else 10 * grad


class Quantizing(GradientDescent):
    """Keeps the momentum of large parameters in 8 bits, with one scale per block."""

    block = 2048
    min_numel = 4096

    def direction(self, param: Tensor) -> Tensor:
        grad, state = super().direction(param), self.state[param]
        if param.numel() < self.min_numel:
            return grad
        old = state["codes"].float() * state["scales"] if state else torch.zeros(())
        momentum = self._blocks(grad) + 0.9 * old
        state["scales"] = momentum.abs().amax(1, keepdim=True) / 127 + 1e-12
        state["codes"] = (momentum / state["scales"]).round().to(torch.int8)
        return momentum.view(-1)[: grad.numel()].view_as(grad)

    def _blocks(self, grad: Tensor) -> Tensor:
        flat = grad.reshape(-1)
        return torch.nn.functional.pad(flat, (0, -len(flat) % self.block)).view(-1, self.block)


class TorchNoise(GradientDescent):
    def direction(self, param: Tensor) -> Tensor:
        return super().direction(param) + torch.randn_like(param)


class PythonNoise(GradientDescent):
    """Draws one number per parameter."""

    def direction(self, param: Tensor) -> Tensor:
        return super().direction(param) * random.random()


class FixedNoise(GradientDescent):
    """Draws the same numbers every time."""

    def direction(self, param: Tensor) -> Tensor:
        return super().direction(param) + torch.rand(param.shape, generator=torch.Generator().manual_seed(1))


class KeepsNorm(GradientDescent):
    """Elementwise update, but keeps a norm of the whole parameter as state."""

    def direction(self, param: Tensor) -> Tensor:
        grad = super().direction(param)
        self.state[param]["norm"] = norm(grad)
        return grad


class KeepsRows(GradientDescent):
    """Elementwise update, but keeps one state value per row."""

    def direction(self, param: Tensor) -> Tensor:
        self.state[param]["rows"] = torch.zeros(len(param))
        return super().direction(param)


class ScaledByParamCount(GradientDescent):
    """Scales each update by the number of parameters."""

    def direction(self, param: Tensor) -> Tensor:
        return super().direction(param) * sum(len(group["params"]) for group in self.param_groups)


class Unsteppable(GradientDescent):
    def step(self, *, scale: float) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["lr"] = scale
        super().step()


class OptionalNorm(Optimizer):
    """Normalizes gradients of groups with `normalize`."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "normalize": False})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                grad = param.grad
                if grad is not None:
                    param.sub_(grad / (norm(grad) if group["normalize"] else 1.0), alpha=group["lr"])


@pytest.mark.parametrize("cls", [GradientDescent, ElementClipping, Lion])
def test_custom_elementwise_optimizers(cls: type[Optimizer]) -> None:
    assert is_elementwise(make_factory(cls))


@pytest.mark.parametrize(
    "cls",
    [
        *(Lamb, NormClipping, SmallMeanBoost, ByDimensions, Quantizing, TorchNoise, PythonNoise, FixedNoise),
        *(KeepsNorm, KeepsRows, ScaledByParamCount, Unsteppable),
    ],
)
def test_custom_optimizers_that_are_not_elementwise(cls: type[Optimizer]) -> None:
    assert not is_elementwise(make_factory(cls))


@pytest.mark.parametrize("shapes", [[(4, 3)], [(4, 3), (7,)], [(4, 3), (8, 4, 3, 3)], [(8, 4, 3, 3), (7,), (4, 3)]])
def test_dimension_dependent_optimizer_is_not_elementwise_for_matrices(shapes: Shapes) -> None:
    assert not is_elementwise(make_factory(MatricesOnly, shapes))


def test_scalar_dependent_optimizer_is_elementwise_only_without_scalars() -> None:
    assert not is_elementwise(make_factory(ScalarsOnly, [(), (4, 3)]))
    assert is_elementwise(make_factory(ScalarsOnly, [(7,)]))


def test_dimension_dependent_optimizer_is_elementwise_for_vectors() -> None:
    assert is_elementwise(make_factory(ByDimensions, [(7,), (3,)]))


def test_small_learning_rate_does_not_hide_differences() -> None:
    assert not is_elementwise(make_factory(Lamb, lr=0.0))
    assert not is_elementwise(make_factory(Lamb, lr=1e-9))


def test_every_group_is_probed() -> None:
    def make_grouped(**second: Any) -> OptimizerFactory:
        groups: list[dict[str, Any]] = [{"params": [torch.nn.Parameter(torch.ones(shape))]} for shape in SHAPES]
        groups[1].update(second)
        return OptimizerFactory(OptionalNorm, [*groups, {"params": []}], False, {})

    assert is_elementwise(make_grouped())
    assert not is_elementwise(make_grouped(normalize=True))


def test_probing_has_no_side_effects() -> None:
    calls: list[str] = []
    hook = register_optimizer_step_pre_hook(lambda *_: calls.append("step"))
    lr = torch.tensor(0.1)
    factories = [
        make_factory(TorchNoise),
        make_factory(PythonNoise),
        make_factory(partial(optim.Adam, lr=lr)),
        make_factory(Unsteppable),
    ]
    values = [param.detach().clone() for factory in factories for param in factory.groups[0]["params"]]
    torch_state, python_state, filters = torch.get_rng_state(), random.getstate(), list(warnings.filters)
    for factory in factories:
        is_elementwise(factory)
    hook.remove()
    assert not calls
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert random.getstate() == python_state
    assert list(warnings.filters) == filters
    assert lr == torch.tensor(0.1)
    params = [param for factory in factories for param in factory.groups[0]["params"]]
    assert all(torch.equal(param, before) and param.grad is None for param, before in zip(params, values, strict=True))
