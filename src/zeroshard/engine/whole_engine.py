"""The engine for whole parameters: one rank owns each parameter, updates it and broadcasts it to all ranks.

The inner optimizer reads gradients from `param.grad`, where the user or DDP has averaged them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch.autograd.graph import increment_version

from ..comm.collectives import Comm
from ..comm.consensus import Failure, exchange_status, raise_failure
from ..layout.chunks import storage_numel
from ..layout.layout import Layout
from ..profiling import Phase
from ..state.shard_tensor import ShardTensor, make_empty_shard
from ..state.state_dict import SavedState, StateShard, extract_local_state_dict
from .base import PARTIAL_UPDATE, Closure, CollectiveClosure, Engine, StateAllocator, StepOutcome
from .checks import GradConsistencyCheck, GradSample
from .inner import LocalOptimizer, ParamGroup, load_state
from .optimizer_shard import OptimizerSpec
from .param_gather import ParamBroadcast
from .param_store import ParamStore
from .state import StateKeys, allocate_full, rebuild_subclass_state


class WholeParamEngine(Engine):
    """The inner optimizer holds the user's own parameters, namely those that this rank owns."""

    inner: LocalOptimizer
    param_sync: ParamBroadcast

    def __init__(self, comm: Comm, spec: OptimizerSpec, param_store: ParamStore) -> None:
        super().__init__(comm, param_store)
        self._spec = spec
        self.param_sync = ParamBroadcast(comm)
        self._pending_broadcast = b""
        """Mask of updated parameters that other ranks may not have received."""

    def prepare(self, layout: Layout, groups: Sequence[ParamGroup]) -> None:
        params = [param for group in groups for param in group["params"]]
        new_indices = layout.params_owned_by(self.comm.group.rank, first_bucket=len(self.layout.buckets))
        owned_ids = {id(params[index]) for index in new_indices}
        first_new = len(self._group_params)
        if not first_new:
            self.inner = self._spec.factory.build(owned_ids)
        else:
            self.inner.add_groups(groups[:first_new], groups[first_new:], owned_ids)

    def move_params(self, layout: Layout, groups: Sequence[ParamGroup]) -> None:
        self.param_store.prepare(layout, [param for group in groups for param in group["params"]])

    def rollback(self, first_group: int) -> None:
        self.inner.drop_groups(first_group)
        self.param_store.rollback()

    def state(self) -> dict[Any, Any]:
        return self.inner.optimizer.state

    def replace_state(self, state: Any) -> None:
        self.inner.optimizer.state = state

    def local_optimizer_of(self, index: int) -> LocalOptimizer:  # noqa: ARG002
        return self.inner

    def param_shaped_keys(self, index: int) -> frozenset[str]:  # noqa: ARG002
        return self._spec.traits.param_shaped_keys

    def state_shards(self) -> list[StateShard]:
        state = self.inner.optimizer.state
        # Reading the state of another rank's parameter leaves an empty entry in a defaultdict, which is not ours.
        owned = self.owned_params(self.comm.group.rank)
        return [StateShard(index, None, (), state[param]) for index, param in owned.items() if param in state]

    def state_allocator(
        self,
        state_keys: StateKeys,  # noqa: ARG002
        *,
        in_place: bool,
        param_shaped_keys: frozenset[Any],  # noqa: ARG002
    ) -> StateAllocator:
        state = self.inner.optimizer.state

        def allocate(index: int, key: Any, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            param = self.params[index]
            present = state[param].get(key) if in_place and param in state else None
            return allocate_full(present, shape, dtype, param.device, param=param)

        return allocate

    def load_state(self, saved: SavedState, *, assign: bool = False) -> Callable[[], None]:
        optimizer = self.inner.optimizer
        owned_by_group: list[list[int]] = [[] for _ in optimizer.param_groups]
        for index in self._owned_indices:
            owned_by_group[self.layout.params[index].group].append(index)
        local = rebuild_subclass_state(extract_local_state_dict(saved, owned_by_group), self._spec.factory, optimizer)
        return load_state(optimizer, local, caller_tensors=None if assign else saved.tensor_containers)

    def shard_tensor(self, index: int) -> ShardTensor:
        param = self.params[index].detach()
        if self.layout.owner_of(index) != self.comm.group.rank:
            return make_empty_shard(param)
        flat = param.as_strided((storage_numel(param.shape, param.stride()),), (1,))
        return ShardTensor(flat, param.shape, param.stride(), 0)

    def wait_until_idle(self) -> None:
        self.param_sync.finish()
        self.param_store.rebind_if_moved()

    def bytes_to_send(self) -> tuple[int | None, int]:
        nbytes = (self.params[index].nbytes for index in self._owned_indices if self.layout.params[index].trainable)
        return None, (self.comm.group.size - 1) * sum(nbytes)

    def broadcast_params(self) -> Callable[[], None]:
        if self.comm.group.size > 1:
            self.param_sync.start(self.param_store.plan_broadcast(b"\1" * len(self.params)))
        increment_version(self.params)
        return self.param_sync.finish

    def _step(self, groups: Sequence[ParamGroup], closure: Closure | None, kwargs: dict[str, Any]) -> Any:
        if self.comm.group.size == 1:
            self.check_groups(groups)
            closure = self._precompute_closure(closure)
            if self.should_skip(self._owned_grad_samples):
                return None
            self.steps += 1
            return self._step_inner(groups, closure, kwargs)
        call = f"step {self.steps + 1}"
        groups_before = [dict(group) for group in groups]
        outcome = StepOutcome()
        outcome.check(lambda: self.check_groups(groups))
        outcome.check(self.param_store.rebind_if_moved)
        updated_params = _UpdatedParams(
            self.params,
            self._owned_indices,
            self.grad_check,
            has_grads=closure is None,
            updates_all=self._spec.traits.updates_without_grads,
        )
        collective_closure = (
            None if closure is None else CollectiveClosure(self.comm, call, closure, updated_params.record_grads)
        )
        if not outcome.error:
            outcome.run(lambda: self._precompute_closure(collective_closure))
        outcome.raise_if_closure_failed(collective_closure)
        if self.should_skip(self._owned_grad_samples, outcome.error):
            return None
        if not outcome.error:
            inner_closure = outcome.result
            outcome.run(lambda: self._step_inner(groups, inner_closure, kwargs))
            outcome.raise_if_closure_failed(collective_closure)
            outcome.check(lambda: self.param_store.rebind_if_moved(self._owned_indices))
        self._broadcast_updates(call, outcome, updated_params, groups_before)
        return outcome.result

    def _step_inner(self, groups: Sequence[ParamGroup], closure: Closure | None, kwargs: dict[str, Any]) -> Any:
        with self.comm.profiler.phase(Phase.INNER_STEP, self._spec.name):
            return super()._step_inner(groups, closure, kwargs)

    def _owned_grad_samples(self) -> Iterator[GradSample]:
        for index, param in self.owned_params(self.comm.group.rank).items():
            if param.grad is not None:
                yield GradSample.from_grad(index, param.grad)

    def update_params(self, groups: Sequence[ParamGroup], grads: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Update some of this rank's parameters with the given gradients. Does not communicate.

        Several such updates make one step: each starts from the options in `groups`, which it does not change.
        """
        self.inner.push_options(groups)
        grads_before = {param: param.grad for param in grads}
        try:
            for param, grad in grads.items():
                param.grad = grad
            phase = self.comm.profiler.phase(Phase.INNER_STEP, self._spec.name)
            with phase, self.inner.restrict_to({id(param) for param in grads}):
                self.inner.step()
            self.param_store.rebind_if_moved(self._owned_indices)
        finally:
            for param, grad_before in grads_before.items():
                param.grad = grad_before

    def local_step(self, groups: Sequence[ParamGroup], closure: Closure | None, kwargs: dict[str, Any]) -> Any:
        """Update this rank's parameters with the gradients in `param.grad`. Does not communicate."""
        self.check_groups(groups)
        self.param_store.rebind_if_moved()
        result = self._step_inner(groups, closure, kwargs)
        self.param_store.rebind_if_moved(self._owned_indices)
        return result

    def broadcast_bucket(self, bucket: int) -> None:
        """Start broadcasting the parameters of one bucket; `param_sync.finish` waits for it. Call on all ranks."""
        if self.comm.group.size > 1:
            self.param_sync.start(self.param_store.plan_bucket_broadcast(bucket))

    def _broadcast_updates(
        self, call: str, outcome: StepOutcome, updated_params: "_UpdatedParams", groups_before: Sequence[ParamGroup]
    ) -> None:
        """Agree on the outcome of the step and broadcast updated parameters.

        `groups_before` are the groups before the step. Raises on all ranks if the step failed on one.
        """
        # Include what an earlier step could not deliver. The mask stays pending until it has been broadcast.
        mask = self._pending_broadcast = _merge_masks(updated_params.mask(), self._pending_broadcast)
        outcome.check(lambda: self.param_store.plan_broadcast(mask))
        options = self._encode_options(groups_before)
        first_status = status = exchange_status(
            self.comm, call, mask, outcome.failure, options=options, measure=updated_params.grad_projection
        )
        self._require_same_options(call, status, groups_before)
        self.steps += 1
        if status.failure_level < Failure.CANNOT_CONTINUE and not status.has_same_plan:
            # Ranks have gradients of different parameters: the owners decide which parameters are broadcast.
            owned = set(self._owned_indices)
            mask = self.comm.all_reduce_any(bytes(flag and index in owned for index, flag in enumerate(mask)))
            outcome.check(lambda: self.param_store.plan_broadcast(mask))
            status = exchange_status(self.comm, call, mask, outcome.failure)
        if status.failure_level < Failure.CANNOT_CONTINUE:
            with self.comm.group.failure_detector.abort_on_error():
                self.param_sync.start(self.param_store.plan_broadcast(mask))
                self.param_sync.finish()
            self._pending_broadcast = b""
        if status.failure_level:
            raise_failure(self.comm, call, outcome.error, consequence=PARTIAL_UPDATE)
        self.grad_check.warn_on_mismatch(first_status)  # last, because warnings may be configured to raise


class _UpdatedParams:
    """Tracks which parameters a step updates: those with a gradient, and those that this rank changes without one."""

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        owned_indices: Sequence[int],
        grad_check: GradConsistencyCheck,
        *,
        has_grads: bool,
        updates_all: bool,
    ) -> None:
        """Start tracking, before the step.

        Args:
            params: All parameters.
            owned_indices: Parameters that this rank owns.
            grad_check: Computes the fingerprint of the gradients.
            has_grads: Whether gradients exist already. Otherwise call `record_grads` after each closure call.
            updates_all: Whether the optimizer updates parameters without gradients too.
        """
        self._params, self._grad_check = params, grad_check
        self._updates_all = updates_all
        self.grad_projection: int | None = None
        """Fingerprint of the gradients, which ranks compare to see whether their gradients differ."""
        self._mask = bytearray(b"\1" * len(params)) if updates_all else bytearray(len(params))
        if has_grads:
            self.record_grads()
        self._versions = {index: params[index]._version for index in owned_indices if not self._mask[index]}

    def record_grads(self) -> None:
        """Add parameters with gradients to the mask. Call before the step or after a closure call."""
        # Hazard: some optimizers clear gradients in their step, so record them before it.
        grad_mask = bytes([param.grad is not None for param in self._params])
        self._mask = bytearray(_merge_masks(grad_mask, bytes(self._mask)) if any(self._mask) else grad_mask)
        # If every parameter is updated, the mask does not tell whether ranks have gradients of the same parameters.
        self.grad_projection = None if self._updates_all else self._grad_check.compute_fingerprint(self._params)

    def mask(self) -> bytes:
        """Return the mask after the step."""
        for index, version in self._versions.items():
            self._mask[index] |= self._params[index]._version != version
        return bytes(self._mask)


def _merge_masks(mask: bytes, other: bytes) -> bytes:
    return bytes(a | b for a, b in zip_longest(mask, other, fillvalue=0)) if other else mask
