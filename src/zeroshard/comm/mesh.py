"""Shard groups and replica groups: resolves `mesh=` and `shard_group_size=`.

Hybrid sharding arranges the data-parallel ranks in a grid. The ranks of a row form a shard group, which divides the
optimizer state; the ranks of a column own the same shard and are replicas of each other::

                      shard 0   shard 1   shard 2
    shard group 0     rank 0    rank 1    rank 2
    shard group 1     rank 3    rank 4    rank 5
"""

import os
from collections import defaultdict
from collections.abc import Sequence
from typing import Literal
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..errors import ConfigError
from ..profiling import StepProfiler
from .collectives import Comm
from .consensus import Prepared, prepare_all
from .process_group import Group

NODE: Literal["node"] = "node"
ShardGroupSize = int | Literal["node"]
RankGrid = Sequence[Sequence[int]]
"""Global ranks: a row per shard group, a column per replica group."""

_subgroups: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[tuple[int, ...], ...], dist.ProcessGroup]] = (
    WeakKeyDictionary()
)
"""Subgroups by parent group and partition of its ranks; shared by all optimizers."""


def make_comm(
    process_group: dist.ProcessGroup | None,
    mesh: DeviceMesh | None,
    shard_group_size: ShardGroupSize | None,
    profiler: StepProfiler | None = None,
) -> Comm:
    """Return the `Comm` that the arguments of `shard` ask for. All data-parallel ranks must call.

    Raises:
        ConfigError: the arguments are invalid (on all ranks; `RankFailedError` where only others found that).
        RankMismatchError: the arguments differ between ranks (on all ranks).
    """
    if mesh is None and shard_group_size is None:
        return Comm(Group(process_group), profiler=profiler)
    data_parallel = Comm(_resolve_data_parallel_group(process_group, mesh), profiler=profiler)
    arguments = f"mesh={_format_mesh(mesh)}, shard_group_size={shard_group_size!r}"

    def prepare() -> Prepared[RankGrid]:
        if process_group is not None and mesh is not None:
            raise ConfigError(
                "mesh= already defines the data-parallel ranks. Remove process_group=, or build the mesh from that "
                "group."
            )
        if mesh is not None and shard_group_size is not None:
            raise ConfigError("mesh= and shard_group_size= both define the shard groups. Pass one of them.")
        if mesh is not None:
            return Prepared(_grid_from_mesh(mesh), [arguments])
        return Prepared(_grid_from_group_size(data_parallel.group, shard_group_size), [arguments])

    # Hazard: no other message may be sent before consensus that all ranks are in this call.
    grid = prepare_all(data_parallel, "choosing the ranks that share the state", prepare)
    grid = grid or _grid_from_hosts(data_parallel)
    if len(grid) == 1:
        return data_parallel
    if mesh is None:
        process_groups = _get_shard_and_replica_groups(data_parallel.group, grid)
    else:
        process_groups = (mesh.get_group(1), mesh.get_group(0))
    shard_group, replica_group = map(Group, process_groups)
    comm = Comm(shard_group, data_parallel, replica_group, profiler=profiler)
    # Hazard: create the CPU group here, on all ranks. If one shard group created it later on its own, torch would name
    # the next group differently in the other shard groups. `Comm` comes first, as it sets the failure detector.
    _ = shard_group.cpu_group
    return comm


def _resolve_data_parallel_group(process_group: dist.ProcessGroup | None, mesh: DeviceMesh | None) -> Group:
    """Return the group of all data-parallel ranks, even if the arguments are otherwise invalid."""
    if process_group is not None or not isinstance(mesh, DeviceMesh):
        return Group(process_group)
    world, ranks = Group(), sorted(mesh.mesh.flatten().tolist())
    if world.global_rank not in ranks:
        raise ConfigError(
            f"global rank {world.global_rank} is not in the mesh of ranks {ranks}. Include all ranks that call shard()."
        )
    for dim in range(mesh.ndim):
        if mesh.size(dim) == len(ranks):
            return Group(mesh.get_group(dim))
    return world if len(ranks) == world.size else Group(_get_or_create_subgroup(world, [ranks]))


def _grid_from_mesh(mesh: DeviceMesh) -> RankGrid:
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(f"expected mesh to be a torch.distributed.DeviceMesh, got {type(mesh).__name__}")
    if mesh.ndim not in (1, 2):
        raise ConfigError(
            f"expected a mesh of one dimension (shard) or two (replicate, shard), got {mesh.ndim}: "
            f"{_format_mesh(mesh)}. Slice it, as in mesh['replicate', 'shard']."
        )
    if mesh.ndim == 2 and (mesh.mesh_dim_names or ("", ""))[::-1] == ("replicate", "shard"):
        raise ConfigError(f"expected mesh dimensions (replicate, shard) in this order, got {_format_mesh(mesh)}")
    rows: list[list[int]] = mesh.mesh.view(-1, mesh.size(-1)).tolist()
    # Hazard: process groups number their ranks in ascending order. With any other order the ranks of a column would
    # not own the same shard.
    if any(row != sorted(row) for row in rows):
        raise ConfigError(f"expected ascending ranks in each row of the mesh, got {rows}. Sort them.")
    return rows


def _grid_from_group_size(data_parallel: Group, shard_group_size: object) -> RankGrid:
    """Return shard groups of consecutive ranks. Empty for "node": that needs information from the other ranks."""
    if isinstance(shard_group_size, str) and shard_group_size == NODE:
        _read_local_rank_and_size()
        return []
    if type(shard_group_size) is not int or shard_group_size < 1:
        raise ConfigError(
            f"expected shard_group_size to be {NODE!r} or a positive number of ranks, got {shard_group_size!r}"
        )
    if data_parallel.size % shard_group_size:
        raise ConfigError(
            f"shard_group_size={shard_group_size} does not divide the {data_parallel.size} ranks: give one of "
            f"{[size for size in range(1, data_parallel.size + 1) if data_parallel.size % size == 0]}"
        )
    members = data_parallel.members
    return [members[start : start + shard_group_size] for start in range(0, len(members), shard_group_size)]


def _grid_from_hosts(data_parallel: Comm) -> RankGrid:
    """Return the ranks of each host, which torchrun numbers consecutively. All ranks must call.

    All ranks return the same grid or raise the same error.
    """
    local_ranks_and_sizes = [
        tuple(map(int, text.split()))
        for text in data_parallel.all_gather_text("{} {}".format(*_read_local_rank_and_size()), max_bytes=64)
    ]
    hosts: dict[int, list[int]] = defaultdict(list)
    local_sizes: dict[int, set[int]] = defaultdict(set)
    for member, (local_rank, local_size) in zip(data_parallel.group.members, local_ranks_and_sizes, strict=True):
        first_rank = member - local_rank
        hosts[first_rank].append(member)
        local_sizes[first_rank].add(local_size)
    for first_rank, host in hosts.items():
        if local_sizes[first_rank] != {len(host)}:
            raise ConfigError(
                f"shard_group_size='{NODE}': on the host of rank {host[0]}, LOCAL_WORLD_SIZE is "
                f"{sorted(local_sizes[first_rank])}, but {len(host)} of its ranks train here: {host}. All ranks of a "
                "host must take part and be numbered consecutively. Otherwise pass a mesh, or a number of ranks."
            )
    if len(set(map(len, hosts.values()))) > 1:
        sizes = ", ".join(f"{len(host)} from rank {host[0]} on" for host in hosts.values())
        raise ConfigError(
            f"shard_group_size='{NODE}': all hosts must have the same number of ranks, got {sizes}. Pass a number of "
            "consecutive ranks that divides each of them."
        )
    return list(hosts.values())


def _read_local_rank_and_size() -> tuple[int, int]:
    """Return LOCAL_RANK and LOCAL_WORLD_SIZE from the environment."""
    variables = {name: os.environ.get(name) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    try:
        rank, size = (int(value or "") for value in variables.values())
    except ValueError:
        found = ", ".join(f"{name}={value!r}" for name, value in variables.items())
        raise ConfigError(
            f"shard_group_size='{NODE}' takes LOCAL_RANK and LOCAL_WORLD_SIZE from the environment, where torchrun "
            f"sets them, but found {found}. Start with torchrun, or give a number of consecutive ranks."
        ) from None
    return rank, size


def _get_shard_and_replica_groups(data_parallel: Group, grid: RankGrid) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return this rank's shard group and replica group. All ranks must call."""
    return _get_or_create_subgroup(data_parallel, grid), _get_or_create_subgroup(
        data_parallel, [list(column) for column in zip(*grid, strict=True)]
    )


def _get_or_create_subgroup(parent: Group, partition: RankGrid) -> dist.ProcessGroup:
    """Return the subgroup that contains this rank. All ranks of the disjoint subgroups must call."""
    (own_ranks,) = [tuple(ranks) for ranks in partition if parent.global_rank in ranks]
    if len(own_ranks) == parent.size:
        return parent.process_group
    cache = _subgroups.setdefault(parent.process_group, {})
    # Hazard: key by the whole partition. With this rank's subgroup alone as the key, some ranks could find it in the
    # cache while others wait for them to create it.
    key = tuple(map(tuple, partition))
    if key not in cache:
        cache[key] = _create_subgroup(parent, partition, own_ranks)
    return cache[key]


def _create_subgroup(parent: Group, partition: RankGrid, own_ranks: tuple[int, ...]) -> dist.ProcessGroup:
    backend = dist.get_backend_config(parent.process_group)
    with parent.failure_detector:
        if parent.process_group is dist.group.WORLD and sum(map(len, partition)) == parent.size:
            groups = {tuple(ranks): dist.new_group(list(ranks), parent.timeout, backend) for ranks in partition}
            group: dist.ProcessGroup = groups[own_ranks]
        else:
            group = dist.new_group(list(own_ranks), parent.timeout, backend, use_local_synchronization=True)
    return group


def _format_mesh(mesh: object) -> str:
    if not isinstance(mesh, DeviceMesh):
        return repr(mesh)
    return f"DeviceMesh({mesh.mesh.tolist()}, {mesh.mesh_dim_names})"
