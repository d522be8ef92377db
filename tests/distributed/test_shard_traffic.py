"""Communication volume and memory of an iteration."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from itertools import accumulate
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from benchmarks.harness.resources import sent_bytes
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.support import RankContext, ranks
from tests.support.monitoring import recorded
from tests.support.oracles import ZERO2, both_stages, make_seeded, mlp, regression
from zeroshard import FlatShards, ShardedOptimizer, ZeroConfig, shard
from zeroshard.engine import grad_reducer
from zeroshard.engine.grad_bucket import MAX_IDLE_BUFFERS
from zeroshard.engine.grad_stage import local_grad

MIB = 2**20


def make_wide_model(width: int = 512, layers: int = 4) -> nn.Sequential:
    """Return a model of slightly more than a million elements by default."""
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def make_inputs(width: int, number: int) -> torch.Tensor:
    return torch.randn(2, width, generator=torch.Generator().manual_seed(100 * number + dist.get_rank()))


def measure_sent_bytes(train_step: Callable[[int], None], steps: int = 3) -> int:
    """Return the bytes that this rank sends in several iterations after a warm-up."""
    train_step(0)
    dist.barrier()
    before = sent_bytes()
    for number in range(1, 1 + steps):
        train_step(number)
    dist.barrier()  # all messages have arrived and been acknowledged
    return sent_bytes() - before


def make_train_step(model: nn.Module, optimizer: torch.optim.Optimizer, width: int) -> Callable[[int], None]:
    def iterate(number: int) -> None:
        torch.autograd.backward(model(make_inputs(width, number)).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    return iterate


@pytest.mark.parametrize("stage", [2, 1], ids=["zero2", "zero1"])
@ranks(2, 4)
def test_traffic_is_at_most_that_of_ddp(ctx: RankContext, stage: Literal[1, 2]) -> None:
    plain = make_seeded(make_wide_model, 0)
    ddp = DistributedDataParallel(plain)
    reference = measure_sent_bytes(make_train_step(ddp, torch.optim.SGD(plain.parameters(), lr=0.1), 512))
    for overlap in (False, True):
        model = make_seeded(make_wide_model, 0)
        config = ZeroConfig(partition=FlatShards(MIB), stage=stage, overlap_param_gather=overlap)
        optimizer = shard(model, torch.optim.SGD, lr=0.1, config=config)
        ours = measure_sent_bytes(make_train_step(model, optimizer, 512))
        # The sum over ranks: the share of one rank depends on gloo's algorithms.
        total, allowed = sum(ctx.gather(ours)), 1.02 * sum(ctx.gather(reference))
        assert total <= allowed, f"sent {total / allowed * 1.02:.3f} times DDP's bytes"
        numel = sum(param.numel() for param in model.parameters())
        assert total >= 3 * 2 * (ctx.world_size - 1) * 4 * numel, "not all messages were measured"


def count_collectives_per_step(layers: int, config: ZeroConfig) -> tuple[Counter[str], ShardedOptimizer]:
    model = make_seeded(lambda: mlp(layers), 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grad_reducer, "WAIT_BUDGET_S", 30.0)
        optimizer = shard(model, torch.optim.AdamW, lr=0.1, config=config)
        for number in range(2):
            with recorded() as traffic:
                torch.autograd.backward(regression(model, number))
                optimizer.step()
                optimizer.zero_grad()
                optimizer.wait_for_params()
    return Counter(traffic.verbs), optimizer


@both_stages
@ranks(2, 3)
def test_collectives_scale_with_buckets_not_params(ctx: RankContext, config: ZeroConfig) -> None:
    counts: set[tuple[int, int]] = set()
    for layers in (2, 4, 40):
        calls, optimizer = count_collectives_per_step(layers, ZeroConfig(stage=config.stage))
        assert len(optimizer.layout.buckets) == 1
        counts.add((sum(calls.values()), len(optimizer.layout.buckets)))
    assert len(counts) == 1, "more parameters in a bucket need more calls"
    calls, optimizer = count_collectives_per_step(10, config)
    num_buckets, num_peers = len(optimizer.layout.buckets), ctx.world_size - 1
    assert num_buckets >= 5
    assert calls["isend"] == calls["irecv"] == 2 * num_peers * num_buckets
    assert calls["all_reduce"] == 2, "expected one before and one after the update if ranks keep pace"
    assert set(calls) == {"isend", "irecv", "all_reduce"}


def live_tensor_bytes() -> int:
    """Return the storage bytes of all tensors that the garbage collector tracks."""
    gc.collect()
    found = [obj for obj in gc.get_objects() if type(obj) in (torch.Tensor, nn.Parameter)]
    tensors = [tensor for tensor in found if tensor.layout == torch.strided]  # earlier tests may leave other layouts
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


@ranks(1, 2, 4)
def test_zero2_grads_take_a_fraction_of_their_size(ctx: RankContext) -> None:
    bucket_bytes = 64 * 1024
    model = make_seeded(lambda: make_wide_model(128, 16), 0)
    full_bytes = sum(param.nbytes for param in model.parameters())
    optimizer = shard(model, torch.optim.SGD, lr=0.1, config=ZeroConfig(partition=FlatShards(bucket_bytes)))
    before = live_tensor_bytes()
    for _ in range(2):
        torch.autograd.backward(model(make_inputs(128, 0)).square().mean())
        assert all(local_grad(param) is None for param in model.parameters())
    optimizer.clip_grad_norm_(1e9)  # all gradients are reduced
    # Besides the shards: three idle bucket buffers and a little more.
    assert live_tensor_bytes() - before <= full_bytes / ctx.world_size + 4 * bucket_bytes
    shard_bytes = sum(grad.nbytes for grad in optimizer._engine.grads.grad_tensors())
    assert shard_bytes <= 1.001 * full_bytes / ctx.world_size + 64
    assert sum(ctx.gather(shard_bytes)) >= full_bytes


@ranks(2, 4)
def test_zero1_keeps_full_grads(ctx: RankContext) -> None:
    """Shows that the test above can fail."""
    model = make_seeded(lambda: make_wide_model(128, 16), 0)
    full_bytes = sum(param.nbytes for param in model.parameters())
    config = ZeroConfig(partition=FlatShards(64 * 1024), stage=1)
    optimizer = shard(model, torch.optim.SGD, lr=0.1, config=config)
    before = live_tensor_bytes()
    torch.autograd.backward(model(make_inputs(128, 0)).square().mean())
    assert live_tensor_bytes() - before >= full_bytes
    assert optimizer.world_size == ctx.world_size


@ranks(2, 3)
def test_memory_does_not_grow_from_step_to_step(ctx: RankContext) -> None:
    model = make_seeded(mlp, 0)
    optimizer = shard(model, torch.optim.AdamW, lr=0.1, config=ZERO2)
    sizes = []
    for number in range(30):
        torch.autograd.backward(regression(model, number))
        optimizer.step()
        optimizer.zero_grad()
        sizes.append(live_tensor_bytes())
    # The number of idle buffers depends on how fast messages arrive.
    idle = MAX_IDLE_BUFFERS * max(bucket.numel * bucket.dtype.itemsize for bucket in optimizer.layout.buckets)
    # Tensors left by earlier tests may be freed during the run: compare each size with the minimum so far.
    assert all(size <= least + idle for size, least in zip(sizes[2:], accumulate(sizes[2:], min), strict=True)), sizes
