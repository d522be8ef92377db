"""Who shares, and who holds the same.

Ranks stand in rows and columns. What there is to hold is divided among the ranks of a row; those of a column hold the
same part of it, and are each other's replicas.
"""

import os
from collections import defaultdict
from collections.abc import Sequence
from typing import Literal
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..errors import ConfigError
from .agreement import Proposal, agreed
from .collectives import Comm
from .group import Group

NODE: Literal["node"] = "node"
Within = int | Literal["node"]
Rows = Sequence[Sequence[int]]
"""Global ranks."""

_made: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[tuple[int, ...], ...], dist.ProcessGroup]] = WeakKeyDictionary()
"""Groups of some ranks of a group, however many optimizers use them."""


def comm_of(process_group: dist.ProcessGroup | None, mesh: DeviceMesh | None, shard_within: Within | None) -> Comm:
    """What the arguments of `shard` ask for. On all ranks that train together; what is wrong is raised on all."""
    if mesh is None and shard_within is None:
        return Comm(Group(process_group))
    everyone = Comm(_everyone(process_group, mesh))
    asked = f"mesh={_in_words(mesh)}, shard_within={shard_within!r}"

    def propose() -> Proposal[Rows]:
        if process_group is not None and mesh is not None:
            raise ConfigError("mesh=... says which ranks train: leave out process_group=..., or make the mesh of those")
        if mesh is not None and shard_within is not None:
            raise ConfigError("mesh=... and shard_within=... both say which ranks share the state: give one of them")
        rows = _rows_of(mesh) if mesh is not None else _rows_within(everyone.group, shard_within)
        return Proposal(rows, [asked])

    # Hazard: nothing else may be sent before all ranks are known to be in this call.
    rows = agreed(everyone, "choosing the ranks that share the state", propose) or _hosts(everyone)
    if len(rows) == 1:
        return everyone
    pair = _groups(everyone.group, rows) if mesh is None else (mesh.get_group(1), mesh.get_group(0))
    row, column = map(Group, pair)
    # Hazard: were it made later, by one row only, torch would name the next group differently in other rows.
    _ = row.control
    return Comm(row, everyone, column)


def _everyone(process_group: dist.ProcessGroup | None, mesh: DeviceMesh | None) -> Group:
    """All ranks that train together, whatever else is wrong with what was given."""
    if process_group is not None or not isinstance(mesh, DeviceMesh):
        return Group(process_group)
    world, ranks = Group(), sorted(mesh.mesh.flatten().tolist())
    if world.global_rank not in ranks:
        raise ConfigError(f"global rank {world.global_rank} is not in the mesh of ranks {ranks}")
    for dim in range(mesh.ndim):
        if mesh.size(dim) == len(ranks):
            return Group(mesh.get_group(dim))
    return world if len(ranks) == world.size else Group(_group_of(world, [ranks]))


def _rows_of(mesh: DeviceMesh) -> Rows:
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(f"mesh must be a torch.distributed.DeviceMesh, not a {type(mesh).__name__}")
    if mesh.ndim not in (1, 2):
        raise ConfigError(
            f"mesh must have one dimension (shard) or two (replicate, shard), not {mesh.ndim} as {_in_words(mesh)}. "
            "Slice it, as in mesh['replicate', 'shard']."
        )
    if mesh.ndim == 2 and (mesh.mesh_dim_names or ("", ""))[::-1] == ("replicate", "shard"):
        raise ConfigError(f"the dimensions of mesh are (replicate, shard) in this order, not as in {_in_words(mesh)}")
    rows: list[list[int]] = mesh.mesh.view(-1, mesh.size(-1)).tolist()
    # Hazard: process groups number their ranks upwards, so that columns of other meshes would not hold the same.
    if any(row != sorted(row) for row in rows):
        raise ConfigError(f"ranks must ascend in each row of the mesh, not as in {rows}. Sort them.")
    return rows


def _rows_within(everyone: Group, within: object) -> Rows:
    """Rows of so many ranks; none yet for those of one host, which others have to tell."""
    if isinstance(within, str) and within == NODE:
        _local_place()
        return []
    if type(within) is not int or within < 1:
        raise ConfigError(f"shard_within must be '{NODE}' or a number of ranks from 1 on, not {within!r}")
    if everyone.size % within:
        raise ConfigError(
            f"shard_within={within} does not divide the {everyone.size} ranks: give one of "
            f"{[number for number in range(1, everyone.size + 1) if everyone.size % number == 0]}"
        )
    members = everyone.members
    return [members[start : start + within] for start in range(0, len(members), within)]


def _hosts(everyone: Comm) -> Rows:
    """The ranks of each host, which torchrun numbers one after the other. All ranks find, or raise, the same."""
    places = [tuple(map(int, text.split())) for text in everyone.share("{} {}".format(*_local_place()), most=64)]
    hosts: dict[int, list[int]] = defaultdict(list)
    stated: dict[int, set[int]] = defaultdict(set)
    for member, (local, size) in zip(everyone.group.members, places, strict=True):
        hosts[member - local].append(member)
        stated[member - local].add(size)
    for first, host in hosts.items():
        if stated[first] != {len(host)}:
            raise ConfigError(
                f"shard_within='{NODE}': the host of rank {host[0]} has {sorted(stated[first])} ranks by "
                f"LOCAL_WORLD_SIZE, but {len(host)} of them train here: {host}. All of a host must take part, numbered "
                "one after the other. Else give a mesh, or a number of consecutive ranks."
            )
    if len(set(map(len, hosts.values()))) > 1:
        found = ", ".join(f"{len(host)} from rank {host[0]} on" for host in hosts.values())
        raise ConfigError(
            f"shard_within='{NODE}': all hosts must have as many ranks, but there are {found}. Give a number of "
            "consecutive ranks that divides each of them."
        )
    return list(hosts.values())


def _local_place() -> tuple[int, int]:
    """This rank's number on its host, and how many there are."""
    found = {name: os.environ.get(name) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    try:
        rank, size = (int(value or "") for value in found.values())
    except ValueError:
        told = ", ".join(f"{name}={value!r}" for name, value in found.items())
        raise ConfigError(
            f"shard_within='{NODE}' takes LOCAL_RANK and LOCAL_WORLD_SIZE from the environment, where torchrun sets "
            f"them, but found {told}. Start with torchrun, or give a number of consecutive ranks."
        ) from None
    return rank, size


def _groups(everyone: Group, rows: Rows) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """This rank's row, and its column. On all ranks."""
    return _group_of(everyone, rows), _group_of(everyone, [list(column) for column in zip(*rows, strict=True)])


def _group_of(parent: Group, parts: Rows) -> dist.ProcessGroup:
    """The part that this rank is in. On all ranks of all parts, which do not overlap."""
    (mine,) = [tuple(part) for part in parts if parent.global_rank in part]
    if len(mine) == parent.size:
        return parent.process_group
    known = _made.setdefault(parent.process_group, {})
    # Hazard: by this rank's part alone some ranks could know it, and others would wait for them to make it.
    division = tuple(map(tuple, parts))
    if division not in known:
        known[division] = _made_group(parent, parts, mine)
    return known[division]


def _made_group(parent: Group, parts: Rows, mine: tuple[int, ...]) -> dist.ProcessGroup:
    backend = dist.get_backend_config(parent.process_group)
    with parent.line:
        if parent.process_group is dist.group.WORLD and sum(map(len, parts)) == parent.size:
            made = {tuple(part): dist.new_group(list(part), parent.timeout, backend) for part in parts}
        else:
            made = {mine: dist.new_group(list(mine), parent.timeout, backend, use_local_synchronization=True)}
    group: dist.ProcessGroup = made[mine]
    return group


def _in_words(mesh: object) -> str:
    if not isinstance(mesh, DeviceMesh):
        return repr(mesh)
    return f"DeviceMesh({mesh.mesh.tolist()}, {mesh.mesh_dim_names})"
