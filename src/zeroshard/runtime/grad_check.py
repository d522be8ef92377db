"""Are gradients the same on all ranks, as `DistributedDataParallel` makes them? Checked in the first step only.

Every rank computes one number of its gradients and sends it along with what it states in the step anyway. A warning is
all that follows: only the owner's gradient of a parameter is used, so different ones are no proof of a mistake.
"""

import logging
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch

from ..comm.agreement import Verdict
from ..comm.collectives import Comm
from ..notices import log, warn_user

SAMPLE = 1 << 16
"""Elements of a gradient that are looked at."""
_AT_ONCE = 1 << 20
_UNIT = 1 << 32
TOLERANCE = _UNIT >> 8
"""Averages that each rank computes, or clips by a norm that it computes, differ by rounding. Gradients of different
inputs differ by about `_UNIT`, times the noise that they have in relation to their length."""


class GradCheck:
    """Compares the gradients of the first step. On all ranks."""

    def __init__(self, comm: Comm) -> None:
        self._is_due = not comm.is_alone
        self._rank = comm.everyone.group.rank
        self.paused = False
        """Ranks without inputs have the gradients of others, or none."""

    def measure(self, params: Sequence[torch.Tensor]) -> int | None:
        """A number that is about the same on all ranks if their gradients of `params` are; None: nothing to compare."""
        if not self._is_due or self.paused:
            return None
        try:
            return _project(param.grad for param in params if param.grad is not None)
        except Exception as error:  # no memory, or an odd kind of gradient: no reason to fail
            log(logging.DEBUG, self._rank, "gradients are not compared: %r", error)
            return None

    def judge(self, verdict: Verdict) -> None:
        """Warn if they differ. If ranks have gradients of different parameters, they cannot be compared."""
        if not self._is_due or self.paused or verdict.trouble:
            return
        self._is_due = False
        if verdict.same_plan and verdict.spread > TOLERANCE:
            warn_user(
                "the gradients in param.grad differ between ranks, so each parameter is updated with the gradient of "
                "the one rank that owns it, and not with the average. Wrap the model in DistributedDataParallel, or "
                "use zeroshard.shard(model, ...), which averages gradients itself. If each owner does have the "
                "average, ignore this, or set param.grad to None on the other ranks."
            )


@torch.no_grad()
def _project(grads: Iterable[torch.Tensor]) -> int | None:
    """The direction of dense gradients, along one of pseudo-random signs: scale does not matter."""
    samples: dict[torch.device, list[torch.Tensor]] = defaultdict(list)
    for grad in grads:
        if grad.layout == torch.strided and grad.numel():
            samples[grad.device].append(_sample(grad.detach()))
    along = square = 0.0
    for device, found in samples.items():
        sums = torch.zeros(2, device=device)
        for some in _in_lots(found):
            flat = torch.cat(some)
            sums += torch.stack([flat.dot(_signs(len(flat), device)), flat.dot(flat)])
        on_device = sums.tolist()
        along, square = along + on_device[0], square + on_device[1]
    if not (math.isfinite(along) and math.isfinite(square) and square > 0):
        return None
    return round(along / math.sqrt(square) * _UNIT)


def _sample(grad: torch.Tensor) -> torch.Tensor:
    """Its first elements, in the order of its dimensions: strides may differ from rank to rank."""
    while grad.numel() > SAMPLE:
        row = grad.numel() // len(grad)
        grad = grad[: SAMPLE // row] if row <= SAMPLE else grad[0]
    real = torch.view_as_real(grad.resolve_conj()) if grad.is_complex() else grad
    return real.reshape(-1).float()


def _in_lots(samples: Sequence[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    lot: list[torch.Tensor] = []
    size = 0
    for sample in samples:
        lot.append(sample)
        size += sample.numel()
        if size >= _AT_ONCE:
            yield lot
            lot, size = [], 0
    if lot:
        yield lot


def _signs(count: int, device: torch.device) -> torch.Tensor:
    """The same ones everywhere, as if drawn by chance."""
    bits = torch.arange(1, count + 1, device=device, dtype=torch.int64) * 0x2545F4914F6CDD1D
    return ((bits ^ (bits >> 29)) >> 40 & 1).mul_(2).sub_(1).float()
