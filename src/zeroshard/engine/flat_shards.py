"""Flat shards: every rank owns a shard of every bucket, and all ranks all-gather the updated shards.

::

    gradients    reduce-scatter (during backward)  ->  gradient shard
    step         inner optimizers update flat params, views of this rank's shards or of their master weights
    parameters   updated shard  ->  all-gather into the flat param buffers of all ranks
"""

from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import ExitStack, suppress
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch

from ..comm.collectives import Comm
from ..comm.process_group import Group
from ..config import CPUOffload, MasterWeightPolicy
from ..errors import BindingError
from ..layout.layout import Bucket, Layout, ParamShard
from ..profiling import Phase, StepProfiler
from ..state.shard_tensor import ShardTensor, make_empty_shard
from ..state.state_dict import MASTER_KEY, SavedState, StateShard
from .checks import GradSample, ReplicaGuard
from .flat_params import FlatParam, make_storage
from .grad_source import GradSource
from .host_buffers import HostTransfers
from .inner import OPTIMIZER_KEY, InnerOptimizer, LocalOptimizer, ParamGroup
from .offload import OffloadedOptimizer, OffloadPipeline
from .optimizer_shard import OptimizerShard, OptimizerSpec, OptimizerStateView, ParamStateView
from .param_memory import FlatParamBuffers
from .param_store import OptimizerState, ParamStore, StateAllocator
from .probe import init_state
from .state import StateKeys
from .step import Step


class OptimizerSharding(NamedTuple):
    """An optimizer class, and whether its parameters may be split over ranks."""

    spec: OptimizerSpec
    splits_params: bool
    """Whether ranks may own a part of a parameter; otherwise every parameter belongs to one rank."""


class FlatShardStore(ParamStore):
    """Parameters are views of flat buckets; the inner optimizers hold flat params over this rank's shards."""

    memory: FlatParamBuffers
    members: list[OptimizerShard]

    def __init__(
        self,
        comm: Comm,
        profiler: StepProfiler,
        shardings: Sequence[OptimizerSharding],
        masters: MasterWeightPolicy | None,
        offload: CPUOffload | None = None,
    ) -> None:
        super().__init__(comm, profiler, FlatParamBuffers())
        rank, host_transfers = comm.group.rank, HostTransfers(offload) if offload else None
        self.storage = make_storage(rank, self.memory, masters, host_transfers, profiler)
        self.members = [
            OptimizerShard(rank, spec, self.storage, splits_params=splits_params) for spec, splits_params in shardings
        ]
        self.offload_pipeline = OffloadPipeline(host_transfers, self.storage, profiler) if host_transfers else None
        self.inner = (
            InnerOptimizer(self.members, profiler)
            if self.offload_pipeline is None
            else OffloadedOptimizer(self.members, profiler, self.offload_pipeline)
        )
        self._member_index_of_group: dict[int, int] = {}
        self._index_by_param_id: dict[int, int] = {}
        self.bucket_by_param_id: dict[int, int] = {}
        """The bucket of each parameter, by its id."""

    def prepare(self, layout: Layout, groups: Sequence[ParamGroup]) -> None:
        self.memory.prepare(layout, [param for group in groups for param in group["params"]])
        self.storage.extend(layout)
        first_new = sum(len(member.group_ids) for member in self.members)
        is_only_one = len(self.members) == 1
        for member in self.members:
            new_ids = [
                group_id
                for group_id, group in enumerate(groups)
                if group_id >= first_new and (is_only_one or group[OPTIMIZER_KEY] == member.name)
            ]
            member.prepare(layout, groups, [*member.group_ids, *new_ids])
        self._member_index_of_group = {
            group_id: index for index, member in enumerate(self.members) for group_id in member.group_ids
        }

    def rollback(self, first_group: int) -> None:
        for member in self.members:
            member.rollback(self.layout, first_group)
        self.storage.extend(self.layout)
        self.memory.rollback()

    def extend(self, layout: Layout, groups: Sequence[ParamGroup]) -> None:
        super().extend(layout, groups)
        self.mark_synced()
        self._index_by_param_id = {id(param): index for index, param in enumerate(self.tensors)}
        self.bucket_by_param_id = {
            id(self.tensors[param]): bucket.index for bucket in layout.buckets for param in bucket.params
        }

    def member_index_of(self, index: int) -> int:
        """Return the position in `members` of the optimizer class that updates a parameter."""
        return self._member_index_of_group[self.layout.params[index].group]

    def index_of(self, param: torch.Tensor) -> int | None:
        """Return the index of a parameter; None for any other tensor."""
        return self._index_by_param_id.get(id(param))

    @property
    def flat_params(self) -> Iterator[FlatParam]:
        """The flat params of all inner optimizers on this rank."""
        return chain.from_iterable(self.members)

    def shard_tensor(self, index: int) -> ShardTensor:
        param_shard = self.layout.param_shard(index, self._comm.group.rank)
        if param_shard is None:
            return make_empty_shard(self.tensors[index])
        return self._make_shard_tensor(param_shard, self.storage.param_view(param_shard))

    def master_shard_tensor(self, index: int) -> ShardTensor | None:
        param_shard = self.layout.param_shard(index, self._comm.group.rank)
        master = None if param_shard is None else self.storage.master_view(param_shard)
        return None if param_shard is None or master is None else self._make_shard_tensor(param_shard, master)

    def _make_shard_tensor(self, param_shard: ParamShard, flat: torch.Tensor) -> ShardTensor:
        spec = self.layout.params[param_shard.param]
        return ShardTensor(flat, spec.shape, spec.stride, param_shard.in_param.start)

    def mark_synced(self) -> None:
        """Record that all parameters are being received from their owners: the user has not edited them."""
        self.storage.mark_synced(self.tensors)

    def invalidate_masters(self) -> None:
        """Take master weights from the parameters in the next step, since these have been replaced."""
        self.storage.invalidate_masters()

    def memory_usage(self) -> dict[str, list[torch.Tensor]]:
        return {**super().memory_usage(), "master weights": self.storage.master_tensors()}

    # ---- a step

    def start_update(self, step: Step) -> None:
        pass

    def assign_grads(self, step: Step, grads: GradSource) -> None:
        """Set `grad` of all flat params to views of the gradient shards."""
        with self._profiler.phase(Phase.ASSIGN_GRADS):
            self.sync_user_edits()
            if 0 in step.grad_mask:
                for member in self.members:
                    member.split_by_mask(step.grad_mask)
            for flat_param in self.flat_params:
                has_grad = step.grad_mask[flat_param.param_shards[0].param]
                flat_param.param.grad = flat_param.view_of(grads.shard(flat_param.bucket)) if has_grad else None

    def grad_samples(self, step: Step, grads: GradSource) -> Iterator[GradSample]:
        for bucket in self.layout.buckets:
            if any(map(step.grad_mask.__getitem__, bucket.params)):
                shard = grads.shard(bucket.index)
                yield GradSample(shard, partial(self._param_grads, bucket, shard, step.grad_mask))

    def _param_grads(self, bucket: Bucket, shard: torch.Tensor, grad_mask: bytes) -> Iterator[tuple[int, torch.Tensor]]:
        rank = self._comm.group.rank
        base = bucket.shards[rank].start
        for param_shard in bucket.param_shards_of_rank(rank):
            if grad_mask[param_shard.param]:
                start, stop = param_shard.in_bucket
                yield param_shard.param, shard[start - base : stop - base]

    def clear_assigned_grads(self) -> None:
        for flat_param in self.flat_params:
            flat_param.param.grad = None

    def finish_update(self, step: Step) -> None:
        try:
            self.write_back(step)
        finally:
            self.clear_assigned_grads()

    def write_back(self, step: Step) -> None:
        """Rebind moved flat params, then round updated master weights into the parameters."""
        mask = step.update_mask
        try:
            self._rebind_flat_params()
        finally:
            self.storage.write_params(
                flat_param for flat_param in self.flat_params if mask[flat_param.param_shards[0].param]
            )

    def _rebind_flat_params(self) -> None:
        """Copy flat params that inner optimizers have moved (`param.data = ...`) back into the shards.

        With offloading, the pipeline rebinds the flat params of each bucket after updating it.
        """
        with ExitStack() as callbacks:  # calls all of them, even if one fails
            for member in self.members if self.offload_pipeline is None else ():
                callbacks.callback(member.flat_params.rebind_if_moved)

    def sync_user_edits(self) -> None:
        """Apply the user's edits of parameters and of `optimizer.state` since the last step."""
        self.storage.sync_user_edits(self.tensors)
        for member in self.members:
            member.sync_user_edits()

    # ---- train and eval mode

    def snapshot(self, groups: Sequence[ParamGroup]) -> Callable[[], None]:
        restore_flat_params = super().snapshot(groups)

        def restore_all() -> None:
            with suppress(BindingError):  # everything that fits has been rebound
                self._rebind_flat_params()
            restore_flat_params()
            self.storage.write_params(self.flat_params)

        return restore_all

    def set_mode(self, groups: Sequence[ParamGroup], mode: str) -> None:
        self.sync_user_edits()
        super().set_mode(groups, mode)
        self._rebind_flat_params()
        self.storage.write_params(self.flat_params)


class FlatShardState(OptimizerState):
    """State of flat params, shown as the state of the parameters that they consist of."""

    _store: FlatShardStore

    def __init__(self, group: Group, store: FlatShardStore, replica_guard: ReplicaGuard) -> None:
        super().__init__(group.rank, store)
        self._world_size, self._replica_guard = group.size, replica_guard

    def view(self) -> OptimizerStateView:
        return OptimizerStateView.create(self._store.tensors, self._store.members, self._param_state, self._world_size)

    def _param_state(self, param: torch.Tensor) -> ParamStateView | None:
        index = self._store.index_of(param)
        return (
            None
            if index is None
            else ParamStateView.create(self._member_of(index), self._store.layout, index, self._rank)
        )

    def _member_of(self, index: int) -> OptimizerShard:
        return self._store.members[self._store.member_index_of(index)]

    def replace(self, state: Any) -> None:
        self.view().replace_state(state)

    def shards(self) -> list[StateShard]:
        self._store.sync_user_edits()
        return [
            state_shard
            for member in self._store.members
            for state_shard in member.state_shards(self._store.layout.params)
        ]

    def owns(self, index: int, key: Any) -> bool:
        param_shard = self._store.layout.param_shard(index, self._rank)
        return param_shard is not None and (key != MASTER_KEY or self._store.storage.has_master(param_shard.bucket))

    def local_optimizer_of(self, index: int) -> LocalOptimizer:
        return self._member_of(index).inner

    def param_shaped_keys(self, index: int) -> frozenset[str]:
        return self._member_of(index).traits.param_shaped_keys

    def add_param_shaped_keys(self, keys: frozenset[Any]) -> None:
        for member in self._store.members:
            member.flat_params.add_param_shaped_keys(keys)

    def allocator(self, state_keys: StateKeys, *, in_place: bool, param_shaped_keys: frozenset[Any]) -> StateAllocator:
        store = self._store
        allocators = []
        for position, member in enumerate(store.members):
            member_keys = {(param, key) for param, key in state_keys if store.member_index_of(param) == position}
            allocators.append(member.state_allocator(store.layout, member_keys, param_shaped_keys, in_place=in_place))

        def allocate(index: int, key: Any, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            param_shard = store.layout.param_shard(index, self._rank)
            assert param_shard is not None, "this rank owns no shard of the parameter"
            return allocators[store.member_index_of(index)](param_shard, key, shape, dtype)

        return allocate

    def load(self, saved: SavedState, *, assign: bool = False) -> Callable[[], None]:
        with ExitStack() as undo:  # undoes the loads so far if one fails
            undo.callback(self._replica_guard.mark_loaded())
            for member in self._store.members:
                undo.callback(member.load_state(saved, self._store.layout.params, assign=assign))
            return undo.pop_all().close

    def snapshot_replica_status(self) -> Callable[[], None]:
        return self._replica_guard.snapshot()

    def _init_missing(self, undo: ExitStack) -> None:
        pipeline = self._store.offload_pipeline
        if pipeline is None:
            super()._init_missing(undo)
            return
        trainable = self._split_and_find_trainable()
        for member in self._store.members:
            if self._is_init_neutral(member.inner):
                pipeline.for_each_bucket(member, partial(init_state, member.inner, trainable, undo))

    def _split_and_find_trainable(self) -> Set[int]:
        # Hazard: flat params always require gradients, and may contain parameters that were frozen since.
        state = self.view()
        mask = bytes(param.requires_grad or param in state for param in self._store.tensors)
        if 0 in mask:
            for member in self._store.members:
                member.split_by_mask(mask)
        return {
            id(flat_param.param) for flat_param in self._store.flat_params if mask[flat_param.param_shards[0].param]
        }
