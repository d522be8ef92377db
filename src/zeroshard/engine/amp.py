"""Support for `torch.amp.GradScaler`: all ranks skip a step if gradients are not finite on any rank.

The scaler passes its scale and a found-inf flag to optimizers that support it (`_step_supports_amp_scaling`), and then
always calls `step`. zeroshard opts in: a scaler that skips on its own would leave the other ranks waiting.
"""

from collections.abc import Iterable, Sequence

import torch
from torch.optim import Optimizer

from .._logging import warn_at_caller
from .._torch_compat import amp_unscale_, sparse_values, supports_amp_scaling
from ..comm.collectives import Comm
from ..comm.consensus import check_all_equal, exchange_status


def is_scaler_step(outer_optimizer: Optimizer) -> bool:
    """Return whether a GradScaler drives this step."""
    return getattr(outer_optimizer, "found_inf", None) is not None


def scaler_skips_step(
    outer_optimizer: Optimizer,
    inner_optimizers: Sequence[Optimizer] | None,
    params: Sequence[torch.Tensor],
    comm: Comm,
    *,
    is_join_enabled: bool,
) -> bool:
    """Return whether to skip the step; the result is the same on all ranks. Call on all ranks.

    If not skipped, the gradients of `params` are ready for `inner_optimizers`. If all of those support AMP scaling,
    their fused kernels unscale and skip on the device, and the result is False. Pass None to rule that out.

    With `is_join_enabled`, joined ranks may only shadow the step. They have no scale, so gradients are unscaled here,
    before they are sent to them.
    """
    if not is_join_enabled:
        exchange_status(comm, "a step that a GradScaler drives", b"")  # raises if another rank steps without a scaler
    found_inf = _get_found_inf(outer_optimizer, params[0].device)
    found_inf_anywhere = comm.data_parallel.all_reduce_max_(found_inf.clone())
    scale: torch.Tensor | None = getattr(outer_optimizer, "grad_scale", None)
    if not is_join_enabled and _delegate_to_fused(inner_optimizers, found_inf_anywhere, scale):
        return False
    if found_inf_anywhere.item():
        _warn_if_found_elsewhere(outer_optimizer, found_inf)
        return True
    if scale is not None:
        _unscale_grads(params, scale)
    return False


def unscale_sharded_grads(
    grads: Sequence[torch.Tensor], inverse_scale: torch.Tensor, comm: Comm
) -> dict[torch.device, torch.Tensor]:
    """Unscale this rank's gradient shards in place. Call on all ranks.

    Returns:
        A found-inf flag per device, reduced over all ranks.
    """
    found_inf: dict[torch.device, torch.Tensor] = {}
    for grad in grads:
        flag = found_inf.setdefault(grad.device, torch.zeros((), device=grad.device))
        amp_unscale_([grad], flag, inverse_scale.to(grad.device))
    if not found_inf:
        found_inf[inverse_scale.device] = torch.zeros((), device=inverse_scale.device)
    return {
        device: flag if comm.is_single_rank else comm.data_parallel.all_reduce_max_(flag)
        for device, flag in found_inf.items()
    }


def scaler_skips_sharded_step(
    outer_optimizer: Optimizer,
    inner_optimizers: Sequence[Optimizer] | None,
    grads: Sequence[torch.Tensor],
    comm: Comm,
    *,
    is_inf_checked: bool,
) -> bool:
    """Return whether to skip a step on sharded gradients; if not, they are ready, as in `scaler_skips_step`.

    `is_inf_checked`: found-inf flags are already reduced over all ranks (`zeroshard.GradScaler`). Otherwise torch's own
    scaler drives the step, and all ranks raise.
    """
    if not is_inf_checked:  # perhaps on this rank only
        message = "torch's GradScaler cannot see gradients that are sharded across ranks: use zeroshard.GradScaler"
        check_all_equal(comm, "a step that torch's GradScaler drives", (), RuntimeError(message))
    found_inf = _get_found_inf(outer_optimizer, grads[0].device if grads else torch.device("cpu"))
    scale: torch.Tensor | None = getattr(outer_optimizer, "grad_scale", None)
    if _delegate_to_fused(inner_optimizers, found_inf, scale):
        return False
    if found_inf.item():
        return True
    if scale is not None:
        inverse = scale.double().reciprocal().float()
        for grad in grads:
            grad.mul_(inverse.to(grad.device))
    return False


def _delegate_to_fused(
    inner_optimizers: Sequence[Optimizer] | None, found_inf: torch.Tensor, scale: torch.Tensor | None
) -> bool:
    """Pass flag and scale to the fused kernels of all inner optimizers; return False if one does not support them."""
    if inner_optimizers is None or not all(map(supports_amp_scaling, inner_optimizers)):
        return False
    for optimizer in inner_optimizers:
        optimizer.found_inf, optimizer.grad_scale = found_inf, scale  # type: ignore[attr-defined]
    return True


def clear_scaler_attrs(*optimizers: Optimizer) -> None:
    """Delete `found_inf` and `grad_scale`, which a GradScaler or `scaler_skips_step` has set on optimizers."""
    for optimizer in optimizers:
        for name in ("found_inf", "grad_scale"):
            vars(optimizer).pop(name, None)


def _get_found_inf(outer_optimizer: Optimizer, device: torch.device) -> torch.Tensor:
    """Return the scaler's flag as a tensor. It sets a plain 0 without gradients; without a scaler there is none."""
    found_inf = getattr(outer_optimizer, "found_inf", None)
    return found_inf if isinstance(found_inf, torch.Tensor) else torch.zeros((), device=device)


def _warn_if_found_elsewhere(outer_optimizer: Optimizer, found_inf: torch.Tensor) -> None:
    if is_scaler_step(outer_optimizer) and not found_inf.item():
        warn_at_caller(
            "another rank found non-finite gradients, so this rank skips its step, too, but its GradScaler keeps "
            "another scale. Reduce gradients over all ranks before scaler.step().",
            RuntimeWarning,
            on_all_ranks=True,
        )


def _unscale_grads(params: Iterable[torch.Tensor], scale: torch.Tensor) -> None:
    inverse = scale.double().reciprocal().float()
    for param in params:
        if param.grad is not None:
            values = sparse_values(param.grad) if param.grad.is_sparse else param.grad
            if values.dtype == torch.float16:
                raise ValueError("Attempting to unscale FP16 gradients.")
            values.mul_(inverse.to(values.device))
