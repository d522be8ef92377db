"""Consolidate the state on one rank: time, bytes on the wire, memory."""

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


class Consolidation(NamedTuple):
    """One consolidation on one rank."""

    seconds: float
    sent: int
    extra: int
    """Peak memory minus the memory before, in bytes."""


class RankRecord(NamedTuple):
    """All consolidations of one class on one rank, and the bytes of the rank's own state."""

    rounds: list[Consolidation]
    own_bytes: int


def consolidation(rounds: int, *, more_ranks: bool) -> list[Row]:
    """Consolidate the AdamW state of 26.3 M parameters."""
    return [row for world in ((2, 4) if more_ranks else (2,)) for row in _rows(world, rounds)]


def _rows(world: int, rounds: int) -> list[Row]:
    by_rank: list[dict[str, RankRecord]] = run_ranks(world, _consolidate_all, rounds)
    seconds, wire, target, others = ({} for _ in range(4))
    for peer in PEERS:
        records = [by_peer[peer] for by_peer in by_rank]
        needed = sum(record.own_bytes for rank, record in enumerate(records) if rank != TARGET)
        turns = list(zip(*(record.rounds for record in records), strict=True))
        seconds[peer] = [max(measured.seconds for measured in turn) for turn in turns]
        wire[peer] = max(sum(measured.sent for measured in turn) for turn in turns) / needed
        extra = [max(measured.extra for measured in record.rounds) / MIB for record in records]
        target[peer] = extra.pop(TARGET)
        others[peer] = max(extra)
    what = f"consolidate AdamW state of GPT 26M, {world} ranks"
    ours, theirs = seconds["zeroshard"], seconds["torch"]
    result = sum(record["zeroshard"].own_bytes for record in by_rank) / MIB
    return [
        ratio_row(f"{what}: time", ms(ours), f"{ms(theirs)} torch", ratio(ours, theirs), bar=0.05),
        _value_row(f"{what}: bytes sent / bytes a gather needs", wire, "", bar=1.005),
        _value_row(f"{what}: extra memory, worst rank except the target", others, "MiB", bar=32),
        _value_row(f"{what}: extra memory of the target (result: {result:.0f} MiB)", target, "MiB"),
    ]


def _value_row(what: str, values: dict[str, float], unit: str, bar: float | None = None) -> Row:
    """Make a row whose bar applies to our own value, not to a ratio."""
    ours, theirs = (f"{value:.0f} {unit}" if unit else f"{value:.3f}" for value in values.values())
    return Row(what, ours, f"{theirs} torch", values["zeroshard"], bar=bar)


def _consolidate_all(rounds: int) -> dict[str, RankRecord]:
    optimizers = {peer: _make_stepped_optimizer(peer) for peer in PEERS}
    consolidations: dict[str, list[Consolidation]] = {peer: [] for peer in PEERS}
    for _ in range(rounds):
        for peer, optimizer in optimizers.items():
            consolidations[peer].append(_consolidate(optimizer))
    return {peer: RankRecord(consolidations[peer], _state_bytes(optimizers[peer])) for peer in PEERS}


def _make_stepped_optimizer(peer: str) -> Any:
    optimizer = RECIPES["fused AdamW"].sharded(peer, make_params(gpt_shapes()))
    optimizer.step()
    return optimizer


def _consolidate(optimizer: Any) -> Consolidation:
    before = reset_peak()
    dist.barrier()
    sent = sent_bytes()
    start = time.perf_counter()
    optimizer.consolidate_state_dict(to=TARGET)
    if dist.get_rank() == TARGET:
        optimizer.state_dict()
    seconds = time.perf_counter() - start
    dist.barrier()
    return Consolidation(seconds, sent_bytes() - sent, peak_bytes() - before)


def _state_bytes(optimizer: Any) -> int:
    values: Iterable[Any] = (value for state in optimizer.optim.state.values() for value in state.values())
    return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))
