"""Gradients to their owners: a gradient is ready, its bucket is full, its slices are on their way.

All ranks send buckets in the same order, round after round: a bucket goes when all its parameters have gradients and
its elders have gone. A rank where that never happens, since it used other parameters or made no backward pass at all,
catches up in `settle`, with zeros for what it lacks. So no rank relies on another inside a backward pass; it waits for
others there only when much is under way, and not for long.

A large gradient is copied into its bucket as soon as it is there, and freed; small ones together when the bucket goes.

What is in `param.grad` in `settle` and has not travelled yet (it came too late, or from `no_sync`) goes along then.
"""

import warnings
from collections import deque
from collections.abc import Sequence
from operator import attrgetter
from struct import pack
from threading import RLock
from weakref import ReferenceType, ref

import torch

from ..comm.collectives import Comm
from ..comm.shards import Ways
from ..errors import RankMismatchError
from ..layout.layout import Bucket, Layout
from ..policies import MasterWeights, Reduce, Retention
from .grads import Gradients
from .packing import Grads, Pool
from .slots import Sending, Slot, Target

_GRAD = attrgetter("grad")

UNFINISHED = 1
"""The newest buckets are left on their way: taking them in at once would stop what they are to overlap with."""
CROWD = 2
PATIENCE = 0.1
"""Seconds that a rank waits, inside a backward pass, for the oldest of more buckets than that, so that memory is
bounded where ranks keep pace. In vain once a step only: another may send nothing before this one settles."""
LARGE = 256 * 1024
"""Bytes of a gradient that is copied on its own."""


class GradSync(Gradients):
    """Averages gradients over all ranks, each slice at its owner."""

    origin = "slices from all ranks"

    def __init__(self, comm: Comm, retention: Retention, reduce: Reduce, masters: MasterWeights | None) -> None:
        super().__init__(comm, masters)
        self._retention, self._reduce = retention, reduce
        self.paused = False
        """Gradients add up in `param.grad`, and nothing travels."""
        self._slots: list[Slot] = []
        self._slot_of: dict[int, Slot] = {}
        self._large: set[int] = set()
        """Parameters whose gradients are copied at once."""
        self._present = bytearray()
        self._fired = bytearray()
        self._offered: dict[int, torch.Tensor] = {}
        self._unsent = bytearray()
        self._late: list[int] = []
        self._expects = self._expected_for = b""
        self._sent_grads: dict[int, ReferenceType[torch.Tensor] | None] = {}
        """Of those that stay in `param.grad`, to notice when another one takes its place."""
        self._round: list[Slot] = []
        self._sent = self._cleared = 0
        """Buckets that were sent since gradients were last settled, all and before they were last cleared."""
        self._under_way: deque[Sending] = deque()
        self._pools: dict[tuple[torch.dtype, torch.device], Pool] = {}
        self._ways = Ways(comm.group, reduce)
        self._lock = RLock()
        """Autograd has a thread for each device."""
        self._spent = False
        self._patience = PATIENCE

    def extend(self, layout: Layout, params: Sequence[torch.Tensor]) -> None:
        super().extend(layout, params)
        for bucket in layout.buckets[len(self._slots) :]:
            slot = self._slot(layout, bucket)
            self._slots.append(slot)
            self._slot_of |= dict.fromkeys(slot.members, slot)
            if any(place.spec.trainable for place in slot.places):
                self._round.append(slot)
        if self._retention.frees and self._comm.group.size > 1 and self._is_eager:
            self._large = {index for slot in self._slots if slot.packs for index in slot.at_least(LARGE)}
        self._present.extend(bytes(len(params) - len(self._present)))
        self._expect_those_that_train(bytes(len(params)))
        self._start_over()

    def _slot(self, layout: Layout, bucket: Bucket) -> Slot:
        dtype = self._reduce.wire_dtype(bucket.dtype)
        pool = self._pools.setdefault((dtype, bucket.device), Pool(dtype, bucket.device))
        return Slot(layout, bucket, self._ways.of(bucket.device, equal=bucket.has_equal_shards), pool)

    @property
    def busy(self) -> bool:
        """Gradients have been sent since they were last settled."""
        return self._sent > 0 or bool(self._under_way)

    def ready(self, index: int, grad: torch.Tensor | None = None) -> None:
        """A parameter has its gradient: the given one, or that in `param.grad`. Relies on no other rank."""
        with self._lock:
            self._ready(index, grad)

    def _ready(self, index: int, grad: torch.Tensor | None) -> None:
        if grad is not None:
            self._offered[index] = grad
        if self._spent:
            self._warn_of_old_grads()
        self._unsent[index] = 1
        if self.paused or self._fired[index] or not self._expects[index]:
            return
        self._fired[index] = 1
        slot = self._slot_of[index]
        if index in self._large:
            self._put_in(slot, index)
        slot.missing -= 1
        if not slot.missing:
            self._send_full()

    @torch.no_grad()
    def _put_in(self, slot: Slot, index: int) -> None:
        param = self._params[index]
        if param.grad is not None:
            slot.put_in(index, param.grad)
            param.grad = None

    def _send_full(self) -> None:
        """Send all buckets that are full and whose turn it is."""
        while self._is_eager and self._round and not self._next.missing:
            self._send(self._next)
            if self._sent % len(self._round) == 0:
                return  # the same bucket twice in one go would be empty

    def end_round(self) -> None:
        """A backward pass is over: send what is left of a round that has begun."""
        with self._lock:
            if self._is_eager and not self.paused and any(self._fired):
                while self._sent % len(self._round):
                    self._send(self._next)

    def statement(self) -> bytes:
        have, self._late = bytearray(self._present_flags()), self._find_late()
        if self._late and self._spent:
            self._warn_of_old_grads()
        for index in self._late:
            have[index] = 1
        return bytes(have) + self._late_buckets() + pack("qq", self._sent, self._cleared)

    def settle(self, *, same: bool) -> bytes:
        if not same:
            self._catch_up()
            self._late = self._find_late()
        late = self._late_buckets()
        for slot, flag in zip(self._slots, late if same else self._comm.union(late), strict=True):
            if flag:
                self._send(slot)
        while self._under_way:
            self._take_in()
        present = self._present_flags() if same else self._comm.union(self._present_flags())
        if self._late or not same or present != self._expected_for:
            self._expect_those_that_train(present)
        self._present[:] = present
        # What had no gradients this time is not expected to have any next time.
        used = [slot for slot in self._slots if 0 not in present or any(map(present.__getitem__, slot.members))]
        self._round = used or self._round
        self._start_over()
        return present

    def _catch_up(self) -> None:
        """All ranks have sent as many buckets as the one that has sent most.

        What one rank has cleared after it was sent counts on none. A rank that sent what shall count in its place could
        not be told apart from one that cleared too late, so that is refused.
        """
        goal, void = self._comm.maximum([self._sent, self._cleared])
        conflict = self._cleared < void and self._cleared < self._sent
        problem = self._comm.maximum([conflict])[0]
        while self._sent < goal:
            self._send(self._next, wanted=self._sent >= void)
        if problem:
            while self._under_way:
                self._take_in()
            self.clear(to_none=True)
            self._start_over()
            for param in self._params:
                param.grad = None
            raise RankMismatchError(
                "zero_grad() was called between different backward passes on different ranks, so that gradients of one "
                "pass would meet those of another. They are cleared now."
            )

    def clear(self, *, to_none: bool) -> None:
        # Hazard: waiting here for what is under way would be waiting for ranks that may not send it before they settle.
        self._under_way = deque(sending._replace(wanted=False) for sending in self._under_way)
        for slot in self._slots:
            slot.clear(to_none=to_none)
            slot.holds = slot.holds and not to_none
            if not to_none and slot.bucket in self._shards:
                self._shards[slot.bucket].zero_()
        if to_none:
            self._present[:] = bytes(len(self._present))
        self._cleared = self._sent
        self._spent = False

    def tensors(self) -> list[torch.Tensor]:
        # Hazard: not their padding. Nothing writes there, so what is multiplied by NaN once would stay NaN.
        return [self._filled(slot) for slot in self._slots if slot.holds]

    def spend(self) -> None:
        """A later backward pass adds to them unless they are cleared."""
        self._spent = self._retention.frees

    @property
    def _is_eager(self) -> bool:
        """Buckets may go while backward runs; else all go along when gradients are settled."""
        return self._ways.eager

    @property
    def _next(self) -> Slot:
        return self._round[self._sent % len(self._round)]

    def _find_late(self) -> list[int]:
        """Parameters with a gradient that has not travelled, whoever has set it."""
        grads = list(map(_GRAD, self._params))
        waiting = [index for slot in self._slots for index in slot.waiting]
        # Lists ask for identity first. Hazard: `count` would go on and ask every tensor whether it equals None.
        if self._retention.frees and grads == [None] * len(grads):
            return waiting
        have = [(i, grad) for i, grad in enumerate(grads) if grad is not None and i in self._slot_of]
        return waiting + [i for i, grad in have if self._retention.frees or self._is_unsent(i, grad)]

    def _is_unsent(self, index: int, grad: torch.Tensor) -> bool:
        sent = self._sent_grads.get(index)
        return bool(self._unsent[index]) or not self._present[index] or (sent is not None and sent() is not grad)

    def _late_buckets(self) -> bytes:
        late = {self._slot_of[index].bucket for index in self._late}
        return bytes(slot.bucket in late for slot in self._slots)

    def _present_flags(self) -> bytes:
        if self._retention.frees:
            return bytes(self._present)
        return bytes([param.grad is not None for param in self._params])

    def _start_over(self) -> None:
        self._sent = self._cleared = 0
        self._patience = PATIENCE
        self._fired = bytearray(len(self._params))
        self._unsent = bytearray(len(self._params))
        for slot in self._slots:
            slot.missing = slot.expected

    def _expect_those_that_train(self, present: bytes) -> None:
        """Those that had gradients last time, if there were any: an unused parameter must not keep a bucket waiting."""
        self._expected_for = present
        used = present if any(present) else b"\1" * len(present)
        flags = [param.requires_grad and used[index] for index, param in enumerate(self._params)]
        self._expects = bytes(map(bool, flags))
        for slot in self._slots:
            slot.expected = sum(map(self._expects.__getitem__, slot.members))

    @torch.no_grad()
    def _send(self, slot: Slot, *, wanted: bool = True) -> None:
        """`wanted`: else nobody will use what is sent, and it is zeros."""
        self._sent += slot in self._round
        slot.missing = slot.expected
        if not wanted:
            self._under_way.append(slot.send_zeros(self._target(slot)))
            self._take_in_what_came()
            return
        for index in slot.waiting:
            self._present[index] = 1
        grads = map(self._take, slot.members)
        if self._comm.group.size == 1:
            self._keep(slot, grads)
            return
        self._under_way.append(slot.send(grads, self._target(slot), ours=self._retention.frees))
        self._take_in_what_came()

    def _take_in_what_came(self) -> None:
        while len(self._under_way) > UNFINISHED:
            crowded = len(self._under_way) > CROWD
            if not self._under_way[0].arriving.arrives(self._patience if crowded else 0):
                self._patience = 0 if crowded else self._patience
                return
            self._take_in()

    def _take(self, index: int) -> torch.Tensor | None:
        """The gradient of a parameter, which is on its way then."""
        param = self._params[index]
        offered = self._offered.pop(index, None)
        grad = param.grad if offered is None else offered
        self._unsent[index] = self._fired[index] = 0
        self._present[index] |= grad is not None
        if self._retention.frees:
            param.grad = None
        else:
            self._sent_grads[index] = ref(grad) if grad is not None and offered is None else None
        return grad

    def _keep(self, slot: Slot, grads: Grads) -> None:
        """There are no other ranks: the shard is the whole bucket."""
        buffer = slot.as_buffer(self.shard(slot.bucket))
        if slot.holds and self._retention.frees:
            slot.packing.add(grads, buffer)
        else:
            slot.packing.pack(grads, buffer)
        slot.holds = True

    @torch.no_grad()
    def _take_in(self) -> None:
        slot, arriving, (memory, is_shard), *_ = sending = self._under_way.popleft()
        arriving.wait()
        slot.give_back(sending)
        shard = self._filled(slot)
        if not sending.wanted:
            if is_shard:
                shard.zero_()
            return
        if not is_shard:
            shard.add_(memory) if slot.holds and self._retention.frees else shard.copy_(memory)
        slot.holds = True

    def _target(self, slot: Slot) -> Target:
        """The shard itself, unless it has something that must stay or is about to get something."""
        shard = self._filled(slot)
        occupied = slot.holds and self._retention.frees
        if occupied or any(sending.slot is slot for sending in self._under_way):
            return Target(torch.empty_like(shard), is_shard=False)
        return Target(shard, is_shard=True)

    def _filled(self, slot: Slot) -> torch.Tensor:
        """A shard without the padding at its end."""
        return self.shard(slot.bucket)[: slot.packing.shards[self._comm.group.rank].length]

    def _warn_of_old_grads(self) -> None:
        self._spent = False
        warnings.warn(
            "gradients of the last step were not cleared, so this backward pass adds to them. "
            "Call optimizer.zero_grad() after each step.",
            stacklevel=2,
        )
