"""Whole parameters: each is updated by the one rank that owns it, with the gradient that lies in `param.grad`."""

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
    """The inner optimizer holds the user's own parameters, those that this rank owns."""

    inner: LocalOptimizer
    param_sync: ParamBroadcast

    def __init__(self, comm: Comm, spec: OptimizerSpec, param_store: ParamStore) -> None:
        super().__init__(comm, param_store)
        self._spec = spec
        self.param_sync = ParamBroadcast(comm)
        self._pending_broadcast = b""

    def prepare(self, layout: Layout, groups: Sequence[ParamGroup]) -> None:
        params = [param for group in groups for param in group["params"]]
        new = layout.params_owned_by(self.comm.group.rank, first_bucket=len(self.layout.buckets))
        owned = {id(params[index]) for index in new}
        known = len(self._group_params)
        if not known:
            self.inner = self._spec.factory.build(owned)
        else:
            self.inner.add_groups(groups[:known], groups[known:], owned)

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
        # A look at the state of another rank's parameter leaves an empty entry in a defaultdict: not ours to send.
        mine = self.owned_params(self.comm.group.rank)
        return [StateShard(index, None, (), state[param]) for index, param in mine.items() if param in state]

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
            return allocate_full(present, shape, dtype, param.device)

        return allocate

    def load_state(self, saved: SavedState, *, assign: bool = False) -> Callable[[], None]:
        owned: list[list[int]] = [[] for _ in self.inner.optimizer.param_groups]
        for index in self._owned_indices:
            owned[self.layout.params[index].group].append(index)
        local = rebuild_subclass_state(extract_local_state_dict(saved, owned), self._spec.factory, self.inner.optimizer)
        return load_state(self.inner.optimizer, local, caller_tensors=None if assign else saved.tensor_containers)

    def shard_tensor(self, index: int) -> ShardTensor:
        param = self.params[index].detach()
        if self.layout.owner_of(index) != self.comm.group.rank:
            return make_empty_shard(param)
        memory = param.as_strided((storage_numel(param.shape, param.stride()),), (1,))
        return ShardTensor(memory, param.shape, param.stride(), 0)

    def wait_until_idle(self) -> None:
        self.param_sync.finish()
        self.param_store.rebind_if_moved()

    def bytes_to_send(self) -> tuple[int | None, int]:
        own = (self.params[index].nbytes for index in self._owned_indices if self.layout.params[index].trainable)
        return None, (self.comm.group.size - 1) * sum(own)

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
        before = [dict(group) for group in groups]
        attempt = StepOutcome()
        attempt.check(lambda: self.check_groups(groups))
        attempt.check(self.param_store.rebind_if_moved)
        watch = _UpdatedParams(
            self.params,
            self._owned_indices,
            self.grad_check,
            has_grads=closure is None,
            updates_all=self._spec.traits.updates_without_grads,
        )
        shared = None if closure is None else CollectiveClosure(self.comm, call, closure, watch.record_grads)
        if not attempt.error:
            attempt.run(lambda: self._precompute_closure(shared))
        attempt.raise_if_closure_failed(shared)
        if self.should_skip(self._owned_grad_samples, attempt.error):
            return None
        if not attempt.error:
            used = attempt.result
            attempt.run(lambda: self._step_inner(groups, used, kwargs))
            attempt.raise_if_closure_failed(shared)
            attempt.check(lambda: self.param_store.rebind_if_moved(self._owned_indices))
        self._broadcast_updates(call, attempt, watch, before)
        return attempt.result

    def _step_inner(self, groups: Sequence[ParamGroup], closure: Closure | None, kwargs: dict[str, Any]) -> Any:
        with self.comm.profiler.phase(Phase.INNER_STEP, self._spec.name):
            return super()._step_inner(groups, closure, kwargs)

    def _owned_grad_samples(self) -> Iterator[GradSample]:
        for index, param in self.owned_params(self.comm.group.rank).items():
            if param.grad is not None:
                yield GradSample.from_grad(index, param.grad)

    def update_params(self, groups: Sequence[ParamGroup], grads: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Update some of this rank's parameters with the given gradients, and tell no one.

        Any number of such updates make one step: each starts from the groups as they were before it.
        """
        self.inner.push_options(groups)
        kept = {param: param.grad for param in grads}
        try:
            for param, grad in grads.items():
                param.grad = grad
            step = self.comm.profiler.phase(Phase.INNER_STEP, self._spec.name)
            with step, self.inner.restrict_to({id(param) for param in grads}):
                self.inner.step()
            self.param_store.rebind_if_moved(self._owned_indices)
        finally:
            for param, before in kept.items():
                param.grad = before

    def local_step(self, groups: Sequence[ParamGroup], closure: Closure | None, kwargs: dict[str, Any]) -> Any:
        """Update this rank's parameters with the gradients in `param.grad`, and tell no one."""
        self.check_groups(groups)
        self.param_store.rebind_if_moved()
        result = self._step_inner(groups, closure, kwargs)
        self.param_store.rebind_if_moved(self._owned_indices)
        return result

    def broadcast_bucket(self, bucket: int) -> None:
        """Start bringing the parameters of one bucket to everyone; `sync.finish` ends it."""
        if self.comm.group.size > 1:
            self.param_sync.start(self.param_store.plan_bucket_broadcast(bucket))

    def _broadcast_updates(
        self, call: str, outcome: StepOutcome, updated_params: "_UpdatedParams", groups_before: Sequence[ParamGroup]
    ) -> None:
        """`groups`: as they were before the step."""
        # What an earlier step could not deliver goes along. Whatever follows, nothing of it is forgotten.
        moving = self._pending_broadcast = _merge_masks(updated_params.mask(), self._pending_broadcast)
        outcome.check(lambda: self.param_store.plan_broadcast(moving))
        options = self._encode_options(groups_before)
        verdict = exchange_status(
            self.comm, call, moving, outcome.failure, options=options, measure=updated_params.grad_projection
        )
        self._require_same_options(call, verdict, groups_before)
        first = verdict
        self.steps += 1
        if verdict.failure_level < Failure.CANNOT_CONTINUE and not verdict.has_same_plan:
            # Which gradients there are differs from rank to rank: the owners decide.
            mine = set(self._owned_indices)
            moving = self.comm.all_reduce_any(bytes(flag and i in mine for i, flag in enumerate(moving)))
            outcome.check(lambda: self.param_store.plan_broadcast(moving))
            verdict = exchange_status(self.comm, call, moving, outcome.failure)
        if verdict.failure_level < Failure.CANNOT_CONTINUE:
            with self.comm.group.failure_detector.abort_on_error():
                self.param_sync.start(self.param_store.plan_broadcast(moving))
                self.param_sync.finish()
            self._pending_broadcast = b""
        if verdict.failure_level:
            raise_failure(self.comm, call, outcome.error, consequence=PARTIAL_UPDATE)
        self.grad_check.warn_on_mismatch(first)  # at the end: a warning may be an error


class _UpdatedParams:
    """Which parameters a step moves: those with a gradient, and those that this rank changes without one."""

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        owned_indices: Sequence[int],
        grad_check: GradConsistencyCheck,
        *,
        has_grads: bool,
        updates_all: bool,
    ) -> None:
        """`grads_are_there`: else a closure makes them, and `note_grads` must follow it."""
        self._params, self._grad_check = params, grad_check
        self._updates_all = updates_all
        self.grad_projection: int | None = None
        """The number that ranks compare to see whether their gradients differ."""
        self._mask = bytearray(b"\1" * len(params)) if updates_all else bytearray(len(params))
        if has_grads:
            self.record_grads()
        self._versions = {i: params[i]._version for i in owned_indices if not self._mask[i]}

    def record_grads(self) -> None:
        # Hazard: some optimizers clear gradients in their step, so they are looked at before it.
        flags = bytes([param.grad is not None for param in self._params])
        self._mask = bytearray(_merge_masks(flags, bytes(self._mask)) if any(self._mask) else flags)
        # Where everything moves, flags do not say whether ranks have gradients of the same parameters.
        self.grad_projection = None if self._updates_all else self._grad_check.compute_fingerprint(self._params)

    def mask(self) -> bytes:
        for index, before in self._versions.items():
            self._mask[index] |= self._params[index]._version != before
        return bytes(self._mask)


def _merge_masks(mask: bytes, other: bytes) -> bytes:
    return bytes(a | b for a, b in zip_longest(mask, other, fillvalue=0)) if other else mask
