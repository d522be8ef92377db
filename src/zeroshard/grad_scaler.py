"""`GradScaler` for sharded gradients."""

from typing import Any

import torch

from .optimizer import ZeroRedundancyOptimizer


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` with support for sharded gradients.

    If a gradient is inf or NaN on one rank, all ranks skip the step and lower the scale by the same factor. The
    constructor takes torch's arguments.
    """

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, Any]:
        if isinstance(optimizer, ZeroRedundancyOptimizer) and optimizer._reduces_grads:
            return optimizer._unscale_grads(inv_scale)
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
