"""Rules: training with several optimizer classes equals the same classes side by side under DDP, bit by bit."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler as TorchScaler
from torch.distributed.algorithms.join import Join
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW, Muon
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

from tests.support import RankContext, ranks
from tests.support.oracles import (
    CONFIGS,
    MUON,
    RULES_ADAMW,
    TINY,
    ParitySide,
    PlainOptimizers,
    RulesParityRun,
    Words,
    assert_same,
    average,
    gather_from_all_ranks,
    is_hidden_matrix,
    make_seeded,
    muon_and_adamw,
    next_word_loss,
    rules,
)
from zeroshard import (
    GradScaler,
    ParamRule,
    ShardedOptimizer,
    WholeParams,
    ZeroConfig,
    matrix_params,
    remaining_params,
    shard,
)
from zeroshard._types import Rank


@ranks(1, 2, 3, 4)
def test_training_matches_ddp_with_one_optimizer_per_rule(ctx: RankContext) -> None:
    for config in CONFIGS[:: 2 if ctx.world_size in (1, 4) else 1]:
        parity = RulesParityRun(config=config)
        parity.train(3)
        parity.check_state()


@ranks(2, 3)
def test_muon_owns_whole_matrices_and_adamw_flat_shards(ctx: RankContext) -> None:
    zero = RulesParityRun().zero
    whole = [bucket.has_whole_params for bucket in zero.layout.buckets]
    assert sorted(whole) == [False, True]
    for spec in zero.layout.params:
        owners = [rank for rank in range(ctx.world_size) if spec.index in zero.layout.params_owned_by(Rank(rank))]
        assert len(owners) == 1 or spec.group == 1, spec
    assert zero.balance.memory_imbalance < 1.5
    muon, adamw = zero.inner_optimizers
    assert type(muon) is Muon
    assert type(adamw) is AdamW
    assert all(param.dim() == 2 for param in muon.param_groups[0]["params"])
    assert len(adamw.param_groups[0]["params"]) == 1, "its parameters form one flat parameter"


def clip_by_inf_norm(side: ParitySide) -> None:
    """Clip by the inf norm, whose value does not depend on a summation order."""
    if isinstance(side.optimizer, ShardedOptimizer):
        norm = side.optimizer.clip_grad_norm_(0.01, math.inf)
    else:
        norm = clip_grad_norm_(side.model.parameters(), 0.01, math.inf)
    assert norm > 0.01


@ranks(1, 2, 3, 4)
def test_clipping_covers_all_optimizers(ctx: RankContext) -> None:
    for config in CONFIGS[1:3]:
        RulesParityRun(config=config).train(2, clip_by_inf_norm)


@ranks(2)
def test_grad_norm_covers_all_optimizers(ctx: RankContext) -> None:
    parity = RulesParityRun()
    parity.backward()
    expected = clip_grad_norm_(parity.plain_model.parameters(), 1e9)
    torch.testing.assert_close(parity.zero.clip_grad_norm_(1e9), expected, rtol=1e-6, atol=0)


def halving_scheduler(optimizer: Any) -> LRScheduler:
    return LambdaLR(optimizer, lambda epoch: 0.5**epoch)


def one_cycle_scheduler(optimizer: Any) -> LRScheduler:
    peaks = [10 * group["lr"] for group in optimizer.param_groups]
    return OneCycleLR(optimizer, peaks, total_steps=8, cycle_momentum=False)


@ranks(1, 3)
@pytest.mark.parametrize("make_scheduler", [halving_scheduler, one_cycle_scheduler])
def test_scheduler_covers_groups_of_all_optimizers(
    ctx: RankContext, make_scheduler: Callable[[Any], LRScheduler]
) -> None:
    parity = RulesParityRun(config=CONFIGS[1])
    schedulers = [make_scheduler(optimizer) for optimizer in (parity.zero, *parity.plain.members)]
    for _ in range(4):
        parity.train()
        for scheduler in schedulers:
            scheduler.step()
        ours, theirs = ([group["lr"] for group in optimizer.param_groups] for optimizer in (parity.zero, parity.plain))
        assert ours == theirs
        assert len(set(ours)) == 2


@ranks(1, 2, 3)
def test_grad_scaler(ctx: RankContext) -> None:
    settings: dict[str, Any] = {"device": "cpu", "init_scale": 1024.0, "growth_interval": 2}
    for config in CONFIGS[1:2]:
        parity, scalers = RulesParityRun(config=config), (GradScaler(**settings), TorchScaler(**settings))
        for factor in (1.0, math.inf if ctx.rank == 0 else 1.0, 1.0, 1.0):
            for side, scaler in zip(parity.sides, scalers, strict=True):
                torch.autograd.backward(scaler.scale(factor * next_word_loss(side.net, parity.steps)))
                for optimizer in (
                    side.optimizer.members if isinstance(side.optimizer, PlainOptimizers) else [side.optimizer]
                ):
                    scaler.unscale_(optimizer)
                clip_by_inf_norm_unchecked(side)
                for optimizer in (
                    side.optimizer.members if isinstance(side.optimizer, PlainOptimizers) else [side.optimizer]
                ):
                    scaler.step(optimizer)
                scaler.update()
                side.model.zero_grad()
            parity.steps += 1
            parity.check()
        assert scalers[0].get_scale() == scalers[1].get_scale() == 1024.0


def clip_by_inf_norm_unchecked(side: ParitySide) -> None:
    if isinstance(side.optimizer, ShardedOptimizer):
        side.optimizer.clip_grad_norm_(0.01, math.inf)
    else:
        clip_grad_norm_(side.model.parameters(), 0.01, math.inf)


class MasterWeightsOracle:
    """Plain optimizers that update float32 copies, and a model with the rounded copies."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.master_model = model, copy.deepcopy(model).float()
        self.optimizer = muon_and_adamw(self.master_model)

    def train_step(self, number: int) -> None:
        torch.autograd.backward(next_word_loss(self.model, number))
        for param, master in zip(self.model.parameters(), self.master_model.parameters(), strict=True):
            assert param.grad is not None
            master.grad = average(gather_from_all_ranks(param.grad))
            param.grad = None
        self.optimizer.step()
        with torch.no_grad():
            for param, master in zip(self.model.parameters(), self.master_model.parameters(), strict=True):
                param.copy_(master)


@ranks(1, 2, 3, 4)
def test_master_weights_match_fp32_oracle(ctx: RankContext) -> None:
    model, oracle = make_seeded(Words).bfloat16(), MasterWeightsOracle(make_seeded(Words).bfloat16())
    zero = shard(model, rules(), config=ZeroConfig(partition=TINY, master_dtype=torch.float32))
    for number in range(4):
        torch.autograd.backward(next_word_loss(model, number))
        zero.step()
        zero.zero_grad()
        oracle.train_step(number)
        assert_same(model.state_dict(), oracle.model.state_dict(), f"the model after step {number}")


@ranks(1, 2, 3)
def test_gradient_accumulation(ctx: RankContext) -> None:
    for config in CONFIGS[1:4]:
        parity = RulesParityRun(config=config)
        for _ in range(2):
            for side in parity.sides:
                local = parity.zero.no_sync if side.optimizer is parity.zero else parity.ddp.no_sync
                for number in range(3):
                    with local() if number < 2 else nullcontext():
                        torch.autograd.backward(next_word_loss(side.net, 10 * parity.steps + number) / 3)
                side.optimizer.step()
                side.model.zero_grad()
            parity.steps += 1
            parity.check()


@ranks(1, 2, 3)
def test_closure_is_called_once_for_all_optimizers(ctx: RankContext) -> None:
    parity = RulesParityRun(config=CONFIGS[1])
    losses: list[float] = []
    for _ in range(3):
        for side in parity.sides:

            def closure(side: ParitySide = side) -> Tensor:
                side.model.zero_grad()
                loss = next_word_loss(side.net, parity.steps)
                torch.autograd.backward(loss)
                losses.append(loss.item())
                return loss

            assert side.optimizer.step(closure).item() == losses[-1]
        parity.steps += 1
        parity.check()
    assert len(losses) == 6
    assert losses[::2] == losses[1::2]


def loss_with_skipped_blocks(model: nn.Module, number: int) -> Tensor:
    """The loss of a model with one block that only odd ranks use, and one that no rank uses in even passes."""
    words = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    assert isinstance(words, Words)
    is_odd_rank, is_odd_pass = torch.distributed.get_rank() % 2, number % 2
    words.skipped = {*([] if is_odd_rank else [0]), *([] if is_odd_pass else [1])}
    return next_word_loss(model, number)


@ranks(1, 2, 3, 4)
def test_params_without_gradients(ctx: RankContext) -> None:
    for config in (CONFIGS[1], CONFIGS[4]):
        parity = RulesParityRun(config=config, loss=loss_with_skipped_blocks, find_unused=True)
        parity.train(4)
        parity.check_state()


def make_partly_frozen() -> nn.Module:
    model = Words()
    model.blocks[1].requires_grad_(False)
    model.embed.requires_grad_(False)
    return model


@ranks(1, 2, 3)
def test_unfreeze_params(ctx: RankContext) -> None:
    for config in (CONFIGS[1], CONFIGS[4]):
        parity = RulesParityRun(make=make_partly_frozen, config=config)
        parity.train(2)
        for model in (parity.model, parity.plain_model):
            model.requires_grad_(True)
        parity.wrap_plain()
        parity.train(2)
        parity.check_state()


def make_three_plain_optimizers(model: nn.Module) -> PlainOptimizers:
    named = list(model.named_parameters())
    biases = [(name, param) for name, param in named if name.endswith(".bias")]
    rest = [(name, param) for name, param in named if not is_hidden_matrix(name, param) and not name.endswith(".bias")]
    return PlainOptimizers(
        Muon([(name, param) for name, param in named if is_hidden_matrix(name, param)], **MUON),
        SGD(biases, lr=0.1, momentum=0.9),
        AdamW(rest, **RULES_ADAMW),
    )


THREE_RULES = [
    rules()[0],
    ParamRule(lambda name, _: name.endswith(".bias"), SGD, lr=0.1, momentum=0.9),
    ParamRule(remaining_params, AdamW, **RULES_ADAMW),
]


@ranks(1, 2, 4)
def test_three_optimizer_classes(ctx: RankContext) -> None:
    for config in (CONFIGS[1], CONFIGS[4]):
        parity = RulesParityRun(THREE_RULES, make_three_plain_optimizers, config=config)
        assert [group["optimizer"] for group in parity.zero.param_groups] == ["Muon", "SGD", "AdamW"]
        parity.train(3)
        parity.check_state()


def is_first_block(name: str, _: Tensor) -> bool:
    return name.startswith("blocks.0.")


def make_two_plain_adamws(model: nn.Module) -> PlainOptimizers:
    named = list(model.named_parameters())
    first = [(name, param) for name, param in named if is_first_block(name, param)]
    rest = [(name, param) for name, param in named if not is_first_block(name, param)]
    return PlainOptimizers(AdamW(first, lr=0.1, amsgrad=True), AdamW(rest, **RULES_ADAMW))


@ranks(1, 3)
def test_same_class_with_different_options(ctx: RankContext) -> None:
    two_rules = [
        ParamRule(is_first_block, AdamW, lr=0.1, amsgrad=True),
        ParamRule(remaining_params, AdamW, **RULES_ADAMW),
    ]
    for config in (CONFIGS[1], CONFIGS[4]):
        parity = RulesParityRun(two_rules, make_two_plain_adamws, config=config)
        assert [group["optimizer"] for group in parity.zero.param_groups] == ["AdamW", "AdamW 2"]
        parity.train(3)
        parity.check_state()


@ranks(2, 3)
def test_partition_per_rule_does_not_change_results(ctx: RankContext) -> None:
    """Partitioners decide which rank owns which parameter, and do not change results."""
    muon, adamw = rules()
    weighted = WholeParams(cost=lambda spec: 1.0 if spec.shape[0] == 8 else 0.001)
    rule_lists = [
        [ParamRule(muon.selector, Muon, partition=weighted, **MUON), adamw],
        [muon, ParamRule(remaining_params, AdamW, partition=TINY, **RULES_ADAMW)],
        [muon, ParamRule(remaining_params, AdamW, partition=WholeParams(), **RULES_ADAMW)],
    ]
    zeros = []
    for rule_list in rule_lists:
        parity = RulesParityRun(rule_list)
        parity.train(2)
        zeros.append(parity.zero)
    weighted_layout, small_layout, whole_layout = (zero.layout for zero in zeros)
    owned_specs = [
        [weighted_layout.params[index] for index in weighted_layout.params_owned_by(Rank(rank))]
        for rank in range(ctx.world_size)
    ]
    matrix_shapes = [[spec.shape for spec in specs if spec.group == 0] for specs in owned_specs]
    assert [(8, 6)] in matrix_shapes, "the owner of the expensive matrix owns no other"
    sizes = [
        {bucket.numel * bucket.dtype.itemsize for bucket in layout.buckets}
        for layout in (weighted_layout, small_layout)
    ]
    assert max(sizes[1]) <= 512 < max(sizes[0]), "all buckets are small if one rule asks for small buckets"
    assert all(bucket.has_whole_params for bucket in whole_layout.buckets)


class FailingMuon(Muon):
    """Fails once if `should_fail` is set."""

    should_fail = False

    def step(self, closure: Any = None) -> Any:
        if FailingMuon.should_fail:
            FailingMuon.should_fail = False
            raise ArithmeticError("a matrix that cannot be inverted")
        return super().step(closure)  # type: ignore[no-untyped-call]


@ranks(1, 2, 3)
def test_optimizer_failure_on_one_rank_is_raised_on_all_ranks(ctx: RankContext) -> None:
    model = make_seeded(Words)
    zero = shard(
        model, [ParamRule(matrix_params(("embed", "head")), FailingMuon, **MUON), rules()[1]], config=CONFIGS[1]
    )
    for number in range(4):
        torch.autograd.backward(next_word_loss(model, number))
        FailingMuon.should_fail = number == 1 and ctx.rank == ctx.world_size - 1
        if number == 1:
            with pytest.raises(Exception, match="a matrix that cannot be inverted"):
                zero.step()
        else:
            before = [param.detach().clone() for param in model.parameters()]
            zero.step()
            assert not any(map(torch.equal, before, model.parameters()))
        zero.zero_grad()
        values = [param.detach() for param in model.parameters()]
        for rank_values in ctx.gather(values):
            assert_same(values, rank_values, "parameters of all ranks")


@ranks(2, 3)
def test_join_with_uneven_inputs(ctx: RankContext) -> None:
    """Ranks without inputs own matrices, too. Gradients are averages over all ranks, including these."""
    model, plain_model = make_seeded(Words), make_seeded(Words)
    zero, plain = shard(model, rules(), config=CONFIGS[1]), muon_and_adamw(plain_model)
    passes = 2 + ctx.rank
    with Join([zero]):
        for number in range(passes):
            torch.autograd.backward(next_word_loss(model, number))
            zero.step()
            zero.zero_grad()
    for number in range(1 + ctx.world_size):
        loss = next_word_loss(plain_model, number)
        torch.autograd.backward(loss if number < passes else 0 * loss)
        for param in plain_model.parameters():
            assert param.grad is not None
            param.grad = average(gather_from_all_ranks(param.grad))
        plain.step()
        plain.zero_grad()
    assert_same(model.state_dict(), plain_model.state_dict(), "the model")
