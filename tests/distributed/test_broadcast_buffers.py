"""Buffers are those of rank 0 in each forward pass, as DDP has them.

They come after steps, and before passes with gradients as often as in DDP. Passes without gradients send nothing: ranks
may evaluate alone.
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
    ShardTwins,
    Side,
    all_equal,
    assert_equal_sums,
    batch,
    left_as_it_was,
    mlp,
    regression,
    seeded,
    some_configs,
)
from zeroshard import ConfigError, NonFiniteGrads, RankFailedError, RankMismatchError, ZeroConfig, shard


class NetWithBuffers(nn.Module):
    """BatchNorm, a buffer of another dtype, one that each pass replaces, and one that is none."""

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


def assert_buffers_match_ddp(twins: ShardTwins) -> None:
    """After a step: DDP will bring those of rank 0 to all, in the next forward pass."""
    for (name, ours), theirs in zip(twins.model.named_buffers(), twins.plain_model.buffers(), strict=True):
        first = theirs.clone()
        dist.broadcast(first, 0)
        assert_equal_sums(ours, first, name)


def make_batchnorm_net() -> nn.Module:
    """Buffers that only training changes."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))


def record_buffers_in_forward(model: nn.Module) -> list[list[torch.Tensor]]:
    """Buffers as each forward pass of a layer in the model finds them."""
    found: list[list[torch.Tensor]] = []
    model.linear.register_forward_pre_hook(  # type: ignore[union-attr]
        lambda *_: found.append([buffer.clone() for name, buffer in model.named_buffers() if "norm" in name])
    )
    return found


@some_configs
@ranks(1, 2, 3)
def test_buffers_match_ddp(ctx: RankContext, config: ZeroConfig) -> None:
    twins = ShardTwins(config, NetWithBuffers)
    found = record_buffers_in_forward(twins.model)

    def iterate(side: Side, number: int) -> None:
        side.iterate(number)

    for _ in range(3):
        twins.run(1, iterate)
        assert_buffers_match_ddp(twins)
    assert len(found) == 3
    for seen in found:
        assert all_equal(ctx.gather(seen))
    assert all_equal(ctx.gather([buffer.clone() for buffer in twins.plain_model.buffers()])) == (ctx.world_size == 1)


def two_pass_loss(model: nn.Module, number: int) -> torch.Tensor:
    """A loss of two forward passes, as a contrastive one."""
    result: torch.Tensor = (model(batch(2 * number)) - model(batch(2 * number + 1))).square().mean()
    return result


@pytest.mark.skipif(TORCH < (2, 12), reason="DDP of torch 2.11 raises there")
@some_configs
@ranks(1, 2, 3)
def test_buffers_with_two_forwards_before_one_backward(ctx: RankContext, config: ZeroConfig) -> None:
    """Also with statistics that are frozen, which the backward pass reads."""
    for trains in (True, False):
        twins = ShardTwins(config, NetWithBuffers)
        for model in (twins.model, twins.plain_model):
            model.norm.train(trains)  # type: ignore[union-attr]
        twins.train(3, two_pass_loss)
        assert_buffers_match_ddp(twins)


@ranks(2, 3)
def test_evaluation_uses_buffers_of_rank_0(ctx: RankContext) -> None:
    twins = ShardTwins(ZERO2, NetWithBuffers)
    twins.train(2)
    with torch.no_grad():
        for model in (twins.model, twins.ddp):
            model.eval()
        assert_equal_sums(twins.model(batch(9)), twins.ddp(batch(9)), "the output")
    for (name, ours), theirs in zip(twins.model.named_buffers(), twins.plain_model.buffers(), strict=True):
        assert_equal_sums(ours, theirs, name)


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
@some_configs
@ranks(1, 2, 3)
def test_one_rank_can_evaluate_alone(
    ctx: RankContext, config: ZeroConfig, without: Callable[[], AbstractContextManager[object]]
) -> None:
    """While the others wait for it, also where parameters are still under way."""
    twins = ShardTwins(config, make_batchnorm_net)
    for rank in (0, ctx.world_size - 1):
        twins.train(1)
        for side in twins.sides:
            side.iterate(rank)
        if ctx.rank == rank:
            with without(), recorded() as traffic:
                twins.model.eval()(batch(9))
            assert not traffic
            twins.model.train()
        dist.barrier()
    twins.train(1)
    assert_buffers_match_ddp(twins)


@ranks(2, 3)
def test_no_grad_buffer_updates_stay_local_until_broadcast_buffers(ctx: RankContext) -> None:
    model, alone = seeded(NetWithBuffers, ctx.rank), seeded(NetWithBuffers, 0)
    zero = shard(model, torch.optim.AdamW, config=replace(ZERO2, broadcast_buffers=False), **ADAMW)
    with torch.no_grad(), recorded() as traffic:
        for number in range(2):
            for side in (model, alone):
                side(batch(number))
    assert not traffic
    zero.broadcast_buffers()
    for ours, own in zip(model.buffers(), alone.buffers(), strict=True):
        dist.broadcast(own, 0)
        assert torch.equal(ours, own)


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
    former = shard(model, torch.optim.SGD, config=ZERO2, lr=0.1)
    shard(model, torch.optim.SGD, config=ZERO2, lr=0.1).broadcast_buffers()
    with pytest.raises(RuntimeError, match=r"call broadcast_buffers\(\) of that optimizer"):
        former.broadcast_buffers()


class CachingNet(nn.Module):
    """As long as the longest input that this rank has seen."""

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
    assert "broadcast buffers" not in str(zero.report()), "nothing to be brought"


@pytest.mark.parametrize("within", [1, 2])
@ranks(2, 4)
def test_all_shard_groups_get_buffers_of_rank_0(ctx: RankContext, within: int) -> None:
    twins = ShardTwins(ZERO2, NetWithBuffers, where={"shard_group_size": within})
    twins.train(2)
    assert_buffers_match_ddp(twins)


@ranks(2)
def test_skipped_step_broadcasts_buffers(ctx: RankContext) -> None:
    model = seeded(NetWithBuffers, 0)
    zero = shard(model, torch.optim.SGD, config=replace(ZERO2, nonfinite=NonFiniteGrads("skip")), lr=0.1)
    torch.autograd.backward(regression(model, 0) * (torch.inf if ctx.rank else 1.0))
    with pytest.warns(RuntimeWarning, match="not finite"):
        zero.step()
    assert all_equal(ctx.gather([buffer.clone() for buffer in model.buffers()]))


@ranks(2, 3)
def test_step_inside_no_sync_broadcasts_buffers(ctx: RankContext) -> None:
    model = seeded(NetWithBuffers, ctx.rank)
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
    """Off: equal at the start, and each rank's own from then on."""
    model, alone = seeded(NetWithBuffers, ctx.rank), seeded(NetWithBuffers, 0)
    zero = shard(model, torch.optim.AdamW, config=replace(ZERO2, broadcast_buffers=False), **ADAMW)
    with recorded() as traffic:
        for number in range(3):
            for side in (model, alone):
                side(batch(number))
    assert not traffic
    for ours, theirs in zip(model.buffers(), alone.buffers(), strict=True):
        assert torch.equal(ours, theirs)
    del zero  # which had to live until here


@ranks(2, 3)
def test_no_sync_passes_broadcast_no_buffers(ctx: RankContext) -> None:
    """So one rank may make some alone, and all of them agree on what the next pass sends."""
    model, alone = seeded(NetWithBuffers, ctx.rank), seeded(NetWithBuffers, 0)
    zero = shard(model, torch.optim.AdamW, config=ZERO2, **ADAMW)
    with recorded() as traffic, zero.no_sync():
        for number in range(ctx.rank):
            for side in (model, alone):
                torch.autograd.backward(regression(side, number))
    assert not traffic
    for ours, theirs in zip(model.buffers(), alone.buffers(), strict=True):
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
    "each pass": ["sync step"] * 4,
    "over 2": ["local sync step"] * 3,
    "over 3": ["local local sync step"] * 3,
    "uneven": ["local local sync step", "sync step", "local sync step", "local local local sync step"],
    "skipped": ["local sync step", "local sync clear", "local sync step", "sync clear", "sync step"],
    "averaged passes": ["sync sync step", "local sync clear", "sync local sync step"],
    "evaluation": ["evaluate local evaluate sync evaluate step evaluate", "local sync step", "evaluate sync step"],
}


@pytest.mark.parametrize("name", ACCUMULATION_SCHEDULES)
@ranks(2, 3)
def test_buffers_match_ddp_with_accumulation(ctx: RankContext, name: str) -> None:
    """What a pass makes of its input and `centre` is equal bit by bit. Only rounding separates what depends on
    parameters, since DDP adds up in another order. The last rank evaluates alone."""
    twins = ShardTwins(ZERO1, CenteredNet, torch.optim.SGD, lr=0.1)
    inputs: list[list[list[torch.Tensor]]] = [[], []]
    for number, model in enumerate((twins.model, twins.plain_model)):
        record_inputs(model, inputs[number])
    passes = 0
    for cycle in ACCUMULATION_SCHEDULES[name]:
        for what in cycle.split():
            passes += 1
            for side, model in zip(twins.sides, (twins.model, twins.plain_model), strict=True):
                if what == "evaluate":
                    evaluate_alone(model, ctx.rank == ctx.world_size - 1)
                elif what == "clear":
                    side.optimizer.zero_grad()
                elif what == "step":
                    side.update()
                else:
                    (side.backward if what == "sync" else side.backward_locally)(passes)
        twins.compare(exactly=False)
    for (ours, *buffers), (theirs, *their_buffers) in zip(*inputs, strict=True):
        assert torch.equal(ours, theirs)
        torch.testing.assert_close(buffers, their_buffers)


def record_inputs(model: nn.Module, recorded_inputs: list[list[torch.Tensor]]) -> None:
    """Those of the first layer, with all buffers, in each training pass."""

    def record(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if model.training:  # else after a step: DDP has other buffers on each rank then
            recorded_inputs.append([*inputs, *map(torch.clone, model.buffers())])

    model.linear.register_forward_pre_hook(record)  # type: ignore[union-attr]


def evaluate_alone(model: nn.Module, on_this_rank: bool) -> None:
    if on_this_rank:
        model.eval()
        with torch.no_grad(), recorded() as traffic:
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
    """So a rank may evaluate alone."""
    model = seeded(mlp, 0)
    zero = shard(model, torch.optim.SGD, lr=0.1, config=ZERO2)
    with recorded() as traffic:
        if ctx.rank == 0:
            model(batch(0))
    assert not traffic
    Side(model, zero, zero.no_sync).iterate(0)


class BuffersInSubmodule(nn.Module):
    """Only the inner model has buffers, and only it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = NetWithBuffers()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(x)
        return result


@ranks(2)
def test_submodule_forward_sends_nothing(ctx: RankContext) -> None:
    """As `ddp.module` does: a way to evaluate on one rank."""
    model = seeded(BuffersInSubmodule, 0)
    zero = shard(model, torch.optim.SGD, lr=0.1, config=ZERO2)
    with recorded() as traffic:
        if ctx.rank == 0:
            model.inner(batch(0))  # type: ignore[operator]
    assert not traffic
    del zero  # which had to live until here


def make_compile_fn(way: str) -> Callable[[nn.Module], nn.Module]:
    def apply(model: nn.Module) -> nn.Module:
        if way == "function":
            return torch.compile(model, backend="eager")  # type: ignore[return-value]
        model.compile(backend="eager")
        return model

    return apply


@ranks(2, timeout=60)
def test_compiled_models_match_ddp(ctx: RankContext) -> None:
    for way in ("module", "function"):
        torch._dynamo.reset()
        twins = ShardTwins(ZERO2, NetWithBuffers)
        callee = make_compile_fn(way)(twins.model)
        ours = Side(callee, twins.zero, twins.zero.no_sync)
        for number in range(2):
            ours.backward(number, regression)
            twins.sides[1].backward(number, regression)
            for side in twins.sides:
                side.update()
            assert_buffers_match_ddp(twins)
        twins.compare()


@ranks(2, 3)
def test_buffers_and_other_params_must_have_equal_shapes_on_all_ranks(ctx: RankContext) -> None:
    """Found before anything is sent, and nothing is left behind."""

    def attempt(model: nn.Module, what: str) -> None:
        with left_as_it_was(model), pytest.raises(RankMismatchError, match=what):
            shard(model, torch.optim.SGD, params=list(model.linear.parameters()), lr=0.1)  # type: ignore[union-attr]

    last = ctx.rank == ctx.world_size - 1
    odd = NetWithBuffers()
    odd.mean = torch.zeros(WIDTH + last)
    attempt(odd, "buffer mean")
    odd = NetWithBuffers()
    odd.last = nn.Linear(WIDTH, WIDTH + last)
    attempt(odd, "last.weight")
    shard(NetWithBuffers(), torch.optim.SGD, lr=0.1)


def with_buffer(value: torch.Tensor) -> nn.Module:
    model = nn.Linear(4, 4)
    model.register_buffer("scale", value)
    return model


def with_frozen_param(value: torch.Tensor) -> nn.Module:
    model = nn.Linear(4, 4)
    model.scale = nn.Parameter(value, requires_grad=False)
    return model


NOT_BROADCASTABLE: list[tuple[Any, torch.Tensor, str]] = [
    (with_buffer, torch.ones(1).expand(4), r"buffer scale has elements that share memory .* strides \(0,\).*clone\(\)"),
    (with_frozen_param, torch.ones(4, 1).expand(4, 2), r"scale has elements that share memory .* clone\(\)"),
    (with_buffer, torch.eye(3).to_sparse(), r"buffer scale .* torch.sparse_coo\. .* to_dense\(\)"),
    (with_buffer, torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8), r"buffer scale .* is quantized"),
    (with_buffer, torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), r"buffer scale .* a nested tensor"),
    (with_buffer, torch.ones(3, device="meta"), "cannot carry buffer scale on meta"),
]


@ranks(2, 3, timeout=20)
def test_tensors_that_cannot_be_broadcast_are_rejected_on_all_ranks(ctx: RankContext) -> None:
    """Also where one rank alone has it. Nothing is left behind."""
    for odd in (range(ctx.world_size), [0], [ctx.world_size - 1]):
        for make, value, what in NOT_BROADCASTABLE:
            model = make(value if ctx.rank in odd else torch.ones(4))
            own = [model.weight, model.bias]
            error = ConfigError if ctx.rank in odd else RankFailedError
            with left_as_it_was(nn.ParameterList(own)), pytest.raises(error, match=what):
                shard(model, torch.optim.SGD, params=own, lr=0.1)
            assert not model._forward_pre_hooks
            assert not any(param._post_accumulate_grad_hooks for param in own)
            assert "zero_grad" not in vars(model)
    shard(nn.Linear(4, 4), torch.optim.SGD, lr=0.1)
