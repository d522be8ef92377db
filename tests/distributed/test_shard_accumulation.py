"""Several backward passes before a step, and what `param.grad` is meanwhile."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support import RankContext, ranks
from tests.support.monitoring import recorded
from tests.support.oracles import (
    ZERO1,
    ZERO2,
    ShardTwins,
    Side,
    all_equal,
    assert_equal_sums,
    both_stages,
    mlp,
    regression,
    seeded,
    some_configs,
    values_of,
)
from tests.support.tiers import sampled
from zeroshard import ShardedOptimizer, ZeroConfig, shard
from zeroshard.engine.grad_bucket import ShardedGrad

model_or_optimizer_zero_grad = sampled("by_model", [False, True], ids=["optimizer", "model"])


def accumulate_averages(ddp: nn.Module, passes: list[Callable[[nn.Module], torch.Tensor]]) -> None:
    """Backward passes through DDP, each averaged on its own: DDP would average what is there already once more."""
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
        twins = ShardTwins(config)
        for step in range(3):
            numbers = range(10 * step, 10 * step + 3)
            for number in numbers:
                twins.sides[0].backward(number)
                assert all(isinstance(param.grad, ShardedGrad) for param in twins.model.parameters())
            accumulate_averages(twins.ddp, [lambda model, n=n: regression(model, n) for n in numbers])  # type: ignore[misc]
            for side in twins.sides:
                side.update()
            twins.compare()


@ranks(1, 2, 3)
def test_zero1_reduces_locally_accumulated_grads(ctx: RankContext) -> None:
    twins = ShardTwins(ZERO1)

    def iterate(side: Side, number: int) -> None:
        """DDP keeps gradients local in all passes but the last: the average of sums, as ours."""
        for local in range(2):
            (side.backward if side.model is twins.model else side.backward_locally)(number + 50 * local)
        side.iterate(number + 100)

    twins.run(3, iterate)


@some_configs
@ranks(1, 2, 3)
def test_no_sync_passes_then_synced_pass(ctx: RankContext, config: ZeroConfig) -> None:
    def iterate(side: Side, number: int) -> None:
        side.backward_locally(number + 50)
        side.backward_locally(number + 70)
        side.iterate(number)

    ShardTwins(config).run(3, iterate)


@both_stages
@ranks(2, 3)
def test_step_reduces_grads_of_no_sync_passes(ctx: RankContext, config: ZeroConfig) -> None:
    """DDP would step with other gradients on each rank, so what is averaged by hand is the oracle."""
    twins = ShardTwins(config)

    def iterate(side: Side, number: int) -> None:
        side.backward_locally(number)
        side.backward_locally(number + 50)
        if side.model is twins.ddp:
            for param in side.model.parameters():
                assert param.grad is not None
                dist.all_reduce(param.grad.div_(ctx.world_size))
        side.update()

    twins.run(3, iterate)


@both_stages
@ranks(1, 2, 3)
def test_no_sync_passes_send_nothing(ctx: RankContext, config: ZeroConfig) -> None:
    model, alone = seeded(mlp, 0), seeded(mlp, 0)
    zero = shard(model, torch.optim.SGD, lr=0.1, config=config)
    with recorded() as traffic, zero.no_sync():
        for number in range(2):
            for side in (model, alone):
                torch.autograd.backward(regression(side, number))
    assert not traffic
    for param, expected in zip(model.parameters(), alone.parameters(), strict=True):
        assert param.grad is not None
        assert expected.grad is not None
        assert torch.equal(param.grad, expected.grad)
    with recorded() as traffic:
        torch.autograd.backward(regression(model, 2))
    assert ("isend" in traffic.verbs) == (ctx.world_size > 1)


@ranks(2)
def test_no_sync_can_be_nested_and_left_by_an_error(ctx: RankContext) -> None:
    model = seeded(mlp, 0)
    zero = shard(model, torch.optim.SGD, lr=0.1, config=ZERO2)
    with zero.no_sync():
        with pytest.raises(RuntimeError, match="on purpose"), zero.no_sync():
            raise RuntimeError("on purpose")
        torch.autograd.backward(regression(model, 0))
        assert all(param.grad is not None for param in model.parameters())
    torch.autograd.backward(regression(model, 1))
    assert all(isinstance(param.grad, ShardedGrad) for param in model.parameters())


@both_stages
@ranks(1, 2)
def test_param_grad_is_placeholder_in_zero2_and_local_sum_in_zero1(ctx: RankContext, config: ZeroConfig) -> None:
    """ZeRO-2: a placeholder. ZeRO-1: the sum over this rank's own passes, also after a step, until it is cleared."""
    model, alone = seeded(mlp, 0), seeded(mlp, 0)
    zero = shard(model, torch.optim.SGD, lr=0.1, config=config)

    def require_local_sums() -> None:
        for param, expected in zip(model.parameters(), alone.parameters(), strict=True):
            assert param.grad is not None
            assert expected.grad is not None
            if config == ZERO1:
                assert torch.equal(param.grad, expected.grad)
            else:
                assert isinstance(param.grad, ShardedGrad)

    for number in range(2):
        for side in (model, alone):
            torch.autograd.backward(regression(side, number))
        require_local_sums()
    zero.step()
    require_local_sums()
    zero.zero_grad()
    assert all(param.grad is None for param in model.parameters())


@model_or_optimizer_zero_grad
@both_stages
@ranks(1, 2)
def test_zero_grad_to_zeros(ctx: RankContext, config: ZeroConfig, by_model: bool) -> None:
    """Zeros are gradients: momenta and weight decay go on, with and without a backward pass."""
    twins = ShardTwins(config)

    def iterate(side: Side, number: int) -> None:
        if number % 2 == 0:
            side.backward(number)
        side.optimizer.step()
        (side.model if by_model else side.optimizer).zero_grad(set_to_none=False)

    twins.run(5, iterate)


@model_or_optimizer_zero_grad
@both_stages
@ranks(1, 2)
def test_grads_cleared_before_step_are_discarded(ctx: RankContext, config: ZeroConfig, by_model: bool) -> None:
    def iterate(side: Side, number: int) -> None:
        side.backward(number + 50)
        side.backward_locally(number + 70)
        (side.model if by_model else side.optimizer).zero_grad()
        side.iterate(number)

    ShardTwins(config).run(2, iterate)


@both_stages
@ranks(1, 2)
def test_step_without_grads_changes_nothing(ctx: RankContext, config: ZeroConfig) -> None:
    twins = ShardTwins(config)
    twins.train(1)
    before = values_of(twins.model)
    twins.zero.step()
    assert all_equal([before, values_of(twins.model)])
    twins.train(1)


@both_stages
@ranks(1, 2)
def test_uncleared_grads_accumulate_across_steps(ctx: RankContext, config: ZeroConfig) -> None:
    """The next pass adds to them, as in torch: with SGD and whole passes that is a sum over all passes so far."""
    twins = ShardTwins(config, optimizer_class=torch.optim.SGD, lr=0.01)
    passes: list[Callable[[nn.Module], torch.Tensor]] = []
    for number in range(3):
        # Parameters move from step to step, so that earlier passes cannot be made again: their sums are kept.
        earlier = [None if param.grad is None else param.grad.clone() for param in twins.ddp.parameters()]
        twins.sides[0].backward(number)
        passes = [lambda model, n=number: regression(model, n)]  # type: ignore[misc]
        accumulate_averages(twins.ddp, passes)
        for param, grad in zip(twins.ddp.parameters(), earlier, strict=True):
            assert param.grad is not None
            param.grad = param.grad if grad is None else grad + param.grad
        twins.zero.step()
        twins.plain.step()
        # ZeRO-1 averages the sums, and this is the sum of averages: a rounding more.
        twins.compare(exactly=False)


@ranks(1, 2)
def test_missing_zero_grad_warns_once(ctx: RankContext) -> None:
    model = seeded(mlp, 0)
    zero = shard(model, torch.optim.SGD, lr=0.1, config=ZERO2)
    torch.autograd.backward(regression(model, 0))
    torch.autograd.backward(regression(model, 1))  # several passes before a step are no mistake
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
    """Whole numbers: their sums are exact."""
    for place, param in enumerate(model.parameters()):
        values = torch.arange(param.numel()).add(5 * rank + 3 * number + place).remainder(7)
        param.grad = values.view_as(param).float()


@both_stages
@ranks(1, 2, 4)
def test_manually_set_grads_are_averaged(ctx: RankContext, config: ZeroConfig) -> None:
    """They are averaged in the step, though no backward pass has told of them."""
    twins = ShardTwins(config)

    def iterate(side: Side, number: int) -> None:
        set_grads_manually(side.model, number, ctx.rank)
        if side.model is twins.ddp:
            for param in side.model.parameters():
                dist.all_reduce(param.grad)
                assert param.grad is not None
                param.grad /= ctx.world_size
        side.update()

    twins.run(3, iterate)


@both_stages
@ranks(1, 2)
def test_manually_set_grads_replace_those_of_last_step(ctx: RankContext, config: ZeroConfig) -> None:
    """Nobody needs to clear what is replaced anyway."""
    twins = ShardTwins(config, optimizer_class=torch.optim.SGD, lr=0.01)

    def iterate(side: Side, number: int) -> None:
        set_grads_manually(side.model, number, rank=0)
        side.optimizer.step()

    twins.run(3, iterate)


def num_passes(rank: int, step: int) -> int:
    """Rank 0 makes none in the first step, one in the second, ..."""
    return (rank + step) % 3


@some_configs
@ranks(2, 3, timeout=20)
def test_different_numbers_of_passes_per_rank(ctx: RankContext, config: ZeroConfig) -> None:
    """A pass that a rank did not make counts as one without gradients."""
    twins = ShardTwins(config, optimizer_class=torch.optim.SGD, lr=0.1)
    for step in range(4):
        for number in range(num_passes(ctx.rank, step)):
            twins.sides[0].backward(100 * step + number)
        _average_manually(ctx, twins, [100 * step + number for number in range(num_passes(ctx.rank, step))])
        for side in twins.sides:
            side.update()
        # A sum over passes of averages, or the average of sums: they round differently.
        twins.compare(exactly=False)


def _average_manually(ctx: RankContext, twins: ShardTwins, numbers: list[int]) -> None:
    for number in numbers:
        twins.sides[1].backward_locally(number)
    for param in twins.ddp.parameters():
        param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        dist.all_reduce(param.grad.div_(ctx.world_size))


@both_stages
@ranks(2, 3, timeout=20)
def test_rank_clears_grads_other_ranks_never_computed(ctx: RankContext, config: ZeroConfig) -> None:
    """Rank 0 makes a pass, finds it useless, clears it and makes another; the others made none of them."""
    model = seeded(mlp, 0)
    zero = shard(model, torch.optim.SGD, lr=0.1, config=config)
    if ctx.rank == 0:
        torch.autograd.backward(regression(model, 0))
        zero.zero_grad()
        torch.autograd.backward(regression(model, 1))
    zero.step()
    zero.zero_grad()
    assert all_equal(ctx.gather(values_of(model)))


@both_stages
@ranks(2)
def test_passes_after_clipping(ctx: RankContext, config: ZeroConfig) -> None:
    """Clipping brings all gradients to their owners; what comes later goes along with the step."""
    model, other = seeded(mlp, 0), seeded(mlp, 0)
    sides: list[tuple[nn.Module, ShardedOptimizer]] = [
        (it, shard(it, torch.optim.SGD, lr=0.1, config=config)) for it in (model, other)
    ]
    for step in range(3):
        for it, zero in sides:
            torch.autograd.backward(regression(it, step))
            if it is model:
                zero.clip_grad_norm_(1e9)
            torch.autograd.backward(regression(it, step + 50))
            zero.step()
            zero.zero_grad()
        for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
            # With ZeRO-1 a pass after clipping adds to the average, as with DDP: else gradients are added up before it.
            assert_equal_sums(ours, theirs, f"a parameter after step {step}", exactly=config.stage != 1)


@ranks(2, 3)
@both_stages
def test_zero_grad_to_zeros_during_accumulation(ctx: RankContext, config: ZeroConfig) -> None:
    """`zero_grad(set_to_none=False)` right after backward: what still comes counts for nothing."""
    twins = ShardTwins(config)

    def iterate(side: Side, number: int) -> None:
        side.backward(number)
        side.optimizer.zero_grad(set_to_none=False)
        if number % 2:
            side.backward(number + 100)
        side.update()

    twins.run(4, iterate)
