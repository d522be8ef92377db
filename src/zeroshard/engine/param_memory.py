"""Parameter memory, and the messages that broadcast updated parameters from their owners.

There are two kinds of memory:

- `UnflattenedParams` leaves parameters where they are.
- `FlatParamBuffers` moves parameters into flat buffers: one per bucket, or one per owner in each bucket.

A message carries contiguous memory of one owner. Large ranges are sent in place; small ones are packed into a staging
buffer. Staging buffers have memory only while a broadcast plan is sent.
"""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple, TypeVar

import torch
from torch.autograd.graph import increment_version
from torch.utils.dlpack import from_dlpack

from .._torch_compat import foreach_copy_
from .._types import MIB, Rank, Span, align_up
from ..errors import BindingError
from ..layout.layout import Bucket, Layout, ParamShard
from ..layout.partition import ALIGNMENT_BYTES
from ..layout.spec import ParamSpec
from ..params import check_no_aliasing

_T = TypeVar("_T")

MIN_IN_PLACE_BYTES = MIB
"""Memory ranges of at least this size are sent in place, as a message of their own."""
MESSAGE_BYTES = 2 * MIB
STAGING_BYTES = 8 * MIB
"""Limit of a staging buffer on the CPU, where every step pays for its page faults again."""
DEVICE_MESSAGE_BYTES = 32 * MIB
DEVICE_STAGING_BYTES = 64 * MIB
"""Limit on other devices, where messages cost more and the caching allocator keeps freed memory."""
BALANCED_SHARE = 1.5
"""The most bytes that an owner sends straight to all ranks, as a multiple of an equal share. More bytes arrive sooner
by broadcast, which other ranks relay."""
MAX_CACHED_PLANS = 4
_get_shape = attrgetter("shape")
_get_stride = torch.Tensor.stride


class BroadcastMessage(ABC):
    """One broadcast: the owner calls `pack` before sending, the other ranks call `unpack` after receiving."""

    payload: torch.Tensor
    needs_staging = False
    """Whether the message is sent from a staging buffer. Call `bind_staging` first."""
    is_balanced = False
    """Its owner sends about as many bytes of the plan as the other owners: see `ShardTransport.broadcast`."""

    def __init__(self, owner: Rank, nbytes: int, device: torch.device) -> None:
        self.owner, self.nbytes, self.device = owner, nbytes, device

    def bind_staging(self, buffer: torch.Tensor) -> None:  # noqa: B027 (nothing by default)
        """Use the start of a byte buffer as `payload`, if the message needs staging."""

    @abstractmethod
    def pack(self) -> None: ...

    @abstractmethod
    def unpack(self) -> None: ...


class BroadcastPlan(NamedTuple):
    """Messages in the order in which all ranks send them.

    Hazard: messages share staging buffers, so at most `max_in_flight` staged messages may be in flight at once.
    """

    messages: list[BroadcastMessage]
    max_in_flight: int
    staging_buffers: list[torch.Tensor]

    def allocate_staging(self) -> "BroadcastPlan":
        """Allocate the memory of the staging buffers and return `self`."""
        for buffer in self.staging_buffers:
            _ensure_allocated(buffer)
        return self

    def release_staging(self) -> None:
        """Free the staging memory, once all staged messages have completed. Its views stay valid for the next time."""
        for buffer in self.staging_buffers:
            buffer.untyped_storage().resize_(0)


class MemoryRange(NamedTuple):
    """Memory that one owner broadcasts: a parameter, or a contiguous range of a flat buffer."""

    tensor: torch.Tensor
    params: list[torch.Tensor]


class InPlaceMessage(BroadcastMessage):
    """A message sent from, and received into, the memory of the parameters."""

    def __init__(self, owner: Rank, payload: torch.Tensor, params: list[torch.Tensor]) -> None:
        super().__init__(owner, payload.nbytes, payload.device)
        self.payload, self._params = payload, params

    def pack(self) -> None:
        pass

    def unpack(self) -> None:
        # Autograd must see a remote update as an in-place change, like a local one.
        increment_version(self._params)


class StagedMessage(BroadcastMessage):
    """Several memory ranges, packed into a staging buffer."""

    needs_staging = True

    def __init__(self, owner: Rank, ranges: list[MemoryRange]) -> None:
        super().__init__(owner, sum(item.tensor.nbytes for item in ranges), ranges[0].tensor.device)
        self._tensors = [item.tensor for item in ranges]
        self._aliased_params = [param for item in ranges if item.params[0] is not item.tensor for param in item.params]
        """Parameters whose version counter does not change when their range is written to."""

    @cached_property
    def _flat_views(self) -> list[torch.Tensor] | None:
        """Flat views for the owner, or None: one concatenation is faster than as many copies."""
        if not all(tensor.is_contiguous() for tensor in self._tensors):
            return None
        return [tensor.detach().view(-1) for tensor in self._tensors]

    def bind_staging(self, buffer: torch.Tensor) -> None:
        self.payload = buffer[: self.nbytes].view(self._tensors[0].dtype)
        flat_parts = torch.split(self.payload, [tensor.numel() for tensor in self._tensors])
        self._staged_views = [flat.view(tensor.shape) for flat, tensor in zip(flat_parts, self._tensors, strict=True)]

    def pack(self) -> None:
        # A parameter that was transposed since keeps its data pointer, so its cached flat view has the old order.
        if self._flat_views is not None and all(tensor.is_contiguous() for tensor in self._tensors):
            torch.cat(self._flat_views, out=self.payload)
        else:
            foreach_copy_(self._staged_views, self._tensors)

    def unpack(self) -> None:
        foreach_copy_(self._tensors, self._staged_views)
        increment_version(self._aliased_params)


class ParamMemory(ABC):
    """All parameters by index, their memory, and the plans that broadcast them."""

    def __init__(self, *, has_fixed_strides: bool = False) -> None:
        """Create memory without parameters.

        Args:
            has_fixed_strides: Parameters must keep the strides that they had at construction.
        """
        self._has_fixed_strides = has_fixed_strides
        self._params: list[torch.Tensor] = []
        self._layout = Layout.empty(0)
        self._data_ptrs: list[int] = []
        self._shapes: list[torch.Size] = []
        self._strides: list[tuple[int, ...]] = []
        self._staging_buffers: dict[torch.device, torch.Tensor] = {}
        self._plans_by_mask: dict[bytes, BroadcastPlan] = {}
        self._plans_by_bucket: dict[int, BroadcastPlan] = {}

    def extend(self, layout: Layout, params: Sequence[torch.Tensor]) -> None:
        """Add the new buckets of `layout`. `params` are the new parameters."""
        first_new = len(self._layout.buckets)
        self._layout = layout
        self._params.extend(params)
        for bucket in layout.buckets[first_new:]:
            self._add_bucket(bucket)
        # Hazard: record new parameters only. If an earlier one was moved since, the next `rebind_if_moved` must see it.
        self._record_locations(params)

    def prepare(self, layout: Layout, params: Sequence[torch.Tensor]) -> None:  # noqa: B027 (nothing by default)
        """Prepare an `extend` to `layout`. `params` are all parameters, old and new."""

    def rollback(self) -> None:  # noqa: B027 (nothing by default)
        """Undo a `prepare` that was not followed by `extend`."""

    def rebind_if_moved(self, indices: Sequence[int] | None = None, *, check_shapes: bool = True) -> None:
        """Rebind parameters to this memory if the user has moved parameters (`param.data = ...`).

        Args:
            indices: Check only these parameters; None checks all.
            check_shapes: Compare shapes too, since a transposed parameter (`param.data = param.data.t()`) keeps its
                data pointer. Not needed if a gradient of another shape would be rejected anyway.

        Raises:
            BindingError: A parameter has another dtype, device or shape than at construction, or shares memory.
        """
        params = _select(self._params, indices)
        if (
            list(map(torch.Tensor.data_ptr, params)) == _select(self._data_ptrs, indices)
            and (not check_shapes or list(map(_get_shape, params)) == _select(self._shapes, indices))
            and (not self._has_fixed_strides or list(map(_get_stride, params)) == _select(self._strides, indices))
        ):
            return
        for spec, param in zip(self._layout.params, self._params, strict=True):
            _require_same_metadata(spec, param)
        check_no_aliasing(self._layout.params, self._params)
        self._rebind()
        self._data_ptrs, self._shapes, self._strides = [], [], []
        self._record_locations(self._params)

    def param_tensors(self) -> list[torch.Tensor]:
        """Return the memory of all parameters, including padding."""
        return self._params

    def shard_views(self) -> list[list[torch.Tensor]]:
        """Return each rank's span of each flat buffer, including padding; none if parameters have their own memory."""
        return []

    def staging_buffers(self) -> list[torch.Tensor]:
        """Return the staging buffers that have memory now: none between broadcasts."""
        return [buffer for buffer in self._staging_buffers.values() if _is_allocated(buffer)]

    def plan_broadcast(self, update_mask: bytes) -> BroadcastPlan:
        """Return the messages for all parameters set in `update_mask`, in the same order on all ranks.

        The plan's staging buffers have memory until `release_staging`. It is allocated here and not during the
        broadcast, so a rank that is out of memory fails before the others wait for its messages.
        """
        if update_mask not in self._plans_by_mask:
            plan = self._build_plan(update_mask, self._layout.buckets)
            while len(self._plans_by_mask) >= MAX_CACHED_PLANS:
                del self._plans_by_mask[next(iter(self._plans_by_mask))]
            self._plans_by_mask[update_mask] = plan
        return self._plans_by_mask[update_mask].allocate_staging()

    def plan_bucket_broadcast(self, bucket: int) -> BroadcastPlan:
        """Return the messages for all parameters of one bucket, as `plan_broadcast` does."""
        if bucket not in self._plans_by_bucket:
            self._plans_by_bucket[bucket] = self._build_plan(b"\1" * len(self._params), [self._layout.buckets[bucket]])
        return self._plans_by_bucket[bucket].allocate_staging()

    def _build_plan(self, update_mask: bytes, buckets: Sequence[Bucket]) -> BroadcastPlan:
        # Pack ranges across buckets: hundreds of groups that were added one by one have as many small buckets.
        ranges: dict[tuple[Rank, torch.dtype, torch.device], list[MemoryRange]] = defaultdict(list)
        for bucket in buckets:
            non_empty = [shard for shard in bucket.param_shards if shard.in_param.length]
            for owner, owned in groupby(non_empty, key=lambda shard: shard.owner):
                ranges[owner, bucket.dtype, bucket.device].extend(self._memory_ranges(bucket, list(owned), update_mask))
        by_owner: dict[Rank, list[BroadcastMessage]] = defaultdict(list)
        for (owner, _, _), owner_ranges in ranges.items():
            by_owner[owner].extend(self._build_messages(owner, owner_ranges))
        _mark_balanced(by_owner.values(), self._layout.world_size)
        messages = _interleave_owners(by_owner)
        staged = [message for message in messages if message.needs_staging]
        max_in_flight = self._assign_staging(staged)
        devices = {message.device for message in staged}
        return BroadcastPlan(messages, max_in_flight, [self._staging_buffers[device] for device in devices])

    def _build_messages(self, owner: Rank, ranges: list[MemoryRange]) -> Iterator[BroadcastMessage]:
        """Send large ranges on their own and pack small ones into staged messages of limited size."""
        # Hazard: only sizes may decide how ranges form messages. Strides can differ between ranks.
        small: list[MemoryRange] = []
        limit, _ = _staging_limits([item.tensor for item in ranges])
        remaining = limit
        for item in ranges:
            if item.tensor.nbytes >= MIN_IN_PLACE_BYTES or self._can_send_in_place(ranges):
                yield _make_single_message(owner, item)
                continue
            if item.tensor.nbytes > remaining:
                yield StagedMessage(owner, small)
                small, remaining = [], limit
            small.append(item)
            remaining -= item.tensor.nbytes
        if small:
            yield StagedMessage(owner, small)

    def _can_send_in_place(self, ranges: list[MemoryRange]) -> bool:  # noqa: ARG002
        """Return whether small ranges need no packing, because there is only one."""
        return False

    def _assign_staging(self, messages: list[BroadcastMessage]) -> int:
        """Assign slots of the staging buffer to messages round-robin and return the number of slots."""
        slot_bytes = align_up(max((message.nbytes for message in messages), default=1), ALIGNMENT_BYTES)
        _, limit = _staging_limits(messages)
        num_slots = max(1, min(len(messages), limit // slot_bytes))
        for position, message in enumerate(messages):
            buffer = self._ensure_staging_buffer(message.device, num_slots * slot_bytes)
            start = position % num_slots * slot_bytes
            message.bind_staging(buffer[start : start + slot_bytes])
        return num_slots

    def _ensure_staging_buffer(self, device: torch.device, nbytes: int) -> torch.Tensor:
        """Return the staging buffer of a device, with memory and of at least `nbytes`.

        All plans share it: the staged messages of one plan complete before the next plan starts.
        """
        buffer = self._staging_buffers.get(device)
        if buffer is None or buffer.nbytes < nbytes:
            self._invalidate_plans()  # they would keep the smaller buffer alive
            buffer = self._staging_buffers[device] = torch.empty(nbytes, dtype=torch.uint8, device=device)
        _ensure_allocated(buffer)  # torch cannot make a view of a buffer without memory
        return buffer

    def _invalidate_plans(self) -> None:
        self._plans_by_mask.clear()
        self._plans_by_bucket.clear()

    def _record_locations(self, params: Sequence[torch.Tensor]) -> None:
        """Append the data pointers, shapes and strides of parameters, and drop all plans."""
        self._data_ptrs.extend(map(torch.Tensor.data_ptr, params))
        self._shapes.extend(map(_get_shape, params))
        self._strides.extend(map(_get_stride, params))
        self._invalidate_plans()

    @abstractmethod
    def _add_bucket(self, bucket: Bucket) -> None: ...

    @abstractmethod
    def _rebind(self) -> None: ...

    @abstractmethod
    def _memory_ranges(
        self, bucket: Bucket, param_shards: list[ParamShard], update_mask: bytes
    ) -> Iterator[MemoryRange]:
        """Yield the memory of those param shards of one owner that are set in `update_mask`."""


class UnflattenedParams(ParamMemory):
    """Parameters keep the memory that the user gave them."""

    def _add_bucket(self, bucket: Bucket) -> None:
        pass

    def _rebind(self) -> None:
        pass

    def _memory_ranges(self, _: Bucket, param_shards: list[ParamShard], update_mask: bytes) -> Iterator[MemoryRange]:
        for shard in param_shards:
            if update_mask[shard.param]:
                param = self._params[shard.param]
                yield MemoryRange(param, [param])


def _make_single_message(owner: Rank, memory_range: MemoryRange) -> BroadcastMessage:
    """Send one range in place if it is contiguous on this rank, otherwise through staging."""
    if memory_range.tensor.is_contiguous():
        return InPlaceMessage(owner, memory_range.tensor.detach().view(-1), memory_range.params)
    return StagedMessage(owner, [memory_range])


class FlatParamBuffers(ParamMemory):
    """Parameters are views of flat buffers: one per bucket, or one per owner in each bucket."""

    def __init__(self, *, by_owner: bool = False) -> None:
        """Create memory without buffers.

        Args:
            by_owner: Allocate one buffer per owner. The shards of a bucket are then not contiguous, and moving
                parameters temporarily duplicates one owner's shard instead of a bucket.
        """
        # The shards of a bucket are ranges of its memory; an owner updates whole parameters, whatever their strides.
        super().__init__(has_fixed_strides=not by_owner)
        self._by_owner = by_owner
        self._buffers: list[list[tuple[Span, torch.Tensor]]] = []
        """By bucket, its spans and their buffers."""
        self._moved_params: dict[int, list[torch.Tensor]] = {}
        """By bucket, parameters that `prepare` has moved and `extend` has not added yet."""

    def prepare(self, layout: Layout, params: Sequence[torch.Tensor]) -> None:
        """Allocate buffers for the new buckets of `layout` and move their parameters there.

        Buffers are filled one after the other, and a parameter's old memory is freed as soon as it has moved, so at
        most one buffer is duplicated at a time. `params` are all parameters, old and new.
        """
        for bucket in layout.buckets[len(self._buffers) :]:
            self._allocate_buffers(bucket, layout, params)

    def rollback(self) -> None:
        """Move parameters out of new buffers, last bucket first, so at most one buffer is duplicated at a time."""
        while len(self._buffers) > len(self._layout.buckets):
            self._buffers.pop()
            for param in self._moved_params.pop(len(self._buffers), []):
                _move_out(param)

    def param_tensors(self) -> list[torch.Tensor]:
        return [buffer for bucket_buffers in self._buffers for _, buffer in bucket_buffers]

    def shard_views(self) -> list[list[torch.Tensor]]:
        return [[self.span_view(bucket.index, shard) for shard in bucket.shards] for bucket in self._layout.buckets]

    def buffer(self, bucket: int) -> torch.Tensor:
        """Return the flat buffer of a bucket. Not for memory with one buffer per owner."""
        ((_, buffer),) = self._buffers[bucket]
        return buffer

    def _add_bucket(self, bucket: Bucket) -> None:
        if bucket.index == len(self._buffers):
            self._allocate_buffers(bucket, self._layout, self._params)
        self._moved_params.pop(bucket.index, None)

    def _allocate_buffers(self, bucket: Bucket, layout: Layout, params: Sequence[torch.Tensor]) -> None:
        """Allocate the buffers of a bucket, move its parameters there and zero the padding."""
        buffers: list[tuple[Span, torch.Tensor]] = []
        moved: list[torch.Tensor] = []
        self._buffers.append(buffers)
        self._moved_params[bucket.index] = moved
        slots = deque(bucket.slots)
        for buffer_span in self._buffer_spans(bucket):
            # On the CPU, untouched memory has no pages yet: the buffer grows as old parameter memory is freed.
            buffer = torch.empty(buffer_span.length, dtype=bucket.dtype, device=bucket.device)
            buffers.append((buffer_span, buffer))
            filled = buffer_span.start
            while slots and (slots[0].span.start < buffer_span.stop or buffer_span.stop == bucket.numel):
                index, span = slots.popleft()
                spec, target = layout.params[index], _slice_buffer(buffer_span, buffer, span)
                # A parameter with gaps in its storage does not overwrite all of its slot.
                zero_until = span.start if spec.storage_numel == spec.numel else span.stop
                _slice_buffer(buffer_span, buffer, Span(filled, zero_until)).zero_()
                moved.append(params[index])
                _move_into(params[index], params[index].detach(), target, spec)
                filled = span.stop
            _slice_buffer(buffer_span, buffer, Span(filled, buffer_span.stop)).zero_()

    def _buffer_spans(self, bucket: Bucket) -> list[Span]:
        """Return the spans of a bucket that get one buffer each."""
        return [shard for _, shard in bucket.shards.non_empty()] if self._by_owner else [Span(0, bucket.numel)]

    def span_view(self, bucket: int, span: Span) -> torch.Tensor:
        """Return a view of a span of a bucket, which must lie in one buffer."""
        buffers = self._buffers[bucket]
        position = bisect_right(buffers, span.start, key=lambda item: item[0].start) - 1
        buffer_span, buffer = buffers[max(0, position)]
        return _slice_buffer(buffer_span, buffer, span)

    def _rebind(self) -> None:
        """Copy moved parameters into the buffers and make them views of the buffers again."""
        moved = [
            (index, view)
            for index, view in self._param_views()
            if self._params[index].data_ptr() != view.data_ptr()
            or (self._has_fixed_strides and self._params[index].stride() != self._layout.params[index].stride)
        ]
        # Hazard: a parameter may now alias the slot of another one, so clone all values before writing any.
        values = [self._params[index].detach().clone() for index, _ in moved]
        for (index, view), value in zip(moved, values, strict=True):
            _move_into(self._params[index], value, view, self._layout.params[index])

    def _param_views(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the slot of each parameter as a view of its buffer.

        Hazard: compute it from the buckets, never from the parameters: `share_memory_` moves everything that has a
        parameter's storage.
        """
        for bucket in self._layout.buckets:
            for index, span in bucket.slots:
                yield index, self.span_view(bucket.index, span)

    def _memory_ranges(
        self, bucket: Bucket, param_shards: list[ParamShard], update_mask: bytes
    ) -> Iterator[MemoryRange]:
        for is_updated, run in groupby(param_shards, key=lambda shard: update_mask[shard.param]):
            if is_updated:
                shards = list(run)
                span = Span(shards[0].in_bucket.start, shards[-1].in_bucket.stop)
                yield MemoryRange(self.span_view(bucket.index, span), [self._params[shard.param] for shard in shards])

    def _can_send_in_place(self, ranges: list[MemoryRange]) -> bool:
        return len(ranges) == 1


def _slice_buffer(buffer_span: Span, buffer: torch.Tensor, span: Span) -> torch.Tensor:
    """Return a span of a bucket as a view of `buffer`, which holds `buffer_span` of that bucket."""
    return buffer[span.start - buffer_span.start : span.stop - buffer_span.start]


def _staging_limits(tensors: Sequence[torch.Tensor | BroadcastMessage]) -> tuple[int, int]:
    """Return the maximum bytes of one staged message and of all staged messages in flight."""
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return MESSAGE_BYTES, STAGING_BYTES
    return DEVICE_MESSAGE_BYTES, DEVICE_STAGING_BYTES


def _ensure_allocated(buffer: torch.Tensor) -> None:
    if not _is_allocated(buffer):
        buffer.untyped_storage().resize_(buffer.nbytes)


def _is_allocated(buffer: torch.Tensor) -> bool:
    return buffer.untyped_storage().nbytes() > 0


def _move_into(param: torch.Tensor, value: torch.Tensor, target: torch.Tensor, spec: ParamSpec) -> None:
    """Make a parameter a view of `target`, with `value`, which must not overlap `target`."""
    # DLPack gives each parameter its own storage over the shared memory, so torch.save writes one parameter and not
    # the entire bucket.
    view = from_dlpack(target).as_strided(spec.shape, spec.stride)
    param.data = view.copy_(value)


def _move_out(param: torch.Tensor) -> None:
    """Give a parameter its own memory. If none is left, it stays in the buffer and keeps that alive."""
    with suppress(RuntimeError):  # includes torch.cuda.OutOfMemoryError
        own = torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device=param.device)
        param.data = own.copy_(param.detach())


def _mark_balanced(messages_by_owner: Iterable[Sequence[BroadcastMessage]], world_size: int) -> None:
    """Mark the messages of owners that send at most `BALANCED_SHARE` of an equal share of the bytes."""
    nbytes_by_owner = [(messages, sum(message.nbytes for message in messages)) for messages in messages_by_owner]
    equal_share = sum(nbytes for _, nbytes in nbytes_by_owner) / world_size
    for messages, nbytes in nbytes_by_owner:
        for message in messages:
            message.is_balanced = nbytes <= BALANCED_SHARE * equal_share


def _interleave_owners(by_owner: dict[Rank, list[BroadcastMessage]]) -> list[BroadcastMessage]:
    """Return the first message of every owner in rank order, then all second ones, and so on: all links are busy."""
    order = sorted((position, owner) for owner, messages in by_owner.items() for position in range(len(messages)))
    return [by_owner[owner][position] for position, owner in order]


def _select(values: list[_T], indices: Sequence[int] | None) -> list[_T]:
    return values if indices is None else [values[index] for index in indices]


def _require_same_metadata(spec: ParamSpec, param: torch.Tensor) -> None:
    if (spec.dtype, spec.device, spec.shape) != (param.dtype, param.device, tuple(param.shape)):
        raise BindingError(
            f"{spec.label} changed: expected {spec.dtype} on {spec.device} with shape {spec.shape}, as when the "
            f"optimizer was created, got {param.dtype} on {param.device} with shape {tuple(param.shape)}. Cast, move "
            "or reshape the model before creating the optimizer, or create a new one."
        )
