"""What survives the loss of a rank is put together again from memory, for other ranks, bit for bit."""

from __future__ import annotations

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
from tests.support.oracle import assert_same
from zeroshard import (
    Copies,
    FlatShards,
    Rule,
    SecondCopy,
    ShardedOptimizer,
    WholeParams,
    ZeroConfig,
    ZeroRedundancyOptimizer,
    everything_else,
    matrices,
    restore,
    shard,
)

EVERY = 3
COPIED = ZeroConfig(partition=FlatShards(bucket_bytes=160), second_copy=SecondCopy(every=EVERY))
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
        Rule(matrices(exclude=("kernel",)), torch.optim.Muon, lr=0.02),
        Rule(everything_else, torch.optim.AdamW, lr=0.05),
    ]
    return shard(model, rules, process_group=group, config=COPIED)


def with_momentum(model: nn.Module, group: dist.ProcessGroup | None) -> ZeroRedundancyOptimizer:
    return shard(model, torch.optim.SGD, process_group=group, config=COPIED, lr=0.005, momentum=0.9)


def dropin(model: nn.Module, group: dist.ProcessGroup | None) -> ZeroRedundancyOptimizer:
    config = ZeroConfig(second_copy=SecondCopy(every=EVERY))
    named = model.named_parameters()
    return ZeroRedundancyOptimizer(named, torch.optim.AdamW, process_group=group, config=config, **ADAMW)


WAYS: dict[str, Way] = {
    "flat": sharded(COPIED),
    "one-bucket": sharded(ZeroConfig(second_copy=SecondCopy(every=EVERY))),
    "whole": sharded(replace(COPIED, partition=WholeParams())),
    "overlap": sharded(replace(COPIED, overlap_gather=True)),
    "groups": in_groups,
    "rules": by_rules,
    "momentum": with_momentum,
    "dropin": dropin,
}


def without(lost: int) -> dist.ProcessGroup | None:
    """The other ranks. Called on all."""
    group: dist.ProcessGroup | None = dist.new_group([it for it in range(dist.get_world_size()) if it != lost])
    return group


def settled(optimizer: ZeroRedundancyOptimizer) -> Copies:
    """What is held when nothing is on its way."""
    assert optimizer.copying is not None
    optimizer.copying.settle()
    return optimizer.copying.held


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
@pytest.mark.parametrize("way", WAYS)
def test_without_one_rank_training_goes_on_as_from_a_checkpoint(ctx: RankContext, way: str) -> None:
    lost = len(way) % ctx.world_size  # now this one, now that
    group, model = without(lost), net()
    optimizer = WAYS[way](model, None)
    train(model, optimizer, 2 * EVERY)
    weights, state = saved(model, optimizer)
    train(model, optimizer, 2, first=2 * EVERY)
    held = settled(optimizer)
    if ctx.rank == lost:
        return
    optimizer = WAYS[way](model, group)
    assert restore(optimizer, held) == 2 * EVERY
    oracle = net(seed=5)
    expected = WAYS[way](oracle, group)
    oracle.load_state_dict(weights)
    expected.load_state_dict(state)
    for first in (2 * EVERY, 2 * EVERY + 2):
        assert_same(everything(model, optimizer), everything(oracle, expected))
        train(model, optimizer, 2, first=first)
        train(oracle, expected, 2, first=first)
