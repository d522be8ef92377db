"""What the verbs between ranks take here, through the ways that training takes."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import NamedTuple

import torch

from ..comm.transport_cache import select_transport
from ..comm.collectives import Comm
from ..comm.process_group import Group
from ..comm.mesh import NODE, make_comm
from ..layout.shards import EqualShards
from ..policies import Reduce
from .._types import MIB, Rank
from .speed import time_call

_MEASUREMENT_BUDGET_S = 0.3
"""That one measurement may take."""
_MIN_MESSAGE_S = 0.02
"""Seconds of a message whose latency no longer counts."""
_MIN_REPEATS, _MAX_REPEATS = 3, 15


@dataclass(frozen=True)
class CollectiveTiming:
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
class NodeBandwidths:
    """Bytes a second of an all-gather: among the ranks of a host, and among those of one place on all hosts."""

    within: float
    between: float


class _Collective(NamedTuple):
    name: str
    transport: str
    received_fraction: float
    call: Callable[[torch.Tensor], object]


class CollectiveBenchmark:
    """Measures verbs of a group on tensors that lie on a device. All ranks make the same calls."""

    def __init__(self, comm: Comm, device: torch.device) -> None:
        self._comm, self._device, self._world_size = comm, device, comm.group.size
        self._transport = select_transport(comm, device, Reduce(), has_equal_shards=True)

    def measure_timings(self, max_bytes: int) -> list[CollectiveTiming]:
        """Of all verbs, with messages of no more than `most` bytes."""
        verbs, nbytes = self._collectives(), self.choose_message_bytes(max_bytes)
        return [self._time_collective(verb, nbytes) for verb in verbs]

    def measure_consensus_seconds(self) -> float:
        """Seconds that ranks take to agree on something."""
        return self._measure_seconds(lambda: self._comm.all_reduce_max([0]))

    def choose_message_bytes(self, max_bytes: int) -> int:
        """Bytes of a message that takes long enough to be measured."""
        nbytes = MIB // 4
        while nbytes * 4 <= max_bytes:
            flat = self._make_flat_tensor(nbytes)
            if self._measure_pilot_seconds(partial(self._all_gather, flat)) >= _MIN_MESSAGE_S:
                break
            nbytes *= 4
        return nbytes

    def measure_all_gather_bandwidth(self, nbytes: int) -> float:
        flat, share = self._make_flat_tensor(nbytes), (self._world_size - 1) / self._world_size
        return nbytes * share / max(self._measure_seconds(lambda: self._all_gather(flat)), 1e-9)

    def _collectives(self) -> list[_Collective]:
        share, way = (self._world_size - 1) / self._world_size, type(self._transport).__name__
        return [
            _Collective("all-reduce", "native", 2 * share, self._comm.all_reduce_sum_),
            _Collective("reduce-scatter", way, share, self._reduce_scatter),
            _Collective("all-gather", way, share, self._all_gather),
            _Collective("broadcast", "native", 1.0 if self._world_size > 1 else 0.0, self._broadcast),
        ]

    def _reduce_scatter(self, flat: torch.Tensor) -> None:
        into = torch.empty_like(flat[: flat.numel() // self._world_size])
        self._transport.reduce_scatter(flat, self._equal_shards(flat), into, 1 / self._world_size).wait()

    def _all_gather(self, flat: torch.Tensor) -> None:
        self._transport.all_gather(flat, self._equal_shards(flat)).wait()

    def _broadcast(self, flat: torch.Tensor) -> None:
        self._comm.broadcast(flat, Rank(0)).wait()

    def _equal_shards(self, flat: torch.Tensor) -> EqualShards:
        return EqualShards(flat.numel() // self._world_size, self._world_size, flat.numel())

    def _make_flat_tensor(self, nbytes: int) -> torch.Tensor:
        """About so many: a slice of equal length for each rank."""
        each = max(nbytes // 4 // self._world_size, 1)
        return torch.zeros(each * self._world_size, dtype=torch.float32, device=self._device)

    def _time_collective(self, collective: _Collective, nbytes: int) -> CollectiveTiming:
        tiny, flat = self._make_flat_tensor(4), self._make_flat_tensor(nbytes)
        # The quickest of tiny messages: what holds up others is another process, and no latency.
        small, large = (
            self._measure_seconds(lambda: collective.call(tiny), min),
            self._measure_seconds(lambda: collective.call(flat)),
        )
        return CollectiveTiming(
            collective.name, collective.transport, small, large, flat.nbytes, collective.received_fraction
        )

    def _measure_seconds(self, call: Callable[[], object], summarize: Callable[[list[float]], float] = median) -> float:
        repeats = int(_MEASUREMENT_BUDGET_S / max(self._measure_pilot_seconds(call), 1e-6))
        return time_call(call, self._device, min(max(repeats, _MIN_REPEATS), _MAX_REPEATS), summarize)

    def _measure_pilot_seconds(self, call: Callable[[], object]) -> float:
        """Seconds on the slowest rank, so that all do the same afterwards."""
        return self._comm.all_reduce_max([int(time_call(call, self._device, _MIN_REPEATS) * 1e9)])[0] / 1e9


def measure_node_bandwidths(group: Group, device: torch.device, max_bytes: int) -> NodeBandwidths:
    """On all ranks, where there are several on each of several hosts."""
    comm = make_comm(group.process_group, None, NODE)
    assert comm.replicas is not None, "there are several hosts"
    row, column = (CollectiveBenchmark(Comm(it), device) for it in (comm.group, comm.replicas))
    nbytes = comm.data_parallel.all_reduce_max(
        [row.choose_message_bytes(max_bytes), column.choose_message_bytes(max_bytes)]
    )
    return NodeBandwidths(row.measure_all_gather_bandwidth(nbytes[0]), column.measure_all_gather_bandwidth(nbytes[1]))
