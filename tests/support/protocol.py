"""What the pool and its workers say to each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeVar

import torch.distributed as dist

T = TypeVar("T")


@dataclass(frozen=True)
class RankContext:
    """The place of one process in the run of a test."""

    rank: int
    world_size: int

    def gather(self, value: T) -> list[T]:
        """Every rank's `value`, in rank order; a collective call."""
        values = [value] * self.world_size
        dist.all_gather_object(values, value)
        return values


@dataclass(frozen=True)
class Job:
    """One rank's part in one run."""

    context: RankContext
    run: str
    module: str
    qualname: str
    arguments: bytes
    timeout: float


@dataclass(frozen=True)
class Outcome:
    """How one rank ended: `detail` says why it did not pass, `value` is what a passing body returned."""

    status: Literal["passed", "skipped", "failed", "stuck"]
    detail: str = ""
    value: bytes = b""
