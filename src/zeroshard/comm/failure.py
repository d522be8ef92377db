"""Failure detection: when one rank notices that another is lost, all ranks raise `RankLostError` at once.

::

    a collective fails on rank A       (a peer died, or did not answer in time)
      -> A publishes a report          in the job's store: what it was doing, and its error
      -> A closes all its connections
      -> ranks that wait for A fail    at once, and do the same
      -> every survivor collects the reports: the ranks without one are lost

Hazard: gloo reports a lost connection only to ranks that wait for that very rank. If ranks did not close their
connections, all others would wait for their timeout.

A rank that waits for more than `LONG_WAIT_S` seconds logs what it waits for, and what others say that they wait for.

The module has five parts: shutdown of background threads, the flight recorder, the reports, long waits, and the
detector itself.
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

from .._formatting import format_count, format_error, format_ranks
from .._logging import log_rank
from .._torch_compat import (
    backend_name,
    default_store,
    flight_recorder_dump,
    flight_recorder_entries,
    group_timeout,
    is_open,
)
from .._tracebacks import install as shorten_printed_tracebacks
from ..errors import RankLostError, ZeroError

# ---------------------------------------------------------------------------------------------------------------------
# Shutdown: background threads end before the process does, and soon after their process group is destroyed.
#
# Hazard: a thread that Python kills inside torch's code aborts the whole process (SIGABRT).
#
# Threads keep receiving after the process group was destroyed, since a message that nobody receives blocks its sender.
# After a timeout the group's connections are closed, which ends all waiting.


DRAIN_TIMEOUT_S = 10.0
"""How long threads may keep receiving at exit: usually until the other ranks have exited."""
ABORT_TIMEOUT_S = 1.0
"""The same if an error ends the process, after it closed its connections. Most waits end at once then, but gloo may
lose a message that was sent while its connection closed, and its receiver would wait for the timeout."""
SETTLE_TIME_S = 0.1
"""How long torch's own threads get to release the tensors of the last collective, for which they need the interpreter.
They outlive a destroyed group as long as something refers to it."""
DESTROYED_GROUP_TIMEOUT_S = 2.0
"""How long threads may keep receiving in a destroyed process group: its other ranks may be slower."""
WATCHER_INTERVAL_S = 0.1
"""How often the watcher checks for destroyed process groups and long waits."""
WATCHER_IDLE_S = 5.0
"""How long the watcher lives without anything to watch: starting a thread for each wait would cost more than it."""
_THREAD_PREFIX = "zeroshard-"
"""Names of the package's threads. Their waits are not reported: they wait while the program does something else."""


class Abortable(Protocol):
    """What shutdown needs of a `FailureDetector`."""

    @property
    def is_destroyed(self) -> bool: ...

    def abort(self, error: BaseException) -> None: ...

    def log_lost_ranks(self) -> None: ...

    def close_connections(self, *, destroyed_only: bool) -> None: ...


class _ExitJoin(NamedTuple):
    timeout_s: float
    failure_detector: Abortable | None


class UnusedBuckets:
    """Counts the gradient buckets that a rank sent since the last `step()` or `zero_grad()`.

    It outlives its optimizer, so that gradients of a garbage-collected optimizer are reported, too.
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
"""Set at exit: other ranks may have exited already, so a lost connection is not worth a report."""
_threads_to_join: WeakKeyDictionary[threading.Thread, _ExitJoin] = WeakKeyDictionary()
_detectors_to_abort: WeakSet[Abortable] = WeakSet()
_unused_buckets: set[UnusedBuckets] = set()
_exit_lock = threading.Lock()
_watcher: threading.Thread | None = None


@cache
def install_exit_handlers() -> None:
    """Register the exit handlers, once per process. Called before the first communication."""
    atexit.register(_shut_down)
    shorten_printed_tracebacks()
    sys.excepthook = partial(_abort_on_uncaught_error, sys.excepthook)


def join_at_exit(
    thread: threading.Thread, timeout_s: float = DRAIN_TIMEOUT_S, failure_detector: Abortable | None = None
) -> None:
    """Join `thread` at exit, for at most `timeout_s`; the timeouts of all threads run concurrently.

    Args:
        thread: a running daemon thread.
        timeout_s: how long exit may wait for it.
        failure_detector: of the group that the thread communicates in. Its connections are closed when the timeout at
            exit is over, or `DESTROYED_GROUP_TIMEOUT_S` after its process group was destroyed.
    """
    with _exit_lock:
        _threads_to_join[thread] = _ExitJoin(timeout_s, failure_detector)
        if failure_detector is not None:
            _start_watcher()


def abort_at_exit(failure_detector: Abortable) -> None:
    """Abort this detector's groups if an uncaught error ends the process, so that no rank waits for another."""
    _detectors_to_abort.add(failure_detector)


def _abort_on_uncaught_error(
    previous_hook: Callable[..., object], error_type: type[BaseException], error: BaseException, traceback: Any
) -> None:
    """Run as `sys.excepthook`: that is before Python waits for the threads that save checkpoints.

    A launcher may kill this process as soon as another one has failed. So an error of this rank is printed first. A
    lost connection in DDP, whose traceback explains nothing, is printed after what zeroshard knows about it.
    """
    is_explained_first = _is_consequence(error) and not isinstance(error, ZeroError)
    try:
        if not is_explained_first:
            previous_hook(error_type, error, traceback)
    finally:  # whatever a hook of the program does
        detectors = list(_detectors_to_abort)
        for detector in detectors:
            with suppress(Exception):
                detector.abort(error)
        # Hazard: only once all connections are closed. It waits for reports, and other ranks wait for this one.
        for detector in detectors:
            with suppress(Exception):
                detector.log_lost_ranks()
        _has_aborted.set()
        if is_explained_first:
            previous_hook(error_type, error, traceback)


def _start_watcher() -> None:
    """Start the watcher thread, which closes connections of destroyed groups and reports long waits.

    It lives as long as other threads communicate, and a few seconds after the last wait of any thread. Does nothing if
    no thread can be started: a rank must not miss a collective because of that.
    """
    global _watcher  # noqa: PLW0603
    if _watcher is None and not is_shutting_down.is_set():
        # Hazard: torch has no callback for the destruction of a process group, so the thread has to poll.
        thread = threading.Thread(target=_watch, name=f"{_THREAD_PREFIX}watcher", daemon=True)
        with suppress(RuntimeError):
            thread.start()
            _watcher = thread


def _watch() -> None:
    global _watcher  # noqa: PLW0603
    destroyed_since: WeakKeyDictionary[Abortable, float] = WeakKeyDictionary()
    last_wait = time.monotonic()
    while not is_shutting_down.wait(WATCHER_INTERVAL_S):
        now = time.monotonic()
        if _report_long_waits(now):
            last_wait = now
        with _exit_lock:
            detectors = _active_detectors()
            if not detectors and now - last_wait > WATCHER_IDLE_S:
                _watcher = None
                return
        for detector in detectors:
            if detector.is_destroyed and now - destroyed_since.setdefault(detector, now) >= DESTROYED_GROUP_TIMEOUT_S:
                with suppress(Exception):  # other detectors, and shutdown, need this thread
                    detector.close_connections(destroyed_only=True)
                _warn_of_unused_buckets(
                    [buckets for buckets in list(_unused_buckets) if buckets.failure_detector is detector]
                )


def _active_detectors() -> list[Abortable]:
    """Return the detectors of groups that live threads communicate in."""
    detectors = {
        id(exit_join.failure_detector): exit_join.failure_detector
        for thread, exit_join in list(_threads_to_join.items())
        if exit_join.failure_detector is not None and thread.is_alive()
    }
    return list(detectors.values())


def _warn_of_unused_buckets(unused_buckets: list[UnusedBuckets]) -> None:
    """Log one warning for all of them, and reset them."""
    count = sum(buckets.count for buckets in unused_buckets)
    if count:
        text = "dropped %d gradient buckets: backward passes sent them, but neither step() nor zero_grad() followed"
        log_rank(logging.WARNING, unused_buckets[0].rank, text, count)
    for buckets in unused_buckets:
        buckets.reset()


def _shut_down() -> None:
    is_shutting_down.set()
    if _watcher is not None:
        _watcher.join()
    has_aborted = _has_aborted.is_set()
    if not has_aborted:
        _warn_of_unused_buckets(list(_unused_buckets))
    _join_threads(ABORT_TIMEOUT_S if has_aborted else DRAIN_TIMEOUT_S)
    if not has_aborted and (detectors := _active_detectors()):
        for detector in detectors:
            detector.close_connections(destroyed_only=False)
        _join_threads(ABORT_TIMEOUT_S)
    time.sleep(SETTLE_TIME_S)


def _join_threads(max_timeout_s: float) -> None:
    start = time.monotonic()
    for thread, (timeout_s, detector) in list(_threads_to_join.items()):
        limit_s = DESTROYED_GROUP_TIMEOUT_S if detector is not None and detector.is_destroyed else timeout_s
        thread.join(max(0.0, start + min(limit_s, max_timeout_s) - time.monotonic()))


# ---------------------------------------------------------------------------------------------------------------------
# torch's flight recorder: the last collectives of this rank, `TORCH_FR_BUFFER_SIZE` of them.
#
# Errors quote the last one. All are dumped for `torchfrtrace` if the environment names a file.


_DUMP_PATH_VARS = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""Environment variables with the prefix of the dump file; the rank is appended."""


def describe_last_collective(*process_groups: dist.ProcessGroup) -> str:
    """Describe the newest collective of these groups; "" if nothing was recorded."""
    with suppress(Exception):  # must not replace the error that it explains
        names = {group.group_name for group in process_groups}
        entries = [entry for entry in flight_recorder_entries() if entry["process_group"][0] in names]
        return _format_recorder_entry(entries[-1]) if entries else ""
    return ""


def dump_flight_recorder() -> str:
    """Write the trace if the environment names a file; return its path, or "" if nothing was written."""
    prefix = next((os.environ[name] for name in _DUMP_PATH_VARS if os.environ.get(name)), "")
    if not prefix:
        return ""
    with suppress(Exception):
        path = Path(f"{prefix}{dist.get_rank()}")
        path.write_bytes(flight_recorder_dump())
        return str(path)
    return ""


def _format_recorder_entry(entry: dict[str, Any]) -> str:
    kind, seq_id = ("p2p", entry["p2p_seq_id"]) if entry["is_p2p"] else ("collective", entry["collective_seq_id"])
    sizes = entry["input_sizes"] or entry["output_sizes"]
    return f"{entry['profiling_name']}{f' of {sizes}' if sizes else ''}, {kind} {seq_id} of its group"


# ---------------------------------------------------------------------------------------------------------------------
# Peer reports: what surviving ranks tell each other, through the store of the rendezvous.


REPORT_TIMEOUT_S = 1.0
"""How long to wait for the reports of other ranks."""
DISCONNECTED_GRACE_S = 0.5
"""The same if only disconnected ranks are missing. A rank publishes before it disconnects, but a network may fail."""
STORE_TIMEOUT_S = 1.0
"""How long the store may take to answer: the rank that serves it may be the lost one."""
_UNRESPONSIVE_CAUSES = "stopped, hung, disconnected, or busy with something else"
_SAME_CALLS_HINT = "All ranks must make the same calls in the same order"
_DIFFERENT_CALLS_HINT = (
    f"{_SAME_CALLS_HINT}. If one rank saves or steps alone, remove the `if rank == 0:` around it. If one rank "
    "evaluates alone, do so under torch.no_grad()."
)
_NOT_IN_ZEROSHARD = "outside of zeroshard (in DDP, for example in backward, or in another collective of the program)"
OUTSIDE = "no zeroshard call"
"""The activity between calls, and its kind: a rank that loses a connection then was in a collective of DDP, or of the
program itself."""
_TRAINING = "a training step"
"""The kind of call of everything that ranks wait for in training: they may be a phase apart."""
_EXITED_ADVICE = (
    "If its program simply ended, it made fewer calls than this one: look for a call under `if rank == 0:`, or a loop "
    "that is shorter on that rank (run the same number of steps on all ranks, or use Join). Otherwise restart from the "
    "last checkpoint."
)
_RESTART_ADVICE = "Restart from the last checkpoint: the process group can no longer be used."
_FIX_ADVICE = "Then restart: the process group can no longer be used."
_MAX_LINES_SHOWN = 8
_MAX_REPORT_CHARS = 600

Ranks = Sequence[int]


class PeerReports:
    """The failure reports of all ranks of a group, by group rank."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        call: str,
        activity: str,
        error: str,
        disconnected: Collection[int],
        *,
        waits_in: str,
        is_root_cause: bool,
    ) -> None:
        """Create this rank's report.

        Args:
            group: all data-parallel ranks.
            call: what kind of call this rank was waiting in, to compare it with those of the others.
            activity: the call, with details.
            error: what it failed with.
            disconnected: global ranks whose connections are closed.
            waits_in: the call for the first line, if those of the ranks differ.
            is_root_cause: the error is this rank's own, not the consequence of a lost peer.
        """
        members = dist.get_process_group_ranks(group)
        self._rank, self._size = members.index(dist.get_rank()), len(members)
        self._disconnected = {members.index(rank) for rank in disconnected if rank in members}
        # The error of a root cause is in the first line already.
        self._own_report = (activity if is_root_cause else f"{activity}: {error}")[:_MAX_REPORT_CHARS]
        self._calls, self._waits = {self._rank: call}, {self._rank: waits_in}
        self._store_key = f"zeroshard/lost/{group.group_name}"
        self._reports: dict[int, str] = {self._rank: self._own_report}
        self._failed = {self._rank: error[:_MAX_REPORT_CHARS]} if is_root_cause else {}
        self._given_up_by: set[int] = set()
        """Ranks that gave up waiting for this one."""
        self._has_all_reports = False
        """Whether polling the store finished: a rank without a report has not published one."""

    def publish(self) -> None:
        """Append this rank's report to the store.

        Call before closing connections, so that a disconnected rank without a report is known not to have one.
        """
        entry = {
            "report": self._own_report,
            "call": self._calls[self._rank],
            "waits_in": self._waits[self._rank],
            "error": self._failed.get(self._rank, ""),
            "closed": sorted(self._disconnected),
        }
        _run_with_timeout(STORE_TIMEOUT_S, lambda: self._append_to_store(**entry))

    def collect_error(self, no_loss_message: str, trace_path: str) -> RankLostError:
        """Wait for the reports of the other ranks and build the error.

        Args:
            no_loss_message: the first sentence if no rank is missing.
            trace_path: the file of the flight recorder's trace, or "".
        """
        _run_with_timeout(REPORT_TIMEOUT_S + STORE_TIMEOUT_S, self._poll_store)
        # The polling thread may still run: read the flag before the reports that it guards, and both only once.
        has_all_reports, missing = self._has_all_reports, self._missing_ranks()
        exited = [rank for rank in missing if rank in self._disconnected]
        unresponsive = [rank for rank in missing if rank not in self._disconnected]
        causes = _describe_failures(self._failed, self._size)
        if has_all_reports:
            causes += [*_describe_losses(exited, unresponsive, self._size), *self._describe_given_up_by()]
        else:
            causes += self._describe_unreachable_store(missing, exited)
            exited = unresponsive = []
        advice = _EXITED_ADVICE if exited else _RESTART_ADVICE
        if causes:
            headline = "; ".join(cause.rstrip(".") for cause in causes) + "."
        elif self.has_different_calls:
            headline = f"the ranks are waiting in different calls: {self._describe_waits()}."
            advice = f"{self._advise_on_waits()} {_FIX_ADVICE}"
        else:
            headline = f"{no_loss_message}, and no rank is missing."
        lines = [headline, advice, *self._format_reports()]
        if trace_path:
            lines.append(f"torch's flight recorder wrote {trace_path}; read it with torchfrtrace.")
        return RankLostError("\n".join(lines), tuple(sorted(self._failed)), tuple(exited), tuple(unresponsive))

    @property
    def has_different_calls(self) -> bool:
        """Whether the ranks that have reported were waiting in different kinds of calls."""
        return len(set(dict(self._calls).values())) > 1

    def _describe_waits(self) -> str:
        ranks_by_wait: dict[str, list[int]] = {}
        for rank, waits_in in sorted(dict(self._waits).items()):
            ranks_by_wait.setdefault(waits_in, []).append(rank)
        shown = list(ranks_by_wait.items())[:_MAX_LINES_SHOWN]
        return "; ".join(
            f"{format_ranks(ranks)} {_NOT_IN_ZEROSHARD if waits_in == OUTSIDE else f'in {waits_in}'}"
            for waits_in, ranks in shown
        )

    def _advise_on_waits(self) -> str:
        """Say what to fix: exactly, if only one call of zeroshard is involved."""
        waits = {*dict(self._waits).values()} - {OUTSIDE}
        call = re.split("[:,]", waits.pop())[0] if len(waits) == 1 else ""
        call = "step()" if call.startswith("step ") else call
        if not call or " " in call:  # a phase, and not a method
            return _DIFFERENT_CALLS_HINT
        return (
            f"{_SAME_CALLS_HINT}: call {call} on all ranks. Look for it under `if rank == 0:`, or for a loop that is "
            "shorter on one rank."
        )

    def _append_to_store(self, **entry: Any) -> None:
        _get_store().append(self._store_key, json.dumps({"rank": self._rank, **entry}) + "\n")

    def _missing_ranks(self) -> list[int]:
        return sorted(set(range(self._size)) - dict(self._reports).keys())

    def _poll_store(self) -> None:
        """Read reports until no rank is missing, or until the missing ranks have run out of time."""
        start, interval_s = time.monotonic(), max(0.01, self._size / 500)
        while True:
            for entry in _get_store().get(self._store_key).decode(errors="replace").splitlines():
                self._record(**json.loads(entry))
            missing = self._missing_ranks()
            if not missing or time.monotonic() - start > (
                DISCONNECTED_GRACE_S if self._disconnected.issuperset(missing) else REPORT_TIMEOUT_S
            ):
                break
            time.sleep(interval_s)
        self._has_all_reports = True
        if missing:  # a rank that was only stopped reads this when it resumes
            self._append_to_store(missed=missing)

    def _record(
        self,
        rank: int,
        *,
        report: str = "",
        call: str = "",
        waits_in: str = "",
        error: str = "",
        closed: Ranks = (),
        missed: Ranks = (),
    ) -> None:
        """Merge an entry of the store; the parameters are its JSON keys."""
        self._reports |= {rank: report} if report else {}
        self._calls |= {rank: call} if call else {}
        self._waits |= {rank: waits_in} if waits_in else {}
        self._failed |= {rank: error} if error else {}
        self._disconnected.update(closed)
        self._given_up_by.update([rank] if self._rank in missed else [])

    def _describe_unreachable_store(self, missing: Ranks, disconnected: Ranks) -> list[str]:
        """A closed connection alone does not prove an exit: survivors close their connections, too."""
        if not missing:
            return []
        text = "the job's store does not answer (rank 0 serves it, unless torchrun or another process does)"
        text += f", so the state of {format_ranks(missing)} of {self._size} is unknown"
        if disconnected:
            text += f"; connections to {format_ranks(disconnected)} are closed, by an exit or after a failure"
        return [text]

    def _describe_given_up_by(self) -> list[str]:
        if not self._given_up_by:
            return []
        ranks = format_ranks(sorted(self._given_up_by))
        return [f"{ranks} of {self._size} gave up waiting for this rank: it was {_UNRESPONSIVE_CAUSES}"]

    def _format_reports(self) -> list[str]:
        """Format the reports, this rank's first, equal ones in one line."""
        ranks_by_report: dict[str, list[int]] = {self._own_report: []}
        for rank, report in sorted(dict(self._reports).items()):
            ranks_by_report.setdefault(report, []).append(rank)
        lines = [f"{format_ranks(ranks)}: {report}" for report, ranks in ranks_by_report.items()]
        num_hidden = len(lines) - _MAX_LINES_SHOWN
        return [*lines[:_MAX_LINES_SHOWN], *([f"... and {num_hidden} more"] if num_hidden > 0 else [])]


def _describe_failures(failed: dict[int, str], size: int) -> list[str]:
    return [f"rank {rank} of {size} failed with {error}" for rank, error in sorted(failed.items())[:_MAX_LINES_SHOWN]]


def _describe_losses(exited: Ranks, unresponsive: Ranks, size: int) -> list[str]:
    losses = []
    if exited:
        verb, pronoun, left = ("are", "their", "they left") if len(exited) > 1 else ("is", "its", "it left")
        losses.append(
            f"{format_ranks(exited)} of {size} {verb} gone: {pronoun} connections closed and {left} no error report "
            "(program ended, killed, crashed, or network failure)"
        )
    if unresponsive:
        losses.append(f"{format_ranks(unresponsive)} of {size} did not answer: {_UNRESPONSIVE_CAUSES}")
    return losses


def _get_store() -> Any:
    return default_store()


def _run_with_timeout(timeout_s: float, action: Callable[[], object]) -> None:
    """Run a store operation in a thread, and wait for it for at most `timeout_s`. Errors are ignored.

    The store can block forever, whatever its own timeout is.
    """

    def attempt() -> None:
        with suppress(Exception):
            action()

    thread = threading.Thread(target=attempt, name="zeroshard-reports", daemon=True)
    thread.start()
    join_at_exit(thread, STORE_TIMEOUT_S)
    thread.join(timeout_s)


# ---------------------------------------------------------------------------------------------------------------------
# Long waits: a rank that waits publishes what it waits for, and logs it with what it knows about the others.


LONG_WAIT_S = 10.0
"""How long a rank waits for others before it publishes and logs that."""
PUBLISH_TIME_S = 2.5
"""How long to wait, after publishing, for others that began to wait at about the same time. A step may have waited for
another second before: see `WAIT_BUDGET_S` of the gradient reducer."""
REPEAT_LOG_AFTER_S = (60.0, 300.0, 900.0)
"""When to log again that the same wait goes on."""
_NOT_WAITING = (
    "not waiting in zeroshard (busy, exited, or in DDP or another collective of the program). If this call is under "
    "`if rank == 0:`, make it on all ranks."
)
_MAX_RANKS_ASKED = 16
"""How many ranks' waits to read: usually it is rank 0 that waits elsewhere."""


class WaitMonitor:
    """The waits of the threads of this rank in one process group."""

    def __init__(self) -> None:
        self._started: dict[int, float] = {}
        """When each waiting thread began to wait, by thread id."""
        self._published = self._noticed = 0.0
        """The start of the last wait that was published, and of the last one considered for logging."""
        self._num_noticed = 0
        """How often that wait was considered."""
        self._num_long_waits = 0

    def start(self) -> None:
        self._started[threading.get_ident()] = time.monotonic()
        if _watcher is None:
            with _exit_lock:
                _start_watcher()

    def end(self) -> None:
        self._started.pop(threading.get_ident(), None)

    def report(self, detector: "FailureDetector", now: float, own_thread_ids: Collection[int]) -> bool:
        """Publish a long wait once, and log it at growing intervals. Return whether any thread waits."""
        started = min((start for ident, start in list(self._started.items()) if ident not in own_thread_ids), default=0)
        if not started:
            if self._published:
                self._published = 0.0
                _run_with_timeout(STORE_TIMEOUT_S, lambda: detector.publish_wait(""))
            return False
        waited_s = now - started
        if waited_s >= LONG_WAIT_S and self._published != started:
            self._published = started
            _run_with_timeout(STORE_TIMEOUT_S, lambda: detector.publish_wait(detector.describe_activity()))
            return True
        if self._noticed != started:
            self._noticed, self._num_noticed = started, 0
        log_after_s = (LONG_WAIT_S + PUBLISH_TIME_S, *REPEAT_LOG_AFTER_S)
        if self._num_noticed < len(log_after_s) and waited_s >= log_after_s[self._num_noticed]:
            self._num_noticed += 1
            self._num_long_waits += self._num_noticed == 1
            # Of waits that end soon, log the 1st, 2nd, 4th, 8th, ...: a rank may always be slow.
            if self._num_noticed > 1 or self._num_long_waits.bit_count() == 1:
                detector.log_wait(waited_s)
        return True


def _report_long_waits(now: float) -> bool:
    """Report the long waits of all process groups. Return whether any thread waits."""
    own_thread_ids = {thread.ident or 0 for thread in threading.enumerate() if thread.name.startswith(_THREAD_PREFIX)}
    is_waiting = False
    for detector in list(_detectors.values()):
        with suppress(Exception):  # a report must not end the watcher
            is_waiting |= detector.wait_monitor.report(detector, now, own_thread_ids)
    return is_waiting


# ---------------------------------------------------------------------------------------------------------------------
# The failure detector: publishes this rank's report, closes its connections and raises `RankLostError`.


_UNUSED_TAG = (1 << 20) - 1
"""The tag of probes: no rank sends messages with it."""
_PROBE_TIMEOUT = timedelta(milliseconds=1)

_detectors: WeakKeyDictionary[dist.ProcessGroup, "FailureDetector"] = WeakKeyDictionary()


def get_failure_detector(process_group: dist.ProcessGroup) -> "FailureDetector":
    """Return the detector of a process group, which all optimizers on it share."""
    if process_group not in _detectors:
        _detectors[process_group] = detector = FailureDetector(process_group)
        abort_at_exit(detector)
    return _detectors[process_group]


class FailureDetector:
    """Context manager that turns an error of the backend into `RankLostError`, on all ranks.

    After the first loss, entering it raises `RankLostError` again: the process groups are unusable.
    """

    def __init__(self, *process_groups: dist.ProcessGroup) -> None:
        """The first group must contain all data-parallel ranks. Without any group, errors pass unchanged."""
        self._activity: str | Callable[[], str] = "finding each other"
        self._call = _TRAINING
        self._context_providers: list[WeakMethod[Callable[[], str]]] = []
        self._num_steps = 0
        self._data_parallel_refs = [ref(group) for group in process_groups[:1]]
        self._groups = WeakSet(process_groups)
        self._lock = threading.Lock()
        self.wait_monitor = WaitMonitor()
        self._rank_lost_error: RankLostError | None = None
        self._unlogged_reports: PeerReports | None = None
        """Set by `abort` until `log_lost_ranks`."""
        self._closed_groups: WeakSet[dist.ProcessGroup] = WeakSet()

    def set_activity(
        self, activity: str | Callable[[], str], num_steps: int | None = None, *, call: str = _TRAINING
    ) -> None:
        """Set what this rank is about to wait for, for its report.

        Args:
            activity: What it waits for, or a function that says so.
            num_steps: How many steps it has done.
            call: The kind of call, if it is not part of an ordinary training step: for ranks that wait in different
                kinds of calls, the error says so first.
        """
        self._activity, self._call = activity, call
        self._num_steps = self._num_steps if num_steps is None else num_steps

    def set_idle(self, num_steps: int | None = None) -> None:
        """Record that this rank is between two calls."""
        self.set_activity(OUTSIDE, num_steps, call=OUTSIDE)

    def add_context(self, provider: Callable[[], str]) -> None:
        """Add a bound method that returns more text for the report ("" for none). It is referenced weakly."""
        live_providers = (weak for weak in self._context_providers if weak() is not None)
        self._context_providers = [*live_providers, WeakMethod(provider)]

    @contextmanager
    def activity(self, activity: str) -> Iterator[None]:
        """Context manager for a call that is not part of a step: sets the activity, and restores the previous one."""
        previous = self._activity, self._call
        self._activity = self._call = activity
        try:
            yield
        finally:
            self._activity, self._call = previous

    def add_group(self, process_group: dist.ProcessGroup) -> None:
        """Add a group of these ranks, or of some of them, whose connections are closed with the others."""
        self._groups.add(process_group)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Context manager for a wait for other ranks that is not inside this detector."""
        self.wait_monitor.start()
        try:
            yield
        finally:
            self.wait_monitor.end()

    def publish_wait(self, activity: str) -> None:
        """Publish in the job's store what this rank waits for; "" if it is no longer waiting."""
        group = self._data_parallel_group
        if group is not None:
            _get_store().set(_wait_key(group, group.rank()), activity)

    def log_wait(self, waited_s: float) -> None:
        """Log what this rank waits for, and what others do."""
        group = self._data_parallel_group
        if group is None:
            return
        own, others = self.describe_activity(), dict[int, str]()
        _run_with_timeout(STORE_TIMEOUT_S, lambda: others.update(_read_waits(group)))
        elsewhere = [f"rank {rank} waits in: {text}" for rank, text in sorted(others.items()) if text and text != own]
        same = [rank for rank, text in sorted(others.items()) if text == own]
        idle = [rank for rank, text in sorted(others.items()) if not text]
        elsewhere += [f"{format_ranks(same)}: waiting in the same call"] if same else []
        elsewhere += [f"{format_ranks(idle)}: {_NOT_WAITING}"] if idle else []
        log_rank(
            logging.WARNING,
            group.rank(),
            "has been waiting for other ranks for %.0f s, in: %s (process-group timeout: %s). %s",
            *(waited_s, own, group_timeout(group) or "unknown", "; ".join(elsewhere)),
        )

    def describe_activity(self) -> str:
        return self._activity if isinstance(self._activity, str) else self._activity()

    def __enter__(self) -> None:
        if self._rank_lost_error is not None:
            raise self._rank_lost_error.copy()
        self.wait_monitor.start()

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.wait_monitor.end()
        if not isinstance(error, RuntimeError) or isinstance(error, (ZeroError, torch.OutOfMemoryError)):
            return
        group = self._data_parallel_group
        if group is not None:
            # `from None`: the message includes the backend's error, and its traceback does not help.
            raise self._abort_and_report_once(error, group) from None

    @property
    def _data_parallel_group(self) -> dist.ProcessGroup | None:
        """The group of all ranks; None if it was destroyed, or has no other ranks."""
        group = next((weak() for weak in self._data_parallel_refs), None)
        return group if group is not None and is_open(group) and group.size() > 1 else None

    @contextmanager
    def abort_on_error(self) -> Iterator[None]:
        """Context manager for work that other ranks wait for: an error aborts the groups, so they raise at once."""
        try:
            yield
        except ZeroError:
            raise  # all ranks raise it
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
            return RankLostError(f"other ranks have exited: {reason}")
        no_loss_message = (
            "the connections between ranks broke" if _is_connection_error(error) else f"a message failed: {reason}"
        )
        reports = self._announce_and_abort(reason, group, is_root_cause=False)
        return reports.collect_error(no_loss_message, dump_flight_recorder())

    def abort(self, error: BaseException) -> None:
        """Report an error of this rank alone and close its connections, so that the other ranks raise at once."""
        group = self._data_parallel_group
        with self._lock:
            if self._rank_lost_error is None and group is not None:
                is_root_cause = not _is_consequence(error)
                reason = format_error(error) if is_root_cause else _format_reason(error)
                reports = self._announce_and_abort(reason, group, is_root_cause=is_root_cause)
                self._rank_lost_error = RankLostError(f"this rank failed with {reason}. {_RESTART_ADVICE}")
                self._unlogged_reports = None if is_root_cause else reports

    def log_lost_ranks(self) -> None:
        """Log which ranks were lost if `abort` was called with a connection error, which names none (as DDP's)."""
        group, reports = self._data_parallel_group, self._unlogged_reports
        if group is None or reports is None:
            return
        self._unlogged_reports = None
        lost = reports.collect_error("the connections between ranks broke", "")
        is_any_lost = bool(lost.failed or lost.exited or lost.unresponsive)
        if is_any_lost or reports.has_different_calls:
            headline, advice, *_ = str(lost).splitlines()
            text = headline if is_any_lost else f"{headline} {advice}"
            log_rank(logging.ERROR, group.rank(), "connection lost outside of zeroshard: %s", text)

    @property
    def is_destroyed(self) -> bool:
        """Whether any of the process groups was destroyed."""
        return any(not is_open(group) for group in list(self._groups))

    def close_connections(self, *, destroyed_only: bool) -> None:
        """Close the connections of all process groups, or of the destroyed ones: threads that wait there raise."""
        with self._lock:
            for group in list(self._groups):
                is_chosen = not destroyed_only or not is_open(group)
                if is_chosen and group not in self._closed_groups:
                    self._closed_groups.add(group)
                    _GlooConnections(group).close()

    def _announce_and_abort(self, reason: str, group: dist.ProcessGroup, *, is_root_cause: bool) -> PeerReports:
        """Publish this rank's report, then close all its connections."""
        connections = [_GlooConnections(open_group) for open_group in list(self._groups) if is_open(open_group)]
        disconnected = {rank for connection in connections for rank in connection.disconnected_ranks()}
        activity = self._describe_for_report()
        call = self._call
        waits_in = self.describe_activity() if call == _TRAINING else call
        reports = PeerReports(
            group, call, activity, reason, disconnected, waits_in=waits_in, is_root_cause=is_root_cause
        )
        reports.publish()
        for connection in connections:
            connection.close()
        return reports

    def _describe_for_report(self) -> str:
        text = self.describe_activity()
        for weak_provider in self._context_providers:
            with suppress(Exception):  # must not replace the error that it explains
                provider = weak_provider()
                context = "" if provider is None else provider()
                text += f"; {context}" if context else ""
        text += f", {format_count(self._num_steps, 'step')} done"
        collective = describe_last_collective(*self._groups)
        return f"{text} (torch's flight recorder: {collective})" if collective else text


def _wait_key(group: dist.ProcessGroup, rank: int) -> str:
    return f"zeroshard/waiting/{group.group_name}/{rank}"


def _read_waits(group: dist.ProcessGroup) -> dict[int, str]:
    """Return what the first ranks wait for, "" if they have not published it."""
    store = _get_store()
    ranks = [rank for rank in range(min(group.size(), _MAX_RANKS_ASKED)) if rank != group.rank()]
    keys = {rank: _wait_key(group, rank) for rank in ranks}
    return {rank: store.get(key).decode(errors="replace") if store.check([key]) else "" for rank, key in keys.items()}


def _format_reason(error: BaseException) -> str:
    """Return gloo's message without source location, ports and advice."""
    if _is_timeout_error(error):
        return "no answer within the timeout of the process group"
    return re.sub(r"^\[\S+\] |(?<=\]):\d+|\. This is typically .*", "", str(error), flags=re.DOTALL)


def _is_connection_error(error: BaseException) -> bool:
    return _is_timeout_error(error) or re.search("connection|broken pipe", str(error), re.IGNORECASE) is not None


def _is_consequence(error: BaseException) -> bool:
    """Whether the failure of another rank has caused the error: the backend lost a connection."""
    return isinstance(error, RuntimeError) and _is_connection_error(error)


def _is_timeout_error(error: BaseException) -> bool:
    return re.search("timed? ?out", str(error), re.IGNORECASE) is not None


class _GlooConnections:
    """This rank's gloo connections in a group: finds the closed ones, and closes all.

    gloo has no API for either. A receive of a message that is never sent fails at once on a closed connection. If
    instead it times out, gloo closes all connections of the rank.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._disconnected = group, list[int]()
        """Group ranks whose connections are closed, other than by a timeout."""
        self._probes: list[tuple[Any, torch.Tensor]] = []
        if not _is_gloo(group):
            return  # NCCL has a watchdog of its own
        for rank in range(group.size()):
            if rank != group.rank():
                self._probe(rank)

    def disconnected_ranks(self) -> list[int]:
        """Return global ranks. Not for a destroyed group, whose ranks torch cannot translate any more."""
        return [dist.get_global_rank(self._group, rank) for rank in self._disconnected]

    def _probe(self, rank: int) -> None:
        buffer = torch.empty(1, dtype=torch.uint8, device="cpu")
        try:
            # Hazard: `dist.irecv` refuses destroyed groups.
            self._probes.append((self._group.recv([buffer], rank, _UNUSED_TAG), buffer))
        except RuntimeError as error:
            if not _is_timeout_error(error):
                self._disconnected.append(rank)

    def close(self) -> None:
        """Let one probe time out, whereupon gloo closes all connections."""
        for work, _ in self._probes:
            try:
                work.wait(_PROBE_TIMEOUT)
            except RuntimeError as error:
                if _is_timeout_error(error):
                    return


def _is_gloo(group: dist.ProcessGroup) -> bool:
    try:
        return backend_name(group, torch.device("cpu")) == "gloo"
    except RuntimeError:
        return False
