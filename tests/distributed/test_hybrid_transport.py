"""How slices travel where several ranks own the same: what arrives, how it is added up, what crosses rows."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise, product
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support import RankContext, ranks
from tests.support.oracles import (
    ZERO1,
    ZERO2,
    Grid,
    ShardTwins,
    assert_replicas_are_equal,
    assert_same,
    average_by_rows,
    grids,
    rows_of,
    seeded,
    within,
)
from tests.support.tiers import sampled
from zeroshard import FlatShards, ShardedOptimizer, ZeroConfig, shard
from zeroshard._types import Span
from zeroshard.comm import transport_cache
from zeroshard.comm.collectives import Comm
from zeroshard.comm.gloo import GlooTransport
from zeroshard.comm.hybrid import GlooHybridTransport, NcclHybridTransport, split_evenly
from zeroshard.comm.mesh import make_comm
from zeroshard.comm.nccl import AllReduceTransport, NcclTransport
from zeroshard.comm.process_group import Group
from zeroshard.comm.transport import ShardTransport
from zeroshard.comm.transport_cache import select_transport
from zeroshard.config import Reduce

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def replicated_grids(ctx: RankContext) -> list[Grid]:
    """Those with more than one row."""
    return [grid for grid in grids(ctx.world_size) if grid[0] > 1]


def make_transports(comm: Comm) -> list[ShardTransport]:
    assert comm.replicas is not None
    plain, fixed = Reduce(), Reduce(fixed_order=True)
    return [
        GlooHybridTransport(GlooTransport(comm.group, plain), GlooTransport(comm.replicas, plain)),
        NcclHybridTransport(NcclTransport(comm.group, plain), comm.replicas),
        NcclHybridTransport(NcclTransport(comm.group, fixed), comm.replicas),
        AllReduceTransport(comm.group, plain, comm.data_parallel.group),
    ]


def make_contributions(ranks: int, numel: int, dtype: torch.dtype, iteration: int = 0) -> list[Tensor]:
    seeds = [torch.Generator().manual_seed(100 * iteration + rank) for rank in range(ranks)]
    return [torch.randn(numel, generator=seed).to(dtype) for seed in seeds]


def make_shards(group_size: int, length: int, *, equal: bool) -> list[Span]:
    cuts = [length * number for number in range(group_size + 1)]
    if not equal:
        cuts[-1] += 13
    return [Span(*it) for it in pairwise(cuts)]


@ranks(2, 3, 4)
def test_reduce_delivers_the_average_to_all_owners(ctx: RankContext) -> None:
    for grid in replicated_grids(ctx):
        for way, length, dtype in product(make_transports(make_comm(None, None, grid[1])), (1, 7, 64, 1000), DTYPES):
            shards = make_shards(grid[1], length, equal=way.needs_equal_shards)
            mine = shards[way.group.rank]
            flats = make_contributions(ctx.world_size, shards[-1].stop, dtype)
            given = flats[ctx.rank].clone()
            for into in (torch.full((mine.length,), 7.0, dtype=dtype), torch.full((mine.length,), 7.0)):
                if into.dtype == torch.float32 and dtype == torch.float64:
                    continue
                way.reduce_scatter(given, shards, into, 1 / way.num_ranks).wait()
                assert_same(given, flats[ctx.rank], "what was given")
                expected = average_by_rows(flats, grid)[slice(*mine)].to(into.dtype)
                if isinstance(way, GlooHybridTransport) or (
                    isinstance(way, NcclHybridTransport) and way.policy.fixed_order
                ):
                    assert_same(into, expected)  # these promise the order
                else:
                    torch.testing.assert_close(into, expected)
                column = [row[way.group.rank] for row in rows_of(grid)]
                found = ctx.gather(into)
                assert all(torch.equal(found[rank], into) for rank in column), "replicas differ"


@ranks(2, 4)
def test_several_reduces_in_flight(ctx: RankContext) -> None:
    """They may be finished later, and in any order."""
    for grid in replicated_grids(ctx):
        for way in make_transports(make_comm(None, None, grid[1])):
            shards = make_shards(grid[1], 100, equal=True)
            mine = shards[way.group.rank]
            turns = [make_contributions(ctx.world_size, shards[-1].stop, torch.float32, turn) for turn in range(6)]
            sums = [torch.empty(mine.length) for _ in turns]
            arriving = [
                way.reduce_scatter(flats[ctx.rank], shards, into, 1 / way.num_ranks)
                for flats, into in zip(turns, sums, strict=True)
            ]
            gathered = torch.full((shards[-1].stop,), float(way.group.rank))
            way.all_gather(gathered, shards).wait()
            assert_same(gathered, torch.arange(grid[1]).repeat_interleave(100).float())
            for flats, into, each in reversed(list(zip(turns, sums, arriving, strict=True))):
                each.wait()
                assert each.is_ready(0)
                torch.testing.assert_close(into, average_by_rows(flats, grid)[slice(*mine)])


@ranks(4)
def test_idle_worker_threads_exit(ctx: RankContext) -> None:
    comm = make_comm(None, None, 2)
    way = select_transport(comm, torch.device("cpu"), Reduce(), has_equal_shards=True)
    shards, others = make_shards(2, 50, equal=True), threading.enumerate()
    for _ in range(3):
        way.reduce_scatter(torch.ones(100), shards, torch.empty(50), 0.25).wait()
    for thread in threading.enumerate():
        if thread.name.startswith("zeroshard") and thread not in others:
            thread.join(20)
            assert not thread.is_alive(), thread.name


@ranks(2)
def test_lost_replica_raises(ctx: RankContext) -> None:
    """Not a wait for ever."""
    way = select_transport(make_comm(None, None, 1), torch.device("cpu"), Reduce(), has_equal_shards=True)
    shards, flat, into = [Span(0, 100000)], torch.ones(100000), torch.empty(100000)
    way.reduce_scatter(flat, shards, into, 0.5).wait()
    dist.barrier()
    if ctx.rank == 1:
        dist.destroy_process_group()
        return

    def several_times() -> None:
        for _ in range(3):  # the first message may still fit into a buffer of the system
            way.reduce_scatter(flat, shards, into, 0.5).wait()

    with pytest.raises(RuntimeError, match=r"(?i)connection|peer|closed|reset|broken"):
        several_times()


@ranks(2, 4)
def test_transport_selection(ctx: RankContext) -> None:
    for grid in replicated_grids(ctx):
        comm = make_comm(None, None, grid[1])
        cpu, cuda = torch.device("cpu"), torch.device("cuda")
        assert type(select_transport(comm, cpu, Reduce(), has_equal_shards=True)) is GlooHybridTransport
        whole = select_transport(comm, cuda, Reduce(), has_equal_shards=True)
        assert type(whole) is AllReduceTransport
        assert whole.num_ranks == ctx.world_size
        assert not whole.can_overlap_backward
        fakes = [Group(dist.new_group(backend="fake")) for _ in range(3)]
        fake = Comm(fakes[0], Comm(fakes[1]), fakes[2])
        assert type(select_transport(fake, cuda, Reduce(), has_equal_shards=True)) is NcclHybridTransport
        uneven = select_transport(fake, cuda, Reduce(), has_equal_shards=False)
        assert type(uneven) is NcclHybridTransport
        assert not uneven.needs_equal_shards


@sampled("way", [AllReduceTransport, NcclTransport])
@ranks(4, timeout=60)
def test_training_with_transports_of_other_backends(ctx: RankContext, way: type[ShardTransport]) -> None:
    """As with gloo and CUDA tensors, and as with NCCL. Rows of one rank are left to NCCL: gloo would mix up sums across
    them with words in the same group."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport_cache, "select_group_transport", lambda group, _, reduce, **__: way(group, reduce))
        for grid in [(2, 2)] if way is NcclTransport else replicated_grids(ctx):
            for config in (ZERO2, ZERO1, replace(ZERO2, deterministic_reduce=True)):
                twins = ShardTwins(config, where=within(grid))
                twins.train(3)
                twins.zero.clip_grad_norm_(1.0)
                assert_replicas_are_equal(grid, twins.model, twins.zero)


def test_split_evenly() -> None:
    for numel, parts in product((0, 1, 15, 16, 17, 100, 4097), range(1, 6)):
        spans = split_evenly(numel, parts)
        assert len(spans) == parts
        assert spans[0].start == 0
        assert spans[-1].stop == numel
        assert all(first.stop == second.start for first, second in pairwise(spans))
        assert all(span.length <= -(-numel // parts) + 15 for span in spans)


@contextmanager
def record_bytes_between_shard_groups(grid: Grid) -> Iterator[dict[str, int]]:
    """Bytes of messages from this rank to ranks of other rows, and of collectives with such ranks."""
    (mine,) = [row for row in rows_of(grid) if dist.get_rank() in row]
    sent = {"messages": 0, "collectives": 0}
    isend, all_reduce = dist.isend, dist.all_reduce

    def counted(tensor: Tensor, to: int, *args: Any) -> Any:
        sent["messages"] += tensor.nbytes if to not in mine else 0
        return isend(tensor, to, *args)

    def reduced(tensor: Tensor, *, group: Any = None, **kwargs: Any) -> Any:
        if not set(dist.get_process_group_ranks(group)) <= set(mine):
            sent["collectives"] += tensor.nbytes
        return all_reduce(tensor, group=group, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "isend", counted)
        patch.setattr(dist, "all_reduce", reduced)
        yield sent


def make_wide_model() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(128, 128) for _ in range(4)))


def measure_bytes_between_shard_groups(
    ctx: RankContext, grid: Grid, shard_group_args: dict[str, Any], config: ZeroConfig
) -> tuple[dict[str, int], ShardedOptimizer]:
    """What all ranks send from row to row in an iteration."""
    model = seeded(make_wide_model, 0)
    optimizer = shard(model, torch.optim.AdamW, config=config, **shard_group_args)
    for _ in range(2):
        with record_bytes_between_shard_groups(grid) as sent:
            inputs = torch.randn(2, 128, generator=torch.Generator().manual_seed(ctx.rank))
            torch.autograd.backward(model(inputs).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    totals = ctx.gather(sent)
    return {kind: sum(total[kind] for total in totals) for kind in sent}, optimizer


@sampled("stage", [2, 1], ids=["zero2", "zero1"])
@ranks(4)
def test_shard_groups_reduce_traffic_between_them(ctx: RankContext, stage: Literal[1, 2]) -> None:
    """In one group every slice of gradients has two senders in the other row, and every slice of parameters two
    receivers. In two rows only sums cross, there and back: half of that, and no parameters."""
    grid = (2, 2)
    for dtype in (None, torch.bfloat16):
        config = ZeroConfig(partition=FlatShards(2**16), stage=stage, reduce_dtype=dtype)
        ours, optimizer = measure_bytes_between_shard_groups(ctx, grid, within(grid), config)
        flat, one_group = measure_bytes_between_shard_groups(ctx, grid, {}, config)
        grads = sum(param.nbytes for param in optimizer._engine.params)
        params = sum(bucket.numel * bucket.dtype.itemsize for bucket in one_group.layout.buckets)
        assert ours["messages"] == 2 * grads  # sums travel in float32
        assert flat["messages"] == 2 * grads // (1 if dtype is None else 2) + 2 * params
        assert ours["messages"] <= (0.5 if dtype is None else 0.67) * flat["messages"]
        assert max(ours["collectives"], flat["collectives"]) < 2000  # words; a few more where a rank has to catch up


@ranks(4)
def test_one_shard_group_has_no_traffic_across(ctx: RankContext) -> None:
    """So that the test above can fail: rows are told from columns."""
    ours, _ = measure_bytes_between_shard_groups(ctx, (1, 4), within((1, 4)), ZeroConfig())
    assert ours["messages"] == 0
    along, _ = measure_bytes_between_shard_groups(ctx, (4, 1), within((1, 4)), ZeroConfig())
    assert along["messages"] > 0
