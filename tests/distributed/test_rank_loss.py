"""Lost ranks: the error that other ranks raise, how they find the lost rank, and data for debugging."""

from __future__ import annotations

import logging
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
from zeroshard._formatting import format_ranks
from zeroshard.comm import failure
from zeroshard.comm.collectives import Comm
from zeroshard.comm.failure import _GlooConnections
from zeroshard.comm.gloo import GlooTransport
from zeroshard.comm.process_group import Group

LOST_RANK = 1
"""The rank that is lost."""


def new_comm(seconds: float = 30.0) -> Comm:
    """Return what the constructor of an optimizer makes. Call on all ranks."""
    group = dist.new_group(timeout=timedelta(seconds=seconds))
    assert isinstance(group, dist.ProcessGroup)
    comm = Comm(Group(group))
    assert comm.group.cpu_group is not group
    return comm


@contextmanager
def extended_timeouts() -> Iterator[None]:
    """Longer timeouts, so failure reports arrive in time on a busy machine."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("REPORT_TIMEOUT_S", "DISCONNECTED_GRACE_S", "STORE_TIMEOUT_S"):
            patch.setattr(failure, name, 3.0)
        yield


def close_connections(group: Group) -> None:
    """Close the connections to all other ranks without a report, like a killed process."""
    for process_group in list(group.failure_detector._groups):
        _GlooConnections(process_group).close()


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
    dist.barrier()  # otherwise some ranks could still be connecting
    if ctx.rank == LOST_RANK:
        close_connections(comm.group)
        dist.barrier()
        return
    error = expect_rank_lost(comm)
    assert (error.exited, error.unresponsive) == ((LOST_RANK,), ())
    assert str(error).startswith(
        f"rank {LOST_RANK} of {ctx.world_size} is gone: its connections closed and it left no error report"
    )
    dist.barrier()  # other groups still work


@ranks(2, 3, 4)
def test_rank_that_misses_a_collective_is_unresponsive(ctx: RankContext) -> None:
    comm = new_comm(seconds=1.0)
    comm.group.failure_detector.set_activity("the end of step 3", num_steps=2)
    if ctx.rank == LOST_RANK:
        dist.barrier()
        error = expect_rank_lost(comm)
        assert (error.exited, error.unresponsive) == ((), ()), "all other ranks have left a report"
        others = [rank for rank in range(ctx.world_size) if rank != LOST_RANK]
        expected = f"{format_ranks(others)} of {ctx.world_size} gave up waiting for this rank: it was stopped, hung"
        assert str(error).startswith(expected), "the reports of the other ranks about this rank"
        assert "the end of step 3, 2 steps done" in str(error)
        assert "no answer within the timeout of the process group" in str(error)
        return
    error = expect_rank_lost(comm)
    assert (error.exited, error.unresponsive) == ((), (LOST_RANK,))
    assert "no answer within the timeout of the process group" in str(error)
    assert "gloo:all_reduce of [[1]], collective" in str(error), "from torch's flight recorder"
    dist.barrier()


@ranks(2)
def test_rank_that_waits_outside_zeroshard_is_in_a_different_call(ctx: RankContext) -> None:
    """One rank waits in `dist.barrier()`, say, until the timeout ends its program."""
    comm = new_comm()
    if ctx.rank == LOST_RANK:
        comm.group.failure_detector.set_idle(num_steps=1)
        comm.group.failure_detector.abort(RuntimeError("Timed out waiting 1000ms for recv operation"))
        return
    comm.group.failure_detector.set_activity("step 2", num_steps=1)
    error = expect_rank_lost(comm)
    elsewhere = f"rank {LOST_RANK} outside of zeroshard (in DDP, for example in backward, or in another collective"
    assert str(error).startswith(f"the ranks are waiting in different calls: rank 0 in step 2; {elsewhere}")
    assert "call step() on all ranks. Look for it under `if rank == 0:`, or for a loop that is shorter" in str(error)
    assert f"rank {LOST_RANK}: no zeroshard call, 1 step done" in str(error)


@ranks(2)
def test_error_explains_how_to_evaluate_on_one_rank(ctx: RankContext) -> None:
    """One rank's forward pass broadcasts the model's buffers, while the other rank steps."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = shard(model, torch.optim.SGD, process_group=group, lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    with extended_timeouts(), pytest.raises(RankLostError) as caught:
        model(torch.ones(2, 3)) if ctx.rank == 0 else optimizer.step()
    message = str(caught.value)
    advice = "to evaluate on one rank, use torch.no_grad()"
    assert f"rank 0: broadcasting buffers ({advice})" in message
    assert message.startswith("the ranks are waiting in different calls: rank 0 in broadcasting buffers (")
    assert "If one rank evaluates alone, do so under torch.no_grad()." in message
    dist.barrier()


@ranks(2, 3)
def test_rank_that_never_steps_raises_in_a_later_pass(ctx: RankContext) -> None:
    """`if rank == 0: optimizer.step()` in a loop: without an error, the others would run on without training."""
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

    with extended_timeouts(), pytest.raises(RankLostError, match=r"rank \d: step 1, with reduce-scattered gradients"):
        train()
    with optimizer.no_sync():  # this rank's own pass does not communicate
        model(torch.ones(2, 3)).sum().backward()
    dist.barrier()


@ranks(2)
def test_forward_inside_a_closure_restores_the_phase(ctx: RankContext) -> None:
    """If a rank is lost later in that step, the error names the step, not the time between steps."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = shard(model, torch.optim.SGD, lr=0.1)
    detector = Group(optimizer.process_group).failure_detector

    def closure() -> torch.Tensor:
        detector.set_activity("the closure of step 1")
        loss: torch.Tensor = model(torch.ones(2, 3)).sum()
        assert detector._activity == "the closure of step 1"
        return loss

    optimizer.step(closure)


class FlakyStore:
    """A store that answers `answers` requests, and then hangs or is gone."""

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
            patch.setattr(failure, "_get_store", lambda store=store: store)
            with pytest.raises(RankLostError) as caught:
                comm.all_reduce_max([0])
            store.released.set()
        error = caught.value
        assert (error.failed, error.exited, error.unresponsive) == ((), (), ()), "live ranks closed connections, too"
        assert str(error).startswith("the job's store does not answer")
        assert re.search(rf"connections to ranks? [\d, ]*\b{LOST_RANK}\b[\d, ]* are closed", str(error))
        assert re.search(rf"\nranks? [\d, ]*\b{ctx.rank}\b", str(error)), "this rank's own report"


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
    dump = tmp_path / f"rank_{ctx.rank}"
    assert str(dump) in str(error)
    names = [entry["profiling_name"] for entry in pickle.loads(dump.read_bytes())["entries"]]
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
    dist.barrier()  # otherwise some ranks could still be in the first step
    if ctx.rank == LOST_RANK:
        close_connections(Group(group))
        return
    with extended_timeouts(), pytest.raises(RankLostError, match="1 step done") as caught:
        train(steps=2)
    assert "gradients of bucket" in str(caught.value)
    assert caught.value.exited == (LOST_RANK,)
    assert "look for a call under `if rank == 0:`, or a loop that is shorter" in str(caught.value)


@ranks(2)
def test_parameters_that_were_lost_raise_on_every_use(ctx: RankContext) -> None:
    """A rank is lost between its update and its all-gather: the others have parameters of two steps."""
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    model = nn.Linear(64, 64)
    config = ZeroConfig(overlap_param_gather=True)
    optimizer = shard(model, torch.optim.SGD, process_group=group, lr=0.1, config=config)

    def lose_rank(*_: Any) -> None:
        close_connections(Group(group))
        raise OSError("connections closed")

    model(torch.ones(1, 64)).sum().backward()
    with extended_timeouts():
        if ctx.rank == LOST_RANK:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(GlooTransport, "all_gather", lose_rank)
                with pytest.raises((RankLostError, OSError)):
                    optimizer.step()
            return
        for use in (optimizer.step, model.state_dict, model.state_dict):
            with pytest.raises(RankLostError):
                use()


@ranks(2, 3)
def test_error_names_the_bucket_of_a_rank_stuck_in_backward(ctx: RankContext) -> None:
    """The other ranks have sent all their buckets, and wait for consensus."""
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
    group = dist.new_group(timeout=timedelta(seconds=4))
    assert isinstance(group, dist.ProcessGroup)
    config = ZeroConfig(partition=FlatShards(bucket_bytes=256))
    optimizer = shard(model, torch.optim.AdamW, process_group=group, config=config)
    if ctx.rank == LOST_RANK:
        weight: Any = model.get_parameter("1.weight")
        weight.register_hook(lambda _: dist.barrier())

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
    for own in (Group(comm.group.cpu_group), comm.group.background_group()):
        assert own.process_group is not comm.group.process_group
        assert own.timeout == timedelta(seconds=17)


class StoreHandler(logging.Handler):
    """Keeps messages, and tells other ranks through the store that there is one."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self.messages: list[str] = []
        self._key = key

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
        _get_default_store().set(self._key, "logged")


@ranks(2, 3, timeout=20)
def test_long_wait_is_logged_once(ctx: RankContext) -> None:
    comm, late_rank = new_comm(), ctx.world_size - 1
    assert comm.group.process_group is not None
    name = comm.group.process_group.group_name
    comm.group.failure_detector.set_activity(f"call {ctx.rank}")
    handler = StoreHandler(f"{name}/logged by {ctx.rank}")
    logging.getLogger("zeroshard").addHandler(handler)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(failure, "LONG_WAIT_S", 0.3)
            patch.setattr(failure, "PUBLISH_TIME_S", 0.3)
            if ctx.rank == late_rank:
                _get_default_store().wait([f"{name}/logged by {rank}" for rank in range(late_rank)])
            comm.all_reduce_max([0])
        comm.all_reduce_max([0])  # a short wait
    finally:
        logging.getLogger("zeroshard").removeHandler(handler)
    if ctx.rank == late_rank:
        assert handler.messages == []
        return
    (message,) = handler.messages
    assert re.search(
        rf"waiting for other ranks for \d+ s, in: call {ctx.rank} \(process-group timeout: 0:00:30\)", message
    )
    assert re.search(rf"ranks? [\d, ]*\b{late_rank}\b: not waiting in zeroshard", message)
    assert "If this call is under `if rank == 0:`, make it on all ranks" in message
