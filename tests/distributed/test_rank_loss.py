"""Ranks that are lost: what the others raise, how they know who is missing, and what is left for a closer look."""

from __future__ import annotations

import pickle
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store

from tests.support import RankContext, ranks
from zeroshard import FlatShards, RankLostError, ZeroConfig, shard
from zeroshard._types import format_ranks
from zeroshard.comm import failure
from zeroshard.comm.collectives import Comm
from zeroshard.comm.failure import _GlooConnections
from zeroshard.comm.process_group import Group

LOST_RANK = 1
"""The rank that is lost."""


def new_comm(seconds: float = 30.0) -> Comm:
    group = dist.new_group(timeout=timedelta(seconds=seconds))
    assert isinstance(group, dist.ProcessGroup)
    return Comm(Group(group))


@contextmanager
def extended_timeouts() -> Iterator[None]:
    """Whoever leaves a word has left it by then, also where the machine is busy."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("REPORT_TIMEOUT_S", "DISCONNECTED_GRACE_S", "STORE_TIMEOUT_S"):
            patch.setattr(failure, name, 3.0)
        yield


def close_connections(group: Group) -> None:
    """Close the connections to all other ranks without a word, as a process does that is killed."""
    for it in list(group.failure_detector._groups):
        _GlooConnections(it).close()


def expect_rank_lost(comm: Comm) -> RankLostError:
    with extended_timeouts(), pytest.raises(RankLostError) as caught:
        comm.all_reduce_max([0])
    return caught.value


@ranks(2, 3, 4)
def test_failed_rank_reports_its_error_to_all_ranks(ctx: RankContext) -> None:
    comm = new_comm()
    comm.group.failure_detector.set_activity("something of importance", num_steps=7)
    if ctx.rank == LOST_RANK:
        with pytest.raises(OSError, match="no room"), comm.group.failure_detector.abort_on_error():
            raise OSError("no room on the disk")
        assert "no room on the disk" in str(expect_rank_lost(comm))
        return
    error = expect_rank_lost(comm)
    assert (error.failed, error.exited, error.unresponsive) == ((LOST_RANK,), (), ())
    assert str(error).startswith(f"rank {LOST_RANK} of {ctx.world_size} failed with OSError: no room on the disk.")
    assert "something of importance, 7 steps done" in str(error)
    assert str(expect_rank_lost(comm)) == str(error), "once lost, always lost"


@ranks(2, 3, 4)
def test_rank_that_disconnects_without_a_report_has_exited(ctx: RankContext) -> None:
    comm = new_comm()
    if ctx.rank == LOST_RANK:
        close_connections(comm.group)
        dist.barrier()
        return
    error = expect_rank_lost(comm)
    assert (error.exited, error.unresponsive) == ((LOST_RANK,), ())
    assert str(error).startswith(f"rank {LOST_RANK} of {ctx.world_size} ended, or lost the network")
    dist.barrier()  # other groups are as they were


@ranks(2, 3, 4)
def test_rank_that_misses_a_collective_is_unresponsive(ctx: RankContext) -> None:
    comm = new_comm(seconds=1.0)
    comm.group.failure_detector.set_activity("the end of step 3", num_steps=2)
    if ctx.rank == LOST_RANK:
        dist.barrier()
        error = expect_rank_lost(comm)
        assert (error.exited, error.unresponsive) == ((), ()), "all others have left a word"
        others = [rank for rank in range(ctx.world_size) if rank != LOST_RANK]
        told = f"{format_ranks(others)} of {ctx.world_size} waited for this rank in vain: stopped, stuck"
        assert str(error).startswith(told), "what the others have said of it"
        assert "the end of step 3, 2 steps done" in str(error)
        assert "no answer within the timeout of the process group" in str(error)
        return
    error = expect_rank_lost(comm)
    assert (error.exited, error.unresponsive) == ((), (LOST_RANK,))
    assert "no answer within the timeout of the process group" in str(error)
    assert "gloo:all_reduce of [[1]], collective" in str(error), "what torch has recorded"
    dist.barrier()


@ranks(2)
def test_error_explains_how_to_evaluate_on_one_rank(ctx: RankContext) -> None:
    """A model with buffers brings them to all ranks before a forward pass, and the others make a step."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = shard(model, torch.optim.SGD, process_group=group, lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    with extended_timeouts(), pytest.raises(RankLostError) as caught:
        model(torch.ones(2, 3)) if ctx.rank == 0 else optimizer.step()
    told = str(caught.value)
    assert "rank 0: bringing buffers to all; who runs the model alone does so under torch.no_grad()" in told
    assert "one of them has made a call alone, and that would end in the same way" in told
    dist.barrier()


@ranks(2, 3)
def test_rank_that_never_steps_raises_in_a_later_pass(ctx: RankContext) -> None:
    """`if rank == 0: optimizer.step()` in a loop: the others would train on, and never know that they do not."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    model = nn.Linear(3, 4)
    optimizer = shard(model, torch.optim.SGD, process_group=group, lr=0.1)

    def train() -> None:
        for _ in range(1000):
            model(torch.ones(2, 3)).sum().backward()
            if ctx.rank == 0:
                optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.01)

    with extended_timeouts(), pytest.raises(RankLostError, match="agreeing on step 1"):
        train()
    with optimizer.no_sync():  # of this rank alone
        model(torch.ones(2, 3)).sum().backward()
    dist.barrier()


@ranks(2)
def test_forward_inside_a_closure_restores_the_phase(ctx: RankContext) -> None:
    """Whoever is lost later in that step is missed there, not between steps."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = shard(model, torch.optim.SGD, lr=0.1)
    line = Group(optimizer.process_group).failure_detector

    def closure() -> torch.Tensor:
        line.set_activity("the closure of step 1")
        loss: torch.Tensor = model(torch.ones(2, 3)).sum()
        assert line._activity == "the closure of step 1"
        return loss

    optimizer.step(closure)


class FlakyStore:
    """A store that answers so many times, and then hangs or is gone."""

    def __init__(self, answers: int, *, hangs: bool) -> None:
        self._answers, self._hangs, self._store = answers, hangs, _get_default_store()
        self.released = threading.Event()

    def append(self, key: str, value: str) -> None:
        self._store.append(key, value)  # type: ignore[attr-defined]

    def get(self, key: str) -> bytes:
        self._answers -= 1
        if self._answers < 0 and self._hangs:
            self.released.wait()
        if self._answers < 0:
            raise ConnectionError("the store is gone")
        return self._store.get(key)


@ranks(3)
def test_unresponsive_store_neither_blocks_nor_blames_a_rank(ctx: RankContext) -> None:
    for answers, hangs in ((0, False), (0, True), (1, False)):
        comm, store = new_comm(), FlakyStore(answers, hangs=hangs)
        dist.barrier()
        if ctx.rank == LOST_RANK:
            close_connections(comm.group)
            continue
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(failure, "_get_store", lambda it=store: it)
            with pytest.raises(RankLostError) as caught:
                comm.all_reduce_max([0])
            store.released.set()
        error = caught.value
        assert (error.failed, error.exited, error.unresponsive) == ((), (), ()), "ranks that live have hung up, too"
        assert str(error).startswith("the store of the job does not answer")
        assert re.search(rf"closed are connections to ranks? [\d, ]*\b{LOST_RANK}\b", str(error))
        assert re.search(rf"\nranks? [\d, ]*\b{ctx.rank}\b", str(error)), "what this rank knows itself"


@ranks(2)
def test_flight_recorder_dump_path_comes_from_the_environment(ctx: RankContext, tmp_path: Path) -> None:
    comm = new_comm()
    comm.all_reduce_max([3])
    if ctx.rank == LOST_RANK:
        close_connections(comm.group)
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_FR_DUMP_TEMP_FILE", f"{tmp_path}/rank_")
        error = expect_rank_lost(comm)
    kept = tmp_path / f"rank_{ctx.rank}"
    assert str(kept) in str(error)
    names = [entry["profiling_name"] for entry in pickle.loads(kept.read_bytes())["entries"]]
    assert "gloo:all_reduce" in names


@ranks(2, 4)
def test_rank_lost_error_names_step_and_bucket(ctx: RankContext) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    config = ZeroConfig(partition=FlatShards(bucket_bytes=256))
    optimizer = shard(model, torch.optim.AdamW, process_group=group, config=config)

    def train(steps: int = 1) -> None:
        for _ in range(steps):
            torch.autograd.backward(model(torch.ones(1, 8)).sum())
            optimizer.step()
            optimizer.zero_grad()

    train()
    dist.barrier()  # or some would still be in the first step
    if ctx.rank == LOST_RANK:
        close_connections(Group(group))
        return
    with extended_timeouts(), pytest.raises(RankLostError, match="1 steps done") as caught:
        train(steps=2)
    assert "gradients of bucket" in str(caught.value)
    assert caught.value.exited == (LOST_RANK,)
    assert "if a rank's program had come to its end, its loop was shorter" in str(caught.value)


@ranks(2, 3)
def test_error_names_the_bucket_of_a_rank_stuck_in_backward(ctx: RankContext) -> None:
    """The others have sent all of theirs by then, and are agreeing."""
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
    group = dist.new_group(timeout=timedelta(seconds=4))
    assert isinstance(group, dist.ProcessGroup)
    config = ZeroConfig(partition=FlatShards(bucket_bytes=256))
    optimizer = shard(model, torch.optim.AdamW, process_group=group, config=config)
    if ctx.rank == LOST_RANK:
        stuck: Any = model.get_parameter("1.weight")
        stuck.register_hook(lambda _: dist.barrier())

    def train() -> None:
        torch.autograd.backward(model(torch.ones(1, 8)).sum())
        optimizer.step()

    dist.barrier()
    with extended_timeouts(), pytest.raises(RankLostError) as caught:
        train()
    if ctx.rank == LOST_RANK:
        return
    dist.barrier()
    bucket = f"gradients of bucket {optimizer.layout.bucket_of(1)} of 4 (parameter 1 (1.weight))"
    assert f"2 of 4 buckets that were sent have arrived, next: {bucket}, 0 steps done" in str(caught.value)
    assert caught.value.unresponsive == (LOST_RANK,)


@ranks(2)
def test_internal_groups_inherit_the_timeout(ctx: RankContext) -> None:
    comm = new_comm(seconds=17)
    assert comm.group.timeout == timedelta(seconds=17)
    assert comm.group.dedicated_gloo_group().timeout == timedelta(seconds=17)
