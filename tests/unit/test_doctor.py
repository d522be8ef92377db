"""Checks, advice and reports of the doctor, on made-up job data."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

import zeroshard
from tests.support.tools import GIB, some_facts, some_gpu, some_job, some_measured, with_facts, with_measured
from zeroshard.doctor import collect, report
from zeroshard.doctor.checks import (
    ERROR,
    NOTE,
    WARNING,
    Finding,
    NetworkProfile,
    profile_network,
    recommend_options,
    run_checks,
)
from zeroshard.doctor.collect import (
    CollectiveTiming,
    JobInfo,
    Link,
    NodeBandwidths,
    RankInfo,
    RankMeasurements,
    RankSpeed,
    TrialResult,
    choose_backend,
    find_shared_gpus,
    has_equal_nodes,
    ranks_by_host,
    ranks_by_node,
)
from zeroshard.doctor.report import make_report

HEALTHY = some_job()


def single_finding(job: JobInfo) -> Finding:
    (found,) = run_checks(job)
    return found


def test_healthy_job_has_no_findings() -> None:
    assert run_checks(HEALTHY) == []
    assert make_report(HEALTHY).exit_status == 0


# ---- mismatches between ranks


@pytest.mark.parametrize(("name", "level"), [("torch", ERROR), ("zeroshard", ERROR), ("python", WARNING)])
def test_version_mismatch(name: str, level: str) -> None:
    versions = {**HEALTHY.rank_infos[0].versions, name: "9.9"}
    found = single_finding(with_facts(HEALTHY, 2, versions=versions))
    assert (found.level, found.what) == (level, f"version of {name}")
    assert found.found == f"rank 2: 9.9; ranks 0, 1, 3: {HEALTHY.rank_infos[0].versions[name]}"


def test_version_missing_on_some_ranks() -> None:
    found = single_finding(with_facts(HEALTHY, 1, versions={**HEALTHY.rank_infos[0].versions, "NCCL": "2.29"}))
    assert (found.level, found.found) == (ERROR, "rank 1: 2.29; ranks 0, 2, 3: none")


@pytest.mark.parametrize(("name", "level"), [("GLOO_X", WARNING), ("TORCH_X", WARNING), ("NCCL_ALGO", ERROR)])
def test_environment_mismatch(name: str, level: str) -> None:
    found = single_finding(with_facts(HEALTHY, 3, environment={**HEALTHY.rank_infos[3].environment, name: "a b"}))
    assert (found.level, found.what) == (level, f"environment: {name}")
    assert found.found == "rank 3: 'a b'; ranks 0, 1, 2: not set"
    assert name in found.do


def test_empty_variable_differs_from_unset() -> None:
    one = with_facts(HEALTHY, 0, environment={**HEALTHY.rank_infos[0].environment, "NCCL_DEBUG": ""})
    assert single_finding(one).found == "rank 0: ''; ranks 1, 2, 3: not set"


def test_visible_devices_may_differ() -> None:
    assert len({it.environment["CUDA_VISIBLE_DEVICES"] for it in HEALTHY.rank_infos}) == 4
    assert run_checks(HEALTHY) == []


def test_setting_mismatch() -> None:
    found = single_finding(with_facts(HEALTHY, 0, settings={"deterministic algorithms": "True"}))
    assert (found.level, found.found) == (ERROR, "rank 0: True; ranks 1, 2, 3: False")


def test_backend_mismatch() -> None:
    found = run_checks(with_facts(HEALTHY, 1, backend="gloo"))
    assert [(it.level, it.what, it.found) for it in found] == [
        (ERROR, "--backend", "rank 1: gloo; ranks 0, 2, 3: none")
    ]


# ---- nodes and GPUs


def ranks_with_gpus(*numbers: int | None, backend: str = "") -> list[RankInfo]:
    gpus = [None if number is None else some_gpu(number) for number in numbers]
    return [some_facts(rank, gpu=gpu, backend=backend) for rank, gpu in enumerate(gpus)]


def test_hosts_and_nodes() -> None:
    ranks = [some_facts(rank, 2) for rank in range(4)]
    assert ranks_by_host(ranks) == {"host0": [0, 1], "host1": [2, 3]}
    assert ranks_by_node(ranks) == [[0, 1], [2, 3]]
    assert has_equal_nodes(ranks)
    assert ranks_by_node([replace(it, host="the same") for it in ranks]) == [[0, 1], [2, 3]]
    assert ranks_by_node([replace(it, local_rank=-1) for it in ranks]) == [[0, 1], [2, 3]]
    assert ranks_by_node([replace(it, local_rank=-1, host="the same") for it in ranks]) == [[0, 1, 2, 3]]


@pytest.mark.parametrize(
    "ranks",
    [
        [some_facts(rank, 4) for rank in range(4)],
        [some_facts(rank, 1) for rank in range(4)],
        [some_facts(rank, 2) for rank in range(3)],
        [some_facts(rank, 2, local_size=4) for rank in range(4)],
        [some_facts(rank, 2, local_rank=-1, local_size=-1) for rank in range(4)],
    ],
    ids=["one host", "one rank per host", "unequal", "some ranks absent", "unknown local rank"],
)
def test_unequal_or_trivial_nodes(ranks: list[RankInfo]) -> None:
    assert not has_equal_nodes(ranks)


def test_choose_backend() -> None:
    assert choose_backend(ranks_with_gpus(0, 1)) == "nccl"
    assert choose_backend(ranks_with_gpus(0, 1, backend="nccl")) == "nccl"
    assert choose_backend(ranks_with_gpus(0, 1, backend="gloo")) == "gloo"
    assert choose_backend(ranks_with_gpus(0, 0)) == "gloo"
    assert choose_backend(ranks_with_gpus(0, None)) == "gloo"
    assert choose_backend(ranks_with_gpus(None, None)) == "gloo"
    assert choose_backend([*ranks_with_gpus(0), replace(ranks_with_gpus(0, 1)[1], backend="gloo")]) == "gloo"


@pytest.mark.parametrize(("backend", "level"), [("nccl", ERROR), ("", WARNING)])
def test_two_ranks_on_one_gpu(backend: str, level: str) -> None:
    ranks = ranks_with_gpus(0, 1, 1, backend=backend)
    assert find_shared_gpus(ranks) == {"host0 cuda:1": [1, 2]}
    found = single_finding(replace(some_job(3), rank_infos=ranks))
    assert (found.level, found.what) == (level, "GPU host0 cuda:1")
    assert found.found.startswith("ranks 1, 2 would all use it")


def test_gpu_missing_on_some_ranks() -> None:
    found = single_finding(replace(some_job(3), rank_infos=ranks_with_gpus(0, None, 2)))
    assert (found.level, found.found) == (ERROR, "none for rank 1")


def test_nccl_without_gpus() -> None:
    found = single_finding(replace(some_job(2), rank_infos=ranks_with_gpus(None, None, backend="nccl")))
    assert (found.level, found.found) == (ERROR, "none for ranks 0, 1")


def test_gpu_does_not_respond() -> None:
    ranks = ranks_with_gpus(0, None)
    found = single_finding(replace(some_job(2), rank_infos=[ranks[0], replace(ranks[1], gpu_trouble="cuda:0: no")]))
    assert (found.level, found.what, found.found) == (ERROR, "GPU of rank 1", "cuda:0: no")


def test_unequal_number_of_ranks_per_host() -> None:
    found = single_finding(some_job(3, ranks_a_host=2))
    assert (found.level, found.found) == (WARNING, "from 1 to 2")


def test_single_rank_is_noted() -> None:
    found = single_finding(some_job(1, local_size=1))
    assert (found.level, found.what) == (NOTE, "ranks")


# ---- memory, threads, clocks, speed


def test_low_memory() -> None:
    gpu = replace(some_gpu(1), free=40 * GIB)
    ranks = [*ranks_with_gpus(0), replace(ranks_with_gpus(0, 1)[1], gpu=gpu)]
    found = single_finding(replace(some_job(2), rank_infos=ranks))
    assert (found.level, found.found) == (WARNING, "40.0 of 80.0 GiB are free")
    assert found.what == "memory of the GPU of rank 1"
    found = single_finding(some_job(host_free=GIB))
    assert (found.level, found.what, found.found) == (WARNING, "memory of host host0", "1.0 of 64.0 GiB are free")


def test_number_of_threads() -> None:
    cores = tuple(range(32))
    found = single_finding(some_job(threads=9, cores=cores))
    assert (found.level, found.found) == (WARNING, "36 of ranks 0, 1, 2, 3 on 32 cores")
    assert found.do == "export OMP_NUM_THREADS=8"
    found = single_finding(some_job(threads=1, cores=(0, 1)))
    assert (found.level, found.do) == (WARNING, "start fewer ranks there")
    found = single_finding(some_job(threads=1, cores=cores))
    assert (found.level, found.do) == (NOTE, "export OMP_NUM_THREADS=8")
    pinned = [some_facts(rank, cores=(rank,), threads=1) for rank in range(4)]
    assert run_checks(replace(HEALTHY, rank_infos=pinned)) == []


@pytest.mark.parametrize(
    ("offset", "uncertainty", "is_skewed"), [(3.0, 0.1, True), (-3.0, 0.1, True), (3.0, 2.5, False)]
)
def test_clock_skew(offset: float, uncertainty: float, is_skewed: bool) -> None:
    found = run_checks(with_measured(HEALTHY, 2, link=Link(offset, uncertainty, 1e9)))
    assert [(it.level, it.what) for it in found] == [(WARNING, "clock of rank 2 on host0")] * is_skewed


@pytest.mark.parametrize(
    "changes",
    [{"speed": RankSpeed(1e11, 2e10)}, {"speed": RankSpeed(1e12, 2e9)}, {"link": Link(0.0, 0.0, 1e8)}],
    ids=["matmul", "copy", "link"],
)
def test_slow_rank(changes: dict[str, Any]) -> None:
    found = single_finding(with_measured(HEALTHY, 3, **changes))
    assert found.level == WARNING
    assert found.what.startswith("rank 3 on host0 is slow")


def test_links_across_hosts_are_compared_separately() -> None:
    job = some_job(8, ranks_a_host=4)
    for rank in range(4, 8):
        job = with_measured(job, rank, link=Link(0.0, 0.0, 1e7))
    assert run_checks(job) == []
    found = single_finding(with_measured(job, 7, link=Link(0.0, 0.0, 1e6)))
    assert found.what == "rank 7 on host1 is slow: messages to rank 0 from ranks on other hosts"


# ---- the trial


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"trial": None, "trouble": "OSError: no"}, "rank 1: OSError: no"),
        ({"trial": TrialResult(1.5, 0.5, 1e-3, "abc")}, "rank 1: parameters differ by 0.001"),
        ({"trial": TrialResult(1.5, 0.5, float("nan"), "abc")}, "rank 1: parameters differ by nan"),
        ({"trial": TrialResult(1.5, 1.5, 0.0, "abc")}, "rank 1: the loss went from 1.5000 to 1.5000"),
        ({"trial": TrialResult(1.5, float("nan"), 0.0, "abc")}, "rank 1: the loss went from 1.5000 to nan"),
        ({"trial": TrialResult(1.5, 0.5, 0.0, "other")}, "ranks ended with 2 different sets of parameters"),
    ],
)
def test_failed_trial(changes: dict[str, Any], found: str) -> None:
    job = with_measured(HEALTHY, 1, **changes)
    assert single_finding(job).level == ERROR
    assert single_finding(job).found == found
    assert make_report(job).exit_status == 1
    assert "not healthy (1 error, 0 warnings)" in make_report(job).as_text()


# ---- advice


def evaluate_call(call: str) -> tuple[zeroshard.ZeroConfig, str | None]:
    """The config and shard_group_size that a recommended call passes to `shard`."""
    given: dict[str, Any] = {}

    class Zeroshard:
        def __getattr__(self, name: str) -> Any:
            return getattr(zeroshard, name)

        def shard(self, model: object, factory: object, **options: Any) -> None:
            assert (model, factory) == ("model", torch.optim.AdamW)
            given.update(options)

    exec(call, {"zeroshard": Zeroshard(), "torch": torch, "model": "model"})
    assert given.keys() - {"shard_group_size", "config"} == {"lr"}
    return given.get("config", zeroshard.ZeroConfig()), given.get("shard_group_size")


def make_config(**changes: Any) -> zeroshard.ZeroConfig:
    return zeroshard.ZeroConfig(**changes)


NETWORK = NetworkProfile("nccl", 16, 2, latency_s=1e-4, bandwidth=1e10)


@pytest.mark.parametrize(
    ("network", "mib", "overlap", "within"),
    [
        (NetworkProfile("gloo", 1, 1, 1e-5, 1e12), None, False, None),
        (NetworkProfile("gloo", 4, 1, 1e-3, 1e9), None, False, None),
        (NetworkProfile("gloo", 4, 1, 5e-3, 1e9), 128, False, None),
        (NetworkProfile("gloo", 4, 2, 1e-3, 1e8), None, True, None),
        (NETWORK, None, True, None),
        (replace(NETWORK, latency_s=1e-3), None, True, None),
        (replace(NETWORK, latency_s=2e-3), 512, True, None),
        (replace(NETWORK, latency_s=1.0), 512, True, None),
        (replace(NETWORK, intra_node_bandwidth=1e11, inter_node_bandwidth=1e10), None, True, "node"),
        (replace(NETWORK, intra_node_bandwidth=1e10, inter_node_bandwidth=1e10), None, True, None),
    ],
)
def test_recommended_options(network: NetworkProfile, mib: int | None, overlap: bool, within: str | None) -> None:
    """Only options that differ from the defaults are recommended."""
    advice = recommend_options(network)
    partition = None if mib is None else zeroshard.FlatShards(bucket_bytes=mib * 2**20)
    expected = make_config(partition=partition, overlap_param_gather=overlap)
    assert evaluate_call(advice.call) == (expected, within)
    assert eval(advice.config) == expected
    assert advice.reasons


def test_network_profile_uses_slowest_rank() -> None:
    slow = tuple(
        CollectiveTiming(verb, "a way", 1e-3, 1e-1, 16 * 2**20, 0.75) for verb in ("reduce-scatter", "all-gather")
    )
    job = with_measured(HEALTHY, 2, timings=slow)
    job = replace(job, measurements=[replace(it, rates=NodeBandwidths(2e9, 1e9)) for it in job.measurements])
    found = profile_network(job)
    assert (found.latency_s, found.intra_node_bandwidth, found.inter_node_bandwidth) == (1e-3, 2e9, 1e9)
    assert found.bandwidth == pytest.approx(16 * 2**20 / 1e-1)


# ---- reports


def test_json_is_complete() -> None:
    said = json.loads(json.dumps(make_report(HEALTHY).as_dict()))
    assert said.keys() == {
        *("healthy", "backend", "world_size", "hosts", "findings", "advice", "collectives", "ranks"),
    }
    assert (said["healthy"], said["world_size"], said["hosts"]) == (True, 4, {"host0": [0, 1, 2, 3]})
    assert [it["verb"] for it in said["collectives"]] == ["all-reduce", "reduce-scatter", "all-gather", "broadcast"]
    assert said["ranks"][3]["link"]["rate"] == 1e9
    assert eval(said["advice"]["config"]) == eval(make_report(HEALTHY).advice.config)


def test_json_has_no_non_finite_numbers() -> None:
    job = with_measured(HEALTHY, 1, trial=TrialResult(1.5, float("inf"), float("nan"), "abc"))
    said = json.loads(json.dumps(make_report(job).as_dict(), allow_nan=False))
    assert said["ranks"][1]["trial"] == {"before": 1.5, "after": "inf", "difference": "nan", "digest": "abc"}


def test_text_lists_findings_and_ranks() -> None:
    job = some_job(20, ranks_a_host=20, environment={"NCCL_ALGO": "Ring"})
    text = make_report(with_facts(job, 19, environment={"NCCL_ALGO": "Tree"})).as_text()
    assert "not healthy (1 error, 0 warnings); 20 ranks on 1 host, gloo" in text
    assert "error: environment: NCCL_ALGO: rank 19: 'Tree'; ranks 0, 1," in text
    assert "... and 4 ranks more: see --json" in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_rank_data_survives_json_round_trip() -> None:
    mine, measured = some_facts(3, gpu=some_gpu(3)), some_measured(3, rates=NodeBandwidths(1.0, 2.0))
    assert RankInfo.from_dict(json.loads(json.dumps(asdict(mine)))) == mine
    assert RankMeasurements.from_dict(json.loads(json.dumps(asdict(measured)))) == measured
    alone = some_measured(0, trial=None, trouble="it")
    assert RankMeasurements.from_dict(json.loads(json.dumps(asdict(alone)))) == alone


# ---- the program


def test_collect_rank_info(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "NCCL_DEBUG": "INFO", "SECRET": "x"}.items():
        monkeypatch.setenv(name, value)
    found = collect.collect_rank_info(5, "gloo")
    assert (found.rank, found.local_rank, found.local_size, found.backend, found.gpu) == (5, 1, 2, "gloo", None)
    assert found.versions.keys() >= {"python", "torch", "zeroshard"}
    assert found.versions["torch"] == torch.__version__
    assert found.environment["NCCL_DEBUG"] == "INFO"
    assert "SECRET" not in found.environment
    assert 0 < found.host_free <= found.host_total
    assert found.threads == torch.get_num_threads()


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
    with pytest.raises(SystemExit) as ended:
        report.main(arguments)
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert "usage: zeroshard doctor" in told
    assert ("a number of seconds above 0" in told) == ("--timeout" in arguments)


def test_incomplete_environment(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "0")
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert report.main([]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("zeroshard doctor: not healthy: rank 0 of ?: the environment does not say which ranks")
    assert "WORLD_SIZE" in err


def test_watchdog_exits_after_timeout(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    ended, codes = threading.Event(), []

    def end(code: int) -> None:
        codes.append(code)
        ended.set()

    monkeypatch.setattr(os, "_exit", end)
    with collect.Watchdog(0.01, "rank 1 of 2") as it:
        it.set_phase("measuring collectives")
        assert ended.wait(60)
    assert codes == [1]
    assert (
        capsys.readouterr().err == "zeroshard doctor: rank 1 of 2 gives up measuring collectives, after 0.01 seconds\n"
    )


def test_watchdog_does_not_exit_while_progressing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "_exit", lambda _: pytest.fail("ended"))
    with collect.Watchdog(1000, "rank 0 of 2") as it:
        for place in ("one", "another"):
            it.set_phase(place)
            (timer,) = [
                thread
                for thread in threading.enumerate()
                if isinstance(thread, threading.Timer) and thread is it._timer
            ]
    timer.join(60)
    assert not timer.is_alive()
