"""Where may a parameter be cut? Asked of optimizers that work on blocks, and of those that need all of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from tests.support.optimizers import Blocks
from tests.unit import test_probe_elementwise as own
from tests.unit.test_probe_elementwise import Own, norm, recipe
from zeroshard.engine.inner import OptimizerFactory
from zeroshard.engine.probe import SplitRule, probe_split_rule, probe_traits
from zeroshard.layout.partition import ShardGranularity


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def grain_of(factory: Callable[..., Optimizer], **options: Any) -> ShardGranularity | None:
    found = probe_split_rule(recipe(factory, **options))
    return None if found is None else found.granularity


@pytest.mark.parametrize(
    ("block", "least"), [(64, 256), (128, 1024), (256, 256), (256, 4096), (2048, 4096), (4096, 4096)]
)
def test_of_blocks_the_finest_grain_that_is_right(block: int, least: int) -> None:
    assert grain_of(Blocks, block=block, least=least) == ShardGranularity(block, least)


def test_odd_blocks_and_longer_ones_are_left_whole() -> None:
    assert grain_of(Blocks, block=8192, least=8192) is None
    for block in (96, 320, 1280, 1920):
        assert grain_of(Blocks, block=block, least=1920) is None


def test_element_wise_ones_may_be_cut_anywhere() -> None:
    assert probe_split_rule(recipe(AdamW)) == SplitRule()


class RootMeanSquare(Own):
    """Divides the update by something of the whole, once gradients grow beyond what they were."""

    def direction(self, param: Tensor) -> Tensor:
        grad, state = super().direction(param), self.state[param]
        square: Tensor = state.setdefault("square", torch.zeros_like(param))
        square.lerp_(grad.square(), 0.1)
        clipped: Tensor = grad / max(1.0, norm(grad / (square.sqrt() + 1e-8)) / math.sqrt(grad.numel()))
        return clipped


@pytest.mark.parametrize(
    "cls",
    [
        *(own.Lamb, own.NormClipping, own.SmallMeanBoost, own.ByDimensions, own.Quantizing, own.Noisy, own.KeepsNorm),
        *(own.KeepsRows, own.Together, own.Unsteppable, RootMeanSquare),
    ],
)
def test_what_looks_at_the_whole_is_not_cut_at_any_grain(cls: type[Optimizer]) -> None:
    assert probe_split_rule(recipe(cls)) is None


class Greedy(Own):
    """Keeps a matrix of as many rows as the first dimension has."""

    largest = 0

    def direction(self, param: Tensor) -> Tensor:
        Greedy.largest = max(Greedy.largest, len(param))
        self.state[param]["matrix"] = torch.eye(len(param))
        return super().direction(param)


def test_one_that_needs_much_memory_for_flat_parameters_is_asked_with_small_ones() -> None:
    assert probe_split_rule(recipe(Greedy, [(4, 3)])) is None
    assert Greedy.largest <= 128


def test_the_coarsest_grain_of_all_groups_is_taken() -> None:
    sizes = [{"least": 1 << 30}, {"block": 128, "least": 2048}, {"block": 256, "least": 512}]
    groups: list[dict[str, Any]] = [{"params": [torch.nn.Parameter(torch.ones(4, 3))], **size} for size in sizes]
    found = probe_split_rule(OptimizerFactory(Blocks, groups, False, {}))
    assert found is not None
    assert found.granularity == ShardGranularity(256, 2048)
    assert probe_split_rule(OptimizerFactory(Blocks, groups[:1], False, {})) == SplitRule()


class Doubly(Own):
    """Differentiates gradients."""

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                (curvature,) = torch.autograd.grad(param.grad.sum(), param, retain_graph=True)
                with torch.no_grad():
                    param.sub_(curvature, alpha=0.1)


class WithModes(Own):
    """Steps only where it was told to train."""

    trains = False

    def train(self) -> None:
        self.trains = True

    def direction(self, param: Tensor) -> Tensor:
        assert self.trains
        return super().direction(param)


def test_what_gradients_it_needs() -> None:
    assert probe_traits(recipe(Own)).required_grads == ""
    assert probe_traits(recipe(torch.optim.SparseAdam)).required_grads == "sparse"
    assert probe_traits(recipe(Doubly)).required_grads == "graph"
    assert probe_traits(recipe(own.Unsteppable)).required_grads == ""


def test_one_that_has_modes_is_told_to_train() -> None:
    assert probe_split_rule(recipe(WithModes)) == SplitRule()
