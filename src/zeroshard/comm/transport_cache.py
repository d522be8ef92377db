"""The best way for each kind of bucket, with replicas or without."""

import torch

from ..config import Reduce
from .collectives import Comm
from .gloo import GlooTransport
from .hybrid import GlooHybridTransport, NcclHybridTransport
from .nccl import AllReduceTransport, NcclTransport, select_group_transport
from .transport import ShardTransport


class TransportCache:
    """The best way for each kind of bucket. All ranks ask in the same order: each way has messages of its own."""

    def __init__(self, comm: Comm, reduce: Reduce) -> None:
        self._comm, self._reduce = comm, reduce
        self._transports: dict[tuple[torch.device, bool], ShardTransport] = {}

    def get(self, device: torch.device, *, has_equal_shards: bool) -> ShardTransport:
        """`equal`: all shards are equally long."""
        kind = (device, has_equal_shards)
        if kind not in self._transports:
            self._transports[kind] = select_transport(
                self._comm, device, self._reduce, has_equal_shards=has_equal_shards
            )
        return self._transports[kind]

    def cached_buffers(self) -> list[torch.Tensor]:
        """Memory that they keep for the next messages."""
        return [tensor for way in self._transports.values() for tensor in way.cached_buffers()]

    @property
    def can_overlap_backward(self) -> bool:
        """All of them are."""
        return all(way.can_overlap_backward for way in self._transports.values())


def select_transport(comm: Comm, device: torch.device, reduce: Reduce, *, has_equal_shards: bool) -> ShardTransport:
    """`equal`: all shards are equally long."""
    if comm.replicas is None:
        return select_group_transport(comm.group, device, reduce, has_equal_shards=has_equal_shards)
    plain = select_group_transport(comm.data_parallel.group, device, reduce, has_equal_shards=has_equal_shards)
    if isinstance(plain, GlooTransport):
        return GlooHybridTransport(GlooTransport(comm.group, reduce), GlooTransport(comm.replicas, reduce))
    if isinstance(plain, NcclTransport):
        return NcclHybridTransport(type(plain)(comm.group, reduce), comm.replicas)
    return AllReduceTransport(comm.group, reduce, comm.data_parallel.group)
