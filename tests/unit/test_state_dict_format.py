"""Optimizer state in torch's format: what is read, refused, split among ranks and written."""

import copy
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from zeroshard.errors import CheckpointError
from zeroshard.layout.spec import ParamSpec, make_param_specs
from zeroshard.state import state_dict as compat
from zeroshard.state.state_dict import SavedState, describe_options, extract_local_state_dict, pack_param_groups

SHAPED = frozenset({"exp_avg", "exp_avg_sq"})
NAMES = ["0.weight", "0.bias", "1.weight", "1.bias"]


def stepped(*, named: bool = False, **options: Any) -> AdamW:
    """AdamW over two groups of two parameters each, after a step, so that there is state."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    params: list[Any] = list(model.named_parameters() if named else model.parameters())
    groups: list[dict[str, Any]] = [{"params": params[:2]}, {"params": params[2:], "lr": 0.5}]
    made = AdamW(groups, **options)
    model(torch.ones(1, 3)).sum().backward()
    made.step()
    return made


def specs_of(optimizer: torch.optim.Optimizer) -> tuple[ParamSpec, ...]:
    return make_param_specs(optimizer.param_groups)


def read(saved: Any, specs: tuple[ParamSpec, ...] | None = None) -> SavedState:
    return compat.parse_state_dict(saved, specs_of(stepped()) if specs is None else specs, 2, lambda _: SHAPED)


def marks_of(saved: SavedState) -> list[Any]:
    """Which saved entry went to which parameter, told by the mark that `marked` left."""
    return [saved.by_param[index]["mark"] for index in range(4)]


def marked(saved: dict[str, Any]) -> dict[str, Any]:
    """The dict with states that only say under which number they were saved."""
    return {**saved, "state": {number: {"mark": number} for number in saved["state"]}}


def renumbered(saved: dict[str, Any], ids: list[Any]) -> dict[str, Any]:
    """The same dict with other ids."""
    groups = [{**group, "params": [ids[number] for number in group["params"]]} for group in saved["param_groups"]]
    return {"state": {ids[number]: state for number, state in saved["state"].items()}, "param_groups": groups}


def test_groups_are_written_as_torch_writes_them() -> None:
    for named in (True, False):
        optimizer = stepped(named=named, lr=torch.tensor(0.25), betas=(0.8, 0.9))
        written, expected = pack_param_groups(optimizer.param_groups), optimizer.state_dict()["param_groups"]
        assert written == expected
        assert [list(group) for group in written] == [list(group) for group in expected]
        assert [type(group["lr"]) for group in written] == [torch.Tensor, float]


def test_written_groups_do_not_change_later() -> None:
    optimizer = stepped(named=True, lr=torch.tensor(0.25))
    written = pack_param_groups(optimizer.param_groups)
    optimizer.param_groups[0]["lr"].fill_(9)
    optimizer.param_groups[0]["param_names"].clear()
    assert (written[0]["lr"].item(), written[0]["param_names"]) == (0.25, NAMES[:2])


@pytest.mark.parametrize("ids", [[0, 1, 2, 3], [7, 3, 12, 0], ["a", "b", "c", "d"]])
def test_ids_are_matched_by_position(ids: list[Any]) -> None:
    saved = read(renumbered(marked(stepped().state_dict()), ids))
    assert marks_of(saved) == [0, 1, 2, 3]
    assert saved.shared_state == {}


ORDER = [1, 0, 3, 2]
SPELLINGS: dict[str, Callable[[str], str]] = {
    "as they are": lambda name: name,
    "under DDP": lambda name: f"module.{name}",
    "compiled": lambda name: f"_orig_mod.{name}",
    "compiled under DDP": lambda name: f"module._orig_mod.{name}",
    "compiled in parts": lambda name: name.replace(".", "._orig_mod."),
}


@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS)
@pytest.mark.parametrize("as_ids", [True, False], ids=["names as ids", "param_names"])
def test_names_count_more_than_positions(spelling: Callable[[str], str], as_ids: bool) -> None:
    """Saved with the parameters of each group in another order."""
    specs = specs_of(stepped(named=True))
    names = [spelling(NAMES[index]) for index in ORDER]
    saved = marked(stepped().state_dict())
    if as_ids:
        saved = renumbered(saved, names)
    else:
        for group in saved["param_groups"]:
            group["param_names"] = [names[number] for number in group["params"]]
    assert marks_of(read(saved, specs)) == ORDER


def test_names_on_one_side_only_are_no_help() -> None:
    named, plain = stepped(named=True), stepped()
    assert marks_of(read(marked(named.state_dict()), specs_of(plain))) == [0, 1, 2, 3]
    assert marks_of(read(marked(plain.state_dict()), specs_of(named))) == [0, 1, 2, 3]


def test_other_names_are_matched_by_position_with_a_warning() -> None:
    optimizer = stepped(named=True)
    saved = marked(optimizer.state_dict())
    saved["param_groups"][0]["param_names"] = ["first", "second"]
    with pytest.warns(UserWarning, match="names in the loaded state dict differ.*by position"):
        found = read(saved, specs_of(optimizer))
    assert marks_of(found) == [0, 1, 2, 3]


def test_equal_names_give_no_warning() -> None:
    optimizer = stepped(named=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read(optimizer.state_dict(), specs_of(optimizer))


def test_state_of_no_parameter_is_kept_apart() -> None:
    saved = stepped().state_dict()
    saved["state"]["calls"] = 5
    found = read(saved)
    assert found.shared_state == {"calls": 5}
    assert extract_local_state_dict(found, [[], []])["state"] == {"calls": 5}


def test_a_stale_number_falls_on_no_parameter() -> None:
    """A rank numbers its own parameters from 0, where the saved ids are others."""
    saved = renumbered(stepped().state_dict(), [10, 11, 12, 13])
    saved["state"][0] = saved["state"].pop(10)
    assert extract_local_state_dict(read(saved), [[0], [2]])["state"].keys() == {1}


def test_what_stands_beside_state_and_groups_is_handed_on() -> None:
    saved = stepped().state_dict() | {"version": 3}
    local = extract_local_state_dict(read(saved), [[0], []])
    assert (local["version"], sorted(local)) == (3, ["param_groups", "state", "version"])


def test_a_rank_calls_its_parameters_by_their_own_names() -> None:
    named = stepped(named=True)
    for saved in (stepped().state_dict(), named.state_dict()):
        groups = extract_local_state_dict(read(saved, specs_of(named)), [[1], [2, 3]])["param_groups"]
        assert [group["param_names"] for group in groups] == [["0.bias"], ["1.weight", "1.bias"]]
    groups = extract_local_state_dict(read(named.state_dict()), [[1], [2, 3]])["param_groups"]
    assert not any("param_names" in group for group in groups)


def test_parameters_without_state_have_none() -> None:
    saved = stepped().state_dict()
    del saved["state"][2]
    assert sorted(read(saved).by_param) == [0, 1, 3]


def test_an_empty_group_counts() -> None:
    optimizer = stepped()
    optimizer.add_param_group({"params": []})
    saved = optimizer.state_dict()
    assert len(compat.parse_state_dict(saved, specs_of(optimizer), 3, lambda _: SHAPED).groups) == 3
    with pytest.raises(CheckpointError, match="it has 3, this optimizer has 2"):
        read(saved)


def broken(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    saved = copy.deepcopy(stepped().state_dict())
    change(saved)
    return saved


NO_STATE_DICT = "not an optimizer state dict: it needs 'state', a dict, and 'param_groups', a list of dicts"
MISFITS: dict[str, tuple[Any, str]] = {
    "no dict": ([1, 2], NO_STATE_DICT),
    "no groups": ({"state": {}}, NO_STATE_DICT),
    "groups that are no list": ({"state": {}, "param_groups": {}}, NO_STATE_DICT),
    "groups that are no dicts": ({"state": {}, "param_groups": [1]}, NO_STATE_DICT),
    "a group without params": (broken(lambda d: d["param_groups"][1].pop("params")), NO_STATE_DICT),
    "no state": ({"param_groups": []}, NO_STATE_DICT),
    "state that is no dict": (broken(lambda d: d.update(state=[])), NO_STATE_DICT),
    "a group too few": (broken(lambda d: d["param_groups"].pop()), "number of parameter groups: it has 1, .* has 2"),
    "a group too many": (broken(lambda d: d["param_groups"].append({"params": []})), "it has 3, this optimizer has 2"),
    "a parameter too few": (
        broken(lambda d: d["param_groups"][1]["params"].pop()),
        "group 1 has 1 parameters there and 2 here",
    ),
    "a parameter too many": (
        broken(lambda d: d["param_groups"][0]["params"].append(9)),
        "group 0 has 3 parameters there and 2 here",
    ),
    "a parameter twice": (
        broken(lambda d: d["param_groups"][1].update(params=[0, 3])),
        "lists a parameter twice",
    ),
    "another shape": (
        broken(lambda d: d["state"][2].update(exp_avg=torch.zeros(2, 3))),
        r"'exp_avg' of parameter 2 has shape \(2, 3\), but the parameter has \(2, 2\)",
    ),
}


@pytest.mark.parametrize(("saved", "message"), MISFITS.values(), ids=MISFITS)
def test_what_does_not_fit_is_refused(saved: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(saved)


def test_a_parameter_that_changed_its_group_is_refused() -> None:
    optimizer = stepped(named=True)
    saved = optimizer.state_dict()
    names = [NAMES[index] for index in (0, 2, 1, 3)]
    for group in saved["param_groups"]:
        group["param_names"] = [names[number] for number in group["params"]]
    with pytest.raises(CheckpointError, match=r"parameter 2 \(1.weight\) is in another group"):
        read(saved, specs_of(optimizer))


def test_state_of_another_shape_may_be_what_the_optimizer_keeps() -> None:
    """Only what is known to be shaped like its parameter is held to that."""
    assert read(broken(lambda d: d["state"][2].update(scale=torch.zeros(7)))).by_param[2]["scale"].shape == (7,)


def test_reading_leaves_the_dict_as_it_was() -> None:
    saved = stepped().state_dict()
    before = copy.deepcopy(saved)
    found = read(saved)
    local = extract_local_state_dict(found, [[1], [2, 3]])
    for group in (*found.groups, *local["param_groups"]):
        group.clear()
    assert saved["param_groups"] == before["param_groups"]
    assert saved["state"].keys() == before["state"].keys()
    for number, state in before["state"].items():
        assert all(torch.equal(saved["state"][number][key], value) for key, value in state.items())


@pytest.mark.parametrize("split", [[[0, 1], [2, 3]], [[1], [2]], [[], [3, 2]], [[0], []], [[], []]])
def test_a_rank_gets_its_part(split: list[list[int]]) -> None:
    """Loaded by a plain optimizer over the same parameters, the part gives each of them its own state."""
    whole = stepped(lr=0.125)
    params = [param for group in whole.param_groups for param in group["params"]]
    part = AdamW([{"params": [params[index] for index in indices]} for indices in split], lr=9.0)
    part.load_state_dict(extract_local_state_dict(read(whole.state_dict()), split))
    assert [group["lr"] for group in part.param_groups] == [0.125, 0.5]
    assert len(part.state) == sum(map(len, split))
    for param, state in part.state.items():
        assert all(torch.equal(whole.state[param][key], value) for key, value in state.items())


def test_facts_are_equal_for_equal_dicts() -> None:
    saved = stepped().state_dict()
    assert read(saved).must_match(is_sharded=False) == read(copy.deepcopy(saved)).must_match(is_sharded=False)


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["param_groups"][1].update(lr=0.75),
        lambda d: d["param_groups"][1].update(fresh=None),
        lambda d: d["state"].pop(3),
        lambda d: d["state"][3].pop("step"),
        lambda d: d["state"][3].update(step=torch.zeros(2)),
        lambda d: d["state"][3].update(step=torch.zeros((), dtype=torch.float64)),
        lambda d: d["state"][3].update(extra=1),
    ],
)
def test_facts_tell_dicts_apart(change: Callable[[dict[str, Any]], object]) -> None:
    assert read(broken(change)).must_match(is_sharded=False) != read(stepped().state_dict()).must_match(
        is_sharded=False
    )


class Opaque:
    """An option whose repr holds its address."""


def options() -> dict[str, Any]:
    return {
        "params": [torch.zeros(2)],
        "param_names": ["w"],
        "lr": torch.tensor(0.1),
        "betas": (0.9, torch.tensor(0.99)),
        "table": torch.zeros(100),
        "flags": [True, None, "text", b"raw", 1j],
        "dtype": torch.float32,
        "policy": Opaque(),
        "rule": lambda step: step,
        "nested": {"a": [Opaque(), 1]},
    }


def test_options_in_words() -> None:
    text = describe_options(options())
    assert text == describe_options(options())
    assert not re.search("0x[0-9a-f]+", text)
    assert "param" not in text
    assert text == describe_options(dict(reversed(options().items())))
    assert "lr=tensor(0.1" in text
    assert "betas=tuple(0.9, tensor(" in text
    assert "flags=list(True, None, 'text', b'raw', 1j)" in text


@pytest.mark.parametrize(
    "change",
    [
        {"lr": torch.tensor(0.2)},
        {"lr": 0.1},
        {"lr": torch.tensor(0.1, dtype=torch.float64)},
        {"betas": [0.9, torch.tensor(0.99)]},
        {"betas": (0.9, torch.tensor(0.98))},
        {"flags": [False, None, "text", b"raw", 1j]},
        {"table": torch.zeros(101)},
        {"dtype": torch.float16},
        {"policy": None},
        {"nested": {"a": [Opaque(), 2]}},
        {"momentum": 0.9},
    ],
)
def test_options_that_differ_read_differently(change: dict[str, Any]) -> None:
    assert describe_options({**options(), **change}) != describe_options(options())
