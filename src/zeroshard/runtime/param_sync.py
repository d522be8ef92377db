"""Updated parameters from their owners to everyone."""

from collections.abc import Iterable
from contextlib import suppress

import torch

from ..comm.choice import Ways
from ..comm.collectives import Comm
from ..comm.pending import Pending, Window
from ..layout.layout import Bucket
from ..policies import Reduce
from .store import InPlace, Parcel, Shipment


class ParamSync:
    """Sends a shipment. All ranks must send the same ones in the same order."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._in_place = Window(limit=256)

    @torch.no_grad()
    def start(self, shipment: Shipment) -> None:
        """Send and receive; parcels that need no staging may still be under way afterwards."""
        staged = Window(shipment.window)
        for parcel in shipment.parcels:
            window = self._in_place if isinstance(parcel, InPlace) else staged
            window.make_room()
            self._send(parcel, window)
        staged.drain()

    @torch.no_grad()
    def finish(self) -> None:
        """All that was started has arrived."""
        self._in_place.drain()

    def _send(self, parcel: Parcel, window: Window) -> None:
        mine = parcel.owner == self._comm.group.rank
        if mine:
            parcel.pack()
        pending = self._comm.broadcast(parcel.wire, parcel.owner)
        window.add(pending, then=None if mine else parcel.unpack)


class ShardSync:
    """Brings all shards of a bucket to everyone. All ranks must send the same buckets in the same order."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._ways = Ways(Comm(comm.group), Reduce())  # replicas bring theirs to their own
        self._under_way: dict[int, Pending] = {}
        self.is_broken = False
        """Something did not arrive, and never will."""

    @property
    def under_way(self) -> bool:
        return bool(self._under_way)

    def start(self, bucket: Bucket, flat: torch.Tensor) -> None:
        """Send this rank's shard of `flat`, and receive the others'."""
        if self._comm.group.size == 1:
            return
        way = self._ways.of(bucket.device, equal=bucket.has_equal_shards)
        self._under_way[bucket.index] = way.gather(flat, bucket.shards)

    def wait(self, buckets: Iterable[int]) -> None:
        """These buckets have arrived."""
        for bucket in buckets:
            if bucket in self._under_way:
                try:
                    self._under_way.pop(bucket).wait()
                except BaseException:
                    self.is_broken = True
                    raise

    def let_go(self) -> None:
        """Nothing is under way any longer, whether it has arrived or not."""
        while self._under_way:
            with suppress(RuntimeError):
                self.wait([next(iter(self._under_way))])

    def finish(self) -> None:
        self.wait(list(self._under_way))
