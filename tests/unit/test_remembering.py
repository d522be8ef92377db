"""What a self-test has found of a class is asked again only where the answer could be another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from zeroshard.runtime import remembering
from zeroshard.runtime.inner import Recipe
from zeroshard.runtime.remembering import remembered

Asked = Callable[..., int]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """How often a recipe had to be tested until now, this time included."""
    monkeypatch.setattr(remembering, "_found", {})
    seen: list[Recipe] = []

    def test(recipe: Recipe) -> int:
        seen.append(recipe)
        return len(seen)

    def ask(factory: Any = AdamW, shapes: Any = ((3, 4),), dtype: torch.dtype = torch.float32, **given: Any) -> int:
        params = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
        group = given.pop("group", {})
        answer = remembered(test, Recipe(factory, [{**group, "params": params}], not group, given))
        assert 1 <= answer <= len(seen)
        return len(seen)

    return ask


def test_the_same_is_asked_once(asked: Asked) -> None:
    assert asked(lr=0.1, betas=(0.9, 0.99)) == 1
    assert asked(lr=0.1, betas=(0.9, 0.99)) == 1
    assert asked(lr=0.1, betas=(0.9, 0.99), shapes=[(5, 6), (2, 2)]) == 1, "sizes do not matter, dimensions do"


@pytest.mark.parametrize(
    "other",
    [
        {"factory": SGD},
        {"lr": 0.2},
        {"lr": 1},
        {"lr": True},
        {"amsgrad": True},
        {"shapes": [(3,)]},
        {"shapes": [(3, 4), (3,)]},
        {"dtype": torch.float64},
        {"group": {"lr": 0.3}},
        {"group": {"param_names": ["a"]}},
    ],
)
def test_what_could_make_a_difference_is_asked(asked: Asked, other: dict[str, Any]) -> None:
    assert asked(lr=1.0) == 1
    assert asked(**{"lr": 1.0, **other}) == 2
    assert asked(lr=1.0) == 2


def test_what_may_change_under_its_name_is_asked_each_time(asked: Asked) -> None:
    class Own(AdamW):
        pass

    assert [asked(Own, lr=0.1) for _ in range(2)] == [1, 2]
    assert [asked(lr=torch.tensor(0.1)) for _ in range(2)] == [3, 4]
    assert [asked(lambda params: AdamW(params, lr=0.1)) for _ in range(2)] == [5, 6]


def test_another_step_is_asked(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked(lr=0.1) == 1
    monkeypatch.setattr(AdamW, "step", lambda *_: None)
    assert asked(lr=0.1) == 2
    monkeypatch.undo()
