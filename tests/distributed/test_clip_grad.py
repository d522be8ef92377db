"""Clipping through the optimizer: as torch clips the gradients of the unsharded model."""

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
    Pair,
    PairSide,
    ShardTwins,
    Twins,
    assert_equal_sums,
    assert_same,
    both_stages,
    mlp,
    regression,
    seeded,
    set_grads,
    through_branches,
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


def clip_side(side: PairSide, *args: Any, **kwargs: Any) -> Tensor:
    """Clip as a user of this side would; returns the norm before."""
    if isinstance(side.optimizer, ShardedOptimizer):
        return side.optimizer.clip_grad_norm_(*args, **kwargs)
    return clip_grad_norm_(side.model.parameters(), *args, **kwargs)


def train_step_with_clipping(pair: Pair, max_norm: float, norm_type: float, check: Callable[[], None]) -> list[Tensor]:
    """One step of both after clipping; returns the norms, ours first."""
    pair.backward()
    norms = []
    for side in pair.sides:
        norms.append(clip_side(side, max_norm, norm_type))
        side.optimizer.step()
        side.optimizer.zero_grad()
    pair.steps += 1
    check()
    return norms


def check_close(pair: Pair) -> None:
    """torch adds up norms of parameters, we those of slices: the scale may differ in its last bits."""
    for ours, theirs in zip(pair.model.parameters(), pair.plain_model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@ranks(1, 2, 3, 4)
def test_norms_of_all_types_match_torch(ctx: RankContext) -> None:
    for norm_type, config in zip(NORM_TYPES, cycle(CONFIGS)):
        pair = Pair(optim.SGD, lr=0.5, config=config)
        for _ in range(2):
            ours, theirs = train_step_with_clipping(pair, 0.05, norm_type, partial(check_close, pair))
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
            assert theirs > 0.05


@ranks(1, 2, 3, 4)
def test_inf_norm_is_bitwise_equal(ctx: RankContext) -> None:
    pair = Pair(optim.AdamW, config=ZeroConfig(partition=TINY))
    for _ in range(3):
        ours, theirs = train_step_with_clipping(pair, 0.01, math.inf, pair.check)
        assert_same(ours, theirs)


@ranks(1, 2, 3, 4)
def test_norm_below_the_limit_changes_nothing(ctx: RankContext) -> None:
    for config in CONFIGS:
        pair = Pair(optim.AdamW, config=config)
        pair.train(2, lambda side: clip_side(side, 1e3) if isinstance(side.optimizer, ShardedOptimizer) else None)


@ranks(1, 2, 3, 4)
def test_clip_grad_value_matches_torch(ctx: RankContext) -> None:
    def clip(side: PairSide) -> None:
        if isinstance(side.optimizer, ShardedOptimizer):
            side.optimizer.clip_grad_value_(0.01)
        else:
            clip_grad_value_(side.model.parameters(), 0.01)

    for config in CONFIGS:
        Pair(optim.SGD, lr=0.5, config=config).train(3, clip)


@ranks(2, 3)
def test_repeated_clipping_matches_torch(ctx: RankContext) -> None:
    def clip(side: PairSide) -> None:
        for limit in (0.01, 0.005, 0.02):
            clip_side(side, limit, math.inf)

    Pair(optim.SGD, lr=0.5, config=CONFIGS[0]).train(2, clip)


def clip_by_value(optimizer: Any, model: nn.Module) -> None:
    own = getattr(optimizer, "clip_grad_value_", None)
    own(0.004) if own else clip_grad_value_(model.parameters(), 0.004)


def clip_by_norm(optimizer: Any, model: nn.Module) -> None:
    own = getattr(optimizer, "clip_grad_norm_", None)
    own(0.05) if own else clip_grad_norm_(model.parameters(), 0.05)


def make_with_ddp_hook(model: nn.Module) -> tuple[nn.Module, ZeroRedundancyOptimizer]:
    """The drop-in under DDP, whose gradients our hook brings to their owners."""
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
@pytest.mark.parametrize("way", SHARDED_SETUPS)
@ranks(1, 2, 3)
def test_backward_accumulates_into_clipped_gradients(ctx: RankContext, way: str, clip: Callable[..., None]) -> None:
    """As with DDP: after each micro batch, with parameters that only some passes use, and over a step.

    DDP averages the clipped sum once more with each pass, which rounds differently.
    """
    plain_model, model = seeded(Branches), seeded(Branches)
    plain = DistributedDataParallel(plain_model, find_unused_parameters=True)
    net, zero = SHARDED_SETUPS[way](model)
    sides = [(plain, plain_model, optim.SGD(plain_model.parameters(), lr=0.1, momentum=0.9)), (net, model, zero)]
    for number in range(4):
        for forward, owner, optimizer in sides:
            for part in range(3):
                torch.autograd.backward(through_branches(forward, 3 * number + part))
                clip(optimizer, owner)
            optimizer.step()
            if number != 1:  # once the next passes add to what a step has used
                optimizer.zero_grad()
        for (name, ours), theirs in zip(model.named_parameters(), plain_model.parameters(), strict=True):
            assert_equal_sums(ours, theirs, f"{name} after step {number}", exactly=False)


@ranks(1, 2, 3, 4)
def test_unused_params_do_not_affect_the_norm(ctx: RankContext) -> None:
    pair = Pair(optim.AdamW, make=Branches, loss=through_branches, find_unused=True, config=CONFIGS[0])
    for _ in range(3):
        ours, theirs = train_step_with_clipping(pair, 0.01, math.inf, pair.check)
        assert_same(ours, theirs)


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_nonfinite_grad_on_one_rank_raises_on_all_ranks(ctx: RankContext, value: float) -> None:
    model = mlp()
    zero = shard(model, optim.SGD, lr=0.5, config=CONFIGS[0])
    weight = next(model.parameters())
    for norm_type in NORM_TYPES:
        for place in (0, 12, 24, 35):  # in the slices of all ranks
            zero.zero_grad()
            set_grads(model.parameters(), 0)
            if ctx.rank == ctx.world_size - 1:
                assert weight.grad is not None
                weight.grad.view(-1)[place] = value
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
    """Some ranks own nothing, and still say what the others hear."""

    def single() -> nn.Module:
        return nn.Linear(6, 6, bias=False)

    for factory in (optim.SGD, optim.Adafactor):
        for norm_type in NORM_TYPES:
            pair = Pair(factory, make=single, lr=0.1)
            ours, theirs = train_step_with_clipping(pair, 0.05, norm_type, partial(check_close, pair))
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
    """Norms of all of them together; each is scaled in its own precision."""

    def mixed() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6).bfloat16(), nn.Linear(6, 6).double())

    model, plain = mixed(), mixed()
    zero = shard(model, optim.SGD, lr=1.0, config=CONFIGS[0])
    plain.load_state_dict(model.state_dict())
    for each in (model, plain):
        set_grads(each.parameters(), 0)
    expected = clip_grad_norm_(plain.parameters(), 0.5)
    # torch rounds the norm of a bfloat16 parameter to bfloat16.
    torch.testing.assert_close(zero.clip_grad_norm_(0.5), expected, rtol=1e-3, atol=0, check_dtype=False)
    zero.step()
    optim.SGD(plain.parameters(), lr=1.0).step()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-3)


@both_stages
@ranks(2)
def test_norm_has_the_dtype_of_the_existing_gradients(ctx: RankContext, config: ZeroConfig) -> None:
    """A bucket goes along in the pass after one that used it, whether it is used or not."""
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
            twins = Twins(optim.AdamW, zero_only=zero_only)
            for step in range(2):
                for model, _ in twins.sides:
                    set_grads(model.parameters(), step)
                found = twins.zero.clip_grad_norm_(0.5, norm_type)
                assert_same(found, clip_grad_norm_(twins.plain_model.parameters(), 0.5, norm_type))
                twins.zero.clip_grad_value_(0.1)
                clip_grad_value_(twins.plain_model.parameters(), 0.1)
                for _, optimizer in twins.sides:
                    optimizer.step()
                twins.check()
            twins.zero.zero_grad()
            assert twins.zero.clip_grad_norm_(1.0) == 0


@ranks(2, 3)
def test_different_limits_across_ranks_raise_on_all_ranks(ctx: RankContext) -> None:
    """Each rank would clip its own slices, and nobody would notice."""
    model = mlp()
    optimizer = shard(model, torch.optim.SGD, lr=0.1)
    odd = ctx.rank == ctx.world_size - 1
    for clip in (
        lambda: optimizer.clip_grad_norm_(1.0 + odd),
        lambda: optimizer.clip_grad_norm_(1.0, norm_type=1.0 + odd),
        lambda: optimizer.clip_grad_norm_(1.0, error_if_nonfinite=odd),
        lambda: optimizer.clip_grad_value_(0.1 + odd),
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
    """Before anything is clipped, so that gradients stay as they are."""
    twins = ShardTwins(config)
    zero, odd = twins.zero, ctx.rank == ctx.world_size - 1
    calls: list[Callable[[Any], Any]] = [
        zero.clip_grad_norm_,
        partial(zero.clip_grad_norm_, 0.01),
        partial(zero.clip_grad_norm_, 0.01, 2.0),
        zero.clip_grad_value_,
    ]
    for side in twins.sides:
        side.backward(0)
    for call, value in product(calls, (torch.ones(2), NotANumber())):
        with pytest.raises((ValueError, RuntimeError, TypeError) if odd else RankFailedError) as caught:
            call(value if odd else 1.0)
        assert isinstance(caught.value, RankFailedError) is not odd
    for side in twins.sides:
        side.update()
    twins.compare()


class NotANumber:
    """Neither a number nor true or false."""

    def __float__(self) -> float:
        raise TypeError("no number, on purpose")

    def __bool__(self) -> bool:
        raise TypeError("neither true nor false, on purpose")
