"""What a report consists of: plain values, of one rank at one moment."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from ..profiling import StepTimes
from ..layout.balance import Balance
from ..layout.layout import Bucket, Layout


class RankSummary(NamedTuple):
    """What one rank owns."""

    rank: int
    elements: int
    """That are trained."""
    parameters: int
    """Of which it owns all or a piece."""
    cost_fraction: float
    """Of an update, as a part of that of all ranks."""
    state_bytes: int | None
    """Counted on the rank that reports, and for the others as much for each element; None if that is not known."""


class BucketSummary(NamedTuple):
    """One flat run of memory, and how it is divided."""

    bucket_index: int
    dtype: str
    device: str
    elements: int
    nbytes: int
    padding: int
    """Elements that belong to no parameter."""
    parameters: tuple[str, ...]
    sharding: str
    """What shards are: equal slices, slices cut at multiples, or whole parameters."""
    shards: tuple[tuple[int, int, int], ...]
    """Rank, first element and the one behind the last, of all ranks that have some of it."""


class MemoryUse(NamedTuple):
    """Memory of this rank."""

    category: str
    device: str
    nbytes: int


class CommVolume(NamedTuple):
    """Bytes that this rank sends when gradients travel once and parameters come back, if the backend sends none in
    vain. Agreements of a few words are not among them."""

    grad_bytes: int | None
    """None if DDP sends them."""
    param_bytes: int


class Counters(NamedTuple):
    steps: int
    """That were made."""
    nonfinite_found: int = 0
    nonfinite_skipped: int = 0
    consistency_checks: int = 0
    peer_snapshot_step: int | None = None
    """Of the last copy that all ranks have."""
    peer_snapshot_bytes: int = 0
    """Bytes, for that copy."""


@dataclass(frozen=True)
class ReportData:
    """All that a report says."""

    rank: int
    """Of this process, among all that train."""
    shard_rank: int
    """Among those that share the state."""
    world_size: int
    """How many these are."""
    num_replicas: int
    """Groups of such ranks, each of which has all of it."""
    optimizer_classes: tuple[str, ...]
    config: tuple[str, ...]
    """In words, a line each."""
    is_layout_final: bool
    """Who owns what will not change; else DDP's buckets are yet to come."""
    balance: Balance
    state_bytes: tuple[int | None, ...]
    """Of each rank."""
    memory: tuple[MemoryUse, ...]
    comm_volume: CommVolume
    times: StepTimes
    counters: Counters
    layout: Layout = field(repr=False)

    @cached_property
    def ranks(self) -> list[RankSummary]:
        """What all ranks own, as the layout says."""
        pieces = self.layout.sum_per_rank(lambda spec, elements: 1 if elements or not spec.storage_numel else 0)
        total = sum(self.balance.cost_per_rank) or 1.0
        work = [it / total for it in self.balance.cost_per_rank]
        shares = zip(self.balance.numel_per_rank, pieces, work, self.state_bytes, strict=True)
        return [RankSummary(rank, *it) for rank, it in enumerate(shares)]

    @cached_property
    def buckets(self) -> list[BucketSummary]:
        return [self._summarize_bucket(bucket) for bucket in self.layout.buckets]

    @property
    def elements(self) -> int:
        """Of all parameters."""
        return sum(spec.numel for spec in self.layout.params)

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain values that JSON knows."""
        facts = {key: value for key, value in vars(self).items() if key in _PLAIN_FIELDS}
        times = [
            {"phase": label.text, "calls": it.num_calls, "in_step": it.in_step_s, "outside": it.outside_step_s}
            for label, it in self.times.phases.items()
        ]
        return {
            **{key: list(it) if isinstance(it, tuple) else it for key, it in facts.items()},
            "elements": self.elements,
            "parameters": len(self.layout.params),
            "balance": {
                "memory_imbalance": self.balance.memory_imbalance,
                "compute_imbalance": self.balance.compute_imbalance,
            },
            "ranks": [it._asdict() for it in self.ranks],
            "buckets": [_tuples_to_lists(it._asdict()) for it in self.buckets],
            "memory": [it._asdict() for it in self.memory],
            "comm_volume": self.comm_volume._asdict(),
            "times": {"iteration": self.times.iteration_s, "step": self.times.step_s, "phases": times},
            "counters": self.counters._asdict(),
        }

    def _summarize_bucket(self, bucket: Bucket) -> BucketSummary:
        specs = [self.layout.params[index] for index in bucket.params]
        padding = bucket.numel - sum(spec.numel for spec in specs)
        names = tuple(spec.name or f"parameter {spec.index}" for spec in specs)
        shards = tuple((int(rank), *span) for rank, span in bucket.shards.non_empty())
        return BucketSummary(
            bucket.index,
            str(bucket.dtype).removeprefix("torch."),
            str(bucket.device),
            bucket.numel,
            bucket.numel * bucket.dtype.itemsize,
            padding,
            names,
            _describe_sharding(bucket),
            shards,
        )


_PLAIN_FIELDS = ("rank", "shard_rank", "world_size", "num_replicas", "optimizer_classes", "config", "is_layout_final")


def _describe_sharding(bucket: Bucket) -> str:
    if bucket.has_whole_params:
        return "whole parameters"
    return "equal slices" if bucket.has_equal_shards else "slices at multiples"


def _tuples_to_lists(value: Any) -> Any:
    """Tuples as lists, as JSON has them."""
    if isinstance(value, dict):
        return {key: _tuples_to_lists(it) for key, it in value.items()}
    return [_tuples_to_lists(it) for it in value] if isinstance(value, (list, tuple)) else value
