"""Every `ShardWay` keeps the same contract: averages to owners, shards to everyone, whatever the shards are."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise, product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support import RankContext, ranks
from tests.support.oracles import assert_same, average
from zeroshard._types import Span
from zeroshard.comm.gloo import GlooTransport
from zeroshard.comm.nccl import AllReduceTransport, NcclTransport, NcclUnevenTransport, select_group_transport
from zeroshard.comm.process_group import Group
from zeroshard.comm.transport import ShardTransport
from zeroshard.config import Reduce

TRANSPORTS = [GlooTransport, AllReduceTransport, NcclTransport, NcclUnevenTransport]
Boundaries = list[int]


def make_shards(boundaries: Boundaries) -> list[Span]:
    return [Span(start, stop) for start, stop in pairwise(boundaries)]


def make_boundaries(transport: type[ShardTransport], world_size: int) -> list[Boundaries]:
    """Where flat buffers are cut: into equal shards, and at random where the way allows it."""
    equal = [[length * rank for rank in range(world_size + 1)] for length in (1, 7, 64)]
    if transport.needs_equal_shards:
        return equal
    draw = random.Random(world_size)
    anywhere = [[0, *sorted(draw.choices(range(50), k=world_size - 1)), 50] for _ in range(4)]
    all_with_the_last = [0] * world_size + [9]
    all_with_the_first = [0] + [9] * world_size
    return [*equal, *anywhere, all_with_the_last, all_with_the_first, [0] * (world_size + 1)]


def make_contribution(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("way", TRANSPORTS)
def test_reduce_scatter_averages_to_owners(ctx: RankContext, way: type[ShardTransport]) -> None:
    made = way(Group(), Reduce())
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    for cuts, dtype in product(make_boundaries(way, ctx.world_size), dtypes):
        flats = [make_contribution(rank, cuts[-1], dtype) for rank in range(ctx.world_size)]
        given = flats[ctx.rank].clone()
        mine = make_shards(cuts)[ctx.rank]
        for into in (torch.full((mine.length,), 7.0, dtype=dtype), torch.full((mine.length,), 7.0)):
            made.reduce_scatter(given, make_shards(cuts), into, 1 / ctx.world_size).wait()
            if way is NcclUnevenTransport:  # gloo, which stands for NCCL here, makes sums in what it is given
                given = flats[ctx.rank].clone()
            assert_same(given, flats[ctx.rank], "what was given")
            expected = average(flats)[slice(*mine)].to(into.dtype)
            if way is GlooTransport:  # promises the order of ranks
                assert_same(into, expected)
            else:
                torch.testing.assert_close(into, expected)


@ranks(2, 3, 4)
def test_deterministic_reduce_adds_in_rank_order(ctx: RankContext) -> None:
    made = NcclTransport(Group(), Reduce(fixed_order=True))
    for cuts, dtype in product(make_boundaries(NcclTransport, ctx.world_size), (torch.float32, torch.bfloat16)):
        flats = [make_contribution(rank, cuts[-1], dtype) for rank in range(ctx.world_size)]
        mine = make_shards(cuts)[ctx.rank]
        into = torch.empty(mine.length, dtype=dtype)
        made.reduce_scatter(flats[ctx.rank], make_shards(cuts), into, 1 / ctx.world_size).wait()
        assert_same(into, average(flats)[slice(*mine)].to(dtype))


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("way", TRANSPORTS)
def test_all_gather_brings_shards_to_all_ranks(ctx: RankContext, way: type[ShardTransport]) -> None:
    made = way(Group(), Reduce())
    dtypes = (torch.float32, torch.bfloat16, torch.complex64)
    for cuts, dtype in product(make_boundaries(way, ctx.world_size), dtypes):
        flat = torch.full((cuts[-1],), float(ctx.rank), dtype=dtype)
        made.all_gather(flat, make_shards(cuts)).wait()
        owners = [rank for rank, shard in enumerate(make_shards(cuts)) for _ in range(shard.length)]
        assert_same(flat, torch.tensor(owners, dtype=torch.float32).to(dtype))


@ranks(2, 3, 4)
@pytest.mark.parametrize("way", TRANSPORTS)
def test_several_collectives_in_flight(ctx: RankContext, way: type[ShardTransport]) -> None:
    """They may be finished later, and in any order."""
    made = way(Group(), Reduce())
    cuts = [100 * rank for rank in range(ctx.world_size + 1)]
    shards, mine = make_shards(cuts), make_shards(cuts)[ctx.rank]
    flats = [
        [make_contribution(10 * turn + rank, cuts[-1], torch.float32) for rank in range(ctx.world_size)]
        for turn in range(4)
    ]
    sums = [torch.empty(mine.length) for _ in flats]
    every = zip(flats, sums, strict=True)
    arriving = [made.reduce_scatter(turn[ctx.rank].clone(), shards, into, 1 / ctx.world_size) for turn, into in every]
    gathered = [torch.full((cuts[-1],), float(ctx.rank)) for _ in range(3)]
    pending = [made.all_gather(flat, shards) for flat in gathered]
    for it in reversed(pending):
        it.wait()
    for turn, each, into in reversed(list(zip(flats, arriving, sums, strict=True))):
        each.wait()
        torch.testing.assert_close(into, average(turn)[slice(*mine)])
        assert each.is_ready(0)
    for flat in gathered:
        assert_same(flat, torch.arange(ctx.world_size).repeat_interleave(100).float())


def repeat(action: Callable[[], None]) -> None:
    """The first message may still fit into a buffer of the system."""
    for _ in range(3):
        action()


@ranks(2)
@pytest.mark.parametrize("way", TRANSPORTS)
def test_lost_peer_raises(ctx: RankContext, way: type[ShardTransport]) -> None:
    """Not a wait for ever."""
    made = way(Group(), Reduce())
    shards = make_shards([0, 50000, 100000])
    flat, into = torch.ones(100000), torch.empty(50000)
    made.reduce_scatter(flat, shards, into, 1 / ctx.world_size).wait()
    dist.barrier()
    if ctx.rank == 1:
        dist.destroy_process_group()
        return
    with pytest.raises(RuntimeError, match=r"(?i)connection|peer|closed|reset|broken"):
        repeat(lambda: made.reduce_scatter(flat, shards, into, 1 / ctx.world_size).wait())
    with pytest.raises(RuntimeError, match=r"(?i)connection|peer|closed|reset|broken"):
        repeat(lambda: made.all_gather(flat, shards).wait())


@ranks(1, 2)
def test_select_transport(ctx: RankContext) -> None:
    cpu = select_group_transport(Group(), torch.device("cpu"), Reduce(), has_equal_shards=True)
    assert type(cpu) is (GlooTransport if ctx.world_size > 1 else AllReduceTransport)
    assert (
        type(select_group_transport(Group(), torch.device("cuda"), Reduce(), has_equal_shards=True))
        is AllReduceTransport
    )
    if ctx.world_size > 1:
        fake = dist.new_group(backend="fake")
        for device in ("cpu", "cuda"):
            assert (
                type(select_group_transport(Group(fake), torch.device(device), Reduce(), has_equal_shards=True))
                is NcclTransport
            )
            assert (
                type(select_group_transport(Group(fake), torch.device(device), Reduce(), has_equal_shards=False))
                is NcclUnevenTransport
            )
        both = dist.new_group(backend="cpu:gloo,cuda:fake")
        assert (
            type(select_group_transport(Group(both), torch.device("cpu"), Reduce(), has_equal_shards=True))
            is GlooTransport
        )
        assert (
            type(select_group_transport(Group(both), torch.device("cuda"), Reduce(), has_equal_shards=True))
            is NcclTransport
        )
