"""A second copy of every rank's share, in the memory of another rank.

A generation is what all ranks had after one step. It counts when every rank has its own share and those that it keeps
for others; until then the one before stays. So whenever a rank is lost, those that are left have one generation whole.
"""

import random
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from .comm.agreement import Proposal, agreed
from .comm.aside import Aside
from .comm.collectives import Comm
from .comm.ending import wait_at_exit_for
from .comm.line import Line
from .errors import RankFailedError
from .labels import Label
from .layout.partners import keepers, wards
from .notices import warn_user
from .policies import SecondCopy
from .runtime.inner import ParamGroup
from .runtime.step import Engine
from .state.compat import write_groups
from .state.copies import share_of
from .state.exchange import Outbox, receive
from .state.parcels import Packed, packed
from .state.readers import require_readers
from .state.trees import plain_tensors
from .units import Rank

COMMON = -1
"""The share of what all ranks have alike, which rank 0 gives: options, buffers, names of parameters."""
_MOST_TAG = 1 << 62

Buffers = Mapping[str, torch.Tensor]


@dataclass
class Generation:
    """What this rank has of one: shares by their place in the layout, and `COMMON`."""

    tag: int
    """Of all copies that one optimizer makes."""
    step: int
    places: int
    """How many shares there are."""
    shares: dict[int, Packed] = field(default_factory=dict)


class Copies:
    """The copies that this rank holds: of its own share, and of those that it keeps for others.

    They are values in host memory, and stay when the process group and the optimizer are gone.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._whole: Generation | None = None
        self._coming: Generation | None = None
        self.traffic = 0
        """Bytes that this rank has sent for the last copy."""

    @property
    def step(self) -> int | None:
        """The number of steps after which the copy was taken that all ranks have; None if there is none yet."""
        with self._lock:
            return None if self._whole is None else self._whole.step

    @property
    def memory(self) -> int:
        """Bytes that they take on this rank, also what is still coming."""
        return sum(tensor.nbytes for it in self.generations() for tensor in plain_tensors(it.shares))

    def generations(self) -> list[Generation]:
        """All that is here, also of a generation that did not become whole."""
        with self._lock:
            found = [it for it in (self._whole, self._coming) if it is not None]
            return [Generation(it.tag, it.step, it.places, dict(it.shares)) for it in found]

    def begin(self, generation: Generation) -> None:
        with self._lock:
            self._coming = generation

    def keep(self, tag: int, step: int) -> None:
        """That generation is whole, as ranks have found out together."""
        with self._lock:
            for it in (self._whole, self._coming):
                if it is not None and (it.tag, it.step) == (tag, step):
                    self._whole, self._coming = it, None
                    return

    def forget(self) -> None:
        """All of it, also what is coming."""
        with self._lock:
            self._whole = self._coming = None

    def add(self, generation: Generation, shares: Mapping[int, Any]) -> None:
        with self._lock:
            generation.shares.update(shares)

    def confirm(self, generation: Generation) -> None:
        """All ranks have it."""
        with self._lock:
            if self._coming is generation:
                self._whole, self._coming = generation, None


class Copying:
    """Takes copies of an optimizer's share, and exchanges them in a thread."""

    def __init__(self, comm: Comm, policy: SecondCopy) -> None:
        """On all ranks."""
        self._comm, self._policy = comm, policy
        self.held = Copies()
        self._taken, self._is_due = 0, False
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        everyone = comm.everyone
        self._rank = everyone.group.rank
        if comm.is_alone:
            warn_user("SecondCopy(...) on one rank: there is no other to keep a copy, which is lost with this process")
            self._keepers, self._tag = [0], random.SystemRandom().randrange(_MOST_TAG)
            return
        self._aside = Aside(everyone.group)
        self._keepers = keepers(_domains(everyone, policy.apart))
        self._tag = everyone.maximum([random.SystemRandom().randrange(_MOST_TAG)])[0]

    def after_step(self, engine: Engine, groups: Sequence[ParamGroup], buffers: Callable[[], Buffers]) -> None:
        """Take a copy if it is time for one. On all ranks."""
        if engine.steps != self._taken and (self._is_due or engine.steps % self._policy.every == 0):
            with self._comm.clock.part(Label.COPY):
                self.take(engine, groups, buffers)

    def begin_anew(self) -> None:
        """What was copied is no more: something else was loaded, and is copied after the next step. On all ranks."""
        self.held.forget()
        self._is_due = True

    def take(self, engine: Engine, groups: Sequence[ParamGroup], buffers: Callable[[], Buffers]) -> None:
        """Copy this rank's share to host memory, and start to exchange it. On all ranks.

        Waits for the exchange before, if that is still under way, and raises what failed in it.
        """

        def propose() -> Proposal[tuple[Generation, Outbox]]:
            self.settle()
            mine = {number: packed(share) for number, share in self._shares(engine, groups, buffers).items()}
            return Proposal((Generation(self._tag, engine.steps, engine.layout.world_size, mine), Outbox(mine)))

        self._taken, self._is_due = engine.steps, False
        call = f"the second copy of step {engine.steps}"
        generation, outbox = agreed(self._comm, call, propose)
        types = {name for share in generation.shares.values() for name in share["types"]}
        require_readers(self._comm, call, sorted(types))
        self.held.begin(generation)
        if self._comm.is_alone:
            self.held.confirm(generation)
            return
        # Hazard: both start here, since no thread can once the process is about to end.
        sending = _Sending(self._aside, outbox, Rank(self._keepers[self._rank]))
        self._thread = _started(partial(self._run, generation, sending), self._aside.group.line)
        self.held.traffic = outbox.nbytes

    def settle(self) -> None:
        """No exchange is under way. Raises what failed in the last one, once."""
        if self._thread is not None:
            self._thread.join()
        failure, self._failure, self._thread = self._failure, None, None
        if failure is not None:
            raise failure

    def _shares(
        self, engine: Engine, groups: Sequence[ParamGroup], buffers: Callable[[], Buffers]
    ) -> dict[int, dict[str, Any]]:
        place = engine.comm.group.rank
        weights = {index: engine.part(index) for index in engine.owned(place)}
        shares = {int(place): share_of(engine.records(), weights)}
        if self._rank == 0:
            shares[COMMON] = common_of(engine, groups, buffers())
        return shares

    def _run(self, generation: Generation, sending: "_Sending") -> None:
        """All ranks send and receive at once: in a ring where all only sent first, nobody would be there to receive."""
        failure = self._receive(generation)
        failure = sending.end() or failure
        try:
            if self._aside.all_well(well=failure is None):
                self.held.confirm(generation)
            else:
                failure = failure or RankFailedError(f"another rank did not get the copy of step {generation.step}")
        except BaseException as error:
            failure = failure or error
        self._failure = failure

    def _receive(self, generation: Generation) -> BaseException | None:
        """What others give to keep; what failed, if anything did."""
        try:
            with self._aside.group.line.relied_on():
                for ward in wards(self._keepers, self._rank):
                    self.held.add(generation, receive(self._aside, Rank(ward)))
        except BaseException as error:
            return error
        return None


class _Sending:
    def __init__(self, comm: Aside, outbox: Outbox, to: Rank) -> None:
        self._failure: BaseException | None = None
        self._job = (comm, outbox, to)
        self._thread = _started(self._run, comm.group.line)

    def end(self) -> BaseException | None:
        """Wait for it; what failed, if anything did."""
        self._thread.join()
        return self._failure

    def _run(self) -> None:
        comm, outbox, to = self._job
        try:
            with comm.group.line.relied_on():
                outbox.send(comm, to)
        except BaseException as error:
            self._failure = error


def _started(job: Callable[[], None], line: Line) -> threading.Thread:
    thread = threading.Thread(target=job, name="zeroshard-copy", daemon=True)
    thread.start()
    wait_at_exit_for(thread, line=line)
    return thread


def copying(comm: Comm, policy: SecondCopy | None) -> Copying | None:
    """What a config asks for. On all ranks."""
    return None if policy is None else Copying(comm, policy)


def common_of(engine: Engine, groups: Sequence[ParamGroup], buffers: Buffers) -> dict[str, Any]:
    """What all ranks have alike."""
    others = {key: value for member in engine.inner.members for key, value in member.shared().items()}
    return {
        "params": names_of(engine),
        "groups": write_groups(groups),
        "extra": engine.inner.extra(),
        "others": others,
        "buffers": dict(buffers),
    }


def names_of(engine: Engine) -> list[str]:
    """A line for each parameter, by which another optimizer knows that its own are the same."""
    return [f"{it.label}: shape {it.shape}, strides {it.stride}, {it.dtype}" for it in engine.layout.params]


def _domains(everyone: Comm, apart: int | None) -> list[str] | list[int]:
    if apart is not None:
        return [rank // apart for rank in range(everyone.group.size)]
    return everyone.share(socket.gethostname(), most=256)
