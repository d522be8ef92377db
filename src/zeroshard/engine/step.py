"""One step as data: what the engine and its collaborators know about it, and how closures and failures are shared.

A rank that fails keeps its error in `StepOutcome` until all ranks know of it, so that all ranks raise and none waits
for a message that is never sent.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch

from .._logging import log_rank
from ..comm.collectives import Comm
from ..comm.consensus import Failure, Status, exchange_status, raise_failure
from ..profiling import Phase, StepProfiler
from .inner import ParamGroup

PARTIAL_UPDATE = (
    "The step was applied only partially: parameters owned by other ranks were updated. Load a checkpoint to get a "
    "consistent state."
)
"""Appended to the error of a step that failed on some rank."""
UPDATED_BY_OWNERS = "The step was applied: each parameter was updated with its owner's options."
"""Appended to the error of a step whose options turned out to differ after the update."""
Closure = Callable[[], Any]


class StepOutcome:
    """The result or the error of this rank's part of a step."""

    def __init__(self) -> None:
        self.result: Any = None
        self.error: Exception | None = None
        self.failure = Failure.NONE

    def run(self, action: Callable[[], Any]) -> None:
        """Run a part of the step, unless an earlier one has failed. If it fails, parameters can still be sent."""
        if self.error is None:
            try:
                self.result = action()
            except Exception as error:
                self.error, self.failure = error, Failure.FAILED

    def run_always(self, action: Callable[[], object]) -> None:
        """Run what must be done before parameters are sent, even if an earlier part of the step has failed.

        If it fails, parameters cannot be sent.
        """
        try:
            action()
        except Exception as error:
            self.error, self.failure = self.error or error, Failure.CANNOT_SEND_PARAMS


@dataclass
class Step:
    """What this rank knows about a step, or about another call that synchronizes gradients."""

    call: str
    """Its name in error messages."""
    groups: Sequence[ParamGroup]
    """The user's groups."""
    groups_before: Sequence[ParamGroup]
    """Copies of the groups, from before the step."""
    has_closure: bool = False
    in_join: bool = False
    """The step is made inside `Join`, so some ranks may be out of inputs."""
    outcome: StepOutcome = field(default_factory=StepOutcome)
    grad_mask: bytes = b""
    """A flag per parameter: whether it has a gradient."""
    update_mask: bytes = b""
    """A flag per parameter: whether the step may have updated it."""
    grad_projection: int | None = None
    """A projection of the gradients, if they were not compared before the update; see `GradConsistencyCheck`."""
    grad_status: Status | None = None
    """The status of the exchange in which ranks compared the gradients in `param.grad`."""
    was_applied: bool = False
    """The update was made on all ranks."""

    def add_to_update_mask(self, mask: bytes) -> None:
        self.update_mask = merge_masks(mask, self.update_mask) if any(self.update_mask) else mask


def merge_masks(mask: bytes, other: bytes) -> bytes:
    """Return the flags that are set in either mask. `other` may be shorter."""
    return bytes(a | b for a, b in zip_longest(mask, other, fillvalue=0)) if other else mask


class CollectiveClosure:
    """Calls the user's closure, then completes the gradients that it has computed.

    A call returns on all ranks or raises on all ranks.
    """

    def __init__(
        self,
        comm: Comm,
        profiler: StepProfiler,
        step: Step,
        closure: Closure,
        *,
        complete_grads: Callable[[], object],
        assign_grads: Callable[[], object] | None,
        between_calls: Callable[[], object],
        reduces_grads: bool,
    ) -> None:
        """Wrap a closure.

        Args:
            comm: Collectives of the optimizer.
            profiler: Times the calls.
            step: The step that calls the closure.
            closure: The user's closure.
            complete_grads: Called on all ranks after the closure. Raises on all ranks, or leaves errors to `step`.
            assign_grads: Gives the gradients to the inner optimizers, if they need that. It may raise on one rank only.
            between_calls: Called on all ranks before every call but the first. Raises on all ranks.
            reduces_grads: The closure's backward pass sends gradients.
        """
        self._comm, self._profiler, self._step, self._closure = comm, profiler, step, closure
        self._complete_grads, self._assign_grads, self._between_calls = complete_grads, assign_grads, between_calls
        self._reduces_grads = reduces_grads
        self.num_calls = 0
        self.has_failed = False
        """The last call has raised, on all ranks."""

    def __call__(self) -> Any:
        """Call the closure, even if this rank has failed before: others may be in a collective of theirs."""
        self.num_calls += 1
        self.has_failed = True  # until this method returns
        if self.num_calls > 1:
            self._between_calls()
        call = f"closure {self.num_calls} of {self._step.call}"
        loss, error = None, self._step.outcome.error
        try:
            with self._profiler.phase(Phase.CLOSURE):
                loss = self._closure()
        except Exception as closure_error:
            # Hazard: other ranks may be inside a collective of their closure, where our status exchange never reaches
            # them. Log now.
            rank = self._comm.data_parallel.group.rank
            log_rank(logging.ERROR, rank, "the closure failed: %r", closure_error)
            error = error or closure_error
        is_failure = self._exchange_failure(call, error)
        if self._reduces_grads or not is_failure:
            # After a failure, too: ranks that had gradients by then have sent them, and the others must follow.
            self._complete_grads()
        if is_failure:
            raise_failure(self._comm, call, error)
        if self._assign_grads is not None:
            outcome = self._step.outcome
            outcome.run(self._assign_grads)
            if self._exchange_failure(f"the gradients of {call}", outcome.error):
                raise_failure(self._comm, call, outcome.error)
        self.has_failed = False
        return loss

    def _exchange_failure(self, call: str, error: Exception | None) -> bool:
        """Return whether any rank has an error. Call on all ranks."""
        failure = Failure.NONE if error is None else Failure.FAILED
        return exchange_status(self._comm, call, b"", failure).failure_level > Failure.NONE


class PrecomputedClosure:
    """A closure that `evaluate` calls before the optimizer does.

    The optimizer's first call returns the loss of `evaluate`. Later calls call the closure again.
    """

    def __init__(self, closure: Closure) -> None:
        self._closure, self._has_unused_loss = closure, False
        self._loss: Any = None

    def evaluate(self) -> None:
        with torch.enable_grad():
            self._loss = self._closure()
        self._has_unused_loss = True

    def __call__(self) -> Any:
        if not self._has_unused_loss:
            return self._closure()
        self._has_unused_loss = False
        return self._loss
