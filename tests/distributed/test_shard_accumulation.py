"""Several backward passes before a step, and the contents of `param.grad` between them."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support import RankContext, ranks
from tests.support.monitoring import recorded
from tests.support.oracles import (
    ZERO1,
    ZERO2,
    DdpParityRun,
    Side,
    all_equal,
    assert_equal_sums,
    both_stages,
    clone_values,
    make_seeded,
    mlp,
    regression,
    some_configs,
)
from tests.support.tiers import sampled
from zeroshard import FlatShards, ShardedOptimizer, ZeroConfig, shard
from zeroshard.engine.grad_stage import GradPlaceholder

model_or_optimizer_zero_grad = sampled("by_model", [False, True], ids=["optimizer", "model"])


def accumulate_averages(ddp: nn.Module, passes: list[Callable[[nn.Module], torch.Tensor]]) -> None:
    """Sum separately averaged DDP passes: DDP would average gradients that are already there a second time."""
    total: list[torch.Tensor | None] = [None for _ in ddp.parameters()]
    for loss in passes:
        ddp.zero_grad()
        torch.autograd.backward(loss(ddp))
        grads = [param.grad for param in ddp.parameters()]
        total = [new if old is None or new is None else old + new for old, new in zip(total, grads, strict=True)]
    for param, grad in zip(ddp.parameters(), total, strict=True):
        param.grad = grad


@ranks(1, 2, 3, 4)
def test_zero2_accumulates_passes_in_the_shard(ctx: RankContext) -> None:
    for config in (ZERO2, ZeroConfig()):
        parity = DdpParityRun(config)
        for step in range(3):
            numbers = range(10 * step, 10 * step + 3)
            for number in numbers:
                parity.sides[0].backward(number)
                assert all(isinstance(param.grad, GradPlaceholder) for param in parity.model.parameters())
            accumulate_averages(parity.ddp, [lambda model, n=n: regression(model, n) for n in numbers])  # type: ignore[misc]
            for side in parity.sides:
                side.update()
            parity.compare()


@ranks(1, 2, 3)
def test_zero1_reduces_locally_accumulated_grads(ctx: RankContext) -> None:
    parity = DdpParityRun(ZERO1)

    def iterate(side: Side, number: int) -> None:
        """DDP keeps gradients local until the last pass and averages the sums, as ZeRO-1 does."""
        for local in range(2):
            (side.backward if side.model is parity.model else side.backward_locally)(number + 50 * local)
        side.iterate(number + 100)

    parity.run(3, iterate)


@some_configs
@ranks(1, 2, 3)
def test_no_sync_passes_then_synced_pass(ctx: RankContext, config: ZeroConfig) -> None:
    def iterate(side: Side, number: int) -> None:
        side.backward_locally(number + 50)
        side.backward_locally(number + 70)
        side.iterate(number)

    DdpParityRun(config).run(3, iterate)


@both_stages
@ranks(2, 3)
def test_step_reduces_grads_of_no_sync_passes(ctx: RankContext, config: ZeroConfig) -> None:
    """DDP would step with different gradients on each rank, so the reference averages manually."""
    parity = DdpParityRun(config)

    def iterate(side: Side, number: int) -> None:
        side.backward_locally(number)
        side.backward_locally(number + 50)
        if side.model is parity.ddp:
            for param in side.model.parameters():
                assert param.grad is not None
                dist.all_reduce(param.grad.div_(ctx.world_size))
        side.update()

    parity.run(3, iterate)


@both_stages
@ranks(1, 2, 3)
def test_no_sync_passes_send_nothing(ctx: RankContext, config: ZeroConfig) -> None:
    model, unsharded = make_seeded(mlp, 0), make_seeded(mlp, 0)
    zero = shard(model, torch.optim.SGD, lr=0.1, config=config)
    with recorded() as traffic, zero.no_sync():
        for number in range(2):
            for side in (model, unsharded):
                torch.autograd.backward(regression(side, number))
    assert not traffic
    for param, expected in zip(model.parameters(), unsharded.parameters(), strict=True):
        assert param.grad is not None
        assert expected.grad is not None
        assert torch.equal(param.grad, expected.grad)
    with recorded() as traffic:
        torch.autograd.backward(regression(model, 2))
    assert ("isend" in traffic.verbs) == (ctx.world_size > 1)


@ranks(2)
def test_no_sync_can_be_nested_and_left_by_an_error(ctx: RankContext) -> None:
    model = make_seeded(mlp, 0)
    zero = shard(model, torch.optim.SGD, lr=0.1, config=ZERO2)
    with zero.no_sync():
        with pytest.raises(RuntimeError, match="on purpose"), zero.no_sync():
            raise RuntimeError("on purpose")
        torch.autograd.backward(regression(model, 0))
        assert all(param.grad is not None for param in model.parameters())
    torch.autograd.backward(regression(model, 1))
    assert all(isinstance(param.grad, GradPlaceholder) for param in model.parameters())


@both_stages
@ranks(1, 2)
def test_param_grad_is_placeholder_in_zero2_and_local_sum_in_zero1(ctx: RankContext, config: ZeroConfig) -> None:
    """ZeRO-2: a placeholder. ZeRO-1: the sum over this rank's passes, also after a step, until it is cleared."""
    model, unsharded = make_seeded(mlp, 0), make_seeded(mlp, 0)
    zero = shard(model, torch.optim.SGD, lr=0.1, config=config)

    def assert_local_sums() -> None:
        for param, expected in zip(model.parameters(), unsharded.parameters(), strict=True):
            assert param.grad is not None
            assert expected.grad is not None
            if config == ZERO1:
                assert torch.equal(param.grad, expected.grad)
            else:
                assert isinstance(param.grad, GradPlaceholder)

    for number in range(2):
        for side in (model, unsharded):
            torch.autograd.backward(regression(side, number))
        assert_local_sums()
    zero.step()
    assert_local_sums()
    zero.zero_grad()
    assert all(param.grad is None for param in model.parameters())


@model_or_optimizer_zero_grad
@both_stages
@ranks(1, 2)
def test_zero_grad_to_zeros(ctx: RankContext, config: ZeroConfig, by_model: bool) -> None:
    """Zeros are gradients: momentum and weight decay still apply, with and without a backward pass."""
    parity = DdpParityRun(config)

    def iterate(side: Side, number: int) -> None:
        if number % 2 == 0:
            side.backward(number)
        side.optimizer.step()
        (side.model if by_model else side.optimizer).zero_grad(set_to_none=False)

    parity.run(5, iterate)


@model_or_optimizer_zero_grad
@both_stages
@ranks(1, 2)
def test_grads_cleared_before_step_are_discarded(ctx: RankContext, config: ZeroConfig, by_model: bool) -> None:
    def iterate(side: Side, number: int) -> None:
        side.backward(number + 50)
        side.backward_locally(number + 70)
        (side.model if by_model else side.optimizer).zero_grad()
        side.iterate(number)

    DdpParityRun(config).run(2, iterate)


@both_stages
@ranks(1, 2)
def test_step_without_grads_changes_nothing(ctx: RankContext, config: ZeroConfig) -> None:
    parity = DdpParityRun(config)
    parity.train(1)
    before = clone_values(parity.model)
    parity.zero.step()
    assert all_equal([before, clone_values(parity.model)])
    parity.train(1)


@both_stages
@ranks(1, 2)
def test_uncleared_grads_accumulate_across_steps(ctx: RankContext, config: ZeroConfig) -> None:
    """The next pass adds to them, as in torch: with SGD and full passes, gradients are the sum over all passes."""
    parity = DdpParityRun(config, optimizer_class=torch.optim.SGD, lr=0.01)
    passes: list[Callable[[nn.Module], torch.Tensor]] = []
    for number in range(3):
        # Parameters change in each step, so earlier passes cannot be repeated: keep their sums.
        earlier = [None if param.grad is None else param.grad.clone() for param in parity.ddp.parameters()]
        parity.sides[0].backward(number)
        passes = [lambda model, n=number: regression(model, n)]  # type: ignore[misc]
        accumulate_averages(parity.ddp, passes)
        for param, grad in zip(parity.ddp.parameters(), earlier, strict=True):
            assert param.grad is not None
            param.grad = param.grad if grad is None else grad + param.grad
        parity.zero.step()
        parity.plain.step()
        # ZeRO-1 averages the sums, the reference sums the averages: one more rounding.
        parity.compare(exactly=False)


@ranks(1, 2)
def test_missing_zero_grad_warns_once(ctx: RankContext) -> None:
    model = make_seeded(mlp, 0)
    zero = shard(model, torch.optim.SGD, lr=0.1, config=ZERO2)
    torch.autograd.backward(regression(model, 0))
    torch.autograd.backward(regression(model, 1))  # several passes before a step are allowed
    zero.step()
    with pytest.warns(UserWarning, match="were not cleared") as caught:
        torch.autograd.backward(regression(model, 2))
    assert len(caught) == 1
    zero.step()
    model.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.autograd.backward(regression(model, 3))
        zero.step()
        zero.zero_grad()
        torch.autograd.backward(regression(model, 4))


def set_grads_manually(model: nn.Module, number: int, rank: int) -> None:
    """Set gradients to integers, whose sums are exact."""
    for index, param in enumerate(model.parameters()):
        values = torch.arange(param.numel()).add(5 * rank + 3 * number + index).remainder(7)
        param.grad = values.view_as(param).float()


@both_stages
@ranks(1, 2, 4)
def test_manually_set_grads_are_averaged(ctx: RankContext, config: ZeroConfig) -> None:
    """The step averages them, although no backward pass has announced them."""
    parity = DdpParityRun(config)

    def iterate(side: Side, number: int) -> None:
        set_grads_manually(side.model, number, ctx.rank)
        if side.model is parity.ddp:
            for param in side.model.parameters():
                dist.all_reduce(param.grad)
                assert param.grad is not None
                param.grad /= ctx.world_size
        side.update()

    parity.run(3, iterate)


@both_stages
@ranks(1, 2)
def test_manually_set_grads_replace_those_of_last_step(ctx: RankContext, config: ZeroConfig) -> None:
    """Gradients that are replaced need not be cleared."""
    parity = DdpParityRun(config, optimizer_class=torch.optim.SGD, lr=0.01)

    def iterate(side: Side, number: int) -> None:
        set_grads_manually(side.model, number, rank=0)
        side.optimizer.step()

    parity.run(3, iterate)


def num_passes(rank: int, step: int) -> int:
    """Rank 0 runs no pass in the first step, one in the second, ..."""
    return (rank + step) % 3


@some_configs
@ranks(2, 3, timeout=20)
def test_different_numbers_of_passes_per_rank(ctx: RankContext, config: ZeroConfig) -> None:
    """A pass that a rank did not run counts as a pass without gradients."""
    parity = DdpParityRun(config, optimizer_class=torch.optim.SGD, lr=0.1)
    for step in range(4):
        for number in range(num_passes(ctx.rank, step)):
            parity.sides[0].backward(100 * step + number)
        _average_manually(ctx, parity, [100 * step + number for number in range(num_passes(ctx.rank, step))])
        for side in parity.sides:
            side.update()
        # The sum of averages and the average of sums round differently.
        parity.compare(exactly=False)


def _average_manually(ctx: RankContext, parity: DdpParityRun, numbers: list[int]) -> None:
    for number in numbers:
        parity.sides[1].backward_locally(number)
    for param in parity.ddp.parameters():
        param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        dist.all_reduce(param.grad.div_(ctx.world_size))


@both_stages
@ranks(2, 3, timeout=20)
def test_rank_clears_grads_other_ranks_never_computed(ctx: RankContext, config: ZeroConfig) -> None:
    """Rank 0 runs a pass, clears its gradients and runs another; the other ranks run none."""
    model = make_seeded(mlp, 0)
    zero = shard(model, torch.optim.SGD, lr=0.1, config=config)
    if ctx.rank == 0:
        torch.autograd.backward(regression(model, 0))
        zero.zero_grad()
        torch.autograd.backward(regression(model, 1))
    zero.step()
    zero.zero_grad()
    assert all_equal(ctx.gather(clone_values(model)))


@both_stages
@ranks(2)
def test_passes_after_clipping(ctx: RankContext, config: ZeroConfig) -> None:
    """Clipping reduces all gradients to their owners; the step reduces those of later passes."""
    clipped, unclipped = make_seeded(mlp, 0), make_seeded(mlp, 0)
    sides: list[tuple[nn.Module, ShardedOptimizer]] = [
        (model, shard(model, torch.optim.SGD, lr=0.1, config=config)) for model in (clipped, unclipped)
    ]
    for step in range(3):
        for model, zero in sides:
            torch.autograd.backward(regression(model, step))
            if model is clipped:
                zero.clip_grad_norm_(1e9)
            torch.autograd.backward(regression(model, step + 50))
            zero.step()
            zero.zero_grad()
        for ours, theirs in zip(clipped.parameters(), unclipped.parameters(), strict=True):
            # With ZeRO-1 a pass after clipping adds to the average, as with DDP; without clipping it is added before.
            assert_equal_sums(ours, theirs, f"a parameter after step {step}", exactly=config.stage != 1)


@ranks(2, 3)
@both_stages
def test_clip_after_zero_grad_to_zeros_if_one_rank_is_slow(ctx: RankContext, config: ZeroConfig) -> None:
    """The slow rank has finished a reduce before it clears, the others have not: all must sum the same norms."""
    model = make_seeded(lambda: nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)))
    one_bucket_each = replace(config, partition=FlatShards(bucket_bytes=8 * 8 * 4))
    optimizer = shard(model, torch.optim.SGD, lr=0.1, config=one_bucket_each)
    for param in model.parameters():
        param.register_hook(lambda _: time.sleep(0.4 if ctx.rank == 0 else 0))  # type: ignore[no-untyped-call]
    model(torch.ones(4, 8)).sum().backward()
    optimizer.zero_grad(set_to_none=False)
    assert optimizer.clip_grad_norm_(1.0) == 0
    before = clone_values(model)
    optimizer.step()
    assert all_equal([clone_values(model), before])


@ranks(2, 3)
@both_stages
def test_zero_grad_to_zeros_during_accumulation(ctx: RankContext, config: ZeroConfig) -> None:
    """`zero_grad(set_to_none=False)` right after backward discards gradients that are still in flight."""
    parity = DdpParityRun(config)

    def iterate(side: Side, number: int) -> None:
        side.backward(number)
        side.optimizer.zero_grad(set_to_none=False)
        if number % 2:
            side.backward(number + 100)
        side.update()

    parity.run(4, iterate)
