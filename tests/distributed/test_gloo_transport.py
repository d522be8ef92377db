"""Gloo reduce-scatter: shards sent in chunks, and the thread that receives and sums them."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support import RankContext, ranks
from tests.support.oracles import assert_same, average
from zeroshard.comm import gloo
from zeroshard.comm.gloo import GlooTransport
from zeroshard.comm.nccl import AllReduceTransport
from zeroshard.comm.process_group import Group
from zeroshard.comm.transport import ShardTransport
from zeroshard.config import ReducePolicy
from zeroshard.layout.layout import EqualShards

SHARD_NUMEL = 1000


def make_small_chunk_transport() -> GlooTransport:
    """A transport that sends each shard in many chunks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gloo, "CHUNK_ROW_BYTES", 128)
        patch.setattr(gloo, "MIN_CHUNK_BYTES", 128)
        return GlooTransport(Group(), ReducePolicy())


def make_shards(world_size: int, numel: int = SHARD_NUMEL) -> EqualShards:
    """Equal shards; the last is truncated by 7 elements."""
    return EqualShards(numel, world_size, world_size * numel - 7)


def make_flat_grads(world_size: int, step: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    numel = make_shards(world_size).stop
    seeds = [torch.Generator().manual_seed(10 * step + rank) for rank in range(world_size)]
    return [torch.randn(numel, generator=seed).to(dtype) for seed in seeds]


def list_reduce_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "zeroshard-receiver"]


@ranks(2, 3, 4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_chunked_reduces_in_flight_give_exact_averages(ctx: RankContext, dtype: torch.dtype) -> None:
    """Several shards are in flight, each in more chunks than are received at once."""
    transport, shards = make_small_chunk_transport(), make_shards(ctx.world_size)
    own_span = shards[ctx.rank]
    grads_by_step = [make_flat_grads(ctx.world_size, step, dtype) for step in range(3)]
    outputs = [torch.empty(own_span.length, dtype=dtype) for _ in grads_by_step]
    scale = 1 / ctx.world_size
    works = [
        transport.reduce_scatter(rank_grads[ctx.rank], shards, output, scale)
        for rank_grads, output in zip(grads_by_step, outputs, strict=True)
    ]
    for rank_grads, output, work in zip(grads_by_step, outputs, works, strict=True):
        work.wait()
        assert work.is_ready(0)
        assert_same(output, average(rank_grads)[slice(*own_span)].to(dtype))


@ranks(2, 4)
def test_receive_buffers_stay_small(ctx: RankContext) -> None:
    transport, shards = make_small_chunk_transport(), make_shards(ctx.world_size)
    for step in range(3):
        grads, output = make_flat_grads(ctx.world_size, step)[ctx.rank], torch.empty(shards[ctx.rank].length)
        transport.reduce_scatter(grads, shards, output, 1.0).wait()
    free_buffers = transport.cached_buffers()
    assert 0 < len(free_buffers) <= gloo.MAX_ROWS_IN_FLIGHT
    assert all(buffer.nbytes <= 128 * (ctx.world_size - 1) for buffer in free_buffers)


@ranks(2)
@pytest.mark.parametrize("transport_class", [GlooTransport, AllReduceTransport])
def test_reduce_is_not_ready_before_slow_rank_sends(ctx: RankContext, transport_class: type[ShardTransport]) -> None:
    """Backward must not block on a rank that has not sent yet."""
    group = Group(dist.new_group())  # the barriers below use another one
    transport, shards = transport_class(group, ReducePolicy()), make_shards(2)
    rank_grads, output = make_flat_grads(2, 0), torch.empty(shards[ctx.rank].length)
    if ctx.rank == 1:
        dist.barrier()  # the other rank has sent its data, and its wait has timed out
    work = transport.reduce_scatter(rank_grads[ctx.rank], shards, output, 0.5)
    if ctx.rank == 0:
        assert not work.is_ready(0.05)
        dist.barrier()
    work.wait()
    assert_same(output, average(rank_grads)[slice(*shards[ctx.rank])])


@ranks(2)
def test_reduce_thread_ends_when_nothing_is_pending(ctx: RankContext) -> None:
    transport, shards = GlooTransport(Group(), ReducePolicy()), make_shards(2)
    for step in range(3):
        grads, output = make_flat_grads(2, step)[ctx.rank], torch.empty(shards[ctx.rank].length)
        if ctx.rank == 1:
            dist.barrier()
        work = transport.reduce_scatter(grads, shards, output, 0.5)
        if ctx.rank == 0:
            assert len(list_reduce_threads()) == 1
            dist.barrier()
        work.wait()
        for thread in list_reduce_threads():
            thread.join(30)
        assert not list_reduce_threads()


@ranks(2)
def test_connection_failure_is_raised_by_every_wait(ctx: RankContext) -> None:
    """Reduces in flight and later ones raise; none waits forever."""
    transport, shards = make_small_chunk_transport(), make_shards(2)
    grads, output = make_flat_grads(2, 0)[ctx.rank], torch.empty(shards[ctx.rank].length)
    transport.reduce_scatter(grads, shards, output, 0.5).wait()
    if ctx.rank == 1:
        dist.barrier()
        dist.destroy_process_group()
        return
    in_flight = transport.reduce_scatter(grads, shards, output, 0.5)
    dist.barrier()  # rank 1 closes its connections only now
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"(?i)connection|peer|closed|reset|broken"):
            in_flight.wait()
    with pytest.raises(RuntimeError, match=r"(?i)connection|peer|closed|reset|broken"):
        transport.reduce_scatter(grads, shards, output, 0.5).wait()


@ranks(2)
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.float64, torch.float32)])
def test_reduces_of_several_dtypes_in_flight(ctx: RankContext, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    transport, shards = make_small_chunk_transport(), make_shards(2)
    own_span = shards[ctx.rank]
    grads_by_step = [make_flat_grads(2, step, dtype) for step, dtype in enumerate(dtypes * 2)]
    outputs = [torch.empty(own_span.length, dtype=rank_grads[0].dtype) for rank_grads in grads_by_step]
    works = [
        transport.reduce_scatter(rank_grads[ctx.rank], shards, output, 0.5)
        for rank_grads, output in zip(grads_by_step, outputs, strict=True)
    ]
    for rank_grads, output, work in zip(grads_by_step, outputs, works, strict=True):
        work.wait()
        assert_same(output, average(rank_grads)[slice(*own_span)].to(output.dtype))
