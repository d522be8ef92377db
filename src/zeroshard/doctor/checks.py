"""What is wrong with a job, or may be. Pure: every rank has the same values, and so comes to the same end."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median

from .._types import format_ranks
from .agreeing import check_same_across_ranks
from .checkup import JobInfo
from .facts import RankInfo
from .findings import ERROR, NOTE, WARNING, Finding
from .places import find_shared_gpus, ranks_by_host, ranks_by_node

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
