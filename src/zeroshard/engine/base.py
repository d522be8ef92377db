"""The engine: this rank's part of the optimizer, and its one step.

What differs between the drop-in and `shard` is in four collaborators that `build.py` chooses. The store owns the inner
optimizer, and `OptimizerState` is its view for checkpoints::

                     whole parameters, in place          flat buckets
                     (the drop-in's default)             (`shard`, and the drop-in with FlatShards())
    GradSource       ParamGrads: `param.grad`            LocalGrads | GradReducer: gradient shards
    ParamStore       WholeParamStore                     FlatShardStore, with or without master weights
    ParamSync        ParamBroadcast                      ParamAllGather
    InnerOptimizer   one class                           one or several classes, perhaps offloaded

The overlap hooks (ddp.py) do not go through `Engine.step`: they update bucket by bucket inside DDP's backward pass.
tests/unit/test_architecture.py lists what checkpoints, reports and peer checkpoints may use of the engine.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..comm.collectives import Comm
from ..comm.consensus import (
    Status,
    exchange_status,
    raise_failure,
    raise_first_mismatch,
    rollback_on_error,
)
from ..layout.layout import Layout
from ..profiling import Phase, StepProfiler
from ..state.state_dict import describe_groups
from .checks import GradConsistencyCheck, ReplicaGuard, StepChecks
from .grad_source import GradSource
from .inner import ParamGroup
from .param_store import OptimizerState, ParamStore
from .param_sync import ParamSync
from .step import PARTIAL_UPDATE, UPDATED_BY_OWNERS, Closure, CollectiveClosure, PrecomputedClosure, Step


class Engine:
    """Updates what this rank owns, agrees with the other ranks on the outcome, and brings updates to all ranks."""

    def __init__(
        self,
        comm: Comm,
        grads: GradSource,
        params: ParamStore,
        state: OptimizerState,
        param_sync: ParamSync,
        *,
        profiler: StepProfiler,
        checks: StepChecks,
        grad_consistency: GradConsistencyCheck,
        replica_guard: ReplicaGuard,
    ) -> None:
        self.comm, self.grads, self.params, self.state, self.param_sync = comm, grads, params, state, param_sync
        self.profiler, self._failure_detector = profiler, comm.group.failure_detector
        self.checks, self.grad_consistency, self._replica_guard = checks, grad_consistency, replica_guard
        self.steps = 0
        """Steps that sent updates. Includes steps that failed on a rank, and excludes skipped ones."""

    @property
    def layout(self) -> Layout:
        return self.params.layout

    # ---- changes after construction

    def extend(self, layout: Layout, groups: Sequence[ParamGroup]) -> None:
        """Commit new groups and buckets, after `ParamStore.prepare` succeeded on all ranks. `groups` are all groups."""
        self.params.extend(layout, groups)
        self.grads.extend(layout, self.params.tensors)

    def set_grad_source(self, grads: GradSource) -> None:
        """Take gradients from `grads` from now on, for `ddp_hook()`."""
        grads.extend(self.layout, self.params.tensors)
        self.grads = grads

    # ---- the step

    def step(
        self, groups: Sequence[ParamGroup], closure: Closure | None, kwargs: dict[str, Any], *, in_join: bool = False
    ) -> Any:
        """Make one step. Call on all ranks; an error on one rank is raised on all ranks.

        If the update itself fails on a rank, the other ranks have already updated their own shards. These are still
        sent to all ranks, unless parameters cannot be sent.

        Args:
            groups: The user's groups.
            closure: Passed to the inner optimizer, as are `kwargs`.
            kwargs: Further arguments of the inner optimizer's step.
            in_join: The step is made inside `Join`, so some ranks may be out of inputs.
        """
        groups_before = [dict(group) for group in groups]
        call = f"step {self.steps + 1}"
        step = self._make_step(call, groups, groups_before, has_closure=closure is not None, in_join=in_join)
        try:
            if self.param_sync.can_step_alone:
                return self._step_alone(step, closure, kwargs)
            return self._step(step, closure, kwargs)
        except BaseException:
            if not step.was_applied:
                # Otherwise step counts in the groups would differ between ranks that succeeded and ranks that failed.
                for group, options in zip(groups, groups_before, strict=True):
                    group.clear()
                    group.update(options)
            raise
        finally:
            self.grads.mark_stepped(was_applied=step.was_applied)
            self._failure_detector.set_idle(self.steps)

    def _step(self, step: Step, closure: Closure | None, kwargs: dict[str, Any]) -> Any:
        # Ranks compare options and gradients once per step. If they reduce gradients, or have flat shards of them, they
        # do so before the update (`_agree`). Otherwise the status message at the end of the step carries both.
        compares_at_end = not self.grads.agrees_before_update
        if compares_at_end:
            self._check_params(step)
        is_skipped = self._update(step, kwargs) if closure is None else self._update_with_closure(step, closure, kwargs)
        if is_skipped:
            return None
        step.outcome.run_always(lambda: self.params.finish_update(step))
        options = self.params.groups.encode_options(step.groups_before) if compares_at_end else b""
        status = self.param_sync.finish_step(step, options, self.count_step)
        if status.failure_level:
            self._replica_guard.mark_diverged(step.call)
            raise_failure(self.comm, step.call, step.outcome.error, consequence=PARTIAL_UPDATE)
        step.was_applied = True
        self._require_same_options(step.call, status, step.groups_before, consequence=UPDATED_BY_OWNERS)
        # Last, since warnings may be errors.
        self.grad_consistency.warn_on_mismatch(step.grad_status or status, step.update_mask)
        return step.outcome.result

    def _update(self, step: Step, kwargs: dict[str, Any]) -> bool:
        """Update what this rank owns; return whether the step is skipped instead. Errors go to `step.outcome`."""
        self._complete_grads(step)
        self.params.start_update(step)
        if self._checks_skip_step(step):
            return True
        step.outcome.run(lambda: self.params.assign_grads(step, self.grads))
        step.outcome.run(lambda: self.params.inner.run(step.groups, None, kwargs))
        return False

    def _update_with_closure(self, step: Step, closure: Closure, kwargs: dict[str, Any]) -> bool:
        """Like `_update`, for an optimizer that calls a closure: each call completes and assigns gradients.

        A closure that fails on one rank raises on all ranks. If it was the first call, nothing has been updated.
        """
        collective_closure = self._make_collective(step, closure)
        inner_closure: Closure = collective_closure
        self.params.start_update(step)
        if not self.grads.agrees_before_update and not step.in_join:
            self._raise_if_any_rank_failed(step)
        elif step.outcome.error is not None:
            # Ranks without inputs wait for a message of the first call. It raises on all ranks.
            collective_closure()
        if self.checks.should_check_grads:
            inner_closure = precomputed_closure = PrecomputedClosure(collective_closure)
            step.outcome.run(precomputed_closure.evaluate)
            self._raise_if_closure_failed(step, collective_closure)
        if self._checks_skip_step(step):
            return True
        step.outcome.run(lambda: self.params.inner.run(step.groups, inner_closure, kwargs))
        self._raise_if_closure_failed(step, collective_closure)
        return False

    def _raise_if_any_rank_failed(self, step: Step) -> None:
        """Raise on all ranks before the closure is called, if parameters cannot be updated on one."""
        call, outcome = f"the start of {step.call} with a closure", step.outcome
        if exchange_status(self.comm, call, b"", outcome.failure).failure_level:
            raise_failure(self.comm, step.call, outcome.error)

    def _raise_if_closure_failed(self, step: Step, closure: CollectiveClosure) -> None:
        """Raise on all ranks if the last call of the closure has failed: all ranks know of it."""
        if closure.has_failed and step.outcome.error is not None:
            if closure.num_calls > 1:
                step.outcome.run_always(lambda: self.params.finish_update(step))
                self.param_sync.sync_after_failed_closure(step)
            raise step.outcome.error

    def _step_alone(self, step: Step, closure: Closure | None, kwargs: dict[str, Any]) -> Any:
        """Make the step of the inner optimizer: there is no other rank."""
        self.params.groups.check(step.groups)
        if closure is not None and self.checks.should_check_grads:
            closure = precomputed_closure = PrecomputedClosure(closure)
            precomputed_closure.evaluate()
        if self._checks_skip_step(step):
            return None
        self.count_step()
        result = self.params.inner.run(step.groups, closure, kwargs)
        step.was_applied = True
        return result

    def _make_step(
        self,
        call: str,
        groups: Sequence[ParamGroup],
        groups_before: Sequence[ParamGroup],
        *,
        has_closure: bool = False,
        in_join: bool = False,
    ) -> Step:
        no_params = bytes(len(self.params.tensors))
        return Step(
            call,
            groups,
            groups_before,
            has_closure=has_closure,
            in_join=in_join,
            grad_mask=no_params,
            update_mask=self.params.expand_to_updated(no_params),
        )

    def count_step(self) -> None:
        self.steps += 1

    def restore_step_count(self, steps: int) -> None:
        """Continue to count from `steps`, after state of that step was restored."""
        self.steps = steps

    def _make_collective(self, step: Step, closure: Closure) -> CollectiveClosure:
        return CollectiveClosure(
            self.comm,
            self.profiler,
            step,
            closure,
            complete_grads=partial(self._complete_grads, step),
            assign_grads=partial(self.params.assign_grads, step, self.grads)
            if self.grads.agrees_before_update
            else None,
            between_calls=partial(self.param_sync.sync_between_closures, step),
            reduces_grads=self.grads.reduces,
        )

    def _checks_skip_step(self, step: Step) -> bool:
        """Return whether a check of the gradients asks to skip the step. Call on all ranks; raises on all ranks."""
        get_samples = partial(self.params.grad_samples, step, self.grads)
        with rollback_on_error(self.params.clear_assigned_grads):
            is_skipped = self.checks.should_skip_step(self.layout, get_samples, step.outcome.error)
        if is_skipped:
            self.params.clear_assigned_grads()
        return is_skipped

    # ---- consensus

    def synchronize_grads(
        self, call: str, groups: Sequence[ParamGroup], describe_args: Callable[[], list[str]] = list
    ) -> None:
        """Complete gradients before they are clipped or unscaled, or before buckets change.

        Call on all ranks; raises on all ranks.

        Args:
            call: Name of the call in error messages.
            groups: The user's groups, whose options must be equal on all ranks.
            describe_args: Reads arguments of the call that must be equal on all ranks. It may raise.
        """
        step = self._make_step(call, groups, groups)
        self._complete_grads(step, describe_args)
        if step.grad_status is not None:
            self.grad_consistency.warn_on_mismatch(step.grad_status, step.update_mask)

    def _complete_grads(self, step: Step, describe_args: Callable[[], list[str]] = list) -> None:
        """Complete the gradients of a step, after all ranks have agreed on them if they do so before the update.

        Call on all ranks; raises on all ranks.
        """
        if self.grads.agrees_before_update:
            with self.profiler.phase(Phase.SYNC_GRADS):
                signatures_match = self._agree(step, describe_args)
                self.grads.complete(step, signatures_match=signatures_match)
        else:
            self.grads.complete(step, signatures_match=True)  # there is nothing to compare
        # A parameter updated after an earlier closure stays in the mask even if the next closure gives it no gradient:
        # the optimizer may restore it, and the other ranks must receive that.
        step.add_to_update_mask(self.params.expand_to_updated(step.grad_mask))

    def _agree(self, step: Step, describe_args: Callable[[], list[str]]) -> bool:
        """Reach consensus before the update. Return whether all ranks have gradients of the same parameters.

        Raises on all ranks if they are in different calls, have different options, or cannot update on some rank.
        """
        self.param_sync.finish()
        outcome, arguments = step.outcome, list[str]()
        outcome.run(lambda: arguments.extend(describe_args()))
        self._check_params(step)
        outcome.run_always(lambda: self._replica_guard.check_not_diverged(self.steps + 1))
        # Hazard: if only one rank has called `ddp_hook()`, it would synchronize with other messages than the rest.
        # The source in the name of the call makes all ranks raise instead.
        call_with_source = f"{step.call}, with {self.grads.name}"
        options = self.params.groups.encode_options(step.groups) + "\n".join(arguments).encode()
        measure = None if self.grads.reduces else self.grad_consistency.compute_projection(self.params.tensors)
        status = exchange_status(
            self.comm, call_with_source, self.grads.prepare(), outcome.failure, options=options, measure=measure
        )
        if status.failure_level:
            raise_failure(self.comm, step.call, outcome.error)
        self._require_same_options(step.call, status, step.groups, arguments)
        step.grad_status = status
        if self._replica_guard.needs_param_check:
            self.check_consistency(step.call, self.steps + 1)
            self._replica_guard.needs_param_check = False
        return status.has_same_payload

    def _check_params(self, step: Step) -> None:
        """Check, without communication, that parameters and groups can be updated. Errors go to `step.outcome`."""
        step.outcome.run_always(lambda: self.params.groups.check(step.groups))
        step.outcome.run_always(lambda: self.params.memory.rebind_if_moved(check_shapes=not self.grads.reduces))

    def _require_same_options(
        self,
        call: str,
        status: Status,
        groups: Sequence[ParamGroup],
        arguments: Sequence[str] = (),
        *,
        consequence: str = "",
    ) -> None:
        """Raise on all ranks if the last status exchange found different options."""
        if not status.has_same_options and not status.failure_level:
            raise_first_mismatch(self.comm, call, [*arguments, *describe_groups(groups)], consequence=consequence)

    def check_consistency(self, call: str, step: int | None = None) -> None:
        """Raise `ReplicaMismatchError` on all ranks if their parameters differ. Call on all ranks."""
        self.param_sync.finish()
        self.checks.check_consistency(self.layout, self.params.tensors, call, step)
