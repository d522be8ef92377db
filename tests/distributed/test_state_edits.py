"""Edits of `optimizer.state` do what they do for the unsharded optimizer: resets, restarts, transplants."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from tests.distributed.test_flat_parity import flat_options, make_param_groups, make_strided_params, random_params
from tests.distributed.test_master_weights import INNER_OPTIMIZERS, MASTER_WEIGHTS, Run, make_half_mlp
from tests.support import RankContext, ranks
from tests.support.oracles import TINY, Pair, RulesPair, Twins, assert_same
from zeroshard import ConfigError, ZeroConfig, broadcast_object

Params = list[Tensor]
Edit = Callable[[Any, Params], object]


def clear_state(optimizer: Any, _: Params) -> None:
    optimizer.state.clear()


def delete_some_entries(optimizer: Any, params: Params) -> None:
    for param in params[1::2]:
        del optimizer.state[param]


def pop_all_entries(optimizer: Any, params: Params) -> None:
    for param in params:
        optimizer.state.pop(param)
        optimizer.state.pop(param, None)


def empty_some_entries(optimizer: Any, params: Params) -> None:
    optimizer.state[params[0]] = {}
    optimizer.state[params[2]].clear()
    for key in list(optimizer.state[params[3]]):
        del optimizer.state[params[3]][key]
    optimizer.state.pop(params[4])
    optimizer.state.setdefault(params[4], {})


def replace_shards(optimizer: Any, _: Params) -> None:
    """As code does that moves state to another device: it assigns in the loop, also what has not changed."""
    for state in optimizer.state.values():
        for key, value in state.items():
            state[key] = torch.zeros_like(value) if key != "step" else value.to("cpu")


def assign_full_tensors(optimizer: Any, params: Params) -> None:
    """Tensors in the shape of the parameters, of which each rank takes its slice."""
    key = "momentum_buffer" if "momentum" in optimizer.param_groups[0] else "exp_avg"
    for param in params[::2]:
        optimizer.state[param][key] = param.detach() * 0.1


def reset_step_counts(optimizer: Any, params: Params) -> None:
    """In place, of some parameters of a segment only."""
    for param in params[1:4]:
        if "step" in optimizer.state.get(param, {}):
            optimizer.state[param]["step"].zero_()


def replace_state_dict(optimizer: Any, params: Params) -> None:
    """An optimizer that goes on with what it had for some parameters, and with less of it for others."""
    kept = {it: copy.copy(optimizer.state[it]) for it in params[2:]}
    less = {it: {key: value * 0.5 for key, value in optimizer.state[it].items()} for it in params[:1]}
    optimizer.state = defaultdict(dict, kept)
    optimizer.state.update(less)


def replace_and_restore(optimizer: Any, _: Params) -> None:
    """What was replaced keeps its values."""
    for state in optimizer.state.values():
        before = dict(state)
        state.update({key: torch.zeros_like(value) for key, value in before.items()})
        state.update(before)


EDITS: list[Edit] = [
    clear_state,
    delete_some_entries,
    pop_all_entries,
    empty_some_entries,
    replace_shards,
    assign_full_tensors,
    reset_step_counts,
    replace_state_dict,
    replace_and_restore,
]


def edit_name(edit: Edit) -> str:
    return edit.__name__


def apply_to_both(edit: Edit, sides: list[tuple[nn.Module, Any]]) -> None:
    for model, optimizer in sides:
        edit(optimizer, list(model.parameters()))


def assert_same_state(zero: Any, plain: Any) -> None:
    """Of all parameters, in whichever order: what was deleted and made again is the last one of a plain optimizer."""
    found = zero.full_state_dict()
    if found is not None:
        expected = plain.state_dict()
        assert_same(found, {**expected, "state": dict(sorted(expected["state"].items()))}, "the state dict")


@pytest.mark.parametrize("edit", EDITS, ids=edit_name)
@ranks(1, 2, 3, 4)
def test_sharded_state_edits_match_ddp(ctx: RankContext, edit: Edit) -> None:
    """Also from what is saved after it."""
    kinds: list[tuple[Any, ZeroConfig, dict[str, Any]]] = [
        (optim.AdamW, ZeroConfig(), {"lr": 0.05}),
        (optim.SGD, ZeroConfig(partition=TINY, stage=1), {"lr": 0.05, "momentum": 0.9}),
    ]
    for factory, config, options in kinds:
        pair = Pair(factory, config=config, **options)
        pair.train(2)
        for _ in range(2):
            apply_to_both(edit, [(pair.model, pair.zero), (pair.plain_model, pair.plain)])
            assert_same_state(pair.zero, pair.plain)
            pair.train(2)
        assert_same_state(pair.zero, pair.plain)
        pair.zero.load_state_dict(broadcast_object(pair.zero.full_state_dict(), 0))
        pair.train(1)


@pytest.mark.parametrize("edit", EDITS, ids=edit_name)
@ranks(1, 2, 3)
def test_flat_drop_in_state_edits_match_plain_optimizer(ctx: RankContext, edit: Edit) -> None:
    """Of parameters in several groups, without elements, without dimensions, and in other orders of memory."""
    shapes: list[tuple[int, ...]] = [(7, 5), (33,), (), (2, 3, 2), (0,), (19,)]
    for make, handed in (
        (partial(random_params, *shapes), make_param_groups),
        (make_strided_params, nn.Module.named_parameters),
    ):
        twins = Twins(optim.AdamW, model=make, handed=handed, zero_only=flat_options(1 << 20), lr=0.05, amsgrad=True)
        twins.train(2)
        apply_to_both(edit, twins.sides)
        twins.train(3)
        assert_same_state(twins.zero, twins.plain)


@ranks(1, 2, 3)
def test_state_edits_with_several_optimizers(ctx: RankContext) -> None:
    """Whole matrices of Muon beside slices of AdamW."""
    pair = RulesPair()
    pair.train(2)
    named = zip(pair.model.parameters(), pair.plain_model.parameters(), strict=True)
    for number, (ours, theirs) in enumerate(named):
        plain = next(member.state for member in pair.plain.members if theirs in member.state)
        key = next(key for key in plain[theirs] if key != "step")
        for state, param in ((pair.zero.state, ours), (plain, theirs)):
            if number % 3 == 0:
                del state[param]
            elif number % 3 == 1:
                state[param][key] = torch.full_like(param, 0.01)
    pair.train(2)
    pair.check_state()
    pair.zero.state = {}
    for member in pair.plain.members:
        member.state = defaultdict(dict)
    pair.train(2)
    pair.check_state()


@ranks(1, 2, 3)
def test_edited_state_of_master_weights_keeps_its_dtype(ctx: RankContext) -> None:
    for inner, key in ((INNER_OPTIMIZERS[0], "exp_avg"), (INNER_OPTIMIZERS[2], "momentum_buffer")):
        run = Run(make_half_mlp(), ZeroConfig(master_dtype=MASTER_WEIGHTS), inner)
        run.train(2)
        params: list[Params] = [list(run.model.parameters()), list(run.oracle.masters)]
        for optimizer, given in zip((run.zero, run.oracle.plain), params, strict=True):
            del optimizer.state[given[8]], optimizer.state[given[9]]
            optimizer.state[given[3]][key] = torch.ones_like(given[3])
        run.train(3)
        run.check_state()


@ranks(1, 2, 3)
def test_invalid_state_edits_are_rejected_on_all_ranks(ctx: RankContext) -> None:
    """And nothing of it is kept."""
    pair = Pair(optim.AdamW, config=ZeroConfig(), lr=0.05)
    pair.train(2)
    state, params = pair.zero.state, list(pair.model.parameters())
    for param in params:
        good, bad = torch.zeros_like(param), torch.zeros(3, 1, 7)
        with pytest.raises(ConfigError, match=r"'exp_avg' .* must have the parameter's shape .*, got \(3, 1, 7\)"):
            state[param]["exp_avg"] = bad
        with pytest.raises(ConfigError, match=r"'exp_avg_sq' .* must have"):
            state[param].update(exp_avg=good, exp_avg_sq=bad)
        with pytest.raises(ConfigError, match=r"'exp_avg' .* must have"):
            state.update({params[0]: {}, param: {"exp_avg": bad}})
        with pytest.raises(ConfigError, match=r"'exp_avg' .* must have"):
            pair.zero.state = {params[0]: {}, param: {"exp_avg": torch.tensor(0.0)}}
        with pytest.raises(ConfigError, match=r"'master_weights' .* cannot be assigned"):
            state[param]["master_weights"] = good
        with pytest.raises(ConfigError, match="must be a dict, got a int"):
            state[param] = 3
    with pytest.raises(ConfigError, match="not a parameter of this optimizer"):
        state[torch.zeros(3)] = {}
    if ctx.world_size > 1:
        with pytest.raises(ConfigError, match="different parameter on each of the"):
            state.popitem()
    pair.check_state()
    pair.train(1)


@ranks(1, 2, 3)
def test_reading_state_returns_live_views(ctx: RankContext) -> None:
    """Reading divides no tensor of the inner optimizer and keeps nothing, nor does a reset of all parameters; what
    somebody holds follows later steps."""
    pair = Pair(optim.AdamW, config=ZeroConfig(), lr=0.05)
    pair.train(2)
    inner, params = pair.zero.optim.state, list(pair.model.parameters())
    count, memory = len(inner), {it["exp_avg"].untyped_storage().data_ptr() for it in inner.values()}
    mine = [param for param in params if param in pair.zero.state]
    assert list(map(id, pair.zero.state)) == list(map(id, mine))
    assert [state["step"].item() for state in pair.zero.state.values()] == [2.0] * len(mine)
    for values in pair.zero.state.values():
        assert values["exp_avg"].untyped_storage().data_ptr() in memory
        assert isinstance(values, dict)
        assert_same([copy.deepcopy(values), values | {}, type(values)(values), values.copy()], [dict(values)] * 4)
    pair.train(1)
    assert len(inner) == count
    apply_to_both(pop_all_entries, [(pair.model, pair.zero), (pair.plain_model, pair.plain)])
    pair.train(3)
    assert len(inner) == count
    held = [(values, values["step"], values["exp_avg"]) for values in pair.zero.state.values()]
    pair.train(2)
    for values, step, average in held:
        assert step.item() == 5.0
        assert values["step"] is step
        assert torch.equal(values["exp_avg"], average)
        step.zero_()
    for state in pair.plain.state.values():
        state["step"].zero_()
    pair.train(2)
    pair.check_state()
