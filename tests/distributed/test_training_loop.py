"""Everything a training script does around the step: the sharded optimizer goes along as the plain one does."""

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
from tests.support.oracles import SCHEDULERS, Twins, assert_same, follow, set_grads, small_model, two_groups
from zeroshard import ConfigError, ZeroRedundancyOptimizer

Options = dict[str, Any]
BUCKET_VIEW_OPTIONS = ({"parameters_as_bucket_view": False}, {"parameters_as_bucket_view": True})
MOMENTUM_OPTIONS: Options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}


def compute_loss(model: nn.Module, seed: int = 0) -> Tensor:
    inputs = torch.randn(3, 5, generator=torch.Generator().manual_seed(seed))
    loss: Tensor = model(inputs).square().mean()
    return loss


# ---- learning rates: tests/unit/test_schedulers.py has all schedulers


@ranks(2, 3, 4)
@pytest.mark.parametrize("name", ["OneCycleLR", "ReduceLROnPlateau"])
def test_lr_schedulers_match_plain_optimizer(ctx: RankContext, name: str) -> None:
    for zero_only in BUCKET_VIEW_OPTIONS:
        for cls, options in ((optim.SGD, MOMENTUM_OPTIONS), (optim.AdamW, {"lr": 0.1})):
            twins = Twins(cls, handed=two_groups, zero_only=zero_only, **options)
            assert len(follow(twins, SCHEDULERS[name])) > 1


@ranks(2)
def test_schedulers_update_tensor_lr_in_place(ctx: RankContext) -> None:
    twins = Twins(optim.AdamW, handed=two_groups, lr=torch.tensor(0.1), foreach=False)
    assert len(follow(twins, SCHEDULERS["ExponentialLR"])) > 1


@ranks(2)
def test_scheduler_detects_optimizer_steps(ctx: RankContext) -> None:
    warnings.simplefilter("error")
    twins = Twins(optim.SGD, lr=0.1)
    follow(twins, SCHEDULERS["StepLR"])
    with pytest.warns(UserWarning, match=r"Detected call of `lr_scheduler.step\(\)` before `optimizer.step\(\)`"):
        SCHEDULERS["StepLR"](Twins(optim.SGD, lr=0.1).zero).step()


@ranks(1, 3)
def test_defaults_are_complete(ctx: RankContext) -> None:
    for factory in (optim.SGD, optim.AdamW, partial(optim.RMSprop, momentum=0.5)):
        for handed in (nn.Module.parameters, two_groups):
            twins = Twins(factory, handed=handed, lr=0.3)
            assert_same(twins.zero.defaults, twins.plain.defaults)


@ranks(1, 2, 3, 4)
def test_averaged_models(ctx: RankContext) -> None:
    for zero_only in BUCKET_VIEW_OPTIONS:
        for average in (None, get_ema_multi_avg_fn(0.9)):  # type: ignore[no-untyped-call]
            twins = Twins(optim.AdamW, zero_only=zero_only)
            averaged = [AveragedModel(model, multi_avg_fn=average) for model, _ in twins.sides]
            for _ in range(3):
                twins.train(1)
                for mean, (model, _optimizer) in zip(averaged, twins.sides, strict=True):
                    mean.update_parameters(model)
            assert_same(averaged[0].state_dict(), averaged[1].state_dict())


# ---- gradients


class ScaledTwins:
    """Twins with a GradScaler each."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.twins = Twins(*args, **kwargs)
        self.scalers = [GradScaler("cpu", init_scale=1024.0, growth_interval=2) for _ in self.twins.sides]

    def train(self, steps: int, edit_grads: Callable[[nn.Module], None] | None = None, *, clip: bool = False) -> None:
        """Steps of both; `spoil` may change the gradients of either."""
        for _ in range(steps):
            for scaler, (model, optimizer) in zip(self.scalers, self.twins.sides, strict=True):
                optimizer.zero_grad()
                torch.autograd.backward(scaler.scale(compute_loss(model, self.twins.steps)))
                if edit_grads:
                    edit_grads(model)
                if clip:
                    scaler.unscale_(optimizer)
                    clip_grad_norm_(model.parameters(), 0.01)
                scaler.step(optimizer)
                scaler.update()
            self.twins.steps += 1
            self.twins.check()


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
            scaled = ScaledTwins(cls, zero_only=BUCKET_VIEW_OPTIONS[view % 2], **options)
            scaled.train(2, clip=clip)
            before = {name: value.clone() for name, value in scaled.twins.model.state_dict().items()}
            scaled.train(1, put_inf, clip=clip)
            assert_same(dict(scaled.twins.model.state_dict()), before)
            scaled.train(4, clip=clip)
            ours, theirs = scaled.scalers
            assert_same(ours.state_dict(), theirs.state_dict())
            assert ours.get_scale() != 1024.0


@ranks(2, 3, 4)
def test_all_ranks_skip_if_one_rank_sees_inf(ctx: RankContext) -> None:
    for clip in (False, True):
        for cls, options in INNER_OPTIMIZERS:
            for place in (0, 5):
                scaled = ScaledTwins(cls, **options)
                ours = scaled.twins.model

                def spoil(model: nn.Module, ours: nn.Module = ours, place: int = place) -> None:
                    if model is not ours or ctx.rank == 1:
                        put_inf(model, place)

                scaled.train(1, clip=clip)
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    scaled.train(1, spoil, clip=clip)
                told = [w for w in caught if "another rank found gradients that are not finite" in str(w.message)]
                assert bool(told) == (ctx.rank != 1 and not options.get("fused"))
                assert all((w.category, w.filename) == (RuntimeWarning, __file__) for w in told)
                scaled.train(2, clip=clip)


@ranks(2, 3)
def test_rank_without_grads_takes_part_in_scaled_step(ctx: RankContext) -> None:
    for cls, options in INNER_OPTIMIZERS:
        scaled = ScaledTwins(cls, **options)
        twins, owner_of = scaled.twins, scaled.twins.zero.layout.owner_of
        for scaler, (model, optimizer) in zip(scaled.scalers, twins.sides, strict=True):
            torch.autograd.backward(scaler.scale(compute_loss(model)))
            for place, param in enumerate(model.parameters()):
                if owner_of(place) if model is twins.plain_model else ctx.rank:
                    param.grad = None
            scaler.step(optimizer)
        twins.check()


@ranks(1, 2, 3, 4)
def test_gradient_accumulation_under_ddp(ctx: RankContext) -> None:
    for zero_only in BUCKET_VIEW_OPTIONS:
        for as_view in (False, True):
            twins = Twins(optim.AdamW, zero_only=zero_only)
            wrapped = [
                (DistributedDataParallel(model, gradient_as_bucket_view=as_view), optimizer)
                for model, optimizer in twins.sides
            ]
            for round_ in range(3):
                for ddp, optimizer in wrapped:
                    for part in range(3):
                        with nullcontext() if part == 2 else ddp.no_sync():
                            torch.autograd.backward(compute_loss(ddp, 100 * round_ + 10 * part + ctx.rank))
                    clip_grad_norm_(ddp.parameters(), 0.5)
                    optimizer.step()
                    optimizer.zero_grad()
                twins.check()


@ranks(1, 2, 3, 4)
def test_freeze_and_unfreeze(ctx: RankContext) -> None:
    for zero_only in BUCKET_VIEW_OPTIONS:
        for set_to_none in (True, False):
            twins = Twins(optim.SGD, handed=two_groups, zero_only=zero_only, **MOMENTUM_OPTIONS)
            for frozen in ((), (0, 5), (1, 2, 3), (0, 1, 2, 3, 4, 5), (4,), ()):
                for model, optimizer in twins.sides:
                    optimizer.zero_grad(set_to_none)
                    for place, param in enumerate(model.parameters()):
                        param.requires_grad_(place not in frozen)
                twins.train(2)


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
            twins = Twins(cls, model=partial(TiedEmbeddingNet, sparse=sparse), zero_only=zero_only, **options)
            for step in range(3):
                for model, optimizer in twins.sides:
                    optimizer.zero_grad()
                    torch.autograd.backward(model(step))
                    optimizer.step()
                twins.check()
            assert len(list(twins.model.parameters())) == (5 if sparse else 4)


@ranks(2, 3, 4)
def test_owner_decides_whether_a_param_has_a_gradient(ctx: RankContext) -> None:
    for zero_only in BUCKET_VIEW_OPTIONS:
        twins = Twins(optim.SGD, zero_only=zero_only, **MOMENTUM_OPTIONS)
        mine = {id(param) for param in twins.zero.optim.param_groups[0]["params"]}
        for step in range(4):
            for model, optimizer in twins.sides:
                set_grads(model.parameters(), step)
                for place, param in enumerate(model.parameters()):
                    wanted = (place + step) % 2
                    keeps = wanted if model is twins.plain_model or id(param) in mine else (place + ctx.rank) % 3
                    if not keeps:
                        param.grad = None
                optimizer.step()
            twins.check()


# ---- the step itself


class GroupEditingSGD(Optimizer):
    """Gradient descent that adds to its groups, changes and removes in them, and takes no closure."""

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
    """Puts new memory into its parameters."""

    def update_group(self, group: Options) -> None:
        for param in group["params"]:
            if param.grad is not None:
                param.data = param.data - group["lr"] * param.grad


@ranks(1, 2, 3, 4)
def test_group_changes_by_inner_optimizer_are_synced(ctx: RankContext) -> None:
    def handed(model: nn.Module) -> list[Options]:
        return [group | {"once": True} for group in two_groups(model)]

    for zero_only in BUCKET_VIEW_OPTIONS:
        twins = Twins(GroupEditingSGD, handed=handed, zero_only=zero_only)
        twins.check()
        twins.train(3)
        assert [group["count"] for group in twins.zero.param_groups] == [3, 3]


@ranks(1, 2, 3, 4)
def test_optimizer_that_replaces_param_data(ctx: RankContext) -> None:
    for zero_only in BUCKET_VIEW_OPTIONS:
        Twins(DataReplacingSGD, zero_only=zero_only).train(3)


@ranks(1, 2, 3, 4)
def test_group_changes_by_user_are_synced(ctx: RankContext) -> None:
    twins = Twins(optim.SGD, handed=two_groups, lr=0.1)
    twins.train(1)
    for _, optimizer in twins.sides:
        optimizer.param_groups[0]["lr"] = 0.5
        optimizer.param_groups[1] |= {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True, "note": "mine"}
    twins.train(2)
    assert twins.zero.optim.param_groups[1]["note"] == "mine"
    for _, optimizer in twins.sides:
        del optimizer.param_groups[1]["note"]
    twins.train(1)
    assert "note" not in twins.zero.optim.param_groups[1]


class RejectsEmptyGroups(optim.SGD):
    """Refuses empty groups wherever it meets them."""

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
        for handed in (lambda model: list(model.parameters())[:1], two_groups):
            twins = Twins(RejectsEmptyGroups, handed=handed, zero_only=zero_only, lr=0.1)
            twins.train(2)
            added = [nn.Linear(2, 2, bias=False) for _ in twins.sides]
            for layer, (_, optimizer) in zip(added, twins.sides, strict=True):
                nn.init.ones_(layer.weight)
                optimizer.add_param_group({"params": layer.weight})
                set_grads(layer.parameters(), 0)
            twins.train(2)
            assert_same(added[0].state_dict(), added[1].state_dict())
            assert all(param.numel() for group in twins.zero.optim.param_groups for param in group["params"])
            assert all(param.numel() for param in twins.zero.state)


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
        for handed in (nn.Module.parameters, two_groups):
            twins = Twins(factory, handed=handed, lr=0.1)
            assert type(twins.zero.optim) is type(twins.plain)
            twins.train(2)


@ranks(1, 2, 3, 4)
def test_closures_match_plain_optimizer(ctx: RankContext) -> None:
    for zero_only in BUCKET_VIEW_OPTIONS:
        twins = Twins(optim.AdamW, zero_only=zero_only)
        for step in range(3):
            losses = []
            for model, optimizer in twins.sides:

                def closure(model: nn.Module = model, optimizer: Optimizer = optimizer, step: int = step) -> Tensor:
                    optimizer.zero_grad()
                    loss = compute_loss(model, step)
                    torch.autograd.backward(loss)
                    return loss.detach()

                losses.append(optimizer.step(closure) if step else optimizer.step(closure=closure))
            twins.check()
            assert_same(losses[0], losses[1])


class StepWithArgument(GroupEditingSGD):
    """A step with an argument and a result of its own."""

    @torch.no_grad()
    def step(self, *, times: int = 1) -> str:  # type: ignore[override]
        for group in self.param_groups * times:
            self.update_group(group)
        return f"{times} times"


@ranks(1, 2, 3, 4)
def test_step_arguments_and_result_are_forwarded(ctx: RankContext) -> None:
    twins = Twins(StepWithArgument, lr=0.1)
    for model, optimizer in twins.sides:
        set_grads(model.parameters(), 0)
        assert optimizer.step(times=3) == "3 times"
    twins.check()


# ---- how parameters are given


@ranks(1, 3)
def test_inner_optimizer_gets_params_in_the_users_form(ctx: RankContext) -> None:
    for handed, kind in ((nn.Module.parameters, nn.Parameter), (nn.Module.named_parameters, tuple), (two_groups, dict)):
        given: list[Any] = []

        def factory(params: list[Any], given: list[Any] = given) -> Optimizer:
            given.extend(params)
            return optim.SGD(params, lr=0.1)

        ZeroRedundancyOptimizer(handed(small_model()), factory)
        assert {type(entry) for entry in given} == {kind}


def make_groups(params: Iterable[Tensor], lr: float) -> Optimizer:
    return optim.SGD([{"params": [param]} for param in params], lr)


@ranks(1, 3)
def test_factory_that_splits_groups_is_rejected(ctx: RankContext) -> None:
    with pytest.raises(ConfigError, match=r"make_groups made \d parameter groups of the 1 it was given"):
        ZeroRedundancyOptimizer([torch.ones(1, requires_grad=True) for _ in range(6)], make_groups, lr=0.1)


def named_groups(model: nn.Module) -> list[Options]:
    *others, last = model.named_parameters()
    return [{"params": iter(others), "lr": 0.3}, {"params": [last]}]


@ranks(1, 2, 3, 4)
def test_named_parameters(ctx: RankContext) -> None:
    for handed in (nn.Module.named_parameters, named_groups):
        twins = Twins(optim.AdamW, handed=handed)
        twins.train(2)
        names = {id(param): name for name, param in twins.model.named_parameters()}
        for group in twins.zero.optim.param_groups:
            assert group["param_names"] == [names[id(param)] for param in group["params"]]


@ranks(1, 2, 3, 4)
def test_groups_with_generator_params(ctx: RankContext) -> None:
    twins = Twins(optim.SGD, handed=lambda model: ({"params": part.parameters()} for part in model.children()), lr=0.1)
    assert [len(group["params"]) for group in twins.zero.param_groups] == [2, 2, 2]
    before = [param.detach().clone() for param in twins.model.parameters()]
    twins.train(2)
    assert all(not torch.equal(a, b) for a, b in zip(before, twins.model.parameters(), strict=True))


def make_growing_model() -> nn.Sequential:
    return nn.Sequential(small_model(), small_model(1, width=3))


def first_part_params(model: nn.Module) -> Any:
    return next(model.children()).parameters()


@ranks(1, 2, 3, 4)
def test_add_param_group_during_training(ctx: RankContext) -> None:
    for zero_only in BUCKET_VIEW_OPTIONS:
        for options in ({}, {"lr": 0.3, "weight_decay": 0.5}):
            twins = Twins(optim.AdamW, model=make_growing_model, handed=first_part_params, zero_only=zero_only)
            early = [lr_scheduler.ExponentialLR(optimizer, 0.5) for _, optimizer in twins.sides]
            twins.train(2)
            layout, loads = twins.zero.layout, twins.zero.layout.numel_per_rank(trainable=True)
            for model, optimizer in twins.sides:
                optimizer.add_param_group({"params": model[1].parameters(), **options})
            twins.check()
            assert [twins.zero.layout.owner_of(i) for i in range(6)] == [layout.owner_of(i) for i in range(6)]
            added = list(twins.model.parameters())[6:]
            for size in sorted((param.numel() for param in added), reverse=True):
                loads[loads.index(min(loads))] += size
            assert twins.zero.layout.numel_per_rank(trainable=True) == loads
            late = [lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=9) for _, optimizer in twins.sides]
            for _ in range(2):
                twins.train(1)
                for scheduler in (*early, *late):
                    scheduler.step()
            twins.train(1)


# ---- hooks


@ranks(1, 2, 3, 4)
def test_step_hooks_fire_once(ctx: RankContext) -> None:
    calls: list[str] = []

    def note(what: str) -> Callable[..., None]:
        return lambda optimizer, *_: calls.append(f"{what} {type(optimizer).__name__}")

    zero = Twins(optim.SGD, lr=0.1).zero
    register_optimizer_step_pre_hook(note("global pre"))
    register_optimizer_step_post_hook(note("global post"))
    for optimizer in (zero, zero.optim):
        optimizer.register_step_pre_hook(note("own pre"))
        optimizer.register_step_post_hook(note("own post"))
    for _ in range(2):
        zero.step()
    outer = "ZeroRedundancyOptimizer"
    before = [f"global pre {outer}", f"own pre {outer}", "own pre SGD"]
    after = ["own post SGD", f"own post {outer}", f"global post {outer}"]
    assert calls == 2 * [*before, *after]


@ranks(1, 2, 3, 4)
def test_step_pre_hook_can_change_arguments(ctx: RankContext) -> None:
    twins = Twins(StepWithArgument, lr=0.1)
    for model, optimizer in twins.sides:
        set_grads(model.parameters(), 0)
        optimizer.register_step_pre_hook(lambda _, args, _kwargs: (args, {"times": 2}))
        assert optimizer.step() == "2 times"
    twins.check()
    set_grads(twins.model.parameters(), 1)
    twins.zero.optim.register_step_pre_hook(lambda _, args, _kwargs: (args, {"times": 5}))
    assert twins.zero.step() == "5 times"
