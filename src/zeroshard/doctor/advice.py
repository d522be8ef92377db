"""From what was measured to options of `shard`. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch

from ..layout.partition import default_bucket_bytes
from .._types import MIB
from .checkup import JobInfo
from .collect import CollectiveTiming
from .places import ranks_by_node

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
