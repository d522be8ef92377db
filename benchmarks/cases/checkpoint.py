"""Save and load a model with its optimizer state: time, and memory on the fullest rank."""

import math
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from ..harness.ranks import run_ranks
from ..harness.report import Row, ratio_row
from ..harness.resources import MIB, peak_bytes, reset_peak
from ..harness.timing import ms, ratio
from .checkpoint_peers import FSDP2, OURS, PEERS, TORCH_ZERO, AsyncPeer, Peer, Wait

WORLD = 4
BUCKET_MIB = 25
TIME_BARS = {FSDP2: 1.1, TORCH_ZERO: 0.2}
_LIMIT_S = 600
_REQUIRED_SPACE = 6 * 2**30
"""Bytes that the files of one contestant need at most: two checkpoints, and the one being written."""


class Cost(NamedTuple):
    """The cost of one call, on one rank or on the worst rank."""

    seconds: float
    extra: float
    """Peak resident memory minus the memory before, in MiB."""


Turn = dict[str, Cost]
"""One turn of a contestant, in its own processes: `save` and `load`. Contestants with asynchronous saves also have
`blocked`, until the call returns, and `complete`, until the checkpoint is complete."""
Board = dict[str, list[Turn]]


def compare(rounds: int, size: str, parent: Path | None) -> list[Row]:
    """Run all contestants in turns, each in new processes, in reverse order every other round."""
    board: Board = {name: [] for name in PEERS}
    for number in range(rounds):
        for name in PEERS if number % 2 else reversed(PEERS):
            board[name].append(_run_turn(name, size, parent))
            print(f"round {number + 1}, {name}: {_describe(board[name][-1])}", file=sys.stderr, flush=True)
    return [*_time_rows(board, size), *_memory_rows(board, size), *_async_rows(board, size)]


def in_memory_folder() -> Path | None:
    """Return a directory in memory, if it has enough space.

    A disk is equally slow for all contestants and hides their own time.
    """
    memory = Path("/dev/shm")
    return memory if memory.is_dir() and shutil.disk_usage(memory).free > _REQUIRED_SPACE else None


def _run_turn(name: str, size: str, parent: Path | None) -> Turn:
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        if shutil.disk_usage(folder).free < _REQUIRED_SPACE:
            raise RuntimeError(f"{folder}: less than {_REQUIRED_SPACE // 2**30} GiB are free")
        by_rank: list[Turn] = run_ranks(WORLD, _measure, name, size, folder, limit_s=_LIMIT_S, start="forkserver")
    return {action: _worst([turn[action] for turn in by_rank]) for action in by_rank[0]}


def _describe(turn: Turn) -> str:
    return ", ".join(f"{action} {cost.seconds:.2f} s and {cost.extra:.0f} MiB" for action, cost in turn.items())


def _worst(costs: list[Cost]) -> Cost:
    return Cost(*map(max, zip(*costs, strict=True)))


def _measure(name: str, size: str, folder: str) -> Turn:
    _save_and_load(PEERS[name]("tiny"), Path(folder, "tiny"))  # import modules and initialize: these must not count
    return _save_and_load(PEERS[name](size), Path(folder, "real"))


def _save_and_load(peer: Peer, folder: Path) -> Turn:
    expected = peer.digest()
    turn = {"save": _measure_cost(lambda: peer.save(folder))}
    peer.zero_tensors()
    turn["load"] = _measure_cost(lambda: peer.load(folder))
    if not math.isclose(peer.digest(), expected, rel_tol=1e-9):  # the summation order may differ
        raise RuntimeError("the loaded values differ from the saved ones")
    if isinstance(peer, AsyncPeer):
        waits: list[Wait] = []
        turn["blocked"] = _measure_cost(lambda: waits.append(peer.async_save(folder)))
        wait_cost = _measure_cost(waits[0])
        seconds = turn["blocked"].seconds + wait_cost.seconds
        turn["complete"] = Cost(seconds, max(turn["blocked"].extra, wait_cost.extra))
    return turn


def _measure_cost(call: Callable[[], object]) -> Cost:
    before = reset_peak()
    dist.barrier()
    start = time.perf_counter()
    call()
    seconds = time.perf_counter() - start
    extra = peak_bytes() - before
    dist.barrier()
    return Cost(seconds, extra / MIB)


def _time_rows(board: Board, size: str) -> list[Row]:
    rows = []
    for action in ("save", "load"):
        seconds = {name: [turn[action].seconds for turn in turns] for name, turns in board.items()}
        for peer, bar in TIME_BARS.items():
            what = f"{action} GPT {size} and AdamW state, {WORLD} ranks: time"
            spread = ratio(seconds[OURS], seconds[peer])
            rows.append(ratio_row(what, ms(seconds[OURS]), f"{ms(seconds[peer])} {peer}", spread, bar))
    return rows


def _memory_rows(board: Board, size: str) -> list[Row]:
    rows = []
    for action in ("save", "load"):
        extra = {name: max(turn[action].extra for turn in turns) for name, turns in board.items()}
        peers = ", ".join(f"{extra[peer]:.0f} MiB {peer}" for peer in TIME_BARS)
        what = f"{action} GPT {size} and AdamW state, {WORLD} ranks: extra memory, worst rank"
        rows.append(Row(what, f"{extra[OURS]:.0f} MiB", peers, extra[OURS], bar=BUCKET_MIB))
    return rows


def _async_rows(board: Board, size: str) -> list[Row]:
    rows = []
    for action, label in (("blocked", "time that training is blocked"), ("complete", "time until it is complete")):
        seconds = {name: [turn[action].seconds for turn in board[name]] for name in (OURS, FSDP2)}
        ours, theirs = seconds[OURS], seconds[FSDP2]
        what = f"asynchronous save, GPT {size}, {WORLD} ranks: {label}"
        rows.append(ratio_row(what, ms(ours), f"{ms(theirs)} {FSDP2}", ratio(ours, theirs)))
    return rows
