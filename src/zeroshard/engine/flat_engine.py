"""Flat shards: every rank updates its slice of every bucket, and all slices go to everyone."""

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
    """A kind of optimizer, and how it takes its parameters."""

    spec: OptimizerSpec
    splits_params: bool
    """Pieces of their memory, which it updates as it would update the whole; else each belongs to one rank."""


class FlatShardEngine(Engine):
    """The inner optimizer holds segments of this rank's shards."""

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
        rank, hosts = comm.group.rank, HostTransfers(offload) if offload else None
        self.storage = make_storage(rank, self.param_store, masters, hosts, comm.profiler)
        self._shard_index_of_group: dict[int, int] = {}
        self._offload_pipeline = OffloadPipeline(hosts, self.storage, comm.profiler) if hosts else None
        self.optimizer_shards = [OptimizerShard(rank, kind, self.storage, splits_params=cut) for kind, cut in shardings]
        self.inner: InnerOptimizer = CompositeOptimizer(self.optimizer_shards, comm.profiler)
        self.grads: GradSource = LocalGrads(comm, masters)
        self.param_sync = ParamAllGather(comm)
        self._replica_guard = ReplicaGuard(comm)
        self.should_wait_for_params = True
        """A step ends when all parameters have arrived; else they are waited for where they are needed."""
        self._index_by_param_id: dict[int, int] = {}
        self.bucket_by_param_id: dict[int, int] = {}
        """Where each parameter lies, by its id."""

    def prepare(self, layout: Layout, groups: Sequence[ParamGroup]) -> None:
        self.param_store.prepare(layout, [param for group in groups for param in group["params"]])
        self.storage.extend(layout)
        known, alone = sum(len(part.group_ids) for part in self.optimizer_shards), len(self.optimizer_shards) == 1
        for part in self.optimizer_shards:
            new = [n for n, it in enumerate(groups) if n >= known and (alone or it[OPTIMIZER_KEY] == part.name)]
            part.prepare(layout, groups, [*part.group_ids, *new])
        self._shard_index_of_group = {
            number: n for n, part in enumerate(self.optimizer_shards) for number in part.group_ids
        }

    def rollback(self, first_group: int) -> None:
        for part in self.optimizer_shards:
            part.rollback(self.layout, first_group)
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
        """Make all parameters those of one rank of `Comm.everyone`, from a bucket on."""
        with self.comm.profiler.phase(Phase.BROADCAST_BUFFERS):
            for bucket in self.layout.buckets[first_bucket:]:
                if not self.comm.is_single_rank and bucket.numel:
                    self.comm.data_parallel.broadcast(self.param_store.buffer(bucket.index), source).wait()
        self.storage.invalidate_masters()

    def set_grad_source(self, grad_source: GradSource) -> None:
        """Take gradients from there from now on."""
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
        return [record for part in self.optimizer_shards for record in part.state_shards(self.layout.params)]

    def sync_user_edits(self) -> None:
        """Take over what was done to parameters and to values of `optimizer.state` since the last step."""
        self.storage.sync_user_edits(self.params)
        for part in self.optimizer_shards:
            part.sync_user_edits()

    def owns_state(self, index: int, key: Any) -> bool:
        piece = self.layout.param_shard(index, self.comm.group.rank)
        return piece is not None and (key != MASTER_KEY or self.storage.has_master(piece.bucket))

    def add_param_shaped_keys(self, keys: frozenset[Any]) -> None:
        for part in self.optimizer_shards:
            part.flat_params.add_param_shaped_keys(keys)

    def state_allocator(
        self, state_keys: StateKeys, *, in_place: bool, param_shaped_keys: frozenset[Any]
    ) -> StateAllocator:
        rooms = []
        for number, part in enumerate(self.optimizer_shards):
            own = {it for it in state_keys if self._shard_index_of_param(it[0]) == number}
            rooms.append(part.state_allocator(self.layout, own, param_shaped_keys, in_place=in_place))

        def allocate(index: int, key: Any, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            piece = self.layout.param_shard(index, self.comm.group.rank)
            assert piece is not None, "asked for what this rank does not hold"
            return rooms[self._shard_index_of_param(index)](piece, key, shape, dtype)

        return allocate

    def load_state(self, saved: SavedState, *, assign: bool = False) -> Callable[[], None]:
        with ExitStack() as undo:  # also where the second fails
            undo.callback(self._replica_guard.mark_loaded())
            for part in self.optimizer_shards:
                undo.callback(part.load_state(saved, self.layout.params, assign=assign))
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
        return chain.from_iterable(self.optimizer_shards)

    def shard_tensor(self, index: int) -> ShardTensor:
        piece = self.layout.param_shard(index, self.comm.group.rank)
        return (
            make_empty_shard(self.params[index])
            if piece is None
            else self._make_shard_tensor(piece, self.storage.param_view(piece))
        )

    def master_shard_tensor(self, index: int) -> ShardTensor | None:
        piece = self.layout.param_shard(index, self.comm.group.rank)
        copy = None if piece is None else self.storage.master_view(piece)
        return None if piece is None or copy is None else self._make_shard_tensor(piece, copy)

    def _make_shard_tensor(self, param_shard: ParamShard, flat: torch.Tensor) -> ShardTensor:
        spec = self.layout.params[param_shard.param]
        return ShardTensor(flat, spec.shape, spec.stride, param_shard.in_param.start)

    def wait_until_idle(self) -> None:
        self.param_sync.finish()
        self.param_store.rebind_if_moved()

    def snapshot(self, groups: Sequence[ParamGroup]) -> Callable[[], None]:
        put_back = super().snapshot(groups)

        def restore_all() -> None:
            with suppress(BindingError):  # all that can be is where it belongs
                self.rebind_params()
            put_back()
            self.storage.write_params(self.flat_params)

        return restore_all

    def set_mode(self, groups: Sequence[ParamGroup], mode: str) -> None:
        self.sync_user_edits()
        super().set_mode(groups, mode)
        self.rebind_params()
        self.storage.write_params(self.flat_params)

    def rebind_params(self) -> None:
        """What inner optimizers have put elsewhere (`param.data = ...`) is in the shards. State that rests in host
        memory has its own time for it."""
        with ExitStack() as each:  # also where one fails
            for part in self.optimizer_shards if self._offload_pipeline is None else ():
                each.callback(part.flat_params.rebind_if_moved)

    def broadcast_params(self) -> Callable[[], None]:
        self.start_all_gather(b"\1" * len(self.params))
        self.storage.invalidate_masters()
        return self.param_sync.finish

    def memory_usage(self) -> dict[str, list[torch.Tensor]]:
        known = super().memory_usage()
        grads, staging = (
            [*known["gradients"], *self.grads.shard_tensors()],
            [*known["staging"], *self.grads.staging_buffers()],
        )
        return {**known, "gradients": grads, "master weights": self.storage.master_tensors(), "staging": staging}

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
        """All gradients are where they belong; a flag for each parameter that has one. Raises on all ranks alike.

        `given` reads arguments of the call, which must be the same on all ranks: it may raise.
        """
        with self.comm.profiler.phase(Phase.SYNC_GRADS):
            return self._synchronize_grads(call, groups, describe_args)

    def _synchronize_grads(
        self, call: str, groups: Sequence[ParamGroup], describe_args: Callable[[], list[str]]
    ) -> bytes:
        self.param_sync.finish()
        attempt, arguments = StepOutcome(), list[str]()
        attempt.check(lambda: arguments.extend(describe_args()))
        attempt.check(lambda: self.check_groups(groups))
        attempt.check(lambda: self.param_store.rebind_if_moved(check_shapes=not self.reduces_grads))
        attempt.check(lambda: self._replica_guard.check_not_diverged(self.steps + 1))
        # Hazard: a rank that alone has called `ddp_hook()` would settle by other messages than the rest.
        stated = f"{call}, with gradients of {self.grads.source_name}"
        options = self._encode_options(groups) + "\n".join(arguments).encode()
        measure = None if self.reduces_grads else self.grad_check.compute_fingerprint(self.params)
        verdict = exchange_status(
            self.comm, stated, self.grads.signature(), attempt.failure, options=options, measure=measure
        )
        if verdict.failure_level:
            raise_failure(self.comm, call, attempt.error)
        self._require_same_options(call, verdict, groups, arguments)
        self.grad_check.warn_on_mismatch(verdict)
        if self._replica_guard.needs_param_check:
            self.check_consistency(call, self.steps + 1)
            self._replica_guard.needs_param_check = False
        return self.grads.synchronize(signatures_match=verdict.has_same_plan)

    def _step(self, groups: Sequence[ParamGroup], closure: Closure | None, kwargs: dict[str, Any]) -> Any:
        try:
            return self._run_step(groups, closure, kwargs)
        finally:
            self.grads.mark_stepped(was_applied=False)

    def _run_step(self, groups: Sequence[ParamGroup], closure: Closure | None, kwargs: dict[str, Any]) -> Any:
        call = f"step {self.steps + 1}"
        update, attempt = _ShardUpdate(self, call, groups), StepOutcome()
        shared = None if closure is None else update.make_collective(closure)
        if shared is None:
            update.synchronize()
        attempt.run(lambda: self._precompute_closure(shared))
        attempt.raise_if_closure_failed(shared)
        if update.should_skip(attempt.error):
            return None
        used = attempt.result
        if shared is None:
            attempt.run(update.assign_grads)
        if not attempt.error:
            attempt.run(lambda: self._step_inner(groups, used, kwargs))
            attempt.raise_if_closure_failed(shared)
        attempt.check(update.finish)
        self.steps += 1
        if closure is None:
            self.start_all_gather(
                update.update_mask
            )  # whatever the verdict: ranks where it failed must not part from the others
        verdict = exchange_status(self.comm, f"the end of {call}", b"", attempt.failure)
        if closure is not None:
            self.start_all_gather(
                update.update_mask
            )  # only now: a rank whose optimizer calls its closure once more is not here yet
        if self.should_wait_for_params or verdict.failure_level:
            self.param_sync.finish()
        if verdict.failure_level:
            self._replica_guard.mark_diverged(call)
            raise_failure(self.comm, call, attempt.error, consequence=PARTIAL_UPDATE)
        self.grads.mark_stepped(was_applied=True)
        return attempt.result

    def compute_update_mask(self, grad_mask: bytes) -> bytes:
        """A flag for each parameter that a step moves: some optimizers change those without gradients, too."""
        moves_all = [part.traits.updates_without_grads for part in self.optimizer_shards]
        if not any(moves_all):
            return grad_mask
        groups = {
            number
            for part, flag in zip(self.optimizer_shards, moves_all, strict=True)
            if flag
            for number in part.group_ids
        }
        return bytes(flag or spec.group in groups for flag, spec in zip(grad_mask, self.layout.params, strict=True))

    def _init_missing_state(self, undo: ExitStack) -> None:
        if self._offload_pipeline is None:
            super()._init_missing_state(undo)
            return
        chosen = self._find_trainable()
        for part in self.optimizer_shards:
            if self._is_init_neutral(part.inner):
                self._offload_pipeline.for_each_bucket(part, partial(init_state, part.inner, chosen, undo))

    def _find_trainable(self) -> Set[int]:
        # Hazard: segments always require gradients, and may hold parameters that were frozen since.
        state = self.state()
        chosen = bytes(param.requires_grad or param in state for param in self.params)
        if 0 in chosen:
            for part in self.optimizer_shards:
                part.split_by_mask(chosen)
        return {id(segment.param) for segment in self.flat_params if chosen[segment.param_shards[0].param]}

    def _step_inner(self, groups: Sequence[ParamGroup], closure: Closure | None, kwargs: dict[str, Any]) -> Any:
        if self._offload_pipeline is None:
            return super()._step_inner(groups, closure, kwargs)
        with torch.enable_grad():
            loss = None if closure is None else closure()
        self.inner.push_options(groups)
        results = [self._offload_pipeline.step(part, kwargs) for part in self.optimizer_shards]
        self.inner.pull_options(groups)
        return results[0] if closure is None else loss

    def start_all_gather(self, update_mask: bytes) -> None:
        """Start bringing the flagged parameters to everyone, those that a forward pass needs first at the head."""
        with self.comm.group.failure_detector.abort_on_error():
            for bucket in reversed(self.layout.buckets):
                if 0 not in update_mask or any(map(update_mask.__getitem__, bucket.params)):
                    self.param_sync.start(bucket, self.param_store.buffer(bucket.index))
        # Autograd must see an update, local or remote, as the in-place change that it is.
        increment_version([*compress(self.params, update_mask)] if 0 in update_mask else self.params)
        self.storage.mark_synced(self.params)


class _ShardUpdate:
    """Gradients into the inner optimizer's tensors, and what it makes of them out again."""

    def __init__(self, engine: FlatShardEngine, call: str, groups: Sequence[ParamGroup]) -> None:
        self._engine, self._call, self._groups = engine, call, groups
        self.update_mask = self._grad_mask = bytes(len(engine.params))

    def make_collective(self, closure: Closure) -> CollectiveClosure:
        # Settles also where it failed: ranks that had gradients by then have sent them, and others have yet to follow.
        then, otherwise = self.synchronize_and_assign, self.synchronize
        return CollectiveClosure(
            self._engine.comm, self._call, closure, then, otherwise, before_retry=self.all_gather_updates
        )

    def synchronize(self) -> None:
        """Gradients are there. Raises on all ranks alike."""
        self._grad_mask = self._engine.synchronize_grads(self._call, self._groups)
        moving = self._engine.compute_update_mask(self._grad_mask)
        # What a closure has moved stays moving where the next one has no gradient of it: others have to get it back.
        self.update_mask = bytes(map(max, moving, self.update_mask)) if any(self.update_mask) else moving

    def all_gather_updates(self) -> None:
        """What an optimizer has moved since its last closure is where the next one looks for it: on all ranks."""
        engine, call, attempt = self._engine, f"another closure of {self._call}", StepOutcome()
        attempt.check(self._write_back)
        if exchange_status(engine.comm, call, b"", attempt.failure).failure_level:
            raise_failure(engine.comm, call, attempt.error)
        engine.start_all_gather(self.update_mask)
        engine.param_sync.finish()

    def assign_grads(self) -> None:
        """The inner optimizer has them."""
        with self._engine.comm.profiler.phase(Phase.ASSIGN_GRADS):
            self._assign_grads()

    def _assign_grads(self) -> None:
        engine = self._engine
        engine.sync_user_edits()
        if 0 in self._grad_mask:
            for part in engine.optimizer_shards:
                part.split_by_mask(self._grad_mask)
        for segment in engine.flat_params:
            has = self._grad_mask[segment.param_shards[0].param]
            segment.param.grad = segment.view_of(engine.grads.shard(segment.bucket)) if has else None

    def should_skip(self, error: Exception | None) -> bool:
        """After gradients are settled, perhaps filled in, too. Raises on all ranks alike, `failure` too."""
        left_out = True
        try:
            left_out = self._engine.should_skip(self._grad_samples, error)
        finally:
            if left_out:
                self._clear_grads()
        return left_out

    def _grad_samples(self) -> Iterator[GradSample]:
        for bucket in self._engine.layout.buckets:
            if any(map(self._grad_mask.__getitem__, bucket.params)):
                yield GradSample(self._engine.grads.shard(bucket.index), partial(self._param_grads, bucket))

    def _param_grads(self, bucket: Bucket) -> Iterator[tuple[int, torch.Tensor]]:
        rank, shard = self._engine.comm.group.rank, self._engine.grads.shard(bucket.index)
        base = bucket.shards[rank].start
        for piece in bucket.param_shards_of_rank(rank):
            if self._grad_mask[piece.param]:
                yield piece.param, shard[piece.in_bucket.start - base : piece.in_bucket.stop - base]

    def synchronize_and_assign(self) -> None:
        self.synchronize()
        self.assign_grads()

    def finish(self) -> None:
        """Also after an update that failed."""
        with ExitStack() as each:
            each.callback(self._clear_grads)
            each.callback(self._write_back)

    def _write_back(self) -> None:
        moved = (it for it in self._engine.flat_params if self.update_mask[it.param_shards[0].param])
        with ExitStack() as each:
            each.callback(self._engine.storage.write_params, moved)
            each.callback(self._engine.rebind_params)

    def _clear_grads(self) -> None:
        for segment in self._engine.flat_params:
            segment.param.grad = None
