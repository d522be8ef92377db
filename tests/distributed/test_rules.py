"""Rules: a model with several optimizer classes is trained as by those classes side by side under DDP, bit for bit."""

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
    PairSide,
    RulesPair,
    Several,
    Words,
    assert_same,
    average,
    from_all_ranks,
    hidden,
    muon_and_adamw,
    next_word,
    rules,
    seeded,
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
        pair = RulesPair(config=config)
        pair.train(3)
        pair.check_state()


@ranks(2, 3)
def test_muon_owns_whole_matrices_and_adamw_flat_shards(ctx: RankContext) -> None:
    zero = RulesPair().zero
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
    assert len(adamw.param_groups[0]["params"]) == 1, "its parameters are one run of memory"


def clip_by_inf_norm(side: PairSide) -> None:
    """Its value does not depend on the order in which things are added up."""
    if isinstance(side.optimizer, ShardedOptimizer):
        norm = side.optimizer.clip_grad_norm_(0.01, math.inf)
    else:
        norm = clip_grad_norm_(side.model.parameters(), 0.01, math.inf)
    assert norm > 0.01


@ranks(1, 2, 3, 4)
def test_clipping_covers_all_optimizers(ctx: RankContext) -> None:
    for config in CONFIGS[1:3]:
        RulesPair(config=config).train(2, clip_by_inf_norm)


@ranks(2)
def test_grad_norm_covers_all_optimizers(ctx: RankContext) -> None:
    pair = RulesPair()
    pair.backward()
    expected = clip_grad_norm_(pair.plain_model.parameters(), 1e9)
    torch.testing.assert_close(pair.zero.clip_grad_norm_(1e9), expected, rtol=1e-6, atol=0)


def halving_scheduler(optimizer: Any) -> LRScheduler:
    return LambdaLR(optimizer, lambda epoch: 0.5**epoch)


def one_cycle_scheduler(optimizer: Any) -> LRScheduler:
    peaks = [10 * group["lr"] for group in optimizer.param_groups]
    return OneCycleLR(optimizer, peaks, total_steps=8, cycle_momentum=False)


@ranks(1, 3)
@pytest.mark.parametrize("make", [halving_scheduler, one_cycle_scheduler])
def test_scheduler_covers_groups_of_all_optimizers(ctx: RankContext, make: Callable[[Any], LRScheduler]) -> None:
    pair = RulesPair(config=CONFIGS[1])
    schedulers = [make(it) for it in (pair.zero, *pair.plain.members)]
    for _ in range(4):
        pair.train()
        for scheduler in schedulers:
            scheduler.step()
        ours, theirs = ([group["lr"] for group in it.param_groups] for it in (pair.zero, pair.plain))
        assert ours == theirs
        assert len(set(ours)) == 2


@ranks(1, 2, 3)
def test_grad_scaler(ctx: RankContext) -> None:
    settings: dict[str, Any] = {"device": "cpu", "init_scale": 1024.0, "growth_interval": 2}
    for config in CONFIGS[1:2]:
        pair, scalers = RulesPair(config=config), (GradScaler(**settings), TorchScaler(**settings))
        for factor in (1.0, math.inf if ctx.rank == 0 else 1.0, 1.0, 1.0):
            for side, scaler in zip(pair.sides, scalers, strict=True):
                torch.autograd.backward(scaler.scale(factor * next_word(side.net, pair.steps)))
                for optimizer in side.optimizer.members if isinstance(side.optimizer, Several) else [side.optimizer]:
                    scaler.unscale_(optimizer)
                clip_by_inf_norm_unchecked(side)
                for optimizer in side.optimizer.members if isinstance(side.optimizer, Several) else [side.optimizer]:
                    scaler.step(optimizer)
                scaler.update()
                side.model.zero_grad()
            pair.steps += 1
            pair.check()
        assert scalers[0].get_scale() == scalers[1].get_scale() == 1024.0


def clip_by_inf_norm_unchecked(side: PairSide) -> None:
    if isinstance(side.optimizer, ShardedOptimizer):
        side.optimizer.clip_grad_norm_(0.01, math.inf)
    else:
        clip_grad_norm_(side.model.parameters(), 0.01, math.inf)


class MasterWeightsOracle:
    """Plain optimizers over float32 copies, whose rounded image the model is."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.master_model = model, copy.deepcopy(model).float()
        self.optimizer = muon_and_adamw(self.master_model)

    def train_step(self, number: int) -> None:
        torch.autograd.backward(next_word(self.model, number))
        for param, master in zip(self.model.parameters(), self.master_model.parameters(), strict=True):
            assert param.grad is not None
            master.grad = average(from_all_ranks(param.grad))
            param.grad = None
        self.optimizer.step()
        with torch.no_grad():
            for param, master in zip(self.model.parameters(), self.master_model.parameters(), strict=True):
                param.copy_(master)


@ranks(1, 2, 3, 4)
def test_master_weights_match_fp32_oracle(ctx: RankContext) -> None:
    model, oracle = seeded(Words).bfloat16(), MasterWeightsOracle(seeded(Words).bfloat16())
    zero = shard(model, rules(), config=ZeroConfig(partition=TINY, master_dtype=torch.float32))
    for number in range(4):
        torch.autograd.backward(next_word(model, number))
        zero.step()
        zero.zero_grad()
        oracle.train_step(number)
        assert_same(model.state_dict(), oracle.model.state_dict(), f"the model after step {number}")


@ranks(1, 2, 3)
def test_gradient_accumulation(ctx: RankContext) -> None:
    for config in CONFIGS[1:4]:
        pair = RulesPair(config=config)
        for _ in range(2):
            for side in pair.sides:
                local = pair.zero.no_sync if side.optimizer is pair.zero else pair.ddp.no_sync
                for number in range(3):
                    with local() if number < 2 else nullcontext():
                        torch.autograd.backward(next_word(side.net, 10 * pair.steps + number) / 3)
                side.optimizer.step()
                side.model.zero_grad()
            pair.steps += 1
            pair.check()


@ranks(1, 2, 3)
def test_closure_is_called_once_for_all_optimizers(ctx: RankContext) -> None:
    pair = RulesPair(config=CONFIGS[1])
    losses: list[float] = []
    for _ in range(3):
        for side in pair.sides:

            def closure(side: PairSide = side) -> Tensor:
                side.model.zero_grad()
                loss = next_word(side.net, pair.steps)
                torch.autograd.backward(loss)
                losses.append(loss.item())
                return loss

            assert side.optimizer.step(closure).item() == losses[-1]
        pair.steps += 1
        pair.check()
    assert len(losses) == 6
    assert losses[::2] == losses[1::2]


def loss_with_skipped_blocks(model: nn.Module, number: int) -> Tensor:
    """One block that only odd ranks use, one that none uses in even passes."""
    words = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    assert isinstance(words, Words)
    odd_rank, odd_pass = torch.distributed.get_rank() % 2, number % 2
    words.skipped = {*([] if odd_rank else [0]), *([] if odd_pass else [1])}
    return next_word(model, number)


@ranks(1, 2, 3, 4)
def test_params_without_gradients(ctx: RankContext) -> None:
    for config in (CONFIGS[1], CONFIGS[4]):
        pair = RulesPair(config=config, loss=loss_with_skipped_blocks, find_unused=True)
        pair.train(4)
        pair.check_state()


def make_partly_frozen() -> nn.Module:
    model = Words()
    model.blocks[1].requires_grad_(False)
    model.embed.requires_grad_(False)
    return model


@ranks(1, 2, 3)
def test_unfreeze_params(ctx: RankContext) -> None:
    for config in (CONFIGS[1], CONFIGS[4]):
        pair = RulesPair(make=make_partly_frozen, config=config)
        pair.train(2)
        for model in (pair.model, pair.plain_model):
            model.requires_grad_(True)
        pair.wrap_plain()
        pair.train(2)
        pair.check_state()


def make_three_plain_optimizers(model: nn.Module) -> Several:
    named = list(model.named_parameters())
    biases = [(name, param) for name, param in named if name.endswith(".bias")]
    rest = [(name, param) for name, param in named if not hidden(name, param) and not name.endswith(".bias")]
    return Several(
        Muon([(name, param) for name, param in named if hidden(name, param)], **MUON),
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
        pair = RulesPair(THREE_RULES, make_three_plain_optimizers, config=config)
        assert [group["optimizer"] for group in pair.zero.param_groups] == ["Muon", "SGD", "AdamW"]
        pair.train(3)
        pair.check_state()


def is_first_block(name: str, _: Tensor) -> bool:
    return name.startswith("blocks.0.")


def make_two_plain_adamws(model: nn.Module) -> Several:
    named = list(model.named_parameters())
    first = [(name, param) for name, param in named if is_first_block(name, param)]
    rest = [(name, param) for name, param in named if not is_first_block(name, param)]
    return Several(AdamW(first, lr=0.1, amsgrad=True), AdamW(rest, **RULES_ADAMW))


@ranks(1, 3)
def test_same_class_with_different_options(ctx: RankContext) -> None:
    given = [ParamRule(is_first_block, AdamW, lr=0.1, amsgrad=True), ParamRule(remaining_params, AdamW, **RULES_ADAMW)]
    for config in (CONFIGS[1], CONFIGS[4]):
        pair = RulesPair(given, make_two_plain_adamws, config=config)
        assert [group["optimizer"] for group in pair.zero.param_groups] == ["AdamW", "AdamW 2"]
        pair.train(3)
        pair.check_state()


@ranks(2, 3)
def test_partition_per_rule_does_not_change_results(ctx: RankContext) -> None:
    """Who owns what is the user's choice, and changes no bit."""
    muon, adamw = rules()
    dear = WholeParams(cost=lambda spec: 1.0 if spec.shape[0] == 8 else 0.001)
    given = [
        [ParamRule(muon.selector, Muon, partition=dear, **MUON), adamw],
        [muon, ParamRule(remaining_params, AdamW, partition=TINY, **RULES_ADAMW)],
        [muon, ParamRule(remaining_params, AdamW, partition=WholeParams(), **RULES_ADAMW)],
    ]
    zeros = []
    for one in given:
        pair = RulesPair(one)
        pair.train(2)
        zeros.append(pair.zero)
    costly, small, whole = (zero.layout for zero in zeros)
    shares = [[costly.params[index] for index in costly.params_owned_by(Rank(rank))] for rank in range(ctx.world_size)]
    matrices_of_dear = [[it.shape for it in share if it.group == 0] for share in shares]
    assert [(8, 6)] in matrices_of_dear, "the dear one is all that its owner has"
    sizes = [{bucket.numel * bucket.dtype.itemsize for bucket in layout.buckets} for layout in (costly, small)]
    assert max(sizes[1]) <= 512 < max(sizes[0]), "small buckets where one rule asks for them"
    assert all(bucket.has_whole_params for bucket in whole.buckets)


class FailingMuon(Muon):
    """Fails where it is told to, once."""

    should_fail = False

    def step(self, closure: Any = None) -> Any:
        if FailingMuon.should_fail:
            FailingMuon.should_fail = False
            raise ArithmeticError("a matrix that cannot be inverted")
        return super().step(closure)  # type: ignore[no-untyped-call]


@ranks(1, 2, 3)
def test_optimizer_failure_on_one_rank_is_raised_on_all_ranks(ctx: RankContext) -> None:
    model = seeded(Words)
    zero = shard(
        model, [ParamRule(matrix_params(("embed", "head")), FailingMuon, **MUON), rules()[1]], config=CONFIGS[1]
    )
    for number in range(4):
        torch.autograd.backward(next_word(model, number))
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
        for others in ctx.gather(values):
            assert_same(values, others, "parameters of all ranks")


@ranks(2, 3)
def test_join_with_uneven_inputs(ctx: RankContext) -> None:
    """Ranks without inputs own matrices, too: what the others would make of them is a mean over all ranks."""
    model, plain_model = seeded(Words), seeded(Words)
    zero, plain = shard(model, rules(), config=CONFIGS[1]), muon_and_adamw(plain_model)
    passes = 2 + ctx.rank
    with Join([zero]):
        for number in range(passes):
            torch.autograd.backward(next_word(model, number))
            zero.step()
            zero.zero_grad()
    for number in range(1 + ctx.world_size):
        loss = next_word(plain_model, number)
        torch.autograd.backward(loss if number < passes else 0 * loss)
        for param in plain_model.parameters():
            assert param.grad is not None
            param.grad = average(from_all_ranks(param.grad))
        plain.step()
        plain.zero_grad()
    assert_same(model.state_dict(), plain_model.state_dict(), "the model")
