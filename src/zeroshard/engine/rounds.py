"""Whose turn it is: buckets go in the same order on all ranks, round after round."""

from collections.abc import Iterable, Sequence

import torch

from .slots import GradBucket


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
