"""Groups that are added later: many of them, at once or one by one, and what they cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn, optim

from tests.support import RankContext, ranks
from tests.support.monitoring import recorded
from tests.support.oracles import ShardTwins, Twins, assert_same, left_as_it_was, set_grads, some_configs
from zeroshard import RankFailedError, RankMismatchError, ZeroConfig, ZeroRedundancyOptimizer, shard

BUCKET_VIEW_OPTIONS: tuple[dict[str, Any], ...] = (
    {"parameters_as_bucket_view": False},
    {"parameters_as_bucket_view": True},
)
ADAMW_OPTIONS: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.01}
ParamGroup = dict[str, Any]


def make_deep_model() -> nn.Sequential:
    """One of them is frozen."""
    torch.manual_seed(0)
    layers = [nn.Linear(3 + place % 4, 2 + place % 3) for place in range(12)]
    layers[5].requires_grad_(False)
    return nn.Sequential(*layers)


def first_layer_params(model: nn.Module) -> list[nn.Parameter]:
    return list(model.get_submodule("0").parameters())


def remaining_groups(model: nn.Module) -> list[ParamGroup]:
    """A group a layer, with options of its own, and an empty one."""
    layers = list(model.children())[1:]
    groups: list[ParamGroup] = [{"params": layer.parameters(), "lr": 0.02 * n} for n, layer in enumerate(layers, 1)]
    return [*groups, {"params": []}]


def add_one_by_one(zero: ZeroRedundancyOptimizer, groups: list[ParamGroup]) -> None:
    for group in groups:
        zero.add_param_group(group)


@ranks(1, 2, 3)
def test_add_param_groups_equals_adding_one_by_one(ctx: RankContext) -> None:
    for zero_only in BUCKET_VIEW_OPTIONS:
        sides = []
        for add in (add_one_by_one, ZeroRedundancyOptimizer.add_param_groups):
            twins = Twins(
                optim.AdamW, model=make_deep_model, handed=first_layer_params, zero_only=zero_only, **ADAMW_OPTIONS
            )
            twins.train(2)
            add(twins.zero, remaining_groups(twins.model))
            for group in remaining_groups(twins.plain_model):
                twins.plain.add_param_group(group)
            twins.train(3)
            sides.append(twins)
        apart, together = (twins.zero for twins in sides)
        assert [together.layout.owner_of(i) for i in range(24)] == [apart.layout.owner_of(i) for i in range(24)]
        assert_same(together.full_state_dict(), apart.full_state_dict())


@some_configs
@ranks(1, 2, 3)
def test_add_param_groups_to_sharded_model_equals_plain_optimizer(ctx: RankContext, config: ZeroConfig) -> None:
    def some(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
        return list(model.named_parameters())[-2:]

    twins = ShardTwins(config, handed=some)
    twins.train(2)
    rest = [list(model.parameters())[:-2] for model in (twins.model, twins.plain_model)]
    for side, params in zip(twins.sides, rest, strict=True):
        for param in params:
            param.grad = None
        names = {id(param): name for name, param in twins.plain_model.named_parameters()}
        groups: list[ParamGroup] = [{"params": [param], "lr": 0.01 * n} for n, param in enumerate(params, 1)]
        if side.optimizer is twins.zero:
            twins.zero.add_param_groups(iter(groups))
        else:
            for group in groups:
                side.optimizer.add_param_group({**group, "params": [(names[id(p)], p) for p in group["params"]]})
    found = [group["param_names"] for group in twins.zero.param_groups]
    assert found == [group["param_names"] for group in twins.plain.param_groups]
    twins.train(3)


def failing_groups() -> Iterator[ParamGroup]:
    yield {"params": [nn.Parameter(torch.ones(2))]}
    raise OSError("no further group")


def failing_params() -> Iterator[nn.Parameter]:
    yield nn.Parameter(torch.ones(2))
    raise OSError("no further parameter")


MakeInvalidGroups = Callable[[nn.Module, list[ParamGroup]], Any]
INVALID_GROUPS: list[tuple[type[Exception], str, MakeInvalidGroups]] = [
    (ValueError, "'params'", lambda _, groups: [groups[0], {"lr": 0.1}, *groups[1:]]),
    (
        ValueError,
        "more than one",
        lambda model, groups: [*groups[:2], {"params": first_layer_params(model)}, *groups[2:]],
    ),
    (ValueError, "share memory", lambda _, groups: [*groups, {"params": [nn.Parameter(first_param(groups).data)]}]),
    (OSError, "no further group", lambda *_: failing_groups()),
    (OSError, "no further parameter", lambda _, groups: [*groups[:2], {"params": failing_params()}]),
    (TypeError, "list of param groups", lambda _, groups: groups[0]),
]


def first_param(groups: list[ParamGroup]) -> torch.Tensor:
    groups[0]["params"] = list(groups[0]["params"])
    tensor: torch.Tensor = groups[0]["params"][0]
    return tensor


@ranks(2, 3)
def test_invalid_group_leaves_optimizer_unchanged(ctx: RankContext) -> None:
    """Whether all ranks have it, or one."""
    for zero_only in BUCKET_VIEW_OPTIONS:
        twins = Twins(
            optim.AdamW, model=make_deep_model, handed=first_layer_params, zero_only=zero_only, **ADAMW_OPTIONS
        )
        twins.train(1)
        added = nn.ModuleList(list(twins.model.children())[1:])
        before = [dict(group) for group in twins.zero.param_groups]
        digest = twins.zero.layout.digest
        for error, message, spoil in INVALID_GROUPS:
            for culprits in (range(ctx.world_size), [ctx.world_size - 1]):
                groups = remaining_groups(twins.model)
                mine = ctx.rank in culprits
                with left_as_it_was(added), pytest.raises(error if mine else RankFailedError, match=message):
                    twins.zero.add_param_groups(spoil(twins.model, groups) if mine else groups)
                assert_same(twins.zero.param_groups, before)
                assert (len(twins.zero.optim.param_groups), twins.zero.layout.digest) == (1, digest)
        twins.train(1)
        twins.zero.add_param_groups(remaining_groups(twins.model))
        for group in remaining_groups(twins.plain_model):
            twins.plain.add_param_group(group)
        twins.train(2)


@ranks(2, 3)
def test_invalid_group_leaves_sharded_model_unchanged(ctx: RankContext) -> None:
    for culprits in (range(ctx.world_size), [ctx.world_size - 1]):
        for error, message, spoil in INVALID_GROUPS:
            model = make_deep_model()
            zero = shard(model, optim.AdamW, params=dict(model[0].named_parameters()).items(), **ADAMW_OPTIONS)
            *groups, _ = remaining_groups(model)  # torch refuses an empty group beside groups with names
            mine = ctx.rank in culprits
            added = nn.ModuleList(list(model)[1:])
            with left_as_it_was(added), pytest.raises(error if mine else RankFailedError, match=message):
                zero.add_param_groups(spoil(model, groups) if mine else groups)
            assert (len(zero.param_groups), len(zero.optim.param_groups), len(zero.layout.params)) == (1, 1, 2)


@ranks(2, 3)
def test_ranks_adding_different_groups_are_reported(ctx: RankContext) -> None:
    twins = Twins(optim.AdamW, model=make_deep_model, handed=first_layer_params, **ADAMW_OPTIONS)
    groups = remaining_groups(twins.model)
    groups[2]["lr"] = 0.06 if ctx.rank == 0 else 0.5
    with pytest.raises(RankMismatchError, match=r"add_param_groups.*rank 0: [^;]*group 3 has lr=0\.06"):
        twins.zero.add_param_groups(groups)
    group = remaining_groups(twins.model)[0]
    with pytest.raises(RankMismatchError, match="different calls"):
        twins.zero.add_param_group(group) if ctx.rank == 0 else twins.zero.add_param_groups([group])
    with pytest.raises(RankMismatchError, match="parameters in 1 group"):
        twins.zero.add_param_groups([] if ctx.rank == 0 else remaining_groups(twins.model))
    assert len(twins.zero.param_groups) == 1
    twins.zero.add_param_groups([])
    twins.train(1)


@ranks(2, 3)
def test_options_of_existing_groups_are_compared_across_ranks(ctx: RankContext) -> None:
    for option, value, found in (("lr", 0.5, r"lr=0\.5"), ("mode", "other", "mode='other'")):
        twins = Twins(SGDWithMode, model=make_deep_model, handed=first_layer_params, lr=0.1)
        twins.zero.add_param_groups(remaining_groups(twins.model)[:3])
        if ctx.rank == 1:
            twins.zero.param_groups[2][option] = value
        with pytest.raises(RankMismatchError, match=rf"rank 1: group 2 has {found}"):
            twins.zero.add_param_groups(remaining_groups(twins.model)[3:])
        assert len(twins.zero.param_groups) == 4


class SGDWithMode(optim.SGD):
    """An option that is a word."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group.setdefault("mode", "usual")
        self.defaults["mode"] = "usual"


# ---- what many groups cost


@ranks(2, 3)
def test_adding_any_number_of_groups_takes_one_collective(ctx: RankContext) -> None:
    for zero_only in BUCKET_VIEW_OPTIONS:
        model = make_deep_model()
        zero = ZeroRedundancyOptimizer(first_layer_params(model), optim.SGD, lr=0.1, **zero_only)
        with recorded() as traffic:
            zero.add_param_groups(remaining_groups(model))
        assert [name for name, _ in traffic] == ["all_reduce"]
        with recorded() as same_traffic:
            zero.add_param_groups([])
        assert same_traffic == traffic


@ranks(2, 3)
def test_step_sends_one_broadcast_per_rank_however_groups_were_added(ctx: RankContext) -> None:
    for zero_only in BUCKET_VIEW_OPTIONS:
        for add in (add_one_by_one, ZeroRedundancyOptimizer.add_param_groups):
            twins = Twins(optim.SGD, model=make_deep_model, handed=first_layer_params, zero_only=zero_only, lr=0.1)
            add(twins.zero, remaining_groups(twins.model))
            for group in remaining_groups(twins.plain_model):
                twins.plain.add_param_group(group)
            with recorded() as traffic:
                twins.train(1)
            assert len(traffic.sizes("broadcast")) == ctx.world_size


@ranks(2, 3)
def test_remote_update_bumps_param_versions(ctx: RankContext) -> None:
    """A graph from before the step must not go unnoticed."""
    model = make_deep_model()
    zero = ZeroRedundancyOptimizer(first_layer_params(model), optim.SGD, parameters_as_bucket_view=True, lr=0.1)
    add_one_by_one(zero, [{"params": layer.parameters()} for layer in list(model)[1:]])
    graphs = [param.square().sum() for param in model.requires_grad_().parameters()]
    set_grads(model.parameters(), 0)
    zero.step()
    for graph in graphs:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.backward(graph)


@ranks(2, 3)
def test_param_data_replaced_before_adding_a_group(ctx: RankContext) -> None:
    """A parameter outside of its buffer comes back into it, whatever happens in between."""
    for zero_only in BUCKET_VIEW_OPTIONS:
        twins = Twins(
            optim.SGD, model=make_deep_model, handed=first_layer_params, zero_only=zero_only, lr=0.1, momentum=0.9
        )
        twins.train(1)
        for model, optimizer in twins.sides:
            for param in first_layer_params(model):
                param.data = param.data * 0.5
            optimizer.add_param_group({"params": model[1].parameters()})
        twins.train(2)
