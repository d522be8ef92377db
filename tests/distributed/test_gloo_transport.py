"""Slices that travel in pieces, and the thread that receives them and adds them up."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support import RankContext, ranks
from tests.support.oracles import assert_same, average
from zeroshard._types import Span
from zeroshard.comm import gloo
from zeroshard.comm.gloo import GlooTransport
from zeroshard.comm.process_group import Group
from zeroshard.config import Reduce

SHARD_NUMEL = 1000


def make_small_chunk_transport() -> GlooTransport:
    """A way in which a slice takes many rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gloo, "CHUNK_ROW_BYTES", 128)
        patch.setattr(gloo, "MIN_CHUNK_BYTES", 128)
        return GlooTransport(Group(), Reduce())


def make_shards(world_size: int, numel: int = SHARD_NUMEL) -> list[Span]:
    """The last is shorter."""
    return [Span(rank * numel, (rank + 1) * numel - 7 * (rank == world_size - 1)) for rank in range(world_size)]


def make_flat_grads(world_size: int, step: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    numel = make_shards(world_size)[-1].stop
    seeds = [torch.Generator().manual_seed(10 * step + rank) for rank in range(world_size)]
    return [torch.randn(numel, generator=seed).to(dtype) for seed in seeds]


def list_reduce_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "zeroshard-receiver"]


@ranks(2, 3, 4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_chunked_reduces_in_flight_give_exact_averages(ctx: RankContext, dtype: torch.dtype) -> None:
    """Of several slices under way at once, each in more rows than are received at once."""
    made, shards = make_small_chunk_transport(), make_shards(ctx.world_size)
    mine = shards[ctx.rank]
    turns = [make_flat_grads(ctx.world_size, turn, dtype) for turn in range(3)]
    sums = [torch.empty(mine.length, dtype=dtype) for _ in turns]
    share = 1 / ctx.world_size
    arriving = [
        made.reduce_scatter(flats[ctx.rank], shards, into, share) for flats, into in zip(turns, sums, strict=True)
    ]
    for flats, into, each in zip(turns, sums, arriving, strict=True):
        each.wait()
        assert each.is_ready(0)
        assert_same(into, average(flats)[slice(*mine)].to(dtype))


@ranks(2, 4)
def test_receive_buffers_stay_small(ctx: RankContext) -> None:
    made, shards = make_small_chunk_transport(), make_shards(ctx.world_size)
    for turn in range(3):
        flat, into = make_flat_grads(ctx.world_size, turn)[ctx.rank], torch.empty(shards[ctx.rank].length)
        made.reduce_scatter(flat, shards, into, 1.0).wait()
    rooms = made._reduce_thread._free_buffers
    assert 0 < len(rooms) <= gloo.MAX_ROWS_IN_FLIGHT
    assert all(room.nbytes <= 128 * (ctx.world_size - 1) for room in rooms)


@ranks(2)
def test_reduce_is_not_ready_before_slow_rank_sends(ctx: RankContext) -> None:
    made, shards = GlooTransport(Group(), Reduce()), make_shards(2)
    flats, into = make_flat_grads(2, 0), torch.empty(shards[ctx.rank].length)
    if ctx.rank == 1:
        dist.barrier()  # the other has sent, and waited in vain
    arriving = made.reduce_scatter(flats[ctx.rank], shards, into, 0.5)
    if ctx.rank == 0:
        assert not arriving.is_ready(0.05)
        dist.barrier()
    arriving.wait()
    assert_same(into, average(flats)[slice(*shards[ctx.rank])])


@ranks(2)
def test_reduce_thread_ends_when_nothing_is_pending(ctx: RankContext) -> None:
    made, shards = GlooTransport(Group(), Reduce()), make_shards(2)
    for turn in range(3):
        flat, into = make_flat_grads(2, turn)[ctx.rank], torch.empty(shards[ctx.rank].length)
        if ctx.rank == 1:
            dist.barrier()
        arriving = made.reduce_scatter(flat, shards, into, 0.5)
        if ctx.rank == 0:
            assert len(list_reduce_threads()) == 1
            dist.barrier()
        arriving.wait()
        for thread in list_reduce_threads():
            thread.join(30)
        assert not list_reduce_threads()


@ranks(2)
def test_connection_failure_is_raised_by_every_wait(ctx: RankContext) -> None:
    """Also of those that had begun before, and of those that begin later; none waits for ever."""
    made, shards = make_small_chunk_transport(), make_shards(2)
    flat, into = make_flat_grads(2, 0)[ctx.rank], torch.empty(shards[ctx.rank].length)
    made.reduce_scatter(flat, shards, into, 0.5).wait()
    dist.barrier()
    if ctx.rank == 1:
        dist.destroy_process_group()
        return
    before = made.reduce_scatter(flat, shards, into, 0.5)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"(?i)connection|peer|closed|reset|broken"):
            before.wait()
    with pytest.raises(RuntimeError, match=r"(?i)connection|peer|closed|reset|broken"):
        made.reduce_scatter(flat, shards, into, 0.5).wait()


@ranks(2)
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.float64, torch.float32)])
def test_reduces_of_several_dtypes_in_flight(ctx: RankContext, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    made, shards = make_small_chunk_transport(), make_shards(2)
    mine = shards[ctx.rank]
    turns = [make_flat_grads(2, turn, dtype) for turn, dtype in enumerate(dtypes * 2)]
    sums = [torch.empty(mine.length, dtype=flats[0].dtype) for flats in turns]
    arriving = [
        made.reduce_scatter(flats[ctx.rank], shards, into, 0.5) for flats, into in zip(turns, sums, strict=True)
    ]
    for flats, into, each in zip(turns, sums, arriving, strict=True):
        each.wait()
        assert_same(into, average(flats)[slice(*mine)].to(into.dtype))
