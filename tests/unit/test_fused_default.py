"""The fused implementation is taken where torch has it for the device, and where the user has not chosen."""

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


def recipe(
    factory: Callable[..., Optimizer],
    defaults: dict[str, Any] | None = None,
    *,
    device: str = "cuda",
    dtype: torch.dtype = torch.float32,
    group: dict[str, Any] | None = None,
) -> OptimizerFactory:
    """With parameters that have no memory, on a device that need not be there."""
    with FakeTensorMode():
        params = [torch.empty(shape, dtype=dtype, device=device) for shape in ((4, 3), (7,))]
    return OptimizerFactory(factory, [{"params": params, **(group or {})}], group is None, defaults or {})


def fuses(given: OptimizerFactory) -> bool:
    """Whether `fused=True` is added, and nothing else is changed."""
    made = enable_fused(given)
    assert made is given or (made.defaults == {**given.defaults, "fused": True} and made.groups == given.groups)
    return made is not given


@pytest.mark.parametrize("cls", [optim.Adam, optim.AdamW, optim.SGD, optim.Adagrad])
def test_it_is_taken_where_torch_has_it(cls: type[Optimizer]) -> None:
    assert fuses(recipe(cls))
    assert fuses(recipe(cls, {"lr": 0.1, "weight_decay": 0.1}))
    assert fuses(recipe(cls, group={"lr": 0.3}))


def test_it_is_not_taken_on_the_cpu() -> None:
    """Its bits would depend on where parameters are cut."""
    assert not fuses(recipe(optim.AdamW, device="cpu"))


@pytest.mark.parametrize("name", ["fused", "foreach", "capturable", "differentiable"])
def test_the_users_choice_wins(name: str) -> None:
    for value in (False, True, None):
        assert not fuses(recipe(optim.AdamW, {name: value}))
        assert not fuses(recipe(optim.AdamW, group={name: value}))


@pytest.mark.parametrize("option", [{"fused": False}, {"foreach": True}, {"capturable": True}], ids=str)
def test_what_a_partial_has_chosen_wins(option: dict[str, Any]) -> None:
    assert fuses(recipe(partial(optim.AdamW, lr=0.1)))
    assert not fuses(recipe(partial(optim.AdamW, **option)))


@pytest.mark.parametrize("cls", [optim.Adadelta, optim.Adamax, optim.NAdam, optim.RAdam, optim.RMSprop, optim.Rprop])
def test_it_is_not_taken_where_there_is_none(cls: type[Optimizer]) -> None:
    assert not fuses(recipe(cls))


class Foreign(Optimizer):
    def __init__(self, params: Any, lr: float = 0.1, fused: bool | None = None) -> None:
        super().__init__(params, {"lr": lr, "fused": fused})


def test_it_is_not_taken_of_classes_that_are_not_torchs() -> None:
    """Who knows what they mean by it."""
    assert not fuses(recipe(Foreign))
    assert not fuses(recipe(partial(Foreign, lr=0.2)))


def test_it_is_not_taken_for_what_it_cannot_update() -> None:
    assert not fuses(recipe(optim.AdamW, dtype=torch.complex64))


class Own(optim.AdamW):
    """Knows no such option."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)


def test_own_classes_must_know_it() -> None:
    assert not fuses(recipe(Own))
