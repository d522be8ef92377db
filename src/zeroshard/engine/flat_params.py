"""The tensors that the inner optimizer updates: a few long flat params instead of one tensor per parameter.

A flat param covers consecutive param shards of this rank, of one group in one bucket and with equal attributes::

    bucket                    | p0 ....... | p1 .......... | p2 ... | p3 ....... |
    shards                    | rank 0                | rank 1                   |
    flat params of rank 1                             | p1, p2 and p3            |
    if p2 has no gradient                             | p1 | p2 ... | p3 ....... |

While all parameters in a flat param get gradients, the optimizer updates it as one tensor. If some get none, it is
split, so these parameters keep their values, momenta and step counts, as they do with an unsharded optimizer.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any

import torch
from torch.optim import Optimizer

from .._types import Rank, Span
from ..config import MasterWeightPolicy
from ..errors import BindingError
from ..layout.layout import Layout, ParamShard
from ..profiling import Phase, StepProfiler
from ..state.tensor_utils import clone_tensor, deepcopy_except_tensors, map_tensors
from .host_buffers import HostTransfer, HostTransfers
from .inner import ParamGroup
from .param_memory import FlatParamBuffers

ShardViewFn = Callable[[int, Span, Sequence[int], Sequence[int]], torch.Tensor]
"""Returns a view of this rank's shard: (bucket, span in the shard, shape, stride)."""
State = dict[Any, Any]
MemoryLocation = tuple[int, torch.Size, tuple[int, ...]]


@dataclass(frozen=True, eq=False)
class FlatParam:
    """Consecutive param shards, and the tensor over their memory that the inner optimizer updates."""

    param_shards: tuple[ParamShard, ...]
    group: int
    in_shard: Span
    param: torch.nn.Parameter

    @property
    def bucket(self) -> int:
        return self.param_shards[0].bucket

    def span_of(self, param_shard: ParamShard) -> Span:
        """Return the position of a param shard in the flat tensor."""
        start = param_shard.in_bucket.start - self.param_shards[0].in_bucket.start
        return Span(start, start + param_shard.in_bucket.length)

    def view_of(self, shard: torch.Tensor) -> torch.Tensor:
        """Return the elements of a flat shard, of gradients for example, that match `param`, in its shape."""
        offset = shard.storage_offset() + self.in_shard.start
        return shard.as_strided(self.param.shape, self.param.stride(), offset)


class FlatParams:
    """All flat params that one inner optimizer has on this rank, by group, and its view of them."""

    def __init__(
        self, rank: Rank, shard_view: ShardViewFn, *, can_join_shards: bool, param_shaped_keys: frozenset[str]
    ) -> None:
        """Start without any flat params.

        Args:
            rank: This rank in the shard group.
            shard_view: Gives the memory to update.
            can_join_shards: Whether the optimizer updates concatenated shards as it would update each on its own.
                Otherwise every param shard is a flat param, and an unsplit parameter keeps its shape.
            param_shaped_keys: Keys of state that has the shape of its parameter.
        """
        self._rank, self._shard_view = rank, shard_view
        self._can_join_shards, self._param_shaped_keys = can_join_shards, param_shaped_keys
        self._layout = Layout.empty(0)
        self.by_group: list[list[FlatParam]] = []
        """In the order of `_group_ids`; within a group in memory order."""
        self._group_ids: list[int] = []
        self._bound_locations: list[MemoryLocation] = []
        """Memory of all flat params when they were last bound to the shards."""

    def __iter__(self) -> Iterator[FlatParam]:
        return chain.from_iterable(self.by_group)

    def extend(self, layout: Layout, group_ids: Sequence[int]) -> None:
        """Add flat params for the new buckets of `layout`. `group_ids` are all groups of the inner optimizer."""
        first_new, self._layout, self._group_ids = len(self._layout.buckets), layout, list(group_ids)
        self.by_group.extend([] for _ in group_ids[len(self.by_group) :])
        by_group_id = dict(zip(group_ids, self.by_group, strict=True))
        for bucket in layout.buckets[first_new:]:
            owned = (
                shard
                for shard in bucket.param_shards_of_rank(self._rank)
                if layout.params[shard.param].group in by_group_id
            )
            for run in self._split_into_runs(owned, lambda shard: layout.params[shard.param].group):
                flat_param = self._make_flat_param(run)
                by_group_id[flat_param.group].append(flat_param)

    def rollback(self, layout: Layout, num_groups: int) -> None:
        """Undo `extend`: return to `layout` and the first `num_groups` groups."""
        self._layout = layout
        del self.by_group[num_groups:], self._group_ids[num_groups:]

    def make_inner_groups(self, groups: Sequence[ParamGroup]) -> list[ParamGroup]:
        """Return copies of the user's groups with flat params as "params".

        A group without flat params on this rank keeps the user's parameters.
        """
        inner_groups = [dict(group) for group in groups]
        for group, flat_params in zip(inner_groups, self.by_group, strict=True):
            if flat_params:
                self._set_group_params(group, flat_params)
        return inner_groups

    def param_ids(self) -> set[int]:
        return {id(flat_param.param) for flat_param in self}

    def split_by_mask(self, mask: bytes, optimizer: Optimizer) -> None:
        """Split flat params, and their state, in which `mask` is set for some parameters only."""
        for flat_params, group in self._pair_groups(optimizer):
            if all(_is_uniform(flat_param, mask) for flat_param in flat_params):
                continue
            split = [self._split_flat_param(flat_param, mask, optimizer) for flat_param in flat_params]
            flat_params[:] = chain.from_iterable(split)
            self._set_group_params(group, flat_params)

    def flat_param_of(self, param_shard: ParamShard) -> FlatParam:
        """Return the flat param that contains a param shard of this rank."""
        flat_params, position = self._find(param_shard)
        return flat_params[position]

    def isolate(self, param_shard: ParamShard, optimizer: Optimizer) -> FlatParam:
        """Split a param shard, with its state, into its own flat param. Other flat params keep their tensors."""
        flat_params, position = self._find(param_shard)
        shards = flat_params[position].param_shards
        if len(shards) == 1:
            return flat_params[position]
        at = shards.index(param_shard)
        runs = [run for run in (shards[:at], (param_shard,), shards[at + 1 :]) if run]
        flat_params[position : position + 1] = self._split_at_runs(flat_params[position], runs, optimizer)
        self._set_group_params(optimizer.param_groups[self._group_position(param_shard)], flat_params)
        return self.flat_param_of(param_shard)

    def join_stateless(self, optimizer: Optimizer) -> None:
        """Join adjacent flat params that have no state.

        Hazard: never join flat params with state. Views of their state that the user holds would no longer alias it.
        """
        for flat_params, group in self._pair_groups(optimizer) if self._can_join_shards else ():
            joined: list[FlatParam] = []
            for (*_, has_state), run in groupby(flat_params, key=lambda item: self._merge_key(item, optimizer)):
                adjacent = list(run)
                shards = tuple(shard for flat_param in adjacent for shard in flat_param.param_shards)
                joined += adjacent if has_state or len(adjacent) == 1 else [self._make_flat_param(shards)]
            if len(joined) < len(flat_params):
                flat_params[:] = joined
                self._set_group_params(group, flat_params)

    def _merge_key(self, flat_param: FlatParam, optimizer: Optimizer) -> tuple[object, ...]:
        return (
            flat_param.bucket,
            self._layout.params[flat_param.param_shards[0].param].attrs,
            flat_param.param in optimizer.state,
        )

    def _find(self, param_shard: ParamShard) -> tuple[list[FlatParam], int]:
        """Return the flat params of the shard's group, and the position of the one that contains it."""
        flat_params = self.by_group[self._group_position(param_shard)]
        start = (param_shard.bucket, param_shard.in_bucket.start)
        position = bisect_right(flat_params, start, key=_bucket_position) - 1
        while param_shard not in flat_params[position].param_shards:  # an empty one starts where the next one does
            position -= 1
        return flat_params, position

    def _group_position(self, param_shard: ParamShard) -> int:
        return self._group_ids.index(self._layout.params[param_shard.param].group)

    def reflatten(self, optimizer: Optimizer, merge_key_of: Callable[[ParamShard], object]) -> Callable[[], None]:
        """Rebuild all flat params from runs of shards with equal `merge_key_of`, and drop all state.

        Returns a function that restores the former flat params and their state.
        """
        flat_params_before = [list(flat_params) for flat_params in self.by_group]
        state_before = dict(optimizer.state)

        def undo() -> None:
            for (flat_params, group), before in zip(self._pair_groups(optimizer), flat_params_before, strict=True):
                flat_params[:] = before
                self._set_group_params(group, flat_params)
            optimizer.state.clear()
            optimizer.state.update(state_before)

        for flat_params, group in self._pair_groups(optimizer):
            shards = [shard for flat_param in flat_params for shard in flat_param.param_shards]
            flat_params[:] = [
                self._make_flat_param(run)
                for run in self._split_into_runs(shards, lambda shard: (shard.bucket, merge_key_of(shard)))
            ]
            self._set_group_params(group, flat_params)
        for key in [key for key in optimizer.state if isinstance(key, torch.Tensor)]:
            del optimizer.state[key]
        return undo

    def rebind_if_moved(self) -> None:
        """Call `rebind` for all flat params if the inner optimizer has moved any (`param.data = ...`)."""
        if [_memory_location(flat_param.param) for flat_param in self] != self._bound_locations:
            self.rebind(self)
            self._bound_locations = [_memory_location(flat_param.param) for flat_param in self]

    @torch.no_grad()
    def rebind(self, flat_params: Iterable[FlatParam]) -> None:
        """Copy the values of moved flat params into the shards and make the flat params views of the shards again.

        Raises:
            BindingError: The optimizer has assigned a tensor with another dtype, device or shape. Its values are
                dropped; all other flat params have been rebound.
        """
        moved: list[tuple[FlatParam, torch.Tensor]] = []
        for flat_param in flat_params:
            target = self._view_span(flat_param.param_shards[0], flat_param.in_shard)
            if _memory_location(flat_param.param) != _memory_location(target):
                moved.append((flat_param, target))
        shard_ptrs = {target.untyped_storage().data_ptr() for _, target in moved}
        # Hazard: a flat param may now alias the memory of another one, so clone values inside shards before writing.
        values = [_clone_if_inside(shard_ptrs, flat_param.param.detach()) for flat_param, _ in moved]
        mismatches: list[str] = []
        for (flat_param, target), value in zip(moved, values, strict=True):
            if _describe_tensor(value) == _describe_tensor(target):
                target.copy_(value)
            else:
                label = self._layout.params[flat_param.param_shards[0].param].label
                mismatches.append(f"{_describe_tensor(value)} instead of {_describe_tensor(target)} for {label}")
            flat_param.param.data = target
        if mismatches:
            raise BindingError(
                f"the optimizer's step() assigned incompatible tensors to param.data: {mismatches[0]}. The "
                "assignment was ignored. It must keep dtype, device and shape."
            )

    def shard_state(self, flat_param: FlatParam, param_shard: ParamShard, state: State) -> State:
        """Return the state of one param shard: views of parameter-shaped values, all other values as they are."""
        if len(flat_param.param_shards) == 1:
            return dict(state)
        span = flat_param.span_of(param_shard)
        return {
            key: value.view(-1)[slice(*span)] if self.is_sharded(key, value, flat_param.param) else value
            for key, value in state.items()
        }

    def is_full_param(self, param_shard: ParamShard) -> bool:
        """Return whether the optimizer gets the full parameter, in its own shape and with unsharded state."""
        return (
            not self._can_join_shards
            and param_shard.in_param.length == self._layout.params[param_shard.param].storage_numel
        )

    def is_sharded(self, key: Any, value: Any, param: torch.Tensor) -> bool:
        """Return whether a state value has one element per element of the parameter, and so is sharded with it."""
        return isinstance(value, torch.Tensor) and self.has_param_shape(key, tuple(value.shape), tuple(param.shape))

    def add_param_shaped_keys(self, keys: frozenset[Any]) -> None:
        """Add keys that the probe did not see, because options have changed since."""
        self._param_shaped_keys |= keys

    def with_param_shaped_keys(self, keys: frozenset[Any]) -> "FlatParams":
        """Return a shallow copy with additional param-shaped keys, over the same flat params."""
        other = copy(self)
        other.add_param_shaped_keys(keys)
        return other

    def is_param_shaped(self, key: Any) -> bool:
        """Return whether state under this key is known to have the parameter's shape."""
        return key in self._param_shaped_keys

    def has_param_shape(self, key: Any, shape: tuple[int, ...], param_shape: tuple[int, ...]) -> bool:
        """Return whether state of this shape is param-shaped. For a single element only the probed keys can tell."""
        return shape == param_shape and (key in self._param_shaped_keys or math.prod(shape) > 1)

    def _set_group_params(self, group: ParamGroup, flat_params: Sequence[FlatParam]) -> None:
        group["params"] = [flat_param.param for flat_param in flat_params]
        if "param_names" in group:
            specs = self._layout.params
            group["param_names"] = [str(specs[flat_param.param_shards[0].param].name) for flat_param in flat_params]

    def _pair_groups(self, optimizer: Optimizer) -> Iterable[tuple[list[FlatParam], ParamGroup]]:
        return zip(self.by_group, optimizer.param_groups, strict=True)

    def _split_into_runs(
        self, param_shards: Iterable[ParamShard], key: Callable[[ParamShard], object]
    ) -> Iterator[tuple[ParamShard, ...]]:
        """Group consecutive shards with equal attributes and `key`; single shards if they cannot be joined."""
        if not self._can_join_shards:
            return ((shard,) for shard in param_shards)
        specs = self._layout.params
        return (
            tuple(run) for _, run in groupby(param_shards, key=lambda shard: (specs[shard.param].attrs, key(shard)))
        )

    def _make_flat_param(self, param_shards: tuple[ParamShard, ...]) -> FlatParam:
        first, last = param_shards[0], param_shards[-1]
        spec = self._layout.params[first.param]
        base = self._layout.buckets[first.bucket].shards[self._rank].start
        span = Span(first.in_bucket.start - base, last.in_bucket.stop - base)
        memory = self._view_span(first, span)
        param = torch.nn.Parameter(memory, requires_grad=_can_require_grad(memory))
        vars(param).update(spec.attrs)
        return FlatParam(param_shards, spec.group, span, param)

    def _view_span(self, first_shard: ParamShard, span: Span) -> torch.Tensor:
        """Return the memory of a flat param that starts with `first_shard`, in the shape that the optimizer gets."""
        spec = self._layout.params[first_shard.param]
        shape, stride = (spec.shape, spec.stride) if self.is_full_param(first_shard) else ((span.length,), (1,))
        return self._shard_view(first_shard.bucket, span, shape, stride)

    def _split_flat_param(self, flat_param: FlatParam, mask: bytes, optimizer: Optimizer) -> list[FlatParam]:
        if _is_uniform(flat_param, mask):
            return [flat_param]
        runs = self._split_into_runs(flat_param.param_shards, lambda shard: mask[shard.param])
        return self._split_at_runs(flat_param, runs, optimizer)

    def _split_at_runs(
        self, flat_param: FlatParam, runs: Iterable[tuple[ParamShard, ...]], optimizer: Optimizer
    ) -> list[FlatParam]:
        """Replace a flat param by one per run, with its part of the state and, in the middle of a step, of the grad."""
        sub_params = [self._make_flat_param(run) for run in runs]
        state, grad = optimizer.state.pop(flat_param.param, None), flat_param.param.grad
        for sub_param in sub_params:
            if state is not None:
                optimizer.state[sub_param.param] = self._split_state(flat_param, sub_param, state)
            if grad is not None:
                sub_param.param.grad = grad[_slice_within(flat_param, sub_param)]
        return sub_params

    def _split_state(self, flat_param: FlatParam, sub_param: FlatParam, state: State) -> State:
        within = _slice_within(flat_param, sub_param)
        return {
            key: value[within] if self.is_sharded(key, value, flat_param.param) else _copy_mutable_state(value)
            for key, value in state.items()
        }


def _memory_location(tensor: torch.Tensor) -> MemoryLocation:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def _describe_tensor(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} on {tensor.device} with shape {tuple(tensor.shape)}"


def _clone_if_inside(storage_ptrs: set[int], value: torch.Tensor) -> torch.Tensor:
    return value.clone() if value.untyped_storage().data_ptr() in storage_ptrs else value


def _is_uniform(flat_param: FlatParam, mask: bytes) -> bool:
    return len({mask[shard.param] for shard in flat_param.param_shards}) == 1


def _bucket_position(flat_param: FlatParam) -> tuple[int, int]:
    return flat_param.bucket, flat_param.param_shards[0].in_bucket.start


def _slice_within(flat_param: FlatParam, sub_param: FlatParam) -> slice:
    """Return the position of `sub_param` in the tensor of the flat param that it was split from."""
    start = sub_param.in_shard.start - flat_param.in_shard.start
    return slice(start, start + sub_param.in_shard.length)


def _copy_mutable_state(value: Any) -> Any:
    """Copy state that is not sharded: optimizers change step counts and lists in place, so they cannot be shared."""
    return map_tensors(deepcopy_except_tensors(value), clone_tensor)


def _can_require_grad(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


# ---------------------------------------------------------------------------------------------------------------------
# Shard storage: the memory behind flat params, either this rank's shard of a bucket or its master weights.


def make_storage(
    rank: Rank,
    param_memory: FlatParamBuffers,
    masters: MasterWeightPolicy | None,
    host_transfers: HostTransfers | None,
    profiler: StepProfiler,
) -> "ShardStorage":
    """Return the storage for the given master-weight and offload policies."""
    if masters is None:
        return ShardStorage(rank, param_memory, host_transfers)
    if host_transfers is None:
        return MasterStorage(rank, param_memory, masters, profiler)
    return OffloadedMasterStorage(rank, param_memory, masters, profiler, host_transfers)


class ShardStorage:
    """The inner optimizer updates the shards in the param buffers directly: no master weights."""

    def __init__(self, rank: Rank, param_memory: FlatParamBuffers, host_transfers: HostTransfers | None = None) -> None:
        """`host_transfers`: offload state to host memory; None keeps it on the device of the parameters."""
        self.rank, self._param_memory, self.host_transfers = rank, param_memory, host_transfers
        self._layout = Layout.empty(0)

    def extend(self, layout: Layout) -> None:
        self._layout = layout

    def view(self, bucket: int, span: Span, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
        """Return a view of the memory that the inner optimizer updates; `span` is relative to the shard."""
        return self.update_target(bucket)[slice(*span)].as_strided(shape, stride)

    def update_target(self, bucket: int) -> torch.Tensor:
        """Return the flat tensor that the inner optimizer updates for a bucket: its shard or the master weights."""
        return self.shard(bucket)

    def allocate_state(self, bucket: int, span: slice, dtype: torch.dtype) -> torch.Tensor:
        """Return zeros for state of a part of a shard, in host memory if state is offloaded."""
        like = self.shard(bucket)[span]
        if self.host_transfers is None:
            return torch.zeros_like(like, dtype=dtype)
        return self.host_transfers.for_device(like.device).zeros(like.numel(), dtype)

    def shard(self, bucket: int) -> torch.Tensor:
        """Return this rank's shard of a bucket, a view of the param buffers."""
        return self._param_memory.buffer(bucket)[slice(*self._layout.buckets[bucket].shards[self.rank])]

    def param_view(self, param_shard: ParamShard) -> torch.Tensor:
        """Return a param shard of this rank as a flat view of the param buffers."""
        return self.shard(param_shard.bucket)[self.slice_in_shard(param_shard)]

    def master_view(self, param_shard: ParamShard) -> torch.Tensor | None:  # noqa: ARG002
        """Return the master weights of a param shard, flat, or None if it has none."""
        return None

    def has_master(self, bucket: int) -> bool:  # noqa: ARG002
        """Return whether a bucket has master weights."""
        return False

    def master_tensors(self) -> list[torch.Tensor]:
        """Return the memory of all master weights: on the host if they are offloaded."""
        return []

    def sync_user_edits(self, params: list[torch.Tensor]) -> None:
        """Update master weights of parameters that the user changed since the last step."""

    def write_params(self, flat_params: Iterable[FlatParam]) -> None:
        """Round updated master weights into the parameters."""

    def mark_synced(self, params: list[torch.Tensor]) -> None:
        """Record that parameters and master weights agree now."""

    def invalidate_masters(self) -> None:
        """Make the next `sync_user_edits` compare all parameters with their master weights."""

    def prefetch_masters(self, bucket: int, host_transfer: HostTransfer) -> None:
        """Start copying the offloaded master weights of a bucket to the device, if it has any."""

    def write_back_masters(self, bucket: int, host_transfer: HostTransfer) -> None:
        """Start copying offloaded master weights of a bucket to the host, and free their device memory."""

    def slice_in_shard(self, param_shard: ParamShard) -> slice:
        """Return the position of a param shard in this rank's shard of the bucket."""
        base = self._layout.buckets[param_shard.bucket].shards[self.rank].start
        return slice(param_shard.in_bucket.start - base, param_shard.in_bucket.stop - base)


class MasterStorage(ShardStorage):
    """Master weights: a copy of the shard in a more precise dtype, for each bucket that the policy covers.

    If the user changes a parameter (loads a model, say), its master weights follow wherever the parameter differs from
    their rounded value. Changes through `param.data` do not increment the version counter and are not detected.
    """

    def __init__(
        self,
        rank: Rank,
        param_memory: FlatParamBuffers,
        policy: MasterWeightPolicy,
        profiler: StepProfiler,
        host_transfers: HostTransfers | None = None,
    ) -> None:
        super().__init__(rank, param_memory, host_transfers)
        self._policy, self._profiler = policy, profiler
        self._masters: dict[int, torch.Tensor] = {}
        self._versions: dict[int, int] = {}

    def extend(self, layout: Layout) -> None:
        super().extend(layout)
        self._masters = {bucket: master for bucket, master in self._masters.items() if bucket < len(layout.buckets)}

    def update_target(self, bucket: int) -> torch.Tensor:
        if not self.has_master(bucket):
            return self.shard(bucket)
        if bucket not in self._masters:
            self._masters[bucket] = self.shard(bucket).to(self._policy.dtype)
        return self._masters[bucket]

    def has_master(self, bucket: int) -> bool:
        return self._policy.covers(self._layout.buckets[bucket].dtype)

    def master_view(self, param_shard: ParamShard) -> torch.Tensor | None:
        return (
            self.update_target(param_shard.bucket)[self.slice_in_shard(param_shard)]
            if self.has_master(param_shard.bucket)
            else None
        )

    def master_tensors(self) -> list[torch.Tensor]:
        return list(self._masters.values())

    @torch.no_grad()
    def sync_user_edits(self, params: list[torch.Tensor]) -> None:
        for shard in self._owned_param_shards():
            if self._versions.get(shard.param) != params[shard.param]._version:
                self._refresh_master(shard)

    @torch.no_grad()
    def write_params(self, flat_params: Iterable[FlatParam]) -> None:
        with self._profiler.phase(Phase.ROUND_MASTER_WEIGHTS):
            for flat_param in flat_params:
                if self.has_master(flat_param.bucket):
                    self.shard(flat_param.bucket)[slice(*flat_param.in_shard)].copy_(flat_param.param.view(-1))

    def mark_synced(self, params: list[torch.Tensor]) -> None:
        self._versions = {shard.param: params[shard.param]._version for shard in self._owned_param_shards()}

    def invalidate_masters(self) -> None:
        self._versions.clear()

    def _refresh_master(self, param_shard: ParamShard) -> None:
        """Take over the elements of a parameter that differ from its rounded master weights."""
        master = self.master_view(param_shard)
        assert master is not None, "this bucket has no master weights"
        param = self.param_view(param_shard).to(master.device)
        master.copy_(torch.where(master.to(param.dtype) == param, master, param.to(master.dtype)))

    def _owned_param_shards(self) -> list[ParamShard]:
        """Return this rank's param shards that have master weights."""
        return [
            shard
            for bucket in self._layout.buckets
            if self._policy.covers(bucket.dtype)
            for shard in bucket.param_shards_of_rank(self.rank)
        ]


class OffloadedMasterStorage(MasterStorage):
    """Master weights in host memory. Their device tensors have memory only from prefetch to write-back."""

    host_transfers: HostTransfers

    def __init__(
        self,
        rank: Rank,
        param_memory: FlatParamBuffers,
        policy: MasterWeightPolicy,
        profiler: StepProfiler,
        host_transfers: HostTransfers,
    ) -> None:
        super().__init__(rank, param_memory, policy, profiler, host_transfers)
        self._host_masters: dict[int, torch.Tensor] = {}

    def extend(self, layout: Layout) -> None:
        super().extend(layout)
        self._host_masters = {
            bucket: master for bucket, master in self._host_masters.items() if bucket in self._masters
        }

    def update_target(self, bucket: int) -> torch.Tensor:
        if self.has_master(bucket) and bucket not in self._masters:
            master = super().update_target(bucket)
            self._host_masters[bucket] = self.host_transfers.for_device(master.device).allocate(master).copy_(master)
            _free_memory(master)
        return super().update_target(bucket)

    def view(self, bucket: int, span: Span, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
        if not self.has_master(bucket) or self._is_on_device(bucket):
            return super().view(bucket, span, shape, stride)
        master = self.update_target(bucket)
        _allocate_memory(master)  # torch cannot make a view of a tensor without memory
        view = super().view(bucket, span, shape, stride)
        _free_memory(master)
        return view

    def write_params(self, flat_params: Iterable[FlatParam]) -> None:
        """Round master weights that are on the device. All others were rounded before they were written back."""
        on_device = (
            flat_param
            for flat_param in flat_params
            if self.has_master(flat_param.bucket) and self._is_on_device(flat_param.bucket)
        )
        super().write_params(on_device)

    def master_view(self, param_shard: ParamShard) -> torch.Tensor | None:
        if not self.has_master(param_shard.bucket):
            return None
        self.update_target(param_shard.bucket)
        return self._host_masters[param_shard.bucket][self.slice_in_shard(param_shard)]

    def master_tensors(self) -> list[torch.Tensor]:
        return list(self._host_masters.values())

    def prefetch_masters(self, bucket: int, host_transfer: HostTransfer) -> None:
        if self.has_master(bucket):
            _allocate_memory(self._masters[bucket])
            host_transfer.prefetch_into(self._masters[bucket], self._host_masters[bucket])

    def write_back_masters(self, bucket: int, host_transfer: HostTransfer) -> None:
        if self.has_master(bucket):
            host_transfer.write_back(self._masters[bucket], self._host_masters[bucket])
            _free_memory(self._masters[bucket])

    def _is_on_device(self, bucket: int) -> bool:
        return self.update_target(bucket).untyped_storage().nbytes() > 0


def _allocate_memory(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(tensor.nbytes)


def _free_memory(tensor: torch.Tensor) -> None:
    """Free a tensor's memory. Its views stay, but must not be used until memory is allocated again."""
    tensor.untyped_storage().resize_(0)
