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
from tests.support.oracle import set_grads
from zeroshard import FlatShards, WholeParams, ZeroConfig, ZeroRedundancyOptimizer, checkpoint
from zeroshard.layout.partition import Partitioner

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


@st.composite
def kinds(draw: st.DrawFn) -> Kind:
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
    order = tuple(draw(st.permutations(range(len(shape)))))
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
    return Kind(shape, order, dtype, draw(st.booleans()), draw(st.booleans()), draw(st.integers(0, 1)))


MODELS = st.lists(kinds(), max_size=7)
DIVISIONS = st.builds(Division, st.integers(1, WORLD), st.integers(0, len(PARTITIONS) - 1))
PLAIN = Kind((5, 3), (0, 1), torch.float32, True, True, 0)


def model_of(every: Sequence[Kind], seed: int) -> nn.ParameterDict:
    draw = torch.Generator().manual_seed(seed)
    return nn.ParameterDict({f"p{number}": kind.made(draw) for number, kind in enumerate(every)})


def optimizer_of(
    model: nn.ParameterDict, every: Sequence[Kind], division: Division, group: Any
) -> ZeroRedundancyOptimizer:
    named = list(zip(model.named_parameters(), every, strict=True))
    groups = [
        {"params": [it for it, kind in named if kind.group == number], "lr": 0.1 * (number + 1)} for number in (0, 1)
    ]
    config = ZeroConfig(partition=PARTITIONS[division.partition], mixed_dtypes=True)
    return ZeroRedundancyOptimizer(
        [it for it in groups if it["params"]], torch.optim.AdamW, process_group=group, config=config
    )


def trained(every: Sequence[Kind], division: Division, group: Any) -> tuple[nn.ParameterDict, ZeroRedundancyOptimizer]:
    model = model_of(every, seed=1)
    optimizer = optimizer_of(model, every, division, group)
    for step in range(2):
        set_grads([it for it in model.parameters() if it.requires_grad], step)
        for param, kind in zip(model.parameters(), every, strict=True):
            param.grad = param.grad if kind.has_grad else None
        optimizer.step()
    return model, optimizer


def state_of(model: nn.ParameterDict, optimizer: ZeroRedundancyOptimizer) -> dict[str, Any] | None:
    found = optimizer.full_state_dict(to=0)
    return None if found is None else by_name(optimizer, found, model)


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, state in expected.items():
        assert found[name].keys() == state.keys(), name
        for key, value in state.items():
            assert found[name][key].dtype == value.dtype, (name, key)
            assert torch.equal(found[name][key], value), (name, key)


def come_back(ctx: RankContext, drawn: list[Kind], source: Division, target: Division, folder: str) -> None:
    """Runs on all ranks, of which some save and some load."""
    every = [PLAIN, *drawn]
    writers, readers = first_ranks(source.ranks), first_ranks(target.ranks)
    expected: dict[str, Any] | None = None
    values: dict[str, Any] = {}
    if writers is not None:
        model, optimizer = trained(every, source, writers)
        checkpoint.save(folder, step=1, model=model, optimizer=optimizer, process_group=writers)
        expected, values = state_of(model, optimizer), model.state_dict()
    dist.barrier()
    if readers is not None:
        other = model_of(every, seed=2)
        into = optimizer_of(other, every, target, readers)
        checkpoint.load(folder, model=other, optimizer=into, process_group=readers)
        found = state_of(other, into)
        assert all(torch.equal(value, values.get(name, value)) for name, value in other.state_dict().items())
        if found is not None and expected is not None:
            assert_equal(found, expected)


@pytest.mark.timeout(300)
def test_any_model_in_any_way(rank_pool: RankPool) -> None:
    """Drawn here, not on the ranks: an example that fails is made smaller for all of them alike."""

    @settings(max_examples=20, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(MODELS, DIVISIONS, DIVISIONS)
    def comes_back(drawn: list[Kind], source: Division, target: Division) -> None:
        with TemporaryDirectory() as folder:
            arguments = {"drawn": drawn, "source": source, "target": target, "folder": folder}
            rank_pool.run(come_back, max(source.ranks, target.ranks), arguments=arguments)

    comes_back()
