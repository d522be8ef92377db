"""Flat shards: every rank updates its slice of every bucket, and all slices go to everyone."""

from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import ExitStack, suppress
from functools import partial
from itertools import chain, compress
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import increment_version

from ..comm.agreement import compare, raise_failure
from ..comm.collectives import Comm
from ..errors import BindingError
from ..labels import Label
from ..layout.layout import Bucket, Layout, Piece
from ..policies import MasterWeights, Offload
from ..state.compat import SavedState
from ..state.dcp import CutTensor, nothing_of
from ..state.records import MASTER, StateRecord
from ..units import Rank
from .beginnings import begin
from .grads import Gradients, LocalGrads
from .host import Hosts
from .inner import Inner, ParamGroup, ShardOptimizer
from .masters import memory_of
from .nonfinite import Lot
from .offload import Offloading
from .param_sync import ShardSync
from .parts import Kind, Part
from .rooms import Wanted
from .rows import Rows
from .segments import Segment
from .state_view import FlatState, ParamState
from .step import PARTLY, Attempt, Closure, Engine, Room, SharedClosure
from .store import FlatStore
from .team import CLASS, Team


class Share(NamedTuple):
    """A kind of optimizer, and how it takes its parameters."""

    kind: Kind
    cut: bool
    """Pieces of their memory, which it updates as it would update the whole; else each belongs to one rank."""


class FlatEngine(Engine):
    """The inner optimizer holds segments of this rank's shards."""

    store: FlatStore
    sync: ShardSync

    def __init__(
        self, comm: Comm, kinds: Sequence[Share], masters: MasterWeights | None, offload: Offload | None = None
    ) -> None:
        super().__init__(comm, FlatStore())
        rank, hosts = comm.group.rank, Hosts(offload) if offload else None
        self.memory = memory_of(rank, self.store, masters, hosts, comm.clock)
        self._part_of_group: dict[int, int] = {}
        self._offloading = Offloading(hosts, self.memory, comm.clock) if hosts else None
        self.parts = [Part(rank, kind, self.memory, cut=cut) for kind, cut in kinds]
        self.inner: Inner = Team(self.parts, comm.clock)
        self.grads: Gradients = LocalGrads(comm, masters)
        self.sync = ShardSync(comm)
        self._rows = Rows(comm)
        self.waits = True
        """A step ends when all parameters have arrived; else they are waited for where they are needed."""
        self._index_of: dict[int, int] = {}
        self.bucket_of: dict[int, int] = {}
        """Where each parameter lies, by its id."""

    def prepare(self, layout: Layout, groups: Sequence[ParamGroup]) -> None:
        self.store.prepare(layout, [param for group in groups for param in group["params"]])
        self.memory.extend(layout)
        known, alone = sum(len(part.numbers) for part in self.parts), len(self.parts) == 1
        for part in self.parts:
            new = [n for n, it in enumerate(groups) if n >= known and (alone or it[CLASS] == part.name)]
            part.prepare(layout, groups, [*part.numbers, *new])
        self._part_of_group = {number: n for n, part in enumerate(self.parts) for number in part.numbers}

    def take_back(self, first_group: int) -> None:
        for part in self.parts:
            part.take_back(self.layout, first_group)
        self.memory.extend(self.layout)
        self.store.take_back()

    def extend(self, layout: Layout, groups: Sequence[ParamGroup]) -> None:
        super().extend(layout, groups)
        self.sync.layout = layout
        self.grads.extend(layout, self.params)
        self.memory.remember(self.params)
        self._index_of = {id(param): index for index, param in enumerate(self.params)}
        self.bucket_of = {id(self.params[param]): bucket.index for bucket in layout.buckets for param in bucket.params}

    def broadcast(self, source: Rank, *, first_bucket: int = 0) -> None:
        """Make all parameters those of one rank of `Comm.everyone`, from a bucket on."""
        with self.comm.clock.part(Label.EQUAL):
            for bucket in self.layout.buckets[first_bucket:]:
                if not self.comm.is_alone and bucket.numel:
                    self.comm.everyone.broadcast(self.store.buffer(bucket.index), source).wait()
        self.memory.doubt()

    def reduce_by(self, grads: Gradients) -> None:
        """Take gradients from there from now on."""
        grads.extend(self.layout, self.params)
        self.grads, self.reduces = grads, True

    def state(self) -> FlatState:
        return FlatState.of(self.params, self.parts, self._state_of, self.comm.group.size)

    def replace_state(self, state: Any) -> None:
        self.state().replace(state)

    def _state_of(self, param: torch.Tensor) -> ParamState | None:
        index = self._index_of.get(id(param))
        if index is None:
            return None
        return ParamState.of(self.parts[self._part_of(index)], self.layout, index, self.comm.group.rank)

    def records(self) -> list[StateRecord]:
        self.take_edits()
        return [record for part in self.parts for record in part.records(self.layout.params)]

    def take_edits(self) -> None:
        """Take over what was done to parameters and to values of `optimizer.state` since the last step."""
        self.memory.before_update(self.params)
        for part in self.parts:
            part.take_edits()

    def holds(self, index: int, key: Any) -> bool:
        piece = self.layout.piece_of(index, self.comm.group.rank)
        return piece is not None and (key != MASTER or self.memory.covers(piece.bucket))

    def learn(self, param_shaped: frozenset[Any]) -> None:
        for part in self.parts:
            part.holdings.learn(param_shaped)

    def rooms(self, wanted: Wanted, *, in_place: bool, param_shaped: frozenset[Any]) -> Room:
        rooms = []
        for number, part in enumerate(self.parts):
            own = {it for it in wanted if self._part_of(it[0]) == number}
            rooms.append(part.rooms(self.layout, own, param_shaped, in_place=in_place))

        def room(index: int, key: Any, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            piece = self.layout.piece_of(index, self.comm.group.rank)
            assert piece is not None, "asked for what this rank does not hold"
            return rooms[self._part_of(index)](piece, key, shape, dtype)

        return room

    def load(self, saved: SavedState, *, adopt: bool = False) -> Callable[[], None]:
        with ExitStack() as undo:  # also where the second fails
            undo.callback(self._rows.load())
            for part in self.parts:
                undo.callback(part.load(saved, self.layout.params, adopt=adopt))
            return undo.pop_all().close

    def kept_doubts(self) -> Callable[[], None]:
        return self._rows.kept()

    def inner_of(self, index: int) -> ShardOptimizer:
        return self.parts[self._part_of(index)].inner

    def param_shaped(self, index: int) -> frozenset[str]:
        return self.parts[self._part_of(index)].traits.param_shaped

    def _part_of(self, index: int) -> int:
        return self._part_of_group[self.layout.params[index].group]

    @property
    def segments(self) -> Iterator[Segment]:
        return chain.from_iterable(self.parts)

    def part(self, index: int) -> CutTensor:
        piece = self.layout.piece_of(index, self.comm.group.rank)
        return nothing_of(self.params[index]) if piece is None else self._part(piece, self.memory.own(piece))

    def precise_part(self, index: int) -> CutTensor | None:
        piece = self.layout.piece_of(index, self.comm.group.rank)
        copy = None if piece is None else self.memory.precise(piece)
        return None if piece is None or copy is None else self._part(piece, copy)

    def _part(self, piece: Piece, memory: torch.Tensor) -> CutTensor:
        spec = self.layout.params[piece.param]
        return CutTensor(memory, spec.shape, spec.stride, piece.in_param.start)

    def at_rest(self) -> None:
        self.sync.finish()
        self.store.refresh()

    def kept(self, groups: Sequence[ParamGroup]) -> Callable[[], None]:
        put_back = super().kept(groups)

        def put_all_back() -> None:
            with suppress(BindingError):  # all that can be is where it belongs
                self.bind_anew()
            put_back()
            self.memory.after_update(self.segments)

        return put_all_back

    def switch(self, groups: Sequence[ParamGroup], mode: str) -> None:
        self.take_edits()
        super().switch(groups, mode)
        self.bind_anew()
        self.memory.after_update(self.segments)

    def bind_anew(self) -> None:
        """What inner optimizers have put elsewhere (`param.data = ...`) is in the shards. State that rests in host
        memory has its own time for it."""
        with ExitStack() as each:  # also where one fails
            for part in self.parts if self._offloading is None else ():
                each.callback(part.holdings.bind_anew)

    def spread(self) -> Callable[[], None]:
        self.send(b"\1" * len(self.params))
        self.memory.doubt()
        return self.sync.finish

    def held(self) -> dict[str, list[torch.Tensor]]:
        known = super().held()
        grads, staging = [*known["gradients"], *self.grads.slices()], [*known["staging"], *self.grads.staging()]
        return {**known, "gradients": grads, "master weights": self.memory.copies(), "staging": staging}

    def bytes_to_send(self) -> tuple[int | None, int]:
        return self.grads.bytes_to_send() if self.reduces else None, self.sync.bytes_to_send()

    @property
    def is_reducing(self) -> bool:
        return self.grads.busy

    def drop_placeholders(self) -> None:
        self.grads.drop_placeholders()

    def clear_grads(self, *, to_none: bool) -> None:
        self.grads.clear(to_none=to_none)

    def settle(self, call: str, groups: Sequence[ParamGroup], given: Callable[[], list[str]] = list) -> bytes:
        """All gradients are where they belong; a flag for each parameter that has one. Raises on all ranks alike.

        `given` reads arguments of the call, which must be the same on all ranks: it may raise.
        """
        with self.comm.clock.part(Label.SETTLE):
            return self._settle(call, groups, given)

    def _settle(self, call: str, groups: Sequence[ParamGroup], given: Callable[[], list[str]]) -> bytes:
        self.sync.finish()
        attempt, arguments = Attempt(), list[str]()
        attempt.require(lambda: arguments.extend(given()))
        attempt.require(lambda: self.check_groups(groups))
        attempt.require(lambda: self.store.refresh(shapes=not self.reduces))
        attempt.require(lambda: self._rows.require_equal_state(self.steps + 1))
        # Hazard: a rank that alone has called `ddp_hook()` would settle by other messages than the rest.
        stated = f"{call}, with gradients of {self.grads.origin}"
        options = self._hyper_parameters(groups) + "\n".join(arguments).encode()
        measure = None if self.reduces else self.grad_check.measure(self.params)
        verdict = compare(self.comm, stated, self.grads.statement(), attempt.trouble, options=options, measure=measure)
        if verdict.trouble:
            raise_failure(self.comm, call, attempt.failure)
        self._require_same_options(call, verdict, groups, arguments)
        self.grad_check.judge(verdict)
        if self._rows.in_doubt:
            self.check_drift(call, self.steps + 1)
            self._rows.in_doubt = False
        return self.grads.settle(same=verdict.same_plan)

    def _run(self, groups: Sequence[ParamGroup], closure: Closure | None, kwargs: dict[str, Any]) -> Any:
        try:
            return self._make_step(groups, closure, kwargs)
        finally:
            self.grads.note_step(made=False)

    def _make_step(self, groups: Sequence[ParamGroup], closure: Closure | None, kwargs: dict[str, Any]) -> Any:
        call = f"step {self.steps + 1}"
        update, attempt = _Update(self, call, groups), Attempt()
        shared = None if closure is None else update.shared(closure)
        if shared is None:
            update.settle()
        attempt.update(lambda: self._foreseen(shared))
        attempt.raise_if_shared(shared)
        if update.is_left_out(attempt.failure):
            return None
        used = attempt.result
        if shared is None:
            attempt.update(update.fill)
        if not attempt.failure:
            attempt.update(lambda: self._inner_step(groups, used, kwargs))
            attempt.raise_if_shared(shared)
        attempt.require(update.end)
        self.steps += 1
        if closure is None:
            self.send(update.moving)  # whatever the verdict: ranks where it failed must not part from the others
        verdict = compare(self.comm, f"the end of {call}", b"", attempt.trouble)
        if closure is not None:
            self.send(update.moving)  # only now: a rank whose optimizer calls its closure once more is not here yet
        if self.waits or verdict.trouble:
            self.sync.finish()
        if verdict.trouble:
            self._rows.part(call)
            raise_failure(self.comm, call, attempt.failure, then=PARTLY)
        self.grads.note_step(made=True)
        return attempt.result

    def moving(self, present: bytes) -> bytes:
        """A flag for each parameter that a step moves: some optimizers change those without gradients, too."""
        moves_all = [part.traits.moves_without_grads for part in self.parts]
        if not any(moves_all):
            return present
        groups = {number for part, flag in zip(self.parts, moves_all, strict=True) if flag for number in part.numbers}
        return bytes(flag or spec.group in groups for flag, spec in zip(present, self.layout.params, strict=True))

    def _begin(self, undo: ExitStack) -> None:
        if self._offloading is None:
            super()._begin(undo)
            return
        chosen = self._find_trainable()
        for part in self.parts:
            if self._begins_neutrally(part.inner):
                self._offloading.each(part, partial(begin, part.inner, chosen, undo))

    def _find_trainable(self) -> Set[int]:
        # Hazard: segments always require gradients, and may hold parameters that were frozen since.
        state = self.state()
        chosen = bytes(param.requires_grad or param in state for param in self.params)
        if 0 in chosen:
            for part in self.parts:
                part.split(chosen)
        return {id(segment.param) for segment in self.segments if chosen[segment.pieces[0].param]}

    def _inner_step(self, groups: Sequence[ParamGroup], closure: Closure | None, kwargs: dict[str, Any]) -> Any:
        if self._offloading is None:
            return super()._inner_step(groups, closure, kwargs)
        with torch.enable_grad():
            loss = None if closure is None else closure()
        self.inner.push(groups)
        results = [self._offloading.step(part, kwargs) for part in self.parts]
        self.inner.pull(groups)
        return results[0] if closure is None else loss

    def send(self, moving: bytes) -> None:
        """Start bringing the flagged parameters to everyone, those that a forward pass needs first at the head."""
        with self.comm.group.line.relied_on():
            for bucket in reversed(self.layout.buckets):
                if 0 not in moving or any(map(moving.__getitem__, bucket.params)):
                    self.sync.start(bucket, self.store.buffer(bucket.index))
        # Autograd must see an update, local or remote, as the in-place change that it is.
        increment_version([*compress(self.params, moving)] if 0 in moving else self.params)
        self.memory.remember(self.params)


class _Update:
    """Gradients into the inner optimizer's tensors, and what it makes of them out again."""

    def __init__(self, engine: FlatEngine, call: str, groups: Sequence[ParamGroup]) -> None:
        self._engine, self._call, self._groups = engine, call, groups
        self.moving = self._present = bytes(len(engine.params))

    def shared(self, closure: Closure) -> SharedClosure:
        # Settles also where it failed: ranks that had gradients by then have sent them, and others have yet to follow.
        then, otherwise = self.settle_and_fill, self.settle
        return SharedClosure(self._engine.comm, self._call, closure, then, otherwise, again=self.bring)

    def settle(self) -> None:
        """Gradients are there. Raises on all ranks alike."""
        self._present = self._engine.settle(self._call, self._groups)
        moving = self._engine.moving(self._present)
        # What a closure has moved stays moving where the next one has no gradient of it: others have to get it back.
        self.moving = bytes(map(max, moving, self.moving)) if any(self.moving) else moving

    def bring(self) -> None:
        """What an optimizer has moved since its last closure is where the next one looks for it: on all ranks."""
        engine, call, attempt = self._engine, f"another closure of {self._call}", Attempt()
        attempt.require(self._write_back)
        if compare(engine.comm, call, b"", attempt.trouble).trouble:
            raise_failure(engine.comm, call, attempt.failure)
        engine.send(self.moving)
        engine.sync.finish()

    def fill(self) -> None:
        """The inner optimizer has them."""
        with self._engine.comm.clock.part(Label.HAND_OVER):
            self._fill()

    def _fill(self) -> None:
        engine = self._engine
        engine.take_edits()
        if 0 in self._present:
            for part in engine.parts:
                part.split(self._present)
        for segment in engine.segments:
            has = self._present[segment.pieces[0].param]
            segment.param.grad = segment.of(engine.grads.shard(segment.bucket)) if has else None

    def is_left_out(self, failure: Exception | None) -> bool:
        """After gradients are settled, perhaps filled in, too. Raises on all ranks alike, `failure` too."""
        left_out = True
        try:
            left_out = self._engine.leaves_out(self._lots, failure)
        finally:
            if left_out:
                self._empty()
        return left_out

    def _lots(self) -> Iterator[Lot]:
        for bucket in self._engine.layout.buckets:
            if any(map(self._present.__getitem__, bucket.params)):
                yield Lot(self._engine.grads.shard(bucket.index), partial(self._members, bucket))

    def _members(self, bucket: Bucket) -> Iterator[tuple[int, torch.Tensor]]:
        rank, shard = self._engine.comm.group.rank, self._engine.grads.shard(bucket.index)
        base = bucket.shards[rank].start
        for piece in bucket.pieces_of(rank):
            if self._present[piece.param]:
                yield piece.param, shard[piece.in_bucket.start - base : piece.in_bucket.stop - base]

    def settle_and_fill(self) -> None:
        self.settle()
        self.fill()

    def end(self) -> None:
        """Also after an update that failed."""
        with ExitStack() as each:
            each.callback(self._empty)
            each.callback(self._write_back)

    def _write_back(self) -> None:
        moved = (it for it in self._engine.segments if self.moving[it.pieces[0].param])
        with ExitStack() as each:
            each.callback(self._engine.memory.after_update, moved)
            each.callback(self._engine.bind_anew)

    def _empty(self) -> None:
        for segment in self._engine.segments:
            segment.param.grad = None
