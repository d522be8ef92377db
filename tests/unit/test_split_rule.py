"""The probe that decides where parameters may be split, for blockwise and whole-parameter optimizers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from tests.support.optimizers import Blocks
from tests.unit import test_probe_elementwise as optimizers
from tests.unit.test_probe_elementwise import GradientDescent, make_factory, norm
from zeroshard.engine.inner import OptimizerFactory
from zeroshard.engine.probe import SplitRule, probe_split_rule, probe_traits
from zeroshard.layout.partition import ShardGranularity

pytestmark = pytest.mark.usefixtures("one_thread")


def probe_granularity(factory: Callable[..., Optimizer], **options: Any) -> ShardGranularity | None:
    rule = probe_split_rule(make_factory(factory, **options))
    return None if rule is None else rule.granularity


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
    assert probe_split_rule(make_factory(AdamW)) == SplitRule()


class RMSClipping(GradientDescent):
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
        *(
            optimizers.Lamb,
            optimizers.NormClipping,
            optimizers.SmallMeanBoost,
            optimizers.ByDimensions,
            optimizers.Quantizing,
            optimizers.TorchNoise,
            optimizers.KeepsNorm,
        ),
        *(optimizers.KeepsRows, optimizers.ScaledByParamCount, optimizers.Unsteppable, RMSClipping),
    ],
)
def test_whole_param_optimizer_is_never_split(cls: type[Optimizer]) -> None:
    assert probe_split_rule(make_factory(cls)) is None


class SquareMatrixState(GradientDescent):
    """Keeps a square matrix as large as the first dimension."""

    largest = 0

    def direction(self, param: Tensor) -> Tensor:
        SquareMatrixState.largest = max(SquareMatrixState.largest, len(param))
        self.state[param]["matrix"] = torch.eye(len(param))
        return super().direction(param)


def test_memory_hungry_optimizer_is_probed_with_small_params() -> None:
    assert probe_split_rule(make_factory(SquareMatrixState, [(4, 3)])) is None
    assert SquareMatrixState.largest <= 128


def test_coarsest_granularity_of_all_groups_is_used() -> None:
    sizes = [{"least": 1 << 30}, {"block": 128, "least": 2048}, {"block": 256, "least": 512}]
    groups: list[dict[str, Any]] = [{"params": [torch.nn.Parameter(torch.ones(4, 3))], **size} for size in sizes]
    rule = probe_split_rule(OptimizerFactory(Blocks, groups, False, {}))
    assert rule is not None
    assert rule.granularity == ShardGranularity(256, 2048)
    assert probe_split_rule(OptimizerFactory(Blocks, groups[:1], False, {})) == SplitRule()


class SecondOrder(GradientDescent):
    """Differentiates through the gradients."""

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                (curvature,) = torch.autograd.grad(param.grad.sum(), param, retain_graph=True)
                with torch.no_grad():
                    param.sub_(curvature, alpha=0.1)


class RequiresTrainMode(GradientDescent):
    """Steps only in train mode."""

    trains = False

    def train(self) -> None:
        self.trains = True

    def direction(self, param: Tensor) -> Tensor:
        assert self.trains
        return super().direction(param)


def test_required_grads() -> None:
    assert probe_traits(make_factory(GradientDescent)).required_grads == ""
    assert probe_traits(make_factory(torch.optim.SparseAdam)).required_grads == "sparse"
    assert probe_traits(make_factory(SecondOrder)).required_grads == "graph"
    assert probe_traits(make_factory(optimizers.Unsteppable)).required_grads == ""


def test_probe_switches_to_train_mode() -> None:
    assert probe_split_rule(make_factory(RequiresTrainMode)) == SplitRule()
