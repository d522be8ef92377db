"""Gradients that were reduced and stay in `param.grad`, where anybody may write to them afterwards."""

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import ReferenceType, ref

import torch

CHANGED_AFTER_REDUCTION = (
    "was changed in param.grad after it was reduced, or after the average was clipped or unscaled. param.grad does not "
    "hold the average: torch.nn.utils.clip_grad_norm_() uses another norm on every rank. "
    "Use optimizer.clip_grad_norm_(), optimizer.clip_grad_value_() or zeroshard.GradScaler. To edit gradients, "
    "accumulate them inside no_sync() and edit them before step(); to set new ones, call zero_grad() first."
)


@dataclass
class _ReducedGrad:
    grad_ref: ReferenceType[torch.Tensor]
    version: int
    accumulation_count: int
    is_pending: bool = True
    """No step has used it yet, and it was not cleared."""


class GradVersions:
    """What was sent as it is, by parameter; to notice what else is in `param.grad` by now."""

    def __init__(self) -> None:
        self._reduced: dict[int, _ReducedGrad] = {}
        self._accumulation_count = 0
        self.is_scaled = False
        """The average was clipped or unscaled, and must not be made again from gradients that were not."""

    def record(self, index: int, grad: torch.Tensor | None) -> None:
        if grad is None:
            self._reduced.pop(index, None)
        else:
            self._reduced[index] = _ReducedGrad(ref(grad), _tensor_version(grad), self._accumulation_count)

    def __contains__(self, index: int) -> bool:
        return index in self._reduced

    def mark_scaled(self, params: Sequence[torch.Tensor]) -> None:
        """The average is clipped or unscaled. It is made of gradients that are still in `param.grad`."""
        self._reduced = {index: sent for index, sent in self._reduced.items() if params[index].grad is not None}
        self.is_scaled = True

    def clear(self) -> None:
        self._reduced.clear()

    def split_cleared(
        self, params: Sequence[torch.Tensor], written_by_backward: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        """Parameters whose gradients were cleared, or set for another step, since they were sent; and the others.

        What a backward pass has made since may be zero by chance, and so is left out.
        """
        cleared: list[int] = []
        others: list[int] = []
        for index, sent in self._reduced.items():
            grad = params[index].grad
            if grad is None:
                cleared.append(index)
            elif not self.is_changed(index, grad):
                others.append(index)
            elif not written_by_backward[index] and not self._may_share_version(sent, grad):
                (cleared if not sent.is_pending or _is_all_zero(grad) else others).append(index)
        return cleared, others

    def _may_share_version(self, reduced: _ReducedGrad, grad: torch.Tensor) -> bool:
        """Hazard: views of one DDP bucket share a version, so that adding to one gradient changes its neighbors."""
        return grad._is_view() and reduced.accumulation_count != self._accumulation_count

    def mark_accumulation(self) -> None:
        """A backward pass adds to some gradients."""
        self._accumulation_count += 1

    def mark_zeroed(self, params: Sequence[torch.Tensor]) -> None:
        """All are zeros, as is their average."""
        for index in list(self._reduced):
            self.record(index, params[index].grad)
        self.mark_stepped()

    def mark_stepped(self) -> None:
        """What is written from now on is a gradient for another step."""
        for sent in self._reduced.values():
            sent.is_pending = False

    def is_changed(self, index: int, grad: torch.Tensor) -> bool:
        """Another one has taken its place, or it was written to."""
        sent = self._reduced.get(index)
        return sent is not None and (sent.grad_ref() is not grad or sent.version != _tensor_version(grad))

    def find_late_edit(self, params: Sequence[torch.Tensor], written_by_backward: Sequence[int]) -> int | None:
        """The first that somebody has changed between its reduction and the step, unless a backward pass has."""
        grads = ((index, params[index].grad) for index in self._reduced if not written_by_backward[index])
        return next((index for index, grad in grads if grad is not None and self._is_late_edit(index, grad)), None)

    def _is_late_edit(self, index: int, grad: torch.Tensor) -> bool:
        if not self.is_changed(index, grad):
            return False
        sent = self._reduced[index]
        if self.is_scaled:
            return True
        if not sent.is_pending:
            return False  # a gradient of the user's own, which is sent
        return not self._may_share_version(sent, grad) and not _is_all_zero(grad)


def _is_all_zero(grad: torch.Tensor) -> bool:
    """As `model.zero_grad(set_to_none=False)` leaves it."""
    values = grad._values() if grad.layout == torch.sparse_coo else grad
    return not values.detach().count_nonzero()


def _tensor_version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
