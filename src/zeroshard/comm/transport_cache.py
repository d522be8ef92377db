"""Selects the transport for each kind of bucket, with or without replicas."""

import torch

from ..config import Reduce
from .collectives import Comm
from .gloo import GlooTransport
from .hybrid import GlooHybridTransport, NcclHybridTransport
from .nccl import AllReduceTransport, NcclTransport, select_group_transport
from .transport import ShardTransport


class TransportCache:
    """One transport per device and shard shape, created on first use.

    All ranks must call `get` in the same order: each transport allocates message tags of its own.
    """

    def __init__(self, comm: Comm, reduce: Reduce) -> None:
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


def select_transport(comm: Comm, device: torch.device, reduce: Reduce, *, has_equal_shards: bool) -> ShardTransport:
    """Return the fastest transport that the backend supports. `has_equal_shards`: all shards have the same length."""
    if comm.replicas is None:
        return select_group_transport(comm.group, device, reduce, has_equal_shards=has_equal_shards)
    unreplicated = select_group_transport(comm.data_parallel.group, device, reduce, has_equal_shards=has_equal_shards)
    if isinstance(unreplicated, GlooTransport):
        return GlooHybridTransport(GlooTransport(comm.group, reduce), GlooTransport(comm.replicas, reduce))
    if isinstance(unreplicated, NcclTransport):
        return NcclHybridTransport(type(unreplicated)(comm.group, reduce), comm.replicas)
    return AllReduceTransport(comm.group, reduce, comm.data_parallel.group)
