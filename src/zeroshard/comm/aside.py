"""Messages beside all others, for a thread of its own."""

from collections.abc import Iterator
from itertools import count
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from .._types import Rank
from .collectives import Comm
from .process_group import Group

BACKGROUND_TAG_BASE = 1 << 24
"""Beyond what users and ways between ranks give their own messages."""

_background_tags: WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = WeakKeyDictionary()
"""Those who talk aside do so in the same order on all ranks, and messages of one must not be taken for another's."""


class BackgroundComm(Comm):
    """`send` and `receive` of messages that meet no others. The other verbs are not for threads. Made on all ranks.

    They travel in `Group.control`: a process group of its own would have to be found by a name, which torch makes of
    how many groups a process is in.
    """

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self.tag = next(_background_tags.setdefault(group.cpu_group, count(BACKGROUND_TAG_BASE)))

    def all_succeeded(self, *, succeeded: bool) -> bool:
        """Whether it is so on all ranks, which all call it. The first asks, and tells the others."""
        flag = torch.tensor([succeeded], dtype=torch.uint8, device="cpu")
        if self.group.rank == 0:
            return self._reduce_on_rank0(flag)
        self.send(flag, Rank(0)).wait()
        self.receive(flag, Rank(0)).wait()
        return bool(flag.item())

    def _reduce_on_rank0(self, flag: torch.Tensor) -> bool:
        others = [Rank(rank) for rank in range(1, self.group.size)]
        for call in (self._receive_flag, self._send_flag):
            for rank in others:
                call(flag, rank)
        return bool(flag.item())

    def _receive_flag(self, flag: torch.Tensor, rank: Rank) -> None:
        heard = torch.zeros_like(flag)
        self.receive(heard, rank).wait()
        flag.mul_(heard)

    def _send_flag(self, flag: torch.Tensor, rank: Rank) -> None:
        self.send(flag.clone(), rank).wait()
