"""An optimizer that keeps state of every kind that may be sent from rank to rank."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch.optim import Optimizer


class Keeper(Optimizer):
    """Momentum, and beside it all kinds of containers and plain values."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.calls = 0

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self.calls += 1
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state["buffer"] = param.grad + state.get("buffer", 0)
                    state.update(_containers(param, self.calls))
                    param.sub_(state["buffer"], alpha=group["lr"])


def _containers(param: torch.Tensor, calls: int) -> dict[str, Any]:
    return {
        "list": [param.square(), calls, None, ["deep", param.sum()]],
        "tuple": (param.abs(), "text"),
        "ordered": OrderedDict(z=1, a=param.exp()),
        "nested": {"deep": {"deeper": param.sum(), 3: "three"}},
        "text": f"call {calls}",
        "raw": bytes([0, calls]),
        "flag": True,
        "none": None,
        "number": 0.1 * calls,
        "complex": 1j * calls,
        "dtype": torch.bfloat16,
        "size": torch.Size([calls, 2]),
        "set": {1, calls},
        "empty": [(), {}, "", torch.empty(0, 2)],
        "integers": torch.arange(calls),
        "flags": torch.tensor([True, False]),
        "half": param.half(),
    }
