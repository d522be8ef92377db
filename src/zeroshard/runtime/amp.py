"""`torch.amp.GradScaler`: gradients that are not finite on one rank make all ranks skip the step.

The scaler hands a scale and a found-inf flag to optimizers that ask for them, and then always calls
`step`. So we ask: a scaler that decided by itself would leave ranks waiting for one that skips.
"""

import warnings
from collections.abc import Iterable

import torch
from torch.optim import Optimizer

from ..comm.collectives import Comm


def skips(outer: Optimizer, inner: Optimizer, params: Iterable[torch.Tensor], comm: Comm) -> bool:
    """Whether the step is to be left out, on all ranks alike; if not, gradients are ready for `inner`."""
    if getattr(outer, "found_inf", None) is None:
        return False
    found = _flag(outer)
    anywhere = comm.maximum_of(found.clone())
    scale: torch.Tensor | None = getattr(outer, "grad_scale", None)
    if getattr(inner, "_step_supports_amp_scaling", False):
        # Fused kernels unscale and skip on the device.
        inner.found_inf, inner.grad_scale = anywhere, scale  # type: ignore[attr-defined]
        return False
    if anywhere.item():
        _warn_if_alone(found)
        return True
    if scale is not None:
        _unscale(params, scale)
    return False


def forget(inner: Optimizer) -> None:
    """Undo what `skips` left on the inner optimizer."""
    for name in ("found_inf", "grad_scale"):
        vars(inner).pop(name, None)


def _flag(outer: Optimizer) -> torch.Tensor:
    """What the scaler found: a tensor, or a bare 0 on a rank without gradients."""
    device = outer.param_groups[0]["params"][0].device
    found: torch.Tensor | int = outer.found_inf  # type: ignore[attr-defined]
    return found if isinstance(found, torch.Tensor) else torch.zeros((), device=device)


def _warn_if_alone(found: torch.Tensor) -> None:
    if not found.item():
        warnings.warn(
            "another rank found gradients that are not finite, so this rank skips its step too; its GradScaler "
            "does not know and keeps another scale. Reduce gradients over all ranks before scaler.step().",
            RuntimeWarning,
            stacklevel=5,
        )


def _unscale(params: Iterable[torch.Tensor], scale: torch.Tensor) -> None:
    inverse = scale.double().reciprocal().float()
    for param in params:
        if param.grad is not None:
            values = param.grad._values() if param.grad.is_sparse else param.grad
            if values.dtype == torch.float16:
                raise ValueError("Attempting to unscale FP16 gradients.")
            values.mul_(inverse.to(values.device))
