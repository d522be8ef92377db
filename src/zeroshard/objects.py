"""Python objects between ranks, without running code."""

from typing import Any

import torch
import torch.distributed as dist

from .comm.consensus import Prepared, prepare_all
from .comm.collectives import Comm
from .comm.process_group import Group
from .errors import ConfigError
from .state.codec import dumps, loads
from .state.readers import check_types_allowed, find_custom_types
from .state.trees import map_tensors


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

    def prepare() -> Prepared[tuple[bytes | None, list[str]]]:
        _check_device_exists(device)
        data = dumps(obj) if comm.group.from_global(src_rank) == comm.group.rank else None
        return Prepared((data, find_custom_types(data) if data is not None else []), [f"src_rank={src_rank}"])

    data, types = prepare_all(comm, "broadcast_object", prepare)
    check_types_allowed(comm, "broadcast_object", types)
    received = comm.broadcast_bytes(data, comm.group.from_global(src_rank))
    if data is not None:
        return obj
    return map_tensors(loads(received), lambda tensor: tensor.to(device))


def _check_device_exists(device: torch.device | str) -> None:
    """Where it is not there, that is found before anything is sent."""
    try:
        torch.empty(0, device=device)
    except Exception as error:
        raise ConfigError(f"broadcast_object: device={device!r:.200} is none that this rank has: {error}") from error
