"""State under hybrid sharding: gathered from one shard group, written once, loaded at any world size."""

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
from tests.support.checkpoints import ADAMW, Net, assert_same_state, first_ranks, net, plain, state_by_name, train
from tests.support.oracles import (
    ZERO1,
    ZERO2,
    Grid,
    all_equal,
    assert_replicas_are_equal,
    assert_same,
    clone_values,
    grids,
    group_size_options,
    hybrid_parity_run,
    make_seeded,
    mlp,
    torchrun_env,
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
    return model, shard(model, torch.optim.AdamW, config=config, **group_size_options(grid), **ADAMW)


def gather_named_state(optimizer: ShardedOptimizer, model: nn.Module) -> dict[str, Any]:
    """The full state by parameter name, on all ranks."""
    state_dicts: list[Any] = [optimizer.full_state_dict()]
    dist.broadcast_object_list(state_dicts)
    return state_by_name(optimizer, state_dicts[0], model)


@ranks(2, 3, 4)
def test_full_state_dict_on_any_rank_equals_plain(ctx: RankContext) -> None:
    """Every rank can gather the state from its own shard group, bit by bit as in the plain optimizer."""
    for grid in grids(ctx.world_size):
        for config in (ZERO2, ZERO1):
            parity = hybrid_parity_run(grid, torch.optim.AdamW, config=config)
            parity.train(2)
            for rank in range(ctx.world_size):
                found = parity.zero.full_state_dict(to=rank)
                assert (found is None) == (ctx.rank != rank)
                if found is not None:
                    assert_same(found, parity.plain.state_dict())
                parity.zero.consolidate_state_dict(to=rank)
                if ctx.rank == rank:
                    assert_same(parity.zero.state_dict(), parity.plain.state_dict())
            with pytest.raises(ConfigError, match=f"expected to= to be a rank from 0 to {ctx.world_size - 1}"):
                parity.zero.full_state_dict(to=ctx.world_size)


@ranks(2, 3, 4)
def test_state_dict_loads_into_all_shard_groups(ctx: RankContext) -> None:
    for grid in grids(ctx.world_size):
        parity = hybrid_parity_run(grid, torch.optim.AdamW, config=ZERO2)
        parity.train(2)
        loaded = hybrid_parity_run(grid, torch.optim.AdamW, config=ZERO1)
        loaded.model.load_state_dict(parity.model.state_dict())
        loaded.plain_model.load_state_dict(parity.model.state_dict())
        for optimizer in (loaded.zero, loaded.plain):
            optimizer.load_state_dict(parity.plain.state_dict())
        loaded.steps = parity.steps
        loaded.train(2)
        loaded.check_state()
        assert_replicas_are_equal(grid, loaded.model, loaded.zero)


@ranks(2, 4)
def test_torch_state_dict_helpers(ctx: RankContext) -> None:
    for grid in grids(ctx.world_size):
        model, optimizer = make_sharded(grid)
        train(model, optimizer, 2)
        full_on_all_ranks = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
        states: list[Any] = ctx.gather(full_on_all_ranks["state"])
        assert all(state.keys() == states[0].keys() for state in states)
        assert_same(states[-1], states[0])
        offloaded = StateDictOptions(full_state_dict=True, cpu_offload=True)
        full_on_rank_0 = get_optimizer_state_dict(model, optimizer, options=offloaded)
        assert bool(full_on_rank_0["state"] if full_on_rank_0 else {}) == (ctx.rank == 0)
        loaded_model, loaded_optimizer = make_sharded(grid, seed=3)
        set_optimizer_state_dict(
            loaded_model, loaded_optimizer, full_on_all_ranks, options=StateDictOptions(full_state_dict=True)
        )
        assert_same_state(gather_named_state(loaded_optimizer, loaded_model), gather_named_state(optimizer, model))


def checkpoint_bytes(folder: Path) -> int:
    """Bytes of all data files of a checkpoint."""
    return sum(file.stat().st_size for file in folder.rglob("*.distcp"))


@ranks(2, 4)
@sampled("config", [ZeroConfig(), CONFIGS[1]], ids=["flat", "whole"])
def test_replicas_are_written_once(ctx: RankContext, tmp_path: Path, config: ZeroConfig) -> None:
    """Checkpoints are as large as those of one group, apart from the headers of chunks with other boundaries."""
    sizes = {}
    for grid in grids(ctx.world_size):
        model = make_seeded(lambda: nn.Sequential(*(nn.Linear(200, 200) for _ in range(3))), 0)
        optimizer = shard(model, torch.optim.AdamW, config=config, **group_size_options(grid))
        torch.autograd.backward(model(torch.ones(2, 200)).sum())
        optimizer.step()
        checkpoint.save(tmp_path / str(grid), step=1, model=model, optimizer=optimizer)
        dcp_save({"optim": optimizer.sharded_state_dict()}, checkpoint_id=tmp_path / f"dcp-{grid}")
        sizes[grid] = checkpoint_bytes(tmp_path / str(grid)), checkpoint_bytes(tmp_path / f"dcp-{grid}")
    param_bytes = sum(param.nbytes for param in model.parameters())
    for checkpoint_size, state_dict_size in sizes.values():
        assert 3 * param_bytes <= checkpoint_size <= 3.3 * param_bytes  # parameters and two moments
        assert 2 * param_bytes <= state_dict_size <= 2.3 * param_bytes


@ranks(4, timeout=120)
@sampled("config", CONFIGS, ids=["flat", "whole"])
def test_checkpoint_loads_from_any_grid_to_any_grid(ctx: RankContext, tmp_path: Path, config: ZeroConfig) -> None:
    """Bit by bit, also in the steps after loading: data are equal on all ranks, so means over four are exact."""
    reference = net()
    train(reference, plain(reference), 5)
    for grid in grids(4):
        model, optimizer = make_sharded(grid, config=config)
        train(model, optimizer, 3)
        checkpoint.save(tmp_path / str(grid), step=3, model=model, optimizer=optimizer)
        expected = gather_named_state(optimizer, model)
        for other in grids(4):
            loaded_model, loaded_optimizer = make_sharded(other, seed=5, config=config)
            result = checkpoint.load(tmp_path / str(grid), model=loaded_model, optimizer=loaded_optimizer)
            assert result.world_size == 4
            assert_same_state(gather_named_state(loaded_optimizer, loaded_model), expected)
            assert_replicas_are_equal(other, loaded_model, loaded_optimizer)
            train(loaded_model, loaded_optimizer, 2, first=3)
            assert all(map(torch.equal, loaded_model.parameters(), reference.parameters()))


@ranks(4, timeout=120)
@sampled("num_ranks", [1, 2, 3])
def test_checkpoint_of_two_shard_groups_loads_on_fewer_ranks_and_back(
    ctx: RankContext, tmp_path: Path, num_ranks: int
) -> None:
    model, optimizer = make_sharded((2, 2))
    train(model, optimizer, 3)
    expected, weights = gather_named_state(optimizer, model), clone_values(model)
    checkpoint.save(tmp_path / "two-groups", step=3, model=model, optimizer=optimizer, extra=ctx.rank)
    group = first_ranks(num_ranks)
    if group is not None:
        loaded_model = net(seed=5)
        loaded_optimizer = shard(loaded_model, torch.optim.AdamW, process_group=group, config=CONFIGS[0], **ADAMW)
        result = checkpoint.load(
            tmp_path / "two-groups", model=loaded_model, optimizer=loaded_optimizer, process_group=group
        )
        assert result.extra_by_rank == {0: 0, 1: 1, 2: 2, 3: 3}
        found = loaded_optimizer.full_state_dict()
        if found is not None:
            assert_same_state(state_by_name(loaded_optimizer, found, loaded_model), expected)
        assert all_equal([clone_values(loaded_model), weights])
        checkpoint.save(tmp_path / "fewer", step=3, model=loaded_model, optimizer=loaded_optimizer, process_group=group)
    dist.barrier()
    final_model, optimizer = make_sharded((2, 2), seed=7)
    checkpoint.load(tmp_path / "fewer", model=final_model, optimizer=optimizer)
    assert_same_state(gather_named_state(optimizer, final_model), expected)
    assert all_equal([clone_values(final_model), weights])
    assert_replicas_are_equal((2, 2), final_model, optimizer)


@ranks(4)
def test_async_save_with_master_weights(ctx: RankContext, tmp_path: Path) -> None:
    config = ZeroConfig(partition=TINY, master_dtype=torch.float32)

    def make_bf16_run(seed: int) -> tuple[nn.Module, ShardedOptimizer]:
        model = make_seeded(mlp, seed).bfloat16()
        return model, shard(model, torch.optim.AdamW, config=config, **group_size_options((2, 2)), **ADAMW)

    model, optimizer = make_bf16_run(0)
    torch.autograd.backward(model(torch.ones(2, 6).bfloat16()).float().sum())
    optimizer.step()
    save_handle = checkpoint.async_save(tmp_path, step=1, model=model, optimizer=optimizer)
    expected, weights = gather_named_state(optimizer, model), clone_values(model)
    save_handle.wait()
    loaded_model, loaded_optimizer = make_bf16_run(1)
    checkpoint.load(tmp_path, model=loaded_model, optimizer=loaded_optimizer)
    assert_same_state(gather_named_state(loaded_optimizer, loaded_model), expected)
    assert all_equal([clone_values(loaded_model), weights])


@ranks(2, 4)
def test_sharded_state_dict_through_dcp(ctx: RankContext, tmp_path: Path) -> None:
    for grid in grids(ctx.world_size):
        model, optimizer = make_sharded(grid)
        train(model, optimizer, 2)
        dcp_save({"optim": optimizer.sharded_state_dict()}, checkpoint_id=tmp_path / str(grid))
        for other in grids(ctx.world_size):
            loaded_model, loaded_optimizer = make_sharded(other, seed=3)
            target = loaded_optimizer.sharded_state_dict()
            dcp_load({"optim": target}, checkpoint_id=tmp_path / str(grid))
            loaded_optimizer.load_state_dict(target)
            assert_same_state(gather_named_state(loaded_optimizer, loaded_model), gather_named_state(optimizer, model))
            assert_replicas_are_equal(other, loaded_model, loaded_optimizer)


@ranks(4)
def test_saving_from_one_shard_group_only_is_rejected(ctx: RankContext, tmp_path: Path) -> None:
    with torchrun_env(ctx.rank % 2, 2):
        model = net()
        optimizer = shard(model, torch.optim.AdamW, shard_group_size="node")
    with pytest.raises(ConfigError, match=r"process_group=optimizer.join_process_group"):
        checkpoint.save(tmp_path, step=0, model=model, optimizer=optimizer, process_group=optimizer.process_group)
    all_ranks = optimizer.join_process_group
    checkpoint.save(tmp_path, step=0, model=model, optimizer=optimizer, process_group=all_ranks)
    checkpoint.load(tmp_path, model=model, optimizer=optimizer, process_group=all_ranks)
