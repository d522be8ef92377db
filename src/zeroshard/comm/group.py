"""The process group, and this process's place in it."""

from functools import cached_property
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ..errors import ConfigError
from ..units import GlobalRank, Rank

_companions: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
"""One for each process group that carries no CPU tensors, however many optimizers use it."""


class Group:
    """A process group with its two kinds of ranks kept apart."""

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                "the default process group is not initialized: call torch.distributed.init_process_group() first"
            )
        chosen = process_group or dist.group.WORLD
        assert chosen is not None, "an initialized job has a world"
        self.process_group = chosen
        self.global_rank = GlobalRank(dist.get_rank())
        rank = dist.get_rank(self.process_group)
        if rank < 0:
            raise ConfigError(f"global rank {self.global_rank} is not a member of the given process group")
        self.rank = Rank(rank)
        self.size: int = self.process_group.size()
        members = [GlobalRank(member) for member in dist.get_process_group_ranks(self.process_group)]
        self._members = {Rank(dist.get_group_rank(self.process_group, member)): member for member in members}

    def to_global(self, rank: Rank) -> GlobalRank:
        return self._members[rank]

    def from_global(self, rank: int) -> Rank:
        for mine, member in self._members.items():
            if member == rank:
                return mine
        raise ConfigError(f"global rank {rank} is not a member of the process group of {list(self._members.values())}")

    def carries(self, device: torch.device) -> bool:
        """Whether tensors on `device` can travel in this group."""
        return any(kind.type == device.type for kind in self.process_group._device_types)

    @cached_property
    def control(self) -> dist.ProcessGroup:
        """The same ranks, for small messages between hosts: a group that carries CPU tensors.

        A group that cannot (plain NCCL) gets a gloo companion, so that agreeing on something never
        waits for a GPU. First use is collective.
        """
        if self.carries(torch.device("cpu")):
            return self.process_group
        if self.process_group not in _companions:
            members = list(self._members.values())
            _companions[self.process_group] = dist.new_group(members, backend="gloo", use_local_synchronization=True)
        return _companions[self.process_group]
