"""The drop-in equals the unsharded optimizer bit by bit: every class of `torch.optim`. Others are rejected."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tests.support import RankContext, ranks
from tests.support.optimizers import Assigning
from tests.support.oracles import ParityRun, assert_same, set_grads, small_model
from zeroshard import ConfigError, ZeroRedundancyOptimizer

Options = dict[str, Any]

CASES: dict[type[Optimizer], list[Options]] = {
    optim.SGD: [
        {"lr": 0.1},
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01},
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True, "foreach": False},
        {"lr": 0.1, "momentum": 0.9, "foreach": True},
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "fused": True},
        {"lr": torch.tensor(0.1), "momentum": 0.9},
    ],
    optim.Adam: [
        {},
        {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1, "amsgrad": True, "foreach": False},
        {"maximize": True, "amsgrad": True, "foreach": True},
        {"decoupled_weight_decay": True, "weight_decay": 0.1, "fused": True},
        {"lr": torch.tensor(0.1), "amsgrad": True, "fused": True},
        {"lr": torch.tensor(0.1)},
    ],
    optim.AdamW: [
        {},
        {"weight_decay": 0.1, "amsgrad": True, "foreach": False},
        {"maximize": True, "foreach": True},
        {"amsgrad": True, "maximize": True, "fused": True},
        {"lr": torch.tensor(0.1)},
    ],
    optim.Adagrad: [
        {},
        {"lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.1, "foreach": False},
        {"maximize": True, "foreach": True},
        {"fused": True},
        {"lr": torch.tensor(0.1)},
    ],
    optim.Adadelta: [
        {},
        {"weight_decay": 0.1, "maximize": True, "foreach": False},
        {"foreach": True},
        {"lr": torch.tensor(0.1)},
    ],
    optim.Adamax: [
        {},
        {"weight_decay": 0.1, "maximize": True, "foreach": False},
        {"foreach": True},
        {"lr": torch.tensor(0.1)},
    ],
    optim.NAdam: [
        {},
        {"weight_decay": 0.1, "decoupled_weight_decay": True, "maximize": True, "foreach": False},
        {"momentum_decay": 0.1, "foreach": True},
        {"lr": torch.tensor(0.1)},
    ],
    optim.RAdam: [
        {},
        {"weight_decay": 0.1, "decoupled_weight_decay": True, "maximize": True, "foreach": False},
        {"betas": (0.6, 0.7), "foreach": True},
        {"lr": torch.tensor(0.1)},
    ],
    optim.RMSprop: [
        {},
        {"momentum": 0.9, "centered": True, "weight_decay": 0.1, "maximize": True, "foreach": False},
        {"momentum": 0.9, "centered": True, "foreach": True},
        {"lr": torch.tensor(0.1)},
    ],
    optim.Rprop: [
        {},
        {"etas": (0.4, 1.5), "step_sizes": (1e-3, 1.0), "maximize": True, "foreach": False},
        {"foreach": True},
        {"lr": torch.tensor(0.1)},
    ],
    optim.ASGD: [
        {},
        {"t0": 1.0, "lambd": 0.1, "weight_decay": 0.1, "maximize": True, "foreach": False},
        {"t0": 1.0, "foreach": True},
        {"lr": torch.tensor(0.1)},
    ],
    optim.Adafactor: [
        {},
        {"weight_decay": 0.1, "d": 2.0, "eps": (1e-8, 1e-2), "maximize": True, "foreach": False},
        {"foreach": True},
        {"lr": torch.tensor(0.1)},
    ],
    optim.Muon: [
        {},
        {"momentum": 0.5, "nesterov": False, "weight_decay": 0.0, "ns_steps": 2},
        {"adjust_lr_fn": "match_rms_adamw"},
    ],
    optim.SparseAdam: [{}, {"betas": (0.8, 0.9), "maximize": True}, {"lr": torch.tensor(0.1)}],
    Assigning: [{"momentum": 0.9}],
}

SHAPES: list[tuple[int, ...]] = [(4, 3), (7,), (), (2, 3, 2), (5, 5)]
MATRICES: list[tuple[int, ...]] = [(4, 3), (2, 6), (1, 7), (5, 5)]
SHAPES_BY_CLASS: dict[type[Optimizer], list[tuple[int, ...]]] = {optim.Muon: MATRICES, optim.SparseAdam: MATRICES}


def make_params(shapes: list[tuple[int, ...]] = SHAPES) -> nn.ParameterList:
    torch.manual_seed(0)
    return nn.ParameterList([torch.randn(shape) for shape in shapes])


def make_groups(module: nn.Module) -> list[Options]:
    """Three groups, two of them too small for every rank to own something in them."""
    first, second, *others = module.parameters()
    return [{"params": [first], "lr": 0.03}, {"params": others}, {"params": second}]


def set_sparse_grads(params: Iterable[Tensor], step: int) -> None:
    """Each step leaves out another row."""
    params = list(params)
    set_grads(params, step)
    for param in params:
        assert param.grad is not None
        param.grad[step % param.shape[0]] = 0
        param.grad = param.grad.to_sparse(1)


def test_all_torch_optimizers_are_covered() -> None:
    exported = {getattr(optim, name) for name in optim.__all__}
    classes = {cls for cls in exported if isinstance(cls, type) and issubclass(cls, Optimizer)}
    assert classes - set(CASES) == {Optimizer, optim.LBFGS}


@pytest.mark.parametrize("cls", CASES, ids=lambda cls: cls.__name__)
@ranks(1, 2, 3, 4)
def test_matches_unsharded_optimizer(ctx: RankContext, cls: type[Optimizer]) -> None:
    grads = set_sparse_grads if cls is optim.SparseAdam else set_grads
    model = partial(make_params, SHAPES_BY_CLASS.get(cls, SHAPES))
    for options in CASES[cls]:
        for bucket_view, get_params in ((False, nn.Module.parameters), (True, make_groups)):
            zero_only = {"parameters_as_bucket_view": bucket_view}
            ParityRun(cls, model=model, get_params=get_params, zero_only=zero_only, **options).train(3, grads)


@ranks(1, 2, 3, 4)
def test_matches_unsharded_optimizer_with_swapped_settings(ctx: RankContext) -> None:
    for cls in (optim.SGD, optim.AdamW, optim.Rprop, optim.Adafactor):
        for bucket_view, get_params in ((True, nn.Module.parameters), (False, make_groups)):
            zero_only = {"parameters_as_bucket_view": bucket_view}
            ParityRun(cls, model=make_params, get_params=get_params, zero_only=zero_only).train(3)


@ranks(1, 2, 3, 4)
def test_matches_torch_zero_redundancy_optimizer(ctx: RankContext) -> None:
    for bucket_view in (False, True):
        models = make_params(), make_params()
        ours = ZeroRedundancyOptimizer(make_groups(models[0]), optim.AdamW, None, bucket_view, lr=0.1)
        theirs = TorchZero(make_groups(models[1]), optim.AdamW, None, bucket_view, lr=0.1)
        for step in range(3):
            for model, optimizer in zip(models, (ours, theirs), strict=True):
                set_grads(model.parameters(), step)
                optimizer.step()  # type: ignore[attr-defined]
            assert_same(models[0].state_dict(), models[1].state_dict())
        assert_same(_state_of_owned_params(models[0], ours.optim), _state_of_owned_params(models[1], theirs.optim))


def _state_of_owned_params(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """State of the parameters that this rank updates, by parameter name."""
    return {name: optimizer.state[param] for name, param in model.named_parameters() if param in optimizer.state}


# ---- Optimizers that cannot be sharded


class PlainSGD(Optimizer):
    """Gradient descent as users write it themselves."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            self.update_group(group, [param for param in group["params"] if param.grad is not None])

    def update_group(self, group: Options, params: list[Tensor]) -> None:
        for param in params:
            param.sub_(self.compute_direction(param) * group["lr"])

    def compute_direction(self, param: Tensor) -> Tensor:
        assert param.grad is not None
        return param.grad


class Clipping(PlainSGD):
    """Couples all parameters through the norm of their gradients."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        nn.utils.clip_grad_norm_([param for group in self.param_groups for param in group["params"]], 0.5)
        super().step()


class SelfTuning(PlainSGD):
    """Couples the parameters of a group through a learning rate that depends on their gradients."""

    def update_group(self, group: Options, params: list[Tensor]) -> None:
        super().update_group(group, params)
        group["lr"] *= 0.9 + 0.1 * sum(float(self.compute_direction(param).abs().sum()) for param in params)


class NoisySGD(PlainSGD):
    def compute_direction(self, param: Tensor) -> Tensor:
        return super().compute_direction(param) + torch.randn_like(param) * random.random()


class RequiresStepArgument(PlainSGD):
    """Requires a `step` argument, so the probe cannot step it."""

    def step(self, *, scale: float) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["lr"] = scale
        super().step()


class StepsThroughBaseClass(optim.SGD):
    """Overrides `step` only to call its base class."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@ranks(1, 2, 3, 4)
def test_rejects_optimizers_that_cannot_be_sharded(ctx: RankContext) -> None:
    rejected_cases: list[tuple[Callable[..., Optimizer], str, Options]] = [
        (optim.LBFGS, "LBFGS cannot be sharded: its update of one parameter depends on other parameters", {}),
        (Clipping, "Clipping cannot be sharded: its update of one", {}),
        (SelfTuning, "SelfTuning cannot be sharded: its update of one", {}),
        (optim.AdamW, "differentiable=True cannot be sharded", {"differentiable": True}),
        (partial(optim.SGD, differentiable=True), "differentiable=True cannot be sharded", {"lr": 0.1}),
    ]
    for factory, reason, options in rejected_cases:
        model = make_params()
        before = {name: (value.clone(), value.data_ptr()) for name, value in model.state_dict().items()}
        with pytest.raises(ConfigError, match=reason):
            ZeroRedundancyOptimizer(model.parameters(), factory, parameters_as_bucket_view=True, **options)
        assert_same({name: (value, value.data_ptr()) for name, value in model.state_dict().items()}, before)
    differentiable = {"params": list(small_model().parameters()), "differentiable": True}
    with pytest.raises(ConfigError, match="differentiable=True cannot be sharded"):
        ZeroRedundancyOptimizer([{"params": make_params().parameters()}, differentiable], optim.SGD, lr=0.1)
    zero = ZeroRedundancyOptimizer(make_params().parameters(), optim.SGD, lr=0.1)
    with pytest.raises(ConfigError, match="differentiable=True cannot be sharded"):
        zero.add_param_group(differentiable)
    assert len(zero.param_groups) == len(zero.optim.param_groups) == 1


@ranks(1, 2, 3, 4)
def test_random_optimizer_gives_equal_params_on_all_ranks(ctx: RankContext) -> None:
    model = make_params()
    zero = ZeroRedundancyOptimizer(model.parameters(), NoisySGD)
    set_grads(model.parameters(), 0)
    torch.manual_seed(ctx.rank)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    zero.step()
    after = ctx.gather(dict(model.state_dict()))
    assert_same(after, [after[0]] * ctx.world_size)
    assert all(not torch.equal(after[0][name], before[name]) for name in before)


@ranks(1, 2, 3, 4)
def test_accepts_optimizer_that_the_probe_cannot_step(ctx: RankContext) -> None:
    for bucket_view in (False, True):
        parity = ParityRun(RequiresStepArgument, zero_only={"parameters_as_bucket_view": bucket_view})
        for step in range(2):
            for model, optimizer in parity.sides:
                set_grads(model.parameters(), step)
                optimizer.step(scale=0.3 + step)
            parity.check()


@ranks(2)
def test_probe_has_no_side_effects(ctx: RankContext) -> None:
    calls: list[str] = []
    register_optimizer_step_pre_hook(lambda *_: calls.append("before"))
    register_optimizer_step_post_hook(lambda *_: calls.append("after"))
    warnings.simplefilter("error")
    lr, params = torch.tensor(0.1), list(make_params(MATRICES))
    optim.SGD(params)  # from here on SGD.step is torch's patched version, which runs the global hooks
    filters, torch_rng, python_rng = list(warnings.filters), torch.get_rng_state(), random.getstate()
    for factory in (NoisySGD, partial(optim.Adam, lr=lr, amsgrad=True), optim.SparseAdam, StepsThroughBaseClass):
        ZeroRedundancyOptimizer(params, factory)
    assert not calls
    assert list(warnings.filters) == filters
    assert torch.equal(torch.get_rng_state(), torch_rng)
    assert random.getstate() == python_rng
    assert lr == torch.tensor(0.1)
