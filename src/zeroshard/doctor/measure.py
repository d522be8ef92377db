"""What the verbs between ranks take here, through the ways that training takes."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import NamedTuple

import torch

from ..comm.choice import way_of
from ..comm.collectives import Comm
from ..comm.group import Group
from ..comm.rows import NODE, comm_of
from ..layout.shards import EqualShards
from ..policies import Reduce
from ..units import MIB, Rank
from .speed import timed

_SECONDS = 0.3
"""That one measurement may take."""
_LONG_ENOUGH = 0.02
"""Seconds of a message whose latency no longer counts."""
_FEWEST, _MOST = 3, 15


@dataclass(frozen=True)
class Timing:
    """Of one verb: seconds of a tiny message, and of one of `nbytes`, of which the part `crossing` reaches a rank."""

    verb: str
    way: str
    small: float
    large: float
    nbytes: int
    crossing: float

    @property
    def rate(self) -> float:
        """Bytes a second that reach a rank."""
        return self.nbytes * self.crossing / max(self.large, 1e-9)


@dataclass(frozen=True)
class Rates:
    """Bytes a second of an all-gather: among the ranks of a host, and among those of one place on all hosts."""

    within: float
    between: float


class _Verb(NamedTuple):
    name: str
    way: str
    crossing: float
    call: Callable[[torch.Tensor], object]


class Bench:
    """Measures verbs of a group on tensors that lie on a device. All ranks make the same calls."""

    def __init__(self, comm: Comm, device: torch.device) -> None:
        self._comm, self._device, self._ranks = comm, device, comm.group.size
        self._way = way_of(comm, device, Reduce(), equal=True)

    def timings(self, most: int) -> list[Timing]:
        """Of all verbs, with messages of no more than `most` bytes."""
        verbs, nbytes = self._verbs(), self.fitting(most)
        return [self._timing(verb, nbytes) for verb in verbs]

    def agreement(self) -> float:
        """Seconds that ranks take to agree on something."""
        return self._seconds(lambda: self._comm.maximum([0]))

    def fitting(self, most: int) -> int:
        """Bytes of a message that takes long enough to be measured."""
        nbytes = MIB // 4
        while nbytes * 4 <= most:
            flat = self._flat(nbytes)
            if self._pilot(partial(self._gather, flat)) >= _LONG_ENOUGH:
                break
            nbytes *= 4
        return nbytes

    def rate_of_gather(self, nbytes: int) -> float:
        flat, share = self._flat(nbytes), (self._ranks - 1) / self._ranks
        return nbytes * share / max(self._seconds(lambda: self._gather(flat)), 1e-9)

    def _verbs(self) -> list[_Verb]:
        share, way = (self._ranks - 1) / self._ranks, type(self._way).__name__
        return [
            _Verb("all-reduce", "native", 2 * share, self._comm.sum_of),
            _Verb("reduce-scatter", way, share, self._reduce),
            _Verb("all-gather", way, share, self._gather),
            _Verb("broadcast", "native", 1.0 if self._ranks > 1 else 0.0, self._broadcast),
        ]

    def _reduce(self, flat: torch.Tensor) -> None:
        into = torch.empty_like(flat[: flat.numel() // self._ranks])
        self._way.reduce(flat, self._shards(flat), into, 1 / self._ranks).wait()

    def _gather(self, flat: torch.Tensor) -> None:
        self._way.gather(flat, self._shards(flat)).wait()

    def _broadcast(self, flat: torch.Tensor) -> None:
        self._comm.broadcast(flat, Rank(0)).wait()

    def _shards(self, flat: torch.Tensor) -> EqualShards:
        return EqualShards(flat.numel() // self._ranks, self._ranks, flat.numel())

    def _flat(self, nbytes: int) -> torch.Tensor:
        """About so many: a slice of equal length for each rank."""
        each = max(nbytes // 4 // self._ranks, 1)
        return torch.zeros(each * self._ranks, dtype=torch.float32, device=self._device)

    def _timing(self, verb: _Verb, nbytes: int) -> Timing:
        tiny, flat = self._flat(4), self._flat(nbytes)
        # The quickest of tiny messages: what holds up others is another process, and no latency.
        small, large = self._seconds(lambda: verb.call(tiny), min), self._seconds(lambda: verb.call(flat))
        return Timing(verb.name, verb.way, small, large, flat.nbytes, verb.crossing)

    def _seconds(self, call: Callable[[], object], of: Callable[[list[float]], float] = median) -> float:
        repeats = int(_SECONDS / max(self._pilot(call), 1e-6))
        return timed(call, self._device, min(max(repeats, _FEWEST), _MOST), of)

    def _pilot(self, call: Callable[[], object]) -> float:
        """Seconds on the slowest rank, so that all do the same afterwards."""
        return self._comm.maximum([int(timed(call, self._device, _FEWEST) * 1e9)])[0] / 1e9


def rates_of_rows(group: Group, device: torch.device, most: int) -> Rates:
    """On all ranks, where there are several on each of several hosts."""
    comm = comm_of(group.process_group, None, NODE)
    assert comm.replicas is not None, "there are several hosts"
    row, column = (Bench(Comm(it), device) for it in (comm.group, comm.replicas))
    nbytes = comm.everyone.maximum([row.fitting(most), column.fitting(most)])
    return Rates(row.rate_of_gather(nbytes[0]), column.rate_of_gather(nbytes[1]))
