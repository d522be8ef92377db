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
from .ending import is_ending, tell_at_exit
from .recorder import keep_for_later, last_message
from .words import Words

_NOBODYS = (1 << 20) - 1
"""The tag of messages that nobody sends."""
_MOMENT = timedelta(milliseconds=1)

_lines: WeakKeyDictionary[dist.ProcessGroup, "Line"] = WeakKeyDictionary()


def line_of(process_group: dist.ProcessGroup) -> "Line":
    """The one of all optimizers that use a group."""
    if process_group not in _lines:
        _lines[process_group] = line = Line(process_group)
        tell_at_exit(line)
    return _lines[process_group]


class Line:
    """As a context it turns a failure of the backend into `RankLostError`, on all ranks."""

    def __init__(self, *process_groups: dist.ProcessGroup) -> None:
        """The first of them is that of all ranks; none for a process that is part of no job."""
        self._place: str | Callable[[], str] = "finding each other"
        self._more: list[WeakMethod[Callable[[], str]]] = []
        self._steps = 0
        self._ranks = [ref(group) for group in process_groups[:1]]
        self._groups = WeakSet(process_groups)
        self._lock = threading.Lock()
        self._broken: RankLostError | None = None
        self._hung_up: WeakSet[dist.ProcessGroup] = WeakSet()

    def at(self, place: str | Callable[[], str], steps: int | None = None) -> None:
        """Says what is waited for next, and how many steps have been made."""
        self._place, self._steps = place, self._steps if steps is None else steps

    def ask(self, more: Callable[[], str]) -> None:
        """A method that is asked, when ranks are lost, what this one waits for besides: "" if for nothing."""
        self._more = [*(it for it in self._more if it() is not None), WeakMethod(more)]

    @contextmanager
    def meanwhile(self, place: str) -> Iterator[None]:
        """The same of what is done inside, after which it is where it was before."""
        before, self._place = self._place, place
        yield
        self._place = before

    def add(self, process_group: dist.ProcessGroup) -> None:
        """One more in which these ranks, or some of them, talk."""
        self._groups.add(process_group)

    def __enter__(self) -> None:
        if self._broken is not None:
            raise self._broken.again()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, RuntimeError) or isinstance(error, (ZeroError, torch.OutOfMemoryError)):
            return
        group = self._everyone
        if group is not None:
            # What the backend says is in it; its own trace is no help, and others have been cut off by us.
            raise self._lost(error, group) from None

    @property
    def _everyone(self) -> dist.ProcessGroup | None:
        """The group of all ranks, unless it was destroyed, or there is nobody else to lose."""
        group = next((it() for it in self._ranks), None)
        return group if group in _world.pg_map and group.size() > 1 else None

    @contextmanager
    def relied_on(self) -> Iterator[None]:
        """Other ranks wait for what is done inside: if it fails, they shall hear of it at once."""
        try:
            yield
        except ZeroError:
            raise  # on all ranks
        except BaseException as error:
            self.give_up(error)
            raise

    def _lost(self, error: RuntimeError, group: dist.ProcessGroup) -> RankLostError:
        with self._lock:
            if self._broken is None:
                self._broken = self._tell(error, group)
        return self._broken.again()

    def _tell(self, error: RuntimeError, group: dist.ProcessGroup) -> RankLostError:
        reason = _reason(error)
        if is_ending.is_set():
            return RankLostError(f"other ranks have ended: {reason}")
        all_there = "the connections between ranks broke" if _is_connection(error) else f"a message failed: {reason}"
        return self._part(reason, group, own=False).report(all_there, keep_for_later())

    def give_up(self, error: BaseException) -> None:
        """This rank fails alone, and tells the others."""
        group = self._everyone
        with self._lock:
            if self._broken is None and group is not None:
                own = not (isinstance(error, RuntimeError) and _is_connection(error))  # else others have failed it, too
                reason = f"{type(error).__name__}: {error}" if own else _reason(error)
                words = self._part(reason, group, own=own)
                self._broken = RankLostError(f"this rank has failed with {reason}. {words.ADVICE}")

    @property
    def is_destroyed(self) -> bool:
        """Whether one of the process groups was destroyed."""
        return any(it not in _world.pg_map for it in list(self._groups))

    def hang_up(self, *, destroyed_only: bool) -> None:
        """Close the connections of all process groups, or of those that were destroyed: whoever waits there raises."""
        with self._lock:
            chosen = [it for it in list(self._groups) if not destroyed_only or it not in _world.pg_map]
            for group in chosen:
                if group not in self._hung_up:
                    self._hung_up.add(group)
                    _Ends(group).close()

    def _part(self, reason: str, group: dist.ProcessGroup, *, own: bool) -> Words:
        """Leave a word, then hang up."""
        ends = [_Ends(it) for it in list(self._groups) if it in _world.pg_map]
        closed = {rank for it in ends for rank in it.closed_ranks()}
        words = Words(group, self._where(group), reason, closed, own=own)
        words.leave()
        for it in ends:
            it.close()
        return words

    def _where(self, group: dist.ProcessGroup) -> str:
        place = self._place if isinstance(self._place, str) else self._place()
        for asked in self._more:
            with suppress(Exception):  # a help in an error, never another error
                place += f"; {more}" if (it := asked()) is not None and (more := it()) else ""
        recorded = last_message(group)
        return f"{place}, {self._steps} steps done" + (f" (torch's flight recorder: {recorded})" if recorded else "")


def _reason(error: BaseException) -> str:
    """What gloo says, without the place in its source, ports, and its advice."""
    if _is_timeout(error):
        return "no answer within the timeout of the process group"
    return re.sub(r"^\[\S+\] |(?<=\]):\d+|\. This is typically .*", "", str(error), flags=re.DOTALL)


def _is_connection(error: BaseException) -> bool:
    return _is_timeout(error) or re.search("connection|broken pipe", str(error), re.IGNORECASE) is not None


def _is_timeout(error: BaseException) -> bool:
    return re.search("timed? ?out", str(error), re.IGNORECASE) is not None


class _Ends:
    """This rank's ends of the connections in a group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._closed = group, list[int]()
        """Ranks of the group whose ends are closed, if not for want of time."""
        self._open: list[tuple[Any, torch.Tensor]] = []
        if not _is_gloo(group):
            return  # NCCL has a watchdog of its own
        for rank in range(group.size()):
            if rank != group.rank():
                self._look(rank)

    def closed_ranks(self) -> list[int]:
        """Global ranks. Not for a group that was destroyed, which torch no longer knows."""
        return [dist.get_global_rank(self._group, rank) for rank in self._closed]

    def _look(self, rank: int) -> None:
        memory = torch.empty(1, dtype=torch.uint8, device="cpu")
        try:
            # Hazard: `dist.irecv` refuses groups that were destroyed.
            self._open.append((self._group.recv([memory], rank, _NOBODYS), memory))
        except RuntimeError as error:
            if not _is_timeout(error):
                self._closed.append(rank)

    def close(self) -> None:
        """gloo closes all of them when one has waited in vain."""
        for work, _ in self._open:
            try:
                work.wait(_MOMENT)
            except RuntimeError as error:
                if _is_timeout(error):
                    return


def _is_gloo(group: dist.ProcessGroup) -> bool:
    try:
        return bool(group._get_backend(torch.device("cpu")).name() == "gloo")
    except RuntimeError:
        return False
