"""Send updated parameters from their owners to all ranks of the shard group.

`ParamBroadcast` sends whole parameters as broadcasts, `ParamAllGather` all-gathers the shards of flat buckets. Both
are asynchronous, and all ranks must start the same transfers in the same order.
"""

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
    """Broadcasts the messages of a `BroadcastPlan`. All ranks must start the same plans in the same order."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._in_place_window = InFlightWindow(limit=256)
        """Messages that need no staging; `finish` waits for them."""

    @torch.no_grad()
    def start(self, plan: BroadcastPlan) -> None:
        """Start all messages and wait for the staged ones. In-place messages may still be in flight on return."""
        staged = InFlightWindow(plan.max_in_flight)
        with self._comm.profiler.phase(Phase.SEND_PARAMS):
            for message in plan.messages:
                window = self._in_place_window if isinstance(message, InPlaceMessage) else staged
                window.wait_for_capacity()
                self._send(message, window)
        with self._comm.profiler.phase(Phase.WAIT_PARAMS):
            staged.drain()
        # Hazard: release only on success. After an error, messages that are still in flight may use this memory.
        plan.release_staging()

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for all messages in flight."""
        self._comm.group.failure_detector.set_activity("updated parameters")
        with self._comm.profiler.phase(Phase.WAIT_PARAMS):
            self._in_place_window.drain()

    def _send(self, message: BroadcastMessage, window: InFlightWindow) -> None:
        is_owner = message.owner == self._comm.group.rank
        if is_owner:
            message.pack()
        work = self._comm.broadcast(message.payload, message.owner)
        window.add(work, on_done=None if is_owner else message.unpack)


class ParamAllGather:
    """All-gathers the shards of buckets. All ranks must start the same buckets in the same order."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        # Gather within the shard group only: its ranks own all shards, with replicas too.
        self._transports = TransportCache(Comm(comm.group), Reduce())
        self._in_flight: dict[int, PendingWork] = {}
        self.layout = Layout.empty(comm.group.size)
        self._lock = RLock()
        """Two threads may wait for the same bucket: neither may continue before it has arrived."""

    @property
    def is_in_flight(self) -> bool:
        return bool(self._in_flight)

    def start(self, bucket: Bucket, buffer: torch.Tensor) -> None:
        """Start the all-gather of a bucket: send this rank's shard of `buffer` and receive the others into it."""
        if self._comm.group.size == 1:
            return
        transport = self._transports.get(bucket.device, has_equal_shards=bucket.has_equal_shards)
        with self._comm.profiler.phase(Phase.SEND_PARAMS, bucket.index):
            self._in_flight[bucket.index] = transport.all_gather(buffer, bucket.shards)

    def bytes_to_send(self) -> int:
        """Return the bytes that this rank sends to all-gather all trainable buckets once.

        Hazard: do not ask a transport. All ranks must create transports in the same order, and a single rank may call
        this.
        """
        group = self._comm.group
        trainable = [bucket for bucket in self.layout.buckets if self.layout.has_trainable_params(bucket.index)]
        return (group.size - 1) * sum(bucket.shards[group.rank].length * bucket.dtype.itemsize for bucket in trainable)

    def wait(self, buckets: Iterable[int]) -> None:
        """Wait until the parameters of these buckets, given by index, have arrived."""
        with self._lock:
            for index in buckets:
                if index in self._in_flight:
                    self._comm.group.failure_detector.set_activity(
                        partial(self.layout.describe_bucket, index, "parameters")
                    )
                    with self._comm.profiler.phase(Phase.WAIT_PARAMS, index):
                        self._in_flight.pop(index).wait()

    def abandon(self) -> None:
        """Wait for all buckets in flight. If that fails, drop them and warn instead of raising."""
        try:
            self.finish()
        except Exception:  # other ranks or the process group may be gone
            self._in_flight.clear()
            warn_at_caller(
                "some parameters of the model never arrived because a rank was lost: the model mixes the parameters of "
                "two steps. Restore or load them before you continue training."
            )

    def finish(self) -> None:
        """Wait for all buckets in flight."""
        with self._lock:
            self.wait(list(self._in_flight))
