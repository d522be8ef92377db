"""Which ranks share the state: all ways to ask for it, and the groups that are made for it."""

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
    Pair,
    all_equal,
    grids,
    in_rank_order,
    launched,
    meshed,
    mlp,
    regression,
    rows_of,
    seeded,
    trained,
    values_of,
    within,
)
from zeroshard import ConfigError, shard
from zeroshard.comm import mesh as rows
from zeroshard.comm.process_group import Group


@ranks(4)
def test_mesh_group_size_and_node_are_equivalent(ctx: RankContext) -> None:
    for grid in grids(4):
        with launched(ctx.rank % grid[1], grid[1]):
            asked = [meshed(grid), within(grid), {"shard_group_size": "node"}]
            made = [shard(seeded(mlp, 0), optim.AdamW, config=ZERO2, **where) for where in asked]
            assert all_equal([trained(where) for where in asked])
        (row,) = [row for row in rows_of(grid) if ctx.rank in row]
        for optimizer in made:
            assert dist.get_process_group_ranks(optimizer.process_group) == row
            assert dist.get_process_group_ranks(optimizer.join_process_group) == [0, 1, 2, 3]
            assert optimizer.rank == row.index(ctx.rank)
            assert optimizer.layout.digest == made[0].layout.digest


@ranks(2, 4)
def test_1d_mesh_is_one_shard_group(ctx: RankContext) -> None:
    mesh = init_device_mesh("cpu", (ctx.world_size,))
    assert all_equal([trained({"mesh": mesh}), trained({})])
    assert shard(mlp(), optim.SGD, lr=0.1, mesh=mesh).process_group is mesh.get_group()


@ranks(4)
def test_submesh_of_a_larger_mesh(ctx: RankContext) -> None:
    """Two jobs side by side, each in two rows of one; and in one row of two."""
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("pipe", "replicate", "shard"))
    group = mesh["replicate"].get_group()
    expected = trained({"process_group": group})
    assert all_equal([trained({"mesh": mesh["replicate", "shard"]}), expected])
    for number in (1, 2):
        assert all_equal([trained({"process_group": group, "shard_group_size": number}), expected])
    assert not all_equal(ctx.gather(expected))


@ranks(4)
def test_shard_groups_may_have_strided_ranks(ctx: RankContext) -> None:
    strided = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("replicate", "shard"))
    model = seeded(mlp, 0)
    optimizer = shard(model, optim.AdamW, config=ZERO2, mesh=strided, **ADAMW)
    assert dist.get_process_group_ranks(optimizer.process_group) == ([0, 2] if ctx.rank in (0, 2) else [1, 3])
    for number in range(3):
        torch.autograd.backward(regression(model, number))
        optimizer.step()
        optimizer.zero_grad()
    plain = Pair(optim.AdamW, hook=in_rank_order, config=ZERO2, **ADAMW)
    plain.train(3)
    for ours, theirs in zip(model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)  # (a + c) + (b + d)
    assert all_equal(ctx.gather(values_of(model)))


@ranks(5)
def test_mesh_may_leave_out_ranks(ctx: RankContext) -> None:
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]])
    group = dist.new_group([0, 1, 2, 3])
    if ctx.rank == 4:
        with pytest.raises(ConfigError, match=r"rank 4 is not in the mesh of ranks \[0, 1, 2, 3\]"):
            shard(mlp(), optim.SGD, lr=0.1, mesh=mesh)
        return
    rows, again = trained({"mesh": mesh}), trained({"mesh": mesh})
    assert all_equal([rows, again, trained({"process_group": group, "shard_group_size": 2})])
    for ours, flat in zip(rows, trained({"process_group": group}), strict=True):
        torch.testing.assert_close(ours, flat, rtol=1e-5, atol=1e-6)  # sums in another order
    optimizer = shard(mlp(), optim.SGD, lr=0.1, mesh=mesh)
    assert dist.get_process_group_ranks(optimizer.join_process_group) == [0, 1, 2, 3]
    found: list[Any] = [None] * 4
    dist.all_gather_object(found, rows, group=group)
    assert all_equal(found)


@ranks(1)
def test_mesh_group_size_and_node_work_on_one_rank(ctx: RankContext) -> None:
    expected = trained({})
    with launched(0, 1):
        for where in ({"shard_group_size": "node"}, within((1, 1)), meshed((1, 1))):
            assert all_equal([trained(where), expected])


@ranks(4)
def test_shard_groups_inherit_the_backend(ctx: RankContext) -> None:
    group = dist.new_group(backend="cpu:gloo,cuda:fake")
    optimizer = shard(mlp(), optim.SGD, lr=0.1, process_group=group, shard_group_size=2)
    assert dist.get_backend_config(optimizer.process_group) == dist.get_backend_config(group)


@ranks(2, 4)
def test_process_groups_are_cached(ctx: RankContext) -> None:
    for grid in grids(ctx.world_size):
        first = shard(mlp(), optim.SGD, lr=0.1, **within(grid))
        with recorded() as traffic:
            second = shard(mlp(), optim.SGD, lr=0.1, **within(grid))
        assert "new_group" not in traffic.verbs
        assert first.process_group is second.process_group


@ranks(4)
def test_groups_cached_on_some_ranks_only_do_not_deadlock(ctx: RankContext) -> None:
    if ctx.rank < 2:
        rows._get_or_create_subgroup(Group(), [[0, 1]])
    optimizer = shard(mlp(), torch.optim.AdamW, shard_group_size=2)
    assert optimizer.world_size == 2


@ranks(4)
def test_swapped_mesh_dimensions_are_rejected(ctx: RankContext) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "replicate"))
    with pytest.raises(ConfigError, match=r"\(replicate, shard\) in this order"):
        shard(mlp(), torch.optim.AdamW, mesh=mesh)
