"""Rows of ranks that share the state: the same numbers as one group, and replicas that stay the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.algorithms.join import Join

from tests.support import RankContext, ranks
from tests.support.oracles import (
    ADAMW,
    TINY,
    ZERO1,
    ZERO2,
    Branches,
    Pair,
    PairSide,
    ShardTwins,
    all_configs,
    all_equal,
    assert_replicas_are_equal,
    assert_same,
    batch,
    both_stages,
    grids,
    hybrid_pair,
    in_order_of_rows,
    meshed,
    mlp,
    regression,
    rows_of,
    seeded,
    state_of,
    through_branches,
    trained,
    values_of,
    within,
)
from tests.support.tiers import sampled
from zeroshard import (
    GradScaler,
    ShardedOptimizer,
    WholeParams,
    ZeroConfig,
    shard,
)


@ranks(1, 2, 3, 4)
def test_training_equals_the_plain_optimizer(ctx: RankContext) -> None:
    """Bit by bit, from the first step, with every stage, size of buckets and way back of parameters."""
    for grid in grids(ctx.world_size):
        for config in all_configs():
            pair = hybrid_pair(grid, optim.AdamW, where=meshed, config=config, **ADAMW)
            assert pair.zero.world_size == grid[1]
            pair.train(3)
            pair.check_state()
            assert_replicas_are_equal(grid, pair.model, pair.zero)


@ranks(2, 3, 4)
def test_one_shard_group_or_pure_replication_equals_one_group_bitwise(ctx: RankContext) -> None:
    """Then sums are in the order of ranks, as without replicas."""
    for grid in ((1, ctx.world_size), (ctx.world_size, 1)):
        for dtype in (torch.float32, torch.bfloat16):
            assert_same(trained(within(grid), dtype), trained({}, dtype))


@ranks(4)
def test_two_stage_sum_differs_from_flat_sum_by_rounding_only(ctx: RankContext) -> None:
    """(a + b) + (c + d) is not ((a + b) + c) + d: a rounding of float32 (6e-8) in gradients, a bit more after AdamW."""
    for ours, flat in zip(trained(within((2, 2))), trained({}), strict=True):
        torch.testing.assert_close(ours, flat, rtol=1e-5, atol=1e-6)


class IntegerGradModel(nn.Module):
    """Integers in, integers as gradients: every sum of them is exact, and so is their mean over four."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.ones(9, 6)), nn.Parameter(torch.zeros(5, 6))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.first.t()).sum() + (x.flip(1) @ self.second.t()).sum()


def integer_batch(number: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
    return torch.randint(-50, 50, (3, 6), generator=generator).float()


@ranks(2, 4)
@sampled("config", [ZERO2, ZERO1, ZeroConfig()], ids=["zero2", "zero1", "one-bucket"])
def test_all_grids_are_bitwise_equal_where_sums_are_exact(ctx: RankContext, config: ZeroConfig) -> None:
    results = []
    for where in ({}, *map(within, grids(ctx.world_size)), *map(meshed, grids(ctx.world_size))):
        model = seeded(IntegerGradModel, 0)
        optimizer = shard(model, optim.AdamW, config=config, foreach=True, **where, **ADAMW)
        for number in range(3):
            torch.autograd.backward(model(integer_batch(number)))
            optimizer.step()
            optimizer.zero_grad()
        results.append(values_of(model))
    assert all_equal([result for each in results for result in ctx.gather(each)])
    assert not torch.equal(results[0][0], torch.ones(9, 6))


@ranks(2, 3, 4)
def test_each_shard_group_holds_the_state_once(ctx: RankContext) -> None:
    for grid in grids(ctx.world_size):
        model = seeded(mlp, 0)
        optimizer = shard(model, optim.AdamW, config=ZERO2, **within(grid), **ADAMW)
        torch.autograd.backward(regression(model, 0))
        optimizer.step()
        elements = sum(param.numel() for param in model.parameters())
        held = sum(value.numel() for value in state_of(optimizer) if value.dim())
        totals = ctx.gather(held)
        for row in rows_of(grid):
            assert sum(totals[rank] for rank in row) >= 2 * elements  # two moments
        assert held <= 2 * (elements / grid[1] + 16 * len(optimizer.layout.buckets))


class ModelWithBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.norm = mlp(2), nn.BatchNorm1d(6)
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.layers(x))
        return out


@ranks(2, 3, 4)
def test_params_and_buffers_are_broadcast_to_all_shard_groups(ctx: RankContext) -> None:
    for grid in grids(ctx.world_size):
        model, expected = seeded(ModelWithBuffers, ctx.rank + 1), seeded(ModelWithBuffers, 1)
        handed = list(model.parameters())[:4]
        optimizer = shard(model, optim.AdamW, params=handed, config=ZERO2, **within(grid), **ADAMW)
        assert all_equal([values_of(model), values_of(expected)])
        model.eval()
        model(batch(0))
        model.norm.running_mean.fill_(ctx.rank)  # type: ignore[union-attr,operator]
        model(batch(0))
        assert all_equal(ctx.gather(values_of(model)))
        assert not model.norm.running_mean.any()  # type: ignore[union-attr,operator]
        assert optimizer.world_size == grid[1]


@sampled("norm_type", [2.0, 1.0, float("inf")])
@ranks(2, 3, 4)
def test_clip_grad_norm(ctx: RankContext, norm_type: float) -> None:
    """To rounding: norms are added up shard by shard."""
    for grid in grids(ctx.world_size):
        for config in (ZERO2, ZERO1):
            twins = ShardTwins(config, where=within(grid))
            for number in range(3):
                ours, theirs = twins.sides
                for side in (ours, theirs):
                    side.backward(number)
                norm = twins.zero.clip_grad_norm_(0.05, norm_type)
                expected = nn.utils.clip_grad_norm_(twins.plain_model.parameters(), 0.05, norm_type)
                assert expected > 0.05
                torch.testing.assert_close(norm, expected, rtol=1e-5, atol=1e-6)
                assert all_equal([[it] for it in ctx.gather(norm)])
                ours.update()
                theirs.update()
                twins.compare(exactly=False)
            assert_replicas_are_equal(grid, twins.model, twins.zero)


@ranks(2, 3, 4)
def test_grad_scaler_skips_on_all_ranks_or_none(ctx: RankContext) -> None:
    for grid in grids(ctx.world_size):
        pair = hybrid_pair(grid, optim.SGD, lr=0.125, config=ZERO2)
        scalers = [(side, GradScaler("cpu", init_scale=2.0**10, growth_interval=2)) for side in pair.sides]
        for number in range(5):
            for side, scaler in scalers:
                loss = regression(side.net, number)
                if number == 2 and ctx.rank == ctx.world_size - 1:
                    loss = loss * float("inf")
                torch.autograd.backward(scaler.scale(loss))
                scaler.step(side.optimizer)
                scaler.update()
                side.model.zero_grad()
            pair.check()
            assert scalers[0][1].get_scale() == scalers[1][1].get_scale()
        assert_replicas_are_equal(grid, pair.model, pair.zero)


@ranks(2, 3, 4)
def test_grad_accumulation_with_and_without_no_sync(ctx: RankContext) -> None:
    """To rounding: DDP averages the sum of passes, and ZeRO-2 sums up averages."""
    for grid in grids(ctx.world_size):
        for config in (ZERO2, ZERO1, replace(ZERO2, overlap_param_gather=True)):
            twins = ShardTwins(config, where=within(grid))
            for local in (False, True):
                for side in twins.sides:
                    (side.backward_locally if local else side.backward)(1)
                    side.backward(2)
                    side.update()
                twins.compare(exactly=False)
            assert_replicas_are_equal(grid, twins.model, twins.zero)


def last_params(model: nn.Module) -> list[nn.Parameter]:
    return list(model.parameters())[-4:]


def make_mlp_with_frozen_last_params() -> nn.Module:
    model = mlp()
    for param in last_params(model):
        param.requires_grad_(False)
    return model


@ranks(2, 3, 4)
def test_add_param_group(ctx: RankContext) -> None:
    for grid in grids(ctx.world_size):
        twins = ShardTwins(
            ZERO2,
            make_mlp_with_frozen_last_params,
            handed=lambda model: list(model.parameters())[:-4],
            where=within(grid),
            **ADAMW,
        )
        twins.train(2)
        for model, optimizer in ((twins.model, twins.zero), (twins.plain_model, twins.plain)):
            for param in last_params(model):
                param.requires_grad_(True)
            optimizer.add_param_group({"params": last_params(model), "lr": 0.2})
        twins.wrap_plain()
        twins.train(2)
        assert_replicas_are_equal(grid, twins.model, twins.zero)


def bf16_loss(model: nn.Module, number: int) -> Tensor:
    output: Tensor = model(batch(number).bfloat16()).float().square().mean()
    return output


def make_bf16_mlp() -> nn.Module:
    return mlp().bfloat16()


@ranks(2, 3, 4)
def test_16_bit_grads_are_summed_in_float32_and_rounded_once(ctx: RankContext) -> None:
    for grid in grids(ctx.world_size):
        for config in (ZERO2, ZERO1, ZeroConfig(partition=TINY, deterministic_reduce=True)):
            pair = hybrid_pair(grid, optim.AdamW, make=make_bf16_mlp, loss=bf16_loss, config=config, **ADAMW)
            pair.train(3)
            assert_replicas_are_equal(grid, pair.model, pair.zero)


@ranks(2, 3, 4)
def test_bf16_reduce_dtype_rounds_once(ctx: RankContext) -> None:
    for grid in grids(ctx.world_size):
        for stage in (ZERO2.stage, ZERO1.stage):
            config = ZeroConfig(partition=TINY, stage=stage, reduce_dtype=torch.bfloat16)
            hook = in_order_of_rows(grid, torch.bfloat16)
            Pair(optim.SGD, hook=hook, where=within(grid), lr=0.3, config=config).train(3)


@ranks(2, 3, 4)
def test_master_weights(ctx: RankContext) -> None:
    """As in one group, bit by bit: sums are exact of gradients that two or four ranks have alike, and both grids of
    three ranks add in the order of ranks."""
    results = []
    for where in ({}, *map(within, grids(ctx.world_size))):
        model = seeded(make_bf16_mlp, 0)
        optimizer = shard(model, optim.AdamW, config=replace(ZERO2, master_dtype=torch.float32), **where, **ADAMW)
        for number in range(4):
            inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(number)).bfloat16()
            torch.autograd.backward(model(inputs).float().square().mean())
            optimizer.step()
            optimizer.zero_grad()
        results.append([*values_of(model), *(it for it in gather_state_tensors(optimizer))])
    for result in results[1:]:
        assert all_equal([result, results[0]])
    assert all_equal(ctx.gather(results[-1]))


def gather_state_tensors(optimizer: ShardedOptimizer) -> list[Tensor]:
    """All state, on all ranks."""
    found: list[Any] = [optimizer.full_state_dict()]
    dist.broadcast_object_list(found)
    return [it for entry in found[0]["state"].values() for it in entry.values() if isinstance(it, torch.Tensor)]


@ranks(2, 4)
def test_params_used_on_some_ranks_only(ctx: RankContext) -> None:
    for grid in grids(ctx.world_size):
        for config in (ZERO2, ZERO1, ZeroConfig()):
            twins = ShardTwins(config, Branches, find_unused=True, where=within(grid), lr=0.1)
            twins.run(4, lambda side, number: side.iterate(number, through_branches))
            assert_replicas_are_equal(grid, twins.model, twins.zero)


@ranks(2, 4)
def test_whole_params_partition(ctx: RankContext) -> None:
    for grid in grids(ctx.world_size):
        pair = hybrid_pair(grid, optim.AdamW, config=ZeroConfig(partition=WholeParams()), **ADAMW)
        pair.train(3)
        pair.check_state()


@ranks(2, 4)
def test_closures(ctx: RankContext) -> None:
    for grid in grids(ctx.world_size):
        pair = hybrid_pair(grid, optim.SGD, lr=0.1, momentum=0.9, config=ZERO2)
        for number in range(2):
            for side in pair.sides:

                def closure(side: PairSide = side, number: int = number) -> Tensor:
                    side.model.zero_grad()
                    loss = regression(side.net, number)
                    torch.autograd.backward(loss)
                    return loss

                side.optimizer.step(closure)
            pair.check()


@ranks(2, 4)
def test_uneven_inputs(ctx: RankContext) -> None:
    """Ranks that ran out of inputs give zeros: the oracle has zeros in their place."""
    for grid in grids(ctx.world_size):
        model, plain = seeded(mlp, 0), seeded(mlp, 0)
        optimizer = shard(model, optim.SGD, lr=0.125, config=ZERO2, **within(grid))
        with Join([optimizer]):
            for number in range(2 + ctx.rank % 3):
                torch.autograd.backward(regression(model, number))
                optimizer.step()
                optimizer.zero_grad()
        reference = optim.SGD(plain.parameters(), lr=0.125)
        most = max(2 + rank % 3 for rank in range(ctx.world_size))
        for number in range(most):
            loss = regression(plain, number) * (number < 2 + ctx.rank % 3)
            torch.autograd.backward(loss)
            for param in plain.parameters():
                assert param.grad is not None
                dist.all_reduce(param.grad)
                param.grad /= ctx.world_size
            reference.step()
            reference.zero_grad()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)  # gloo adds in another order
        assert_replicas_are_equal(grid, model, optimizer)


@both_stages
@ranks(2, 4)
def test_two_stage_reduce_finishes_without_a_step(ctx: RankContext, config: ZeroConfig) -> None:
    """In a backward pass and behind it: both sums come without a step that waits for them."""
    for grid in grids(ctx.world_size):
        model, plain = seeded(mlp, 0), seeded(mlp, 0)
        optimizer = shard(model, optim.SGD, lr=0.1, config=config, **within(grid))
        torch.autograd.backward(regression(model, 0))
        sync = optimizer._grad_reducer
        assert all(sending.work.is_ready(30) for sending in sync._in_flight)
        assert sync._schedule.num_sent == len(sync._schedule.buckets)
        dist.barrier()
        optimizer.clip_grad_norm_(1e9)
        torch.autograd.backward(regression(plain, 0))
        grads = [param.grad for param in plain.parameters() if param.grad is not None]
        for grad in grads:
            dist.all_reduce(grad)
        expected = torch.cat([grad.flatten() for grad in grads]).div(ctx.world_size).square().sum()
        total = torch.cat(optimizer._engine.grads.grad_tensors()).square().sum()
        dist.all_reduce(total, group=optimizer.process_group)
        torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-6)


@ranks(4)
def test_two_optimizers_in_one_backward_pass(ctx: RankContext) -> None:
    model, plain = seeded(mlp, 0), seeded(mlp, 0)
    halves = [list(model.parameters())[:4], list(model.parameters())[4:]]
    made = [shard(model, optim.AdamW, params=half, config=ZERO2, **within((2, 2)), **ADAMW) for half in halves]
    one = shard(plain, optim.AdamW, config=ZERO2, **within((2, 2)), **ADAMW)
    for number in range(3):
        for net, optimizers in ((model, made), (plain, [one])):
            torch.autograd.backward(regression(net, number))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert all_equal([values_of(model), values_of(plain)])
