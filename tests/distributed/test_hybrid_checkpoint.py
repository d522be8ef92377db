"""State of rows of ranks: gathered from one row, written once, loaded by whatever ranks there are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from tests.support import RankContext, ranks
from tests.support.checkpoints import ADAMW, Net, assert_same_state, by_name, first_ranks, net, plain, train
from tests.support.oracles import (
    ZERO1,
    ZERO2,
    Grid,
    all_equal,
    assert_replicas_are_equal,
    assert_same,
    grids,
    hybrid_pair,
    launched,
    mlp,
    seeded,
    values_of,
    within,
)
from tests.support.tiers import sampled
from zeroshard import (
    ConfigError,
    FlatShards,
    ShardedOptimizer,
    WholeParams,
    ZeroConfig,
    checkpoint,
    shard,
)

TINY = FlatShards(bucket_bytes=160)
CONFIGS = [ZeroConfig(partition=TINY), ZeroConfig(partition=WholeParams())]


def make_sharded(grid: Grid, seed: int = 0, config: ZeroConfig = CONFIGS[0]) -> tuple[Net, ShardedOptimizer]:
    model = net(seed)
    return model, shard(model, torch.optim.AdamW, config=config, **within(grid), **ADAMW)


def gather_named_state(optimizer: ShardedOptimizer, model: nn.Module) -> dict[str, Any]:
    """All state by names, on all ranks."""
    found: list[Any] = [optimizer.full_state_dict()]
    dist.broadcast_object_list(found)
    return by_name(optimizer, found[0], model)


@ranks(2, 3, 4)
def test_full_state_dict_on_any_rank_equals_plain(ctx: RankContext) -> None:
    """Whichever, from its own row: what the plain optimizer has, bit by bit."""
    for grid in grids(ctx.world_size):
        for config in (ZERO2, ZERO1):
            pair = hybrid_pair(grid, torch.optim.AdamW, config=config)
            pair.train(2)
            for to in range(ctx.world_size):
                found = pair.zero.full_state_dict(to=to)
                assert (found is None) == (ctx.rank != to)
                if found is not None:
                    assert_same(found, pair.plain.state_dict())
                pair.zero.consolidate_state_dict(to=to)
                if ctx.rank == to:
                    assert_same(pair.zero.state_dict(), pair.plain.state_dict())
            with pytest.raises(ConfigError, match=f"not a rank of a group of {ctx.world_size}"):
                pair.zero.full_state_dict(to=ctx.world_size)


@ranks(2, 3, 4)
def test_state_dict_loads_into_all_shard_groups(ctx: RankContext) -> None:
    for grid in grids(ctx.world_size):
        pair = hybrid_pair(grid, torch.optim.AdamW, config=ZERO2)
        pair.train(2)
        again = hybrid_pair(grid, torch.optim.AdamW, config=ZERO1)
        again.model.load_state_dict(pair.model.state_dict())
        again.plain_model.load_state_dict(pair.model.state_dict())
        for optimizer in (again.zero, again.plain):
            optimizer.load_state_dict(pair.plain.state_dict())
        again.steps = pair.steps
        again.train(2)
        again.check_state()
        assert_replicas_are_equal(grid, again.model, again.zero)


@ranks(2, 4)
def test_torch_state_dict_helpers(ctx: RankContext) -> None:
    for grid in grids(ctx.world_size):
        model, optimizer = make_sharded(grid)
        train(model, optimizer, 2)
        everywhere = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
        states: list[Any] = ctx.gather(everywhere["state"])
        assert all(state.keys() == states[0].keys() for state in states)
        assert_same(states[-1], states[0])
        offloaded = StateDictOptions(full_state_dict=True, cpu_offload=True)
        on_one = get_optimizer_state_dict(model, optimizer, options=offloaded)
        assert bool(on_one["state"] if on_one else {}) == (ctx.rank == 0)
        again, into = make_sharded(grid, seed=3)
        set_optimizer_state_dict(again, into, everywhere, options=StateDictOptions(full_state_dict=True))
        assert_same_state(gather_named_state(into, again), gather_named_state(optimizer, model))


def checkpoint_bytes(folder: Path) -> int:
    """Bytes of all parts."""
    return sum(file.stat().st_size for file in folder.rglob("*.distcp"))


@ranks(2, 4)
@sampled("config", [ZeroConfig(), CONFIGS[1]], ids=["flat", "whole"])
def test_replicas_are_written_once(ctx: RankContext, tmp_path: Path, config: ZeroConfig) -> None:
    """The bytes on the disk: what one group writes, but for the headers of chunks that are cut in other places."""
    sizes = {}
    for grid in grids(ctx.world_size):
        model = seeded(lambda: nn.Sequential(*(nn.Linear(200, 200) for _ in range(3))), 0)
        optimizer = shard(model, torch.optim.AdamW, config=config, **within(grid))
        torch.autograd.backward(model(torch.ones(2, 200)).sum())
        optimizer.step()
        checkpoint.save(tmp_path / str(grid), step=1, model=model, optimizer=optimizer)
        dcp_save({"optim": optimizer.sharded_state_dict()}, checkpoint_id=tmp_path / f"dcp-{grid}")
        sizes[grid] = checkpoint_bytes(tmp_path / str(grid)), checkpoint_bytes(tmp_path / f"dcp-{grid}")
    elements = sum(param.nbytes for param in model.parameters())
    for whole, state in sizes.values():
        assert 3 * elements <= whole <= 3.3 * elements  # parameters and two moments
        assert 2 * elements <= state <= 2.3 * elements


@ranks(4, timeout=120)
@sampled("config", CONFIGS, ids=["flat", "whole"])
def test_checkpoint_loads_from_any_grid_to_any_grid(ctx: RankContext, tmp_path: Path, config: ZeroConfig) -> None:
    """Bit by bit, also in what follows: data are equal on all ranks, so that means over four are exact."""
    reference = net()
    train(reference, plain(reference), 5)
    for grid in grids(4):
        model, optimizer = make_sharded(grid, config=config)
        train(model, optimizer, 3)
        checkpoint.save(tmp_path / str(grid), step=3, model=model, optimizer=optimizer)
        expected = gather_named_state(optimizer, model)
        for other in grids(4):
            again, into = make_sharded(other, seed=5, config=config)
            loaded = checkpoint.load(tmp_path / str(grid), model=again, optimizer=into)
            assert loaded.world_size == 4
            assert_same_state(gather_named_state(into, again), expected)
            assert_replicas_are_equal(other, again, into)
            train(again, into, 2, first=3)
            assert all(map(torch.equal, again.parameters(), reference.parameters()))


@ranks(4, timeout=120)
@sampled("fewer", [1, 2, 3])
def test_checkpoint_of_two_shard_groups_loads_on_fewer_ranks_and_back(
    ctx: RankContext, tmp_path: Path, fewer: int
) -> None:
    model, optimizer = make_sharded((2, 2))
    train(model, optimizer, 3)
    expected, weights = gather_named_state(optimizer, model), values_of(model)
    checkpoint.save(tmp_path / "rows", step=3, model=model, optimizer=optimizer, extra=ctx.rank)
    group = first_ranks(fewer)
    if group is not None:
        again = net(seed=5)
        into = shard(again, torch.optim.AdamW, process_group=group, config=CONFIGS[0], **ADAMW)
        loaded = checkpoint.load(tmp_path / "rows", model=again, optimizer=into, process_group=group)
        assert loaded.extra_by_rank == {0: 0, 1: 1, 2: 2, 3: 3}
        found = into.full_state_dict()
        if found is not None:
            assert_same_state(by_name(into, found, again), expected)
        assert all_equal([values_of(again), weights])
        checkpoint.save(tmp_path / "fewer", step=3, model=again, optimizer=into, process_group=group)
    dist.barrier()
    back, optimizer = make_sharded((2, 2), seed=7)
    checkpoint.load(tmp_path / "fewer", model=back, optimizer=optimizer)
    assert_same_state(gather_named_state(optimizer, back), expected)
    assert all_equal([values_of(back), weights])
    assert_replicas_are_equal((2, 2), back, optimizer)


@ranks(4)
def test_async_save_with_master_weights(ctx: RankContext, tmp_path: Path) -> None:
    config = ZeroConfig(partition=TINY, master_dtype=torch.float32)

    def narrow(seed: int) -> tuple[nn.Module, ShardedOptimizer]:
        model = seeded(mlp, seed).bfloat16()
        return model, shard(model, torch.optim.AdamW, config=config, **within((2, 2)), **ADAMW)

    model, optimizer = narrow(0)
    torch.autograd.backward(model(torch.ones(2, 6).bfloat16()).float().sum())
    optimizer.step()
    saving = checkpoint.async_save(tmp_path, step=1, model=model, optimizer=optimizer)
    expected, weights = gather_named_state(optimizer, model), values_of(model)
    saving.wait()
    again, into = narrow(1)
    checkpoint.load(tmp_path, model=again, optimizer=into)
    assert_same_state(gather_named_state(into, again), expected)
    assert all_equal([values_of(again), weights])


@ranks(2, 4)
def test_sharded_state_dict_through_dcp(ctx: RankContext, tmp_path: Path) -> None:
    for grid in grids(ctx.world_size):
        model, optimizer = make_sharded(grid)
        train(model, optimizer, 2)
        dcp_save({"optim": optimizer.sharded_state_dict()}, checkpoint_id=tmp_path / str(grid))
        for other in grids(ctx.world_size):
            again, into = make_sharded(other, seed=3)
            room = into.sharded_state_dict()
            dcp_load({"optim": room}, checkpoint_id=tmp_path / str(grid))
            into.load_state_dict(room)
            assert_same_state(gather_named_state(into, again), gather_named_state(optimizer, model))
            assert_replicas_are_equal(other, again, into)


@ranks(4)
def test_saving_from_one_shard_group_only_is_rejected(ctx: RankContext, tmp_path: Path) -> None:
    with launched(ctx.rank % 2, 2):
        model = net()
        optimizer = shard(model, torch.optim.AdamW, shard_group_size="node")
    with pytest.raises(ConfigError, match=r"process_group=optimizer.join_process_group"):
        checkpoint.save(tmp_path, step=0, model=model, optimizer=optimizer, process_group=optimizer.process_group)
    given = optimizer.join_process_group
    checkpoint.save(tmp_path, step=0, model=model, optimizer=optimizer, process_group=given)
    checkpoint.load(tmp_path, model=model, optimizer=optimizer, process_group=given)
