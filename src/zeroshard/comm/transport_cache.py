"""Selects the transport for each kind of bucket, with or without replicas."""

from collections.abc import Callable

import torch

from .._torch_compat import backend_name
from ..config import ReducePolicy
from .collectives import Comm
from .gloo import GlooTransport
from .hybrid import GlooHybridTransport, NcclHybridTransport
from .nccl import AllReduceTransport, NcclTransport, NcclUnevenTransport
from .process_group import Group
from .transport import ShardTransport


class TransportCache:
    """One transport per device for shards of equal length, and one for others, created on first use.

    All ranks must call `get` in the same order: each transport allocates message tags of its own.
    """

    def __init__(self, comm: Comm, reduce: ReducePolicy) -> None:
        self._comm, self._reduce = comm, reduce
        self._transports: dict[tuple[torch.device, bool], ShardTransport] = {}

    def get(self, device: torch.device, *, has_equal_shards: bool) -> ShardTransport:
        """Return the transport for buckets on `device`. `has_equal_shards`: all shards have the same length."""
        key = (device, has_equal_shards)
        if key not in self._transports:
            self._transports[key] = select_transport(
                self._comm, device, self._reduce, has_equal_shards=has_equal_shards
            )
        return self._transports[key]

    def cached_buffers(self) -> list[torch.Tensor]:
        """Return the memory that transports keep for reuse."""
        return [buffer for transport in self._transports.values() for buffer in transport.cached_buffers()]

    @property
    def can_overlap_backward(self) -> bool:
        return all(transport.can_overlap_backward for transport in self._transports.values())


STREAM_BACKENDS = ("nccl", "xccl", "hccl", "fake")
"""Backends with NCCL's collectives, which block a stream and not the host."""


def select_transport(
    comm: Comm, device: torch.device, reduce: ReducePolicy, *, has_equal_shards: bool
) -> ShardTransport:
    """Return the fastest transport that the backend supports. `has_equal_shards`: all shards have the same length."""
    transport_class = select_transport_class(comm.data_parallel.group, device, has_equal_shards=has_equal_shards)
    if comm.replicas is None:
        return transport_class(comm.group, reduce)
    return _WITH_REPLICAS[transport_class](comm, comm.replicas, reduce)


def select_transport_class(group: Group, device: torch.device, *, has_equal_shards: bool) -> type[ShardTransport]:
    """Return the class of the fastest transport without replicas.

    To add a transport for another backend, select its class here, and say in `_WITH_REPLICAS` how it works with
    replicas. A backend whose collectives block a stream, as NCCL's do, only needs its name in `STREAM_BACKENDS`.
    Backends that are not named use `AllReduceTransport`.
    """
    backend = backend_name(group.process_group, device).lower() if group.size > 1 else ""
    if backend in STREAM_BACKENDS:
        return NcclTransport if has_equal_shards else NcclUnevenTransport
    return GlooTransport if device.type == "cpu" and backend in ("gloo", "mpi") else AllReduceTransport


_WITH_REPLICAS: dict[type[ShardTransport], Callable[[Comm, Group, ReducePolicy], ShardTransport]] = {
    GlooTransport: lambda comm, replicas, reduce: GlooHybridTransport(
        GlooTransport(comm.group, reduce), GlooTransport(replicas, reduce)
    ),
    NcclTransport: lambda comm, replicas, reduce: NcclHybridTransport(NcclTransport(comm.group, reduce), replicas),
    NcclUnevenTransport: lambda comm, replicas, reduce: NcclHybridTransport(
        NcclUnevenTransport(comm.group, reduce), replicas
    ),
    AllReduceTransport: lambda comm, _, reduce: AllReduceTransport(comm.group, reduce, comm.data_parallel.group),
}
"""For each transport class, builds its version for hybrid sharding."""
