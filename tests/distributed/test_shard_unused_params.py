"""Parameters that are used several times, only on some ranks, or not at all; frozen and unfrozen parameters."""

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
    DdpParityRun,
    Side,
    batch,
    both_stages,
    branches_loss,
    make_seeded,
    mlp,
    some_configs,
)
from tests.support.tiers import sampled
from zeroshard import ZeroConfig, ZeroRedundancyOptimizer, shard


class LayerChoiceNet(nn.Module):
    """Layers that a pass applies in the order of `used`, which lists their indices."""

    NUM_LAYERS = 5

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(self.NUM_LAYERS))

    def forward(self, x: torch.Tensor, used: list[int]) -> torch.Tensor:
        for index in used:
            x = self.layers[index](x).tanh()
        return x


LayerSchedule = Callable[[int, int], list[int]]
"""Maps a rank and the number of a pass to the layers of that pass."""
LAYER_SCHEDULES: dict[str, LayerSchedule] = {
    "different-on-each-rank": lambda rank, _: [rank % 5],
    "different-in-each-step": lambda _, number: [number % 5, (number + 2) % 5],
    "both": lambda rank, number: [(rank + number) % 5, (3 * rank + 2 * number + 1) % 5],
    "several-times": lambda rank, number: [0, 1, 0, 2, 1, 0] if number % 2 else [3, 3, rank % 2],
    "reversed-on-odd-ranks": lambda rank, _: list(range(5))[:: -1 if rank % 2 else 1],
    "growing": lambda rank, number: list(range(rank % 3, min(5, rank % 3 + number + 1))),
    "shrinking": lambda rank, number: list(range(max(1, 4 - number + rank % 2))),
}


@sampled("schedule", LAYER_SCHEDULES)
@ranks(2, 3)
def test_layer_subsets_per_pass_and_rank(ctx: RankContext, schedule: str) -> None:
    def loss(model: nn.Module, number: int) -> torch.Tensor:
        result: torch.Tensor = model(batch(number), LAYER_SCHEDULES[schedule](ctx.rank, number)).square().mean()
        return result

    for config in (ZERO2, ZERO1, ZeroConfig(partition=ZERO2.partition, overlap_param_gather=True)):
        DdpParityRun(config, LayerChoiceNet, find_unused=True).train(4, loss)


@some_configs
@ranks(1, 2, 3)
def test_params_unused_on_some_or_all_ranks(ctx: RankContext, config: ZeroConfig) -> None:
    DdpParityRun(config, Branches, find_unused=True).train(5, branches_loss)


@both_stages
@ranks(2)
def test_unused_params_with_no_sync_passes(ctx: RankContext, config: ZeroConfig) -> None:
    """Gradients of parameters that only a local pass used are sent with the next synchronized pass."""

    def iterate(side: Side, number: int) -> None:
        side.backward_locally(number + 1, branches_loss)
        side.iterate(number, branches_loss)

    parity = DdpParityRun(config, Branches, find_unused=True)
    parity.run(4, iterate)


@both_stages
@ranks(2)
def test_unused_params_keep_zero_grads(ctx: RankContext, config: ZeroConfig) -> None:
    """With zeros instead of None, a parameter that was used once keeps decaying."""

    def iterate(side: Side, number: int) -> None:
        side.backward(number, branches_loss)
        side.optimizer.step()
        side.optimizer.zero_grad(set_to_none=False)

    DdpParityRun(config, Branches, find_unused=True).run(4, iterate)


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
    parity = DdpParityRun(config, TiedNet)
    assert len(parity.zero.layout.params) == 5
    parity.train(4)
    assert parity.model.first.weight is parity.model.last.weight  # type: ignore[union-attr]


def freeze_layers(parity: DdpParityRun, frozen: set[int]) -> None:
    """Freeze these layers, unfreeze all others, and wrap the plain model in a new DDP, as DDP requires."""
    for model in (parity.model, parity.plain_model):
        for index, layer in enumerate(model.children()):
            layer.requires_grad_(index not in frozen)
    parity.wrap_plain()


@some_configs
@ranks(1, 2)
def test_freeze_and_unfreeze_layers(ctx: RankContext, config: ZeroConfig) -> None:
    parity = DdpParityRun(config)
    for frozen in ({0, 4}, set[int](), {2}, {0, 2, 4, 6}, set[int]()):
        freeze_layers(parity, frozen)
        parity.train(2)


def make_partly_frozen() -> nn.Module:
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    for layer in layers[:2]:
        layer.requires_grad_(False)
    return nn.Sequential(*layers)


@some_configs
@ranks(2)
def test_unfreeze_layers_frozen_from_the_start(ctx: RankContext, config: ZeroConfig) -> None:
    parity = DdpParityRun(config, make_partly_frozen)
    parity.train(2)
    for frozen in ({0}, set[int](), {1, 3}):
        freeze_layers(parity, frozen)
        parity.train(2)


@both_stages
@ranks(2)
def test_layer_frozen_after_backward_is_still_updated(ctx: RankContext, config: ZeroConfig) -> None:
    """An existing gradient is used, as in torch."""
    parity = DdpParityRun(config)
    for side in parity.sides:
        side.backward(0)
    for model in (parity.model, parity.plain_model):
        next(model.children()).requires_grad_(False)
    for side in parity.sides:
        side.update()
    parity.compare()


@ranks(1, 2)
def test_buckets_follow_backward_order_across_param_groups(ctx: RankContext) -> None:
    """With weights in one group and biases in another, buckets still follow the model from its end to its start."""
    model = make_seeded(lambda: mlp(12), 0)
    weights, biases = ([param for param in model.parameters() if param.dim() == dim] for dim in (2, 1))
    groups: Any = [{"params": weights, "weight_decay": 0.1}, {"params": biases}]
    param_index = {id(param): index for index, param in enumerate(model.parameters())}
    optimizers = (
        shard(model, torch.optim.SGD, params=groups, lr=0.1, config=ZERO2),
        ZeroRedundancyOptimizer(groups, torch.optim.SGD, lr=0.1, config=ZeroConfig(partition=ZERO2.partition)),
    )
    for optimizer in optimizers:
        params = optimizer._engine.params.tensors
        buckets = [
            {param_index[id(params[param_shard.param])] for param_shard in bucket.param_shards}
            for bucket in optimizer.layout.buckets
        ]
        assert len(buckets) > 3
        assert all(min(earlier) > max(later) for earlier, later in pairwise(buckets))


def early_exit_loss(model: nn.Module, number: int) -> torch.Tensor:
    """Ranks exit at different depths, which change from pass to pass."""
    depth = 1 + (3 * number + dist.get_rank()) % LayerChoiceNet.NUM_LAYERS
    loss: torch.Tensor = model(batch(number), list(range(depth))).square().mean()
    return loss


@ranks(2, 3, 4)
@some_configs
def test_cleared_passes_with_other_used_params(ctx: RankContext, config: ZeroConfig) -> None:
    """All ranks clear the gradients: no rank sends those of a pass that another rank has cleared."""
    parity = DdpParityRun(config, LayerChoiceNet, find_unused=True)
    for number in range(10):
        for side in parity.sides:
            for cleared in range(number % 3):
                side.backward(100 + 2 * number + cleared, early_exit_loss)
            side.optimizer.zero_grad()
            side.backward(number, early_exit_loss)
            side.update()
        parity.compare()


def fail_backward(_: torch.Tensor) -> None:
    raise ArithmeticError("on purpose")


@ranks(2, 3)
@some_configs
def test_backward_failure_on_one_rank_cleared_on_all(ctx: RankContext, config: ZeroConfig) -> None:
    parity = DdpParityRun(config)
    parity.train(1)
    first, rest = parity.model[:2], parity.model[2:]  # type: ignore[index]
    hidden = first(batch(0))
    if ctx.rank == 1:
        hidden.register_hook(fail_backward)
    loss = rest(hidden).square().mean()
    with pytest.raises(ArithmeticError) if ctx.rank == 1 else nullcontext():
        torch.autograd.backward(loss)
    parity.zero.zero_grad()
    parity.train(2)


@ranks(2, 3)
@some_configs
def test_unfrozen_layers_accumulate_before_reduce(ctx: RankContext, config: ZeroConfig) -> None:
    """As in DDP, each rank first adds the passes inside `no_sync()` and the last one; then ranks are summed."""
    parity = DdpParityRun(config, find_unused=True)
    for number in range(4):
        for model in (parity.model, parity.plain_model):
            model[0].requires_grad_(number % 2 == 0)  # type: ignore[index]
        parity.wrap_plain()
        for side in parity.sides:
            side.backward_locally(3 * number)
            side.backward_locally(3 * number + 1)
            side.backward(3 * number + 2)
            side.update()
        parity.compare()


@ranks(2)
@both_stages
def test_pass_after_clipping_adds_to_grads_of_unfrozen_layers(ctx: RankContext, config: ZeroConfig) -> None:
    """Before the first step after unfreezing. DDP rounds differently: it adds the second pass before averaging."""
    parity = DdpParityRun(config, make_partly_frozen)
    parity.train(1)
    freeze_layers(parity, set[int]())
    for side in parity.sides:
        side.backward(1)
        if side.optimizer is parity.zero:
            parity.zero.clip_grad_value_(0.01)
        else:
            nn.utils.clip_grad_value_(side.model.parameters(), 0.01)
        side.backward(2)
        side.update()
    for ours, theirs in zip(parity.model.parameters(), parity.plain_model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


@ranks(2)
def test_clip_after_unfreezing_a_layer_in_a_bucket_in_use(ctx: RankContext) -> None:
    """Backward reduces its gradient before it has a hook; clipping adds the hook and must keep the gradient."""
    parity = DdpParityRun(ZeroConfig(), make_partly_frozen)
    parity.train(1)
    for frozen in ({1}, set[int]()):
        freeze_layers(parity, frozen)
        for side in parity.sides:
            side.backward(1)
            if side.optimizer is parity.zero:
                parity.zero.clip_grad_value_(0.01)
            else:
                nn.utils.clip_grad_value_(side.model.parameters(), 0.01)
            side.update()
        parity.compare()


@ranks(2)
def test_two_passes_after_unfreezing_a_layer_in_a_bucket_in_use(ctx: RankContext) -> None:
    """The first pass reduces the layer's gradient before the layer has hooks; the second adds to it."""
    parity = DdpParityRun(ZeroConfig(), make_partly_frozen)
    parity.train(1)
    for frozen in ({1}, set[int]()):
        freeze_layers(parity, frozen)
        for side in parity.sides:
            side.backward(1)
            side.backward(2)
            side.update()
    for ours, theirs in zip(parity.model.parameters(), parity.plain_model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)  # DDP averages after the second pass: it rounds differently
