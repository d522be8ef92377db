"""Where parameters lie, and what is put on the wire for them. The only allocator.

A parcel is the memory of one message from one owner. Two stores make them:

- `LooseStore` leaves parameters where they are. Small ones are packed into a staging buffer, large
  ones travel from and into their own memory.
- `FlatStore` moves parameters into flat buffers, one a bucket or one for each owner in it. A run of neighbours is a
  parcel as it is; several small runs are packed.

Staging buffers have memory only while a shipment is sent.
"""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch.autograd.graph import increment_version
from torch.utils.dlpack import from_dlpack

from .._types import MIB, Rank, Span, align_up
from ..errors import BindingError
from ..layout.layout import Bucket, Layout, ParamShard
from ..layout.partition import ALIGNMENT_BYTES
from ..layout.spec import ParamSpec
from ..params import check_no_aliasing

_T = TypeVar("_T")

MIN_IN_PLACE_BYTES = MIB
"""From this size on a parameter is worth a message of its own, and not worth a copy."""
MESSAGE_BYTES = 2 * MIB
STAGING_BYTES = 8 * MIB
"""What a store's staging buffer may take on the CPU, where every step pays for its pages again."""
DEVICE_MESSAGE_BYTES = 32 * MIB
DEVICE_STAGING_BYTES = 64 * MIB
"""Elsewhere, where messages cost more and the allocator keeps what was freed."""
MAX_CACHED_PLANS = 4
_get_shape = attrgetter("shape")


class BroadcastMessage(Protocol):
    """One message: `pack` on the owner before it goes, `unpack` on the others once it has arrived."""

    owner: Rank
    payload: torch.Tensor

    def pack(self) -> None: ...

    def unpack(self) -> None: ...


class BroadcastPlan(NamedTuple):
    """Parcels in the order in which all ranks send them.

    Hazard: staging buffers are shared, so no more than `window` staged parcels may be under way at once.
    """

    messages: list[BroadcastMessage]
    max_in_flight: int
    staging_buffers: list[torch.Tensor]

    def allocate_staging(self) -> "BroadcastPlan":
        """The same, with memory in its staging buffers."""
        for buffer in self.staging_buffers:
            _ensure_allocated(buffer)
        return self

    def release_staging(self) -> None:
        """Free that memory, once all staged parcels have arrived. Views of it stay, to be used next time."""
        for buffer in self.staging_buffers:
            buffer.untyped_storage().resize_(0)


class MemoryRange(NamedTuple):
    """What one owner sends, as it lies in memory: a parameter, or neighbours in a flat buffer."""

    tensor: torch.Tensor
    params: list[torch.Tensor]


class InPlaceMessage:
    """Parameters whose own memory travels."""

    def __init__(self, owner: Rank, payload: torch.Tensor, params: list[torch.Tensor]) -> None:
        self.owner, self.payload, self._params = owner, payload, params

    def pack(self) -> None:
        pass

    def unpack(self) -> None:
        # Autograd must see a remote update as the in-place change that a local one is.
        increment_version(self._params)


class StagedMessage:
    """Runs that are copied into and out of a staging buffer, which `stage` must give first."""

    payload: torch.Tensor

    def __init__(self, owner: Rank, ranges: list[MemoryRange]) -> None:
        self.owner, self._tensors = owner, [run.tensor for run in ranges]
        self._aliased_params = [param for run in ranges if run.params[0] is not run.tensor for param in run.params]
        """Parameters that do not notice when the memory of their run is written to."""
        self.nbytes = sum(run.tensor.nbytes for run in ranges)
        self.device = ranges[0].tensor.device

    @cached_property
    def _flat_views(self) -> list[torch.Tensor] | None:
        """For the owner: one concatenation is faster than as many copies."""
        if not all(param.is_contiguous() for param in self._tensors):
            return None
        return [param.detach().view(-1) for param in self._tensors]

    def bind_staging(self, buffer: torch.Tensor) -> None:
        self.payload = buffer[: self.nbytes].view(self._tensors[0].dtype)
        parts = torch.split(self.payload, [param.numel() for param in self._tensors])
        self._staged_views = [part.view(param.shape) for part, param in zip(parts, self._tensors, strict=True)]

    def pack(self) -> None:
        # A transposed parameter keeps its pointer, and so its alias here, but not its order.
        if self._flat_views is not None and all(param.is_contiguous() for param in self._tensors):
            torch.cat(self._flat_views, out=self.payload)
        else:
            torch._foreach_copy_(self._staged_views, self._tensors)

    def unpack(self) -> None:
        torch._foreach_copy_(self._tensors, self._staged_views)
        increment_version(self._aliased_params)


class ParamStore(ABC):
    """All parameters by index, and the parcels that carry them."""

    def __init__(self) -> None:
        self._params: list[torch.Tensor] = []
        self._layout = Layout.empty(0)
        self._data_ptrs: list[int] = []
        self._shapes: list[torch.Size] = []
        self._staging_buffers: dict[torch.device, torch.Tensor] = {}
        self._plans_by_mask: dict[bytes, BroadcastPlan] = {}
        self._plans_by_bucket: dict[int, BroadcastPlan] = {}

    def extend(self, layout: Layout, params: Sequence[torch.Tensor]) -> None:
        """Take in the parameters and buckets that `layout` has beyond the present one."""
        known = len(self._layout.buckets)
        self._layout = layout
        self._params.extend(params)
        for bucket in layout.buckets[known:]:
            self._add_bucket(bucket)
        # Hazard: not of earlier parameters. One whose memory was exchanged since is noticed by the next `refresh`.
        self._record_locations(params)

    def prepare(self, layout: Layout, params: Sequence[torch.Tensor]) -> None:  # noqa: B027 (most have nothing to do)
        """Get ready for an `extend` to `layout`. `params` are all of them."""

    def rollback(self) -> None:  # noqa: B027 (most have nothing to take back)
        """Undo what was prepared for an `extend` that does not come."""

    def rebind_if_moved(self, indices: Sequence[int] | None = None, *, check_shapes: bool = True) -> None:
        """Notice parameters whose memory was exchanged since (`param.data = ...`): bind anew, or refuse.

        `among`: look at these only. `shapes`: a parameter turned over (`param.data = param.data.t()`) keeps its
        pointer, so look at shapes, too; not needed where its gradient would not fit any more.
        """
        params = _select(self._params, indices)
        if list(map(torch.Tensor.data_ptr, params)) == _select(self._data_ptrs, indices) and (
            not check_shapes or list(map(_get_shape, params)) == _select(self._shapes, indices)
        ):
            return
        for spec, param in zip(self._layout.params, self._params, strict=True):
            _require_same_metadata(spec, param)
        check_no_aliasing(self._layout.params, self._params)
        self._rebind()
        self._data_ptrs, self._shapes = [], []
        self._record_locations(self._params)

    def staging_buffers(self) -> list[torch.Tensor]:
        """Memory in which small parameters are packed: none between shipments."""
        return [buffer for buffer in self._staging_buffers.values() if _is_allocated(buffer)]

    def plan_broadcast(self, update_mask: bytes) -> BroadcastPlan:
        """Parcels of the parameters flagged in `moving`, in an order that is the same on all ranks.

        Their staging buffers have memory until the shipment is released. It is allocated here, and not when it is sent:
        a rank that has none left says so before the others wait for its messages.
        """
        if update_mask not in self._plans_by_mask:
            shipment = self._build_plan(update_mask, self._layout.buckets)
            while len(self._plans_by_mask) >= MAX_CACHED_PLANS:
                del self._plans_by_mask[next(iter(self._plans_by_mask))]
            self._plans_by_mask[update_mask] = shipment
        return self._plans_by_mask[update_mask].allocate_staging()

    def plan_bucket_broadcast(self, bucket: int) -> BroadcastPlan:
        """Parcels of all parameters of one bucket."""
        if bucket not in self._plans_by_bucket:
            self._plans_by_bucket[bucket] = self._build_plan(b"\1" * len(self._params), [self._layout.buckets[bucket]])
        return self._plans_by_bucket[bucket].allocate_staging()

    def _build_plan(self, update_mask: bytes, buckets: Sequence[Bucket]) -> BroadcastPlan:
        # Over all buckets: hundreds of groups that were added one by one have as many of them.
        runs: dict[tuple[Rank, torch.dtype, torch.device], list[MemoryRange]] = defaultdict(list)
        for bucket in buckets:
            full = [piece for piece in bucket.param_shards if piece.in_param.length]
            for owner, pieces in groupby(full, key=lambda piece: piece.owner):
                runs[owner, bucket.dtype, bucket.device].extend(self._memory_ranges(bucket, list(pieces), update_mask))
        queues: dict[Rank, list[BroadcastMessage]] = defaultdict(list)
        for (owner, _, _), of_kind in runs.items():
            queues[owner].extend(self._build_messages(owner, of_kind))
        parcels = [parcel for _, _, parcel in sorted(_interleave_owners(queues), key=lambda turn: turn[:2])]
        packed = [parcel for parcel in parcels if isinstance(parcel, StagedMessage)]
        window = self._assign_staging(packed)
        return BroadcastPlan(
            parcels, window, [self._staging_buffers[device] for device in {parcel.device for parcel in packed}]
        )

    def _build_messages(self, owner: Rank, ranges: list[MemoryRange]) -> Iterator[BroadcastMessage]:
        # Hazard: sizes alone decide what is a parcel. Strides may differ from rank to rank.
        small: list[MemoryRange] = []
        limit, _ = _staging_limits([run.tensor for run in ranges])
        room = limit
        for run in ranges:
            if run.tensor.nbytes >= MIN_IN_PLACE_BYTES or self._can_send_in_place(ranges):
                yield _make_single_message(owner, run)
                continue
            if run.tensor.nbytes > room:
                yield StagedMessage(owner, small)
                small, room = [], limit
            small.append(run)
            room -= run.tensor.nbytes
        if small:
            yield StagedMessage(owner, small)

    def _can_send_in_place(self, ranges: list[MemoryRange]) -> bool:  # noqa: ARG002
        """Whether a small run needs no packing, since it is all there is."""
        return False

    def _assign_staging(self, messages: list[StagedMessage]) -> int:
        """Deal out places in the staging buffer, in turns; return how many places there are."""
        largest = align_up(max((parcel.nbytes for parcel in messages), default=1), ALIGNMENT_BYTES)
        _, limit = _staging_limits(messages)
        window = max(1, min(len(messages), limit // largest))
        for turn, parcel in enumerate(messages):
            start = turn % window * largest
            parcel.bind_staging(self._ensure_staging_buffer(parcel.device, window * largest)[start : start + largest])
        return window

    def _ensure_staging_buffer(self, device: torch.device, nbytes: int) -> torch.Tensor:
        """One buffer serves all shipments: a shipment's staged parcels have arrived before the next one starts."""
        arena = self._staging_buffers.get(device)
        if arena is None or arena.nbytes < nbytes:
            self._invalidate_plans()  # they would keep the outgrown buffer alive
            arena = self._staging_buffers[device] = torch.empty(nbytes, dtype=torch.uint8, device=device)
        _ensure_allocated(arena)  # no view can be made of a buffer without memory
        return arena

    def _invalidate_plans(self) -> None:
        self._plans_by_mask.clear()
        self._plans_by_bucket.clear()

    def _record_locations(self, params: Sequence[torch.Tensor]) -> None:
        """Where further parameters lie."""
        self._data_ptrs.extend(map(torch.Tensor.data_ptr, params))
        self._shapes.extend(map(_get_shape, params))
        self._invalidate_plans()

    @abstractmethod
    def _add_bucket(self, bucket: Bucket) -> None: ...

    @abstractmethod
    def _rebind(self) -> None: ...

    @abstractmethod
    def _memory_ranges(
        self, bucket: Bucket, param_shards: list[ParamShard], update_mask: bytes
    ) -> Iterator[MemoryRange]:
        """What moves of pieces of one owner."""


class UnflattenedParams(ParamStore):
    """Parameters stay where they are."""

    def _add_bucket(self, bucket: Bucket) -> None:
        pass

    def _rebind(self) -> None:
        pass

    def _memory_ranges(self, _: Bucket, param_shards: list[ParamShard], update_mask: bytes) -> Iterator[MemoryRange]:
        for param in (self._params[piece.param] for piece in param_shards if update_mask[piece.param]):
            yield MemoryRange(param, [param])


def _make_single_message(owner: Rank, memory_range: MemoryRange) -> BroadcastMessage:
    if memory_range.tensor.is_contiguous():
        return InPlaceMessage(owner, memory_range.tensor.detach().view(-1), memory_range.params)
    return StagedMessage(owner, [memory_range])


class FlatParamBuffers(ParamStore):
    """Parameters are views of flat buffers: one a bucket, or one for each owner in it."""

    def __init__(self, *, by_owner: bool = False) -> None:
        """`by_owner`: what ranks own need not be neighbours. Building then takes the memory of one owner's share."""
        super().__init__()
        self._by_owner = by_owner
        self._buffers: list[list[tuple[Span, torch.Tensor]]] = []
        """By bucket, which span of it lies where."""
        self._moved_params: dict[int, list[torch.Tensor]] = {}
        """By bucket, parameters that were moved here and are not taken in yet."""

    def prepare(self, layout: Layout, params: Sequence[torch.Tensor]) -> None:
        """Make the buffers that `layout` has beyond the present ones, and move its new parameters there.

        One buffer after the other, so that only what belongs into one is there twice. A parameter's old memory is free
        as soon as it has moved. `params` are all of them.
        """
        for bucket in layout.buckets[len(self._buffers) :]:
            self._allocate_buffers(bucket, layout, params)

    def rollback(self) -> None:
        """Bucket by bucket, the last first, so that only what was in one buffer is there twice."""
        while len(self._buffers) > len(self._layout.buckets):
            self._buffers.pop()
            for param in self._moved_params.pop(len(self._buffers), []):
                _move_out(param)

    def buffers(self) -> list[torch.Tensor]:
        """The memory of all parameters, padding included."""
        return [buffer for parts in self._buffers for _, buffer in parts]

    def buffer(self, bucket: int) -> torch.Tensor:
        """All of a bucket, which is not divided by owner."""
        ((_, buffer),) = self._buffers[bucket]
        return buffer

    def _add_bucket(self, bucket: Bucket) -> None:
        if bucket.index == len(self._buffers):
            self._allocate_buffers(bucket, self._layout, self._params)
        self._moved_params.pop(bucket.index, None)

    def _allocate_buffers(self, bucket: Bucket, layout: Layout, params: Sequence[torch.Tensor]) -> None:
        parts: list[tuple[Span, torch.Tensor]] = []
        moved: list[torch.Tensor] = []
        self._buffers.append(parts)
        self._moved_params[bucket.index] = moved
        rooms = deque(bucket.slots)
        for part in self._buffer_spans(bucket):
            # On the CPU, memory that nobody has written to takes no pages: it fills up as old memory is freed.
            buffer = torch.empty(part.length, dtype=bucket.dtype, device=bucket.device)
            parts.append((part, buffer))
            end = part.start
            while rooms and (rooms[0].span.start < part.stop or part.stop == bucket.numel):
                index, span = rooms.popleft()
                spec, room = layout.params[index], _slice_buffer(part, buffer, span)
                _slice_buffer(
                    part, buffer, Span(end, span.start if spec.storage_numel == spec.numel else span.stop)
                ).zero_()
                moved.append(params[index])
                _move_into(params[index], params[index].detach(), room, spec)
                end = span.stop
            _slice_buffer(part, buffer, Span(end, part.stop)).zero_()

    def _buffer_spans(self, bucket: Bucket) -> list[Span]:
        """Spans of a bucket that have a buffer each."""
        return [shard for _, shard in bucket.shards.non_empty()] if self._by_owner else [Span(0, bucket.numel)]

    def span_view(self, bucket: int, span: Span) -> torch.Tensor:
        """A span of a bucket. It lies in one buffer."""
        parts = self._buffers[bucket]
        part, buffer = parts[max(0, bisect_right(parts, span.start, key=lambda part: part[0].start) - 1)]
        return _slice_buffer(part, buffer, span)

    def _rebind(self) -> None:
        away = [
            (index, room) for index, room in self._param_views() if self._params[index].data_ptr() != room.data_ptr()
        ]
        # Hazard: one may lie in the room of another, so all are read before any is written.
        values = [self._params[index].detach().clone() for index, _ in away]
        for (index, room), value in zip(away, values, strict=True):
            _move_into(self._params[index], value, room, self._layout.params[index])

    def _param_views(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Where parameters belong. Hazard: `share_memory_` takes along all that has a parameter's storage, so buckets
        alone know it."""
        for bucket in self._layout.buckets:
            for index, span in bucket.slots:
                yield index, self.span_view(bucket.index, span)

    def _memory_ranges(
        self, bucket: Bucket, param_shards: list[ParamShard], update_mask: bytes
    ) -> Iterator[MemoryRange]:
        for moves, run in groupby(param_shards, key=lambda piece: update_mask[piece.param]):
            if moves:
                members = list(run)
                span = Span(members[0].in_bucket.start, members[-1].in_bucket.stop)
                yield MemoryRange(self.span_view(bucket.index, span), [self._params[piece.param] for piece in members])

    def _can_send_in_place(self, ranges: list[MemoryRange]) -> bool:
        return len(ranges) == 1


def _slice_buffer(buffer_span: Span, buffer: torch.Tensor, span: Span) -> torch.Tensor:
    """A span of a bucket, in the buffer that a part of it has."""
    return buffer[span.start - buffer_span.start : span.stop - buffer_span.start]


def _staging_limits(tensors: Sequence[torch.Tensor | StagedMessage]) -> tuple[int, int]:
    """Bytes of a parcel of small runs, and of all staged parcels in flight."""
    if all(it.device.type == "cpu" for it in tensors):
        return MESSAGE_BYTES, STAGING_BYTES
    return DEVICE_MESSAGE_BYTES, DEVICE_STAGING_BYTES


def _ensure_allocated(buffer: torch.Tensor) -> None:
    if not _is_allocated(buffer):
        buffer.untyped_storage().resize_(buffer.nbytes)


def _is_allocated(buffer: torch.Tensor) -> bool:
    return buffer.untyped_storage().nbytes() > 0


def _move_into(param: torch.Tensor, value: torch.Tensor, target: torch.Tensor, spec: ParamSpec) -> None:
    """Move a parameter into its room, with a value that does not lie there."""
    # Through DLPack each parameter gets a storage of its own over the shared memory: saving one
    # parameter then writes that one, not the whole bucket.
    home = from_dlpack(target).as_strided(spec.shape, spec.stride)
    param.data = home.copy_(value)


def _move_out(param: torch.Tensor) -> None:
    """Memory of its own for a parameter. Where there is none left, it stays in the buffer, which lives on."""
    with suppress(RuntimeError):  # also that of a GPU without memory
        own = torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device=param.device)
        param.data = own.copy_(param.detach())


def _interleave_owners(queues: dict[Rank, list[BroadcastMessage]]) -> Iterator[tuple[int, Rank, BroadcastMessage]]:
    """First one parcel of every owner, then the second ones: all links are busy."""
    for owner, parcels in queues.items():
        yield from ((turn, owner, parcel) for turn, parcel in enumerate(parcels))


def _select(values: list[_T], indices: Sequence[int] | None) -> list[_T]:
    return values if indices is None else [values[index] for index in indices]


def _require_same_metadata(spec: ParamSpec, param: torch.Tensor) -> None:
    was = (spec.dtype, spec.device, spec.shape)
    now = (param.dtype, param.device, tuple(param.shape))
    if was != now:
        raise BindingError(
            f"{spec.label} was {spec.dtype} on {spec.device} with shape {spec.shape} when the optimizer was made, "
            f"and is {param.dtype} on {param.device} with shape {tuple(param.shape)} now. "
            "Cast, move or reshape the model before making the optimizer, or make a new one."
        )
