"""Clipping gradients that are spread over ranks, as torch clips whole ones."""

import math
from collections.abc import Sequence

import torch

from ..comm.collectives import Comm

NORM_CHUNK_NUMEL = 4096
"""Elements that are added up in single precision; sums of more lose digits."""


@torch.no_grad()
def clip_grad_norm(
    grads: Sequence[torch.Tensor], max_norm: float, norm_type: float, comm: Comm, *, error_if_nonfinite: bool
) -> torch.Tensor:
    """Scale all gradients so that their norm over all ranks is at most `max_norm`; returns the norm before.

    On all ranks. The host waits for nothing where gradients are on another device.
    """
    if not grads:
        return torch.tensor(0.0)
    total = compute_total_norm(grads, norm_type, comm)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"the total norm of order {norm_type} of the gradients of all ranks is {total.item()}, so they cannot be "
            "clipped. Pass error_if_nonfinite=False to scale them by it nevertheless."
        )
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for grad in grads:
        grad.mul_(scale.to(grad.device))
    return total


def compute_total_norm(grads: Sequence[torch.Tensor], norm_type: float, comm: Comm) -> torch.Tensor:
    """The norm over all elements on all ranks."""
    zero = torch.zeros(1, dtype=torch.float64, device=grads[0].device)  # a rank may have nothing
    parts = torch.cat([zero, *(_chunk_norms(grad, norm_type).to(zero.device) for grad in grads)])
    local: torch.Tensor = torch.linalg.vector_norm(parts, norm_type)
    if comm.group.size == 1:
        total = local
    elif math.isinf(norm_type):
        total = _all_reduce_max_with_nan(local, comm)
    else:
        total = comm.all_reduce_sum_(local.pow(norm_type)).pow(1.0 / norm_type)
    if comm.replicas is not None:
        total = _all_reduce_max_with_nan(
            total, comm.data_parallel
        )  # backends may add in another order in another group
    exact = any(grad.dtype in (torch.float64, torch.complex128) for grad in grads)
    return total if exact else total.float()


def _all_reduce_max_with_nan(value: torch.Tensor, comm: Comm) -> torch.Tensor:
    """Over all ranks; NaN if it is NaN on one, which a backend's maximum may lose."""
    most, is_nan = comm.all_reduce_max_(torch.stack([value.nan_to_num(nan=math.inf), value.isnan().double()]))
    return torch.where(is_nan > 0, math.nan, most)


@torch.no_grad()
def clip_grad_value(grads: Sequence[torch.Tensor], clip_value: float) -> None:
    for grad in grads:
        grad.clamp_(-float(clip_value), float(clip_value))


def _chunk_norms(grad: torch.Tensor, norm_type: float) -> torch.Tensor:
    """Norms of all rows of a flat gradient, and of the rest."""
    wide = torch.float32 if grad.dtype in (torch.bfloat16, torch.float16) else None
    full = grad.numel() // NORM_CHUNK_NUMEL * NORM_CHUNK_NUMEL
    rows = torch.linalg.vector_norm(grad[:full].view(-1, NORM_CHUNK_NUMEL), norm_type, dim=1, dtype=wide)
    rest = torch.linalg.vector_norm(grad[full:], norm_type, dtype=wide).view(1) if full < grad.numel() else rows[:0]
    return torch.cat([rows, rest]).double()
