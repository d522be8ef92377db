"""Send updated parameters from their owners to all ranks of the shard group.

`ParamBroadcast` sends whole parameters to all ranks, `ParamAllGather` all-gathers the shards of flat buckets. Both
are asynchronous, and all ranks must start the same transfers in the same order. Each decides what is sent before and
after the ranks exchange the outcome of a step.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import partial
from itertools import compress
from threading import RLock

import torch
from torch.autograd.graph import increment_version

from .._logging import warn_at_caller
from .._types import Rank
from ..comm.collectives import Comm
from ..comm.consensus import Failure, Status, exchange_status, raise_failure
from ..comm.transport_cache import TransportCache
from ..comm.work import InFlightWindow, PendingWork
from ..config import ReducePolicy
from ..layout.layout import Bucket
from ..profiling import Phase, StepProfiler
from .flat_shards import FlatShardStore
from .param_memory import BroadcastMessage, BroadcastPlan
from .param_store import ParamStore
from .step import Step, StepOutcome, merge_masks
from .whole_params import WholeParamStore


class ParamSync(ABC):
    """Sends updated parameters from their owners to all ranks, when a step ends and between calls of a closure."""

    can_step_alone = False
    """A step is nothing but the step of the inner optimizer: there is one rank, which updates parameters in place."""

    @property
    @abstractmethod
    def is_in_flight(self) -> bool: ...

    def __init__(self, store: ParamStore) -> None:
        self._memory = store.memory

    def wait_until_idle(self) -> None:
        """Wait for parameters in flight, and rebind parameters that the user has moved."""
        self.finish()
        self._memory.rebind_if_moved()

    @abstractmethod
    def sync_between_closures(self, step: Step) -> None:
        """Send what was updated since the last call of the closure. Call on all ranks; raises on all ranks."""

    @abstractmethod
    def sync_after_failed_closure(self, step: Step) -> None:
        """Send what was updated before a later call of the closure failed on all ranks. Call on all ranks."""

    @abstractmethod
    def finish_step(self, step: Step, options: bytes, count_step: Callable[[], None]) -> Status:
        """Exchange the outcome of the update, and send updated parameters. Call on all ranks.

        Args:
            step: The step, after the update.
            options: Options that must be equal on all ranks. The result says whether they are.
            count_step: Called when this rank starts to send: from then on ranks may differ.
        """

    @abstractmethod
    def start_all(self) -> None:
        """Start sending all parameters from their owners to all ranks; `finish` waits. Call on all ranks."""

    def sync_all(self) -> None:
        """Send all parameters from their owners to all ranks. Call on all ranks."""
        self.start_all()
        self.finish()

    @abstractmethod
    def finish(self) -> None:
        """Wait for everything in flight."""

    @abstractmethod
    def bytes_to_send(self) -> int:
        """Return the bytes that this rank sends when all of its trainable parameters are updated once."""


class ParamBroadcast(ParamSync):
    """Broadcasts updated whole parameters, after all ranks have agreed which ones."""

    def __init__(self, comm: Comm, profiler: StepProfiler, store: WholeParamStore) -> None:
        super().__init__(store)
        self._comm, self._profiler, self._store = comm, profiler, store
        self._failure_detector = comm.group.failure_detector
        self._transports = TransportCache(Comm(comm.group), ReducePolicy())
        self._in_place_window = InFlightWindow(limit=256)
        """Messages that need no staging; `finish` waits for them."""
        self._undelivered_mask = b""
        """Mask of updated parameters that other ranks may not have received."""
        self.can_step_alone = comm.group.size == 1

    @property
    def is_in_flight(self) -> bool:
        return len(self._in_place_window) > 0

    def sync_between_closures(self, step: Step) -> None:
        """Do nothing: closures see the parameters of their own rank, and ranks exchange updates when a step ends."""

    def sync_after_failed_closure(self, step: Step) -> None:
        self.finish_step(step, b"", lambda: None)

    def finish_step(self, step: Step, options: bytes, count_step: Callable[[], None]) -> Status:
        """Agree which parameters were updated, and broadcast them."""
        # Include what an earlier step could not send.
        step.update_mask = self._undelivered_mask = merge_masks(step.update_mask, self._undelivered_mask)
        # If every parameter is updated, the mask does not tell whether ranks have gradients of the same parameters.
        updates_all = all(member.traits.updates_without_grads for member in self._store.members)
        measure = None if updates_all else step.grad_projection
        plan, status = self._plan_on_all_ranks(step, step.update_mask, options, measure)
        count_step()
        if status.failure_level < Failure.CANNOT_SEND_PARAMS and not status.has_same_payload:
            # Ranks have gradients of different parameters: the owners decide which parameters are broadcast.
            owned = set(self._store.owned_indices)
            owned_mask = bytes(flag and index in owned for index, flag in enumerate(step.update_mask))
            plan, owner_status = self._plan_on_all_ranks(step, self._comm.all_reduce_any(owned_mask))
            status = status._replace(failure_level=owner_status.failure_level)
        if plan is not None and status.failure_level < Failure.CANNOT_SEND_PARAMS:
            with self._failure_detector.abort_on_error():
                self.start(plan)
                self.finish()
            self._undelivered_mask = b""
        return status

    def _plan_on_all_ranks(
        self, step: Step, mask: bytes, options: bytes = b"", measure: int | None = None
    ) -> tuple[BroadcastPlan | None, Status]:
        """Plan to broadcast the parameters in `mask`. Return the plan, if it can be made here, and the status of all.

        Call on all ranks.
        """
        plans: list[BroadcastPlan] = []
        step.outcome.run_always(lambda: plans.append(self._store.memory.plan_broadcast(mask)))
        failure = step.outcome.failure
        status = exchange_status(self._comm, step.call, mask, failure, options=options, measure=measure)
        return (plans[0] if plans else None), status

    def start_all(self) -> None:
        with self._failure_detector.abort_on_error():
            if not self.can_step_alone:
                self.start(self._store.memory.plan_broadcast(b"\1" * len(self._store.tensors)))
            increment_version(self._store.tensors)

    def start_bucket(self, bucket: int) -> None:
        """Start broadcasting the parameters of one bucket; `finish` waits for it. Call on all ranks."""
        if not self.can_step_alone:
            with self._failure_detector.abort_on_error():
                self.start(self._store.memory.plan_bucket_broadcast(bucket))

    def bytes_to_send(self) -> int:
        store = self._store
        nbytes = (store.tensors[index].nbytes for index in store.owned_indices if store.layout.params[index].trainable)
        return (self._comm.group.size - 1) * sum(nbytes)

    @torch.no_grad()
    def start(self, plan: BroadcastPlan) -> None:
        """Start all messages and wait for the staged ones. In-place messages may still be in flight on return."""
        staged = InFlightWindow(plan.max_in_flight)
        with self._profiler.phase(Phase.SEND_PARAMS):
            for message in plan.messages:
                window = staged if message.needs_staging else self._in_place_window
                window.wait_for_capacity()
                self._send(message, window)
        with self._profiler.phase(Phase.WAIT_PARAMS):
            staged.drain()
        # Hazard: release only on success. After an error, messages that are still in flight may use this memory.
        plan.release_staging()

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for all messages in flight."""
        self._failure_detector.set_activity("updated parameters")
        with self._profiler.phase(Phase.WAIT_PARAMS), self._failure_detector.abort_on_error():
            self._in_place_window.drain()

    def _send(self, message: BroadcastMessage, window: InFlightWindow) -> None:
        is_owner = message.owner == self._comm.group.rank
        if is_owner:
            message.pack()
        if message.is_balanced:
            transport = self._transports.get(message.device, has_equal_shards=False)
            work = transport.broadcast(message.payload, message.owner)
        else:
            work = self._comm.broadcast(message.payload, message.owner)
        window.add(work, on_done=None if is_owner else message.unpack)


class ParamAllGather(ParamSync):
    """All-gathers the updated shards of flat buckets. All ranks must start the same buckets in the same order."""

    def __init__(self, comm: Comm, profiler: StepProfiler, store: FlatShardStore, *, should_wait: bool = True) -> None:
        """Create the sync of a store.

        Args:
            comm: Collectives of the optimizer.
            profiler: Times sends and waits.
            store: The store whose buckets are gathered.
            should_wait: A step waits for all parameters; otherwise the modules that use them wait.
        """
        super().__init__(store)
        self._comm, self._profiler, self._store, self._should_wait = comm, profiler, store, should_wait
        self._failure_detector = comm.group.failure_detector
        # Gather within the shard group only: its ranks own all shards, with replicas too.
        self._transports = TransportCache(Comm(comm.group), ReducePolicy())
        self._in_flight: dict[int, PendingWork] = {}
        self._lock = RLock()
        """Two threads may wait for the same bucket: neither may continue before it has arrived."""

    @property
    def is_in_flight(self) -> bool:
        return bool(self._in_flight)

    def sync_between_closures(self, step: Step) -> None:
        call, outcome = f"another closure of {step.call}", StepOutcome()
        outcome.run_always(lambda: self._store.write_back(step))
        status = exchange_status(self._comm, call, b"", outcome.failure)
        self.start_updated(step.update_mask)
        self.finish()
        if status.failure_level:
            raise_failure(self._comm, call, outcome.error)

    def sync_after_failed_closure(self, step: Step) -> None:
        """Do nothing: `sync_between_closures` has sent all updates before the call that failed."""

    def finish_step(self, step: Step, options: bytes, count_step: Callable[[], None]) -> Status:
        """All-gather updated shards, even after a failure: parameters must stay equal on all ranks."""
        call = f"the end of {step.call}"
        count_step()
        if step.has_closure:
            # Start to send after the exchange: a rank whose optimizer calls its closure once more is not here yet.
            status = exchange_status(self._comm, call, b"", step.outcome.failure, options=options)
            self.start_updated(step.update_mask)
        else:
            self.start_updated(step.update_mask)
            status = exchange_status(self._comm, call, b"", step.outcome.failure, options=options)
        if self._should_wait or status.failure_level:
            self.finish()
        return status

    def start_all(self) -> None:
        self.start_updated(b"\1" * len(self._store.tensors))
        self._store.invalidate_masters()

    def start_updated(self, update_mask: bytes) -> None:
        """Start all-gathering the buckets of updated parameters, in the order in which a forward pass uses them.

        Buckets are numbered in the order of backward, hence the reversal.
        """
        params = self._store.tensors
        with self._failure_detector.abort_on_error():
            for bucket in reversed(self._store.layout.buckets):
                if 0 not in update_mask or any(map(update_mask.__getitem__, bucket.params)):
                    self.start(bucket, self._store.memory.buffer(bucket.index))
        # Autograd must see every update, local or remote, as an in-place change.
        increment_version([*compress(params, update_mask)] if 0 in update_mask else params)
        self._store.mark_synced()

    def broadcast_from_rank(self, source: Rank, *, first_bucket: int = 0) -> None:
        """Broadcast parameters of data-parallel rank `source`, from `first_bucket` on. Call on all ranks."""
        with self._profiler.phase(Phase.BROADCAST_BUFFERS):
            for bucket in self._store.layout.buckets[first_bucket:]:
                if not self._comm.is_single_rank and bucket.numel:
                    self._comm.data_parallel.broadcast(self._store.memory.buffer(bucket.index), source).wait()
        self._store.invalidate_masters()

    def start(self, bucket: Bucket, buffer: torch.Tensor) -> None:
        """Start the all-gather of a bucket: send this rank's shard of `buffer` and receive the others into it."""
        if self._comm.group.size == 1:
            return
        transport = self._transports.get(bucket.device, has_equal_shards=bucket.has_equal_shards)
        with self._profiler.phase(Phase.SEND_PARAMS, bucket.index):
            self._in_flight[bucket.index] = transport.all_gather(buffer, bucket.shards)

    def bytes_to_send(self) -> int:
        """Return the bytes that this rank sends to all-gather all trainable buckets once.

        Hazard: do not ask a transport. All ranks must create transports in the same order, and a single rank may call
        this.
        """
        group, layout = self._comm.group, self._store.layout
        trainable = [bucket for bucket in layout.buckets if layout.has_trainable_params(bucket.index)]
        return (group.size - 1) * sum(bucket.shards[group.rank].length * bucket.dtype.itemsize for bucket in trainable)

    def wait(self, buckets: Iterable[int]) -> None:
        """Wait until the parameters of these buckets, given by index, have arrived."""
        with self._lock:
            for index in buckets:
                if index in self._in_flight:
                    self._failure_detector.set_activity(
                        partial(self._store.layout.describe_bucket, index, "parameters")
                    )
                    with self._profiler.phase(Phase.WAIT_PARAMS, index):
                        self._in_flight[index].wait()
                    # Hazard: not before it has arrived. If a rank was lost, every later use must raise as well.
                    del self._in_flight[index]

    def abandon(self) -> None:
        """Wait for all buckets in flight. If that fails, drop them and warn instead of raising."""
        try:
            self.finish()
        except Exception:  # other ranks or the process group may be gone
            self._in_flight.clear()
            warn_at_caller(
                "a rank was lost before all parameters were gathered: the model mixes parameters of two steps. Load "
                "a checkpoint before you continue.",
                on_all_ranks=True,
            )

    def finish(self) -> None:
        """Wait for all buckets in flight."""
        with self._lock:
            self.wait(list(self._in_flight))
