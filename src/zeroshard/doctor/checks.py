"""What is wrong with a job, or may be. Pure: every rank has the same values, and so comes to the same end."""

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
# What there is to say of a job.


NOTE: Literal["note"] = "note"
WARNING: Literal["warning"] = "warning"
ERROR: Literal["error"] = "error"
Level = Literal["note", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """One thing that is worth a look. An error makes the job unhealthy; the others do not."""

    level: Level
    what: str
    found: str
    expected: str
    do: str


def is_healthy(findings: Iterable[Finding]) -> bool:
    return all(finding.level != ERROR for finding in findings)


# ---------------------------------------------------------------------------------------------------------------------
# From what was measured to options of `shard`. Pure.


_MAX_LATENCY_FRACTION = 0.05
"""Of the time of a bucket's message."""
_MAX_BUCKET_MIB = 512
_SLOW_INTER_NODE_RATIO = 0.5
"""Between hosts as a part of within: from there on it pays to share within a host."""


@dataclass(frozen=True)
class Advice:
    """Python that can be pasted, and why it says that."""

    config: str
    call: str
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class NetworkProfile:
    """What decides. Seconds, and bytes a second of a bucket."""

    backend: str
    world_size: int
    num_nodes: int
    latency_s: float
    bandwidth: float
    intra_node_bandwidth: float | None = None
    inter_node_bandwidth: float | None = None


def profile_network(job: JobInfo) -> NetworkProfile:
    verbs = [slowest_timing(job, name) for name in ("reduce-scatter", "all-gather")]
    rates = [it.rates for it in job.measurements if it.rates is not None]
    return NetworkProfile(
        backend=job.backend,
        world_size=len(job.rank_infos),
        num_nodes=len(ranks_by_node(job.rank_infos)),
        latency_s=max(it.small for it in verbs),
        bandwidth=min(it.nbytes / max(it.large, 1e-9) for it in verbs),
        intra_node_bandwidth=median(it.within for it in rates) if rates else None,
        inter_node_bandwidth=median(it.between for it in rates) if rates else None,
    )


def slowest_timing(job: JobInfo, collective: str) -> CollectiveTiming:
    """As the slowest ranks have timed it: all wait for them."""
    found = [it for measured in job.measurements for it in measured.timings if it.verb == collective]
    first = found[0]
    small, large = max(it.small for it in found), max(it.large for it in found)
    return CollectiveTiming(collective, first.way, small, large, first.nbytes, first.crossing)


def recommend_options(profile: NetworkProfile) -> Advice:
    size, reasons = _recommend_bucket_mib(profile)
    overlap = profile.backend == "nccl" or profile.num_nodes > 1
    options = [] if size is None else [f"partition=zeroshard.FlatShards(bucket_bytes={size} * 2**20)"]
    reasons.append("stage=2, the default: gradients take 1/N of their size, at the traffic of stage=1")
    if overlap and profile.world_size > 1:
        options.append("overlap_param_gather=True")
        reasons.append("overlap_param_gather: parameters travel while the next forward pass runs")
    config, more = f"zeroshard.ZeroConfig({', '.join(options)})", ""
    if profile.intra_node_bandwidth is not None and profile.inter_node_bandwidth is not None:
        pays = profile.inter_node_bandwidth < _SLOW_INTER_NODE_RATIO * profile.intra_node_bandwidth
        more = ', shard_group_size="node"' if pays else ""
        between, within = profile.inter_node_bandwidth / 1e9, profile.intra_node_bandwidth / 1e9
        compared = f"{between:.2f} GB/s between hosts, {within:.2f} GB/s within"
        reasons.append(f"{'shard_group_size' if pays else 'no shard_group_size'}: {compared}")
    given = f", config={config}" if options else ""
    call = f"optimizer = zeroshard.shard(model, torch.optim.AdamW, lr=3e-4{given}{more})"
    return Advice(config, call, tuple(reasons))


def _recommend_bucket_mib(profile: NetworkProfile) -> tuple[int | None, list[str]]:
    """In MiB, so large that latency is a small part of a message's time; None where the default is."""
    if profile.world_size == 1:
        return None, ["one rank: nothing travels, and buckets of any size will do"]
    device = torch.device("cuda" if profile.backend == "nccl" else "cpu")
    default = default_bucket_bytes(device, profile.world_size) // MIB
    needed = profile.latency_s * profile.bandwidth / _MAX_LATENCY_FRACTION / MIB
    size = default if needed <= 2 * default else min(_next_power_of_two(needed), _MAX_BUCKET_MIB)
    share = profile.latency_s / (profile.latency_s + size * MIB / profile.bandwidth)
    measured = f"latency {profile.latency_s * 1e3:.2f} ms, {profile.bandwidth / 1e9:.2f} GB/s of a bucket"
    kind = "the default" if size == default else "more than the default"
    reason = f"buckets of {size} MiB, {kind}: {measured}, so that {share:.1%} of a message's time is latency"
    return None if size == default else size, [reason]


def _next_power_of_two(value: float) -> int:
    size = 1
    while size < value:
        size *= 2
    return size


def slowest_timings(job: JobInfo) -> Sequence[CollectiveTiming]:
    """Of all verbs, in the order in which they were measured."""
    return [slowest_timing(job, it.verb) for it in job.measurements[0].timings]


# ---------------------------------------------------------------------------------------------------------------------
# Do all ranks run the same, with the same settings? Pure.


_RANK_LOCAL_VARIABLES = ("CUDA_VISIBLE_DEVICES",)
_RESULT_CHANGING_VARIABLES = ("NCCL_ALGO", "NCCL_PROTO", "NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG")
"""Ranks with different ones wait for each other for ever, or compute different numbers."""
_HARMLESS_VERSIONS = ("python",)


def check_same_across_ranks(rank_infos: Sequence[RankInfo]) -> Iterator[Finding]:
    """Named by ranks, with their values."""
    yield from _check_versions(rank_infos)
    yield from _check_torch_settings(rank_infos)
    yield from _check_environment(rank_infos)
    asked = _ranks_by_value(rank_infos, lambda it: it.backend or "none")
    if len(asked) > 1:
        yield Finding(
            ERROR,
            "--backend",
            _format_ranks_by_value(asked),
            "the same on all ranks",
            "start all hosts with the same command",
        )


def _check_versions(rank_infos: Sequence[RankInfo]) -> Iterator[Finding]:
    for name in _all_keys(it.versions for it in rank_infos):
        sides = _ranks_by_value(rank_infos, partial(_get_version, name))
        if len(sides) > 1:
            level: Level = WARNING if name in _HARMLESS_VERSIONS else ERROR
            yield Finding(
                level,
                f"version of {name}",
                _format_ranks_by_value(sides),
                "one version on all ranks",
                f"install the same {name} on all hosts, or start the same interpreter there",
            )


def _check_torch_settings(rank_infos: Sequence[RankInfo]) -> Iterator[Finding]:
    for name in _all_keys(it.settings for it in rank_infos):
        sides = _ranks_by_value(rank_infos, partial(_get_torch_setting, name))
        if len(sides) > 1:
            yield Finding(
                ERROR,
                f"setting of torch: {name}",
                _format_ranks_by_value(sides),
                "the same on all ranks, since it changes numbers",
                "look for what sets it on some hosts only, such as sitecustomize or the environment",
            )


def _check_environment(rank_infos: Sequence[RankInfo]) -> Iterator[Finding]:
    for name in _all_keys(it.environment for it in rank_infos):
        sides = _ranks_by_value(rank_infos, partial(_get_variable, name))
        if len(sides) > 1 and name not in _RANK_LOCAL_VARIABLES:
            changes = name in _RESULT_CHANGING_VARIABLES
            yield Finding(
                ERROR if changes else WARNING,
                f"environment: {name}",
                _format_ranks_by_value(sides),
                "the same on all ranks" + (", else they hang or compute other numbers" if changes else ""),
                f"export {name} in the same way on all hosts, unless it is meant to differ",
            )


def _all_keys(dicts: Iterable[Mapping[str, str]]) -> list[str]:
    return sorted({name for it in dicts for name in it})


def _ranks_by_value(rank_infos: Sequence[RankInfo], get_value: Callable[[RankInfo], str]) -> dict[str, list[int]]:
    """The ranks that have each value, those of the fewest first: they are the ones to look at."""
    found: dict[str, list[int]] = defaultdict(list)
    for it in rank_infos:
        found[get_value(it)].append(it.rank)
    return dict(sorted(found.items(), key=lambda side: len(side[1])))


def _format_ranks_by_value(ranks_by_value: dict[str, list[int]]) -> str:
    return "; ".join(f"{format_ranks(ranks)}: {value}" for value, ranks in ranks_by_value.items())


def _get_version(name: str, rank_info: RankInfo) -> str:
    return rank_info.versions.get(name, "none")


def _get_torch_setting(name: str, rank_info: RankInfo) -> str:
    return rank_info.settings[name]


def _get_variable(name: str, rank_info: RankInfo) -> str:
    return repr(rank_info.environment[name]) if name in rank_info.environment else "not set"


# ---------------------------------------------------------------------------------------------------------------------
# What is wrong with a job, or may be. Pure: every rank has the same values, and so comes to the same end.


_MAX_CLOCK_SKEW_S = 1.0
"""Seconds."""
_MIN_GPU_FREE_FRACTION, _MIN_HOST_FREE_FRACTION = 0.75, 0.1
_SLOW_RANK_FACTOR = 2.5
"""Times slower than the median."""
_MAX_PARAM_DIFFERENCE = 1e-9
"""Of float64: sums are made in another order."""
_LEVEL_ORDER = {ERROR: 0, WARNING: 1, NOTE: 2}


def run_checks(job: JobInfo) -> list[Finding]:
    """The worst first."""
    facts = job.rank_infos
    found = [
        *check_same_across_ranks(facts),
        *_check_gpus(job),
        *_check_placement(facts),
        *_check_memory(facts),
        *_check_threads(facts),
    ]
    found += [*_check_clocks(job), *_check_slow_ranks(job), *_check_trial(job)]
    return sorted(found, key=lambda finding: _LEVEL_ORDER[finding.level])


def _check_gpus(job: JobInfo) -> Iterator[Finding]:
    facts = job.rank_infos
    for it in facts:
        if it.gpu_trouble:
            yield Finding(
                ERROR,
                f"GPU of rank {it.rank}",
                it.gpu_trouble,
                "a GPU that answers",
                "look at nvidia-smi and the driver there, or leave that host out",
            )
    asked = any(it.backend == "nccl" for it in facts)
    for gpu, ranks in find_shared_gpus(facts).items():
        yield Finding(
            ERROR if asked else WARNING,
            f"GPU {gpu}",
            f"{format_ranks(ranks)} would all use it; measured was gloo on the CPU",
            "a GPU of its own for each rank: NCCL refuses others",
            "start as many ranks on a host as it has GPUs, or use the backend gloo",
        )
    without = [it.rank for it in facts if it.gpu is None and not it.gpu_trouble]
    if without and (asked or any(it.gpu is not None for it in facts)):
        yield Finding(
            ERROR,
            "GPUs",
            f"none for {format_ranks(without)}",
            "a GPU for each rank" if asked else "a GPU for each rank, or for none",
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
    for it in rank_infos:
        if it.gpu is not None and it.gpu.free < _MIN_GPU_FREE_FRACTION * it.gpu.total:
            yield Finding(
                WARNING,
                f"memory of the GPU of rank {it.rank}",
                f"{it.gpu.free / 2**30:.1f} of {it.gpu.total / 2**30:.1f} GiB are free",
                f"at least {_MIN_GPU_FREE_FRACTION:.0%} before training starts",
                "look with nvidia-smi who else uses it",
            )
    for host, ranks in ranks_by_host(rank_infos).items():
        it = rank_infos[ranks[0]]
        if it.host_free < _MIN_HOST_FREE_FRACTION * it.host_total:
            yield Finding(
                WARNING,
                f"memory of host {host}",
                f"{it.host_free / 2**30:.1f} of {it.host_total / 2**30:.1f} GiB are free",
                f"at least {_MIN_HOST_FREE_FRACTION:.0%}",
                "end what else runs there",
            )


def _check_threads(rank_infos: Sequence[RankInfo]) -> Iterator[Finding]:
    for host, ranks in ranks_by_host(rank_infos).items():
        cores = len({core for rank in ranks for core in rank_infos[rank].cores})
        threads, each = [rank_infos[rank].threads for rank in ranks], max(cores // len(ranks), 1)
        found = f"{sum(threads)} of {format_ranks(ranks)} on {cores} cores"
        do = f"export OMP_NUM_THREADS={each}"
        if sum(threads) > cores:
            do = do if max(threads) > each else "start fewer ranks there"
            yield Finding(WARNING, f"threads on {host}", found, f"{cores} at most: they wait for each other", do)
        elif each >= 2 * max(threads):
            yield Finding(NOTE, f"threads on {host}", found, f"up to {each} a rank, for work on the CPU", do)


def _check_clocks(job: JobInfo) -> Iterator[Finding]:
    for it, measured in zip(job.rank_infos, job.measurements, strict=True):
        link = measured.link
        if link is not None and abs(link.ahead) - link.give_or_take > _MAX_CLOCK_SKEW_S:
            yield Finding(
                WARNING,
                f"clock of rank {it.rank} on {it.host}",
                f"{link.ahead:+.3f} s from that of rank 0 (± {link.give_or_take:.4f} s)",
                f"less than {_MAX_CLOCK_SKEW_S:g} s, or logs of ranks cannot be compared",
                "let the hosts take their time from one server (chrony, ntpd)",
            )


def _check_slow_ranks(job: JobInfo) -> Iterator[Finding]:
    """Compared with others of their kind: those as far from rank 0."""
    first, kinds = job.rank_infos[0].host, defaultdict[str, dict[int, float]](dict)
    for it, measured in zip(job.rank_infos, job.measurements, strict=True):
        kinds["matrix products"][it.rank] = measured.speed.product
        kinds["copies in memory"][it.rank] = measured.speed.copy
        if measured.link is not None:
            where = "on its host" if it.host == first else "on other hosts"
            kinds[f"messages to rank 0 from ranks {where}"][it.rank] = measured.link.rate
    for what, rates in kinds.items():
        usual = median(rates.values())
        for rank, rate in rates.items():
            if rate * _SLOW_RANK_FACTOR < usual:
                yield Finding(
                    WARNING,
                    f"rank {rank} on {job.rank_infos[rank].host} is slow: {what}",
                    f"{rate / 1e9:.2f} G/s",
                    f"about the median of all, {usual / 1e9:.2f} G/s",
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
    digests = {it.trial.digest for it in job.measurements if it.trial is not None}
    if len(digests) > 1:
        yield replace(wrong, found=f"ranks ended with {len(digests)} different sets of parameters")
