"""Clip gradients that are sharded across ranks, with the semantics of `torch.nn.utils.clip_grad_*_`."""

import math
from collections.abc import Sequence

import torch

from ..comm.collectives import Comm

NORM_CHUNK_NUMEL = 4096
"""Elements per partial norm in float32; longer sums would lose digits. Partial norms are combined in float64."""


@torch.no_grad()
def clip_grad_norm(
    grads: Sequence[torch.Tensor], max_norm: float, norm_type: float, comm: Comm, *, error_if_nonfinite: bool
) -> torch.Tensor:
    """Scale all gradients so that their norm over all ranks is at most `max_norm`. Return the norm before clipping.

    Call on all ranks. Does not synchronize the host with the device, unless `error_if_nonfinite` is set.
    """
    if not grads:
        return torch.tensor(0.0)
    total = compute_total_norm(grads, norm_type, comm)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"the total norm of order {norm_type} of all ranks' gradients is {total.item()}, so they cannot be "
            "clipped. Pass error_if_nonfinite=False to scale them anyway."
        )
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for grad in grads:
        grad.mul_(scale.to(grad.device))
    return total


def compute_total_norm(grads: Sequence[torch.Tensor], norm_type: float, comm: Comm) -> torch.Tensor:
    """Return the norm over all elements on all ranks, equal on all of them. Call on all ranks; `grads` is not empty."""
    zero = torch.zeros(1, dtype=torch.float64, device=grads[0].device)  # a rank may own no elements
    partial_norms = torch.cat([zero, *(_chunk_norms(grad, norm_type).to(zero.device) for grad in grads)])
    local: torch.Tensor = torch.linalg.vector_norm(partial_norms, norm_type)
    if comm.group.size == 1:
        total = local
    elif math.isinf(norm_type):
        total = _all_reduce_max_with_nan(local, comm)
    else:
        total = comm.all_reduce_sum_(local.pow(norm_type)).pow(1.0 / norm_type)
    if comm.replicas is not None:
        # Backends may sum in a different order in each shard group: all replicas use the same value.
        total = _all_reduce_max_with_nan(total, comm.data_parallel)
    is_double = any(grad.dtype in (torch.float64, torch.complex128) for grad in grads)
    return total if is_double else total.float()


def _all_reduce_max_with_nan(value: torch.Tensor, comm: Comm) -> torch.Tensor:
    """Return the maximum over all ranks; NaN if it is NaN on any, which a backend's maximum may drop."""
    maximum, is_nan = comm.all_reduce_max_(torch.stack([value.nan_to_num(nan=math.inf), value.isnan().double()]))
    return torch.where(is_nan > 0, math.nan, maximum)


@torch.no_grad()
def clip_grad_value(grads: Sequence[torch.Tensor], clip_value: float) -> None:
    """Clamp all gradients to [-clip_value, clip_value]. Needs no communication."""
    for grad in grads:
        grad.clamp_(-float(clip_value), float(clip_value))


def _chunk_norms(grad: torch.Tensor, norm_type: float) -> torch.Tensor:
    """Return the norms of all chunks of `NORM_CHUNK_NUMEL` elements of a flat gradient, and of the remainder."""
    dtype = torch.float32 if grad.dtype in (torch.bfloat16, torch.float16) else None
    full = grad.numel() // NORM_CHUNK_NUMEL * NORM_CHUNK_NUMEL
    chunks = torch.linalg.vector_norm(grad[:full].view(-1, NORM_CHUNK_NUMEL), norm_type, dim=1, dtype=dtype)
    rest = torch.linalg.vector_norm(grad[full:], norm_type, dtype=dtype).view(1) if full < grad.numel() else chunks[:0]
    return torch.cat([chunks, rest]).double()
