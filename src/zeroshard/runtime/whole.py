"""Whole parameters: each is updated by the one rank that owns it, with the gradient that lies in `param.grad`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch.autograd.graph import increment_version

from ..comm.agreement import Trouble, compare, raise_failure
from ..comm.collectives import Comm
from ..labels import Label
from ..layout.boxes import extent
from ..layout.layout import Layout
from ..state.compat import SavedState, local_dict
from ..state.dcp import CutTensor, nothing_of
from ..state.records import StateRecord
from .grad_check import GradCheck
from .inner import ParamGroup, ShardOptimizer
from .loading import load
from .nonfinite import Lot
from .param_sync import ParamSync
from .parts import Kind
from .rooms import Wanted, whole_room
from .step import PARTLY, Attempt, Closure, Engine, Room, SharedClosure
from .store import Store
from .wrapping import put_together


class WholeEngine(Engine):
    """The inner optimizer holds the user's own parameters, those that this rank owns."""

    inner: ShardOptimizer
    sync: ParamSync

    def __init__(self, comm: Comm, kind: Kind, store: Store) -> None:
        super().__init__(comm, store)
        self._kind = kind
        self.sync = ParamSync(comm)
        self._undelivered = b""

    def prepare(self, layout: Layout, groups: Sequence[ParamGroup]) -> None:
        params = [param for group in groups for param in group["params"]]
        new = layout.owned_by(self.comm.group.rank, first_bucket=len(self.layout.buckets))
        owned = {id(params[index]) for index in new}
        known = len(self._members)
        if not known:
            self.inner = self._kind.recipe.build(owned)
        else:
            self.inner.add_groups(groups[:known], groups[known:], owned)

    def move_params(self, layout: Layout, groups: Sequence[ParamGroup]) -> None:
        self.store.prepare(layout, [param for group in groups for param in group["params"]])

    def take_back(self, first_group: int) -> None:
        self.inner.drop_groups(first_group)
        self.store.take_back()

    def state(self) -> dict[Any, Any]:
        return self.inner.optimizer.state

    def replace_state(self, state: Any) -> None:
        self.inner.optimizer.state = state

    def inner_of(self, index: int) -> ShardOptimizer:  # noqa: ARG002
        return self.inner

    def param_shaped(self, index: int) -> frozenset[str]:  # noqa: ARG002
        return self._kind.traits.param_shaped

    def records(self) -> list[StateRecord]:
        state = self.inner.optimizer.state
        # A look at the state of another rank's parameter leaves an empty entry in a defaultdict: not ours to send.
        mine = self.owned(self.comm.group.rank)
        return [StateRecord(index, None, (), state[param]) for index, param in mine.items() if param in state]

    def rooms(self, wanted: Wanted, *, in_place: bool, param_shaped: frozenset[Any]) -> Room:  # noqa: ARG002
        state = self.inner.optimizer.state

        def room(index: int, key: Any, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            param = self.params[index]
            present = state[param].get(key) if in_place and param in state else None
            return whole_room(present, shape, dtype, param.device)

        return room

    def load(self, saved: SavedState, *, adopt: bool = False) -> Callable[[], None]:
        owned: list[list[int]] = [[] for _ in self.inner.optimizer.param_groups]
        for index in self._owned:
            owned[self.layout.params[index].group].append(index)
        local = put_together(local_dict(saved, owned), self._kind.recipe, self.inner.optimizer)
        return load(self.inner.optimizer, local, foreign=None if adopt else saved.tensors)

    def part(self, index: int) -> CutTensor:
        param = self.params[index].detach()
        if self.layout.owner_of(index) != self.comm.group.rank:
            return nothing_of(param)
        memory = param.as_strided((extent(param.shape, param.stride()),), (1,))
        return CutTensor(memory, param.shape, param.stride(), 0)

    def at_rest(self) -> None:
        self.sync.finish()
        self.store.refresh()

    def bytes_to_send(self) -> tuple[int | None, int]:
        own = (self.params[index].nbytes for index in self._owned if self.layout.params[index].trainable)
        return None, (self.comm.group.size - 1) * sum(own)

    def spread(self) -> Callable[[], None]:
        if self.comm.group.size > 1:
            self.sync.start(self.store.shipment(b"\1" * len(self.params)))
        increment_version(self.params)
        return self.sync.finish

    def _run(self, groups: Sequence[ParamGroup], closure: Closure | None, kwargs: dict[str, Any]) -> Any:
        if self.comm.group.size == 1:
            self.check_groups(groups)
            closure = self._foreseen(closure)
            if self.leaves_out(self._own_grads):
                return None
            self.steps += 1
            return self._inner_step(groups, closure, kwargs)
        call = f"step {self.steps + 1}"
        before = [dict(group) for group in groups]
        attempt = Attempt()
        attempt.require(lambda: self.check_groups(groups))
        attempt.require(self.store.refresh)
        watch = _Watch(
            self.params,
            self._owned,
            self.grad_check,
            grads_are_there=closure is None,
            everything=self._kind.traits.moves_without_grads,
        )
        shared = None if closure is None else SharedClosure(self.comm, call, closure, watch.note_grads)
        if not attempt.failure:
            attempt.update(lambda: self._foreseen(shared))
        attempt.raise_if_shared(shared)
        if self.leaves_out(self._own_grads, attempt.failure):
            return None
        if not attempt.failure:
            used = attempt.result
            attempt.update(lambda: self._inner_step(groups, used, kwargs))
            attempt.raise_if_shared(shared)
            attempt.require(lambda: self.store.refresh(self._owned))
        self._bring_to_all(call, attempt, watch, before)
        return attempt.result

    def _inner_step(self, groups: Sequence[ParamGroup], closure: Closure | None, kwargs: dict[str, Any]) -> Any:
        with self.comm.clock.part(Label.INNER_STEP, self._kind.name):
            return super()._inner_step(groups, closure, kwargs)

    def _own_grads(self) -> Iterator[Lot]:
        for index, param in self.owned(self.comm.group.rank).items():
            if param.grad is not None:
                yield Lot.of(index, param.grad)

    def update(self, groups: Sequence[ParamGroup], grads: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Update some of this rank's parameters with the given gradients, and tell no one.

        Any number of such updates make one step: each starts from the groups as they were before it.
        """
        self.inner.push(groups)
        kept = {param: param.grad for param in grads}
        try:
            for param, grad in grads.items():
                param.grad = grad
            step = self.comm.clock.part(Label.INNER_STEP, self._kind.name)
            with step, self.inner.only({id(param) for param in grads}):
                self.inner.step()
            self.store.refresh(self._owned)
        finally:
            for param, before in kept.items():
                param.grad = before

    def local_step(self, groups: Sequence[ParamGroup], closure: Closure | None, kwargs: dict[str, Any]) -> Any:
        """Update this rank's parameters with the gradients in `param.grad`, and tell no one."""
        self.check_groups(groups)
        self.store.refresh()
        result = self._inner_step(groups, closure, kwargs)
        self.store.refresh(self._owned)
        return result

    def send_bucket(self, bucket: int) -> None:
        """Start bringing the parameters of one bucket to everyone; `sync.finish` ends it."""
        if self.comm.group.size > 1:
            self.sync.start(self.store.bucket_shipment(bucket))

    def _bring_to_all(self, call: str, attempt: Attempt, watch: "_Watch", groups: Sequence[ParamGroup]) -> None:
        """`groups`: as they were before the step."""
        # What an earlier step could not deliver goes along. Whatever follows, nothing of it is forgotten.
        moving = self._undelivered = _either(watch.moving(), self._undelivered)
        attempt.require(lambda: self.store.shipment(moving))
        options = self._hyper_parameters(groups)
        verdict = compare(self.comm, call, moving, attempt.trouble, options=options, measure=watch.measure)
        self._require_same_options(call, verdict, groups)
        first = verdict
        self.steps += 1
        if verdict.trouble < Trouble.UNFIT and not verdict.same_plan:
            # Which gradients there are differs from rank to rank: the owners decide.
            mine = set(self._owned)
            moving = self.comm.union(bytes(flag and i in mine for i, flag in enumerate(moving)))
            attempt.require(lambda: self.store.shipment(moving))
            verdict = compare(self.comm, call, moving, attempt.trouble)
        if verdict.trouble < Trouble.UNFIT:
            with self.comm.group.line.relied_on():
                self.sync.start(self.store.shipment(moving))
                self.sync.finish()
            self._undelivered = b""
        if verdict.trouble:
            raise_failure(self.comm, call, attempt.failure, then=PARTLY)
        self.grad_check.judge(first)  # at the end: a warning may be an error


class _Watch:
    """Which parameters a step moves: those with a gradient, and those that this rank changes without one."""

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        owned: Sequence[int],
        check: GradCheck,
        *,
        grads_are_there: bool,
        everything: bool,
    ) -> None:
        """`grads_are_there`: else a closure makes them, and `note_grads` must follow it."""
        self._params, self._check = params, check
        self._everything = everything
        self.measure: int | None = None
        """The number that ranks compare to see whether their gradients differ."""
        self._flags = bytearray(b"\1" * len(params)) if everything else bytearray(len(params))
        if grads_are_there:
            self.note_grads()
        self._versions = {i: params[i]._version for i in owned if not self._flags[i]}

    def note_grads(self) -> None:
        # Hazard: some optimizers clear gradients in their step, so they are looked at before it.
        flags = bytes([param.grad is not None for param in self._params])
        self._flags = bytearray(_either(flags, bytes(self._flags)) if any(self._flags) else flags)
        # Where everything moves, flags do not say whether ranks have gradients of the same parameters.
        self.measure = None if self._everything else self._check.measure(self._params)

    def moving(self) -> bytes:
        for index, before in self._versions.items():
            self._flags[index] |= self._params[index]._version != before
        return bytes(self._flags)


def _either(flags: bytes, others: bytes) -> bytes:
    return bytes(a | b for a, b in zip_longest(flags, others, fillvalue=0)) if others else flags
