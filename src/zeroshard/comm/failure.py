"""The line to the other ranks, and what happens when it breaks.

A rank whose communication fails (another one has died, or did not answer in time) leaves a word in the job's store on
what it was doing, and hangs up on everyone. So whoever waits for this rank knows at once, hangs up in turn, and all
that are alive raise within moments, whatever they were waiting for. From the words they know who has said nothing.

Hazard: gloo tells of a lost connection only those that wait for that very rank; others would wait for their timeout.
"""

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary, WeakMethod, WeakSet, ref

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from ..errors import RankLostError, ZeroError
from .ending import abort_at_exit, is_shutting_down
from .recorder import describe_last_collective, dump_flight_recorder
from .words import PeerReports

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
