"""The few lines of a step."""

import logging
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch

from ..checkpoint.compat import describe_groups
from ..comm.agreement import Trouble, agree, compare, raise_failure, raise_first_difference
from ..comm.collectives import Comm
from ..errors import BindingError
from ..layout.layout import Layout
from ..units import Rank
from .inner import ParamGroup, ShardOptimizer
from .param_sync import ParamSync
from .store import Store

Closure = Callable[[], Any]

_log = logging.getLogger(__name__)


class Engine:
    """This rank's share of the work, and the order of it: update what it owns, agree that all is well, bring
    the updates to everyone."""

    def __init__(self, comm: Comm, inner: ShardOptimizer, store: Store, *, moves_all: bool) -> None:
        """`moves_all`: the optimizer changes parameters that have no gradient, too."""
        self.comm, self.inner, self.store, self._moves_all = comm, inner, store, moves_all
        self.sync = ParamSync(comm)
        self.layout = Layout.empty(comm.group.size)
        self.params: list[torch.Tensor] = []
        self.steps = 0
        self._owned: tuple[int, ...] = ()
        self._members: list[list[int]] = []
        self._undelivered = b""

    def extend(self, layout: Layout, groups: Sequence[ParamGroup]) -> None:
        """Take in the parameters that `layout` has beyond the present ones. `groups` are all groups."""
        params = [param for group in groups for param in group["params"]][len(self.params) :]
        self.layout = layout
        self.params.extend(params)
        self._members = _ids(groups)
        self._owned = layout.owned_by(self.comm.group.rank)
        self.store.extend(layout, params)

    def owned(self, rank: Rank) -> dict[int, torch.Tensor]:
        """The parameters of a rank, by index."""
        return {index: self.params[index] for index in self.layout.owned_by(rank)}

    def run(self, groups: Sequence[ParamGroup], closure: Closure | None, kwargs: dict[str, Any]) -> Any:
        """One step on all ranks. What fails on one rank is raised on all, after the others' updates arrived."""
        if self.comm.group.size == 1:
            self.check_groups(groups)
            self.steps += 1
            return self._inner_step(groups, closure, kwargs)
        call = f"step {self.steps + 1}"
        before = [dict(group) for group in groups]
        attempt = _Attempt()
        attempt.require(lambda: self.check_groups(groups))
        attempt.require(self.store.refresh)
        watch = _Watch(self.params, self._owned, grads_are_there=closure is None, everything=self._moves_all)
        if not attempt.failure:
            shared = None if closure is None else _SharedClosure(self.comm, call, closure, watch)
            attempt.update(lambda: self._inner_step(groups, shared, kwargs))
            if shared and shared.failed and attempt.failure:
                raise attempt.failure  # on all ranks alike, before anything was updated
            attempt.require(lambda: self.store.refresh(self._owned))
        try:
            self._bring_to_all(call, attempt, watch.moving(), before)
        except BaseException:
            # What a step counts in its groups would else differ between the ranks that made it and those that failed.
            for group, options in zip(groups, before, strict=True):
                group.clear()
                group.update(options)
            raise
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

    def check_groups(self, groups: Sequence[ParamGroup]) -> None:
        """Refuse groups whose parameters are no longer those of the layout."""
        if _ids(groups) != self._members:
            raise BindingError(
                "the parameters in param_groups were changed by hand; add some with add_param_group(), "
                "or make a new optimizer"
            )

    def _bring_to_all(self, call: str, attempt: "_Attempt", moving: bytes, groups: Sequence[ParamGroup]) -> None:
        """`groups`: as they were before the step."""
        # What an earlier step could not deliver goes along. Whatever follows, nothing of it is forgotten.
        moving = self._undelivered = _either(moving, self._undelivered)
        attempt.require(lambda: self.store.shipment(moving))
        verdict = compare(
            self.comm, call, moving, attempt.trouble, options=_hyper_parameters(groups, self.inner.optimizer.defaults)
        )
        if not verdict.same_options and not verdict.trouble:
            raise_first_difference(self.comm, call, describe_groups(groups))
        self.steps += 1
        if verdict.trouble < Trouble.UNFIT and not verdict.same_plan:
            # Which gradients there are differs from rank to rank: the owners decide.
            mine = set(self._owned)
            moving = self.comm.union(bytes(flag and i in mine for i, flag in enumerate(moving)))
            attempt.require(lambda: self.store.shipment(moving))
            verdict = compare(self.comm, call, moving, attempt.trouble)
        if verdict.trouble < Trouble.UNFIT:
            self.sync.start(self.store.shipment(moving))
            self.sync.finish()
            self._undelivered = b""
        if verdict.trouble:
            raise_failure(self.comm, call, attempt.failure)


class _Watch:
    """Which parameters a step moves: those with a gradient, and those that this rank changes without one."""

    def __init__(
        self, params: Sequence[torch.Tensor], owned: Sequence[int], *, grads_are_there: bool, everything: bool
    ) -> None:
        """`grads_are_there`: else a closure makes them, and `note_grads` must follow it."""
        self._params = params
        self._flags = bytearray(b"\1" * len(params)) if everything else bytearray(len(params))
        if grads_are_there:
            self.note_grads()
        self._versions = {i: params[i]._version for i in owned if not self._flags[i]}

    def note_grads(self) -> None:
        # Hazard: some optimizers clear gradients in their step, so they are looked at before it.
        flags = bytes([param.grad is not None for param in self._params])
        self._flags = bytearray(_either(flags, bytes(self._flags)) if any(self._flags) else flags)

    def moving(self) -> bytes:
        for index, before in self._versions.items():
            self._flags[index] |= self._params[index]._version != before
        return bytes(self._flags)


def _hyper_parameters(groups: Sequence[ParamGroup], names: Iterable[str]) -> bytes:
    """The numbers among the options of these names, cheap to compare in every step."""
    numbers = array("d")
    for group in groups:
        for value in map(group.get, names):
            if isinstance(value, (int, float)):
                numbers.append(value)
    return numbers.tobytes()


def _ids(groups: Sequence[ParamGroup]) -> list[list[int]]:
    return [list(map(id, group["params"])) for group in groups]


def _either(flags: bytes, others: bytes) -> bytes:
    return bytes(a | b for a, b in zip_longest(flags, others, fillvalue=0)) if others else flags


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

    def require(self, check: Callable[[], object]) -> None:
        """A check without which this rank cannot take part in what follows."""
        try:
            check()
        except Exception as error:
            self.failure, self.trouble = self.failure or error, Trouble.UNFIT


class _SharedClosure:
    """The user's closure, after which all ranks learn whether it failed on one, before any of them updates."""

    def __init__(self, comm: Comm, call: str, closure: Closure, watch: _Watch) -> None:
        self._comm, self._call, self._closure, self._watch = comm, call, closure, watch
        self._calls = 0
        self.failed = False

    def __call__(self) -> Any:
        self._calls += 1
        failure: Exception | None = None
        loss = None
        try:
            loss = self._closure()
        except Exception as error:
            # Hazard: the other ranks may be in a collective of the closure, where our agreement never reaches them.
            _log.error("the closure failed on rank %d: %r", self._comm.group.rank, error)
            failure = error
        self.failed = True
        agree(self._comm, f"closure {self._calls} of {self._call}", (), failure)
        self.failed = False
        self._watch.note_grads()
        return loss
