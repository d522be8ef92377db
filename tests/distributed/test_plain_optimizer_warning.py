"""A plain optimizer that steps parameters of a sharded one causes one warning; correct programs cause none."""

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch._dynamo.utils import counters
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim.swa_utils import SWALR, AveragedModel

from tests.support import RankContext, ranks
from tests.support.oracles import assert_same, make_seeded, mlp, regression, set_grads
from zeroshard import FlatShards, ZeroConfig, ZeroRedundancyOptimizer, shard

UPDATED_BY_PLAIN_STEP = "step\\(\\) of a plain SGD has updated parameters of a {}"
SGD_OPTIONS: dict[str, Any] = {"optimizer_class": optim.SGD, "lr": 0.1}


def make_drop_in(model: nn.Module, **options: Any) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(model.parameters(), **SGD_OPTIONS, **options)


@contextmanager
def assert_no_plain_step_warning() -> Iterator[None]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    assert not [str(warning.message) for warning in caught if "of a plain" in str(warning.message)]


def make_flat_drop_in(model: nn.Module) -> ZeroRedundancyOptimizer:
    return make_drop_in(model, config=ZeroConfig(partition=FlatShards()))


@ranks(1, 2)
@pytest.mark.parametrize("make_optimizer", [make_drop_in, make_flat_drop_in])
@pytest.mark.parametrize("first", ["plain", "zero"])
def test_plain_step_beside_drop_in_warns_once(
    ctx: RankContext, make_optimizer: Callable[[nn.Module], Any], first: str
) -> None:
    model = make_seeded(mlp)
    plain, zero = optim.SGD(model.parameters(), lr=0.1), make_optimizer(model)
    steps = [plain.step, zero.step] if first == "plain" else [zero.step, plain.step]
    with pytest.warns(UserWarning, match=UPDATED_BY_PLAIN_STEP.format("ZeroRedundancyOptimizer")) as caught:
        step_in_turn(model, steps)
    assert [warning.filename for warning in caught] == [__file__]


def step_in_turn(model: nn.Module, steps: list[Callable[[], Any]]) -> None:
    for number in range(4):
        set_grads(model.parameters(), number)
        for step in steps:
            step()


@ranks(1, 2)
def test_plain_step_after_sharded_step_warns_once(ctx: RankContext) -> None:
    model = make_seeded(mlp)
    plain = optim.SGD(model.parameters(), lr=0.1)
    sharded = shard(model, **SGD_OPTIONS, config=ZeroConfig(stage=1))
    torch.autograd.backward(regression(model, 0))
    sharded.step()
    with pytest.warns(UserWarning, match=UPDATED_BY_PLAIN_STEP.format("ShardedOptimizer")):
        plain.step()
    with assert_no_plain_step_warning():
        torch.autograd.backward(regression(model, 1))
        plain.step()


@ranks(1, 2)
def test_plain_step_on_sharded_grads_raises(ctx: RankContext) -> None:
    """A plain step instead of the sharded one finds placeholders instead of gradients."""
    model = make_seeded(mlp)
    plain = optim.SGD(model.parameters(), lr=0.1)
    sharded = shard(model, **SGD_OPTIONS, config=ZeroConfig(stage=2))
    with assert_no_plain_step_warning():
        plain.step()  # before any backward pass
        torch.autograd.backward(regression(model, 0))
        sharded.step()
        with pytest.raises(RuntimeError, match="sharded across ranks"):
            plain.step()


class AccumulatingWrapper(optim.Optimizer):
    """Steps another optimizer every other time, like wrappers for gradient accumulation."""

    def __init__(self, inner: optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner, self.calls = inner, 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        if self.calls % 2 == 0:
            self.inner.step(closure)


class NestedSGD(optim.Optimizer):
    """Steps an inner optimizer that it creates itself."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.inner = optim.SGD(self.param_groups, lr=lr)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.param_groups = self.param_groups
        self.inner.step(closure)


def two_models(model: nn.Module, make_optimizer: Any) -> None:
    first, second = make_optimizer(model), make_optimizer(make_seeded(mlp))
    for number in range(2):
        set_grads(model.parameters(), number)
        first.step()
        second.step()


def two_drop_ins_on_one_model(model: nn.Module, make_optimizer: Any) -> None:
    del make_optimizer
    (first, second) = (make_drop_in(model) for _ in range(2))
    for number in range(2):
        set_grads(model.parameters(), number)
        first.step()
        second.step()


def superseded_optimizer(model: nn.Module, make_optimizer: Any) -> None:
    """A plain optimizer may step after the second optimizer is freed, even while the superseded one is alive."""
    first = make_optimizer(model)
    second = shard(model, **SGD_OPTIONS)
    torch.autograd.backward(regression(model, 0))
    second.step()
    del second
    gc.collect()
    if first._reduces_grads:
        set_grads(model.parameters(), 0)
        optim.SGD(model.parameters(), lr=0.1).step()


def schedulers(model: nn.Module, make_optimizer: Any) -> None:
    optimizer = make_optimizer(model)
    inner_scheduler = optim.lr_scheduler.StepLR(optimizer.optim, 1)
    for scheduler in (optim.lr_scheduler.StepLR(optimizer, 1), SWALR(optimizer, swa_lr=0.01)):
        set_grads(model.parameters(), 0)
        optimizer.step()
        scheduler.step()
        inner_scheduler.step()


def averaged_model(model: nn.Module, make_optimizer: Any) -> None:
    optimizer, average = make_optimizer(model), AveragedModel(model)
    average_optimizer = optim.SGD(average.parameters(), lr=0.1)
    for module in (model, average):
        set_grads(module.parameters(), 0)
    optimizer.step()
    average.update_parameters(model)
    average_optimizer.step()


def plain_optimizer_on_other_params(model: nn.Module, make_optimizer: Any) -> None:
    sharded, other = make_optimizer(model), nn.Parameter(torch.zeros(3))
    other.grad = torch.ones(3)
    plain = optim.SGD([other], lr=0.1)
    set_grads(model.parameters(), 0)
    sharded.step()
    plain.step()
    assert_same(other.detach(), torch.full((3,), -0.1))


def wrapped_optimizer(model: nn.Module, make_optimizer: Any) -> None:
    optimizer = AccumulatingWrapper(make_optimizer(model))
    for number in range(4):
        set_grads(model.parameters(), number)
        optimizer.step()


def nested_optimizer(model: nn.Module, make_optimizer: Any) -> None:
    del make_optimizer
    zero = ZeroRedundancyOptimizer(model.parameters(), NestedSGD, lr=0.1)
    for number in range(2):
        set_grads(model.parameters(), number)
        zero.step()


def plain_optimizer_afterwards(model: nn.Module, make_optimizer: Any) -> None:
    """A plain optimizer continues after the drop-in, or after a sharded optimizer that is freed."""
    sharded = make_optimizer(model)
    set_grads(model.parameters(), 0)
    sharded.step()
    if sharded._reduces_grads:
        del sharded
        gc.collect()
    plain = optim.SGD(model.parameters(), lr=0.1)
    for number in range(2):
        set_grads(model.parameters(), number)
        plain.step()


def plain_step_without_grads(model: nn.Module, make_optimizer: Any) -> None:
    sharded = make_optimizer(model)
    optim.SGD(model.parameters(), lr=0.1).step()
    del sharded


def state_initialized_by_torch(model: nn.Module, make_optimizer: Any) -> None:
    """torch initializes the state by a step with zero gradients."""
    sharded = make_optimizer(model)
    plain = optim.AdamW(model.parameters())
    assert get_optimizer_state_dict(model, plain)["state"]
    del sharded


CORRECT_PROGRAMS: list[Callable[[nn.Module, Any], None]] = [
    *(
        two_models,
        two_drop_ins_on_one_model,
        superseded_optimizer,
        schedulers,
        averaged_model,
        plain_optimizer_on_other_params,
        wrapped_optimizer,
        nested_optimizer,
    ),
    *(plain_optimizer_afterwards, plain_step_without_grads, state_initialized_by_torch),
]


def make_zero1(model: nn.Module) -> Any:
    return shard(model, **SGD_OPTIONS, config=ZeroConfig(stage=1))


@ranks(1, 2)
def test_correct_programs_get_no_warning(ctx: RankContext) -> None:
    for make_optimizer in (make_drop_in, make_flat_drop_in, make_zero1, lambda model: shard(model, **SGD_OPTIONS)):
        for program in CORRECT_PROGRAMS:
            with assert_no_plain_step_warning():
                program(make_seeded(mlp), make_optimizer)


@ranks(1, 2)
def test_global_step_hook_breaks_no_compiled_graph(ctx: RankContext) -> None:
    """Global step hooks must not break a compiled graph."""
    zero = make_drop_in(make_seeded(mlp))
    models = [make_seeded(mlp) for _ in range(2)]
    for model in models:
        set_grads(model.parameters(), 0)
    plain, compiled = (optim.SGD(model.parameters(), lr=0.1, foreach=True) for model in models)
    plain.step()
    counters.clear()
    torch.compile(compiled.step, backend="eager")()
    assert all("`torch._dynamo.graph_break()`" in reason for reason in counters["graph_break"]), "only torch's own"
    assert_same(models[1].state_dict(), models[0].state_dict())
    del zero
