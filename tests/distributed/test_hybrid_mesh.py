"""Which ranks form a shard group: every way to configure it, and the process groups that it creates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import optim
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.support import RankContext, ranks
from tests.support.monitoring import recorded
from tests.support.oracles import (
    ADAMW,
    ZERO2,
    ShardParityRun,
    all_equal,
    clone_values,
    grids,
    group_size_options,
    make_seeded,
    mesh_options,
    mlp,
    rank_order_hook,
    regression,
    shard_groups_of,
    torchrun_env,
    train_with_group_options,
)
from zeroshard import ConfigError, shard
from zeroshard.comm import mesh as comm_mesh
from zeroshard.comm.process_group import Group


@ranks(4)
def test_mesh_group_size_and_node_are_equivalent(ctx: RankContext) -> None:
    for grid in grids(4):
        with torchrun_env(ctx.rank % grid[1], grid[1]):
            equivalent_options = [mesh_options(grid), group_size_options(grid), {"shard_group_size": "node"}]
            optimizers = [
                shard(make_seeded(mlp, 0), optim.AdamW, config=ZERO2, **group_options)
                for group_options in equivalent_options
            ]
            assert all_equal([train_with_group_options(group_options) for group_options in equivalent_options])
        (own_group,) = [shard_group for shard_group in shard_groups_of(grid) if ctx.rank in shard_group]
        for optimizer in optimizers:
            assert dist.get_process_group_ranks(optimizer.process_group) == own_group
            assert dist.get_process_group_ranks(optimizer.join_process_group) == [0, 1, 2, 3]
            assert optimizer.rank == own_group.index(ctx.rank)
            assert optimizer.layout.digest == optimizers[0].layout.digest


@ranks(2, 4)
def test_1d_mesh_is_one_shard_group(ctx: RankContext) -> None:
    mesh = init_device_mesh("cpu", (ctx.world_size,))
    assert all_equal([train_with_group_options({"mesh": mesh}), train_with_group_options({})])
    assert shard(mlp(), optim.SGD, lr=0.1, mesh=mesh).process_group is mesh.get_group()


@ranks(4)
def test_submesh_of_a_larger_mesh(ctx: RankContext) -> None:
    """Two jobs side by side, each with two shard groups of one rank, then with one shard group of two ranks."""
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("pipe", "replicate", "shard"))
    group = mesh["replicate"].get_group()
    expected = train_with_group_options({"process_group": group})
    assert all_equal([train_with_group_options({"mesh": mesh["replicate", "shard"]}), expected])
    for group_size in (1, 2):
        assert all_equal([train_with_group_options({"process_group": group, "shard_group_size": group_size}), expected])
    assert not all_equal(ctx.gather(expected))


@ranks(4)
def test_shard_groups_may_have_strided_ranks(ctx: RankContext) -> None:
    strided = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("replicate", "shard"))
    model = make_seeded(mlp, 0)
    optimizer = shard(model, optim.AdamW, config=ZERO2, mesh=strided, **ADAMW)
    assert dist.get_process_group_ranks(optimizer.process_group) == ([0, 2] if ctx.rank in (0, 2) else [1, 3])
    for number in range(3):
        torch.autograd.backward(regression(model, number))
        optimizer.step()
        optimizer.zero_grad()
    plain = ShardParityRun(optim.AdamW, hook=rank_order_hook, config=ZERO2, **ADAMW)
    plain.train(3)
    for ours, theirs in zip(model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)  # (a + c) + (b + d)
    assert all_equal(ctx.gather(clone_values(model)))


@ranks(5)
def test_mesh_may_leave_out_ranks(ctx: RankContext) -> None:
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]])
    group = dist.new_group([0, 1, 2, 3])
    if ctx.rank == 4:
        with pytest.raises(ConfigError, match=r"rank 4 is not in the mesh of ranks \[0, 1, 2, 3\]"):
            shard(mlp(), optim.SGD, lr=0.1, mesh=mesh)
        return
    values, repeated_values = train_with_group_options({"mesh": mesh}), train_with_group_options({"mesh": mesh})
    assert all_equal(
        [values, repeated_values, train_with_group_options({"process_group": group, "shard_group_size": 2})]
    )
    for ours, flat in zip(values, train_with_group_options({"process_group": group}), strict=True):
        torch.testing.assert_close(ours, flat, rtol=1e-5, atol=1e-6)  # summed in another order
    optimizer = shard(mlp(), optim.SGD, lr=0.1, mesh=mesh)
    assert dist.get_process_group_ranks(optimizer.join_process_group) == [0, 1, 2, 3]
    gathered: list[Any] = [None] * 4
    dist.all_gather_object(gathered, values, group=group)
    assert all_equal(gathered)


@ranks(1)
def test_mesh_group_size_and_node_work_on_one_rank(ctx: RankContext) -> None:
    expected = train_with_group_options({})
    with torchrun_env(0, 1):
        for group_options in ({"shard_group_size": "node"}, group_size_options((1, 1)), mesh_options((1, 1))):
            assert all_equal([train_with_group_options(group_options), expected])


@ranks(4)
def test_shard_groups_inherit_the_backend(ctx: RankContext) -> None:
    group = dist.new_group(backend="cpu:gloo,cuda:fake")
    optimizer = shard(mlp(), optim.SGD, lr=0.1, process_group=group, shard_group_size=2)
    assert dist.get_backend_config(optimizer.process_group) == dist.get_backend_config(group)


@ranks(2, 4)
def test_process_groups_are_cached(ctx: RankContext) -> None:
    for grid in grids(ctx.world_size):
        first = shard(mlp(), optim.SGD, lr=0.1, **group_size_options(grid))
        with recorded() as traffic:
            second = shard(mlp(), optim.SGD, lr=0.1, **group_size_options(grid))
        assert "new_group" not in traffic.verbs
        assert first.process_group is second.process_group


@ranks(4)
def test_groups_cached_on_some_ranks_only_do_not_deadlock(ctx: RankContext) -> None:
    if ctx.rank < 2:
        comm_mesh._get_or_create_subgroup(Group(), [[0, 1]])
    optimizer = shard(mlp(), torch.optim.AdamW, shard_group_size=2)
    assert optimizer.world_size == 2


@ranks(4)
def test_swapped_mesh_dimensions_are_rejected(ctx: RankContext) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "replicate"))
    with pytest.raises(ConfigError, match=r"\(replicate, shard\) in this order"):
        shard(mlp(), torch.optim.AdamW, mesh=mesh)
