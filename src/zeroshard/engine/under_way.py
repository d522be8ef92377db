"""Buckets of gradients that have been sent, and when to wait for them."""

from collections import deque
from collections.abc import Callable, Iterator

from ..comm.collectives import Comm
from ..comm.ending import UnusedBuckets
from ..profiling import Phase
from ..layout.layout import Layout
from .slots import PendingReduce

MIN_IN_FLIGHT = 1
"""The newest buckets are left on their way: taking them in at once would stop what they are to overlap with."""
MAX_IN_FLIGHT = 2
WAIT_TIMEOUT_S = 0.1
"""Seconds that a rank waits, inside a backward pass, for the oldest of more buckets than that, so that memory is
bounded where ranks keep pace; and for all of them before it settles, so that what fails is known in time. In vain once
a step only: another may send nothing before this one settles."""


FinishReduce = Callable[[PendingReduce], None]
"""Takes one in. Raises nothing that this rank alone knows of."""


class InFlightReduces:
    """The oldest first."""

    def __init__(self, comm: Comm) -> None:
        self._profiler = comm.profiler
        self._unused_buckets = UnusedBuckets(comm.data_parallel.group.rank, comm.group.failure_detector)
        self._pending: deque[PendingReduce] = deque()
        self._timeout_s = WAIT_TIMEOUT_S
        self.are_ranks_in_step = True
        """All ranks had sent as much when they last settled."""

    def __len__(self) -> int:
        return len(self._pending)

    def __iter__(self) -> Iterator[PendingReduce]:
        return iter(self._pending)

    def add(self, pending: PendingReduce) -> None:
        self._pending.append(pending)
        self._unused_buckets.add()

    def reset(self) -> None:
        """A step has all that it waited for."""
        self._timeout_s = WAIT_TIMEOUT_S
        self._unused_buckets.reset()

    def discard_results(self) -> None:
        # Hazard: waiting here for what is under way would be waiting for ranks that may not send it before they settle.
        self._pending = deque(sending._replace(is_needed=False) for sending in self._pending)
        self._unused_buckets.reset()

    def finish_arrived(self, finish_reduce: FinishReduce) -> None:
        while len(self) > MIN_IN_FLIGHT:
            crowded = len(self) > MAX_IN_FLIGHT
            if not self._wait_for_oldest(self._timeout_s if crowded else 0):
                self._timeout_s = 0 if crowded else self._timeout_s
                return
            self._finish_oldest(finish_reduce)

    def finish_within_timeout(self, finish_reduce: FinishReduce) -> None:
        """What arrives soon: if that fails, all ranks learn of it by the statement."""
        while self and self._wait_for_oldest(self._timeout_s if self.are_ranks_in_step else 0):
            self._finish_oldest(finish_reduce)
        self._timeout_s = 0 if self else self._timeout_s

    def finish_all(self, finish_reduce: FinishReduce) -> None:
        while self:
            self._finish_oldest(finish_reduce)

    def describe_missing(self, num_sent: int, layout: Layout) -> str:
        """What of so many buckets a rank waits for, for an error; "" if for nothing."""
        missing = [it.bucket.index for it in self if not it.work.is_ready(0)]
        if not missing:
            return ""
        num_sent = max(num_sent, len(missing))
        next_one = layout.describe_bucket(missing[0], "gradients")
        return f"{num_sent - len(missing)} of {num_sent} buckets that were sent have arrived, next: {next_one}"

    def _finish_oldest(self, finish_reduce: FinishReduce) -> None:
        """It is among these until it has arrived, for errors to name it."""
        finish_reduce(self._pending[0])
        self._pending.popleft()

    def _wait_for_oldest(self, timeout_s: float) -> bool:
        """Whether the oldest has come, after so many seconds at most."""
        slot, arriving, *_ = self._pending[0]
        if not timeout_s or arriving.is_ready(0):
            return arriving.is_ready(0)
        with self._profiler.phase(Phase.WAIT_GRADS, slot.index):
            return arriving.is_ready(timeout_s)
