"""Operations of a training script around the step match the plain optimizer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer, lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.support import RankContext, ranks
from tests.support.oracles import (
    SCHEDULERS,
    ParityRun,
    assert_same,
    set_grads,
    small_model,
    train_with_scheduler,
    two_groups,
)
from zeroshard import ConfigError, ZeroRedundancyOptimizer

Options = dict[str, Any]
BUCKET_VIEW_OPTIONS = ({"parameters_as_bucket_view": False}, {"parameters_as_bucket_view": True})
MOMENTUM_OPTIONS: Options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}


def compute_loss(model: nn.Module, seed: int = 0) -> Tensor:
    inputs = torch.randn(3, 5, generator=torch.Generator().manual_seed(seed))
    loss: Tensor = model(inputs).square().mean()
    return loss


# ---- learning rates: tests/unit/test_schedulers.py tests all schedulers


@ranks(2, 3, 4)
@pytest.mark.parametrize("name", ["OneCycleLR", "ReduceLROnPlateau"])
def test_lr_schedulers_match_plain_optimizer(ctx: RankContext, name: str) -> None:
    for zero_only in BUCKET_VIEW_OPTIONS:
        for cls, options in ((optim.SGD, MOMENTUM_OPTIONS), (optim.AdamW, {"lr": 0.1})):
            parity = ParityRun(cls, get_params=two_groups, zero_only=zero_only, **options)
            assert len(train_with_scheduler(parity, SCHEDULERS[name])) > 1


@ranks(2)
def test_schedulers_update_tensor_lr_in_place(ctx: RankContext) -> None:
    parity = ParityRun(optim.AdamW, get_params=two_groups, lr=torch.tensor(0.1), foreach=False)
    assert len(train_with_scheduler(parity, SCHEDULERS["ExponentialLR"])) > 1


@ranks(2)
def test_scheduler_detects_optimizer_steps(ctx: RankContext) -> None:
    warnings.simplefilter("error")
    parity = ParityRun(optim.SGD, lr=0.1)
    train_with_scheduler(parity, SCHEDULERS["StepLR"])
    with pytest.warns(UserWarning, match=r"Detected call of `lr_scheduler.step\(\)` before `optimizer.step\(\)`"):
        SCHEDULERS["StepLR"](ParityRun(optim.SGD, lr=0.1).zero).step()


@ranks(1, 3)
def test_defaults_are_complete(ctx: RankContext) -> None:
    for factory in (optim.SGD, optim.AdamW, partial(optim.RMSprop, momentum=0.5)):
        for get_params in (nn.Module.parameters, two_groups):
            parity = ParityRun(factory, get_params=get_params, lr=0.3)
            assert_same(parity.zero.defaults, parity.plain.defaults)


@ranks(1, 2, 3, 4)
def test_averaged_models(ctx: RankContext) -> None:
    for zero_only in BUCKET_VIEW_OPTIONS:
        for avg_fn in (None, get_ema_multi_avg_fn(0.9)):  # type: ignore[no-untyped-call]
            parity = ParityRun(optim.AdamW, zero_only=zero_only)
            averaged_models = [AveragedModel(model, multi_avg_fn=avg_fn) for model, _ in parity.sides]
            for _ in range(3):
                parity.train(1)
                for averaged_model, (model, _optimizer) in zip(averaged_models, parity.sides, strict=True):
                    averaged_model.update_parameters(model)
            assert_same(averaged_models[0].state_dict(), averaged_models[1].state_dict())


# ---- gradients


class ScaledDdpParityRun:
    """A sharded and a plain optimizer, each with a GradScaler."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.parity = ParityRun(*args, **kwargs)
        self.scalers = [GradScaler("cpu", init_scale=1024.0, growth_interval=2) for _ in self.parity.sides]

    def train(self, steps: int, edit_grads: Callable[[nn.Module], None] | None = None, *, clip: bool = False) -> None:
        """Step both. `edit_grads` is called with each model after its backward pass."""
        for _ in range(steps):
            for scaler, (model, optimizer) in zip(self.scalers, self.parity.sides, strict=True):
                optimizer.zero_grad()
                torch.autograd.backward(scaler.scale(compute_loss(model, self.parity.steps)))
                if edit_grads:
                    edit_grads(model)
                if clip:
                    scaler.unscale_(optimizer)
                    clip_grad_norm_(model.parameters(), 0.01)
                scaler.step(optimizer)
                scaler.update()
            self.parity.steps += 1
            self.parity.check()


def put_inf(model: nn.Module, param_index: int = 3) -> None:
    param = list(model.parameters())[param_index]
    assert param.grad is not None
    param.grad.view(-1)[0] = torch.inf


INNER_OPTIMIZERS: list[tuple[type[Optimizer], Options]] = [
    (optim.SGD, MOMENTUM_OPTIONS),
    (optim.SGD, MOMENTUM_OPTIONS | {"fused": True}),
    (optim.AdamW, {}),
    (optim.AdamW, {"fused": True, "amsgrad": True}),
]


@ranks(1, 2, 3, 4)
def test_grad_scaler(ctx: RankContext) -> None:
    for clip in (False, True):
        for view, (cls, options) in enumerate(INNER_OPTIMIZERS):
            scaled = ScaledDdpParityRun(cls, zero_only=BUCKET_VIEW_OPTIONS[view % 2], **options)
            scaled.train(2, clip=clip)
            before = {name: value.clone() for name, value in scaled.parity.model.state_dict().items()}
            scaled.train(1, put_inf, clip=clip)
            assert_same(dict(scaled.parity.model.state_dict()), before)
            scaled.train(4, clip=clip)
            ours, theirs = scaled.scalers
            assert_same(ours.state_dict(), theirs.state_dict())
            assert ours.get_scale() != 1024.0


@ranks(2, 3, 4)
def test_all_ranks_skip_if_one_rank_sees_inf(ctx: RankContext) -> None:
    for clip in (False, True):
        for cls, options in INNER_OPTIMIZERS:
            for param_index in (0, 5):
                scaled = ScaledDdpParityRun(cls, **options)
                ours = scaled.parity.model

                def edit_grads(model: nn.Module, ours: nn.Module = ours, param_index: int = param_index) -> None:
                    if model is not ours or ctx.rank == 1:
                        put_inf(model, param_index)

                scaled.train(1, clip=clip)
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    scaled.train(1, edit_grads, clip=clip)
                found = [w for w in caught if "another rank found non-finite gradients" in str(w.message)]
                assert bool(found) == (ctx.rank != 1 and not options.get("fused"))
                assert all((w.category, w.filename) == (RuntimeWarning, __file__) for w in found)
                scaled.train(2, clip=clip)


@ranks(2, 3)
def test_rank_without_grads_takes_part_in_scaled_step(ctx: RankContext) -> None:
    for cls, options in INNER_OPTIMIZERS:
        scaled = ScaledDdpParityRun(cls, **options)
        parity, owner_of = scaled.parity, scaled.parity.zero.layout.owner_of
        for scaler, (model, optimizer) in zip(scaled.scalers, parity.sides, strict=True):
            torch.autograd.backward(scaler.scale(compute_loss(model)))
            for index, param in enumerate(model.parameters()):
                if owner_of(index) if model is parity.plain_model else ctx.rank:
                    param.grad = None
            scaler.step(optimizer)
        parity.check()


@ranks(1, 2, 3, 4)
def test_gradient_accumulation_under_ddp(ctx: RankContext) -> None:
    for zero_only in BUCKET_VIEW_OPTIONS:
        for as_view in (False, True):
            parity = ParityRun(optim.AdamW, zero_only=zero_only)
            sides = [
                (DistributedDataParallel(model, gradient_as_bucket_view=as_view), optimizer)
                for model, optimizer in parity.sides
            ]
            for step in range(3):
                for ddp, optimizer in sides:
                    for micro_batch in range(3):
                        with nullcontext() if micro_batch == 2 else ddp.no_sync():
                            torch.autograd.backward(compute_loss(ddp, 100 * step + 10 * micro_batch + ctx.rank))
                    clip_grad_norm_(ddp.parameters(), 0.5)
                    optimizer.step()
                    optimizer.zero_grad()
                parity.check()


@ranks(1, 2, 3, 4)
def test_freeze_and_unfreeze(ctx: RankContext) -> None:
    for zero_only in BUCKET_VIEW_OPTIONS:
        for set_to_none in (True, False):
            parity = ParityRun(optim.SGD, get_params=two_groups, zero_only=zero_only, **MOMENTUM_OPTIONS)
            for frozen in ((), (0, 5), (1, 2, 3), (0, 1, 2, 3, 4, 5), (4,), ()):
                for model, optimizer in parity.sides:
                    optimizer.zero_grad(set_to_none)
                    for index, param in enumerate(model.parameters()):
                        param.requires_grad_(index not in frozen)
                parity.train(2)


class TiedEmbeddingNet(nn.Module):
    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(9, 4, sparse=sparse)
        self.middle = nn.Linear(4, 4)
        self.out = nn.Linear(4, 9)
        if not sparse:
            self.out.weight = self.words.weight

    def forward(self, seed: int) -> Tensor:
        words = torch.randint(9, (3,), generator=torch.Generator().manual_seed(seed))
        scores: Tensor = self.out(self.middle(self.words(words)))
        return nn.functional.cross_entropy(scores, words)


@ranks(1, 2, 3, 4)
def test_tied_weights_and_sparse_gradients(ctx: RankContext) -> None:
    cases: list[tuple[bool, type[Optimizer], Options]] = [
        (False, optim.AdamW, {}),
        (True, optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (True, optim.Adagrad, {}),
    ]
    for sparse, cls, options in cases:
        for zero_only in BUCKET_VIEW_OPTIONS:
            parity = ParityRun(cls, model=partial(TiedEmbeddingNet, sparse=sparse), zero_only=zero_only, **options)
            for step in range(3):
                for model, optimizer in parity.sides:
                    optimizer.zero_grad()
                    torch.autograd.backward(model(step))
                    optimizer.step()
                parity.check()
            assert len(list(parity.model.parameters())) == (5 if sparse else 4)


@ranks(2, 3, 4)
def test_owner_decides_whether_a_param_has_a_gradient(ctx: RankContext) -> None:
    for zero_only in BUCKET_VIEW_OPTIONS:
        parity = ParityRun(optim.SGD, zero_only=zero_only, **MOMENTUM_OPTIONS)
        owned = {id(param) for param in parity.zero.optim.param_groups[0]["params"]}
        for step in range(4):
            for model, optimizer in parity.sides:
                set_grads(model.parameters(), step)
                for index, param in enumerate(model.parameters()):
                    owner_keeps = (index + step) % 2
                    keeps_grad = (
                        owner_keeps if model is parity.plain_model or id(param) in owned else (index + ctx.rank) % 3
                    )
                    if not keeps_grad:
                        param.grad = None
                optimizer.step()
            parity.check()


# ---- the step itself


class GroupEditingSGD(Optimizer):
    """Gradient descent that adds, changes and removes options of its groups, and takes no closure."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            self.update_group(group)

    def update_group(self, group: Options) -> None:
        group["count"] = group.get("count", 0) + 1
        group["lr"] *= 0.9
        group.pop("once", None)
        for param in group["params"]:
            if param.grad is not None:
                param.sub_(param.grad * (group["lr"] / group["count"]))


class DataReplacingSGD(GroupEditingSGD):
    """Assigns new memory to `param.data`."""

    def update_group(self, group: Options) -> None:
        for param in group["params"]:
            if param.grad is not None:
                param.data = param.data - group["lr"] * param.grad


@ranks(1, 2, 3, 4)
def test_group_changes_by_inner_optimizer_are_synced(ctx: RankContext) -> None:
    def get_params(model: nn.Module) -> list[Options]:
        return [group | {"once": True} for group in two_groups(model)]

    for zero_only in BUCKET_VIEW_OPTIONS:
        parity = ParityRun(GroupEditingSGD, get_params=get_params, zero_only=zero_only)
        parity.check()
        parity.train(3)
        assert [group["count"] for group in parity.zero.param_groups] == [3, 3]


@ranks(1, 2, 3, 4)
def test_optimizer_that_replaces_param_data(ctx: RankContext) -> None:
    for zero_only in BUCKET_VIEW_OPTIONS:
        ParityRun(DataReplacingSGD, zero_only=zero_only).train(3)


@ranks(1, 2, 3, 4)
def test_group_changes_by_user_are_synced(ctx: RankContext) -> None:
    parity = ParityRun(optim.SGD, get_params=two_groups, lr=0.1)
    parity.train(1)
    for _, optimizer in parity.sides:
        optimizer.param_groups[0]["lr"] = 0.5
        optimizer.param_groups[1] |= {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True, "note": "mine"}
    parity.train(2)
    assert parity.zero.optim.param_groups[1]["note"] == "mine"
    for _, optimizer in parity.sides:
        del optimizer.param_groups[1]["note"]
    parity.train(1)
    assert "note" not in parity.zero.optim.param_groups[1]


class RejectsEmptyGroups(optim.SGD):
    """Rejects empty groups everywhere."""

    def __init__(self, params: Any, lr: float) -> None:
        params = list(params)
        if not all(group["params"] if isinstance(group, dict) else True for group in params):
            raise ValueError("a group without parameters was given")
        super().__init__(params, lr)

    def add_param_group(self, param_group: Options) -> None:
        super().add_param_group(param_group)
        if not self.param_groups[-1]["params"]:
            raise ValueError("a group without parameters was added")

    def step(self, closure: Any = None) -> Any:
        assert all(group["params"] for group in self.param_groups)
        return super().step(closure)


@ranks(1, 2, 3, 4)
def test_optimizers_that_reject_empty_groups(ctx: RankContext) -> None:
    for zero_only in BUCKET_VIEW_OPTIONS:
        for get_params in (lambda model: list(model.parameters())[:1], two_groups):
            parity = ParityRun(RejectsEmptyGroups, get_params=get_params, zero_only=zero_only, lr=0.1)
            parity.train(2)
            new_layers = [nn.Linear(2, 2, bias=False) for _ in parity.sides]
            for layer, (_, optimizer) in zip(new_layers, parity.sides, strict=True):
                nn.init.ones_(layer.weight)
                optimizer.add_param_group({"params": layer.weight})
                set_grads(layer.parameters(), 0)
            parity.train(2)
            assert_same(new_layers[0].state_dict(), new_layers[1].state_dict())
            assert all(param.numel() for group in parity.zero.optim.param_groups for param in group["params"])
            assert all(param.numel() for param in parity.zero.state)


def make_sgd(params: Iterable[Any], lr: float, momentum: float = 0.5) -> Optimizer:
    return optim.SGD(params, lr, momentum)


class AdamWFactory:
    def __call__(self, params: Iterable[Any], lr: float) -> Optimizer:
        return optim.AdamW(params, lr)


@ranks(1, 2, 3, 4)
def test_any_callable_can_be_the_optimizer_factory(ctx: RankContext) -> None:
    factories = (
        partial(optim.SGD, momentum=0.9),
        make_sgd,
        lambda params, lr: optim.Adam(params, 2 * lr),
        AdamWFactory(),
    )
    for factory in factories:
        for get_params in (nn.Module.parameters, two_groups):
            parity = ParityRun(factory, get_params=get_params, lr=0.1)
            assert type(parity.zero.optim) is type(parity.plain)
            parity.train(2)


@ranks(1, 2, 3, 4)
def test_closures_match_plain_optimizer(ctx: RankContext) -> None:
    for zero_only in BUCKET_VIEW_OPTIONS:
        parity = ParityRun(optim.AdamW, zero_only=zero_only)
        for step in range(3):
            losses = []
            for model, optimizer in parity.sides:

                def closure(model: nn.Module = model, optimizer: Optimizer = optimizer, step: int = step) -> Tensor:
                    optimizer.zero_grad()
                    loss = compute_loss(model, step)
                    torch.autograd.backward(loss)
                    return loss.detach()

                losses.append(optimizer.step(closure) if step else optimizer.step(closure=closure))
            parity.check()
            assert_same(losses[0], losses[1])


class StepWithArgument(GroupEditingSGD):
    """Its step takes an argument and returns a result."""

    @torch.no_grad()
    def step(self, *, times: int = 1) -> str:  # type: ignore[override]
        for group in self.param_groups * times:
            self.update_group(group)
        return f"{times} times"


@ranks(1, 2, 3, 4)
def test_step_arguments_and_result_are_forwarded(ctx: RankContext) -> None:
    parity = ParityRun(StepWithArgument, lr=0.1)
    for model, optimizer in parity.sides:
        set_grads(model.parameters(), 0)
        assert optimizer.step(times=3) == "3 times"
    parity.check()


# ---- forms in which parameters are passed


@ranks(1, 3)
def test_inner_optimizer_gets_params_in_the_users_form(ctx: RankContext) -> None:
    for get_params, expected_type in (
        (nn.Module.parameters, nn.Parameter),
        (nn.Module.named_parameters, tuple),
        (two_groups, dict),
    ):
        received: list[Any] = []

        def factory(params: list[Any], received: list[Any] = received) -> Optimizer:
            received.extend(params)
            return optim.SGD(params, lr=0.1)

        ZeroRedundancyOptimizer(get_params(small_model()), factory)
        assert {type(entry) for entry in received} == {expected_type}


def make_groups(params: Iterable[Tensor], lr: float) -> Optimizer:
    return optim.SGD([{"params": [param]} for param in params], lr)


@ranks(1, 3)
def test_factory_that_splits_groups_is_rejected(ctx: RankContext) -> None:
    with pytest.raises(ConfigError, match=r"make_groups made \d parameter groups from 1\."):
        ZeroRedundancyOptimizer([torch.ones(1, requires_grad=True) for _ in range(6)], make_groups, lr=0.1)


def named_groups(model: nn.Module) -> list[Options]:
    *others, last = model.named_parameters()
    return [{"params": iter(others), "lr": 0.3}, {"params": [last]}]


@ranks(1, 2, 3, 4)
def test_named_parameters(ctx: RankContext) -> None:
    for get_params in (nn.Module.named_parameters, named_groups):
        parity = ParityRun(optim.AdamW, get_params=get_params)
        parity.train(2)
        names = {id(param): name for name, param in parity.model.named_parameters()}
        for group in parity.zero.optim.param_groups:
            assert group["param_names"] == [names[id(param)] for param in group["params"]]


@ranks(1, 2, 3, 4)
def test_groups_with_generator_params(ctx: RankContext) -> None:
    parity = ParityRun(
        optim.SGD, get_params=lambda model: ({"params": layer.parameters()} for layer in model.children()), lr=0.1
    )
    assert [len(group["params"]) for group in parity.zero.param_groups] == [2, 2, 2]
    before = [param.detach().clone() for param in parity.model.parameters()]
    parity.train(2)
    assert all(not torch.equal(a, b) for a, b in zip(before, parity.model.parameters(), strict=True))


def make_growing_model() -> nn.Sequential:
    return nn.Sequential(small_model(), small_model(1, width=3))


def first_part_params(model: nn.Module) -> Any:
    return next(model.children()).parameters()


@ranks(1, 2, 3, 4)
def test_add_param_group_during_training(ctx: RankContext) -> None:
    for zero_only in BUCKET_VIEW_OPTIONS:
        for options in ({}, {"lr": 0.3, "weight_decay": 0.5}):
            parity = ParityRun(optim.AdamW, model=make_growing_model, get_params=first_part_params, zero_only=zero_only)
            early = [lr_scheduler.ExponentialLR(optimizer, 0.5) for _, optimizer in parity.sides]
            parity.train(2)
            layout, numels = parity.zero.layout, parity.zero.layout.numel_per_rank(trainable=True)
            for model, optimizer in parity.sides:
                optimizer.add_param_group({"params": model[1].parameters(), **options})
            parity.check()
            assert [parity.zero.layout.owner_of(i) for i in range(6)] == [layout.owner_of(i) for i in range(6)]
            new_params = list(parity.model.parameters())[6:]
            for numel in sorted((param.numel() for param in new_params), reverse=True):
                numels[numels.index(min(numels))] += numel
            assert parity.zero.layout.numel_per_rank(trainable=True) == numels
            late = [lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=9) for _, optimizer in parity.sides]
            for _ in range(2):
                parity.train(1)
                for scheduler in (*early, *late):
                    scheduler.step()
            parity.train(1)


# ---- hooks


@ranks(1, 2, 3, 4)
def test_step_hooks_fire_once(ctx: RankContext) -> None:
    calls: list[str] = []

    def make_hook(name: str) -> Callable[..., None]:
        return lambda optimizer, *_: calls.append(f"{name} {type(optimizer).__name__}")

    zero = ParityRun(optim.SGD, lr=0.1).zero
    register_optimizer_step_pre_hook(make_hook("global pre"))
    register_optimizer_step_post_hook(make_hook("global post"))
    for optimizer in (zero, zero.optim):
        optimizer.register_step_pre_hook(make_hook("own pre"))
        optimizer.register_step_post_hook(make_hook("own post"))
    for _ in range(2):
        zero.step()
    outer = "ZeroRedundancyOptimizer"
    before = [f"global pre {outer}", f"own pre {outer}", "own pre SGD"]
    after = ["own post SGD", f"own post {outer}", f"global post {outer}"]
    assert calls == 2 * [*before, *after]


@ranks(1, 2, 3, 4)
def test_step_pre_hook_can_change_arguments(ctx: RankContext) -> None:
    parity = ParityRun(StepWithArgument, lr=0.1)
    for model, optimizer in parity.sides:
        set_grads(model.parameters(), 0)
        optimizer.register_step_pre_hook(lambda _, args, _kwargs: (args, {"times": 2}))
        assert optimizer.step() == "2 times"
    parity.check()
    set_grads(parity.model.parameters(), 1)
    parity.zero.optim.register_step_pre_hook(lambda _, args, _kwargs: (args, {"times": 5}))
    assert parity.zero.step() == "5 times"
