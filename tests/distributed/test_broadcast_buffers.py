"""Each forward pass uses the buffers of rank 0, as under DDP.

Buffers are broadcast after steps, and before passes with gradients as often as in DDP. Passes without gradients send
nothing, so a single rank can evaluate.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support import RankContext, ranks
from tests.support.monitoring import recorded
from tests.support.oracles import (
    ADAMW,
    TORCH,
    WIDTH,
    ZERO1,
    ZERO2,
    DdpParityRun,
    Side,
    all_equal,
    assert_equal_sums,
    assert_params_unchanged,
    batch,
    make_seeded,
    mlp,
    regression,
    some_configs,
)
from zeroshard import ConfigError, NonFiniteGrads, RankFailedError, RankMismatchError, ZeroConfig, shard


class NetWithBuffers(nn.Module):
    """BatchNorm, a buffer of another dtype, one that each pass replaces, and one that is None."""

    count: torch.Tensor
    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros((), dtype=torch.int32))
        self.register_buffer("mean", torch.randn(WIDTH, dtype=torch.float64))
        self.register_buffer("nothing", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.mean = 0.9 * self.mean + 0.1 * x.detach().double().mean(0)
        hidden = self.norm(self.linear(x)) + self.mean.float()
        result: torch.Tensor = self.last(hidden)
        return result


def assert_buffers_match_ddp(parity: DdpParityRun) -> None:
    """Compare buffers after a step with those of rank 0, which DDP broadcasts in the next forward pass."""
    for (name, ours), theirs in zip(parity.model.named_buffers(), parity.plain_model.buffers(), strict=True):
        expected = theirs.clone()
        dist.broadcast(expected, 0)
        assert_equal_sums(ours, expected, name)


def make_batchnorm_net() -> nn.Module:
    """Make a net whose buffers change only in training mode."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))


def record_buffers_in_forward(model: nn.Module) -> list[list[torch.Tensor]]:
    """Return a list that collects the norm's buffers at the start of each forward pass of `model.linear`."""
    buffers_by_pass: list[list[torch.Tensor]] = []
    model.linear.register_forward_pre_hook(  # type: ignore[union-attr]
        lambda *_: buffers_by_pass.append([buffer.clone() for name, buffer in model.named_buffers() if "norm" in name])
    )
    return buffers_by_pass


@some_configs
@ranks(1, 2, 3)
def test_buffers_match_ddp(ctx: RankContext, config: ZeroConfig) -> None:
    parity = DdpParityRun(config, NetWithBuffers)
    buffers_by_pass = record_buffers_in_forward(parity.model)
    for _ in range(3):
        parity.train(1)
        assert_buffers_match_ddp(parity)
    assert len(buffers_by_pass) == 3
    for buffers in buffers_by_pass:
        assert all_equal(ctx.gather(buffers))
    assert all_equal(ctx.gather([buffer.clone() for buffer in parity.plain_model.buffers()])) == (ctx.world_size == 1)


def two_pass_loss(model: nn.Module, number: int) -> torch.Tensor:
    """A loss over two forward passes, like a contrastive loss."""
    result: torch.Tensor = (model(batch(2 * number)) - model(batch(2 * number + 1))).square().mean()
    return result


@pytest.mark.skipif(TORCH < (2, 12), reason="DDP of torch 2.11 raises in this case")
@some_configs
@ranks(1, 2, 3)
def test_buffers_with_two_forwards_before_one_backward(ctx: RankContext, config: ZeroConfig) -> None:
    """Also with frozen statistics, which the backward pass reads."""
    for is_training in (True, False):
        parity = DdpParityRun(config, NetWithBuffers)
        for model in (parity.model, parity.plain_model):
            model.norm.train(is_training)  # type: ignore[union-attr]
        parity.train(3, two_pass_loss)
        assert_buffers_match_ddp(parity)


@ranks(2, 3)
def test_evaluation_uses_buffers_of_rank_0(ctx: RankContext) -> None:
    parity = DdpParityRun(ZERO2, NetWithBuffers)
    parity.train(2)
    with torch.no_grad():
        for model in (parity.model, parity.ddp):
            model.eval()
        assert_equal_sums(parity.model(batch(9)), parity.ddp(batch(9)), "the output")
    for (name, ours), theirs in zip(parity.model.named_buffers(), parity.plain_model.buffers(), strict=True):
        assert_equal_sums(ours, theirs, name)


@pytest.mark.parametrize("disable_grad", [torch.no_grad, torch.inference_mode])
@some_configs
@ranks(1, 2, 3)
def test_one_rank_can_evaluate_alone(
    ctx: RankContext, config: ZeroConfig, disable_grad: Callable[[], AbstractContextManager[object]]
) -> None:
    """While the other ranks wait for it, and while parameters are still in flight."""
    parity = DdpParityRun(config, make_batchnorm_net)
    for rank in (0, ctx.world_size - 1):
        parity.train(1)
        for side in parity.sides:
            side.iterate(rank)
        if ctx.rank == rank:
            with disable_grad(), recorded() as traffic:
                parity.model.eval()(batch(9))
            assert not traffic
            parity.model.train()
        dist.barrier()
    parity.train(1)
    assert_buffers_match_ddp(parity)


@ranks(2, 3)
def test_no_grad_buffer_updates_stay_local_until_broadcast_buffers(ctx: RankContext) -> None:
    model, local_model = make_seeded(NetWithBuffers, ctx.rank), make_seeded(NetWithBuffers, 0)
    zero = shard(model, torch.optim.AdamW, config=replace(ZERO2, broadcast_buffers=False), **ADAMW)
    with torch.no_grad(), recorded() as traffic:
        for number in range(2):
            for each_model in (model, local_model):
                each_model(batch(number))
    assert not traffic
    zero.broadcast_buffers()
    for ours, expected in zip(model.buffers(), local_model.buffers(), strict=True):
        dist.broadcast(expected, 0)
        assert torch.equal(ours, expected)


@ranks(2, 3)
def test_broadcast_buffers_on_one_rank_only_is_reported_on_all(ctx: RankContext) -> None:
    model = NetWithBuffers()
    zero = shard(model, torch.optim.SGD, config=ZERO2, lr=0.1)
    with pytest.raises(RankMismatchError, match=r"different calls.*broadcast_buffers"):
        zero.broadcast_buffers() if ctx.rank == 0 else zero.full_state_dict(to=0)
    zero.broadcast_buffers()


@ranks(2)
def test_superseded_optimizer_cannot_broadcast_buffers(ctx: RankContext) -> None:
    model = NetWithBuffers()
    superseded = shard(model, torch.optim.SGD, config=ZERO2, lr=0.1)
    shard(model, torch.optim.SGD, config=ZERO2, lr=0.1).broadcast_buffers()
    with pytest.raises(
        RuntimeError, match=r"a later shard\(\) call .* Call broadcast_buffers\(\) of the later optimizer"
    ):
        superseded.broadcast_buffers()


class CachingNet(nn.Module):
    """Assigns a buffer as long as the last input, which differs between ranks."""

    cache: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("cache", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache = torch.ones(len(x))
        result: torch.Tensor = self.linear(x)
        return result


@ranks(1, 2, 3)
def test_buffers_assigned_later_stay_local(ctx: RankContext) -> None:
    model = CachingNet()
    zero = shard(model, torch.optim.SGD, config=ZERO2, lr=0.1)
    for _ in range(2):
        model(torch.ones(1 + ctx.rank, WIDTH)).sum().backward()
        zero.step()
    assert model.cache is not None
    assert len(model.cache) == 1 + ctx.rank
    assert "broadcast buffers" not in str(zero.report()), "no buffers to broadcast"


@pytest.mark.parametrize("shard_group_size", [1, 2])
@ranks(2, 4)
def test_all_shard_groups_get_buffers_of_rank_0(ctx: RankContext, shard_group_size: int) -> None:
    parity = DdpParityRun(ZERO2, NetWithBuffers, group_options={"shard_group_size": shard_group_size})
    parity.train(2)
    assert_buffers_match_ddp(parity)


@ranks(2)
def test_skipped_step_broadcasts_buffers(ctx: RankContext) -> None:
    model = make_seeded(NetWithBuffers, 0)
    zero = shard(model, torch.optim.SGD, config=replace(ZERO2, nonfinite=NonFiniteGrads("skip")), lr=0.1)
    torch.autograd.backward(regression(model, 0) * (torch.inf if ctx.rank else 1.0))
    with pytest.warns(RuntimeWarning, match="not finite"):
        zero.step()
    assert all_equal(ctx.gather([buffer.clone() for buffer in model.buffers()]))


@ranks(2, 3)
def test_step_inside_no_sync_broadcasts_buffers(ctx: RankContext) -> None:
    model = make_seeded(NetWithBuffers, ctx.rank)
    zero = shard(model, torch.optim.SGD, config=ZERO2, lr=0.1)
    with zero.no_sync():
        torch.autograd.backward(regression(model, 0))
        assert not all_equal(ctx.gather([buffer.clone() for buffer in model.buffers()]))
        if ctx.rank == 0:
            zero.step()
    if ctx.rank > 0:
        zero.step()
    assert all_equal(ctx.gather([buffer.clone() for buffer in model.buffers()]))


@ranks(2, 3)
def test_broadcast_buffers_option_can_be_disabled(ctx: RankContext) -> None:
    """If disabled, buffers are equal at the start and local to each rank from then on."""
    model, local_model = make_seeded(NetWithBuffers, ctx.rank), make_seeded(NetWithBuffers, 0)
    zero = shard(model, torch.optim.AdamW, config=replace(ZERO2, broadcast_buffers=False), **ADAMW)
    with recorded() as traffic:
        for number in range(3):
            for each_model in (model, local_model):
                each_model(batch(number))
    assert not traffic
    for ours, theirs in zip(model.buffers(), local_model.buffers(), strict=True):
        assert torch.equal(ours, theirs)
    del zero  # the optimizer must live until here


@ranks(2, 3)
def test_no_sync_passes_broadcast_no_buffers(ctx: RankContext) -> None:
    """One rank can run such passes alone, and all ranks still agree on what the next pass sends."""
    model, local_model = make_seeded(NetWithBuffers, ctx.rank), make_seeded(NetWithBuffers, 0)
    zero = shard(model, torch.optim.AdamW, config=ZERO2, **ADAMW)
    with recorded() as traffic, zero.no_sync():
        for number in range(ctx.rank):
            for each_model in (model, local_model):
                torch.autograd.backward(regression(each_model, number))
    assert not traffic
    for ours, theirs in zip(model.buffers(), local_model.buffers(), strict=True):
        assert torch.equal(ours, theirs)
    Side(model, zero, zero.no_sync).iterate(9)
    assert all_equal(ctx.gather([buffer.clone() for buffer in model.buffers()]))


class CenteredNet(nn.Module):
    """Its output depends on buffers that every pass in training mode changes."""

    centre: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.register_buffer("centre", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.centre.lerp_(x.detach().mean(0), 0.5)
        result: torch.Tensor = self.norm(self.linear(x - self.centre)) * self.norm.running_var
        return result


ACCUMULATION_SCHEDULES = {
    "no accumulation": ["sync step"] * 4,
    "2 passes": ["local sync step"] * 3,
    "3 passes": ["local local sync step"] * 3,
    "uneven": ["local local sync step", "sync step", "local sync step", "local local local sync step"],
    "skipped steps": ["local sync step", "local sync clear", "local sync step", "sync clear", "sync step"],
    "several sync passes": ["sync sync step", "local sync clear", "sync local sync step"],
    "evaluation": ["evaluate local evaluate sync evaluate step evaluate", "local sync step", "evaluate sync step"],
}


@pytest.mark.parametrize("name", ACCUMULATION_SCHEDULES)
@ranks(2, 3)
def test_buffers_match_ddp_with_accumulation(ctx: RankContext, name: str) -> None:
    """The inputs of the first layer depend only on data and `centre` and are bitwise equal. Buffers that depend on
    parameters differ by rounding, because DDP sums gradients in another order. The last rank evaluates alone."""
    parity = DdpParityRun(ZERO1, CenteredNet, torch.optim.SGD, lr=0.1)
    inputs: list[list[list[torch.Tensor]]] = [[], []]
    for number, model in enumerate((parity.model, parity.plain_model)):
        record_inputs(model, inputs[number])
    passes = 0
    for cycle in ACCUMULATION_SCHEDULES[name]:
        for action in cycle.split():
            passes += 1
            for side, model in zip(parity.sides, (parity.model, parity.plain_model), strict=True):
                if action == "evaluate":
                    evaluate_alone(model, ctx.rank == ctx.world_size - 1)
                elif action == "clear":
                    side.optimizer.zero_grad()
                elif action == "step":
                    side.update()
                else:
                    (side.backward if action == "sync" else side.backward_locally)(passes)
        parity.compare(exactly=False)
    for (ours, *buffers), (theirs, *their_buffers) in zip(*inputs, strict=True):
        assert torch.equal(ours, theirs)
        torch.testing.assert_close(buffers, their_buffers)


def record_inputs(model: nn.Module, recorded_inputs: list[list[torch.Tensor]]) -> None:
    """Record the inputs of the first layer, with all buffers, in each training pass."""

    def record(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if model.training:  # evaluation follows a step, after which DDP's buffers differ between ranks
            recorded_inputs.append([*inputs, *map(torch.clone, model.buffers())])

    model.linear.register_forward_pre_hook(record)  # type: ignore[union-attr]


def evaluate_alone(model: nn.Module, is_on_this_rank: bool) -> None:
    if is_on_this_rank:
        model.eval()
        with torch.no_grad(), recorded(this_thread_only=True) as traffic:  # reduces may still be in flight
            model(batch(99))
        model.train()
        assert not traffic


@ranks(2)
def test_buffers_take_one_broadcast_per_dtype(ctx: RankContext) -> None:
    deep = nn.Sequential(*(nn.BatchNorm1d(WIDTH) for _ in range(8)))
    zero = shard(deep, torch.optim.SGD, lr=0.1, config=ZERO2)
    deep(batch(0))
    with recorded() as traffic:
        deep(batch(1))
    assert traffic.verbs == ["broadcast"] * 2  # float32 and int64
    assert zero.world_size == 2


@ranks(2)
def test_forward_without_buffers_sends_nothing(ctx: RankContext) -> None:
    """A single rank can evaluate."""
    model = make_seeded(mlp, 0)
    zero = shard(model, torch.optim.SGD, lr=0.1, config=ZERO2)
    with recorded() as traffic:
        if ctx.rank == 0:
            model(batch(0))
    assert not traffic
    Side(model, zero, zero.no_sync).iterate(0)


class BuffersInSubmodule(nn.Module):
    """Only the inner model has buffers; the test calls it directly."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = NetWithBuffers()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(x)
        return result


@ranks(2)
def test_submodule_forward_sends_nothing(ctx: RankContext) -> None:
    """Like calling `ddp.module`, this evaluates on one rank."""
    model = make_seeded(BuffersInSubmodule, 0)
    zero = shard(model, torch.optim.SGD, lr=0.1, config=ZERO2)
    with recorded() as traffic:
        if ctx.rank == 0:
            model.inner(batch(0))  # type: ignore[operator]
    assert not traffic
    del zero  # the optimizer must live until here


def make_compile_fn(method: str) -> Callable[[nn.Module], nn.Module]:
    def apply(model: nn.Module) -> nn.Module:
        if method == "function":
            return torch.compile(model, backend="eager")  # type: ignore[return-value]
        model.compile(backend="eager")
        return model

    return apply


@ranks(2, timeout=60)
def test_compiled_models_match_ddp(ctx: RankContext) -> None:
    for method in ("module", "function"):
        torch._dynamo.reset()
        parity = DdpParityRun(ZERO2, NetWithBuffers)
        compiled = make_compile_fn(method)(parity.model)
        ours = Side(compiled, parity.zero, parity.zero.no_sync)
        for number in range(2):
            ours.backward(number, regression)
            parity.sides[1].backward(number, regression)
            for side in parity.sides:
                side.update()
            assert_buffers_match_ddp(parity)
        parity.compare()


@ranks(2, 3)
def test_buffers_and_other_params_must_have_equal_shapes_on_all_ranks(ctx: RankContext) -> None:
    """The mismatch is found before anything is sent, and the model stays unchanged."""

    def assert_mismatch(model: nn.Module, pattern: str) -> None:
        with assert_params_unchanged(model), pytest.raises(RankMismatchError, match=pattern):
            shard(model, torch.optim.SGD, params=list(model.linear.parameters()), lr=0.1)  # type: ignore[union-attr]

    is_last = ctx.rank == ctx.world_size - 1
    mismatched = NetWithBuffers()
    mismatched.mean = torch.zeros(WIDTH + is_last)
    assert_mismatch(mismatched, "buffer mean")
    mismatched = NetWithBuffers()
    mismatched.last = nn.Linear(WIDTH, WIDTH + is_last)
    assert_mismatch(mismatched, "last.weight")
    shard(NetWithBuffers(), torch.optim.SGD, lr=0.1)


def make_model_with_buffer(value: torch.Tensor) -> nn.Module:
    model = nn.Linear(4, 4)
    model.register_buffer("scale", value)
    return model


def make_model_with_frozen_param(value: torch.Tensor) -> nn.Module:
    model = nn.Linear(4, 4)
    model.scale = nn.Parameter(value, requires_grad=False)
    return model


NOT_BROADCASTABLE: list[tuple[Any, torch.Tensor, str]] = [
    (
        make_model_with_buffer,
        torch.ones(1).expand(4),
        r"buffer scale has elements that share memory .* strides \(0,\).*clone\(\)",
    ),
    (make_model_with_frozen_param, torch.ones(4, 1).expand(4, 2), r"scale has elements that share memory .* clone\(\)"),
    (make_model_with_buffer, torch.eye(3).to_sparse(), r"buffer scale .* torch.sparse_coo\. .* to_dense\(\)"),
    (
        make_model_with_buffer,
        torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
        r"buffer scale .* is quantized",
    ),
    (
        make_model_with_buffer,
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        r"buffer scale .* a nested tensor",
    ),
    (make_model_with_buffer, torch.ones(3, device="meta"), "does not support meta, where buffer scale is"),
]


@ranks(2, 3, timeout=20)
def test_tensors_that_cannot_be_broadcast_are_rejected_on_all_ranks(ctx: RankContext) -> None:
    """Also if only one rank has such a tensor. No hook or patched method stays on the model."""
    for odd_ranks in (range(ctx.world_size), [0], [ctx.world_size - 1]):
        for make, value, pattern in NOT_BROADCASTABLE:
            model = make(value if ctx.rank in odd_ranks else torch.ones(4))
            params = [model.weight, model.bias]
            error = ConfigError if ctx.rank in odd_ranks else RankFailedError
            with assert_params_unchanged(nn.ParameterList(params)), pytest.raises(error, match=pattern):
                shard(model, torch.optim.SGD, params=params, lr=0.1)
            assert not model._forward_pre_hooks
            assert not any(param._post_accumulate_grad_hooks for param in params)
            assert "zero_grad" not in vars(model)
    shard(nn.Linear(4, 4), torch.optim.SGD, lr=0.1)
