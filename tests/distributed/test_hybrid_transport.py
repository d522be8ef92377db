"""Hybrid transports: results of reduces, their summation order, and traffic between shard groups."""

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
    DdpParityRun,
    Grid,
    assert_replicas_are_equal,
    assert_same,
    average_by_shard_group,
    grids,
    group_size_options,
    make_seeded,
    shard_groups_of,
)
from tests.support.tiers import sampled
from zeroshard import FlatShards, ShardedOptimizer, ZeroConfig, shard
from zeroshard._types import Rank, Span
from zeroshard.comm import transport_cache
from zeroshard.comm.collectives import Comm
from zeroshard.comm.gloo import GlooTransport
from zeroshard.comm.hybrid import GlooHybridTransport, NcclHybridTransport, split_evenly
from zeroshard.comm.mesh import make_comm
from zeroshard.comm.nccl import AllReduceTransport, NcclTransport
from zeroshard.comm.process_group import Group
from zeroshard.comm.transport import ShardTransport
from zeroshard.comm.transport_cache import select_transport
from zeroshard.config import ReducePolicy
from zeroshard.layout.layout import EqualShards, ExplicitShards

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def replicated_grids(ctx: RankContext) -> list[Grid]:
    """Grids with more than one shard group."""
    return [grid for grid in grids(ctx.world_size) if grid[0] > 1]


def make_transports(comm: Comm) -> list[ShardTransport]:
    assert comm.replicas is not None
    plain, fixed = ReducePolicy(), ReducePolicy(fixed_order=True)
    return [
        GlooHybridTransport(GlooTransport(comm.group, plain), GlooTransport(comm.replicas, plain)),
        NcclHybridTransport(NcclTransport(comm.group, plain), comm.replicas),
        NcclHybridTransport(NcclTransport(comm.group, fixed), comm.replicas),
        AllReduceTransport(comm.group, plain, comm.data_parallel.group),
    ]


def make_contributions(ranks: int, numel: int, dtype: torch.dtype, iteration: int = 0) -> list[Tensor]:
    seeds = [torch.Generator().manual_seed(100 * iteration + rank) for rank in range(ranks)]
    return [torch.randn(numel, generator=seed).to(dtype) for seed in seeds]


def make_shards(group_size: int, length: int, *, equal: bool) -> ExplicitShards:
    cuts = [length * number for number in range(group_size + 1)]
    if not equal:
        cuts[-1] += 13
    return ExplicitShards({Rank(rank): Span(*ends) for rank, ends in enumerate(pairwise(cuts))}, group_size)


@ranks(2, 3, 4)
def test_reduce_delivers_the_average_to_all_owners(ctx: RankContext) -> None:
    for grid in replicated_grids(ctx):
        for transport, length, dtype in product(
            make_transports(make_comm(None, None, grid[1])), (1, 7, 64, 1000), DTYPES
        ):
            shards = make_shards(grid[1], length, equal=transport.needs_equal_shards)
            own_span = shards[transport.group.rank]
            contributions = make_contributions(ctx.world_size, shards[grid[1] - 1].stop, dtype)
            grads = contributions[ctx.rank].clone()
            for output in (torch.full((own_span.length,), 7.0, dtype=dtype), torch.full((own_span.length,), 7.0)):
                if output.dtype == torch.float32 and dtype == torch.float64:
                    continue
                transport.reduce_scatter(grads, shards, output, 1 / transport.num_ranks).wait()
                assert_same(grads, contributions[ctx.rank], "the input")
                expected = average_by_shard_group(contributions, grid)[slice(*own_span)].to(output.dtype)
                if isinstance(transport, GlooHybridTransport) or (
                    isinstance(transport, NcclHybridTransport) and transport.policy.fixed_order
                ):
                    assert_same(output, expected)  # these guarantee the summation order
                else:
                    torch.testing.assert_close(output, expected)
                replica_ranks = [shard_group[transport.group.rank] for shard_group in shard_groups_of(grid)]
                gathered = ctx.gather(output)
                assert all(torch.equal(gathered[rank], output) for rank in replica_ranks), "replicas differ"


@ranks(2, 4)
def test_several_reduces_in_flight(ctx: RankContext) -> None:
    """Reduces may finish later, and in any order."""
    for grid in replicated_grids(ctx):
        for transport in make_transports(make_comm(None, None, grid[1])):
            shards = make_shards(grid[1], 100, equal=True)
            own_span = shards[transport.group.rank]
            contributions_by_step = [
                make_contributions(ctx.world_size, shards[grid[1] - 1].stop, torch.float32, step) for step in range(6)
            ]
            outputs = [torch.empty(own_span.length) for _ in contributions_by_step]
            works = [
                transport.reduce_scatter(contributions[ctx.rank], shards, output, 1 / transport.num_ranks)
                for contributions, output in zip(contributions_by_step, outputs, strict=True)
            ]
            gathered = torch.full((shards[grid[1] - 1].stop,), float(transport.group.rank))
            transport.all_gather(gathered, shards).wait()
            assert_same(gathered, torch.arange(grid[1]).repeat_interleave(100).float())
            for contributions, output, work in reversed(list(zip(contributions_by_step, outputs, works, strict=True))):
                work.wait()
                assert work.is_ready(0)
                torch.testing.assert_close(output, average_by_shard_group(contributions, grid)[slice(*own_span)])


@ranks(4)
def test_idle_worker_threads_exit(ctx: RankContext) -> None:
    comm = make_comm(None, None, 2)
    transport = select_transport(comm, torch.device("cpu"), ReducePolicy(), has_equal_shards=True)
    shards, earlier_threads = make_shards(2, 50, equal=True), threading.enumerate()
    for _ in range(3):
        transport.reduce_scatter(torch.ones(100), shards, torch.empty(50), 0.25).wait()
    for thread in threading.enumerate():
        if thread.name.startswith("zeroshard") and thread not in earlier_threads:
            thread.join(20)
            assert not thread.is_alive(), thread.name


@ranks(2)
def test_lost_replica_raises(ctx: RankContext) -> None:
    """The next reduces raise instead of waiting forever."""
    transport = select_transport(make_comm(None, None, 1), torch.device("cpu"), ReducePolicy(), has_equal_shards=True)
    shards, grads, output = EqualShards(100000, 1, 100000), torch.ones(100000), torch.empty(100000)
    transport.reduce_scatter(grads, shards, output, 0.5).wait()
    dist.barrier()
    if ctx.rank == 1:
        dist.destroy_process_group()
        return

    def reduce_several_times() -> None:
        for _ in range(3):  # the first message may still fit into a system buffer
            transport.reduce_scatter(grads, shards, output, 0.5).wait()

    with pytest.raises(RuntimeError, match=r"(?i)connection|peer|closed|reset|broken"):
        reduce_several_times()


@ranks(2, 4)
def test_transport_selection(ctx: RankContext) -> None:
    for grid in replicated_grids(ctx):
        comm = make_comm(None, None, grid[1])
        cpu, cuda = torch.device("cpu"), torch.device("cuda")
        assert type(select_transport(comm, cpu, ReducePolicy(), has_equal_shards=True)) is GlooHybridTransport
        all_reduce = select_transport(comm, cuda, ReducePolicy(), has_equal_shards=True)
        assert type(all_reduce) is AllReduceTransport
        assert all_reduce.num_ranks == ctx.world_size
        assert not all_reduce.can_overlap_backward
        fake_groups = [Group(dist.new_group(backend="fake")) for _ in range(3)]
        fake_comm = Comm(fake_groups[0], Comm(fake_groups[1]), fake_groups[2])
        assert type(select_transport(fake_comm, cuda, ReducePolicy(), has_equal_shards=True)) is NcclHybridTransport
        uneven = select_transport(fake_comm, cuda, ReducePolicy(), has_equal_shards=False)
        assert type(uneven) is NcclHybridTransport
        assert not uneven.needs_equal_shards


@sampled("transport_class", [AllReduceTransport, NcclTransport])
@ranks(4, timeout=60)
def test_training_with_transports_of_other_backends(ctx: RankContext, transport_class: type[ShardTransport]) -> None:
    """Transports as for gloo with CUDA tensors, and as for NCCL. Shard groups of one rank are not tested with
    `NcclTransport`: on gloo its sums across shard groups would mix with control messages in the same process group."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport_cache, "select_transport_class", lambda *_, **__: transport_class)
        for grid in [(2, 2)] if transport_class is NcclTransport else replicated_grids(ctx):
            for config in (ZERO2, ZERO1, replace(ZERO2, deterministic_reduce=True)):
                parity = DdpParityRun(config, group_options=group_size_options(grid))
                parity.train(3)
                parity.zero.clip_grad_norm_(1.0)
                assert_replicas_are_equal(grid, parity.model, parity.zero)


def test_split_evenly() -> None:
    for numel, num_parts in product((0, 1, 15, 16, 17, 100, 4097), range(1, 6)):
        spans = split_evenly(numel, num_parts)
        assert len(spans) == num_parts
        assert spans[0].start == 0
        assert spans[num_parts - 1].stop == numel
        assert all(first.stop == second.start for first, second in pairwise(spans))
        assert all(span.length <= -(-numel // num_parts) + 15 for span in spans)


@contextmanager
def record_bytes_between_shard_groups(grid: Grid) -> Iterator[dict[str, int]]:
    """Bytes of messages from this rank to ranks of other shard groups, and of collectives with such ranks."""
    (own_group,) = [shard_group for shard_group in shard_groups_of(grid) if dist.get_rank() in shard_group]
    sent = {"messages": 0, "collectives": 0}
    isend, all_reduce = dist.isend, dist.all_reduce

    def count_and_isend(tensor: Tensor, dst: int, *args: Any) -> Any:
        sent["messages"] += tensor.nbytes if dst not in own_group else 0
        return isend(tensor, dst, *args)

    def count_and_all_reduce(tensor: Tensor, *, group: Any = None, **kwargs: Any) -> Any:
        if not set(dist.get_process_group_ranks(group)) <= set(own_group):
            sent["collectives"] += tensor.nbytes
        return all_reduce(tensor, group=group, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "isend", count_and_isend)
        patch.setattr(dist, "all_reduce", count_and_all_reduce)
        yield sent


def make_wide_model() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(128, 128) for _ in range(4)))


def measure_bytes_between_shard_groups(
    ctx: RankContext, grid: Grid, shard_group_args: dict[str, Any], config: ZeroConfig
) -> tuple[dict[str, int], ShardedOptimizer]:
    """Measure the bytes that all ranks send between shard groups in an iteration."""
    model = make_seeded(make_wide_model, 0)
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
    """In one group every gradient shard has two senders in the other half, and every parameter shard two receivers.
    Between two shard groups only sums are sent, in both directions: half of that, and no parameters."""
    grid = (2, 2)
    for dtype in (None, torch.bfloat16):
        config = ZeroConfig(partition=FlatShards(2**16), stage=stage, reduce_dtype=dtype)
        ours, optimizer = measure_bytes_between_shard_groups(ctx, grid, group_size_options(grid), config)
        flat, one_group = measure_bytes_between_shard_groups(ctx, grid, {}, config)
        grads = sum(param.nbytes for param in optimizer._engine.params.tensors)
        params = sum(bucket.numel * bucket.dtype.itemsize for bucket in one_group.layout.buckets)
        assert ours["messages"] == 2 * grads  # sums are sent in float32
        assert flat["messages"] == 2 * grads // (1 if dtype is None else 2) + 2 * params
        assert ours["messages"] <= (0.5 if dtype is None else 0.67) * flat["messages"]
        # Control messages; a few more if a rank has to catch up.
        assert max(ours["collectives"], flat["collectives"]) < 2000


@ranks(4)
def test_one_shard_group_has_no_traffic_across(ctx: RankContext) -> None:
    """Guards the test above: it distinguishes traffic within shard groups from traffic between them."""
    ours, _ = measure_bytes_between_shard_groups(ctx, (1, 4), group_size_options((1, 4)), ZeroConfig())
    assert ours["messages"] == 0
    between_ranks, _ = measure_bytes_between_shard_groups(ctx, (4, 1), group_size_options((1, 4)), ZeroConfig())
    assert between_ranks["messages"] > 0
