"""Every `ShardTransport` averages to owners and gathers shards to all ranks, for any shards that it supports."""

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
from zeroshard._types import Rank, Span
from zeroshard.comm.gloo import GlooTransport
from zeroshard.comm.nccl import AllReduceTransport, NcclTransport, NcclUnevenTransport
from zeroshard.comm.process_group import Group
from zeroshard.comm.transport import ShardTransport
from zeroshard.comm.transport_cache import select_transport_class
from zeroshard.config import ReducePolicy
from zeroshard.layout.layout import ExplicitShards

TRANSPORTS = [GlooTransport, AllReduceTransport, NcclTransport, NcclUnevenTransport]
Boundaries = list[int]


def make_shards(boundaries: Boundaries) -> ExplicitShards:
    spans = {Rank(rank): Span(*ends) for rank, ends in enumerate(pairwise(boundaries))}
    return ExplicitShards(spans, len(spans))


def make_boundaries(transport_class: type[ShardTransport], world_size: int) -> list[Boundaries]:
    """Return boundaries of equal shards, and of uneven ones if the transport supports them."""
    equal = [[length * rank for rank in range(world_size + 1)] for length in (1, 7, 64)]
    if transport_class.needs_equal_shards:
        return equal
    rng = random.Random(world_size)
    uneven = [[0, *sorted(rng.choices(range(50), k=world_size - 1)), 50] for _ in range(4)]
    all_on_last_rank = [0] * world_size + [9]
    all_on_first_rank = [0] + [9] * world_size
    return [*equal, *uneven, all_on_last_rank, all_on_first_rank, [0] * (world_size + 1)]


def make_contribution(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("transport_class", TRANSPORTS)
def test_reduce_scatter_averages_to_owners(ctx: RankContext, transport_class: type[ShardTransport]) -> None:
    transport = transport_class(Group(), ReducePolicy())
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    for boundaries, dtype in product(make_boundaries(transport_class, ctx.world_size), dtypes):
        flats = [make_contribution(rank, boundaries[-1], dtype) for rank in range(ctx.world_size)]
        flat = flats[ctx.rank].clone()
        own_shard = make_shards(boundaries)[ctx.rank]
        for output in (torch.full((own_shard.length,), 7.0, dtype=dtype), torch.full((own_shard.length,), 7.0)):
            transport.reduce_scatter(flat, make_shards(boundaries), output, 1 / ctx.world_size).wait()
            if transport_class is NcclUnevenTransport:  # gloo, used here in place of NCCL, sums into its input
                flat = flats[ctx.rank].clone()
            assert_same(flat, flats[ctx.rank], "the input")
            expected = average(flats)[slice(*own_shard)].to(output.dtype)
            if transport_class is GlooTransport:  # it guarantees rank order
                assert_same(output, expected)
            else:
                torch.testing.assert_close(output, expected)


@ranks(2, 3, 4)
def test_deterministic_reduce_adds_in_rank_order(ctx: RankContext) -> None:
    transport = NcclTransport(Group(), ReducePolicy(fixed_order=True))
    for boundaries, dtype in product(make_boundaries(NcclTransport, ctx.world_size), (torch.float32, torch.bfloat16)):
        flats = [make_contribution(rank, boundaries[-1], dtype) for rank in range(ctx.world_size)]
        own_shard = make_shards(boundaries)[ctx.rank]
        output = torch.empty(own_shard.length, dtype=dtype)
        transport.reduce_scatter(flats[ctx.rank], make_shards(boundaries), output, 1 / ctx.world_size).wait()
        assert_same(output, average(flats)[slice(*own_shard)].to(dtype))


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("transport_class", TRANSPORTS)
def test_all_gather_brings_shards_to_all_ranks(ctx: RankContext, transport_class: type[ShardTransport]) -> None:
    transport = transport_class(Group(), ReducePolicy())
    dtypes = (torch.float32, torch.bfloat16, torch.complex64)
    for boundaries, dtype in product(make_boundaries(transport_class, ctx.world_size), dtypes):
        flat = torch.full((boundaries[-1],), float(ctx.rank), dtype=dtype)
        transport.all_gather(flat, make_shards(boundaries)).wait()
        owners = [rank for rank, shard in enumerate(make_shards(boundaries)) for _ in range(shard.length)]
        assert_same(flat, torch.tensor(owners, dtype=torch.float32).to(dtype))


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("transport_class", TRANSPORTS)
def test_broadcasts_of_several_owners_may_be_in_flight(ctx: RankContext, transport_class: type[ShardTransport]) -> None:
    transport = transport_class(Group(), ReducePolicy())
    owners = [Rank(number % ctx.world_size) for number in range(3 * ctx.world_size)]
    flats = [torch.full((50 + number,), float(ctx.rank), dtype=torch.float64) for number in range(len(owners))]
    works = [transport.broadcast(flat, owner) for flat, owner in zip(flats, owners, strict=True)]
    for work in reversed(works):
        work.wait()
    for flat, owner in zip(flats, owners, strict=True):
        assert_same(flat, torch.full_like(flat, float(owner)))


@ranks(2, 3, 4)
@pytest.mark.parametrize("transport_class", TRANSPORTS)
def test_several_collectives_in_flight(ctx: RankContext, transport_class: type[ShardTransport]) -> None:
    """Work can be waited for later and in any order."""
    transport = transport_class(Group(), ReducePolicy())
    boundaries = [100 * rank for rank in range(ctx.world_size + 1)]
    shards, own_shard = make_shards(boundaries), make_shards(boundaries)[ctx.rank]
    flats = [
        [make_contribution(10 * number + rank, boundaries[-1], torch.float32) for rank in range(ctx.world_size)]
        for number in range(4)
    ]
    outputs = [torch.empty(own_shard.length) for _ in flats]
    pairs = zip(flats, outputs, strict=True)
    reduces = [
        transport.reduce_scatter(inputs[ctx.rank].clone(), shards, output, 1 / ctx.world_size)
        for inputs, output in pairs
    ]
    gathered = [torch.full((boundaries[-1],), float(ctx.rank)) for _ in range(3)]
    gathers = [transport.all_gather(flat, shards) for flat in gathered]
    for gather in reversed(gathers):
        gather.wait()
    for inputs, reduce, output in reversed(list(zip(flats, reduces, outputs, strict=True))):
        reduce.wait()
        torch.testing.assert_close(output, average(inputs)[slice(*own_shard)])
        assert reduce.is_ready(0)
    for flat in gathered:
        assert_same(flat, torch.arange(ctx.world_size).repeat_interleave(100).float())


def repeat(action: Callable[[], None]) -> None:
    """Run the action three times: the first message may still fit into a system buffer."""
    for _ in range(3):
        action()


@ranks(2)
@pytest.mark.parametrize("transport_class", TRANSPORTS)
def test_lost_peer_raises(ctx: RankContext, transport_class: type[ShardTransport]) -> None:
    """A lost peer must not cause a hang."""
    transport = transport_class(Group(), ReducePolicy())
    shards = make_shards([0, 50000, 100000])
    flat, output = torch.ones(100000), torch.empty(50000)
    transport.reduce_scatter(flat, shards, output, 1 / ctx.world_size).wait()
    dist.barrier()
    if ctx.rank == 1:
        dist.destroy_process_group()
        return
    with pytest.raises(RuntimeError, match=r"(?i)connection|peer|closed|reset|broken"):
        repeat(lambda: transport.reduce_scatter(flat, shards, output, 1 / ctx.world_size).wait())
    with pytest.raises(RuntimeError, match=r"(?i)connection|peer|closed|reset|broken"):
        repeat(lambda: transport.all_gather(flat, shards).wait())


@ranks(1, 2)
def test_select_transport(ctx: RankContext) -> None:
    cpu = select_transport_class(Group(), torch.device("cpu"), has_equal_shards=True)
    assert cpu is (GlooTransport if ctx.world_size > 1 else AllReduceTransport)
    assert select_transport_class(Group(), torch.device("cuda"), has_equal_shards=True) is AllReduceTransport
    if ctx.world_size > 1:
        fake = dist.new_group(backend="fake")
        for device in ("cpu", "cuda"):
            assert select_transport_class(Group(fake), torch.device(device), has_equal_shards=True) is NcclTransport
            assert (
                select_transport_class(Group(fake), torch.device(device), has_equal_shards=False) is NcclUnevenTransport
            )
        mixed = dist.new_group(backend="cpu:gloo,cuda:fake")
        assert select_transport_class(Group(mixed), torch.device("cpu"), has_equal_shards=True) is GlooTransport
        assert select_transport_class(Group(mixed), torch.device("cuda"), has_equal_shards=True) is NcclTransport
