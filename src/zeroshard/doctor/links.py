"""Each rank and rank 0: how far their clocks are apart, and how fast the way between them is."""

import time
from dataclasses import dataclass

import torch

from ..comm.collectives import Comm
from .._types import MIB, Rank

_PING_ROUNDS = 8
_PAYLOAD_ROUNDS = 3
_MAX_RANKS_WITH_FULL_PAYLOAD = 64
"""Rank 0 talks to one rank at a time. To more than so many it says less."""


@dataclass(frozen=True)
class Link:
    """To rank 0. Seconds, and bytes a second.

    ahead: how much later this rank's clock is, give or take `give_or_take`.
    """

    ahead: float
    give_or_take: float
    rate: float


def measure_link_to_rank0(comm: Comm) -> Link | None:
    """On all ranks, which rank 0 serves in their order; it has none itself."""
    word = torch.zeros(1, dtype=torch.int64, device="cpu")
    load = torch.zeros(
        MIB if comm.group.size <= _MAX_RANKS_WITH_FULL_PAYLOAD else MIB // 8, dtype=torch.uint8, device="cpu"
    )
    if comm.group.rank != 0:
        return _ping_rank0(comm, word, load)
    for rank in range(1, comm.group.size):
        _serve_pings(comm, Rank(rank), word, load)
    return None


def _serve_pings(comm: Comm, rank: Rank, ping: torch.Tensor, payload: torch.Tensor) -> None:
    for _ in range(_PING_ROUNDS):
        comm.receive(ping, rank).wait()
        ping[0] = time.time_ns()
        comm.send(ping, rank).wait()
    for _ in range(_PAYLOAD_ROUNDS):
        comm.receive(payload, rank).wait()
        comm.send(payload, rank).wait()


def _ping_rank0(comm: Comm, ping: torch.Tensor, payload: torch.Tensor) -> Link:
    """Of several rounds the fastest counts. In the first this rank waits for its turn."""
    rounds: list[tuple[int, int]] = []
    for _ in range(_PING_ROUNDS):
        asked = time.time_ns()
        _round_trip(comm, ping)
        took = time.time_ns() - asked
        rounds.append((took, asked + took // 2 - int(ping.item())))
    echoes = []
    for _ in range(_PAYLOAD_ROUNDS):
        start = time.perf_counter_ns()
        _round_trip(comm, payload)
        echoes.append(time.perf_counter_ns() - start)
    took, ahead = min(rounds)
    return Link(ahead / 1e9, took / 2e9, 2 * payload.numel() * 1e9 / max(min(echoes), 1))


def _round_trip(comm: Comm, tensor: torch.Tensor) -> None:
    comm.send(tensor, Rank(0)).wait()
    comm.receive(tensor, Rank(0)).wait()
