"""Compare two shard groups of two ranks with one of four: results, and bytes between shard groups."""

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
SHARD_GROUPS = ((0, 1), (2, 3))
SHARD_GROUP_SIZES = {"4 x 1": RANKS, "2 x 2": 2}
MIB = 2**20


class RankResult(NamedTuple):
    times: Times
    sent: dict[str, tuple[int, int]]
    """Bytes that this rank sent within its shard group and to the other one, in one iteration, by shape."""
    state: dict[str, int]
    difference: float


def compare(name: str, rounds: int) -> list[Row]:
    results: list[RankResult] = run_ranks(RANKS, _train, name, rounds, limit_s=300)
    times, label = slowest([result.times for result in results]), WORKLOADS[name].label
    within, between = (
        {shape: sum(result.sent[shape][i] for result in results) for shape in SHARD_GROUP_SIZES} for i in range(2)
    )
    state = {shape: max(result.state[shape] for result in results) for shape in SHARD_GROUP_SIZES}
    comparisons = (
        ("bytes between shard groups", between, 0.51),
        ("bytes within shard groups", within, None),
        ("state of a rank", state, None),
    )
    rows = [
        Row(
            f"{what}, {label}",
            f"{num_bytes['2 x 2'] / MIB:.1f} MiB in 2 x 2",
            f"{num_bytes['4 x 1'] / MIB:.1f} MiB in 4 x 1",
            num_bytes["2 x 2"] / num_bytes["4 x 1"],
            bar=bar,
        )
        for what, num_bytes, bar in comparisons
    ]
    largest = max(result.difference for result in results)
    what = f"largest difference of a parameter after {rounds + 2} steps, {label}"
    rows.append(Row(what, f"{largest:.2g}", "", largest, bar=1e-4))
    spread = ratio(times["2 x 2"], times["4 x 1"])
    return [
        *rows,
        ratio_row(f"iteration, {label}, all ranks on one host", ms(times["2 x 2"]), ms(times["4 x 1"]), spread),
    ]


def _train(name: str, rounds: int) -> RankResult:
    runs = {shape: _Run(name, size) for shape, size in SHARD_GROUP_SIZES.items()}
    times = race({shape: run.iterate for shape, run in runs.items()}, rounds)
    params = [[param.detach() for param in run.model.parameters()] for run in runs.values()]
    difference = max(float((a - b).abs().max()) for a, b in zip(*params, strict=True))
    sent = {}
    for shape, run in runs.items():
        with _count_sent_bytes() as bytes_sent:
            run.iterate()
        sent[shape] = (bytes_sent[True], bytes_sent[False])
    return RankResult(times, sent, {shape: run.state_bytes for shape, run in runs.items()}, difference)


class _Run:
    def __init__(self, name: str, shard_group_size: int) -> None:
        workload = WORKLOADS[name]
        self.model, self._batch = workload.build(), workload.batch(dist.get_rank())
        self._optimizer: ShardedOptimizer = shard(
            self.model, AdamW, shard_group_size=shard_group_size, lr=1e-4, fused=True
        )

    def iterate(self) -> None:
        torch.autograd.backward(self.model(self._batch))
        self._optimizer.step()
        self._optimizer.zero_grad()

    @property
    def state_bytes(self) -> int:
        values = [value for state in self._optimizer.state.values() for value in state.values()]
        return sum(value.nbytes for value in values if value.numel() > 1)


@contextmanager
def _count_sent_bytes() -> Iterator[dict[bool, int]]:
    """Count the bytes that this rank sends within its shard group (True) and to other ranks (False).

    On gloo, gradients and parameters are sent point to point.
    """
    (own_group,) = [ranks for ranks in SHARD_GROUPS if dist.get_rank() in ranks]
    sent, isend = {True: 0, False: 0}, dist.isend

    def count_and_send(tensor: torch.Tensor, to: int, *args: Any) -> Any:
        sent[to in own_group] += tensor.nbytes
        return isend(tensor, to, *args)

    with mock.patch.object(dist, "isend", count_and_send):
        yield sent
