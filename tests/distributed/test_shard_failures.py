"""Gradients that cannot be sent or received on one rank: all ranks raise in the next step, and train on without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.support import RankContext, ranks
from tests.support.monitoring import recorded
from tests.support.oracles import ZERO1, ZERO2, ShardTwins, both_stages, mlp, regression, seeded, some_configs
from tests.support.tiers import sampled
from zeroshard import FlatShards, RankFailedError, ZeroConfig, ZeroRedundancyOptimizer
from zeroshard.comm import gloo as pairs
from zeroshard.comm.transport import sum_in_rank_order
from zeroshard.engine import grad_reducer
from zeroshard.engine.grad_bucket import BufferPool, GradBucket

FAILING_RANK = 1
"""The rank that fails, or the only one."""

BUCKET_PER_PARAM = ZeroConfig(partition=FlatShards(bucket_bytes=1))
"""A bucket for each parameter, whose gradient is sent as it lies."""


def is_failing_rank(ctx: RankContext) -> bool:
    return ctx.rank == FAILING_RANK % ctx.world_size


def drop_pooled_buffers(twins: ShardTwins) -> None:
    for pool in twins.zero._grad_reducer._buffer_pools.values():
        pool._idle.clear()


@contextmanager
def out_of_memory(ctx: RankContext, calls: range = range(1000)) -> Iterator[None]:
    """No memory to pack gradients in, on one rank."""
    take, number = BufferPool.acquire, count()

    def no_memory(self: BufferPool, numel: int) -> Any:
        if next(number) in calls:
            raise torch.OutOfMemoryError("no memory, on purpose")
        return take(self, numel)

    with pytest.MonkeyPatch.context() as patch:
        if is_failing_rank(ctx):
            patch.setattr(BufferPool, "acquire", no_memory)
        yield


@contextmanager
def failing_sums(ctx: RankContext, calls: range) -> Iterator[None]:
    """Sums of slices that end halfway, on one rank: those of these numbers."""
    number = count()

    def add_then_fail(slices: list[torch.Tensor], into: torch.Tensor, share: float) -> None:
        sum_in_rank_order(slices, into, share)
        if next(number) in calls:
            into.fill_(torch.nan)
            raise RuntimeError("DefaultCPUAllocator: no memory, on purpose")  # as torch says it

    with pytest.MonkeyPatch.context() as patch:
        if is_failing_rank(ctx):
            patch.setattr(pairs, "sum_in_rank_order", add_then_fail)
        yield


@contextmanager
def assert_raised_on_all(
    ctx: RankContext, match: str = "on purpose", error: type[Exception] = RuntimeError
) -> Iterator[None]:
    """Its own error on the rank that failed, and what it says on the others."""
    with pytest.raises(error if is_failing_rank(ctx) else RankFailedError, match=match) as caught:
        yield
    if not is_failing_rank(ctx):
        assert f"cleared now: rank {FAILING_RANK} failed" in str(caught.value)


def with_wrong_grad_shape(param_index: int, enabled: list[bool]) -> Callable[[], nn.Module]:
    """A model one of whose gradients gets another shape from a hook of the user's."""

    def replace_grad(param: torch.Tensor) -> None:
        if enabled[0]:
            assert param.grad is not None
            param.grad.data = torch.ones(5)

    def make() -> nn.Module:
        model = mlp()
        list(model.parameters())[param_index].register_post_accumulate_grad_hook(replace_grad)  # type: ignore[no-untyped-call]
        return model

    return make


@sampled("where", [0, 1, 4, -1])
@sampled("config", [ZERO2, ZERO1, ZeroConfig(), BUCKET_PER_PARAM], ids=["zero2", "zero1", "one", "each"])
@ranks(1, 2, 3, timeout=20)
def test_wrong_gradient_shape_is_raised_on_all(ctx: RankContext, config: ZeroConfig, where: int) -> None:
    when = [False]
    twins = ShardTwins(config, with_wrong_grad_shape(where, when), plain_model=mlp)
    twins.train(1)
    when[0] = is_failing_rank(ctx)
    twins.sides[0].backward(7)
    when[0] = False
    with assert_raised_on_all(ctx, match="size|shape"):
        twins.zero.step()
    twins.train(2)


@some_configs
@sampled("first", [0, 1])
@ranks(1, 2, 3, timeout=20)
def test_out_of_memory_while_packing_grads(ctx: RankContext, config: ZeroConfig, first: int) -> None:
    twins = ShardTwins(config)
    if first:
        twins.train(first)
    drop_pooled_buffers(twins)
    with pytest.MonkeyPatch.context() as patch:
        if ctx.world_size == 1:
            patch.setattr(grad_reducer.GradReducer, "_accumulate_on_single_rank", _raise_out_of_memory)
        with out_of_memory(ctx):
            twins.sides[0].backward(7)
    with assert_raised_on_all(ctx):
        twins.zero.step()
    assert all(param.grad is None for param in twins.model.parameters())
    twins.train(2)


def _raise_out_of_memory(*_: Any) -> None:
    raise torch.OutOfMemoryError("no memory, on purpose")


@ranks(2, 3, timeout=20)
def test_failure_to_copy_large_grads_into_bucket(ctx: RankContext) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grad_reducer, "EAGER_COPY_MIN_BYTES", 0)
        twins = ShardTwins(ZERO2)
        if is_failing_rank(ctx):
            patch.setattr(GradBucket, "copy_in", _raise_out_of_memory)
        twins.sides[0].backward(7)
    with assert_raised_on_all(ctx):
        twins.zero.step()
    twins.train(2)


@both_stages
@ranks(2, 3, timeout=20)
def test_out_of_memory_in_step(ctx: RankContext, config: ZeroConfig) -> None:
    """Gradients of local passes are sent there, when all ranks have stated that they are well."""
    twins = ShardTwins(config)
    twins.train(1)
    twins.sides[0].backward_locally(7)
    drop_pooled_buffers(twins)
    with out_of_memory(ctx, range(1, 2)), assert_raised_on_all(ctx):
        twins.zero.step()
    twins.train(2)


@sampled("which", [range(1), range(2, 3), range(4, 5), range(5)], ids=["first", "third", "last", "all"])
@both_stages
@ranks(2, 3, timeout=20)
def test_failure_to_sum_grad_shards(ctx: RankContext, config: ZeroConfig, which: range) -> None:
    """Whether that is known before all ranks state that they are well, or after."""
    twins = ShardTwins(config)
    assert len(twins.zero.layout.buckets) == 5
    for patience in (0.0, 1.0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(grad_reducer, "WAIT_TIMEOUT_S", patience)
            twins.train(1)
            with failing_sums(ctx, which):
                twins.sides[0].backward(7)
                with assert_raised_on_all(ctx):
                    twins.zero.step()
    twins.train(2)


@both_stages
@ranks(2, 3, timeout=20)
def test_failed_second_pass_discards_the_first(ctx: RankContext, config: ZeroConfig) -> None:
    twins = ShardTwins(config)
    twins.sides[0].backward(7)
    twins.zero.clip_grad_value_(1.0)  # all is there
    with failing_sums(ctx, range(1, 2)):
        twins.sides[0].backward(8)
        with assert_raised_on_all(ctx):
            twins.zero.step()
    twins.train(2)


@both_stages
@ranks(2, 3, timeout=20)
def test_failure_with_different_numbers_of_passes_per_rank(ctx: RankContext, config: ZeroConfig) -> None:
    twins = ShardTwins(config)
    for failing_passes, other_passes in ((1, 0), (0, 1), (2, 1)):
        with failing_sums(ctx, range(1)):
            for number in range(failing_passes if is_failing_rank(ctx) else other_passes):
                twins.sides[0].backward(number)
            with assert_raised_on_all(ctx):
                twins.zero.step()
        twins.train(1)


@both_stages
@ranks(2, 3, timeout=20)
def test_clipping_raises_the_reduce_failure(ctx: RankContext, config: ZeroConfig) -> None:
    twins = ShardTwins(config)
    with out_of_memory(ctx):
        twins.sides[0].backward(7)
    with assert_raised_on_all(ctx):
        twins.zero.clip_grad_norm_(1.0)
    twins.train(1)


@both_stages
@ranks(2, 3, timeout=20)
def test_zero_grad_does_not_hide_a_failure(ctx: RankContext, config: ZeroConfig) -> None:
    twins = ShardTwins(config)
    with out_of_memory(ctx):
        twins.sides[0].backward(7)
    twins.zero.zero_grad()
    twins.sides[0].backward(8)
    with assert_raised_on_all(ctx):
        twins.zero.step()
    twins.train(1)


@both_stages
@ranks(1, 2, 3, timeout=20)
def test_all_ranks_fail_at_once(ctx: RankContext, config: ZeroConfig) -> None:
    twins = ShardTwins(config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grad_reducer.GradReducer, "_start_reduce", _raise_out_of_memory)
        twins.sides[0].backward(7)
    with pytest.raises(torch.OutOfMemoryError, match="on purpose"):
        twins.zero.step()
    twins.train(2)


@ranks(2, 3, timeout=20)
def test_out_of_memory_in_ddp_hook(ctx: RankContext) -> None:
    models = [seeded(mlp, 0) for _ in range(2)]
    plain_ddp, ddp = (DistributedDataParallel(model, bucket_cap_mb=0.0003) for model in models)
    plain = torch.optim.AdamW(plain_ddp.parameters(), lr=0.05)
    zero = ZeroRedundancyOptimizer(
        ddp.parameters(), torch.optim.AdamW, lr=0.05, config=ZeroConfig(partition=ZERO2.partition)
    )
    ddp.register_comm_hook(None, zero.ddp_hook())
    for number, fault in enumerate((None, out_of_memory, None, None)):
        if fault is not None:
            with fault(ctx):
                torch.autograd.backward(regression(ddp, number))
            with assert_raised_on_all(ctx):
                zero.step()
            continue
        for model, optimizer in ((plain_ddp, plain), (ddp, zero)):
            torch.autograd.backward(regression(model, number))
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in zip(ddp.parameters(), plain_ddp.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)  # gloo adds in another order than that of ranks


@ranks(2, 3)
def test_second_clip_sends_only_the_status_exchange(ctx: RankContext) -> None:
    twins = ShardTwins(ZERO2)
    twins.sides[0].backward(7)
    twins.zero.clip_grad_value_(1.0)
    with recorded() as traffic:
        twins.zero.clip_grad_value_(1.0)
    assert traffic.verbs == ["all_reduce"]


@some_configs
@ranks(1, 2, 3, timeout=20)
def test_closure_failure_on_one_rank(ctx: RankContext, config: ZeroConfig) -> None:
    """Others have made their backward pass. Once gradients are cleared, training goes on as if nothing had been."""
    twins = ShardTwins(config)
    param = next(twins.model.parameters())

    def closure(when: str) -> None:
        if is_failing_rank(ctx) and when == "before":
            raise ValueError("on purpose")
        if is_failing_rank(ctx) and when == "halfway":
            param.register_hook(fail_backward)  # type: ignore[no-untyped-call]
        twins.sides[0].backward(7)
        if is_failing_rank(ctx):
            raise ValueError("on purpose")

    for when in ("before", "halfway", "after", "before"):
        twins.train(2)
        with pytest.raises(ValueError if is_failing_rank(ctx) else RankFailedError, match="on purpose"):
            twins.zero.step(partial(closure, when))
        twins.zero.zero_grad()
        param._backward_hooks = None
    twins.train(2)


def fail_backward(_: torch.Tensor) -> None:
    raise ValueError("on purpose")
