"""Situations in which a step, a join or a backward pass could silently give wrong results or hang."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import ExponentialLR

from tests.support import RankContext, ranks
from tests.support.oracles import (
    WIDTH,
    DdpParityRun,
    OverlapParityRun,
    ParityRun,
    Setup,
    assert_same,
    batch,
    make_seeded,
    mlp,
    set_grads,
    small_model,
)
from zeroshard import (
    BindingError,
    ConfigError,
    FlatShards,
    RankFailedError,
    RankMismatchError,
    ZeroConfig,
    ZeroError,
    ZeroRedundancyOptimizer,
    shard,
)


def assert_params_equal_on_all_ranks(ctx: RankContext, model: nn.Module) -> None:
    """Check that all ranks have the same parameters."""
    models = ctx.gather([param.detach().clone() for param in model.parameters()])
    assert_same(models[ctx.rank], models[0], f"the model of rank {ctx.rank}")


def step_with_one_grad(ctx: RankContext, parity: ParityRun) -> None:
    """Step with a gradient for one parameter only; the step must still broadcast all updates that ranks missed."""
    parity.zero.zero_grad()
    set_grads([next(iter(parity.model.parameters()))], 7)
    parity.zero.step()
    assert_params_equal_on_all_ranks(ctx, parity.model)


# ---- uneven inputs


class FloatSubclass(float):
    """A subclass of float, like numpy's floats, that cannot be sent as a float."""


@ranks(2, 3)
def test_lr_scheduler_under_join(ctx: RankContext) -> None:
    for counts in ([4, 2, 1], [1, 4, 2], [0, 3, 1]):
        ours, theirs = (DistributedDataParallel(small_model()) for _ in range(2))
        zero = ZeroRedundancyOptimizer(ours.parameters(), SGD, lr=FloatSubclass(1.0), momentum=0.9)
        plain = SGD(theirs.parameters(), lr=FloatSubclass(1.0), momentum=0.9)
        sides: list[tuple[nn.Module, Optimizer, list[Any]]] = [(ours, zero, [ours, zero]), (theirs, plain, [theirs])]
        for model, optimizer, joinables in sides:
            scheduler = ExponentialLR(optimizer, 0.5)
            with Join(joinables):
                for step in range(counts[ctx.rank]):
                    optimizer.zero_grad()
                    torch.autograd.backward(model(torch.full((3, 5), step + 1.0)).sum() * 0.01)
                    optimizer.step()
                    scheduler.step()
        assert_same(ours.state_dict(), theirs.state_dict(), f"the model with {counts}")
        longest_rank = counts.index(max(counts[: ctx.world_size]))
        zero.consolidate_state_dict(to=longest_rank)
        if ctx.rank == longest_rank:
            assert_same(zero.state_dict(), plain.state_dict(), f"the state with {counts}")


@ranks(2, 3)
def test_lr_scheduler_with_overlap_under_join(ctx: RankContext) -> None:
    for counts in ([3, 6, 1], [6, 3, 0]):
        setup = Setup()
        ours, theirs = (setup.wrap(small_model()) for _ in range(2))
        zero = ZeroRedundancyOptimizer(ours.parameters(), SGD, lr=FloatSubclass(0.5), overlap_with_ddp=True)
        plain = SGD(theirs.parameters(), lr=0.5)
        setup.connect(ours, zero)
        sides: list[tuple[nn.Module, Optimizer, list[Any]]] = [(ours, zero, [ours, zero]), (theirs, plain, [theirs])]
        for model, optimizer, joinables in sides:
            scheduler = ExponentialLR(optimizer, 0.5)
            with Join(joinables):
                for number in range(counts[ctx.rank]):
                    torch.autograd.backward(model(torch.full((3, 5), number + 1.0)).sum() * 0.01)
                    if optimizer is plain and number >= setup.warmup:
                        plain.step()
                    optimizer.zero_grad()
                    scheduler.step()
        assert_same(ours.state_dict(), theirs.state_dict(), f"the model with {counts}")
        zero.consolidate_state_dict()


class SGDWithFactor(SGD):
    """Takes an argument in each step."""

    def step(self, closure: Any = None, *, factor: float = 1.0) -> Any:
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                param.grad.mul_(factor)
        return super().step(closure)


@ranks(2, 3)
def test_step_arguments_under_join(ctx: RankContext) -> None:
    for longest_rank in range(ctx.world_size):
        parity = ParityRun(SGDWithFactor, lr=0.1, momentum=0.9)
        with Join([parity.zero]):
            for step in range(3 if ctx.rank == longest_rank else 1):
                set_grads(parity.model.parameters(), step)
                parity.zero.step(factor=2.0 + step)
        for step in range(3):
            set_grads(parity.plain_model.parameters(), step)
            parity.plain.step(factor=2.0 + step)  # type: ignore[call-overload]
        parity.check()


# ---- training continues after an error, and no update is lost


@ranks(2, 3)
def test_training_continues_after_mismatched_calls(ctx: RankContext) -> None:
    def step(parity: ParityRun) -> None:
        parity.zero.step()

    def consolidate(parity: ParityRun) -> None:
        parity.zero.consolidate_state_dict()

    def step_with_closure(parity: ParityRun) -> None:
        parity.zero.step(lambda: 1.0)

    def step_with_scaler(parity: ParityRun) -> None:
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(()))
        scaler.step(parity.zero)

    for other_call in (consolidate, step_with_closure, step_with_scaler):
        for differing_rank in range(ctx.world_size):
            parity = ParityRun(Adam, lr=0.1)
            set_grads(parity.model.parameters(), 0)
            with pytest.raises(RankMismatchError, match=f"rank {differing_rank}: "):
                (other_call if ctx.rank == differing_rank else step)(parity)
            step_with_one_grad(ctx, parity)
            parity.zero.consolidate_state_dict()


@ranks(2, 3)
def test_training_continues_after_param_dtype_is_restored(ctx: RankContext) -> None:
    for changed_rank in range(ctx.world_size):
        parity = ParityRun(Adam, lr=0.1)
        set_grads(parity.model.parameters(), 0)
        if ctx.rank == changed_rank:
            parity.model.double()
        with pytest.raises(BindingError if ctx.rank == changed_rank else RankFailedError, match="float64"):
            parity.zero.step()
        parity.model.float()
        step_with_one_grad(ctx, parity)


@ranks(2, 3)
def test_transposed_param_data_is_rejected(ctx: RankContext) -> None:
    """The data pointer stays the same, the shape does not."""

    def transpose(changed_ranks: Iterable[int]) -> None:
        if ctx.rank in changed_ranks:
            weight.grad = None
            weight.data = weight.data.t()
            weight.grad = torch.ones_like(weight)

    for bucket_view in (False, True):
        for changed_ranks in (range(ctx.world_size), *([rank] for rank in range(ctx.world_size))):
            parity = ParityRun(SGD, lr=0.1, zero_only={"parameters_as_bucket_view": bucket_view})
            parity.train(1)
            weight = next(iter(parity.model.parameters()))
            pointer = weight.data_ptr()
            transpose(changed_ranks)
            assert pointer == weight.data_ptr()
            with pytest.raises((BindingError, RankFailedError), match="with shape"):
                parity.zero.step()
            transpose(changed_ranks)
            step_with_one_grad(ctx, parity)


@ranks(2)
def test_transposed_square_param_data(ctx: RankContext) -> None:
    """Pointer and shape stay the same, the strides do not: flat shards would mix up elements."""

    def make_optimizer(model: nn.Module, mode: str) -> torch.optim.Optimizer:
        if mode == "shard":
            return shard(model, SGD, lr=0.1)
        all_options: dict[str, dict[str, Any]] = {
            "whole": {},
            "bucket view": {"parameters_as_bucket_view": True},
            "flat": {"config": ZeroConfig(partition=FlatShards())},
        }
        options = all_options[mode]
        return ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1, **options)

    for mode in ("shard", "flat", "bucket view", "whole"):
        model, plain = (make_seeded(lambda: nn.Linear(8, 8)) for _ in range(2))
        pairs = [(model, make_optimizer(model, mode)), (plain, SGD(plain.parameters(), lr=0.1))]
        for step in range(2):
            for each, optimizer in pairs:
                weight = each.get_parameter("weight")
                weight.data = weight.data.t()
                each(torch.arange(32.0).view(4, 8) + step).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        # Weights with other strides may take another kernel for their product.
        torch.testing.assert_close([*model.parameters()], [*plain.parameters()], msg=mode)


@ranks(2, 3)
def test_tying_params_after_construction_is_rejected(ctx: RankContext) -> None:
    def tie(model: Any) -> None:
        model[1].weight.data = model[0].weight.data

    def two_layers() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))

    for bucket_view in (False, True):
        for changed_ranks in (range(ctx.world_size), [0], [1]):
            parity = ParityRun(SGD, lr=0.1, model=two_layers, zero_only={"parameters_as_bucket_view": bucket_view})
            parity.model.load_state_dict(parity.plain_model.state_dict())
            set_grads(parity.model.parameters(), 0)
            if ctx.rank in changed_ranks:
                tie(parity.model)
            with pytest.raises(ZeroError, match="share memory"):
                parity.zero.step()


@ranks(2, 3)
def test_edited_param_lists_are_rejected(ctx: RankContext) -> None:
    edits: list[Callable[[list[Any]], Any]] = [
        lambda params: params.pop(),
        lambda params: params.append(nn.Parameter(torch.ones(2))),
        lambda params: params.__setitem__(0, nn.Parameter(params[0].detach().clone())),
        lambda params: params.reverse(),
    ]
    for edit in edits:
        for changed_ranks in (range(ctx.world_size), [1]):
            parity = ParityRun(SGD, lr=0.1, momentum=0.9)
            parity.train(1)
            group = parity.zero.param_groups[0]
            before = list(group["params"])
            if ctx.rank in changed_ranks:
                edit(group["params"])
            calls: list[Callable[[], Any]] = [parity.zero.step, parity.zero.full_state_dict]
            for call in [*calls, parity.zero.consolidate_state_dict]:
                with pytest.raises(BindingError if ctx.rank in changed_ranks else RankFailedError, match="by hand"):
                    call()
            group["params"][:] = before
            step_with_one_grad(ctx, parity)


@ranks(2, 3)
def test_failed_closure_does_not_count_as_a_step(ctx: RankContext) -> None:
    def closure() -> None:
        raise ArithmeticError

    parity = ParityRun(SGD, lr=0.1, momentum=0.9)
    parity.train(1)
    parity.zero.consolidate_state_dict()
    with pytest.raises(ArithmeticError):
        parity.zero.step(closure)
    if ctx.rank == 0:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert_same(parity.zero.state_dict(), parity.plain.state_dict())


# ---- optimizers that write through `.data`, which no version counter sees


class DecaysAllParams(SGD):
    """Shrinks all parameters, with or without a gradient."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                param.data.add_(param.grad, alpha=-0.1)
            param.data.mul_(0.9)


class ClearsGrads(SGD):
    """Computes its gradients in a closure and clears them itself."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.enable_grad():
            closure()
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                param.data.add_(param.grad, alpha=-0.1)
                param.grad = None


def set_alternating_grads(params: Iterable[torch.Tensor], step: int) -> None:
    param_list = list(params)
    set_grads(param_list, step)
    for param in param_list[step % 2 :: 2]:
        param.grad = None


def clear_grads(params: Iterable[torch.Tensor], _: int) -> None:
    for param in params:
        param.grad = None


@ranks(2, 3)
def test_data_updates_without_grads_are_broadcast(ctx: RankContext) -> None:
    for bucket_view in (False, True):
        parity = ParityRun(DecaysAllParams, lr=0.1, zero_only={"parameters_as_bucket_view": bucket_view})
        parity.train(3, set_alternating_grads)
        parity.train(1, clear_grads)


@ranks(2, 3)
def test_grads_created_and_cleared_within_a_step(ctx: RankContext) -> None:
    parity = ParityRun(ClearsGrads, lr=0.1)
    for step in range(3):
        for model, optimizer in parity.sides:
            optimizer.step(partial(set_grads, list(model.parameters()), step))
        parity.check()


# ---- optimizers that cannot be sharded, even if their first steps do not show it


class GlobalClip(Optimizer):
    """Scales each gradient by the norm of all gradients."""

    def __init__(self, params: Any, lr: float = 0.1, max_norm: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "max_norm": max_norm})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        norm = torch.stack([param.grad.norm() for param in params]).norm().item() if params else 0.0
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"] * min(1.0, group["max_norm"] / (norm + 1e-6)))


@ranks(2, 3)
def test_optimizers_that_couple_params_are_rejected(ctx: RankContext) -> None:
    lr_options: list[dict[str, Any]] = [{"lr": lr} for lr in (0.0, 1e-8, 1e-3, torch.tensor(0.0), torch.tensor(1e-8))]
    cases: list[tuple[Any, dict[str, Any]]] = [(LBFGS, options) for options in lr_options]
    cases += [(GlobalClip, options) for options in (*lr_options, {"max_norm": 5.0}, {"max_norm": 50.0, "lr": 0.0})]
    for dtype in (torch.float32, torch.bfloat16):
        for factory, options in cases:
            params = list(small_model().to(dtype).parameters())
            with pytest.raises(ConfigError):
                ZeroRedundancyOptimizer(params, factory, **options)
            with pytest.raises(ConfigError):
                ZeroRedundancyOptimizer([{"params": params, **options}], factory)
    ZeroRedundancyOptimizer(small_model().bfloat16().parameters(), Adam, lr=0.0)


class ModelWithFrozenIntegers(nn.Module):
    """A model whose first parameter is frozen and holds integers, which cannot have gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.ones(WIDTH, WIDTH, dtype=torch.int8), requires_grad=False)
        self.layers = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x @ self.codes.float())
        return out


@ranks(1, 2, 3)
def test_optimizer_traits_are_probed_with_frozen_integer_params(ctx: RankContext) -> None:
    with pytest.raises(ConfigError, match="GlobalClip cannot be sharded: its update of one parameter depends on"):
        shard(ModelWithFrozenIntegers(), GlobalClip)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parity = DdpParityRun(None, ModelWithFrozenIntegers)
    assert parity.zero.balance.memory_imbalance < 1.1
    parity.train(3)


# ---- overlap


@ranks(2, 3)
def test_different_hook_options_are_a_mismatch(ctx: RankContext) -> None:
    is_on = ctx.rank == 0
    for option, setup in (("shard_buckets", Setup(shard_buckets=is_on)), ("interleaved", Setup(interleaved=is_on))):
        ddp = setup.wrap(mlp(3))
        zero = ZeroRedundancyOptimizer(ddp.parameters(), SGD, lr=0.1, overlap_with_ddp=True)
        setup.connect(ddp, zero)
        torch.autograd.backward(ddp(batch(0)).sum())
        with pytest.raises(RankMismatchError, match=f"{option}=True"):
            torch.autograd.backward(ddp(batch(1)).sum())


@ranks(2, 3)
def test_grad_scaler_with_overlap_is_rejected(ctx: RankContext) -> None:
    parity = OverlapParityRun(Setup(), partial(mlp, 2), SGD, lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    parity.train(2)
    torch.autograd.backward(scaler.scale(parity.ddp(batch(2)).sum()))
    with pytest.raises(RuntimeError, match="GradScaler cannot be used"):
        scaler.step(parity.zero)


@ranks(2, 3)
def test_step_names_a_differing_learning_rate(ctx: RankContext) -> None:
    parity = ParityRun(SGD, lr=0.1)
    parity.train(1)
    parity.zero.param_groups[0]["lr"] = 0.5 if ctx.rank == 1 else 0.1
    set_grads(parity.model.parameters(), 1)
    with pytest.raises(RankMismatchError, match=r"group 0 has lr=0\.1; rank 1: group 0 has lr=0\.5"):
        parity.zero.step()
    parity.zero.param_groups[0]["lr"] = 0.1
    parity.zero.step()
    assert_same(ctx.gather(parity.model.state_dict()), [parity.model.state_dict()] * ctx.world_size)


def make_groups_with_custom_options(model: nn.Module) -> list[dict[str, Any]]:
    """Return a group with options that the optimizer class does not define."""
    return [{"params": list(model.parameters()), "lr_scale": 1.0, "limits": [1.0, [2.0]]}]


def make_drop_in() -> tuple[nn.Module, Optimizer]:
    model = mlp()
    return model, ZeroRedundancyOptimizer(make_groups_with_custom_options(model), AdamW, lr=torch.tensor(0.1))


def make_sharded() -> tuple[nn.Module, Optimizer]:
    model = mlp()
    return model, shard(model, AdamW, params=make_groups_with_custom_options(model), lr=torch.tensor(0.1))


@ranks(2, 3)
@pytest.mark.parametrize("make", [make_drop_in, make_sharded])
def test_step_names_any_differing_group_option(
    ctx: RankContext, make: Callable[[], tuple[nn.Module, Optimizer]]
) -> None:
    cases: list[tuple[str, Any, str]] = [
        ("lr", torch.tensor(0.5), r"lr=tensor\(0\.1[^;]*; rank 1: group 0 has lr=tensor\(0\.5"),
        ("betas", (0.9, 0.5), r"betas=tuple\(0\.9, 0\.999\); rank 1: group 0 has betas=tuple\(0\.9, 0\.5\)"),
        ("betas", (0.9, torch.tensor(0.5)), r"betas=tuple\(0\.9, 0\.999\); rank 1: .*tensor\(0\.5"),
        ("limits", [1.0, [3.0]], r"limits=list\(1\.0, list\(2\.0\)\); rank 1: .*limits=list\(1\.0, list\(3\.0\)\)"),
        ("lr_scale", 2.0, r"lr_scale=1\.0; rank 1: group 0 has lr_scale=2\.0"),
    ]
    for key, other, message in cases:
        torch.manual_seed(0)
        model, optimizer = make()
        (group,) = optimizer.param_groups
        original = group[key]
        torch.autograd.backward(model(batch(0)).sum())
        group[key] = other if ctx.rank == 1 else original
        with pytest.raises(RankMismatchError, match=rf"group 0 has {message}"):
            optimizer.step()
        group[key] = original
        optimizer.step()
        assert_params_equal_on_all_ranks(ctx, model)


class RecordsGradNorms(SGD):
    """Writes the sum and the number of gradient norms to each group that has gradients."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            norms = [float(param.grad.norm()) for param in group["params"] if param.grad is not None]
            group.update(dict(zip(["norm", "number"], [sum(norms), len(norms)], strict=True)) if norms else {})


@ranks(2, 3)
def test_values_optimizers_write_to_groups_may_differ(ctx: RankContext) -> None:
    parity = ParityRun(RecordsGradNorms, lr=0.1)
    parity.zero.param_groups[0]["label"] = f"of rank {ctx.rank}"
    for step in range(3):
        for model, optimizer in parity.sides:
            set_grads(model.parameters(), step)
            optimizer.step()
        assert_same(parity.model.state_dict(), parity.plain_model.state_dict())


@ranks(1, 2)
def test_optimizer_instance_instead_of_class_is_rejected(ctx: RankContext) -> None:
    params = list(small_model().parameters())
    with pytest.raises(TypeError, match=r"to be a class such as .* got an instance of SGD"):
        ZeroRedundancyOptimizer(params, SGD(params, lr=0.1))  # type: ignore[arg-type]


class CountsSteps(SGD):
    """Counts steps in an option of its groups, and fails while `should_fail` is set."""

    should_fail = False

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.defaults["k"] = 0
        for group in self.param_groups:
            group["k"] = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        for group in self.param_groups:
            group["k"] += 1
        if self.should_fail:
            raise ArithmeticError("on purpose")
        super().step()


@ranks(2, 3)
def test_failed_step_rolls_back_counters_on_all_ranks(ctx: RankContext) -> None:
    parity = ParityRun(CountsSteps)
    parity.train(2)
    set_grads(parity.model.parameters(), 2)
    parity.zero.optim.should_fail = ctx.rank == 0  # type: ignore[attr-defined]
    with pytest.raises((ArithmeticError, RankFailedError), match="on purpose"):
        parity.zero.step()
    assert parity.zero.param_groups[0]["k"] == 2
    parity.zero.optim.should_fail = False  # type: ignore[attr-defined]
    parity.zero.step()
    assert parity.zero.param_groups[0]["k"] == 3
    assert_same(ctx.gather(parity.model.state_dict()), [parity.model.state_dict()] * ctx.world_size)
    parity.zero.consolidate_state_dict()
