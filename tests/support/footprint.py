"""What a process holds: memory, files, threads, tensors, process groups."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

PATIENCE = 30.0
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Footprint:
    """Counts are exact once what has no owner any more is collected."""

    rss: int
    objects: int
    """Those that Python's collector knows."""
    tensors: int
    files: int
    threads: int
    process_groups: int

    @property
    def exact(self) -> dict[str, int]:
        """What must not change at all."""
        return {name: count for name, count in asdict(self).items() if name not in ("rss", "objects")}


def footprint() -> Footprint:
    """Of this process, when threads that were about to end have ended."""
    for thread in threading.enumerate():
        if thread.name.startswith("zeroshard"):
            thread.join(PATIENCE)
            assert not thread.is_alive(), f"{thread.name} does not end"
    gc.collect()
    gc.collect()
    found = gc.get_objects()
    return Footprint(
        rss(),
        len(found),
        sum(1 for it in found if issubclass(type(it), torch.Tensor)),
        len(list(Path("/proc/self/fd").iterdir())),
        threading.active_count(),
        len(dist.distributed_c10d._world.pg_map),
    )


def rss() -> int:
    """Bytes in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE


def growth(samples: Sequence[int], lap: int) -> float:
    """From the first lap to the last one, of `lap` samples each, by their medians: what is needed in passing, or by one
    of the samples only, does not count."""
    return median(samples[-lap:]) - median(samples[:lap])
