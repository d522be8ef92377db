"""From what was measured to options of `shard`. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch

from ..layout.partition import default_bucket_bytes
from ..units import MIB
from .checkup import Checkup
from .measure import Timing
from .places import nodes

_LATENCY_SHARE = 0.05
"""Of the time of a bucket's message."""
_MOST_MIB = 512
_SLOWER = 0.5
"""Between hosts as a part of within: from there on it pays to share within a host."""


@dataclass(frozen=True)
class Advice:
    """Python that can be pasted, and why it says that."""

    config: str
    call: str
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Situation:
    """What decides. Seconds, and bytes a second of a bucket."""

    backend: str
    ranks: int
    nodes: int
    latency: float
    rate: float
    within: float | None = None
    between: float | None = None


def situation(checkup: Checkup) -> Situation:
    verbs = [worst(checkup, name) for name in ("reduce-scatter", "all-gather")]
    rates = [it.rates for it in checkup.measured if it.rates is not None]
    return Situation(
        backend=checkup.backend,
        ranks=len(checkup.facts),
        nodes=len(nodes(checkup.facts)),
        latency=max(it.small for it in verbs),
        rate=min(it.nbytes / max(it.large, 1e-9) for it in verbs),
        within=median(it.within for it in rates) if rates else None,
        between=median(it.between for it in rates) if rates else None,
    )


def worst(checkup: Checkup, verb: str) -> Timing:
    """As the slowest ranks have timed it: all wait for them."""
    found = [it for measured in checkup.measured for it in measured.timings if it.verb == verb]
    first = found[0]
    small, large = max(it.small for it in found), max(it.large for it in found)
    return Timing(verb, first.way, small, large, first.nbytes, first.crossing)


def advise(it: Situation) -> Advice:
    size, reasons = _bucket(it)
    overlap = it.backend == "nccl" or it.nodes > 1
    options = [] if size is None else [f"partition=zeroshard.FlatShards(bucket_bytes={size} * 2**20)"]
    reasons.append("stage=2, the default: gradients take 1/N of their size, at the traffic of stage=1")
    if overlap and it.ranks > 1:
        options.append("overlap_gather=True")
        reasons.append("overlap_gather: parameters travel while the next forward pass runs")
    config, more = f"zeroshard.ZeroConfig({', '.join(options)})", ""
    if it.within is not None and it.between is not None:
        pays = it.between < _SLOWER * it.within
        more = ', shard_within="node"' if pays else ""
        compared = f"{it.between / 1e9:.2f} GB/s between hosts, {it.within / 1e9:.2f} GB/s within"
        reasons.append(f"{'shard_within' if pays else 'no shard_within'}: {compared}")
    given = f", config={config}" if options else ""
    call = f"optimizer = zeroshard.shard(model, torch.optim.AdamW, lr=3e-4{given}{more})"
    return Advice(config, call, tuple(reasons))


def _bucket(it: Situation) -> tuple[int | None, list[str]]:
    """In MiB, so large that latency is a small part of a message's time; None where the default is."""
    if it.ranks == 1:
        return None, ["one rank: nothing travels, and buckets of any size will do"]
    device = torch.device("cuda" if it.backend == "nccl" else "cpu")
    default = default_bucket_bytes(device, it.ranks) // MIB
    needed = it.latency * it.rate / _LATENCY_SHARE / MIB
    size = default if needed <= 2 * default else min(_power_of_two(needed), _MOST_MIB)
    share = it.latency / (it.latency + size * MIB / it.rate)
    measured = f"latency {it.latency * 1e3:.2f} ms, {it.rate / 1e9:.2f} GB/s of a bucket"
    kind = "the default" if size == default else "more than the default"
    reason = f"buckets of {size} MiB, {kind}: {measured}, so that {share:.1%} of a message's time is latency"
    return None if size == default else size, [reason]


def _power_of_two(value: float) -> int:
    size = 1
    while size < value:
        size *= 2
    return size


def timings(checkup: Checkup) -> Sequence[Timing]:
    """Of all verbs, in the order in which they were measured."""
    return [worst(checkup, it.verb) for it in checkup.measured[0].timings]
