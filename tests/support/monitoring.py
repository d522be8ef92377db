"""Monitor a process: messages, files, subprocesses, memory and threads."""

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

COMMUNICATION_FUNCTIONS = (
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single"),
    *("barrier", "batch_isend_irecv", "broadcast", "broadcast_object_list", "gather", "gather_object", "irecv"),
    *("isend", "monitored_barrier", "new_group", "recv", "recv_object_list", "reduce", "reduce_scatter"),
    *("reduce_scatter_tensor", "scatter", "scatter_object_list", "send", "send_object_list"),
)


class Traffic(list[tuple[str, int]]):
    """Calls into `torch.distributed`, each with the bytes of its first tensor."""

    @property
    def verbs(self) -> list[str]:
        return [name for name, _ in self]

    def sizes(self, verb: str) -> list[int]:
        return [size for name, size in self if name == verb]

    def sizes_to_all(self, world_size: int) -> list[int]:
        """Return the bytes of each message from one rank to all others, by broadcast or as one send per peer."""
        return self.sizes("broadcast") + self.sizes("irecv") + self.sizes("isend")[:: world_size - 1]


@contextmanager
def recorded(*, this_thread_only: bool = False) -> Iterator[Traffic]:
    """Record this rank's calls while the context is open.

    With `this_thread_only`, leave out calls of other threads: background receives of reduces in flight.
    """
    traffic = Traffic()
    thread = threading.get_ident() if this_thread_only else None
    with pytest.MonkeyPatch.context() as patch:
        for name in COMMUNICATION_FUNCTIONS:
            patch.setattr(dist, name, _make_recorder(name, getattr(dist, name), traffic, thread))
        yield traffic


def _make_recorder(name: str, function: Any, traffic: Traffic, thread: int | None) -> Any:
    def record(*args: Any, **kwargs: Any) -> Any:
        if thread in (None, threading.get_ident()):
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
            traffic.append((name, tensors[0].nbytes if tensors else 0))
        return function(*args, **kwargs)

    return record


# ---- Processes started, connections opened, files written

_PROCESS_EVENTS = ("os.system", "os.exec", "os.fork", "os.posix_spawn", "subprocess.Popen", "socket.connect")
_FILE_EVENTS = (
    *("os.rename", "os.remove", "os.mkdir", "os.rmdir"),
    *("os.link", "os.symlink", "os.truncate", "shutil.rmtree"),
)
_EVENTS_WITH_DIRECTORY = ("os.remove", "os.mkdir", "os.rmdir")
"""Their last argument is the descriptor of the directory that the path is relative to, or -1."""
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

_allowed: list[Path] = []
_side_effects: list[str] = []
_is_on = False


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if not _is_on:
        return
    if event in _PROCESS_EVENTS:
        _side_effects.append(f"{event} {args!r:.200}")
    elif (event == "open" and isinstance(args[2], int) and args[2] & _WRITE_FLAGS) or event in _FILE_EVENTS:
        _audit_path(event, args[0], args[-1] if event in _EVENTS_WITH_DIRECTORY else None)


def _audit_path(event: str, path: Any, directory: int | None) -> None:
    if isinstance(path, int):  # a file that is open: opening it was an event, too
        return
    base = os.readlink(f"/proc/self/fd/{directory}") if isinstance(directory, int) and directory >= 0 else os.getcwd()
    full = Path(os.path.normpath(os.path.join(base, os.fsdecode(path))))
    if full != Path("/dev/null") and not any(full.is_relative_to(folder) for folder in _allowed):
        _side_effects.append(f"{event} {full}")


@contextmanager
def forbid_side_effects(*allowed: Path) -> Iterator[None]:
    """Fail if the body starts processes, opens connections, or writes outside `allowed`."""
    global _is_on
    if not _hook_installed:
        sys.addaudithook(_audit)
        _hook_installed.append(True)
    _allowed[:], _side_effects[:], _is_on = [path.resolve() for path in allowed], [], True
    # Modules that are first imported in the body would write bytecode.
    dont_write_bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        yield
    finally:
        _is_on, sys.dont_write_bytecode = False, dont_write_bytecode
    assert not _side_effects, list(_side_effects)


_hook_installed: list[bool] = []


# ---- Memory, files, threads, tensors and process groups

THREAD_EXIT_TIMEOUT_S = 30.0
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Footprint:
    """Resources of a process. Counts are exact after a garbage collection."""

    rss: int
    objects: int
    """Objects that Python's garbage collector tracks."""
    tensors: int
    files: int
    threads: int
    process_groups: int

    @property
    def exact(self) -> dict[str, int]:
        """Counts that must not change."""
        return {name: count for name, count in asdict(self).items() if name not in ("rss", "objects")}


def footprint() -> Footprint:
    """Count resources of this process, after threads that are about to exit have exited."""
    for thread in threading.enumerate():
        if thread.name.startswith("zeroshard"):
            thread.join(THREAD_EXIT_TIMEOUT_S)
            assert not thread.is_alive(), f"{thread.name} does not exit"
    gc.collect()
    gc.collect()
    objects = gc.get_objects()
    return Footprint(
        rss(),
        len(objects),
        sum(1 for value in objects if issubclass(type(value), torch.Tensor)),
        len(list(Path("/proc/self/fd").iterdir())),
        threading.active_count(),
        len(dist.distributed_c10d._world.pg_map),
    )


@dataclass
class Allocations:
    """Bytes of tensors that were allocated inside a context and not freed there: at the peak, and at the end."""

    peak: int = 0
    kept: int = 0


@contextmanager
def track_allocations() -> Iterator[Allocations]:
    """Track allocations of torch's CPU allocator. The result is set when the context closes, and always the same."""
    allocations = Allocations()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        yield allocations
    events: list[Any] = record.profiler.kineto_results.events()
    memory_events = [event for event in events if event.name() == "[memory]"]
    for event in sorted(memory_events, key=lambda event: event.start_ns()):
        allocations.kept += event.nbytes()
        allocations.peak = max(allocations.peak, allocations.kept)


def rss() -> int:
    """Return the resident memory in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE


def growth(samples: Sequence[int], lap: int) -> float:
    """Return the growth from the first `lap` samples to the last ones.

    Compares medians: values that are high temporarily, or in one sample only, do not count.
    """
    return median(samples[-lap:]) - median(samples[:lap])
