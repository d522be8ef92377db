"""A failure on one rank raises on all ranks, and the optimizer still works afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

from tests.support import RankContext, ranks
from tests.support.oracles import ParityRun, assert_same, set_grads, small_model
from zeroshard import BindingError, FlatShards, RankFailedError, ZeroConfig, ZeroError, ZeroRedundancyOptimizer
from zeroshard.engine.grad_source import LocalGrads


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
    for number, (error, make_invalid) in enumerate(invalid_params()):
        culprit = number % ctx.world_size
        params = list(small_model().parameters())
        with pytest.raises(error):
            ZeroRedundancyOptimizer(make_invalid(params), Adam)
        with pytest.raises(error if ctx.rank == culprit else RankFailedError) as caught:
            ZeroRedundancyOptimizer(make_invalid(params) if ctx.rank == culprit else params, Adam)
        assert ctx.rank == culprit or f"rank {culprit}" in str(caught.value)


@ranks(2, 3)
def test_invalid_arguments_raise_on_all_ranks(ctx: RankContext) -> None:
    def make_optimizer(**options: Any) -> ZeroRedundancyOptimizer:
        return ZeroRedundancyOptimizer(small_model().parameters(), **{"optimizer_class": Adam, **options})

    invalid_options: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ValueError, "learning rate", {"lr": -1.0}),
        (TypeError, "nonsense", {"nonsense": 1}),
        (TypeError, "config", {"config": "x"}),
        (TypeError, "expected optimizer_class to be a class such as .* got str", {"optimizer_class": "Adam"}),
        (LookupError, "nothing to see", {"optimizer_class": FailsInInit}),
    ]
    for culprit in range(ctx.world_size):
        for error, message, options in invalid_options:
            with expect_error_on_all_ranks(ctx, culprit, error, message):
                make_optimizer(**options if ctx.rank == culprit else {})


class FailsInInit(Adam):
    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        raise LookupError("nothing to see")


def make_closure(parity: ParityRun, should_fail: bool = False) -> Callable[[], torch.Tensor]:
    def closure() -> torch.Tensor:
        set_grads(parity.model.parameters(), parity.steps)
        if should_fail:
            raise ZeroDivisionError("a bad batch")
        return torch.tensor(float(parity.steps))

    return closure


@ranks(1, 2, 3, 4)
def test_failing_closure_changes_nothing(ctx: RankContext) -> None:
    for bucket_view in (False, True):
        parity = ParityRun(Adam, zero_only={"parameters_as_bucket_view": bucket_view})
        parity.train(1)
        for culprit in range(ctx.world_size):
            with expect_error_on_all_ranks(ctx, culprit, ZeroDivisionError, "a bad batch"):
                parity.zero.step(make_closure(parity, should_fail=ctx.rank == culprit))
            for model in gather_models(ctx, parity.model):
                assert_same(model, dict(parity.plain_model.state_dict()))
            found = parity.zero.full_state_dict()
            if found is not None:
                assert_same(found, parity.plain.state_dict())
            assert parity.zero.step(make_closure(parity)) == float(parity.steps)
            set_grads(parity.plain_model.parameters(), parity.steps)
            parity.plain.step()
            parity.check()
            parity.steps += 1


class FailsAfterStep(SGD):
    """Updates its parameters, then fails if `should_fail` is set."""

    should_fail = False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        result = super().step(closure)
        if self.should_fail:
            raise ArithmeticError("the step broke")
        return result


class FailsBeforeStep(FailsAfterStep):
    """Fails before it updates anything."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if self.should_fail:
            raise ArithmeticError("the step broke")
        return super().step(closure)


@ranks(1, 2, 3, 4)
def test_failing_inner_step_leaves_ranks_identical(ctx: RankContext) -> None:
    for bucket_view in (False, True):
        parity = ParityRun(FailsAfterStep, lr=0.1, momentum=0.9, zero_only={"parameters_as_bucket_view": bucket_view})
        for culprit in range(ctx.world_size):
            inner = parity.zero.optim
            assert isinstance(inner, FailsAfterStep)
            inner.should_fail = ctx.rank == culprit
            # The step fails after the update, so the result equals the plain optimizer's step.
            with expect_error_on_all_ranks(ctx, culprit, ArithmeticError, "the step broke"):
                parity.train(1)
            set_grads(parity.plain_model.parameters(), parity.steps)
            parity.plain.step()
            parity.steps += 1
            parity.check()
            inner.should_fail = False
            parity.train(1)


@ranks(2, 3)
def test_step_failing_on_one_rank_is_applied_by_the_others(ctx: RankContext) -> None:
    for bucket_view in (False, True):
        parity = ParityRun(FailsBeforeStep, lr=0.1, zero_only={"parameters_as_bucket_view": bucket_view})
        owned = {id(param) for group in parity.zero.optim.param_groups for param in group["params"]}
        for culprit in range(ctx.world_size):
            start = [param.detach().clone() for param in parity.model.parameters()]
            parity.zero.optim.should_fail = ctx.rank == culprit  # type: ignore[attr-defined]
            consequence = (
                ""
                if ctx.rank == culprit
                else r"\. The step was applied only partially: .* Load a checkpoint to get a consistent state\."
            )
            with expect_error_on_all_ranks(ctx, culprit, ArithmeticError, f"the step broke{consequence}"):
                parity.train(1)
            parity.zero.optim.should_fail = False  # type: ignore[attr-defined]
            set_grads(parity.plain_model.parameters(), parity.steps)
            parity.plain.step()
            owned_indices = [index for index, param in enumerate(parity.model.parameters()) if id(param) in owned]
            with torch.no_grad():
                for index, param in enumerate(parity.plain_model.parameters()):
                    if index in ctx.gather(owned_indices)[culprit]:
                        param.copy_(start[index])
            parity.check()
            parity.train(1)  # without momentum, so the lost update affects no later step on either side


class FailsInAddParamGroup(Adam):
    should_fail = False

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if self.should_fail:
            raise PermissionError("no more groups")


@ranks(1, 2, 3)
def test_failed_add_param_group_changes_nothing(ctx: RankContext) -> None:
    parity = ParityRun(FailsInAddParamGroup)
    parity.train(1)
    inner = parity.zero.optim
    assert isinstance(inner, FailsInAddParamGroup)

    def make_new_params() -> list[nn.Parameter]:
        return list(small_model(1).parameters())

    invalid_groups: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (TypeError, "dict", make_new_params),
        (TypeError, "int", lambda: {"params": [3]}),
        (ValueError, "'params'", lambda: {"lr": 0.1}),
        (ValueError, "more than one", lambda: {"params": list(parity.model.parameters())}),
        (PermissionError, "no more groups", lambda: {"params": make_new_params()}),
    ]
    for culprit in range(ctx.world_size):
        for error, message, make_group in invalid_groups:
            inner.should_fail = ctx.rank == culprit and error is PermissionError
            with expect_error_on_all_ranks(ctx, culprit, error, message):
                parity.zero.add_param_group(make_group() if ctx.rank == culprit else {"params": make_new_params()})
            assert len(parity.zero.param_groups) == len(parity.zero.optim.param_groups) == 1
        with pytest.raises(ValueError, match="dtype"):
            parity.zero.add_param_group({"params": [nn.Parameter(torch.ones(2).double())]})
        parity.train(1)
    inner.should_fail = False
    added = [make_new_params(), make_new_params()]
    parity.zero.add_param_group({"params": added[0], "lr": 0.3})
    parity.plain.add_param_group({"params": added[1], "lr": 0.3})
    for params in added:
        set_grads(params, 0)
    parity.train(1)
    assert_same(added[0], added[1])


@ranks(2, 3)
def test_recast_param_on_one_rank_raises_on_all_ranks(ctx: RankContext) -> None:
    for bucket_view in (False, True):
        parity = ParityRun(SGD, lr=0.1, zero_only={"parameters_as_bucket_view": bucket_view})
        parity.train(1)
        weight = next(parity.model.parameters())
        if ctx.rank == 1:
            weight.data = weight.data.double()
        with pytest.raises(BindingError if ctx.rank == 1 else RankFailedError, match="float64") as caught:
            parity.train(1)
        assert isinstance(caught.value, ZeroError)


@ranks(2, 3)
def test_errors_of_several_ranks_are_all_reported(ctx: RankContext) -> None:
    last = ctx.world_size - 1

    def closure() -> float:
        if ctx.rank != last:
            raise ValueError(f"batch of rank {ctx.rank}")
        return 0.0

    parity = ParityRun(SGD, lr=0.1)
    with pytest.raises(ValueError if ctx.rank != last else RankFailedError) as caught:
        parity.zero.step(closure)
    reported_ranks = range(last) if ctx.rank == last else [ctx.rank]
    assert all(f"batch of rank {rank}" in str(caught.value) for rank in reported_ranks)
    parity.train(1)


@ranks(2)
def test_long_error_message_is_truncated(ctx: RankContext) -> None:
    def closure() -> None:
        if ctx.rank == 1:
            raise ValueError("é" * 9000)

    parity = ParityRun(SGD, lr=0.1)
    with pytest.raises(ValueError if ctx.rank == 1 else RankFailedError, match=r"é{1000}"):
        parity.zero.step(closure)
    parity.train(1)


def test_uninitialized_process_group_raises() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        ZeroRedundancyOptimizer(small_model().parameters(), Adam)


@ranks(2, 3, timeout=20)
def test_out_of_memory_while_gradients_are_copied_to_shards(ctx: RankContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """With flat shards, after DDP or the user has averaged the gradients."""
    model = small_model()
    config = ZeroConfig(partition=FlatShards())
    zero = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1, config=config)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    with monkeypatch.context() as patch:
        if ctx.rank == 1:

            def fail(*_: Any) -> None:
                raise torch.OutOfMemoryError("on purpose")

            patch.setattr(LocalGrads, "_copy_to_shard", fail)
        with expect_error_on_all_ranks(ctx, 1, torch.OutOfMemoryError, "on purpose"):
            zero.step()
    zero.check_consistency()
    zero.step()
    zero.check_consistency()


class ClosureTwice(SGD):
    """Moves its parameters between two closure calls, and puts them back."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        closure = closure or (lambda: None)
        params = [param for group in self.param_groups for param in group["params"]]
        with torch.enable_grad():
            closure()
        for param in params:
            param.add_(1)
        with torch.enable_grad():
            loss = closure()
        for param in params:
            param.sub_(1)
        super().step()
        return loss


def fail_second_call(model: nn.Module, *, should_fail: bool) -> Callable[[], float]:
    calls = iter(range(2))

    def closure() -> float:
        call = next(calls)
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        if should_fail and call:
            raise ArithmeticError("second call")
        return 0.5

    return closure


@ranks(2, 3, timeout=20)
def test_failing_second_closure_leaves_replicas_equal(ctx: RankContext) -> None:
    """Owners have moved their parameters by then: the other ranks receive them."""
    for config in (ZeroConfig(), ZeroConfig(partition=FlatShards())):
        model, plain_model = small_model(), small_model()
        zero = ZeroRedundancyOptimizer(model.parameters(), ClosureTwice, lr=0.1, config=config)
        plain = ClosureTwice(plain_model.parameters(), lr=0.1)
        with expect_error_on_all_ranks(ctx, 1, ArithmeticError, "second call"):
            zero.step(fail_second_call(model, should_fail=ctx.rank == 1))
        with pytest.raises(ArithmeticError):
            plain.step(fail_second_call(plain_model, should_fail=True))
        zero.check_consistency()
        assert_same(dict(model.state_dict()), dict(plain_model.state_dict()))
        assert zero.step(fail_second_call(model, should_fail=False)) == 0.5
        plain.step(fail_second_call(plain_model, should_fail=False))
        assert_same(dict(model.state_dict()), dict(plain_model.state_dict()))


@ranks(2, 3, timeout=20)
def test_out_of_memory_in_a_closure_raises_on_all_ranks(ctx: RankContext, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model()
    config = ZeroConfig(partition=FlatShards())
    zero = ZeroRedundancyOptimizer(model.parameters(), ClosureTwice, lr=0.1, config=config)
    with monkeypatch.context() as patch:
        if ctx.rank == 1:

            def fail(*_: Any) -> None:
                raise torch.OutOfMemoryError("on purpose")

            patch.setattr(LocalGrads, "_copy_to_shard", fail)
        with expect_error_on_all_ranks(ctx, 1, torch.OutOfMemoryError, "on purpose"):
            zero.step(fail_second_call(model, should_fail=False))
    assert zero._engine.steps == 0
    zero.step(fail_second_call(model, should_fail=False))
    zero.check_consistency()


class IgnoresClosure(SGD):
    """Has its own idea of what to do with a closure."""

    def step(self, closure: Any = None) -> Any:
        return super().step() if closure is None else 0.5


@ranks(2, 3, timeout=20)
@pytest.mark.parametrize("optimizer_class", [SGD, IgnoresClosure])
def test_step_with_closure_reports_replaced_params_by_name(ctx: RankContext, optimizer_class: Any) -> None:
    """The rank with the replaced parameters cannot call the closure: the others must not wait for it."""
    model = small_model()
    zero = ZeroRedundancyOptimizer(model.parameters(), optimizer_class, lr=0.1)
    params = zero.param_groups[0]["params"]
    if ctx.rank == 1:
        zero.param_groups[0]["params"] = params[:-1]
    with expect_error_on_all_ranks(ctx, 1, BindingError, "param_groups were changed"):
        zero.step(lambda: 0.5)
    zero.param_groups[0]["params"] = params
    assert zero.step(lambda: 0.5) == 0.5
