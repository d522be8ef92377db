"""May a parameter be cut into flat pieces? Asked of optimizers that are separable, and of all kinds that are not."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
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


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other on a busy machine take seconds for nothing."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def is_separable(made: OptimizerFactory) -> bool:
    """Whether parameters may be cut anywhere."""
    found = probe_split_rule(made)
    return found is not None and found.granularity.is_elementwise


def recipe(
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


@pytest.mark.parametrize(("cls", "options"), ELEMENTWISE, ids=lambda it: getattr(it, "__name__", None))
def test_element_wise_classes_are(cls: type[Optimizer], options: dict[str, Any]) -> None:
    assert is_separable(recipe(cls, **options))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.complex64])
def test_they_are_in_every_dtype(dtype: torch.dtype) -> None:
    for cls in (optim.SGD, optim.AdamW):
        assert is_separable(recipe(cls, dtype=dtype, lr=0.1))


@pytest.mark.parametrize("shapes", [[()], [(0,)], [(3,)], [(2, 0)], [(2, 3, 2, 2, 2)]], ids=str)
def test_they_are_whatever_the_shapes(shapes: Shapes) -> None:
    assert is_separable(recipe(optim.AdamW, shapes))


@pytest.mark.parametrize("cls", [optim.Adafactor, optim.Muon, optim.SparseAdam, optim.LBFGS])
def test_torchs_other_classes_are_not(cls: type[Optimizer]) -> None:
    matrices: Shapes = [(4, 3), (5, 5)]
    assert not is_separable(recipe(cls, matrices))


# ---- what people write themselves


def norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor))


class Own(Optimizer):
    """Gradient descent in a direction of one's own."""

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


class ElementClipping(Own):
    def direction(self, param: Tensor) -> Tensor:
        return super().direction(param).clamp(-1, 1)


class Lion(Own):
    """Keeps an average, and moves by signs."""

    def direction(self, param: Tensor) -> Tensor:
        grad = super().direction(param)
        average: Tensor = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
        update = average.mul(0.9).add_(grad, alpha=0.1).sign_()
        average.lerp_(grad, 0.01)
        return update


class Lamb(Own):
    """Scales the update of a layer by the norm of its weights."""

    def direction(self, param: Tensor) -> Tensor:
        grad = super().direction(param)
        update = grad / (grad.abs() + 1e-6)
        return update * (norm(param) / norm(update))


class NormClipping(Own):
    """Looks at a norm only beyond a threshold."""

    def direction(self, param: Tensor) -> Tensor:
        grad = super().direction(param)
        return grad * min(1.0, 1000 / norm(grad))


class SmallMeanBoost(Own):
    """Looks at a mean only below a threshold."""

    def direction(self, param: Tensor) -> Tensor:
        grad = super().direction(param)
        mean = grad.abs().mean()
        return grad / mean if mean < 0.1 else grad


class ByDimensions(Own):
    """Decays matrices and what has more dimensions, as recipes for transformers do."""

    def direction(self, param: Tensor) -> Tensor:
        grad = super().direction(param)
        return grad + 0.1 * param if param.dim() >= 2 else grad


class MatricesOnly(Own):
    """Treats matrices in a way of its own, but neither vectors nor the kernels of convolutions."""

    def direction(self, param: Tensor) -> Tensor:
        grad = super().direction(param)
        return grad / grad.abs().sum(dim=1, keepdim=True) if param.dim() == 2 else grad


class ScalarsOnly(Own):
    """Treats scalars (temperatures, gates) in a way of their own."""

    def direction(self, param: Tensor) -> Tensor:
        grad = super().direction(param)
        return grad if param.dim() else 10 * grad


class Quantizing(Own):
    """Keeps the momentum of large parameters in 8 bits, with one scale for each block."""

    block = 2048
    least = 4096

    def direction(self, param: Tensor) -> Tensor:
        grad, state = super().direction(param), self.state[param]
        if param.numel() < self.least:
            return grad
        old = state["codes"].float() * state["scales"] if state else torch.zeros(())
        momentum = self._blocks(grad) + 0.9 * old
        state["scales"] = momentum.abs().amax(1, keepdim=True) / 127 + 1e-12
        state["codes"] = (momentum / state["scales"]).round().to(torch.int8)
        return momentum.view(-1)[: grad.numel()].view_as(grad)

    def _blocks(self, grad: Tensor) -> Tensor:
        flat = grad.reshape(-1)
        return torch.nn.functional.pad(flat, (0, -len(flat) % self.block)).view(-1, self.block)


class Noisy(Own):
    def direction(self, param: Tensor) -> Tensor:
        return super().direction(param) + torch.randn_like(param)


class NoisyByPython(Own):
    """One draw for each parameter."""

    def direction(self, param: Tensor) -> Tensor:
        return super().direction(param) * random.random()


class NoisyByItself(Own):
    """Draws the same numbers every time."""

    def direction(self, param: Tensor) -> Tensor:
        return super().direction(param) + torch.rand(param.shape, generator=torch.Generator().manual_seed(1))


class KeepsNorm(Own):
    """Steps element by element, but keeps something of the whole."""

    def direction(self, param: Tensor) -> Tensor:
        grad = super().direction(param)
        self.state[param]["norm"] = norm(grad)
        return grad


class KeepsRows(Own):
    """Steps element by element, but keeps something for each row."""

    def direction(self, param: Tensor) -> Tensor:
        self.state[param]["rows"] = torch.zeros(len(param))
        return super().direction(param)


class Together(Own):
    """Updates a parameter by the number of all."""

    def direction(self, param: Tensor) -> Tensor:
        return super().direction(param) * sum(len(group["params"]) for group in self.param_groups)


class Unsteppable(Own):
    def step(self, *, scale: float) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["lr"] = scale
        super().step()


class OptionalNorm(Optimizer):
    """Normalizes where a group asks for it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "normalize": False})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                grad = param.grad
                if grad is not None:
                    param.sub_(grad / (norm(grad) if group["normalize"] else 1.0), alpha=group["lr"])


@pytest.mark.parametrize("cls", [Own, ElementClipping, Lion])
def test_own_element_wise_optimizers_are(cls: type[Optimizer]) -> None:
    assert is_separable(recipe(cls))


@pytest.mark.parametrize(
    "cls",
    [
        *(Lamb, NormClipping, SmallMeanBoost, ByDimensions, Quantizing, Noisy, NoisyByPython, NoisyByItself),
        *(KeepsNorm, KeepsRows, Together, Unsteppable),
    ],
)
def test_own_optimizers_that_look_at_more_are_not(cls: type[Optimizer]) -> None:
    assert not is_separable(recipe(cls))


@pytest.mark.parametrize("shapes", [[(4, 3)], [(4, 3), (7,)], [(4, 3), (8, 4, 3, 3)], [(8, 4, 3, 3), (7,), (4, 3)]])
def test_those_that_act_by_dimensions_are_not_whatever_stands_beside(shapes: Shapes) -> None:
    assert not is_separable(recipe(MatricesOnly, shapes))


def test_those_that_act_on_scalars_are_not() -> None:
    assert not is_separable(recipe(ScalarsOnly, [(), (4, 3)]))
    assert is_separable(recipe(ScalarsOnly, [(7,)]))


def test_those_that_act_by_dimensions_are_where_it_makes_no_difference() -> None:
    assert is_separable(recipe(ByDimensions, [(7,), (3,)]))


def test_a_small_learning_rate_hides_nothing() -> None:
    assert not is_separable(recipe(Lamb, lr=0.0))
    assert not is_separable(recipe(Lamb, lr=1e-9))


def test_every_group_is_asked() -> None:
    def grouped(**second: Any) -> OptimizerFactory:
        groups: list[dict[str, Any]] = [{"params": [torch.nn.Parameter(torch.ones(shape))]} for shape in SHAPES]
        groups[1].update(second)
        return OptimizerFactory(OptionalNorm, [*groups, {"params": []}], False, {})

    assert is_separable(grouped())
    assert not is_separable(grouped(normalize=True))


def test_asking_leaves_no_trace() -> None:
    calls: list[str] = []
    hook = register_optimizer_step_pre_hook(lambda *_: calls.append("step"))
    lr = torch.tensor(0.1)
    asked = [recipe(Noisy), recipe(NoisyByPython), recipe(partial(optim.Adam, lr=lr)), recipe(Unsteppable)]
    kept = [param.detach().clone() for one in asked for param in one.groups[0]["params"]]
    numbers, words, filters = torch.get_rng_state(), random.getstate(), list(warnings.filters)
    for one in asked:
        is_separable(one)
    hook.remove()
    assert not calls
    assert torch.equal(torch.get_rng_state(), numbers)
    assert random.getstate() == words
    assert list(warnings.filters) == filters
    assert lr == torch.tensor(0.1)
    params = [param for one in asked for param in one.groups[0]["params"]]
    assert all(torch.equal(param, before) and param.grad is None for param, before in zip(params, kept, strict=True))
