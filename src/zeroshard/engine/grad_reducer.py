"""Reduce-scatter gradient buckets while backward runs.

One bucket on three ranks::

    param.grad    | p7 ... | | p6 . | | p5 ............... |         backward produces them on every rank
                       |        |              |
                       v        v              v                     pack: ZeRO-2 copies large gradients at once
    flat buffer   | p7 ...   p6 .     p5 ................. | pad |   in the wire dtype
    shards        | rank 0        | rank 1        | rank 2       |
                                          |
                                          v                          reduce-scatter, scaled by 1 / number of ranks
    on rank 1                     | p6 .  p5 ...  |                  the average, kept until zero_grad()

With ZeRO-2 `param.grad` is freed when its gradient is packed, and later passes add to the shard. With ZeRO-1
`param.grad` stays, and later passes reduce the accumulated gradient and overwrite the shard. What differs between them
is in `GradStage` (grad_stage.py).

Invariants:

* **Order.** All ranks send the same buckets in the same order, one round of all buckets per backward pass. A bucket is
  sent when its expected gradients are ready and all earlier buckets have been sent, at the latest when the pass ends.
  A rank that has made fewer passes catches up in `complete`, with zeros for gradients that it does not have.
* **Waiting.** No host depends on another rank inside backward: it starts reduces, and waits only if more than
  `MAX_IN_FLIGHT` are in flight, for at most `WAIT_BUDGET_S` in one step. Only `complete` waits until all have arrived.
  With NCCL the host never waits; instead, each send makes the compute stream wait for all reduces but the newest.
* **Completeness.** `complete` also sends gradients that are in `param.grad` and have not been sent: they were ready
  too late, or were accumulated inside `no_sync()`. It sends all buckets if a transport cannot overlap with backward.
* **`zero_grad` cancels results, not messages.** Reduces in flight are marked as not needed, and the buckets that the
  current pass has not sent follow as zeros, because other ranks wait for both. It therefore clears whole rounds, and
  a round cleared by any rank is dropped on all. It does not cancel an error: the next step still raises it.
* **Errors.** A rank that fails stops packing but does not raise inside backward. In `complete` it sends zeros for
  the buckets that other ranks wait for; then all ranks drop their gradients and raise. Only a lost rank raises inside
  backward, and only in passes after a `zero_grad`: there is no step that could reach the others.

Where a gradient is, and what records it::

    expected      backward will produce it; its bucket waits for it          BucketSchedule.is_missing
    ready         in param.grad, or provided by DDP's hook; not sent         _unsent_flags, _provided_grads
    copied        in the open buffer of its bucket; not sent (ZeRO-2)        ReduceBucket.copied_params
    in flight     its bucket was sent                                        _grad_mask, InFlightReduces
    reduced       in the shard, until `zero_grad`                            _grad_mask
"""

import logging
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import RLock

import torch

from .._logging import log_rank
from ..comm.collectives import Comm
from ..comm.consensus import raise_failure
from ..comm.failure import UnusedBuckets
from ..comm.transport_cache import TransportCache
from ..config import MasterWeightPolicy, ReducePolicy
from ..errors import RankLostError, RankMismatchError
from ..layout.layout import Bucket, Layout
from ..profiling import Phase, StepProfiler
from .grad_bucket import BufferPool, OptionalGrads, PendingReduce, ReduceBucket, ReduceOutput
from .grad_source import ShardedGradSource
from .grad_stage import GradStage
from .step import Step

# ---------------------------------------------------------------------------------------------------------------------
# Reduces in flight, and when to wait for them.


MIN_IN_FLIGHT = 1
"""The newest reduces stay in flight: finishing them at once would stall the computation that they overlap with."""
MAX_IN_FLIGHT = 2
"""With more reduces in flight, backward waits for the oldest. This bounds memory as long as ranks keep pace."""
WAIT_BUDGET_S = 1.0
"""Seconds that one step may wait for reduces, in total: inside backward, and before the ranks compare signatures, which
reports errors of finished reduces to all ranks. The budget is limited because another rank may send nothing before this
one calls `complete`. A step that uses it up leaves a tenth to the next one."""

FinishReduce = Callable[[PendingReduce], None]
"""Completes one reduce. Must not raise errors that only this rank knows of."""


class InFlightReduces:
    """Reduce-scatters in flight, oldest first. They are finished in this order.

    Of the reduces of one bucket, only the oldest may write straight into the shard: the others are added to it, or
    replace it, when they are finished.
    """

    def __init__(self, comm: Comm, profiler: StepProfiler) -> None:
        self._profiler = profiler
        self._unused_buckets = UnusedBuckets(comm.data_parallel.group.rank, comm.group.failure_detector)
        self._pending: deque[PendingReduce] = deque()
        self._num_started = 0
        """Reduces started since the last `reset`."""
        self._remaining_wait_s = WAIT_BUDGET_S
        self.all_sent_equally = True
        """All ranks had sent the same number of buckets at the last `complete`."""

    def __len__(self) -> int:
        return len(self._pending)

    def __iter__(self) -> Iterator[PendingReduce]:
        return iter(self._pending)

    def add(self, pending: PendingReduce) -> None:
        self._pending.append(pending)
        self._num_started += 1
        self._unused_buckets.add()

    def reset(self) -> None:
        """Start counting for a new step."""
        is_used_up = self._remaining_wait_s == 0
        self._num_started, self._remaining_wait_s = 0, WAIT_BUDGET_S / 10 if is_used_up else WAIT_BUDGET_S
        self._unused_buckets.reset()

    def discard_results(self) -> None:
        """Mark all reduces in flight as not needed."""
        # Hazard: do not wait for them here. Other ranks may not send their buckets before they synchronize.
        self._pending = deque(pending._replace(is_needed=False) for pending in self._pending)
        self._unused_buckets.reset()

    def finish_arrived(self, finish_reduce: FinishReduce) -> None:
        """Finish reduces that have arrived, and wait briefly if too many are in flight."""
        while len(self) > MIN_IN_FLIGHT:
            if not self._wait_for_oldest(self._remaining_wait_s if len(self) > MAX_IN_FLIGHT else 0):
                return
            self._finish_oldest(finish_reduce)

    def finish_within_budget(self, finish_reduce: FinishReduce) -> None:
        """Finish reduces that arrive soon: the signature then reports their errors to all ranks."""
        while self and self._wait_for_oldest(self._remaining_wait_s if self.all_sent_equally else 0):
            self._finish_oldest(finish_reduce)

    def finish_all(self, finish_reduce: FinishReduce) -> None:
        while self:
            self._finish_oldest(finish_reduce)

    def describe_missing(self, layout: Layout) -> str:
        """Describe which buckets have not arrived, for error messages; "" if all have."""
        missing = [pending.bucket.index for pending in self if not pending.work.is_ready(0)]
        if not missing:
            return ""
        num_sent = max(self._num_started, len(missing))
        next_bucket = layout.describe_bucket(missing[0], "gradients")
        return f"{num_sent - len(missing)} of {num_sent} buckets that were sent have arrived, next: {next_bucket}"

    def _finish_oldest(self, finish_reduce: FinishReduce) -> None:
        """Finish the oldest reduce. It stays in the queue until then, for error messages to name it."""
        finish_reduce(self._pending[0])
        self._pending.popleft()

    def _wait_for_oldest(self, timeout_s: float) -> bool:
        """Return whether the oldest reduce has arrived, after `timeout_s` seconds of the budget at most."""
        bucket, work, *_ = self._pending[0]
        if not timeout_s or work.is_ready(0):
            return work.is_ready(0)
        start = time.monotonic()
        with self._profiler.phase(Phase.WAIT_GRADS, bucket.index):
            is_ready = work.is_ready(timeout_s)
        self._remaining_wait_s = max(0.0, self._remaining_wait_s - (time.monotonic() - start)) if is_ready else 0.0
        return is_ready


# ---------------------------------------------------------------------------------------------------------------------
# Bucket schedule: which bucket is sent next.


class BucketSchedule:
    """Decides which bucket is sent next, and which gradients it waits for.

    A backward pass sends one round: every bucket of the send order once, however many parameters it has used. Ranks
    that make the same backward passes have therefore sent the same rounds, whichever parameters each used. `zero_grad`
    completes the open round before it clears, so only whole rounds are cleared. The send order changes only between
    steps, when no rounds are counted.

    Parameters without a gradient in the last step are not expected: an unused parameter must not delay its bucket, nor
    an unused bucket the others.
    """

    def __init__(self) -> None:
        self.buckets: list[ReduceBucket] = []
        self.bucket_of: dict[int, ReduceBucket] = {}
        self.rounds_sent = self.rounds_cleared = 0
        """Complete rounds since the last `complete`, and those of them before the last `zero_grad`."""
        self.sent_in_round = 0
        """Buckets sent of the round after `rounds_sent`."""
        self._open_round: int | None = None
        """The round of the current backward pass. It stays open until the pass ends, even if it is complete."""
        self._send_order: list[ReduceBucket] = []
        self._params: Sequence[torch.Tensor] = ()
        self._expected: list[set[int]] = []
        """For each bucket, the parameters that are expected to get a gradient."""
        self._missing: list[set[int]] = []
        """For each bucket, those of them whose gradient is not ready since the bucket was sent the last time."""
        self._expected_from = b""
        """The mask that `_expected` was computed from."""

    def extend(self, buckets: Iterable[ReduceBucket], params: Sequence[torch.Tensor]) -> None:
        """Append `buckets` to the schedule. `params` are all parameters, old and new."""
        for bucket in buckets:
            self.buckets.append(bucket)
            self.bucket_of |= dict.fromkeys(bucket.params, bucket)
            if any(slot.spec.trainable for slot in bucket.slots):
                self._send_order.append(bucket)
        self._params = params
        self._set_expected(bytes(len(params)))

    @property
    def next_bucket(self) -> ReduceBucket:
        return self._send_order[self.sent_in_round]

    @property
    def num_sent(self) -> int:
        """Buckets sent in rounds since the last `complete`."""
        return self.rounds_sent * len(self._send_order) + self.sent_in_round

    @property
    def has_uncleared(self) -> bool:
        """Whether buckets were sent after the last `zero_grad`."""
        return self.rounds_sent > self.rounds_cleared or self.sent_in_round > 0

    def open_round(self) -> None:
        """Open a round when backward produces its first gradient; do nothing if one is open.

        Gradients of a bucket that this round has already sent are sent in the next pass, or by `complete`.
        """
        if self._open_round is None:
            self._open_round = self.rounds_sent

    def close_round(self) -> None:
        """Close the round, after all its buckets have been sent."""
        assert not self.has_remaining
        self._open_round = None

    @property
    def has_remaining(self) -> bool:
        """Whether the open round has buckets to send."""
        return self._open_round == self.rounds_sent and bool(self._send_order)

    @property
    def is_next_ready(self) -> bool:
        return self.has_remaining and not self._missing[self.next_bucket.index]

    def is_missing(self, index: int) -> bool:
        """Return whether the bucket of this parameter waits for its gradient."""
        return index in self.bucket_of and index in self._missing[self.bucket_of[index].index]

    def mark_ready(self, index: int) -> bool:
        """Mark a missing gradient as ready. Return whether its bucket is complete."""
        missing = self._missing[self.bucket_of[index].index]
        missing.remove(index)
        return not missing

    def advance(self) -> None:
        """Count the next bucket as sent, and expect its gradients again."""
        self._expect_again(self.next_bucket)
        self.sent_in_round += 1
        if self.sent_in_round == len(self._send_order):
            self.rounds_sent, self.sent_in_round = self.rounds_sent + 1, 0

    def mark_cleared(self) -> None:
        """Record that the gradients of all rounds sent so far were cleared."""
        self.rounds_cleared = self.rounds_sent

    def expect(self, index: int) -> None:
        """Expect a gradient that accumulates in a pass without communication: the pass that sends must wait for it."""
        if index in self.bucket_of and index not in self._expected[self.bucket_of[index].index]:
            self._expected[self.bucket_of[index].index].add(index)
            self._missing[self.bucket_of[index].index].add(index)

    def reset(self) -> None:
        """Start a new step: forget all rounds, including an open one."""
        self.rounds_sent = self.rounds_cleared = self.sent_in_round = 0
        self._open_round = None
        for bucket in self.buckets:
            self._expect_again(bucket)

    def update_expected(self, grad_mask: bytes, *, force: bool) -> None:
        """Expect gradients of the parameters in `grad_mask`, which must be equal on all ranks, in the next step.

        Call `reset` next. With `force`, recompute even if the mask is that of the last time: `requires_grad` may have
        changed.
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
        self._expected = [
            {index for index in bucket.params if used[index] and self._params[index].requires_grad}
            for bucket in self.buckets
        ]
        self._missing = [set(expected) for expected in self._expected]

    def _expect_again(self, bucket: ReduceBucket) -> None:
        self._missing[bucket.index] = set(self._expected[bucket.index])


# ---------------------------------------------------------------------------------------------------------------------
# Reducer.


DEVICES_THAT_KEEP_SHARDS = ("cpu",)
"""Devices without a caching allocator: page faults of memory that is allocated in every step would cost time."""

EAGER_COPY_MIN_BYTES = 256 * 1024
"""With ZeRO-2, gradients of at least this size are copied to their bucket, and freed, as soon as they are ready."""


class GradReducer(ShardedGradSource):
    """Averages gradients over all data-parallel ranks; each rank keeps its shards of the average.

    Autograd hooks call `prepare_accumulation`, `mark_ready` and `finish_backward` during backward, or DDP's
    communication hook calls the latter two. Steps and clipping call `prepare` and `complete` on all ranks.
    """

    name = "reduce-scattered gradients"
    reduces = True

    def __init__(
        self,
        comm: Comm,
        profiler: StepProfiler,
        stage: GradStage,
        reduce: ReducePolicy,
        masters: MasterWeightPolicy | None,
    ) -> None:
        super().__init__(comm, masters)
        self._profiler = profiler
        self._stage, self._reduce = stage, reduce
        self.is_paused = False
        """Inside `no_sync()`: gradients accumulate in `param.grad`, and nothing is sent."""
        self._schedule = BucketSchedule()
        self._eager_copy_params: set[int] = set()
        """Parameters whose gradients are large enough to be copied to their bucket as soon as they are ready."""
        self._grad_mask = bytearray()
        """Parameters with a gradient in the shards."""
        self._provided_grads: dict[int, torch.Tensor] = {}
        """Gradients that were given to `mark_ready` and have not been sent."""
        self._unsent_flags = bytearray()
        """Parameters whose gradient is ready and has not been sent."""
        self._params_to_send: list[int] = []
        """Parameters whose gradients `complete` has to send, as `prepare` has found them."""
        self._is_untouched = False
        """The result of `GradStage.is_untouched` in `prepare`."""
        self._backward_id = -1
        """The backward pass that accumulated last."""
        self.grad_accumulators: dict[int, torch.autograd.graph.Node] = {}
        """AccumulateGrad nodes of hooked parameters. Nothing else keeps them, and their hooks, alive between passes."""
        self._in_flight = InFlightReduces(comm, profiler)
        self._buffer_pools: dict[tuple[torch.dtype, torch.device], BufferPool] = {}
        self._transports = TransportCache(comm, reduce)
        self._can_overlap_backward = True
        """Whether all transports may send during backward. Read for every gradient."""
        self._lock = RLock()
        """Held inside backward, where autograd runs one thread per device. `prepare`, `complete` and `clear` run
        between passes, without it."""
        self._error: Exception | None = None
        """An error that only this rank knows of; `complete` raises it on all ranks."""
        self._peer_lost_error: RankLostError | None = None
        """Set by `clear` after a rank was lost: the reduces in flight will not complete, and new gradients raise."""
        self._failure_detector = comm.group.failure_detector
        self._failure_detector.add_context(self._describe_missing)

    def extend(self, layout: Layout, params: Sequence[torch.Tensor]) -> None:
        super().extend(layout, params)
        new = [self._make_bucket(layout, bucket) for bucket in layout.buckets[len(self._schedule.buckets) :]]
        self._schedule.extend(new, self._params)
        self._stage.extend(layout.params, self._params)
        self._can_overlap_backward = self._transports.can_overlap_backward
        if not self._comm.is_single_rank and self._can_overlap_backward:
            self._eager_copy_params = {
                index
                for bucket in self._schedule.buckets
                if bucket.needs_packing
                for index in bucket.large_params(EAGER_COPY_MIN_BYTES)
            }
        self._grad_mask.extend(bytes(len(params) - len(self._grad_mask)))
        self._reset()

    def _make_bucket(self, layout: Layout, bucket: Bucket) -> ReduceBucket:
        dtype = self._reduce.wire_dtype(bucket.dtype)
        pool = self._buffer_pools.setdefault((dtype, bucket.device), BufferPool(dtype, bucket.device))
        transport = self._transports.get(bucket.device, has_equal_shards=bucket.has_equal_shards)
        return ReduceBucket(layout, bucket, transport, pool, self._profiler)

    # Backward: called by autograd hooks or by DDP's communication hook.

    def prepare_accumulation(self, index: int, backward_id: int) -> None:
        """Prepare `param.grad`, to which backward pass `backward_id` is about to add."""
        with self._lock:
            if backward_id != self._backward_id:
                self._backward_id = backward_id
                self._check_grad_edits(in_backward=True)
                self._stage.start_backward()
            self._stage.prepare_accumulation(index)

    def mark_ready(self, index: int, grad: torch.Tensor | None = None) -> None:
        """Mark the gradient of a parameter as ready, and send the buckets that this completes.

        `grad` is the gradient; None means `param.grad`. Does not depend on other ranks: errors of this rank are
        recorded for `complete`. Raises `RankLostError` after `clear` if a rank was lost.
        """
        with self._lock:
            if self._peer_lost_error is not None and not self.is_paused:
                raise self._peer_lost_error.copy()
            if self._stage.is_used:
                self._warn_used()
            if self._error is None:
                try:
                    self._mark_ready(index, grad)
                except Exception as error:
                    self._record_error(error)

    def finish_backward(self) -> None:
        """Send the remaining buckets of the round. Call at the end of each backward pass."""
        with self._lock:
            if self.is_paused or self._error is not None:
                return
            try:
                while self._schedule.has_remaining:
                    self._send_next()
                self._schedule.close_round()
                self._stage.install_placeholders(self._grad_mask, self.grad_accumulators)
            except Exception as error:
                self._record_error(error)

    def record_param_grads(self, indices: Sequence[int]) -> None:
        """Detect edits from now on: DDP has written the gradients given to `mark_ready` to `param.grad`, unchanged."""
        with self._lock:
            for index in indices:
                was_sent = self._provided_grads.pop(index, None) is None
                self._stage.record_written_grad(index, was_sent=was_sent)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Context manager of `no_sync()`: gradients accumulate in `param.grad`, and nothing is sent."""
        was_paused, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = was_paused

    # Step: called by steps and clipping, on all ranks.

    @property
    def has_sent(self) -> bool:
        return self._schedule.num_sent > 0 or bool(self._in_flight)

    def prepare(self) -> bytes:
        self._in_flight.finish_within_budget(self._finish_reduce)
        self._is_untouched = self._stage.is_untouched()
        if not self._is_untouched:
            self._check_grad_edits(in_backward=False)
        grad_mask = bytearray(self._stage.current_grad_mask(self._grad_mask))
        self._params_to_send = self._find_params_to_send()
        if self._params_to_send and self._stage.is_used:
            self._warn_used()
        for index in self._params_to_send:
            grad_mask[index] = 1
        schedule = self._schedule
        rounds = struct.pack("qqq", schedule.rounds_sent, schedule.sent_in_round, schedule.rounds_cleared)
        status = struct.pack("??", self._error is not None, bool(self._in_flight))
        return bytes(grad_mask) + self._unsent_bucket_flags() + rounds + status

    def complete(self, step: Step, *, signatures_match: bool) -> None:
        """Complete the shards of all buckets.

        If signatures match, all ranks send the same buckets, and none has failed so far. If they differ, all ranks
        first exchange how many buckets each has sent (two small all-reduces, in `_catch_up`) and which are unsent, and
        in the end which parameters have a gradient. In any case, if buckets were sent, one more says whether a rank has
        failed since.
        """
        # Equal signatures say that no rank has an error or a reduce in flight if this one has none. Anything sent below
        # may fail on one rank only.
        can_fail = not signatures_match or bool(self._params_to_send) or bool(self._in_flight) or bool(self._error)
        if self._error is not None:
            self._drop_local_grads()
        self._in_flight.all_sent_equally = signatures_match
        if signatures_match:
            unsent = self._unsent_bucket_flags()
        else:
            self._catch_up()
            self._params_to_send = self._find_params_to_send()
            unsent = self._comm.data_parallel.all_reduce_any(self._unsent_bucket_flags())
        for bucket, is_unsent in zip(self._schedule.buckets, unsent, strict=True):
            if is_unsent:
                self._reduce_or_zeros(bucket)
                self._in_flight.finish_arrived(self._finish_reduce)
        self._in_flight.finish_all(self._finish_reduce)
        if can_fail:
            self._raise_if_any_rank_failed()
        grad_mask = self._stage.current_grad_mask(self._grad_mask)
        if not signatures_match:
            grad_mask = self._comm.data_parallel.all_reduce_any(grad_mask)
        self._schedule.update_expected(grad_mask, force=bool(self._params_to_send) or not signatures_match)
        self._grad_mask[:] = step.grad_mask = grad_mask
        self._zero_shards_without_reduce()
        if 0 in grad_mask:
            self._zero_removed_grads()
        self._reset()
        has_sent = not signatures_match or bool(self._params_to_send)
        if (
            has_sent
            or not self._is_untouched
            or not self._stage.has_placeholders_for(self._grad_mask, self.grad_accumulators)
        ):
            self._stage.install_placeholders(self._grad_mask, self.grad_accumulators)

    def grad_tensors(self) -> list[torch.Tensor]:
        # Hazard: exclude padding that is not sent. Nothing overwrites it, so it would stay NaN once it is multiplied by
        # NaN.
        # Exclude buckets that were sent only because an earlier pass had used them: their dtype must not affect norms.
        return [
            self._sent_shard(bucket)
            for bucket in self._schedule.buckets
            if bucket.has_grads and any(self._grad_mask[index] for index in bucket.params)
        ]

    def mark_scaled(self) -> None:
        self._stage.mark_scaled()

    def mark_stepped(self, *, was_applied: bool) -> None:
        self._stage.mark_stepped(was_applied=was_applied)

    # Clearing.

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
            self._release_shards()
        self._stage.clear(set_to_none=set_to_none)
        self._stage.install_placeholders(self._grad_mask, self.grad_accumulators)
        self._schedule.mark_cleared()
        self._peer_lost_error = self._error if isinstance(self._error, RankLostError) else None

    def _release_shards(self) -> None:
        """Free the shards where that costs no time: activations can use their memory until the next reduce."""
        if not self._comm.is_single_rank:  # a single rank packs full gradients, into views that are created once
            self._shards = {
                index: shard for index, shard in self._shards.items() if shard.device.type in DEVICES_THAT_KEEP_SHARDS
            }

    def drop_placeholders(self) -> None:
        self._stage.drop_placeholders()

    # Reports.

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

    # Helpers of backward: ready gradients, and changes of `param.grad` by users.

    def _mark_ready(self, index: int, grad: torch.Tensor | None) -> None:
        if grad is not None:
            self._provided_grads[index] = grad
        self._unsent_flags[index] = 1
        if self.is_paused:
            self._schedule.expect(index)
            return
        if self._can_overlap_backward:
            self._schedule.open_round()
        if not self._schedule.is_missing(index):
            return
        if index in self._eager_copy_params:
            self._stage.copy_early(index, self._schedule.bucket_of[index])
        if self._schedule.mark_ready(index):
            while self._schedule.is_next_ready:
                self._send_next()

    def _check_grad_edits(self, *, in_backward: bool) -> None:
        """Detect changes of `param.grad` since gradients were reduced. The next step raises errors, on all ranks."""
        if self._error is None:
            try:
                self._clear_if_grads_cleared(in_backward=in_backward)
                self._stage.check_no_late_edits(self._unsent_flags)
            except Exception as error:
                self._record_error(error)

    def _clear_if_grads_cleared(self, *, in_backward: bool) -> None:
        """Clear the shards if gradients were cleared in `param.grad`, by hand or by `model.zero_grad()`.

        Between the last backward pass and the step, users may also remove individual gradients.
        """
        cleared, others = self._stage.find_cleared()
        if cleared and not others:
            self.clear(set_to_none=True)
        elif cleared and in_backward:
            first, other = (self._layout.params[indices[0]].label for indices in (cleared, others))
            raise RuntimeError(
                f"the gradient of {first} was removed from param.grad after it was reduced, but not that of {other}. "
                "Before another backward pass, clear all gradients with optimizer.zero_grad(), or none."
            )
        elif cleared:
            for index in self._stage.forget_removed(cleared):
                self._grad_mask[index] = 0

    # Helpers of `complete`.

    def _warn_used(self) -> None:
        """Warn like the stage. Hazard: warnings may be configured to raise, and other ranks may have none."""
        try:
            self._stage.warn_used()
        except Exception as error:
            self._record_error(error)

    def _find_params_to_send(self) -> list[int]:
        """Return the parameters whose gradient has not been sent, whether backward or the user has set it."""
        if self._error is not None:
            return []
        copied = [index for bucket in self._schedule.buckets for index in bucket.copied_params]
        if self._is_untouched:
            return copied
        return copied + self._stage.find_unsent(self._schedule.bucket_of, self._unsent_flags, self._grad_mask)

    def _unsent_bucket_flags(self) -> bytes:
        unsent = {self._schedule.bucket_of[index].index for index in self._params_to_send}
        return bytes(bucket.index in unsent for bucket in self._schedule.buckets)

    def _catch_up(self) -> None:
        """Send buckets until all ranks have sent as many as the rank that sent the most. Call on all ranks.

        A round that any rank has sent and cleared is dropped on all ranks. If another rank has sent buckets of such a
        round and has not cleared them, it may want to keep them or may be late to clear them, so all ranks raise.
        """
        schedule = self._schedule
        max_sent, max_rounds_cleared, negative_min_sent = self._comm.data_parallel.all_reduce_max(
            [schedule.num_sent, schedule.rounds_cleared, -schedule.num_sent]
        )
        self._in_flight.all_sent_equally = max_sent == -negative_min_sent
        conflict = schedule.rounds_cleared < max_rounds_cleared and schedule.has_uncleared
        if self._comm.data_parallel.all_reduce_max([conflict])[0]:
            self._error = self._error or RankMismatchError(
                "zero_grad() was called after different backward passes on different ranks, so gradients of "
                "different passes would be summed. All gradients were cleared. If one rank skips a step, all ranks "
                "must skip it."
            )
        while schedule.num_sent < max_sent:
            self._send_next_or_zeros(is_needed=schedule.rounds_sent >= max_rounds_cleared)

    def _raise_if_any_rank_failed(self) -> None:
        """Clear gradients and raise if any rank has an error: the shards are incomplete then. Call on all ranks."""
        failed = self._error is not None
        if not (failed if self._comm.is_single_rank else self._comm.data_parallel.all_reduce_max([failed])[0]):
            return
        error, self._error = self._error, None
        # Hazard: all ranks have sent the same buckets by now. An open round must not send its others on some ranks.
        self._reset()
        self.clear(set_to_none=True)
        self._drop_local_grads()
        raise_failure(self._comm, "failed to reduce gradients, which were cleared", error)

    def _zero_shards_without_reduce(self) -> None:
        """Zero the shards of gradients that were cleared with `set_to_none=False` and not reduced since.

        Hazard: whether a shard was reduced before it was cleared differs between ranks. Norms must count the same
        buckets on all of them.
        """
        for bucket in self._schedule.buckets:
            if not bucket.has_grads and any(self._grad_mask[index] for index in bucket.params):
                self.shard(bucket.index).zero_()
                bucket.has_grads = True

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

    def _drop_local_grads(self) -> None:
        """Free gradients that have not been sent."""
        self._provided_grads.clear()
        self._stage.drop_grads()

    def _reset(self) -> None:
        self._schedule.reset()
        self._in_flight.reset()
        self._unsent_flags = bytearray(len(self._params))

    # Helpers: send a bucket.

    def _send_next(self) -> None:
        """Send the next bucket of the round. If packing it raises, it was not sent and stays the next one."""
        self._start_reduce(self._schedule.next_bucket)
        # Hazard: count it before waiting. A wait that is interrupted must not lead to a bucket that is sent twice.
        self._schedule.advance()
        self._in_flight.finish_arrived(self._finish_reduce)

    def _send_next_or_zeros(self, *, is_needed: bool) -> None:
        """Send the next bucket of the round, for which other ranks wait, whatever happens here."""
        self._reduce_or_zeros(self._schedule.next_bucket, is_needed=is_needed)
        self._schedule.advance()
        self._in_flight.finish_arrived(self._finish_reduce)

    def _abandon_backward(self) -> None:
        """End the current pass, which may have failed halfway: send zeros for the buckets that other ranks wait for."""
        try:
            while self._schedule.has_remaining:
                self._send_next_or_zeros(is_needed=False)
            self._schedule.close_round()
        except Exception as error:
            self._record_error(error)

    @torch.no_grad()
    def _start_reduce(self, bucket: ReduceBucket) -> None:
        """Pack and send a bucket. If this raises, nothing was sent, unless connections are broken."""
        self._failure_detector.set_activity(partial(self._layout.describe_bucket, bucket.index, "gradients"))
        for index in bucket.copied_params:
            self._grad_mask[index] = 1
        grads = map(self._take_grad, bucket.params)
        if self._comm.is_single_rank:
            self._accumulate_on_single_rank(bucket, grads)
        else:
            output = self._choose_output(bucket)
            self._in_flight.add(bucket.start_reduce(grads, output, owns_grads=self._stage.frees_grads))

    def _reduce_or_zeros(self, bucket: ReduceBucket, *, is_needed: bool = True) -> None:
        """Send a bucket that other ranks wait for: as unused zeros if it is not needed or this rank has failed."""
        if is_needed and self._error is None:
            try:
                self._start_reduce(bucket)
                return
            except Exception as error:
                self._record_error(error)
        if not self._comm.is_single_rank:
            with self._failure_detector.abort_on_error():
                self._in_flight.add(bucket.start_reduce_zeros(self._choose_output(bucket)))

    def _take_grad(self, index: int) -> torch.Tensor | None:
        """Take the gradient of a parameter to send it; None if there is none, or its shard was already scaled."""
        self._unsent_flags[index] = 0
        grad = self._stage.take_grad(index, self._provided_grads.pop(index, None))
        self._grad_mask[index] |= grad is not None
        return grad

    def _accumulate_on_single_rank(self, bucket: ReduceBucket, grads: OptionalGrads) -> None:
        """Pack gradients into the shard, which is the whole bucket on a single rank."""
        buffer = bucket.wrap_shard(self.shard(bucket.index))
        with self._profiler.phase(Phase.PACK_GRADS, bucket.index):
            if self._adds_to_shard(bucket):
                bucket.packer.add(grads, buffer)
            else:
                bucket.packer.pack(grads, buffer)
        bucket.has_grads = True

    def _choose_output(self, bucket: ReduceBucket) -> ReduceOutput:
        """Return the shard itself, or a new tensor if the shard must keep its gradients or is an output in flight."""
        shard = self._sent_shard(bucket)
        if self._adds_to_shard(bucket) or any(pending.bucket is bucket for pending in self._in_flight):
            return ReduceOutput(torch.empty_like(shard), is_shard=False)
        return ReduceOutput(shard, is_shard=True)

    def _adds_to_shard(self, bucket: ReduceBucket) -> bool:
        """Return whether a reduce of this bucket is added to gradients in the shard."""
        return bucket.has_grads and self._stage.should_add_to_shard

    def _sent_shard(self, bucket: ReduceBucket) -> torch.Tensor:
        """Return the part of this rank's shard that is reduced: without the padding, unless that is sent too."""
        return self.shard(bucket.index)[: bucket.packer.shards[self._comm.group.rank].length]

    # Helpers: receive a bucket; errors.

    def _finish_reduce(self, pending: PendingReduce) -> None:
        try:
            with self._profiler.phase(Phase.RECEIVE_GRADS, pending.bucket.index):
                self._wait_and_accumulate(pending)
        except Exception as error:
            self._record_error(error)

    @torch.no_grad()
    def _wait_and_accumulate(self, pending: PendingReduce) -> None:
        bucket, work, (output, is_shard), *_ = pending
        self._failure_detector.set_activity(partial(self._layout.describe_bucket, bucket.index, "gradients"))
        with self._failure_detector.waiting():
            work.wait()
        bucket.release(pending)
        if not pending.is_needed:
            if is_shard:
                output.zero_()
            return
        if not is_shard:
            shard = self._sent_shard(bucket)
            shard.add_(output) if self._adds_to_shard(bucket) else shard.copy_(output)
        bucket.has_grads = True

    def _record_error(self, error: Exception) -> None:
        """Keep the first error for `complete`.

        Hazard: other ranks wait for the buckets that this rank would send next, so it must not raise on its own.
        """
        if not isinstance(error, RankLostError):  # all ranks detect that one themselves, and raise
            rank = self._comm.data_parallel.group.rank
            log_rank(logging.ERROR, rank, "failed to reduce gradients; step() will raise the %s", type(error).__name__)
        self._error = self._error or error

    def _describe_missing(self) -> str:
        return self._in_flight.describe_missing(self._layout)
