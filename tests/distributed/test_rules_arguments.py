"""What may be given to `shard` beside rules, what is refused on all ranks, and what users look at."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Muon
from torch.optim.lr_scheduler import OneCycleLR

import zeroshard
from tests.support import RankContext, ranks
from tests.support.monitoring import recorded
from tests.support.oracles import (
    MUON,
    RULES_ADAMW,
    TINY,
    WIDTH,
    Pair,
    RulesPair,
    Words,
    hidden,
    next_word,
    regression,
    rules,
    seeded,
)
from zeroshard import (
    ConfigError,
    FlatShards,
    ParamRule,
    RankFailedError,
    RankMismatchError,
    WholeParams,
    ZeroConfig,
    ZeroRedundancyOptimizer,
    matrix_params,
    remaining_params,
    shard,
)
from zeroshard.engine import grad_reducer
from zeroshard.layout import partition
from zeroshard.rules import profile_step_cost


class Shared(SGD):
    """Counts its steps for all parameters together."""

    def step(self, closure: Any = None) -> Any:
        state: dict[Any, Any] = self.state
        state["steps"] = {"count": state.get("steps", {}).get("count", 0) + 1}
        return super().step(closure)


REMAINING_RULE = ParamRule(remaining_params, AdamW)
REJECTED: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"optimizer_class": [ParamRule(hidden, Shared, lr=0.1), REMAINING_RULE]},
        ConfigError,
        "Shared cannot be one of several classes",
    ),
    (
        {"optimizer_class": [ParamRule(hidden, torch.optim.LBFGS), REMAINING_RULE]},
        ConfigError,
        "LBFGS cannot be sharded",
    ),
    ({"optimizer_class": [ParamRule(hidden, Muon)]}, ConfigError, "no rule takes 12 of the parameters: embed.weight"),
    ({"optimizer_class": [ParamRule(hidden, Muon, momentun=0.9), REMAINING_RULE]}, TypeError, "momentun"),
    (
        {"optimizer_class": [ParamRule(hidden, Muon, partition=TINY), REMAINING_RULE]},
        ConfigError,
        "FlatShards() cannot be used with Muon",
    ),
    ({"optimizer_class": [ParamRule(lambda *_: 1 / 0, Muon), REMAINING_RULE]}, ZeroDivisionError, "division"),  # type: ignore[arg-type]
    (
        {"optimizer_class": rules(), "lr": 0.1},
        ConfigError,
        "with rules, options belong into one: ParamRule(..., lr=...)",
    ),
    ({"optimizer_class": rules(), "params": []}, ConfigError, "shard() takes either them or params"),
    (
        {"optimizer_class": [(hidden, Muon)]},
        TypeError,
        "a list for shard() holds ParamRule(...)s only, not (<fun",
    ),
    ({"optimizer_class": []}, TypeError, "A list of ParamRule(...)s, and not an empty one, is for zeroshard.shard"),
    ({"optimizer_class": REMAINING_RULE}, TypeError, "not a ParamRule. A list of ParamRule(...)s"),
    (
        {
            "optimizer_class": [ParamRule(hidden, AdamW, partition=FlatShards(400)), REMAINING_RULE],
            "config": ZeroConfig(partition=FlatShards(200)),
        },
        ConfigError,
        "all rules share buckets, which have one size: give one bucket_bytes, not [200, 400]",
    ),
    (
        {"optimizer_class": [ParamRule(hidden, Muon, partition=WholeParams(cost=lambda _: -1)), REMAINING_RULE]},
        ConfigError,
        "is -1: it must be a number of 0 or more",
    ),
]


@ranks(1, 2)
def test_invalid_rules_are_rejected(ctx: RankContext) -> None:
    for given, error, problem in REJECTED:
        model = seeded(Words)
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(error, match=re.escape(problem)):
            shard(model, **given)
        assert all(map(torch.equal, model.state_dict().values(), before.values()))
    with pytest.raises(ConfigError, match="give it the model without DistributedDataParallel"):
        shard(DistributedDataParallel(seeded(Words)), rules())
    with pytest.raises(TypeError, match=re.escape("A list of ParamRule(...)s")):
        ZeroRedundancyOptimizer(seeded(Words).parameters(), rules())  # type: ignore[arg-type]
    RulesPair().train(1)


@ranks(3)
def test_invalid_rules_on_one_rank_are_raised_on_all(ctx: RankContext) -> None:
    for given, error, problem in REJECTED:
        last = ctx.rank == ctx.world_size - 1
        with pytest.raises(error if last else RankFailedError, match=re.escape(problem)):
            shard(seeded(Words), **(given if last else {"optimizer_class": rules()}))
    RulesPair().train(1)


@ranks(2, 3)
def test_different_rules_across_ranks_are_reported(ctx: RankContext) -> None:
    muon, adamw = rules()
    first = ctx.rank == 0
    for mine, theirs, problem in (
        (rules(), [muon, ParamRule(remaining_params, SGD, lr=0.1)], "optimizer class AdamW.*optimizer class SGD"),
        (rules(), rules(lr=0.5), "group 0 has lr=0.02.*group 0 has lr=0.5"),
        (
            rules(),
            [ParamRule(matrix_params(("head",)), Muon, **MUON), adamw],
            "disagree.*blocks.0.1.weight.*embed.weight",
        ),
        ([muon, adamw], [adamw, muon], "optimizer class Muon.*optimizer class AdamW"),
    ):
        with pytest.raises(RankMismatchError, match=f"(?s){problem}"):
            shard(seeded(Words), mine if first else theirs)
    by_rank = [
        ParamRule(hidden, Muon, partition=WholeParams(cost=lambda it: 100 if first and it.index == 1 else 1)),
        adamw,
    ]
    with pytest.raises(RankMismatchError, match="layout"):
        shard(seeded(Words), by_rank)
    RulesPair().train(1)


@ranks(1, 2)
def test_public_attributes_and_repr(ctx: RankContext) -> None:
    zero = shard(seeded(Words), rules())
    shown = repr(zero)
    assert "ShardedOptimizer (" in shown
    assert "optimizer: Muon" in shown
    assert "optimizer: AdamW" in shown
    assert zero.defaults == {}
    with pytest.raises(AttributeError, match="several inner optimizers, of several classes: see `inner_optimizers`"):
        assert zero.optim
    assert [type(it).__name__ for it in zero.inner_optimizers] == ["Muon", "AdamW"]
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            copied(zero)
    with pytest.raises(ValueError, match="momentum"):
        OneCycleLR(zero, [0.1, 0.1], total_steps=8)  # the classes have no momentum in common: cycle_momentum=False
    assert zero.balance.compute_imbalance >= 1
    assert zero.balance.memory_imbalance >= 1
    assert sum(zero.balance.numel_per_rank) == sum(param.numel() for param in zero._engine.params)


@ranks(1, 2)
def test_single_rule_equals_plain_class(ctx: RankContext) -> None:
    ruled, plain = seeded(Words), seeded(Words)
    for model, zero in (
        (ruled, shard(ruled, [ParamRule(remaining_params, AdamW, **RULES_ADAMW)])),
        (plain, shard(plain, AdamW, **RULES_ADAMW)),
    ):
        assert type(zero.optim) is AdamW
        for number in range(2):
            torch.autograd.backward(next_word(model, number))
            zero.step()
            zero.zero_grad()
    assert all(map(torch.equal, ruled.parameters(), plain.parameters()))


class TiedNet(Words):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


@ranks(2)
def test_tied_weight_is_in_one_group(ctx: RankContext) -> None:
    """Excluded under its second name, too."""
    given = [
        ParamRule(matrix_params(exclude=("head",)), Muon, **MUON),
        ParamRule(remaining_params, AdamW, **RULES_ADAMW),
    ]
    pair = RulesPair(given, make=TiedNet)
    pair.train(3)
    pair.check_state()


@ranks(2)
def test_rule_patterns_ignore_orig_mod_prefix(ctx: RankContext) -> None:
    inside = nn.Sequential()
    inside.add_module("_orig_mod", seeded(Words))
    zero = shard(
        inside,
        [ParamRule(matrix_params(exclude=("embed.*", "head.*")), Muon, **MUON), ParamRule(remaining_params, AdamW)],
    )
    assert zero.param_groups[0]["param_names"][0] == "_orig_mod.blocks.0.1.weight"
    assert len(zero.param_groups[0]["params"]) == 6


# ---- one class that looks at whole matrices


def make_matrix_layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6)))


@pytest.mark.filterwarnings("ignore:.*Muon looks at whole parameters")
@ranks(1, 2, 3, 4)
def test_muon_alone_matches_ddp(ctx: RankContext) -> None:
    pair = Pair(Muon, make=make_matrix_layers, **MUON)
    assert all(bucket.has_whole_params for bucket in pair.zero.layout.buckets)
    pair.train(3)
    pair.check_state()


@pytest.mark.filterwarnings("ignore:.*Muon looks at whole parameters")
@ranks(2, 3)
def test_whole_matrices_are_reduced_during_backward(ctx: RankContext) -> None:
    """The matrices of the last layers are on their way before the first layer's gradient is there."""
    sent: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grad_reducer, "WAIT_TIMEOUT_S", 30.0)
        patch.setattr(partition, "default_bucket_bytes", lambda *_: 300)  # two matrices
        model = seeded(make_matrix_layers)
        zero = shard(model, Muon, **MUON)
        assert [sorted(bucket.params) for bucket in zero.layout.buckets] == [[4, 5], [2, 3], [0, 1]]
        for number in range(2):
            sent.clear()
            with recorded() as traffic:
                first = next(model.parameters())
                handle = first.register_hook(lambda _: sent.append(len(traffic.sizes("isend"))))  # type: ignore[no-untyped-call]
                torch.autograd.backward(regression(model, number))
                handle.remove()
                sent.append(len(traffic.sizes("isend")))
                sizes = traffic.sizes("isend")
                zero.step()
            zero.zero_grad()
    before_the_end, at_the_end = sent
    assert 0 < before_the_end < at_the_end
    # What a rank sends is what others own, and nothing else: no matrix goes to a rank that does not update it.
    mine = sum(zero.layout.params[index].numel for index in zero.layout.params_owned_by(zero.rank))
    matrix = 4 * WIDTH * WIDTH
    assert sum(sizes) >= 6 * matrix - 4 * mine
    assert sum(sizes) <= 1.5 * (6 * matrix - 4 * mine)


# ---- costs that are measured


@ranks(1, 2, 3)
def test_profiled_costs_are_equal_on_all_ranks_and_usable(ctx: RankContext) -> None:
    model = seeded(Words)
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    cost = profile_step_cost(model, Muon, selector=matrix_params(("embed", "head")), **MUON)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, model.state_dict().values(), before.values()))
    assert {shape for shape, _ in cost.seconds} == {(8, 6), (6, 8), (9, 6), (6, 9)}
    assert all(value > 0 for value in cost.seconds.values())
    assert all(other == cost for other in ctx.gather(cost))
    muon = ParamRule(matrix_params(("embed", "head")), Muon, partition=WholeParams(cost=cost), **MUON)
    pair = RulesPair([muon, rules()[1]])
    pair.train(2)
    assert 1 <= pair.zero.balance.compute_imbalance < 6


def selects_nothing(_: str, param: Tensor) -> bool:
    return param.dim() == 7


@ranks(2, 3)
def test_profiling_errors_are_raised_on_all_ranks(ctx: RankContext) -> None:
    model = seeded(Words)
    with pytest.raises(ConfigError, match="chooses no parameter of the model"):
        profile_step_cost(model, Muon, selector=selects_nothing)
    for rank in (0, ctx.world_size - 1):
        wrong: dict[str, Any] = {"selector": selects_nothing} if ctx.rank == rank else {}
        with pytest.raises(ConfigError if ctx.rank == rank else RankFailedError, match="chooses no parameter"):
            profile_step_cost(model, Muon, **wrong)
    with pytest.raises(TypeError if ctx.rank == 0 else RankFailedError, match="momentun"):
        profile_step_cost(model, Muon, momentun=0.9)
    with pytest.raises(RankMismatchError, match=r"\(6, 9\)|\(6, 8\)|nothing more"):
        profile_step_cost(seeded(lambda: Words(1 + (ctx.rank == 0))), Muon, selector=hidden)
    with pytest.raises(TypeError, match=re.escape("profile_step_cost() takes a torch.nn.Module, not a list")):
        profile_step_cost([], Muon)  # type: ignore[arg-type]
    assert len(profile_step_cost(model, Muon).seconds) == 5


@ranks(3)
def test_profiling_in_a_subgroup(ctx: RankContext) -> None:
    group = dist.new_group([1, 2])
    if ctx.rank > 0:
        cost = zeroshard.rules.profile_step_cost(seeded(Words), Muon, process_group=group)
        found = [None, None]
        dist.all_gather_object(found, cost, group=group)
        assert found[0] == found[1] == cost
