"""Parameters that are used several times, on some ranks, or not at all; frozen and thawed ones."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support import RankContext, ranks
from tests.support.oracles import (
    WIDTH,
    ZERO1,
    ZERO2,
    Branches,
    ShardTwins,
    Side,
    batch,
    both_stages,
    mlp,
    seeded,
    some_configs,
    through_branches,
)
from tests.support.tiers import sampled
from zeroshard import ZeroConfig, ZeroRedundancyOptimizer, shard


class LayerChoiceNet(nn.Module):
    """Layers of which each pass uses some: `used(rank, number)` says which."""

    NUM_LAYERS = 5

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(self.NUM_LAYERS))

    def forward(self, x: torch.Tensor, used: list[int]) -> torch.Tensor:
        for place in used:
            x = self.layers[place](x).tanh()
        return x


LayerSchedule = Callable[[int, int], list[int]]
LAYER_SCHEDULES: dict[str, LayerSchedule] = {
    "another-layer-on-each-rank": lambda rank, _: [rank % 5],
    "from-step-to-step": lambda _, number: [number % 5, (number + 2) % 5],
    "both": lambda rank, number: [(rank + number) % 5, (3 * rank + 2 * number + 1) % 5],
    "several-times": lambda rank, number: [0, 1, 0, 2, 1, 0] if number % 2 else [3, 3, rank % 2],
    "from-back-to-front": lambda rank, _: list(range(5))[:: -1 if rank % 2 else 1],
    "more-and-more": lambda rank, number: list(range(rank % 3, min(5, rank % 3 + number + 1))),
    "less-and-less": lambda rank, number: list(range(max(1, 4 - number + rank % 2))),
}


@sampled("plan", LAYER_SCHEDULES)
@ranks(2, 3)
def test_layer_subsets_per_pass_and_rank(ctx: RankContext, plan: str) -> None:
    def loss(model: nn.Module, number: int) -> torch.Tensor:
        result: torch.Tensor = model(batch(number), LAYER_SCHEDULES[plan](ctx.rank, number)).square().mean()
        return result

    for config in (ZERO2, ZERO1, ZeroConfig(partition=ZERO2.partition, overlap_param_gather=True)):
        ShardTwins(config, LayerChoiceNet, find_unused=True).train(4, loss)


@some_configs
@ranks(1, 2, 3)
def test_params_unused_on_some_or_all_ranks(ctx: RankContext, config: ZeroConfig) -> None:
    ShardTwins(config, Branches, find_unused=True).train(5, through_branches)


@both_stages
@ranks(2)
def test_unused_params_with_no_sync_passes(ctx: RankContext, config: ZeroConfig) -> None:
    """What only a local pass has used goes along with the pass that sends."""

    def iterate(side: Side, number: int) -> None:
        side.backward_locally(number + 1, through_branches)
        side.iterate(number, through_branches)

    twins = ShardTwins(config, Branches, find_unused=True)
    twins.run(4, iterate)


@both_stages
@ranks(2)
def test_unused_params_keep_zero_grads(ctx: RankContext, config: ZeroConfig) -> None:
    """Zeros instead of None: what was used once goes on decaying."""

    def iterate(side: Side, number: int) -> None:
        side.backward(number, through_branches)
        side.optimizer.step()
        side.optimizer.zero_grad(set_to_none=False)

    ShardTwins(config, Branches, find_unused=True).run(4, iterate)


class TiedNet(nn.Module):
    """The same weight at both ends, and the same layer twice between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.between, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.between(self.between(self.first(x)).tanh())
        result: torch.Tensor = self.last(hidden)
        return result


@some_configs
@ranks(1, 3)
def test_tied_weights_and_layers_used_twice(ctx: RankContext, config: ZeroConfig) -> None:
    twins = ShardTwins(config, TiedNet)
    assert len(twins.zero.layout.params) == 5
    twins.train(4)
    assert twins.model.first.weight is twins.model.last.weight  # type: ignore[union-attr]


def freeze_layers(twins: ShardTwins, frozen: set[int]) -> None:
    """Freeze these layers, thaw all others, with DDP as it must be made then."""
    for model in (twins.model, twins.plain_model):
        for place, layer in enumerate(model.children()):
            layer.requires_grad_(place not in frozen)
    twins.wrap_plain()


@some_configs
@ranks(1, 2)
def test_freeze_and_unfreeze_layers(ctx: RankContext, config: ZeroConfig) -> None:
    twins = ShardTwins(config)
    for frozen in ({0, 4}, set[int](), {2}, {0, 2, 4, 6}, set[int]()):
        freeze_layers(twins, frozen)
        twins.train(2)


def make_partly_frozen() -> nn.Module:
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    for layer in layers[:2]:
        layer.requires_grad_(False)
    return nn.Sequential(*layers)


@some_configs
@ranks(2)
def test_unfreeze_layers_frozen_from_the_start(ctx: RankContext, config: ZeroConfig) -> None:
    twins = ShardTwins(config, make_partly_frozen)
    twins.train(2)
    for frozen in ({0}, set[int](), {1, 3}):
        freeze_layers(twins, frozen)
        twins.train(2)


@both_stages
@ranks(2)
def test_layer_frozen_after_backward_is_still_updated(ctx: RankContext, config: ZeroConfig) -> None:
    """What is there is used, as in torch."""
    twins = ShardTwins(config)
    for side in twins.sides:
        side.backward(0)
    for model in (twins.model, twins.plain_model):
        next(model.children()).requires_grad_(False)
    for side in twins.sides:
        side.update()
    twins.compare()


@ranks(1, 2)
def test_buckets_follow_backward_order_across_param_groups(ctx: RankContext) -> None:
    """With weights in one group and biases in another, buckets still follow the model from its end to its start."""
    model = seeded(lambda: mlp(12), 0)
    weights, biases = ([param for param in model.parameters() if param.dim() == it] for it in (2, 1))
    groups: Any = [{"params": weights, "weight_decay": 0.1}, {"params": biases}]
    place = {id(param): number for number, param in enumerate(model.parameters())}
    optimizers = (
        shard(model, torch.optim.SGD, params=groups, lr=0.1, config=ZERO2),
        ZeroRedundancyOptimizer(groups, torch.optim.SGD, lr=0.1, config=ZeroConfig(partition=ZERO2.partition)),
    )
    for optimizer in optimizers:
        params = optimizer._engine.params
        members = [
            {place[id(params[piece.param])] for piece in bucket.param_shards} for bucket in optimizer.layout.buckets
        ]
        assert len(members) > 3
        assert all(min(earlier) > max(later) for earlier, later in pairwise(members))


def early_exit_loss(model: nn.Module, number: int) -> torch.Tensor:
    """Ranks leave at different depths, others in each pass."""
    depth = 1 + (3 * number + dist.get_rank()) % LayerChoiceNet.NUM_LAYERS
    loss: torch.Tensor = model(batch(number), list(range(depth))).square().mean()
    return loss


@ranks(2, 3, 4)
@some_configs
def test_cleared_passes_with_other_used_params(ctx: RankContext, config: ZeroConfig) -> None:
    """By all ranks: none of them sends a pass that another has cleared."""
    twins = ShardTwins(config, LayerChoiceNet, find_unused=True)
    for number in range(10):
        for side in twins.sides:
            for skipped in range(number % 3):
                side.backward(100 + 2 * number + skipped, early_exit_loss)
            side.optimizer.zero_grad()
            side.backward(number, early_exit_loss)
            side.update()
        twins.compare()


def fail_backward(_: torch.Tensor) -> None:
    raise ArithmeticError("on purpose")


@ranks(2, 3)
@some_configs
def test_backward_failure_on_one_rank_cleared_on_all(ctx: RankContext, config: ZeroConfig) -> None:
    twins = ShardTwins(config)
    twins.train(1)
    first, rest = twins.model[:2], twins.model[2:]  # type: ignore[index]
    hidden = first(batch(0))
    if ctx.rank == 1:
        hidden.register_hook(fail_backward)
    loss = rest(hidden).square().mean()
    with pytest.raises(ArithmeticError) if ctx.rank == 1 else nullcontext():
        torch.autograd.backward(loss)
    twins.zero.zero_grad()
    twins.train(2)


@ranks(2, 3)
@some_configs
def test_unfrozen_layers_accumulate_before_reduce(ctx: RankContext, config: ZeroConfig) -> None:
    """As DDP adds them: those of passes inside `no_sync()` and of the last one first, then those of all ranks."""
    twins = ShardTwins(config, find_unused=True)
    for number in range(4):
        for model in (twins.model, twins.plain_model):
            model[0].requires_grad_(number % 2 == 0)  # type: ignore[index]
        twins.wrap_plain()
        for side in twins.sides:
            side.backward_locally(3 * number)
            side.backward_locally(3 * number + 1)
            side.backward(3 * number + 2)
            side.update()
        twins.compare()


@ranks(2)
@both_stages
def test_pass_after_clipping_adds_to_grads_of_unfrozen_layers(ctx: RankContext, config: ZeroConfig) -> None:
    """Between their unfreezing and the next step. DDP rounds otherwise: it adds the second pass before it averages."""
    twins = ShardTwins(config, make_partly_frozen)
    twins.train(1)
    freeze_layers(twins, set[int]())
    for side in twins.sides:
        side.backward(1)
        if side.optimizer is twins.zero:
            twins.zero.clip_grad_value_(0.01)
        else:
            nn.utils.clip_grad_value_(side.model.parameters(), 0.01)
        side.backward(2)
        side.update()
    for ours, theirs in zip(twins.model.parameters(), twins.plain_model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


@ranks(2)
def test_clip_after_unfreezing_a_layer_in_a_bucket_in_use(ctx: RankContext) -> None:
    """Backward reduces its gradient before it has a hook; clipping adds the hook and must keep the gradient."""
    twins = ShardTwins(ZeroConfig(), make_partly_frozen)
    twins.train(1)
    for frozen in ({1}, set[int]()):
        freeze_layers(twins, frozen)
        for side in twins.sides:
            side.backward(1)
            if side.optimizer is twins.zero:
                twins.zero.clip_grad_value_(0.01)
            else:
                nn.utils.clip_grad_value_(side.model.parameters(), 0.01)
            side.update()
        twins.compare()


@ranks(2)
def test_two_passes_after_unfreezing_a_layer_in_a_bucket_in_use(ctx: RankContext) -> None:
    """The first pass reduces the layer's gradient before the layer has hooks; the second adds to it."""
    twins = ShardTwins(ZeroConfig(), make_partly_frozen)
    twins.train(1)
    for frozen in ({1}, set[int]()):
        freeze_layers(twins, frozen)
        for side in twins.sides:
            side.backward(1)
            side.backward(2)
            side.update()
    for ours, theirs in zip(twins.model.parameters(), twins.plain_model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)  # DDP averages after the second pass: it rounds differently
