"""`zeroshard doctor` on real ranks: all come to the same end, whatever is wrong on one of them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroshard
from tests.support import RankContext, ranks
from tests.support.launch import torchrun
from tests.support.oracles import assert_same, small_model
from zeroshard import RankLostError
from zeroshard.comm.collectives import Comm
from zeroshard.comm.process_group import Group, with_backend
from zeroshard.doctor import collect
from zeroshard.doctor import report as command
from zeroshard.doctor.checks import ERROR, WARNING
from zeroshard.doctor.collect import measure_speed, ranks_by_node
from zeroshard.doctor.report import make_report

COLLECTIVES = ["all-reduce", "reduce-scatter", "all-gather", "broadcast"]
GLOO_ENV = {"GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}


@contextmanager
def shorten_measurements() -> Iterator[None]:
    """Measured is as little as possible."""
    with patch.object(collect, "_MEASUREMENT_BUDGET_S", 0.0), patch.object(collect, "_MAX_CPU_MESSAGE_BYTES", 2**20):
        yield


@contextmanager
def use_existing_group(_: timedelta) -> Iterator[Group]:
    yield Group()


def run_doctor(ctx: RankContext, arguments: list[str], directory: Path) -> tuple[int, str]:
    """The exit status of the command on this rank, and what it has printed."""
    file = directory / f"{ctx.world_size}-{ctx.rank}-{len(arguments)}"
    with (
        file.open("w") as out,
        patch.object(sys, "stdout", out),
        patch.object(command, "init_from_env", use_existing_group),
    ):
        status = command.main(arguments)
    return status, file.read_text()


@ranks(1, 2, 3, 4)
def test_healthy_job_reports_json(ctx: RankContext, tmp_path: Path) -> None:
    with shorten_measurements():
        status, out = run_doctor(ctx, ["--json"], tmp_path)
    assert ctx.gather(status) == [0] * ctx.world_size
    assert (out == "") == (ctx.rank > 0)
    if ctx.rank == 0:
        said = json.loads(out)
        assert (said["healthy"], said["backend"], said["world_size"]) == (True, "gloo", ctx.world_size)
        assert said["hosts"] == {socket.gethostname(): list(range(ctx.world_size))}
        assert [it["verb"] for it in said["collectives"]] == COLLECTIVES
        assert all(it["small"] > 0 and it["large"] > 0 and it["nbytes"] > 2**17 for it in said["collectives"])
        assert [it["rank"] for it in said["ranks"]] == list(range(ctx.world_size))
        assert said["ranks"][0]["link"] is None
        assert all(abs(it["link"]["ahead"]) <= it["link"]["give_or_take"] for it in said["ranks"][1:])
        assert all(it["trial"]["after"] < it["trial"]["before"] for it in said["ranks"])
        assert {it["level"] for it in said["findings"]} <= {"note", "warning"}


@ranks(2)
def test_healthy_job_reports_text(ctx: RankContext, tmp_path: Path) -> None:
    with shorten_measurements():
        status, out = run_doctor(ctx, [], tmp_path)
    assert status == 0
    if ctx.rank == 0:
        assert out.startswith("zeroshard doctor: healthy (0 errors, ")
        assert all(f"\n  {verb}" in out for verb in COLLECTIVES)
        assert "\nadvice\n  optimizer = zeroshard.shard(model, " in out


@ranks(3)
def test_different_environment_variables_are_reported(ctx: RankContext, tmp_path: Path) -> None:
    """Every rank names the one that is different, and whether that is bad."""
    for name, level, expected in (("TORCH_SOMETHING", WARNING, 0), ("NCCL_ALGO", ERROR, 1)):
        mine = {name: f"of rank {ctx.rank}"} if ctx.rank == 1 else {}
        with shorten_measurements(), patch.dict(os.environ, mine):
            report = make_report(collect.collect_job_info(Group(), "", lambda _: None))
        (found,) = [it for it in report.findings if it.what == f"environment: {name}"]
        assert (found.level, found.found) == (level, "rank 1: 'of rank 1'; ranks 0, 2: not set")
        assert report.exit_status == expected
        assert ctx.gather(report.findings) == [report.findings] * 3


@ranks(2)
def test_nccl_without_gpus_is_an_error(ctx: RankContext, tmp_path: Path) -> None:
    with shorten_measurements(), patch.object(torch.cuda, "is_available", lambda: False):
        status, out = run_doctor(ctx, ["--backend", "nccl"], tmp_path)
    assert ctx.gather(status) == [1, 1]
    if ctx.rank == 0:
        assert "error: GPUs: none for ranks 0, 1" in out


@ranks(3)
def test_diverged_trial_steps_are_an_error(ctx: RankContext, tmp_path: Path) -> None:
    """One loses a bit of its result."""
    real = collect.run_trial

    def spoiled(group: Group, device: torch.device) -> collect.TrialResult:
        found = real(group, device)
        return replace(found, digest="another") if ctx.rank == 1 else found

    with shorten_measurements(), patch.object(collect, "run_trial", spoiled):
        status, out = run_doctor(ctx, [], tmp_path)
    assert ctx.gather(status) == [1] * ctx.world_size
    if ctx.rank == 0:
        assert "error: sharded steps: ranks ended with 2 different sets of parameters" in out


@ranks(1, 3)
def test_failing_trial_step_is_reported_on_all_ranks(ctx: RankContext, tmp_path: Path) -> None:
    """What fails on the last rank is known to all, and the report is made."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise ValueError("not today")

    last = ctx.rank == ctx.world_size - 1
    with shorten_measurements(), patch.object(torch.optim, "AdamW", refuse if last else torch.optim.AdamW):
        status, out = run_doctor(ctx, ["--json"], tmp_path)
    assert ctx.gather(status) == [1] * ctx.world_size
    if ctx.rank == 0:
        found = [it["found"] for it in json.loads(out)["findings"] if it["level"] == "error"]
        assert len(found) == ctx.world_size
        assert all("not today" in it for it in found)


@ranks(3)
def test_failure_on_one_rank_does_not_hang_the_others(ctx: RankContext) -> None:
    def fail(_: torch.device) -> Any:
        raise OSError("no such speed")

    failing = ctx.rank == 1
    expected = pytest.raises(OSError if failing else RankLostError, match="no such speed")
    with shorten_measurements(), expected, patch.object(collect, "measure_speed", fail if failing else measure_speed):
        collect.collect_job_info(Group(), "", lambda _: None)


@ranks(4)
def test_bandwidth_within_and_between_hosts(ctx: RankContext) -> None:
    """As if two ranks ran on each of two hosts."""
    place = {"LOCAL_RANK": str(ctx.rank % 2), "LOCAL_WORLD_SIZE": "2"}
    with shorten_measurements(), patch.dict(os.environ, place):
        found = collect.collect_job_info(Group(), "", lambda _: None)
    assert ranks_by_node(found.rank_infos) == [[0, 1], [2, 3]]
    for it in found.measurements:
        assert it.rates is not None
        assert it.rates.within > 0
        assert it.rates.between > 0


@ranks(1, 3)
def test_trial_has_no_side_effects(ctx: RankContext) -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    found = collect.run_trial(Group(), torch.device("cpu"))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert found.difference < 1e-12
    assert found.after < found.before
    assert len(set(ctx.gather(found.digest))) == 1


@ranks(1, 3)
def test_data_group_with_another_backend(ctx: RankContext) -> None:
    """As NCCL is, where there are GPUs: a group of its own, of the same ranks."""
    words = Group()
    assert with_backend(words, "gloo") is words
    with patch.object(dist, "get_backend", lambda _: "another"):
        data = with_backend(words, "gloo")
    assert data.process_group is not words.process_group
    assert (data.rank, data.size, data.timeout) == (words.rank, words.size, words.timeout)
    with shorten_measurements():
        timings = collect.CollectiveBenchmark(Comm(data), torch.device("cpu")).measure_timings(2**20)
    assert [it.verb for it in timings] == COLLECTIVES
    assert collect.run_trial(data, torch.device("cpu")).difference < 1e-12


@ranks(2)
def test_trial_detects_wrong_steps(ctx: RankContext) -> None:
    """Guard of the guard: the sharded one gets slightly other data."""
    real = collect._trial_step

    def otherwise(model: nn.Module, optimizer: torch.optim.Optimizer, rows: torch.Tensor) -> None:
        real(model, optimizer, rows * 1.001 if isinstance(optimizer, zeroshard.ShardedOptimizer) else rows)

    with patch.object(collect, "_trial_step", otherwise):
        assert collect.run_trial(Group(), torch.device("cpu")).difference > 1e-6


@ranks(1, 2, 3)
def test_recommended_code_runs(ctx: RankContext) -> None:
    """What it says makes an optimizer that trains as the plain one does."""
    with shorten_measurements():
        advice = make_report(collect.collect_job_info(Group(), "", lambda _: None)).advice
    assert ctx.gather(advice) == [advice] * ctx.world_size
    model, plain_model, names = small_model(), small_model(), {"zeroshard": zeroshard, "torch": torch}
    scope: dict[str, Any] = {**names, "model": model}
    exec(advice.call, scope)
    plain = torch.optim.AdamW(plain_model.parameters(), lr=3e-4)
    for net, optimizer in ((model, scope["optimizer"]), (plain_model, plain)):
        for step in range(2):
            net(torch.full((1, 5), 1.0 + step)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    if ctx.world_size < 3:
        assert_same(model.state_dict(), plain_model.state_dict())
    else:  # a third of a sum of three is rounded
        torch.testing.assert_close(model.state_dict(), plain_model.state_dict())


@pytest.mark.timeout(180)
def test_doctor_under_torchrun(tmp_path: Path) -> None:
    said = json.loads(torchrun("-m", 2, tmp_path, "zeroshard", "doctor", "--json"))
    assert (said["healthy"], said["world_size"]) == (True, 2)
    assert [it["local_size"] for it in said["ranks"]] == [2, 2]


@pytest.mark.timeout(180)
def test_missing_rank_times_out(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-m", "zeroshard", "doctor", "--timeout", "2"]
    env = {**os.environ, **GLOO_ENV, **place}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=150)
    assert (done.returncode, done.stdout) == (1, "")
    said = done.stderr.splitlines()[-1]
    assert said.startswith(
        "zeroshard doctor: not healthy: rank 0 of 2: the ranks did not all find each other within 2 s"
    )


@pytest.mark.gpu
@pytest.mark.timeout(180)
def test_doctor_on_gpu(tmp_path: Path) -> None:
    """One rank measures NCCL; two cannot share a GPU."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    more = ["-m", "zeroshard", "doctor", "--json", "--backend", "nccl"]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "0"}
    for count in (1, 2):
        words = [*command, str(count), *more]
        done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == count - 1, done.stderr
        said = json.loads(done.stdout)
        assert said["backend"] == ("nccl" if count == 1 else "gloo")
        assert said["ranks"][0]["gpu"]["name"] == torch.cuda.get_device_name(0)
        assert said["ranks"][0]["trial"]["difference"] < 1e-9
