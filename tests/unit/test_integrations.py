"""Integrations without their frameworks: import errors, and reading unsharded optimizers."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LambdaLR, ReduceLROnPlateau, SequentialLR

from zeroshard import ConfigError
from zeroshard.integrations import _common
from zeroshard.integrations._common import make_scaler, retarget_scheduler

CLASSES = [
    *(torch.optim.Adadelta, torch.optim.Adafactor, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW),
    *(torch.optim.Adamax, torch.optim.ASGD, torch.optim.Muon, torch.optim.NAdam, torch.optim.RAdam),
    *(torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD),
]


def params() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2, 2))]


@pytest.mark.parametrize("framework", ["lightning", "accelerate", "transformers"])
def test_missing_framework_says_what_to_install(monkeypatch: pytest.MonkeyPatch, framework: str) -> None:
    name = f"zeroshard.integrations.{framework}"
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, framework, None)
    with pytest.raises(ImportError, match=rf"{name} needs {framework.title()}: pip install '{framework}>="):
        importlib.import_module(name)


@pytest.mark.parametrize("optimizer_class", CLASSES, ids=lambda it: it.__name__)
def test_constructor_arguments_are_recovered(optimizer_class: Any) -> None:
    given = {"lr": 0.125, "maximize": True} if optimizer_class is not torch.optim.Muon else {"nesterov": False}
    plainly, specially = optimizer_class(params()), optimizer_class(params(), **given)
    assert _common._prepare_constructor_args(plainly).value == {}, "and zeroshard.shard may choose"
    taken = _common._prepare_constructor_args(specially).value
    assert taken == given
    assert optimizer_class(params(), **taken).defaults == specially.defaults


def test_tensor_lr_is_kept() -> None:
    rate = torch.tensor(0.5)
    assert _common._prepare_constructor_args(torch.optim.SGD(params(), lr=rate)).value == {"lr": rate}


def test_groups_keep_only_their_own_options() -> None:
    """Otherwise the implementation, which every group names, could not be chosen again."""
    model = nn.Linear(2, 2)
    groups: list[dict[str, Any]] = [
        {"params": [model.weight], "weight_decay": 0.5, "mine": 1},
        {"params": [model.bias]},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    optimizer.param_groups[1]["lr"] = 0.3
    first, second = _common._iter_named_groups(model, optimizer)
    assert first == {"params": [("weight", model.weight)], "weight_decay": 0.5, "mine": 1}
    assert second == {"params": [("bias", model.bias)], "lr": 0.3}


class Quiet(torch.optim.SGD):
    def __init__(self, params: Any, secret: int) -> None:  # noqa: ARG002
        super().__init__(params)


def test_unrecoverable_argument_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"a Quiet does not say what it was made with as secret.*zeroshard\.shard"):
        _common._prepare_constructor_args(Quiet(params(), 1))


@pytest.mark.filterwarnings("error")
def test_schedulers_follow_the_new_optimizer() -> None:
    """Learning rates are unchanged for any scheduler, and the replaced optimizer gets none."""

    def made(optimizer: torch.optim.Optimizer) -> list[Any]:
        parts = [ConstantLR(optimizer, 0.5, 2), CosineAnnealingLR(optimizer, 4)]
        return [SequentialLR(optimizer, parts, [2]), ReduceLROnPlateau(optimizer, factor=0.5, patience=0)]

    gone, other, straight = (torch.optim.SGD(params(), lr=1.0) for _ in range(3))
    moved, expected = made(gone), made(straight)
    other.param_groups[0].update({key: value for key, value in gone.param_groups[0].items() if key != "params"})
    for scheduler in moved:
        retarget_scheduler(scheduler, gone, other)
    before = gone.param_groups[0]["lr"]
    for _ in range(5):
        for optimizer, (steady, plateau) in ((other, moved), (straight, expected)):
            optimizer.step()
            steady.step()
            plateau.step(1.0)
        assert other.param_groups[0]["lr"] == straight.param_groups[0]["lr"]
    assert gone.param_groups[0]["lr"] == before
    retarget_scheduler(LambdaLR(straight, lambda _: 1.0), gone, other)
    assert "step" in vars(other)


def test_scaler_keeps_its_settings() -> None:
    given = torch.amp.GradScaler("cpu", init_scale=8.0, growth_factor=3.0, backoff_factor=0.25, growth_interval=7)
    assert make_scaler(given, "cpu").state_dict() == given.state_dict()
    assert not make_scaler(torch.amp.GradScaler("cpu", enabled=False), "cpu").is_enabled()
