"""Adding many parameter groups, at once or one by one, and the communication that this costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn, optim

from tests.support import RankContext, ranks
from tests.support.monitoring import recorded
from tests.support.oracles import DdpParityRun, ParityRun, assert_params_unchanged, assert_same, set_grads, some_configs
from zeroshard import RankFailedError, RankMismatchError, ZeroConfig, ZeroRedundancyOptimizer, shard

BUCKET_VIEW_OPTIONS: tuple[dict[str, Any], ...] = (
    {"parameters_as_bucket_view": False},
    {"parameters_as_bucket_view": True},
)
ADAMW_OPTIONS: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.01}
ParamGroup = dict[str, Any]


def make_deep_model() -> nn.Sequential:
    """Twelve layers, one of them frozen."""
    torch.manual_seed(0)
    layers = [nn.Linear(3 + index % 4, 2 + index % 3) for index in range(12)]
    layers[5].requires_grad_(False)
    return nn.Sequential(*layers)


def first_layer_params(model: nn.Module) -> list[nn.Parameter]:
    return list(model.get_submodule("0").parameters())


def remaining_groups(model: nn.Module) -> list[ParamGroup]:
    """One group per layer, each with its own learning rate, and an empty group."""
    layers = list(model.children())[1:]
    groups: list[ParamGroup] = [
        {"params": layer.parameters(), "lr": 0.02 * number} for number, layer in enumerate(layers, 1)
    ]
    return [*groups, {"params": []}]


def add_one_by_one(zero: ZeroRedundancyOptimizer, groups: list[ParamGroup]) -> None:
    for group in groups:
        zero.add_param_group(group)


@ranks(1, 2, 3)
def test_add_param_groups_equals_adding_one_by_one(ctx: RankContext) -> None:
    for zero_only in BUCKET_VIEW_OPTIONS:
        runs = []
        for add in (add_one_by_one, ZeroRedundancyOptimizer.add_param_groups):
            parity = ParityRun(
                optim.AdamW, model=make_deep_model, get_params=first_layer_params, zero_only=zero_only, **ADAMW_OPTIONS
            )
            parity.train(2)
            add(parity.zero, remaining_groups(parity.model))
            for group in remaining_groups(parity.plain_model):
                parity.plain.add_param_group(group)
            parity.train(3)
            runs.append(parity)
        one_by_one, at_once = (parity.zero for parity in runs)
        assert [at_once.layout.owner_of(index) for index in range(24)] == [
            one_by_one.layout.owner_of(index) for index in range(24)
        ]
        assert_same(at_once.full_state_dict(), one_by_one.full_state_dict())


@some_configs
@ranks(1, 2, 3)
def test_add_param_groups_to_sharded_model_equals_plain_optimizer(ctx: RankContext, config: ZeroConfig) -> None:
    def last_params(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
        return list(model.named_parameters())[-2:]

    parity = DdpParityRun(config, get_params=last_params)
    parity.train(2)
    rest = [list(model.parameters())[:-2] for model in (parity.model, parity.plain_model)]
    for side, params in zip(parity.sides, rest, strict=True):
        for param in params:
            param.grad = None
        names = {id(param): name for name, param in parity.plain_model.named_parameters()}
        groups: list[ParamGroup] = [{"params": [param], "lr": 0.01 * number} for number, param in enumerate(params, 1)]
        if side.optimizer is parity.zero:
            parity.zero.add_param_groups(iter(groups))
        else:
            for group in groups:
                side.optimizer.add_param_group(
                    {**group, "params": [(names[id(param)], param) for param in group["params"]]}
                )
    found = [group["param_names"] for group in parity.zero.param_groups]
    assert found == [group["param_names"] for group in parity.plain.param_groups]
    parity.train(3)


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
    (TypeError, "list of parameter groups, got dict", lambda _, groups: groups[0]),
]


def first_param(groups: list[ParamGroup]) -> torch.Tensor:
    groups[0]["params"] = list(groups[0]["params"])
    tensor: torch.Tensor = groups[0]["params"][0]
    return tensor


@ranks(2, 3)
def test_invalid_group_leaves_optimizer_unchanged(ctx: RankContext) -> None:
    """All ranks pass the invalid group, or only one rank does."""
    for zero_only in BUCKET_VIEW_OPTIONS:
        parity = ParityRun(
            optim.AdamW, model=make_deep_model, get_params=first_layer_params, zero_only=zero_only, **ADAMW_OPTIONS
        )
        parity.train(1)
        added = nn.ModuleList(list(parity.model.children())[1:])
        before = [dict(group) for group in parity.zero.param_groups]
        digest = parity.zero.layout.digest
        for error, message, make_invalid in INVALID_GROUPS:
            for failing_ranks in (range(ctx.world_size), [ctx.world_size - 1]):
                groups = remaining_groups(parity.model)
                is_failing_rank = ctx.rank in failing_ranks
                with (
                    assert_params_unchanged(added),
                    pytest.raises(error if is_failing_rank else RankFailedError, match=message),
                ):
                    parity.zero.add_param_groups(make_invalid(parity.model, groups) if is_failing_rank else groups)
                assert_same(parity.zero.param_groups, before)
                assert (len(parity.zero.optim.param_groups), parity.zero.layout.digest) == (1, digest)
        parity.train(1)
        parity.zero.add_param_groups(remaining_groups(parity.model))
        for group in remaining_groups(parity.plain_model):
            parity.plain.add_param_group(group)
        parity.train(2)


@ranks(2, 3)
def test_invalid_group_leaves_sharded_model_unchanged(ctx: RankContext) -> None:
    for failing_ranks in (range(ctx.world_size), [ctx.world_size - 1]):
        for error, message, make_invalid in INVALID_GROUPS:
            model = make_deep_model()
            zero = shard(model, optim.AdamW, params=dict(model[0].named_parameters()).items(), **ADAMW_OPTIONS)
            *groups, _ = remaining_groups(model)  # torch refuses an empty group beside groups with names
            is_failing_rank = ctx.rank in failing_ranks
            added = nn.ModuleList(list(model)[1:])
            with (
                assert_params_unchanged(added),
                pytest.raises(error if is_failing_rank else RankFailedError, match=message),
            ):
                zero.add_param_groups(make_invalid(model, groups) if is_failing_rank else groups)
            assert (len(zero.param_groups), len(zero.optim.param_groups), len(zero.layout.params)) == (1, 1, 2)


@ranks(2, 3)
def test_ranks_adding_different_groups_are_reported(ctx: RankContext) -> None:
    parity = ParityRun(optim.AdamW, model=make_deep_model, get_params=first_layer_params, **ADAMW_OPTIONS)
    groups = remaining_groups(parity.model)
    groups[2]["lr"] = 0.06 if ctx.rank == 0 else 0.5
    with pytest.raises(RankMismatchError, match=r"add_param_groups.*rank 0: [^;]*group 3 has lr=0\.06"):
        parity.zero.add_param_groups(groups)
    group = remaining_groups(parity.model)[0]
    with pytest.raises(RankMismatchError, match="different calls"):
        parity.zero.add_param_group(group) if ctx.rank == 0 else parity.zero.add_param_groups([group])
    with pytest.raises(RankMismatchError, match="parameters in 1 group"):
        parity.zero.add_param_groups([] if ctx.rank == 0 else remaining_groups(parity.model))
    assert len(parity.zero.param_groups) == 1
    parity.zero.add_param_groups([])
    parity.train(1)


@ranks(2, 3)
def test_options_of_existing_groups_are_compared_across_ranks(ctx: RankContext) -> None:
    for option, value, found in (("lr", 0.5, r"lr=0\.5"), ("mode", "other", "mode='other'")):
        parity = ParityRun(SGDWithMode, model=make_deep_model, get_params=first_layer_params, lr=0.1)
        parity.zero.add_param_groups(remaining_groups(parity.model)[:3])
        if ctx.rank == 1:
            parity.zero.param_groups[2][option] = value
        with pytest.raises(RankMismatchError, match=rf"rank 1: group 2 has {found}"):
            parity.zero.add_param_groups(remaining_groups(parity.model)[3:])
        assert len(parity.zero.param_groups) == 4


class SGDWithMode(optim.SGD):
    """SGD with an option whose value is a string."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group.setdefault("mode", "usual")
        self.defaults["mode"] = "usual"


# ---- Communication costs


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
def test_step_sends_one_message_per_owner_however_groups_were_added(ctx: RankContext) -> None:
    for zero_only in BUCKET_VIEW_OPTIONS:
        for add in (add_one_by_one, ZeroRedundancyOptimizer.add_param_groups):
            parity = ParityRun(
                optim.SGD, model=make_deep_model, get_params=first_layer_params, zero_only=zero_only, lr=0.1
            )
            add(parity.zero, remaining_groups(parity.model))
            for group in remaining_groups(parity.plain_model):
                parity.plain.add_param_group(group)
            with recorded() as traffic:
                parity.train(1)
            assert len(traffic.sizes_to_all(ctx.world_size)) == ctx.world_size


@ranks(2, 3)
def test_remote_update_bumps_param_versions(ctx: RankContext) -> None:
    """Backward through a graph from before the step must raise."""
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
    """A parameter outside of its buffer is moved back into it, even if a group is added in between."""
    for zero_only in BUCKET_VIEW_OPTIONS:
        parity = ParityRun(
            optim.SGD, model=make_deep_model, get_params=first_layer_params, zero_only=zero_only, lr=0.1, momentum=0.9
        )
        parity.train(1)
        for model, optimizer in parity.sides:
            for param in first_layer_params(model):
                param.data = param.data * 0.5
            optimizer.add_param_group({"params": model[1].parameters()})
        parity.train(2)
