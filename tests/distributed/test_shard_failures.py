"""One rank fails to send or receive gradients: all ranks raise in the next step and can continue training."""

from __future__ import annotations

import threading
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
from tests.support.oracles import ZERO1, ZERO2, DdpParityRun, both_stages, make_seeded, mlp, regression, some_configs
from tests.support.tiers import sampled
from zeroshard import FlatShards, RankFailedError, ZeroConfig, ZeroRedundancyOptimizer
from zeroshard.comm import gloo
from zeroshard.comm.transport import sum_in_rank_order
from zeroshard.engine import grad_reducer
from zeroshard.engine.grad_bucket import BufferPool, ReduceBucket

FAILING_RANK = 1
"""The rank that fails (rank 0 if it is the only one)."""

BUCKET_PER_PARAM = ZeroConfig(partition=FlatShards(bucket_bytes=1))
"""One bucket per parameter; the gradient is sent without a copy."""


def is_failing_rank(ctx: RankContext) -> bool:
    return ctx.rank == FAILING_RANK % ctx.world_size


def drop_pooled_buffers(parity: DdpParityRun) -> None:
    for pool in parity.zero._model_binding.reducer._buffer_pools.values():
        pool._idle.clear()


@contextmanager
def out_of_memory(ctx: RankContext, calls: range = range(1000)) -> Iterator[None]:
    """Raise an out-of-memory error on one rank when it packs gradients."""
    acquire, call_numbers = BufferPool.acquire, count()

    def acquire_or_fail(self: BufferPool, numel: int) -> Any:
        if next(call_numbers) in calls:
            raise torch.OutOfMemoryError("no memory, on purpose")
        return acquire(self, numel)

    with pytest.MonkeyPatch.context() as patch:
        if is_failing_rank(ctx):
            patch.setattr(BufferPool, "acquire", acquire_or_fail)
        yield


@contextmanager
def failing_sums(ctx: RankContext, calls: range) -> Iterator[None]:
    """Make the sums of gradient slices with these call numbers fail halfway, on one rank."""
    call_numbers = count()

    def add_then_fail(slices: list[torch.Tensor], into: torch.Tensor, scale: float) -> None:
        sum_in_rank_order(slices, into, scale)
        if next(call_numbers) in calls:
            into.fill_(torch.nan)
            raise RuntimeError("DefaultCPUAllocator: no memory, on purpose")  # torch's words

    with pytest.MonkeyPatch.context() as patch:
        if is_failing_rank(ctx):
            patch.setattr(gloo, "sum_in_rank_order", add_then_fail)
        yield


@contextmanager
def assert_raised_on_all(
    ctx: RankContext, match: str = "on purpose", error: type[Exception] = RuntimeError
) -> Iterator[None]:
    """Expect the original error on the failing rank and `RankFailedError` with its message on the others."""
    with pytest.raises(error if is_failing_rank(ctx) else RankFailedError, match=match) as caught:
        yield
    if not is_failing_rank(ctx):
        assert f"failed to reduce gradients, which were cleared: rank {FAILING_RANK} failed" in str(caught.value)


def model_with_wrong_grad_shape(param_index: int, enabled: list[bool]) -> Callable[[], nn.Module]:
    """Return a factory of models; a user hook changes the shape of one gradient while `enabled[0]` is set."""

    def replace_grad(param: torch.Tensor) -> None:
        if enabled[0]:
            assert param.grad is not None
            param.grad.data = torch.ones(5)

    def make() -> nn.Module:
        model = mlp()
        list(model.parameters())[param_index].register_post_accumulate_grad_hook(replace_grad)  # type: ignore[no-untyped-call]
        return model

    return make


@sampled("param_index", [0, 1, 4, -1])
@sampled(
    "config", [ZERO2, ZERO1, ZeroConfig(), BUCKET_PER_PARAM], ids=["zero2", "zero1", "one-bucket", "bucket-per-param"]
)
@ranks(1, 2, 3, timeout=20)
def test_wrong_gradient_shape_is_raised_on_all(ctx: RankContext, config: ZeroConfig, param_index: int) -> None:
    enabled = [False]
    parity = DdpParityRun(config, model_with_wrong_grad_shape(param_index, enabled), plain_model=mlp)
    parity.train(1)
    enabled[0] = is_failing_rank(ctx)
    parity.sides[0].backward(7)
    enabled[0] = False
    with assert_raised_on_all(ctx, match="size|shape"):
        parity.zero.step()
    parity.train(2)


@some_configs
@sampled("steps_before", [0, 1])
@ranks(1, 2, 3, timeout=20)
def test_out_of_memory_while_packing_grads(ctx: RankContext, config: ZeroConfig, steps_before: int) -> None:
    parity = DdpParityRun(config)
    if steps_before:
        parity.train(steps_before)
    drop_pooled_buffers(parity)
    with pytest.MonkeyPatch.context() as patch:
        if ctx.world_size == 1:
            patch.setattr(grad_reducer.GradReducer, "_accumulate_on_single_rank", _raise_out_of_memory)
        with out_of_memory(ctx):
            parity.sides[0].backward(7)
    with assert_raised_on_all(ctx):
        parity.zero.step()
    assert all(param.grad is None for param in parity.model.parameters())
    parity.train(2)


@some_configs
@ranks(2, 3, timeout=20)
def test_thread_that_cannot_start_sends_nothing(ctx: RankContext, config: ZeroConfig) -> None:
    """Otherwise the bucket would be sent twice, once as zeros."""
    parity = DdpParityRun(config)
    parity.train(1)
    for thread in threading.enumerate():
        if thread.name == "zeroshard-receiver":  # ends when it has nothing to receive
            thread.join(5)
    with pytest.MonkeyPatch.context() as patch:
        if is_failing_rank(ctx):
            patch.setattr(threading, "Thread", _ThreadLimitReached)
        parity.sides[0].backward(7)
        patch.undo()
        with assert_raised_on_all(ctx, "can't start new thread"):
            parity.zero.step()
    parity.train(2)


class _ThreadLimitReached(threading.Thread):
    def start(self) -> None:
        raise RuntimeError("can't start new thread, on purpose")


def _raise_out_of_memory(*_: Any) -> None:
    raise torch.OutOfMemoryError("no memory, on purpose")


@ranks(2, 3, timeout=20)
def test_failure_to_copy_large_grads_into_bucket(ctx: RankContext) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grad_reducer, "EAGER_COPY_MIN_BYTES", 0)
        parity = DdpParityRun(ZERO2)
        if is_failing_rank(ctx):
            patch.setattr(ReduceBucket, "copy_in", _raise_out_of_memory)
        parity.sides[0].backward(7)
    with assert_raised_on_all(ctx):
        parity.zero.step()
    parity.train(2)


@both_stages
@ranks(2, 3, timeout=20)
def test_out_of_memory_in_step(ctx: RankContext, config: ZeroConfig) -> None:
    """The step sends gradients of local passes after all ranks have reported that they are ready."""
    parity = DdpParityRun(config)
    parity.train(1)
    parity.sides[0].backward_locally(7)
    drop_pooled_buffers(parity)
    with out_of_memory(ctx, range(1, 2)), assert_raised_on_all(ctx):
        parity.zero.step()
    parity.train(2)


@sampled("calls", [range(1), range(2, 3), range(4, 5), range(5)], ids=["first", "third", "last", "all"])
@both_stages
@ranks(2, 3, timeout=20)
def test_failure_to_sum_grad_shards(ctx: RankContext, config: ZeroConfig, calls: range) -> None:
    """The failure is detected before or after all ranks have reported that they are ready."""
    parity = DdpParityRun(config)
    assert len(parity.zero.layout.buckets) == 5
    for wait_timeout_s in (0.0, 1.0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(grad_reducer, "WAIT_BUDGET_S", wait_timeout_s)
            parity.train(1)
            with failing_sums(ctx, calls):
                parity.sides[0].backward(7)
                with assert_raised_on_all(ctx):
                    parity.zero.step()
    parity.train(2)


@both_stages
@ranks(2, 3, timeout=20)
def test_failed_second_pass_discards_the_first(ctx: RankContext, config: ZeroConfig) -> None:
    parity = DdpParityRun(config)
    parity.sides[0].backward(7)
    parity.zero.clip_grad_value_(1.0)  # all gradients are reduced
    with failing_sums(ctx, range(1, 2)):
        parity.sides[0].backward(8)
        with assert_raised_on_all(ctx):
            parity.zero.step()
    parity.train(2)


@both_stages
@ranks(2, 3, timeout=20)
def test_failure_with_different_numbers_of_passes_per_rank(ctx: RankContext, config: ZeroConfig) -> None:
    parity = DdpParityRun(config)
    for failing_passes, other_passes in ((1, 0), (0, 1), (2, 1)):
        with failing_sums(ctx, range(1)):
            for number in range(failing_passes if is_failing_rank(ctx) else other_passes):
                parity.sides[0].backward(number)
            with assert_raised_on_all(ctx):
                parity.zero.step()
        parity.train(1)


@both_stages
@ranks(2, 3, timeout=20)
def test_clipping_raises_the_reduce_failure(ctx: RankContext, config: ZeroConfig) -> None:
    parity = DdpParityRun(config)
    with out_of_memory(ctx):
        parity.sides[0].backward(7)
    with assert_raised_on_all(ctx):
        parity.zero.clip_grad_norm_(1.0)
    parity.train(1)


@both_stages
@ranks(2, 3, timeout=20)
def test_zero_grad_does_not_hide_a_failure(ctx: RankContext, config: ZeroConfig) -> None:
    parity = DdpParityRun(config)
    with out_of_memory(ctx):
        parity.sides[0].backward(7)
    parity.zero.zero_grad()
    parity.sides[0].backward(8)
    with assert_raised_on_all(ctx):
        parity.zero.step()
    parity.train(1)


@both_stages
@ranks(1, 2, 3, timeout=20)
def test_all_ranks_fail_at_once(ctx: RankContext, config: ZeroConfig) -> None:
    parity = DdpParityRun(config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grad_reducer.GradReducer, "_start_reduce", _raise_out_of_memory)
        parity.sides[0].backward(7)
    with pytest.raises(torch.OutOfMemoryError, match="on purpose"):
        parity.zero.step()
    parity.train(2)


@both_stages
@ranks(2, 3, timeout=20)
def test_step_fails_after_an_interrupted_backward(ctx: RankContext, config: ZeroConfig) -> None:
    """Rank 0's pass ends before its first bucket is complete: its failed step sends no more than those of others."""
    parity = DdpParityRun(config)
    parity.train(1)
    if ctx.rank == 0:
        handle = list(parity.model.parameters())[-2].register_hook(_raise_out_of_memory)  # type: ignore[no-untyped-call]
        with pytest.raises(torch.OutOfMemoryError, match="on purpose"):
            parity.sides[0].backward(7)
        handle.remove()
    assert not parity.zero._model_binding.reducer.has_sent
    with out_of_memory(ctx, range(1)), assert_raised_on_all(ctx):
        parity.zero.step()
    parity.train(2)


@ranks(2, 3, timeout=20)
def test_out_of_memory_in_ddp_hook(ctx: RankContext) -> None:
    models = [make_seeded(mlp, 0) for _ in range(2)]
    plain_ddp, ddp = (DistributedDataParallel(model, bucket_cap_mb=0.0003) for model in models)
    plain = torch.optim.AdamW(plain_ddp.parameters(), lr=0.05)
    zero = ZeroRedundancyOptimizer(
        ddp.parameters(), torch.optim.AdamW, lr=0.05, config=ZeroConfig(partition=ZERO2.partition)
    )
    ddp.register_comm_hook(None, zero.ddp_hook())
    for number, inject_fault in enumerate((None, out_of_memory, None, None)):
        if inject_fault is not None:
            with inject_fault(ctx):
                torch.autograd.backward(regression(ddp, number))
            with assert_raised_on_all(ctx):
                zero.step()
            continue
        for model, optimizer in ((plain_ddp, plain), (ddp, zero)):
            torch.autograd.backward(regression(model, number))
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in zip(ddp.parameters(), plain_ddp.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)  # gloo does not sum in rank order


@ranks(2, 3)
def test_second_clip_sends_only_the_status_exchange(ctx: RankContext) -> None:
    parity = DdpParityRun(ZERO2)
    parity.sides[0].backward(7)
    parity.zero.clip_grad_value_(1.0)
    with recorded() as traffic:
        parity.zero.clip_grad_value_(1.0)
    assert traffic.verbs == ["all_reduce"]


@some_configs
@ranks(1, 2, 3, timeout=20)
def test_closure_failure_on_one_rank(ctx: RankContext, config: ZeroConfig) -> None:
    """The other ranks have run backward. After gradients are cleared, training continues with DDP's results."""
    parity = DdpParityRun(config)
    param = next(parity.model.parameters())

    def closure(when: str) -> None:
        if is_failing_rank(ctx) and when == "before":
            raise ValueError("on purpose")
        if is_failing_rank(ctx) and when == "halfway":
            param.register_hook(fail_backward)  # type: ignore[no-untyped-call]
        parity.sides[0].backward(7)
        if is_failing_rank(ctx):
            raise ValueError("on purpose")

    for when in ("before", "halfway", "after", "before"):
        parity.train(2)
        with pytest.raises(ValueError if is_failing_rank(ctx) else RankFailedError, match="on purpose"):
            parity.zero.step(partial(closure, when))
        parity.zero.zero_grad()
        param._backward_hooks = None
    parity.train(2)


def fail_backward(_: torch.Tensor) -> None:
    raise ValueError("on purpose")
