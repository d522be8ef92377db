"""Flat shards equal the unsharded optimizer bit for bit: every elementwise class, every kind of parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import Optimizer, lr_scheduler

from tests.distributed.test_parity import CASES, NoisySGD
from tests.support import RankContext, ranks
from tests.support.oracles import ParityRun, assert_same, set_grads
from zeroshard import (
    BindingError,
    ConfigError,
    FlatShards,
    WholeParams,
    ZeroConfig,
    ZeroRedundancyOptimizer,
)
from zeroshard.build import EngineBuilder
from zeroshard.comm.collectives import Comm
from zeroshard.comm.process_group import Group
from zeroshard.engine.inner import OptimizerFactory
from zeroshard.engine.optimizer_shard import OptimizerSpec
from zeroshard.profiling import StepProfiler

Options = dict[str, Any]

NON_ELEMENTWISE_CLASSES = {optim.Adafactor, optim.Muon, optim.SparseAdam}
ELEMENTWISE_CASES = {cls: options for cls, options in CASES.items() if cls not in NON_ELEMENTWISE_CLASSES}
SHAPES: list[tuple[int, ...]] = [(7, 5), (33,), (), (2, 3, 2), (1, 64), (19,)]


def flat_options(bucket_bytes: int = 200, **options: Any) -> Options:
    """Return options for flat shards, by default with several buckets, most of which split parameters."""
    return {"config": ZeroConfig(partition=FlatShards(bucket_bytes), **options)}


def random_params(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> nn.ParameterList:
    torch.manual_seed(0)
    return nn.ParameterList([torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes])


def make_param_groups(module: nn.Module) -> list[Options]:
    """Four groups, one of them empty, one with a parameter too small for every rank."""
    first, second, third, *others = module.parameters()
    return [
        {"params": [first, others[0]], "lr": 0.03},
        {"params": []},
        {"params": [third]},
        {"params": [second, *others[1:]], "lr": 0.2},
    ]


def rounds_differently(cls: type[Optimizer], options: Options, dtype: torch.dtype = torch.float32) -> bool:
    """Whether torch's kernel rounds the last elements of a tensor, which do not fill a vector register, once more than
    those before them. In a flat param those are other elements than in the parameters that it consists of."""
    if options.get("fused"):
        return cls is optim.SGD or bool(options.get("amsgrad"))
    return cls is optim.SGD and dtype.itemsize == 2


@pytest.mark.parametrize("cls", ELEMENTWISE_CASES, ids=lambda cls: cls.__name__)
@ranks(1, 2, 3, 4)
def test_equals_the_unsharded_optimizer(ctx: RankContext, cls: type[Optimizer]) -> None:
    settings: list[tuple[int, Callable[[nn.Module], Any]]] = [
        (200, nn.Module.parameters),
        (1 << 20, make_param_groups),
        (200, make_param_groups),
    ]
    for options, (bucket_bytes, get_params) in zip(ELEMENTWISE_CASES[cls], cycle(settings)):
        parity = ParityRun(
            cls,
            model=partial(random_params, *SHAPES),
            get_params=get_params,
            zero_only=flat_options(bucket_bytes),
            **options,
        )
        train(parity, 3, allow_rounding=rounds_differently(cls, options))


def train(parity: ParityRun, steps: int, *, allow_rounding: bool) -> None:
    """Train both sides and compare bit for bit, or up to one rounding per step."""
    if not allow_rounding:
        parity.train(steps)
        return
    for step in range(steps):
        for model, optimizer in parity.sides:
            set_grads(model.parameters(), step)
            optimizer.step()
        for ours, theirs in zip(parity.model.parameters(), parity.plain_model.parameters(), strict=True):
            tolerance = 2 * (step + 1) * torch.finfo(ours.dtype).eps
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@ranks(1, 2, 3, 4)
def test_lr_schedulers(ctx: RankContext) -> None:
    factories: list[Callable[[Optimizer], Any]] = [
        lambda optimizer: lr_scheduler.StepLR(optimizer, 2, gamma=0.3),
        lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=10),
        lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1)),
    ]
    for make in factories:
        for lr in (0.1, torch.tensor(0.1)):
            parity = ParityRun(optim.AdamW, model=partial(random_params, *SHAPES), zero_only=flat_options(), lr=lr)
            schedules = [make(optimizer) for _, optimizer in parity.sides]
            for _ in range(4):
                parity.train(1)
                for schedule in schedules:
                    schedule.step()
                parity.check()


@ranks(1, 2, 3)
def test_edited_group_options_take_effect(ctx: RankContext) -> None:
    parity = ParityRun(
        optim.AdamW,
        model=partial(random_params, *SHAPES),
        get_params=make_param_groups,
        zero_only=flat_options(),
        lr=0.1,
    )
    parity.train(1)
    for _, optimizer in parity.sides:
        optimizer.param_groups[0].update(lr=0.7, weight_decay=0.3)
        optimizer.param_groups[3]["betas"] = (0.5, 0.6)
    parity.train(2)


@ranks(1, 2, 3, 4)
def test_closure(ctx: RankContext) -> None:
    parity = ParityRun(optim.AdamW, model=partial(random_params, *SHAPES), zero_only=flat_options(), lr=0.1)
    for step in range(3):
        losses = []
        for model, optimizer in parity.sides:

            def closure(model: nn.Module = model, step: int = step) -> Tensor:
                for param in model.parameters():
                    param.grad = None
                loss = torch.stack([param.sin().sum() * (step + 1) for param in model.parameters()]).sum()
                torch.autograd.backward(loss)
                return loss.detach()

            losses.append(optimizer.step(closure))
        assert_same(losses[0], losses[1])
        parity.check()


# ---- flat params


@ranks(1, 2, 3, 4)
def test_inner_optimizer_gets_one_flat_param_per_group(ctx: RankContext) -> None:
    shapes = [(5, 4), (3,)] * 50
    parity = ParityRun(optim.AdamW, model=partial(random_params, *shapes), zero_only=flat_options(1 << 20))
    parity.train(2)
    (flat_params,) = (group["params"] for group in parity.zero.optim.param_groups)
    assert [param.dim() for param in flat_params] == [1]
    assert sum(ctx.gather(flat_params[0].numel())) <= 50 * 23 + 16 * ctx.world_size

    def split_in_halves(model: nn.Module) -> list[Options]:
        params = list(model.parameters())
        return [{"params": params[::2], "weight_decay": 0.0}, {"params": params[1::2]}]

    grouped = ParityRun(
        optim.AdamW, model=partial(random_params, *shapes), get_params=split_in_halves, zero_only=flat_options(1 << 20)
    )
    grouped.train(2)
    counts = ctx.gather([len(group["params"]) for group in grouped.zero.optim.param_groups])
    assert all(count <= 1 for rank_counts in counts for count in rank_counts)
    assert [any(rank_counts[group] for rank_counts in counts) for group in range(2)] == [True, True]


@ranks(2, 3, 4)
def test_state_is_sharded_evenly(ctx: RankContext) -> None:
    shapes = [(700, 300), (300,), (1,), (64, 129)]
    parity = ParityRun(optim.Adam, model=partial(random_params, *shapes), zero_only=flat_options(1 << 20))
    set_grads(parity.model.parameters(), 0)
    parity.zero.step()
    total = sum(param.numel() for param in parity.model.parameters())
    for key in ("exp_avg", "exp_avg_sq"):
        local_numel = sum(state[key].numel() for state in parity.zero.optim.state.values())
        assert local_numel <= 1.001 * total / ctx.world_size


# ---- parameters of all kinds

SGD_OPTIONS: Options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
OPTIMIZERS: list[tuple[type[Optimizer], Options]] = [
    (optim.SGD, SGD_OPTIONS),
    (optim.Adam, {"eps": 1e-3}),
    (optim.AdamW, {"eps": 1e-3, "amsgrad": True, "foreach": True}),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64], ids=str)
@ranks(1, 2, 3, 4)
def test_dtypes(ctx: RankContext, dtype: torch.dtype) -> None:
    model = partial(random_params, (3, 14), (5,), (), (2, 2, 2), (0,), (37,), dtype=dtype)
    for cls, options in OPTIMIZERS:
        train(
            ParityRun(cls, model=model, zero_only=flat_options(), **options),
            3,
            allow_rounding=rounds_differently(cls, options, dtype),
        )
    if not dtype.is_complex:
        ParityRun(optim.AdamW, model=model, zero_only=flat_options(), eps=1e-3, fused=True).train(3)


def make_mixed_dtype_params() -> nn.ParameterList:
    dtypes = (torch.float32, torch.bfloat16, torch.complex64, torch.float32, torch.float64, torch.bfloat16)
    shapes = ((3, 3), (7,), (2, 2), (5,), (4,), ())
    return nn.ParameterList([random_params(shape, dtype=dtype)[0] for shape, dtype in zip(shapes, dtypes, strict=True)])


def one_group_per_param(model: nn.Module) -> list[Options]:
    return [{"params": [param]} for param in model.parameters()]


@ranks(1, 2, 3, 4)
def test_mixed_dtypes_must_be_allowed(ctx: RankContext) -> None:
    for get_params in (nn.Module.parameters, one_group_per_param):
        with pytest.raises(ConfigError, match=r"parameter 0 is torch.float32, parameter 1 is torch.bfloat16"):
            ZeroRedundancyOptimizer(get_params(make_mixed_dtype_params()), optim.SGD, lr=0.1, **flat_options())
        for cls, options in OPTIMIZERS:
            parity = ParityRun(
                cls,
                model=make_mixed_dtype_params,
                get_params=get_params,
                zero_only=flat_options(20, allow_mixed_dtypes=True),
                **options,
            )
            train(parity, 2, allow_rounding=rounds_differently(cls, options, torch.bfloat16))


@ranks(1, 2, 3, 4)
def test_empty_scalar_and_tiny_params(ctx: RankContext) -> None:
    """Some have fewer elements than there are ranks."""
    odd_shapes: list[list[tuple[int, ...]]] = [
        [(0,)],
        [(0,), (3, 0), (2,)],
        [()],
        [(), (), ()],
        [(1,)],
        [(3, 4)],
        [(0,), ()],
    ]
    for shapes in odd_shapes:
        model = partial(random_params, *shapes)
        ParityRun(optim.SGD, model=model, zero_only=flat_options(), **SGD_OPTIONS).train(2)
        ParityRun(optim.AdamW, model=model, get_params=one_group_per_param, zero_only=flat_options(8)).train(2)


def make_strided_params() -> nn.ParameterList:
    """Make parameters with all kinds of strides."""
    torch.manual_seed(0)
    layouts: list[Tensor] = [
        torch.randn(3, 4),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(4, 6).t(),
        torch.randn(4, 6)[:, ::2],
        torch.randn(4, 6)[:, :5].t(),
        torch.randn(9)[::3],
        torch.randn(3, 1, 2).expand(3, 1, 2).transpose(0, 2),
        torch.randn(2, 3, 4, 5).permute(3, 1, 0, 2)[1:, :, :, ::3],
        torch.randn(80, 102)[:, ::2],
    ]
    return nn.ParameterList([nn.Parameter(layout) for layout in layouts])


@ranks(1, 2, 3, 4)
def test_params_keep_their_strides(ctx: RankContext) -> None:
    strides = [param.stride() for param in make_strided_params()]
    for bucket_bytes in (200, 1 << 20):
        for cls, options in ((optim.SGD, SGD_OPTIONS), (optim.AdamW, {"foreach": True})):
            parity = ParityRun(cls, model=make_strided_params, zero_only=flat_options(bucket_bytes), **options)
            assert [param.stride() for param in parity.model.parameters()] == strides
            parity.train(2)
            assert [param.stride() for param in parity.model.parameters()] == strides


@ranks(2, 3)
def test_grads_may_have_other_strides_than_params(ctx: RankContext) -> None:
    def set_contiguous_grads(params: Iterable[Tensor], step: int) -> None:
        params = list(params)
        set_grads(params, step)
        for param in params:
            assert param.grad is not None
            param.grad = param.grad.clone(memory_format=torch.contiguous_format)

    ParityRun(optim.SGD, model=make_strided_params, zero_only=flat_options(), **SGD_OPTIONS).train(
        2, set_contiguous_grads
    )


@ranks(2, 3)
def test_sparse_grads_are_densified(ctx: RankContext) -> None:
    parity = ParityRun(optim.AdamW, model=partial(random_params, (6, 3), (4, 4)), zero_only=flat_options())
    for step in range(3):
        for model, optimizer in parity.sides:
            set_grads(model.parameters(), step)
            for param in model.parameters() if model is parity.model else ():
                assert param.grad is not None
                param.grad = param.grad.to_sparse()
            optimizer.step()
        parity.check()


# ---- parameter memory that the user replaces


def overwrite_in_place(model: nn.Module) -> None:
    vector_to_parameters(parameters_to_vector(model.parameters()) * 1.5, model.parameters())


def replace_data(model: nn.Module) -> None:
    for param in model.parameters():
        param.data = param.data * 2


def swap_data(model: nn.Module) -> None:
    """Swap the data of two parameters of equal shape."""
    first, second = (param for param in model.parameters() if param.shape == (19,))
    first.data, second.data = second.data, first.data


def load_shifted_state_dict(model: nn.Module) -> None:
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})


@ranks(1, 2, 3, 4)
def test_replaced_param_data_is_detected(ctx: RankContext) -> None:
    model = partial(random_params, *SHAPES, (19,))
    for change in (overwrite_in_place, replace_data, swap_data, load_shifted_state_dict):
        parity = ParityRun(optim.AdamW, model=model, zero_only=flat_options())
        parity.train(1)
        for module, _ in parity.sides:
            change(module)
        parity.train(2)


@ranks(1, 2, 3, timeout=30)
def test_changed_param_dtype_or_shape_is_rejected_on_all_ranks(ctx: RankContext) -> None:
    """Also on ranks that own no part of the changed parameter."""
    changes: list[Callable[[nn.Module], object]] = [nn.Module.double, nn.Module.bfloat16, transpose_first_param]
    for change in changes:
        parity = ParityRun(optim.AdamW, model=partial(random_params, (4, 3), (40,)), zero_only=flat_options(1 << 20))
        parity.train(1)
        for param in parity.model.parameters():
            param.grad = None
        change(parity.model)
        set_grads(parity.model.parameters(), 1)
        with pytest.raises(BindingError, match=r"parameter 0 changed: expected torch\.float32"):
            parity.zero.step()


def transpose_first_param(model: nn.Module) -> None:
    first = next(model.parameters())
    first.data = first.data.t()


# ---- optimizers whose parameters must not be split


class LambLike(optim.SGD):
    """Scales SGD's update of a layer by the norm of its weights."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.mul_(torch.linalg.vector_norm(param) / torch.linalg.vector_norm(param.grad))
        return super().step(closure)


NON_ELEMENTWISE_CASES: list[tuple[Callable[..., Optimizer], Options]] = [
    (optim.Muon, {}),
    (optim.Adafactor, {}),
    (optim.SparseAdam, {}),
    (optim.LBFGS, {}),
    (LambLike, {"lr": 0.1}),
    (NoisySGD, {}),
    (partial(optim.Adafactor, lr=0.1), {}),
]


@ranks(1, 2, 3)
def test_flat_shards_reject_non_elementwise_optimizers_by_name(ctx: RankContext) -> None:
    for factory, options in NON_ELEMENTWISE_CASES:
        model = random_params((4, 3), (5, 5))
        before = [(param.detach().clone(), param.data_ptr()) for param in model]
        name = OptimizerFactory(factory, [], True, {}).name
        with pytest.raises(ConfigError, match=rf"{name} cannot be sharded|FlatShards\(\) cannot be used with {name}:"):
            ZeroRedundancyOptimizer(model.parameters(), factory, **flat_options(), **options)
        assert_same([(param.detach(), param.data_ptr()) for param in model], before)


@ranks(1)
def test_default_partition_depends_on_the_optimizer(ctx: RankContext) -> None:
    comm = Comm(Group(None))
    for factory, options in NON_ELEMENTWISE_CASES[:3]:
        specs = [
            OptimizerSpec(
                "X", OptimizerFactory(factory, [{"params": list(random_params((4, 3), (5, 5)))}], True, options)
            )
        ]
        assert EngineBuilder(
            comm, StepProfiler(), ZeroConfig(), specs, reduces_grads=True
        ).partitioning.partitioners == [WholeParams()]
    specs = [
        OptimizerSpec("X", OptimizerFactory(optim.AdamW, [{"params": list(random_params((4, 3), (5, 5)))}], True, {}))
    ]
    assert EngineBuilder(comm, StepProfiler(), ZeroConfig(), specs, reduces_grads=True).partitioning.partitioners == [
        FlatShards(align=1, min_numel=1)
    ]
    assert EngineBuilder(comm, StepProfiler(), ZeroConfig(), specs).partitioning.partitioners == [WholeParams()]


@ranks(1, 2)
def test_incompatible_options_are_rejected(ctx: RankContext) -> None:
    with pytest.raises(ConfigError, match=r"overlap_with_ddp=True.*ddp_hook"):
        ZeroRedundancyOptimizer(random_params((3,)).parameters(), optim.SGD, overlap_with_ddp=True, **flat_options())
    with pytest.raises(ConfigError, match=r"zeroshard\.shard"):
        ZeroRedundancyOptimizer(random_params((3,)).parameters(), optim.SGD, **flat_options(overlap_param_gather=True))
    with pytest.raises(ConfigError, match=r"cannot use stage=2.* call zeroshard\.shard\(model, \.\.\.\)"):
        ZeroRedundancyOptimizer(random_params((3,)).parameters(), optim.SGD, **flat_options(stage=2))
    with pytest.raises(ConfigError, match=r"ZeroConfig\(broadcast_buffers=False\) is for zeroshard\.shard\(\)"):
        ZeroRedundancyOptimizer(random_params((3,)).parameters(), optim.SGD, config=ZeroConfig(broadcast_buffers=False))
    with pytest.raises(ConfigError, match=r"ZeroConfig\(reduce_dtype=\.\.\.\) needs partition=FlatShards\(\)"):
        ZeroRedundancyOptimizer(
            random_params((3,)).parameters(), optim.SGD, config=ZeroConfig(reduce_dtype=torch.bfloat16)
        )
    with pytest.raises(ConfigError, match=r"ZeroConfig\(master_dtype=\.\.\.\) needs partition=FlatShards\(\)"):
        ZeroRedundancyOptimizer(
            random_params((3,)).parameters(), optim.SGD, config=ZeroConfig(master_dtype=torch.float32)
        )
    with pytest.raises(ConfigError, match="differentiable=True cannot be sharded"):
        ZeroRedundancyOptimizer(random_params((3,)).parameters(), optim.SGD, differentiable=True, **flat_options())
