"""Gradients that have travelled and stay in `param.grad`, where anybody may write to them afterwards."""

from collections.abc import Sequence
from typing import NamedTuple
from weakref import ReferenceType, ref

import torch

CHANGED_AFTER_SCALING = (
    "was changed in param.grad after the average had been clipped or unscaled, which averaging anew would undo. "
    "Change it before clip_grad_norm_(), clip_grad_value_() or unscale_(), or call zero_grad() first."
)


class _Sent(NamedTuple):
    grad: ReferenceType[torch.Tensor]
    version: int


class SentGrads:
    """What has travelled as it is, by parameter; to notice what else is in `param.grad` by now."""

    def __init__(self) -> None:
        self._sent: dict[int, _Sent] = {}
        self.scaled = False
        """The average was clipped or unscaled, and must not be made again from gradients that were not."""

    def note(self, index: int, grad: torch.Tensor | None) -> None:
        if grad is None:
            self._sent.pop(index, None)
        else:
            self._sent[index] = _Sent(ref(grad), _version(grad))

    def __contains__(self, index: int) -> bool:
        return index in self._sent

    def note_zeros(self, params: Sequence[torch.Tensor]) -> None:
        """All are zeros, as is their average."""
        for index in list(self._sent):
            self.note(index, params[index].grad)

    def is_changed(self, index: int, grad: torch.Tensor) -> bool:
        """Another one has taken its place, or it was written to."""
        sent = self._sent.get(index)
        return sent is not None and (sent.grad() is not grad or sent.version != _version(grad))

    def changed_after_scaling(self, params: Sequence[torch.Tensor], by_backward: Sequence[int]) -> int | None:
        """The first that somebody has changed too late, unless a backward pass has."""
        grads = ((i, params[i].grad) for i in self._sent if not by_backward[i]) if self.scaled else ()
        return next((i for i, grad in grads if grad is not None and self.is_changed(i, grad)), None)


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
