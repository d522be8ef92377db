"""The line to the other ranks, and what happens when it breaks.

A rank whose communication fails (another one has died, or did not answer in time) leaves a word in the job's store on
what it was doing, and hangs up on everyone. So whoever waits for this rank knows at once, hangs up in turn, and all
that are alive raise within moments, whatever they were waiting for. From the words they know who has said nothing.

Hazard: gloo tells of a lost connection only those that wait for that very rank; others would wait for their timeout.
"""

import atexit
import json
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary, WeakMethod, WeakSet, ref

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store, _world

from .._logging import log_rank
from .._types import format_ranks
from ..errors import RankLostError, ZeroError

# ---------------------------------------------------------------------------------------------------------------------
# The end of a process, in order, whatever threads are still at work.
#
# Hazard: a thread that Python ends in the middle of torch's code takes the whole process down (SIGABRT).
#
# Threads receive what others have sent also after the process group was destroyed, since a message that nobody receives
# keeps its sender waiting. What does not come soon is abandoned: the connections of the group are closed, which ends
# all
# waiting. So no thread is left after the end of a process, nor for long after that of a process group.


DRAIN_TIMEOUT_S = 10.0
"""Seconds that are left to all that is still received: until the other ranks have ended, as a rule."""
ABORT_TIMEOUT_S = 1.0
"""The same where an error ends the process, after it has hung up on everyone. Nobody waits for long then, but gloo may
lose sight of a message that was sent while its connection closed, and has whoever waits for it wait for the timeout."""
SETTLE_TIME_S = 0.1
"""Seconds in which torch's own threads let go of the tensors of the last collective, which takes the interpreter. They
live on where a group was destroyed and somebody still refers to it."""
DESTROYED_GROUP_TIMEOUT_S = 2.0
"""Seconds that are left to what is received in a process group that was destroyed: its other ranks may be slower."""
WATCHER_INTERVAL_S = 0.1
"""Seconds between two checks whether a process group was destroyed, while threads receive."""


class Abortable(Protocol):
    @property
    def is_destroyed(self) -> bool: ...

    def abort(self, error: BaseException) -> None: ...

    def close_connections(self, *, destroyed_only: bool) -> None: ...


class _ExitJoin(NamedTuple):
    timeout_s: float
    failure_detector: Abortable | None


class UnusedBuckets:
    """Count the gradient buckets that a rank has sent, as long as neither a step nor `zero_grad` follows.

    It outlives its optimizer: whoever forgets that one drops its gradients without a word, too.
    """

    def __init__(self, rank: int, failure_detector: Abortable) -> None:
        self.rank, self.failure_detector, self.count = rank, failure_detector, 0

    def add(self) -> None:
        self.count += 1
        _unused_buckets.add(self)

    def reset(self) -> None:
        self.count = 0
        _unused_buckets.discard(self)


_has_aborted = threading.Event()
is_shutting_down = threading.Event()
"""Others may have ended before, and nobody is left to be told of it."""
_threads_to_join: WeakKeyDictionary[threading.Thread, _ExitJoin] = WeakKeyDictionary()
_detectors_to_abort: WeakSet[Abortable] = WeakSet()
_unused_buckets: set[UnusedBuckets] = set()
_exit_lock = threading.Lock()
_watcher: threading.Thread | None = None


@cache
def install_exit_handlers() -> None:
    """From now on ranks talk to each other."""
    atexit.register(_shut_down)
    sys.excepthook = partial(_abort_on_uncaught_error, sys.excepthook)


def join_at_exit(
    thread: threading.Thread, timeout_s: float = DRAIN_TIMEOUT_S, failure_detector: Abortable | None = None
) -> None:
    """For so long at most. All are waited for at once.

    `line`: what the thread communicates through. It is hung up at exit when the time is over, and `ABANDONING` seconds
    after its process group was destroyed.
    """
    with _exit_lock:
        _threads_to_join[thread] = _ExitJoin(timeout_s, failure_detector)
        if failure_detector is not None:
            _start_watcher()


def abort_at_exit(failure_detector: Abortable) -> None:
    """Of a process that an error ends: others need not wait until it is gone, nor it for them."""
    _detectors_to_abort.add(failure_detector)


def _abort_on_uncaught_error(
    previous_hook: Callable[..., object], error_type: type[BaseException], error: BaseException, traceback: Any
) -> None:
    """When an exception ends the process, before Python waits for threads that save."""
    previous_hook(error_type, error, traceback)
    for line in list(_detectors_to_abort):
        with suppress(Exception):
            line.abort(error)
    _has_aborted.set()


def _start_watcher() -> None:
    """A thread that hangs up on process groups that were destroyed. It lives as long as others communicate."""
    global _watcher  # noqa: PLW0603
    if _watcher is None and not is_shutting_down.is_set():
        # Hazard: torch offers nothing that runs when a process group is destroyed, so the thread has to ask.
        thread = threading.Thread(target=_watch_destroyed_groups, name="zeroshard-watcher", daemon=True)
        thread.start()
        _watcher = thread


def _watch_destroyed_groups() -> None:
    global _watcher  # noqa: PLW0603
    since: WeakKeyDictionary[Abortable, float] = WeakKeyDictionary()
    while not is_shutting_down.wait(WATCHER_INTERVAL_S):
        with _exit_lock:
            lines = _active_detectors()
            if not lines:
                _watcher = None
                return
        now = time.monotonic()
        for line in lines:
            if line.is_destroyed and now - since.setdefault(line, now) >= DESTROYED_GROUP_TIMEOUT_S:
                with suppress(Exception):  # the other lines, and the end of the process, need this thread
                    line.close_connections(destroyed_only=True)
                _warn_of_unused_buckets([it for it in list(_unused_buckets) if it.failure_detector is line])


def _active_detectors() -> list[Abortable]:
    """Those that threads communicate through."""
    lines = {
        id(it.failure_detector): it.failure_detector
        for thread, it in list(_threads_to_join.items())
        if it.failure_detector is not None and thread.is_alive()
    }
    return list(lines.values())


def _warn_of_unused_buckets(unused_buckets: list[UnusedBuckets]) -> None:
    """In one line."""
    count = sum(it.count for it in unused_buckets)
    if count:
        text = "dropped %d gradient buckets: backward passes sent them, but neither step() nor zero_grad() followed"
        log_rank(logging.WARNING, unused_buckets[0].rank, text, count)
    for it in unused_buckets:
        it.reset()


def _shut_down() -> None:
    is_shutting_down.set()
    if _watcher is not None:
        _watcher.join()
    failed = _has_aborted.is_set()
    if not failed:
        _warn_of_unused_buckets(list(_unused_buckets))
    _join_threads(ABORT_TIMEOUT_S if failed else DRAIN_TIMEOUT_S)
    if not failed and (lines := _active_detectors()):
        for line in lines:
            line.close_connections(destroyed_only=False)
        _join_threads(ABORT_TIMEOUT_S)
    time.sleep(SETTLE_TIME_S)


def _join_threads(max_timeout_s: float) -> None:
    start = time.monotonic()
    for thread, (seconds, line) in list(_threads_to_join.items()):
        limit = DESTROYED_GROUP_TIMEOUT_S if line is not None and line.is_destroyed else seconds
        thread.join(max(0.0, start + min(limit, max_timeout_s) - time.monotonic()))


# ---------------------------------------------------------------------------------------------------------------------
# torch's flight recorder: what this rank has lately asked its backends for.
#
# It records by itself, as many messages as `TORCH_FR_BUFFER_SIZE` says. What it has seen is told in errors, and kept
# for
# `torchfrtrace` where the environment names a file.


_flight_recorder: Any = torch._C._distributed_c10d

_DUMP_PATH_VARS = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""What torch calls the beginning of a file's name, to which it adds the rank."""


def describe_last_collective(process_group: dist.ProcessGroup) -> str:
    """The newest in a group, in words; "" if nothing was recorded."""
    with suppress(Exception):  # a help in an error, never another error
        entries = [it for it in _flight_recorder_entries() if it["process_group"][0] == process_group.group_name]
        return _format_recorder_entry(entries[-1]) if entries else ""
    return ""


def dump_flight_recorder() -> str:
    """Where all that was recorded is now, if the environment names a place for it; else ""."""
    beginning = next((os.environ[name] for name in _DUMP_PATH_VARS if os.environ.get(name)), "")
    if not beginning:
        return ""
    with suppress(Exception):
        file = Path(f"{beginning}{dist.get_rank()}")
        file.write_bytes(_flight_recorder._dump_fr_trace())
        return str(file)
    return ""


def _flight_recorder_entries() -> list[dict[str, Any]]:
    found = json.loads(_flight_recorder._dump_fr_trace_json(includeCollectives=True))
    entries: list[dict[str, Any]] = found.get("entries", [])
    return entries


def _format_recorder_entry(entry: dict[str, Any]) -> str:
    kind, number = ("p2p", entry["p2p_seq_id"]) if entry["is_p2p"] else ("collective", entry["collective_seq_id"])
    sizes = entry["input_sizes"] or entry["output_sizes"]
    return f"{entry['profiling_name']}{f' of {sizes}' if sizes else ''}, {kind} {number} of its group"


# ---------------------------------------------------------------------------------------------------------------------
# What ranks have to say when they have lost each other, through the store in which they once found each other.


REPORT_TIMEOUT_S = 1.0
"""Seconds that others have to leave a word."""
DISCONNECTED_GRACE_S = 0.5
"""Seconds that those have whose connections are closed: who hangs up leaves a word before, but a network may fail."""
STORE_TIMEOUT_S = 1.0
"""Seconds that the store has to answer: whoever serves it may be the one that is gone."""
_UNRESPONSIVE_CAUSES = "stopped, stuck, cut off, or busy with something else"
_MISMATCHED_CALLS_HINT = (
    "But if ranks waited for different things, as said above, one of them has made a call alone, and that would end in "
    "the same way: a step or a save under `if rank == 0`, a forward pass with gradients of a model that has buffers."
)
_UNEVEN_LOOP_HINT = (
    "But if a rank's program had come to its end, its loop was shorter: all ranks make as many steps, or use Join."
)
_MAX_LINES_SHOWN = 8
_MAX_REPORT_CHARS = 600

Ranks = Sequence[int]


class PeerReports:
    """Those of all ranks of a group. Ranks are counted in it."""

    ADVICE = "Nothing more can be sent in this process group. Start again from the last checkpoint."

    def __init__(
        self, group: dist.ProcessGroup, activity: str, error: str, disconnected: Collection[int], *, is_root_cause: bool
    ) -> None:
        """`closed`: global ranks to which there is no connection any more. `own`: the error is this rank's own."""
        members = dist.get_process_group_ranks(group)
        self._rank, self._size = members.index(dist.get_rank()), len(members)
        self._disconnected = {members.index(rank) for rank in disconnected if rank in members}
        self._own_report, self._store_key = (
            f"{activity}: {error}"[:_MAX_REPORT_CHARS],
            f"zeroshard/lost/{group.group_name}",
        )
        self._reports: dict[int, str] = {self._rank: self._own_report}
        self._failed = {self._rank: error[:_MAX_REPORT_CHARS]} if is_root_cause else {}
        self._given_up_by: set[int] = set()
        """Ranks that have given up waiting for this one."""
        self._has_all_reports = False
        """The store has answered to the end: whoever was not heard has said nothing."""

    def publish(self) -> None:
        """For all others to read. Before connections are closed: then who is gone without one has none to leave."""
        word = {
            "word": self._own_report,
            "error": self._failed.get(self._rank, ""),
            "closed": sorted(self._disconnected),
        }
        _run_with_timeout(STORE_TIMEOUT_S, lambda: self._append_to_store(**word))

    def collect_error(self, no_loss_message: str, trace_path: str) -> RankLostError:
        """`all_there`: what to say if nobody is missing; `kept`: where torch's records are, if they were written."""
        _run_with_timeout(REPORT_TIMEOUT_S + STORE_TIMEOUT_S, self._poll_store)
        is_told, missing = self._has_all_reports, self._missing_ranks()
        gone = [rank for rank in missing if rank in self._disconnected]
        silent = [rank for rank in missing if rank not in self._disconnected]
        parts = _describe_failures(self._failed, self._size)
        if is_told:
            parts += [*_describe_losses(gone, silent, self._size), *self._describe_given_up_by()]
        else:
            parts += self._describe_unreachable_store(missing, gone)
            gone = silent = []
        told = [
            f"{'; '.join(parts)}." if parts else f"{no_loss_message}, and all ranks are still there.",
            *self._format_reports(),
        ]
        if trace_path:
            told.append(f"torch's flight recorder is in {trace_path}: see torchfrtrace.")
        told.append(
            f"{self.ADVICE} {_MISMATCHED_CALLS_HINT if not parts else _UNEVEN_LOOP_HINT if gone else ''}".rstrip()
        )
        return RankLostError("\n".join(told), tuple(sorted(self._failed)), tuple(gone), tuple(silent))

    def _append_to_store(self, **entry: Any) -> None:
        _get_store().append(self._store_key, json.dumps({"rank": self._rank, **entry}) + "\n")

    def _missing_ranks(self) -> list[int]:
        return sorted(set(range(self._size)) - dict(self._reports).keys())

    def _poll_store(self) -> None:
        """Until all who can have spoken, or for as long as is sensible."""
        start, pause = time.monotonic(), max(0.01, self._size / 500)
        while True:
            for line in _get_store().get(self._store_key).decode(errors="replace").splitlines():
                self._record(**json.loads(line))
            missing = self._missing_ranks()
            if not missing or time.monotonic() - start > (
                DISCONNECTED_GRACE_S if self._disconnected.issuperset(missing) else REPORT_TIMEOUT_S
            ):
                break
            time.sleep(pause)
        self._has_all_reports = True
        if missing:  # who was only stopped shall know when it wakes up
            self._append_to_store(missed=missing)

    def _record(self, rank: int, word: str = "", error: str = "", closed: Ranks = (), missed: Ranks = ()) -> None:
        self._reports |= {rank: word} if word else {}
        self._failed |= {rank: error} if error else {}
        self._disconnected.update(closed)
        self._given_up_by.update([rank] if self._rank in missed else [])

    def _describe_unreachable_store(self, missing: Ranks, disconnected: Ranks) -> list[str]:
        """A closed connection alone says little: ranks that live have hung up, too."""
        whose = (
            f"; closed are connections to {format_ranks(disconnected)}, which ended, or live and hung up"
            if disconnected
            else ""
        )
        where = "the store of the job does not answer (rank 0 serves it, unless torchrun or you do)"
        return [f"{where}, so nothing is known of {format_ranks(missing)} of {self._size}{whose}"] if missing else []

    def _describe_given_up_by(self) -> list[str]:
        by = sorted(self._given_up_by)
        return (
            [f"{format_ranks(by)} of {self._size} waited for this rank in vain: {_UNRESPONSIVE_CAUSES}"] if by else []
        )

    def _format_reports(self) -> list[str]:
        """What this rank says first, and what several say once."""
        by_word: dict[str, list[int]] = {self._own_report: []}
        for rank, word in sorted(dict(self._reports).items()):
            by_word.setdefault(word, []).append(rank)
        lines = [f"{format_ranks(ranks)}: {word}" for word, ranks in by_word.items()]
        more = len(lines) - _MAX_LINES_SHOWN
        return [*lines[:_MAX_LINES_SHOWN], *([f"... and {more} more"] if more > 0 else [])]


def _describe_failures(failed: dict[int, str], size: int) -> list[str]:
    return [f"rank {rank} of {size} failed with {error}" for rank, error in sorted(failed.items())[:_MAX_LINES_SHOWN]]


def _describe_losses(exited: Ranks, unresponsive: Ranks, size: int) -> list[str]:
    parts = []
    if exited:
        parts.append(f"{format_ranks(exited)} of {size} ended, or lost the network: no connection, and no word left")
    if unresponsive:
        parts.append(f"{format_ranks(unresponsive)} of {size} did not answer: {_UNRESPONSIVE_CAUSES}")
    return parts


def _get_store() -> Any:
    return _get_default_store()


def _run_with_timeout(timeout_s: float, action: Callable[[], object]) -> None:
    """Do it if the store answers in time; it can keep one waiting for ever, whatever its timeout is."""

    def attempt() -> None:
        with suppress(Exception):
            action()

    thread = threading.Thread(target=attempt, name="zeroshard-words", daemon=True)
    thread.start()
    join_at_exit(thread, STORE_TIMEOUT_S)
    thread.join(timeout_s)


# ---------------------------------------------------------------------------------------------------------------------
# The line to the other ranks, and what happens when it breaks.
#
# A rank whose communication fails (another one has died, or did not answer in time) leaves a word in the job's store on
# what it was doing, and hangs up on everyone. So whoever waits for this rank knows at once, hangs up in turn, and all
# that are alive raise within moments, whatever they were waiting for. From the words they know who has said nothing.
#
# Hazard: gloo tells of a lost connection only those that wait for that very rank; others would wait for their timeout.


_UNUSED_TAG = (1 << 20) - 1
"""The tag of messages that nobody sends."""
_PROBE_TIMEOUT = timedelta(milliseconds=1)

_detectors: WeakKeyDictionary[dist.ProcessGroup, "FailureDetector"] = WeakKeyDictionary()


def get_failure_detector(process_group: dist.ProcessGroup) -> "FailureDetector":
    """The one of all optimizers that use a group."""
    if process_group not in _detectors:
        _detectors[process_group] = line = FailureDetector(process_group)
        abort_at_exit(line)
    return _detectors[process_group]


class FailureDetector:
    """As a context it turns a failure of the backend into `RankLostError`, on all ranks."""

    def __init__(self, *process_groups: dist.ProcessGroup) -> None:
        """The first of them is that of all ranks; none for a process that is part of no job."""
        self._activity: str | Callable[[], str] = "finding each other"
        self._context_providers: list[WeakMethod[Callable[[], str]]] = []
        self._num_steps = 0
        self._data_parallel_refs = [ref(group) for group in process_groups[:1]]
        self._groups = WeakSet(process_groups)
        self._lock = threading.Lock()
        self._rank_lost_error: RankLostError | None = None
        self._closed_groups: WeakSet[dist.ProcessGroup] = WeakSet()

    def set_activity(self, activity: str | Callable[[], str], num_steps: int | None = None) -> None:
        """Says what is waited for next, and how many steps have been made."""
        self._activity, self._num_steps = activity, self._num_steps if num_steps is None else num_steps

    def add_context(self, provider: Callable[[], str]) -> None:
        """A method that is asked, when ranks are lost, what this one waits for besides: "" if for nothing."""
        self._context_providers = [*(it for it in self._context_providers if it() is not None), WeakMethod(provider)]

    @contextmanager
    def activity(self, activity: str) -> Iterator[None]:
        """The same of what is done inside, after which it is where it was before."""
        before, self._activity = self._activity, activity
        yield
        self._activity = before

    def add_group(self, process_group: dist.ProcessGroup) -> None:
        """One more in which these ranks, or some of them, talk."""
        self._groups.add(process_group)

    def __enter__(self) -> None:
        if self._rank_lost_error is not None:
            raise self._rank_lost_error.copy()

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not isinstance(error, RuntimeError) or isinstance(error, (ZeroError, torch.OutOfMemoryError)):
            return
        group = self._data_parallel_group
        if group is not None:
            # What the backend says is in it; its own trace is no help, and others have been cut off by us.
            raise self._abort_and_report_once(error, group) from None

    @property
    def _data_parallel_group(self) -> dist.ProcessGroup | None:
        """The group of all ranks, unless it was destroyed, or there is nobody else to lose."""
        group = next((it() for it in self._data_parallel_refs), None)
        return group if group in _world.pg_map and group.size() > 1 else None

    @contextmanager
    def abort_on_error(self) -> Iterator[None]:
        """Other ranks wait for what is done inside: if it fails, they shall hear of it at once."""
        try:
            yield
        except ZeroError:
            raise  # on all ranks
        except BaseException as error:
            self.abort(error)
            raise

    def _abort_and_report_once(self, error: RuntimeError, group: dist.ProcessGroup) -> RankLostError:
        with self._lock:
            if self._rank_lost_error is None:
                self._rank_lost_error = self._abort_and_report(error, group)
        return self._rank_lost_error.copy()

    def _abort_and_report(self, error: RuntimeError, group: dist.ProcessGroup) -> RankLostError:
        reason = _format_reason(error)
        if is_shutting_down.is_set():
            return RankLostError(f"other ranks have ended: {reason}")
        all_there = (
            "the connections between ranks broke" if _is_connection_error(error) else f"a message failed: {reason}"
        )
        return self._announce_and_abort(reason, group, is_root_cause=False).collect_error(
            all_there, dump_flight_recorder()
        )

    def abort(self, error: BaseException) -> None:
        """This rank fails alone, and tells the others."""
        group = self._data_parallel_group
        with self._lock:
            if self._rank_lost_error is None and group is not None:
                own = not (
                    isinstance(error, RuntimeError) and _is_connection_error(error)
                )  # else others have failed it, too
                reason = f"{type(error).__name__}: {error}" if own else _format_reason(error)
                words = self._announce_and_abort(reason, group, is_root_cause=own)
                self._rank_lost_error = RankLostError(f"this rank has failed with {reason}. {words.ADVICE}")

    @property
    def is_destroyed(self) -> bool:
        """Whether one of the process groups was destroyed."""
        return any(it not in _world.pg_map for it in list(self._groups))

    def close_connections(self, *, destroyed_only: bool) -> None:
        """Close the connections of all process groups, or of those that were destroyed: whoever waits there raises."""
        with self._lock:
            chosen = [it for it in list(self._groups) if not destroyed_only or it not in _world.pg_map]
            for group in chosen:
                if group not in self._closed_groups:
                    self._closed_groups.add(group)
                    _GlooConnections(group).close()

    def _announce_and_abort(self, reason: str, group: dist.ProcessGroup, *, is_root_cause: bool) -> PeerReports:
        """Leave a word, then hang up."""
        ends = [_GlooConnections(it) for it in list(self._groups) if it in _world.pg_map]
        closed = {rank for it in ends for rank in it.disconnected_ranks()}
        words = PeerReports(group, self._describe_activity(group), reason, closed, is_root_cause=is_root_cause)
        words.publish()
        for it in ends:
            it.close()
        return words

    def _describe_activity(self, group: dist.ProcessGroup) -> str:
        place = self._activity if isinstance(self._activity, str) else self._activity()
        for asked in self._context_providers:
            with suppress(Exception):  # a help in an error, never another error
                place += f"; {more}" if (it := asked()) is not None and (more := it()) else ""
        recorded = describe_last_collective(group)
        return f"{place}, {self._num_steps} steps done" + (
            f" (torch's flight recorder: {recorded})" if recorded else ""
        )


def _format_reason(error: BaseException) -> str:
    """What gloo says, without the place in its source, ports, and its advice."""
    if _is_timeout_error(error):
        return "no answer within the timeout of the process group"
    return re.sub(r"^\[\S+\] |(?<=\]):\d+|\. This is typically .*", "", str(error), flags=re.DOTALL)


def _is_connection_error(error: BaseException) -> bool:
    return _is_timeout_error(error) or re.search("connection|broken pipe", str(error), re.IGNORECASE) is not None


def _is_timeout_error(error: BaseException) -> bool:
    return re.search("timed? ?out", str(error), re.IGNORECASE) is not None


class _GlooConnections:
    """This rank's ends of the connections in a group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._disconnected = group, list[int]()
        """Ranks of the group whose ends are closed, if not for want of time."""
        self._probes: list[tuple[Any, torch.Tensor]] = []
        if not _is_gloo(group):
            return  # NCCL has a watchdog of its own
        for rank in range(group.size()):
            if rank != group.rank():
                self._probe(rank)

    def disconnected_ranks(self) -> list[int]:
        """Global ranks. Not for a group that was destroyed, which torch no longer knows."""
        return [dist.get_global_rank(self._group, rank) for rank in self._disconnected]

    def _probe(self, rank: int) -> None:
        memory = torch.empty(1, dtype=torch.uint8, device="cpu")
        try:
            # Hazard: `dist.irecv` refuses groups that were destroyed.
            self._probes.append((self._group.recv([memory], rank, _UNUSED_TAG), memory))
        except RuntimeError as error:
            if not _is_timeout_error(error):
                self._disconnected.append(rank)

    def close(self) -> None:
        """gloo closes all of them when one has waited in vain."""
        for work, _ in self._probes:
            try:
                work.wait(_PROBE_TIMEOUT)
            except RuntimeError as error:
                if _is_timeout_error(error):
                    return


def _is_gloo(group: dist.ProcessGroup) -> bool:
    try:
        return bool(group._get_backend(torch.device("cpu")).name() == "gloo")
    except RuntimeError:
        return False
