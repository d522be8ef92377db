"""Ranks that are about to do different things: all of them are told, by rank and first difference, and none hangs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Adam, AdamW

from tests.support import RankContext, ranks
from tests.support.monitoring import recorded
from tests.support.oracles import Twins, assert_same, mlp, regression, set_grads, small_model
from zeroshard import RankMismatchError, WholeParams, ZeroConfig, ZeroRedundancyOptimizer, broadcast_object, shard
from zeroshard.comm import collectives

MakeArguments = Callable[[nn.Module], dict[str, Any]]
"""The arguments of a rank that differs, given its model."""


def default_arguments(model: nn.Module) -> dict[str, Any]:
    return {"params": model.named_parameters(), "optimizer_class": Adam, "lr": 0.1}


class Renamed(Adam):
    pass


class Reversed(WholeParams):
    """Another strategy, which says what it is only by its type."""


def with_edited_model(edit: Callable[[Any], object]) -> MakeArguments:
    """The usual arguments, after something was done to the model."""

    def change(model: nn.Module) -> dict[str, Any]:
        edit(model)
        return default_arguments(model)

    return change


def transpose_weight(model: Any) -> None:
    model[1].weight.data = model[1].weight.data.t().contiguous().t()


def reshape_weight(model: Any) -> None:
    model[1].weight = nn.Parameter(model[1].weight.view(7, 4))


def with_params(select: Callable[[list[tuple[str, nn.Parameter]]], Any]) -> MakeArguments:
    """The usual arguments, but for the parameters."""
    return lambda model: default_arguments(model) | {"params": select(list(model.named_parameters()))}


def with_options(**overrides: Any) -> MakeArguments:
    return lambda model: default_arguments(model) | overrides


def mismatch_cases() -> Iterator[tuple[str, str, MakeArguments]]:
    """What the usual rank says, what the other one says, and the arguments of the other."""
    yield r"parameter 0 \(0.weight\)", r"parameter 0 \(2.bias\)", with_params(lambda pairs: pairs[::-1])
    yield (
        r"parameter 2 \(1.weight\) .*shape \(4, 7\)",
        r"parameter 2 .*shape \(7, 4\)",
        with_edited_model(reshape_weight),
    )
    yield r"parameter 2 .*strides \(7, 1\)", r"parameter 2 .*strides \(1, 4\)", with_edited_model(transpose_weight)
    yield "parameter 0 .*float32", "parameter 0 .*float64", with_edited_model(nn.Module.double)
    yield (
        "parameter 5 .*trainable",
        "parameter 5 .*frozen",
        with_edited_model(lambda model: model[2].bias.requires_grad_(False)),
    )
    yield r"parameter 0 \(0.weight\)", "parameter 0 in", with_params(lambda pairs: [param for _, param in pairs])
    yield (
        r"parameter 0 \(0.weight\)",
        r"parameter 0 \(other.0.weight\)",
        with_params(lambda pairs: [(f"other.{name}", param) for name, param in pairs]),
    )
    yield r"parameter 5 \(2.bias\)", "no further parameter", with_params(lambda pairs: pairs[:-1])
    yield (
        r"parameter 3 .*in group 0",
        r"parameter 3 .*in group 1",
        with_params(lambda pairs: [{"params": pairs[:3]}, {"params": pairs[3:]}]),
    )
    yield r"group 0 has lr=0\.1$", r"group 0 has lr=0\.2$", with_options(lr=0.2)
    yield r"lr=0\.1$", r"lr=tensor\(0\.1", with_options(lr=torch.tensor(0.1))
    yield r"betas=tuple\(0\.9, 0\.999\)", r"betas=tuple\(0\.9, 0\.9\)", with_options(betas=(0.9, 0.9))
    yield (
        r"betas=tuple\(0\.9, 0\.999\)",
        r"betas=tuple\(0\.8, 0\.9\)",
        with_params(lambda pairs: [{"params": pairs, "betas": (0.8, 0.9)}]),
    )
    yield "amsgrad=False", "amsgrad=True", with_options(amsgrad=True)
    yield "class Adam$", "class AdamW$", with_options(optimizer_class=AdamW)
    yield "class Adam$", "class Renamed$", with_options(optimizer_class=Renamed)
    yield (
        "parameters_as_bucket_view=False",
        "parameters_as_bucket_view=True",
        with_options(parameters_as_bucket_view=True),
    )
    yield "overlap_with_ddp=False", "overlap_with_ddp=True", with_options(overlap_with_ddp=True)
    yield (
        "allow_mixed_dtypes=False",
        "allow_mixed_dtypes=True",
        with_options(config=ZeroConfig(allow_mixed_dtypes=True)),
    )
    yield "partition=None", "Reversed", with_options(config=ZeroConfig(partition=Reversed()))


@ranks(2, 3, 4)
def test_different_arguments_raise_rank_mismatch_on_every_rank(ctx: RankContext) -> None:
    for number, (expected, found, change) in enumerate(mismatch_cases()):
        odd = number % ctx.world_size
        others = ", ".join(str(rank) for rank in range(ctx.world_size) if rank != odd)
        model = small_model()
        before = [param.data_ptr() for param in model.parameters()]
        with pytest.raises(RankMismatchError) as caught:
            ZeroRedundancyOptimizer(**(change if ctx.rank == odd else default_arguments)(model))
        sides = dict(side.split(": ", 1) for side in parse_first_mismatch(str(caught.value)).split("; "))
        assert sides.keys() == {f"rank {odd}", f"rank{'s' if ctx.world_size > 2 else ''} {others}"}
        assert_matches(sides.pop(f"rank {odd}"), found)
        assert_matches(sides.popitem()[1], expected)
        if ctx.rank != odd:
            assert [param.data_ptr() for param in model.parameters()] == before


def parse_first_mismatch(message: str) -> str:
    """What ranks say of it, after their numbers of parameters where those differ."""
    found, told, _ = message.partition(". ")[2].rpartition("The first difference: ")[2].partition(". This is to be")
    assert told
    return found


@ranks(2, 3)
def test_different_param_counts_are_reported_first(ctx: RankContext) -> None:
    ours = list(small_model().named_parameters())
    for said, given in (
        ("6 parameters in 1 group; rank 1: 5 parameters in 1 group", ours[:2] + ours[3:]),
        ("6 parameters in 1 group; rank 1: 6 parameters in 2 groups", [{"params": ours[:2]}, {"params": ours[2:]}]),
    ):
        rest = (
            r"\. The first difference: ranks? 0(, 2)?: parameter 2 \(1\.weight\) in group 0: .*rank 1: parameter 2 \("
        )
        with pytest.raises(RankMismatchError, match=rf"disagree\. ranks? 0(, 2)?: {said}{rest}"):
            ZeroRedundancyOptimizer(given if ctx.rank == 1 else ours, Adam)


@ranks(2)
def test_only_the_mismatched_config_field_is_reported(ctx: RankContext) -> None:
    with pytest.raises(RankMismatchError) as caught:
        ZeroRedundancyOptimizer(small_model().parameters(), Adam, config=ZeroConfig(allow_mixed_dtypes=bool(ctx.rank)))
    expected = "rank 0: ZeroConfig(allow_mixed_dtypes=False); rank 1: ZeroConfig(allow_mixed_dtypes=True)"
    assert str(caught.value) == (
        f"making a ZeroRedundancyOptimizer: the ranks disagree. {expected}. This is to be the same on all ranks: look "
        "for what depends on the rank, such as an option, a file, an order, or a learning rate that one has changed by "
        "itself."
    )


def assert_matches(text: str, pattern: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        raise ValueError(text)


@ranks(3, 4)
def test_each_value_is_reported_with_its_ranks(ctx: RankContext) -> None:
    with pytest.raises(RankMismatchError) as caught:
        ZeroRedundancyOptimizer(small_model().parameters(), SGD, lr=0.1 * (ctx.rank % 3))
    sides = {0.0: [0, 3], 0.1: [1], 0.2: [2]}
    for lr, members in sides.items():
        present = [rank for rank in members if rank < ctx.world_size]
        named = f"rank {present[0]}" if len(present) == 1 else f"ranks {', '.join(map(str, present))}"
        assert_matches(str(caught.value), rf"{named}: [^;]*lr={lr}")


@ranks(1, 2, 3, 4)
def test_construction_costs_one_small_collective(ctx: RankContext) -> None:
    for bucket_view in (False, True):
        with recorded() as traffic:
            ZeroRedundancyOptimizer(small_model(width=500).parameters(), Adam, parameters_as_bucket_view=bucket_view)
        assert traffic == ([] if ctx.world_size == 1 else [("all_reduce", 72)])


@ranks(2, 3)
def test_mismatched_param_group_is_rejected_without_side_effects(ctx: RankContext) -> None:
    def added(model: nn.Module, **options: Any) -> dict[str, Any]:
        return {"params": list(model.parameters()), **options}

    for bucket_view in (False, True):
        twins = Twins(Adam, lr=0.1, zero_only={"parameters_as_bucket_view": bucket_view})
        twins.train(2)
        twins.zero.consolidate_state_dict()
        odd_groups: list[tuple[str, dict[str, Any]]] = [
            (r"shape \(3, 5\)", added(small_model(width=3))),
            (r"lr=0\.7", added(small_model(), lr=0.7)),
            ("parameter 11 .*frozen", added(make_model_with_frozen_last_param())),
            ("no further parameter", {"params": []}),
        ]
        for what, group in odd_groups:
            before = [dict(group) for group in twins.zero.param_groups]
            with pytest.raises(RankMismatchError, match=rf"add_param_group.*rank 1: [^;]*{what}"):
                twins.zero.add_param_group(group if ctx.rank == 1 else added(small_model()))
            assert_same(twins.zero.param_groups, before)
            assert len(twins.zero.optim.param_groups) == 1
            assert len(twins.zero.layout.params) == 6
            if ctx.rank == 0:
                assert_same(twins.zero.state_dict()["param_groups"], twins.plain.state_dict()["param_groups"])
        twins.train(2)
        assert_param_group_can_be_added(twins)


def make_model_with_frozen_last_param() -> nn.Module:
    model = small_model()
    list(model.parameters())[-1].requires_grad_(False)
    return model


def assert_param_group_can_be_added(twins: Twins) -> None:
    """What was refused for a moment can still be done."""
    ours, theirs = small_model(1), small_model(1)
    twins.zero.add_param_group({"params": list(ours.parameters()), "lr": 0.3})
    twins.plain.add_param_group({"params": list(theirs.parameters()), "lr": 0.3})
    for step in range(2):
        set_grads(ours.parameters(), step)
        set_grads(theirs.parameters(), step)
        twins.train(1)
        assert_same(ours.state_dict(), theirs.state_dict())
    found = twins.zero.full_state_dict()
    if found is not None:
        assert_same(found, twins.plain.state_dict())


@ranks(2, 3)
@pytest.mark.parametrize("bucket_view", [False, True])
def test_ranks_in_different_calls_raise_instead_of_hanging(ctx: RankContext, bucket_view: bool) -> None:
    make = partial(Twins, SGD, lr=0.1, momentum=0.9, zero_only={"parameters_as_bucket_view": bucket_view})
    twins = make()
    saved = twins.plain.state_dict()

    def new_group() -> dict[str, Any]:
        return {"params": list(small_model().parameters())}

    calls: dict[str, Callable[[Twins], object]] = {
        "step": lambda twins: twins.zero.step(),
        "closure": lambda twins: twins.zero.step(lambda: 0.0),
        "consolidate_state_dict": lambda twins: twins.zero.consolidate_state_dict(),
        "full_state_dict": lambda twins: twins.zero.full_state_dict(),
        "load_state_dict": lambda twins: twins.zero.load_state_dict(saved),
        "add_param_group": lambda twins: twins.zero.add_param_group(new_group()),
        "making a ZeroRedundancyOptimizer": lambda twins: ZeroRedundancyOptimizer(twins.model.parameters(), Adam),
        "broadcast_object": lambda _: broadcast_object("text", 0),
    }
    names = list(calls)
    for place, name in enumerate(names):
        other = names[place - 1]
        twins = make()
        set_grads(twins.model.parameters(), 0)
        with pytest.raises(
            RankMismatchError, match=rf"different calls.*{name}.*{other}|different calls.*{other}.*{name}"
        ):
            calls[name if ctx.rank == 0 else other](twins)


@ranks(2)
def test_rejected_call_does_not_break_later_calls(ctx: RankContext) -> None:
    twins = Twins(Adam)
    twins.train(1)
    with pytest.raises(RankMismatchError):
        (twins.zero.consolidate_state_dict if ctx.rank else twins.zero.full_state_dict)()
    twins.train(2)


@ranks(3, 4)
def test_tree_consensus_detects_mismatch(ctx: RankContext) -> None:
    """What large groups do, forced on small ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "MAX_RING_RANKS", 1)
        with pytest.raises(RankMismatchError, match=r"ranks 0, 1.*: .*lr=0\.1.*rank 2: .*lr=0\.2"):
            ZeroRedundancyOptimizer(small_model().parameters(), Adam, lr=0.2 if ctx.rank == 2 else 0.1)
        twins = Twins(Adam)
        twins.train(2)


class ExtraClosureCallOnRank0(torch.optim.SGD):
    """Looks at the loss once more on rank 0."""

    def step(self, closure: Any = None) -> Any:
        if closure is not None and dist.get_rank() == 0:
            closure()
        return super().step(closure)


@ranks(2, 3, timeout=30)
def test_extra_closure_call_on_one_rank_raises(ctx: RankContext) -> None:
    """Nothing is left on its way that would be written into parameters later, or waited for."""
    model = mlp()
    optimizer = shard(model, ExtraClosureCallOnRank0, lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = regression(model, 0)
        torch.autograd.backward(loss)
        return loss

    with pytest.raises(RankMismatchError, match=r"different calls.*look for a condition such as `if rank == 0:`"):
        optimizer.step(closure)
    assert not optimizer._engine.param_sync.is_in_flight
