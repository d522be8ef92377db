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

from ..errors import BindingError
from ..layout.layout import Bucket, Layout, Piece
from ..layout.partition import ALIGNMENT
from ..layout.specs import ParamSpec
from ..params import check_disjoint
from ..units import MIB, Rank, Span, align_up

_T = TypeVar("_T")

ALONE_BYTES = MIB
"""From this size on a parameter is worth a message of its own, and not worth a copy."""
PARCEL_BYTES = 2 * MIB
STAGING_BYTES = 8 * MIB
"""What a store's staging buffer may take on the CPU, where every step pays for its pages again."""
DEVICE_PARCEL_BYTES = 32 * MIB
DEVICE_STAGING_BYTES = 64 * MIB
"""Elsewhere, where messages cost more and the allocator keeps what was freed."""
KEPT_SHIPMENTS = 4
_SHAPE = attrgetter("shape")


class Parcel(Protocol):
    """One message: `pack` on the owner before it goes, `unpack` on the others once it has arrived."""

    owner: Rank
    wire: torch.Tensor

    def pack(self) -> None: ...

    def unpack(self) -> None: ...


class Shipment(NamedTuple):
    """Parcels in the order in which all ranks send them.

    Hazard: staging buffers are shared, so no more than `window` staged parcels may be under way at once.
    """

    parcels: list[Parcel]
    window: int
    staging: list[torch.Tensor]

    def allocated(self) -> "Shipment":
        """The same, with memory in its staging buffers."""
        for buffer in self.staging:
            _make_room(buffer)
        return self

    def release(self) -> None:
        """Free that memory, once all staged parcels have arrived. Views of it stay, to be used next time."""
        for buffer in self.staging:
            buffer.untyped_storage().resize_(0)


class Run(NamedTuple):
    """What one owner sends, as it lies in memory: a parameter, or neighbours in a flat buffer."""

    memory: torch.Tensor
    params: list[torch.Tensor]


class InPlace:
    """Parameters whose own memory travels."""

    def __init__(self, owner: Rank, wire: torch.Tensor, params: list[torch.Tensor]) -> None:
        self.owner, self.wire, self._params = owner, wire, params

    def pack(self) -> None:
        pass

    def unpack(self) -> None:
        # Autograd must see a remote update as the in-place change that a local one is.
        increment_version(self._params)


class Packed:
    """Runs that are copied into and out of a staging buffer, which `stage` must give first."""

    wire: torch.Tensor

    def __init__(self, owner: Rank, runs: list[Run]) -> None:
        self.owner, self._params = owner, [run.memory for run in runs]
        self._aliased = [param for run in runs if run.params[0] is not run.memory for param in run.params]
        """Parameters that do not notice when the memory of their run is written to."""
        self.nbytes = sum(run.memory.nbytes for run in runs)
        self.device = runs[0].memory.device

    @cached_property
    def _flats(self) -> list[torch.Tensor] | None:
        """For the owner: one concatenation is faster than as many copies."""
        if not all(param.is_contiguous() for param in self._params):
            return None
        return [param.detach().view(-1) for param in self._params]

    def stage(self, buffer: torch.Tensor) -> None:
        self.wire = buffer[: self.nbytes].view(self._params[0].dtype)
        parts = torch.split(self.wire, [param.numel() for param in self._params])
        self._views = [part.view(param.shape) for part, param in zip(parts, self._params, strict=True)]

    def pack(self) -> None:
        # A transposed parameter keeps its pointer, and so its alias here, but not its order.
        if self._flats is not None and all(param.is_contiguous() for param in self._params):
            torch.cat(self._flats, out=self.wire)
        else:
            torch._foreach_copy_(self._views, self._params)

    def unpack(self) -> None:
        torch._foreach_copy_(self._params, self._views)
        increment_version(self._aliased)


class Store(ABC):
    """All parameters by index, and the parcels that carry them."""

    def __init__(self) -> None:
        self._params: list[torch.Tensor] = []
        self._layout = Layout.empty(0)
        self._pointers: list[int] = []
        self._shapes: list[torch.Size] = []
        self._staging: dict[torch.device, torch.Tensor] = {}
        self._prepared: dict[bytes, Shipment] = {}
        self._by_bucket: dict[int, Shipment] = {}

    def extend(self, layout: Layout, params: Sequence[torch.Tensor]) -> None:
        """Take in the parameters and buckets that `layout` has beyond the present one."""
        known = len(self._layout.buckets)
        self._layout = layout
        self._params.extend(params)
        for bucket in layout.buckets[known:]:
            self._take_in(bucket)
        # Hazard: not of earlier parameters. One whose memory was exchanged since is noticed by the next `refresh`.
        self._remember(params)

    def prepare(self, layout: Layout, params: Sequence[torch.Tensor]) -> None:  # noqa: B027 (most have nothing to do)
        """Get ready for an `extend` to `layout`. `params` are all of them."""

    def take_back(self) -> None:  # noqa: B027 (most have nothing to take back)
        """Undo what was prepared for an `extend` that does not come."""

    def refresh(self, among: Sequence[int] | None = None, *, shapes: bool = True) -> None:
        """Notice parameters whose memory was exchanged since (`param.data = ...`): bind anew, or refuse.

        `among`: look at these only. `shapes`: a parameter turned over (`param.data = param.data.t()`) keeps its
        pointer, so look at shapes, too; not needed where its gradient would not fit any more.
        """
        params = _chosen(self._params, among)
        if list(map(torch.Tensor.data_ptr, params)) == _chosen(self._pointers, among) and (
            not shapes or list(map(_SHAPE, params)) == _chosen(self._shapes, among)
        ):
            return
        for spec, param in zip(self._layout.params, self._params, strict=True):
            _require_same_kind(spec, param)
        check_disjoint(self._layout.params, self._params)
        self._rebind()
        self._pointers, self._shapes = [], []
        self._remember(self._params)

    def staging(self) -> list[torch.Tensor]:
        """Memory in which small parameters are packed: none between shipments."""
        return [buffer for buffer in self._staging.values() if _has_memory(buffer)]

    def shipment(self, moving: bytes) -> Shipment:
        """Parcels of the parameters flagged in `moving`, in an order that is the same on all ranks.

        Their staging buffers have memory until the shipment is released. It is allocated here, and not when it is sent:
        a rank that has none left says so before the others wait for its messages.
        """
        if moving not in self._prepared:
            shipment = self._prepare(moving, self._layout.buckets)
            while len(self._prepared) >= KEPT_SHIPMENTS:
                del self._prepared[next(iter(self._prepared))]
            self._prepared[moving] = shipment
        return self._prepared[moving].allocated()

    def bucket_shipment(self, index: int) -> Shipment:
        """Parcels of all parameters of one bucket."""
        if index not in self._by_bucket:
            self._by_bucket[index] = self._prepare(b"\1" * len(self._params), [self._layout.buckets[index]])
        return self._by_bucket[index].allocated()

    def _prepare(self, moving: bytes, buckets: Sequence[Bucket]) -> Shipment:
        # Over all buckets: hundreds of groups that were added one by one have as many of them.
        runs: dict[tuple[Rank, torch.dtype, torch.device], list[Run]] = defaultdict(list)
        for bucket in buckets:
            full = [piece for piece in bucket.pieces if piece.in_param.length]
            for owner, pieces in groupby(full, key=lambda piece: piece.owner):
                runs[owner, bucket.dtype, bucket.device].extend(self._runs_of(bucket, list(pieces), moving))
        queues: dict[Rank, list[Parcel]] = defaultdict(list)
        for (owner, _, _), of_kind in runs.items():
            queues[owner].extend(self._parcels_of(owner, of_kind))
        parcels = [parcel for _, _, parcel in sorted(_in_turns(queues), key=lambda turn: turn[:2])]
        packed = [parcel for parcel in parcels if isinstance(parcel, Packed)]
        window = self._stage(packed)
        return Shipment(parcels, window, [self._staging[device] for device in {parcel.device for parcel in packed}])

    def _parcels_of(self, owner: Rank, runs: list[Run]) -> Iterator[Parcel]:
        # Hazard: sizes alone decide what is a parcel. Strides may differ from rank to rank.
        small: list[Run] = []
        limit, _ = _limits([run.memory for run in runs])
        room = limit
        for run in runs:
            if run.memory.nbytes >= ALONE_BYTES or self._stays_alone(runs):
                yield _alone(owner, run)
                continue
            if run.memory.nbytes > room:
                yield Packed(owner, small)
                small, room = [], limit
            small.append(run)
            room -= run.memory.nbytes
        if small:
            yield Packed(owner, small)

    def _stays_alone(self, runs: list[Run]) -> bool:  # noqa: ARG002
        """Whether a small run needs no packing, since it is all there is."""
        return False

    def _stage(self, packed: list[Packed]) -> int:
        """Deal out places in the staging buffer, in turns; return how many places there are."""
        largest = align_up(max((parcel.nbytes for parcel in packed), default=1), ALIGNMENT)
        _, limit = _limits(packed)
        window = max(1, min(len(packed), limit // largest))
        for turn, parcel in enumerate(packed):
            start = turn % window * largest
            parcel.stage(self._arena(parcel.device, window * largest)[start : start + largest])
        return window

    def _arena(self, device: torch.device, nbytes: int) -> torch.Tensor:
        """One buffer serves all shipments: a shipment's staged parcels have arrived before the next one starts."""
        arena = self._staging.get(device)
        if arena is None or arena.nbytes < nbytes:
            self._forget_shipments()  # they would keep the outgrown buffer alive
            arena = self._staging[device] = torch.empty(nbytes, dtype=torch.uint8, device=device)
        _make_room(arena)  # no view can be made of a buffer without memory
        return arena

    def _forget_shipments(self) -> None:
        self._prepared.clear()
        self._by_bucket.clear()

    def _remember(self, params: Sequence[torch.Tensor]) -> None:
        """Where further parameters lie."""
        self._pointers.extend(map(torch.Tensor.data_ptr, params))
        self._shapes.extend(map(_SHAPE, params))
        self._forget_shipments()

    @abstractmethod
    def _take_in(self, bucket: Bucket) -> None: ...

    @abstractmethod
    def _rebind(self) -> None: ...

    @abstractmethod
    def _runs_of(self, bucket: Bucket, pieces: list[Piece], moving: bytes) -> Iterator[Run]:
        """What moves of pieces of one owner."""


class LooseStore(Store):
    """Parameters stay where they are."""

    def _take_in(self, bucket: Bucket) -> None:
        pass

    def _rebind(self) -> None:
        pass

    def _runs_of(self, _: Bucket, pieces: list[Piece], moving: bytes) -> Iterator[Run]:
        for param in (self._params[piece.param] for piece in pieces if moving[piece.param]):
            yield Run(param, [param])


def _alone(owner: Rank, run: Run) -> Parcel:
    if run.memory.is_contiguous():
        return InPlace(owner, run.memory.detach().view(-1), run.params)
    return Packed(owner, [run])


class FlatStore(Store):
    """Parameters are views of flat buffers: one a bucket, or one for each owner in it."""

    def __init__(self, *, by_owner: bool = False) -> None:
        """`by_owner`: what ranks own need not be neighbours. Building then takes the memory of one owner's share."""
        super().__init__()
        self._by_owner = by_owner
        self._buffers: list[list[tuple[Span, torch.Tensor]]] = []
        """By bucket, which span of it lies where."""
        self._moved: dict[int, list[torch.Tensor]] = {}
        """By bucket, parameters that were moved here and are not taken in yet."""

    def prepare(self, layout: Layout, params: Sequence[torch.Tensor]) -> None:
        """Make the buffers that `layout` has beyond the present ones, and move its new parameters there.

        One buffer after the other, so that only what belongs into one is there twice. A parameter's old memory is free
        as soon as it has moved. `params` are all of them.
        """
        for bucket in layout.buckets[len(self._buffers) :]:
            self._make_buffer(bucket, layout, params)

    def take_back(self) -> None:
        """Bucket by bucket, the last first, so that only what was in one buffer is there twice."""
        while len(self._buffers) > len(self._layout.buckets):
            self._buffers.pop()
            for param in self._moved.pop(len(self._buffers), []):
                _leave(param)

    def buffers(self) -> list[torch.Tensor]:
        """The memory of all parameters, padding included."""
        return [buffer for parts in self._buffers for _, buffer in parts]

    def buffer(self, bucket: int) -> torch.Tensor:
        """All of a bucket, which is not divided by owner."""
        ((_, buffer),) = self._buffers[bucket]
        return buffer

    def _take_in(self, bucket: Bucket) -> None:
        if bucket.index == len(self._buffers):
            self._make_buffer(bucket, self._layout, self._params)
        self._moved.pop(bucket.index, None)

    def _make_buffer(self, bucket: Bucket, layout: Layout, params: Sequence[torch.Tensor]) -> None:
        parts: list[tuple[Span, torch.Tensor]] = []
        moved: list[torch.Tensor] = []
        self._buffers.append(parts)
        self._moved[bucket.index] = moved
        rooms = deque(bucket.rooms)
        for part in self._parts_of(bucket):
            # On the CPU, memory that nobody has written to takes no pages: it fills up as old memory is freed.
            buffer = torch.empty(part.length, dtype=bucket.dtype, device=bucket.device)
            parts.append((part, buffer))
            end = part.start
            while rooms and (rooms[0].span.start < part.stop or part.stop == bucket.numel):
                index, span = rooms.popleft()
                spec, room = layout.params[index], _within(part, buffer, span)
                _within(part, buffer, Span(end, span.start if spec.extent == spec.numel else span.stop)).zero_()
                moved.append(params[index])
                _settle(params[index], params[index].detach(), room, spec)
                end = span.stop
            _within(part, buffer, Span(end, part.stop)).zero_()

    def _parts_of(self, bucket: Bucket) -> list[Span]:
        """Spans of a bucket that have a buffer each."""
        return [shard for _, shard in bucket.shards.filled()] if self._by_owner else [Span(0, bucket.numel)]

    def memory(self, bucket: int, span: Span) -> torch.Tensor:
        """A span of a bucket. It lies in one buffer."""
        parts = self._buffers[bucket]
        part, buffer = parts[max(0, bisect_right(parts, span.start, key=lambda part: part[0].start) - 1)]
        return _within(part, buffer, span)

    def _rebind(self) -> None:
        away = [(index, room) for index, room in self._rooms() if self._params[index].data_ptr() != room.data_ptr()]
        # Hazard: one may lie in the room of another, so all are read before any is written.
        values = [self._params[index].detach().clone() for index, _ in away]
        for (index, room), value in zip(away, values, strict=True):
            _settle(self._params[index], value, room, self._layout.params[index])

    def _rooms(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Where parameters belong. Hazard: `share_memory_` takes along all that has a parameter's storage, so buckets
        alone know it."""
        for bucket in self._layout.buckets:
            for index, span in bucket.rooms:
                yield index, self.memory(bucket.index, span)

    def _runs_of(self, bucket: Bucket, pieces: list[Piece], moving: bytes) -> Iterator[Run]:
        for moves, run in groupby(pieces, key=lambda piece: moving[piece.param]):
            if moves:
                members = list(run)
                span = Span(members[0].in_bucket.start, members[-1].in_bucket.stop)
                yield Run(self.memory(bucket.index, span), [self._params[piece.param] for piece in members])

    def _stays_alone(self, runs: list[Run]) -> bool:
        return len(runs) == 1


def _within(part: Span, buffer: torch.Tensor, span: Span) -> torch.Tensor:
    """A span of a bucket, in the buffer that a part of it has."""
    return buffer[span.start - part.start : span.stop - part.start]


def _limits(placed: Sequence[torch.Tensor | Packed]) -> tuple[int, int]:
    """Bytes of a parcel of small runs, and of all staged parcels in flight."""
    if all(it.device.type == "cpu" for it in placed):
        return PARCEL_BYTES, STAGING_BYTES
    return DEVICE_PARCEL_BYTES, DEVICE_STAGING_BYTES


def _make_room(buffer: torch.Tensor) -> None:
    if not _has_memory(buffer):
        buffer.untyped_storage().resize_(buffer.nbytes)


def _has_memory(buffer: torch.Tensor) -> bool:
    return buffer.untyped_storage().nbytes() > 0


def _settle(param: torch.Tensor, value: torch.Tensor, room: torch.Tensor, spec: ParamSpec) -> None:
    """Move a parameter into its room, with a value that does not lie there."""
    # Through DLPack each parameter gets a storage of its own over the shared memory: saving one
    # parameter then writes that one, not the whole bucket.
    home = from_dlpack(room).as_strided(spec.shape, spec.stride)
    param.data = home.copy_(value)


def _leave(param: torch.Tensor) -> None:
    """Memory of its own for a parameter. Where there is none left, it stays in the buffer, which lives on."""
    with suppress(RuntimeError):  # also that of a GPU without memory
        own = torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device=param.device)
        param.data = own.copy_(param.detach())


def _in_turns(queues: dict[Rank, list[Parcel]]) -> Iterator[tuple[int, Rank, Parcel]]:
    """First one parcel of every owner, then the second ones: all links are busy."""
    for owner, parcels in queues.items():
        yield from ((turn, owner, parcel) for turn, parcel in enumerate(parcels))


def _chosen(values: list[_T], among: Sequence[int] | None) -> list[_T]:
    return values if among is None else [values[index] for index in among]


def _require_same_kind(spec: ParamSpec, param: torch.Tensor) -> None:
    was = (spec.dtype, spec.device, spec.shape)
    now = (param.dtype, param.device, tuple(param.shape))
    if was != now:
        raise BindingError(
            f"{spec.label} was {spec.dtype} on {spec.device} with shape {spec.shape} when the optimizer was made, "
            f"and is {param.dtype} on {param.device} with shape {tuple(param.shape)} now. "
            "Cast, move or reshape the model before making the optimizer, or make a new one."
        )
