"""What a report consists of: plain values, of one rank at one moment."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from ..labels import Times
from ..layout.balance import Balance
from ..layout.layout import Bucket, Layout


class RankShare(NamedTuple):
    """What one rank owns."""

    rank: int
    elements: int
    """That are trained."""
    parameters: int
    """Of which it owns all or a piece."""
    work: float
    """Of an update, as a part of that of all ranks."""
    state_bytes: int | None
    """Counted on the rank that reports, and for the others as much for each element; None if that is not known."""


class BucketShare(NamedTuple):
    """One flat run of memory, and how it is divided."""

    number: int
    dtype: str
    device: str
    elements: int
    nbytes: int
    padding: int
    """Elements that belong to no parameter."""
    parameters: tuple[str, ...]
    kind: str
    """What shards are: equal slices, slices cut at multiples, or whole parameters."""
    shards: tuple[tuple[int, int, int], ...]
    """Rank, first element and the one behind the last, of all ranks that have some of it."""


class Held(NamedTuple):
    """Memory of this rank."""

    what: str
    device: str
    nbytes: int


class Wire(NamedTuple):
    """Bytes that this rank sends when gradients travel once and parameters come back, if the backend sends none in
    vain. Agreements of a few words are not among them."""

    gradients: int | None
    """None if DDP sends them."""
    parameters: int


class Counters(NamedTuple):
    steps: int
    """That were made."""
    nonfinite_found: int = 0
    nonfinite_skipped: int = 0
    looks_for_drift: int = 0
    second_copy_step: int | None = None
    """Of the last copy that all ranks have."""
    second_copy_sent: int = 0
    """Bytes, for that copy."""


@dataclass(frozen=True)
class Facts:
    """All that a report says."""

    rank: int
    """Of this process, among all that train."""
    place: int
    """Among those that share the state."""
    world_size: int
    """How many these are."""
    rows: int
    """Groups of such ranks, each of which has all of it."""
    classes: tuple[str, ...]
    config: tuple[str, ...]
    """In words, a line each."""
    settled: bool
    """Who owns what will not change; else DDP's buckets are yet to come."""
    balance: Balance
    state_bytes: tuple[int | None, ...]
    """Of each rank."""
    memory: tuple[Held, ...]
    wire: Wire
    times: Times
    counters: Counters
    layout: Layout = field(repr=False)

    @cached_property
    def ranks(self) -> list[RankShare]:
        """What all ranks own, as the layout says."""
        pieces = self.layout.tally(lambda spec, elements: 1 if elements or not spec.extent else 0)
        total = sum(self.balance.work) or 1.0
        work = [it / total for it in self.balance.work]
        shares = zip(self.balance.elements, pieces, work, self.state_bytes, strict=True)
        return [RankShare(rank, *it) for rank, it in enumerate(shares)]

    @cached_property
    def buckets(self) -> list[BucketShare]:
        return [self._share(bucket) for bucket in self.layout.buckets]

    @property
    def elements(self) -> int:
        """Of all parameters."""
        return sum(spec.numel for spec in self.layout.params)

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain values that JSON knows."""
        facts = {key: value for key, value in vars(self).items() if key in _PLAIN}
        times = [
            {"part": label.text, "calls": it.calls, "in_step": it.in_step, "outside": it.outside}
            for label, it in self.times.parts.items()
        ]
        return {
            **{key: list(it) if isinstance(it, tuple) else it for key, it in facts.items()},
            "elements": self.elements,
            "parameters": len(self.layout.params),
            "balance": {"fullest": self.balance.fullest, "slowest": self.balance.slowest},
            "ranks": [it._asdict() for it in self.ranks],
            "buckets": [_listed(it._asdict()) for it in self.buckets],
            "memory": [it._asdict() for it in self.memory],
            "wire": self.wire._asdict(),
            "times": {"iteration": self.times.iteration, "step": self.times.step, "parts": times},
            "counters": self.counters._asdict(),
        }

    def _share(self, bucket: Bucket) -> BucketShare:
        specs = [self.layout.params[index] for index in bucket.params]
        padding = bucket.numel - sum(spec.numel for spec in specs)
        names = tuple(spec.name or f"parameter {spec.index}" for spec in specs)
        shards = tuple((int(rank), *span) for rank, span in bucket.shards.filled())
        return BucketShare(
            bucket.index,
            str(bucket.dtype).removeprefix("torch."),
            str(bucket.device),
            bucket.numel,
            bucket.numel * bucket.dtype.itemsize,
            padding,
            names,
            _kind(bucket),
            shards,
        )


_PLAIN = ("rank", "place", "world_size", "rows", "classes", "config", "settled")


def _kind(bucket: Bucket) -> str:
    if bucket.is_dealt:
        return "whole parameters"
    return "equal slices" if bucket.has_equal_shards else "slices at multiples"


def _listed(value: Any) -> Any:
    """Tuples as lists, as JSON has them."""
    if isinstance(value, dict):
        return {key: _listed(it) for key, it in value.items()}
    return [_listed(it) for it in value] if isinstance(value, (list, tuple)) else value
