"""The process group, and this process's place in it."""

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

from .._types import GlobalRank, Rank
from ..errors import ConfigError, RankLostError
from .failure import FailureDetector, get_failure_detector, install_exit_handlers

_dedicated_gloo_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
"""One for each process group that has something to do in the background."""
_cpu_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
"""One for each process group that carries no CPU tensors, however many optimizers use it."""


class Group:
    """A process group with its two kinds of ranks kept apart."""

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                "the default process group is not initialized: call torch.distributed.init_process_group() first"
            )
        install_exit_handlers()
        chosen: Any = dist.group.WORLD if process_group is None else process_group
        self.global_rank = GlobalRank(dist.get_rank())
        if chosen is dist.GroupMember.NON_GROUP_MEMBER:
            raise ConfigError(f"global rank {self.global_rank} is not a member of the given process group")
        if not isinstance(chosen, dist.ProcessGroup):
            raise ConfigError(f"a process group is what torch.distributed.new_group() returns, not {chosen!r:.200}")
        self.process_group = chosen
        self.failure_detector = get_failure_detector(chosen)
        self.rank = Rank(dist.get_rank(chosen))
        self.size: int = self.process_group.size()
        members = [GlobalRank(member) for member in dist.get_process_group_ranks(self.process_group)]
        self._members = {Rank(dist.get_group_rank(self.process_group, member)): member for member in members}

    @property
    def members(self) -> list[GlobalRank]:
        return list(self._members.values())

    def to_global(self, rank: Rank) -> GlobalRank:
        return self._members[rank]

    def from_global(self, rank: int) -> Rank:
        for mine, member in self._members.items():
            if isinstance(rank, Integral) and member == rank:
                return mine
        raise ConfigError(f"global rank {rank!r:.200} is not a member of the process group of {self.members}")

    def supports_device(self, device: torch.device) -> bool:
        """Whether tensors on `device` can travel in this group."""
        return any(kind.type == device.type for kind in self.process_group._device_types)

    @cached_property
    def cpu_group(self) -> dist.ProcessGroup:
        """The same ranks, for small messages between hosts: a group that carries CPU tensors.

        A group that cannot (plain NCCL) gets a gloo companion, so that agreeing on something never
        waits for a GPU. First use is collective.
        """
        if self.supports_device(torch.device("cpu")):
            return self.process_group
        companion = self._get_or_create_gloo_group(_cpu_groups)
        self.failure_detector.add_group(companion)
        return companion

    @property
    def timeout(self) -> timedelta | None:
        """How long its messages may take. Groups made of it have the same: torch would give them half an hour."""
        backend = self.process_group._get_backend(self.process_group._device_types[0])
        return getattr(getattr(backend, "options", None), "_timeout", None)

    def attach_detector(self, data_parallel: "Group") -> None:
        """A rank that is lost here is lost for everyone."""
        self.failure_detector = data_parallel.failure_detector
        self.failure_detector.add_group(self.process_group)

    def dedicated_gloo_group(self) -> "Group":
        """The same ranks with messages between hosts that meet no others: for threads. First use is collective."""
        return Group(self._get_or_create_gloo_group(_dedicated_gloo_groups))

    def _get_or_create_gloo_group(
        self, cache: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup]
    ) -> dist.ProcessGroup:
        if self.process_group not in cache:
            with self.failure_detector:
                # Hazard: torch names a group that only its members make by how many groups a process is in already.
                by_members = self.size < dist.get_world_size()
                cache[self.process_group] = dist.new_group(
                    self.members, self.timeout, backend="gloo", use_local_synchronization=by_members
                )
        return cache[self.process_group]


class SingleRankGroup(Group):
    """One process that is part of no job."""

    def __init__(self) -> None:
        self.rank, self.size, self.global_rank = Rank(0), 1, GlobalRank(0)
        self.failure_detector = FailureDetector()
        self._members = {Rank(0): GlobalRank(0)}

    def dedicated_gloo_group(self) -> Group:
        return self


def resolve_group(process_group: dist.ProcessGroup | None) -> Group:
    """For what also works where no process group was initialized."""
    return Group(process_group) if dist.is_available() and dist.is_initialized() else SingleRankGroup()


def init_single_rank(timeout: timedelta | None = None) -> None:
    """A job of this process alone, where nobody has begun one: sharding over one rank needs no others."""
    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timeout)


# ---------------------------------------------------------------------------------------------------------------------
# A process that has joined no job yet: in, and out again.


def is_launched_by_torchrun() -> bool:
    """Whether torchrun, or whoever sets the same variables, has started this process as one of several ranks."""
    return "RANK" in os.environ


@contextmanager
def init_from_env(timeout: timedelta) -> Iterator[Group]:
    """All ranks that were started together, with messages between hosts; this process alone if none were."""
    try:
        _init_process_group(timeout)
    except ValueError as error:
        raise ConfigError(f"the environment does not say which ranks there are: {error}") from error
    except RuntimeError as error:
        raise RankLostError(_describe_rendezvous_failure(error, timeout)) from error
    try:
        yield Group()
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
        f"the ranks did not all find each other within {timeout.total_seconds():g} seconds ({reason}). Look whether "
        "all of them were started, whether MASTER_ADDR and MASTER_PORT can be reached from each host, and whether host "
        "names lead to addresses that others can reach (else set GLOO_SOCKET_IFNAME)."
    )


def with_backend(group: Group, backend: str) -> Group:
    """The same ranks with messages of this backend. On all of them."""
    if dist.get_backend(group.process_group) == backend:
        return group
    with group.failure_detector:
        made = dist.new_group(group.members, group.timeout, backend)
    return Group(made)
