"""One optimizer, tried for real: sharded over 1, 2 and 3 ranks beside itself unsharded, saved and loaded in between."""

from __future__ import annotations

import re
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.support import RankContext
from tests.support.optimizers import Case
from tests.support.oracle import assert_same
from zeroshard import (
    CheckpointError,
    ConfigError,
    FlatShards,
    ShardedOptimizer,
    broadcast_object,
    checkpoint,
    shard,
)

SIZES = (1, 2, 3)
STEPS = 3
MORE = 2
"""Steps after each load."""
BITWISE = "bitwise"
NOTHING = "-"


@dataclass(frozen=True)
class Report:
    """What became of it, as the page tells it."""

    partition: str
    training: str = NOTHING
    state: str = NOTHING


def try_out(ctx: RankContext, case: Case, folder: Path) -> Report:
    """Called on 3 ranks. Raises where it is neither right nor refused."""
    groups = {size: dist.new_group(list(range(size))) for size in SIZES}
    stance: Any = torch.compiler.set_stance("force_eager") if case.eager else nullcontext()
    with stance, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            runs = {size: Run(case, size, groups[size]) for size in reversed(SIZES) if ctx.rank < size}
        except ConfigError as error:
            return Report(f"refused: {_sentence(error)}")
        for run in runs.values():
            run.train(STEPS)
            run.evaluate()
        partition = _in_words(runs[3].zero)
        _require_cuts(runs[3].zero, partition)
        try:
            runs[3].zero.full_state_dict()
        except CheckpointError as error:
            return Report(partition, BITWISE, f"refused: {_unsafe(error)}")
        _through_a_dict(case, runs)
        _through_files(runs, groups[2] if ctx.rank < 2 else None, folder)
        return Report(partition, BITWISE, BITWISE)


def _sentence(error: Exception) -> str:
    return str(error).partition(". ")[0].partition("\n")[0]


def _unsafe(error: Exception) -> str:
    found = re.search(r"an? \w+ cannot be sent safely", str(error))
    assert found, error
    return found.group()


def _in_words(zero: ShardedOptimizer) -> str:
    (partition,) = zero._assembly.division.partitions
    if not isinstance(partition, FlatShards):
        return "whole parameters"
    grain = partition.grain
    assert grain is not None, "the self-test has found one"
    if grain.is_fine:
        return "cut anywhere"
    return f"cut at multiples of {grain.align}, into pieces of {grain.least} or more"


def _require_cuts(zero: ShardedOptimizer, partition: str) -> None:
    """What is cut is cut in fact, and what is not is not."""
    pieces = [len(zero.layout.pieces_of_param(spec.index)) for spec in zero.layout.params]
    assert (max(pieces) > 1) == partition.startswith("cut"), (pieces, partition)


class Plain:
    """The optimizer unsharded, with the mean of the gradients of some ranks: the same on each rank."""

    def __init__(self, case: Case) -> None:
        self.model, self.steps = case.make_model(0), 0
        self.optimizer = case.factory()(case.handed(self.model), **case.arguments())
        _switch(self.optimizer, "train")

    def train(self, steps: int, ranks: int) -> None:
        for _ in range(steps):
            set_mean_grads(self.model, self.steps, ranks)
            self.optimizer.step()
            self.steps += 1

    def evaluate(self) -> None:
        _switch(self.optimizer, "eval")
        _switch(self.optimizer, "train")


class Run:
    """A model that is sharded over some ranks, beside the plain one."""

    def __init__(self, case: Case, size: int, group: dist.ProcessGroup) -> None:
        self._size, self._rank = size, dist.get_rank(group)
        self.plain, self.model = Plain(case), case.make_model(self._rank)
        self.zero = shard(
            self.model, case.factory(), params=case.handed(self.model), process_group=group, **case.arguments()
        )
        _switch(self.zero, "train")

    def train(self, steps: int) -> None:
        """After each step all parameters have the same bits."""
        for _ in range(steps):
            backward(self.model, self.plain.steps, self._rank)
            self.zero.step()
            self.zero.zero_grad()
            self.plain.train(1, self._size)
            self.compare()

    def evaluate(self) -> None:
        """Weights are those that the plain optimizer evaluates, and training goes on from where it was."""
        for mode in ("eval", "train"):
            _switch(self.plain.optimizer, mode)
            _switch(self.zero, mode)
            self.compare()

    def compare(self) -> None:
        assert_same(self.model.state_dict(), self.plain.model.state_dict(), f"the model after {self.plain.steps} steps")


def _switch(optimizer: Any, mode: str) -> None:
    """Of schedule-free optimizers, which have modes."""
    if hasattr(optimizer, mode):
        getattr(optimizer, mode)()


def backward(model: nn.Module, step: int, rank: int) -> None:
    loss: Any = model.loss
    loss(100 * step + rank).backward()


def set_mean_grads(model: nn.Module, step: int, ranks: int) -> None:
    """The mean over all ranks, added up in their order, as it is between them."""
    means: list[torch.Tensor] = []
    for rank in range(ranks):
        model.zero_grad()
        backward(model, step, rank)
        mine = [param.grad * (1 / ranks) for param in model.parameters() if param.grad is not None]
        means = [a + b for a, b in zip(means, mine, strict=True)] if means else mine
    for param, mean in zip(model.parameters(), means, strict=True):
        param.grad = mean


def _through_a_dict(case: Case, runs: dict[int, Run]) -> None:
    """From 2 ranks to 3, and from those to the plain optimizer."""
    runs[3].plain = _trained_by_two(case)
    mine = (runs[2].zero.full_state_dict(), runs[2].model.state_dict()) if 2 in runs else None
    saved, weights = broadcast_object(mine, 0)
    runs[3].model.load_state_dict(weights)
    runs[3].zero.load_state_dict(saved)
    runs[3].train(MORE)
    runs[3].plain.optimizer.load_state_dict(broadcast_object(runs[3].zero.full_state_dict(), 0))
    runs[3].train(1)


def _trained_by_two(case: Case) -> Plain:
    """As beside 2 ranks, also on the third."""
    plain = Plain(case)
    plain.train(STEPS, 2)
    plain.evaluate()
    return plain


def _through_files(runs: dict[int, Run], group: dist.ProcessGroup | None, folder: Path) -> None:
    """From 3 ranks to 2."""
    checkpoint.save(folder, step=1, model=runs[3].model, optimizer=runs[3].zero).wait()
    if group is not None:
        checkpoint.load(folder, model=runs[2].model, optimizer=runs[2].zero, process_group=group)
        runs[2].plain = runs[3].plain
        runs[2].compare()
        runs[2].train(MORE)
