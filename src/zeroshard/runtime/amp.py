"""`torch.amp.GradScaler`: gradients that are not finite on one rank make all ranks skip the step.

The scaler hands a scale and a found-inf flag to optimizers that ask for them, and then always calls
`step`. So we ask: a scaler that decided by itself would leave ranks waiting for one that skips.
"""

from collections.abc import Iterable, Sequence

import torch
from torch.optim import Optimizer

from ..comm.agreement import agree, compare
from ..comm.collectives import Comm
from ..notices import warn_user


def drives(outer: Optimizer) -> bool:
    """Whether a GradScaler is making this step."""
    return getattr(outer, "found_inf", None) is not None


def skips(
    outer: Optimizer, inner: Sequence[Optimizer] | None, params: Sequence[torch.Tensor], comm: Comm, *, uneven: bool
) -> bool:
    """Whether the step is to be left out, on all ranks alike; if not, gradients are ready for `inner`: perhaps only
    for its kernels that unscale and skip by themselves, unless it is None.

    `uneven`: some ranks may only shadow the step. They have no scale, so gradients are unscaled before they are lent.
    """
    if not uneven:
        compare(comm, "a step that a GradScaler drives", b"")  # or another rank steps without one
    found = _flag(outer, params[0].device)
    anywhere = comm.everyone.maximum_of(found.clone())
    scale: torch.Tensor | None = getattr(outer, "grad_scale", None)
    if not uneven and _hands_over(inner, anywhere, scale):
        return False
    if anywhere.item():
        _warn_if_alone(outer, found)
        return True
    if scale is not None:
        _unscale(params, scale)
    return False


def unscale_jointly(
    grads: Sequence[torch.Tensor], inverse_scale: torch.Tensor, comm: Comm
) -> dict[torch.device, torch.Tensor]:
    """Scale gradients that are spread over ranks; says for each device whether some on any rank are not finite."""
    found: dict[torch.device, torch.Tensor] = {}
    for grad in grads:
        flag = found.setdefault(grad.device, torch.zeros((), device=grad.device))
        torch._amp_foreach_non_finite_check_and_unscale_([grad], flag, inverse_scale.to(grad.device))
    if not found:
        found[inverse_scale.device] = torch.zeros((), device=inverse_scale.device)
    return {device: flag if comm.is_alone else comm.everyone.maximum_of(flag) for device, flag in found.items()}


def skips_jointly(
    outer: Optimizer, inner: Sequence[Optimizer] | None, grads: Sequence[torch.Tensor], comm: Comm, *, checked: bool
) -> bool:
    """Whether the step is to be left out; if not, gradients are ready for `inner`, as in `skips`.

    `checked`: the scaler has found what is not finite on any rank.
    """
    if not checked:  # perhaps here alone
        text = "torch's GradScaler cannot see gradients that are spread over ranks: use zeroshard.GradScaler"
        agree(comm, "a step that torch's GradScaler drives", (), RuntimeError(text))
    found = _flag(outer, grads[0].device if grads else torch.device("cpu"))
    scale: torch.Tensor | None = getattr(outer, "grad_scale", None)
    if _hands_over(inner, found, scale):
        return False
    if found.item():
        return True
    if scale is not None:
        inverse = scale.double().reciprocal().float()
        for grad in grads:
            grad.mul_(inverse.to(grad.device))
    return False


def _hands_over(inner: Sequence[Optimizer] | None, found: torch.Tensor, scale: torch.Tensor | None) -> bool:
    """Let fused kernels unscale and skip on the device, if all optimizers have them."""
    if inner is None or not all(getattr(optimizer, "_step_supports_amp_scaling", False) for optimizer in inner):
        return False
    for optimizer in inner:
        optimizer.found_inf, optimizer.grad_scale = found, scale  # type: ignore[attr-defined]
    return True


def forget(*optimizers: Optimizer) -> None:
    """Undo what `skips` left on inner optimizers, or a GradScaler on the outer one."""
    for optimizer in optimizers:
        for name in ("found_inf", "grad_scale"):
            vars(optimizer).pop(name, None)


def _flag(outer: Optimizer, device: torch.device) -> torch.Tensor:
    """What the scaler found: a tensor, or a bare 0 on a rank without gradients, or nothing on one without a scaler."""
    found = getattr(outer, "found_inf", None)
    return found if isinstance(found, torch.Tensor) else torch.zeros((), device=device)


def _warn_if_alone(outer: Optimizer, found: torch.Tensor) -> None:
    if drives(outer) and not found.item():
        warn_user(
            "another rank found gradients that are not finite, so this rank skips its step too; its GradScaler "
            "does not know and keeps another scale. Reduce gradients over all ranks before scaler.step().",
            RuntimeWarning,
        )


def _unscale(params: Iterable[torch.Tensor], scale: torch.Tensor) -> None:
    inverse = scale.double().reciprocal().float()
    for param in params:
        if param.grad is not None:
            values = param.grad._values() if param.grad.is_sparse else param.grad
            if values.dtype == torch.float16:
                raise ValueError("Attempting to unscale FP16 gradients.")
            values.mul_(inverse.to(values.device))
