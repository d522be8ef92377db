"""Updated parameters from their owners to everyone."""

from collections.abc import Iterable
from functools import partial
from threading import RLock

import torch

from .._logging import warn_at_caller
from ..comm.collectives import Comm
from ..comm.transport_cache import TransportCache
from ..comm.work import InFlightWindow, PendingWork
from ..config import Reduce
from ..layout.layout import Bucket, Layout
from ..profiling import Phase
from .param_store import BroadcastMessage, BroadcastPlan, InPlaceMessage


class ParamBroadcast:
    """Sends a shipment. All ranks must send the same ones in the same order."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._in_place_window = InFlightWindow(limit=256)

    @torch.no_grad()
    def start(self, plan: BroadcastPlan) -> None:
        """Send and receive; parcels that need no staging may still be under way afterwards."""
        staged = InFlightWindow(plan.max_in_flight)
        with self._comm.profiler.phase(Phase.SEND_PARAMS):
            for parcel in plan.messages:
                window = self._in_place_window if isinstance(parcel, InPlaceMessage) else staged
                window.wait_for_capacity()
                self._send(parcel, window)
        with self._comm.profiler.phase(Phase.WAIT_PARAMS):
            staged.drain()
        # Hazard: only here. After an error, messages that are still in flight may use this memory.
        plan.release_staging()

    @torch.no_grad()
    def finish(self) -> None:
        """All that was started has arrived."""
        self._comm.group.failure_detector.set_activity("updated parameters")
        with self._comm.profiler.phase(Phase.WAIT_PARAMS):
            self._in_place_window.drain()

    def _send(self, message: BroadcastMessage, window: InFlightWindow) -> None:
        mine = message.owner == self._comm.group.rank
        if mine:
            message.pack()
        pending = self._comm.broadcast(message.payload, message.owner)
        window.add(pending, on_done=None if mine else message.unpack)


class ParamAllGather:
    """Brings all shards of a bucket to everyone. All ranks must send the same buckets in the same order."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._transports = TransportCache(Comm(comm.group), Reduce())  # replicas bring theirs to their own
        self._in_flight: dict[int, PendingWork] = {}
        self.layout = Layout.empty(comm.group.size)
        self._lock = RLock()
        """Another thread may wait for the same: neither may go on before they are there."""

    @property
    def is_in_flight(self) -> bool:
        return bool(self._in_flight)

    def start(self, bucket: Bucket, buffer: torch.Tensor) -> None:
        """Send this rank's shard of `flat`, and receive the others'."""
        if self._comm.group.size == 1:
            return
        way = self._transports.get(bucket.device, has_equal_shards=bucket.has_equal_shards)
        with self._comm.profiler.phase(Phase.SEND_PARAMS, bucket.index):
            self._in_flight[bucket.index] = way.all_gather(buffer, bucket.shards)

    def bytes_to_send(self) -> int:
        """What this rank sends when all buckets go that train.

        Hazard: no way is asked for. They are made in the same order on all ranks, and one rank may ask this alone.
        """
        group = self._comm.group
        trained = [it for it in self.layout.buckets if self.layout.has_trainable_params(it.index)]
        return (group.size - 1) * sum(it.shards[group.rank].length * it.dtype.itemsize for it in trained)

    def wait(self, buckets: Iterable[int]) -> None:
        """These buckets have arrived."""
        with self._lock:
            for bucket in buckets:
                if bucket in self._in_flight:
                    self._comm.group.failure_detector.set_activity(
                        partial(self.layout.describe_bucket, bucket, "parameters")
                    )
                    with self._comm.profiler.phase(Phase.WAIT_PARAMS, bucket):
                        self._in_flight.pop(bucket).wait()

    def abandon(self) -> None:
        """Nothing is under way any longer, whether it has arrived or never will."""
        try:
            self.finish()
        except Exception:  # of ranks, or a process group, that may be gone
            self._in_flight.clear()
            warn_at_caller(
                "some parameters of the model never came, since a rank was lost: they are of two steps. Restore or "
                "load them before you train on."
            )

    def finish(self) -> None:
        with self._lock:
            self.wait(list(self._in_flight))
