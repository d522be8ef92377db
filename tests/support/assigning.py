"""Optimizers that assign to `param.data`, as much code outside of torch does, instead of changing it in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Closure = Callable[[], Any]


class Assigning(torch.optim.Optimizer):
    """SGD that exchanges the memory of its parameters, and of its momenta, in every step."""

    becomes: dict[str, Any] | None = None
    """What `.data` is made of by `to` before it is assigned, once."""

    def __init__(self, params: Any, lr: float = 0.1, momentum: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        with torch.enable_grad():
            loss = None if closure is None else closure()
        others, self.becomes = self.becomes or {}, None
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    known = self.state[param].get("momentum_buffer", torch.zeros_like(param))
                    change = self.state[param]["momentum_buffer"] = known * group["momentum"] + param.grad
                    param.data = (param.data - group["lr"] * change).to(**others)
        return loss


class Sam(torch.optim.Optimizer):
    """Updates parameters by gradients of a place nearby, and goes back by an assignment, as published code does."""

    def __init__(self, params: Any, lr: float = 0.1, rho: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "rho": rho})

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        closure = torch.enable_grad()(closure or _nothing)
        closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.state[param]["old_p"] = param.data.clone()
                    param.add_(param.grad.sign(), alpha=group["rho"])
        loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.data = self.state[param]["old_p"]
                    param.add_(param.grad, alpha=-group["lr"])
        return loss


def _nothing() -> None:
    """A closure that leaves gradients as they are."""
