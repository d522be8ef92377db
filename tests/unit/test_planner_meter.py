"""OptimizerMeter measures a step on a few tensors; the result is close to that of a step on all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zeroshard.engine.inner import OptimizerFactory
from zeroshard.planner.meter import OptimizerMeter, TensorMeta, measure_step

TENSORS: list[TensorMeta] = [
    (shape, torch.float32) for shape in ((40, 30), (30, 20), (30, 20), (40, 30), (40, 30), (16, 16), (30, 20), (8, 64))
]


@pytest.mark.parametrize(
    ("optimizer_class", "options"),
    [
        (torch.optim.AdamW, {"foreach": True}),
        (torch.optim.AdamW, {"foreach": False}),
        (torch.optim.SGD, {"momentum": 0.9, "foreach": True}),
        (torch.optim.Adafactor, {}),
        (torch.optim.Muon, {}),
    ],
)
def test_temporary_bytes_agree_with_a_step_on_all_tensors(optimizer_class: Any, options: dict[str, Any]) -> None:
    factory = OptimizerFactory(optimizer_class, [{"params": [torch.zeros(4, 4)]}], True, options)
    for tensors in (TENSORS, TENSORS[:1], TENSORS[1:3], TENSORS[::-1]):
        measured = measure_step(factory, tensors, "meta")
        assert OptimizerMeter(factory).temporary_bytes(tensors) == pytest.approx(measured.temporary, rel=0.1)
        assert measured.temporary > 0 or optimizer_class is torch.optim.SGD
