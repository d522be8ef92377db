"""The fused implementation is the default where torch supports it and the user has not chosen one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import optim
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer

from zeroshard.engine.inner import OptimizerFactory, enable_fused


def make_factory(
    factory: Callable[..., Optimizer],
    defaults: dict[str, Any] | None = None,
    *,
    device: str = "cuda",
    dtype: torch.dtype = torch.float32,
    group: dict[str, Any] | None = None,
) -> OptimizerFactory:
    """With fake parameters, on a device that need not exist."""
    with FakeTensorMode():
        params = [torch.empty(shape, dtype=dtype, device=device) for shape in ((4, 3), (7,))]
    return OptimizerFactory(factory, [{"params": params, **(group or {})}], group is None, defaults or {})


def enables_fused(factory: OptimizerFactory) -> bool:
    """Whether `fused=True` is added; nothing else may change."""
    result = enable_fused(factory)
    assert result is factory or (
        result.defaults == {**factory.defaults, "fused": True} and result.groups == factory.groups
    )
    return result is not factory


@pytest.mark.parametrize("cls", [optim.Adam, optim.AdamW, optim.SGD, optim.Adagrad])
def test_enabled_where_torch_supports_it(cls: type[Optimizer]) -> None:
    assert enables_fused(make_factory(cls))
    assert enables_fused(make_factory(cls, {"lr": 0.1, "weight_decay": 0.1}))
    assert enables_fused(make_factory(cls, group={"lr": 0.3}))


def test_disabled_on_cpu() -> None:
    """Results would depend on where parameters are split."""
    assert not enables_fused(make_factory(optim.AdamW, device="cpu"))


@pytest.mark.parametrize("name", ["fused", "foreach", "capturable", "differentiable"])
def test_user_choice_wins(name: str) -> None:
    for value in (False, True, None):
        assert not enables_fused(make_factory(optim.AdamW, {name: value}))
        assert not enables_fused(make_factory(optim.AdamW, group={name: value}))


@pytest.mark.parametrize("option", [{"fused": False}, {"foreach": True}, {"capturable": True}], ids=str)
def test_choice_in_partial_wins(option: dict[str, Any]) -> None:
    assert enables_fused(make_factory(partial(optim.AdamW, lr=0.1)))
    assert not enables_fused(make_factory(partial(optim.AdamW, **option)))


@pytest.mark.parametrize("cls", [optim.Adadelta, optim.Adamax, optim.NAdam, optim.RAdam, optim.RMSprop, optim.Rprop])
def test_disabled_for_classes_without_fused(cls: type[Optimizer]) -> None:
    assert not enables_fused(make_factory(cls))


class ThirdParty(Optimizer):
    def __init__(self, params: Any, lr: float = 0.1, fused: bool | None = None) -> None:
        super().__init__(params, {"lr": lr, "fused": fused})


def test_disabled_for_third_party_classes() -> None:
    """Their `fused` may mean something else."""
    assert not enables_fused(make_factory(ThirdParty))
    assert not enables_fused(make_factory(partial(ThirdParty, lr=0.2)))


def test_disabled_for_unsupported_dtypes() -> None:
    assert not enables_fused(make_factory(optim.AdamW, dtype=torch.complex64))


class SubclassWithoutFused(optim.AdamW):
    """Does not accept the option."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)


def test_disabled_for_subclass_without_the_option() -> None:
    assert not enables_fused(make_factory(SubclassWithoutFused))
