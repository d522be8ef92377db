"""Each rank and rank 0: how far their clocks are apart, and how fast the way between them is."""

import time
from dataclasses import dataclass

import torch

from ..comm.collectives import Comm
from ..units import MIB, Rank

_ROUNDS = 8
_ECHOES = 3
_FEW_RANKS = 64
"""Rank 0 talks to one rank at a time. To more than so many it says less."""


@dataclass(frozen=True)
class Link:
    """To rank 0. Seconds, and bytes a second.

    ahead: how much later this rank's clock is, give or take `give_or_take`.
    """

    ahead: float
    give_or_take: float
    rate: float


def link_to_first(comm: Comm) -> Link | None:
    """On all ranks, which rank 0 serves in their order; it has none itself."""
    word = torch.zeros(1, dtype=torch.int64, device="cpu")
    load = torch.zeros(MIB if comm.group.size <= _FEW_RANKS else MIB // 8, dtype=torch.uint8, device="cpu")
    if comm.group.rank != 0:
        return _ask(comm, word, load)
    for rank in range(1, comm.group.size):
        _serve(comm, Rank(rank), word, load)
    return None


def _serve(comm: Comm, rank: Rank, word: torch.Tensor, load: torch.Tensor) -> None:
    for _ in range(_ROUNDS):
        comm.receive(word, rank).wait()
        word[0] = time.time_ns()
        comm.send(word, rank).wait()
    for _ in range(_ECHOES):
        comm.receive(load, rank).wait()
        comm.send(load, rank).wait()


def _ask(comm: Comm, word: torch.Tensor, load: torch.Tensor) -> Link:
    """Of several rounds the fastest counts. In the first this rank waits for its turn."""
    rounds: list[tuple[int, int]] = []
    for _ in range(_ROUNDS):
        asked = time.time_ns()
        _there_and_back(comm, word)
        took = time.time_ns() - asked
        rounds.append((took, asked + took // 2 - int(word.item())))
    echoes = []
    for _ in range(_ECHOES):
        start = time.perf_counter_ns()
        _there_and_back(comm, load)
        echoes.append(time.perf_counter_ns() - start)
    took, ahead = min(rounds)
    return Link(ahead / 1e9, took / 2e9, 2 * load.numel() * 1e9 / max(min(echoes), 1))


def _there_and_back(comm: Comm, tensor: torch.Tensor) -> None:
    comm.send(tensor, Rank(0)).wait()
    comm.receive(tensor, Rank(0)).wait()
