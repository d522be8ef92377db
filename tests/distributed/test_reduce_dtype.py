"""How gradients are sent and summed: `reduce_dtype` and `deterministic_reduce`."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn, optim

from tests.support import RankContext, ranks
from tests.support.monitoring import recorded
from tests.support.oracles import (
    TINY,
    ShardParityRun,
    assert_same,
    average,
    batch,
    gather_from_all_ranks,
    mlp,
    regression,
)
from zeroshard import ZeroConfig, shard

STAGES: tuple[Literal[1, 2], ...] = (2, 1)


def make_sharded(
    dtype: torch.dtype | None, stage: Literal[1, 2] = 2, *, deterministic: bool = False
) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = mlp()
    config = ZeroConfig(partition=TINY, reduce_dtype=dtype, deterministic_reduce=deterministic, stage=stage)
    return model, shard(model, optim.SGD, lr=1.0, foreach=True, config=config)


def average_grads_manually(model: nn.Module, step: int, dtype: torch.dtype | None) -> list[Tensor]:
    """Averages of all gradients: each rank's gradient is rounded to `dtype` first, sums are in float32."""
    plain = mlp()
    plain.load_state_dict(model.state_dict())
    torch.autograd.backward(regression(plain, step))
    averages = []
    for param in plain.parameters():
        assert param.grad is not None
        averages.append(average(gather_from_all_ranks(param.grad.to(dtype or param.dtype))))
    return averages


@ranks(2, 3, 4)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, None])
def test_reduce_dtype_rounds_contributions_but_not_sums(ctx: RankContext, dtype: torch.dtype | None) -> None:
    for stage in STAGES:
        model, zero = make_sharded(dtype, stage)
        for step in range(2):
            averages = average_grads_manually(model, step, dtype)
            expected = [param.detach().sub(update) for param, update in zip(model.parameters(), averages, strict=True)]
            torch.autograd.backward(regression(model, step))
            zero.step()
            zero.zero_grad()
            assert_same([param.detach() for param in model.parameters()], expected)


@ranks(1)
def test_single_rank_does_not_round(ctx: RankContext) -> None:
    model, zero = make_sharded(torch.bfloat16)
    averages = average_grads_manually(model, 0, None)
    expected = [param.detach().sub(update) for param, update in zip(model.parameters(), averages, strict=True)]
    torch.autograd.backward(regression(model, 0))
    zero.step()
    assert_same([param.detach() for param in model.parameters()], expected)


@ranks(2, 3, 4)
def test_bf16_reduce_halves_gradient_traffic(ctx: RankContext) -> None:
    sent = {}
    for dtype in (None, torch.bfloat16):
        model, zero = make_sharded(dtype)
        with recorded() as traffic:
            torch.autograd.backward(regression(model, 0))
            zero.step()
        sent[dtype] = sum(ctx.gather(sum(traffic.sizes("isend"))))
    grads = (ctx.world_size - 1) * sum(param.nbytes for param in model.parameters())
    params = (ctx.world_size - 1) * sum(bucket.numel * bucket.dtype.itemsize for bucket in zero.layout.buckets)
    assert sent == {None: grads + params, torch.bfloat16: grads / 2 + params}


@ranks(1, 2, 3, 4)
def test_deterministic_reduce_gives_the_same_values(ctx: RankContext) -> None:
    for dtype in (None, torch.bfloat16):
        results = []
        for deterministic in (False, True, True):
            model, zero = make_sharded(dtype, deterministic=deterministic)
            for step in range(3):
                torch.autograd.backward(regression(model, step))
                zero.step()
                zero.zero_grad()
            results.append(model.state_dict())
        assert_same(results[1], results[0])
        assert_same(results[2], results[0])


@ranks(2, 3)
def test_reduce_dtype_never_widens_or_converts_narrow_params(ctx: RankContext) -> None:
    """bfloat16 gradients are not sent as float16, and float64 gradients are sent in the configured dtype."""

    def bf16_loss(model: nn.Module, number: int) -> Tensor:
        output: Tensor = model(batch(number).bfloat16()).float().square().mean()
        return output

    def make_bf16_mlp() -> nn.Module:
        return mlp().bfloat16()

    for dtype in (torch.float32, torch.float16):
        config = ZeroConfig(partition=TINY, reduce_dtype=dtype)
        ShardParityRun(optim.AdamW, make=make_bf16_mlp, loss=bf16_loss, config=config).train(2)
    model = mlp().double()
    zero = shard(model, optim.SGD, lr=1.0, config=ZeroConfig(reduce_dtype=torch.float32))
    with recorded() as traffic:
        torch.autograd.backward(model(batch(0).double()).square().mean())
        zero.step()
    param_bytes_sent = (ctx.world_size - 1) * sum(param.nbytes for param in model.parameters())
    assert sum(ctx.gather(sum(traffic.sizes("isend")))) == 1.5 * param_bytes_sent  # gradients need half of that


@ranks(2, 3)
def test_accumulated_passes_sum_in_full_precision(ctx: RankContext) -> None:
    """Under ZeRO-2 every pass is reduced; the sum of the averages is kept in full precision."""
    model, zero = make_sharded(torch.bfloat16)
    totals = average_grads_manually(model, 0, torch.bfloat16)
    for total, second in zip(totals, average_grads_manually(model, 1, torch.bfloat16), strict=True):
        total.add_(second)
    expected = [param.detach().sub(total) for param, total in zip(model.parameters(), totals, strict=True)]
    for step in range(2):
        torch.autograd.backward(regression(model, step))
    zero.step()
    assert_same([param.detach() for param in model.parameters()], expected)
