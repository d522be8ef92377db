"""Logging: only errors are printed by default, and records of all ranks have the same form."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.support import RankContext, ranks
from tests.support.oracles import ADAMW, ZERO2, make_seeded, mlp, regression
from zeroshard import ZeroRedundancyOptimizer, checkpoint, shard
from zeroshard._logging import log_rank

SCRIPT = """if True:
    import logging, torch, torch.distributed as dist, zeroshard
    from zeroshard import checkpoint
    SETUP
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = torch.nn.Linear(4, 4)
    optimizer = zeroshard.shard(model, torch.optim.SGD, lr=0.1)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    checkpoint.save(FOLDER, step=1, model=model, optimizer=optimizer)
    checkpoint.load(FOLDER, model=model, optimizer=optimizer)
    try:
        optimizer.step(lambda: 1 / 0 if FAILS else None)
    except ZeroDivisionError:
        pass
    dist.destroy_process_group()
"""


def run_and_capture_stderr(folder: Path, *, setup: str = "", should_fail: bool = False) -> str:
    """Run a job with these settings and return its stderr."""
    code = SCRIPT.replace("SETUP", setup).replace("FOLDER", repr(str(folder))).replace("FAILS", str(should_fail))
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert completed.stdout == ""
    return completed.stderr


def test_unconfigured_logging_prints_errors_only(tmp_path: Path) -> None:
    """An error may be the last output of a process. A handler can silence it."""
    assert (
        run_and_capture_stderr(tmp_path / "plain", should_fail=True)
        == f"rank 0: the closure failed: {ZeroDivisionError('division by zero')!r}\n"
    )
    muted = 'logging.getLogger("zeroshard").addHandler(logging.NullHandler())'
    assert run_and_capture_stderr(tmp_path / "muted", setup=muted, should_fail=True) == ""


def test_info_level_prints_one_line(tmp_path: Path) -> None:
    (line,) = run_and_capture_stderr(tmp_path, setup="logging.basicConfig(level=logging.INFO)").splitlines()
    assert line.startswith(
        "INFO:zeroshard:rank 0: SGD on 20 elements of 2 parameters in 1 buckets, shared by 1 ranks. SGD: each rank "
        "updates its shard of every bucket. "
    )


class RecordingHandler(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    @property
    def messages(self) -> list[str]:
        return [record.getMessage() for record in self.records]


@contextmanager
def capture_logs(level: int) -> Iterator[RecordingHandler]:
    logger, handler = logging.getLogger("zeroshard"), RecordingHandler()
    level_before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield handler
    finally:
        logger.setLevel(level_before)
        logger.removeHandler(handler)


@ranks(1, 2)
def test_rank_0_logs_each_optimizer_once(ctx: RankContext) -> None:
    with capture_logs(logging.INFO) as logs:
        model = make_seeded(mlp, 0)
        optimizer = shard(model, torch.optim.AdamW, config=ZERO2, **ADAMW)
        torch.autograd.backward(regression(model, 0))
        optimizer.step()
        ZeroRedundancyOptimizer(make_seeded(mlp, 0).parameters(), torch.optim.SGD, lr=0.1)
    assert [record.levelname for record in logs.records] == (["INFO"] * 2 if ctx.rank == 0 else [])
    assert all(f"shared by {ctx.world_size} ranks" in message for message in logs.messages)


@ranks(1, 2)
def test_debug_records_name_their_rank(ctx: RankContext, tmp_path: Path) -> None:
    folder = ctx.gather(str(tmp_path))[0]
    with capture_logs(logging.DEBUG) as logs:
        model = make_seeded(mlp, 0)
        optimizer = shard(model, torch.optim.AdamW, config=ZERO2, **ADAMW)
        torch.autograd.backward(regression(model, 0))
        optimizer.step()
        checkpoint.save(folder, step=3, model=model, optimizer=optimizer)
        checkpoint.load(folder, model=model, optimizer=optimizer)
    assert {vars(record)["rank"] for record in logs.records} == {ctx.rank}
    assert all(message.startswith(f"rank {ctx.rank}: ") for message in logs.messages)
    assert sum(" owns " in message for message in logs.messages) == len(optimizer.layout.buckets)
    assert (
        sum("saved " in message for message in logs.messages)
        == sum("loaded " in message for message in logs.messages)
        == 1
    )
    consensus_messages = [message for message in logs.messages if "all ranks are in step 1" in message]
    assert len(consensus_messages) == (ctx.world_size > 1)


def test_record_points_to_the_caller(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "zeroshard"):
        log_rank(logging.DEBUG, 7, "%d of %s", 3, "something")
    (record,) = caplog.records
    assert (record.getMessage(), vars(record)["rank"]) == ("rank 7: 3 of something", 7)
    assert record.filename == Path(__file__).name
