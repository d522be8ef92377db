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

from .._types import Rank
from ..comm.collectives import Comm
from ..state.serialization import StateSender, dumps, loads, receive_state
from .base import Closure, Engine
from .inner import ParamGroup


class JoinStatus(NamedTuple):
    """How the ranks that still train make the coming step, and who needs their gradients."""

    source: Rank
    joined_ranks: list[Rank]
    has_own_grads: bytes
    """A flag for each rank: its gradients were set by another joinable."""
    has_closure: bool
    has_grad_scaler: bool
    """A GradScaler drives it."""


class JoinedStep:
    """One step that ranks without inputs shadow: before it they borrow what they lack."""

    def __init__(
        self,
        engine: Engine,
        groups: list[ParamGroup],
        kwargs: dict[str, Any],
        *,
        is_joined: bool,
        has_cleared_grads: bool,
    ) -> None:
        """`joined`: this rank only shadows. `cleared`: it did so before, and has cleared its gradients since."""
        self._engine, self._comm, self._groups = engine, engine.comm, groups
        self.kwargs = kwargs
        self._is_joined, self._has_cleared_grads = is_joined, has_cleared_grads

    def gather_status(self, *, has_closure: bool = False, has_grad_scaler: bool = False) -> JoinStatus:
        """On all ranks, when gradients are there: those that still train say how they step, their shadows listen."""
        rank, size = self._comm.group.rank, self._comm.group.size
        # Gradients on a rank that cleared them after its last shadow step were set by another joinable.
        given = self._has_cleared_grads and any(param.grad is not None for param in self._owned_params().values())
        mine = (not self._is_joined, self._is_joined, self._is_joined and given, has_closure, has_grad_scaler)
        flags = self._comm.all_reduce_any(b"".join(bytes(i == rank and flag for i in range(size)) for flag in mine))
        trains, joined, supplied, closures, scales = (flags[i * size : (i + 1) * size] for i in range(len(mine)))
        shadows = [Rank(i) for i in range(size) if joined[i]]
        return JoinStatus(Rank(trains.index(1)), shadows, supplied, any(closures), any(scales))

    def exchange_step_inputs(self, status: JoinStatus) -> None:
        """On all ranks, after a survey: gradients, options as schedulers left them, arguments of the step."""
        for shadow in status.joined_ranks:
            if self._comm.group.rank == status.source:
                grads = None if status.has_own_grads[shadow] else self._serialize_grads(shadow)
                lent = [grads, _serialize_options(self._groups), _serializable_options(self.kwargs)]
                StateSender(lent).send(self._comm, shadow)
            elif self._comm.group.rank == shadow:
                self._apply_step_inputs(*receive_state(self._comm, status.source))

    def wrap_closure(self, closure: Closure) -> Closure:
        """A closure of a rank that trains, which lends what the given one has computed."""

        def run() -> Any:
            loss, failure = None, None
            try:
                loss = closure()
            except Exception as error:
                failure = error  # raised only after lending: another rank waits for our gradients
            self.exchange_step_inputs(self.gather_status(has_closure=True))
            if failure is not None:
                raise failure
            return loss

        return run

    def make_joined_closure(self) -> Closure:
        """A closure for a shadow of such ranks that has borrowed already: only a further call borrows again."""
        calls = count()

        def run() -> None:
            if next(calls) > 0:
                self.exchange_step_inputs(self.gather_status())

        return run

    def finish(self) -> None:
        """No later shadow step may use what is on this rank now."""
        if self._is_joined:
            for param in self._owned_params().values():
                param.grad = None

    def _owned_params(self) -> dict[int, torch.Tensor]:
        return self._engine.owned_params(self._comm.group.rank)

    def _serialize_grads(self, owner: Rank) -> dict[int, Any]:
        params = self._engine.owned_params(owner)
        return {i: _serialize_grad(param.grad) for i, param in params.items() if param.grad is not None}

    def _apply_step_inputs(
        self, grads: dict[int, Any] | None, options: list[dict[str, Any]], kwargs: dict[str, Any]
    ) -> None:
        self.kwargs = kwargs
        _apply_options(self._groups, options)
        if grads is not None:
            for index, param in self._owned_params().items():
                param.grad = _deserialize_grad(grads[index]).to(param.device) if index in grads else None


class ZeroJoinHook(JoinHook):
    """What `Join` runs on a rank that ran out of inputs, as often as the others step."""

    def __init__(self, step: Callable[[], object], comm: Comm, groups: list[ParamGroup]) -> None:
        self._step, self._comm, self._groups = step, comm, groups

    def main_hook(self) -> None:
        self._step()

    def post_hook(self, is_last_joiner: bool) -> None:
        """On all ranks, when all have joined."""
        broadcast_options(self._comm, self._groups, is_current=is_last_joiner)


def broadcast_options(comm: Comm, groups: list[ParamGroup], *, is_current: bool) -> list[Rank]:
    """Broadcast the options of the first rank that has the current ones to those that have not. Called on all ranks.

    Returns the ranks that have the current ones.
    """
    comm = comm.data_parallel
    rank, size = comm.group.rank, comm.group.size
    flags = comm.all_reduce_any(bytes(i == rank and is_current for i in range(size)))
    holders = [Rank(i) for i, flag in enumerate(flags) if flag]
    if len(holders) < size:
        data = comm.broadcast_bytes(dumps(_serialize_options(groups)) if rank == holders[0] else None, holders[0])
        if not is_current:
            _apply_options(groups, loads(data))
    return holders


def _serialize_grad(grad: torch.Tensor) -> Any:
    if grad.layout != torch.sparse_coo:
        return grad
    # As it is: sums in another order would round differently.
    parts = {"indices": grad._indices(), "values": grad._values(), "size": tuple(grad.shape)}
    return {**parts, "is_coalesced": grad.is_coalesced()}


def _deserialize_grad(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else torch.sparse_coo_tensor(**value)


def _serialize_options(groups: list[ParamGroup]) -> list[dict[str, Any]]:
    return [_serializable_options(group) for group in groups]


def _apply_options(groups: list[ParamGroup], options: list[dict[str, Any]]) -> None:
    for group, lent in zip(groups, options, strict=True):
        group.update({key: _move_like(value, group.get(key)) for key, value in lent.items()})


def _serializable_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options that can change from step to step: numbers, and what is made of them."""
    chosen = {
        key: value for key, value in group.items() if key not in ("params", "param_names") and _is_serializable(value)
    }
    return {key: _to_serializable(value) for key, value in chosen.items()}


def _is_serializable(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(map(_is_serializable, value))
    return type(value) in (bool, int, str, type(None)) or isinstance(value, (torch.Tensor, float))


def _to_serializable(value: Any) -> Any:
    if type(value) in (list, tuple):
        return type(value)(map(_to_serializable, value))
    return float(value) if isinstance(value, float) else value  # numpy's floats could not be sent


def _move_like(value: Any, current: Any) -> Any:
    return value.to(current.device) if isinstance(value, torch.Tensor) and isinstance(current, torch.Tensor) else value
