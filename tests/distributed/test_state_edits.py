"""Edits of `optimizer.state` work as with the unsharded optimizer: resets, restarts, replaced entries."""

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
from tests.support.oracles import TINY, ParityRun, RulesParityRun, ShardParityRun, assert_same
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
    """Assign all entries in a loop, also unchanged ones, as code does that moves state to another device."""
    for state in optimizer.state.values():
        for key, value in state.items():
            state[key] = torch.zeros_like(value) if key != "step" else value.to("cpu")


def assign_full_tensors(optimizer: Any, params: Params) -> None:
    """Assign tensors in the shape of the parameters; each rank takes its slice."""
    key = "momentum_buffer" if "momentum" in optimizer.param_groups[0] else "exp_avg"
    for param in params[::2]:
        optimizer.state[param][key] = param.detach() * 0.1


def reset_step_counts(optimizer: Any, params: Params) -> None:
    """Reset step counts in place, of only some of the parameters that share a flat parameter."""
    for param in params[1:4]:
        if "step" in optimizer.state.get(param, {}):
            optimizer.state[param]["step"].zero_()


def replace_state_dict(optimizer: Any, params: Params) -> None:
    """Keep the state of some parameters, halve that of one and drop that of another."""
    kept = {param: copy.copy(optimizer.state[param]) for param in params[2:]}
    halved = {param: {key: value * 0.5 for key, value in optimizer.state[param].items()} for param in params[:1]}
    optimizer.state = defaultdict(dict, kept)
    optimizer.state.update(halved)


def replace_and_restore(optimizer: Any, _: Params) -> None:
    """Tensors that were replaced keep their values, so they can be assigned again."""
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
    """Compare the state of all parameters in any order: a plain optimizer moves recreated entries to the end."""
    found = zero.full_state_dict()
    if found is not None:
        expected = plain.state_dict()
        assert_same(found, {**expected, "state": dict(sorted(expected["state"].items()))}, "the state dict")


@pytest.mark.parametrize("edit", EDITS, ids=edit_name)
@ranks(1, 2, 3, 4)
def test_sharded_state_edits_match_ddp(ctx: RankContext, edit: Edit) -> None:
    """Also after loading a state dict that was saved after the edit."""
    cases: list[tuple[Any, ZeroConfig, dict[str, Any]]] = [
        (optim.AdamW, ZeroConfig(), {"lr": 0.05}),
        (optim.SGD, ZeroConfig(partition=TINY, stage=1), {"lr": 0.05, "momentum": 0.9}),
    ]
    for factory, config, options in cases:
        parity = ShardParityRun(factory, config=config, **options)
        parity.train(2)
        for _ in range(2):
            apply_to_both(edit, [(parity.model, parity.zero), (parity.plain_model, parity.plain)])
            assert_same_state(parity.zero, parity.plain)
            parity.train(2)
        assert_same_state(parity.zero, parity.plain)
        parity.zero.load_state_dict(broadcast_object(parity.zero.full_state_dict(), 0))
        parity.train(1)


@pytest.mark.parametrize("edit", EDITS, ids=edit_name)
@ranks(1, 2, 3)
def test_flat_drop_in_state_edits_match_plain_optimizer(ctx: RankContext, edit: Edit) -> None:
    """Parameters in several groups, without elements, without dimensions, and with unusual strides."""
    shapes: list[tuple[int, ...]] = [(7, 5), (33,), (), (2, 3, 2), (0,), (19,)]
    for make, get_params in (
        (partial(random_params, *shapes), make_param_groups),
        (make_strided_params, nn.Module.named_parameters),
    ):
        parity = ParityRun(
            optim.AdamW, model=make, get_params=get_params, zero_only=flat_options(1 << 20), lr=0.05, amsgrad=True
        )
        parity.train(2)
        apply_to_both(edit, parity.sides)
        parity.train(3)
        assert_same_state(parity.zero, parity.plain)


@ranks(1, 2, 3)
def test_state_edits_with_several_optimizers(ctx: RankContext) -> None:
    """Muon has whole matrices, AdamW has slices."""
    parity = RulesParityRun()
    parity.train(2)
    param_pairs = zip(parity.model.parameters(), parity.plain_model.parameters(), strict=True)
    for number, (ours, theirs) in enumerate(param_pairs):
        plain = next(member.state for member in parity.plain.members if theirs in member.state)
        key = next(key for key in plain[theirs] if key != "step")
        for state, param in ((parity.zero.state, ours), (plain, theirs)):
            if number % 3 == 0:
                del state[param]
            elif number % 3 == 1:
                state[param][key] = torch.full_like(param, 0.01)
    parity.train(2)
    parity.check_state()
    parity.zero.state = {}
    for member in parity.plain.members:
        member.state = defaultdict(dict)
    parity.train(2)
    parity.check_state()


@ranks(1, 2, 3)
def test_edited_state_of_master_weights_keeps_its_dtype(ctx: RankContext) -> None:
    for inner, key in ((INNER_OPTIMIZERS[0], "exp_avg"), (INNER_OPTIMIZERS[2], "momentum_buffer")):
        run = Run(make_half_mlp(), ZeroConfig(master_dtype=MASTER_WEIGHTS), inner)
        run.train(2)
        param_lists: list[Params] = [list(run.model.parameters()), list(run.oracle.masters)]
        for optimizer, params in zip((run.zero, run.oracle.plain), param_lists, strict=True):
            del optimizer.state[params[8]], optimizer.state[params[9]]
            optimizer.state[params[3]][key] = torch.ones_like(params[3])
        run.train(3)
        run.check_state()


@ranks(1, 2, 3)
def test_invalid_state_edits_are_rejected_on_all_ranks(ctx: RankContext) -> None:
    """A rejected edit changes nothing."""
    parity = ShardParityRun(optim.AdamW, config=ZeroConfig(), lr=0.05)
    parity.train(2)
    state, params = parity.zero.state, list(parity.model.parameters())
    for param in params:
        good, bad = torch.zeros_like(param), torch.zeros(3, 1, 7)
        with pytest.raises(ConfigError, match=r"'exp_avg' .* to have the parameter's shape .*, got \(3, 1, 7\)"):
            state[param]["exp_avg"] = bad
        with pytest.raises(ConfigError, match=r"expected 'exp_avg_sq' .* to have"):
            state[param].update(exp_avg=good, exp_avg_sq=bad)
        with pytest.raises(ConfigError, match=r"expected 'exp_avg' .* to have"):
            state.update({params[0]: {}, param: {"exp_avg": bad}})
        with pytest.raises(ConfigError, match=r"expected 'exp_avg' .* to have"):
            parity.zero.state = {params[0]: {}, param: {"exp_avg": torch.tensor(0.0)}}
        with pytest.raises(ConfigError, match=r"'master_weights' .* cannot be assigned"):
            state[param]["master_weights"] = good
        with pytest.raises(ConfigError, match="to be a dict, got int"):
            state[param] = 3
    with pytest.raises(ConfigError, match="not a parameter of this optimizer"):
        state[torch.zeros(3)] = {}
    if ctx.world_size > 1:
        with pytest.raises(ConfigError, match="different parameters on the"):
            state.popitem()
    parity.check_state()
    parity.train(1)


@ranks(1, 2, 3)
def test_reading_state_returns_live_views(ctx: RankContext) -> None:
    """Reading neither splits nor copies tensors of the inner optimizer, and a reset of all parameters splits none.

    Views that the user holds follow later steps.
    """
    parity = ShardParityRun(optim.AdamW, config=ZeroConfig(), lr=0.05)
    parity.train(2)
    inner, params = parity.zero.optim.state, list(parity.model.parameters())
    count, storages = len(inner), {state["exp_avg"].untyped_storage().data_ptr() for state in inner.values()}
    local_params = [param for param in params if param in parity.zero.state]
    assert list(map(id, parity.zero.state)) == list(map(id, local_params))
    assert [state["step"].item() for state in parity.zero.state.values()] == [2.0] * len(local_params)
    for values in parity.zero.state.values():
        assert values["exp_avg"].untyped_storage().data_ptr() in storages
        assert isinstance(values, dict)
        assert_same([copy.deepcopy(values), values | {}, type(values)(values), values.copy()], [dict(values)] * 4)
    parity.train(1)
    assert len(inner) == count
    apply_to_both(pop_all_entries, [(parity.model, parity.zero), (parity.plain_model, parity.plain)])
    parity.train(3)
    assert len(inner) == count
    held = [(values, values["step"], values["exp_avg"]) for values in parity.zero.state.values()]
    parity.train(2)
    for values, step, exp_avg in held:
        assert step.item() == 5.0
        assert values["step"] is step
        assert torch.equal(values["exp_avg"], exp_avg)
        step.zero_()
    for state in parity.plain.state.values():
        state["step"].zero_()
    parity.train(2)
    parity.check_state()
