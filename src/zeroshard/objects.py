"""Python objects between ranks, without running code."""

from typing import Any

import torch
import torch.distributed as dist

from .checkpoint.codec import pack, unpack
from .checkpoint.trees import map_tensors
from .comm.agreement import agree
from .comm.collectives import Comm
from .comm.group import Group
from .units import Rank


def broadcast_object(
    obj: Any,
    src_rank: int,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
) -> Any:
    """The source's object on every rank of the group, its tensors on `device`; the source returns its own.

    `src_rank` is a global rank. What `torch.load(weights_only=True)` would not read is refused, on all ranks.
    """
    comm = Comm(Group(group))
    source = Rank(dist.get_group_rank(comm.group.process_group, src_rank))
    data, failure = None, None
    if comm.group.rank == source:
        try:
            data = pack(obj)
        except Exception as error:
            failure = error
    agree(comm, "broadcast_object", [f"src_rank={src_rank}"], failure)
    received = comm.broadcast_bytes(data, source)
    if comm.group.rank == source:
        return obj
    return map_tensors(unpack(received), lambda tensor: tensor.to(device))
