"""Whose turn it is: buckets go in the same order on all ranks, round after round."""

from collections.abc import Iterable, Sequence

import torch

from .slots import Slot


class Rounds:
    """Which bucket goes next, and whose gradients it waits for.

    A backward pass sends one round: every bucket once, however many parameters it has used. So ranks that make the same
    backward passes have sent as many buckets at each `zero_grad`, whichever parameters each of them has used.

    What had no gradients last time is not waited for: an unused parameter must not keep a bucket waiting, nor an unused
    bucket the others.
    """

    def __init__(self) -> None:
        self.slots: list[Slot] = []
        self.slot_of: dict[int, Slot] = {}
        self.sent = self.cleared = 0
        """Buckets that were sent since gradients were last settled, all and before they were last cleared."""
        self._is_open = False
        self._left = 0
        """Buckets that the open round, that of the present backward pass, has yet to send."""
        self._order: list[Slot] = []
        self._params: Sequence[torch.Tensor] = ()
        self._there = bytearray()
        self._expects = bytearray()
        self._expected_for = b""

    def extend(self, slots: Iterable[Slot], params: Sequence[torch.Tensor]) -> None:
        for slot in slots:
            self.slots.append(slot)
            self.slot_of |= dict.fromkeys(slot.members, slot)
            if any(place.spec.trainable for place in slot.places):
                self._order.append(slot)
        self._params = params
        self._expect(bytes(len(params)))

    @property
    def next(self) -> Slot:
        return self._order[self.sent % len(self._order)]

    def open(self) -> None:
        """A backward pass has made a gradient: it sends every bucket once, when it is full or at the end of the pass.

        Gradients for a bucket that it has sent already wait for the next pass, or the step.
        """
        if not self._is_open:
            self._is_open, self._left = True, len(self._order)

    def close(self) -> None:
        """All buckets of the round have been sent."""
        assert not self._left
        self._is_open = False

    @property
    def has_left(self) -> bool:
        """The open round has buckets that were not sent."""
        return self._left > 0

    @property
    def next_is_full(self) -> bool:
        return self.has_left and not self.next.missing

    def awaits(self, index: int) -> bool:
        return bool(self._expects[index]) and not self._there[index]

    def fills_by(self, index: int) -> bool:
        """A gradient that was awaited is there; whether its bucket is full now."""
        slot, self._there[index] = self.slot_of[index], 1
        slot.missing -= 1
        return not slot.missing

    def note_taken(self, index: int) -> None:
        self._there[index] = 0

    def note_sent(self, slot: Slot) -> None:
        if slot in self._order:
            self.sent += 1
            self._left -= self.has_left
        slot.missing = slot.expected

    def expect_too(self, index: int) -> None:
        """A gradient of this parameter adds up in a pass that sends nothing, so the pass that sends waits for it."""
        if index in self.slot_of and not self._expects[index]:
            slot, self._expects[index] = self.slot_of[index], 1
            slot.expected += 1
            slot.missing += 1

    def start_over(self) -> None:
        self.sent = self.cleared = self._left = 0
        self._is_open = False
        self._there = bytearray(len(self._params))
        for slot in self.slots:
            slot.missing = slot.expected

    def learn(self, present: bytes, *, anew: bool) -> None:
        """Wait for these from now on. `anew`: also if they are those of last time, but others may train now."""
        if anew or present != self._expected_for:
            self._expect(present)
        used = [slot for slot in self.slots if 0 not in present or any(map(present.__getitem__, slot.members))]
        self._order = used or self._order

    def _expect(self, present: bytes) -> None:
        self._expected_for = present
        used = present if any(present) else b"\1" * len(present)
        flags = [param.requires_grad and used[index] for index, param in enumerate(self._params)]
        self._expects = bytearray(map(bool, flags))
        for slot in self.slots:
            slot.expected = sum(map(self._expects.__getitem__, slot.members))
