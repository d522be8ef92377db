"""Ranks that differ: every rank raises an error that names the ranks and their first difference, and none hangs."""

from __future__ import annotations

import re
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
from tests.support.oracles import ParityRun, assert_same, mlp, regression, set_grads, small_model
from zeroshard import RankMismatchError, WholeParams, ZeroConfig, ZeroRedundancyOptimizer, broadcast_object, shard
from zeroshard.comm import collectives

MakeArguments = Callable[[nn.Module], dict[str, Any]]
"""Returns the arguments of the rank that differs, given its model."""


def default_arguments(model: nn.Module) -> dict[str, Any]:
    return {"params": model.named_parameters(), "optimizer_class": Adam, "lr": 0.1}


class Renamed(Adam):
    pass


class Reversed(WholeParams):
    """Another partitioner that differs from its base class only by type."""


def with_edited_model(edit: Callable[[Any], object]) -> MakeArguments:
    """The default arguments, after an edit of the model."""

    def make_arguments(model: nn.Module) -> dict[str, Any]:
        edit(model)
        return default_arguments(model)

    return make_arguments


def transpose_weight(model: Any) -> None:
    model[1].weight.data = model[1].weight.data.t().contiguous().t()


def reshape_weight(model: Any) -> None:
    model[1].weight = nn.Parameter(model[1].weight.view(7, 4))


def with_params(select: Callable[[list[tuple[str, nn.Parameter]]], Any]) -> MakeArguments:
    """The default arguments with other parameters."""
    return lambda model: default_arguments(model) | {"params": select(list(model.named_parameters()))}


def with_options(**overrides: Any) -> MakeArguments:
    return lambda model: default_arguments(model) | overrides


def mismatch_cases() -> Iterator[tuple[str, str, MakeArguments]]:
    """Patterns for the other ranks' side and the differing rank's side of the error, and its arguments."""
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
    for number, (expected, differing, make_arguments) in enumerate(mismatch_cases()):
        differing_rank = number % ctx.world_size
        others = ", ".join(str(rank) for rank in range(ctx.world_size) if rank != differing_rank)
        model = small_model()
        before = [param.data_ptr() for param in model.parameters()]
        with pytest.raises(RankMismatchError) as caught:
            ZeroRedundancyOptimizer(**(make_arguments if ctx.rank == differing_rank else default_arguments)(model))
        sides = dict(side.split(": ", 1) for side in parse_first_mismatch(str(caught.value)).split("; "))
        assert sides.keys() == {f"rank {differing_rank}", f"rank{'s' if ctx.world_size > 2 else ''} {others}"}
        assert_matches(sides.pop(f"rank {differing_rank}"), differing)
        assert_matches(sides.popitem()[1], expected)
        if ctx.rank != differing_rank:
            assert [param.data_ptr() for param in model.parameters()] == before


def parse_first_mismatch(message: str) -> str:
    """The part of the message with each rank's side, without parameter counts."""
    mismatch, separator, _ = (
        message.partition(". ")[2].rpartition("The first difference: ")[2].partition(". These values must be")
    )
    assert separator
    return mismatch


@ranks(2, 3)
def test_different_param_counts_are_reported_first(ctx: RankContext) -> None:
    ours = list(small_model().named_parameters())
    for counts, params in (
        ("6 parameters in 1 group; rank 1: 5 parameters in 1 group", ours[:2] + ours[3:]),
        ("6 parameters in 1 group; rank 1: 6 parameters in 2 groups", [{"params": ours[:2]}, {"params": ours[2:]}]),
    ):
        rest = (
            r"\. The first difference: ranks? 0(, 2)?: parameter 2 \(1\.weight\) in group 0: .*rank 1: parameter 2 \("
        )
        with pytest.raises(RankMismatchError, match=rf"disagree\. ranks? 0(, 2)?: {counts}{rest}"):
            ZeroRedundancyOptimizer(params if ctx.rank == 1 else ours, Adam)


@ranks(2)
def test_only_the_mismatched_config_field_is_reported(ctx: RankContext) -> None:
    with pytest.raises(RankMismatchError) as caught:
        ZeroRedundancyOptimizer(small_model().parameters(), Adam, config=ZeroConfig(allow_mixed_dtypes=bool(ctx.rank)))
    expected = "rank 0: ZeroConfig(allow_mixed_dtypes=False); rank 1: ZeroConfig(allow_mixed_dtypes=True)"
    assert str(caught.value) == (
        f"ZeroRedundancyOptimizer(): the ranks disagree. {expected}. These values must be equal on all ranks: look for "
        "a learning rate, option, model, file or order that depends on the rank."
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
    ZeroRedundancyOptimizer(small_model().parameters(), Adam)  # the first one makes the group for control messages
    for bucket_view in (False, True):
        with recorded() as traffic:
            ZeroRedundancyOptimizer(small_model(width=500).parameters(), Adam, parameters_as_bucket_view=bucket_view)
        assert traffic == ([] if ctx.world_size == 1 else [("all_reduce", 72)])


@ranks(2, 3)
def test_mismatched_param_group_is_rejected_without_side_effects(ctx: RankContext) -> None:
    def make_group(model: nn.Module, **options: Any) -> dict[str, Any]:
        return {"params": list(model.parameters()), **options}

    for bucket_view in (False, True):
        parity = ParityRun(Adam, lr=0.1, zero_only={"parameters_as_bucket_view": bucket_view})
        parity.train(2)
        parity.zero.consolidate_state_dict()
        odd_groups: list[tuple[str, dict[str, Any]]] = [
            (r"shape \(3, 5\)", make_group(small_model(width=3))),
            (r"lr=0\.7", make_group(small_model(), lr=0.7)),
            ("parameter 11 .*frozen", make_group(make_model_with_frozen_last_param())),
            ("no further parameter", {"params": []}),
        ]
        for problem, group in odd_groups:
            before = [dict(group) for group in parity.zero.param_groups]
            with pytest.raises(RankMismatchError, match=rf"add_param_group.*rank 1: [^;]*{problem}"):
                parity.zero.add_param_group(group if ctx.rank == 1 else make_group(small_model()))
            assert_same(parity.zero.param_groups, before)
            assert len(parity.zero.optim.param_groups) == 1
            assert len(parity.zero.layout.params) == 6
            if ctx.rank == 0:
                assert_same(parity.zero.state_dict()["param_groups"], parity.plain.state_dict()["param_groups"])
        parity.train(2)
        assert_param_group_can_be_added(parity)


def make_model_with_frozen_last_param() -> nn.Module:
    model = small_model()
    list(model.parameters())[-1].requires_grad_(False)
    return model


def assert_param_group_can_be_added(parity: ParityRun) -> None:
    """After a rejected group, equal groups can still be added."""
    ours, theirs = small_model(1), small_model(1)
    parity.zero.add_param_group({"params": list(ours.parameters()), "lr": 0.3})
    parity.plain.add_param_group({"params": list(theirs.parameters()), "lr": 0.3})
    for step in range(2):
        set_grads(ours.parameters(), step)
        set_grads(theirs.parameters(), step)
        parity.train(1)
        assert_same(ours.state_dict(), theirs.state_dict())
    found = parity.zero.full_state_dict()
    if found is not None:
        assert_same(found, parity.plain.state_dict())


@ranks(2, 3)
@pytest.mark.parametrize("bucket_view", [False, True])
def test_ranks_in_different_calls_raise_instead_of_hanging(ctx: RankContext, bucket_view: bool) -> None:
    make_run = partial(ParityRun, SGD, lr=0.1, momentum=0.9, zero_only={"parameters_as_bucket_view": bucket_view})
    parity = make_run()
    saved = parity.plain.state_dict()

    def new_group() -> dict[str, Any]:
        return {"params": list(small_model().parameters())}

    calls: dict[str, Callable[[ParityRun], object]] = {
        "step": lambda parity: parity.zero.step(),
        "closure": lambda parity: parity.zero.step(lambda: 0.0),
        "consolidate_state_dict": lambda parity: parity.zero.consolidate_state_dict(),
        "full_state_dict": lambda parity: parity.zero.full_state_dict(),
        "load_state_dict": lambda parity: parity.zero.load_state_dict(saved),
        "add_param_group": lambda parity: parity.zero.add_param_group(new_group()),
        "ZeroRedundancyOptimizer()": lambda parity: ZeroRedundancyOptimizer(parity.model.parameters(), Adam),
        "broadcast_object": lambda _: broadcast_object("text", 0),
    }
    names = list(calls)
    for index, name in enumerate(names):
        other = names[index - 1]
        parity = make_run()
        set_grads(parity.model.parameters(), 0)
        with pytest.raises(
            RankMismatchError,
            match=rf"different calls.*{re.escape(name)}.*{re.escape(other)}|{re.escape(other)}.*{re.escape(name)}",
        ):
            calls[name if ctx.rank == 0 else other](parity)


@ranks(2)
def test_rejected_call_does_not_break_later_calls(ctx: RankContext) -> None:
    parity = ParityRun(Adam)
    parity.train(1)
    with pytest.raises(RankMismatchError):
        (parity.zero.consolidate_state_dict if ctx.rank else parity.zero.full_state_dict)()
    parity.train(2)


@ranks(3, 4)
def test_tree_consensus_detects_mismatch(ctx: RankContext) -> None:
    """The consensus algorithm of large groups, forced on small ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "MAX_RING_RANKS", 1)
        with pytest.raises(RankMismatchError, match=r"ranks 0, 1.*: .*lr=0\.1.*rank 2: .*lr=0\.2"):
            ZeroRedundancyOptimizer(small_model().parameters(), Adam, lr=0.2 if ctx.rank == 2 else 0.1)
        parity = ParityRun(Adam)
        parity.train(2)


@ranks(2, 3)
@pytest.mark.parametrize("bucket_view", [False, True])
def test_option_changed_on_one_rank_leaves_replicas_equal(ctx: RankContext, bucket_view: bool) -> None:
    """The drop-in compares options after the update: all ranks have received it when they raise."""
    parity = ParityRun(SGD, lr=0.1, zero_only={"parameters_as_bucket_view": bucket_view})
    parity.train(1)
    if ctx.rank == 0:
        parity.zero.param_groups[0]["lr"] = 0.5
    set_grads(parity.model.parameters(), 1)
    with pytest.raises(RankMismatchError, match=r"rank 0: .*lr=0\.5.*The step was applied: .* its owner's options"):
        parity.zero.step()
    params = [param.detach() for param in parity.model.parameters()]
    for values in ctx.gather(params):
        assert_same(values, params)


class ExtraClosureCallOnRank0(torch.optim.SGD):
    """Calls the closure once more on rank 0."""

    def step(self, closure: Any = None) -> Any:
        if closure is not None and dist.get_rank() == 0:
            closure()
        return super().step(closure)


@ranks(2, 3, timeout=30)
def test_extra_closure_call_on_one_rank_raises(ctx: RankContext) -> None:
    """No communication stays in flight that would be written into parameters, or waited for, later."""
    model = mlp()
    optimizer = shard(model, ExtraClosureCallOnRank0, lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = regression(model, 0)
        torch.autograd.backward(loss)
        return loss

    with pytest.raises(RankMismatchError, match=r"different calls.*look for a call under `if rank == 0:`"):
        optimizer.step(closure)
    assert not optimizer._engine.param_sync.is_in_flight
