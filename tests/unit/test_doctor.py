"""Checks, advice and reports of the doctor, on made-up job data."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest
import torch

import zeroshard
from tests.support.tools import (
    GIB,
    make_gpu_info,
    make_job,
    make_measurements,
    make_rank_info,
    with_rank_info,
    with_samples,
    with_trial,
)
from zeroshard.doctor import collect, report
from zeroshard.doctor.checks import (
    Finding,
    MedianInterval,
    estimate,
    recommend_options,
    run_checks,
    summarize_collectives,
)
from zeroshard.doctor.collect import (
    COLLECTIVES,
    ROUNDS,
    JobInfo,
    RankInfo,
    TrialResult,
    choose_backend,
    find_shared_gpus,
    ranks_by_host,
    ranks_by_node,
)
from zeroshard.doctor.report import make_report

HEALTHY = make_job()


def single_finding(job: JobInfo) -> Finding:
    (finding,) = run_checks(job)
    return finding


def test_healthy_job_has_no_findings() -> None:
    assert run_checks(HEALTHY) == []
    assert make_report(HEALTHY).is_healthy


# ---- mismatches between ranks


@pytest.mark.parametrize(("name", "level"), [("torch", "error"), ("zeroshard", "error"), ("python", "warning")])
def test_version_mismatch(name: str, level: str) -> None:
    versions = {**HEALTHY.ranks[0].versions, name: "9.9"}
    finding = single_finding(with_rank_info(HEALTHY, 2, versions=versions))
    assert (finding.level, finding.what) == (level, f"version of {name}")
    assert finding.found == f"rank 2: '9.9'; ranks 0, 1, 3: {HEALTHY.ranks[0].versions[name]!r}"


def test_version_missing_on_some_ranks() -> None:
    finding = single_finding(with_rank_info(HEALTHY, 1, versions={**HEALTHY.ranks[0].versions, "NCCL": "2.29"}))
    assert (finding.level, finding.found) == ("error", "rank 1: '2.29'; ranks 0, 2, 3: not set")


@pytest.mark.parametrize(("name", "level"), [("GLOO_X", "warning"), ("TORCH_X", "warning"), ("NCCL_ALGO", "error")])
def test_environment_mismatch(name: str, level: str) -> None:
    finding = single_finding(with_rank_info(HEALTHY, 3, environment={**HEALTHY.ranks[3].environment, name: "a b"}))
    assert (finding.level, finding.what) == (level, f"environment: {name}")
    assert finding.found == "rank 3: 'a b'; ranks 0, 1, 2: not set"
    assert name in finding.do


def test_empty_variable_differs_from_unset() -> None:
    job = with_rank_info(HEALTHY, 0, environment={**HEALTHY.ranks[0].environment, "NCCL_DEBUG": ""})
    assert single_finding(job).found == "rank 0: ''; ranks 1, 2, 3: not set"


def test_visible_devices_may_differ() -> None:
    assert len({info.environment["CUDA_VISIBLE_DEVICES"] for info in HEALTHY.ranks}) == 4
    assert run_checks(HEALTHY) == []


def test_setting_mismatch() -> None:
    finding = single_finding(with_rank_info(HEALTHY, 0, settings={"deterministic algorithms": "True"}))
    assert (finding.level, finding.found) == ("error", "rank 0: 'True'; ranks 1, 2, 3: 'False'")


def test_backend_mismatch() -> None:
    findings = run_checks(with_rank_info(HEALTHY, 1, backend="gloo"))
    assert [(finding.level, finding.what, finding.found) for finding in findings] == [
        ("error", "--backend", "rank 1: 'gloo'; ranks 0, 2, 3: 'default'")
    ]


# ---- nodes and GPUs


def ranks_with_gpus(*numbers: int | None, backend: str = "") -> list[RankInfo]:
    gpus = [None if number is None else make_gpu_info(number) for number in numbers]
    return [make_rank_info(rank, gpu=gpu, backend=backend) for rank, gpu in enumerate(gpus)]


def test_hosts_and_nodes() -> None:
    ranks = [make_rank_info(rank, 2) for rank in range(4)]
    assert ranks_by_host(ranks) == {"host0": [0, 1], "host1": [2, 3]}
    assert ranks_by_node(ranks) == [[0, 1], [2, 3]]
    assert ranks_by_node([replace(info, host="the same") for info in ranks]) == [[0, 1], [2, 3]]
    assert ranks_by_node([replace(info, local_rank=-1) for info in ranks]) == [[0, 1], [2, 3]]
    assert ranks_by_node([replace(info, local_rank=-1, host="the same") for info in ranks]) == [[0, 1, 2, 3]]


def test_choose_backend() -> None:
    assert choose_backend(ranks_with_gpus(0, 1)) == "nccl"
    assert choose_backend(ranks_with_gpus(0, 1, backend="nccl")) == "nccl"
    assert choose_backend(ranks_with_gpus(0, 1, backend="gloo")) == "gloo"
    assert choose_backend(ranks_with_gpus(0, 0)) == "gloo"
    assert choose_backend(ranks_with_gpus(0, None)) == "gloo"
    assert choose_backend(ranks_with_gpus(None, None)) == "gloo"
    assert choose_backend([*ranks_with_gpus(0), replace(ranks_with_gpus(0, 1)[1], backend="gloo")]) == "gloo"


@pytest.mark.parametrize(("backend", "level"), [("nccl", "error"), ("", "warning")])
def test_two_ranks_on_one_gpu(backend: str, level: str) -> None:
    ranks = ranks_with_gpus(0, 1, 1, backend=backend)
    assert find_shared_gpus(ranks) == [[1, 2]]
    finding = single_finding(replace(make_job(3), ranks=ranks))
    assert (finding.level, finding.what) == (level, "GPU host0 cuda:1")
    assert finding.found.startswith("shared by ranks 1, 2")


def test_gpu_missing_on_some_ranks() -> None:
    finding = single_finding(replace(make_job(3), ranks=ranks_with_gpus(0, None, 2)))
    assert (finding.level, finding.found) == ("error", "none for rank 1")


def test_nccl_without_gpus() -> None:
    finding = single_finding(replace(make_job(2), ranks=ranks_with_gpus(None, None, backend="nccl")))
    assert (finding.level, finding.found) == ("error", "none for ranks 0, 1")


def test_gpu_does_not_respond() -> None:
    ranks = ranks_with_gpus(0, None)
    finding = single_finding(replace(make_job(2), ranks=[ranks[0], replace(ranks[1], gpu_error="cuda:0: no")]))
    assert (finding.level, finding.what, finding.found) == ("error", "GPU of rank 1", "cuda:0: no")


def test_unequal_number_of_ranks_per_host() -> None:
    finding = single_finding(make_job(3, ranks_per_host=2))
    assert (finding.level, finding.found) == ("warning", "1 to 2")


def test_single_rank_is_noted() -> None:
    finding = single_finding(make_job(1, local_size=1))
    assert (finding.level, finding.what) == ("note", "ranks")


# ---- memory, threads, clocks, speed


def test_low_memory() -> None:
    gpu = replace(make_gpu_info(1), free=40 * GIB)
    ranks = [*ranks_with_gpus(0), replace(ranks_with_gpus(0, 1)[1], gpu=gpu)]
    finding = single_finding(replace(make_job(2), ranks=ranks))
    assert (finding.level, finding.found) == ("warning", "40 GiB of 80 GiB are free")
    assert finding.what == "GPU memory of rank 1"
    finding = single_finding(make_job(host_free=GIB))
    assert (finding.level, finding.what, finding.found) == ("warning", "memory of host0", "1 GiB of 64 GiB are free")


def test_number_of_threads() -> None:
    cores = tuple(range(32))
    finding = single_finding(make_job(threads=9, cores=cores))
    assert (finding.level, finding.found) == ("warning", "36 of ranks 0, 1, 2, 3 on 32 cores")
    assert finding.do == "export OMP_NUM_THREADS=8"
    finding = single_finding(make_job(threads=1, cores=(0, 1)))
    assert (finding.level, finding.do) == ("warning", "start fewer ranks there")
    finding = single_finding(make_job(threads=1, cores=cores))
    assert (finding.level, finding.do) == ("note", "export OMP_NUM_THREADS=8")
    pinned = [make_rank_info(rank, cores=(rank,), threads=1) for rank in range(4)]
    assert run_checks(replace(HEALTHY, ranks=pinned)) == []


@pytest.mark.parametrize(("offset", "ping", "is_skewed"), [(3.0, 0.2, True), (-3.0, 0.2, True), (3.0, 5.0, False)])
def test_clock_skew(offset: float, ping: float, is_skewed: bool) -> None:
    findings = run_checks(with_samples(HEALTHY, 2, clock_offset=offset, ping=ping))
    assert [(finding.level, finding.what) for finding in findings] == [
        ("warning", "clock of rank 2 on host0")
    ] * is_skewed


def test_clock_offset_is_that_of_the_fastest_ping() -> None:
    delayed = {"clock_offset": [3.0] * (ROUNDS - 1) + [0.5], "ping": [0.2] * (ROUNDS - 1) + [0.1]}
    assert run_checks(with_samples(HEALTHY, 2, **delayed)) == []


@pytest.mark.parametrize(("name", "rate"), [("matmul", 1e11), ("memcpy", 2e9), ("link", 1e8)])
def test_slow_rank(name: str, rate: float) -> None:
    finding = single_finding(with_samples(HEALTHY, 3, **{name: rate}))
    assert finding.level == "warning"
    assert finding.what.startswith(f"rank 3 on host0 is slow: {name}")


def test_links_across_hosts_are_compared_separately() -> None:
    job = make_job(8, ranks_per_host=4)
    for rank in range(4, 8):
        job = with_samples(job, rank, link=1e7)
    assert run_checks(job) == []
    finding = single_finding(with_samples(job, 7, link=1e6))
    assert finding.what == "rank 7 on host1 is slow: link to rank 0 on another host"


# ---- noise


def test_interval_contains_the_median_in_96_percent_of_cases() -> None:
    """Nine values, each above or below the true median with equal probability: all 512 cases."""
    cases = [[float(case >> number & 1) - 0.5 for number in range(ROUNDS)] for case in range(2**ROUNDS)]
    intervals = [estimate(case) for case in cases]
    assert sum(interval.low < 0 < interval.high for interval in intervals) / len(cases) == 1 - 20 / 512
    assert estimate([5.0, 1.0, 9.0, 2.0, 8.0, 3.0, 7.0, 4.0, 6.0]) == MedianInterval(2.0, 5.0, 8.0)


@pytest.mark.parametrize(("slow_rounds", "is_reported"), [(ROUNDS, True), (ROUNDS - 1, True), (ROUNDS - 2, False)])
def test_slow_rank_is_reported_only_outside_the_noise(slow_rounds: int, is_reported: bool) -> None:
    rates = [1e11] * slow_rounds + [1e12] * (ROUNDS - slow_rounds)
    assert len(run_checks(with_samples(HEALTHY, 3, matmul=rates))) == is_reported


def test_load_that_slows_all_ranks_is_not_reported() -> None:
    """Ranks are compared within a round, so that load which comes and goes does not matter."""
    job = HEALTHY
    for rank in range(4):
        job = with_samples(job, rank, matmul=[1e12, 1e10] * 4 + [1e12])
    assert run_checks(job) == []


# ---- the trial


@pytest.mark.parametrize(
    ("trial", "expected"),
    [
        (TrialResult(error="OSError: no"), "rank 1: OSError: no"),
        (TrialResult(1.5, 0.5, 1e-3), "rank 1: parameters differ by 0.001"),
        (TrialResult(1.5, 0.5, nan), "rank 1: parameters differ by nan"),
        (TrialResult(1.5, 1.5, 0.0), "rank 1: the loss went from 1.5000 to 1.5000"),
        (TrialResult(1.5, nan, 0.0), "rank 1: the loss went from 1.5000 to nan"),
    ],
)
def test_failed_trial(trial: TrialResult, expected: str) -> None:
    job = with_trial(HEALTHY, 1, trial)
    assert single_finding(job).level == "error"
    assert single_finding(job).found == expected
    assert not make_report(job).is_healthy
    assert "not healthy (1 error, 0 warnings)" in make_report(job).as_text()


# ---- advice


def evaluate_call(call: str) -> tuple[zeroshard.ZeroConfig, str | None]:
    """The config and shard_group_size that a recommended call passes to `shard`."""
    call_options: dict[str, Any] = {}

    class Zeroshard:
        def __getattr__(self, name: str) -> Any:
            return getattr(zeroshard, name)

        def shard(self, model: object, factory: object, **options: Any) -> None:
            assert (model, factory) == ("model", torch.optim.AdamW)
            call_options.update(options)

    exec(call, {"zeroshard": Zeroshard(), "torch": torch, "model": "model"})
    assert call_options.keys() - {"shard_group_size", "config"} == {"lr"}
    return call_options.get("config", zeroshard.ZeroConfig()), call_options.get("shard_group_size")


LATENCIES = ("reduce-scatter_latency", "all-gather_latency")
BANDWIDTH = 16 * 2**20 / 1e-2
"""Of a bucket, as made-up samples have it."""


def slow_network(latency: float | Sequence[float], job: JobInfo = HEALTHY, **nodes: float | Sequence[float]) -> JobInfo:
    """Return a job with this latency on one rank, which all others wait for, and these bandwidths of nodes."""
    measurements = [make_measurements(rank, **nodes) for rank in range(len(job.ranks))]
    return with_samples(replace(job, measurements=measurements), 1, **dict.fromkeys(LATENCIES, latency), **nodes)


NODES = make_job(4, ranks_per_host=2)
NCCL = make_job(4, "nccl")


@pytest.mark.parametrize(
    ("job", "bucket_mib", "overlap", "group_size"),
    [
        (make_job(1), None, False, None),
        (HEALTHY, None, False, None),
        (slow_network(1e-3), None, False, None),
        (slow_network(1.8e-3), 64, False, None),
        (slow_network(1.0), 512, False, None),
        (NODES, None, True, None),
        (make_job(1, "nccl"), None, False, None),
        (NCCL, None, True, None),
        (slow_network(2e-3, NCCL), None, True, None),
        (slow_network(1e-2, NCCL), 512, True, None),
        (slow_network(1e-4, NODES, **{"intra-node": 1e10, "inter-node": 1e9}), None, True, "node"),
        (slow_network(1e-4, NODES, **{"intra-node": 1e10, "inter-node": 1e10}), None, True, None),
    ],
)
def test_recommended_options(job: JobInfo, bucket_mib: int | None, overlap: bool, group_size: str | None) -> None:
    """Only options that differ from the defaults are recommended."""
    advice = recommend_options(job)
    partition = None if bucket_mib is None else zeroshard.FlatShards(bucket_bytes=bucket_mib * 2**20)
    expected = zeroshard.ZeroConfig(partition=partition, overlap_param_gather=overlap)
    assert evaluate_call(advice.call) == (expected, group_size)
    assert "noisy" not in " ".join(advice.reasons)


def test_noisy_latency_changes_no_option() -> None:
    """In two rounds of nine, latency is small enough for the default."""
    advice = recommend_options(slow_network([1e-4] * 2 + [2e-3] * (ROUNDS - 2)))
    assert evaluate_call(advice.call) == (zeroshard.ZeroConfig(), None)
    assert advice.reasons[0].startswith("bucket size: 25 MiB, the default of large models: ")
    assert "between 3 and 64 MiB: too noisy for advice" in advice.reasons[0]


def test_noisy_bandwidth_changes_no_option() -> None:
    bandwidths: dict[str, Any] = {"intra-node": 1e10, "inter-node": [9e9] * 2 + [1e9] * (ROUNDS - 2)}
    advice = recommend_options(slow_network(1e-4, NODES, **bandwidths))
    assert evaluate_call(advice.call)[1] is None
    assert "the ratio varies from 0.10 to 0.90: too noisy for advice" in advice.reasons[-1]


def test_collectives_are_timed_on_the_slowest_rank_of_each_round() -> None:
    alternating = [1e-1, 1e-2] * 4
    job = with_samples(HEALTHY, 1, broadcast=[*alternating, 1e-2])
    job = with_samples(job, 2, broadcast=[*alternating[::-1], 1e-2])
    *_, broadcast = summarize_collectives(job)
    assert (broadcast.transport, broadcast.duration_s) == ("native", MedianInterval(1e-1, 1e-1, 1e-1))
    assert broadcast.bandwidth == pytest.approx(16 * 2**20 / 1e-1)


# ---- reports


def test_json_is_complete() -> None:
    data = json.loads(json.dumps(make_report(HEALTHY).as_dict()))
    assert data.keys() == {
        *("healthy", "backend", "world_size", "hosts", "findings", "advice", "collectives", "ranks"),
    }
    assert (data["healthy"], data["world_size"], data["hosts"]) == (True, 4, {"host0": [0, 1, 2, 3]})
    assert [row["collective"] for row in data["collectives"]] == list(COLLECTIVES)
    assert data["collectives"][0]["latency_s"] == {"low": 1e-4, "median": 1e-4, "high": 1e-4}
    assert data["ranks"][3]["samples"]["link"] == [1e9] * ROUNDS
    assert data["advice"]["call"] == make_report(HEALTHY).advice.call


def test_json_has_no_non_finite_numbers() -> None:
    job = with_trial(HEALTHY, 1, TrialResult(1.5, inf, nan))
    data = json.loads(json.dumps(make_report(job).as_dict(), allow_nan=False))
    assert data["ranks"][1]["trial"] == {
        "initial_loss": 1.5,
        "final_loss": "Infinity",
        "max_difference": "NaN",
        "error": "",
    }


def test_text_lists_findings_and_ranks() -> None:
    job = make_job(20, ranks_per_host=20, environment={"NCCL_ALGO": "Ring"})
    text = make_report(with_rank_info(job, 19, environment={"NCCL_ALGO": "Tree"})).as_text()
    assert "not healthy (1 error, 0 warnings); 20 ranks on 1 host, gloo" in text
    assert "error: environment: NCCL_ALGO: rank 19: 'Tree'; ranks 0, 1," in text
    assert "... and 4 ranks more: see --json" in text
    assert all(line == line.rstrip() for line in text.splitlines())


# ---- the program


def test_collect_rank_info(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "NCCL_DEBUG": "INFO", "SECRET": "x"}.items():
        monkeypatch.setenv(name, value)
    info = collect.collect_rank_info(5, "gloo")
    assert (info.rank, info.local_rank, info.local_size, info.backend, info.gpu) == (5, 1, 2, "gloo", None)
    assert info.versions.keys() >= {"python", "torch", "zeroshard"}
    assert info.versions["torch"] == torch.__version__
    assert info.environment["NCCL_DEBUG"] == "INFO"
    assert "SECRET" not in info.environment
    assert 0 < info.host_free <= info.host_total
    assert info.threads == torch.get_num_threads()


def test_gpu_error_is_reported_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise RuntimeError("CUDA error: out of order\nmore")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", fail)
    assert collect._probe_gpu(3) == (None, "cuda:1: CUDA error: out of order")


@pytest.mark.parametrize(
    "arguments", [["--backend", "mpi"], ["--timeout", "0"], ["--timeout", "soon"], ["it"]], ids=" ".join
)
def test_invalid_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        report.main(arguments)
    assert raised.value.code == 2
    text = capsys.readouterr().err
    assert "usage: zeroshard doctor" in text
    assert ("argument --timeout: " in text) == ("--timeout" in arguments)


def test_incomplete_environment(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "0")
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert report.main([]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("zeroshard doctor: not healthy: rank 0 of ?: cannot initialize a process group from")
    assert "WORLD_SIZE" in err
    assert "torchrun" in err


def test_watchdog_exits_after_timeout(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    exited, codes = threading.Event(), []

    def record_exit(code: int) -> None:
        codes.append(code)
        exited.set()

    monkeypatch.setattr(os, "_exit", record_exit)
    watchdog = report.Watchdog(0.01, "rank 1 of 2")
    watchdog.set_phase("measuring collectives")
    assert exited.wait(60)
    assert codes == [1]
    assert (
        capsys.readouterr().err == "zeroshard doctor: rank 1 of 2 timed out after 0.01 s while measuring collectives\n"
    )


def test_watchdog_does_not_exit_while_progressing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next phase and the end cancel the timer of a phase."""
    codes: list[int] = []
    timers: list[threading.Timer] = []

    class RecordedTimer(threading.Timer):
        def start(self) -> None:
            timers.append(self)

    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(threading, "Timer", RecordedTimer)
    watchdog = report.Watchdog(0, "rank 0 of 2")
    watchdog.set_phase("one")
    watchdog.set_phase("another")
    watchdog.stop()
    for timer in timers:
        timer.run()  # expires
    assert len(timers) == 2
    assert codes == []
