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

LENGTH = 1000


def in_short_pieces() -> GlooTransport:
    """A way in which a slice takes many rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gloo, "CHUNK_ROW_BYTES", 128)
        patch.setattr(gloo, "MIN_CHUNK_BYTES", 128)
        return GlooTransport(Group(), Reduce())


def shards_for(ranks: int, length: int = LENGTH) -> list[Span]:
    """The last is shorter."""
    return [Span(rank * length, (rank + 1) * length - 7 * (rank == ranks - 1)) for rank in range(ranks)]


def flats_of(ranks: int, turn: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    numel = shards_for(ranks)[-1].stop
    seeds = [torch.Generator().manual_seed(10 * turn + rank) for rank in range(ranks)]
    return [torch.randn(numel, generator=seed).to(dtype) for seed in seeds]


def receivers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "zeroshard-receiver"]


@ranks(2, 3, 4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_many_pieces_make_the_same_sum(ctx: RankContext, dtype: torch.dtype) -> None:
    """Of several slices under way at once, each in more rows than are received at once."""
    made, shards = in_short_pieces(), shards_for(ctx.world_size)
    mine = shards[ctx.rank]
    turns = [flats_of(ctx.world_size, turn, dtype) for turn in range(3)]
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
def test_what_is_received_takes_little_memory(ctx: RankContext) -> None:
    made, shards = in_short_pieces(), shards_for(ctx.world_size)
    for turn in range(3):
        flat, into = flats_of(ctx.world_size, turn)[ctx.rank], torch.empty(shards[ctx.rank].length)
        made.reduce_scatter(flat, shards, into, 1.0).wait()
    rooms = made._reduce_thread._free_buffers
    assert 0 < len(rooms) <= gloo.MAX_ROWS_IN_FLIGHT
    assert all(room.nbytes <= 128 * (ctx.world_size - 1) for room in rooms)


@ranks(2)
def test_a_rank_that_lags_is_told_from_one_that_sent(ctx: RankContext) -> None:
    made, shards = GlooTransport(Group(), Reduce()), shards_for(2)
    flats, into = flats_of(2, 0), torch.empty(shards[ctx.rank].length)
    if ctx.rank == 1:
        dist.barrier()  # the other has sent, and waited in vain
    arriving = made.reduce_scatter(flats[ctx.rank], shards, into, 0.5)
    if ctx.rank == 0:
        assert not arriving.is_ready(0.05)
        dist.barrier()
    arriving.wait()
    assert_same(into, average(flats)[slice(*shards[ctx.rank])])


@ranks(2)
def test_the_thread_lives_as_long_as_there_is_something_to_receive(ctx: RankContext) -> None:
    made, shards = GlooTransport(Group(), Reduce()), shards_for(2)
    for turn in range(3):
        flat, into = flats_of(2, turn)[ctx.rank], torch.empty(shards[ctx.rank].length)
        if ctx.rank == 1:
            dist.barrier()
        arriving = made.reduce_scatter(flat, shards, into, 0.5)
        if ctx.rank == 0:
            assert len(receivers()) == 1
            dist.barrier()
        arriving.wait()
        for thread in receivers():
            thread.join(30)
        assert not receivers()


@ranks(2)
def test_a_failure_is_raised_by_every_wait(ctx: RankContext) -> None:
    """Also of those that had begun before, and of those that begin later; none waits for ever."""
    made, shards = in_short_pieces(), shards_for(2)
    flat, into = flats_of(2, 0)[ctx.rank], torch.empty(shards[ctx.rank].length)
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
def test_several_dtypes_under_way_at_once(ctx: RankContext, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    made, shards = in_short_pieces(), shards_for(2)
    mine = shards[ctx.rank]
    turns = [flats_of(2, turn, dtype) for turn, dtype in enumerate(dtypes * 2)]
    sums = [torch.empty(mine.length, dtype=flats[0].dtype) for flats in turns]
    arriving = [
        made.reduce_scatter(flats[ctx.rank], shards, into, 0.5) for flats, into in zip(turns, sums, strict=True)
    ]
    for flats, into, each in zip(turns, sums, arriving, strict=True):
        each.wait()
        assert_same(into, average(flats)[slice(*mine)].to(into.dtype))
