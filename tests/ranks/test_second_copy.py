"""What survives the loss of a rank is put together again from memory, for other ranks, bit for bit."""

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

EVERY = 3
COPIED = ZeroConfig(partition=FlatShards(bucket_bytes=160), peer_checkpoint=PeerCheckpoint(every=EVERY))
Way = Callable[[nn.Module, dist.ProcessGroup | None], ZeroRedundancyOptimizer]


def sharded(config: ZeroConfig) -> Way:
    return lambda model, group: shard(model, torch.optim.AdamW, process_group=group, config=config, **ADAMW)


def in_groups(model: nn.Module, group: dist.ProcessGroup | None) -> ZeroRedundancyOptimizer:
    """One of them is frozen."""
    first, *rest = model.parameters()
    first.requires_grad_(False)
    groups = [{"params": rest, "lr": 0.03}, {"params": [first], "weight_decay": 0.2}]
    return shard(model, torch.optim.AdamW, params=groups, process_group=group, config=COPIED, **ADAMW)


def by_rules(model: nn.Module, group: dist.ProcessGroup | None) -> ZeroRedundancyOptimizer:
    rules = [
        ParamRule(matrix_params(exclude=("kernel",)), torch.optim.Muon, lr=0.02),
        ParamRule(remaining_params, torch.optim.AdamW, lr=0.05),
    ]
    return shard(model, rules, process_group=group, config=COPIED)


def with_momentum(model: nn.Module, group: dist.ProcessGroup | None) -> ZeroRedundancyOptimizer:
    return shard(model, torch.optim.SGD, process_group=group, config=COPIED, lr=0.005, momentum=0.9)


def dropin(model: nn.Module, group: dist.ProcessGroup | None) -> ZeroRedundancyOptimizer:
    config = ZeroConfig(peer_checkpoint=PeerCheckpoint(every=EVERY))
    named = model.named_parameters()
    return ZeroRedundancyOptimizer(named, torch.optim.AdamW, process_group=group, config=config, **ADAMW)


WAYS: dict[str, Way] = {
    "flat": sharded(COPIED),
    "one-bucket": sharded(ZeroConfig(peer_checkpoint=PeerCheckpoint(every=EVERY))),
    "whole": sharded(replace(COPIED, partition=WholeParams())),
    "overlap": sharded(replace(COPIED, overlap_param_gather=True)),
    "groups": in_groups,
    "rules": by_rules,
    "momentum": with_momentum,
    "dropin": dropin,
}


def without(lost: int) -> dist.ProcessGroup | None:
    """The other ranks. Called on all."""
    group: dist.ProcessGroup | None = dist.new_group([it for it in range(dist.get_world_size()) if it != lost])
    return group


def settled(optimizer: ZeroRedundancyOptimizer) -> PeerSnapshots:
    """What is held when nothing is on its way."""
    assert optimizer._peer_checkpointer is not None
    optimizer._peer_checkpointer.wait()
    return optimizer._peer_checkpointer.snapshots


def from_first(value: Any) -> Any:
    found = [value]
    dist.broadcast_object_list(found)
    return found[0]


def saved(model: nn.Module, optimizer: ZeroRedundancyOptimizer) -> Any:
    """All there is, on all ranks."""
    return from_first((deepcopy(model.state_dict()), optimizer.full_state_dict()))


def everything(model: nn.Module, optimizer: ZeroRedundancyOptimizer) -> Any:
    """The drop-in does not know the model, and so not its buffers."""
    values = model.state_dict() if isinstance(optimizer, ShardedOptimizer) else dict(model.named_parameters())
    return values, optimizer.full_state_dict()


@ranks(2, 3, 4)
@sampled("way", WAYS)
def test_without_one_rank_training_goes_on_as_from_a_checkpoint(ctx: RankContext, way: str) -> None:
    lose_a_rank(ctx, WAYS[way], lost=len(way) % ctx.world_size)  # now this one, now that


@ranks(2, 3)
@pytest.mark.gpu
@sampled("offload", [None, CPUOffload()])
@sampled("overlap", [False, True])
def test_what_is_on_a_gpu(ctx: RankContext, offload: CPUOffload | None, overlap: bool) -> None:
    config = replace(COPIED, offload=offload, overlap_param_gather=overlap)
    lose_a_rank(ctx, sharded(config), lost=ctx.world_size - 1, device="cuda")


def lose_a_rank(ctx: RankContext, way: Way, *, lost: int, device: str = "cpu") -> None:
    group, model = without(lost), net().to(device)
    optimizer = way(model, None)
    train(model, optimizer, 2 * EVERY)
    weights, state = saved(model, optimizer)
    train(model, optimizer, 2, first=2 * EVERY)
    held = settled(optimizer)
    if ctx.rank == lost:
        return
    optimizer = way(model, group)
    assert restore_from_peers(optimizer, held) == 2 * EVERY
    oracle = net(seed=5).to(device)
    expected = way(oracle, group)
    oracle.load_state_dict(weights)
    expected.load_state_dict(state)
    for first in (2 * EVERY, 2 * EVERY + 2):
        assert_same(everything(model, optimizer), everything(oracle, expected))
        train(model, optimizer, 2, first=first)
        train(oracle, expected, 2, first=first)


@ranks(2, 3, 4)
@sampled("lost", [0, 1])
def test_with_a_new_process_in_its_place(ctx: RankContext, lost: int) -> None:
    """It has another model, and nothing in its hands."""
    model = net()
    optimizer = WAYS["flat"](model, None)
    train(model, optimizer, EVERY + 1)
    held: PeerSnapshots | None = settled(optimizer)
    train(model, optimizer, 1, first=EVERY + 1)
    if ctx.rank == lost:
        model, held = net(seed=7), None
    optimizer = WAYS["flat"](model, None)
    assert restore_from_peers(optimizer, held) == EVERY
    train(model, optimizer, 4, first=EVERY)
    expected = net()
    oracle = WAYS["flat"](expected, None)
    train(expected, oracle, EVERY + 4)
    assert_same(everything(model, optimizer), everything(expected, oracle))


@ranks(2, 4)
def test_from_one_arrangement_to_another(ctx: RankContext) -> None:
    """Whole or cut, in one bucket or many, in rows or not: what was copied fits all of them."""
    whole, long = replace(COPIED, partition=WholeParams()), replace(COPIED, partition=FlatShards())
    half = ctx.world_size // 2
    arrangements = [(COPIED, None), (whole, half), (long, None), (whole, None), (COPIED, half), (long, 1), (whole, 1)]
    model = net()
    held, states = None, []
    for number, (config, within) in enumerate(arrangements):
        optimizer = shard(model, torch.optim.AdamW, config=config, shard_group_size=within, **ADAMW)
        if held is not None:
            assert restore_from_peers(optimizer, held) == EVERY * number
            states.append(deepcopy(everything(model, optimizer)))
        train(model, optimizer, EVERY, first=EVERY * number)
        held = settled(optimizer)
    expected = net()
    oracle = shard(expected, torch.optim.AdamW, config=COPIED, **ADAMW)
    for number, found in enumerate(states):
        train(expected, oracle, EVERY, first=EVERY * number)
        assert_same(found, everything(expected, oracle))


MASTERS = replace(COPIED, master_dtype=torch.float32)


@ranks(2, 3)
def test_master_weights(ctx: RankContext) -> None:
    """What is kept is what is updated: not a bit is lost with the rounding. Without masters it is rounded."""
    group, model = without(0), net().to(torch.bfloat16)
    optimizer = sharded(MASTERS)(model, None)
    train_in_bf16(model, optimizer, EVERY)
    weights, state = saved(model, optimizer)
    train_in_bf16(model, optimizer, 1)
    held = settled(optimizer)
    if ctx.rank == 0:
        return
    optimizer = sharded(MASTERS)(model, group)
    restore_from_peers(optimizer, held)
    oracle = net(seed=4).to(torch.bfloat16)
    expected = sharded(MASTERS)(oracle, group)
    oracle.load_state_dict(weights)
    expected.load_state_dict(state)
    assert_same(everything(model, optimizer), everything(oracle, expected))
    train_in_bf16(model, optimizer, 2)
    train_in_bf16(oracle, expected, 2)
    assert_same(everything(model, optimizer), everything(oracle, expected))
    plain = sharded(COPIED)(model, group)
    restore_from_peers(plain, held)
    assert_same(dict(model.state_dict()), dict(weights))
    again = sharded(MASTERS)(model, group)
    restore_from_peers(again, settled(plain))
    assert_same(dict(model.state_dict()), dict(weights))


def train_in_bf16(model: nn.Module, optimizer: ZeroRedundancyOptimizer, steps: int) -> None:
    for number in range(steps):
        draw = torch.Generator().manual_seed(number)
        out = model(torch.randn(4, 5, generator=draw).to(torch.bfloat16))
        torch.autograd.backward(out.float().square().mean())
        optimizer.step()
        optimizer.zero_grad()


def other_net() -> nn.Module:
    model = net(seed=1)
    model.leave = nn.Linear(6, 3, bias=False)
    return model


@ranks(4)
def test_two_partners_at_once_are_too_many(ctx: RankContext) -> None:
    group, model = dist.new_group([0, 3]), net()
    optimizer = WAYS["flat"](model, None)
    train(model, optimizer, EVERY)
    held = settled(optimizer)
    if ctx.rank in (1, 2):
        return
    optimizer = WAYS["flat"](model, group)
    before = deepcopy(everything(model, optimizer))
    with pytest.raises(CheckpointError, match=r"copy of step 3, .* 4 ranks .* nobody here holds the share of rank 1:"):
        restore_from_peers(optimizer, held)
    assert_same(everything(model, optimizer), before)


@ranks(3)
def test_apart_says_who_fails_together(ctx: RankContext) -> None:
    """Ranks 0 and 1 are lost at once, and rank 2 has both of their copies."""
    model = net()
    config = replace(COPIED, peer_checkpoint=PeerCheckpoint(every=EVERY, failure_domain_size=2))
    optimizer = shard(model, torch.optim.AdamW, config=config, **ADAMW)
    train(model, optimizer, EVERY)
    expected = everything(model, optimizer)
    held: PeerSnapshots | None = settled(optimizer)
    train(model, optimizer, 2)
    if ctx.rank < 2:
        model, held = net(seed=7), None
    optimizer = shard(model, torch.optim.AdamW, config=config, **ADAMW)
    assert restore_from_peers(optimizer, held) == EVERY
    assert_same(everything(model, optimizer)[1], expected[1])


@ranks(2)
def test_what_cannot_be_restored_is_told_on_all_ranks(ctx: RankContext) -> None:
    model = net()
    optimizer = WAYS["flat"](model, None)
    train(model, optimizer, EVERY - 1)
    with pytest.raises(CheckpointError, match="no rank holds a copy"):
        restore_from_peers(optimizer, settled(optimizer))
    train(model, optimizer, 1, first=EVERY - 1)
    held = settled(optimizer)
    other = other_net()
    with pytest.raises(CheckpointError, match=r"of another model.*They have parameter 6 \(leave.bias\).*Nothing was"):
        restore_from_peers(WAYS["flat"](other, None), held)
    wrong: Any = held if ctx.rank else model
    with pytest.raises(RankFailedError if ctx.rank else TypeError, match="takes what a former optimizer has"):
        restore_from_peers(optimizer, wrong)
    with pytest.raises(TypeError, match="takes a sharded optimizer, not a Net"):
        restore_from_peers(model, held)  # type: ignore[arg-type]
    assert restore_from_peers(optimizer, held) == EVERY


class Unsendable(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        if dist.get_rank() == 0:
            for state in self.state.values():
                state["what"] = Unsendable
        return result


@ranks(2)
def test_state_that_cannot_be_sent_is_told_at_once(ctx: RankContext) -> None:
    model = net()
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), Unsendable, config=ZeroConfig(peer_checkpoint=PeerCheckpoint(1)), lr=0.1, momentum=0.9
    )
    kind, text = (CheckpointError, "cannot be sent safely") if ctx.rank == 0 else (RankFailedError, "rank 0 failed")
    with pytest.raises(kind, match=text):
        train(model, optimizer, 1)


@ranks(1, 2, 4)
def test_what_it_costs(ctx: RankContext) -> None:
    """AdamW in float32: 12 bytes a parameter and share, for one's own and for the one that is kept."""
    numel = 256 * 256
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = nn.Linear(256, 256, bias=False)
        optimizer = shard(model, torch.optim.AdamW, config=ZeroConfig(peer_checkpoint=PeerCheckpoint(every=2)))
    assert bool([it for it in caught if "PeerCheckpoint(...) on one rank" in str(it.message)]) == (ctx.world_size == 1)
    held = optimizer.peer_snapshots
    assert held is not None
    assert (held.step, held.nbytes, held.bytes_sent) == (None, 0, 0)
    for _ in range(2):
        torch.autograd.backward(model(torch.ones(2, 256)).sum())
        optimizer.step()
        optimizer.zero_grad()
    settled(optimizer)
    share, small = 12 * numel // ctx.world_size, 16384
    assert held.step == 2
    assert 0 <= held.nbytes - share * min(2, ctx.world_size) < small
    assert 0 <= held.bytes_sent - (share if ctx.world_size > 1 else 0) < small


@ranks(1)
def test_a_hook_that_steps_makes_no_copies(ctx: RankContext) -> None:
    assert ctx.world_size == 1
    config = ZeroConfig(peer_checkpoint=PeerCheckpoint())
    with pytest.raises(ConfigError, match=r"PeerCheckpoint\(\.\.\.\) needs step\(\) to be called"):
        ZeroRedundancyOptimizer(net().parameters(), torch.optim.SGD, overlap_with_ddp=True, config=config, lr=0.1)


@ranks(2)
def test_steps_that_a_scaler_skips_make_no_copies(ctx: RankContext) -> None:
    model = net()
    optimizer = WAYS["flat"](model, None)
    train(model, optimizer, EVERY)
    held = settled(optimizer)
    first = held.list_snapshots()[0].shards[ctx.rank]
    scaler = GradScaler("cpu")
    loss = model(torch.full((4, 5), torch.inf)).sum()
    torch.autograd.backward(scaler.scale(loss))
    scaler.step(optimizer)
    scaler.update()
    settled(optimizer)
    assert held.list_snapshots()[0].shards[ctx.rank] is first


@ranks(3)
def test_a_rank_that_is_lost_while_others_restore_leaves_a_whole(
    ctx: RankContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank has heard that all have the new copy, the others have not: whatever each holds, it is enough."""
    model = net()
    optimizer = WAYS["flat"](model, None)
    train(model, optimizer, EVERY)
    held, expected = settled(optimizer), everything(model, optimizer)
    another = WAYS["flat"](model, None)

    def unheard(*_: Any, well: bool) -> bool:
        raise RankFailedError(f"another rank was lost by now ({well})")

    with monkeypatch.context() as patch:
        if ctx.rank != 1:
            patch.setattr(BackgroundComm, "all_succeeded", unheard)
        else:
            patch.setattr(BackgroundComm, "all_succeeded", lambda *_, well: well)
        try:
            assert restore_from_peers(another, held) == EVERY
            assert ctx.rank == 1
        except RankFailedError:
            assert ctx.rank != 1
    assert another.peer_snapshots is held, "or it would be gone with the optimizer"
    train(model, another, 1)
    last = WAYS["flat"](model, None)
    assert restore_from_peers(last, held) == EVERY
    assert_same(everything(model, last), expected)


@ranks(2)
def test_what_is_loaded_is_copied_and_what_was_before_is_not(ctx: RankContext) -> None:
    model = net()
    optimizer = WAYS["flat"](model, None)
    train(model, optimizer, EVERY - 1)
    state = from_first(optimizer.full_state_dict())
    train(model, optimizer, 1)
    assert settled(optimizer).step == EVERY
    optimizer.load_state_dict(state)
    assert optimizer.peer_snapshots is not None
    assert optimizer.peer_snapshots.step is None, "a loss would bring back what was given up"
    train(model, optimizer, 1)
    assert settled(optimizer).step == EVERY + 1


@ranks(2, 3)
def test_a_scheduler_is_made_anew(ctx: RankContext) -> None:
    """As docs/keeping-going.md says."""

    def begun(model: nn.Module) -> tuple[ZeroRedundancyOptimizer, Any]:
        optimizer = WAYS["flat"](model, None)
        return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)

    def trained(model: nn.Module, optimizer: ZeroRedundancyOptimizer, scheduler: Any, first: int, last: int) -> None:
        for step in range(first, last):
            train(model, optimizer, 1, first=step)
            scheduler.step()

    model, plain = net(), net()
    trained(plain, *begun(plain), 0, EVERY + 3)
    optimizer, scheduler = begun(model)
    trained(model, optimizer, scheduler, 0, EVERY + 1)
    held = settled(optimizer)
    another = WAYS["flat"](model, None)
    step = restore_from_peers(another, held)
    for group in another.param_groups:
        group["lr"] = ADAMW["lr"]
        group.pop("initial_lr", None)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(another, T_max=10)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch wonders that no step was made
        for _ in range(step):
            scheduler.step()
    trained(model, another, scheduler, step, EVERY + 3)
    assert_same(dict(model.state_dict()), dict(plain.state_dict()))
