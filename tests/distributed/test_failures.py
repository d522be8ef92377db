"""What fails on one rank is raised on all, and the optimizer goes on afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

from tests.support import RankContext, ranks
from tests.support.oracles import Twins, assert_same, set_grads, small_model
from zeroshard import BindingError, RankFailedError, ZeroError, ZeroRedundancyOptimizer


@contextmanager
def expect_error_on_all_ranks(ctx: RankContext, culprit: int, error: type[Exception], message: str) -> Iterator[None]:
    """The culprit raises its own error; the others raise one that names the culprit, the error and the message."""
    expected, pattern = error, message
    if ctx.rank != culprit:
        expected, pattern = RankFailedError, rf"rank {culprit} failed: {error.__name__}: .*{message}"
    with pytest.raises(expected, match=pattern) as caught:
        yield
    assert type(caught.value) is expected


def gather_models(ctx: RankContext, model: nn.Module) -> list[dict[str, Any]]:
    return ctx.gather({name: tensor.clone() for name, tensor in model.state_dict().items()})


def invalid_params() -> Iterator[tuple[type[Exception], Callable[[list[nn.Parameter]], Any]]]:
    yield TypeError, lambda params: params[0]
    yield TypeError, lambda _: 3
    yield TypeError, lambda _: None
    yield TypeError, lambda _: "abc"
    yield TypeError, lambda params: {"params": params}
    yield TypeError, set
    yield TypeError, lambda params: [*params, 3]
    yield TypeError, lambda params: [*params, {"params": []}]
    yield TypeError, lambda _: [{"params": [3]}]
    yield TypeError, lambda params: [{"params": set(params)}]
    yield ValueError, lambda params: [("a", params[0]), params[1]]
    yield ValueError, lambda _: []
    yield ValueError, lambda _: iter(())
    yield ValueError, lambda _: [{"lr": 0.1}]
    yield ValueError, lambda _: [nn.Parameter(torch.eye(2).to_sparse())]
    yield ValueError, lambda params: [*params, nn.Parameter(torch.ones(2, dtype=torch.float64))]
    yield ValueError, lambda params: [{"params": params}, {"params": [params[0]]}]
    yield ValueError, lambda _: [nn.Parameter(torch.ones(1).expand(3))]
    yield ValueError, lambda params: [params[0] * 2]
    yield RuntimeError, failing_generator


def failing_generator(params: list[nn.Parameter]) -> Iterator[nn.Parameter]:
    yield params[0]
    raise RuntimeError("no more of these")


@ranks(1, 2, 3)
def test_invalid_params_are_rejected_on_all_ranks(ctx: RankContext) -> None:
    for number, (error, spoil) in enumerate(invalid_params()):
        culprit = number % ctx.world_size
        params = list(small_model().parameters())
        with pytest.raises(error):
            ZeroRedundancyOptimizer(spoil(params), Adam)
        with pytest.raises(error if ctx.rank == culprit else RankFailedError) as caught:
            ZeroRedundancyOptimizer(spoil(params) if ctx.rank == culprit else params, Adam)
        assert ctx.rank == culprit or f"rank {culprit}" in str(caught.value)


@ranks(2, 3)
def test_invalid_arguments_raise_on_all_ranks(ctx: RankContext) -> None:
    def made(**options: Any) -> ZeroRedundancyOptimizer:
        return ZeroRedundancyOptimizer(small_model().parameters(), **{"optimizer_class": Adam, **options})

    spoiled: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ValueError, "learning rate", {"lr": -1.0}),
        (TypeError, "nonsense", {"nonsense": 1}),
        (TypeError, "config", {"config": "x"}),
        (TypeError, "must be a class", {"optimizer_class": "Adam"}),
        (LookupError, "nothing to see", {"optimizer_class": FailsInInit}),
    ]
    for culprit in range(ctx.world_size):
        for error, message, options in spoiled:
            with expect_error_on_all_ranks(ctx, culprit, error, message):
                made(**options if ctx.rank == culprit else {})


class FailsInInit(Adam):
    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        raise LookupError("nothing to see")


def make_closure(twins: Twins, should_fail: bool = False) -> Callable[[], torch.Tensor]:
    def closure() -> torch.Tensor:
        set_grads(twins.model.parameters(), twins.steps)
        if should_fail:
            raise ZeroDivisionError("a bad batch")
        return torch.tensor(float(twins.steps))

    return closure


@ranks(1, 2, 3, 4)
def test_failing_closure_changes_nothing(ctx: RankContext) -> None:
    for bucket_view in (False, True):
        twins = Twins(Adam, zero_only={"parameters_as_bucket_view": bucket_view})
        twins.train(1)
        for culprit in range(ctx.world_size):
            with expect_error_on_all_ranks(ctx, culprit, ZeroDivisionError, "a bad batch"):
                twins.zero.step(make_closure(twins, should_fail=ctx.rank == culprit))
            for model in gather_models(ctx, twins.model):
                assert_same(model, dict(twins.plain_model.state_dict()))
            found = twins.zero.full_state_dict()
            if found is not None:
                assert_same(found, twins.plain.state_dict())
            assert twins.zero.step(make_closure(twins)) == float(twins.steps)
            set_grads(twins.plain_model.parameters(), twins.steps)
            twins.plain.step()
            twins.check()
            twins.steps += 1


class FailsAfterStep(SGD):
    """Updates some of its parameters, then fails when told so."""

    fails = False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        result = super().step(closure)
        if self.fails:
            raise ArithmeticError("the step broke")
        return result


class FailsBeforeStep(FailsAfterStep):
    """Fails before it has updated anything."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if self.fails:
            raise ArithmeticError("the step broke")
        return super().step(closure)


@ranks(1, 2, 3, 4)
def test_failing_inner_step_leaves_ranks_identical(ctx: RankContext) -> None:
    for bucket_view in (False, True):
        twins = Twins(FailsAfterStep, lr=0.1, momentum=0.9, zero_only={"parameters_as_bucket_view": bucket_view})
        for culprit in range(ctx.world_size):
            inner = twins.zero.optim
            assert isinstance(inner, FailsAfterStep)
            inner.fails = ctx.rank == culprit
            # This one fails once all is done, so that the step is the plain optimizer's.
            with expect_error_on_all_ranks(ctx, culprit, ArithmeticError, "the step broke"):
                twins.train(1)
            set_grads(twins.plain_model.parameters(), twins.steps)
            twins.plain.step()
            twins.steps += 1
            twins.check()
            inner.fails = False
            twins.train(1)


@ranks(2, 3)
def test_step_failing_on_one_rank_is_applied_by_the_others(ctx: RankContext) -> None:
    for bucket_view in (False, True):
        twins = Twins(FailsBeforeStep, lr=0.1, zero_only={"parameters_as_bucket_view": bucket_view})
        owned = {id(param) for group in twins.zero.optim.param_groups for param in group["params"]}
        for culprit in range(ctx.world_size):
            start = [param.detach().clone() for param in twins.model.parameters()]
            twins.zero.optim.fails = ctx.rank == culprit  # type: ignore[attr-defined]
            then = "" if ctx.rank == culprit else r"\. What other ranks own has been updated: .* load a checkpoint"
            with expect_error_on_all_ranks(ctx, culprit, ArithmeticError, f"the step broke{then}"):
                twins.train(1)
            twins.zero.optim.fails = False  # type: ignore[attr-defined]
            set_grads(twins.plain_model.parameters(), twins.steps)
            twins.plain.step()
            kept = [place for place, param in enumerate(twins.model.parameters()) if id(param) in owned]
            with torch.no_grad():
                for place, param in enumerate(twins.plain_model.parameters()):
                    if place in ctx.gather(kept)[culprit]:
                        param.copy_(start[place])
            twins.check()
            twins.train(1)  # no momentum, so that a lost update is lost for good on both sides


class FailsInAddParamGroup(Adam):
    should_fail = False

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if self.should_fail:
            raise PermissionError("no more groups")


@ranks(1, 2, 3)
def test_failed_add_param_group_changes_nothing(ctx: RankContext) -> None:
    twins = Twins(FailsInAddParamGroup)
    twins.train(1)
    inner = twins.zero.optim
    assert isinstance(inner, FailsInAddParamGroup)

    def new_params() -> list[nn.Parameter]:
        return list(small_model(1).parameters())

    spoiled: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (TypeError, "dict", new_params),
        (TypeError, "int", lambda: {"params": [3]}),
        (ValueError, "'params'", lambda: {"lr": 0.1}),
        (ValueError, "more than one", lambda: {"params": list(twins.model.parameters())}),
        (PermissionError, "no more groups", lambda: {"params": new_params()}),
    ]
    for culprit in range(ctx.world_size):
        for error, message, group in spoiled:
            inner.should_fail = ctx.rank == culprit and error is PermissionError
            with expect_error_on_all_ranks(ctx, culprit, error, message):
                twins.zero.add_param_group(group() if ctx.rank == culprit else {"params": new_params()})
            assert len(twins.zero.param_groups) == len(twins.zero.optim.param_groups) == 1
        with pytest.raises(ValueError, match="dtype"):
            twins.zero.add_param_group({"params": [nn.Parameter(torch.ones(2).double())]})
        twins.train(1)
    inner.should_fail = False
    added = [new_params(), new_params()]
    twins.zero.add_param_group({"params": added[0], "lr": 0.3})
    twins.plain.add_param_group({"params": added[1], "lr": 0.3})
    for params in added:
        set_grads(params, 0)
    twins.train(1)
    assert_same(added[0], added[1])


@ranks(2, 3)
def test_recast_param_on_one_rank_raises_on_all_ranks(ctx: RankContext) -> None:
    for bucket_view in (False, True):
        twins = Twins(SGD, lr=0.1, zero_only={"parameters_as_bucket_view": bucket_view})
        twins.train(1)
        weight = next(twins.model.parameters())
        if ctx.rank == 1:
            weight.data = weight.data.double()
        with pytest.raises(BindingError if ctx.rank == 1 else RankFailedError, match="float64") as caught:
            twins.train(1)
        assert isinstance(caught.value, ZeroError)


@ranks(2, 3)
def test_errors_of_several_ranks_are_all_reported(ctx: RankContext) -> None:
    last = ctx.world_size - 1

    def closure() -> float:
        if ctx.rank != last:
            raise ValueError(f"batch of rank {ctx.rank}")
        return 0.0

    twins = Twins(SGD, lr=0.1)
    with pytest.raises(ValueError if ctx.rank != last else RankFailedError) as caught:
        twins.zero.step(closure)
    told = range(last) if ctx.rank == last else [ctx.rank]
    assert all(f"batch of rank {rank}" in str(caught.value) for rank in told)
    twins.train(1)


@ranks(2)
def test_long_error_message_is_truncated(ctx: RankContext) -> None:
    def closure() -> None:
        if ctx.rank == 1:
            raise ValueError("é" * 9000)

    twins = Twins(SGD, lr=0.1)
    with pytest.raises(ValueError if ctx.rank == 1 else RankFailedError, match=r"é{1000}"):
        twins.zero.step(closure)
    twins.train(1)


def test_uninitialized_process_group_raises() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        ZeroRedundancyOptimizer(small_model().parameters(), Adam)
