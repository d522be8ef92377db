"""What is looked at before a step is made: are parameters the same on all ranks, are gradients finite?"""

from collections.abc import Callable, Iterable, Sequence

import torch

from ..comm.collectives import Comm
from ..labels import Label
from ..layout.layout import Layout
from ..policies import Drift, NonFinite
from .drift import require_equal_params
from .nonfinite import Lot, NonFiniteGuard, NonFiniteSteps


class Looks:
    """Those that policies ask for, counted. On all ranks alike."""

    def __init__(self, comm: Comm, drift: Drift | None = None, nonfinite: NonFinite | None = None) -> None:
        self._comm, self._drift = comm, drift
        self._guard = NonFiniteGuard(comm, nonfinite) if nonfinite else None
        self.for_drift = 0
        """How often parameters were compared."""

    @property
    def at_gradients(self) -> bool:
        """Gradients are looked at, and must be there before the optimizer's code runs."""
        return self._guard is not None

    @property
    def nonfinite(self) -> NonFiniteSteps:
        return NonFiniteSteps() if self._guard is None else self._guard.counts

    def are_due(self, step: int) -> bool:
        """Whether parameters are to be compared before this step."""
        return self._drift is not None and step % self._drift.every == 0

    def require_no_drift(self, layout: Layout, params: Sequence[torch.Tensor], call: str, step: int | None) -> None:
        """Raise `DriftError` on all ranks if they have different parameters."""
        self.for_drift += 1
        with self._comm.clock.part(Label.DRIFT):
            require_equal_params(self._comm, layout, params, call, step)

    def leave_out(self, layout: Layout, look: Callable[[], Iterable[Lot]], failure: Exception | None) -> bool:
        """Whether the step is not to be made, since gradients are not finite. Raises on all ranks alike."""
        if self._guard is None:
            return False
        with self._comm.clock.part(Label.NONFINITE):
            return self._guard.leaves_out(layout, look, failure)
