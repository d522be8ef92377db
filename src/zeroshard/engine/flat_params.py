"""What the inner optimizer holds of flat buckets: few long tensors instead of one a parameter.

A segment is a run of this rank's pieces of one group in one bucket, all with the same marks. As long as all
parameters in it get gradients it is updated as one tensor. When some do not, it is split, so that those keep their
momenta, their step counts and themselves, as the unsharded optimizer leaves them.
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
from ..config import MasterWeights
from ..errors import BindingError
from ..layout.layout import Layout, ParamShard
from ..profiling import Phase, StepProfiler
from ..state.tensor_utils import clone_tensor, deepcopy_except_tensors, map_tensors
from .host_buffers import HostTransfer, HostTransfers
from .inner import ParamGroup
from .param_store import FlatParamBuffers

ShardViewFn = Callable[[int, Span, Sequence[int], Sequence[int]], torch.Tensor]
"""A span of this rank's shard of a bucket, in a shape and with strides."""
State = dict[Any, Any]
MemoryLocation = tuple[int, torch.Size, tuple[int, ...]]


@dataclass(frozen=True, eq=False)
class FlatParam:
    """Neighbouring pieces, and the tensor over their memory that the inner optimizer updates."""

    param_shards: tuple[ParamShard, ...]
    group: int
    in_shard: Span
    param: torch.nn.Parameter
    _cached_view: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def bucket(self) -> int:
        return self.param_shards[0].bucket

    def span_of(self, param_shard: ParamShard) -> Span:
        """Where a piece lies in the tensor."""
        start = param_shard.in_bucket.start - self.param_shards[0].in_bucket.start
        return Span(start, start + param_shard.in_bucket.length)

    def view_of(self, shard: torch.Tensor) -> torch.Tensor:
        """The part of a flat shard that goes with the tensor, in its shape; made once."""
        if self._cached_view is None or self._cached_view[0] is not shard:
            view = shard[slice(*self.in_shard)].as_strided(self.param.shape, self.param.stride())
            object.__setattr__(self, "_view", (shard, view))
        assert self._cached_view is not None
        return self._cached_view[1]


class FlatParams:
    """All segments of a rank, and the inner optimizer's view of them."""

    def __init__(
        self, rank: Rank, shard_view: ShardViewFn, *, can_join_shards: bool, param_shaped_keys: frozenset[str]
    ) -> None:
        """`joins`: the optimizer updates a flat run as it would update its parts; else each piece is on its own, and
        one that is a whole parameter has its shape. `param_shaped`: keys of state that has that shape, too."""
        self._rank, self._shard_view, self._can_join_shards, self._param_shaped_keys = (
            rank,
            shard_view,
            can_join_shards,
            param_shaped_keys,
        )
        self._layout = Layout.empty(0)
        self.by_group: list[list[FlatParam]] = []
        """In the order of `_numbers`, each in the order of memory."""
        self._group_ids: list[int] = []
        self._bound_locations: list[MemoryLocation] = []
        """Where all segments lay when they were last where they belong."""

    def __iter__(self) -> Iterator[FlatParam]:
        return chain.from_iterable(self.by_group)

    def extend(self, layout: Layout, group_ids: Sequence[int]) -> None:
        """Add segments for the buckets that `layout` has beyond the present ones. `numbers`: of all groups to hold."""
        known, self._layout, self._group_ids = len(self._layout.buckets), layout, list(group_ids)
        self.by_group.extend([] for _ in group_ids[len(self.by_group) :])
        held = dict(zip(group_ids, self.by_group, strict=True))
        for bucket in layout.buckets[known:]:
            mine = (
                piece for piece in bucket.param_shards_of_rank(self._rank) if layout.params[piece.param].group in held
            )
            for pieces in self._split_into_runs(mine, lambda piece: layout.params[piece.param].group):
                segment = self._make_flat_param(pieces)
                held[segment.group].append(segment)

    def rollback(self, layout: Layout, num_groups: int) -> None:
        """Undo `extend`."""
        self._layout = layout
        del self.by_group[num_groups:], self._group_ids[num_groups:]

    def make_inner_groups(self, groups: Sequence[ParamGroup]) -> list[ParamGroup]:
        """The user's groups, with segments in the place of parameters. A group without any keeps the user's."""
        own = [dict(group) for group in groups]
        for group, segments in zip(own, self.by_group, strict=True):
            if segments:
                self._set_group_params(group, segments)
        return own

    def param_ids(self) -> set[int]:
        return {id(segment.param) for segment in self}

    def split_by_mask(self, mask: bytes, optimizer: Optimizer) -> None:
        """Split segments in which only some parameters are flagged, with their state."""
        for segments, group in zip(self.by_group, optimizer.param_groups, strict=True):
            if all(_is_uniform(segment, mask) for segment in segments):
                continue
            parts = [self._split_flat_param(segment, mask, optimizer) for segment in segments]
            segments[:] = chain.from_iterable(parts)
            self._set_group_params(group, segments)

    def flat_param_of(self, param_shard: ParamShard) -> FlatParam:
        """The one that a piece of this rank lies in."""
        segments, place = self._find(param_shard)
        return segments[place]

    def isolate(self, param_shard: ParamShard, optimizer: Optimizer) -> FlatParam:
        """Give a piece a segment of its own, with its state. Other segments keep their tensors."""
        segments, place = self._find(param_shard)
        pieces = segments[place].param_shards
        if len(pieces) == 1:
            return segments[place]
        at = pieces.index(param_shard)
        runs = [run for run in (pieces[:at], (param_shard,), pieces[at + 1 :]) if run]
        segments[place : place + 1] = self._split_at_runs(segments[place], runs, optimizer)
        self._set_group_params(optimizer.param_groups[self._group_position(param_shard)], segments)
        return self.flat_param_of(param_shard)

    def join_stateless(self, optimizer: Optimizer) -> None:
        """Join neighbours without state again. Hazard: views of state that is joined would no longer be its memory."""
        for segments, group in self._pair_groups(optimizer) if self._can_join_shards else ():
            joined: list[FlatParam] = []
            for (*_, has_state), run in groupby(segments, key=lambda it: self._merge_key(it, optimizer)):
                neighbours = list(run)
                pieces = tuple(piece for segment in neighbours for piece in segment.param_shards)
                joined += neighbours if has_state or len(neighbours) == 1 else [self._make_flat_param(pieces)]
            if len(joined) < len(segments):
                segments[:] = joined
                self._set_group_params(group, segments)

    def _merge_key(self, flat_param: FlatParam, optimizer: Optimizer) -> tuple[object, ...]:
        return (
            flat_param.bucket,
            self._layout.params[flat_param.param_shards[0].param].attrs,
            flat_param.param in optimizer.state,
        )

    def _find(self, param_shard: ParamShard) -> tuple[list[FlatParam], int]:
        """All segments of its group, and the place among them of the one that it lies in."""
        segments = self.by_group[self._group_position(param_shard)]
        place = bisect_right(segments, (param_shard.bucket, param_shard.in_bucket.start), key=_bucket_position) - 1
        while param_shard not in segments[place].param_shards:  # one without elements starts where the next one does
            place -= 1
        return segments, place

    def _group_position(self, param_shard: ParamShard) -> int:
        return self._group_ids.index(self._layout.params[param_shard.param].group)

    def reflatten(self, optimizer: Optimizer, merge_key_of: Callable[[ParamShard], object]) -> Callable[[], None]:
        """Cut anew into runs of pieces that are `alike`, and drop all state; returns how to undo it."""
        before = [list(segments) for segments in self.by_group]
        state = dict(optimizer.state)

        def undo() -> None:
            for (segments, group), kept in zip(self._pair_groups(optimizer), before, strict=True):
                segments[:] = kept
                self._set_group_params(group, segments)
            optimizer.state.clear()
            optimizer.state.update(state)

        for segments, group in self._pair_groups(optimizer):
            pieces = [piece for segment in segments for piece in segment.param_shards]
            segments[:] = [
                self._make_flat_param(run)
                for run in self._split_into_runs(pieces, lambda p: (p.bucket, merge_key_of(p)))
            ]
            self._set_group_params(group, segments)
        for key in [key for key in optimizer.state if isinstance(key, torch.Tensor)]:
            del optimizer.state[key]
        return undo

    def rebind_if_moved(self) -> None:
        """Notice memory that the optimizer has exchanged (`param.data = ...`): its values come into the shards."""
        if [_memory_location(segment.param) for segment in self] != self._bound_locations:
            self.rebind(self)
            self._bound_locations = [_memory_location(segment.param) for segment in self]

    @torch.no_grad()
    def rebind(self, flat_params: Iterable[FlatParam]) -> None:
        """The same for some of them. What does not fit is dropped, and raised in the end."""
        rooms = ((segment, self._view_span(segment.param_shards[0], segment.in_shard)) for segment in flat_params)
        away = [(segment, room) for segment, room in rooms if _memory_location(segment.param) != _memory_location(room)]
        shards = {room.untyped_storage().data_ptr() for _, room in away}
        # Hazard: one may lie in the room of another, so what lies in shards is read before any is written.
        values = [_clone_if_inside(shards, segment.param.detach()) for segment, _ in away]
        misfits: list[str] = []
        for (segment, room), value in zip(away, values, strict=True):
            if _describe_tensor(value) == _describe_tensor(room):
                room.copy_(value)
            else:
                label = self._layout.params[segment.param_shards[0].param].label
                misfits.append(f"{_describe_tensor(value)} instead of {_describe_tensor(room)} for {label}")
            segment.param.data = room
        if misfits:
            raise BindingError(
                f"the optimizer has assigned to `.data` of its parameters what they cannot be: {misfits[0]}. That was "
                "not taken over. Its step() is to keep dtypes, devices and shapes."
            )

    def shard_state(self, flat_param: FlatParam, param_shard: ParamShard, state: State) -> State:
        """The state of one piece of a segment: views of what has the parameter's shape, the rest as it is."""
        if len(flat_param.param_shards) == 1:
            return dict(state)
        span = flat_param.span_of(param_shard)
        return {
            key: value.view(-1)[slice(*span)] if self.is_sharded(key, value, flat_param.param) else value
            for key, value in state.items()
        }

    def is_full_param(self, param_shard: ParamShard) -> bool:
        """Whether it is a parameter in its own shape, with state that is not cut."""
        return (
            not self._can_join_shards
            and param_shard.in_param.length == self._layout.params[param_shard.param].storage_numel
        )

    def is_sharded(self, key: Any, value: Any, param: torch.Tensor) -> bool:
        """Whether a value has an element for each of the parameter's."""
        return isinstance(value, torch.Tensor) and self.has_param_shape(key, tuple(value.shape), tuple(param.shape))

    def add_param_shaped_keys(self, keys: frozenset[Any]) -> None:
        """Of keys that the self-test did not see: options may have changed since."""
        self._param_shaped_keys |= keys

    def with_param_shaped_keys(self, keys: frozenset[Any]) -> "FlatParams":
        """One that has learned that, over the same segments."""
        other = copy(self)
        other.add_param_shaped_keys(keys)
        return other

    def is_param_shaped(self, key: Any) -> bool:
        """Whether values under this key are known to have the parameter's shape."""
        return key in self._param_shaped_keys

    def has_param_shape(self, key: Any, shape: tuple[int, ...], param_shape: tuple[int, ...]) -> bool:
        """Of one element the shape says nothing, so the self-test does."""
        return shape == param_shape and (key in self._param_shaped_keys or math.prod(shape) > 1)

    def _set_group_params(self, group: ParamGroup, flat_params: Sequence[FlatParam]) -> None:
        group["params"] = [segment.param for segment in flat_params]
        if "param_names" in group:
            group["param_names"] = [
                str(self._layout.params[segment.param_shards[0].param].name) for segment in flat_params
            ]

    def _pair_groups(self, optimizer: Optimizer) -> Iterable[tuple[list[FlatParam], ParamGroup]]:
        return zip(self.by_group, optimizer.param_groups, strict=True)

    def _split_into_runs(
        self, param_shards: Iterable[ParamShard], key: Callable[[ParamShard], object]
    ) -> Iterator[tuple[ParamShard, ...]]:
        if not self._can_join_shards:
            return ((piece,) for piece in param_shards)
        specs = self._layout.params
        return (
            tuple(run) for _, run in groupby(param_shards, key=lambda piece: (specs[piece.param].attrs, key(piece)))
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
        """The memory of a segment that begins with a piece."""
        spec = self._layout.params[first_shard.param]
        shape, stride = (spec.shape, spec.stride) if self.is_full_param(first_shard) else ((span.length,), (1,))
        return self._shard_view(first_shard.bucket, span, shape, stride)

    def _split_flat_param(self, flat_param: FlatParam, mask: bytes, optimizer: Optimizer) -> list[FlatParam]:
        if _is_uniform(flat_param, mask):
            return [flat_param]
        runs = self._split_into_runs(flat_param.param_shards, lambda piece: mask[piece.param])
        return self._split_at_runs(flat_param, runs, optimizer)

    def _split_at_runs(
        self, flat_param: FlatParam, runs: Iterable[tuple[ParamShard, ...]], optimizer: Optimizer
    ) -> list[FlatParam]:
        """A segment for each run of its pieces, with their state and, in the middle of a step, their gradients."""
        parts = [self._make_flat_param(run) for run in runs]
        state, grad = optimizer.state.pop(flat_param.param, None), flat_param.param.grad
        for part in parts:
            if state is not None:
                optimizer.state[part.param] = self._split_state(flat_param, part, state)
            if grad is not None:
                part.param.grad = grad[_slice_within(flat_param, part)]
        return parts

    def _split_state(self, flat_param: FlatParam, sub_param: FlatParam, state: State) -> State:
        span = _slice_within(flat_param, sub_param)
        return {
            key: value[span] if self.is_sharded(key, value, flat_param.param) else _copy_mutable_state(value)
            for key, value in state.items()
        }


def _memory_location(tensor: torch.Tensor) -> MemoryLocation:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def _describe_tensor(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} on {tensor.device} with shape {tuple(tensor.shape)}"


def _clone_if_inside(storage_ptrs: set[int], value: torch.Tensor) -> torch.Tensor:
    return value.clone() if value.untyped_storage().data_ptr() in storage_ptrs else value


def _is_uniform(flat_param: FlatParam, mask: bytes) -> bool:
    return len({mask[piece.param] for piece in flat_param.param_shards}) == 1


def _bucket_position(flat_param: FlatParam) -> tuple[int, int]:
    return flat_param.bucket, flat_param.param_shards[0].in_bucket.start


def _slice_within(flat_param: FlatParam, sub_param: FlatParam) -> slice:
    """Where a part of a segment lies in its tensor."""
    start = sub_param.in_shard.start - flat_param.in_shard.start
    return slice(start, start + sub_param.in_shard.length)


def _copy_mutable_state(value: Any) -> Any:
    """Step counts are tensors that optimizers change in place, as they may change lists: parts must not share them."""
    return map_tensors(deepcopy_except_tensors(value), clone_tensor)


def _can_require_grad(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


# ---------------------------------------------------------------------------------------------------------------------
# The memory that the inner optimizer updates: this rank's shard of a bucket, or a more precise copy of it.


def make_storage(
    rank: Rank,
    param_store: FlatParamBuffers,
    masters: MasterWeights | None,
    host_transfers: HostTransfers | None,
    profiler: StepProfiler,
) -> "ShardStorage":
    """The kind of memory that policies ask for."""
    if masters is None:
        return ShardStorage(rank, param_store, host_transfers)
    if host_transfers is None:
        return MasterStorage(rank, param_store, masters, profiler)
    return OffloadedMasterStorage(rank, param_store, masters, profiler, host_transfers)


class ShardStorage:
    """Shards of buckets as they lie in the store."""

    def __init__(self, rank: Rank, param_store: FlatParamBuffers, host_transfers: HostTransfers | None = None) -> None:
        """`hosts`: state rests there, not where the parameters are."""
        self.rank, self._param_store, self.host_transfers = rank, param_store, host_transfers
        self._layout = Layout.empty(0)

    def extend(self, layout: Layout) -> None:
        self._layout = layout

    def view(self, bucket: int, span: Span, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
        """A part of a shard, which the inner optimizer is to update."""
        return self.update_target(bucket)[slice(*span)].as_strided(shape, stride)

    def update_target(self, bucket: int) -> torch.Tensor:
        """What the inner optimizer is to update."""
        return self.shard(bucket)

    def allocate_state(self, bucket: int, span: slice, dtype: torch.dtype) -> torch.Tensor:
        """Memory for state of a part of a shard, where state rests."""
        like = self.shard(bucket)[span]
        if self.host_transfers is None:
            return torch.zeros_like(like, dtype=dtype)
        return self.host_transfers.for_device(like.device).zeros(like.numel(), dtype)

    def shard(self, bucket: int) -> torch.Tensor:
        return self._param_store.buffer(bucket)[slice(*self._layout.buckets[bucket].shards[self.rank])]

    def param_view(self, param_shard: ParamShard) -> torch.Tensor:
        """A piece of this rank as it lies in the store, flat."""
        return self.shard(param_shard.bucket)[self.slice_in_shard(param_shard)]

    def master_view(self, param_shard: ParamShard) -> torch.Tensor | None:  # noqa: ARG002
        """The more precise copy of a piece, if there is one."""
        return None

    def has_master(self, bucket: int) -> bool:  # noqa: ARG002
        """Whether there are more precise copies of a bucket."""
        return False

    def master_tensors(self) -> list[torch.Tensor]:
        """All more precise copies, where they rest."""
        return []

    def sync_user_edits(self, params: list[torch.Tensor]) -> None:
        """Take over what was done to parameters since the last update."""

    def write_params(self, flat_params: Iterable[FlatParam]) -> None:
        """Bring an update into the parameters' own memory."""

    def mark_synced(self, params: list[torch.Tensor]) -> None:
        """Parameters are now as the last update has left them."""

    def invalidate_masters(self) -> None:
        """Parameters may be others than the copies."""

    def slice_in_shard(self, param_shard: ParamShard) -> slice:
        """Where a piece lies in its shard."""
        base = self._layout.buckets[param_shard.bucket].shards[self.rank].start
        return slice(param_shard.in_bucket.start - base, param_shard.in_bucket.stop - base)


class MasterStorage(ShardStorage):
    """Copies in another dtype, for buckets that the policy covers.

    A parameter that was changed from outside (a loaded model) is taken over where its value is another one than the
    rounded copy. Changes that autograd does not count, through `param.data`, are not noticed.
    """

    def __init__(
        self,
        rank: Rank,
        param_store: FlatParamBuffers,
        policy: MasterWeights,
        profiler: StepProfiler,
        host_transfers: HostTransfers | None = None,
    ) -> None:
        super().__init__(rank, param_store, host_transfers)
        self._policy, self._profiler = policy, profiler
        self._masters: dict[int, torch.Tensor] = {}
        self._versions: dict[int, int] = {}

    def extend(self, layout: Layout) -> None:
        super().extend(layout)
        self._masters = {bucket: copy for bucket, copy in self._masters.items() if bucket < len(layout.buckets)}

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
        for piece in self._owned_param_shards():
            if self._versions.get(piece.param) != params[piece.param]._version:
                self._refresh_master(piece)

    @torch.no_grad()
    def write_params(self, flat_params: Iterable[FlatParam]) -> None:
        with self._profiler.phase(Phase.ROUND_MASTER_WEIGHTS):
            for segment in flat_params:
                if self.has_master(segment.bucket):
                    self.shard(segment.bucket)[slice(*segment.in_shard)].copy_(segment.param.view(-1))

    def mark_synced(self, params: list[torch.Tensor]) -> None:
        self._versions = {piece.param: params[piece.param]._version for piece in self._owned_param_shards()}

    def invalidate_masters(self) -> None:
        self._versions.clear()

    def _refresh_master(self, param_shard: ParamShard) -> None:
        copy = self.master_view(param_shard)
        assert copy is not None, "of those that there are copies of"
        own = self.param_view(param_shard).to(copy.device)
        copy.copy_(torch.where(copy.to(own.dtype) == own, copy, own.to(copy.dtype)))

    def _owned_param_shards(self) -> list[ParamShard]:
        return [
            piece
            for bucket in self._layout.buckets
            if self._policy.covers(bucket.dtype)
            for piece in bucket.param_shards_of_rank(self.rank)
        ]


class OffloadedMasterStorage(MasterStorage):
    """Copies that rest in host memory. On the device they have memory from `fetch` to `stow` only."""

    host_transfers: HostTransfers

    def __init__(
        self,
        rank: Rank,
        param_store: FlatParamBuffers,
        policy: MasterWeights,
        profiler: StepProfiler,
        host_transfers: HostTransfers,
    ) -> None:
        super().__init__(rank, param_store, policy, profiler, host_transfers)
        self._host_masters: dict[int, torch.Tensor] = {}

    def extend(self, layout: Layout) -> None:
        super().extend(layout)
        self._host_masters = {bucket: home for bucket, home in self._host_masters.items() if bucket in self._masters}

    def update_target(self, bucket: int) -> torch.Tensor:
        if self.has_master(bucket) and bucket not in self._masters:
            copy = super().update_target(bucket)
            self._host_masters[bucket] = self.host_transfers.for_device(copy.device).allocate(copy).copy_(copy)
            _free_memory(copy)
        return super().update_target(bucket)

    def view(self, bucket: int, span: Span, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
        if not self.has_master(bucket) or self._is_on_device(bucket):
            return super().view(bucket, span, shape, stride)
        copy = self.update_target(bucket)
        _allocate_memory(copy)  # a view of what has no memory cannot be made
        part = super().view(bucket, span, shape, stride)
        _free_memory(copy)
        return part

    def write_params(self, flat_params: Iterable[FlatParam]) -> None:
        """Those that are here. The others have been here, and were brought there then."""
        here = (it for it in flat_params if self.has_master(it.bucket) and self._is_on_device(it.bucket))
        super().write_params(here)

    def master_view(self, param_shard: ParamShard) -> torch.Tensor | None:
        if not self.has_master(param_shard.bucket):
            return None
        self.update_target(param_shard.bucket)
        return self._host_masters[param_shard.bucket][self.slice_in_shard(param_shard)]

    def master_tensors(self) -> list[torch.Tensor]:
        return list(self._host_masters.values())

    def prefetch(self, bucket: int, host_transfer: HostTransfer) -> None:
        """Start bringing the copies of a bucket to the device."""
        if self.has_master(bucket):
            _allocate_memory(self._masters[bucket])
            host_transfer.prefetch_into(self._masters[bucket], self._host_masters[bucket])

    def write_back(self, bucket: int, host_transfer: HostTransfer) -> None:
        """Start bringing them back."""
        if self.has_master(bucket):
            host_transfer.write_back(self._masters[bucket], self._host_masters[bucket])
            _free_memory(self._masters[bucket])

    def _is_on_device(self, bucket: int) -> bool:
        return self.update_target(bucket).untyped_storage().nbytes() > 0


def _allocate_memory(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(tensor.nbytes)


def _free_memory(tensor: torch.Tensor) -> None:
    """Give back its memory. Views of it stay, and must not be used."""
    tensor.untyped_storage().resize_(0)
