"""Attributes that users set on parameters: the inner optimizer finds them on the tensors that replace parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.support import RankContext, ranks
from tests.support.oracles import DdpParityRun, all_configs, mlp
from zeroshard import WholeParams, ZeroConfig, shard


class MomentumWithLrMultiplier(Optimizer):
    """SGD with momentum. The attribute `lr_mul` of a parameter multiplies its learning rate."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state.setdefault("momentum", torch.zeros_like(param)).mul_(0.9).add_(param.grad)
                    param.sub_(self.direction(param, state["momentum"]) * (group["lr"] * getattr(param, "lr_mul", 1)))

    def direction(self, param: Tensor, momentum: Tensor) -> Tensor:  # noqa: ARG002
        return momentum


class Normed(MomentumWithLrMultiplier):
    """Normalizes by the norm of the full parameter if it has the attribute `is_normed`."""

    def direction(self, param: Tensor, momentum: Tensor) -> Tensor:
        return momentum / (1 + momentum.norm()) if getattr(param, "is_normed", False) else momentum


def make_mlp_with_attrs(set_attrs: Callable[[int, Any], None]) -> nn.Module:
    """An mlp whose parameters get attributes by their index."""
    model = mlp()
    for index, param in enumerate(model.parameters()):
        set_attrs(index, param)
    return model


def set_lr_multiplier(index: int, param: Any) -> None:
    """Some neighbours have equal multipliers, some have different ones, and two parameters have none."""
    if index not in (0, 7):
        param.lr_mul = [0.5, 0.5, 0, 3.0][index // 2 % 4]


def set_norm_flag(index: int, param: Any) -> None:
    if index == 4:
        param.is_normed = True


@ranks(1, 2, 3)
def test_lr_multipliers_on_params(ctx: RankContext) -> None:
    for config in (*all_configs(), ZeroConfig(partition=WholeParams())):
        parity = DdpParityRun(config, lambda: make_mlp_with_attrs(set_lr_multiplier), MomentumWithLrMultiplier, lr=0.1)
        parity.train(2)
        parity.zero.load_state_dict(parity.plain.state_dict())
        parity.train(2)


@ranks(1, 2, 3)
def test_param_flag_requires_whole_params(ctx: RankContext) -> None:
    with pytest.warns(UserWarning, match="Normed needs whole parameters"):
        DdpParityRun(None, lambda: make_mlp_with_attrs(set_norm_flag), Normed, lr=0.1).train(3)


class KeepsModelAlive:
    """Stands for an object whose copy would keep a model alive."""


@ranks(1, 2, 3)
def test_only_differing_param_attrs_split_flat_params(ctx: RankContext) -> None:
    def set_framework_attrs(index: int, param: Any) -> None:
        param.lr_mul, param._is_loaded, param.title, param.owner = (
            2.0,
            index % 2,
            f"parameter {index}",
            KeepsModelAlive(),
        )

    def set_two_multipliers(index: int, param: Any) -> None:
        param.lr_mul = 1.0 if index < 5 else 2.0

    for set_attrs, max_flat_params in ((set_framework_attrs, 1), (set_two_multipliers, 2)):
        optimizer = shard(make_mlp_with_attrs(set_attrs), torch.optim.AdamW)
        flat_params = optimizer.optim.param_groups[0]["params"]
        assert 1 <= len(flat_params) <= max_flat_params
        assert all(vars(param).keys() == {"lr_mul"} for param in flat_params)
