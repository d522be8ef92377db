"""Gathering the state on one rank: time, bytes on the wire, memory."""

import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..harness.models import PEERS, RECIPES, gpt_shapes, make_params
from ..harness.ranks import run_ranks
from ..harness.report import Row, ratio_row
from ..harness.resources import MIB, peak_bytes, reset_peak, sent_bytes
from ..harness.timing import ms, ratio

TARGET = 0


class Gathering(NamedTuple):
    """One consolidation as one rank saw it."""

    seconds: float
    sent: int
    extra: int
    """Bytes of memory at the peak beyond those before."""


class Record(NamedTuple):
    """All consolidations of one rank by one class, and the bytes of the state that the rank holds."""

    rounds: list[Gathering]
    held: int


def consolidation(rounds: int, *, more_ranks: bool) -> list[Row]:
    """AdamW state of 26.3 M parameters."""
    return [row for world in ((2, 4) if more_ranks else (2,)) for row in _rows(world, rounds)]


def _rows(world: int, rounds: int) -> list[Row]:
    by_rank: list[dict[str, Record]] = run_ranks(world, _consolidate, rounds)
    seconds, wire, target, others = ({} for _ in range(4))
    for peer in PEERS:
        records = [by_peer[peer] for by_peer in by_rank]
        needed = sum(record.held for rank, record in enumerate(records) if rank != TARGET)
        turns = list(zip(*(record.rounds for record in records), strict=True))
        seconds[peer] = [max(gathering.seconds for gathering in turn) for turn in turns]
        wire[peer] = max(sum(gathering.sent for gathering in turn) for turn in turns) / needed
        extra = [max(gathering.extra for gathering in record.rounds) / MIB for record in records]
        target[peer] = extra.pop(TARGET)
        others[peer] = max(extra)
    what = f"consolidate AdamW state of GPT 26M, {world} ranks"
    ours, theirs = seconds["zeroshard"], seconds["torch"]
    result = sum(record["zeroshard"].held for record in by_rank) / MIB
    return [
        ratio_row(f"{what}: time", ms(ours), f"{ms(theirs)} torch", ratio(ours, theirs), bar=0.05),
        _single(f"{what}: bytes sent / bytes a gather needs", wire, "", bar=1.005),
        _single(f"{what}: extra memory, worst rank but the target", others, "MiB", bar=32),
        _single(f"{what}: extra memory of the target (result: {result:.0f} MiB)", target, "MiB"),
    ]


def _single(what: str, values: dict[str, float], unit: str, bar: float | None = None) -> Row:
    """A row whose bar is on our own value, not on a ratio."""
    ours, theirs = (f"{value:.0f} {unit}" if unit else f"{value:.3f}" for value in values.values())
    return Row(what, ours, f"{theirs} torch", values["zeroshard"], bar=bar)


def _consolidate(rounds: int) -> dict[str, Record]:
    optimizers = {peer: _stepped(peer) for peer in PEERS}
    gatherings: dict[str, list[Gathering]] = {peer: [] for peer in PEERS}
    for _ in range(rounds):
        for peer, optimizer in optimizers.items():
            gatherings[peer].append(_gather(optimizer))
    return {peer: Record(gatherings[peer], _held(optimizers[peer])) for peer in PEERS}


def _stepped(peer: str) -> Any:
    optimizer = RECIPES["fused AdamW"].sharded(peer, make_params(gpt_shapes()))
    optimizer.step()
    return optimizer


def _gather(optimizer: Any) -> Gathering:
    before = reset_peak()
    dist.barrier()
    sent = sent_bytes()
    start = time.perf_counter()
    optimizer.consolidate_state_dict(to=TARGET)
    if dist.get_rank() == TARGET:
        optimizer.state_dict()
    seconds = time.perf_counter() - start
    dist.barrier()
    return Gathering(seconds, sent_bytes() - sent, peak_bytes() - before)


def _held(optimizer: Any) -> int:
    values: Iterable[Any] = (value for state in optimizer.optim.state.values() for value in state.values())
    return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))
