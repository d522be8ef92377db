"""The best way for each kind of bucket, with replicas or without."""

import torch

from ..policies import Reduce
from .collectives import Comm
from .pairs import Pairwise
from .replicas import Chained, Relayed
from .shards import Native, Whole, best_way
from .ways import ShardWay


class Ways:
    """The best way for each kind of bucket. All ranks ask in the same order: each way has messages of its own."""

    def __init__(self, comm: Comm, reduce: Reduce) -> None:
        self._comm, self._reduce = comm, reduce
        self._known: dict[tuple[torch.device, bool], ShardWay] = {}

    def of(self, device: torch.device, *, equal: bool) -> ShardWay:
        """`equal`: all shards are equally long."""
        kind = (device, equal)
        if kind not in self._known:
            self._known[kind] = way_of(self._comm, device, self._reduce, equal=equal)
        return self._known[kind]

    def kept(self) -> list[torch.Tensor]:
        """Memory that they keep for the next messages."""
        return [tensor for way in self._known.values() for tensor in way.kept()]

    @property
    def eager(self) -> bool:
        """All of them are."""
        return all(way.eager for way in self._known.values())


def way_of(comm: Comm, device: torch.device, reduce: Reduce, *, equal: bool) -> ShardWay:
    """`equal`: all shards are equally long."""
    if comm.replicas is None:
        return best_way(comm.group, device, reduce, equal=equal)
    plain = best_way(comm.everyone.group, device, reduce, equal=equal)
    if isinstance(plain, Pairwise):
        return Relayed(Pairwise(comm.group, reduce), Pairwise(comm.replicas, reduce))
    if isinstance(plain, Native):
        return Chained(type(plain)(comm.group, reduce), comm.replicas)
    return Whole(comm.group, reduce, comm.everyone.group)
