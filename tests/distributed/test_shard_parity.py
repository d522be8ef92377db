"""`shard` without DDP matches DDP with the plain optimizer: initial values, training, models, groups, failures."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from tests.support import RankContext, ranks
from tests.support.monitoring import recorded
from tests.support.oracles import (
    WIDTH,
    ZERO1,
    ZERO2,
    DdpParityRun,
    Side,
    all_configs,
    all_equal,
    assert_equal_sums,
    batch,
    both_stages,
    clone_values,
    make_seeded,
    mlp,
    regression,
    some_configs,
)
from zeroshard import ConfigError, RankFailedError, RankMismatchError, WholeParams, ZeroConfig, shard


class MixedParamsNet(nn.Module):
    """Frozen, scalar, empty and channels-last parameters, buffers of several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        # No bias: before a BatchNorm its gradient is only a rounding error, which AdamW would amplify.
        self.conv = nn.Conv2d(2, 3, 3, padding=1, bias=False).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.norm = nn.BatchNorm2d(3)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.scale = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.randn(0, 3))
        self.register_buffer("noise", torch.randn(5, dtype=torch.float64))
        self.register_buffer("unset", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.frozen(x).view(-1, 2, 1, 3).expand(-1, -1, 4, -1)
        result: torch.Tensor = self.norm(self.conv(hidden)).mean((1, 2, 3)) * self.scale + self.empty.sum()
        return result


def mean_square(model: nn.Module, number: int) -> torch.Tensor:
    loss: torch.Tensor = model(batch(number)).square().mean()
    return loss


@ranks(1, 2, 3, 4)
def test_training_matches_ddp(ctx: RankContext) -> None:
    for config in all_configs():
        DdpParityRun(config).train(4)


@ranks(1, 2, 3, 4)
def test_optimizer_options(ctx: RankContext) -> None:
    DdpParityRun(ZERO2, optimizer_class=torch.optim.SGD, lr=0.3, momentum=0.9, nesterov=True).train(3)
    DdpParityRun(ZERO2, optimizer_class=torch.optim.SGD, lr=0.3, weight_decay=0.1, maximize=True).train(3)


@some_configs
@ranks(1, 3)
def test_params_and_buffers_of_every_kind(ctx: RankContext, config: ZeroConfig) -> None:
    # The gradient of `empty` has no elements; some versions of DDP report the parameter as unused.
    DdpParityRun(config, MixedParamsNet, find_unused=True).train(3, mean_square)


@both_stages
@ranks(1, 2, 3, 4)
def test_shard_broadcasts_params_and_buffers_of_rank_0(ctx: RankContext, config: ZeroConfig) -> None:
    model, expected = make_seeded(MixedParamsNet, ctx.rank + 1), make_seeded(MixedParamsNet, 1)
    is_different = not all_equal(ctx.gather(clone_values(model)))
    assert is_different == (ctx.world_size > 1)
    zero = shard(model, torch.optim.AdamW, config=config)
    assert all_equal([clone_values(model), clone_values(expected)])
    assert model.get_parameter("conv.weight").is_contiguous(memory_format=torch.channels_last)
    assert zero.world_size == ctx.world_size


def train_mlp(config: ZeroConfig) -> list[torch.Tensor]:
    model = make_seeded(mlp, 0)
    optimizer = shard(model, torch.optim.AdamW, lr=0.05, config=config)
    for number in range(4):
        torch.autograd.backward(regression(model, number))
        optimizer.step()
        optimizer.zero_grad()
    return clone_values(model)


@both_stages
@ranks(2, 3, 4)
def test_repeated_run_is_bitwise_equal_on_all_ranks(ctx: RankContext, config: ZeroConfig) -> None:
    assert all_equal([train_mlp(config), *ctx.gather(train_mlp(config))])


@ranks(3)
def test_buckets_and_stage_do_not_change_a_bit(ctx: RankContext) -> None:
    assert all_equal([train_mlp(config) for config in all_configs()])


@both_stages
@ranks(2, 3)
def test_param_groups_with_different_options(ctx: RankContext, config: ZeroConfig) -> None:
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        first, second, *rest = model.parameters()
        return [{"params": rest, "lr": 0.02}, {"params": [second], "weight_decay": 0.5}, {"params": first}]

    DdpParityRun(config, get_params=groups).train(3)


def first_layer(model: nn.Module) -> nn.Module:
    return next(model.children())


def params_after_first_layer(model: nn.Module) -> list[nn.Parameter]:
    return list(model.parameters())[2:]


def make_with_frozen_first_layer() -> nn.Module:
    model = mlp()
    first_layer(model).requires_grad_(False)
    return model


@some_configs
@ranks(2)
def test_subset_of_params(ctx: RankContext, config: ZeroConfig) -> None:
    """Parameters outside the subset start equal on all ranks, too."""
    DdpParityRun(config, make_with_frozen_first_layer, get_params=params_after_first_layer).train(3)


@some_configs
@ranks(2)
def test_add_param_group(ctx: RankContext, config: ZeroConfig) -> None:
    parity = DdpParityRun(config, get_params=params_after_first_layer)
    parity.train(2)
    for side, model in zip(parity.sides, (parity.model, parity.plain_model), strict=True):
        model.zero_grad()  # also gradients of parameters that were in no group
        side.optimizer.add_param_group({"params": first_layer(model).parameters(), "lr": 0.01})
    parity.train(3)


@both_stages
@ranks(3, 4)
def test_two_process_groups_train_at_once(ctx: RankContext, config: ZeroConfig) -> None:
    """Two groups train at the same time, one of them without the world's rank 0."""
    halves = [dist.new_group([0]), dist.new_group(list(range(1, ctx.world_size)))]
    parity = DdpParityRun(config, group=halves[ctx.rank > 0])
    parity.train(3)
    values_by_rank = ctx.gather(clone_values(parity.model))
    assert all_equal(values_by_rank[1:])
    assert not all_equal(values_by_rank)


@both_stages
@ranks(1, 2)
def test_closure(ctx: RankContext, config: ZeroConfig) -> None:
    parity = DdpParityRun(config)
    losses: list[Any] = []

    def iterate(side: Side, number: int) -> None:
        def closure() -> torch.Tensor:
            side.optimizer.zero_grad()
            loss = regression(side.model, number)
            torch.autograd.backward(loss)
            return loss.detach()

        losses.append(side.optimizer.step(closure))  # type: ignore[arg-type]

    parity.run(3, iterate)
    for ours, theirs in zip(losses[::2], losses[1::2], strict=True):
        assert_equal_sums(ours, theirs, "the loss")


class EmbeddingNet(nn.Module):
    """Each row of a batch looks up a different index: gradients of a repeated index may be summed in any order."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(7, WIDTH, sparse=sparse)
        self.out = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        offset = x[0, 0].abs().mul(10).long()
        result: torch.Tensor = self.out(self.table((offset + torch.arange(len(x))) % 7))
        return result


@both_stages
@ranks(1, 2)
def test_sparse_gradients_are_made_dense(ctx: RankContext, config: ZeroConfig) -> None:
    for passes in (1, 2):
        parity = DdpParityRun(
            config, partial(EmbeddingNet, sparse=True), plain_model=partial(EmbeddingNet, sparse=False)
        )

        def iterate(side: Side, number: int, passes: int = passes) -> None:
            for local in range(1, passes):
                side.backward_locally(number + 100 * local, mean_square)
            side.iterate(number, mean_square)

        parity.run(3, iterate)


@ranks(1, 2, 3)
def test_whole_param_optimizer(ctx: RankContext) -> None:
    for config in (ZeroConfig(), ZeroConfig(stage=ZERO1.stage), ZeroConfig(partition=WholeParams())):
        expect_warning = (
            pytest.warns(UserWarning, match="whole parameters") if config.partition is None else nullcontext()
        )
        with expect_warning:
            parity = DdpParityRun(config, optimizer_class=torch.optim.Adafactor, lr=0.05)
        parity.train(3)


class TwoHeads(nn.Module):
    """A trunk and two heads, one of which only odd ranks use."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.all, self.odd = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.trunk(x)
        result: torch.Tensor = self.all(hidden) + (self.odd(hidden) if dist.get_rank() % 2 else 0)
        return result


PARAM_HALVES: list[Callable[[nn.Module], list[nn.Parameter]]] = [
    lambda model: [param for param in model.parameters() if param.dim() > 1],
    lambda model: [param for param in model.parameters() if param.dim() == 1],
]


@some_configs
@ranks(3, timeout=20)
def test_two_optimizers_on_one_model(ctx: RankContext, config: ZeroConfig) -> None:
    """Their gradients are in flight at the same time, in a different order on each rank."""
    model, plain = make_seeded(TwoHeads, ctx.rank), make_seeded(TwoHeads, 0)
    ddp = DistributedDataParallel(plain, find_unused_parameters=True)
    ours: list[Optimizer] = []
    theirs: list[Optimizer] = []
    for half, cls in zip(PARAM_HALVES, (torch.optim.AdamW, torch.optim.SGD), strict=True):
        ours.append(shard(model, cls, params=half(model), config=config, lr=0.05))
        theirs.append(cls(half(plain), lr=0.05))
    for number in range(4):
        for side, optimizers in ((model, ours), (ddp, theirs)):
            torch.autograd.backward(mean_square(side, number))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert_equal_sums(found, expected, "a parameter")


@both_stages
@ranks(3, timeout=20)
def test_two_models_in_one_backward(ctx: RankContext, config: ZeroConfig) -> None:
    """The second model takes the output of the first; in each pass one rank does not use it."""
    encoders, decoders = DdpParityRun(config), DdpParityRun(config)
    for number in range(3):
        for encoder, decoder in zip(encoders.sides, decoders.sides, strict=True):
            hidden = encoder.model(batch(number))
            decoded = decoder.model(hidden)
            loss = decoded.square().mean()
            if ctx.rank == number % ctx.world_size:
                # DDP cannot skip the second model completely: its gradients are zeros on this rank.
                loss = hidden.square().mean() + (0 * decoded.sum() if decoder.model is decoders.ddp else 0)
            torch.autograd.backward(loss)
            encoder.update()
            decoder.update()
    encoders.compare()
    decoders.compare()


@some_configs
@ranks(3, timeout=20)
def test_update_failure_on_one_rank_is_raised_on_all_and_training_continues(
    ctx: RankContext, config: ZeroConfig
) -> None:
    model = make_seeded(mlp, 0)
    zero = shard(model, torch.optim.SGD, lr=0.1, config=config)
    handle = zero.optim.register_step_pre_hook(_fail_on_rank_1)
    torch.autograd.backward(regression(model, 0))
    with pytest.raises(ArithmeticError if ctx.rank == 1 else RankFailedError, match="on purpose"):
        zero.step()
    handle.remove()
    zero.zero_grad()
    assert all_equal(ctx.gather(clone_values(model)))
    for number in range(2):
        Side(model, zero, zero.no_sync).iterate(number)
    assert all_equal(ctx.gather(clone_values(model)))


def _fail_on_rank_1(*_: Any) -> None:
    if dist.get_rank() == 1:
        raise ArithmeticError("on purpose")


@both_stages
@ranks(3, timeout=20)
def test_different_options_are_reported_before_any_update(ctx: RankContext, config: ZeroConfig) -> None:
    """Gradients are kept, and the step succeeds once all ranks have the same options."""
    parity = DdpParityRun(config)
    for side in parity.sides:
        side.backward(0)
    before = clone_values(parity.model)
    parity.zero.param_groups[0]["lr"] = 0.1 * (1 + ctx.rank)
    with pytest.raises(RankMismatchError, match="lr"):
        parity.zero.step()
    assert all_equal([before, clone_values(parity.model)])
    parity.zero.param_groups[0]["lr"] = parity.plain.param_groups[0]["lr"]
    for side in parity.sides:
        side.update()
    parity.compare()


@ranks(2, timeout=20)
def test_model_and_config_mismatch_is_reported(ctx: RankContext) -> None:
    with pytest.raises(RankMismatchError, match="shape"):
        shard(nn.Linear(WIDTH + ctx.rank, 3), torch.optim.SGD, lr=0.1)
    with pytest.raises(RankMismatchError, match=r"ZeroConfig\(stage=1\)"):
        shard(mlp(), torch.optim.SGD, lr=0.1, config=[ZERO1, ZERO2][ctx.rank])
    Side(model := mlp(), zero := shard(model, torch.optim.SGD, lr=0.1), zero.no_sync).iterate(0)


@ranks(1, 2, timeout=20)
def test_invalid_models_are_rejected(ctx: RankContext) -> None:
    with pytest.raises(ConfigError, match="without DistributedDataParallel"):
        shard(DistributedDataParallel(mlp()), torch.optim.SGD, lr=0.1)
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        shard([nn.Parameter(torch.ones(2))], torch.optim.SGD, lr=0.1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="non-leaf"):
        shard(mlp(), torch.optim.SGD, params=[nn.Parameter(torch.ones(2)) * 2], lr=0.1)
    with pytest.raises(ValueError, match="empty"):
        shard(nn.Tanh(), torch.optim.SGD, lr=0.1)


@some_configs
@ranks(1, 2)
def test_deleted_optimizer_is_freed_and_its_hooks_do_nothing(ctx: RankContext, config: ZeroConfig) -> None:
    model = nn.Sequential(make_seeded(mlp, 0), nn.BatchNorm1d(WIDTH))
    zero = shard(model, torch.optim.AdamW, lr=0.1, config=config)
    Side(model, zero, zero.no_sync).iterate(0)
    zero.wait_for_params()
    alive = weakref.ref(zero), weakref.ref(zero._engine), weakref.ref(next(iter(zero.optim.state)))
    del zero
    gc.collect()
    assert [ref() for ref in alive] == [None] * 3
    with recorded() as traffic:
        torch.autograd.backward(regression(model, 1))
    assert not traffic
    assert all(param.grad is not None for param in model.parameters())
    model.zero_grad()
    assert all(param.grad is None for param in model.parameters())
    second = shard(model, torch.optim.AdamW, lr=0.1, config=config)
    Side(model, second, second.no_sync).iterate(1)
    second.wait_for_params()
    assert all_equal(ctx.gather([param.detach().clone() for param in model.parameters()]))


def make_odd_sized_layers() -> nn.Module:
    """Layers whose parameters would not be aligned if they were packed without gaps."""
    return nn.Sequential(nn.Linear(13, 33), nn.Tanh(), nn.Linear(33, 65), nn.Tanh(), nn.Linear(65, 3))


def single_sample_loss(model: nn.Module, number: int) -> torch.Tensor:
    sample = torch.randn(1, 13, generator=torch.Generator().manual_seed(100 * number + dist.get_rank()))
    result: torch.Tensor = model(sample).square().mean()
    return result


@ranks(2)
def test_whole_params_match_ddp_bitwise_with_single_sample_batches(ctx: RankContext) -> None:
    """Matrix-vector products add in an order that depends on where a matrix starts in memory."""
    parity = DdpParityRun(ZeroConfig(partition=WholeParams()), make_odd_sized_layers, torch.optim.SGD, lr=0.05)
    parity.train(4, single_sample_loss)
    assert all(param.data_ptr() % 64 == 0 for param in parity.model.parameters())
