"""Saving and loading a model with the state of its optimizer: time, and memory on the fullest rank."""

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
from .checkpoint_peers import FSDP2, OURS, PEERS, TORCH_ZERO, BackgroundPeer, Peer, Wait

WORLD = 4
BUCKET_MIB = 25
TIME_BARS = {FSDP2: 1.1, TORCH_ZERO: 0.2}
_LIMIT_S = 600
_ROOM = 6 * 2**30
"""Bytes that the files of one contestant take at most: two checkpoints, and what is being written."""


class Cost(NamedTuple):
    """Of one call, on one rank or on the worst of them."""

    seconds: float
    extra: float
    """MiB of resident memory at the peak beyond what was there before."""


Turn = dict[str, Cost]
"""What a contestant did once, in processes of its own: `save`, `load`, and if it can save in the background, `blocked`
until that let go of the training and `complete` until it was done."""
Board = dict[str, list[Turn]]


def compare(rounds: int, size: str, parent: Path | None) -> list[Row]:
    """All contestants in turns, each in new processes, every other round backwards."""
    board: Board = {name: [] for name in PEERS}
    for turn in range(rounds):
        for name in PEERS if turn % 2 else reversed(PEERS):
            board[name].append(_turn(name, size, parent))
            print(f"round {turn + 1}, {name}: {_told(board[name][-1])}", file=sys.stderr, flush=True)
    return [*_time_rows(board, size), *_memory_rows(board, size), *_background_rows(board, size)]


def place() -> Path | None:
    """Memory, if there is enough of it: a disk is slow for all alike, and hides what they do themselves."""
    memory = Path("/dev/shm")
    return memory if memory.is_dir() and shutil.disk_usage(memory).free > _ROOM else None


def _turn(name: str, size: str, parent: Path | None) -> Turn:
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        if shutil.disk_usage(folder).free < _ROOM:
            raise RuntimeError(f"{folder}: less than {_ROOM // 2**30} GiB are free")
        by_rank: list[Turn] = run_ranks(WORLD, _play, name, size, folder, limit_s=_LIMIT_S, start="forkserver")
    return {action: _worst([turn[action] for turn in by_rank]) for action in by_rank[0]}


def _told(turn: Turn) -> str:
    return ", ".join(f"{action} {cost.seconds:.2f} s and {cost.extra:.0f} MiB" for action, cost in turn.items())


def _worst(costs: list[Cost]) -> Cost:
    return Cost(*map(max, zip(*costs, strict=True)))


def _play(name: str, size: str, folder: str) -> Turn:
    _play_once(PEERS[name]("tiny"), Path(folder, "tiny"))  # loads and sets up what would otherwise count
    return _play_once(PEERS[name](size), Path(folder, "real"))


def _play_once(peer: Peer, folder: Path) -> Turn:
    expected = peer.digest()
    turn = {"save": _cost(lambda: peer.save(folder))}
    peer.spoil()
    turn["load"] = _cost(lambda: peer.load(folder))
    if not math.isclose(peer.digest(), expected, rel_tol=1e-9):  # it is added up in another order, perhaps
        raise RuntimeError("what was loaded is not what was saved")
    if isinstance(peer, BackgroundPeer):
        waits: list[Wait] = []
        turn["blocked"] = _cost(lambda: waits.append(peer.start_saving(folder)))
        after = _cost(waits[0])
        turn["complete"] = Cost(turn["blocked"].seconds + after.seconds, max(turn["blocked"].extra, after.extra))
    return turn


def _cost(call: Callable[[], object]) -> Cost:
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
            quotient = ratio(seconds[OURS], seconds[peer])
            rows.append(ratio_row(what, ms(seconds[OURS]), f"{ms(seconds[peer])} {peer}", quotient, bar))
    return rows


def _memory_rows(board: Board, size: str) -> list[Row]:
    rows = []
    for action in ("save", "load"):
        extra = {name: max(turn[action].extra for turn in turns) for name, turns in board.items()}
        others = ", ".join(f"{extra[peer]:.0f} MiB {peer}" for peer in TIME_BARS)
        what = f"{action} GPT {size} and AdamW state, {WORLD} ranks: extra memory, worst rank"
        rows.append(Row(what, f"{extra[OURS]:.0f} MiB", others, extra[OURS], bar=BUCKET_MIB))
    return rows


def _background_rows(board: Board, size: str) -> list[Row]:
    rows = []
    for field, label in (("blocked", "time that training is blocked"), ("complete", "time until it is complete")):
        seconds = {name: [turn[field].seconds for turn in board[name]] for name in (OURS, FSDP2)}
        ours, theirs = seconds[OURS], seconds[FSDP2]
        what = f"save in the background, GPT {size}, {WORLD} ranks: {label}"
        rows.append(ratio_row(what, ms(ours), f"{ms(theirs)} {FSDP2}", ratio(ours, theirs)))
    return rows
