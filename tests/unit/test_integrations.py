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


@pytest.mark.parametrize("optimizer_class", CLASSES, ids=lambda cls: cls.__name__)
def test_constructor_arguments_are_recovered(optimizer_class: Any) -> None:
    given = {"lr": 0.125, "maximize": True} if optimizer_class is not torch.optim.Muon else {"nesterov": False}
    default, customized = optimizer_class(params()), optimizer_class(params(), **given)
    assert _common._prepare_constructor_args(default).value == {}, "zeroshard.shard chooses the implementation"
    recovered = _common._prepare_constructor_args(customized).value
    assert recovered == given
    assert optimizer_class(params(), **recovered).defaults == customized.defaults


def test_tensor_lr_is_kept() -> None:
    lr = torch.tensor(0.5)
    assert _common._prepare_constructor_args(torch.optim.SGD(params(), lr=lr)).value == {"lr": lr}


def test_groups_keep_only_their_own_options() -> None:
    """Every group stores the options that choose an implementation; keeping them would prevent another choice."""
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


@pytest.mark.usefixtures("single_rank")
@pytest.mark.parametrize("has_state", [False, True])
@pytest.mark.parametrize("is_first", [False, True])
def test_empty_groups_are_kept(is_first: bool, has_state: bool) -> None:
    """Transformers creates one for LoRA: no adapter is excluded from weight decay."""
    model = nn.Linear(2, 2)
    groups: list[dict[str, Any]] = [{"params": [*model.parameters()], "weight_decay": 0.5}, {"params": [], "lr": 0.3}]
    optimizer = torch.optim.AdamW(groups[::-1] if is_first else groups, lr=0.1)
    if has_state:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    sharded = _common.shard_optimizer(model, optimizer, {})
    found = [(len(group["params"]), group["lr"], group["weight_decay"]) for group in sharded.param_groups]
    assert found == ([(0, 0.3, 0.01), (2, 0.1, 0.5)] if is_first else [(2, 0.1, 0.5), (0, 0.3, 0.01)])
    assert len(sharded.state) == 2 * has_state


class Quiet(torch.optim.SGD):
    def __init__(self, params: Any, secret: int) -> None:  # noqa: ARG002
        super().__init__(params)


def test_unrecoverable_argument_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"Quiet does not store its arguments secret.*zeroshard\.shard"):
        _common._prepare_constructor_args(Quiet(params(), 1))


@pytest.mark.filterwarnings("error")
def test_schedulers_follow_the_new_optimizer() -> None:
    """Any scheduler sets the same learning rates as before, and none on the replaced optimizer."""

    def make_schedulers(optimizer: torch.optim.Optimizer) -> list[Any]:
        schedulers = [ConstantLR(optimizer, 0.5, 2), CosineAnnealingLR(optimizer, 4)]
        return [SequentialLR(optimizer, schedulers, [2]), ReduceLROnPlateau(optimizer, factor=0.5, patience=0)]

    replaced, replacement, reference = (torch.optim.SGD(params(), lr=1.0) for _ in range(3))
    moved, expected = make_schedulers(replaced), make_schedulers(reference)
    replacement.param_groups[0].update(
        {key: value for key, value in replaced.param_groups[0].items() if key != "params"}
    )
    for scheduler in moved:
        retarget_scheduler(scheduler, replaced, replacement)
    before = replaced.param_groups[0]["lr"]
    for _ in range(5):
        for optimizer, (sequential, plateau) in ((replacement, moved), (reference, expected)):
            optimizer.step()
            sequential.step()
            plateau.step(1.0)
        assert replacement.param_groups[0]["lr"] == reference.param_groups[0]["lr"]
    assert replaced.param_groups[0]["lr"] == before
    retarget_scheduler(LambdaLR(reference, lambda _: 1.0), replaced, replacement)
    assert "step" in vars(replacement)


def test_scaler_keeps_its_settings() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_factor=3.0, backoff_factor=0.25, growth_interval=7)
    assert make_scaler(scaler, "cpu").state_dict() == scaler.state_dict()
    assert not make_scaler(torch.amp.GradScaler("cpu", enabled=False), "cpu").is_enabled()
