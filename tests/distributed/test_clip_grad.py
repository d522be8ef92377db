"""Clipping through the optimizer equals torch's clipping of the unsharded model's gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import cycle, product
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from tests.support import RankContext, ranks
from tests.support.oracles import (
    TINY,
    Branches,
    DdpParityRun,
    ParityRun,
    ParitySide,
    ShardParityRun,
    assert_equal_sums,
    assert_same,
    both_stages,
    branches_loss,
    make_seeded,
    mlp,
    regression,
    set_grads,
)
from zeroshard import (
    FlatShards,
    RankFailedError,
    RankMismatchError,
    ShardedOptimizer,
    ZeroConfig,
    ZeroRedundancyOptimizer,
    shard,
)

NORM_TYPES = (1.0, 2.0, 3.0, math.inf)
CONFIGS = (
    ZeroConfig(partition=TINY),
    ZeroConfig(partition=TINY, stage=1),
    ZeroConfig(overlap_param_gather=True),
)


def clip_side(side: ParitySide, *args: Any, **kwargs: Any) -> Tensor:
    """Clip as a user of this side would; return the norm before clipping."""
    if isinstance(side.optimizer, ShardedOptimizer):
        return side.optimizer.clip_grad_norm_(*args, **kwargs)
    return clip_grad_norm_(side.model.parameters(), *args, **kwargs)


def train_step_with_clipping(
    parity: ShardParityRun, max_norm: float, norm_type: float, check: Callable[[], None]
) -> list[Tensor]:
    """Clip and step both sides; return the norms, ours first."""
    parity.backward()
    norms = []
    for side in parity.sides:
        norms.append(clip_side(side, max_norm, norm_type))
        side.optimizer.step()
        side.optimizer.zero_grad()
    parity.steps += 1
    check()
    return norms


def check_close(parity: ShardParityRun) -> None:
    """torch sums norms of parameters, zeroshard norms of slices: the scale may differ in its last bits."""
    for ours, theirs in zip(parity.model.parameters(), parity.plain_model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@ranks(1, 2, 3, 4)
def test_norms_of_all_types_match_torch(ctx: RankContext) -> None:
    for norm_type, config in zip(NORM_TYPES, cycle(CONFIGS)):
        parity = ShardParityRun(optim.SGD, lr=0.5, config=config)
        for _ in range(2):
            ours, theirs = train_step_with_clipping(parity, 0.05, norm_type, partial(check_close, parity))
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
            assert theirs > 0.05


@ranks(1, 2, 3, 4)
def test_inf_norm_is_bitwise_equal(ctx: RankContext) -> None:
    parity = ShardParityRun(optim.AdamW, config=ZeroConfig(partition=TINY))
    for _ in range(3):
        ours, theirs = train_step_with_clipping(parity, 0.01, math.inf, parity.check)
        assert_same(ours, theirs)


@ranks(1, 2, 3, 4)
def test_norm_below_the_limit_changes_nothing(ctx: RankContext) -> None:
    for config in CONFIGS:
        parity = ShardParityRun(optim.AdamW, config=config)
        parity.train(2, lambda side: clip_side(side, 1e3) if isinstance(side.optimizer, ShardedOptimizer) else None)


@ranks(1, 2, 3, 4)
def test_clip_grad_value_matches_torch(ctx: RankContext) -> None:
    def clip(side: ParitySide) -> None:
        if isinstance(side.optimizer, ShardedOptimizer):
            side.optimizer.clip_grad_value_(0.01)
        else:
            clip_grad_value_(side.model.parameters(), 0.01)

    for config in CONFIGS:
        ShardParityRun(optim.SGD, lr=0.5, config=config).train(3, clip)


@ranks(2, 3)
def test_repeated_clipping_matches_torch(ctx: RankContext) -> None:
    def clip(side: ParitySide) -> None:
        for limit in (0.01, 0.005, 0.02):
            clip_side(side, limit, math.inf)

    ShardParityRun(optim.SGD, lr=0.5, config=CONFIGS[0]).train(2, clip)


def clip_by_value(optimizer: Any, model: nn.Module) -> None:
    clip = getattr(optimizer, "clip_grad_value_", None)
    clip(0.004) if clip else clip_grad_value_(model.parameters(), 0.004)


def clip_by_norm(optimizer: Any, model: nn.Module) -> None:
    clip = getattr(optimizer, "clip_grad_norm_", None)
    clip(0.05) if clip else clip_grad_norm_(model.parameters(), 0.05)


def make_with_ddp_hook(model: nn.Module) -> tuple[nn.Module, ZeroRedundancyOptimizer]:
    """Make the drop-in under DDP with the communication hook that sends gradients to their owners."""
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    config = ZeroConfig(partition=TINY)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.SGD, lr=0.1, momentum=0.9, config=config)
    ddp.register_comm_hook(None, optimizer.ddp_hook())
    return ddp, optimizer


def make_with_stage(stage: Literal[1, 2], model: nn.Module) -> tuple[nn.Module, ZeroRedundancyOptimizer]:
    config = ZeroConfig(partition=TINY, stage=stage)
    return model, shard(model, optim.SGD, lr=0.1, momentum=0.9, config=config)


SHARDED_SETUPS: dict[str, Callable[[nn.Module], tuple[nn.Module, ZeroRedundancyOptimizer]]] = {
    "zero2": partial(make_with_stage, 2),
    "zero1": partial(make_with_stage, 1),
    "ddp_hook": make_with_ddp_hook,
}


@pytest.mark.parametrize("clip", [clip_by_norm, clip_by_value])
@pytest.mark.parametrize("setup", SHARDED_SETUPS)
@ranks(1, 2, 3)
def test_backward_accumulates_into_clipped_gradients(ctx: RankContext, setup: str, clip: Callable[..., None]) -> None:
    """As with DDP: clipping after each micro-batch, with parameters that only some passes use, and across a step.

    DDP averages the clipped sum again in each pass, which rounds differently.
    """
    plain_model, model = make_seeded(Branches), make_seeded(Branches)
    plain = DistributedDataParallel(plain_model, find_unused_parameters=True)
    wrapped, zero = SHARDED_SETUPS[setup](model)
    sides = [(plain, plain_model, optim.SGD(plain_model.parameters(), lr=0.1, momentum=0.9)), (wrapped, model, zero)]
    for number in range(4):
        for wrapper, module, optimizer in sides:
            for micro_batch in range(3):
                torch.autograd.backward(branches_loss(wrapper, 3 * number + micro_batch))
                clip(optimizer, module)
            optimizer.step()
            if number != 1:  # after that step, the next passes add to gradients that the step has used
                optimizer.zero_grad()
        for (name, ours), theirs in zip(model.named_parameters(), plain_model.parameters(), strict=True):
            assert_equal_sums(ours, theirs, f"{name} after step {number}", exactly=False)


@ranks(1, 2, 3, 4)
def test_unused_params_do_not_affect_the_norm(ctx: RankContext) -> None:
    parity = ShardParityRun(optim.AdamW, make=Branches, loss=branches_loss, find_unused=True, config=CONFIGS[0])
    for _ in range(3):
        ours, theirs = train_step_with_clipping(parity, 0.01, math.inf, parity.check)
        assert_same(ours, theirs)


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_nonfinite_grad_on_one_rank_raises_on_all_ranks(ctx: RankContext, value: float) -> None:
    model = mlp()
    zero = shard(model, optim.SGD, lr=0.5, config=CONFIGS[0])
    weight = next(model.parameters())
    for norm_type in NORM_TYPES:
        for index in (0, 12, 24, 35):  # in the slices of all ranks
            zero.zero_grad()
            set_grads(model.parameters(), 0)
            if ctx.rank == ctx.world_size - 1:
                assert weight.grad is not None
                weight.grad.view(-1)[index] = value
            with pytest.raises(RuntimeError, match="cannot be clipped"):
                zero.clip_grad_norm_(1.0, norm_type, error_if_nonfinite=True)
            norm = zero.clip_grad_norm_(1.0, norm_type)
            assert str(norm.item()) == str(value)


@ranks(1, 2, 3, 4)
def test_clip_without_gradients(ctx: RankContext) -> None:
    for norm_type in NORM_TYPES:
        model = mlp()
        zero = shard(model, optim.SGD, lr=0.5, config=CONFIGS[0])
        assert_same(zero.clip_grad_norm_(1.0, norm_type), clip_grad_norm_(mlp().parameters(), 1.0, norm_type))
        zero.clip_grad_value_(1.0)
        set_grads(model.parameters(), 0)
        zero.step()
        zero.zero_grad()
        assert zero.clip_grad_norm_(1.0, norm_type) == 0


@ranks(1, 2, 3, 4)
def test_fewer_parameters_than_ranks(ctx: RankContext) -> None:
    """Ranks that own nothing still take part in the collectives."""

    def make_single_layer() -> nn.Module:
        return nn.Linear(6, 6, bias=False)

    for optimizer_class in (optim.SGD, optim.Adafactor):
        for norm_type in NORM_TYPES:
            parity = ShardParityRun(optimizer_class, make=make_single_layer, lr=0.1)
            ours, theirs = train_step_with_clipping(parity, 0.05, norm_type, partial(check_close, parity))
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)


@ranks(2)
def test_norm_of_large_params_keeps_precision(ctx: RankContext) -> None:
    """Millions of elements added up one by one in single precision would lose several digits."""
    model = nn.Linear(1500, 1000)
    zero = shard(model, optim.SGD, lr=0.5)
    for norm_type in (1.0, 2.0, 3.0):
        zero.zero_grad()
        torch.manual_seed(1)
        grads = [torch.rand_like(param) for param in model.parameters()]
        for param, grad in zip(model.parameters(), grads, strict=True):
            param.grad = grad.clone()
        exact = torch.linalg.vector_norm(torch.cat([grad.double().view(-1) for grad in grads]), norm_type)
        found = zero.clip_grad_norm_(1.0, norm_type)
        torch.testing.assert_close(found.double(), exact, rtol=2e-7, atol=0)


@ranks(1, 2, 3)
def test_clip_with_mixed_dtypes(ctx: RankContext) -> None:
    """One norm over all dtypes; each gradient is scaled in its own precision."""

    def make_mixed_model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6).bfloat16(), nn.Linear(6, 6).double())

    model, plain_model = make_mixed_model(), make_mixed_model()
    zero = shard(model, optim.SGD, lr=1.0, config=CONFIGS[0])
    plain_model.load_state_dict(model.state_dict())
    for each_model in (model, plain_model):
        set_grads(each_model.parameters(), 0)
    expected = clip_grad_norm_(plain_model.parameters(), 0.5)
    # torch rounds the norm of a bfloat16 parameter to bfloat16.
    torch.testing.assert_close(zero.clip_grad_norm_(0.5), expected, rtol=1e-3, atol=0, check_dtype=False)
    zero.step()
    optim.SGD(plain_model.parameters(), lr=1.0).step()
    for ours, theirs in zip(model.parameters(), plain_model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-3)


@both_stages
@ranks(2)
def test_norm_has_the_dtype_of_the_existing_gradients(ctx: RankContext, config: ZeroConfig) -> None:
    """A bucket is sent again in the pass after one that used it, whether it is used or not."""
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.float64)])
    zero = shard(model, optim.SGD, lr=0.1, config=config)
    for layer in model:
        torch.autograd.backward([param.sum() for param in layer.parameters()])
    assert zero.clip_grad_norm_(1.0).dtype == torch.float64
    zero.step()
    zero.zero_grad()
    model[1].requires_grad_(False)
    torch.autograd.backward([param.sum() for param in model[0].parameters()])
    assert zero.clip_grad_norm_(1.0).dtype == torch.float32


@ranks(1, 2, 3, 4)
def test_dropin_clips_param_grad(ctx: RankContext) -> None:
    flat: dict[str, Any] = {"config": ZeroConfig(partition=FlatShards(bucket_bytes=200))}
    views = {"parameters_as_bucket_view": True}
    for zero_only, norms in (({}, NORM_TYPES[:1]), (views, NORM_TYPES[1:2]), (flat, NORM_TYPES)):
        for norm_type in norms:
            parity = ParityRun(optim.AdamW, zero_only=zero_only)
            for step in range(2):
                for model, _ in parity.sides:
                    set_grads(model.parameters(), step)
                found = parity.zero.clip_grad_norm_(0.5, norm_type)
                assert_same(found, clip_grad_norm_(parity.plain_model.parameters(), 0.5, norm_type))
                parity.zero.clip_grad_value_(0.1)
                clip_grad_value_(parity.plain_model.parameters(), 0.1)
                for _, optimizer in parity.sides:
                    optimizer.step()
                parity.check()
            parity.zero.zero_grad()
            assert parity.zero.clip_grad_norm_(1.0) == 0


@ranks(2, 3)
def test_different_limits_across_ranks_raise_on_all_ranks(ctx: RankContext) -> None:
    """Without the check, each rank would clip its own slices by another limit, and no rank would notice."""
    model = mlp()
    optimizer = shard(model, torch.optim.SGD, lr=0.1)
    is_last = ctx.rank == ctx.world_size - 1
    for clip in (
        lambda: optimizer.clip_grad_norm_(1.0 + is_last),
        lambda: optimizer.clip_grad_norm_(1.0, norm_type=1.0 + is_last),
        lambda: optimizer.clip_grad_norm_(1.0, error_if_nonfinite=is_last),
        lambda: optimizer.clip_grad_value_(0.1 + is_last),
    ):
        torch.autograd.backward(regression(model, 0))
        with pytest.raises(RankMismatchError, match=r"clip_grad_\w+: the ranks disagree\. ranks? 0.*: \w+=.*; rank"):
            clip()
        optimizer.zero_grad()
    torch.autograd.backward(regression(model, 0))
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()


@both_stages
@ranks(1, 2, 3, timeout=60)
def test_non_numeric_limit_on_one_rank_raises_on_all_ranks(ctx: RankContext, config: ZeroConfig) -> None:
    """Raised before anything is clipped: gradients stay unchanged."""
    parity = DdpParityRun(config)
    zero, is_last = parity.zero, ctx.rank == ctx.world_size - 1
    calls: list[Callable[[Any], Any]] = [
        zero.clip_grad_norm_,
        partial(zero.clip_grad_norm_, 0.01),
        partial(zero.clip_grad_norm_, 0.01, 2.0),
        zero.clip_grad_value_,
    ]
    for side in parity.sides:
        side.backward(0)
    for call, value in product(calls, (torch.ones(2), NotANumber())):
        with pytest.raises((ValueError, RuntimeError, TypeError) if is_last else RankFailedError) as caught:
            call(value if is_last else 1.0)
        assert isinstance(caught.value, RankFailedError) is not is_last
    for side in parity.sides:
        side.update()
    parity.compare()


class NotANumber:
    """Converts neither to a float nor to a bool."""

    def __float__(self) -> float:
        raise TypeError("not a number, on purpose")

    def __bool__(self) -> bool:
        raise TypeError("neither true nor false, on purpose")
