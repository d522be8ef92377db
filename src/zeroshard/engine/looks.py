"""What is looked at before a step is made: are parameters the same on all ranks, are gradients finite?"""

from collections.abc import Callable, Iterable, Sequence

import torch

from ..comm.collectives import Comm
from ..profiling import Phase
from ..layout.layout import Layout
from ..policies import ConsistencyCheck, NonFiniteGrads
from .checks import check_params_equal
from .nonfinite import GradSample, NonFiniteCheck, NonFiniteSteps


class StepChecks:
    """Those that policies ask for, counted. On all ranks alike."""

    def __init__(
        self, comm: Comm, consistency: ConsistencyCheck | None = None, nonfinite: NonFiniteGrads | None = None
    ) -> None:
        self._comm, self._consistency = comm, consistency
        self._nonfinite_check = NonFiniteCheck(comm, nonfinite) if nonfinite else None
        self.num_consistency_checks = 0
        """How often parameters were compared."""

    @property
    def should_check_grads(self) -> bool:
        """Gradients are looked at, and must be there before the optimizer's code runs."""
        return self._nonfinite_check is not None

    @property
    def nonfinite(self) -> NonFiniteSteps:
        return NonFiniteSteps() if self._nonfinite_check is None else self._nonfinite_check.counts

    def is_consistency_check_due(self, step: int) -> bool:
        """Whether parameters are to be compared before this step."""
        return self._consistency is not None and step % self._consistency.every == 0

    def check_consistency(self, layout: Layout, params: Sequence[torch.Tensor], call: str, step: int | None) -> None:
        """Raise `ReplicaMismatchError` on all ranks if they have different parameters."""
        self.num_consistency_checks += 1
        with self._comm.profiler.phase(Phase.CHECK_CONSISTENCY):
            check_params_equal(self._comm, layout, params, call, step)

    def should_skip_step(
        self, layout: Layout, grad_samples: Callable[[], Iterable[GradSample]], prior_error: Exception | None
    ) -> bool:
        """Whether the step is not to be made, since gradients are not finite. Raises on all ranks alike."""
        if self._nonfinite_check is None:
            return False
        with self._comm.profiler.phase(Phase.CHECK_NONFINITE):
            return self._nonfinite_check.should_skip(layout, grad_samples, prior_error)
