"""Support for `torch.distributed.algorithms.join.Join`: uneven inputs.

A rank that runs out of data ("joined") keeps updating its shard for the others: it shadows their steps. It has no
gradients of its own, and its LR scheduler no longer advances. In each step the lowest rank that still trains sends it
the param-group options and the gradients of the parameters that it owns, unless another joinable of the same context
has set these gradients.

When all ranks have joined, the ranks that trained longest broadcast their options once more, because the schedulers of
those ranks stepped after the last optimizer step.
"""

from collections.abc import Callable, Mapping
from itertools import count
from typing import Any, NamedTuple

import torch
from torch.distributed.algorithms.join import JoinHook

from .._torch_compat import sparse_indices, sparse_values
from .._types import Rank
from ..comm.collectives import Comm
from ..state.serialization import StateSender, dumps, loads, receive_state
from .base import Engine
from .inner import ParamGroup
from .step import Closure


class JoinStatus(NamedTuple):
    """Which ranks have joined, and how the ranks that still train make the next step. Equal on all ranks."""

    source: Rank
    """The lowest rank that still trains: it sends gradients and options to joined ranks."""
    joined_ranks: list[Rank]
    has_own_grads: bytes
    """A flag per rank: another joinable has set the gradients of this joined rank."""
    has_closure: bool
    has_grad_scaler: bool
    """A GradScaler drives the step."""


class JoinedStep:
    """One step inside `Join`: joined ranks receive gradients, options and arguments, then make the step too."""

    def __init__(
        self,
        engine: Engine,
        groups: list[ParamGroup],
        kwargs: dict[str, Any],
        *,
        is_joined: bool,
        has_cleared_grads: bool,
    ) -> None:
        """Prepare a step.

        Args:
            is_joined: this rank is out of inputs and shadows the step.
            has_cleared_grads: this rank has shadowed a step before, and cleared its gradients after it.
        """
        self._engine, self._comm, self._groups = engine, engine.comm, groups
        self.kwargs = kwargs
        self._is_joined, self._has_cleared_grads = is_joined, has_cleared_grads

    def gather_status(self, *, has_closure: bool = False, has_grad_scaler: bool = False) -> JoinStatus:
        """Exchange how each rank makes this step. Call on all ranks, once gradients are ready."""
        rank, size = self._comm.group.rank, self._comm.group.size
        # If a rank cleared its gradients after its last joined step, another joinable has set the ones it has now.
        has_own_grads = self._has_cleared_grads and any(
            param.grad is not None for param in self._owned_params().values()
        )
        local = (not self._is_joined, self._is_joined, self._is_joined and has_own_grads, has_closure, has_grad_scaler)
        flags = self._comm.all_reduce_any(b"".join(bytes(i == rank and flag for i in range(size)) for flag in local))
        training, joined, own_grads, closures, scalers = (flags[i * size : (i + 1) * size] for i in range(len(local)))
        joined_ranks = [Rank(i) for i in range(size) if joined[i]]
        return JoinStatus(Rank(training.index(1)), joined_ranks, own_grads, any(closures), any(scalers))

    def exchange_step_inputs(self, status: JoinStatus) -> None:
        """Send gradients, current options and arguments of the step to joined ranks. Call on all ranks."""
        for joined_rank in status.joined_ranks:
            if self._comm.group.rank == status.source:
                grads = None if status.has_own_grads[joined_rank] else self._serialize_grads(joined_rank)
                step_inputs = [grads, _serialize_options(self._groups), _serializable_options(self.kwargs)]
                StateSender(step_inputs).send(self._comm, joined_rank)
            elif self._comm.group.rank == joined_rank:
                self._apply_step_inputs(*receive_state(self._comm, status.source))

    def wrap_closure(self, closure: Closure) -> Closure:
        """Wrap the closure of a rank that trains: it sends the gradients that `closure` computes to joined ranks."""

        def run() -> Any:
            loss, failure = None, None
            try:
                loss = closure()
            except Exception as error:
                failure = error  # raise only after the exchange: joined ranks wait for our gradients
            self.exchange_step_inputs(self.gather_status(has_closure=True))
            if failure is not None:
                raise failure
            return loss

        return run

    def make_joined_closure(self) -> Closure:
        """Return the closure of a joined rank, for steps in which the others have one.

        Its first call does nothing, because this rank has received its inputs already. Each further call exchanges
        them again.
        """
        calls = count()

        def run() -> None:
            if next(calls) > 0:
                self.exchange_step_inputs(self.gather_status())

        return run

    def finish(self) -> None:
        """Clear the gradients of a joined rank, so that no later step uses them."""
        if self._is_joined:
            for param in self._owned_params().values():
                param.grad = None

    def _owned_params(self) -> dict[int, torch.Tensor]:
        return self._engine.params.owned_by(self._comm.group.rank)

    def _serialize_grads(self, owner: Rank) -> dict[int, Any]:
        params = self._engine.params.owned_by(owner)
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
    """The hook that `Join` runs on a joined rank: one step for each step of the other ranks."""

    def __init__(self, step: Callable[[], object], comm: Comm, groups: list[ParamGroup]) -> None:
        self._step, self._comm, self._groups = step, comm, groups

    def main_hook(self) -> None:
        self._step()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Broadcast the options of the last joiners. `Join` calls it on all ranks, when all have joined."""
        broadcast_options(self._comm, self._groups, is_current=is_last_joiner)


def broadcast_options(comm: Comm, groups: list[ParamGroup], *, is_current: bool) -> list[Rank]:
    """Broadcast the options of the first rank with `is_current` to the ranks without it. Call on all ranks.

    Returns:
        The ranks with `is_current`.
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
    # Send it uncoalesced: sums in another order would round differently.
    components = {"indices": sparse_indices(grad), "values": sparse_values(grad), "size": tuple(grad.shape)}
    return {**components, "is_coalesced": grad.is_coalesced()}


def _deserialize_grad(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else torch.sparse_coo_tensor(**value)


def _serialize_options(groups: list[ParamGroup]) -> list[dict[str, Any]]:
    return [_serializable_options(group) for group in groups]


def _apply_options(groups: list[ParamGroup], options: list[dict[str, Any]]) -> None:
    for group, new in zip(groups, options, strict=True):
        group.update({key: _move_like(value, group.get(key)) for key, value in new.items()})


def _serializable_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that can change from step to step: scalars, strings, tensors, and lists or tuples of them."""
    selected = {
        key: value for key, value in group.items() if key not in ("params", "param_names") and _is_serializable(value)
    }
    return {key: _to_serializable(value) for key, value in selected.items()}


def _is_serializable(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(map(_is_serializable, value))
    return type(value) in (bool, int, str, type(None)) or isinstance(value, (torch.Tensor, float))


def _to_serializable(value: Any) -> Any:
    if type(value) in (list, tuple):
        return type(value)(map(_to_serializable, value))
    return float(value) if isinstance(value, float) else value  # numpy floats cannot be serialized


def _move_like(value: Any, current: Any) -> Any:
    return value.to(current.device) if isinstance(value, torch.Tensor) and isinstance(current, torch.Tensor) else value
