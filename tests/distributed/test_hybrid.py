"""Hybrid sharding: the same results as one shard group, and replicas that stay equal."""

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
    DdpParityRun,
    ParitySide,
    ShardParityRun,
    all_configs,
    all_equal,
    assert_replicas_are_equal,
    assert_same,
    batch,
    both_stages,
    branches_loss,
    clone_state,
    clone_values,
    grids,
    group_size_options,
    hybrid_parity_run,
    make_seeded,
    make_shard_group_order_hook,
    mesh_options,
    mlp,
    regression,
    shard_groups_of,
    train_with_group_options,
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
    """Bit by bit, from the first step, for every stage, bucket size and kind of parameter all-gather."""
    for grid in grids(ctx.world_size):
        for config in all_configs():
            parity = hybrid_parity_run(grid, optim.AdamW, make_group_options=mesh_options, config=config, **ADAMW)
            assert parity.zero.world_size == grid[1]
            parity.train(3)
            parity.check_state()
            assert_replicas_are_equal(grid, parity.model, parity.zero)


@ranks(2, 3, 4)
def test_one_shard_group_or_pure_replication_equals_one_group_bitwise(ctx: RankContext) -> None:
    """Sums are in rank order on such grids, as without replicas."""
    for grid in ((1, ctx.world_size), (ctx.world_size, 1)):
        for dtype in (torch.float32, torch.bfloat16):
            assert_same(train_with_group_options(group_size_options(grid), dtype), train_with_group_options({}, dtype))


@ranks(4)
def test_two_stage_sum_differs_from_flat_sum_by_rounding_only(ctx: RankContext) -> None:
    """(a + b) + (c + d) is not ((a + b) + c) + d: float32 rounding (6e-8) in gradients, slightly more after AdamW."""
    for ours, flat in zip(
        train_with_group_options(group_size_options((2, 2))), train_with_group_options({}), strict=True
    ):
        torch.testing.assert_close(ours, flat, rtol=1e-5, atol=1e-6)


class IntegerGradModel(nn.Module):
    """Integer inputs give integer gradients: every sum is exact, and so is the mean over four ranks."""

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
    for group_options in (
        {},
        *map(group_size_options, grids(ctx.world_size)),
        *map(mesh_options, grids(ctx.world_size)),
    ):
        model = make_seeded(IntegerGradModel, 0)
        optimizer = shard(model, optim.AdamW, config=config, foreach=True, **group_options, **ADAMW)
        for number in range(3):
            torch.autograd.backward(model(integer_batch(number)))
            optimizer.step()
            optimizer.zero_grad()
        results.append(clone_values(model))
    assert all_equal([rank_values for values in results for rank_values in ctx.gather(values)])
    assert not torch.equal(results[0][0], torch.ones(9, 6))


@ranks(2, 3, 4)
def test_each_shard_group_holds_the_state_once(ctx: RankContext) -> None:
    for grid in grids(ctx.world_size):
        model = make_seeded(mlp, 0)
        optimizer = shard(model, optim.AdamW, config=ZERO2, **group_size_options(grid), **ADAMW)
        torch.autograd.backward(regression(model, 0))
        optimizer.step()
        num_elements = sum(param.numel() for param in model.parameters())
        held_numel = sum(value.numel() for value in clone_state(optimizer) if value.dim())
        totals = ctx.gather(held_numel)
        for shard_group in shard_groups_of(grid):
            assert sum(totals[rank] for rank in shard_group) >= 2 * num_elements  # two moments
        assert held_numel <= 2 * (num_elements / grid[1] + 16 * len(optimizer.layout.buckets))


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
        model, expected = make_seeded(ModelWithBuffers, ctx.rank + 1), make_seeded(ModelWithBuffers, 1)
        trained_params = list(model.parameters())[:4]
        optimizer = shard(model, optim.AdamW, params=trained_params, config=ZERO2, **group_size_options(grid), **ADAMW)
        assert all_equal([clone_values(model), clone_values(expected)])
        model.eval()
        model(batch(0))
        model.norm.running_mean.fill_(ctx.rank)  # type: ignore[union-attr,operator]
        model(batch(0))
        assert all_equal(ctx.gather(clone_values(model)))
        assert not model.norm.running_mean.any()  # type: ignore[union-attr,operator]
        assert optimizer.world_size == grid[1]


@sampled("norm_type", [2.0, 1.0, float("inf")])
@ranks(2, 3, 4)
def test_clip_grad_norm(ctx: RankContext, norm_type: float) -> None:
    """Equal up to rounding: norms are summed shard by shard."""
    for grid in grids(ctx.world_size):
        for config in (ZERO2, ZERO1):
            parity = DdpParityRun(config, group_options=group_size_options(grid))
            for number in range(3):
                ours, theirs = parity.sides
                for side in (ours, theirs):
                    side.backward(number)
                norm = parity.zero.clip_grad_norm_(0.05, norm_type)
                expected = nn.utils.clip_grad_norm_(parity.plain_model.parameters(), 0.05, norm_type)
                assert expected > 0.05
                torch.testing.assert_close(norm, expected, rtol=1e-5, atol=1e-6)
                assert all_equal([[rank_norm] for rank_norm in ctx.gather(norm)])
                ours.update()
                theirs.update()
                parity.compare(exactly=False)
            assert_replicas_are_equal(grid, parity.model, parity.zero)


@ranks(2, 3, 4)
def test_grad_scaler_skips_on_all_ranks_or_none(ctx: RankContext) -> None:
    for grid in grids(ctx.world_size):
        parity = hybrid_parity_run(grid, optim.SGD, lr=0.125, config=ZERO2)
        scalers = [(side, GradScaler("cpu", init_scale=2.0**10, growth_interval=2)) for side in parity.sides]
        for number in range(5):
            for side, scaler in scalers:
                loss = regression(side.net, number)
                if number == 2 and ctx.rank == ctx.world_size - 1:
                    loss = loss * float("inf")
                torch.autograd.backward(scaler.scale(loss))
                scaler.step(side.optimizer)
                scaler.update()
                side.model.zero_grad()
            parity.check()
            assert scalers[0][1].get_scale() == scalers[1][1].get_scale()
        assert_replicas_are_equal(grid, parity.model, parity.zero)


@ranks(2, 3, 4)
def test_grad_accumulation_with_and_without_no_sync(ctx: RankContext) -> None:
    """Equal up to rounding: DDP averages the sum of the passes, ZeRO-2 sums their averages."""
    for grid in grids(ctx.world_size):
        for config in (ZERO2, ZERO1, replace(ZERO2, overlap_param_gather=True)):
            parity = DdpParityRun(config, group_options=group_size_options(grid))
            for local in (False, True):
                for side in parity.sides:
                    (side.backward_locally if local else side.backward)(1)
                    side.backward(2)
                    side.update()
                parity.compare(exactly=False)
            assert_replicas_are_equal(grid, parity.model, parity.zero)


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
        parity = DdpParityRun(
            ZERO2,
            make_mlp_with_frozen_last_params,
            get_params=lambda model: list(model.parameters())[:-4],
            group_options=group_size_options(grid),
            **ADAMW,
        )
        parity.train(2)
        for model, optimizer in ((parity.model, parity.zero), (parity.plain_model, parity.plain)):
            for param in last_params(model):
                param.requires_grad_(True)
            optimizer.add_param_group({"params": last_params(model), "lr": 0.2})
        parity.wrap_plain()
        parity.train(2)
        assert_replicas_are_equal(grid, parity.model, parity.zero)


def bf16_loss(model: nn.Module, number: int) -> Tensor:
    output: Tensor = model(batch(number).bfloat16()).float().square().mean()
    return output


def make_bf16_mlp() -> nn.Module:
    return mlp().bfloat16()


@ranks(2, 3, 4)
def test_16_bit_grads_are_summed_in_float32_and_rounded_once(ctx: RankContext) -> None:
    for grid in grids(ctx.world_size):
        for config in (ZERO2, ZERO1, ZeroConfig(partition=TINY, deterministic_reduce=True)):
            parity = hybrid_parity_run(grid, optim.AdamW, make=make_bf16_mlp, loss=bf16_loss, config=config, **ADAMW)
            parity.train(3)
            assert_replicas_are_equal(grid, parity.model, parity.zero)


@ranks(2, 3, 4)
def test_bf16_reduce_dtype_rounds_once(ctx: RankContext) -> None:
    for grid in grids(ctx.world_size):
        for stage in (ZERO2.stage, ZERO1.stage):
            config = ZeroConfig(partition=TINY, stage=stage, reduce_dtype=torch.bfloat16)
            hook = make_shard_group_order_hook(grid, torch.bfloat16)
            ShardParityRun(optim.SGD, hook=hook, group_options=group_size_options(grid), lr=0.3, config=config).train(3)


@ranks(2, 3, 4)
def test_master_weights(ctx: RankContext) -> None:
    """Bit by bit as in one group: sums of equal gradients over two or four ranks are exact, and both grids of three
    ranks add in rank order."""
    results = []
    for group_options in ({}, *map(group_size_options, grids(ctx.world_size))):
        model = make_seeded(make_bf16_mlp, 0)
        optimizer = shard(
            model, optim.AdamW, config=replace(ZERO2, master_dtype=torch.float32), **group_options, **ADAMW
        )
        for number in range(4):
            inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(number)).bfloat16()
            torch.autograd.backward(model(inputs).float().square().mean())
            optimizer.step()
            optimizer.zero_grad()
        results.append([*clone_values(model), *(value for value in gather_state_tensors(optimizer))])
    for result in results[1:]:
        assert all_equal([result, results[0]])
    assert all_equal(ctx.gather(results[-1]))


def gather_state_tensors(optimizer: ShardedOptimizer) -> list[Tensor]:
    """The full state, on all ranks."""
    state_dicts: list[Any] = [optimizer.full_state_dict()]
    dist.broadcast_object_list(state_dicts)
    return [
        value
        for param_state in state_dicts[0]["state"].values()
        for value in param_state.values()
        if isinstance(value, torch.Tensor)
    ]


@ranks(2, 4)
def test_params_used_on_some_ranks_only(ctx: RankContext) -> None:
    for grid in grids(ctx.world_size):
        for config in (ZERO2, ZERO1, ZeroConfig()):
            parity = DdpParityRun(config, Branches, find_unused=True, group_options=group_size_options(grid), lr=0.1)
            parity.run(4, lambda side, number: side.iterate(number, branches_loss))
            assert_replicas_are_equal(grid, parity.model, parity.zero)


@ranks(2, 4)
def test_whole_params_partition(ctx: RankContext) -> None:
    for grid in grids(ctx.world_size):
        parity = hybrid_parity_run(grid, optim.AdamW, config=ZeroConfig(partition=WholeParams()), **ADAMW)
        parity.train(3)
        parity.check_state()


@ranks(2, 4)
def test_closures(ctx: RankContext) -> None:
    for grid in grids(ctx.world_size):
        parity = hybrid_parity_run(grid, optim.SGD, lr=0.1, momentum=0.9, config=ZERO2)
        for number in range(2):
            for side in parity.sides:

                def closure(side: ParitySide = side, number: int = number) -> Tensor:
                    side.model.zero_grad()
                    loss = regression(side.net, number)
                    torch.autograd.backward(loss)
                    return loss

                side.optimizer.step(closure)
            parity.check()


@ranks(2, 4)
def test_uneven_inputs(ctx: RankContext) -> None:
    """Ranks without further inputs contribute zeros, as they do in the oracle."""
    for grid in grids(ctx.world_size):
        model, plain = make_seeded(mlp, 0), make_seeded(mlp, 0)
        optimizer = shard(model, optim.SGD, lr=0.125, config=ZERO2, **group_size_options(grid))
        with Join([optimizer]):
            for number in range(2 + ctx.rank % 3):
                torch.autograd.backward(regression(model, number))
                optimizer.step()
                optimizer.zero_grad()
        reference = optim.SGD(plain.parameters(), lr=0.125)
        max_steps = max(2 + rank % 3 for rank in range(ctx.world_size))
        for number in range(max_steps):
            loss = regression(plain, number) * (number < 2 + ctx.rank % 3)
            torch.autograd.backward(loss)
            for param in plain.parameters():
                assert param.grad is not None
                dist.all_reduce(param.grad)
                param.grad /= ctx.world_size
            reference.step()
            reference.zero_grad()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)  # gloo sums in another order
        assert_replicas_are_equal(grid, model, optimizer)


@both_stages
@ranks(2, 4)
def test_two_stage_reduce_finishes_without_a_step(ctx: RankContext, config: ZeroConfig) -> None:
    """During a backward pass and after it: both stages finish without a step that waits for them."""
    for grid in grids(ctx.world_size):
        model, plain = make_seeded(mlp, 0), make_seeded(mlp, 0)
        optimizer = shard(model, optim.SGD, lr=0.1, config=config, **group_size_options(grid))
        torch.autograd.backward(regression(model, 0))
        reducer = optimizer._model_binding.reducer
        assert all(pending.work.is_ready(30) for pending in reducer._in_flight)
        assert reducer._schedule.num_sent == len(reducer._schedule.buckets)
        dist.barrier()
        optimizer.clip_grad_norm_(1e9)
        torch.autograd.backward(regression(plain, 0))
        grads = [param.grad for param in plain.parameters() if param.grad is not None]
        for grad in grads:
            dist.all_reduce(grad)
        expected = torch.cat([grad.flatten() for grad in grads]).div(ctx.world_size).square().sum()
        total = torch.cat(optimizer._model_binding.reducer.grad_tensors()).square().sum()
        dist.all_reduce(total, group=optimizer.process_group)
        torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-6)


@ranks(4)
def test_two_optimizers_in_one_backward_pass(ctx: RankContext) -> None:
    model, plain = make_seeded(mlp, 0), make_seeded(mlp, 0)
    halves = [list(model.parameters())[:4], list(model.parameters())[4:]]
    half_optimizers = [
        shard(model, optim.AdamW, params=half, config=ZERO2, **group_size_options((2, 2)), **ADAMW) for half in halves
    ]
    single_optimizer = shard(plain, optim.AdamW, config=ZERO2, **group_size_options((2, 2)), **ADAMW)
    for number in range(3):
        for net, optimizers in ((model, half_optimizers), (plain, [single_optimizer])):
            torch.autograd.backward(regression(net, number))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert all_equal([clone_values(model), clone_values(plain)])
