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
from collections.abc import Sequence
from functools import partial
from struct import pack
from threading import RLock

import torch

from ..comm.agreement import raise_failure
from ..comm.choice import Ways
from ..comm.collectives import Comm
from ..errors import RankLostError, RankMismatchError
from ..labels import Label
from ..layout.layout import Bucket, Layout
from ..notices import log, warn_user
from ..policies import MasterWeights, Reduce, ZeroStage
from .grads import Gradients
from .packing import Grads, Pool
from .rounds import Rounds
from .sent import CHANGED_AFTER_REDUCTION, SentGrads
from .sharded_grad import ShardedGrad, drop_placeholder, local_grad
from .slots import Sending, Slot, Target
from .under_way import UnderWay

LARGE = 256 * 1024
"""Bytes of a gradient that is copied on its own."""


class GradSync(Gradients):
    """Averages gradients over all ranks, each slice at its owner."""

    origin = "slices from all ranks"

    def __init__(self, comm: Comm, stage: ZeroStage, reduce: Reduce, masters: MasterWeights | None) -> None:
        super().__init__(comm, masters)
        self._stage, self._reduce = stage, reduce
        self.paused = False
        """Gradients add up in `param.grad`, and nothing travels."""
        self._rounds = Rounds()
        self._large: set[int] = set()
        """Parameters whose gradients are copied at once."""
        self._present = bytearray()
        self._offered: dict[int, torch.Tensor] = {}
        self._unsent = bytearray()
        self._accumulated = bytearray()
        """Parameters to whose `param.grad` a backward pass has added since it was last sent."""
        self._late: list[int] = []
        self._sent = SentGrads()
        self._backward_pass = -1
        """The one that has last added to a gradient."""
        self.accumulators: dict[int, torch.autograd.graph.Node] = {}
        """Of hooked parameters. Nobody else keeps these nodes, and with them their hooks, between passes."""
        self._under_way = UnderWay(comm)
        self._placeholders: dict[int, ShardedGrad] = {}
        self._placed: set[int] = set()
        """Parameters that have a placeholder, unless the user has removed it."""
        self._pools: dict[tuple[torch.dtype, torch.device], Pool] = {}
        self._ways = Ways(comm, reduce)
        self._lock = RLock()
        """Autograd has a thread for each device."""
        self._spent = False
        """A step has used them: a backward pass that adds to them gets a warning."""
        self._is_stepped = False
        """A step was tried since the last backward pass. What is set in `param.grad` then is for another one."""
        self._failure: Exception | None = None
        """What this rank alone knows of, until gradients are settled."""
        self._lost: RankLostError | None = None
        """Others are gone, and so are the gradients that had been on their way to them: there is nothing to settle."""
        comm.group.line.ask(self._missing)

    def extend(self, layout: Layout, params: Sequence[torch.Tensor]) -> None:
        super().extend(layout, params)
        new = [self._slot(layout, bucket) for bucket in layout.buckets[len(self._rounds.slots) :]]
        self._rounds.extend(new, self._params)
        if self._stage.frees and not self._comm.is_alone and self._is_eager:
            self._large = {index for slot in self._rounds.slots if slot.packs for index in slot.at_least(LARGE)}
        self._present.extend(bytes(len(params) - len(self._present)))
        self._accumulated.extend(bytes(len(params) - len(self._accumulated)))
        self._start_over()

    def _slot(self, layout: Layout, bucket: Bucket) -> Slot:
        dtype = self._reduce.wire_dtype(bucket.dtype)
        pool = self._pools.setdefault((dtype, bucket.device), Pool(dtype, bucket.device))
        way = self._ways.of(bucket.device, equal=bucket.has_equal_shards)
        return Slot(layout, bucket, way, pool, self._comm.clock)

    @property
    def busy(self) -> bool:
        """Gradients have been sent since they were last settled."""
        return self._rounds.sent > 0 or bool(self._under_way)

    @property
    def _adds(self) -> bool:
        """A pass adds to the shard; else it sends all that this rank has added up, which takes the shard's place.

        Also with ZeRO-1 once the shard was clipped or unscaled, since what is in `param.grad` was not.
        """
        return self._stage.frees or self._sent.scaled

    def before_accumulation(self, index: int, backward_pass: int) -> None:
        """A backward pass is about to add to `param.grad`."""
        with self._lock:
            if backward_pass != self._backward_pass:
                self._backward_pass = backward_pass
                self._notice_edits(in_backward=True)
                self._is_stepped = False
            if self._stage.frees:
                drop_placeholder(self._params[index])
                self._placed.discard(index)
                return
            if self._is_in_scaled_shard(index):
                self._params[index].grad = None
            self._accumulated[index] = 1
            self._sent.note_accumulation()

    def _notice_edits(self, *, in_backward: bool) -> None:
        """Notice what was done to `param.grad` since gradients were reduced. Raises in the next step, on all ranks."""
        if self._failure is None:
            try:
                self._clear_with_params(in_backward=in_backward)
                self._refuse_late_changes()
            except Exception as failure:
                self._fail(failure)

    def _clear_with_params(self, *, in_backward: bool) -> None:
        """Clear the shards if gradients were cleared in `param.grad`, by hand or by `model.zero_grad()`.

        Single gradients may be removed between the last backward pass and the step.
        """
        if self._stage.frees:
            cleared = [index for index in self._placed if self._is_removed(self._params[index].grad)]
            others = [index for index in self._placed if type(self._params[index].grad) is ShardedGrad]
        elif self._sent.scaled:
            cleared, others = self._sent.cleared(self._params, self._accumulated)
        else:
            return  # the next pass sends all that is in `param.grad` then
        if cleared and others and not in_backward:
            for index in cleared if self._stage.frees else ():
                self._placed.discard(index)
                self._present[index] = 0
        elif cleared and others:
            first, other = (self._layout.params[indices[0]].label for indices in (cleared, others))
            raise RuntimeError(
                f"the gradient of {first} was removed from param.grad after it was reduced, but not that of {other}. "
                "Before another backward pass, clear all gradients with optimizer.zero_grad(), or none."
            )
        elif cleared:
            self.clear(to_none=True)

    def _is_removed(self, grad: torch.Tensor | None) -> bool:
        """A placeholder was removed; or replaced after a step, by a gradient for the next one."""
        return grad is None or (self._is_stepped and type(grad) is not ShardedGrad)

    def _is_in_scaled_shard(self, index: int) -> bool:
        """What is in `param.grad` has been sent, and was clipped or unscaled in the shard since."""
        return self._sent.scaled and index in self._sent and not self._accumulated[index]

    def ready(self, index: int, grad: torch.Tensor | None = None) -> None:
        """A parameter has its gradient: the given one, or that in `param.grad`. Relies on no other rank."""
        with self._lock:
            if self._lost is not None and not self.paused:
                raise self._lost.again()
            if self._spent:
                self._warn_of_old_grads()
            if self._failure is None:
                try:
                    self._ready(index, grad)
                except Exception as failure:
                    self._fail(failure)

    def _ready(self, index: int, grad: torch.Tensor | None) -> None:
        if grad is not None:
            self._offered[index] = grad
        self._unsent[index] = 1
        if self.paused:
            self._rounds.expect_too(index)
            return
        if self._is_eager:
            self._rounds.open()
        if not self._rounds.awaits(index):
            return
        if index in self._large:
            self._put_in(index)
        if self._rounds.fills_by(index):
            self._send_full()

    def note_handed_over(self, indices: Sequence[int]) -> None:
        """What was given to `ready` is in `param.grad` as it was: whoever writes there from now on is heard."""
        with self._lock:
            for index in indices:
                grad = self._params[index].grad
                is_unsent = self._offered.pop(index, None) is not None
                # Hazard: it may have been sent with its bucket before DDP handed it over, and wrote it once more.
                if grad is not None and (not is_unsent or index in self._sent):
                    self._sent.note(index, grad)

    @torch.no_grad()
    def _put_in(self, index: int) -> None:
        param = self._params[index]
        if param.grad is not None:
            self._rounds.slot_of[index].put_in(index, param.grad)
            param.grad = None

    def _send_full(self) -> None:
        """Send all buckets that are full and whose turn it is."""
        while self._rounds.next_is_full:
            self._send(self._rounds.next)

    def end_round(self) -> None:
        """A backward pass is over: send what is left of its round."""
        with self._lock:
            if self.paused or self._failure is not None:
                return
            try:
                while self._rounds.has_left:
                    self._send(self._rounds.next)
                self._rounds.close()
                self._place_placeholders()
            except Exception as failure:
                self._fail(failure)

    def _place_placeholders(self) -> None:
        """Have whoever uses a gradient that is in the shards get an error, instead of None or a part of it."""
        if not self._stage.frees:
            return
        for index, param in enumerate(self._params):
            if self._present[index] and param.grad is None:
                if index not in self._placeholders:
                    self._placeholders[index] = ShardedGrad(param, self._layout.params[index].label)
                param.grad = self._placeholders[index]
                self._placed.add(index)

    def has_placeholder(self, index: int) -> bool:
        """Whether `param.grad` holds a placeholder of this reducer."""
        return index in self._placed

    def drop_placeholders(self) -> None:
        self._placed.clear()
        for param in self._params:
            drop_placeholder(param)

    def __del__(self) -> None:
        for index, placeholder in self._placeholders.items():
            if self._params[index].grad is placeholder:
                self._params[index].grad = None

    def _abandon_round(self) -> None:
        """A backward pass has failed halfway, and its gradients are cleared: others still get what they wait for."""
        try:
            while self._rounds.has_left:
                self._send_surely(self._rounds.next, wanted=False)
            self._rounds.close()
        except Exception as failure:
            self._fail(failure)

    def _fail(self, failure: Exception) -> None:
        """Hazard: other ranks rely on what this one would send next, so that it must not raise alone."""
        if not isinstance(failure, RankLostError):  # which all ranks know of, and raise
            rank = self._comm.everyone.group.rank
            log(logging.ERROR, rank, "gradients cannot be averaged; step() raises a %s", type(failure).__name__)
        self._failure = self._failure or failure

    def statement(self) -> bytes:
        self._under_way.take_in_in_time(self._take_in)
        self._notice_edits(in_backward=False)
        have, self._late = bytearray(self._present_flags()), self._find_late()
        if self._late and self._spent:
            self._warn_of_old_grads()
        for index in self._late:
            have[index] = 1
        doubts = self._failure is not None, bool(self._under_way)
        return bytes(have) + self._late_buckets() + pack("qq??", self._rounds.sent, self._rounds.cleared, *doubts)

    def settle(self, *, same: bool) -> bytes:
        sure = same and not self._late and not self._under_way and self._failure is None
        if self._failure is not None:
            self._drop_local()
        self._under_way.keeps_pace = same
        if not same:
            self._catch_up()
            self._late = self._find_late()
        late = self._late_buckets()
        for slot, flag in zip(self._rounds.slots, late if same else self._comm.everyone.union(late), strict=True):
            if flag:
                self._send_surely(slot)
        self._under_way.take_in_all(self._take_in)
        if not sure:
            self._raise_if_one_failed()
        present = self._present_flags() if same else self._comm.everyone.union(self._present_flags())
        self._rounds.learn(present, anew=bool(self._late) or not same)
        self._present[:] = present
        self._zero_removed()
        self._start_over()
        self._place_placeholders()
        return present

    def _zero_removed(self) -> None:
        """Zero what the shards have of gradients that were removed from `param.grad`: norms do not count them."""
        rank = self._comm.group.rank
        for slot in self._rounds.slots:
            if slot.holds and not all(self._present[index] for index in slot.members):
                bucket, shard = self._layout.buckets[slot.bucket], self.shard(slot.bucket)
                start = bucket.shards[rank].start
                for piece in bucket.pieces_of(rank):
                    if not self._present[piece.param]:
                        shard[piece.in_bucket.start - start : piece.in_bucket.stop - start].zero_()

    def _catch_up(self) -> None:
        """All ranks have sent as many buckets as the one that has sent most.

        What one rank has cleared after it was sent counts on none. A rank that sent what shall count in its place could
        not be told apart from one that cleared too late, so that is refused.
        """
        rounds = self._rounds
        goal, void, least = self._comm.everyone.maximum([rounds.sent, rounds.cleared, -rounds.sent])
        self._under_way.keeps_pace = goal == -least
        conflict = rounds.cleared < void and rounds.cleared < rounds.sent
        if self._comm.everyone.maximum([conflict])[0]:
            self._failure = self._failure or RankMismatchError(
                "zero_grad() was called between different backward passes on different ranks, so that gradients of one "
                "pass would meet those of another. They are cleared now. Where one rank leaves a step out, all must."
            )
        while rounds.sent < goal:
            self._send_surely(rounds.next, wanted=rounds.sent >= void)

    def _raise_if_one_failed(self) -> None:
        """On all ranks, whose gradients are gone then: they are not those of all ranks, and parts of them are lost."""
        failed = self._failure is not None
        if not (failed if self._comm.is_alone else self._comm.everyone.maximum([failed])[0]):
            return
        failure, self._failure = self._failure, None
        self.clear(to_none=True)
        self._drop_local()
        self._start_over()
        raise_failure(self._comm, "gradients could not be averaged, and are cleared now", failure)

    def _drop_local(self) -> None:
        """Free what has not travelled."""
        self._offered.clear()
        self._placed.clear()
        for param in self._params:
            param.grad = None

    def clear(self, *, to_none: bool) -> None:
        self._under_way.unwant()
        self._abandon_round()
        for slot in self._rounds.slots:
            slot.clear(to_none=to_none)
            slot.holds = slot.holds and not to_none
            if not to_none and slot.bucket in self._shards:
                self._shards[slot.bucket].zero_()
        if to_none:
            self._present[:] = bytes(len(self._present))
            self._accumulated[:] = bytes(len(self._accumulated))
            self._sent.clear()
            self._placed.clear()
        else:
            self._sent.note_zeros(self._params)
        self._place_placeholders()
        self._rounds.cleared = self._rounds.sent
        self._spent = self._is_stepped = self._sent.scaled = False
        self._lost = self._failure if isinstance(self._failure, RankLostError) else None

    def tensors(self) -> list[torch.Tensor]:
        # Hazard: not their padding. Nothing writes there, so what is multiplied by NaN once would stay NaN.
        # Nor buckets that were sent because an earlier pass had used them: norms do not take on their dtype.
        filled = (slot for slot in self._rounds.slots if slot.holds and any(self._present[i] for i in slot.members))
        return [self._filled(slot) for slot in filled]

    def staging(self) -> list[torch.Tensor]:
        idle = [tensor for pool in self._pools.values() for tensor in pool.kept()]
        filling = [tensor for slot in self._rounds.slots for tensor in slot.filling()]
        flying = [it.buffer.flat for it in self._under_way if it.buffer is not None]
        targets = [it.target.memory for it in self._under_way if not it.target.is_shard]
        return [*idle, *filling, *flying, *targets, *self._ways.kept()]

    def bytes_to_send(self) -> int:
        slots = [] if self._comm.is_alone else self._rounds.slots
        trained = [slot for slot in slots if self._layout.trains(slot.bucket)]
        return sum(slot.bytes_to_send(self._dtype(self._layout.buckets[slot.bucket])) for slot in trained)

    def note_scaling(self) -> None:
        if not self._stage.frees:
            self._sent.start_scaling(self._params)

    def note_step(self, *, made: bool) -> None:
        self._is_stepped = True
        self._spent = self._spent or (made and self._stage.frees)
        self._sent.note_step()

    @property
    def _is_eager(self) -> bool:
        """Buckets may go while backward runs; else all go along when gradients are settled."""
        return self._ways.eager

    def _find_late(self) -> list[int]:
        """Parameters with a gradient that has not travelled, whoever has set it."""
        if self._failure is not None:
            return []
        grads = list(map(local_grad, self._params))
        waiting = [index for slot in self._rounds.slots for index in slot.waiting]
        # Lists ask for identity first. Hazard: `count` would go on and ask every tensor whether it equals None.
        if self._stage.frees and grads == [None] * len(grads):
            return waiting
        have = [(i, grad) for i, grad in enumerate(grads) if grad is not None and i in self._rounds.slot_of]
        return waiting + [i for i, grad in have if self._stage.frees or self._is_unsent(i, grad)]

    def _is_unsent(self, index: int, grad: torch.Tensor) -> bool:
        return bool(self._unsent[index]) or not self._present[index] or self._sent.is_changed(index, grad)

    def _refuse_late_changes(self) -> None:
        if self._stage.frees:
            index = next((index for index in self._placed if local_grad(self._params[index]) is not None), None)
        else:
            # Hazard: inside DDP's no_sync() gradients are accumulated, but nothing says that they are ready.
            by_backward = [ready or added for ready, added in zip(self._unsent, self._accumulated, strict=True)]
            index = self._sent.changed_too_late(self._params, by_backward)
        if index is not None:
            raise RuntimeError(f"the gradient of {self._layout.params[index].label} {CHANGED_AFTER_REDUCTION}")

    def _late_buckets(self) -> bytes:
        late = {self._rounds.slot_of[index].bucket for index in self._late}
        return bytes(slot.bucket in late for slot in self._rounds.slots)

    def _present_flags(self) -> bytes:
        if self._stage.frees:
            return bytes(self._present)
        return bytes([param.grad is not None for param in self._params])

    def _start_over(self) -> None:
        self._rounds.start_over()
        self._under_way.start_over()
        self._unsent = bytearray(len(self._params))

    @torch.no_grad()
    def _send(self, slot: Slot) -> None:
        """If it raises, nothing was sent."""
        self._comm.group.line.at(partial(self._layout.name_bucket, slot.bucket, "gradients"))
        for index in slot.waiting:
            self._present[index] = 1
        grads = map(self._take, slot.members)
        if self._comm.is_alone:
            self._keep(slot, grads)
        else:
            self._under_way.add(slot.send(grads, self._target(slot), ours=self._stage.frees))
        self._count(slot)

    def _send_surely(self, slot: Slot, *, wanted: bool = True) -> None:
        """Other ranks rely on it. What is not `wanted`, or cannot be sent, goes as zeros that nobody will use."""
        if wanted and self._failure is None:
            try:
                self._send(slot)
                return
            except Exception as failure:
                self._fail(failure)
        if not self._comm.is_alone:
            with self._comm.group.line.relied_on():
                self._under_way.add(slot.send_zeros(self._target(slot)))
        self._count(slot)

    def _count(self, slot: Slot) -> None:
        self._rounds.note_sent(slot)
        self._under_way.take_in_what_came(self._take_in)

    def _take(self, index: int) -> torch.Tensor | None:
        """The gradient of a parameter, which is on its way then."""
        param = self._params[index]
        offered = self._offered.pop(index, None)
        grad = local_grad(param) if offered is None else offered
        self._rounds.note_taken(index)
        self._unsent[index] = 0
        if self._is_in_scaled_shard(index):
            return None
        self._accumulated[index] = 0
        self._present[index] |= grad is not None
        if self._stage.frees:
            param.grad = None
        else:
            self._sent.note(index, grad if offered is None else None)
        return grad

    def _keep(self, slot: Slot, grads: Grads) -> None:
        """There are no other ranks: the shard is the whole bucket."""
        buffer = slot.as_buffer(self.shard(slot.bucket))
        with self._comm.clock.part(Label.PACK, slot.bucket):
            if slot.holds and self._adds:
                slot.packing.add(grads, buffer)
            else:
                slot.packing.pack(grads, buffer)
        slot.holds = True

    def _take_in(self, sending: Sending) -> None:
        try:
            with self._comm.clock.part(Label.RECEIVE, sending.slot.bucket):
                self._receive(sending)
        except Exception as failure:
            self._fail(failure)

    def _missing(self) -> str:
        return self._under_way.name_missing(self._rounds.sent, self._layout)

    @torch.no_grad()
    def _receive(self, sending: Sending) -> None:
        slot, arriving, (memory, is_shard), *_ = sending
        self._comm.group.line.at(partial(self._layout.name_bucket, slot.bucket, "gradients"))
        arriving.wait()
        slot.give_back(sending)
        shard = self._filled(slot)
        if not sending.wanted:
            if is_shard:
                shard.zero_()
            return
        if not is_shard:
            shard.add_(memory) if slot.holds and self._adds else shard.copy_(memory)
        slot.holds = True

    def _target(self, slot: Slot) -> Target:
        """The shard itself, unless it has something that must stay or is about to get something."""
        shard = self._filled(slot)
        occupied = slot.holds and self._adds
        if occupied or any(sending.slot is slot for sending in self._under_way):
            return Target(torch.empty_like(shard), is_shard=False)
        return Target(shard, is_shard=True)

    def _filled(self, slot: Slot) -> torch.Tensor:
        """A shard without the padding at its end."""
        return self.shard(slot.bucket)[: slot.packing.shards[self._comm.group.rank].length]

    def _warn_of_old_grads(self) -> None:
        self._spent = False
        warn_user(
            "gradients of the last step were not cleared, so this backward pass adds to them. "
            "Call optimizer.zero_grad() after each step."
        )
