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
from .collectives import Comm
from .consensus import Prepared, prepare_all
from .process_group import Group

NODE: Literal["node"] = "node"
ShardGroupSize = int | Literal["node"]
RankGrid = Sequence[Sequence[int]]
"""Global ranks."""

_subgroups: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[tuple[int, ...], ...], dist.ProcessGroup]] = (
    WeakKeyDictionary()
)
"""Groups of some ranks of a group, however many optimizers use them."""


def make_comm(
    process_group: dist.ProcessGroup | None, mesh: DeviceMesh | None, shard_group_size: ShardGroupSize | None
) -> Comm:
    """What the arguments of `shard` ask for. On all ranks that train together; what is wrong is raised on all."""
    if mesh is None and shard_group_size is None:
        return Comm(Group(process_group))
    everyone = Comm(_resolve_data_parallel_group(process_group, mesh))
    asked = f"mesh={_format_mesh(mesh)}, shard_group_size={shard_group_size!r}"

    def prepare() -> Prepared[RankGrid]:
        if process_group is not None and mesh is not None:
            raise ConfigError("mesh=... says which ranks train: leave out process_group=..., or make the mesh of those")
        if mesh is not None and shard_group_size is not None:
            raise ConfigError(
                "mesh=... and shard_group_size=... both say which ranks share the state: give one of them"
            )
        rows = _grid_from_mesh(mesh) if mesh is not None else _grid_from_group_size(everyone.group, shard_group_size)
        return Prepared(rows, [asked])

    # Hazard: nothing else may be sent before all ranks are known to be in this call.
    rows = prepare_all(everyone, "choosing the ranks that share the state", prepare) or _grid_from_hosts(everyone)
    if len(rows) == 1:
        return everyone
    pair = (
        _get_shard_and_replica_groups(everyone.group, rows) if mesh is None else (mesh.get_group(1), mesh.get_group(0))
    )
    row, column = map(Group, pair)
    # Hazard: were it made later, by one row only, torch would name the next group differently in other rows.
    _ = row.cpu_group
    return Comm(row, everyone, column)


def _resolve_data_parallel_group(process_group: dist.ProcessGroup | None, mesh: DeviceMesh | None) -> Group:
    """All ranks that train together, whatever else is wrong with what was given."""
    if process_group is not None or not isinstance(mesh, DeviceMesh):
        return Group(process_group)
    world, ranks = Group(), sorted(mesh.mesh.flatten().tolist())
    if world.global_rank not in ranks:
        raise ConfigError(f"global rank {world.global_rank} is not in the mesh of ranks {ranks}")
    for dim in range(mesh.ndim):
        if mesh.size(dim) == len(ranks):
            return Group(mesh.get_group(dim))
    return world if len(ranks) == world.size else Group(_get_or_create_subgroup(world, [ranks]))


def _grid_from_mesh(mesh: DeviceMesh) -> RankGrid:
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(f"mesh must be a torch.distributed.DeviceMesh, not a {type(mesh).__name__}")
    if mesh.ndim not in (1, 2):
        raise ConfigError(
            f"mesh must have one dimension (shard) or two (replicate, shard), not {mesh.ndim} as {_format_mesh(mesh)}. "
            "Slice it, as in mesh['replicate', 'shard']."
        )
    if mesh.ndim == 2 and (mesh.mesh_dim_names or ("", ""))[::-1] == ("replicate", "shard"):
        raise ConfigError(
            f"the dimensions of mesh are (replicate, shard) in this order, not as in {_format_mesh(mesh)}"
        )
    rows: list[list[int]] = mesh.mesh.view(-1, mesh.size(-1)).tolist()
    # Hazard: process groups number their ranks upwards, so that columns of other meshes would not hold the same.
    if any(row != sorted(row) for row in rows):
        raise ConfigError(f"ranks must ascend in each row of the mesh, not as in {rows}. Sort them.")
    return rows


def _grid_from_group_size(data_parallel: Group, shard_group_size: object) -> RankGrid:
    """Rows of so many ranks; none yet for those of one host, which others have to tell."""
    if isinstance(shard_group_size, str) and shard_group_size == NODE:
        _read_local_rank_and_size()
        return []
    if type(shard_group_size) is not int or shard_group_size < 1:
        raise ConfigError(f"shard_group_size must be '{NODE}' or a number of ranks from 1 on, not {shard_group_size!r}")
    if data_parallel.size % shard_group_size:
        raise ConfigError(
            f"shard_group_size={shard_group_size} does not divide the {data_parallel.size} ranks: give one of "
            f"{[number for number in range(1, data_parallel.size + 1) if data_parallel.size % number == 0]}"
        )
    members = data_parallel.members
    return [members[start : start + shard_group_size] for start in range(0, len(members), shard_group_size)]


def _grid_from_hosts(data_parallel: Comm) -> RankGrid:
    """The ranks of each host, which torchrun numbers one after the other. All ranks find, or raise, the same."""
    places = [
        tuple(map(int, text.split()))
        for text in data_parallel.all_gather_text("{} {}".format(*_read_local_rank_and_size()), max_bytes=64)
    ]
    hosts: dict[int, list[int]] = defaultdict(list)
    stated: dict[int, set[int]] = defaultdict(set)
    for member, (local, size) in zip(data_parallel.group.members, places, strict=True):
        hosts[member - local].append(member)
        stated[member - local].add(size)
    for first, host in hosts.items():
        if stated[first] != {len(host)}:
            raise ConfigError(
                f"shard_group_size='{NODE}': the host of rank {host[0]} has {sorted(stated[first])} ranks by "
                f"LOCAL_WORLD_SIZE, but {len(host)} of them train here: {host}. All of a host must take part, numbered "
                "one after the other. Else give a mesh, or a number of consecutive ranks."
            )
    if len(set(map(len, hosts.values()))) > 1:
        found = ", ".join(f"{len(host)} from rank {host[0]} on" for host in hosts.values())
        raise ConfigError(
            f"shard_group_size='{NODE}': all hosts must have as many ranks, but there are {found}. Give a number of "
            "consecutive ranks that divides each of them."
        )
    return list(hosts.values())


def _read_local_rank_and_size() -> tuple[int, int]:
    """This rank's number on its host, and how many there are."""
    found = {name: os.environ.get(name) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    try:
        rank, size = (int(value or "") for value in found.values())
    except ValueError:
        told = ", ".join(f"{name}={value!r}" for name, value in found.items())
        raise ConfigError(
            f"shard_group_size='{NODE}' takes LOCAL_RANK and LOCAL_WORLD_SIZE from the environment, where torchrun "
            f"sets them, but found {told}. Start with torchrun, or give a number of consecutive ranks."
        ) from None
    return rank, size


def _get_shard_and_replica_groups(data_parallel: Group, grid: RankGrid) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """This rank's row, and its column. On all ranks."""
    return _get_or_create_subgroup(data_parallel, grid), _get_or_create_subgroup(
        data_parallel, [list(column) for column in zip(*grid, strict=True)]
    )


def _get_or_create_subgroup(parent: Group, partition: RankGrid) -> dist.ProcessGroup:
    """The part that this rank is in. On all ranks of all parts, which do not overlap."""
    (mine,) = [tuple(part) for part in partition if parent.global_rank in part]
    if len(mine) == parent.size:
        return parent.process_group
    known = _subgroups.setdefault(parent.process_group, {})
    # Hazard: by this rank's part alone some ranks could know it, and others would wait for them to make it.
    division = tuple(map(tuple, partition))
    if division not in known:
        known[division] = _create_subgroup(parent, partition, mine)
    return known[division]


def _create_subgroup(parent: Group, partition: RankGrid, own_ranks: tuple[int, ...]) -> dist.ProcessGroup:
    backend = dist.get_backend_config(parent.process_group)
    with parent.failure_detector:
        if parent.process_group is dist.group.WORLD and sum(map(len, partition)) == parent.size:
            made = {tuple(part): dist.new_group(list(part), parent.timeout, backend) for part in partition}
        else:
            made = {own_ranks: dist.new_group(list(own_ranks), parent.timeout, backend, use_local_synchronization=True)}
    group: dist.ProcessGroup = made[own_ranks]
    return group


def _format_mesh(mesh: object) -> str:
    if not isinstance(mesh, DeviceMesh):
        return repr(mesh)
    return f"DeviceMesh({mesh.mesh.tolist()}, {mesh.mesh_dim_names})"
