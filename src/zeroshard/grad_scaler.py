"""`GradScaler` for gradients that are spread over ranks."""

from typing import Any

import torch

from .optimizer import ZeroRedundancyOptimizer


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` that also knows gradients of which every rank has a part.

    What is not finite on one rank makes all of them skip the step, and lower the same scale.
    """

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, Any]:
        if isinstance(optimizer, ZeroRedundancyOptimizer) and optimizer._reduces_grads:
            return optimizer._unscale_grads(inv_scale)
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
