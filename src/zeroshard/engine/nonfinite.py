"""Gradients that are not finite: found on one rank, known to all, and treated alike."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ..comm.consensus import Failure, exchange_status, raise_failure
from ..comm.collectives import Comm
from ..errors import NonFiniteError
from ..layout.layout import Layout
from .._logging import warn_at_caller
from ..policies import NonFiniteGrads

_MAX_NON_FINITE_SHOWN = 5


@dataclass(frozen=True)
class NonFiniteSteps:
    """Steps with gradients that were not all finite; the same on all ranks."""

    detected: int = 0
    skipped: int = 0
    """How many of these were left out."""
    consecutive: int = 0
    """How many there were since the last step with finite gradients."""
    last_step: int | None = None
    """The latest: `step()` calls are counted from 1, without those that a GradScaler left out."""


class GradSample(NamedTuple):
    """Gradients that this rank has, in one tensor, and how to tell them apart: by parameter."""

    tensor: torch.Tensor
    split_by_param: Callable[[], Iterable[tuple[int, torch.Tensor]]]

    @staticmethod
    def from_grad(param: int, grad: torch.Tensor) -> "GradSample":
        return GradSample(grad, lambda: [(param, grad)])


class NonFiniteCheck:
    """Looks at the gradients of every step before it is made. Called on all ranks."""

    def __init__(self, comm: Comm, policy: NonFiniteGrads) -> None:
        self._comm, self._policy, self._step_count = comm, policy, 0
        self.counts = NonFiniteSteps()

    def should_skip(
        self, layout: Layout, grad_samples: Callable[[], Iterable[GradSample]], prior_error: Exception | None = None
    ) -> bool:
        """Whether the step is to be left out. Raises on all ranks alike, `failure` too: what this one has met with.

        `look`: what this rank has of the gradients that all ranks share.
        """
        self._step_count += 1
        spoiled: list[int] = []
        try:
            spoiled = [] if prior_error is not None else _find_non_finite(list(grad_samples()))
        except Exception as error:
            prior_error = error
        trouble = Failure.NONE if prior_error is None else Failure.FAILED
        call = f"looking at the gradients of step {self._step_count}"
        verdict = exchange_status(self._comm, call, bytes([bool(spoiled)]), trouble)
        if verdict.failure_level:
            raise_failure(self._comm, call, prior_error)
        if not spoiled and verdict.has_same_plan:
            self.counts = replace(self.counts, consecutive=0)
            return False
        return self._apply_policy(layout, set(spoiled))

    def _apply_policy(self, layout: Layout, local_params: set[int]) -> bool:
        flags = bytes(index in local_params for index in range(len(layout.params)))
        union = flags if self._comm.is_single_rank else self._comm.data_parallel.all_reduce_any(flags)
        policy, counts = self._policy, self.counts
        skips = policy.action == "skip"
        self.counts = NonFiniteSteps(
            counts.detected + 1, counts.skipped + skips, counts.consecutive + 1, self._step_count
        )
        names = [layout.params[index].label for index, flag in enumerate(union) if flag]
        what = f"step {self._step_count}: gradients of {_format_param_names(names)} are not finite."
        if policy.action == "raise":
            raise NonFiniteError(f"{what} Nothing was updated. {_NON_FINITE_ADVICE}")
        if policy.max_consecutive is not None and self.counts.consecutive >= policy.max_consecutive:
            raise NonFiniteError(
                f"{what} That is the case for {self.counts.consecutive} steps in a row, and {policy} allows less. "
                f"Nothing was updated. {_NON_FINITE_ADVICE}"
            )
        if self.counts.detected.bit_count() == 1:
            done = "The step is left out" if skips else "The step is made with them"
            warn_at_caller(
                f"{what} {done}, as {policy} says; {_format_count(self.counts.detected)} so far.", RuntimeWarning
            )
        return skips


_NON_FINITE_ADVICE = "Look at the loss and the inputs of this step; a lower learning rate, or clipping, may help."


def _format_param_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NON_FINITE_SHOWN} more" if len(names) > _MAX_NON_FINITE_SHOWN else ""
    return ", ".join(names[:_MAX_NON_FINITE_SHOWN]) + more


def _format_count(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _find_non_finite(samples: Sequence[GradSample]) -> list[int]:
    """Parameters whose gradients here are not all finite."""
    suspects = [lot for lot, fine in zip(samples, _are_finite([it.tensor for it in samples]), strict=True) if not fine]
    # Between its members a lot may hold anything, such as old gradients of parameters that have none now.
    members = [member for lot in suspects for member in lot.split_by_param()]
    fine = _are_finite([grad for _, grad in members])
    return [index for (index, _), flag in zip(members, fine, strict=True) if not flag]


@torch.no_grad()
def _are_finite(tensors: Sequence[torch.Tensor]) -> list[bool]:
    """For each of them; the host waits once for each dtype and device."""
    flags = [True] * len(tensors)
    kinds: dict[tuple[torch.dtype, torch.device], dict[int, torch.Tensor]] = {}
    for place, tensor in enumerate(tensors):
        values = _real_values(tensor)
        if values.numel():
            # The least and the largest are exact, made in one pass, and NaN if there is one.
            kinds.setdefault((values.dtype, values.device), {})[place] = torch.stack(torch.aminmax(values))
    for ends in kinds.values():
        for place, flag in zip(ends, torch.stack(list(ends.values())).isfinite().all(1).tolist(), strict=True):
            flags[place] = flag
    return flags


def _real_values(grad: torch.Tensor) -> torch.Tensor:
    """What a gradient consists of, as real numbers."""
    if grad.layout == torch.sparse_coo:
        grad = grad.coalesce().values()
    elif grad.layout != torch.strided:
        grad = grad.values()
    return torch.view_as_real(grad) if grad.is_complex() else grad
