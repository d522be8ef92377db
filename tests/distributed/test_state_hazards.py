"""Situations in which saving, keeping or freeing state could give wrong values or hang."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.optim import SGD, Adam

from tests.support import RankContext, ranks
from tests.support.oracles import ParityRun, assert_same, set_grads, small_model
from zeroshard import (
    CheckpointError,
    ConfigError,
    RankFailedError,
    RankMismatchError,
    ZeroRedundancyOptimizer,
    broadcast_object,
)
from zeroshard.state import serialization


class NetWithScale(nn.Module):
    """A model whose first parameter has no dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.layers = small_model()


def params_with_scale_first(model: Any) -> Any:
    return list(model.parameters())


def scale_in_last_group(model: Any) -> Any:
    return [{"params": list(model.layers.parameters())}, {"params": [model.scale]}]


def scale_in_first_group(model: Any) -> Any:
    return [{"params": [model.scale]}, {"params": list(model.layers.parameters()), "amsgrad": True}]


@ranks(2, 3)
def test_wrong_state_shape_with_scalar_param_is_rejected(ctx: RankContext) -> None:
    for get_params in (params_with_scale_first, scale_in_last_group, scale_in_first_group):
        parity = ParityRun(Adam, model=NetWithScale, get_params=get_params, lr=0.1)
        parity.train(1)
        saved = parity.plain.state_dict()
        for index, state in saved["state"].items():
            for key in ("exp_avg", "exp_avg_sq"):
                if state[key].dim():
                    corrupted = copy.deepcopy(saved)
                    corrupted["state"][index][key] = torch.ones(7, 7)
                    with pytest.raises(CheckpointError, match="shape"):
                        parity.zero.load_state_dict(corrupted)
        parity.train(1)


def momentum_in_one_group(model: Any) -> Any:
    first, *rest = model.parameters()
    return [{"params": [first]}, {"params": rest, "momentum": 0.9}]


@ranks(2, 3)
def test_wrong_state_shape_with_different_group_options_is_rejected(ctx: RankContext) -> None:
    parity = ParityRun(SGD, get_params=momentum_in_one_group, lr=0.1)
    parity.train(1)
    corrupted = copy.deepcopy(parity.plain.state_dict())
    corrupted["state"][1]["momentum_buffer"] = torch.ones(7, 7)
    with pytest.raises(CheckpointError, match="shape"):
        parity.zero.load_state_dict(corrupted)
    parity.train(1)


@ranks(2, 3)
def test_modified_consolidated_state_is_not_returned(ctx: RankContext) -> None:
    parity = ParityRun(Adam, lr=0.1)
    parity.train(1)
    parity.zero.consolidate_state_dict()
    if ctx.rank == 0:
        other = small_model()
        plain = Adam(other.parameters())
        plain.load_state_dict(parity.zero.state_dict())  # torch keeps the same tensors, without a copy
        assert_same(parity.zero.state_dict()["state"], parity.plain.state_dict()["state"])
        set_grads(other.parameters(), 1)
        plain.step()
        with pytest.raises(RuntimeError, match="changed in place"):
            parity.zero.state_dict()
    parity.zero.consolidate_state_dict()
    if ctx.rank == 0:
        assert_same(parity.zero.state_dict(), parity.plain.state_dict())


@ranks(2, 3)
def test_old_consolidated_state_is_freed_before_the_new_one(ctx: RankContext) -> None:
    parity = ParityRun(Adam, lr=0.1)
    parity.train(1)
    parity.zero.consolidate_state_dict()
    kept = (
        []
        if parity.zero._consolidated_state is None
        else list(parity.zero._consolidated_state.state_dict["state"].values())
    )
    old_tensors = [weakref.ref(state["exp_avg"]) for state in kept]
    del kept
    are_alive: list[bool] = []

    def receive_and_record(*args: Any) -> Any:
        are_alive.extend(tensor() is not None for tensor in old_tensors)
        return receive_state(*args)

    receive_state = serialization.receive_state
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serialization, "receive_state", receive_and_record)
        parity.zero.consolidate_state_dict()
    assert are_alive == ([False] * 6 * (ctx.world_size - 1) if ctx.rank == 0 else [])


class Mark:
    """State of a type that only `add_safe_globals` allows."""


@ranks(2, 3)
def test_types_allowed_on_one_rank_only_are_reported(ctx: RankContext) -> None:
    parity = ParityRun(SGD, lr=0.1, momentum=0.9)
    parity.train(1)
    calls: list[Callable[[], Any]] = [
        parity.zero.consolidate_state_dict,
        parity.zero.full_state_dict,
        lambda: broadcast_object(Mark() if ctx.rank == 1 else None, 1),
    ]
    states = list(parity.zero.state.values())
    with torch.serialization.safe_globals([Mark] if ctx.rank == 1 else []):
        if ctx.rank == 1:
            states[0]["mark"] = Mark()
        for call in calls:
            with pytest.raises(RankMismatchError, match="Mark"):
                call()
    states[0].pop("mark", None)
    parity.train(1)
    for call in calls[:2]:
        call()


@ranks(2, 3)
def test_broadcast_source_outside_the_group_is_rejected(ctx: RankContext) -> None:
    pair = dist.new_group([1, 0])
    for group, members in ((None, range(ctx.world_size)), (pair, (0, 1))):
        if ctx.rank not in members:
            continue
        for outside in (99, -1, 2 if group else 3):
            with pytest.raises(ConfigError, match=f"rank {outside} is not"):
                broadcast_object({"a": 1}, outside, group)
            with pytest.raises(ConfigError if ctx.rank == 1 else RankFailedError, match=f"rank {outside} is not"):
                broadcast_object({"a": 1}, outside if ctx.rank == 1 else 0, group)
        with pytest.raises(RankMismatchError, match="src_rank"):
            broadcast_object({"a": 1}, ctx.rank, group)
        assert broadcast_object({"a": ctx.rank}, 1, group) == {"a": 1}


class SGDWithExtraState(SGD):
    """Adds the sum of each of its parameters to its state dict, or fails."""

    should_fail = False

    def state_dict(self) -> dict[str, Any]:
        if self.should_fail:
            raise ArithmeticError("no sums today")
        sums = [param.sum().item() for param in self.param_groups[0]["params"]]
        return {**super().state_dict(), "sums": sums}


@ranks(2, 3)
def test_different_extra_state_across_ranks_is_reported(ctx: RankContext) -> None:
    parity = ParityRun(SGDWithExtraState, lr=0.1)
    for call in (parity.zero.full_state_dict, parity.zero.consolidate_state_dict):
        parity.zero.optim.should_fail = False  # type: ignore[attr-defined]
        with pytest.raises(RankMismatchError, match="adds to its dict"):
            call()
        parity.zero.optim.should_fail = ctx.rank == 1  # type: ignore[attr-defined]
        with pytest.raises(ArithmeticError if ctx.rank == 1 else RankFailedError, match="no sums today"):
            call()
    parity.train(1)


@ranks(2, 3)
def test_deleted_optimizer_is_freed_without_gc(ctx: RankContext) -> None:
    gc.disable()
    try:
        for bucket_view in (False, True):
            model = small_model()
            zero = ZeroRedundancyOptimizer(model.parameters(), Adam, parameters_as_bucket_view=bucket_view)
            with Join([zero]):
                for step in range(1 + ctx.rank):
                    set_grads(model.parameters(), step)
                    zero.step()
            zero.step(lambda: 1.0)
            zero.consolidate_state_dict()
            refs: list[weakref.ref[Any]] = [weakref.ref(zero), weakref.ref(zero.optim)]
            refs += [weakref.ref(state["exp_avg"]) for state in zero.state.values()]
            del zero
            assert [ref() for ref in refs] == [None] * len(refs)
    finally:
        gc.enable()
