"""Gradients to their owners: a gradient is ready, its bucket is full, its slices are on their way.

All ranks send buckets in the same order, round after round: a bucket goes when all its parameters have gradients and
its elders have gone. A rank where that never happens, since it used other parameters or made no backward pass at all,
catches up in `settle`, with zeros for what it lacks. So no rank relies on another inside a backward pass; it waits for
others there only when much is under way, and not for long.

A large gradient is copied into its bucket as soon as it is there, and freed; small ones together when the bucket goes.
What is in `param.grad` in `settle` and has not travelled yet (it came too late, or from `no_sync`) goes along then.

A rank that fails stops sending, and keeps quiet about it until `settle`. There it sends zeros for what others wait for,
and all ranks drop what they have and raise.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from struct import pack
from threading import RLock
from weakref import ReferenceType, ref

import torch

from .._logging import log_rank, warn_at_caller
from ..comm.collectives import Comm
from ..comm.consensus import raise_failure
from ..comm.failure import UnusedBuckets
from ..comm.transport_cache import TransportCache
from ..config import MasterWeights, Reduce, ZeroStage
from ..errors import RankLostError, RankMismatchError
from ..layout.layout import Bucket, Layout
from ..profiling import Phase
from .grad_bucket import (
    BufferPool,
    GradBucket,
    OptionalGrads,
    PendingReduce,
    ReduceOutput,
    ShardedGrad,
    drop_placeholder,
    local_grad,
)
from .grad_source import GradSource

# ---------------------------------------------------------------------------------------------------------------------
# Buckets of gradients that have been sent, and when to wait for them.


MIN_IN_FLIGHT = 1
"""The newest buckets are left on their way: taking them in at once would stop what they are to overlap with."""
MAX_IN_FLIGHT = 2
WAIT_TIMEOUT_S = 0.1
"""Seconds that a rank waits, inside a backward pass, for the oldest of more buckets than that, so that memory is
bounded where ranks keep pace; and for all of them before it settles, so that what fails is known in time. In vain once
a step only: another may send nothing before this one settles."""


FinishReduce = Callable[[PendingReduce], None]
"""Takes one in. Raises nothing that this rank alone knows of."""


class InFlightReduces:
    """The oldest first."""

    def __init__(self, comm: Comm) -> None:
        self._profiler = comm.profiler
        self._unused_buckets = UnusedBuckets(comm.data_parallel.group.rank, comm.group.failure_detector)
        self._pending: deque[PendingReduce] = deque()
        self._timeout_s = WAIT_TIMEOUT_S
        self.are_ranks_in_step = True
        """All ranks had sent as much when they last settled."""

    def __len__(self) -> int:
        return len(self._pending)

    def __iter__(self) -> Iterator[PendingReduce]:
        return iter(self._pending)

    def add(self, pending: PendingReduce) -> None:
        self._pending.append(pending)
        self._unused_buckets.add()

    def reset(self) -> None:
        """A step has all that it waited for."""
        self._timeout_s = WAIT_TIMEOUT_S
        self._unused_buckets.reset()

    def discard_results(self) -> None:
        # Hazard: waiting here for what is under way would be waiting for ranks that may not send it before they settle.
        self._pending = deque(sending._replace(is_needed=False) for sending in self._pending)
        self._unused_buckets.reset()

    def finish_arrived(self, finish_reduce: FinishReduce) -> None:
        while len(self) > MIN_IN_FLIGHT:
            crowded = len(self) > MAX_IN_FLIGHT
            if not self._wait_for_oldest(self._timeout_s if crowded else 0):
                self._timeout_s = 0 if crowded else self._timeout_s
                return
            self._finish_oldest(finish_reduce)

    def finish_within_timeout(self, finish_reduce: FinishReduce) -> None:
        """What arrives soon: if that fails, all ranks learn of it by the statement."""
        while self and self._wait_for_oldest(self._timeout_s if self.are_ranks_in_step else 0):
            self._finish_oldest(finish_reduce)
        self._timeout_s = 0 if self else self._timeout_s

    def finish_all(self, finish_reduce: FinishReduce) -> None:
        while self:
            self._finish_oldest(finish_reduce)

    def describe_missing(self, num_sent: int, layout: Layout) -> str:
        """What of so many buckets a rank waits for, for an error; "" if for nothing."""
        missing = [it.bucket.index for it in self if not it.work.is_ready(0)]
        if not missing:
            return ""
        num_sent = max(num_sent, len(missing))
        next_one = layout.describe_bucket(missing[0], "gradients")
        return f"{num_sent - len(missing)} of {num_sent} buckets that were sent have arrived, next: {next_one}"

    def _finish_oldest(self, finish_reduce: FinishReduce) -> None:
        """It is among these until it has arrived, for errors to name it."""
        finish_reduce(self._pending[0])
        self._pending.popleft()

    def _wait_for_oldest(self, timeout_s: float) -> bool:
        """Whether the oldest has come, after so many seconds at most."""
        slot, arriving, *_ = self._pending[0]
        if not timeout_s or arriving.is_ready(0):
            return arriving.is_ready(0)
        with self._profiler.phase(Phase.WAIT_GRADS, slot.index):
            return arriving.is_ready(timeout_s)


# ---------------------------------------------------------------------------------------------------------------------
# Whose turn it is: buckets go in the same order on all ranks, round after round.


class BucketSchedule:
    """Which bucket goes next, and whose gradients it waits for.

    A backward pass sends one round: every bucket once, however many parameters it has used. So ranks that make the same
    backward passes have sent as many buckets at each `zero_grad`, whichever parameters each of them has used.

    What had no gradients last time is not waited for: an unused parameter must not keep a bucket waiting, nor an unused
    bucket the others.
    """

    def __init__(self) -> None:
        self.buckets: list[GradBucket] = []
        self.bucket_of: dict[int, GradBucket] = {}
        self.num_sent = self.num_cleared = 0
        """Buckets that were sent since gradients were last settled, all and before they were last cleared."""
        self._is_open = False
        self._num_remaining = 0
        """Buckets that the open round, that of the present backward pass, has yet to send."""
        self._send_order: list[GradBucket] = []
        self._params: Sequence[torch.Tensor] = ()
        self._ready_flags = bytearray()
        self._expected_flags = bytearray()
        self._expected_from = b""

    def extend(self, buckets: Iterable[GradBucket], params: Sequence[torch.Tensor]) -> None:
        for slot in buckets:
            self.buckets.append(slot)
            self.bucket_of |= dict.fromkeys(slot.params, slot)
            if any(place.spec.trainable for place in slot.slots):
                self._send_order.append(slot)
        self._params = params
        self._set_expected(bytes(len(params)))

    @property
    def next_bucket(self) -> GradBucket:
        return self._send_order[self.num_sent % len(self._send_order)]

    def start_backward(self) -> None:
        """A backward pass has made a gradient: it sends every bucket once, when it is full or at the end of the pass.

        Gradients for a bucket that it has sent already wait for the next pass, or the step.
        """
        if not self._is_open:
            self._is_open, self._num_remaining = True, len(self._send_order)

    def finish_backward(self) -> None:
        """All buckets of the round have been sent."""
        assert not self._num_remaining
        self._is_open = False

    @property
    def has_remaining(self) -> bool:
        """The open round has buckets that were not sent."""
        return self._num_remaining > 0

    @property
    def is_next_ready(self) -> bool:
        return self.has_remaining and not self.next_bucket.num_missing

    def is_pending(self, index: int) -> bool:
        return bool(self._expected_flags[index]) and not self._ready_flags[index]

    def mark_ready(self, index: int) -> bool:
        """A gradient that was awaited is there; whether its bucket is full now."""
        slot, self._ready_flags[index] = self.bucket_of[index], 1
        slot.num_missing -= 1
        return not slot.num_missing

    def mark_taken(self, index: int) -> None:
        self._ready_flags[index] = 0

    def mark_sent(self, bucket: GradBucket) -> None:
        if bucket in self._send_order:
            self.num_sent += 1
            self._num_remaining -= self.has_remaining
        bucket.num_missing = bucket.num_expected

    def expect(self, index: int) -> None:
        """A gradient of this parameter adds up in a pass that sends nothing, so the pass that sends waits for it."""
        if index in self.bucket_of and not self._expected_flags[index]:
            slot, self._expected_flags[index] = self.bucket_of[index], 1
            slot.num_expected += 1
            slot.num_missing += 1

    def reset(self) -> None:
        self.num_sent = self.num_cleared = self._num_remaining = 0
        self._is_open = False
        self._ready_flags = bytearray(len(self._params))
        for slot in self.buckets:
            slot.num_missing = slot.num_expected

    def update_expected(self, grad_mask: bytes, *, force: bool) -> None:
        """Wait for these from now on. `anew`: also if they are those of last time, but others may train now."""
        if force or grad_mask != self._expected_from:
            self._set_expected(grad_mask)
        used = [slot for slot in self.buckets if 0 not in grad_mask or any(map(grad_mask.__getitem__, slot.params))]
        self._send_order = used or self._send_order

    def _set_expected(self, grad_mask: bytes) -> None:
        self._expected_from = grad_mask
        used = grad_mask if any(grad_mask) else b"\1" * len(grad_mask)
        flags = [param.requires_grad and used[index] for index, param in enumerate(self._params)]
        self._expected_flags = bytearray(map(bool, flags))
        for slot in self.buckets:
            slot.num_expected = sum(map(self._expected_flags.__getitem__, slot.params))


# ---------------------------------------------------------------------------------------------------------------------
# Gradients that were reduced and stay in `param.grad`, where anybody may write to them afterwards.


CHANGED_AFTER_REDUCTION = (
    "was changed in param.grad after it was reduced, or after the average was clipped or unscaled. param.grad does not "
    "hold the average: torch.nn.utils.clip_grad_norm_() uses another norm on every rank. "
    "Use optimizer.clip_grad_norm_(), optimizer.clip_grad_value_() or zeroshard.GradScaler. To edit gradients, "
    "accumulate them inside no_sync() and edit them before step(); to set new ones, call zero_grad() first."
)


@dataclass
class _ReducedGrad:
    grad_ref: ReferenceType[torch.Tensor]
    version: int
    accumulation_count: int
    is_pending: bool = True
    """No step has used it yet, and it was not cleared."""


class GradVersions:
    """What was sent as it is, by parameter; to notice what else is in `param.grad` by now."""

    def __init__(self) -> None:
        self._reduced: dict[int, _ReducedGrad] = {}
        self._accumulation_count = 0
        self.is_scaled = False
        """The average was clipped or unscaled, and must not be made again from gradients that were not."""

    def record(self, index: int, grad: torch.Tensor | None) -> None:
        if grad is None:
            self._reduced.pop(index, None)
        else:
            self._reduced[index] = _ReducedGrad(ref(grad), _tensor_version(grad), self._accumulation_count)

    def __contains__(self, index: int) -> bool:
        return index in self._reduced

    def mark_scaled(self, params: Sequence[torch.Tensor]) -> None:
        """The average is clipped or unscaled. It is made of gradients that are still in `param.grad`."""
        self._reduced = {index: sent for index, sent in self._reduced.items() if params[index].grad is not None}
        self.is_scaled = True

    def clear(self) -> None:
        self._reduced.clear()

    def split_cleared(
        self, params: Sequence[torch.Tensor], written_by_backward: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        """Parameters whose gradients were cleared, or set for another step, since they were sent; and the others.

        What a backward pass has made since may be zero by chance, and so is left out.
        """
        cleared: list[int] = []
        others: list[int] = []
        for index, sent in self._reduced.items():
            grad = params[index].grad
            if grad is None:
                cleared.append(index)
            elif not self.is_changed(index, grad):
                others.append(index)
            elif not written_by_backward[index] and not self._may_share_version(sent, grad):
                (cleared if not sent.is_pending or _is_all_zero(grad) else others).append(index)
        return cleared, others

    def _may_share_version(self, reduced: _ReducedGrad, grad: torch.Tensor) -> bool:
        """Hazard: views of one DDP bucket share a version, so that adding to one gradient changes its neighbors."""
        return grad._is_view() and reduced.accumulation_count != self._accumulation_count

    def mark_accumulation(self) -> None:
        """A backward pass adds to some gradients."""
        self._accumulation_count += 1

    def mark_zeroed(self, params: Sequence[torch.Tensor]) -> None:
        """All are zeros, as is their average."""
        for index in list(self._reduced):
            self.record(index, params[index].grad)
        self.mark_stepped()

    def mark_stepped(self) -> None:
        """What is written from now on is a gradient for another step."""
        for sent in self._reduced.values():
            sent.is_pending = False

    def is_changed(self, index: int, grad: torch.Tensor) -> bool:
        """Another one has taken its place, or it was written to."""
        sent = self._reduced.get(index)
        return sent is not None and (sent.grad_ref() is not grad or sent.version != _tensor_version(grad))

    def find_late_edit(self, params: Sequence[torch.Tensor], written_by_backward: Sequence[int]) -> int | None:
        """The first that somebody has changed between its reduction and the step, unless a backward pass has."""
        grads = ((index, params[index].grad) for index in self._reduced if not written_by_backward[index])
        return next((index for index, grad in grads if grad is not None and self._is_late_edit(index, grad)), None)

    def _is_late_edit(self, index: int, grad: torch.Tensor) -> bool:
        if not self.is_changed(index, grad):
            return False
        sent = self._reduced[index]
        if self.is_scaled:
            return True
        if not sent.is_pending:
            return False  # a gradient of the user's own, which is sent
        return not self._may_share_version(sent, grad) and not _is_all_zero(grad)


def _is_all_zero(grad: torch.Tensor) -> bool:
    """As `model.zero_grad(set_to_none=False)` leaves it."""
    values = grad._values() if grad.layout == torch.sparse_coo else grad
    return not values.detach().count_nonzero()


def _tensor_version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


# ---------------------------------------------------------------------------------------------------------------------
# Gradients to their owners: a gradient is ready, its bucket is full, its slices are on their way.
#
# All ranks send buckets in the same order, round after round: a bucket goes when all its parameters have gradients and
# its elders have gone. A rank where that never happens, since it used other parameters or made no backward pass at all,
# catches up in `settle`, with zeros for what it lacks. So no rank relies on another inside a backward pass; it waits
# for
# others there only when much is under way, and not for long.
#
# A large gradient is copied into its bucket as soon as it is there, and freed; small ones together when the bucket
# goes.
# What is in `param.grad` in `settle` and has not travelled yet (it came too late, or from `no_sync`) goes along then.
#
# A rank that fails stops sending, and keeps quiet about it until `settle`. There it sends zeros for what others wait
# for,
# and all ranks drop what they have and raise.


EAGER_COPY_MIN_BYTES = 256 * 1024
"""Bytes of a gradient that is copied on its own."""


class GradReducer(GradSource):
    """Averages gradients over all ranks, each slice at its owner."""

    source_name = "slices from all ranks"

    def __init__(self, comm: Comm, stage: ZeroStage, reduce: Reduce, masters: MasterWeights | None) -> None:
        super().__init__(comm, masters)
        self._stage, self._reduce = stage, reduce
        self.is_paused = False
        """Gradients add up in `param.grad`, and nothing travels."""
        self._schedule = BucketSchedule()
        self._eager_copy_params: set[int] = set()
        """Parameters whose gradients are copied at once."""
        self._grad_mask = bytearray()
        self._provided_grads: dict[int, torch.Tensor] = {}
        self._unsent_flags = bytearray()
        self._accumulated_flags = bytearray()
        """Parameters to whose `param.grad` a backward pass has added since it was last sent."""
        self._unsent_params: list[int] = []
        self._grad_versions = GradVersions()
        self._backward_id = -1
        """The one that has last added to a gradient."""
        self.grad_accumulators: dict[int, torch.autograd.graph.Node] = {}
        """Of hooked parameters. Nobody else keeps these nodes, and with them their hooks, between passes."""
        self._in_flight = InFlightReduces(comm)
        self._placeholders: dict[int, ShardedGrad] = {}
        self._placeholder_params: set[int] = set()
        """Parameters that have a placeholder, unless the user has removed it."""
        self._buffer_pools: dict[tuple[torch.dtype, torch.device], BufferPool] = {}
        self._transports = TransportCache(comm, reduce)
        self._lock = RLock()
        """Autograd has a thread for each device."""
        self._is_consumed = False
        """A step has used them: a backward pass that adds to them gets a warning."""
        self._has_stepped = False
        """A step was tried since the last backward pass. What is set in `param.grad` then is for another one."""
        self._error: Exception | None = None
        """What this rank alone knows of, until gradients are settled."""
        self._peer_lost_error: RankLostError | None = None
        """Others are gone, and so are the gradients that had been on their way to them: there is nothing to settle."""
        comm.group.failure_detector.add_context(self._describe_missing)

    def extend(self, layout: Layout, params: Sequence[torch.Tensor]) -> None:
        super().extend(layout, params)
        new = [self._make_bucket(layout, bucket) for bucket in layout.buckets[len(self._schedule.buckets) :]]
        self._schedule.extend(new, self._params)
        if self._stage.frees and not self._comm.is_single_rank and self._can_overlap_backward:
            self._eager_copy_params = {
                index
                for slot in self._schedule.buckets
                if slot.needs_packing
                for index in slot.large_params(EAGER_COPY_MIN_BYTES)
            }
        self._grad_mask.extend(bytes(len(params) - len(self._grad_mask)))
        self._accumulated_flags.extend(bytes(len(params) - len(self._accumulated_flags)))
        self._reset()

    def _make_bucket(self, layout: Layout, bucket: Bucket) -> GradBucket:
        dtype = self._reduce.wire_dtype(bucket.dtype)
        pool = self._buffer_pools.setdefault((dtype, bucket.device), BufferPool(dtype, bucket.device))
        way = self._transports.get(bucket.device, has_equal_shards=bucket.has_equal_shards)
        return GradBucket(layout, bucket, way, pool, self._comm.profiler)

    @property
    def is_reducing(self) -> bool:
        """Gradients have been sent since they were last settled."""
        return self._schedule.num_sent > 0 or bool(self._in_flight)

    @property
    def _should_add_to_shard(self) -> bool:
        """A pass adds to the shard; else it sends all that this rank has added up, which takes the shard's place.

        Also with ZeRO-1 once the shard was clipped or unscaled, since what is in `param.grad` was not.
        """
        return self._stage.frees or self._grad_versions.is_scaled

    def prepare_accumulation(self, index: int, backward_id: int) -> None:
        """A backward pass is about to add to `param.grad`."""
        with self._lock:
            if backward_id != self._backward_id:
                self._backward_id = backward_id
                self._check_grad_edits(in_backward=True)
                self._has_stepped = False
            if self._stage.frees:
                drop_placeholder(self._params[index])
                self._placeholder_params.discard(index)
                return
            if self._is_in_scaled_shard(index):
                self._params[index].grad = None
            self._accumulated_flags[index] = 1
            self._grad_versions.mark_accumulation()

    def _check_grad_edits(self, *, in_backward: bool) -> None:
        """Notice what was done to `param.grad` since gradients were reduced. Raises in the next step, on all ranks."""
        if self._error is None:
            try:
                self._clear_if_grads_cleared(in_backward=in_backward)
                self._check_no_late_edits()
            except Exception as failure:
                self._record_error(failure)

    def _clear_if_grads_cleared(self, *, in_backward: bool) -> None:
        """Clear the shards if gradients were cleared in `param.grad`, by hand or by `model.zero_grad()`.

        Single gradients may be removed between the last backward pass and the step.
        """
        if self._stage.frees:
            cleared = [
                index for index in self._placeholder_params if self._is_placeholder_removed(self._params[index].grad)
            ]
            others = [index for index in self._placeholder_params if type(self._params[index].grad) is ShardedGrad]
        elif self._grad_versions.is_scaled:
            cleared, others = self._grad_versions.split_cleared(self._params, self._accumulated_flags)
        else:
            return  # the next pass sends all that is in `param.grad` then
        if cleared and others and not in_backward:
            for index in cleared if self._stage.frees else ():
                self._placeholder_params.discard(index)
                self._grad_mask[index] = 0
        elif cleared and others:
            first, other = (self._layout.params[indices[0]].label for indices in (cleared, others))
            raise RuntimeError(
                f"the gradient of {first} was removed from param.grad after it was reduced, but not that of {other}. "
                "Before another backward pass, clear all gradients with optimizer.zero_grad(), or none."
            )
        elif cleared:
            self.clear(set_to_none=True)

    def _is_placeholder_removed(self, grad: torch.Tensor | None) -> bool:
        """A placeholder was removed; or replaced after a step, by a gradient for the next one."""
        return grad is None or (self._has_stepped and type(grad) is not ShardedGrad)

    def _is_in_scaled_shard(self, index: int) -> bool:
        """What is in `param.grad` has been sent, and was clipped or unscaled in the shard since."""
        return self._grad_versions.is_scaled and index in self._grad_versions and not self._accumulated_flags[index]

    def mark_ready(self, index: int, grad: torch.Tensor | None = None) -> None:
        """A parameter has its gradient: the given one, or that in `param.grad`. Relies on no other rank."""
        with self._lock:
            if self._peer_lost_error is not None and not self.is_paused:
                raise self._peer_lost_error.copy()
            if self._is_consumed:
                self._warn_uncleared_grads()
            if self._error is None:
                try:
                    self._mark_ready(index, grad)
                except Exception as failure:
                    self._record_error(failure)

    def _mark_ready(self, index: int, grad: torch.Tensor | None) -> None:
        if grad is not None:
            self._provided_grads[index] = grad
        self._unsent_flags[index] = 1
        if self.is_paused:
            self._schedule.expect(index)
            return
        if self._can_overlap_backward:
            self._schedule.start_backward()
        if not self._schedule.is_pending(index):
            return
        if index in self._eager_copy_params:
            self._copy_to_bucket(index)
        if self._schedule.mark_ready(index):
            self._send_ready_buckets()

    def record_param_grads(self, indices: Sequence[int]) -> None:
        """What was given to `ready` is in `param.grad` as it was: whoever writes there from now on is heard."""
        with self._lock:
            for index in indices:
                grad = self._params[index].grad
                is_unsent = self._provided_grads.pop(index, None) is not None
                # Hazard: it may have been sent with its bucket before DDP handed it over, and wrote it once more.
                if grad is not None and (not is_unsent or index in self._grad_versions):
                    self._grad_versions.record(index, grad)

    @torch.no_grad()
    def _copy_to_bucket(self, index: int) -> None:
        param = self._params[index]
        if param.grad is not None:
            self._schedule.bucket_of[index].copy_in(index, param.grad)
            param.grad = None

    def _send_ready_buckets(self) -> None:
        """Send all buckets that are full and whose turn it is."""
        while self._schedule.is_next_ready:
            self._start_reduce(self._schedule.next_bucket)

    def finish_backward(self) -> None:
        """A backward pass is over: send what is left of its round."""
        with self._lock:
            if self.is_paused or self._error is not None:
                return
            try:
                while self._schedule.has_remaining:
                    self._start_reduce(self._schedule.next_bucket)
                self._schedule.finish_backward()
                self._install_placeholders()
            except Exception as failure:
                self._record_error(failure)

    def _install_placeholders(self) -> None:
        """Have whoever uses a gradient that is in the shards get an error, instead of None or a part of it."""
        if not self._stage.frees:
            return
        for index, param in enumerate(self._params):
            if self._grad_mask[index] and param.grad is None:
                if index not in self._placeholders:
                    self._placeholders[index] = ShardedGrad(param, self._layout.params[index].label)
                param.grad = self._placeholders[index]
                self._placeholder_params.add(index)

    def has_placeholder(self, index: int) -> bool:
        """Whether `param.grad` holds a placeholder of this reducer."""
        return index in self._placeholder_params

    def drop_placeholders(self) -> None:
        self._placeholder_params.clear()
        for param in self._params:
            drop_placeholder(param)

    def __del__(self) -> None:
        for index, placeholder in self._placeholders.items():
            if self._params[index].grad is placeholder:
                self._params[index].grad = None

    def _abandon_backward(self) -> None:
        """A backward pass has failed halfway, and its gradients are cleared: others still get what they wait for."""
        try:
            while self._schedule.has_remaining:
                self._reduce_or_zeros(self._schedule.next_bucket, is_needed=False)
            self._schedule.finish_backward()
        except Exception as failure:
            self._record_error(failure)

    def _record_error(self, error: Exception) -> None:
        """Hazard: other ranks rely on what this one would send next, so that it must not raise alone."""
        if not isinstance(error, RankLostError):  # which all ranks know of, and raise
            rank = self._comm.data_parallel.group.rank
            log_rank(logging.ERROR, rank, "gradients cannot be averaged; step() raises a %s", type(error).__name__)
        self._error = self._error or error

    def signature(self) -> bytes:
        self._in_flight.finish_within_timeout(self._finish_reduce)
        self._check_grad_edits(in_backward=False)
        have, self._unsent_params = bytearray(self._current_grad_mask()), self._find_unsent_params()
        if self._unsent_params and self._is_consumed:
            self._warn_uncleared_grads()
        for index in self._unsent_params:
            have[index] = 1
        doubts = self._error is not None, bool(self._in_flight)
        return (
            bytes(have)
            + self._unsent_bucket_flags()
            + pack("qq??", self._schedule.num_sent, self._schedule.num_cleared, *doubts)
        )

    def synchronize(self, *, signatures_match: bool) -> bytes:
        sure = signatures_match and not self._unsent_params and not self._in_flight and self._error is None
        if self._error is not None:
            self._drop_local_grads()
        self._in_flight.are_ranks_in_step = signatures_match
        if not signatures_match:
            self._catch_up()
            self._unsent_params = self._find_unsent_params()
        late = self._unsent_bucket_flags()
        for slot, flag in zip(
            self._schedule.buckets,
            late if signatures_match else self._comm.data_parallel.all_reduce_any(late),
            strict=True,
        ):
            if flag:
                self._reduce_or_zeros(slot)
        self._in_flight.finish_all(self._finish_reduce)
        if not sure:
            self._raise_if_any_rank_failed()
        present = (
            self._current_grad_mask()
            if signatures_match
            else self._comm.data_parallel.all_reduce_any(self._current_grad_mask())
        )
        self._schedule.update_expected(present, force=bool(self._unsent_params) or not signatures_match)
        self._grad_mask[:] = present
        self._zero_removed_grads()
        self._reset()
        self._install_placeholders()
        return present

    def _zero_removed_grads(self) -> None:
        """Zero what the shards have of gradients that were removed from `param.grad`: norms do not count them."""
        rank = self._comm.group.rank
        for slot in self._schedule.buckets:
            if slot.has_grads and not all(self._grad_mask[index] for index in slot.params):
                bucket, shard = self._layout.buckets[slot.index], self.shard(slot.index)
                start = bucket.shards[rank].start
                for piece in bucket.param_shards_of_rank(rank):
                    if not self._grad_mask[piece.param]:
                        shard[piece.in_bucket.start - start : piece.in_bucket.stop - start].zero_()

    def _catch_up(self) -> None:
        """All ranks have sent as many buckets as the one that has sent most.

        What one rank has cleared after it was sent counts on none. A rank that sent what shall count in its place could
        not be told apart from one that cleared too late, so that is refused.
        """
        rounds = self._schedule
        goal, void, least = self._comm.data_parallel.all_reduce_max(
            [rounds.num_sent, rounds.num_cleared, -rounds.num_sent]
        )
        self._in_flight.are_ranks_in_step = goal == -least
        conflict = rounds.num_cleared < void and rounds.num_cleared < rounds.num_sent
        if self._comm.data_parallel.all_reduce_max([conflict])[0]:
            self._error = self._error or RankMismatchError(
                "zero_grad() was called between different backward passes on different ranks, so that gradients of one "
                "pass would meet those of another. They are cleared now. Where one rank leaves a step out, all must."
            )
        while rounds.num_sent < goal:
            self._reduce_or_zeros(rounds.next_bucket, is_needed=rounds.num_sent >= void)

    def _raise_if_any_rank_failed(self) -> None:
        """On all ranks, whose gradients are gone then: they are not those of all ranks, and parts of them are lost."""
        failed = self._error is not None
        if not (failed if self._comm.is_single_rank else self._comm.data_parallel.all_reduce_max([failed])[0]):
            return
        failure, self._error = self._error, None
        self.clear(set_to_none=True)
        self._drop_local_grads()
        self._reset()
        raise_failure(self._comm, "gradients could not be averaged, and are cleared now", failure)

    def _drop_local_grads(self) -> None:
        """Free what has not travelled."""
        self._provided_grads.clear()
        self._placeholder_params.clear()
        for param in self._params:
            param.grad = None

    def clear(self, *, set_to_none: bool) -> None:
        self._in_flight.discard_results()
        self._abandon_backward()
        for slot in self._schedule.buckets:
            slot.clear(set_to_none=set_to_none)
            slot.has_grads = slot.has_grads and not set_to_none
            if not set_to_none and slot.index in self._shards:
                self._shards[slot.index].zero_()
        if set_to_none:
            self._grad_mask[:] = bytes(len(self._grad_mask))
            self._accumulated_flags[:] = bytes(len(self._accumulated_flags))
            self._grad_versions.clear()
            self._placeholder_params.clear()
        else:
            self._grad_versions.mark_zeroed(self._params)
        self._install_placeholders()
        self._schedule.num_cleared = self._schedule.num_sent
        self._is_consumed = self._has_stepped = self._grad_versions.is_scaled = False
        self._peer_lost_error = self._error if isinstance(self._error, RankLostError) else None

    def grad_tensors(self) -> list[torch.Tensor]:
        # Hazard: not their padding. Nothing writes there, so what is multiplied by NaN once would stay NaN.
        # Nor buckets that were sent because an earlier pass had used them: norms do not take on their dtype.
        filled = (
            slot for slot in self._schedule.buckets if slot.has_grads and any(self._grad_mask[i] for i in slot.params)
        )
        return [self._unpadded_shard(slot) for slot in filled]

    def staging_buffers(self) -> list[torch.Tensor]:
        idle = [tensor for pool in self._buffer_pools.values() for tensor in pool.idle_buffers()]
        filling = [tensor for slot in self._schedule.buckets for tensor in slot.open_buffers()]
        flying = [it.buffer.flat for it in self._in_flight if it.buffer is not None]
        targets = [it.output.tensor for it in self._in_flight if not it.output.is_shard]
        return [*idle, *filling, *flying, *targets, *self._transports.cached_buffers()]

    def bytes_to_send(self) -> int:
        slots = [] if self._comm.is_single_rank else self._schedule.buckets
        trained = [slot for slot in slots if self._layout.has_trainable_params(slot.index)]
        return sum(slot.bytes_to_send(self._grad_dtype(self._layout.buckets[slot.index])) for slot in trained)

    def mark_scaled(self) -> None:
        if not self._stage.frees:
            self._grad_versions.mark_scaled(self._params)

    def mark_stepped(self, *, was_applied: bool) -> None:
        self._has_stepped = True
        self._is_consumed = self._is_consumed or (was_applied and self._stage.frees)
        self._grad_versions.mark_stepped()

    @property
    def _can_overlap_backward(self) -> bool:
        """Buckets may go while backward runs; else all go along when gradients are settled."""
        return self._transports.can_overlap_backward

    def _find_unsent_params(self) -> list[int]:
        """Parameters with a gradient that has not travelled, whoever has set it."""
        if self._error is not None:
            return []
        grads = list(map(local_grad, self._params))
        waiting = [index for slot in self._schedule.buckets for index in slot.copied_params]
        # Lists ask for identity first. Hazard: `count` would go on and ask every tensor whether it equals None.
        if self._stage.frees and grads == [None] * len(grads):
            return waiting
        have = [(i, grad) for i, grad in enumerate(grads) if grad is not None and i in self._schedule.bucket_of]
        return waiting + [i for i, grad in have if self._stage.frees or self._needs_reduce(i, grad)]

    def _needs_reduce(self, index: int, grad: torch.Tensor) -> bool:
        return (
            bool(self._unsent_flags[index]) or not self._grad_mask[index] or self._grad_versions.is_changed(index, grad)
        )

    def _check_no_late_edits(self) -> None:
        if self._stage.frees:
            index = next(
                (index for index in self._placeholder_params if local_grad(self._params[index]) is not None), None
            )
        else:
            # Hazard: inside DDP's no_sync() gradients are accumulated, but nothing says that they are ready.
            by_backward = [
                ready or added for ready, added in zip(self._unsent_flags, self._accumulated_flags, strict=True)
            ]
            index = self._grad_versions.find_late_edit(self._params, by_backward)
        if index is not None:
            raise RuntimeError(f"the gradient of {self._layout.params[index].label} {CHANGED_AFTER_REDUCTION}")

    def _unsent_bucket_flags(self) -> bytes:
        late = {self._schedule.bucket_of[index].index for index in self._unsent_params}
        return bytes(slot.index in late for slot in self._schedule.buckets)

    def _current_grad_mask(self) -> bytes:
        if self._stage.frees:
            return bytes(self._grad_mask)
        return bytes([param.grad is not None for param in self._params])

    def _reset(self) -> None:
        self._schedule.reset()
        self._in_flight.reset()
        self._unsent_flags = bytearray(len(self._params))

    @torch.no_grad()
    def _start_reduce(self, bucket: GradBucket) -> None:
        """If it raises, nothing was sent."""
        self._comm.group.failure_detector.set_activity(partial(self._layout.describe_bucket, bucket.index, "gradients"))
        for index in bucket.copied_params:
            self._grad_mask[index] = 1
        grads = map(self._take_grad, bucket.params)
        if self._comm.is_single_rank:
            self._accumulate_on_single_rank(bucket, grads)
        else:
            self._in_flight.add(bucket.start_reduce(grads, self._choose_output(bucket), owns_grads=self._stage.frees))
        self._advance(bucket)

    def _reduce_or_zeros(self, bucket: GradBucket, *, is_needed: bool = True) -> None:
        """Other ranks rely on it. What is not `wanted`, or cannot be sent, goes as zeros that nobody will use."""
        if is_needed and self._error is None:
            try:
                self._start_reduce(bucket)
                return
            except Exception as failure:
                self._record_error(failure)
        if not self._comm.is_single_rank:
            with self._comm.group.failure_detector.abort_on_error():
                self._in_flight.add(bucket.start_reduce_zeros(self._choose_output(bucket)))
        self._advance(bucket)

    def _advance(self, bucket: GradBucket) -> None:
        self._schedule.mark_sent(bucket)
        self._in_flight.finish_arrived(self._finish_reduce)

    def _take_grad(self, index: int) -> torch.Tensor | None:
        """The gradient of a parameter, which is on its way then."""
        param = self._params[index]
        offered = self._provided_grads.pop(index, None)
        grad = local_grad(param) if offered is None else offered
        self._schedule.mark_taken(index)
        self._unsent_flags[index] = 0
        if self._is_in_scaled_shard(index):
            return None
        self._accumulated_flags[index] = 0
        self._grad_mask[index] |= grad is not None
        if self._stage.frees:
            param.grad = None
        else:
            self._grad_versions.record(index, grad if offered is None else None)
        return grad

    def _accumulate_on_single_rank(self, bucket: GradBucket, grads: OptionalGrads) -> None:
        """There are no other ranks: the shard is the whole bucket."""
        buffer = bucket.wrap_shard(self.shard(bucket.index))
        with self._comm.profiler.phase(Phase.PACK_GRADS, bucket.index):
            if bucket.has_grads and self._should_add_to_shard:
                bucket.packer.add(grads, buffer)
            else:
                bucket.packer.pack(grads, buffer)
        bucket.has_grads = True

    def _finish_reduce(self, pending: PendingReduce) -> None:
        try:
            with self._comm.profiler.phase(Phase.RECEIVE_GRADS, pending.bucket.index):
                self._wait_and_accumulate(pending)
        except Exception as failure:
            self._record_error(failure)

    def _describe_missing(self) -> str:
        return self._in_flight.describe_missing(self._schedule.num_sent, self._layout)

    @torch.no_grad()
    def _wait_and_accumulate(self, pending: PendingReduce) -> None:
        slot, arriving, (memory, is_shard), *_ = pending
        self._comm.group.failure_detector.set_activity(partial(self._layout.describe_bucket, slot.index, "gradients"))
        arriving.wait()
        slot.release(pending)
        shard = self._unpadded_shard(slot)
        if not pending.is_needed:
            if is_shard:
                shard.zero_()
            return
        if not is_shard:
            shard.add_(memory) if slot.has_grads and self._should_add_to_shard else shard.copy_(memory)
        slot.has_grads = True

    def _choose_output(self, bucket: GradBucket) -> ReduceOutput:
        """The shard itself, unless it has something that must stay or is about to get something."""
        shard = self._unpadded_shard(bucket)
        occupied = bucket.has_grads and self._should_add_to_shard
        if occupied or any(sending.bucket is bucket for sending in self._in_flight):
            return ReduceOutput(torch.empty_like(shard), is_shard=False)
        return ReduceOutput(shard, is_shard=True)

    def _unpadded_shard(self, bucket: GradBucket) -> torch.Tensor:
        """A shard without the padding at its end."""
        return self.shard(bucket.index)[: bucket.packer.shards[self._comm.group.rank].length]

    def _warn_uncleared_grads(self) -> None:
        self._is_consumed = False
        warn_at_caller(
            "gradients of the last step were not cleared, so this backward pass adds to them. "
            "Call optimizer.zero_grad() after each step."
        )
