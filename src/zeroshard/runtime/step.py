"""What every step has: groups that are still those of the layout, a shared closure, failures kept until all know."""

import logging
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager
from itertools import chain
from operator import itemgetter
from typing import Any

import torch

from ..comm.agreement import (
    Options,
    Proposal,
    Trouble,
    Verdict,
    agreed,
    compare,
    raise_failure,
    raise_first_difference,
)
from ..comm.collectives import Comm, encoded
from ..errors import BindingError
from ..labels import Label
from ..layout.layout import Layout
from ..notices import log
from ..state.compat import SavedState, describe_groups
from ..state.dcp import CutTensor
from ..state.records import MASTER, StateRecord
from ..units import Rank
from .beginnings import begin, begins_neutrally
from .grad_check import GradCheck
from .inner import Inner, ParamGroup, ShardOptimizer
from .looks import Looks
from .nonfinite import Lot
from .param_sync import ParamSync, ShardSync
from .rooms import Wanted
from .sharded_grad import local_grad
from .store import FlatStore, Store

PARTLY = "What other ranks own has been updated: for numbers as if nothing had failed, load a checkpoint."
"""After a step that failed on a rank."""
Closure = Callable[[], Any]
Room = Callable[[int, Any, tuple[int, ...], torch.dtype], torch.Tensor]
"""Memory for what this rank holds of a state tensor: of a parameter, a key, a shape and a dtype."""


class Engine(ABC):
    """This rank's share of the work, and the order of it: update what it owns, agree that all is well, bring
    the updates to everyone.

    It grows in two steps: `prepare` makes what it takes, and can be taken back; `extend` starts to use it.
    """

    inner: Inner
    sync: ParamSync | ShardSync
    reduces = False
    """Gradients are averaged over all ranks here, not before."""

    def __init__(self, comm: Comm, store: Store) -> None:
        self.comm, self.store = comm, store
        self.looks = Looks(comm)
        self.grad_check = GradCheck(comm)
        self._begins: dict[int, bool] = {}
        self.layout = Layout.empty(comm.group.size)
        self.params: list[torch.Tensor] = []
        self.steps = 0
        self._owned: tuple[int, ...] = ()
        self._members: list[list[torch.Tensor]] = []
        self._small: list[tuple[int, int, torch.Tensor]] = []
        """Members of less than two elements, by group and place."""
        self._compared: list[ComparedOptions] = []
        """Of each group, the options that it came with."""

    @abstractmethod
    def prepare(self, layout: Layout, groups: Sequence[ParamGroup]) -> None:
        """Have inner optimizers for all groups."""

    def move_params(self, layout: Layout, groups: Sequence[ParamGroup]) -> None:  # noqa: B027 (most have, in `prepare`)
        """Move parameters to where they are to lie, as the last thing before all ranks agree."""

    @abstractmethod
    def take_back(self, first_group: int) -> None:
        """Undo `prepare` and `move_params`, also where one failed halfway."""

    def extend(self, layout: Layout, groups: Sequence[ParamGroup]) -> None:
        """Take in the parameters that `layout` has beyond the present ones. `groups` are all groups."""
        params = [param for group in groups for param in group["params"]][len(self.params) :]
        known, new_groups = len(self._members), groups[len(self._members) :]
        self._owned += layout.owned_by(self.comm.group.rank, first_bucket=len(self.layout.buckets))
        self.layout = layout
        self.params.extend(params)
        self._compared.extend(map(ComparedOptions, new_groups))
        self._members.extend(list(group["params"]) for group in new_groups)
        for number, members in enumerate(self._members[known:], known):
            self._small.extend((number, place, param) for place, param in enumerate(members) if param.numel() < 2)
        self.store.extend(layout, params)

    def owned(self, rank: Rank) -> dict[int, torch.Tensor]:
        """The parameters of which a rank owns all or a piece, by index."""
        return {index: self.params[index] for index in self.layout.owned_by(rank)}

    def run(self, groups: Sequence[ParamGroup], closure: Closure | None, kwargs: dict[str, Any]) -> Any:
        """One step on all ranks. What fails on one rank is raised on all, after the others' updates arrived."""
        before = [dict(group) for group in groups]
        try:
            return self._run(groups, closure, kwargs)
        except BaseException:
            # What a step counts in its groups would else differ between the ranks that made it and those that failed.
            for group, options in zip(groups, before, strict=True):
                group.clear()
                group.update(options)
            raise
        finally:
            self.comm.group.line.at("between steps", self.steps)

    @abstractmethod
    def _run(self, groups: Sequence[ParamGroup], closure: Closure | None, kwargs: dict[str, Any]) -> Any: ...

    @abstractmethod
    def state(self) -> dict[Any, Any]:
        """This rank's optimizer state, by parameter: whoever changes it changes that of the inner optimizers."""

    @abstractmethod
    def replace_state(self, state: Any) -> None:
        """Have that state and no other."""

    @contextmanager
    def with_initial_state(self) -> Iterator[None]:
        """Inside, parameters that require gradients and have no state have the one that their first step would begin
        with, as far as the optimizer allows it. Afterwards they have none, as before."""
        with ExitStack() as undo:
            self._begin(undo)
            yield

    def make_initial_state(self) -> None:
        """The same, to stay."""
        with ExitStack() as undo:
            self._begin(undo)
            undo.pop_all()

    def _begin(self, undo: ExitStack) -> None:
        chosen = self._find_trainable()
        for member in self.inner.members:
            if self._begins_neutrally(member):
                begin(member, chosen, undo)

    def _find_trainable(self) -> Set[int]:
        """The ids of the inner optimizers' tensors that may get gradients now."""
        return {id(param) for param in self.params if param.requires_grad}

    def _begins_neutrally(self, member: ShardOptimizer) -> bool:
        if id(member) not in self._begins:
            self._begins[id(member)] = begins_neutrally(member.recipe)
        return self._begins[id(member)]

    @abstractmethod
    def inner_of(self, index: int) -> ShardOptimizer:
        """The inner optimizer that has a parameter, or would have it if this rank owned it."""

    @abstractmethod
    def param_shaped(self, index: int) -> frozenset[str]:
        """Keys of a parameter's state that has the parameter's shape, as far as the self-test saw."""

    @abstractmethod
    def records(self) -> list[StateRecord]:
        """All state of parameters that this rank has."""

    def holds(self, index: int, key: Any) -> bool:
        """Whether this rank keeps state of that name of a parameter, all or a part of it."""
        return key != MASTER and self.layout.piece_of(index, self.comm.group.rank) is not None

    def learn(self, param_shaped: frozenset[Any]) -> None:  # noqa: B027 (of no use to whole parameters)
        """State under these keys has the shape of its parameter."""

    @abstractmethod
    def rooms(self, wanted: Wanted, *, in_place: bool, param_shaped: frozenset[Any]) -> Room:
        """Where to read state to: new memory, or `in_place` that of the present state wherever it will do.

        `wanted`: all that room will be asked for.
        """

    @abstractmethod
    def load(self, saved: SavedState, *, adopt: bool = False) -> Callable[[], None]:
        """Take this rank's part of it; returns how to undo it. `adopt`: its tensors are given away."""

    def kept_doubts(self) -> Callable[[], None]:
        """How to doubt again what is doubted now: a load ends that, also one that puts back what was there before."""
        return lambda: None

    @abstractmethod
    def part(self, index: int) -> CutTensor:
        """What this rank owns of a parameter, where it lies, with the parameters `at_rest`; perhaps nothing."""

    def precise_part(self, index: int) -> CutTensor | None:  # noqa: ARG002
        """The more precise copy of it, if there is one."""
        return None

    @abstractmethod
    def at_rest(self) -> None:
        """No parameter is still on its way, and all lie where this rank expects them."""

    @abstractmethod
    def spread(self) -> Callable[[], None]:
        """Start to bring what each rank owns of all parameters to everyone; returns how to wait. On all ranks."""

    def sync_params(self, call: str, groups: Sequence[ParamGroup]) -> None:
        """Bring what each rank owns of all parameters to everyone and wait for it. On all ranks."""

        def propose() -> Proposal[None]:
            self.check_groups(groups)
            self.at_rest()
            return Proposal(None)

        agreed(self.comm, call, propose)
        with self.comm.group.line.relied_on():
            self.spread()()

    def check_drift(self, call: str, step: int | None = None) -> None:
        """Raise `DriftError` on all ranks if they have different parameters. On all ranks."""
        self.sync.finish()
        self.looks.require_no_drift(self.layout, self.params, call, step)

    def held(self) -> dict[str, list[torch.Tensor]]:
        """The memory that this rank keeps, by what it is for; state is not among it."""
        grads = [grad for grad in map(local_grad, self.params) if grad is not None]
        own = self.store.buffers() if isinstance(self.store, FlatStore) else self.params
        return {"parameters": own, "gradients": grads, "staging": self.store.staging()}

    @abstractmethod
    def bytes_to_send(self) -> tuple[int | None, int]:
        """What this rank sends of gradients and of parameters when all travel once; None if others send gradients."""

    @property
    def is_reducing(self) -> bool:
        """Gradients have been sent for the step that comes."""
        return False

    def drop_placeholders(self) -> None:  # noqa: B027 (nothing, by default)
        """Remove what stands in `param.grad` for gradients that are elsewhere: `zero_grad` would use it."""

    def clear_grads(self, *, to_none: bool) -> None:  # noqa: B027 (nothing, by default)
        """What `zero_grad` does beyond `param.grad`."""

    def check_groups(self, groups: Sequence[ParamGroup]) -> None:
        """Refuse groups whose parameters are no longer those of the layout."""
        if not self._are_members([group["params"] for group in groups]):
            raise BindingError(
                "the parameters in param_groups were changed by hand; add some with add_param_group(), "
                "or make a new optimizer"
            )

    def _are_members(self, found: list[list[torch.Tensor]]) -> bool:
        try:
            # Lists ask for identity first, many times faster than a loop could. Hazard: only then do they ask tensors
            # whether they are equal, which those with several elements refuse to say.
            same = found == self._members
        except RuntimeError:
            return False
        return same and all(found[group][place] is param for group, place, param in self._small)

    def _inner_step(self, groups: Sequence[ParamGroup], closure: Closure | None, kwargs: dict[str, Any]) -> Any:
        self.inner.push(groups)
        result = self.inner.step(*([] if closure is None else [closure]), **kwargs)
        self.inner.pull(groups)
        return result

    def _foreseen(self, closure: Closure | None) -> Closure | None:
        """A closure that has made its gradients before the optimizer's code runs, if they are looked at."""
        return CalledBefore(closure) if self.looks.at_gradients and closure is not None else closure

    def leaves_out(self, look: Callable[[], Iterable[Lot]], failure: Exception | None = None) -> bool:
        """Whether the step is not to be made, since gradients are not finite. On all ranks; raises there alike."""
        return self.looks.leave_out(self.layout, look, failure)

    def kept(self, groups: Sequence[ParamGroup]) -> Callable[[], None]:
        """Keeps what this rank owns of parameters, and the options of groups; returns how to put that back. Not state:
        modes exchange parameters with it, and leave it as it is."""
        counters = [member.counters() for member in self.inner.members]
        owned = [param for it in self.inner.members for group in it.optimizer.param_groups for param in group["params"]]
        values, options = [param.detach().clone() for param in owned], [dict(group) for group in groups]

        @torch.no_grad()
        def put_back() -> None:
            for param, value in zip(owned, values, strict=True):
                param.copy_(value)
            for group, before in zip(groups, options, strict=True):
                group.clear()
                group.update(before)
            for undo in counters:
                undo()
            self.inner.push(groups)

        return put_back

    def switch(self, groups: Sequence[ParamGroup], mode: str) -> None:
        """What this rank owns goes into the mode `train` or `eval`, of an optimizer that has them; tells no one."""
        self.inner.push(groups)
        for member in self.inner.members:
            member.switch(mode)
        self.inner.pull(groups)

    def compared_options(self, groups: Sequence[ParamGroup]) -> Options:
        """Those of all groups that it has."""
        return Options(self._hyper_parameters(groups), lambda: describe_groups(groups[: len(self._compared)]))

    def _hyper_parameters(self, groups: Sequence[ParamGroup]) -> bytes:
        """The numbers among the options, cheap to compare in every step. Not of what optimizers add to their groups:
        one that has nothing to update may not."""
        return b"".join([it.read(group) for it, group in zip(self._compared, groups, strict=False)])

    def _require_same_options(
        self, call: str, verdict: Verdict, groups: Sequence[ParamGroup], arguments: Sequence[str] = ()
    ) -> None:
        if not verdict.same_options and not verdict.trouble:
            raise_first_difference(self.comm, call, [*arguments, *describe_groups(groups)])


class ComparedOptions:
    """The numbers and words among the options that a group came with, as bytes that are equal on all ranks."""

    def __init__(self, group: ParamGroup) -> None:
        keys = sorted(set(group) - {"params", "param_names"})
        self._keys = keys
        self._get: Callable[[ParamGroup], Any] = itemgetter(*keys) if len(keys) > 1 else self._look_up
        self._values: Any = None
        self._data = b""

    def read(self, group: ParamGroup) -> bytes:
        try:
            if self._get(group) == self._values:
                return self._data
        except (KeyError, RuntimeError):  # an option is missing, or a number has become a tensor of several elements
            pass
        values = self._look_up(group)
        self._data = _as_bytes(values)
        self._values = values if all(map(_is_immutable, values)) else None
        return self._data

    def _look_up(self, group: ParamGroup) -> tuple[Any, ...]:
        return tuple(map(group.get, self._keys))


def _is_immutable(value: Any) -> bool:
    if type(value) is tuple:
        return all(map(_is_immutable, value))
    return value is None or isinstance(value, (int, float, str))


def _as_bytes(values: Iterable[Any]) -> bytes:
    numbers: list[float] = []
    words: list[str] = []
    for value in values:
        if isinstance(value, (int, float)):
            numbers.append(value)
        elif isinstance(value, str):
            words.append(value)
        elif value is not None:
            numbers.extend(_numbers(value))
    return array("d", numbers).tobytes() + encoded("\n".join(words))


def _numbers(value: Any) -> Iterable[float]:
    """Those in an option. To read a tensor on a GPU would be to wait for it."""
    if isinstance(value, (int, float)):
        return (value,)
    if isinstance(value, (tuple, list)):
        return chain.from_iterable(map(_numbers, value))
    is_near = isinstance(value, torch.Tensor) and value.device.type == "cpu"
    return (value.item(),) if is_near and value.numel() == 1 and not value.is_complex() else ()


class Attempt:
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

    def raise_if_shared(self, closure: "SharedClosure | None") -> None:
        """A closure that failed is known on all ranks, before anything was updated: raise there alike."""
        if closure is not None and closure.failed and self.failure is not None:
            raise self.failure

    def require(self, check: Callable[[], object]) -> None:
        """A check without which this rank cannot take part in what follows."""
        try:
            check()
        except Exception as error:
            self.failure, self.trouble = self.failure or error, Trouble.UNFIT


class SharedClosure:
    """The user's closure, after which all ranks learn whether it failed on one, before any of them updates."""

    def __init__(
        self,
        comm: Comm,
        call: str,
        closure: Closure,
        then: Callable[[], object],
        otherwise: Callable[[], object] = lambda: None,
        *,
        again: Callable[[], object] = lambda: None,
    ) -> None:
        """`then` is called on all ranks after each call of the closure that succeeded on all, `otherwise` if not,
        `again` before each but the first. What that raises it must raise on all ranks alike."""
        self._comm, self._call, self._closure, self._then = comm, call, closure, then
        self._otherwise, self._again = otherwise, again
        self._calls = 0
        self.failed = False

    def __call__(self) -> Any:
        self._calls += 1
        self.failed = True
        if self._calls > 1:
            self._again()
        failure: Exception | None = None
        loss = None
        try:
            with self._comm.clock.part(Label.CLOSURE):
                loss = self._closure()
        except Exception as error:
            # Hazard: the other ranks may be in a collective of the closure, where our agreement never reaches them.
            log(logging.ERROR, self._comm.everyone.group.rank, "the closure failed: %r", error)
            failure = error
        self._share(f"closure {self._calls} of {self._call}", failure)
        self.failed = False
        self._then()
        return loss

    def _share(self, call: str, failure: Exception | None) -> None:
        trouble = Trouble.NONE if failure is None else Trouble.FAILED
        if compare(self._comm, call, b"", trouble).trouble:
            self._otherwise()
            raise_failure(self._comm, call, failure)


class CalledBefore:
    """A closure that is called now. The first call that follows gets what came of that, a later one calls it again."""

    def __init__(self, closure: Closure) -> None:
        self._closure, self._is_new = closure, True
        with torch.enable_grad():
            self._loss = closure()

    def __call__(self) -> Any:
        if not self._is_new:
            return self._closure()
        self._is_new = False
        return self._loss
