"""What users put on parameters for their optimizer to find: it finds it on what it is given in their place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.support import RankContext, ranks
from tests.support.oracles import ShardTwins, all_configs, mlp
from zeroshard import WholeParams, ZeroConfig, shard


class MomentumWithLrMultiplier(Optimizer):
    """Momentum, with a learning rate that parameters multiply."""

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
    """Looks at the whole of parameters that ask for it."""

    def direction(self, param: Tensor, momentum: Tensor) -> Tensor:
        return momentum / (1 + momentum.norm()) if getattr(param, "is_normed", False) else momentum


def make_mlp_with_attrs(set_attrs: Callable[[int, Any], None]) -> nn.Module:
    """Layers whose parameters were marked by their places."""
    model = mlp()
    for place, param in enumerate(model.parameters()):
        set_attrs(place, param)
    return model


def set_lr_multiplier(index: int, param: Any) -> None:
    """Neighbours with different ones and with equal ones, and some without any."""
    if index not in (0, 7):
        param.lr_mul = [0.5, 0.5, 0, 3.0][index // 2 % 4]


def set_norm_flag(index: int, param: Any) -> None:
    if index == 4:
        param.is_normed = True


@ranks(1, 2, 3)
def test_lr_multipliers_on_params(ctx: RankContext) -> None:
    for config in (*all_configs(), ZeroConfig(partition=WholeParams())):
        twins = ShardTwins(config, lambda: make_mlp_with_attrs(set_lr_multiplier), MomentumWithLrMultiplier, lr=0.1)
        twins.train(2)
        twins.zero.load_state_dict(twins.plain.state_dict())
        twins.train(2)


@ranks(1, 2, 3)
def test_param_flag_requires_whole_params(ctx: RankContext) -> None:
    with pytest.warns(UserWarning, match="Normed looks at whole parameters"):
        ShardTwins(None, lambda: make_mlp_with_attrs(set_norm_flag), Normed, lr=0.1).train(3)


class KeepsModelAlive:
    """Would keep a model alive."""


@ranks(1, 2, 3)
def test_only_differing_param_attrs_split_flat_params(ctx: RankContext) -> None:
    def of_frameworks(place: int, param: Any) -> None:
        param.lr_mul, param._is_loaded, param.title, param.owner = (
            2.0,
            place % 2,
            f"parameter {place}",
            KeepsModelAlive(),
        )

    def in_two_halves(place: int, param: Any) -> None:
        param.lr_mul = 1.0 if place < 5 else 2.0

    for mark, most in ((of_frameworks, 1), (in_two_halves, 2)):
        optimizer = shard(make_mlp_with_attrs(mark), torch.optim.AdamW)
        given = optimizer.optim.param_groups[0]["params"]
        assert 1 <= len(given) <= most
        assert all(vars(param).keys() == {"lr_mul"} for param in given)
