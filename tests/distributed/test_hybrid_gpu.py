"""Rows of ranks on a GPU: gloo with CUDA tensors for several, NCCL with one. Skipped where there is none."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.support import RankContext, ranks
from tests.support.oracles import ZERO1, ZERO2, assert_replicas_are_equal, batch, grids, mlp, seeded, within
from zeroshard import shard
from zeroshard._types import Span
from zeroshard.comm.hybrid import NcclHybridTransport
from zeroshard.comm.nccl import NcclTransport
from zeroshard.comm.process_group import Group
from zeroshard.config import Reduce

pytestmark = pytest.mark.gpu


def make_cuda_mlp() -> nn.Module:
    return mlp().cuda()


@ranks(2, 4)
def test_training_over_gloo(ctx: RankContext) -> None:
    for grid in grids(ctx.world_size):
        for config in (ZERO2, ZERO1):
            model, plain = seeded(make_cuda_mlp, 0), seeded(make_cuda_mlp, 0)
            ddp = DistributedDataParallel(plain)
            reference = torch.optim.AdamW(plain.parameters(), lr=0.05, fused=True)  # as `shard` takes it on GPUs
            optimizer = shard(model, torch.optim.AdamW, lr=0.05, config=config, **within(grid))
            for number in range(3):
                for net, it in ((model, optimizer), (ddp, reference)):
                    torch.autograd.backward(net(batch(number).cuda()).square().mean())
                    it.step()
                    it.zero_grad()
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)  # other orders of sums
            assert_replicas_are_equal(grid, model, optimizer)


@ranks(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fixed_order", [False, True])
def test_nccl_two_stage_reduce_is_stream_ordered(ctx: RankContext, dtype: torch.dtype, fixed_order: bool) -> None:
    """With one rank there is nothing to add, but streams have to wait for each other, and no host for them."""
    torch.cuda.set_device(0)
    inside, across = (Group(dist.new_group([0], backend="nccl")) for _ in range(2))
    way = NcclHybridTransport(NcclTransport(inside, Reduce(fixed_order=fixed_order)), across)
    numel = 1 << 20
    for into_dtype in (dtype, torch.float32):
        flats, sums, arriving = [], [], []
        for turn in range(4):
            slow = torch.randn(4096, 4096, device="cuda")
            flat = torch.full((numel,), float(turn + 1), dtype=dtype, device="cuda")
            flat.add_((slow @ slow).isnan().any())  # which is late, and adds nothing
            sums.append(torch.full((numel,), 9.0, dtype=into_dtype, device="cuda"))
            flats.append(flat)
            arriving.append(way.reduce_scatter(flat, [Span(0, numel)], sums[-1], 0.5))
        for turn, each in enumerate(arriving):
            each.wait()
            assert torch.equal(sums[turn], torch.full_like(sums[turn], (turn + 1) / 2))
            assert torch.equal(flats[turn], torch.full_like(flats[turn], float(turn + 1)))
