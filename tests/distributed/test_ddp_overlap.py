"""Optimizer steps inside DDP's backward pass."""

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
    OverlapParityRun,
    Setup,
    assert_same,
    batch,
    branches_loss,
    complex_loss,
    mlp,
    regression,
    setups,
)
from zeroshard import RankFailedError, RankMismatchError, ZeroRedundancyOptimizer
from zeroshard.ddp_hooks import hook_with_zero_step, hook_with_zero_step_interleaved


class Lion(Optimizer):
    """Has no functional variant; counts steps in its groups, on itself, and in state that belongs to no parameter."""

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
    weights = [param for param in model.parameters() if param.dim() == 2]
    biases = [param for param in model.parameters() if param.dim() == 1]
    return [{"params": biases, "lr": 0.02}, {"params": weights}]


@ranks(1, 2, 3, 4)
def test_equals_ddp_with_the_plain_optimizer(ctx: RankContext) -> None:
    for setup in setups():
        OverlapParityRun(setup, mlp, torch.optim.AdamW, lr=0.01).train(setup.warmup + 3)


@ranks(1, 2, 3)
def test_any_optimizer_with_any_groups(ctx: RankContext) -> None:
    for setup in BOTH_HOOKS:
        for optimizer_class, defaults in SOME_OPTIMIZERS:
            parity = OverlapParityRun(setup, short_mlp, optimizer_class, read=two_groups, **defaults)
            parity.train(5)
            for ours, theirs in zip(parity.zero.param_groups, parity.plain.param_groups, strict=True):
                assert [ours[key] for key in theirs if key != "params"] == [
                    theirs[key] for key in theirs if key != "params"
                ]


@ranks(1, 3)
def test_lr_schedulers_are_applied(ctx: RankContext) -> None:
    for setup in BOTH_HOOKS:
        parity = OverlapParityRun(setup, short_mlp, torch.optim.SGD, read=two_groups, lr=0.1, momentum=0.9)
        schedules = [
            OneCycleLR(parity.zero, max_lr=0.2, total_steps=12),
            OneCycleLR(parity.plain, max_lr=0.2, total_steps=12),
        ]
        for _ in range(6):
            parity.train(1)
            for schedule in schedules:
                schedule.step()
        assert parity.zero.param_groups[0]["momentum"] != 0.9


def make_partly_frozen() -> nn.Module:
    model = mlp(4)
    model[2].requires_grad_(False)
    return model


@ranks(2, 3)
def test_frozen_params(ctx: RankContext) -> None:
    for setup in BOTH_HOOKS:
        OverlapParityRun(setup, make_partly_frozen, torch.optim.SGD, lr=0.1, weight_decay=0.1).train(5)


@ranks(1, 2, 3)
def test_grad_accumulation(ctx: RankContext) -> None:
    for setup in setups(static_graph=False, shard_buckets=True):
        parity = OverlapParityRun(setup, short_mlp, torch.optim.AdamW, lr=0.01)
        for _ in range(4):
            parity.train(2, local=True)
            parity.train(1)


def bf16_hook(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """torch's bf16 hook, which DDP accepts only with NCCL."""
    return bf16_compress_hook(state, bucket)


def double_hook(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Leaves the bucket unchanged and returns a new tensor of another dtype."""
    future = dist.all_reduce(bucket.buffer().double(), async_op=True).get_future()
    result: torch.futures.Future[torch.Tensor] = future.then(lambda done: done.value()[0] / dist.get_world_size())
    return result


@ranks(1, 2, 3)
@pytest.mark.parametrize("hook", [fp16_compress_hook, bf16_hook, double_hook])
def test_hooks_that_change_or_replace_the_bucket(ctx: RankContext, hook: Any) -> None:
    for setup in setups(hook=hook, static_graph=False, shard_buckets=False):
        OverlapParityRun(setup, short_mlp, torch.optim.AdamW, lr=0.01).train(4)


@ranks(1, 2, 3, 4)
def test_unused_params_are_not_updated(ctx: RankContext) -> None:
    for setup in setups(find_unused=True, static_graph=False):
        parity = OverlapParityRun(setup, Branches, torch.optim.AdamW, lr=0.01, weight_decay=0.5)
        before = parity.ddp.module.never.weight.clone()
        parity.train(6, branches_loss)
        assert torch.equal(parity.ddp.module.never.weight, before)
        assert not torch.equal(parity.ddp.module.sometimes.weight, parity.ddp.module.never.weight)


def even_pass_loss(model: nn.Module, number: int) -> torch.Tensor:
    loss: torch.Tensor = model(batch(number), 0).square().mean()
    return loss


@ranks(1, 2, 3)
def test_unused_params_with_static_graph(ctx: RankContext) -> None:
    for find_unused in (False, True):
        for setup in setups(find_unused=find_unused, static_graph=True):
            parity = OverlapParityRun(setup, Branches, torch.optim.AdamW, lr=0.01, weight_decay=0.5)
            parity.train(6, even_pass_loss)


class UnusualParams(nn.Module):
    """Non-contiguous strides, a tied weight, an empty parameter and a scalar."""

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
        OverlapParityRun(setup, UnusualParams, torch.optim.SGD, lr=0.01, momentum=0.9).train(5, image_loss)


@ranks(1, 2, 3)
@pytest.mark.parametrize("hook", [allreduce_hook, fp16_compress_hook, double_hook])
def test_complex_params(ctx: RankContext, hook: Any) -> None:
    for setup, dtype in product(
        setups(static_graph=False, shard_buckets=False, hook=hook), (torch.complex64, torch.complex128)
    ):
        OverlapParityRun(setup, partial(Complex, dtype), torch.optim.AdamW, lr=0.01).train(4, complex_loss)


class SparseEmbeddingModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sparse = nn.EmbeddingBag(8, WIDTH, sparse=True)
        self.out = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.out(self.sparse(x))
        return output


def embedding_loss(model: nn.Module, number: int) -> torch.Tensor:
    indices = batch(number).abs().mul(10).long() % 8
    loss: torch.Tensor = model(indices).square().mean()
    return loss


@ranks(1, 2, 3)
def test_sparse_grads(ctx: RankContext) -> None:
    for setup in setups():
        parity = OverlapParityRun(setup, SparseEmbeddingModel, torch.optim.SGD, lr=0.1)
        parity.train(6, embedding_loss)


@ranks(1, 2)
def test_activation_checkpointing(ctx: RankContext) -> None:
    for setup in setups(shard_buckets=False, bucket_view=False):
        OverlapParityRun(setup, Checkpointed, torch.optim.AdamW, lr=0.01).train(6)


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
    bucket_indices: dict[int, int] = {}

    def recording_hook(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        bucket_indices.update({id(param): bucket.index() for param in bucket.parameters()})
        return allreduce_hook(state, bucket)

    parity = OverlapParityRun(Setup(hook=recording_hook), mlp, torch.optim.SGD, lr=0.1)
    parity.train(3)
    bucket_indices = {index: bucket_indices[id(param)] for index, param in enumerate(parity.ddp.parameters())}
    assert len(set(bucket_indices.values())) >= 3
    assert {index: parity.zero.layout.owner_of(index) for index in bucket_indices} == {
        index: bucket_index % ctx.world_size for index, bucket_index in bucket_indices.items()
    }


@ranks(2, 3)
def test_shard_buckets_splits_buckets_at_param_boundaries(ctx: RankContext) -> None:
    parity = OverlapParityRun(Setup(shard_buckets=True), partial(mlp, 6), torch.optim.SGD, lr=0.1)
    parity.train(3)
    numel_per_rank = parity.zero.layout.numel_per_rank(trainable=True)
    largest = max(param.numel() for param in parity.ddp.parameters())
    assert max(numel_per_rank) - min(numel_per_rank) <= largest
    assert any(
        len({param_shard.owner for param_shard in bucket.param_shards}) > 1 for bucket in parity.zero.layout.buckets
    )


@ranks(1, 2)
@pytest.mark.parametrize("interleaved", [False, True])
def test_interleaving_decides_when_buckets_are_updated(ctx: RankContext, interleaved: bool) -> None:
    """Count the earlier buckets that are already updated when DDP passes a bucket to the hook."""
    updated_counts: list[int] = []
    reduced: list[tuple[torch.Tensor, torch.Tensor]] = []

    def watching_hook(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        if bucket.index() == 0:
            updated_counts.clear()
            reduced.clear()
        updated_counts.append(sum(not torch.equal(param, before) for param, before in reduced))
        reduced.append((bucket.parameters()[0], bucket.parameters()[0].clone()))
        return allreduce_hook(state, bucket)

    setup = Setup(interleaved=interleaved)
    ddp = setup.wrap(mlp())
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
    replace(setup, hook=watching_hook).connect(ddp, zero)
    for number in range(4):
        torch.autograd.backward(regression(ddp, number))
    assert updated_counts == ([0, 0, 1] if interleaved else [0, 0, 0])
    assert all(not torch.equal(param, before) for param, before in reduced)


@ranks(1, 2)
def test_functional_optimizers_map_to_plain_ones(ctx: RankContext) -> None:
    for plain, functional in functional_optim_map.items():
        parity = OverlapParityRun(Setup(), short_mlp, plain, overlapped_class=functional, lr=0.01)
        assert type(parity.zero.optim) is plain
        parity.train(4)
        with pytest.raises(ValueError, match="overlap_with_ddp"):
            ZeroRedundancyOptimizer(parity.ddp.parameters(), functional, lr=0.01)


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
    parity = OverlapParityRun(Setup(), mlp, torch.optim.SGD, lr=0.1)
    for _ in range(4):
        parity.train(1)
        torch.autograd.backward(regression(parity.ddp.module, 0))
        with pytest.warns(UserWarning, match="step\\(\\) does nothing"):
            assert parity.zero.step() is None
        parity.zero.zero_grad()
        parity.compare()


@ranks(1, 2)
def test_adding_groups_or_freezing_params_is_rejected(ctx: RankContext) -> None:
    parity = OverlapParityRun(Setup(), mlp, torch.optim.SGD, lr=0.1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="cannot be added"):
            parity.zero.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
        parity.train(3)
    first = next(parity.ddp.parameters()).requires_grad_(False)
    for act in (parity.zero.zero_grad, parity.zero.step):
        with pytest.raises(RuntimeError, match="requires_grad"):
            act()
    first.requires_grad_(True)
    parity.train(1)


@ranks(1, 2, 3)
def test_unfreezing_on_one_rank_raises_in_backward(ctx: RankContext) -> None:
    for setup in BOTH_HOOKS:
        parity = OverlapParityRun(setup, make_partly_frozen, torch.optim.SGD, lr=0.1)
        parity.train(3)
        unfrozen = next(param for param in parity.ddp.parameters() if not param.requires_grad)
        unfrozen.requires_grad_(ctx.rank == 0)
        with pytest.raises(RuntimeError, match="requires_grad cannot be changed"):
            torch.autograd.backward(regression(parity.ddp, 0))
        unfrozen.requires_grad_(False)
        parity.return_to_plain()
        parity.train(2)


@ranks(1, 2, 3)
def test_state_dict_round_trip(ctx: RankContext) -> None:
    for setup in (Setup(), Setup(interleaved=True, shard_buckets=True, static_graph=True)):
        parity, fresh = (
            OverlapParityRun(setup, short_mlp, torch.optim.AdamW, read=two_groups, lr=0.01) for _ in range(2)
        )
        for _ in range(setup.warmup):
            for call in (parity.zero.state_dict, parity.zero.consolidate_state_dict, parity.zero.full_state_dict):
                with pytest.raises(RuntimeError, match=f"Call it after {setup.warmup} backward passes"):
                    call()
            with pytest.raises(RuntimeError, match=f"Call it after {setup.warmup} backward passes"):
                parity.zero.load_state_dict(parity.plain.state_dict())
            parity.train(1)
        parity.train(2)
        for target in range(ctx.world_size):
            parity.zero.consolidate_state_dict(to=target)
        assert_same(parity.zero.state_dict(), parity.plain.state_dict())

        fresh.train(setup.warmup)
        fresh.plain_ddp, fresh.plain, fresh.passes = parity.plain_ddp, parity.plain, parity.passes
        fresh.return_to_plain()
        fresh.train(3)


@ranks(1, 2, 3)
def test_failed_step_raises_from_backward_on_all_ranks(ctx: RankContext) -> None:
    for setup in setups(static_graph=False, shard_buckets=False):
        parity = OverlapParityRun(setup, short_mlp, torch.optim.SGD, lr=0.1, momentum=0.9)
        parity.train(4)
        failing = ctx.world_size - 1
        with pytest.MonkeyPatch.context() as patch:
            if ctx.rank == failing:
                patch.setattr(parity.zero.optim, "step", raise_arithmetic_error)
            with pytest.raises((ArithmeticError, RankFailedError), match="out of cheese") as caught:
                torch.autograd.backward(regression(parity.ddp, 0))
        assert caught.type is (ArithmeticError if ctx.rank == failing else RankFailedError)
        parity.return_to_plain()
        parity.train(3)


@ranks(2, timeout=30)
def test_shard_buckets_must_be_equal_on_all_ranks(ctx: RankContext) -> None:
    """A refused assignment of buckets leaves the optimizer as it was."""
    parity = OverlapParityRun(Setup(shard_buckets=ctx.rank == 1), mlp, torch.optim.SGD, lr=0.1)
    parity.train(1)
    digest = parity.zero.layout.digest
    with pytest.raises(RankMismatchError, match="shard_buckets"):
        parity.train(1)
    assert parity.zero.layout.digest == digest


def raise_arithmetic_error(*args: Any) -> None:
    raise ArithmeticError("out of cheese")


@ranks(1, 2, 3)
def test_optimizer_over_some_params_only(ctx: RankContext) -> None:
    for setup in BOTH_HOOKS:
        for layer in ("0", "4", "8"):
            read = partial(layer_parameters, layer)
            OverlapParityRun(setup, mlp, torch.optim.AdamW, read=read, lr=0.01).train(4)


def layer_parameters(layer: str, model: nn.Module) -> Iterable[nn.Parameter]:
    return model.get_submodule(layer).parameters()


@ranks(1, 2)
def test_params_not_reduced_by_ddp_are_rejected(ctx: RankContext) -> None:
    ddp, foreign = Setup().wrap(mlp()), nn.Parameter(torch.zeros(3))
    zero = ZeroRedundancyOptimizer([*ddp.parameters(), foreign], torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
    Setup().connect(ddp, zero)
    torch.autograd.backward(regression(ddp, 0))
    for number in (1, 2):
        with pytest.raises(ValueError, match=r"parameters \[10\] of the optimizer are not reduced by DDP"):
            torch.autograd.backward(regression(ddp, number))
    with pytest.raises(RuntimeError, match="Call it after"):
        zero.state_dict()
