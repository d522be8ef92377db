"""Checks and advice of `zeroshard doctor`: pure functions of `JobInfo`, with the same result on every rank."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, log2
from statistics import median
from typing import Literal

import torch

from .._formatting import format_bytes, format_ranks, format_ranks_by_text
from .._types import MIB, group_ranks
from ..layout.partition import default_bucket_bytes
from .collect import COLLECTIVES, JobInfo, RankInfo, find_shared_gpus, ranks_by_host, ranks_by_node

# ---------------------------------------------------------------------------------------------------------------------
# Measurements: medians, and how far to trust them.


@dataclass(frozen=True)
class MedianInterval:
    """The median over all rounds, and the interval from the second-lowest to the second-highest of nine values.

    If rounds are independent, the interval contains the true median with a probability of 96 %, whatever the
    distribution. A warning or advice that depends on time needs the whole interval to be beyond its threshold.
    """

    low: float
    median: float
    high: float


def estimate(samples: Iterable[float]) -> MedianInterval:
    ordered = sorted(samples)
    return MedianInterval(ordered[1], median(ordered), ordered[-2])


def combine_ranks(
    job: JobInfo, combine: Callable[[Iterable[float]], float], *names: str, ranks: Iterable[int] | None = None
) -> list[float]:
    """Combine, round by round, the values of these names on all ranks, or some."""
    selected = job.measurements if ranks is None else [job.measurements[rank] for rank in ranks]
    samples = [measured.samples[name] for measured in selected for name in names]
    return list(map(combine, zip(*samples, strict=True)))


@dataclass(frozen=True)
class CollectiveTiming:
    """Seconds of one collective on the slowest rank, which all others wait for. Latency is that of a tiny message."""

    collective: str
    transport: str
    latency_s: MedianInterval
    duration_s: MedianInterval
    nbytes: int
    received_fraction: float
    """Of the message, for one rank."""
    bandwidth: float
    """Bytes per second that a rank receives."""


def summarize_collectives(job: JobInfo) -> list[CollectiveTiming]:
    measured, world_size, timings = job.measurements[0], len(job.ranks), []
    native_fractions = {"all-reduce": 2 * (world_size - 1) / world_size, "broadcast": float(world_size > 1)}
    for name in COLLECTIVES:
        transport = "native" if name in native_fractions else measured.transport
        latency, duration = (estimate(combine_ranks(job, max, key)) for key in (f"{name} latency", name))
        fraction, nbytes = native_fractions.get(name, (world_size - 1) / world_size), measured.message_bytes
        bandwidth = nbytes * fraction / duration.median
        timings.append(CollectiveTiming(name, transport, latency, duration, nbytes, fraction, bandwidth))
    return timings


# ---------------------------------------------------------------------------------------------------------------------
# Advice: from measurements to options of `shard`.


_MAX_LATENCY_FRACTION = 0.05
"""Largest acceptable fraction of a bucket's transfer time that is latency."""
_MAX_BUCKET_MIB = 512
_LARGE_MODEL_BYTES = 1 << 40
"""The default bucket size is the largest possible for such a model."""
_SLOW_INTER_NODE_RATIO = 0.5
"""Inter-node over intra-node bandwidth, below which sharding within a node pays off."""


@dataclass(frozen=True)
class Advice:
    """A call of `shard` with the recommended options, and the reasons for them."""

    call: str
    reasons: Sequence[str]


def recommend_options(job: JobInfo) -> Advice:
    """Recommend bucket size, overlap and shard group size, where they should differ from the defaults."""
    bucket_mib, reason = _recommend_bucket_mib(job)
    options = [] if bucket_mib is None else [f"partition=zeroshard.FlatShards(bucket_bytes={bucket_mib} * 2**20)"]
    reasons = [reason, "stage: 2, the default: gradients take 1/N of their size, with the traffic of stage 1"]
    if len(job.ranks) > 1 and (job.backend == "nccl" or len(ranks_by_node(job.ranks)) > 1):
        options.append("overlap_param_gather=True")
        reasons.append("overlap_param_gather: parameters are all-gathered during the next forward pass")
    arguments = f", config=zeroshard.ZeroConfig({', '.join(options)})" if options else ""
    if "inter-node" in job.measurements[0].samples:
        intra, inter = (combine_ranks(job, median, name) for name in ("intra-node", "inter-node"))
        ratio = estimate(between / within for between, within in zip(inter, intra, strict=True))
        bandwidths = f"{median(inter) / 1e9:.2f} GB/s between nodes, {median(intra) / 1e9:.2f} GB/s within"
        verdict = f"no shard_group_size: {bandwidths}"
        if ratio.high < _SLOW_INTER_NODE_RATIO:
            arguments += ', shard_group_size="node"'
            verdict = f"shard_group_size: {bandwidths}"
        elif ratio.low < _SLOW_INTER_NODE_RATIO:
            verdict += f", but the ratio varies from {ratio.low:.2f} to {ratio.high:.2f}: too noisy for advice"
        reasons.append(verdict)
    call = f"optimizer = zeroshard.shard(model, torch.optim.AdamW, lr=3e-4{arguments})"
    return Advice(call, reasons)


def _recommend_bucket_mib(job: JobInfo) -> tuple[int | None, str]:
    """Return a bucket size in MiB at which latency is negligible, or None for the default, and the reason."""
    if len(job.ranks) == 1:
        return None, "bucket size: irrelevant on one rank, which sends nothing"
    device = torch.device("cuda" if job.backend == "nccl" else "cpu")
    default = default_bucket_bytes(device, _LARGE_MODEL_BYTES, len(job.ranks)) // MIB
    tiny = combine_ranks(job, max, "reduce-scatter latency", "all-gather latency")
    large = combine_ranks(job, max, "reduce-scatter", "all-gather")
    # A message of n bytes takes latency + n / bandwidth.
    rates = [job.measurements[0].message_bytes / MIB / seconds for seconds in large]
    best = estimate(latency * rate / _MAX_LATENCY_FRACTION for latency, rate in zip(tiny, rates, strict=True))
    size = min(2 ** ceil(log2(best.median)), _MAX_BUCKET_MIB) if best.low > 2 * default else default
    latency, rate = median(tiny), median(rates)
    fraction = latency / (latency + size / rate)
    of_default = "the default of large models" if size == default else f"more than the default of up to {default} MiB"
    what = f"bucket size: {size} MiB, {of_default}"
    reason = f"latency is {latency * 1e3:.2f} ms, {fraction:.1%} of a bucket's time at {rate * MIB / 1e9:.2f} GB/s"
    if best.low <= 2 * default < best.high:
        reason += f"; the best size is between {best.low:.0f} and {best.high:.0f} MiB: too noisy for advice"
    return None if size == default else size, f"{what}: {reason}"


# ---------------------------------------------------------------------------------------------------------------------
# Checks.


_LEVELS = ("error", "warning", "note")
_MAX_CLOCK_SKEW_S = 1.0
_MIN_GPU_FREE_FRACTION, _MIN_HOST_FREE_FRACTION = 0.75, 0.1
_SLOW_RANK_FACTOR = 2.5
"""A rank is slow if it is this many times slower than the median."""
_MAX_PARAM_DIFFERENCE = 1e-9
"""Tolerance in float64: only the summation order may differ."""
_RESULT_CHANGING_VARIABLES = ("NCCL_ALGO", "NCCL_PROTO", "NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG")
"""If these differ between ranks, the job hangs or computes different results."""


@dataclass(frozen=True)
class Finding:
    """One observation about a job. Only an error makes the job unhealthy."""

    level: Literal["error", "warning", "note"]
    what: str
    found: str
    expected: str
    do: str


def run_checks(job: JobInfo) -> list[Finding]:
    """Return all findings, the most severe first."""
    by_rank = (_check_same_on_all_ranks, _check_gpus, _check_placement, _check_memory, _check_threads)
    findings = [finding for check in by_rank for finding in check(job.ranks)]
    findings += [finding for check in (_check_clocks, _check_slow_ranks, _check_trial) for finding in check(job)]
    return sorted(findings, key=lambda finding: _LEVELS.index(finding.level))


def _check_same_on_all_ranks(ranks: Sequence[RankInfo]) -> Iterator[Finding]:
    """Report every version, setting and variable that differs, the value of the fewest ranks first."""
    for title, do, tables in (
        (
            "version of {}",
            "install the same {} on all hosts, or start the same Python",
            [rank.versions for rank in ranks],
        ),
        ("torch: {}", "look for what sets it: sitecustomize, the environment", [rank.settings for rank in ranks]),
        ("environment: {}", "export the same {} on all hosts", [rank.environment for rank in ranks]),
        ("{}", "start all hosts with the same command", [{"--backend": rank.backend or "default"} for rank in ranks]),
    ):
        for name in sorted({name for table in tables for name in table} - {"CUDA_VISIBLE_DEVICES"}):
            values = group_ranks(repr(table[name]) if name in table else "not set" for table in tables)
            if len(values) > 1:
                may_differ = name == "python" or ("environment" in title and name not in _RESULT_CHANGING_VARIABLES)
                reason = "unless intended" if may_differ else "or the job may hang or compute other results"
                found = format_ranks_by_text(dict(sorted(values.items(), key=lambda item: len(item[1]))))
                what, expected = title.format(name), f"the same on all ranks, {reason}"
                yield Finding("warning" if may_differ else "error", what, found, expected, do.format(name))


def _check_gpus(ranks: Sequence[RankInfo]) -> Iterator[Finding]:
    for info in ranks:
        if info.gpu_error:
            do = f"check nvidia-smi and the driver on {info.host}, or leave that host out"
            yield Finding("error", f"GPU of rank {info.rank}", info.gpu_error, "a GPU that responds", do)
    uses_nccl = any(info.backend == "nccl" for info in ranks)
    for shared in find_shared_gpus(ranks):
        info = ranks[shared[0]]
        yield Finding(
            "error" if uses_nccl else "warning",
            f"GPU {info.host} cuda:{info.gpu.index if info.gpu else ''}",
            f"shared by {format_ranks(shared)}, so gloo on the CPU was measured",
            "one rank per GPU, as NCCL requires",
            "start as many ranks on a host as it has GPUs, or use the gloo backend",
        )
    without = [info.rank for info in ranks if info.gpu is None and not info.gpu_error]
    if without and (uses_nccl or any(info.gpu for info in ranks)):
        expected = "a GPU for each rank" + ("" if uses_nccl else ", or for none")
        do = "check CUDA_VISIBLE_DEVICES, the driver and the torch build there, or use --backend gloo"
        yield Finding("error", "GPUs", f"none for {format_ranks(without)}", expected, do)


def _check_placement(ranks: Sequence[RankInfo]) -> Iterator[Finding]:
    if len(ranks) == 1:
        do = "start it like the training script: torchrun ... -m zeroshard doctor"
        yield Finding("note", "ranks", "1", "several, to shard anything", do)
    sizes = sorted(map(len, ranks_by_node(ranks)))
    if sizes[0] != sizes[-1]:
        do = 'start the same number on each if you want shard_group_size="node"'
        yield Finding("warning", "ranks per node", f"{sizes[0]} to {sizes[-1]}", "the same number on each node", do)


def _check_memory(ranks: Sequence[RankInfo]) -> Iterator[Finding]:
    gpus = [(f"GPU memory of rank {info.rank}", info.gpu.free, info.gpu.total) for info in ranks if info.gpu]
    first_on_host = {host: ranks[on_host[0]] for host, on_host in ranks_by_host(ranks).items()}
    hosts = [(f"memory of {host}", info.host_free, info.host_total) for host, info in first_on_host.items()]
    for memories, minimum, do in (
        (gpus, _MIN_GPU_FREE_FRACTION, "run nvidia-smi to find other processes on the GPU"),
        (hosts, _MIN_HOST_FREE_FRACTION, "stop other processes on this host"),
    ):
        for what, free, total in memories:
            if free < minimum * total:
                found = f"{format_bytes(free, binary=True)} of {format_bytes(total, binary=True)} are free"
                yield Finding("warning", what, found, f"at least {minimum:.0%} before training starts", do)


def _check_threads(ranks: Sequence[RankInfo]) -> Iterator[Finding]:
    for host, on_host in ranks_by_host(ranks).items():
        cores = len({core for rank in on_host for core in ranks[rank].cores})
        threads, cores_per_rank = [ranks[rank].threads for rank in on_host], max(cores // len(on_host), 1)
        what, found = f"threads on {host}", f"{sum(threads)} of {format_ranks(on_host)} on {cores} cores"
        do = f"export OMP_NUM_THREADS={cores_per_rank}"
        if sum(threads) > cores:
            do = do if max(threads) > cores_per_rank else "start fewer ranks there"
            yield Finding("warning", what, found, f"at most {cores}, the number of cores", do)
        elif cores_per_rank >= 2 * max(threads):
            yield Finding("note", what, found, f"up to {cores_per_rank} per rank, for work on the CPU", do)


def clock_offset(samples: Mapping[str, Sequence[float]]) -> tuple[float, float]:
    """Return by how many seconds a clock is ahead of rank 0's, and the largest error: those of the fastest ping."""
    ping, offset = min(zip(samples["ping"], samples["clock offset"], strict=True))
    return offset, ping / 2


def _check_clocks(job: JobInfo) -> Iterator[Finding]:
    for info in job.ranks[1:]:
        offset, error = clock_offset(job.measurements[info.rank].samples)
        if abs(offset) - error > _MAX_CLOCK_SKEW_S:
            expected = f"less than {_MAX_CLOCK_SKEW_S:g} s, so that logs of ranks can be compared"
            found = f"{offset:+.3f} s (± {error:.4f} s) from rank 0's"
            do = "synchronize the clocks of the hosts with chrony or ntpd"
            yield Finding("warning", f"clock of rank {info.rank} on {info.host}", found, expected, do)


def _check_slow_ranks(job: JobInfo) -> Iterator[Finding]:
    """Compare each rank with the median. Links to rank 0 are compared within its host and across hosts separately."""
    host, all_ranks, others = job.ranks[0].host, [info.rank for info in job.ranks], job.ranks[1:]
    for what, name, unit, ranks in (
        ("matmul", "matmul", "GFLOP/s", all_ranks),
        ("memcpy", "memcpy", "GB/s", all_ranks),
        ("link to rank 0 on the same host", "link", "GB/s", [info.rank for info in others if info.host == host]),
        ("link to rank 0 on another host", "link", "GB/s", [info.rank for info in others if info.host != host]),
    ):
        typical = combine_ranks(job, median, name, ranks=ranks)
        for rank in ranks:
            rates = job.measurements[rank].samples[name]
            slowdown = estimate(usual / rate for rate, usual in zip(rates, typical, strict=True))
            if slowdown.low > _SLOW_RANK_FACTOR:
                found = f"{median(rates) / 1e9:.2f} {unit}, {slowdown.low:.1f} to {slowdown.high:.1f} times slower"
                expected = f"about the median of all ranks, {median(typical) / 1e9:.2f} {unit}"
                do = "look for other processes on this host: every rank waits for the slowest"
                yield Finding("warning", f"rank {rank} on {job.ranks[rank].host} is slow: {what}", found, expected, do)


def _check_trial(job: JobInfo) -> Iterator[Finding]:
    problems = []
    for rank, measured in enumerate(job.measurements):
        trial = measured.trial
        if trial.error:
            problems.append(f"rank {rank}: {trial.error}")
        elif not trial.max_difference <= _MAX_PARAM_DIFFERENCE:
            problems.append(f"rank {rank}: parameters differ by {trial.max_difference:.3g}")
        elif not trial.final_loss < trial.initial_loss:
            problems.append(f"rank {rank}: the loss went from {trial.initial_loss:.4f} to {trial.final_loss:.4f}")
    for found in problems:
        expected = "those of the unsharded optimizer, and the same on all ranks"
        yield Finding(
            "error",
            "sharded steps",
            found,
            expected,
            "do not train on this setup; report a bug with the output of --json",
        )
