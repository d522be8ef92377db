"""Optimizer state in torch's state-dict format: parsing, validation, splitting among ranks and writing."""

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
from zeroshard.state import state_dict as state_dict_format
from zeroshard.state.state_dict import SavedState, describe_options, extract_local_state_dict, pack_param_groups

PARAM_SHAPED_KEYS = frozenset({"exp_avg", "exp_avg_sq"})
NAMES = ["0.weight", "0.bias", "1.weight", "1.bias"]


def make_stepped_adamw(*, named: bool = False, **options: Any) -> AdamW:
    """Build AdamW over two groups of two parameters each and take one step, so it has state."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    params: list[Any] = list(model.named_parameters() if named else model.parameters())
    groups: list[dict[str, Any]] = [{"params": params[:2]}, {"params": params[2:], "lr": 0.5}]
    optimizer = AdamW(groups, **options)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return optimizer


def make_specs(optimizer: torch.optim.Optimizer) -> tuple[ParamSpec, ...]:
    return make_param_specs(optimizer.param_groups)


def parse(saved: Any, specs: tuple[ParamSpec, ...] | None = None) -> SavedState:
    return state_dict_format.parse_state_dict(
        saved, make_specs(make_stepped_adamw()) if specs is None else specs, 2, lambda _: PARAM_SHAPED_KEYS
    )


def get_marks(saved: SavedState) -> list[Any]:
    """Return which saved entry each parameter received, identified by the mark that `mark_state` left."""
    return [saved.by_param[index]["mark"] for index in range(4)]


def mark_state(saved: dict[str, Any]) -> dict[str, Any]:
    """Replace each parameter's state with a mark: the id it was saved under."""
    return {**saved, "state": {number: {"mark": number} for number in saved["state"]}}


def renumber(saved: dict[str, Any], ids: list[Any]) -> dict[str, Any]:
    """Return the same dict with other ids."""
    groups = [{**group, "params": [ids[index] for index in group["params"]]} for group in saved["param_groups"]]
    return {"state": {ids[index]: state for index, state in saved["state"].items()}, "param_groups": groups}


def test_pack_param_groups_matches_torch() -> None:
    for named in (True, False):
        optimizer = make_stepped_adamw(named=named, lr=torch.tensor(0.25), betas=(0.8, 0.9))
        packed, expected = pack_param_groups(optimizer.param_groups), optimizer.state_dict()["param_groups"]
        assert packed == expected
        assert [list(group) for group in packed] == [list(group) for group in expected]
        assert [type(group["lr"]) for group in packed] == [torch.Tensor, float]


def test_packed_groups_are_independent_of_their_source() -> None:
    optimizer = make_stepped_adamw(named=True, lr=torch.tensor(0.25))
    packed = pack_param_groups(optimizer.param_groups)
    optimizer.param_groups[0]["lr"].fill_(9)
    optimizer.param_groups[0]["param_names"].clear()
    assert (packed[0]["lr"].item(), packed[0]["param_names"]) == (0.25, NAMES[:2])


@pytest.mark.parametrize("ids", [[0, 1, 2, 3], [7, 3, 12, 0], ["a", "b", "c", "d"]])
def test_ids_are_matched_by_position(ids: list[Any]) -> None:
    saved = parse(renumber(mark_state(make_stepped_adamw().state_dict()), ids))
    assert get_marks(saved) == [0, 1, 2, 3]
    assert saved.shared_state == {}


SHUFFLED_ORDER = [1, 0, 3, 2]
NAME_WRAPPERS: dict[str, Callable[[str], str]] = {
    "unwrapped": lambda name: name,
    "under DDP": lambda name: f"module.{name}",
    "compiled": lambda name: f"_orig_mod.{name}",
    "compiled under DDP": lambda name: f"module._orig_mod.{name}",
    "compiled submodules": lambda name: name.replace(".", "._orig_mod."),
}


@pytest.mark.parametrize("wrap_name", NAME_WRAPPERS.values(), ids=NAME_WRAPPERS)
@pytest.mark.parametrize("as_ids", [True, False], ids=["names as ids", "param_names"])
def test_names_take_precedence_over_positions(wrap_name: Callable[[str], str], as_ids: bool) -> None:
    """The parameters of each group were saved in a different order."""
    specs = make_specs(make_stepped_adamw(named=True))
    names = [wrap_name(NAMES[index]) for index in SHUFFLED_ORDER]
    saved = mark_state(make_stepped_adamw().state_dict())
    if as_ids:
        saved = renumber(saved, names)
    else:
        for group in saved["param_groups"]:
            group["param_names"] = [names[number] for number in group["params"]]
    assert get_marks(parse(saved, specs)) == SHUFFLED_ORDER


def test_names_on_one_side_only_are_ignored() -> None:
    named, plain = make_stepped_adamw(named=True), make_stepped_adamw()
    assert get_marks(parse(mark_state(named.state_dict()), make_specs(plain))) == [0, 1, 2, 3]
    assert get_marks(parse(mark_state(plain.state_dict()), make_specs(named))) == [0, 1, 2, 3]


def test_different_names_are_matched_by_position_with_warning() -> None:
    optimizer = make_stepped_adamw(named=True)
    saved = mark_state(optimizer.state_dict())
    saved["param_groups"][0]["param_names"] = ["first", "second"]
    with pytest.warns(UserWarning, match="names in the loaded state dict differ.*by position"):
        parsed = parse(saved, make_specs(optimizer))
    assert get_marks(parsed) == [0, 1, 2, 3]


def test_equal_names_do_not_warn() -> None:
    optimizer = make_stepped_adamw(named=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parse(optimizer.state_dict(), make_specs(optimizer))


def test_global_state_is_kept_separately() -> None:
    saved = make_stepped_adamw().state_dict()
    saved["state"]["calls"] = 5
    parsed = parse(saved)
    assert parsed.shared_state == {"calls": 5}
    assert extract_local_state_dict(parsed, [[], []])["state"] == {"calls": 5}


def test_stale_id_matches_no_param() -> None:
    """A rank numbers its own parameters from 0, even if the saved ids differ."""
    saved = renumber(make_stepped_adamw().state_dict(), [10, 11, 12, 13])
    saved["state"][0] = saved["state"].pop(10)
    assert extract_local_state_dict(parse(saved), [[0], [2]])["state"].keys() == {1}


def test_extra_top_level_keys_are_preserved() -> None:
    saved = make_stepped_adamw().state_dict() | {"version": 3}
    local = extract_local_state_dict(parse(saved), [[0], []])
    assert (local["version"], sorted(local)) == (3, ["param_groups", "state", "version"])


def test_local_groups_use_current_param_names() -> None:
    named = make_stepped_adamw(named=True)
    for saved in (make_stepped_adamw().state_dict(), named.state_dict()):
        groups = extract_local_state_dict(parse(saved, make_specs(named)), [[1], [2, 3]])["param_groups"]
        assert [group["param_names"] for group in groups] == [["0.bias"], ["1.weight", "1.bias"]]
    groups = extract_local_state_dict(parse(named.state_dict()), [[1], [2, 3]])["param_groups"]
    assert not any("param_names" in group for group in groups)


def test_params_without_state_are_omitted() -> None:
    saved = make_stepped_adamw().state_dict()
    del saved["state"][2]
    assert sorted(parse(saved).by_param) == [0, 1, 3]


def test_empty_group_is_counted() -> None:
    optimizer = make_stepped_adamw()
    optimizer.add_param_group({"params": []})
    saved = optimizer.state_dict()
    assert (
        len(state_dict_format.parse_state_dict(saved, make_specs(optimizer), 3, lambda _: PARAM_SHAPED_KEYS).groups)
        == 3
    )
    with pytest.raises(CheckpointError, match="it has 3, this optimizer has 2"):
        parse(saved)


def modify_state_dict(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    saved = copy.deepcopy(make_stepped_adamw().state_dict())
    change(saved)
    return saved


NOT_A_STATE_DICT = "expected an optimizer state dict with 'state', a dict, and 'param_groups', a list of dicts"
INVALID_STATE_DICTS: dict[str, tuple[Any, str]] = {
    "not a dict": ([1, 2], NOT_A_STATE_DICT),
    "missing groups": ({"state": {}}, NOT_A_STATE_DICT),
    "groups not a list": ({"state": {}, "param_groups": {}}, NOT_A_STATE_DICT),
    "group not a dict": ({"state": {}, "param_groups": [1]}, NOT_A_STATE_DICT),
    "group without params": (modify_state_dict(lambda saved: saved["param_groups"][1].pop("params")), NOT_A_STATE_DICT),
    "missing state": ({"param_groups": []}, NOT_A_STATE_DICT),
    "state not a dict": (modify_state_dict(lambda saved: saved.update(state=[])), NOT_A_STATE_DICT),
    "too few groups": (
        modify_state_dict(lambda saved: saved["param_groups"].pop()),
        "number of parameter groups: it has 1, .* has 2",
    ),
    "too many groups": (
        modify_state_dict(lambda saved: saved["param_groups"].append({"params": []})),
        "it has 3, this optimizer has 2",
    ),
    "too few params": (
        modify_state_dict(lambda saved: saved["param_groups"][1]["params"].pop()),
        "group 1 has 1 parameters there and 2 here",
    ),
    "too many params": (
        modify_state_dict(lambda saved: saved["param_groups"][0]["params"].append(9)),
        "group 0 has 3 parameters there and 2 here",
    ),
    "duplicate param": (
        modify_state_dict(lambda saved: saved["param_groups"][1].update(params=[0, 3])),
        "lists a parameter twice",
    ),
    "different shape": (
        modify_state_dict(lambda saved: saved["state"][2].update(exp_avg=torch.zeros(2, 3))),
        r"'exp_avg' of parameter 2 does not match: expected shape \(2, 2\), got \(2, 3\)",
    ),
}


@pytest.mark.parametrize(("saved", "message"), INVALID_STATE_DICTS.values(), ids=INVALID_STATE_DICTS)
def test_invalid_state_dict_is_rejected(saved: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parse(saved)


def test_param_in_another_group_is_rejected() -> None:
    optimizer = make_stepped_adamw(named=True)
    saved = optimizer.state_dict()
    names = [NAMES[index] for index in (0, 2, 1, 3)]
    for group in saved["param_groups"]:
        group["param_names"] = [names[number] for number in group["params"]]
    with pytest.raises(CheckpointError, match=r"parameter 2 \(1.weight\) is in another parameter group"):
        parse(saved, make_specs(optimizer))


def test_state_not_shaped_like_param_is_accepted() -> None:
    """Only keys known to be shaped like their parameter are checked."""
    assert parse(modify_state_dict(lambda saved: saved["state"][2].update(scale=torch.zeros(7)))).by_param[2][
        "scale"
    ].shape == (7,)


def test_parsing_does_not_modify_state_dict() -> None:
    saved = make_stepped_adamw().state_dict()
    before = copy.deepcopy(saved)
    parsed = parse(saved)
    local = extract_local_state_dict(parsed, [[1], [2, 3]])
    for group in (*parsed.groups, *local["param_groups"]):
        group.clear()
    assert saved["param_groups"] == before["param_groups"]
    assert saved["state"].keys() == before["state"].keys()
    for number, state in before["state"].items():
        assert all(torch.equal(saved["state"][number][key], value) for key, value in state.items())


@pytest.mark.parametrize("split", [[[0, 1], [2, 3]], [[1], [2]], [[], [3, 2]], [[0], []], [[], []]])
def test_local_state_dict_loads_into_plain_optimizer(split: list[list[int]]) -> None:
    """A plain optimizer over the same parameters gets each parameter's own state."""
    full = make_stepped_adamw(lr=0.125)
    params = [param for group in full.param_groups for param in group["params"]]
    local = AdamW([{"params": [params[index] for index in indices]} for indices in split], lr=9.0)
    local.load_state_dict(extract_local_state_dict(parse(full.state_dict()), split))
    assert [group["lr"] for group in local.param_groups] == [0.125, 0.5]
    assert len(local.state) == sum(map(len, split))
    for param, state in local.state.items():
        assert all(torch.equal(full.state[param][key], value) for key, value in state.items())


def test_must_match_is_equal_for_equal_dicts() -> None:
    saved = make_stepped_adamw().state_dict()
    assert parse(saved).must_match(is_sharded=False) == parse(copy.deepcopy(saved)).must_match(is_sharded=False)


@pytest.mark.parametrize(
    "change",
    [
        lambda saved: saved["param_groups"][1].update(lr=0.75),
        lambda saved: saved["param_groups"][1].update(fresh=None),
        lambda saved: saved["state"].pop(3),
        lambda saved: saved["state"][3].pop("step"),
        lambda saved: saved["state"][3].update(step=torch.zeros(2)),
        lambda saved: saved["state"][3].update(step=torch.zeros((), dtype=torch.float64)),
        lambda saved: saved["state"][3].update(extra=1),
    ],
)
def test_must_match_differs_for_different_dicts(change: Callable[[dict[str, Any]], object]) -> None:
    assert parse(modify_state_dict(change)).must_match(is_sharded=False) != parse(
        make_stepped_adamw().state_dict()
    ).must_match(is_sharded=False)


class Opaque:
    """An option whose repr contains its address."""


def make_options() -> dict[str, Any]:
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


def test_describe_options() -> None:
    text = describe_options(make_options())
    assert text == describe_options(make_options())
    assert not re.search("0x[0-9a-f]+", text)
    assert "param" not in text
    assert text == describe_options(dict(reversed(make_options().items())))
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
def test_descriptions_of_different_options_differ(change: dict[str, Any]) -> None:
    assert describe_options({**make_options(), **change}) != describe_options(make_options())


@pytest.mark.parametrize("value", [torch.eye(3).to_sparse(), torch.ones(2, device="meta")], ids=["sparse", "meta"])
def test_options_that_cannot_be_read_are_described_by_shape(value: torch.Tensor) -> None:
    assert f"lr=tensor(shape {tuple(value.shape)}, torch.float32)" in describe_options({"params": [], "lr": value})
