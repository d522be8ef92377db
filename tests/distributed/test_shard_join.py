"""Uneven inputs: `Join([optimizer])` does what DDP under `Join` does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import ExponentialLR

from tests.distributed.test_join import InputCounts, uneven_counts
from tests.support import RankContext, ranks
from tests.support.oracles import (
    WIDTH,
    ZERO1,
    ZERO2,
    Branches,
    Loss,
    ShardTwins,
    Side,
    all_equal,
    both_stages,
    regression,
    seeded,
    some_configs,
    through_branches,
    values_of,
)
from zeroshard import RankFailedError, ZeroConfig, shard


def train_unevenly(ctx: RankContext, twins: ShardTwins, counts: InputCounts, loss: Loss = regression) -> None:
    ours, theirs = twins.sides
    with Join([twins.zero]):
        for number in range(counts[ctx.rank]):
            ours.iterate(number, loss)
    with Join([twins.ddp]):
        for number in range(counts[ctx.rank]):
            theirs.iterate(number, loss)
    twins.compare()
    # The plain optimizer's state is up to date only where it trained to the end.
    twins.plain.load_state_dict(ctx.gather(twins.plain.state_dict())[counts.index(max(counts))])


@some_configs
@ranks(1, 2, 3)
def test_matches_ddp_under_join(ctx: RankContext, config: ZeroConfig) -> None:
    for counts in uneven_counts(ctx.world_size):
        train_unevenly(ctx, ShardTwins(config), counts)


@both_stages
@ranks(2)
def test_zero_grad_before_each_pass_under_join(ctx: RankContext, config: ZeroConfig) -> None:
    """What a rank's last pass has left there has no part in the steps that it only shadows."""
    for counts in uneven_counts(ctx.world_size):
        twins = ShardTwins(config)
        for side, joinable in zip(twins.sides, (twins.zero, twins.ddp), strict=True):
            with Join([joinable]):
                for number in range(counts[ctx.rank]):
                    side.optimizer.zero_grad()
                    side.backward(number)
                    side.optimizer.step()
        twins.compare()


@both_stages
@ranks(2, 3)
def test_training_continues_after_join(ctx: RankContext, config: ZeroConfig) -> None:
    twins = ShardTwins(config)
    first, second, *_ = uneven_counts(ctx.world_size)
    train_unevenly(ctx, twins, first)
    twins.train(2)
    train_unevenly(ctx, twins, second)
    twins.train(1)
    for side in twins.sides:
        side.backward(3)
    norms = twins.zero.clip_grad_norm_(0.1), clip_grad_norm_(twins.plain_model.parameters(), 0.1)
    torch.testing.assert_close(*norms)
    for side in twins.sides:
        side.update()
    for ours, theirs in zip(twins.model.parameters(), twins.plain_model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)  # norms are summed in another order


@both_stages
@ranks(3)
def test_unused_params_under_join(ctx: RankContext, config: ZeroConfig) -> None:
    """Plain SGD: DDP takes what a rank used in its last pass for used, and gives it gradients of zeros. And on a rank
    that never had an input its map of used parameters is not initialized."""
    for counts in uneven_counts(ctx.world_size):
        twins = ShardTwins(config, Branches, torch.optim.SGD, find_unused=True, lr=0.1)
        train_unevenly(ctx, twins, [count + 2 for count in counts], through_branches)


@both_stages
@ranks(2)
def test_no_sync_passes_under_join(ctx: RankContext, config: ZeroConfig) -> None:
    for counts in uneven_counts(ctx.world_size):
        twins = ShardTwins(config)
        for side, joinable in zip(twins.sides, (twins.zero, twins.ddp), strict=True):
            with Join([joinable]):
                for number in range(counts[ctx.rank]):
                    side.backward_locally(number + 50)
                    side.iterate(number)
        twins.compare()


@both_stages
@ranks(2)
def test_joined_ranks_get_the_scheduled_lr(ctx: RankContext, config: ZeroConfig) -> None:
    for counts in uneven_counts(ctx.world_size):
        twins = ShardTwins(config)
        for side, joinable in zip(twins.sides, (twins.zero, twins.ddp), strict=True):
            scheduler = ExponentialLR(side.optimizer, 0.5)
            with Join([joinable]):
                for number in range(counts[ctx.rank]):
                    side.iterate(number)
                    scheduler.step()
        twins.compare()
        rates = ctx.gather(twins.zero.param_groups[0]["lr"])
        assert len(set(rates)) == 1, rates


@ranks(2)
def test_even_inputs_and_disabled_join(ctx: RankContext) -> None:
    twins = ShardTwins(ZERO2)
    train_unevenly(ctx, twins, [2] * ctx.world_size)
    with Join([twins.zero], enable=False):
        twins.train(2)


class BatchNormNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.last = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.norm(self.linear(x)))
        return result


@ranks(3)
def test_buffers_match_ddp_while_the_last_rank_trains(ctx: RankContext) -> None:
    counts, model, copied = [1, 2, 4], seeded(BatchNormNet, ctx.rank), seeded(BatchNormNet, 0)
    zero = shard(model, torch.optim.SGD, lr=0.1)
    ddp = DistributedDataParallel(copied)
    plain = torch.optim.SGD(ddp.parameters(), lr=0.1)
    model.load_state_dict(copied.state_dict())
    for wrapped, optimizer, joinable in ((model, zero, zero), (ddp, plain, ddp)):
        with Join([joinable]):
            for number in range(counts[ctx.rank]):
                torch.autograd.backward(regression(wrapped, number))
                optimizer.step()
                optimizer.zero_grad()
    for (name, found), expected in zip(model.named_buffers(), copied.buffers(), strict=True):
        torch.testing.assert_close(found, expected, msg=name)


@both_stages
@ranks(3)
def test_buffers_are_equal_after_join(ctx: RankContext, config: ZeroConfig) -> None:
    """As under DDP they are those of a rank that trained to the end."""
    for counts in uneven_counts(ctx.world_size):
        model = seeded(BatchNormNet, ctx.rank)
        zero = shard(model, torch.optim.SGD, lr=0.1, config=config)
        with Join([zero]):
            for number in range(counts[ctx.rank]):
                Side(model, zero, zero.no_sync).iterate(number, regression)
        assert all_equal(ctx.gather(values_of(model))), counts
        Side(model, zero, zero.no_sync).iterate(0, regression)
        assert all_equal(ctx.gather(values_of(model))), "buffers are broadcast again after Join"
        assert model.norm.num_batches_tracked == max(counts) + 1  # type: ignore[union-attr]


@pytest.mark.parametrize("call", ["closure", "clip"])
@ranks(2, timeout=20)
def test_unsupported_calls_inside_join_are_rejected_on_all_ranks(ctx: RankContext, call: str) -> None:
    model = seeded(BatchNormNet, 0)
    zero: Any = shard(model, torch.optim.SGD, lr=0.1, config=ZERO1)

    def use() -> None:
        torch.autograd.backward(regression(model, 0))
        if call == "closure":
            zero.step(lambda: 0.0)
        else:
            zero.clip_grad_norm_(1.0)

    with pytest.raises(RuntimeError, match="Join"), Join([zero]):
        use()


@pytest.mark.parametrize("passes", [1, 0], ids=["all-train", "one-has-joined"])
@ranks(2, 3, timeout=60)
def test_closure_on_one_rank_is_rejected_on_all(ctx: RankContext, passes: int) -> None:
    twins, odd = ShardTwins(ZERO2), ctx.world_size - 1

    def train() -> None:
        with Join([twins.zero]):
            for number in range(passes if ctx.rank == 0 else 1):
                twins.sides[0].backward(number)
                twins.zero.step(*([lambda: 0.0] if ctx.rank == odd else []))

    error = RuntimeError if ctx.rank == odd else RankFailedError
    with pytest.raises(error, match="neither a closure nor a GradScaler"):
        train()
    if passes:  # else a rank has cleared what another never had
        twins.zero.zero_grad()
        twins.train(2)
