"""What a process does and holds: messages, files and programs, memory and threads."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

# ---- Calls into torch.distributed

TALK = (
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single"),
    *("barrier", "batch_isend_irecv", "broadcast", "broadcast_object_list", "gather", "gather_object", "irecv"),
    *("isend", "monitored_barrier", "new_group", "recv", "recv_object_list", "reduce", "reduce_scatter"),
    *("reduce_scatter_tensor", "scatter", "scatter_object_list", "send", "send_object_list"),
)


class Traffic(list[tuple[str, int]]):
    """Calls into `torch.distributed`, each with the bytes of its first tensor."""

    @property
    def verbs(self) -> list[str]:
        return [verb for verb, _ in self]

    def sizes(self, verb: str) -> list[int]:
        return [size for made, size in self if made == verb]


@contextmanager
def recorded() -> Iterator[Traffic]:
    """Record this rank's calls while the context is open."""
    traffic = Traffic()
    with pytest.MonkeyPatch.context() as patch:
        for verb in TALK:
            patch.setattr(dist, verb, _recorder(verb, getattr(dist, verb), traffic))
        yield traffic


def _recorder(verb: str, call: Any, traffic: Traffic) -> Any:
    def record(*args: Any, **kwargs: Any) -> Any:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        traffic.append((verb, tensors[0].nbytes if tensors else 0))
        return call(*args, **kwargs)

    return record


# ---- Programs started, connections made, files written

_DEEDS = ("os.system", "os.exec", "os.fork", "os.posix_spawn", "subprocess.Popen", "socket.connect")
_MOVES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "shutil.rmtree")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

_allowed: list[Path] = []
_seen: list[str] = []
_is_on = False


def _hear(event: str, given: tuple[Any, ...]) -> None:
    if not _is_on:
        return
    if event in _DEEDS:
        _seen.append(f"{event} {given!r:.200}")
    elif (event == "open" and isinstance(given[2], int) and given[2] & _WRITES) or event in _MOVES:
        _note(event, given[0])


def _note(event: str, path: Any) -> None:
    if isinstance(path, int):  # opened before, and noted then
        return
    full = Path(os.path.abspath(os.fsdecode(path)))
    if full != Path("/dev/null") and not any(full.is_relative_to(folder) for folder in _allowed):
        _seen.append(f"{event} {full}")


@contextmanager
def watched(*allowed: Path) -> Iterator[None]:
    """Inside nothing is started or connected to, and nothing is written but below `allowed`."""
    global _is_on
    if not _hooked:
        sys.addaudithook(_hear)
        _hooked.append(True)
    _allowed[:], _seen[:], _is_on = [path.resolve() for path in allowed], [], True
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # of modules that are imported only now
    try:
        yield
    finally:
        _is_on, sys.dont_write_bytecode = False, writes
    assert not _seen, list(_seen)


_hooked: list[bool] = []


# ---- Memory, files, threads, tensors and process groups

THREAD_EXIT_TIMEOUT_S = 30.0
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
            thread.join(THREAD_EXIT_TIMEOUT_S)
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


@dataclass
class Allocated:
    """Bytes of tensors that were allocated inside a context and not freed there: at the peak, and at the end."""

    peak: int = 0
    kept: int = 0


@contextmanager
def allocated() -> Iterator[Allocated]:
    """Filled when the context closes, from what torch's CPU allocator says of each block: the same in every run."""
    found = Allocated()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        yield found
    events: list[Any] = record.profiler.kineto_results.events()
    blocks = [event for event in events if event.name() == "[memory]"]
    for event in sorted(blocks, key=lambda event: event.start_ns()):
        found.kept += event.nbytes()
        found.peak = max(found.peak, found.kept)


def rss() -> int:
    """Bytes in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE


def growth(samples: Sequence[int], lap: int) -> float:
    """From the first lap to the last one, of `lap` samples each, by their medians: what is needed in passing, or by one
    of the samples only, does not count."""
    return median(samples[-lap:]) - median(samples[:lap])
