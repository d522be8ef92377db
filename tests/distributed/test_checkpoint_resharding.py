"""Any model, sharded in any way over any number of ranks, loads bit for bit into any other sharding."""

from __future__ import annotations

from collections.abc import Sequence
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.support import RankContext, RankPool
from tests.support.checkpoints import first_ranks, state_by_name
from tests.support.oracles import assert_same, set_grads
from zeroshard import FlatShards, WholeParams, ZeroConfig, ZeroRedundancyOptimizer, broadcast_object, checkpoint
from zeroshard.layout.partition import Partitioner
from zeroshard.state.state_dict import MASTER_KEY

MAX_WORLD_SIZE = 3
PARTITIONS: list[Partitioner] = [FlatShards(bucket_bytes=64), FlatShards(bucket_bytes=1 << 20), WholeParams()]


class ParamCase(NamedTuple):
    """How to make a parameter, and how to train it."""

    shape: tuple[int, ...]
    dim_order: tuple[int, ...]
    """Order of the dimensions in memory."""
    dtype: torch.dtype
    trainable: bool
    has_grad: bool
    group: int

    def make(self, generator: torch.Generator) -> nn.Parameter:
        shape = [self.shape[dim] for dim in self.dim_order]
        inverse_order = [self.dim_order.index(dim) for dim in range(len(shape))]
        values = torch.randn(shape, generator=generator).to(self.dtype).permute(inverse_order)
        return nn.Parameter(values, requires_grad=self.trainable)


class ShardingCase(NamedTuple):
    """How a model is sharded."""

    num_ranks: int
    partition: int
    masters: bool

    @property
    def config(self) -> ZeroConfig:
        partition = PARTITIONS[self.partition]
        masters = torch.float32 if self.masters and isinstance(partition, FlatShards) else None
        return ZeroConfig(partition=partition, master_dtype=masters, allow_mixed_dtypes=True)


@st.composite
def param_cases(draw: st.DrawFn) -> ParamCase:
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
    order = tuple(draw(st.permutations(range(len(shape)))))
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
    return ParamCase(shape, order, dtype, draw(st.booleans()), draw(st.booleans()), draw(st.integers(0, 1)))


MODEL_CASES = st.lists(param_cases(), max_size=7)
SHARDING_CASES = st.builds(
    ShardingCase, st.integers(1, MAX_WORLD_SIZE), st.integers(0, len(PARTITIONS) - 1), st.booleans()
)
PLAIN_PARAM = ParamCase((5, 3), (0, 1), torch.float32, True, True, 0)


OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.AdamW, {}),
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.Adagrad, {}),
    (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
]


class CheckpointCase(NamedTuple):
    drawn_params: list[ParamCase]
    optimizer: int
    steps_before_load: int
    """Steps that the loading optimizer makes before the load."""

    @property
    def params(self) -> list[ParamCase]:
        return [PLAIN_PARAM, *self.drawn_params]


CHECKPOINT_CASES = st.builds(CheckpointCase, MODEL_CASES, st.integers(0, len(OPTIMIZERS) - 1), st.integers(0, 1))


def make_model(params: Sequence[ParamCase], seed: int) -> nn.ParameterDict:
    generator = torch.Generator().manual_seed(seed)
    return nn.ParameterDict({f"p{number}": param_case.make(generator) for number, param_case in enumerate(params)})


def make_optimizer(
    model: nn.ParameterDict, case: CheckpointCase, sharding: ShardingCase, group: Any
) -> ZeroRedundancyOptimizer:
    param_cases = case.params
    pairs = list(zip(model.named_parameters(), param_cases, strict=True))
    param_groups = [
        {
            "params": [named_param for named_param, param_case in pairs if param_case.group == number],
            "lr": 0.1 * (number + 1),
        }
        for number in (0, 1)
    ]
    optimizer_class, options = OPTIMIZERS[case.optimizer]
    return ZeroRedundancyOptimizer(
        [param_group for param_group in param_groups if param_group["params"]],
        optimizer_class,
        process_group=group,
        config=sharding.config,
        **options,
    )


def make_trained(
    case: CheckpointCase, sharding: ShardingCase, group: Any, *, seed: int, steps: int
) -> tuple[nn.ParameterDict, ZeroRedundancyOptimizer]:
    model = make_model(case.params, seed)
    optimizer = make_optimizer(model, case, sharding, group)
    for step in range(steps):
        set_grads([param for param in model.parameters() if param.requires_grad], step)
        for param, param_case in zip(model.parameters(), case.params, strict=True):
            param.grad = param.grad if param_case.has_grad else None
        optimizer.step()
    return model, optimizer


def gather_state_by_name(model: nn.ParameterDict, optimizer: ZeroRedundancyOptimizer) -> dict[str, Any] | None:
    found = optimizer.full_state_dict(to=0)
    if found is None:
        return None
    return {name: state for name, state in state_by_name(optimizer, found, model).items() if state}


def drop_master_weights(state: dict[str, Any]) -> dict[str, Any]:
    without_masters = {
        name: {key: value for key, value in values.items() if key != MASTER_KEY} for name, values in state.items()
    }
    return {name: values for name, values in without_masters.items() if values}


def assert_state_equal(found: dict[str, Any], expected: dict[str, Any], *, same_precision: bool) -> None:
    """State has the precision of the master weights, or of the parameters if there are none."""
    if not same_precision:
        found, expected = drop_master_weights(found), drop_master_weights(expected)
    assert found.keys() == expected.keys()
    for name, state in expected.items():
        assert found[name].keys() == state.keys(), name
        for key, value in state.items():
            assert not same_precision or found[name][key].dtype == value.dtype, (name, key)
            assert torch.equal(found[name][key], value.to(found[name][key].dtype)), (name, key)


def save_and_load(
    ctx: RankContext, case: CheckpointCase, source: ShardingCase, target: ShardingCase, directory: str
) -> None:
    """Run on all ranks: the first `source.num_ranks` save, the first `target.num_ranks` load."""
    writers, readers = first_ranks(source.num_ranks), first_ranks(target.num_ranks)
    expected: dict[str, Any] | None = None
    values: dict[str, torch.Tensor] = {}
    if writers is not None:
        model, optimizer = make_trained(case, source, writers, seed=1, steps=2)
        checkpoint.save(directory, step=1, model=model, optimizer=optimizer, process_group=writers)
        expected, values = gather_state_by_name(model, optimizer), model.state_dict()
    values = broadcast_object(values, 0)  # to the ranks that only load
    if readers is not None:
        new_model, new_optimizer = make_trained(case, target, readers, seed=2, steps=case.steps_before_load)
        checkpoint.load(directory, model=new_model, optimizer=new_optimizer, process_group=readers)
        found = gather_state_by_name(new_model, new_optimizer)
        assert_same(new_model.state_dict(), values, "the model")
        if found is not None and expected is not None:
            assert_state_equal(found, expected, same_precision=source.config.master_dtype == target.config.master_dtype)


@pytest.mark.timeout(300)
def test_any_model_loads_into_any_sharding(rank_pool: RankPool) -> None:
    """Examples are drawn here, not on the ranks: a failing example shrinks identically on all of them."""

    @settings(max_examples=40, suppress_health_check=list(HealthCheck))
    @given(CHECKPOINT_CASES, SHARDING_CASES, SHARDING_CASES)
    def check_example(case: CheckpointCase, source: ShardingCase, target: ShardingCase) -> None:
        with TemporaryDirectory() as directory:
            arguments = {"case": case, "source": source, "target": target, "directory": directory}
            rank_pool.run(save_and_load, max(source.num_ranks, target.num_ranks), arguments=arguments)

    check_example()
