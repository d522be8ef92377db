"""Arguments of `shard` with rules, errors on all ranks, and public attributes."""

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
    RulesParityRun,
    ShardParityRun,
    Words,
    is_hidden_matrix,
    make_seeded,
    next_word_loss,
    regression,
    rules,
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
    """Keeps one step count for all parameters."""

    def step(self, closure: Any = None) -> Any:
        state: dict[Any, Any] = self.state
        state["steps"] = {"count": state.get("steps", {}).get("count", 0) + 1}
        return super().step(closure)


REMAINING_RULE = ParamRule(remaining_params, AdamW)
PASS_CLASS_OR_RULES = (
    "Pass the class, and its options as keyword arguments. To use several classes, pass a non-empty list of ParamRule "
    "objects to zeroshard.shard()."
)
REJECTED: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"optimizer_class": [ParamRule(is_hidden_matrix, Shared, lr=0.1), REMAINING_RULE]},
        ConfigError,
        "Shared cannot be combined with other optimizer classes",
    ),
    (
        {"optimizer_class": [ParamRule(is_hidden_matrix, torch.optim.LBFGS), REMAINING_RULE]},
        ConfigError,
        "LBFGS cannot be sharded",
    ),
    (
        {"optimizer_class": [ParamRule(is_hidden_matrix, Muon)]},
        ConfigError,
        "no rule takes 12 of the parameters: embed.weight",
    ),
    ({"optimizer_class": [ParamRule(is_hidden_matrix, Muon, momentun=0.9), REMAINING_RULE]}, TypeError, "momentun"),
    (
        {"optimizer_class": [ParamRule(is_hidden_matrix, Muon, partition=TINY), REMAINING_RULE]},
        ConfigError,
        "FlatShards() cannot be used with Muon",
    ),
    ({"optimizer_class": [ParamRule(lambda *_: 1 / 0, Muon), REMAINING_RULE]}, ZeroDivisionError, "division"),  # type: ignore[arg-type]
    (
        {"optimizer_class": rules(), "lr": 0.1},
        ConfigError,
        "options of an optimizer belong to its rule: write ParamRule(..., lr=...)",
    ),
    ({"optimizer_class": rules(), "params": []}, ConfigError, "shard() got both params= and rules"),
    (
        {"optimizer_class": [(is_hidden_matrix, Muon)]},
        TypeError,
        "expected a list of ParamRule objects, got (<fun",
    ),
    ({"optimizer_class": []}, TypeError, f"got list. {PASS_CLASS_OR_RULES}"),
    ({"optimizer_class": REMAINING_RULE}, TypeError, f"got ParamRule. {PASS_CLASS_OR_RULES}"),
    (
        {
            "optimizer_class": [ParamRule(is_hidden_matrix, AdamW, partition=FlatShards(400)), REMAINING_RULE],
            "config": ZeroConfig(partition=FlatShards(200)),
        },
        ConfigError,
        "all rules share buckets, so bucket_bytes must be the same in each: got [200, 400]",
    ),
    (
        {
            "optimizer_class": [
                ParamRule(is_hidden_matrix, Muon, partition=WholeParams(cost=lambda _: -1)),
                REMAINING_RULE,
            ]
        },
        ConfigError,
        "to be a non-negative number, got -1",
    ),
]


@ranks(1, 2)
def test_invalid_rules_are_rejected(ctx: RankContext) -> None:
    for arguments, error, problem in REJECTED:
        model = make_seeded(Words)
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(error, match=re.escape(problem)):
            shard(model, **arguments)
        assert all(map(torch.equal, model.state_dict().values(), before.values()))
    model, other = make_seeded(Words), make_seeded(Words)
    for params in (other.parameters(), list(other.named_parameters()), [{"params": list(other.parameters())}]):
        with pytest.raises(ConfigError, match=r"\d+ parameters, none of them from the model \(Words\)"):
            shard(model, AdamW, params=params)
    with pytest.raises(ConfigError, match="pass the model without DistributedDataParallel"):
        shard(DistributedDataParallel(make_seeded(Words)), rules())
    with pytest.raises(TypeError, match=re.escape(f"got list. {PASS_CLASS_OR_RULES}")):
        ZeroRedundancyOptimizer(make_seeded(Words).parameters(), rules())  # type: ignore[arg-type]
    RulesParityRun().train(1)


@ranks(3)
def test_invalid_rules_on_one_rank_are_raised_on_all(ctx: RankContext) -> None:
    for arguments, error, problem in REJECTED:
        is_last_rank = ctx.rank == ctx.world_size - 1
        with pytest.raises(error if is_last_rank else RankFailedError, match=re.escape(problem)):
            shard(make_seeded(Words), **(arguments if is_last_rank else {"optimizer_class": rules()}))
    RulesParityRun().train(1)


@ranks(2, 3)
def test_different_rules_across_ranks_are_reported(ctx: RankContext) -> None:
    muon, adamw = rules()
    is_rank_0 = ctx.rank == 0
    for rules_of_rank_0, rules_of_others, problem in (
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
            shard(make_seeded(Words), rules_of_rank_0 if is_rank_0 else rules_of_others)
    rank_dependent_rules = [
        ParamRule(
            is_hidden_matrix,
            Muon,
            partition=WholeParams(cost=lambda spec: 100 if is_rank_0 and spec.index == 1 else 1),
        ),
        adamw,
    ]
    with pytest.raises(RankMismatchError, match="layout"):
        shard(make_seeded(Words), rank_dependent_rules)
    RulesParityRun().train(1)


@ranks(1, 2)
def test_public_attributes_and_repr(ctx: RankContext) -> None:
    zero = shard(make_seeded(Words), rules())
    text = repr(zero)
    assert "ShardedOptimizer (" in text
    assert "optimizer: Muon" in text
    assert "optimizer: AdamW" in text
    assert zero.defaults == {}
    with pytest.raises(AttributeError, match=r"several inner optimizers\. Use inner_optimizers"):
        assert zero.optim
    assert [type(inner).__name__ for inner in zero.inner_optimizers] == ["Muon", "AdamW"]
    for copy_or_pickle in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            copy_or_pickle(zero)
    with pytest.raises(ValueError, match="momentum"):
        OneCycleLR(zero, [0.1, 0.1], total_steps=8)  # the classes have no momentum in common: cycle_momentum=False
    assert zero.balance.compute_imbalance >= 1
    assert zero.balance.memory_imbalance >= 1
    assert sum(zero.balance.numel_per_rank) == sum(param.numel() for param in zero._engine.params.tensors)


@ranks(1, 2)
def test_single_rule_equals_plain_class(ctx: RankContext) -> None:
    ruled, plain = make_seeded(Words), make_seeded(Words)
    for model, zero in (
        (ruled, shard(ruled, [ParamRule(remaining_params, AdamW, **RULES_ADAMW)])),
        (plain, shard(plain, AdamW, **RULES_ADAMW)),
    ):
        assert type(zero.optim) is AdamW
        for number in range(2):
            torch.autograd.backward(next_word_loss(model, number))
            zero.step()
            zero.zero_grad()
    assert all(map(torch.equal, ruled.parameters(), plain.parameters()))


class TiedNet(Words):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


@ranks(2)
def test_tied_weight_is_in_one_group(ctx: RankContext) -> None:
    """A tied weight can be excluded by its second name, too."""
    two_rules = [
        ParamRule(matrix_params(exclude=("head",)), Muon, **MUON),
        ParamRule(remaining_params, AdamW, **RULES_ADAMW),
    ]
    parity = RulesParityRun(two_rules, make=TiedNet)
    parity.train(3)
    parity.check_state()


@ranks(2)
def test_rule_patterns_ignore_orig_mod_prefix(ctx: RankContext) -> None:
    wrapped = nn.Sequential()
    wrapped.add_module("_orig_mod", make_seeded(Words))
    zero = shard(
        wrapped,
        [ParamRule(matrix_params(exclude=("embed.*", "head.*")), Muon, **MUON), ParamRule(remaining_params, AdamW)],
    )
    assert zero.param_groups[0]["param_names"][0] == "_orig_mod.blocks.0.1.weight"
    assert len(zero.param_groups[0]["params"]) == 6


# ---- One optimizer class that needs whole matrices


def make_matrix_layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6)))


@pytest.mark.filterwarnings("ignore:.*Muon needs whole parameters")
@ranks(1, 2, 3, 4)
def test_muon_alone_matches_ddp(ctx: RankContext) -> None:
    parity = ShardParityRun(Muon, make=make_matrix_layers, **MUON)
    assert all(bucket.has_whole_params for bucket in parity.zero.layout.buckets)
    parity.train(3)
    parity.check_state()


@pytest.mark.filterwarnings("ignore:.*Muon needs whole parameters")
@ranks(2, 3)
def test_whole_matrices_are_reduced_during_backward(ctx: RankContext) -> None:
    """Gradients of the last layers are in flight before the first layer's gradient is ready."""
    num_sent: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grad_reducer, "WAIT_BUDGET_S", 30.0)
        patch.setattr(partition, "default_bucket_bytes", lambda *_: 300)  # two matrices
        model = make_seeded(make_matrix_layers)
        zero = shard(model, Muon, **MUON)
        assert [sorted(bucket.params) for bucket in zero.layout.buckets] == [[4, 5], [2, 3], [0, 1]]
        for number in range(2):
            num_sent.clear()
            with recorded() as traffic:
                first_param = next(model.parameters())
                handle = first_param.register_hook(lambda _: num_sent.append(len(traffic.sizes("isend"))))  # type: ignore[no-untyped-call]
                torch.autograd.backward(regression(model, number))
                handle.remove()
                num_sent.append(len(traffic.sizes("isend")))
                sizes = traffic.sizes("isend")
                zero.step()
            zero.zero_grad()
    sent_before_last_grad, sent_after_backward = num_sent
    assert 0 < sent_before_last_grad < sent_after_backward
    # A rank sends each matrix only to the rank that updates it.
    owned_numel = sum(zero.layout.params[index].numel for index in zero.layout.params_owned_by(zero.rank))
    matrix_nbytes = 4 * WIDTH * WIDTH
    assert sum(sizes) >= 6 * matrix_nbytes - 4 * owned_numel
    assert sum(sizes) <= 1.5 * (6 * matrix_nbytes - 4 * owned_numel)


# ---- Profiled costs


@ranks(1, 2, 3)
def test_profiled_costs_are_equal_on_all_ranks_and_usable(ctx: RankContext) -> None:
    model = make_seeded(Words)
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    cost = profile_step_cost(model, Muon, selector=matrix_params(("embed", "head")), **MUON)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, model.state_dict().values(), before.values()))
    assert {shape for shape, _ in cost.seconds} == {(8, 6), (6, 8), (9, 6), (6, 9)}
    assert all(value > 0 for value in cost.seconds.values())
    assert all(other == cost for other in ctx.gather(cost))
    muon = ParamRule(matrix_params(("embed", "head")), Muon, partition=WholeParams(cost=cost), **MUON)
    parity = RulesParityRun([muon, rules()[1]])
    parity.train(2)
    assert 1 <= parity.zero.balance.compute_imbalance < 6


def selects_nothing(_: str, param: Tensor) -> bool:
    return param.dim() == 7


@ranks(2, 3)
def test_profiling_errors_are_raised_on_all_ranks(ctx: RankContext) -> None:
    model = make_seeded(Words)
    with pytest.raises(ConfigError, match="selects no parameter of the model"):
        profile_step_cost(model, Muon, selector=selects_nothing)
    for rank in (0, ctx.world_size - 1):
        options: dict[str, Any] = {"selector": selects_nothing} if ctx.rank == rank else {}
        with pytest.raises(ConfigError if ctx.rank == rank else RankFailedError, match="selects no parameter"):
            profile_step_cost(model, Muon, **options)
    with pytest.raises(TypeError if ctx.rank == 0 else RankFailedError, match="momentun"):
        profile_step_cost(model, Muon, momentun=0.9)
    with pytest.raises(RankMismatchError, match=r"\(6, 9\)|\(6, 8\)|nothing more"):
        profile_step_cost(make_seeded(lambda: Words(1 + (ctx.rank == 0))), Muon, selector=is_hidden_matrix)
    with pytest.raises(TypeError, match=re.escape("profile_step_cost(model, ...) with a torch.nn.Module, got list")):
        profile_step_cost([], Muon)  # type: ignore[arg-type]
    assert len(profile_step_cost(model, Muon).seconds) == 5


@ranks(3)
def test_profiling_in_a_subgroup(ctx: RankContext) -> None:
    group = dist.new_group([1, 2])
    if ctx.rank > 0:
        cost = zeroshard.rules.profile_step_cost(make_seeded(Words), Muon, process_group=group)
        gathered = [None, None]
        dist.all_gather_object(gathered, cost, group=group)
        assert gathered[0] == gathered[1] == cost
