"""Parameters that a sharded optimizer divides among ranks: each rank writes and reads what it owns of them."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.optim import Optimizer

from ..comm.collectives import Comm
from ..comm.process_group import Group, resolve_group
from ..errors import CheckpointError, ConfigError
from ..engine.base import Engine
from ..state.trees import collect_plain_tensors
from .names import format_names
from .optimizer_adapter import get_engine


def collect_model_state(rank: int, model: torch.nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    """What a rank writes of a model: its parts of what is divided, and parameters that all have.

    Buffers, and what modules add, may differ between ranks: those of the first one count, as they do in training.
    """
    owned = ShardedParams(optimizer)
    found = get_model_state_dict(model)
    if rank:
        params = {storage_key(param) for param in model.parameters()}
        found = {name: it for name, it in found.items() if storage_key(it) in params or _has_dtensor(it)}
    return {
        name: owned.engine.shard_tensor(i) if (i := owned.find_index(it)) is not None else it
        for name, it in found.items()
    }


def _has_dtensor(value: Any) -> bool:
    return any(hasattr(tensor, "to_local") for tensor in collect_plain_tensors(value))


class ShardedParams:
    """Parameters found by where they lie: a model's dict has others over the same memory.

    Hazard: made before that dict is taken, since parameters whose memory was exchanged are moved back here.
    """

    def __init__(self, optimizer: Optimizer | None) -> None:
        self._index_by_storage_key: dict[Any, int] = {}
        engine = get_engine(optimizer)
        if engine is not None:
            self.engine: Engine = engine
            self.engine.wait_until_idle()
            self._index_by_storage_key = {
                storage_key(param): index for index, param in enumerate(self.engine.params) if param.numel()
            }

    def __bool__(self) -> bool:
        return bool(self._index_by_storage_key)

    def find_index(self, value: Any) -> int | None:
        """The number of a parameter in the optimizer."""
        return self._index_by_storage_key.get(storage_key(value)) if self._index_by_storage_key else None


def storage_key(value: Any) -> object:
    """Where a tensor lies, the same for all that are over the same memory in the same way."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return None
    local = value.to_local() if hasattr(value, "to_local") else value
    return local.data_ptr(), tuple(local.shape), local.stride(), local.dtype, local.device


def choose_group(process_group: dist.ProcessGroup | None, optimizer: Optimizer | None) -> Group:
    """The ranks that save or load together: the given ones, else those of a sharded optimizer, else all."""
    engine = get_engine(optimizer)
    if process_group is None and engine is not None and dist.is_initialized():
        own = engine.comm.data_parallel.group
        if own.size < dist.get_world_size():
            return own
    # Hazard: where the optimizer has all ranks in a group of its own, one that forgot it still meets the others here.
    return resolve_group(process_group)


def check_optimizer_ranks(optimizer: Optimizer | None, group: Group, call: str) -> None:
    """A part of the ranks has a part of the state, and would wait for the others."""
    engine = get_engine(optimizer)
    if engine is None:
        return
    comm = engine.comm
    members = comm.data_parallel.group.members
    if sorted(members) != sorted(group.members):
        name = "process_group" if comm.replicas is None else "join_process_group"
        raise ConfigError(
            f"{call}() is called by ranks {group.members}, but the optimizer is sharded over ranks "
            f"{members}: give it process_group=optimizer.{name}"
        )


def check_state_on_all_owners(optimizer: Optimizer | None, comm: Comm) -> None:
    """Raise on all ranks if only some owners of a parameter have state of it, which files would have in part."""
    engine = get_engine(optimizer)
    if engine is None or comm.group.size == 1:
        return
    state, count = engine.state(), len(engine.params)
    flags = bytearray(2 * count)
    for index, param in engine.owned_params(engine.comm.group.rank).items():
        flags[index if state.get(param) else count + index] = 1
    both = comm.all_reduce_any(bytes(flags))
    torn = [engine.layout.params[index].label for index in range(count) if both[index] and both[count + index]]
    if torn:
        raise CheckpointError(
            f"some ranks have optimizer state of {format_names(torn)}, and others that own a part of it have none, as "
            "after a step that failed on one rank. Load a checkpoint before you save one."
        )
