"""Steps inside DDP's backward."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.distributed.optim.utils import functional_optim_map
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.checkpoint import checkpoint

from tests.support import RankContext, ranks
from tests.support.oracles import (
    WIDTH,
    Branches,
    Complex,
    DdpTwins,
    Setup,
    assert_same,
    batch,
    mlp,
    of_complex,
    regression,
    setups,
    through_branches,
)
from zeroshard import RankFailedError, ZeroRedundancyOptimizer
from zeroshard.ddp_hooks import hook_with_zero_step, hook_with_zero_step_interleaved


class Lion(Optimizer):
    """No functional twin; counts steps in its groups, on itself, and in state that belongs to no parameter."""

    def __init__(self, params: Any, lr: float = 0.01, fail_at: int = -1) -> None:
        super().__init__(params, {"lr": lr, "k": 0, "fail_at": fail_at})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        self.steps += 1
        shared = self.state["shared"]  # type: ignore[index]
        shared["steps"] = shared.get("steps", 0) + 1
        for group in self.param_groups:
            group["k"] += 1
            for param in group["params"]:
                if param.grad is None:
                    continue
                average = self.state[param].setdefault("average", torch.zeros_like(param))
                param.sub_(
                    average.lerp(param.grad, 0.1).sign(),
                    alpha=group["lr"] / (group["k"] + self.steps + shared["steps"]),
                )
                average.lerp_(param.grad, 0.01)


SOME_OPTIMIZERS: list[tuple[Callable[..., Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    (torch.optim.AdamW, {"lr": 0.01}),
    (torch.optim.Adagrad, {"lr": 0.1}),
    (torch.optim.NAdam, {"lr": torch.tensor(0.01), "foreach": False}),
    (partial(torch.optim.Adam, amsgrad=True), {"lr": 0.01}),
    (Lion, {}),
]
short_mlp = partial(mlp, 3)
BOTH_HOOKS = [Setup(interleaved=False), Setup(interleaved=True, shard_buckets=True)]


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    weights = [p for p in model.parameters() if p.dim() == 2]
    biases = [p for p in model.parameters() if p.dim() == 1]
    return [{"params": biases, "lr": 0.02}, {"params": weights}]


@ranks(1, 2, 3, 4)
def test_equals_ddp_with_the_plain_optimizer(ctx: RankContext) -> None:
    for setup in setups():
        DdpTwins(setup, mlp, torch.optim.AdamW, lr=0.01).train(setup.warmup + 3)


@ranks(1, 2, 3)
def test_any_optimizer_with_any_groups(ctx: RankContext) -> None:
    for setup in BOTH_HOOKS:
        for optimizer_class, defaults in SOME_OPTIMIZERS:
            twins = DdpTwins(setup, short_mlp, optimizer_class, read=two_groups, **defaults)
            twins.train(5)
            for ours, theirs in zip(twins.zero.param_groups, twins.plain.param_groups, strict=True):
                assert [ours[key] for key in theirs if key != "params"] == [
                    theirs[key] for key in theirs if key != "params"
                ]


@ranks(1, 3)
def test_lr_schedulers_are_applied(ctx: RankContext) -> None:
    for setup in BOTH_HOOKS:
        twins = DdpTwins(setup, short_mlp, torch.optim.SGD, read=two_groups, lr=0.1, momentum=0.9)
        schedules = [
            OneCycleLR(twins.zero, max_lr=0.2, total_steps=12),
            OneCycleLR(twins.plain, max_lr=0.2, total_steps=12),
        ]
        for _ in range(6):
            twins.train(1)
            for schedule in schedules:
                schedule.step()
        assert twins.zero.param_groups[0]["momentum"] != 0.9


def make_partly_frozen() -> nn.Module:
    model = mlp(4)
    model[2].requires_grad_(False)
    return model


@ranks(2, 3)
def test_frozen_params(ctx: RankContext) -> None:
    for setup in BOTH_HOOKS:
        DdpTwins(setup, make_partly_frozen, torch.optim.SGD, lr=0.1, weight_decay=0.1).train(5)


@ranks(1, 2, 3)
def test_grad_accumulation(ctx: RankContext) -> None:
    for setup in setups(static_graph=False, shard_buckets=True):
        twins = DdpTwins(setup, short_mlp, torch.optim.AdamW, lr=0.01)
        for _ in range(4):
            twins.train(2, local=True)
            twins.train(1)


def bf16_hook(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """torch's, which DDP takes only with NCCL."""
    return bf16_compress_hook(state, bucket)


def double_hook(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Leaves the bucket alone and returns a tensor of its own, of another dtype."""
    future = dist.all_reduce(bucket.buffer().double(), async_op=True).get_future()
    result: torch.futures.Future[torch.Tensor] = future.then(lambda done: done.value()[0] / dist.get_world_size())
    return result


@ranks(1, 2, 3)
@pytest.mark.parametrize("hook", [fp16_compress_hook, bf16_hook, double_hook])
def test_hooks_that_change_or_replace_the_bucket(ctx: RankContext, hook: Any) -> None:
    for setup in setups(hook=hook, static_graph=False, shard_buckets=False):
        DdpTwins(setup, short_mlp, torch.optim.AdamW, lr=0.01).train(4)


@ranks(1, 2, 3, 4)
def test_unused_params_are_not_updated(ctx: RankContext) -> None:
    for setup in setups(find_unused=True, static_graph=False):
        twins = DdpTwins(setup, Branches, torch.optim.AdamW, lr=0.01, weight_decay=0.5)
        before = twins.ddp.module.never.weight.clone()
        twins.train(6, through_branches)
        assert torch.equal(twins.ddp.module.never.weight, before)
        assert not torch.equal(twins.ddp.module.sometimes.weight, twins.ddp.module.never.weight)


def even_pass_loss(model: nn.Module, number: int) -> torch.Tensor:
    loss: torch.Tensor = model(batch(number), 0).square().mean()
    return loss


@ranks(1, 2, 3)
def test_unused_params_with_static_graph(ctx: RankContext) -> None:
    for find_unused in (False, True):
        for setup in setups(find_unused=find_unused, static_graph=True):
            twins = DdpTwins(setup, Branches, torch.optim.AdamW, lr=0.01, weight_decay=0.5)
            twins.train(6, even_pass_loss)


class UnusualParams(nn.Module):
    """Strides that are not contiguous, a tied weight, parameters of no elements and of no dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 2)
        self.conv.weight.data = self.conv.weight.data.to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.randn(5, 4).t())
        self.strided = nn.Parameter(torch.randn(4, 10)[:, ::2])
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.conv(x).mean((2, 3)) @ self.transposed @ self.transposed.t() @ self.strided
        output: torch.Tensor = hidden * self.scale + self.empty.sum()
        return output


def image_loss(model: nn.Module, number: int) -> torch.Tensor:
    loss: torch.Tensor = model(batch(number).repeat(1, 2).view(4, 3, 2, 2)).square().mean()
    return loss


@ranks(1, 2, 3)
def test_any_shapes_and_strides(ctx: RankContext) -> None:
    for setup in setups(static_graph=False):
        DdpTwins(setup, UnusualParams, torch.optim.SGD, lr=0.01, momentum=0.9).train(5, image_loss)


@ranks(1, 2, 3)
@pytest.mark.parametrize("hook", [allreduce_hook, fp16_compress_hook, double_hook])
def test_complex_params(ctx: RankContext, hook: Any) -> None:
    for setup, dtype in product(
        setups(static_graph=False, shard_buckets=False, hook=hook), (torch.complex64, torch.complex128)
    ):
        DdpTwins(setup, partial(Complex, dtype), torch.optim.AdamW, lr=0.01).train(4, of_complex)


class SparseEmbeddingModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sparse = nn.EmbeddingBag(8, WIDTH, sparse=True)
        self.out = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.out(self.sparse(x))
        return output


def embedding_loss(model: nn.Module, number: int) -> torch.Tensor:
    words = batch(number).abs().mul(10).long() % 8
    loss: torch.Tensor = model(words).square().mean()
    return loss


@ranks(1, 2, 3)
def test_sparse_grads(ctx: RankContext) -> None:
    for setup in setups():
        twins = DdpTwins(setup, SparseEmbeddingModel, torch.optim.SGD, lr=0.1)
        twins.train(6, embedding_loss)


@ranks(1, 2)
def test_activation_checkpointing(ctx: RankContext) -> None:
    for setup in setups(shard_buckets=False, bucket_view=False):
        DdpTwins(setup, Checkpointed, torch.optim.AdamW, lr=0.01).train(6)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        for number, layer in enumerate(self.layers):
            x = checkpoint(lambda y, layer=layer: layer(y).tanh(), x, use_reentrant=number % 2 == 0)
        return x


@ranks(1, 2, 3, 4)
def test_bucket_owner_is_its_index_modulo_group_size(ctx: RankContext) -> None:
    numbers: dict[int, int] = {}

    def recording_hook(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        numbers.update({id(param): bucket.index() for param in bucket.parameters()})
        return allreduce_hook(state, bucket)

    twins = DdpTwins(Setup(hook=recording_hook), mlp, torch.optim.SGD, lr=0.1)
    twins.train(3)
    numbers = {i: numbers[id(param)] for i, param in enumerate(twins.ddp.parameters())}
    assert len(set(numbers.values())) >= 3
    assert {i: twins.zero.layout.owner_of(i) for i in numbers} == {i: n % ctx.world_size for i, n in numbers.items()}


@ranks(2, 3)
def test_shard_buckets_splits_buckets_at_param_boundaries(ctx: RankContext) -> None:
    twins = DdpTwins(Setup(shard_buckets=True), partial(mlp, 6), torch.optim.SGD, lr=0.1)
    twins.train(3)
    loads = twins.zero.layout.numel_per_rank(trainable=True)
    largest = max(param.numel() for param in twins.ddp.parameters())
    assert max(loads) - min(loads) <= largest
    assert any(len({piece.owner for piece in bucket.param_shards}) > 1 for bucket in twins.zero.layout.buckets)


@ranks(1, 2)
@pytest.mark.parametrize("interleaved", [False, True])
def test_interleaving_decides_when_buckets_are_updated(ctx: RankContext, interleaved: bool) -> None:
    """How many of the buckets before it are already updated when a bucket is handed over."""
    seen: list[int] = []
    handed: list[tuple[torch.Tensor, torch.Tensor]] = []

    def watching_hook(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        if bucket.index() == 0:
            seen.clear()
            handed.clear()
        seen.append(sum(not torch.equal(param, before) for param, before in handed))
        handed.append((bucket.parameters()[0], bucket.parameters()[0].clone()))
        return allreduce_hook(state, bucket)

    setup = Setup(interleaved=interleaved)
    ddp = setup.wrap(mlp())
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
    replace(setup, hook=watching_hook).connect(ddp, zero)
    for number in range(4):
        torch.autograd.backward(regression(ddp, number))
    assert seen == ([0, 0, 1] if interleaved else [0, 0, 0])
    assert all(not torch.equal(param, before) for param, before in handed)


@ranks(1, 2)
def test_functional_optimizers_map_to_plain_ones(ctx: RankContext) -> None:
    for plain, functional in functional_optim_map.items():
        twins = DdpTwins(Setup(), short_mlp, plain, overlapped_class=functional, lr=0.01)
        assert type(twins.zero.optim) is plain
        twins.train(4)
        with pytest.raises(ValueError, match="overlap_with_ddp"):
            ZeroRedundancyOptimizer(twins.ddp.parameters(), functional, lr=0.01)


@ranks(1, 2)
def test_incompatible_options_raise_or_warn(ctx: RankContext) -> None:
    ddp = Setup().wrap(mlp())
    ready = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
    for make in (hook_with_zero_step, hook_with_zero_step_interleaved):
        with pytest.raises(ValueError, match="overlap_with_ddp=True"):
            make(allreduce_hook, ddp, ready)
    with pytest.warns(UserWarning, match="parameters_as_bucket_view has no effect"):
        ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, None, True, True, lr=0.1)


@ranks(1, 2)
def test_step_does_nothing_but_warn(ctx: RankContext) -> None:
    twins = DdpTwins(Setup(), mlp, torch.optim.SGD, lr=0.1)
    for _ in range(4):
        twins.train(1)
        torch.autograd.backward(regression(twins.ddp.module, 0))
        with pytest.warns(UserWarning, match="step\\(\\) does nothing"):
            assert twins.zero.step() is None
        twins.zero.zero_grad()
        twins.compare()


@ranks(1, 2)
def test_adding_groups_or_freezing_params_is_rejected(ctx: RankContext) -> None:
    twins = DdpTwins(Setup(), mlp, torch.optim.SGD, lr=0.1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="cannot be added"):
            twins.zero.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
        twins.train(3)
    first = next(twins.ddp.parameters()).requires_grad_(False)
    for act in (twins.zero.zero_grad, twins.zero.step):
        with pytest.raises(RuntimeError, match="requires_grad"):
            act()
    first.requires_grad_(True)
    twins.train(1)


@ranks(1, 2, 3)
def test_unfreezing_on_one_rank_raises_in_backward(ctx: RankContext) -> None:
    for setup in BOTH_HOOKS:
        twins = DdpTwins(setup, make_partly_frozen, torch.optim.SGD, lr=0.1)
        twins.train(3)
        thawed = next(param for param in twins.ddp.parameters() if not param.requires_grad)
        thawed.requires_grad_(ctx.rank == 0)
        with pytest.raises(RuntimeError, match="requires_grad cannot be switched"):
            torch.autograd.backward(regression(twins.ddp, 0))
        thawed.requires_grad_(False)
        twins.return_to_plain()
        twins.train(2)


@ranks(1, 2, 3)
def test_state_dict_round_trip(ctx: RankContext) -> None:
    for setup in (Setup(), Setup(interleaved=True, shard_buckets=True, static_graph=True)):
        twins, fresh = (DdpTwins(setup, short_mlp, torch.optim.AdamW, read=two_groups, lr=0.01) for _ in range(2))
        for _ in range(setup.warmup):
            for call in (twins.zero.state_dict, twins.zero.consolidate_state_dict, twins.zero.full_state_dict):
                with pytest.raises(RuntimeError, match=f"after {setup.warmup} of them"):
                    call()
            with pytest.raises(RuntimeError, match=f"after {setup.warmup} of them"):
                twins.zero.load_state_dict(twins.plain.state_dict())
            twins.train(1)
        twins.train(2)
        for target in range(ctx.world_size):
            twins.zero.consolidate_state_dict(to=target)
        assert_same(twins.zero.state_dict(), twins.plain.state_dict())

        fresh.train(setup.warmup)
        fresh.plain_ddp, fresh.plain, fresh.passes = twins.plain_ddp, twins.plain, twins.passes
        fresh.return_to_plain()
        fresh.train(3)


@ranks(1, 2, 3)
def test_failed_step_raises_from_backward_on_all_ranks(ctx: RankContext) -> None:
    for setup in setups(static_graph=False, shard_buckets=False):
        twins = DdpTwins(setup, short_mlp, torch.optim.SGD, lr=0.1, momentum=0.9)
        twins.train(4)
        failing = ctx.world_size - 1
        with pytest.MonkeyPatch.context() as patch:
            if ctx.rank == failing:
                patch.setattr(twins.zero.optim, "step", raise_arithmetic_error)
            with pytest.raises((ArithmeticError, RankFailedError), match="out of cheese") as caught:
                torch.autograd.backward(regression(twins.ddp, 0))
        assert caught.type is (ArithmeticError if ctx.rank == failing else RankFailedError)
        twins.return_to_plain()
        twins.train(3)


def raise_arithmetic_error(*args: Any) -> None:
    raise ArithmeticError("out of cheese")


@ranks(1, 2, 3)
def test_optimizer_over_some_params_only(ctx: RankContext) -> None:
    for setup in BOTH_HOOKS:
        for layer in ("0", "4", "8"):
            read = partial(layer_parameters, layer)
            DdpTwins(setup, mlp, torch.optim.AdamW, read=read, lr=0.01).train(4)


def layer_parameters(layer: str, model: nn.Module) -> Iterable[nn.Parameter]:
    return model.get_submodule(layer).parameters()


@ranks(1, 2)
def test_params_not_reduced_by_ddp_are_rejected(ctx: RankContext) -> None:
    ddp, foreign = Setup().wrap(mlp()), nn.Parameter(torch.zeros(3))
    zero = ZeroRedundancyOptimizer([*ddp.parameters(), foreign], torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
    Setup().connect(ddp, zero)
    torch.autograd.backward(regression(ddp, 0))
    for number in (1, 2):
        with pytest.raises(
            ValueError, match=r"parameters \[10\] of the optimizer are not among those that DDP reduces"
        ):
            torch.autograd.backward(regression(ddp, number))
    with pytest.raises(RuntimeError, match="call it after"):
        zero.state_dict()
