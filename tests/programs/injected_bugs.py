"""Deliberate bugs, which random programs must find. They change values only: all ranks make the same collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import pytest
import torch

from zeroshard._types import Rank
from zeroshard.comm import gloo
from zeroshard.comm.transport import sum_in_rank_order
from zeroshard.engine import clip
from zeroshard.engine.grad_reducer import GradReducer
from zeroshard.engine.module_hooks import BufferBroadcast
from zeroshard.state_dict_mixin import StateDictMixin


def sum_in_reverse_rank_order(patch: pytest.MonkeyPatch) -> None:
    """The reducer sums the gradients of the last rank first."""

    def sum_reversed(slices: Sequence[torch.Tensor], output: torch.Tensor, scale: float) -> None:
        sum_in_rank_order(slices[::-1], output, scale)

    patch.setattr(gloo, "sum_in_rank_order", sum_reversed)


def clip_by_local_norm(patch: pytest.MonkeyPatch) -> None:
    """Each rank clips by the norm of its own shards."""
    compute_total_norm = clip.compute_total_norm

    def compute_local_norm(grads: Sequence[torch.Tensor], norm_type: float, comm: Any) -> torch.Tensor:
        compute_total_norm(grads, norm_type, comm)
        norms = [torch.linalg.vector_norm(grad.double(), norm_type) for grad in grads]
        total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
        return total

    patch.setattr(clip, "compute_total_norm", compute_local_norm)


def load_scaled_state(patch: pytest.MonkeyPatch) -> None:
    """Loaded optimizer state is 0.1 % too large."""
    load_state_dict = StateDictMixin._load_state_dict

    @wraps(load_state_dict)
    def load_and_scale(self: Any, *args: Any, **kwargs: Any) -> None:
        load_state_dict(self, *args, **kwargs)
        for optimizer in self.inner_optimizers:
            for state in optimizer.state.values():
                for value in state.values() if isinstance(state, dict) else ():
                    if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() > 1:
                        value.mul_(1.001)

    patch.setattr(StateDictMixin, "_load_state_dict", load_and_scale)


def give_unused_params_zero_grads(patch: pytest.MonkeyPatch) -> None:
    """Parameters that no rank has used get a gradient of zeros instead of none, so momentum and decay move them."""
    complete = GradReducer.complete

    def complete_with_zeros(self: GradReducer, step: Any, *, signatures_match: bool) -> None:
        complete(self, step, signatures_match=signatures_match)
        step.grad_mask = bytes(
            has_grad or param.requires_grad for has_grad, param in zip(step.grad_mask, self._params, strict=True)
        )

    patch.setattr(GradReducer, "complete", complete_with_zeros)


def broadcast_buffers_of_last_rank(patch: pytest.MonkeyPatch) -> None:
    """Buffers come from the last rank instead of rank 0."""
    broadcast = BufferBroadcast.broadcast

    def broadcast_from_last(self: BufferBroadcast, source: Rank, *args: Any) -> None:
        last = Rank(self._model_buffers._comm.group.size - 1)
        broadcast(self, last if source == 0 else source, *args)

    patch.setattr(BufferBroadcast, "broadcast", broadcast_from_last)


InjectBug = Callable[[pytest.MonkeyPatch], None]
INJECTED_BUGS: dict[str, InjectBug] = {
    inject.__name__: inject
    for inject in (
        sum_in_reverse_rank_order,
        clip_by_local_norm,
        load_scaled_state,
        give_unused_params_zero_grads,
        broadcast_buffers_of_last_rank,
    )
}
