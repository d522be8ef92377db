"""StateMeter steps only some of the equal tensors; the result equals stepping all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zeroshard.engine.inner import OptimizerFactory
from zeroshard.planner.meter import StateMeter, TensorMeta, _measure_on_meta

TENSORS: list[TensorMeta] = [
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
def test_temporary_bytes_equal_full_measurement(made: Any, options: dict[str, Any]) -> None:
    factory = OptimizerFactory(made, [{"params": [torch.zeros(4, 4)]}], True, options)
    for shapes in (TENSORS, TENSORS[:1], TENSORS[1:3], TENSORS[::-1]):
        measured = _measure_on_meta(factory, shapes)
        assert measured is not None
        assert StateMeter(factory).temporary_bytes(shapes) == measured.temporary_bytes
        assert measured.temporary_bytes > 0 or made is torch.optim.SGD
