"""`optimizer.report()` matches the optimizer."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.support import RankContext, ranks
from tests.support.monitoring import recorded
from tests.support.oracles import ADAMW, TINY, ZERO1, ZERO2, group_size_options, make_seeded, mlp, regression
from zeroshard import (
    ConsistencyCheck,
    CPUOffload,
    FlatShards,
    NonFiniteGrads,
    ParamRule,
    PeerCheckpoint,
    ZeroConfig,
    ZeroRedundancyOptimizer,
    ddp_hooks,
    matrix_params,
    remaining_params,
    shard,
)
from zeroshard._types import Rank
from zeroshard.report import Report


def train_step(model: nn.Module, optimizer: Any, number: int) -> None:
    torch.autograd.backward(regression(model, number))
    optimizer.step()
    optimizer.zero_grad()


def memory_nbytes(report: Report, category: str) -> int:
    return sum(memory.nbytes for memory in report.memory if memory.category == category)


def state_bytes(optimizer: Any) -> int:
    """Bytes of all state tensors of the inner optimizers."""
    entries = [entry for inner in optimizer.inner_optimizers for entry in inner.state.values()]
    return sum(value.nbytes for entry in entries for value in entry.values() if isinstance(value, torch.Tensor))


def check_report(report: Report, optimizer: Any) -> None:
    """Check everything that must hold for every report."""
    layout, rank = optimizer.layout, optimizer.rank
    assert [load.elements for load in report.ranks] == list(optimizer.balance.numel_per_rank)
    owned = [len(layout.params_owned_by(Rank(load.rank))) for load in report.ranks]
    assert [load.parameters for load in report.ranks] == owned
    assert sum(load.cost_fraction for load in report.ranks) == pytest.approx(1.0)
    assert report.state_bytes[rank] == memory_nbytes(report, "state") == state_bytes(optimizer)
    assert memory_nbytes(report, "parameters") >= sum(param.nbytes for param in optimizer._engine.params.tensors)
    for reported, bucket in zip(report.buckets, layout.buckets, strict=True):
        assert reported.padding == bucket.numel - sum(layout.params[index].numel for index in bucket.params)
        assert len(reported.parameters) == len(bucket.slots)
        assert [(owner, tuple(bucket.shards[owner])) for owner, *_ in reported.shards] == [
            (owner, (start, stop)) for owner, start, stop in reported.shards
        ]
    assert json.loads(json.dumps(report.as_dict())) == report.as_dict()
    lines = str(report).splitlines()
    assert max(map(len, lines)) <= 100
    assert f"rank {report.rank}" in lines[0]


def make_optimizers(world_size: int) -> Iterator[tuple[nn.Module, Any]]:
    """Models with optimizers in all modes."""
    rules = [
        ParamRule(matrix_params(), torch.optim.Muon, lr=0.1),
        ParamRule(remaining_params, torch.optim.AdamW, lr=0.1),
    ]
    master_config = replace(
        ZERO2, master_dtype=torch.float64, consistency_check=ConsistencyCheck(every=1), nonfinite=NonFiniteGrads("skip")
    )
    for config in (ZERO2, ZERO1, ZeroConfig(), replace(ZERO2, overlap_param_gather=True), master_config):
        model = make_seeded(mlp, 0)
        yield model, shard(model, torch.optim.AdamW, config=config, **ADAMW)
    model = make_seeded(mlp, 0)
    yield model, shard(model, rules)
    for bucket_view in (False, True):
        model = make_seeded(mlp, 0)
        yield model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, None, bucket_view, **ADAMW)
    model = make_seeded(mlp, 0)
    yield model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, config=ZeroConfig(partition=TINY), lr=0.1)
    if world_size % 2 == 0:
        model = make_seeded(mlp, 0)
        yield model, shard(model, torch.optim.AdamW, config=ZERO2, **group_size_options((2, world_size // 2)), **ADAMW)


@ranks(1, 2, 3, 4)
def test_report_matches_the_optimizer(ctx: RankContext) -> None:
    for model, optimizer in make_optimizers(ctx.world_size):
        first = optimizer.report()
        check_report(first, optimizer)
        assert "no step yet" in str(first)
        torch.autograd.backward(regression(model, 0))
        check_report(optimizer.report(), optimizer)  # gradients are in flight with several ranks
        for number in range(2):
            train_step(model, optimizer, number)
        report = optimizer.report()
        check_report(report, optimizer)
        assert report.counters.steps == optimizer._engine.steps == 2
        assert first.counters.steps == 0, "a report does not change"
        assert 0 < report.times.step_s <= report.times.iteration_s
        if hasattr(optimizer, "wait_for_params"):
            optimizer.wait_for_params()


@ranks(1, 2, 4)
def test_reported_state_bytes_of_other_ranks_are_correct(ctx: RankContext) -> None:
    """A rank can tell the others' state bytes if all ranks own the same kinds of parameters."""
    model = make_seeded(mlp, 0)
    optimizer = shard(model, torch.optim.SGD, momentum=0.9, lr=0.1, config=ZERO2)
    train_step(model, optimizer, 0)
    report = optimizer.report()
    assert list(report.state_bytes) == ctx.gather(state_bytes(optimizer))
    assert sum(report.state_bytes) == sum(param.nbytes for param in model.parameters())  # type: ignore[arg-type]


@ranks(3)
def test_report_of_ranks_that_own_nothing(ctx: RankContext) -> None:
    model = nn.Linear(2, 1, bias=False)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **ADAMW)
    torch.autograd.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    report = optimizer.report()
    check_report(report, optimizer)
    owner = optimizer.layout.owner_of(0)
    assert [load.elements for load in report.ranks] == [2 * (rank == owner) for rank in range(3)]
    known = 20 if ctx.rank == owner else None
    assert list(report.state_bytes) == [known if rank == owner else 0 for rank in range(3)]
    assert report.balance.memory_imbalance == 3


@ranks(2, 3, 4)
def test_reported_traffic_matches_bytes_sent(ctx: RankContext) -> None:
    tested_grids = [(1, ctx.world_size)] + (
        [(2, ctx.world_size // 2), (ctx.world_size, 1)] if ctx.world_size % 2 == 0 else []
    )
    for grid in tested_grids:
        model = make_seeded(mlp, 0)
        optimizer = shard(model, torch.optim.AdamW, config=ZERO2, **group_size_options(grid), **ADAMW)
        train_step(model, optimizer, 0)
        with recorded() as traffic:
            torch.autograd.backward(regression(model, 1))
            optimizer.clip_grad_value_(1e9)  # waits until background threads have sent their messages
            sent_grads = sum(traffic.sizes("isend"))
            optimizer.step()
        volume = optimizer.report().comm_volume
        assert (volume.grad_bytes, volume.param_bytes) == (sent_grads, sum(traffic.sizes("isend")) - sent_grads), grid
        optimizer.zero_grad()
    frozen = make_seeded(mlp, 0).requires_grad_(False)
    plain = ZeroRedundancyOptimizer(frozen.parameters(), torch.optim.SGD, lr=0.1)
    assert plain.report().comm_volume == (None, 0)


@ranks(2, 3)
def test_memory_is_reported_by_purpose(ctx: RankContext) -> None:
    model = make_seeded(mlp, 0).bfloat16()
    config = replace(ZERO2, master_dtype=torch.float32)
    optimizer = shard(model, torch.optim.AdamW, config=config, **ADAMW)
    before = optimizer.report()
    assert (memory_nbytes(before, "gradients"), memory_nbytes(before, "state")) == (0, 0)
    torch.autograd.backward(model(torch.ones(2, 6).bfloat16()).sum())
    optimizer.step()
    report = optimizer.report()
    lengths = [bucket.shards[ctx.rank].length for bucket in optimizer.layout.buckets]
    assert memory_nbytes(report, "master weights") == memory_nbytes(report, "gradients") == 4 * sum(lengths)
    assert memory_nbytes(report, "parameters") == 2 * sum(bucket.numel for bucket in optimizer.layout.buckets)
    assert memory_nbytes(report, "staging") > 0
    with optimizer.no_sync():
        torch.autograd.backward(model(torch.ones(2, 6).bfloat16()).sum())
    local_grad_bytes = sum(param.nbytes for param in model.parameters())
    assert memory_nbytes(optimizer.report(), "gradients") == 4 * sum(lengths) + local_grad_bytes
    optimizer.zero_grad()


@ranks(2)
def test_report_before_and_after_ddp_buckets_are_known(ctx: RankContext) -> None:
    model = DistributedDataParallel(make_seeded(mlp, 0))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, overlap_with_ddp=True, **ADAMW)
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    model.register_comm_hook(None, ddp_hooks.hook_with_zero_step(allreduce_hook, model, optimizer))
    early = optimizer.report()
    check_report(early, optimizer)
    assert not early.is_layout_final
    assert "not known yet" in str(early)
    for number in range(4):
        torch.autograd.backward(regression(model, number))
    report = optimizer.report()
    check_report(report, optimizer)
    assert report.is_layout_final
    assert report.counters.steps == 2
    assert report.times.phases


@ranks(2)
def test_report_says_who_reduces_gradients_with_ddp_hook(ctx: RankContext) -> None:
    model = DistributedDataParallel(make_seeded(mlp, 0))
    config = ZeroConfig(partition=FlatShards())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, config=config, **ADAMW)
    assert "gradients: taken from param.grad" in str(optimizer.report())
    model.register_comm_hook(None, optimizer.ddp_hook())
    assert "gradients: reduce-scattered during backward; param.grad is kept (ZeRO-1)" in str(optimizer.report())


@ranks(2)
def test_report_counters(ctx: RankContext) -> None:
    config = replace(
        ZERO2,
        consistency_check=ConsistencyCheck(every=2),
        nonfinite=NonFiniteGrads("skip"),
        peer_checkpoint=PeerCheckpoint(every=1),
    )
    model = make_seeded(mlp, 0)
    optimizer = shard(model, torch.optim.AdamW, config=config, **ADAMW)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(4):
            torch.autograd.backward(regression(model, number) * (float("nan") if number == 3 else 1.0))
            optimizer.step()
            optimizer.zero_grad()
    assert optimizer._peer_checkpointer is not None
    optimizer._peer_checkpointer.wait()
    counters = optimizer.report().counters
    assert counters[:5] == (3, 1, 1, 2, 3)
    assert counters.peer_snapshot_bytes > 0
    assert memory_nbytes(optimizer.report(), "peer snapshots") > 0
    text = str(optimizer.report())
    assert "1 with non-finite gradients, 1 skipped" in text
    assert "peer checkpoint: of step 3" in text


@ranks(1)
def test_offload_without_gpu_warns(ctx: RankContext) -> None:
    model = make_seeded(mlp, 0)
    with pytest.warns(UserWarning, match="no effect"):
        optimizer = shard(model, torch.optim.AdamW, config=ZeroConfig(offload=CPUOffload()), **ADAMW)
    check_report(optimizer.report(), optimizer)


@pytest.mark.gpu
@ranks(1)
def test_offloaded_state_is_reported_as_host_memory(ctx: RankContext) -> None:
    model = nn.Linear(256, 256).cuda()
    config = ZeroConfig(offload=CPUOffload(), master_dtype=torch.float64)
    optimizer = shard(model, torch.optim.AdamW, config=config, **ADAMW)
    torch.autograd.backward(model(torch.ones(2, 256, device="cuda")).sum())
    optimizer.step()
    report = optimizer.report()
    check_report(report, optimizer)
    elements = sum(param.numel() for param in model.parameters())
    host = {memory.category: memory.nbytes for memory in report.memory if memory.device == "cpu"}
    assert host["master weights"] >= 8 * elements
    assert host["state"] >= 2 * 8 * elements
    assert (
        sum(memory.nbytes for memory in report.memory if memory.category == "parameters" and memory.device == "cuda")
        >= 4 * elements
    )


@ranks(2)
def test_report_sends_nothing(ctx: RankContext) -> None:
    model = make_seeded(mlp, 0)
    optimizer = shard(model, torch.optim.AdamW, config=ZERO2, **ADAMW)
    if ctx.rank == 1:
        with recorded() as traffic:
            str(optimizer.report())
            optimizer.report().as_dict()
        assert traffic == []
    train_step(model, optimizer, 0)


@ranks(2)
def test_report_on_one_rank_before_first_step(ctx: RankContext) -> None:
    """A report must not do anything that all ranks have to do in the same order."""
    rules = [
        ParamRule(matrix_params(), torch.optim.Muon, lr=0.01),
        ParamRule(remaining_params, torch.optim.AdamW, lr=0.01),
    ]
    models = [make_seeded(mlp, 0) for _ in range(3)]
    optimizers: list[Any] = []
    optimizer_arguments: list[Any] = [rules, torch.optim.AdamW, torch.optim.AdamW]
    for model, optimizer_argument in zip(models, optimizer_arguments, strict=True):
        optimizers.append(shard(model, optimizer_argument))
        if ctx.rank == 0:
            optimizers[-1].report()
    for model, optimizer in [*zip(models, optimizers, strict=True)][::-1]:
        train_step(model, optimizer, 0)
    assert_same_on_all_ranks(models)


def assert_same_on_all_ranks(models: list[nn.Module]) -> None:
    own_values = torch.cat([param.detach().view(-1) for model in models for param in model.parameters()])
    all_values = [torch.empty_like(own_values) for _ in range(dist.get_world_size())]
    dist.all_gather(all_values, own_values)
    assert all(torch.equal(values, own_values) for values in all_values)
