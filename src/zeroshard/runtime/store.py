"""Where parameters lie, and what is put on the wire for them. The only allocator.

A parcel is the memory of one message from one owner. Two stores make them:

- `LooseStore` leaves parameters where they are. Small ones are packed into a staging buffer, large
  ones travel from and into their own memory.
- `FlatStore` moves parameters into one flat buffer a bucket. A run of neighbours is a parcel as it is.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import groupby
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch.autograd.graph import increment_version
from torch.utils.dlpack import from_dlpack

from ..errors import BindingError
from ..layout.layout import Bucket, Layout, Piece
from ..layout.partition import ALIGNMENT
from ..layout.specs import ParamSpec
from ..params import check_disjoint
from ..units import MIB, Rank, align_up

_T = TypeVar("_T")

ALONE_BYTES = MIB
"""From this size on a parameter is worth a message of its own, and not worth a copy."""
PARCEL_BYTES = 32 * MIB
STAGING_BYTES = 64 * MIB
"""What all staging buffers of a store may take."""
KEPT_SHIPMENTS = 4


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
    """Parameters that are copied into and out of a staging buffer, which `stage` must give first."""

    wire: torch.Tensor

    def __init__(self, owner: Rank, params: list[torch.Tensor]) -> None:
        self.owner, self._params = owner, params
        self.nbytes = sum(param.nbytes for param in params)
        self.device = params[0].device

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
        self._remember()

    def take_back(self) -> None:  # noqa: B027 (most have nothing to take back)
        """Undo what was prepared for an `extend` that does not come."""

    def refresh(self, among: Sequence[int] | None = None, *, shapes: bool = True) -> None:
        """Notice parameters whose memory was exchanged since (`param.data = ...`): bind anew, or refuse.

        `among`: look at these only. `shapes`: a parameter turned over (`param.data = param.data.t()`) keeps its
        pointer, so look at shapes, too; not needed where its gradient would not fit any more.
        """
        params = _chosen(self._params, among)
        if list(map(torch.Tensor.data_ptr, params)) == _chosen(self._pointers, among) and (
            not shapes or [param.shape for param in params] == _chosen(self._shapes, among)
        ):
            return
        for spec, param in zip(self._layout.params, self._params, strict=True):
            _require_same_kind(spec, param)
        check_disjoint(self._layout.params, self._params)
        self._rebind()
        self._remember()

    def staging(self) -> list[torch.Tensor]:
        """Memory in which small parameters are packed."""
        return list(self._staging.values())

    def shipment(self, moving: bytes) -> Shipment:
        """Parcels of the parameters flagged in `moving`, in an order that is the same on all ranks."""
        if moving not in self._prepared:
            shipment = self._prepare(moving, self._layout.buckets)
            while len(self._prepared) >= KEPT_SHIPMENTS:
                del self._prepared[next(iter(self._prepared))]
            self._prepared[moving] = shipment
        return self._prepared[moving]

    def bucket_shipment(self, index: int) -> Shipment:
        """Parcels of all parameters of one bucket."""
        if index not in self._by_bucket:
            self._by_bucket[index] = self._prepare(b"\1" * len(self._params), [self._layout.buckets[index]])
        return self._by_bucket[index]

    def _prepare(self, moving: bytes, buckets: Sequence[Bucket]) -> Shipment:
        queues: dict[Rank, list[Parcel]] = defaultdict(list)
        for bucket in buckets:
            full = [piece for piece in bucket.pieces if piece.in_param.length]
            for owner, pieces in groupby(full, key=lambda piece: piece.owner):
                queues[owner].extend(self._parcels_of(bucket, owner, list(pieces), moving))
        parcels = [parcel for _, _, parcel in sorted(_in_turns(queues), key=lambda turn: turn[:2])]
        return Shipment(parcels, self._stage([parcel for parcel in parcels if isinstance(parcel, Packed)]))

    def _stage(self, packed: list[Packed]) -> int:
        """Deal out places in the staging buffer, in turns; return how many places there are."""
        largest = align_up(max((parcel.nbytes for parcel in packed), default=1), ALIGNMENT)
        window = max(1, min(len(packed), STAGING_BYTES // largest))
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
        return arena

    def _forget_shipments(self) -> None:
        self._prepared.clear()
        self._by_bucket.clear()

    def _remember(self) -> None:
        self._pointers = list(map(torch.Tensor.data_ptr, self._params))
        self._shapes = [param.shape for param in self._params]
        self._forget_shipments()

    @abstractmethod
    def _take_in(self, bucket: Bucket) -> None: ...

    @abstractmethod
    def _rebind(self) -> None: ...

    @abstractmethod
    def _parcels_of(self, bucket: Bucket, owner: Rank, pieces: list[Piece], moving: bytes) -> Iterator[Parcel]: ...


class LooseStore(Store):
    """Parameters stay where they are."""

    def _take_in(self, bucket: Bucket) -> None:
        pass

    def _rebind(self) -> None:
        pass

    def _parcels_of(self, _: Bucket, owner: Rank, pieces: list[Piece], moving: bytes) -> Iterator[Parcel]:
        # Hazard: sizes alone decide what is a parcel. Strides may differ from rank to rank.
        small: list[torch.Tensor] = []
        room = PARCEL_BYTES
        for param in (self._params[piece.param] for piece in pieces if moving[piece.param]):
            if param.nbytes >= ALONE_BYTES:
                yield _alone(owner, param)
                continue
            if param.nbytes > room:
                yield Packed(owner, small)
                small, room = [], PARCEL_BYTES
            small.append(param)
            room -= param.nbytes
        if small:
            yield Packed(owner, small)


def _alone(owner: Rank, param: torch.Tensor) -> Parcel:
    if param.is_contiguous():
        return InPlace(owner, param.detach().view(-1), [param])
    return Packed(owner, [param])


class FlatStore(Store):
    """Parameters are views of one flat buffer a bucket."""

    def __init__(self) -> None:
        super().__init__()
        self._buffers: list[torch.Tensor] = []
        self._moved: dict[int, list[torch.Tensor]] = {}
        """By bucket, parameters that were moved here and are not taken in yet."""

    def prepare(self, layout: Layout, params: Sequence[torch.Tensor]) -> None:
        """Make the buffers that `layout` has beyond the present ones, and move its new parameters there.

        One bucket after the other, so that there is none but one of them twice. `params` are all of them.
        """
        for bucket in layout.buckets[len(self._buffers) :]:
            self._make_buffer(bucket, layout, params)

    def take_back(self) -> None:
        """Bucket by bucket, the last first, so that there is none but one of them twice."""
        while len(self._buffers) > len(self._layout.buckets):
            self._buffers.pop()
            for param in self._moved.pop(len(self._buffers), []):
                _leave(param)

    def buffers(self) -> list[torch.Tensor]:
        """The memory of all parameters, padding included."""
        return list(self._buffers)

    def buffer(self, bucket: int) -> torch.Tensor:
        return self._buffers[bucket]

    def _take_in(self, bucket: Bucket) -> None:
        if bucket.index == len(self._buffers):
            self._make_buffer(bucket, self._layout, self._params)
        self._moved.pop(bucket.index, None)

    def _make_buffer(self, bucket: Bucket, layout: Layout, params: Sequence[torch.Tensor]) -> None:
        buffer = torch.zeros(bucket.numel, dtype=bucket.dtype, device=bucket.device)
        self._buffers.append(buffer)
        for index, span in bucket.rooms:
            self._moved.setdefault(bucket.index, []).append(params[index])
            _settle(params[index], params[index].detach(), buffer[slice(*span)], layout.params[index])

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
                yield index, self._buffers[bucket.index][slice(*span)]

    def _parcels_of(self, bucket: Bucket, owner: Rank, pieces: list[Piece], moving: bytes) -> Iterator[Parcel]:
        for moves, run in groupby(pieces, key=lambda piece: moving[piece.param]):
            if moves:
                members = list(run)
                wire = self._buffers[bucket.index][members[0].in_bucket.start : members[-1].in_bucket.stop]
                yield InPlace(owner, wire, [self._params[piece.param] for piece in members])


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
