"""What an iteration sends, and what it keeps in memory."""

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
from tests.support.oracles import ZERO2, both_stages, mlp, regression, seeded
from zeroshard import FlatShards, ShardedOptimizer, ZeroConfig, shard
from zeroshard.engine import grad_reducer
from zeroshard.engine.grad_bucket import MAX_IDLE_BUFFERS, local_grad

MIB = 2**20


def make_wide_model(width: int = 512, layers: int = 4) -> nn.Sequential:
    """A little above a million elements."""
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def make_inputs(width: int, number: int) -> torch.Tensor:
    return torch.randn(2, width, generator=torch.Generator().manual_seed(100 * number + dist.get_rank()))


def measure_sent_bytes(train_step: Callable[[int], None], steps: int = 3) -> int:
    """What this rank sends in some iterations, after a first one."""
    train_step(0)
    dist.barrier()
    before = sent_bytes()
    for number in range(1, 1 + steps):
        train_step(number)
    dist.barrier()  # all of it has arrived and been acknowledged
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
    plain = seeded(make_wide_model, 0)
    ddp = DistributedDataParallel(plain)
    reference = measure_sent_bytes(make_train_step(ddp, torch.optim.SGD(plain.parameters(), lr=0.1), 512))
    for overlap in (False, True):
        model = seeded(make_wide_model, 0)
        config = ZeroConfig(partition=FlatShards(MIB), stage=stage, overlap_param_gather=overlap)
        optimizer = shard(model, torch.optim.SGD, lr=0.1, config=config)
        ours = measure_sent_bytes(make_train_step(model, optimizer, 512))
        # All ranks together: what one of them sends depends on the algorithms of gloo.
        total, allowed = sum(ctx.gather(ours)), 1.02 * sum(ctx.gather(reference))
        assert total <= allowed, f"{total / allowed * 1.02:.3f} of DDP's bytes"
        elements = sum(param.numel() for param in model.parameters())
        assert total >= 3 * 2 * (ctx.world_size - 1) * 4 * elements, "something was not measured"


def count_collectives_per_step(layers: int, config: ZeroConfig) -> tuple[Counter[str], ShardedOptimizer]:
    model = seeded(lambda: mlp(layers), 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grad_reducer, "WAIT_TIMEOUT_S", 30.0)
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
    expected: set[tuple[int, int]] = set()
    for layers in (2, 4, 40):
        calls, optimizer = count_collectives_per_step(layers, ZeroConfig(stage=config.stage))
        assert len(optimizer.layout.buckets) == 1
        expected.add((sum(calls.values()), len(optimizer.layout.buckets)))
    assert len(expected) == 1, "more parameters in a bucket cost no more calls"
    calls, optimizer = count_collectives_per_step(10, config)
    buckets, others = len(optimizer.layout.buckets), ctx.world_size - 1
    assert buckets >= 5
    assert calls["isend"] == calls["irecv"] == 2 * others * buckets
    assert calls["all_reduce"] == 2, "before and after the update, where ranks keep pace"
    assert set(calls) == {"isend", "irecv", "all_reduce"}


def live_tensor_bytes() -> int:
    """Memory of all tensors that Python knows."""
    gc.collect()
    found = [it for it in gc.get_objects() if type(it) in (torch.Tensor, nn.Parameter)]
    tensors = [it for it in found if it.layout == torch.strided]  # earlier tests may have left others behind
    storages = {it.untyped_storage().data_ptr(): it.untyped_storage().nbytes() for it in tensors}
    return sum(storages.values())


@ranks(1, 2, 4)
def test_zero2_grads_take_a_fraction_of_their_size(ctx: RankContext) -> None:
    bucket = 64 * 1024
    model = seeded(lambda: make_wide_model(128, 16), 0)
    full = sum(param.nbytes for param in model.parameters())
    optimizer = shard(model, torch.optim.SGD, lr=0.1, config=ZeroConfig(partition=FlatShards(bucket)))
    before = live_tensor_bytes()
    for _ in range(2):
        torch.autograd.backward(model(make_inputs(128, 0)).square().mean())
        assert all(local_grad(param) is None for param in model.parameters())
    optimizer.clip_grad_norm_(1e9)  # all gradients have arrived
    # Beside the shards: three idle buffers of a bucket and a bit.
    assert live_tensor_bytes() - before <= full / ctx.world_size + 4 * bucket
    shards = sum(grad.nbytes for grad in optimizer._engine.grads.grad_tensors())
    assert shards <= 1.001 * full / ctx.world_size + 64
    assert sum(ctx.gather(shards)) >= full


@ranks(2, 4)
def test_zero1_keeps_full_grads(ctx: RankContext) -> None:
    """So that the test above can fail."""
    model = seeded(lambda: make_wide_model(128, 16), 0)
    full = sum(param.nbytes for param in model.parameters())
    config = ZeroConfig(partition=FlatShards(64 * 1024), stage=1)
    optimizer = shard(model, torch.optim.SGD, lr=0.1, config=config)
    before = live_tensor_bytes()
    torch.autograd.backward(model(make_inputs(128, 0)).square().mean())
    assert live_tensor_bytes() - before >= full
    assert optimizer.world_size == ctx.world_size


@ranks(2, 3)
def test_memory_does_not_grow_from_step_to_step(ctx: RankContext) -> None:
    model = seeded(mlp, 0)
    optimizer = shard(model, torch.optim.AdamW, lr=0.1, config=ZERO2)
    sizes = []
    for number in range(30):
        torch.autograd.backward(regression(model, number))
        optimizer.step()
        optimizer.zero_grad()
        sizes.append(live_tensor_bytes())
    # How many idle buffers there are depends on how fast messages come.
    idle = MAX_IDLE_BUFFERS * max(bucket.numel * bucket.dtype.itemsize for bucket in optimizer.layout.buckets)
    # What was left by others may go meanwhile: a size is held against the least before it.
    assert all(size <= least + idle for size, least in zip(sizes[2:], accumulate(sizes[2:], min), strict=True)), sizes
