"""Parameters of all dtypes, sizes and strides."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from tests.support import RankContext, ranks
from tests.support.oracles import ParityRun, assert_same, set_grads
from zeroshard import ConfigError, ZeroConfig, ZeroRedundancyOptimizer

MOMENTUM: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
MIXED_DTYPES = ZeroConfig(allow_mixed_dtypes=True)


def bucket_view_options(**options: Any) -> Iterable[dict[str, Any]]:
    """Return options with and without bucket view."""
    return ({"parameters_as_bucket_view": bucket_view, **options} for bucket_view in (False, True))


def random_params(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> nn.ParameterList:
    torch.manual_seed(0)
    return nn.ParameterList([torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes])


OPTIMIZERS: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (optim.SGD, MOMENTUM),
    (optim.Adam, {"eps": 1e-3}),
    (optim.AdamW, {"eps": 1e-3, "amsgrad": True, "foreach": True}),
]


@ranks(1, 2, 3, 4)
def test_all_dtypes_match_plain_optimizer(ctx: RankContext) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128):
        model = partial(random_params, (3, 4), (5,), (), (2, 2, 2), (0,), dtype=dtype)
        for zero_only in bucket_view_options():
            for cls, options in OPTIMIZERS:
                ParityRun(cls, model=model, zero_only=zero_only, **options).train(2)
            if not dtype.is_complex:
                ParityRun(optim.AdamW, model=model, zero_only=zero_only, eps=1e-3, fused=True).train(2)


def make_mixed_dtype_params() -> nn.ParameterList:
    dtypes = (torch.float32, torch.bfloat16, torch.complex64, torch.float32, torch.float64, torch.bfloat16)
    shapes = ((3, 3), (7,), (2, 2), (5,), (4,), ())
    return nn.ParameterList([random_params(shape, dtype=dtype)[0] for shape, dtype in zip(shapes, dtypes, strict=True)])


def one_group_per_param(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": [param]} for param in model.parameters()]


@ranks(1, 2, 3, 4)
def test_mixed_dtypes_require_opt_in(ctx: RankContext) -> None:
    for get_params in (nn.Module.parameters, one_group_per_param):
        with pytest.raises(
            ConfigError, match=r"parameter 0 is torch.float32, parameter 1 is torch.bfloat16.*allow_mixed_dtypes"
        ):
            ZeroRedundancyOptimizer(get_params(make_mixed_dtype_params()), optim.SGD, lr=0.1)
        for zero_only in bucket_view_options(config=MIXED_DTYPES):
            for cls, options in OPTIMIZERS:
                ParityRun(
                    cls, model=make_mixed_dtype_params, get_params=get_params, zero_only=zero_only, **options
                ).train(2)


def first_param(model: nn.Module) -> list[nn.Parameter]:
    return list(model.parameters())[:1]


@ranks(1, 2, 3)
def test_added_group_with_another_dtype(ctx: RankContext) -> None:
    for zero_only in bucket_view_options():
        parity = ParityRun(
            optim.SGD, model=make_mixed_dtype_params, get_params=first_param, zero_only=zero_only, **MOMENTUM
        )
        parity.train(1)
        _, other, *_ = parity.model.parameters()
        with pytest.raises(ConfigError, match=r"parameter 1 is torch.bfloat16"):
            parity.zero.add_param_group({"params": other})
        assert other.dtype == torch.bfloat16
        parity.train(1)
    for zero_only in bucket_view_options(config=MIXED_DTYPES):
        parity = ParityRun(
            optim.SGD, model=make_mixed_dtype_params, get_params=first_param, zero_only=zero_only, **MOMENTUM
        )
        parity.train(1)
        for model, optimizer in parity.sides:
            optimizer.add_param_group({"params": list(model.parameters())[1:]})
        parity.train(2)


@ranks(1, 2, 3, 4)
def test_empty_and_scalar_params(ctx: RankContext) -> None:
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
        for zero_only in bucket_view_options():
            ParityRun(optim.SGD, model=model, zero_only=zero_only, **MOMENTUM).train(2)
            ParityRun(optim.AdamW, model=model, get_params=one_group_per_param, zero_only=zero_only).train(2)


@ranks(2, 3, 4)
def test_large_params_are_broadcast_separately(ctx: RankContext) -> None:
    """Parameters of at least 1 MiB are sent in separate messages."""
    model = partial(random_params, (520, 510), (7,), (512, 512), (5,))
    for zero_only in bucket_view_options():
        ParityRun(optim.SGD, model=model, zero_only=zero_only, **MOMENTUM).train(2)


def make_strided_params() -> nn.ParameterList:
    """Make parameters with all kinds of strides, small and large."""
    torch.manual_seed(0)
    images = torch.randn(2, 3, 4, 5)
    layouts: list[Tensor] = [
        torch.randn(3, 4),
        images.to(memory_format=torch.channels_last),
        torch.randn(4, 6).t(),
        torch.randn(4, 6)[:, ::2],
        torch.randn(4, 6)[:, :5].t(),
        torch.randn(9)[::3],
        torch.randn(3, 1, 2).expand(3, 1, 2).transpose(0, 2),
        torch.randn(2, 3, 4, 5).permute(3, 1, 0, 2)[1:, :, :, ::3],
        torch.randn(520, 510).t(),
        torch.randn(520, 1020)[:, ::2],
    ]
    return nn.ParameterList([nn.Parameter(layout) for layout in layouts])


@ranks(1, 2, 3, 4)
def test_strides_are_preserved(ctx: RankContext) -> None:
    strides = [param.stride() for param in make_strided_params()]
    assert strides[1:4] == [(60, 1, 15, 3), (1, 6), (6, 2)]
    for zero_only in bucket_view_options():
        for cls, options in ((optim.SGD, MOMENTUM), (optim.AdamW, {"foreach": True})):
            parity = ParityRun(cls, model=make_strided_params, zero_only=zero_only, **options)
            assert [param.stride() for param in parity.model.parameters()] == strides
            parity.train(2)
            assert [param.stride() for param in parity.model.parameters()] == strides


@ranks(1, 2, 3, 4)
def test_backward_into_channels_last_params(ctx: RankContext) -> None:
    """Real backward passes through a channels_last convolution."""

    def make_conv_layers() -> nn.Sequential:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.Conv2d(4, 2, 3, bias=False))
        for param in layers.parameters():
            param.data = param.data.contiguous(memory_format=torch.channels_last)
        return layers

    for zero_only in bucket_view_options():
        parity = ParityRun(optim.SGD, model=make_conv_layers, zero_only=zero_only, **MOMENTUM)
        for step in range(2):
            images = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(step))
            grads = []
            for model, optimizer in parity.sides:
                optimizer.zero_grad()
                torch.autograd.backward(model(images.contiguous(memory_format=torch.channels_last)).square().mean())
                optimizer.step()
                grads.append([param.grad for param in model.parameters()])
            parity.check()
            assert_same(grads[0], grads[1])


def make_interleaved_params() -> nn.ParameterList:
    """Make two parameters from the even and the odd columns of one matrix."""
    torch.manual_seed(0)
    matrix = torch.randn(4, 6)
    return nn.ParameterList([nn.Parameter(matrix[:, ::2]), nn.Parameter(matrix[:, 1::2])])


@ranks(1, 2, 3)
def test_params_interleaved_in_memory(ctx: RankContext) -> None:
    for zero_only in bucket_view_options():
        ParityRun(optim.SGD, model=make_interleaved_params, zero_only=zero_only, **MOMENTUM).train(2)


@ranks(1, 2)
def test_params_that_share_memory_are_rejected(ctx: RankContext) -> None:
    shared = torch.randn(3, 4)
    for alias in (shared, shared[1], shared.t()):
        params = [nn.Parameter(shared), nn.Parameter(torch.randn(2)), nn.Parameter(alias)]
        with pytest.raises(ConfigError, match=r"parameter \d and parameter \d share memory"):
            ZeroRedundancyOptimizer(params, optim.SGD, lr=0.1)
        zero = ZeroRedundancyOptimizer(params[:2], optim.SGD, lr=0.1)
        with pytest.raises(ConfigError, match=r"parameter \d and parameter \d share memory"):
            zero.add_param_group({"params": params[2]})
        assert len(zero.param_groups) == 1


def make_sparse_param() -> Tensor:
    return torch.eye(3).to_sparse().requires_grad_()


def make_expanded_param() -> Tensor:
    return nn.Parameter(torch.randn(3, 1).expand(3, 4))


@ranks(1, 2)
def test_sparse_and_expanded_params_are_rejected(ctx: RankContext) -> None:
    cases: list[tuple[Callable[[], Tensor], str]] = [
        (make_sparse_param, "parameter 1 has layout torch.sparse_coo"),
        (make_expanded_param, "parameter 1 has elements that share memory"),
    ]
    for make, reason in cases:
        with pytest.raises(ConfigError, match=reason):
            ZeroRedundancyOptimizer([torch.ones(2, requires_grad=True), make()], optim.SGD, lr=0.1)
        zero = ZeroRedundancyOptimizer([torch.ones(2, requires_grad=True)], optim.SGD, lr=0.1)
        with pytest.raises(ConfigError, match=reason):
            zero.add_param_group({"params": [make()]})
        set_grads(zero.param_groups[0]["params"], 0)
        zero.step()


@ranks(2)
def test_params_without_values_are_rejected(ctx: RankContext) -> None:
    model = nn.Linear(2, 2, device="meta")
    with pytest.raises(ConfigError, match=r"parameter 0 is on the meta device.*to_empty"):
        ZeroRedundancyOptimizer(model.parameters(), optim.SGD, lr=0.1)
