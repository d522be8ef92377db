"""Hybrid sharding on a GPU: gloo with CUDA tensors for several ranks, NCCL with one. Skipped without a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.support import RankContext, ranks
from tests.support.oracles import (
    ZERO1,
    ZERO2,
    assert_replicas_are_equal,
    batch,
    grids,
    group_size_options,
    make_seeded,
    mlp,
)
from zeroshard import shard
from zeroshard.comm.hybrid import NcclHybridTransport
from zeroshard.comm.nccl import NcclTransport
from zeroshard.comm.process_group import Group
from zeroshard.config import ReducePolicy
from zeroshard.layout.layout import EqualShards

pytestmark = pytest.mark.gpu


def make_cuda_mlp() -> nn.Module:
    return mlp().cuda()


@ranks(2, 4)
def test_training_over_gloo(ctx: RankContext) -> None:
    for grid in grids(ctx.world_size):
        for config in (ZERO2, ZERO1):
            model, plain = make_seeded(make_cuda_mlp, 0), make_seeded(make_cuda_mlp, 0)
            ddp = DistributedDataParallel(plain)
            reference = torch.optim.AdamW(plain.parameters(), lr=0.05, fused=True)  # the default of `shard` on GPUs
            optimizer = shard(model, torch.optim.AdamW, lr=0.05, config=config, **group_size_options(grid))
            for number in range(3):
                for net, net_optimizer in ((model, optimizer), (ddp, reference)):
                    torch.autograd.backward(net(batch(number).cuda()).square().mean())
                    net_optimizer.step()
                    net_optimizer.zero_grad()
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)  # sums in another order
            assert_replicas_are_equal(grid, model, optimizer)


@ranks(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fixed_order", [False, True])
def test_nccl_two_stage_reduce_is_stream_ordered(ctx: RankContext, dtype: torch.dtype, fixed_order: bool) -> None:
    """One rank has nothing to add, but streams must wait for each other, and the host must not wait for them."""
    torch.cuda.set_device(0)
    shard_group, replicate_group = (Group(dist.new_group([0], backend="nccl")) for _ in range(2))
    transport = NcclHybridTransport(NcclTransport(shard_group, ReducePolicy(fixed_order=fixed_order)), replicate_group)
    numel = 1 << 20
    for output_dtype in (dtype, torch.float32):
        grads, outputs, works = [], [], []
        for index in range(4):
            slow_matrix = torch.randn(4096, 4096, device="cuda")
            grad = torch.full((numel,), float(index + 1), dtype=dtype, device="cuda")
            grad.add_((slow_matrix @ slow_matrix).isnan().any())  # finishes late, and adds zero
            outputs.append(torch.full((numel,), 9.0, dtype=output_dtype, device="cuda"))
            grads.append(grad)
            works.append(transport.reduce_scatter(grad, EqualShards(numel, 1, numel), outputs[-1], 0.5))
        for index, work in enumerate(works):
            work.wait()
            assert torch.equal(outputs[index], torch.full_like(outputs[index], (index + 1) / 2))
            assert torch.equal(grads[index], torch.full_like(grads[index], float(index + 1)))
