"""Checks and advice of `zeroshard doctor`.

All functions are pure. Every rank evaluates them on the same `JobInfo` and so gets the same findings.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Literal

import torch

from .._types import MIB, format_ranks
from ..layout.partition import default_bucket_bytes
from .collect import CollectiveTiming, JobInfo, RankInfo, find_shared_gpus, ranks_by_host, ranks_by_node

# ---------------------------------------------------------------------------------------------------------------------
# Findings.


NOTE: Literal["note"] = "note"
WARNING: Literal["warning"] = "warning"
ERROR: Literal["error"] = "error"
Level = Literal["note", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """One observation about a job. Only an error makes the job unhealthy."""

    level: Level
    what: str
    found: str
    expected: str
    do: str


def is_healthy(findings: Iterable[Finding]) -> bool:
    return all(finding.level != ERROR for finding in findings)


# ---------------------------------------------------------------------------------------------------------------------
# Advice: from measurements to options of `shard`.


_MAX_LATENCY_FRACTION = 0.05
"""Largest acceptable fraction of a bucket's transfer time that is latency."""
_MAX_BUCKET_MIB = 512
_SLOW_INTER_NODE_RATIO = 0.5
"""Inter-node over intra-node bandwidth, below which sharding within a node pays off."""


@dataclass(frozen=True)
class Advice:
    """Recommended options as Python code, and the reasons for them."""

    config: str
    call: str
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class NetworkProfile:
    """The measurements that decide the advice. Bandwidths in bytes of a bucket per second."""

    backend: str
    world_size: int
    num_nodes: int
    latency_s: float
    bandwidth: float
    intra_node_bandwidth: float | None = None
    inter_node_bandwidth: float | None = None


def profile_network(job: JobInfo) -> NetworkProfile:
    """Summarize the measurements: the slowest collective, and medians over ranks."""
    timings = [slowest_timing(job, name) for name in ("reduce-scatter", "all-gather")]
    rates = [measured.rates for measured in job.measurements if measured.rates is not None]
    return NetworkProfile(
        backend=job.backend,
        world_size=len(job.rank_infos),
        num_nodes=len(ranks_by_node(job.rank_infos)),
        latency_s=max(timing.small for timing in timings),
        bandwidth=min(timing.nbytes / max(timing.large, 1e-9) for timing in timings),
        intra_node_bandwidth=median(rate.within for rate in rates) if rates else None,
        inter_node_bandwidth=median(rate.between for rate in rates) if rates else None,
    )


def slowest_timing(job: JobInfo, collective: str) -> CollectiveTiming:
    """Return the timing on the slowest ranks, which all others wait for."""
    timings = [timing for measured in job.measurements for timing in measured.timings if timing.verb == collective]
    first = timings[0]
    small, large = max(timing.small for timing in timings), max(timing.large for timing in timings)
    return CollectiveTiming(collective, first.way, small, large, first.nbytes, first.crossing)


def recommend_options(profile: NetworkProfile) -> Advice:
    """Recommend bucket size, overlap and shard group size."""
    size, reasons = _recommend_bucket_mib(profile)
    overlap = profile.backend == "nccl" or profile.num_nodes > 1
    options = [] if size is None else [f"partition=zeroshard.FlatShards(bucket_bytes={size} * 2**20)"]
    reasons.append("stage=2, the default: gradients take 1/N of their size, at the traffic of stage=1")
    if overlap and profile.world_size > 1:
        options.append("overlap_param_gather=True")
        reasons.append("overlap_param_gather: parameters travel while the next forward pass runs")
    config, group_option = f"zeroshard.ZeroConfig({', '.join(options)})", ""
    if profile.intra_node_bandwidth is not None and profile.inter_node_bandwidth is not None:
        is_worthwhile = profile.inter_node_bandwidth < _SLOW_INTER_NODE_RATIO * profile.intra_node_bandwidth
        group_option = ', shard_group_size="node"' if is_worthwhile else ""
        between, within = profile.inter_node_bandwidth / 1e9, profile.intra_node_bandwidth / 1e9
        bandwidths = f"{between:.2f} GB/s between hosts, {within:.2f} GB/s within"
        reasons.append(f"{'shard_group_size' if is_worthwhile else 'no shard_group_size'}: {bandwidths}")
    config_option = f", config={config}" if options else ""
    call = f"optimizer = zeroshard.shard(model, torch.optim.AdamW, lr=3e-4{config_option}{group_option})"
    return Advice(config, call, tuple(reasons))


def _recommend_bucket_mib(profile: NetworkProfile) -> tuple[int | None, list[str]]:
    """Return a bucket size in MiB at which latency is negligible, or None for the default, and the reason."""
    if profile.world_size == 1:
        return None, ["one rank: nothing travels, and buckets of any size will do"]
    device = torch.device("cuda" if profile.backend == "nccl" else "cpu")
    default = default_bucket_bytes(device, profile.world_size) // MIB
    needed = profile.latency_s * profile.bandwidth / _MAX_LATENCY_FRACTION / MIB
    size = default if needed <= 2 * default else min(_next_power_of_two(needed), _MAX_BUCKET_MIB)
    share = profile.latency_s / (profile.latency_s + size * MIB / profile.bandwidth)
    measured = f"latency {profile.latency_s * 1e3:.2f} ms, {profile.bandwidth / 1e9:.2f} GB/s of a bucket"
    comparison = "the default" if size == default else "more than the default"
    reason = f"buckets of {size} MiB, {comparison}: {measured}, so that {share:.1%} of a message's time is latency"
    return None if size == default else size, [reason]


def _next_power_of_two(value: float) -> int:
    size = 1
    while size < value:
        size *= 2
    return size


def slowest_timings(job: JobInfo) -> Sequence[CollectiveTiming]:
    """Return the slowest timing of each collective, in the order of measurement."""
    return [slowest_timing(job, timing.verb) for timing in job.measurements[0].timings]


# ---------------------------------------------------------------------------------------------------------------------
# Consistency: do all ranks run the same versions with the same settings?


_RANK_LOCAL_VARIABLES = ("CUDA_VISIBLE_DEVICES",)
_RESULT_CHANGING_VARIABLES = ("NCCL_ALGO", "NCCL_PROTO", "NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG")
"""If these differ between ranks, the job hangs or computes different results."""
_HARMLESS_VERSIONS = ("python",)


def check_same_across_ranks(rank_infos: Sequence[RankInfo]) -> Iterator[Finding]:
    """Report every version, setting and variable that differs between ranks."""
    yield from _check_versions(rank_infos)
    yield from _check_torch_settings(rank_infos)
    yield from _check_environment(rank_infos)
    requested = _ranks_by_value(rank_infos, lambda info: info.backend or "none")
    if len(requested) > 1:
        yield Finding(
            ERROR,
            "--backend",
            _format_ranks_by_value(requested),
            "the same on all ranks",
            "start all hosts with the same command",
        )


def _check_versions(rank_infos: Sequence[RankInfo]) -> Iterator[Finding]:
    for name in _all_keys(info.versions for info in rank_infos):
        ranks_by_value = _ranks_by_value(rank_infos, partial(_get_version, name))
        if len(ranks_by_value) > 1:
            level: Level = WARNING if name in _HARMLESS_VERSIONS else ERROR
            yield Finding(
                level,
                f"version of {name}",
                _format_ranks_by_value(ranks_by_value),
                "one version on all ranks",
                f"install the same {name} on all hosts, or start the same interpreter there",
            )


def _check_torch_settings(rank_infos: Sequence[RankInfo]) -> Iterator[Finding]:
    for name in _all_keys(info.settings for info in rank_infos):
        ranks_by_value = _ranks_by_value(rank_infos, partial(_get_torch_setting, name))
        if len(ranks_by_value) > 1:
            yield Finding(
                ERROR,
                f"setting of torch: {name}",
                _format_ranks_by_value(ranks_by_value),
                "the same on all ranks, since it changes numbers",
                "look for what sets it on some hosts only, such as sitecustomize or the environment",
            )


def _check_environment(rank_infos: Sequence[RankInfo]) -> Iterator[Finding]:
    for name in _all_keys(info.environment for info in rank_infos):
        ranks_by_value = _ranks_by_value(rank_infos, partial(_get_variable, name))
        if len(ranks_by_value) > 1 and name not in _RANK_LOCAL_VARIABLES:
            changes_results = name in _RESULT_CHANGING_VARIABLES
            yield Finding(
                ERROR if changes_results else WARNING,
                f"environment: {name}",
                _format_ranks_by_value(ranks_by_value),
                "the same on all ranks" + (", else they hang or compute other numbers" if changes_results else ""),
                f"export {name} in the same way on all hosts, unless it is meant to differ",
            )


def _all_keys(dicts: Iterable[Mapping[str, str]]) -> list[str]:
    return sorted({name for mapping in dicts for name in mapping})


def _ranks_by_value(rank_infos: Sequence[RankInfo], get_value: Callable[[RankInfo], str]) -> dict[str, list[int]]:
    """Group ranks by value, the smallest group first: it is the likely culprit."""
    ranks_by_value: dict[str, list[int]] = defaultdict(list)
    for info in rank_infos:
        ranks_by_value[get_value(info)].append(info.rank)
    return dict(sorted(ranks_by_value.items(), key=lambda item: len(item[1])))


def _format_ranks_by_value(ranks_by_value: dict[str, list[int]]) -> str:
    return "; ".join(f"{format_ranks(ranks)}: {value}" for value, ranks in ranks_by_value.items())


def _get_version(name: str, rank_info: RankInfo) -> str:
    return rank_info.versions.get(name, "none")


def _get_torch_setting(name: str, rank_info: RankInfo) -> str:
    return rank_info.settings[name]


def _get_variable(name: str, rank_info: RankInfo) -> str:
    return repr(rank_info.environment[name]) if name in rank_info.environment else "not set"


# ---------------------------------------------------------------------------------------------------------------------
# Checks of GPUs, placement, memory, threads, clocks, speed and the trial.


_MAX_CLOCK_SKEW_S = 1.0
_MIN_GPU_FREE_FRACTION, _MIN_HOST_FREE_FRACTION = 0.75, 0.1
_SLOW_RANK_FACTOR = 2.5
"""A rank is slow if it is this many times slower than the median."""
_MAX_PARAM_DIFFERENCE = 1e-9
"""Tolerance in float64: only the summation order may differ."""
_LEVEL_ORDER = {ERROR: 0, WARNING: 1, NOTE: 2}


def run_checks(job: JobInfo) -> list[Finding]:
    """Return all findings, the most severe first."""
    rank_infos = job.rank_infos
    findings = [
        *check_same_across_ranks(rank_infos),
        *_check_gpus(job),
        *_check_placement(rank_infos),
        *_check_memory(rank_infos),
        *_check_threads(rank_infos),
    ]
    findings += [*_check_clocks(job), *_check_slow_ranks(job), *_check_trial(job)]
    return sorted(findings, key=lambda finding: _LEVEL_ORDER[finding.level])


def _check_gpus(job: JobInfo) -> Iterator[Finding]:
    rank_infos = job.rank_infos
    for info in rank_infos:
        if info.gpu_trouble:
            yield Finding(
                ERROR,
                f"GPU of rank {info.rank}",
                info.gpu_trouble,
                "a GPU that answers",
                "look at nvidia-smi and the driver there, or leave that host out",
            )
    nccl_requested = any(info.backend == "nccl" for info in rank_infos)
    for gpu, ranks in find_shared_gpus(rank_infos).items():
        yield Finding(
            ERROR if nccl_requested else WARNING,
            f"GPU {gpu}",
            f"{format_ranks(ranks)} would all use it; measured was gloo on the CPU",
            "a GPU of its own for each rank: NCCL refuses others",
            "start as many ranks on a host as it has GPUs, or use the backend gloo",
        )
    ranks_without_gpu = [info.rank for info in rank_infos if info.gpu is None and not info.gpu_trouble]
    if ranks_without_gpu and (nccl_requested or any(info.gpu is not None for info in rank_infos)):
        yield Finding(
            ERROR,
            "GPUs",
            f"none for {format_ranks(ranks_without_gpu)}",
            "a GPU for each rank" if nccl_requested else "a GPU for each rank, or for none",
            "look at CUDA_VISIBLE_DEVICES, the driver and the build of torch there, or use --backend gloo",
        )


def _check_placement(rank_infos: Sequence[RankInfo]) -> Iterator[Finding]:
    if len(rank_infos) == 1:
        yield Finding(
            NOTE,
            "ranks",
            "1",
            "several, for something to be shared",
            "start it as you start training: torchrun ... -m zeroshard doctor",
        )
    sizes = sorted({len(node) for node in ranks_by_node(rank_infos)})
    if len(sizes) > 1:
        yield Finding(
            WARNING,
            "ranks a node",
            f"from {sizes[0]} to {sizes[-1]}",
            "as many on each",
            'start as many on each if you want shard_group_size="node"',
        )


def _check_memory(rank_infos: Sequence[RankInfo]) -> Iterator[Finding]:
    for info in rank_infos:
        if info.gpu is not None and info.gpu.free < _MIN_GPU_FREE_FRACTION * info.gpu.total:
            yield Finding(
                WARNING,
                f"memory of the GPU of rank {info.rank}",
                f"{info.gpu.free / 2**30:.1f} of {info.gpu.total / 2**30:.1f} GiB are free",
                f"at least {_MIN_GPU_FREE_FRACTION:.0%} before training starts",
                "look with nvidia-smi who else uses it",
            )
    for host, ranks in ranks_by_host(rank_infos).items():
        info = rank_infos[ranks[0]]
        if info.host_free < _MIN_HOST_FREE_FRACTION * info.host_total:
            yield Finding(
                WARNING,
                f"memory of host {host}",
                f"{info.host_free / 2**30:.1f} of {info.host_total / 2**30:.1f} GiB are free",
                f"at least {_MIN_HOST_FREE_FRACTION:.0%}",
                "end what else runs there",
            )


def _check_threads(rank_infos: Sequence[RankInfo]) -> Iterator[Finding]:
    for host, ranks in ranks_by_host(rank_infos).items():
        cores = len({core for rank in ranks for core in rank_infos[rank].cores})
        threads, cores_per_rank = [rank_infos[rank].threads for rank in ranks], max(cores // len(ranks), 1)
        found = f"{sum(threads)} of {format_ranks(ranks)} on {cores} cores"
        do = f"export OMP_NUM_THREADS={cores_per_rank}"
        if sum(threads) > cores:
            do = do if max(threads) > cores_per_rank else "start fewer ranks there"
            yield Finding(WARNING, f"threads on {host}", found, f"{cores} at most: they wait for each other", do)
        elif cores_per_rank >= 2 * max(threads):
            yield Finding(NOTE, f"threads on {host}", found, f"up to {cores_per_rank} a rank, for work on the CPU", do)


def _check_clocks(job: JobInfo) -> Iterator[Finding]:
    for info, measured in zip(job.rank_infos, job.measurements, strict=True):
        link = measured.link
        if link is not None and abs(link.ahead) - link.give_or_take > _MAX_CLOCK_SKEW_S:
            yield Finding(
                WARNING,
                f"clock of rank {info.rank} on {info.host}",
                f"{link.ahead:+.3f} s from that of rank 0 (± {link.give_or_take:.4f} s)",
                f"less than {_MAX_CLOCK_SKEW_S:g} s, or logs of ranks cannot be compared",
                "let the hosts take their time from one server (chrony, ntpd)",
            )


def _check_slow_ranks(job: JobInfo) -> Iterator[Finding]:
    """Compare each rank with the median. Links to rank 0 are compared within its host and across hosts separately."""
    first_host, rates_by_kind = job.rank_infos[0].host, defaultdict[str, dict[int, float]](dict)
    for info, measured in zip(job.rank_infos, job.measurements, strict=True):
        rates_by_kind["matrix products"][info.rank] = measured.speed.product
        rates_by_kind["copies in memory"][info.rank] = measured.speed.copy
        if measured.link is not None:
            where = "on its host" if info.host == first_host else "on other hosts"
            rates_by_kind[f"messages to rank 0 from ranks {where}"][info.rank] = measured.link.rate
    for kind, rates in rates_by_kind.items():
        typical = median(rates.values())
        for rank, rate in rates.items():
            if rate * _SLOW_RANK_FACTOR < typical:
                yield Finding(
                    WARNING,
                    f"rank {rank} on {job.rank_infos[rank].host} is slow: {kind}",
                    f"{rate / 1e9:.2f} G/s",
                    f"about the median of all, {typical / 1e9:.2f} G/s",
                    "look what else runs there, and run this again: all ranks wait for the slowest",
                )


def _check_trial(job: JobInfo) -> Iterator[Finding]:
    wrong = Finding(
        ERROR,
        "sharded steps",
        "",
        "those of the unsharded optimizer, the same on all ranks",
        "do not train here: send the output of --json with a report",
    )
    for rank, measured in enumerate(job.measurements):
        trial = measured.trial
        if trial is None:
            yield replace(wrong, found=f"rank {rank}: {measured.trouble}")
        elif not trial.difference <= _MAX_PARAM_DIFFERENCE:
            yield replace(wrong, found=f"rank {rank}: parameters differ by {trial.difference:.3g}")
        elif not trial.after < trial.before:
            yield replace(wrong, found=f"rank {rank}: the loss went from {trial.before:.4f} to {trial.after:.4f}")
    digests = {measured.trial.digest for measured in job.measurements if measured.trial is not None}
    if len(digests) > 1:
        yield replace(wrong, found=f"ranks ended with {len(digests)} different sets of parameters")
