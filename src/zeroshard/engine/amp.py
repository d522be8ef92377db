"""`torch.amp.GradScaler`: gradients that are not finite on one rank make all ranks skip the step.

The scaler hands a scale and a found-inf flag to optimizers that ask for them, and then always calls
`step`. So we ask: a scaler that decided by itself would leave ranks waiting for one that skips.
"""

from collections.abc import Iterable, Sequence

import torch
from torch.optim import Optimizer

from .._logging import warn_at_caller
from ..comm.collectives import Comm
from ..comm.consensus import check_all_equal, exchange_status


def is_scaler_step(outer_optimizer: Optimizer) -> bool:
    """Whether a GradScaler is making this step."""
    return getattr(outer_optimizer, "found_inf", None) is not None


def should_skip_step(
    outer_optimizer: Optimizer,
    inner_optimizers: Sequence[Optimizer] | None,
    params: Sequence[torch.Tensor],
    comm: Comm,
    *,
    is_join_enabled: bool,
) -> bool:
    """Whether the step is to be left out, on all ranks alike; if not, gradients are ready for `inner`: perhaps only
    for its kernels that unscale and skip by themselves, unless it is None.

    `uneven`: some ranks may only shadow the step. They have no scale, so gradients are unscaled before they are lent.
    """
    if not is_join_enabled:
        exchange_status(comm, "a step that a GradScaler drives", b"")  # or another rank steps without one
    found = _get_found_inf(outer_optimizer, params[0].device)
    anywhere = comm.data_parallel.all_reduce_max_(found.clone())
    scale: torch.Tensor | None = getattr(outer_optimizer, "grad_scale", None)
    if not is_join_enabled and _delegate_to_fused(inner_optimizers, anywhere, scale):
        return False
    if anywhere.item():
        _warn_if_found_elsewhere(outer_optimizer, found)
        return True
    if scale is not None:
        _unscale_grads(params, scale)
    return False


def unscale_sharded_grads(
    grads: Sequence[torch.Tensor], inverse_scale: torch.Tensor, comm: Comm
) -> dict[torch.device, torch.Tensor]:
    """Scale gradients that are spread over ranks; says for each device whether some on any rank are not finite."""
    found: dict[torch.device, torch.Tensor] = {}
    for grad in grads:
        flag = found.setdefault(grad.device, torch.zeros((), device=grad.device))
        torch._amp_foreach_non_finite_check_and_unscale_([grad], flag, inverse_scale.to(grad.device))
    if not found:
        found[inverse_scale.device] = torch.zeros((), device=inverse_scale.device)
    return {
        device: flag if comm.is_single_rank else comm.data_parallel.all_reduce_max_(flag)
        for device, flag in found.items()
    }


def should_skip_sharded_step(
    outer_optimizer: Optimizer,
    inner_optimizers: Sequence[Optimizer] | None,
    grads: Sequence[torch.Tensor],
    comm: Comm,
    *,
    is_inf_checked: bool,
) -> bool:
    """Whether the step is to be left out; if not, gradients are ready for `inner`, as in `skips`.

    `checked`: the scaler has found what is not finite on any rank.
    """
    if not is_inf_checked:  # perhaps here alone
        text = "torch's GradScaler cannot see gradients that are spread over ranks: use zeroshard.GradScaler"
        check_all_equal(comm, "a step that torch's GradScaler drives", (), RuntimeError(text))
    found = _get_found_inf(outer_optimizer, grads[0].device if grads else torch.device("cpu"))
    scale: torch.Tensor | None = getattr(outer_optimizer, "grad_scale", None)
    if _delegate_to_fused(inner_optimizers, found, scale):
        return False
    if found.item():
        return True
    if scale is not None:
        inverse = scale.double().reciprocal().float()
        for grad in grads:
            grad.mul_(inverse.to(grad.device))
    return False


def _delegate_to_fused(
    inner_optimizers: Sequence[Optimizer] | None, found_inf: torch.Tensor, scale: torch.Tensor | None
) -> bool:
    """Let fused kernels unscale and skip on the device, if all optimizers have them."""
    if inner_optimizers is None or not all(
        getattr(optimizer, "_step_supports_amp_scaling", False) for optimizer in inner_optimizers
    ):
        return False
    for optimizer in inner_optimizers:
        optimizer.found_inf, optimizer.grad_scale = found_inf, scale  # type: ignore[attr-defined]
    return True


def clear_scaler_attrs(*optimizers: Optimizer) -> None:
    """Undo what `skips` left on inner optimizers, or a GradScaler on the outer one."""
    for optimizer in optimizers:
        for name in ("found_inf", "grad_scale"):
            vars(optimizer).pop(name, None)


def _get_found_inf(outer_optimizer: Optimizer, device: torch.device) -> torch.Tensor:
    """What the scaler found: a tensor, or a bare 0 on a rank without gradients, or nothing on one without a scaler."""
    found = getattr(outer_optimizer, "found_inf", None)
    return found if isinstance(found, torch.Tensor) else torch.zeros((), device=device)


def _warn_if_found_elsewhere(outer_optimizer: Optimizer, found_inf: torch.Tensor) -> None:
    if is_scaler_step(outer_optimizer) and not found_inf.item():
        warn_at_caller(
            "another rank found gradients that are not finite, so this rank skips its step too; its GradScaler "
            "does not know and keeps another scale. Reduce gradients over all ranks before scaler.step().",
            RuntimeWarning,
        )


def _unscale_grads(params: Iterable[torch.Tensor], scale: torch.Tensor) -> None:
    inverse = scale.double().reciprocal().float()
    for param in params:
        if param.grad is not None:
            values = param.grad._values() if param.grad.is_sparse else param.grad
            if values.dtype == torch.float16:
                raise ValueError("Attempting to unscale FP16 gradients.")
            values.mul_(inverse.to(values.device))
