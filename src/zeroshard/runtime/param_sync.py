"""Updated parameters from their owners to everyone."""

import torch

from ..comm.collectives import Comm
from ..comm.pending import Window
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
