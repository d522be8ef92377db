"""Reduce-scatter gradient buckets while backward runs.

One bucket on three ranks::

    param.grad    | p7 ... | | p6 . | | p5 ............... |         backward produces them on every rank
                       |        |              |
                       v        v              v                     pack: large gradients at once, small ones together
    flat buffer   | p7 ...   p6 .     p5 ................. | pad |   in the wire dtype
    shards        | rank 0        | rank 1        | rank 2       |
                                          |
                                          v                          reduce-scatter, scaled by 1 / number of ranks
    on rank 1                     | p6 .  p5 ...  |                  the average, kept until zero_grad()

With ZeRO-2 `param.grad` is freed when its gradient is packed, and later passes add to the shard. With ZeRO-1
`param.grad` stays, and later passes reduce the accumulated gradient and overwrite the shard.

Invariants:

* **Order.** All ranks send the same buckets in the same order, one round of all buckets per backward pass. A bucket is
  sent when its expected gradients are ready and all earlier buckets have been sent, at the latest when the pass ends.
  A rank that has made fewer passes catches up in `synchronize`, with zeros for gradients that it does not have.
* **Waiting.** No rank depends on another rank inside backward: it starts reduces, and waits only if more than
  `MAX_IN_FLIGHT` are in flight, for at most `WAIT_TIMEOUT_S`. Only `synchronize` waits until all have arrived.
* **Completeness.** `synchronize` also sends gradients that are in `param.grad` and have not been sent: they were ready
  too late, or were accumulated inside `no_sync()`. It sends all buckets if a transport cannot overlap with backward.
* **`zero_grad` cancels results, not messages.** Reduces in flight are marked as not needed, and the buckets that the
  current pass has not sent follow as zeros, because other ranks wait for both. Buckets that one rank has cleared count
  on no rank.
* **Errors.** A rank that fails stops packing but does not raise inside backward. In `synchronize` it sends zeros for
  the buckets that other ranks wait for; then all ranks drop their gradients and raise.
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
from .._torch_compat import is_view, sparse_values
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
# Reduces in flight, and when to wait for them.


MIN_IN_FLIGHT = 1
"""The newest reduces stay in flight: finishing them at once would stall the computation that they overlap with."""
MAX_IN_FLIGHT = 2
"""With more reduces in flight, backward waits for the oldest. This bounds memory as long as ranks keep pace."""
WAIT_TIMEOUT_S = 0.1
"""Seconds to wait for the oldest reduce: inside backward, and before the ranks compare signatures, which reports errors
of finished reduces to all ranks. After one timeout a step does not wait again: another rank may send nothing before
this one calls `synchronize`."""

FinishReduce = Callable[[PendingReduce], None]
"""Completes one reduce. Must not raise errors that only this rank knows of."""


class InFlightReduces:
    """Reduce-scatters in flight, oldest first."""

    def __init__(self, comm: Comm) -> None:
        self._profiler = comm.profiler
        self._unused_buckets = UnusedBuckets(comm.data_parallel.group.rank, comm.group.failure_detector)
        self._pending: deque[PendingReduce] = deque()
        self._timeout_s = WAIT_TIMEOUT_S
        self.are_ranks_in_step = True
        """All ranks had sent the same number of buckets at the last `synchronize`."""

    def __len__(self) -> int:
        return len(self._pending)

    def __iter__(self) -> Iterator[PendingReduce]:
        return iter(self._pending)

    def add(self, pending: PendingReduce) -> None:
        self._pending.append(pending)
        self._unused_buckets.add()

    def reset(self) -> None:
        """Start counting for a new step."""
        self._timeout_s = WAIT_TIMEOUT_S
        self._unused_buckets.reset()

    def discard_results(self) -> None:
        """Mark all reduces in flight as not needed."""
        # Hazard: do not wait for them here. Other ranks may not send their buckets before they synchronize.
        self._pending = deque(pending._replace(is_needed=False) for pending in self._pending)
        self._unused_buckets.reset()

    def finish_arrived(self, finish_reduce: FinishReduce) -> None:
        """Finish reduces that have arrived, and wait briefly if too many are in flight."""
        while len(self) > MIN_IN_FLIGHT:
            is_full = len(self) > MAX_IN_FLIGHT
            if not self._wait_for_oldest(self._timeout_s if is_full else 0):
                self._timeout_s = 0 if is_full else self._timeout_s
                return
            self._finish_oldest(finish_reduce)

    def finish_within_timeout(self, finish_reduce: FinishReduce) -> None:
        """Finish reduces that arrive soon: the signature then reports their errors to all ranks."""
        while self and self._wait_for_oldest(self._timeout_s if self.are_ranks_in_step else 0):
            self._finish_oldest(finish_reduce)
        self._timeout_s = 0 if self else self._timeout_s

    def finish_all(self, finish_reduce: FinishReduce) -> None:
        while self:
            self._finish_oldest(finish_reduce)

    def describe_missing(self, num_sent: int, layout: Layout) -> str:
        """Describe which of `num_sent` buckets have not arrived, for error messages; "" if all have."""
        missing = [pending.bucket.index for pending in self if not pending.work.is_ready(0)]
        if not missing:
            return ""
        num_sent = max(num_sent, len(missing))
        next_bucket = layout.describe_bucket(missing[0], "gradients")
        return f"{num_sent - len(missing)} of {num_sent} buckets that were sent have arrived, next: {next_bucket}"

    def _finish_oldest(self, finish_reduce: FinishReduce) -> None:
        """Finish the oldest reduce. It stays in the queue until then, for error messages to name it."""
        finish_reduce(self._pending[0])
        self._pending.popleft()

    def _wait_for_oldest(self, timeout_s: float) -> bool:
        """Return whether the oldest reduce has arrived, after `timeout_s` seconds at most."""
        bucket, work, *_ = self._pending[0]
        if not timeout_s or work.is_ready(0):
            return work.is_ready(0)
        with self._profiler.phase(Phase.WAIT_GRADS, bucket.index):
            return work.is_ready(timeout_s)


# ---------------------------------------------------------------------------------------------------------------------
# Bucket schedule: which bucket is sent next.


class BucketSchedule:
    """Decides which bucket is sent next, and which gradients it waits for.

    A backward pass sends one round: every bucket once, however many parameters it has used. Ranks that make the same
    backward passes have therefore sent the same number of buckets at each `zero_grad`, whichever parameters each used.

    Parameters without a gradient in the last step are not expected: an unused parameter must not delay its bucket, nor
    an unused bucket the others.
    """

    def __init__(self) -> None:
        self.buckets: list[GradBucket] = []
        self.bucket_of: dict[int, GradBucket] = {}
        self.num_sent = self.num_cleared = 0
        """Buckets sent since the last `synchronize`, and those of them sent before the last `zero_grad`."""
        self._is_open = False
        self._num_remaining = 0
        """Buckets that the open round, the one of the current backward pass, has not sent."""
        self._send_order: list[GradBucket] = []
        self._params: Sequence[torch.Tensor] = ()
        self._ready_flags = bytearray()
        self._expected_flags = bytearray()
        self._expected_from = b""
        """The mask that `_expected_flags` were computed from."""

    def extend(self, buckets: Iterable[GradBucket], params: Sequence[torch.Tensor]) -> None:
        """Append `buckets` to the schedule. `params` are all parameters, old and new."""
        for bucket in buckets:
            self.buckets.append(bucket)
            self.bucket_of |= dict.fromkeys(bucket.params, bucket)
            if any(slot.spec.trainable for slot in bucket.slots):
                self._send_order.append(bucket)
        self._params = params
        self._set_expected(bytes(len(params)))

    @property
    def next_bucket(self) -> GradBucket:
        return self._send_order[self.num_sent % len(self._send_order)]

    def start_backward(self) -> None:
        """Open a round when backward produces its first gradient; do nothing if one is open.

        Gradients of a bucket that this round has already sent are sent in the next pass, or by `synchronize`.
        """
        if not self._is_open:
            self._is_open, self._num_remaining = True, len(self._send_order)

    def finish_backward(self) -> None:
        """Close the round, after all its buckets have been sent."""
        assert not self._num_remaining
        self._is_open = False

    @property
    def has_remaining(self) -> bool:
        """Whether the open round has buckets to send."""
        return self._num_remaining > 0

    @property
    def is_next_ready(self) -> bool:
        return self.has_remaining and not self.next_bucket.num_missing

    def is_pending(self, index: int) -> bool:
        """Return whether the bucket of this parameter waits for its gradient."""
        return bool(self._expected_flags[index]) and not self._ready_flags[index]

    def mark_ready(self, index: int) -> bool:
        """Mark a pending gradient as ready. Return whether its bucket is complete."""
        bucket, self._ready_flags[index] = self.bucket_of[index], 1
        bucket.num_missing -= 1
        return not bucket.num_missing

    def mark_taken(self, index: int) -> None:
        """Forget that a gradient is ready: its bucket is being sent."""
        self._ready_flags[index] = 0

    def mark_sent(self, bucket: GradBucket) -> None:
        """Count a bucket as sent, and expect its gradients again."""
        if bucket in self._send_order:
            self.num_sent += 1
            self._num_remaining -= self.has_remaining
        bucket.num_missing = bucket.num_expected

    def expect(self, index: int) -> None:
        """Expect a gradient that accumulates in a pass without communication: the pass that sends must wait for it."""
        if index in self.bucket_of and not self._expected_flags[index]:
            bucket, self._expected_flags[index] = self.bucket_of[index], 1
            bucket.num_expected += 1
            bucket.num_missing += 1

    def reset(self) -> None:
        """Start a new step."""
        self.num_sent = self.num_cleared = self._num_remaining = 0
        self._is_open = False
        self._ready_flags = bytearray(len(self._params))
        for bucket in self.buckets:
            bucket.num_missing = bucket.num_expected

    def update_expected(self, grad_mask: bytes, *, force: bool) -> None:
        """Expect gradients of the parameters in `grad_mask`, which must be equal on all ranks, from now on.

        With `force`, recompute even if the mask is that of the last time: `requires_grad` may have changed.
        """
        if force or grad_mask != self._expected_from:
            self._set_expected(grad_mask)
        if 0 not in grad_mask:
            used = list(self.buckets)
        else:
            used = [bucket for bucket in self.buckets if any(map(grad_mask.__getitem__, bucket.params))]
        self._send_order = used or self._send_order

    def _set_expected(self, grad_mask: bytes) -> None:
        self._expected_from = grad_mask
        used = grad_mask if any(grad_mask) else b"\1" * len(grad_mask)
        flags = [param.requires_grad and used[index] for index, param in enumerate(self._params)]
        self._expected_flags = bytearray(map(bool, flags))
        for bucket in self.buckets:
            bucket.num_expected = sum(map(self._expected_flags.__getitem__, bucket.params))


# ---------------------------------------------------------------------------------------------------------------------
# Edit detection: reduced gradients that stay in `param.grad`, where users may write to them.


CHANGED_AFTER_REDUCTION = (
    "was changed in param.grad after it was reduced, or after the average was clipped or unscaled. param.grad does not "
    "hold the average: torch.nn.utils.clip_grad_norm_() uses another norm on every rank. "
    "Use optimizer.clip_grad_norm_(), optimizer.clip_grad_value_() or zeroshard.GradScaler. To edit gradients, "
    "accumulate them inside no_sync() and edit them before step(); to set new ones, call zero_grad() first."
)


@dataclass
class _ReducedGrad:
    """The gradient of a parameter as it was when it was reduced."""

    grad_ref: ReferenceType[torch.Tensor]
    version: int
    accumulation_count: int
    is_pending: bool = True
    """No step has used it yet, and it has not been cleared."""


class GradVersions:
    """Detects changes of reduced gradients that stay in `param.grad`, by tensor identity and version."""

    def __init__(self) -> None:
        self._reduced: dict[int, _ReducedGrad] = {}
        self._accumulation_count = 0
        self.is_scaled = False
        """The average was clipped or unscaled. It must not be computed again from gradients that were not."""

    def record(self, index: int, grad: torch.Tensor | None) -> None:
        """Record `grad` as the reduced gradient of a parameter; None removes the record."""
        if grad is None:
            self._reduced.pop(index, None)
        else:
            self._reduced[index] = _ReducedGrad(ref(grad), _tensor_version(grad), self._accumulation_count)

    def __contains__(self, index: int) -> bool:
        return index in self._reduced

    def mark_scaled(self, params: Sequence[torch.Tensor]) -> None:
        """Record that the average is being clipped or unscaled. It consists of gradients still in `param.grad`."""
        self._reduced = {index: reduced for index, reduced in self._reduced.items() if params[index].grad is not None}
        self.is_scaled = True

    def clear(self) -> None:
        self._reduced.clear()

    def split_cleared(
        self, params: Sequence[torch.Tensor], written_by_backward: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        """Split parameters into those whose gradients were cleared, or set for another step, since they were reduced,
        and the others.

        Gradients that backward has written since then are in neither list: they may be zero by chance.
        """
        cleared: list[int] = []
        others: list[int] = []
        for index, reduced in self._reduced.items():
            grad = params[index].grad
            if grad is None:
                cleared.append(index)
            elif not self.is_changed(index, grad):
                others.append(index)
            elif not written_by_backward[index] and not self._may_share_version(reduced, grad):
                (cleared if not reduced.is_pending or _is_all_zero(grad) else others).append(index)
        return cleared, others

    def _may_share_version(self, reduced: _ReducedGrad, grad: torch.Tensor) -> bool:
        """Return whether an accumulation into another gradient may have changed this one's version.

        Hazard: views of one DDP bucket share a version counter, so adding to one gradient changes it for its neighbors.
        """
        return is_view(grad) and reduced.accumulation_count != self._accumulation_count

    def mark_accumulation(self) -> None:
        """Record that a backward pass accumulates into some gradients."""
        self._accumulation_count += 1

    def mark_zeroed(self, params: Sequence[torch.Tensor]) -> None:
        """Record that all gradients, and their averages, were set to zero."""
        for index in list(self._reduced):
            self.record(index, params[index].grad)
        self.mark_stepped()

    def mark_stepped(self) -> None:
        """Treat gradients that are written from now on as those of another step."""
        for reduced in self._reduced.values():
            reduced.is_pending = False

    def is_changed(self, index: int, grad: torch.Tensor) -> bool:
        """Return whether a reduced gradient was replaced or written to."""
        reduced = self._reduced.get(index)
        return reduced is not None and (reduced.grad_ref() is not grad or reduced.version != _tensor_version(grad))

    def find_late_edit(self, params: Sequence[torch.Tensor], written_by_backward: Sequence[int]) -> int | None:
        """Return the first gradient that was changed, not by backward, between its reduction and the step."""
        grads = ((index, params[index].grad) for index in self._reduced if not written_by_backward[index])
        return next((index for index, grad in grads if grad is not None and self._is_late_edit(index, grad)), None)

    def _is_late_edit(self, index: int, grad: torch.Tensor) -> bool:
        if not self.is_changed(index, grad):
            return False
        reduced = self._reduced[index]
        if self.is_scaled:
            return True
        if not reduced.is_pending:
            return False  # a gradient that the user has set for the next step: it will be sent
        return not self._may_share_version(reduced, grad) and not _is_all_zero(grad)


def _is_all_zero(grad: torch.Tensor) -> bool:
    """Return whether a gradient is all zeros, as `model.zero_grad(set_to_none=False)` leaves it."""
    values = sparse_values(grad) if grad.layout == torch.sparse_coo else grad
    return not values.detach().count_nonzero()


def _tensor_version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


# ---------------------------------------------------------------------------------------------------------------------
# Reducer.


EAGER_COPY_MIN_BYTES = 256 * 1024
"""Gradients of at least this size are copied to their bucket, and freed, as soon as they are ready."""


class GradReducer(GradSource):
    """Averages gradients over all data-parallel ranks; each rank keeps its shards of the average.

    Autograd hooks call `prepare_accumulation`, `mark_ready` and `finish_backward` during backward, or DDP's
    communication hook calls the latter two. Steps and clipping call `signature` and `synchronize` on all ranks.
    """

    source_name = "slices from all ranks"

    def __init__(self, comm: Comm, stage: ZeroStage, reduce: Reduce, masters: MasterWeights | None) -> None:
        super().__init__(comm, masters)
        self._stage, self._reduce = stage, reduce
        self.is_paused = False
        """Inside `no_sync()`: gradients accumulate in `param.grad`, and nothing is sent."""
        self._schedule = BucketSchedule()
        self._eager_copy_params: set[int] = set()
        """Parameters whose gradients are copied to their bucket as soon as they are ready."""
        self._grad_mask = bytearray()
        """Parameters with a gradient in the shards."""
        self._provided_grads: dict[int, torch.Tensor] = {}
        """Gradients that were given to `mark_ready` and have not been sent."""
        self._unsent_flags = bytearray()
        """Parameters whose gradient is ready and has not been sent."""
        self._accumulated_flags = bytearray()
        """Parameters to whose `param.grad` backward has added since it was last sent."""
        self._unsent_params: list[int] = []
        """Parameters whose gradients `synchronize` has to send."""
        self._grad_versions = GradVersions()
        self._backward_id = -1
        """The backward pass that accumulated last."""
        self.grad_accumulators: dict[int, torch.autograd.graph.Node] = {}
        """AccumulateGrad nodes of hooked parameters. Nothing else keeps them, and their hooks, alive between passes."""
        self._in_flight = InFlightReduces(comm)
        self._placeholders: dict[int, ShardedGrad] = {}
        self._placeholder_params: set[int] = set()
        """Parameters that were given a placeholder. Users may have removed it."""
        self._buffer_pools: dict[tuple[torch.dtype, torch.device], BufferPool] = {}
        self._transports = TransportCache(comm, reduce)
        self._lock = RLock()
        """Autograd runs one thread per device."""
        self._is_consumed = False
        """A step has used the gradients: a backward pass that adds to them warns."""
        self._has_stepped = False
        """A step was attempted since the last backward pass: gradients set in `param.grad` now are for the next one."""
        self._error: Exception | None = None
        """An error that only this rank knows of; `synchronize` raises it on all ranks."""
        self._peer_lost_error: RankLostError | None = None
        """Set by `clear` after a rank was lost: the reduces in flight will not complete, and new gradients raise."""
        comm.group.failure_detector.add_context(self._describe_missing)

    def extend(self, layout: Layout, params: Sequence[torch.Tensor]) -> None:
        super().extend(layout, params)
        new = [self._make_bucket(layout, bucket) for bucket in layout.buckets[len(self._schedule.buckets) :]]
        self._schedule.extend(new, self._params)
        if self._stage.frees and not self._comm.is_single_rank and self._can_overlap_backward:
            self._eager_copy_params = {
                index
                for bucket in self._schedule.buckets
                if bucket.needs_packing
                for index in bucket.large_params(EAGER_COPY_MIN_BYTES)
            }
        self._grad_mask.extend(bytes(len(params) - len(self._grad_mask)))
        self._accumulated_flags.extend(bytes(len(params) - len(self._accumulated_flags)))
        self._reset()

    def _make_bucket(self, layout: Layout, bucket: Bucket) -> GradBucket:
        dtype = self._reduce.wire_dtype(bucket.dtype)
        pool = self._buffer_pools.setdefault((dtype, bucket.device), BufferPool(dtype, bucket.device))
        transport = self._transports.get(bucket.device, has_equal_shards=bucket.has_equal_shards)
        return GradBucket(layout, bucket, transport, pool, self._comm.profiler)

    @property
    def is_reducing(self) -> bool:
        return self._schedule.num_sent > 0 or bool(self._in_flight)

    @property
    def _should_add_to_shard(self) -> bool:
        """Whether a reduce adds to the shard; otherwise it carries all accumulated gradients and overwrites the shard.

        True also for ZeRO-1 once the shard was clipped or unscaled, because `param.grad` was not.
        """
        return self._stage.frees or self._grad_versions.is_scaled

    def prepare_accumulation(self, index: int, backward_id: int) -> None:
        """Prepare `param.grad`, to which backward pass `backward_id` is about to add."""
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
        """Detect changes of `param.grad` since gradients were reduced. The next step raises errors, on all ranks."""
        if self._error is None:
            try:
                self._clear_if_grads_cleared(in_backward=in_backward)
                self._check_no_late_edits()
            except Exception as failure:
                self._record_error(failure)

    def _clear_if_grads_cleared(self, *, in_backward: bool) -> None:
        """Clear the shards if gradients were cleared in `param.grad`, by hand or by `model.zero_grad()`.

        Between the last backward pass and the step, users may also remove individual gradients.
        """
        if self._stage.frees:
            cleared = [
                index for index in self._placeholder_params if self._is_placeholder_removed(self._params[index].grad)
            ]
            others = [index for index in self._placeholder_params if type(self._params[index].grad) is ShardedGrad]
        elif self._grad_versions.is_scaled:
            cleared, others = self._grad_versions.split_cleared(self._params, self._accumulated_flags)
        else:
            return  # the next reduce sends all of `param.grad` and overwrites the shards
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
        """Return whether a placeholder was removed, or replaced after a step by a gradient for the next one."""
        return grad is None or (self._has_stepped and type(grad) is not ShardedGrad)

    def _is_in_scaled_shard(self, index: int) -> bool:
        """Return whether the content of `param.grad` was sent, and was then clipped or unscaled in the shard."""
        return self._grad_versions.is_scaled and index in self._grad_versions and not self._accumulated_flags[index]

    def mark_ready(self, index: int, grad: torch.Tensor | None = None) -> None:
        """Mark the gradient of a parameter as ready, and send the buckets that this completes.

        `grad` is the gradient; None means `param.grad`. Does not depend on other ranks: errors of this rank are
        recorded for `synchronize`. Raises `RankLostError` after `clear` if a rank was lost.
        """
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
        """Detect edits from now on: DDP has written the gradients given to `mark_ready` to `param.grad`, unchanged."""
        with self._lock:
            for index in indices:
                grad = self._params[index].grad
                is_unsent = self._provided_grads.pop(index, None) is not None
                # Hazard: it may have been sent with its bucket before DDP passed it to the hook and wrote it again.
                if grad is not None and (not is_unsent or index in self._grad_versions):
                    self._grad_versions.record(index, grad)

    @torch.no_grad()
    def _copy_to_bucket(self, index: int) -> None:
        param = self._params[index]
        if param.grad is not None:
            self._schedule.bucket_of[index].copy_in(index, param.grad)
            param.grad = None

    def _send_ready_buckets(self) -> None:
        """Send complete buckets, in order, up to the first that is not."""
        while self._schedule.is_next_ready:
            self._start_reduce(self._schedule.next_bucket)

    def finish_backward(self) -> None:
        """Send the remaining buckets of the round. Call at the end of each backward pass."""
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
        """Put placeholders into `param.grad` for sharded gradients: using them raises, instead of reading None."""
        if not self._stage.frees:
            return
        for index, param in enumerate(self._params):
            # Hazard: a parameter that was unfrozen since the last step has no hook yet that would remove the
            # placeholder before the next backward pass accumulates into it.
            if self._grad_mask[index] and param.grad is None and index in self.grad_accumulators:
                if index not in self._placeholders:
                    self._placeholders[index] = ShardedGrad(param, self._layout.params[index].label)
                param.grad = self._placeholders[index]
                self._placeholder_params.add(index)

    def drop_placeholders(self) -> None:
        self._placeholder_params.clear()
        for param in self._params:
            drop_placeholder(param)

    def __del__(self) -> None:
        for index, placeholder in self._placeholders.items():
            if self._params[index].grad is placeholder:
                self._params[index].grad = None

    def _abandon_backward(self) -> None:
        """Send zeros for the remaining buckets of a backward pass that failed halfway: other ranks wait for them."""
        try:
            while self._schedule.has_remaining:
                self._reduce_or_zeros(self._schedule.next_bucket, is_needed=False)
            self._schedule.finish_backward()
        except Exception as failure:
            self._record_error(failure)

    def _record_error(self, error: Exception) -> None:
        """Keep the first error for `synchronize`.

        Hazard: other ranks wait for the buckets that this rank would send next, so it must not raise on its own.
        """
        if not isinstance(error, RankLostError):  # all ranks detect that one themselves, and raise
            rank = self._comm.data_parallel.group.rank
            log_rank(logging.ERROR, rank, "gradients cannot be averaged; step() raises a %s", type(error).__name__)
        self._error = self._error or error

    def signature(self) -> bytes:
        self._in_flight.finish_within_timeout(self._finish_reduce)
        self._check_grad_edits(in_backward=False)
        grad_mask, self._unsent_params = bytearray(self._current_grad_mask()), self._find_unsent_params()
        if self._unsent_params and self._is_consumed:
            self._warn_uncleared_grads()
        for index in self._unsent_params:
            grad_mask[index] = 1
        counts = self._schedule.num_sent, self._schedule.num_cleared
        return (
            bytes(grad_mask)
            + self._unsent_bucket_flags()
            + pack("qq??", *counts, self._error is not None, bool(self._in_flight))
        )

    def synchronize(self, *, signatures_match: bool) -> bytes:
        # Equal signatures say that no rank has an error or a reduce in flight if this one has none. Anything sent below
        # may fail on one rank only.
        cannot_fail = signatures_match and not self._unsent_params and not self._in_flight and self._error is None
        if self._error is not None:
            self._drop_local_grads()
        self._in_flight.are_ranks_in_step = signatures_match
        if not signatures_match:
            self._catch_up()
            self._unsent_params = self._find_unsent_params()
        unsent = self._unsent_bucket_flags()
        if not signatures_match:
            unsent = self._comm.data_parallel.all_reduce_any(unsent)
        for bucket, is_unsent in zip(self._schedule.buckets, unsent, strict=True):
            if is_unsent:
                self._reduce_or_zeros(bucket)
        self._in_flight.finish_all(self._finish_reduce)
        if not cannot_fail:
            self._raise_if_any_rank_failed()
        grad_mask = self._current_grad_mask()
        if not signatures_match:
            grad_mask = self._comm.data_parallel.all_reduce_any(grad_mask)
        self._schedule.update_expected(grad_mask, force=bool(self._unsent_params) or not signatures_match)
        self._grad_mask[:] = grad_mask
        self._zero_removed_grads()
        self._reset()
        self._install_placeholders()
        return grad_mask

    def _zero_removed_grads(self) -> None:
        """Zero the shards of gradients that were removed from `param.grad`: norms must not count them."""
        rank = self._comm.group.rank
        for bucket in self._schedule.buckets:
            if bucket.has_grads and not all(self._grad_mask[index] for index in bucket.params):
                layout_bucket, grad_shard = self._layout.buckets[bucket.index], self.shard(bucket.index)
                start = layout_bucket.shards[rank].start
                for param_shard in layout_bucket.param_shards_of_rank(rank):
                    if not self._grad_mask[param_shard.param]:
                        grad_shard[param_shard.in_bucket.start - start : param_shard.in_bucket.stop - start].zero_()

    def _catch_up(self) -> None:
        """Send buckets until all ranks have sent as many as the rank that sent the most. Call on all ranks.

        Buckets that one rank has cleared after it sent them count on no rank. A rank that sent gradients to keep at the
        same point of the order cannot be distinguished from one that cleared too late, so this is an error.
        """
        schedule = self._schedule
        max_sent, max_cleared, negative_min_sent = self._comm.data_parallel.all_reduce_max(
            [schedule.num_sent, schedule.num_cleared, -schedule.num_sent]
        )
        self._in_flight.are_ranks_in_step = max_sent == -negative_min_sent
        conflict = schedule.num_cleared < max_cleared and schedule.num_cleared < schedule.num_sent
        if self._comm.data_parallel.all_reduce_max([conflict])[0]:
            self._error = self._error or RankMismatchError(
                "zero_grad() was called between different backward passes on different ranks, so that gradients of one "
                "pass would meet those of another. They are cleared now. Where one rank leaves a step out, all must."
            )
        while schedule.num_sent < max_sent:
            self._reduce_or_zeros(schedule.next_bucket, is_needed=schedule.num_sent >= max_cleared)

    def _raise_if_any_rank_failed(self) -> None:
        """Clear gradients and raise if any rank has an error: the shards are incomplete then. Call on all ranks."""
        failed = self._error is not None
        if not (failed if self._comm.is_single_rank else self._comm.data_parallel.all_reduce_max([failed])[0]):
            return
        failure, self._error = self._error, None
        self.clear(set_to_none=True)
        self._drop_local_grads()
        self._reset()
        raise_failure(self._comm, "gradients could not be averaged, and are cleared now", failure)

    def _drop_local_grads(self) -> None:
        """Free gradients that have not been sent."""
        self._provided_grads.clear()
        self._placeholder_params.clear()
        for param in self._params:
            param.grad = None

    def clear(self, *, set_to_none: bool) -> None:
        self._in_flight.discard_results()
        self._abandon_backward()
        for bucket in self._schedule.buckets:
            bucket.clear(set_to_none=set_to_none)
            bucket.has_grads = bucket.has_grads and not set_to_none
            if not set_to_none and bucket.index in self._shards:
                self._shards[bucket.index].zero_()
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
        # Hazard: exclude the padding. Nothing overwrites it, so it would stay NaN once it is multiplied by NaN.
        # Exclude buckets that were sent only because an earlier pass had used them: their dtype must not affect norms.
        return [
            self._unpadded_shard(bucket)
            for bucket in self._schedule.buckets
            if bucket.has_grads and any(self._grad_mask[index] for index in bucket.params)
        ]

    def staging_buffers(self) -> list[torch.Tensor]:
        idle = [tensor for pool in self._buffer_pools.values() for tensor in pool.idle_buffers()]
        filling = [tensor for bucket in self._schedule.buckets for tensor in bucket.open_buffers()]
        in_flight = [pending.buffer.flat for pending in self._in_flight if pending.buffer is not None]
        outputs = [pending.output.tensor for pending in self._in_flight if not pending.output.is_shard]
        return [*idle, *filling, *in_flight, *outputs, *self._transports.cached_buffers()]

    def bytes_to_send(self) -> int:
        buckets = [] if self._comm.is_single_rank else self._schedule.buckets
        trainable = [bucket for bucket in buckets if self._layout.has_trainable_params(bucket.index)]
        return sum(bucket.bytes_to_send(self._grad_dtype(self._layout.buckets[bucket.index])) for bucket in trainable)

    def mark_scaled(self) -> None:
        if not self._stage.frees:
            self._grad_versions.mark_scaled(self._params)

    def mark_stepped(self, *, was_applied: bool) -> None:
        self._has_stepped = True
        self._is_consumed = self._is_consumed or (was_applied and self._stage.frees)
        self._grad_versions.mark_stepped()

    @property
    def _can_overlap_backward(self) -> bool:
        """Whether buckets may be sent while backward runs; otherwise `synchronize` sends all of them."""
        return self._transports.can_overlap_backward

    def _find_unsent_params(self) -> list[int]:
        """Return the parameters whose gradient has not been sent, whether backward or the user has set it."""
        if self._error is not None:
            return []
        grads = list(map(local_grad, self._params))
        copied = [index for bucket in self._schedule.buckets for index in bucket.copied_params]
        # Comparing lists checks identity first. Hazard: `count` would go on to compare every tensor with None.
        if self._stage.frees and grads == [None] * len(grads):
            return copied
        present = [(i, grad) for i, grad in enumerate(grads) if grad is not None and i in self._schedule.bucket_of]
        return copied + [i for i, grad in present if self._stage.frees or self._needs_reduce(i, grad)]

    def _needs_reduce(self, index: int, grad: torch.Tensor) -> bool:
        return (
            bool(self._unsent_flags[index]) or not self._grad_mask[index] or self._grad_versions.is_changed(index, grad)
        )

    def _check_no_late_edits(self) -> None:
        """Raise if a user has changed a gradient in `param.grad` after it was reduced."""
        if self._stage.frees:
            index = next(
                (index for index in self._placeholder_params if local_grad(self._params[index]) is not None), None
            )
        else:
            # Hazard: inside DDP's no_sync() gradients accumulate, but nothing marks them as ready.
            by_backward = [
                ready or added for ready, added in zip(self._unsent_flags, self._accumulated_flags, strict=True)
            ]
            index = self._grad_versions.find_late_edit(self._params, by_backward)
        if index is not None:
            raise RuntimeError(f"the gradient of {self._layout.params[index].label} {CHANGED_AFTER_REDUCTION}")

    def _unsent_bucket_flags(self) -> bytes:
        unsent = {self._schedule.bucket_of[index].index for index in self._unsent_params}
        return bytes(bucket.index in unsent for bucket in self._schedule.buckets)

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
        """Pack and send a bucket. If this raises, nothing was sent."""
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
        """Send a bucket that other ranks wait for: as unused zeros if it is not needed or this rank has failed."""
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
        """Take the gradient of a parameter to send it; None if there is none, or its shard was already scaled."""
        param = self._params[index]
        provided = self._provided_grads.pop(index, None)
        grad = local_grad(param) if provided is None else provided
        self._schedule.mark_taken(index)
        self._unsent_flags[index] = 0
        if self._is_in_scaled_shard(index):
            return None
        self._accumulated_flags[index] = 0
        self._grad_mask[index] |= grad is not None
        if self._stage.frees:
            param.grad = None
        else:
            self._grad_versions.record(index, grad if provided is None else None)
        return grad

    def _accumulate_on_single_rank(self, bucket: GradBucket, grads: OptionalGrads) -> None:
        """Pack gradients into the shard, which is the whole bucket on a single rank."""
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
        bucket, work, (output, is_shard), *_ = pending
        self._comm.group.failure_detector.set_activity(partial(self._layout.describe_bucket, bucket.index, "gradients"))
        work.wait()
        bucket.release(pending)
        shard = self._unpadded_shard(bucket)
        if not pending.is_needed:
            if is_shard:
                shard.zero_()
            return
        if not is_shard:
            shard.add_(output) if bucket.has_grads and self._should_add_to_shard else shard.copy_(output)
        bucket.has_grads = True

    def _choose_output(self, bucket: GradBucket) -> ReduceOutput:
        """Return the shard itself, or a new tensor if the shard must keep its gradients or is an output in flight."""
        shard = self._unpadded_shard(bucket)
        must_keep = bucket.has_grads and self._should_add_to_shard
        if must_keep or any(pending.bucket is bucket for pending in self._in_flight):
            return ReduceOutput(torch.empty_like(shard), is_shard=False)
        return ReduceOutput(shard, is_shard=True)

    def _unpadded_shard(self, bucket: GradBucket) -> torch.Tensor:
        """Return this rank's shard without the padding at its end."""
        return self.shard(bucket.index)[: bucket.packer.shards[self._comm.group.rank].length]

    def _warn_uncleared_grads(self) -> None:
        self._is_consumed = False
        warn_at_caller(
            "gradients of the last step were not cleared, so this backward pass adds to them. "
            "Call optimizer.zero_grad() after each step."
        )
