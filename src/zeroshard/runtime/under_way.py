"""Buckets of gradients that have been sent, and when to wait for them."""

from collections import deque
from collections.abc import Callable, Iterator

from ..comm.collectives import Comm
from ..comm.ending import UnusedBuckets
from ..labels import Label
from ..layout.layout import Layout
from .slots import Sending

UNFINISHED = 1
"""The newest buckets are left on their way: taking them in at once would stop what they are to overlap with."""
CROWD = 2
PATIENCE = 0.1
"""Seconds that a rank waits, inside a backward pass, for the oldest of more buckets than that, so that memory is
bounded where ranks keep pace; and for all of them before it settles, so that what fails is known in time. In vain once
a step only: another may send nothing before this one settles."""


Receive = Callable[[Sending], None]
"""Takes one in. Raises nothing that this rank alone knows of."""


class UnderWay:
    """The oldest first."""

    def __init__(self, comm: Comm) -> None:
        self._clock = comm.clock
        self._unused = UnusedBuckets(comm.everyone.group.rank, comm.group.line)
        self._sendings: deque[Sending] = deque()
        self._patience = PATIENCE
        self.keeps_pace = True
        """All ranks had sent as much when they last settled."""

    def __len__(self) -> int:
        return len(self._sendings)

    def __iter__(self) -> Iterator[Sending]:
        return iter(self._sendings)

    def add(self, sending: Sending) -> None:
        self._sendings.append(sending)
        self._unused.add()

    def start_over(self) -> None:
        """A step has all that it waited for."""
        self._patience = PATIENCE
        self._unused.reset()

    def unwant(self) -> None:
        # Hazard: waiting here for what is under way would be waiting for ranks that may not send it before they settle.
        self._sendings = deque(sending._replace(wanted=False) for sending in self._sendings)
        self._unused.reset()

    def take_in_what_came(self, receive: Receive) -> None:
        while len(self) > UNFINISHED:
            crowded = len(self) > CROWD
            if not self._arrives(self._patience if crowded else 0):
                self._patience = 0 if crowded else self._patience
                return
            self._take_in(receive)

    def take_in_in_time(self, receive: Receive) -> None:
        """What arrives soon: if that fails, all ranks learn of it by the statement."""
        while self and self._arrives(self._patience if self.keeps_pace else 0):
            self._take_in(receive)
        self._patience = 0 if self else self._patience

    def take_in_all(self, receive: Receive) -> None:
        while self:
            self._take_in(receive)

    def name_missing(self, sent: int, layout: Layout) -> str:
        """What of so many buckets a rank waits for, for an error; "" if for nothing."""
        missing = [it.slot.bucket for it in self if not it.arriving.arrives(0)]
        if not missing:
            return ""
        sent = max(sent, len(missing))
        next_one = layout.name_bucket(missing[0], "gradients")
        return f"{sent - len(missing)} of {sent} buckets that were sent have arrived, next: {next_one}"

    def _take_in(self, receive: Receive) -> None:
        """It is among these until it has arrived, for errors to name it."""
        receive(self._sendings[0])
        self._sendings.popleft()

    def _arrives(self, within: float) -> bool:
        """Whether the oldest has come, after so many seconds at most."""
        slot, arriving, *_ = self._sendings[0]
        if not within or arriving.arrives(0):
            return arriving.arrives(0)
        with self._clock.part(Label.WAIT_GRADS, slot.bucket):
            return arriving.arrives(within)
