"""Uneven inputs: `Join([optimizer])` matches DDP under `Join`."""

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
    DdpParityRun,
    Loss,
    Side,
    all_equal,
    both_stages,
    branches_loss,
    clone_values,
    make_seeded,
    regression,
    some_configs,
)
from zeroshard import RankFailedError, ZeroConfig, shard


def train_unevenly(ctx: RankContext, parity: DdpParityRun, counts: InputCounts, loss: Loss = regression) -> None:
    ours, theirs = parity.sides
    with Join([parity.zero]):
        for number in range(counts[ctx.rank]):
            ours.iterate(number, loss)
    with Join([parity.ddp]):
        for number in range(counts[ctx.rank]):
            theirs.iterate(number, loss)
    parity.compare()
    # The plain optimizer's state is up to date only on ranks that trained to the end.
    parity.plain.load_state_dict(ctx.gather(parity.plain.state_dict())[counts.index(max(counts))])


@some_configs
@ranks(1, 2, 3)
def test_matches_ddp_under_join(ctx: RankContext, config: ZeroConfig) -> None:
    for counts in uneven_counts(ctx.world_size):
        train_unevenly(ctx, DdpParityRun(config), counts)


@both_stages
@ranks(2)
def test_zero_grad_before_each_pass_under_join(ctx: RankContext, config: ZeroConfig) -> None:
    """Gradients left by a rank's last pass must not enter the shadow steps of that rank."""
    for counts in uneven_counts(ctx.world_size):
        parity = DdpParityRun(config)
        for side, joinable in zip(parity.sides, (parity.zero, parity.ddp), strict=True):
            with Join([joinable]):
                for number in range(counts[ctx.rank]):
                    side.optimizer.zero_grad()
                    side.backward(number)
                    side.optimizer.step()
        parity.compare()


@both_stages
@ranks(2, 3)
def test_training_continues_after_join(ctx: RankContext, config: ZeroConfig) -> None:
    parity = DdpParityRun(config)
    first, second, *_ = uneven_counts(ctx.world_size)
    train_unevenly(ctx, parity, first)
    parity.train(2)
    train_unevenly(ctx, parity, second)
    parity.train(1)
    for side in parity.sides:
        side.backward(3)
    norms = parity.zero.clip_grad_norm_(0.1), clip_grad_norm_(parity.plain_model.parameters(), 0.1)
    torch.testing.assert_close(*norms)
    for side in parity.sides:
        side.update()
    for ours, theirs in zip(parity.model.parameters(), parity.plain_model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)  # norms are summed in a different order


@both_stages
@ranks(3)
def test_unused_params_under_join(ctx: RankContext, config: ZeroConfig) -> None:
    """Plain SGD, because DDP treats the parameters of a rank's last pass as used and gives them zero gradients.

    Every rank has inputs, because DDP does not initialize the map of used parameters on a rank without any.
    """
    for counts in uneven_counts(ctx.world_size):
        parity = DdpParityRun(config, Branches, torch.optim.SGD, find_unused=True, lr=0.1)
        train_unevenly(ctx, parity, [count + 2 for count in counts], branches_loss)


@both_stages
@ranks(2)
def test_no_sync_passes_under_join(ctx: RankContext, config: ZeroConfig) -> None:
    for counts in uneven_counts(ctx.world_size):
        parity = DdpParityRun(config)
        for side, joinable in zip(parity.sides, (parity.zero, parity.ddp), strict=True):
            with Join([joinable]):
                for number in range(counts[ctx.rank]):
                    side.backward_locally(number + 50)
                    side.iterate(number)
        parity.compare()


@both_stages
@ranks(2)
def test_joined_ranks_get_the_scheduled_lr(ctx: RankContext, config: ZeroConfig) -> None:
    for counts in uneven_counts(ctx.world_size):
        parity = DdpParityRun(config)
        for side, joinable in zip(parity.sides, (parity.zero, parity.ddp), strict=True):
            scheduler = ExponentialLR(side.optimizer, 0.5)
            with Join([joinable]):
                for number in range(counts[ctx.rank]):
                    side.iterate(number)
                    scheduler.step()
        parity.compare()
        rates = ctx.gather(parity.zero.param_groups[0]["lr"])
        assert len(set(rates)) == 1, rates


@ranks(2)
def test_even_inputs_and_disabled_join(ctx: RankContext) -> None:
    parity = DdpParityRun(ZERO2)
    train_unevenly(ctx, parity, [2] * ctx.world_size)
    with Join([parity.zero], enable=False):
        parity.train(2)


class BatchNormNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.last = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.norm(self.linear(x)))
        return result


@ranks(3)
def test_buffers_match_ddp_while_the_last_rank_trains(ctx: RankContext) -> None:
    counts, model, plain_model = [1, 2, 4], make_seeded(BatchNormNet, ctx.rank), make_seeded(BatchNormNet, 0)
    zero = shard(model, torch.optim.SGD, lr=0.1)
    ddp = DistributedDataParallel(plain_model)
    plain = torch.optim.SGD(ddp.parameters(), lr=0.1)
    model.load_state_dict(plain_model.state_dict())
    for net, optimizer, joinable in ((model, zero, zero), (ddp, plain, ddp)):
        with Join([joinable]):
            for number in range(counts[ctx.rank]):
                torch.autograd.backward(regression(net, number))
                optimizer.step()
                optimizer.zero_grad()
    for (name, found), expected in zip(model.named_buffers(), plain_model.buffers(), strict=True):
        torch.testing.assert_close(found, expected, msg=name)


@both_stages
@ranks(3)
def test_buffers_are_equal_after_join(ctx: RankContext, config: ZeroConfig) -> None:
    """As under DDP, all ranks get the buffers of a rank that trained to the end."""
    for counts in uneven_counts(ctx.world_size):
        model = make_seeded(BatchNormNet, ctx.rank)
        zero = shard(model, torch.optim.SGD, lr=0.1, config=config)
        with Join([zero]):
            for number in range(counts[ctx.rank]):
                Side(model, zero, zero.no_sync).iterate(number, regression)
        assert all_equal(ctx.gather(clone_values(model))), counts
        Side(model, zero, zero.no_sync).iterate(0, regression)
        assert all_equal(ctx.gather(clone_values(model))), "buffers are broadcast again after Join"
        assert model.norm.num_batches_tracked == max(counts) + 1  # type: ignore[union-attr]


@pytest.mark.parametrize("call", ["closure", "clip"])
@ranks(2, timeout=20)
def test_unsupported_calls_inside_join_are_rejected_on_all_ranks(ctx: RankContext, call: str) -> None:
    model = make_seeded(BatchNormNet, 0)
    zero: Any = shard(model, torch.optim.SGD, lr=0.1, config=ZERO1)

    def train() -> None:
        torch.autograd.backward(regression(model, 0))
        if call == "closure":
            zero.step(lambda: 0.0)
        else:
            zero.clip_grad_norm_(1.0)

    with pytest.raises(RuntimeError, match="Join"), Join([zero]):
        train()


@pytest.mark.parametrize("passes", [1, 0], ids=["all-train", "one-joined"])
@ranks(2, 3, timeout=60)
def test_closure_on_one_rank_is_rejected_on_all(ctx: RankContext, passes: int) -> None:
    parity, closure_rank = DdpParityRun(ZERO2), ctx.world_size - 1

    def train() -> None:
        with Join([parity.zero]):
            for number in range(passes if ctx.rank == 0 else 1):
                parity.sides[0].backward(number)
                parity.zero.step(*([lambda: 0.0] if ctx.rank == closure_rank else []))

    error = RuntimeError if ctx.rank == closure_rank else RankFailedError
    with pytest.raises(error, match="neither a closure nor a GradScaler"):
        train()
    if passes:  # otherwise a rank clears gradients that another never computed
        parity.zero.zero_grad()
        parity.train(2)
