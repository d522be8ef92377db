"""The engine for flat shards: every rank updates its shard of every bucket, and all ranks all-gather the shards.

::

    gradients    reduce-scatter (during backward)  ->  gradient shard
    step         inner optimizers update flat params, views of this rank's shards or of their master weights
    parameters   updated shard  ->  all-gather into the flat param buffers of all ranks
"""

from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import ExitStack, suppress
from functools import partial
from itertools import chain, compress
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import increment_version

from .._types import Rank
from ..comm.collectives import Comm
from ..comm.consensus import exchange_status, raise_failure
from ..config import CPUOffload, MasterWeights
from ..errors import BindingError
from ..layout.layout import Bucket, Layout, ParamShard
from ..profiling import Phase
from ..state.shard_tensor import ShardTensor, make_empty_shard
from ..state.state_dict import MASTER_KEY, SavedState, StateShard
from .base import PARTIAL_UPDATE, Closure, CollectiveClosure, Engine, StateAllocator, StepOutcome
from .checks import GradSample, ReplicaGuard
from .flat_params import FlatParam, make_storage
from .grad_source import GradSource, LocalGrads
from .host_buffers import HostTransfers
from .inner import OPTIMIZER_KEY, CompositeOptimizer, InnerOptimizer, LocalOptimizer, ParamGroup
from .offload import OffloadPipeline
from .optimizer_shard import OptimizerShard, OptimizerSpec, OptimizerStateView, ParamStateView
from .param_gather import ParamAllGather
from .param_store import FlatParamBuffers
from .probe import init_state
from .state import StateKeys


class OptimizerSharding(NamedTuple):
    """An optimizer class, and whether its parameters may be split over ranks."""

    spec: OptimizerSpec
    splits_params: bool
    """Whether ranks may own a part of a parameter; otherwise every parameter belongs to one rank."""


class FlatShardEngine(Engine):
    """The inner optimizers hold flat params over this rank's shards."""

    param_store: FlatParamBuffers
    param_sync: ParamAllGather

    def __init__(
        self,
        comm: Comm,
        shardings: Sequence[OptimizerSharding],
        masters: MasterWeights | None,
        offload: CPUOffload | None = None,
    ) -> None:
        super().__init__(comm, FlatParamBuffers())
        rank, host_transfers = comm.group.rank, HostTransfers(offload) if offload else None
        self.storage = make_storage(rank, self.param_store, masters, host_transfers, comm.profiler)
        self._shard_index_of_group: dict[int, int] = {}
        self._offload_pipeline = (
            OffloadPipeline(host_transfers, self.storage, comm.profiler) if host_transfers else None
        )
        self.optimizer_shards = [
            OptimizerShard(rank, spec, self.storage, splits_params=splits_params) for spec, splits_params in shardings
        ]
        self.inner: InnerOptimizer = CompositeOptimizer(self.optimizer_shards, comm.profiler)
        self.grads: GradSource = LocalGrads(comm, masters)
        self.param_sync = ParamAllGather(comm)
        self._replica_guard = ReplicaGuard(comm)
        self.should_wait_for_params = True
        """Whether a step waits for all parameters; otherwise the modules that use them wait."""
        self._index_by_param_id: dict[int, int] = {}
        self.bucket_by_param_id: dict[int, int] = {}
        """The bucket of each parameter, by its id."""

    def prepare(self, layout: Layout, groups: Sequence[ParamGroup]) -> None:
        self.param_store.prepare(layout, [param for group in groups for param in group["params"]])
        self.storage.extend(layout)
        first_new = sum(len(shard.group_ids) for shard in self.optimizer_shards)
        is_only_one = len(self.optimizer_shards) == 1
        for shard in self.optimizer_shards:
            new_ids = [
                group_id
                for group_id, group in enumerate(groups)
                if group_id >= first_new and (is_only_one or group[OPTIMIZER_KEY] == shard.name)
            ]
            shard.prepare(layout, groups, [*shard.group_ids, *new_ids])
        self._shard_index_of_group = {
            group_id: index for index, shard in enumerate(self.optimizer_shards) for group_id in shard.group_ids
        }

    def rollback(self, first_group: int) -> None:
        for shard in self.optimizer_shards:
            shard.rollback(self.layout, first_group)
        self.storage.extend(self.layout)
        self.param_store.rollback()

    def extend(self, layout: Layout, groups: Sequence[ParamGroup]) -> None:
        super().extend(layout, groups)
        self.param_sync.layout = layout
        self.grads.extend(layout, self.params)
        self.storage.mark_synced(self.params)
        self._index_by_param_id = {id(param): index for index, param in enumerate(self.params)}
        self.bucket_by_param_id = {
            id(self.params[param]): bucket.index for bucket in layout.buckets for param in bucket.params
        }

    def broadcast_from_rank(self, source: Rank, *, first_bucket: int = 0) -> None:
        """Broadcast parameters of data-parallel rank `source`, from `first_bucket` on. Call on all ranks."""
        with self.comm.profiler.phase(Phase.BROADCAST_BUFFERS):
            for bucket in self.layout.buckets[first_bucket:]:
                if not self.comm.is_single_rank and bucket.numel:
                    self.comm.data_parallel.broadcast(self.param_store.buffer(bucket.index), source).wait()
        self.storage.invalidate_masters()

    def set_grad_source(self, grad_source: GradSource) -> None:
        """Take gradients from `grad_source` from now on. The engine then reduces gradients itself."""
        grad_source.extend(self.layout, self.params)
        self.grads, self.reduces_grads = grad_source, True

    def state(self) -> OptimizerStateView:
        return OptimizerStateView.create(self.params, self.optimizer_shards, self._param_state, self.comm.group.size)

    def replace_state(self, state: Any) -> None:
        self.state().replace_state(state)

    def _param_state(self, param: torch.Tensor) -> ParamStateView | None:
        index = self._index_by_param_id.get(id(param))
        if index is None:
            return None
        return ParamStateView.create(
            self.optimizer_shards[self._shard_index_of_param(index)], self.layout, index, self.comm.group.rank
        )

    def state_shards(self) -> list[StateShard]:
        self.sync_user_edits()
        return [
            state_shard for shard in self.optimizer_shards for state_shard in shard.state_shards(self.layout.params)
        ]

    def sync_user_edits(self) -> None:
        """Apply the user's edits of parameters and of `optimizer.state` since the last step."""
        self.storage.sync_user_edits(self.params)
        for shard in self.optimizer_shards:
            shard.sync_user_edits()

    def owns_state(self, index: int, key: Any) -> bool:
        param_shard = self.layout.param_shard(index, self.comm.group.rank)
        return param_shard is not None and (key != MASTER_KEY or self.storage.has_master(param_shard.bucket))

    def add_param_shaped_keys(self, keys: frozenset[Any]) -> None:
        for shard in self.optimizer_shards:
            shard.flat_params.add_param_shaped_keys(keys)

    def state_allocator(
        self, state_keys: StateKeys, *, in_place: bool, param_shaped_keys: frozenset[Any]
    ) -> StateAllocator:
        allocators = []
        for shard_index, shard in enumerate(self.optimizer_shards):
            shard_keys = {(param, key) for param, key in state_keys if self._shard_index_of_param(param) == shard_index}
            allocators.append(shard.state_allocator(self.layout, shard_keys, param_shaped_keys, in_place=in_place))

        def allocate(index: int, key: Any, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            param_shard = self.layout.param_shard(index, self.comm.group.rank)
            assert param_shard is not None, "this rank owns no shard of the parameter"
            return allocators[self._shard_index_of_param(index)](param_shard, key, shape, dtype)

        return allocate

    def load_state(self, saved: SavedState, *, assign: bool = False) -> Callable[[], None]:
        with ExitStack() as undo:  # undoes the loads so far if one fails
            undo.callback(self._replica_guard.mark_loaded())
            for shard in self.optimizer_shards:
                undo.callback(shard.load_state(saved, self.layout.params, assign=assign))
            return undo.pop_all().close

    def snapshot_replica_status(self) -> Callable[[], None]:
        return self._replica_guard.snapshot()

    def local_optimizer_of(self, index: int) -> LocalOptimizer:
        return self.optimizer_shards[self._shard_index_of_param(index)].inner

    def param_shaped_keys(self, index: int) -> frozenset[str]:
        return self.optimizer_shards[self._shard_index_of_param(index)].traits.param_shaped_keys

    def _shard_index_of_param(self, index: int) -> int:
        return self._shard_index_of_group[self.layout.params[index].group]

    @property
    def flat_params(self) -> Iterator[FlatParam]:
        """The flat params of all inner optimizers on this rank."""
        return chain.from_iterable(self.optimizer_shards)

    def shard_tensor(self, index: int) -> ShardTensor:
        param_shard = self.layout.param_shard(index, self.comm.group.rank)
        if param_shard is None:
            return make_empty_shard(self.params[index])
        return self._make_shard_tensor(param_shard, self.storage.param_view(param_shard))

    def master_shard_tensor(self, index: int) -> ShardTensor | None:
        param_shard = self.layout.param_shard(index, self.comm.group.rank)
        master = None if param_shard is None else self.storage.master_view(param_shard)
        return None if param_shard is None or master is None else self._make_shard_tensor(param_shard, master)

    def _make_shard_tensor(self, param_shard: ParamShard, flat: torch.Tensor) -> ShardTensor:
        spec = self.layout.params[param_shard.param]
        return ShardTensor(flat, spec.shape, spec.stride, param_shard.in_param.start)

    def wait_until_idle(self) -> None:
        self.param_sync.finish()
        self.param_store.rebind_if_moved()

    def snapshot(self, groups: Sequence[ParamGroup]) -> Callable[[], None]:
        restore_flat_params = super().snapshot(groups)

        def restore_all() -> None:
            with suppress(BindingError):  # everything that fits has been rebound
                self.rebind_params()
            restore_flat_params()
            self.storage.write_params(self.flat_params)

        return restore_all

    def set_mode(self, groups: Sequence[ParamGroup], mode: str) -> None:
        self.sync_user_edits()
        super().set_mode(groups, mode)
        self.rebind_params()
        self.storage.write_params(self.flat_params)

    def rebind_params(self) -> None:
        """Copy flat params that inner optimizers have moved (`param.data = ...`) back into the shards.

        With offloading, the pipeline rebinds the flat params of each bucket after updating it.
        """
        with ExitStack() as callbacks:  # calls all of them, even if one fails
            for shard in self.optimizer_shards if self._offload_pipeline is None else ():
                callbacks.callback(shard.flat_params.rebind_if_moved)

    def broadcast_params(self) -> Callable[[], None]:
        self.start_all_gather(b"\1" * len(self.params))
        self.storage.invalidate_masters()
        return self.param_sync.finish

    def memory_usage(self) -> dict[str, list[torch.Tensor]]:
        usage = super().memory_usage()
        grads = [*usage["gradients"], *self.grads.shard_tensors()]
        staging = [*usage["staging"], *self.grads.staging_buffers()]
        return {**usage, "gradients": grads, "master weights": self.storage.master_tensors(), "staging": staging}

    def bytes_to_send(self) -> tuple[int | None, int]:
        return self.grads.bytes_to_send() if self.reduces_grads else None, self.param_sync.bytes_to_send()

    @property
    def is_reducing(self) -> bool:
        return self.grads.is_reducing

    def drop_placeholders(self) -> None:
        self.grads.drop_placeholders()

    def clear_grads(self, *, set_to_none: bool) -> None:
        self.grads.clear(set_to_none=set_to_none)

    def synchronize_grads(
        self, call: str, groups: Sequence[ParamGroup], describe_args: Callable[[], list[str]] = list
    ) -> bytes:
        """Finish reducing gradients and return a mask of the parameters that have one.

        Call on all ranks; raises on all ranks.

        Args:
            call: Name of the call in error messages.
            groups: The user's groups, whose options must be equal on all ranks.
            describe_args: Reads arguments of the call that must be equal on all ranks. It may raise.
        """
        with self.comm.profiler.phase(Phase.SYNC_GRADS):
            return self._synchronize_grads(call, groups, describe_args)

    def _synchronize_grads(
        self, call: str, groups: Sequence[ParamGroup], describe_args: Callable[[], list[str]]
    ) -> bytes:
        self.param_sync.finish()
        outcome, arguments = StepOutcome(), list[str]()
        outcome.check(lambda: arguments.extend(describe_args()))
        outcome.check(lambda: self.check_groups(groups))
        outcome.check(lambda: self.param_store.rebind_if_moved(check_shapes=not self.reduces_grads))
        outcome.check(lambda: self._replica_guard.check_not_diverged(self.steps + 1))
        # Hazard: if only one rank has called `ddp_hook()`, it would synchronize with other messages than the rest.
        # The source in the name of the call makes all ranks raise instead.
        call_with_source = f"{call}, with gradients of {self.grads.source_name}"
        options = self._encode_options(groups) + "\n".join(arguments).encode()
        measure = None if self.reduces_grads else self.grad_check.compute_fingerprint(self.params)
        status = exchange_status(
            self.comm, call_with_source, self.grads.signature(), outcome.failure, options=options, measure=measure
        )
        if status.failure_level:
            raise_failure(self.comm, call, outcome.error)
        self._require_same_options(call, status, groups, arguments)
        self.grad_check.warn_on_mismatch(status)
        if self._replica_guard.needs_param_check:
            self.check_consistency(call, self.steps + 1)
            self._replica_guard.needs_param_check = False
        return self.grads.synchronize(signatures_match=status.has_same_plan)

    def _step(self, groups: Sequence[ParamGroup], closure: Closure | None, kwargs: dict[str, Any]) -> Any:
        try:
            return self._run_step(groups, closure, kwargs)
        finally:
            self.grads.mark_stepped(was_applied=False)

    def _run_step(self, groups: Sequence[ParamGroup], closure: Closure | None, kwargs: dict[str, Any]) -> Any:
        call = f"step {self.steps + 1}"
        update, outcome = _ShardUpdate(self, call, groups), StepOutcome()
        collective_closure = None if closure is None else update.make_collective(closure)
        if collective_closure is None:
            update.synchronize()
        outcome.run(lambda: self._precompute_closure(collective_closure))
        outcome.raise_if_closure_failed(collective_closure)
        if update.should_skip(outcome.error):
            return None
        inner_closure = outcome.result
        if collective_closure is None:
            outcome.run(update.assign_grads)
        if not outcome.error:
            outcome.run(lambda: self._step_inner(groups, inner_closure, kwargs))
            outcome.raise_if_closure_failed(collective_closure)
        outcome.check(update.finish)
        self.steps += 1
        if closure is None:
            # Whatever the status will be: parameters must stay equal on all ranks, also where the update failed.
            self.start_all_gather(update.update_mask)
        status = exchange_status(self.comm, f"the end of {call}", b"", outcome.failure)
        if closure is not None:
            # Only after the exchange: a rank whose optimizer calls its closure once more has not reached this line.
            self.start_all_gather(update.update_mask)
        if self.should_wait_for_params or status.failure_level:
            self.param_sync.finish()
        if status.failure_level:
            self._replica_guard.mark_diverged(call)
            raise_failure(self.comm, call, outcome.error, consequence=PARTIAL_UPDATE)
        self.grads.mark_stepped(was_applied=True)
        return outcome.result

    def compute_update_mask(self, grad_mask: bytes) -> bytes:
        """Return a mask of the parameters that a step updates: some optimizers update those without gradients too."""
        update_all = [shard for shard in self.optimizer_shards if shard.traits.updates_without_grads]
        if not update_all:
            return grad_mask
        group_ids = {group_id for shard in update_all for group_id in shard.group_ids}
        return bytes(
            has_grad or spec.group in group_ids for has_grad, spec in zip(grad_mask, self.layout.params, strict=True)
        )

    def _init_missing_state(self, undo: ExitStack) -> None:
        if self._offload_pipeline is None:
            super()._init_missing_state(undo)
            return
        trainable = self._find_trainable()
        for shard in self.optimizer_shards:
            if self._is_init_neutral(shard.inner):
                self._offload_pipeline.for_each_bucket(shard, partial(init_state, shard.inner, trainable, undo))

    def _find_trainable(self) -> Set[int]:
        # Hazard: flat params always require gradients, and may contain parameters that were frozen since.
        state = self.state()
        mask = bytes(param.requires_grad or param in state for param in self.params)
        if 0 in mask:
            for shard in self.optimizer_shards:
                shard.split_by_mask(mask)
        return {id(flat_param.param) for flat_param in self.flat_params if mask[flat_param.param_shards[0].param]}

    def _step_inner(self, groups: Sequence[ParamGroup], closure: Closure | None, kwargs: dict[str, Any]) -> Any:
        if self._offload_pipeline is None:
            return super()._step_inner(groups, closure, kwargs)
        with torch.enable_grad():
            loss = None if closure is None else closure()
        self.inner.push_options(groups)
        results = [self._offload_pipeline.step(shard, kwargs) for shard in self.optimizer_shards]
        self.inner.pull_options(groups)
        return results[0] if closure is None else loss

    def start_all_gather(self, update_mask: bytes) -> None:
        """Start all-gathering the buckets of updated parameters, those that a forward pass needs first in front."""
        with self.comm.group.failure_detector.abort_on_error():
            for bucket in reversed(self.layout.buckets):
                if 0 not in update_mask or any(map(update_mask.__getitem__, bucket.params)):
                    self.param_sync.start(bucket, self.param_store.buffer(bucket.index))
        # Autograd must see every update, local or remote, as an in-place change.
        increment_version([*compress(self.params, update_mask)] if 0 in update_mask else self.params)
        self.storage.mark_synced(self.params)


class _ShardUpdate:
    """One step of the flat params: gradients in, updated parameters out."""

    def __init__(self, engine: FlatShardEngine, call: str, groups: Sequence[ParamGroup]) -> None:
        self._engine, self._call, self._groups = engine, call, groups
        self.update_mask = self._grad_mask = bytes(len(engine.params))

    def make_collective(self, closure: Closure) -> CollectiveClosure:
        # Synchronize after a failure too: ranks that had gradients by then have sent them, and the others must follow.
        return CollectiveClosure(
            self._engine.comm,
            self._call,
            closure,
            on_success=self.synchronize_and_assign,
            on_failure=self.synchronize,
            before_retry=self.all_gather_updates,
        )

    def synchronize(self) -> None:
        """Finish reducing gradients. Call on all ranks; raises on all ranks."""
        self._grad_mask = self._engine.synchronize_grads(self._call, self._groups)
        update_mask = self._engine.compute_update_mask(self._grad_mask)
        # A parameter updated after an earlier closure stays in the mask even if the next closure gives it no gradient:
        # the optimizer may restore it, and the other ranks must receive that.
        self.update_mask = bytes(map(max, update_mask, self.update_mask)) if any(self.update_mask) else update_mask

    def all_gather_updates(self) -> None:
        """All-gather what the optimizer has updated since its last closure call, before it calls the closure again."""
        engine, call, outcome = self._engine, f"another closure of {self._call}", StepOutcome()
        outcome.check(self._write_back)
        if exchange_status(engine.comm, call, b"", outcome.failure).failure_level:
            raise_failure(engine.comm, call, outcome.error)
        engine.start_all_gather(self.update_mask)
        engine.param_sync.finish()

    def assign_grads(self) -> None:
        """Set `grad` of all flat params to views of the gradient shards."""
        with self._engine.comm.profiler.phase(Phase.ASSIGN_GRADS):
            self._assign_grads()

    def _assign_grads(self) -> None:
        engine = self._engine
        engine.sync_user_edits()
        if 0 in self._grad_mask:
            for shard in engine.optimizer_shards:
                shard.split_by_mask(self._grad_mask)
        for flat_param in engine.flat_params:
            has_grad = self._grad_mask[flat_param.param_shards[0].param]
            flat_param.param.grad = flat_param.view_of(engine.grads.shard(flat_param.bucket)) if has_grad else None

    def should_skip(self, error: Exception | None) -> bool:
        """Return whether to skip the step because of non-finite gradients. Call after `synchronize`, on all ranks.

        Raises on all ranks, also if `error` is set on one of them.
        """
        is_skipped = True
        try:
            is_skipped = self._engine.should_skip(self._grad_samples, error)
        finally:
            if is_skipped:
                self._clear_grads()
        return is_skipped

    def _grad_samples(self) -> Iterator[GradSample]:
        for bucket in self._engine.layout.buckets:
            if any(map(self._grad_mask.__getitem__, bucket.params)):
                yield GradSample(self._engine.grads.shard(bucket.index), partial(self._param_grads, bucket))

    def _param_grads(self, bucket: Bucket) -> Iterator[tuple[int, torch.Tensor]]:
        rank, shard = self._engine.comm.group.rank, self._engine.grads.shard(bucket.index)
        base = bucket.shards[rank].start
        for param_shard in bucket.param_shards_of_rank(rank):
            if self._grad_mask[param_shard.param]:
                start, stop = param_shard.in_bucket
                yield param_shard.param, shard[start - base : stop - base]

    def synchronize_and_assign(self) -> None:
        self.synchronize()
        self.assign_grads()

    def finish(self) -> None:
        """Write updates back and clear gradients, also after an update that failed."""
        with ExitStack() as callbacks:  # in reverse order, even if one fails
            callbacks.callback(self._clear_grads)
            callbacks.callback(self._write_back)

    def _write_back(self) -> None:
        """Rebind moved flat params, then round updated master weights into the parameters."""
        updated = (
            flat_param for flat_param in self._engine.flat_params if self.update_mask[flat_param.param_shards[0].param]
        )
        with ExitStack() as callbacks:  # in reverse order, even if one fails
            callbacks.callback(self._engine.storage.write_params, updated)
            callbacks.callback(self._engine.rebind_params)

    def _clear_grads(self) -> None:
        for flat_param in self._engine.flat_params:
            flat_param.param.grad = None
