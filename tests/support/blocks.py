"""An optimizer that works on blocks of parameters, as those do that keep their state in few bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Blocks(Optimizer):
    """Keeps a momentum, and divides it by its largest value in each block: of parameters that are large enough, and
    can be divided into blocks. The others are updated by their momentum as it is."""

    def __init__(self, params: Any, lr: float = 0.1, block: int = 256, least: int = 512) -> None:
        super().__init__(params, {"lr": lr, "block": block, "least": least})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(self.direction(param, param.grad, group["block"], group["least"]), alpha=group["lr"])

    def direction(self, param: Tensor, grad: Tensor, block: int, least: int) -> Tensor:
        momentum: Tensor = self.state[param].setdefault("momentum", torch.zeros_like(param))
        momentum.mul_(0.9).add_(grad)
        if param.numel() < least or param.numel() % block:
            return momentum.clone()
        blocks = momentum.reshape(-1, block)
        return (blocks / (blocks.abs().amax(1, keepdim=True) + 1e-3)).reshape(param.shape)
