"""Uneven inputs: a rank that ran out of data goes on updating its shard for the others.

It has no gradients of its own any more, and its LR scheduler stands still. In each step the lowest rank that still
trains lends it the options of the groups and the gradients of the parameters it owns, unless another joinable of the
same context has set those. When all have joined, options are once more those of the ranks that trained longest: their
schedulers stepped after the last step.
"""

from collections.abc import Callable, Mapping
from itertools import count
from typing import Any, NamedTuple

import torch
from torch.distributed.algorithms.join import JoinHook

from ..comm.collectives import Comm
from ..runtime.inner import ParamGroup
from ..runtime.step import Closure, Engine
from ..state.codec import pack, unpack
from ..state.exchange import Outbox, receive
from ..units import Rank


class Survey(NamedTuple):
    """How the ranks that still train make the coming step, and who needs their gradients."""

    lender: Rank
    shadows: list[Rank]
    supplied: bytes
    """A flag for each rank: its gradients were set by another joinable."""
    closure: bool
    scaled: bool
    """A GradScaler drives it."""


class UnevenStep:
    """One step that ranks without inputs shadow: before it they borrow what they lack."""

    def __init__(
        self, engine: Engine, groups: list[ParamGroup], kwargs: dict[str, Any], *, joined: bool, cleared: bool
    ) -> None:
        """`joined`: this rank only shadows. `cleared`: it did so before, and has cleared its gradients since."""
        self._engine, self._comm, self._groups = engine, engine.comm, groups
        self.kwargs = kwargs
        self._joined, self._cleared = joined, cleared

    def survey(self, *, closure: bool = False, scaled: bool = False) -> Survey:
        """On all ranks, when gradients are there: those that still train say how they step, their shadows listen."""
        rank, size = self._comm.group.rank, self._comm.group.size
        # Gradients on a rank that cleared them after its last shadow step were set by another joinable.
        given = self._cleared and any(param.grad is not None for param in self._mine().values())
        mine = (not self._joined, self._joined, self._joined and given, closure, scaled)
        flags = self._comm.union(b"".join(bytes(i == rank and flag for i in range(size)) for flag in mine))
        trains, joined, supplied, closures, scales = (flags[i * size : (i + 1) * size] for i in range(len(mine)))
        shadows = [Rank(i) for i in range(size) if joined[i]]
        return Survey(Rank(trains.index(1)), shadows, supplied, any(closures), any(scales))

    def lend(self, survey: Survey) -> None:
        """On all ranks, after a survey: gradients, options as schedulers left them, arguments of the step."""
        for shadow in survey.shadows:
            if self._comm.group.rank == survey.lender:
                grads = None if survey.supplied[shadow] else self._grads_of(shadow)
                lent = [grads, _options_of(self._groups), _portable_options(self.kwargs)]
                Outbox(lent).send(self._comm, shadow)
            elif self._comm.group.rank == shadow:
                self._take(*receive(self._comm, survey.lender))

    def lending(self, closure: Closure) -> Closure:
        """A closure of a rank that trains, which lends what the given one has computed."""

        def run() -> Any:
            loss, failure = None, None
            try:
                loss = closure()
            except Exception as error:
                failure = error  # raised only after lending: another rank waits for our gradients
            self.lend(self.survey(closure=True))
            if failure is not None:
                raise failure
            return loss

        return run

    def borrowing(self) -> Closure:
        """A closure for a shadow of such ranks that has borrowed already: only a further call borrows again."""
        calls = count()

        def run() -> None:
            if next(calls) > 0:
                self.lend(self.survey())

        return run

    def end(self) -> None:
        """No later shadow step may use what is on this rank now."""
        if self._joined:
            for param in self._mine().values():
                param.grad = None

    def _mine(self) -> dict[int, torch.Tensor]:
        return self._engine.owned(self._comm.group.rank)

    def _grads_of(self, owner: Rank) -> dict[int, Any]:
        params = self._engine.owned(owner)
        return {i: _portable(param.grad) for i, param in params.items() if param.grad is not None}

    def _take(self, grads: dict[int, Any] | None, options: list[dict[str, Any]], kwargs: dict[str, Any]) -> None:
        self.kwargs = kwargs
        _adopt(self._groups, options)
        if grads is not None:
            for index, param in self._mine().items():
                param.grad = _restored(grads[index]).to(param.device) if index in grads else None


class ShadowStep(JoinHook):
    """What `Join` runs on a rank that ran out of inputs, as often as the others step."""

    def __init__(self, step: Callable[[], object], comm: Comm, groups: list[ParamGroup]) -> None:
        self._step, self._comm, self._groups = step, comm, groups

    def main_hook(self) -> None:
        self._step()

    def post_hook(self, is_last_joiner: bool) -> None:
        """On all ranks, when all have joined."""
        share_options(self._comm, self._groups, current=is_last_joiner)


def share_options(comm: Comm, groups: list[ParamGroup], *, current: bool) -> list[Rank]:
    """Broadcast the options of the first rank that has the current ones to those that have not. Called on all ranks.

    Returns the ranks that have the current ones.
    """
    comm = comm.everyone
    rank, size = comm.group.rank, comm.group.size
    flags = comm.union(bytes(i == rank and current for i in range(size)))
    holders = [Rank(i) for i, flag in enumerate(flags) if flag]
    if len(holders) < size:
        data = comm.broadcast_bytes(pack(_options_of(groups)) if rank == holders[0] else None, holders[0])
        if not current:
            _adopt(groups, unpack(data))
    return holders


def _portable(grad: torch.Tensor) -> Any:
    if grad.layout != torch.sparse_coo:
        return grad
    # As it is: sums in another order would round differently.
    parts = {"indices": grad._indices(), "values": grad._values(), "size": tuple(grad.shape)}
    return {**parts, "is_coalesced": grad.is_coalesced()}


def _restored(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else torch.sparse_coo_tensor(**value)


def _options_of(groups: list[ParamGroup]) -> list[dict[str, Any]]:
    return [_portable_options(group) for group in groups]


def _adopt(groups: list[ParamGroup], options: list[dict[str, Any]]) -> None:
    for group, lent in zip(groups, options, strict=True):
        group.update({key: _like(value, group.get(key)) for key, value in lent.items()})


def _portable_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options that can change from step to step: numbers, and what is made of them."""
    chosen = {key: value for key, value in group.items() if key not in ("params", "param_names") and _is_plain(value)}
    return {key: _plain(value) for key, value in chosen.items()}


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return type(value) in (bool, int, str, type(None)) or isinstance(value, (torch.Tensor, float))


def _plain(value: Any) -> Any:
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    return float(value) if isinstance(value, float) else value  # numpy's floats could not be sent


def _like(value: Any, present: Any) -> Any:
    return value.to(present.device) if isinstance(value, torch.Tensor) and isinstance(present, torch.Tensor) else value
