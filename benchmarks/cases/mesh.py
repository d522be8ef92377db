"""Four ranks in two rows against four in one: the same numbers, and what travels from row to row."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.optim import AdamW

from zeroshard import ShardedOptimizer, shard

from ..harness.ranks import run_ranks
from ..harness.report import Row, ratio_row
from ..harness.timing import Times, ms, race, ratio, slowest
from ..harness.workloads import WORKLOADS

RANKS = 4
ROWS = ((0, 1), (2, 3))
SHAPES = {"4 x 1": RANKS, "2 x 2": 2}
"""How many ranks share the state."""
MIB = 2**20


class Found(NamedTuple):
    times: Times
    sent: dict[str, tuple[int, int]]
    """Bytes that this rank sent within its row and to the other one, in an iteration of each shape."""
    state: dict[str, int]
    difference: float


def two_rows(name: str, rounds: int) -> list[Row]:
    found: list[Found] = run_ranks(RANKS, _train, name, rounds, limit_s=300)
    times, label = slowest([one.times for one in found]), WORKLOADS[name].label
    inside, across = ({shape: sum(one.sent[shape][i] for one in found) for shape in SHAPES} for i in range(2))
    state = {shape: max(one.state[shape] for one in found) for shape in SHAPES}
    fewer = ("bytes between rows", across, 0.51), ("bytes within rows", inside, None), ("state of a rank", state, None)
    rows = [
        Row(
            f"{what}, {label}",
            f"{of['2 x 2'] / MIB:.1f} MiB in 2 x 2",
            f"{of['4 x 1'] / MIB:.1f} MiB in 4 x 1",
            of["2 x 2"] / of["4 x 1"],
            bar=bar,
        )
        for what, of, bar in fewer
    ]
    most = max(one.difference for one in found)
    rows.append(
        Row(f"largest difference of a parameter after {rounds + 2} steps, {label}", f"{most:.2g}", "", most, bar=1e-4)
    )
    spread = ratio(times["2 x 2"], times["4 x 1"])
    return [
        *rows,
        ratio_row(f"iteration, {label}, all ranks on one host", ms(times["2 x 2"]), ms(times["4 x 1"]), spread),
    ]


def _train(name: str, rounds: int) -> Found:
    runs = {shape: _Run(name, within) for shape, within in SHAPES.items()}
    times = race({shape: run.iterate for shape, run in runs.items()}, rounds)
    params = [[param.detach() for param in run.model.parameters()] for run in runs.values()]
    difference = max(float((a - b).abs().max()) for a, b in zip(*params, strict=True))
    sent = {}
    for shape, run in runs.items():
        with _counted() as bytes_sent:
            run.iterate()
        sent[shape] = (bytes_sent[True], bytes_sent[False])
    return Found(times, sent, {shape: run.state_bytes for shape, run in runs.items()}, difference)


class _Run:
    def __init__(self, name: str, within: int) -> None:
        workload = WORKLOADS[name]
        self.model, self._batch = workload.build(), workload.batch(dist.get_rank())
        self._optimizer: ShardedOptimizer = shard(self.model, AdamW, shard_group_size=within, lr=1e-4, fused=True)

    def iterate(self) -> None:
        torch.autograd.backward(self.model(self._batch))
        self._optimizer.step()
        self._optimizer.zero_grad()

    @property
    def state_bytes(self) -> int:
        values = [value for state in self._optimizer.state.values() for value in state.values()]
        return sum(value.nbytes for value in values if value.numel() > 1)


@contextmanager
def _counted() -> Iterator[dict[bool, int]]:
    """Bytes sent to ranks of this rank's row, and to others. Gradients and parameters go from rank to rank on gloo."""
    (mine,) = [row for row in ROWS if dist.get_rank() in row]
    sent, isend = {True: 0, False: 0}, dist.isend

    def counting(tensor: torch.Tensor, to: int, *args: Any) -> Any:
        sent[to in mine] += tensor.nbytes
        return isend(tensor, to, *args)

    with mock.patch.object(dist, "isend", counting):
        yield sent
