"""`Group`: a process group, its ranks, and the companion groups that zeroshard creates for it.

Group ranks (`Rank`) and global ranks (`GlobalRank`) are distinct types; `to_global` and `from_global` convert.
"""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property
from numbers import Integral
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from .._torch_compat import backend_name, group_devices, group_timeout, new_gloo_group
from .._types import GlobalRank, Rank
from ..errors import ConfigError, RankLostError
from .failure import FailureDetector, get_failure_detector, install_exit_handlers

_cpu_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
"""Gloo companion for control messages, by the process group of the same ranks; shared by all optimizers on that group.
"""
_background_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
"""Gloo companion for a thread that writes checkpoints, whose collectives run beside those of the main thread."""
_ARRIVAL_TAG = (1 << 20) - 2
"""The tag of messages before a companion is created: larger than the tags of users; nothing else has it."""


class Group:
    """A process group with its failure detector, and the mapping between group ranks and global ranks."""

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        install_exit_handlers()
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                "the default process group is not initialized: call torch.distributed.init_process_group() first"
            )
        resolved: Any = dist.group.WORLD if process_group is None else process_group
        self.global_rank = GlobalRank(dist.get_rank())
        if resolved is dist.GroupMember.NON_GROUP_MEMBER:
            raise ConfigError(
                f"global rank {self.global_rank} is not a member of the given process group. Create the optimizer only "
                "on its members."
            )
        if not isinstance(resolved, dist.ProcessGroup):
            raise ConfigError(f"expected a process group from torch.distributed.new_group(), got {resolved!r:.200}")
        self.process_group = resolved
        self.failure_detector = get_failure_detector(resolved)
        self.rank = Rank(dist.get_rank(resolved))
        self.size: int = self.process_group.size()
        members = [GlobalRank(member) for member in dist.get_process_group_ranks(self.process_group)]
        self._members = {Rank(dist.get_group_rank(self.process_group, member)): member for member in members}

    @property
    def members(self) -> list[GlobalRank]:
        return list(self._members.values())

    def to_global(self, rank: Rank) -> GlobalRank:
        return self._members[rank]

    def from_global(self, rank: int) -> Rank:
        """Return the group rank of a global rank.

        Raises:
            ConfigError: `rank` is not a member of this group.
        """
        for group_rank, member in self._members.items():
            if isinstance(rank, Integral) and member == rank:
                return group_rank
        raise ConfigError(f"global rank {rank!r:.200} is not a member of the process group of {self.members}")

    def supports_device(self, device: torch.device) -> bool:
        """Return whether the group's backend can send tensors on `device`."""
        return any(supported.type == device.type for supported in group_devices(self.process_group))

    @cached_property
    def cpu_group(self) -> dist.ProcessGroup:
        """A process group of the same ranks for small control messages in host memory.

        It is a gloo companion that only zeroshard uses, so consensus never waits for a GPU. All ranks must make the
        first access together, which the consensus of a constructor does.

        Hazard: gloo pairs collectives by their order and ends the process if the sizes of two differ. In the user's
        group, a control message of one rank would be paired with a gradient bucket of DDP on another.
        """
        if not self._needs_companion:
            return self.process_group
        companion = self._get_or_create_companion(_cpu_groups, "control")
        self.failure_detector.add_group(companion)
        return companion

    @property
    def _needs_companion(self) -> bool:
        """Whether CPU tensors go over gloo to other ranks, or cannot be sent at all.

        Other backends for CPU tensors, such as MPI, may run without the store that gloo needs.
        """
        cpu = torch.device("cpu")
        if not self.supports_device(cpu):
            return True
        return self.size > 1 and backend_name(self.process_group, cpu).lower() == "gloo"

    @property
    def timeout(self) -> timedelta | None:
        """The timeout of collectives. Subgroups inherit it: torch would give them 30 minutes."""
        return group_timeout(self.process_group)

    def attach_detector(self, data_parallel: "Group") -> None:
        """Use the data-parallel group's failure detector: a rank lost in this group is lost for all of them."""
        self.failure_detector = data_parallel.failure_detector
        self.failure_detector.add_group(self.process_group)

    def background_group(self) -> "Group":
        """Return a gloo group of the same ranks for a background thread. The first call is collective."""
        return OwnGroup(self._get_or_create_companion(_background_groups, "background"))

    def _get_or_create_companion(
        self, cache: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup], purpose: str
    ) -> dist.ProcessGroup:
        if self.process_group not in cache:
            ranks = [self._members[Rank(rank)] for rank in range(self.size)]
            # Add the ranks: torch does not promise that the names of disjoint groups differ.
            key = f"{self.process_group.group_name} {ranks}".encode()
            name = f"zeroshard-{purpose}-{hashlib.blake2b(key, digest_size=8).hexdigest()}"
            with self.failure_detector:
                self._wait_for_all_ranks()
                cache[self.process_group] = new_gloo_group(name, ranks, self.timeout)
        return cache[self.process_group]

    def _wait_for_all_ranks(self) -> None:
        """Wait until all ranks are in this call, if the group has connections to wait on. All ranks must call.

        Hazard: gloo notices a lost rank only at the timeout while it creates a group. It also blocks the store until
        then, so the rank cannot report its wait. Point-to-point messages are never paired with collectives.
        """
        if not self.supports_device(torch.device("cpu")):
            return
        message, root = torch.zeros(1, dtype=torch.uint8, device="cpu"), self.to_global(Rank(0))
        if self.rank > 0:
            dist.send(message, root, self.process_group, _ARRIVAL_TAG)
            dist.recv(message, root, self.process_group, _ARRIVAL_TAG)
            return
        others = [self.to_global(Rank(rank)) for rank in range(1, self.size)]
        for other in others:
            dist.recv(message, other, self.process_group, _ARRIVAL_TAG)
        for other in others:
            dist.send(message, other, self.process_group, _ARRIVAL_TAG)


class OwnGroup(Group):
    """A gloo group that only zeroshard uses, and therefore also for control messages."""

    @property
    def _needs_companion(self) -> bool:
        return False


class SingleRankGroup(Group):
    """A single process without `torch.distributed`."""

    def __init__(self) -> None:
        self.rank, self.size, self.global_rank = Rank(0), 1, GlobalRank(0)
        self.failure_detector = FailureDetector()
        self._members = {Rank(0): GlobalRank(0)}

    def background_group(self) -> Group:
        return self


def resolve_group(process_group: dist.ProcessGroup | None) -> Group:
    """Return the group, or a `SingleRankGroup` if `torch.distributed` is not initialized."""
    return Group(process_group) if dist.is_available() and dist.is_initialized() else SingleRankGroup()


def init_single_rank(timeout: timedelta | None = None) -> None:
    """Initialize a process group of world size 1, unless one is initialized."""
    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timeout)


# ---------------------------------------------------------------------------------------------------------------------
# Initialization from the environment, for command-line tools.


def is_launched_by_torchrun() -> bool:
    """Return whether torchrun, or a launcher that sets the same variables, started this process."""
    return "RANK" in os.environ


@contextmanager
def init_from_env(timeout: timedelta) -> Iterator[Group]:
    """Context manager that initializes a gloo group of all launched ranks, or of this process alone, and destroys it.

    Raises:
        ConfigError: the environment variables are incomplete or invalid.
        RankLostError: not all ranks joined within `timeout`.
    """
    try:
        _init_process_group(timeout)
    except ValueError as error:
        raise ConfigError(
            f"cannot initialize a process group from the environment: {error}. Start the script with torchrun."
        ) from error
    except RuntimeError as error:
        raise RankLostError(_describe_rendezvous_failure(error, timeout)) from error
    try:
        yield OwnGroup()
    finally:
        dist.destroy_process_group()


def _init_process_group(timeout: timedelta) -> None:
    if is_launched_by_torchrun():
        dist.init_process_group("gloo", timeout=timeout)
    else:
        init_single_rank(timeout)


def _describe_rendezvous_failure(error: RuntimeError, timeout: timedelta) -> str:
    reason = str(error).partition("\n")[0]
    return (
        f"the ranks did not all find each other within {timeout.total_seconds():g} seconds ({reason}). Check that "
        "all of them were started, that MASTER_ADDR and MASTER_PORT can be reached from each host, and that host "
        "names resolve to addresses that others can reach (otherwise set GLOO_SOCKET_IFNAME)."
    )


def with_backend(group: Group, backend: str) -> Group:
    """Return a group of the same ranks with this backend. All ranks must call."""
    if dist.get_backend(group.process_group) == backend:
        return group
    with group.failure_detector:
        process_group = dist.new_group(group.members, group.timeout, backend)
    return Group(process_group)
