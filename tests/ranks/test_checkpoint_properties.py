"""Any model, divided in any way over any number of ranks, comes back bit for bit in any other way."""

from __future__ import annotations

from collections.abc import Sequence
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.support import RankContext, RankPool
from tests.support.checkpoints import by_name, first_ranks
from tests.support.oracles import set_grads
from zeroshard import FlatShards, WholeParams, ZeroConfig, ZeroRedundancyOptimizer, checkpoint
from zeroshard.layout.partition import Partitioner
from zeroshard.state.state_dict import MASTER_KEY

WORLD = 3
PARTITIONS: list[Partitioner] = [FlatShards(bucket_bytes=64), FlatShards(bucket_bytes=1 << 20), WholeParams()]


class Kind(NamedTuple):
    """Of a parameter."""

    shape: tuple[int, ...]
    order: tuple[int, ...]
    """Of its dimensions in memory."""
    dtype: torch.dtype
    trainable: bool
    has_grad: bool
    group: int

    def made(self, draw: torch.Generator) -> nn.Parameter:
        shape = [self.shape[dim] for dim in self.order]
        back = [self.order.index(dim) for dim in range(len(shape))]
        values = torch.randn(shape, generator=draw).to(self.dtype).permute(back)
        return nn.Parameter(values, requires_grad=self.trainable)


class Division(NamedTuple):
    """How a model is spread."""

    ranks: int
    partition: int
    masters: bool

    @property
    def config(self) -> ZeroConfig:
        partition = PARTITIONS[self.partition]
        masters = torch.float32 if self.masters and isinstance(partition, FlatShards) else None
        return ZeroConfig(partition=partition, master_dtype=masters, allow_mixed_dtypes=True)


@st.composite
def kinds(draw: st.DrawFn) -> Kind:
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
    order = tuple(draw(st.permutations(range(len(shape)))))
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
    return Kind(shape, order, dtype, draw(st.booleans()), draw(st.booleans()), draw(st.integers(0, 1)))


MODELS = st.lists(kinds(), max_size=7)
DIVISIONS = st.builds(Division, st.integers(1, WORLD), st.integers(0, len(PARTITIONS) - 1), st.booleans())
PLAIN = Kind((5, 3), (0, 1), torch.float32, True, True, 0)


OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.AdamW, {}),
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.Adagrad, {}),
    (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
]


class Task(NamedTuple):
    drawn: list[Kind]
    optimizer: int
    steps_before: int
    """That the one which loads has made already."""

    @property
    def params(self) -> list[Kind]:
        return [PLAIN, *self.drawn]


TASKS = st.builds(Task, MODELS, st.integers(0, len(OPTIMIZERS) - 1), st.integers(0, 1))


def model_of(every: Sequence[Kind], seed: int) -> nn.ParameterDict:
    draw = torch.Generator().manual_seed(seed)
    return nn.ParameterDict({f"p{number}": kind.made(draw) for number, kind in enumerate(every)})


def optimizer_of(model: nn.ParameterDict, task: Task, division: Division, group: Any) -> ZeroRedundancyOptimizer:
    every = task.params
    named = list(zip(model.named_parameters(), every, strict=True))
    groups = [
        {"params": [it for it, kind in named if kind.group == number], "lr": 0.1 * (number + 1)} for number in (0, 1)
    ]
    kind, options = OPTIMIZERS[task.optimizer]
    return ZeroRedundancyOptimizer(
        [it for it in groups if it["params"]], kind, process_group=group, config=division.config, **options
    )


def trained(
    task: Task, division: Division, group: Any, *, seed: int, steps: int
) -> tuple[nn.ParameterDict, ZeroRedundancyOptimizer]:
    model = model_of(task.params, seed)
    optimizer = optimizer_of(model, task, division, group)
    for step in range(steps):
        set_grads([it for it in model.parameters() if it.requires_grad], step)
        for param, kind in zip(model.parameters(), task.params, strict=True):
            param.grad = param.grad if kind.has_grad else None
        optimizer.step()
    return model, optimizer


def state_of(model: nn.ParameterDict, optimizer: ZeroRedundancyOptimizer) -> dict[str, Any] | None:
    found = optimizer.full_state_dict(to=0)
    if found is None:
        return None
    return {name: state for name, state in by_name(optimizer, found, model).items() if state}


def without_masters(state: dict[str, Any]) -> dict[str, Any]:
    rest = {name: {key: it for key, it in values.items() if key != MASTER_KEY} for name, values in state.items()}
    return {name: values for name, values in rest.items() if values}


def assert_equal(found: dict[str, Any], expected: dict[str, Any], *, same_precision: bool) -> None:
    """With masters, state is as precise as they are; without, as the parameters."""
    if not same_precision:
        found, expected = without_masters(found), without_masters(expected)
    assert found.keys() == expected.keys()
    for name, state in expected.items():
        assert found[name].keys() == state.keys(), name
        for key, value in state.items():
            assert not same_precision or found[name][key].dtype == value.dtype, (name, key)
            assert torch.equal(found[name][key], value.to(found[name][key].dtype)), (name, key)


def come_back(ctx: RankContext, task: Task, source: Division, target: Division, folder: str) -> None:
    """Runs on all ranks, of which some save and some load."""
    writers, readers = first_ranks(source.ranks), first_ranks(target.ranks)
    expected: dict[str, Any] | None = None
    values: dict[str, Any] = {}
    if writers is not None:
        model, optimizer = trained(task, source, writers, seed=1, steps=2)
        checkpoint.save(folder, step=1, model=model, optimizer=optimizer, process_group=writers)
        expected, values = state_of(model, optimizer), model.state_dict()
    dist.barrier()
    if readers is not None:
        other, into = trained(task, target, readers, seed=2, steps=task.steps_before)
        checkpoint.load(folder, model=other, optimizer=into, process_group=readers)
        found = state_of(other, into)
        assert all(torch.equal(value, values.get(name, value)) for name, value in other.state_dict().items())
        if found is not None and expected is not None:
            assert_equal(found, expected, same_precision=source.config.master_dtype == target.config.master_dtype)


@pytest.mark.timeout(300)
def test_any_model_in_any_way(rank_pool: RankPool) -> None:
    """Drawn here, not on the ranks: an example that fails is made smaller for all of them alike."""

    @settings(max_examples=40, suppress_health_check=list(HealthCheck))
    @given(TASKS, DIVISIONS, DIVISIONS)
    def comes_back(task: Task, source: Division, target: Division) -> None:
        with TemporaryDirectory() as folder:
            arguments = {"task": task, "source": source, "target": target, "folder": folder}
            rank_pool.run(come_back, max(source.ranks, target.ranks), arguments=arguments)

    comes_back()
