"""Uneven inputs: a rank that ran out of data goes on updating its shard for the others.

It has no gradients of its own any more. In each step the lowest rank that still trains lends it those of the
parameters it owns, unless another joinable of the same context has set them.
"""

from collections.abc import Callable, Mapping
from itertools import count
from typing import Any, NamedTuple

import torch
from torch.distributed.algorithms.join import JoinHook

from ..checkpoint.exchange import Outbox, receive
from ..comm.collectives import Comm
from ..runtime.step import Closure
from ..units import Rank

OwnedParams = Callable[[Rank], Mapping[int, torch.Tensor]]
"""The parameters that a rank owns, by index."""


class Survey(NamedTuple):
    """How the ranks that still train make the coming step, and who needs their gradients."""

    lender: Rank
    needy: list[Rank]
    closure: bool
    scaled: bool
    """A GradScaler drives it."""


class Lender:
    """Brings gradients to the ranks that ran out of inputs."""

    def __init__(self, comm: Comm, owned: OwnedParams) -> None:
        self._comm, self._owned = comm, owned
        self._cleared = False

    def forget(self) -> None:
        """A new context begins: gradients that are on this rank now are its own."""
        self._cleared = False

    def survey(self, *, joined: bool, closure: bool = False, scaled: bool = False) -> Survey:
        """On all ranks, when gradients are there: those that still train say how they step, their shadows listen."""
        rank, size = self._comm.group.rank, self._comm.group.size
        # Gradients on a rank that cleared them after its last shadow step were set by another joinable.
        given = self._cleared and any(param.grad is not None for param in self._mine().values())
        mine = (not joined, joined and not given, closure, scaled)
        flags = self._comm.union(b"".join(bytes(i == rank and flag for i in range(size)) for flag in mine))
        trains, needs, closures, scales = (flags[i * size : (i + 1) * size] for i in range(len(mine)))
        needy = [Rank(i) for i in range(size) if needs[i]]
        return Survey(Rank(trains.index(1)), needy, any(closures), any(scales))

    def lend(self, survey: Survey) -> None:
        """On all ranks, after a survey."""
        for needy in survey.needy:
            if self._comm.group.rank == survey.lender:
                self._send(needy)
            elif self._comm.group.rank == needy:
                self._take(receive(self._comm, survey.lender))

    def lending(self, closure: Closure) -> Closure:
        """A closure of a rank that trains, which lends what the given one has computed."""

        def run() -> Any:
            loss, failure = None, None
            try:
                loss = closure()
            except Exception as error:
                failure = error  # raised only after lending: another rank waits for our gradients
            self.lend(self.survey(joined=False, closure=True))
            if failure is not None:
                raise failure
            return loss

        return run

    def borrowing(self) -> Closure:
        """A closure for a shadow of such ranks that has borrowed already: only a further call borrows again."""
        calls = count()

        def run() -> None:
            if next(calls) > 0:
                self.lend(self.survey(joined=True))

        return run

    def after_step(self, *, joined: bool) -> None:
        """No later shadow step may use what is on this rank now."""
        self._cleared = joined
        if joined:
            for param in self._mine().values():
                param.grad = None

    def _mine(self) -> Mapping[int, torch.Tensor]:
        return self._owned(self._comm.group.rank)

    def _send(self, needy: Rank) -> None:
        grads = {i: _portable(param.grad) for i, param in self._owned(needy).items() if param.grad is not None}
        Outbox(grads).send(self._comm, needy)

    def _take(self, grads: dict[int, Any]) -> None:
        for index, param in self._mine().items():
            param.grad = _restored(grads[index]).to(param.device) if index in grads else None


class ShadowStep(JoinHook):
    """What `Join` runs on a rank that ran out of inputs, as often as the others step."""

    def __init__(self, step: Callable[[], object]) -> None:
        self._step = step

    def main_hook(self) -> None:
        self._step()


def _portable(grad: torch.Tensor) -> Any:
    if grad.layout != torch.sparse_coo:
        return grad
    # As it is: sums in another order would round differently.
    parts = {"indices": grad._indices(), "values": grad._values(), "size": tuple(grad.shape)}
    return {**parts, "is_coalesced": grad.is_coalesced()}


def _restored(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else torch.sparse_coo_tensor(**value)
