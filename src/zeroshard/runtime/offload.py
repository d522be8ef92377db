"""State in host memory: it comes to the device bucket by bucket, is updated there, and goes back.

While one bucket is updated, the state of the next is on its way in, and that of the last on its way out.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import groupby
from typing import Any

import torch

from ..labels import Clock, Label
from .host import Host, Hosts, is_movable
from .inner import ShardOptimizer
from .masters import HostMasters, ShardMemory
from .parts import Part
from .segments import Segment, State


def is_far(device: torch.device) -> bool:
    """Whether the host can spare memory there."""
    return device.type == "cuda"


class Offloading:
    """Steps inner optimizers whose state rests in host memory."""

    def __init__(self, hosts: Hosts, memory: ShardMemory, clock: Clock) -> None:
        self._hosts, self._memory, self._clock = hosts, memory, clock

    def step(self, part: Part, kwargs: dict[str, Any]) -> Any:
        """State of what has no gradient stays where it is, unless the optimizer moves that, too."""
        step, everything = _OneStep(part.inner, kwargs), part.traits.moves_without_grads
        chosen = [segment for segment in part if everything or segment.param.grad is not None]

        def update(segments: Sequence[Segment]) -> None:
            with ExitStack() as after, self._clock.part(Label.INNER_STEP, part.name):  # also where it fails
                after.callback(self._memory.after_update, segments)
                after.callback(part.holdings.bind, segments)
                step.go_on(segments)

        self._through(part.inner, chosen, update)
        if not chosen:
            step.go_on([])  # it may count its steps
        return step.result

    def each(self, part: Part, action: Callable[[], object]) -> None:
        """Do something to all parameters of the inner optimizer and their state, on the device, some at a time."""

        def do(segments: Sequence[Segment]) -> None:
            with part.inner.only({id(segment.param) for segment in segments}):
                action()

        self._through(part.inner, list(part), do)

    def _through(
        self, inner: ShardOptimizer, segments: Sequence[Segment], action: Callable[[Sequence[Segment]], None]
    ) -> None:
        runs = [list(run) for _, run in groupby(sorted(segments, key=_bucket), key=_bucket)]
        hosts = [self._hosts.of(run[0].param.device) for run in runs]
        batches = [_Batch(*it, inner, self._memory, self._clock) for it in zip(runs, hosts, strict=True)]
        try:
            for number, batch in enumerate(batches):
                for ahead in batches[number : number + 2]:
                    ahead.fetch()
                batch.use()
                action(batch.segments)
                batch.stow()
        finally:
            self._bring_home(batches)

    def _bring_home(self, batches: Sequence["_Batch"]) -> None:
        """All that can be. What fails is raised at the end."""
        failure: Exception | None = None
        for batch in batches:
            try:
                batch.stow()
            except Exception as error:
                failure = failure or error
        with self._clock.part(Label.STOW):
            self._hosts.finish()
        if failure is not None:
            raise failure


class _Batch:
    """Segments of a bucket, with their state and master weights."""

    def __init__(
        self, segments: Sequence[Segment], host: Host, inner: ShardOptimizer, memory: ShardMemory, clock: Clock
    ) -> None:
        self.segments, self._host, self._inner, self._clock = segments, host, inner, clock
        self._bucket = _bucket(segments[0])
        self._masters = memory if isinstance(memory, HostMasters) else None
        self._homes: dict[tuple[int, Any], torch.Tensor] = {}
        self._is_here = False
        self._arrival: Any = None

    def fetch(self) -> None:
        """Start bringing everything to the device."""
        if self._is_here or not is_far(self.segments[0].param.device):
            return
        self._is_here = True
        with self._clock.part(Label.FETCH, self._bucket), self._host.on_the_way_in():
            if self._masters is not None:
                self._masters.fetch(self._bucket, self._host)
            for place, state, key, value in self._values():
                if value.device.type == "cpu":
                    self._homes[place, key] = value
                    state[key] = self._host.bring(value)
        self._arrival = self._host.arrival()

    def use(self) -> None:
        self._host.use(self._arrival)

    def stow(self) -> None:
        """Start bringing it back; what is there for the first time gets a home. State for which there is no memory
        stays on the device, and is used there."""
        if not self._is_here:
            return
        self._is_here = False
        with self._clock.part(Label.STOW, self._bucket):
            if self._masters is not None:
                self._masters.stow(self._bucket, self._host)
            for place, state, key, value in self._values():
                home = self._host.room(value, self._homes.get((place, key)))
                self._host.take(value, home)
                state[key] = home

    def _values(self) -> Iterator[tuple[int, State, Any, torch.Tensor]]:
        for place, segment in enumerate(self.segments):
            state = self._inner.optimizer.state.get(segment.param, {})
            for key, value in list(state.items()):
                if is_movable(value):
                    yield place, state, key, value


class _OneStep:
    """Many calls of `step`, each on some parameters, that count as one."""

    def __init__(self, inner: ShardOptimizer, kwargs: dict[str, Any]) -> None:
        self._inner, self._kwargs = inner, kwargs
        self._options = [dict(group) for group in inner.optimizer.param_groups]
        self._put_counters_back = inner.counters()
        self._begun = False
        self.result: Any = None

    def go_on(self, segments: Sequence[Segment]) -> None:
        if self._begun:
            self._put_counters_back()
            self._inner.push(self._options)
        self._begun = True
        with self._inner.only({id(segment.param) for segment in segments}):
            self.result = self._inner.step(**self._kwargs)


def _bucket(segment: Segment) -> int:
    return segment.bucket
