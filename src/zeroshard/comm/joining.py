"""A process that has joined no job yet: in, and out again."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from ..errors import ConfigError, RankLostError
from .process_group import Group, init_single_rank


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
