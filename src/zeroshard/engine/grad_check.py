"""Are gradients the same on all ranks, as `DistributedDataParallel` makes them? Checked in the first step only.

Every rank computes one number of its gradients and sends it along with what it states in the step anyway. A warning is
all that follows: only the owner's gradient of a parameter is used, so different ones are no proof of a mistake.
"""

import logging
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch

from ..comm.consensus import Status
from ..comm.collectives import Comm
from .._logging import log_rank, warn_at_caller

SAMPLE_NUMEL = 1 << 16
"""Elements of a gradient that are looked at."""
_SAMPLE_BATCH_NUMEL = 1 << 20
_FIXED_POINT_ONE = 1 << 32
GRAD_TOLERANCE = _FIXED_POINT_ONE >> 8
"""Averages that each rank computes, or clips by a norm that it computes, differ by rounding. Gradients of different
inputs differ by about `_UNIT`, times the noise that they have in relation to their length."""


class GradConsistencyCheck:
    """Compares the gradients of the first step. On all ranks."""

    def __init__(self, comm: Comm) -> None:
        self._is_due = not comm.is_single_rank
        self._rank = comm.data_parallel.group.rank
        self.is_paused = False
        """Ranks without inputs have the gradients of others, or none."""

    def compute_fingerprint(self, params: Sequence[torch.Tensor]) -> int | None:
        """A number that is about the same on all ranks if their gradients of `params` are; None: nothing to compare."""
        if not self._is_due or self.is_paused:
            return None
        try:
            return _project_grads(param.grad for param in params if param.grad is not None)
        except Exception as error:  # no memory, or an odd kind of gradient: no reason to fail
            log_rank(logging.DEBUG, self._rank, "gradients are not compared: %r", error)
            return None

    def warn_on_mismatch(self, status: Status) -> None:
        """Warn if they differ. If ranks have gradients of different parameters, they cannot be compared."""
        if not self._is_due or self.is_paused or status.failure_level:
            return
        self._is_due = False
        if status.has_same_plan and status.measure_range > GRAD_TOLERANCE:
            warn_at_caller(
                "the gradients in param.grad differ between ranks, so each parameter is updated with the gradient of "
                "the one rank that owns it, and not with the average. Wrap the model in DistributedDataParallel, or "
                "use zeroshard.shard(model, ...), which averages gradients itself. If each owner does have the "
                "average, ignore this, or set param.grad to None on the other ranks."
            )


@torch.no_grad()
def _project_grads(grads: Iterable[torch.Tensor]) -> int | None:
    """The direction of dense gradients, along one of pseudo-random signs: scale does not matter."""
    samples: dict[torch.device, list[torch.Tensor]] = defaultdict(list)
    for grad in grads:
        if grad.layout == torch.strided and grad.numel():
            samples[grad.device].append(_sample_grad(grad.detach()))
    along = square = 0.0
    for device, found in samples.items():
        sums = torch.zeros(2, device=device)
        for some in _iter_batches(found):
            flat = torch.cat(some)
            sums += torch.stack([flat.dot(_make_signs(len(flat), device)), flat.dot(flat)])
        on_device = sums.tolist()
        along, square = along + on_device[0], square + on_device[1]
    if not (math.isfinite(along) and math.isfinite(square) and square > 0):
        return None
    return round(along / math.sqrt(square) * _FIXED_POINT_ONE)


def _sample_grad(grad: torch.Tensor) -> torch.Tensor:
    """Its first elements, in the order of its dimensions: strides may differ from rank to rank."""
    while grad.numel() > SAMPLE_NUMEL:
        row = grad.numel() // len(grad)
        grad = grad[: SAMPLE_NUMEL // row] if row <= SAMPLE_NUMEL else grad[0]
    real = torch.view_as_real(grad.resolve_conj()) if grad.is_complex() else grad
    return real.reshape(-1).float()


def _iter_batches(samples: Sequence[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    lot: list[torch.Tensor] = []
    size = 0
    for sample in samples:
        lot.append(sample)
        size += sample.numel()
        if size >= _SAMPLE_BATCH_NUMEL:
            yield lot
            lot, size = [], 0
    if lot:
        yield lot


def _make_signs(count: int, device: torch.device) -> torch.Tensor:
    """The same ones everywhere, as if drawn by chance."""
    bits = torch.arange(1, count + 1, device=device, dtype=torch.int64) * 0x2545F4914F6CDD1D
    return ((bits ^ (bits >> 29)) >> 40 & 1).mul_(2).sub_(1).float()
