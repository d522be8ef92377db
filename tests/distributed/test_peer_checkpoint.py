"""After the loss of a rank, state is restored bit by bit from snapshots in the memory of the other ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support import RankContext, ranks
from tests.support.checkpoints import ADAMW, net, train
from tests.support.oracles import assert_same
from tests.support.tiers import sampled
from zeroshard import (
    CheckpointError,
    ConfigError,
    CPUOffload,
    FlatShards,
    GradScaler,
    ParamRule,
    PeerCheckpoint,
    RankFailedError,
    ShardedOptimizer,
    WholeParams,
    ZeroConfig,
    ZeroRedundancyOptimizer,
    matrix_params,
    remaining_params,
    shard,
)
from zeroshard.comm.collectives import BackgroundComm
from zeroshard.peer_checkpoint.restore import restore_from_peers
from zeroshard.peer_checkpoint.snapshot import PeerSnapshots

SNAPSHOT_EVERY = 3
PEER_CHECKPOINT_CONFIG = ZeroConfig(
    partition=FlatShards(bucket_bytes=160), peer_checkpoint=PeerCheckpoint(every=SNAPSHOT_EVERY)
)
MakeOptimizer = Callable[[nn.Module, dist.ProcessGroup | None], ZeroRedundancyOptimizer]


def make_adamw(config: ZeroConfig) -> MakeOptimizer:
    return lambda model, group: shard(model, torch.optim.AdamW, process_group=group, config=config, **ADAMW)


def with_frozen_group(model: nn.Module, group: dist.ProcessGroup | None) -> ZeroRedundancyOptimizer:
    """AdamW with two parameter groups, one of them frozen."""
    first, *rest = model.parameters()
    first.requires_grad_(False)
    groups = [{"params": rest, "lr": 0.03}, {"params": [first], "weight_decay": 0.2}]
    return shard(model, torch.optim.AdamW, params=groups, process_group=group, config=PEER_CHECKPOINT_CONFIG, **ADAMW)


def with_rules(model: nn.Module, group: dist.ProcessGroup | None) -> ZeroRedundancyOptimizer:
    rules = [
        ParamRule(matrix_params(exclude=("kernel",)), torch.optim.Muon, lr=0.02),
        ParamRule(remaining_params, torch.optim.AdamW, lr=0.05),
    ]
    return shard(model, rules, process_group=group, config=PEER_CHECKPOINT_CONFIG)


def with_momentum(model: nn.Module, group: dist.ProcessGroup | None) -> ZeroRedundancyOptimizer:
    return shard(model, torch.optim.SGD, process_group=group, config=PEER_CHECKPOINT_CONFIG, lr=0.005, momentum=0.9)


def drop_in(model: nn.Module, group: dist.ProcessGroup | None) -> ZeroRedundancyOptimizer:
    config = ZeroConfig(peer_checkpoint=PeerCheckpoint(every=SNAPSHOT_EVERY))
    named = model.named_parameters()
    return ZeroRedundancyOptimizer(named, torch.optim.AdamW, process_group=group, config=config, **ADAMW)


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "flat": make_adamw(PEER_CHECKPOINT_CONFIG),
    "one-bucket": make_adamw(ZeroConfig(peer_checkpoint=PeerCheckpoint(every=SNAPSHOT_EVERY))),
    "whole": make_adamw(replace(PEER_CHECKPOINT_CONFIG, partition=WholeParams())),
    "overlap": make_adamw(replace(PEER_CHECKPOINT_CONFIG, overlap_param_gather=True)),
    "groups": with_frozen_group,
    "rules": with_rules,
    "momentum": with_momentum,
    "dropin": drop_in,
}


def group_without(lost: int) -> dist.ProcessGroup | None:
    """Create a group of all ranks but `lost`. All ranks must call."""
    group: dist.ProcessGroup | None = dist.new_group([rank for rank in range(dist.get_world_size()) if rank != lost])
    return group


def wait_for_snapshots(optimizer: ZeroRedundancyOptimizer) -> PeerSnapshots:
    """Wait for snapshots in flight, and return the snapshots that this rank holds."""
    assert optimizer._peer_checkpointer is not None
    optimizer._peer_checkpointer.wait()
    return optimizer._peer_checkpointer.snapshots


def broadcast_from_rank0(value: Any) -> Any:
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def full_state(model: nn.Module, optimizer: ZeroRedundancyOptimizer) -> Any:
    """The state of the model and of the optimizer, on all ranks."""
    return broadcast_from_rank0((deepcopy(model.state_dict()), optimizer.full_state_dict()))


def comparable_state(model: nn.Module, optimizer: ZeroRedundancyOptimizer) -> Any:
    """State to compare. The drop-in does not know the model, so its snapshots have no buffers."""
    values = model.state_dict() if isinstance(optimizer, ShardedOptimizer) else dict(model.named_parameters())
    return values, optimizer.full_state_dict()


@ranks(2, 3, 4)
@sampled("optimizer_name", OPTIMIZERS)
def test_restore_without_lost_rank_equals_checkpoint(ctx: RankContext, optimizer_name: str) -> None:
    # The lost rank varies between optimizers.
    lose_rank_and_compare(ctx, OPTIMIZERS[optimizer_name], lost=len(optimizer_name) % ctx.world_size)


@ranks(2, 3)
@pytest.mark.gpu
@sampled("offload", [None, CPUOffload()])
@sampled("overlap", [False, True])
def test_restore_on_gpu_without_lost_rank(ctx: RankContext, offload: CPUOffload | None, overlap: bool) -> None:
    config = replace(PEER_CHECKPOINT_CONFIG, offload=offload, overlap_param_gather=overlap)
    lose_rank_and_compare(ctx, make_adamw(config), lost=ctx.world_size - 1, device="cuda")


def lose_rank_and_compare(ctx: RankContext, make_optimizer: MakeOptimizer, *, lost: int, device: str = "cpu") -> None:
    group, model = group_without(lost), net().to(device)
    optimizer = make_optimizer(model, None)
    train(model, optimizer, 2 * SNAPSHOT_EVERY)
    weights, state = full_state(model, optimizer)
    train(model, optimizer, 2, first=2 * SNAPSHOT_EVERY)
    snapshots = wait_for_snapshots(optimizer)
    if ctx.rank == lost:
        return
    optimizer = make_optimizer(model, group)
    assert restore_from_peers(optimizer, snapshots) == 2 * SNAPSHOT_EVERY
    expected_model = net(seed=5).to(device)
    expected_optimizer = make_optimizer(expected_model, group)
    expected_model.load_state_dict(weights)
    expected_optimizer.load_state_dict(state)
    for first in (2 * SNAPSHOT_EVERY, 2 * SNAPSHOT_EVERY + 2):
        assert_same(comparable_state(model, optimizer), comparable_state(expected_model, expected_optimizer))
        train(model, optimizer, 2, first=first)
        train(expected_model, expected_optimizer, 2, first=first)


@ranks(2, 3, 4)
@sampled("lost", [0, 1])
def test_restore_with_replacement_rank(ctx: RankContext, lost: int) -> None:
    """The replacement rank has other weights and no snapshots."""
    model = net()
    optimizer = OPTIMIZERS["flat"](model, None)
    train(model, optimizer, SNAPSHOT_EVERY + 1)
    snapshots: PeerSnapshots | None = wait_for_snapshots(optimizer)
    train(model, optimizer, 1, first=SNAPSHOT_EVERY + 1)
    if ctx.rank == lost:
        model, snapshots = net(seed=7), None
    optimizer = OPTIMIZERS["flat"](model, None)
    assert restore_from_peers(optimizer, snapshots) == SNAPSHOT_EVERY
    train(model, optimizer, 4, first=SNAPSHOT_EVERY)
    expected_model = net()
    expected_optimizer = OPTIMIZERS["flat"](expected_model, None)
    train(expected_model, expected_optimizer, SNAPSHOT_EVERY + 4)
    assert_same(comparable_state(model, optimizer), comparable_state(expected_model, expected_optimizer))


@ranks(2, 4)
def test_restore_into_other_partitions_and_shard_groups(ctx: RankContext) -> None:
    """Whole or flat, one bucket or many, with or without shard groups: snapshots can be restored into all of them."""
    whole, large_buckets = (
        replace(PEER_CHECKPOINT_CONFIG, partition=WholeParams()),
        replace(PEER_CHECKPOINT_CONFIG, partition=FlatShards()),
    )
    half = ctx.world_size // 2
    cases = [
        (PEER_CHECKPOINT_CONFIG, None),
        (whole, half),
        (large_buckets, None),
        (whole, None),
        (PEER_CHECKPOINT_CONFIG, half),
        (large_buckets, 1),
        (whole, 1),
    ]
    model = net()
    snapshots, states = None, []
    for number, (config, shard_group_size) in enumerate(cases):
        optimizer = shard(model, torch.optim.AdamW, config=config, shard_group_size=shard_group_size, **ADAMW)
        if snapshots is not None:
            assert restore_from_peers(optimizer, snapshots) == SNAPSHOT_EVERY * number
            states.append(deepcopy(comparable_state(model, optimizer)))
        train(model, optimizer, SNAPSHOT_EVERY, first=SNAPSHOT_EVERY * number)
        snapshots = wait_for_snapshots(optimizer)
    expected_model = net()
    expected_optimizer = shard(expected_model, torch.optim.AdamW, config=PEER_CHECKPOINT_CONFIG, **ADAMW)
    for number, found in enumerate(states):
        train(expected_model, expected_optimizer, SNAPSHOT_EVERY, first=SNAPSHOT_EVERY * number)
        assert_same(found, comparable_state(expected_model, expected_optimizer))


MASTER_WEIGHTS_CONFIG = replace(PEER_CHECKPOINT_CONFIG, master_dtype=torch.float32)


@ranks(2, 3)
def test_restore_master_weights_exactly(ctx: RankContext) -> None:
    """Snapshots contain the master weights, so no precision is lost. Without master weights they are rounded."""
    group, model = group_without(0), net().to(torch.bfloat16)
    optimizer = make_adamw(MASTER_WEIGHTS_CONFIG)(model, None)
    train_in_bf16(model, optimizer, SNAPSHOT_EVERY)
    weights, state = full_state(model, optimizer)
    train_in_bf16(model, optimizer, 1)
    snapshots = wait_for_snapshots(optimizer)
    if ctx.rank == 0:
        return
    optimizer = make_adamw(MASTER_WEIGHTS_CONFIG)(model, group)
    restore_from_peers(optimizer, snapshots)
    expected_model = net(seed=4).to(torch.bfloat16)
    expected_optimizer = make_adamw(MASTER_WEIGHTS_CONFIG)(expected_model, group)
    expected_model.load_state_dict(weights)
    expected_optimizer.load_state_dict(state)
    assert_same(comparable_state(model, optimizer), comparable_state(expected_model, expected_optimizer))
    train_in_bf16(model, optimizer, 2)
    train_in_bf16(expected_model, expected_optimizer, 2)
    assert_same(comparable_state(model, optimizer), comparable_state(expected_model, expected_optimizer))
    plain = make_adamw(PEER_CHECKPOINT_CONFIG)(model, group)
    restore_from_peers(plain, snapshots)
    assert_same(dict(model.state_dict()), dict(weights))
    restored = make_adamw(MASTER_WEIGHTS_CONFIG)(model, group)
    restore_from_peers(restored, wait_for_snapshots(plain))
    assert_same(dict(model.state_dict()), dict(weights))


def train_in_bf16(model: nn.Module, optimizer: ZeroRedundancyOptimizer, steps: int) -> None:
    for number in range(steps):
        generator = torch.Generator().manual_seed(number)
        out = model(torch.randn(4, 5, generator=generator).to(torch.bfloat16))
        torch.autograd.backward(out.float().square().mean())
        optimizer.step()
        optimizer.zero_grad()


def make_other_net() -> nn.Module:
    model = net(seed=1)
    model.leave = nn.Linear(6, 3, bias=False)
    return model


@ranks(4)
def test_loss_of_rank_and_its_peer_is_rejected(ctx: RankContext) -> None:
    group, model = dist.new_group([0, 3]), net()
    optimizer = OPTIMIZERS["flat"](model, None)
    train(model, optimizer, SNAPSHOT_EVERY)
    snapshots = wait_for_snapshots(optimizer)
    if ctx.rank in (1, 2):
        return
    optimizer = OPTIMIZERS["flat"](model, group)
    before = deepcopy(comparable_state(model, optimizer))
    with pytest.raises(
        CheckpointError, match=r"snapshot of step 3 is incomplete: no remaining rank holds the shards of rank 1 of 4"
    ):
        restore_from_peers(optimizer, snapshots)
    assert_same(comparable_state(model, optimizer), before)


@ranks(3)
def test_failure_domain_can_be_lost_at_once(ctx: RankContext) -> None:
    """Ranks 0 and 1 are lost at once, and rank 2 holds the snapshots of both."""
    model = net()
    config = replace(
        PEER_CHECKPOINT_CONFIG, peer_checkpoint=PeerCheckpoint(every=SNAPSHOT_EVERY, failure_domain_size=2)
    )
    optimizer = shard(model, torch.optim.AdamW, config=config, **ADAMW)
    train(model, optimizer, SNAPSHOT_EVERY)
    expected = comparable_state(model, optimizer)
    snapshots: PeerSnapshots | None = wait_for_snapshots(optimizer)
    train(model, optimizer, 2)
    if ctx.rank < 2:
        model, snapshots = net(seed=7), None
    optimizer = shard(model, torch.optim.AdamW, config=config, **ADAMW)
    assert restore_from_peers(optimizer, snapshots) == SNAPSHOT_EVERY
    assert_same(comparable_state(model, optimizer)[1], expected[1])


@ranks(2)
def test_restore_errors_are_raised_on_all_ranks(ctx: RankContext) -> None:
    model = net()
    optimizer = OPTIMIZERS["flat"](model, None)
    train(model, optimizer, SNAPSHOT_EVERY - 1)
    with pytest.raises(CheckpointError, match="no rank holds a snapshot"):
        restore_from_peers(optimizer, wait_for_snapshots(optimizer))
    train(model, optimizer, 1, first=SNAPSHOT_EVERY - 1)
    snapshots = wait_for_snapshots(optimizer)
    other = make_other_net()
    with pytest.raises(CheckpointError, match=r"belong to another model.*got parameter 6 \(leave.bias\).*Nothing was"):
        restore_from_peers(OPTIMIZERS["flat"](other, None), snapshots)
    wrong: Any = snapshots if ctx.rank else model
    with pytest.raises(
        RankFailedError if ctx.rank else TypeError, match="expects the peer_snapshots of the previous optimizer"
    ):
        restore_from_peers(optimizer, wrong)
    with pytest.raises(TypeError, match="expects a sharded optimizer, got Net"):
        restore_from_peers(model, snapshots)  # type: ignore[arg-type]
    assert restore_from_peers(optimizer, snapshots) == SNAPSHOT_EVERY


class UnserializableStateSGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        if dist.get_rank() == 0:
            for state in self.state.values():
                state["what"] = UnserializableStateSGD
        return result


@ranks(2)
def test_unserializable_state_fails_the_step(ctx: RankContext) -> None:
    model = net()
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(),
        UnserializableStateSGD,
        config=ZeroConfig(peer_checkpoint=PeerCheckpoint(1)),
        lr=0.1,
        momentum=0.9,
    )
    error, message = (CheckpointError, "cannot be sent safely") if ctx.rank == 0 else (RankFailedError, "rank 0 failed")
    with pytest.raises(error, match=message):
        train(model, optimizer, 1)


@ranks(1, 2, 4)
def test_snapshot_memory_and_traffic(ctx: RankContext) -> None:
    """AdamW in float32: 12 bytes per element of a shard, for a rank's own snapshot and for the one that it stores."""
    numel = 256 * 256
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = nn.Linear(256, 256, bias=False)
        optimizer = shard(model, torch.optim.AdamW, config=ZeroConfig(peer_checkpoint=PeerCheckpoint(every=2)))
    assert bool(
        [warning for warning in caught if "PeerCheckpoint(...) has no effect on one rank" in str(warning.message)]
    ) == (ctx.world_size == 1)
    snapshots = optimizer.peer_snapshots
    assert snapshots is not None
    assert (snapshots.step, snapshots.nbytes, snapshots.bytes_sent) == (None, 0, 0)
    for _ in range(2):
        torch.autograd.backward(model(torch.ones(2, 256)).sum())
        optimizer.step()
        optimizer.zero_grad()
    wait_for_snapshots(optimizer)
    shard_nbytes, max_overhead = 12 * numel // ctx.world_size, 16384
    assert snapshots.step == 2
    assert 0 <= snapshots.nbytes - shard_nbytes * min(2, ctx.world_size) < max_overhead
    assert 0 <= snapshots.bytes_sent - (shard_nbytes if ctx.world_size > 1 else 0) < max_overhead


@ranks(1)
def test_peer_checkpoint_is_rejected_with_overlap_with_ddp(ctx: RankContext) -> None:
    config = ZeroConfig(peer_checkpoint=PeerCheckpoint())
    with pytest.raises(ConfigError, match=r"PeerCheckpoint\(.* overlap_with_ddp=True, where step\(\) is never called"):
        ZeroRedundancyOptimizer(net().parameters(), torch.optim.SGD, overlap_with_ddp=True, config=config, lr=0.1)


@ranks(2)
def test_skipped_scaler_step_takes_no_snapshot(ctx: RankContext) -> None:
    model = net()
    optimizer = OPTIMIZERS["flat"](model, None)
    train(model, optimizer, SNAPSHOT_EVERY)
    snapshots = wait_for_snapshots(optimizer)
    own_shard = snapshots._list_snapshots()[0].shards[ctx.rank]
    scaler = GradScaler("cpu")
    loss = model(torch.full((4, 5), torch.inf)).sum()
    torch.autograd.backward(scaler.scale(loss))
    scaler.step(optimizer)
    scaler.update()
    wait_for_snapshots(optimizer)
    assert snapshots._list_snapshots()[0].shards[ctx.rank] is own_shard


@ranks(3)
def test_rank_lost_during_restore_leaves_complete_snapshot(ctx: RankContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank knows that all have the new snapshot, the others do not: together, all still hold a complete one."""
    model = net()
    optimizer = OPTIMIZERS["flat"](model, None)
    train(model, optimizer, SNAPSHOT_EVERY)
    snapshots, expected = wait_for_snapshots(optimizer), comparable_state(model, optimizer)
    second = OPTIMIZERS["flat"](model, None)

    def fail_to_confirm(*_: Any, succeeded: bool) -> bool:
        raise RankFailedError(f"another rank was lost in the meantime ({succeeded})")

    with monkeypatch.context() as patch:
        if ctx.rank != 1:
            patch.setattr(BackgroundComm, "all_succeeded", fail_to_confirm)
        else:
            patch.setattr(BackgroundComm, "all_succeeded", lambda *_, succeeded: succeeded)
        try:
            assert restore_from_peers(second, snapshots) == SNAPSHOT_EVERY
            assert ctx.rank == 1
        except RankFailedError:
            assert ctx.rank != 1
    assert second.peer_snapshots is snapshots, "otherwise the snapshots would be freed with the optimizer"
    train(model, second, 1)
    third = OPTIMIZERS["flat"](model, None)
    assert restore_from_peers(third, snapshots) == SNAPSHOT_EVERY
    assert_same(comparable_state(model, third), expected)


@ranks(2)
def test_load_state_dict_invalidates_older_snapshots(ctx: RankContext) -> None:
    model = net()
    optimizer = OPTIMIZERS["flat"](model, None)
    train(model, optimizer, SNAPSHOT_EVERY - 1)
    state = broadcast_from_rank0(optimizer.full_state_dict())
    train(model, optimizer, 1)
    assert wait_for_snapshots(optimizer).step == SNAPSHOT_EVERY
    optimizer.load_state_dict(state)
    assert optimizer.peer_snapshots is not None
    assert optimizer.peer_snapshots.step is None, "restoring would bring back state that the load replaced"
    train(model, optimizer, 1)
    assert wait_for_snapshots(optimizer).step == SNAPSHOT_EVERY + 1


@ranks(2, 3)
def test_scheduler_is_rebuilt_after_restore(ctx: RankContext) -> None:
    """Follows the steps in docs/keeping-going.md."""

    def make_optimizer_and_scheduler(model: nn.Module) -> tuple[ZeroRedundancyOptimizer, Any]:
        optimizer = OPTIMIZERS["flat"](model, None)
        return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)

    def train_with_scheduler(
        model: nn.Module, optimizer: ZeroRedundancyOptimizer, scheduler: Any, first: int, last: int
    ) -> None:
        for step in range(first, last):
            train(model, optimizer, 1, first=step)
            scheduler.step()

    model, plain = net(), net()
    train_with_scheduler(plain, *make_optimizer_and_scheduler(plain), 0, SNAPSHOT_EVERY + 3)
    optimizer, scheduler = make_optimizer_and_scheduler(model)
    train_with_scheduler(model, optimizer, scheduler, 0, SNAPSHOT_EVERY + 1)
    snapshots = wait_for_snapshots(optimizer)
    restored = OPTIMIZERS["flat"](model, None)
    step = restore_from_peers(restored, snapshots)
    for group in restored.param_groups:
        group["lr"] = ADAMW["lr"]
        group.pop("initial_lr", None)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(restored, T_max=10)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the optimizer has not stepped
        for _ in range(step):
            scheduler.step()
    train_with_scheduler(model, restored, scheduler, step, SNAPSHOT_EVERY + 3)
    assert_same(dict(model.state_dict()), dict(plain.state_dict()))
