"""Updated parameters from their owners to everyone."""

from collections.abc import Iterable
from functools import partial
from threading import RLock

import torch

from ..comm.choice import Ways
from ..comm.collectives import Comm
from ..comm.pending import Pending, Window
from ..labels import Label
from ..layout.layout import Bucket, Layout
from ..notices import warn_user
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
        with self._comm.clock.part(Label.SEND_PARAMS):
            for parcel in shipment.parcels:
                window = self._in_place if isinstance(parcel, InPlace) else staged
                window.make_room()
                self._send(parcel, window)
        with self._comm.clock.part(Label.WAIT_PARAMS):
            staged.drain()
        # Hazard: only here. After an error, messages that are still in flight may use this memory.
        shipment.release()

    @torch.no_grad()
    def finish(self) -> None:
        """All that was started has arrived."""
        self._comm.group.line.at("updated parameters")
        with self._comm.clock.part(Label.WAIT_PARAMS):
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
        self.layout = Layout.empty(comm.group.size)
        self._lock = RLock()
        """Another thread may wait for the same: neither may go on before they are there."""

    @property
    def under_way(self) -> bool:
        return bool(self._under_way)

    def start(self, bucket: Bucket, flat: torch.Tensor) -> None:
        """Send this rank's shard of `flat`, and receive the others'."""
        if self._comm.group.size == 1:
            return
        way = self._ways.of(bucket.device, equal=bucket.has_equal_shards)
        with self._comm.clock.part(Label.SEND_PARAMS, bucket.index):
            self._under_way[bucket.index] = way.gather(flat, bucket.shards)

    def bytes_to_send(self) -> int:
        """What this rank sends when all buckets go that train.

        Hazard: no way is asked for. They are made in the same order on all ranks, and one rank may ask this alone.
        """
        group = self._comm.group
        trained = [it for it in self.layout.buckets if self.layout.trains(it.index)]
        return (group.size - 1) * sum(it.shards[group.rank].length * it.dtype.itemsize for it in trained)

    def wait(self, buckets: Iterable[int]) -> None:
        """These buckets have arrived."""
        with self._lock:
            for bucket in buckets:
                if bucket in self._under_way:
                    self._comm.group.line.at(partial(self.layout.name_bucket, bucket, "parameters"))
                    with self._comm.clock.part(Label.WAIT_PARAMS, bucket):
                        self._under_way.pop(bucket).wait()

    def let_go(self) -> None:
        """Nothing is under way any longer, whether it has arrived or never will."""
        try:
            self.finish()
        except Exception:  # of ranks, or a process group, that may be gone
            self._under_way.clear()
            warn_user(
                "some parameters of the model never came, since a rank was lost: they are of two steps. Restore or "
                "load them before you train on."
            )

    def finish(self) -> None:
        with self._lock:
            self.wait(list(self._under_way))
