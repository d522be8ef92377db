"""Probe where an optimizer allows its parameters to be split: blockwise and whole-parameter optimizers."""

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


def probe_granularity(factory: Callable[..., Optimizer], **options: Any) -> ShardGranularity | None:
    found = probe_split_rule(recipe(factory, **options))
    return None if found is None else found.granularity


@pytest.mark.parametrize(
    ("block", "least"), [(64, 256), (128, 1024), (256, 256), (256, 4096), (2048, 4096), (4096, 4096)]
)
def test_finest_valid_granularity_of_blockwise_optimizer(block: int, least: int) -> None:
    assert probe_granularity(Blocks, block=block, least=least) == ShardGranularity(block, least)


def test_unsupported_block_sizes_prevent_splitting() -> None:
    assert probe_granularity(Blocks, block=8192, least=8192) is None
    for block in (96, 320, 1280, 1920):
        assert probe_granularity(Blocks, block=block, least=1920) is None


def test_elementwise_optimizer_may_be_split_anywhere() -> None:
    assert probe_split_rule(recipe(AdamW)) == SplitRule()


class RMSClipping(Own):
    """Scales the update by its RMS over the whole parameter once gradients grow."""

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
        *(own.KeepsRows, own.Together, own.Unsteppable, RMSClipping),
    ],
)
def test_whole_param_optimizer_is_never_split(cls: type[Optimizer]) -> None:
    assert probe_split_rule(recipe(cls)) is None


class SquareMatrixState(Own):
    """Keeps a square matrix as large as the first dimension."""

    largest = 0

    def direction(self, param: Tensor) -> Tensor:
        SquareMatrixState.largest = max(SquareMatrixState.largest, len(param))
        self.state[param]["matrix"] = torch.eye(len(param))
        return super().direction(param)


def test_memory_hungry_optimizer_is_probed_with_small_params() -> None:
    assert probe_split_rule(recipe(SquareMatrixState, [(4, 3)])) is None
    assert SquareMatrixState.largest <= 128


def test_coarsest_granularity_of_all_groups_is_used() -> None:
    sizes = [{"least": 1 << 30}, {"block": 128, "least": 2048}, {"block": 256, "least": 512}]
    groups: list[dict[str, Any]] = [{"params": [torch.nn.Parameter(torch.ones(4, 3))], **size} for size in sizes]
    found = probe_split_rule(OptimizerFactory(Blocks, groups, False, {}))
    assert found is not None
    assert found.granularity == ShardGranularity(256, 2048)
    assert probe_split_rule(OptimizerFactory(Blocks, groups[:1], False, {})) == SplitRule()


class SecondOrder(Own):
    """Differentiates through the gradients."""

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                (curvature,) = torch.autograd.grad(param.grad.sum(), param, retain_graph=True)
                with torch.no_grad():
                    param.sub_(curvature, alpha=0.1)


class RequiresTrainMode(Own):
    """Steps only in train mode."""

    trains = False

    def train(self) -> None:
        self.trains = True

    def direction(self, param: Tensor) -> Tensor:
        assert self.trains
        return super().direction(param)


def test_required_grads() -> None:
    assert probe_traits(recipe(Own)).required_grads == ""
    assert probe_traits(recipe(torch.optim.SparseAdam)).required_grads == "sparse"
    assert probe_traits(recipe(SecondOrder)).required_grads == "graph"
    assert probe_traits(recipe(own.Unsteppable)).required_grads == ""


def test_probe_switches_to_train_mode() -> None:
    assert probe_split_rule(recipe(RequiresTrainMode)) == SplitRule()
