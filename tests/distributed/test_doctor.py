"""`zeroshard doctor` on real ranks: all ranks get the same result, whatever is wrong on one of them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
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
from tests.support.launch import free_port, torchrun
from tests.support.oracles import assert_same, small_model
from zeroshard import RankLostError
from zeroshard.comm.collectives import Comm
from zeroshard.comm.process_group import Group, with_backend
from zeroshard.doctor import collect
from zeroshard.doctor import report as command
from zeroshard.doctor.checks import clock_offset
from zeroshard.doctor.collect import COLLECTIVES, ranks_by_node
from zeroshard.doctor.report import make_report

GLOO_ENV = {"GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}


@contextmanager
def shorten_measurements() -> Iterator[None]:
    """Measure as little as possible."""
    with patch.multiple(collect, ROUNDS=3, _TINY_MESSAGES=1, _MAX_CPU_MESSAGE_BYTES=2**18):
        yield


@contextmanager
def use_existing_group(_: timedelta) -> Iterator[Group]:
    yield Group()


def run_doctor(ctx: RankContext, arguments: list[str], directory: Path) -> tuple[int, str]:
    """Run the command; return its exit status and output on this rank."""
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
        report = json.loads(out)
        assert (report["healthy"], report["backend"], report["world_size"]) == (True, "gloo", ctx.world_size)
        assert report["hosts"] == {socket.gethostname(): list(range(ctx.world_size))}
        assert [timing["collective"] for timing in report["collectives"]] == list(COLLECTIVES)
        for timing in report["collectives"]:
            for estimate in (timing["latency_s"], timing["duration_s"]):
                assert 0 < estimate["low"] <= estimate["median"] <= estimate["high"]
            assert timing["nbytes"] > 2**17
        assert [info["rank"] for info in report["ranks"]] == list(range(ctx.world_size))
        assert ["link" in info["samples"] for info in report["ranks"]] == [False] + [True] * (ctx.world_size - 1)
        assert all(len(values) == 3 for info in report["ranks"] for values in info["samples"].values())
        for info in report["ranks"][1:]:
            offset, error = clock_offset(info["samples"])
            assert abs(offset) <= error
        assert all(info["trial"]["final_loss"] < info["trial"]["initial_loss"] for info in report["ranks"])
        assert {finding["level"] for finding in report["findings"]} <= {"note", "warning"}


@ranks(2)
def test_healthy_job_reports_text(ctx: RankContext, tmp_path: Path) -> None:
    with shorten_measurements():
        status, out = run_doctor(ctx, [], tmp_path)
    assert status == 0
    if ctx.rank == 0:
        assert out.startswith("zeroshard doctor: healthy (0 errors, ")
        assert all(f"\n  {name}" in out for name in COLLECTIVES)
        assert "\nadvice\n  optimizer = zeroshard.shard(model, " in out


@ranks(3)
def test_different_environment_variables_are_reported(ctx: RankContext, tmp_path: Path) -> None:
    """Every rank names the rank that differs, and how severe that is."""
    names = {"TORCH_SOMETHING": "warning", "NCCL_ALGO": "error"}
    override = dict.fromkeys(names, f"of rank {ctx.rank}") if ctx.rank == 1 else {}
    with shorten_measurements(), patch.dict(os.environ, override):
        report = make_report(collect.collect_job_info(Group(), "", lambda _: None))
    for name, level in names.items():
        (reported,) = [finding for finding in report.findings if finding.what == f"environment: {name}"]
        assert (reported.level, reported.found) == (level, "rank 1: 'of rank 1'; ranks 0, 2: not set")
    assert not report.is_healthy
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
    """One rank ends with other parameters."""
    trial_step = collect._trial_step

    def step_and_change_a_bit(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> None:
        trial_step(model, optimizer, inputs)
        if isinstance(optimizer, zeroshard.ShardedOptimizer) and ctx.rank == 1:
            next(model.parameters()).data.mul_(1 + 1e-15)

    with shorten_measurements(), patch.object(collect, "_trial_step", step_and_change_a_bit):
        status, out = run_doctor(ctx, [], tmp_path)
    assert ctx.gather(status) == [1] * ctx.world_size
    if ctx.rank == 0:
        assert "error: sharded steps: rank 2: ReplicaMismatchError: " in out


@ranks(1, 3)
def test_failing_trial_step_is_reported_on_all_ranks(ctx: RankContext, tmp_path: Path) -> None:
    """All ranks report the failure of the last rank."""

    def fail(*_: Any, **__: Any) -> Any:
        raise ValueError("not today")

    is_last = ctx.rank == ctx.world_size - 1
    with shorten_measurements(), patch.object(torch.optim, "AdamW", fail if is_last else torch.optim.AdamW):
        status, out = run_doctor(ctx, ["--json"], tmp_path)
    assert ctx.gather(status) == [1] * ctx.world_size
    if ctx.rank == 0:
        errors = [finding["found"] for finding in json.loads(out)["findings"] if finding["level"] == "error"]
        assert len(errors) == ctx.world_size
        assert all("not today" in error for error in errors)


@ranks(3)
def test_failure_on_one_rank_does_not_hang_the_others(ctx: RankContext) -> None:
    def fail(_: torch.device) -> Any:
        raise OSError("no such speed")

    is_failing = ctx.rank == 1
    expected = pytest.raises(OSError if is_failing else RankLostError, match="no such speed")
    measure_speed = fail if is_failing else collect.measure_speed
    with shorten_measurements(), expected, patch.object(collect, "measure_speed", measure_speed):
        collect.collect_job_info(Group(), "", lambda _: None)


@ranks(4)
def test_bandwidth_within_and_between_hosts(ctx: RankContext) -> None:
    """As if two ranks ran on each of two hosts."""
    torchrun_env = {"LOCAL_RANK": str(ctx.rank % 2), "LOCAL_WORLD_SIZE": "2"}
    with shorten_measurements(), patch.dict(os.environ, torchrun_env):
        job_info = collect.collect_job_info(Group(), "", lambda _: None)
    assert ranks_by_node(job_info.ranks) == [[0, 1], [2, 3]]
    for measurement in job_info.measurements:
        assert min(measurement.samples["intra-node"]) > 0
        assert min(measurement.samples["inter-node"]) > 0


@ranks(3, 4)
def test_bandwidth_of_nodes_is_not_measured_if_they_are_unequal(ctx: RankContext) -> None:
    """As if there were two ranks on the first host and one on each other."""
    node, size = divmod(ctx.rank, 2)[0], 2 if ctx.rank < 2 else 1
    torchrun_env = {"LOCAL_RANK": str(ctx.rank if node == 0 else 0), "LOCAL_WORLD_SIZE": str(size)}
    with shorten_measurements(), patch.dict(os.environ, torchrun_env):
        report = make_report(collect.collect_job_info(Group(), "", lambda _: None))
    assert all("intra-node" not in measured.samples for measured in report.job.measurements)
    assert "ranks per node" in [finding.what for finding in report.findings]


@ranks(1, 3)
def test_trial_has_no_side_effects(ctx: RankContext) -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    found = collect.run_trial(Group(), torch.device("cpu"))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert found.max_difference < 1e-12
    assert found.final_loss < found.initial_loss


@ranks(1, 3)
def test_data_group_with_another_backend(ctx: RankContext) -> None:
    """A separate group of the same ranks, as for NCCL on GPUs."""
    control_group = Group()
    assert with_backend(control_group, "gloo") is control_group
    with patch.object(dist, "get_backend", lambda _: "another"):
        data_group = with_backend(control_group, "gloo")
    assert data_group.process_group is not control_group.process_group
    assert (data_group.rank, data_group.size, data_group.timeout) == (
        control_group.rank,
        control_group.size,
        control_group.timeout,
    )
    samples = collect.CollectiveBenchmark(Comm(data_group), torch.device("cpu"), 2**20).time_collectives()
    assert samples.keys() >= set(COLLECTIVES)
    assert collect.run_trial(data_group, torch.device("cpu")).max_difference < 1e-12


@ranks(2)
def test_trial_detects_wrong_steps(ctx: RankContext) -> None:
    """Check the check: the sharded optimizer gets slightly different data."""
    trial_step = collect._trial_step

    def step_on_other_data(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> None:
        trial_step(model, optimizer, inputs * 1.001 if isinstance(optimizer, zeroshard.ShardedOptimizer) else inputs)

    with patch.object(collect, "_trial_step", step_on_other_data):
        assert collect.run_trial(Group(), torch.device("cpu")).max_difference > 1e-6


@ranks(1, 2, 3)
def test_recommended_code_runs(ctx: RankContext) -> None:
    """The recommended call makes an optimizer that trains like the plain one."""
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
    report = json.loads(torchrun("-m", 2, tmp_path, "zeroshard", "doctor", "--json"))
    assert (report["healthy"], report["world_size"]) == (True, 2)
    assert [info["local_size"] for info in report["ranks"]] == [2, 2]


@pytest.mark.timeout(180)
def test_missing_rank_times_out(tmp_path: Path) -> None:
    rendezvous_env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-m", "zeroshard", "doctor", "--timeout", "2"]
    env = {**os.environ, **GLOO_ENV, **rendezvous_env}
    process = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=150)
    assert (process.returncode, process.stdout) == (1, "")
    message = process.stderr.splitlines()[-1]
    assert message.startswith(
        "zeroshard doctor: not healthy: rank 0 of 2: the ranks did not all find each other within 2 s"
    )


@pytest.mark.gpu
@pytest.mark.timeout(180)
def test_doctor_on_gpu(tmp_path: Path) -> None:
    """One rank measures NCCL; two cannot share a GPU."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    options = ["-m", "zeroshard", "doctor", "--json", "--backend", "nccl"]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "0"}
    for num_ranks in (1, 2):
        args = [*command, str(num_ranks), *options]
        process = subprocess.run(args, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert process.returncode == num_ranks - 1, process.stderr
        report = json.loads(process.stdout)
        assert report["backend"] == ("nccl" if num_ranks == 1 else "gloo")
        assert report["ranks"][0]["gpu"]["name"] == torch.cuda.get_device_name(0)
        assert report["ranks"][0]["trial"]["max_difference"] < 1e-9
