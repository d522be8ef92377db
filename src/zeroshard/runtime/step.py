"""The few lines of a step."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..comm.agreement import Trouble, agree, compare, raise_failure
from ..comm.collectives import Comm
from ..layout.layout import Layout
from ..units import Rank
from .inner import ParamGroup, ShardOptimizer
from .param_sync import ParamSync
from .store import Store

Closure = Callable[[], Any]


class Engine:
    """This rank's share of the work, and the order of it: update what it owns, agree that all is well, bring
    the updates to everyone."""

    def __init__(self, comm: Comm, inner: ShardOptimizer, store: Store) -> None:
        self.comm, self.inner, self.store = comm, inner, store
        self.sync = ParamSync(comm)
        self.layout = Layout.empty(comm.group.size)
        self.params: list[torch.Tensor] = []
        self.steps = 0
        self._owned: tuple[int, ...] = ()

    def extend(self, layout: Layout, params: Sequence[torch.Tensor]) -> None:
        """Take in the parameters that `layout` has beyond the present ones."""
        self.layout = layout
        self.params.extend(params)
        self._owned = layout.owned_by(self.comm.group.rank)
        self.store.extend(layout, params)

    def owned(self, rank: Rank) -> dict[int, torch.Tensor]:
        """The parameters of a rank, by index."""
        return {index: self.params[index] for index in self.layout.owned_by(rank)}

    def run(self, groups: Sequence[ParamGroup], closure: Closure | None, kwargs: dict[str, Any]) -> Any:
        """One step on all ranks. What fails on one rank is raised on all, after the others' updates arrived."""
        self.steps += 1
        if self.comm.group.size == 1:
            self.store.refresh()
            return self._inner_step(groups, closure, kwargs)
        call = f"step {self.steps}"
        attempt = _Attempt()
        attempt.require(self.store.refresh)
        watch = _Watch(self.params, self._owned, grads_are_there=closure is None)
        if not attempt.failure:
            shared = None if closure is None else _SharedClosure(self.comm, call, closure)
            attempt.update(lambda: self._inner_step(groups, shared, kwargs))
            if shared and shared.failed and attempt.failure:
                raise attempt.failure  # on all ranks alike, before anything was updated
            attempt.require(lambda: self.store.refresh(self._owned))
        self._bring_to_all(call, attempt, watch.moving())
        return attempt.result

    def update(self, groups: Sequence[ParamGroup], grads: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Update some of this rank's parameters with the given gradients, and tell no one.

        Any number of such updates make one step: each starts from the groups as they were before it.
        """
        self.inner.push(groups)
        kept = {param: param.grad for param in grads}
        try:
            for param, grad in grads.items():
                param.grad = grad
            with self.inner.only({id(param) for param in grads}):
                self.inner.step()
            self.store.refresh(self._owned)
        finally:
            for param, before in kept.items():
                param.grad = before

    def send_bucket(self, bucket: int) -> None:
        """Start bringing the parameters of one bucket to everyone; `sync.finish` ends it."""
        if self.comm.group.size > 1:
            self.sync.start(self.store.bucket_shipment(bucket))

    def _inner_step(self, groups: Sequence[ParamGroup], closure: Closure | None, kwargs: dict[str, Any]) -> Any:
        self.inner.push(groups)
        result = self.inner.step(*([] if closure is None else [closure]), **kwargs)
        self.inner.pull(groups)
        return result

    def _bring_to_all(self, call: str, attempt: "_Attempt", moving: bytes) -> None:
        verdict = compare(self.comm, call, moving, attempt.trouble)
        if verdict.trouble < Trouble.UNFIT:
            if not verdict.same_plan:
                # Which gradients there are differs from rank to rank: the owners decide.
                mine = set(self._owned)
                moving = self.comm.union(bytes(flag and i in mine for i, flag in enumerate(moving)))
            self.sync.start(self.store.shipment(moving))
            self.sync.finish()
        if verdict.trouble:
            raise_failure(self.comm, call, attempt.failure)


class _Watch:
    """Which parameters a step moves: those with a gradient, and those that this rank changes without one."""

    def __init__(self, params: Sequence[torch.Tensor], owned: Sequence[int], *, grads_are_there: bool) -> None:
        """`grads_are_there`: what has a gradient is known now, and not only after the step."""
        self._params = params
        self._flags = self._with_grads() if grads_are_there else None
        watched = [i for i in owned if not (self._flags and self._flags[i])]
        self._versions = {i: params[i]._version for i in watched}

    def moving(self) -> bytes:
        flags = self._flags or self._with_grads()
        for index, before in self._versions.items():
            flags[index] |= self._params[index]._version != before
        return bytes(flags)

    def _with_grads(self) -> bytearray:
        return bytearray([param.grad is not None for param in self._params])


class _Attempt:
    """What became of this rank's part of a step."""

    def __init__(self) -> None:
        self.result: Any = None
        self.failure: Exception | None = None
        self.trouble = Trouble.NONE

    def update(self, action: Callable[[], Any]) -> None:
        """The inner step."""
        try:
            self.result = action()
        except Exception as error:
            self.failure, self.trouble = error, Trouble.FAILED

    def require(self, check: Callable[[], None]) -> None:
        """A check without which this rank cannot take part in what follows."""
        try:
            check()
        except Exception as error:
            self.failure, self.trouble = self.failure or error, Trouble.UNFIT


class _SharedClosure:
    """The user's closure, after which all ranks learn whether it failed on one, before any of them updates."""

    def __init__(self, comm: Comm, call: str, closure: Closure) -> None:
        self._comm, self._call, self._closure = comm, call, closure
        self._calls = 0
        self.failed = False

    def __call__(self) -> Any:
        self._calls += 1
        failure: Exception | None = None
        loss = None
        try:
            loss = self._closure()
        except Exception as error:
            failure = error
        self.failed = True
        agree(self._comm, f"closure {self._calls} of {self._call}", (), failure)
        self.failed = False
        return loss
