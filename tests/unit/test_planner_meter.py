"""Not all equal tensors are stepped to know what a step takes; the answer is that of stepping them all."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zeroshard.engine.inner import OptimizerFactory
from zeroshard.planner.meter import StateMeter, TensorMeta, _measure_on_meta

SHAPES: list[TensorMeta] = [
    (shape, torch.float32) for shape in ((40, 30), (30, 20), (30, 20), (40, 30), (40, 30), (16, 16), (30, 20), (8, 64))
]


@pytest.mark.parametrize(
    ("made", "options"),
    [
        (torch.optim.AdamW, {"foreach": True}),
        (torch.optim.AdamW, {"foreach": False}),
        (torch.optim.SGD, {"momentum": 0.9, "foreach": True}),
        (torch.optim.Adafactor, {}),
        (torch.optim.Muon, {}),
    ],
)
def test_moments_of_a_step(made: Any, options: dict[str, Any]) -> None:
    recipe = OptimizerFactory(made, [{"params": [torch.zeros(4, 4)]}], True, options)
    for shapes in (SHAPES, SHAPES[:1], SHAPES[1:3], SHAPES[::-1]):
        taken = _measure_on_meta(recipe, shapes)
        assert taken is not None
        assert StateMeter(recipe).temporary_bytes(shapes) == taken.temporary_bytes
        assert taken.temporary_bytes > 0 or made is torch.optim.SGD
