"""Flat shards: every rank updates its slice of every bucket, and all slices go to everyone."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import compress
from typing import Any

import torch
from torch.autograd.graph import increment_version

from ..comm.agreement import compare, raise_failure
from ..comm.collectives import Comm
from ..layout.layout import Layout, Piece
from ..policies import MasterWeights
from ..state.compat import SavedState
from ..state.dcp import CutTensor, nothing_of
from ..state.records import MASTER, StateRecord
from ..units import Rank
from .cut_state import CutState
from .grads import Gradients, LocalGrads
from .inner import ParamGroup, Recipe
from .masters import MasterMemory, ShardMemory
from .param_sync import ShardSync
from .segments import Holdings
from .selftest import Traits
from .step import Attempt, Closure, Engine, Room, SharedClosure
from .store import FlatStore


class FlatEngine(Engine):
    """The inner optimizer holds segments of this rank's shards."""

    store: FlatStore

    def __init__(self, comm: Comm, recipe: Recipe, traits: Traits, masters: MasterWeights | None, *, cut: bool) -> None:
        super().__init__(comm, recipe, FlatStore())
        rank = comm.group.rank
        self.memory = MasterMemory(rank, self.store, masters) if masters else ShardMemory(rank, self.store)
        self.holdings = Holdings(rank, self.memory.of, cut=cut, param_shaped=traits.param_shaped)
        self._cut_state = CutState(self.holdings, self.memory)
        self.grads: Gradients = LocalGrads(comm, masters)
        self.sync = ShardSync(comm)
        self.waits = True
        """A step ends when all parameters have arrived; else they are waited for where they are needed."""
        self._moves_all = traits.moves_without_grads
        self.bucket_of: dict[int, int] = {}
        """Where each parameter lies, by its id."""
        self._members_of: list[list[int]] = []

    def prepare(self, layout: Layout, groups: Sequence[ParamGroup], first_group: int = 0) -> None:
        self.store.prepare(layout, [param for group in groups for param in group["params"]])
        self.memory.extend(layout)
        self.holdings.extend(layout, len(groups))
        own = self.holdings.inner_groups(groups)
        if not first_group:
            self.inner = replace(self._recipe, groups=own).build(self.holdings.ids())
            return
        self.inner.push(groups[:first_group])
        for group in own[first_group:]:
            self.inner.add_group(group, self.holdings.ids())

    def take_back(self, first_group: int) -> None:
        self.inner.drop_groups(first_group)
        self.holdings.take_back(self.layout, first_group)
        self.memory.extend(self.layout)
        self.store.take_back()

    def extend(self, layout: Layout, groups: Sequence[ParamGroup]) -> None:
        super().extend(layout, groups)
        self.grads.extend(layout, self.params)
        self.memory.remember(self.params)
        self.bucket_of = {
            id(self.params[piece.param]): piece.bucket for bucket in layout.buckets for piece in bucket.pieces
        }
        self._members_of = [list({piece.param: None for piece in bucket.pieces}) for bucket in layout.buckets]

    def broadcast(self, source: Rank, *, first_bucket: int = 0) -> None:
        """Make all parameters those of one rank, from a bucket on."""
        for bucket in self.layout.buckets[first_bucket:]:
            if self.comm.group.size > 1 and bucket.numel:
                self.comm.broadcast(self.store.buffer(bucket.index), source).wait()
        self.memory.doubt()

    def reduce_by(self, grads: Gradients) -> None:
        """Take gradients from there from now on."""
        grads.extend(self.layout, self.params)
        self.grads, self.reduces = grads, True

    def state(self) -> dict[Any, Any]:
        return self._cut_state.by_param(self.inner.optimizer, self.params)

    def records(self) -> list[StateRecord]:
        self.memory.before_update(self.params)  # a parameter that was changed since is what its copy is, too
        return self._cut_state.records(self.inner.optimizer, self.layout.params)

    def holds(self, index: int, key: Any) -> bool:
        piece = self.layout.piece_of(index, self.comm.group.rank)
        return piece is not None and (key != MASTER or self.memory.covers(piece.bucket))

    def learn(self, param_shaped: frozenset[Any]) -> None:
        self.holdings.learn(param_shaped)

    def rooms(self, *, in_place: bool, param_shaped: frozenset[Any]) -> Room:
        rooms = self._cut_state.rooms(self.inner.optimizer, self.layout, param_shaped, in_place=in_place)

        def room(index: int, key: Any, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            piece = self.layout.piece_of(index, self.comm.group.rank)
            assert piece is not None, "asked for what this rank does not hold"
            return rooms(piece, key, shape, dtype)

        return room

    def load(self, saved: SavedState, *, adopt: bool = False) -> Callable[[], None]:
        return self._cut_state.load(self.inner.optimizer, saved, self.layout.params, adopt=adopt)

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

    def spread(self) -> Callable[[], None]:
        self._send(b"\1" * len(self.params))
        self.memory.doubt()
        return self.sync.finish

    @property
    def is_reducing(self) -> bool:
        return self.grads.busy

    def clear_grads(self, *, to_none: bool) -> None:
        self.grads.clear(to_none=to_none)

    def settle(self, call: str, groups: Sequence[ParamGroup]) -> bytes:
        """All gradients are where they belong; a flag for each parameter that has one. Raises on all ranks alike."""
        self.sync.finish()
        attempt = Attempt()
        attempt.require(lambda: self.check_groups(groups))
        attempt.require(lambda: self.store.refresh(shapes=not self.reduces))
        # Hazard: a rank that alone has called `ddp_hook()` would settle by other messages than the rest.
        stated = f"{call}, with gradients of {self.grads.origin}"
        verdict = compare(
            self.comm, stated, self.grads.statement(), attempt.trouble, options=self._hyper_parameters(groups)
        )
        if verdict.trouble:
            raise_failure(self.comm, call, attempt.failure)
        self._require_same_options(call, verdict, groups)
        return self.grads.settle(same=verdict.same_plan)

    def _run(self, groups: Sequence[ParamGroup], closure: Closure | None, kwargs: dict[str, Any]) -> Any:
        call = f"step {self.steps + 1}"
        update = _Update(self, call, groups, everything=self._moves_all)
        attempt = Attempt()
        if closure is None:
            update.settle()
            attempt.update(update.fill)
            if not attempt.failure:
                attempt.update(lambda: self._inner_step(groups, None, kwargs))
        else:
            shared = SharedClosure(self.comm, call, closure, update.settle_and_fill)
            attempt.update(lambda: self._inner_step(groups, shared, kwargs))
            if shared.failed and attempt.failure:
                raise attempt.failure  # on all ranks alike, before anything was updated
        attempt.require(update.end)
        self.steps += 1
        if closure is None:
            self._send(update.moving)  # whatever the verdict: ranks where it failed must not part from the others
        verdict = compare(self.comm, f"the end of {call}", b"", attempt.trouble)
        if closure is not None:
            self._send(update.moving)  # only now: a rank whose optimizer calls its closure once more is not here yet
        if self.waits or verdict.trouble:
            self.sync.finish()
        if verdict.trouble:
            raise_failure(self.comm, call, attempt.failure)
        self.grads.spend()
        return attempt.result

    def _send(self, moving: bytes) -> None:
        """Start bringing the flagged parameters to everyone, those that a forward pass needs first at the head."""
        for bucket in reversed(self.layout.buckets):
            if 0 not in moving or any(map(moving.__getitem__, self._members_of[bucket.index])):
                self.sync.start(bucket, self.store.buffer(bucket.index))
        # Autograd must see an update, local or remote, as the in-place change that it is.
        increment_version([*compress(self.params, moving)] if 0 in moving else self.params)
        self.memory.remember(self.params)


class _Update:
    """Gradients into the inner optimizer's tensors, and what it makes of them out again."""

    def __init__(self, engine: FlatEngine, call: str, groups: Sequence[ParamGroup], *, everything: bool) -> None:
        """`everything`: the optimizer changes parameters that have no gradient, too."""
        self._engine, self._call, self._groups, self._everything = engine, call, groups, everything
        self.moving = self._present = bytes(len(engine.params))

    def settle(self) -> None:
        """Gradients are there. Raises on all ranks alike."""
        self._present = self._engine.settle(self._call, self._groups)
        self.moving = b"\1" * len(self._present) if self._everything else self._present

    def fill(self) -> None:
        """The inner optimizer has them."""
        engine = self._engine
        engine.memory.before_update(engine.params)
        if 0 in self._present:
            engine.holdings.split(self._present, engine.inner.optimizer)
        for segment in engine.holdings:
            has = self._present[segment.pieces[0].param]
            segment.param.grad = segment.of(engine.grads.shard(segment.bucket)) if has else None

    def settle_and_fill(self) -> None:
        self.settle()
        self.fill()

    def end(self) -> None:
        """Also after an update that failed."""
        engine = self._engine
        engine.memory.after_update(segment for segment in engine.holdings if self.moving[segment.pieces[0].param])
        for segment in engine.holdings:
            segment.param.grad = None
