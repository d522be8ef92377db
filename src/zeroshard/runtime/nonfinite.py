"""Gradients that are not finite: found on one rank, known to all, and treated alike."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ..comm.agreement import Trouble, compare, raise_failure
from ..comm.collectives import Comm
from ..errors import NonFiniteError
from ..layout.layout import Layout
from ..notices import warn_user
from ..policies import NonFinite

_MOST_SHOWN = 5


@dataclass(frozen=True)
class NonFiniteSteps:
    """Steps with gradients that were not all finite; the same on all ranks."""

    found: int = 0
    skipped: int = 0
    """How many of these were left out."""
    in_a_row: int = 0
    """How many there were since the last step with finite gradients."""
    last: int | None = None
    """The latest: `step()` calls are counted from 1, without those that a GradScaler left out."""


class Lot(NamedTuple):
    """Gradients that this rank has, in one tensor, and how to tell them apart: by parameter."""

    whole: torch.Tensor
    members: Callable[[], Iterable[tuple[int, torch.Tensor]]]

    @staticmethod
    def of(param: int, grad: torch.Tensor) -> "Lot":
        return Lot(grad, lambda: [(param, grad)])


class NonFiniteGuard:
    """Looks at the gradients of every step before it is made. Called on all ranks."""

    def __init__(self, comm: Comm, policy: NonFinite) -> None:
        self._comm, self._policy, self._steps = comm, policy, 0
        self.counts = NonFiniteSteps()

    def leaves_out(self, layout: Layout, look: Callable[[], Iterable[Lot]], failure: Exception | None = None) -> bool:
        """Whether the step is to be left out. Raises on all ranks alike, `failure` too: what this one has met with.

        `look`: what this rank has of the gradients that all ranks share.
        """
        self._steps += 1
        spoiled: list[int] = []
        try:
            spoiled = [] if failure is not None else _spoiled(list(look()))
        except Exception as error:
            failure = error
        trouble = Trouble.NONE if failure is None else Trouble.FAILED
        call = f"looking at the gradients of step {self._steps}"
        verdict = compare(self._comm, call, bytes([bool(spoiled)]), trouble)
        if verdict.trouble:
            raise_failure(self._comm, call, failure)
        if not spoiled and verdict.same_plan:
            self.counts = replace(self.counts, in_a_row=0)
            return False
        return self._decide(layout, set(spoiled))

    def _decide(self, layout: Layout, mine: set[int]) -> bool:
        flags = bytes(index in mine for index in range(len(layout.params)))
        union = flags if self._comm.is_alone else self._comm.everyone.union(flags)
        policy, counts = self._policy, self.counts
        skips = policy.then == "skip"
        self.counts = NonFiniteSteps(counts.found + 1, counts.skipped + skips, counts.in_a_row + 1, self._steps)
        names = [layout.params[index].label for index, flag in enumerate(union) if flag]
        what = f"step {self._steps}: gradients of {_few(names)} are not finite."
        if policy.then == "raise":
            raise NonFiniteError(f"{what} Nothing was updated. {_ADVICE}")
        if policy.most is not None and self.counts.in_a_row >= policy.most:
            raise NonFiniteError(
                f"{what} That is the case for {self.counts.in_a_row} steps in a row, and {policy} allows less. Nothing "
                f"was updated. {_ADVICE}"
            )
        if self.counts.found.bit_count() == 1:
            done = "The step is left out" if skips else "The step is made with them"
            warn_user(f"{what} {done}, as {policy} says; {_times(self.counts.found)} so far.", RuntimeWarning)
        return skips


_ADVICE = "Look at the loss and the inputs of this step; a lower learning rate, or clipping, may help."


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else ""
    return ", ".join(names[:_MOST_SHOWN]) + more


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _spoiled(lots: Sequence[Lot]) -> list[int]:
    """Parameters whose gradients here are not all finite."""
    suspects = [lot for lot, fine in zip(lots, _are_finite([it.whole for it in lots]), strict=True) if not fine]
    # Between its members a lot may hold anything, such as old gradients of parameters that have none now.
    members = [member for lot in suspects for member in lot.members()]
    fine = _are_finite([grad for _, grad in members])
    return [index for (index, _), flag in zip(members, fine, strict=True) if not flag]


@torch.no_grad()
def _are_finite(tensors: Sequence[torch.Tensor]) -> list[bool]:
    """For each of them; the host waits once for each dtype and device."""
    flags = [True] * len(tensors)
    kinds: dict[tuple[torch.dtype, torch.device], dict[int, torch.Tensor]] = {}
    for place, tensor in enumerate(tensors):
        values = _numbers(tensor)
        if values.numel():
            # The least and the largest are exact, made in one pass, and NaN if there is one.
            kinds.setdefault((values.dtype, values.device), {})[place] = torch.stack(torch.aminmax(values))
    for ends in kinds.values():
        for place, flag in zip(ends, torch.stack(list(ends.values())).isfinite().all(1).tolist(), strict=True):
            flags[place] = flag
    return flags


def _numbers(grad: torch.Tensor) -> torch.Tensor:
    """What a gradient consists of, as real numbers."""
    if grad.layout == torch.sparse_coo:
        grad = grad.coalesce().values()
    elif grad.layout != torch.strided:
        grad = grad.values()
    return torch.view_as_real(grad) if grad.is_complex() else grad
