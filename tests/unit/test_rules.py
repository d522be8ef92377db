"""Assignment of parameters to rules, and errors for invalid or ambiguous rules."""

import functools
import re
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Muon

from zeroshard import ConfigError, FlatShards, ParamRule, WholeParams, matrix_params, remaining_params
from zeroshard.rules import Selector, assign_params_to_rules, make_class_names, select_params

MATRIX, VECTOR = torch.zeros(3, 2), torch.zeros(3)


class TiedModel(nn.Module):
    """A small language model with tied embedding and head."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.tok_embed = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(2))
        self.lm_head = nn.Linear(4, 5, bias=False)
        if tied:
            self.lm_head.weight = self.tok_embed.weight


def all_named_parameters(model: nn.Module) -> list[tuple[str, Tensor]]:
    return list(model.named_parameters(remove_duplicate=False))


def names_of(chosen: list[list[tuple[str, Tensor]]]) -> list[list[str]]:
    return [[name for name, _ in members] for members in chosen]


@pytest.mark.parametrize(
    ("name", "words", "excluded"),
    [
        ("tok_embed.weight", ["embed"], True),
        ("embeddings.weight", ["embed"], True),
        ("model.wte.embedding", ["embed"], True),
        ("lm_head.weight", ["head"], True),
        ("multihead.weight", ["head"], False),
        ("head.0.weight", ["lm_head"], False),
        ("lm_head.weight", ["lm_head"], True),
        ("model.lm_head.weight", ["embed", "lm_head"], True),
        ("blocks.1.weight", ["blocks.1"], True),
        ("blocks.10.weight", ["blocks.1"], False),
        ("blocks.1.weight", ["blocks.*"], True),
        ("model.blocks.1.weight", ["blocks.*"], False),
        ("model.blocks.1.weight", ["*.1.*"], True),
        ("Head.weight", ["head"], False),
        ("a+b.weight", ["a+b"], True),
        ("aab.weight", ["a+b"], False),
        ("blocks.0.weight", [], False),
    ],
)
def test_exclude_words_and_patterns(name: str, words: list[str], excluded: bool) -> None:
    assert matrix_params(exclude=words)(name, MATRIX) is not excluded
    assert not matrix_params(exclude=words)(name, VECTOR)
    assert not matrix_params(exclude=words)(name, torch.zeros(3, 2, 1))


@pytest.mark.parametrize("exclude", ["embed", ("embed", ""), (1,)])
def test_exclude_must_be_a_sequence_of_strings(exclude: Any) -> None:
    with pytest.raises(TypeError, match=re.escape("expected matrix_params(exclude=...) to be ")):
        matrix_params(exclude=exclude)


def test_params_are_assigned_in_model_order() -> None:
    model = TiedModel(tied=False)
    rules = [ParamRule(remaining_params, AdamW), ParamRule(matrix_params(("embed", "head")), Muon)]
    rest, chosen = names_of(assign_params_to_rules(all_named_parameters(model), rules))
    assert chosen == ["blocks.0.0.weight", "blocks.1.0.weight"]
    assert rest == [name for name, _ in model.named_parameters() if name not in chosen]
    assert rest[0] == "tok_embed.weight"


def test_frozen_params_are_assigned_too() -> None:
    model = TiedModel().requires_grad_(False)
    assert (
        sum(
            map(
                len,
                assign_params_to_rules(
                    all_named_parameters(model), [ParamRule(matrix_params(), Muon), ParamRule(remaining_params, AdamW)]
                ),
            )
        )
        == 9
    )


@pytest.mark.parametrize("words", [("embed",), ("head",), ("embed", "head")])
def test_tied_weight_is_excluded_by_any_of_its_names(words: tuple[str, ...]) -> None:
    rules = [ParamRule(matrix_params(words), Muon), ParamRule(remaining_params, AdamW)]
    chosen, rest = names_of(assign_params_to_rules(all_named_parameters(TiedModel()), rules))
    assert chosen == ["blocks.0.0.weight", "blocks.1.0.weight"]
    assert rest[0] == "tok_embed.weight"
    assert "lm_head.weight" not in rest, "a tied weight is listed once"


@pytest.mark.parametrize("prefix", ["_orig_mod.", "_checkpoint_wrapped_module."])
def test_selectors_see_names_without_wrapper_prefixes(prefix: str) -> None:
    named = [(f"{prefix}embed.weight", MATRIX), (f"blocks.0.{prefix}weight", torch.zeros(2, 2))]
    rules = [ParamRule(matrix_params(("embed.*",)), Muon), ParamRule(remaining_params, AdamW)]
    assert names_of(assign_params_to_rules(named, rules)) == [
        [f"blocks.0.{prefix}weight"],
        [f"{prefix}embed.weight"],
    ]
    seen: list[str] = []

    def selector(name: str, _: Tensor) -> bool:
        seen.append(name)
        return True

    assert len(select_params(selector, named)) == 2
    assert seen == ["embed.weight", "blocks.0.weight"]


def is_bias(name: str, _: Tensor) -> bool:
    return name.endswith("bias")


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (
            [ParamRule(matrix_params(("embed", "head")), Muon), ParamRule(is_bias, SGD)],
            "no rule takes 3 of the parameters: tok_embed.weight = lm_head.weight, blocks.0.1.weight, "
            "blocks.1.1.weight. Every parameter needs one: add ParamRule(remaining_params, ...).",
        ),
        (
            [
                ParamRule(matrix_params(), Muon),
                ParamRule(lambda name, _: "blocks.0" in name, SGD),
                ParamRule(remaining_params, AdamW),
            ],
            "several rules take 1 of the parameters: blocks.0.0.weight (rules 0 and 1). Every parameter needs one: "
            "make their selectors choose different ones.",
        ),
        (
            [ParamRule(remaining_params, Muon), ParamRule(remaining_params, AdamW)],
            "several rules take 9 of the parameters: tok_embed.weight (rules 0 and 1), blocks.0.0.weight (rules 0 and "
            "1), blocks.0.0.bias (rules 0 and 1), blocks.0.1.weight (rules 0 and 1), blocks.0.1.bias (rules 0 and 1), "
            "blocks.1.0.weight (rules 0 and 1), blocks.1.0.bias (rules 0 and 1), blocks.1.1.weight (rules 0 and 1) "
            "and 1 more. Every parameter needs one: make their selectors choose different ones.",
        ),
        (
            [ParamRule(matrix_params(exclude=("*",)), Muon), ParamRule(remaining_params, AdamW)],
            "rule 0, ParamRule(matrix_params(exclude=('*',)), Muon), selects no parameter of the model. Remove it",
        ),
    ],
)
def test_ambiguous_rules_are_rejected(rules: list[ParamRule], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        assign_params_to_rules(all_named_parameters(TiedModel()), rules)
    assert str(caught.value).startswith(message)


def by_hand(params: Any) -> AdamW:
    return AdamW(params)


EXPECTED_SELECTOR = "expected ParamRule(selector, ...) with a selector such as matrix_params()"
EXPECTED_CLASS = "expected ParamRule(selector, optimizer_class) with a class such as torch.optim.AdamW"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: ParamRule(cast(Any, Muon), AdamW),
            f"{EXPECTED_SELECTOR}, got <class 'torch.optim",
        ),
        (
            lambda: ParamRule(matrix_params, Muon),  # type: ignore[arg-type]
            f"{EXPECTED_SELECTOR}, got <function matrix_params",
        ),
        (lambda: ParamRule("embed", Muon), f"{EXPECTED_SELECTOR}, got 'embed'"),  # type: ignore[arg-type]
        (lambda: ParamRule(matrix_params(), "Muon"), f"{EXPECTED_CLASS}, got 'Muon'"),
        (
            lambda: ParamRule(matrix_params(), SGD([MATRIX], lr=0.1)),
            f"{EXPECTED_CLASS}, got SGD (",
        ),
        (
            lambda: ParamRule(matrix_params(), Muon, partition=FlatShards),  # type: ignore[arg-type]
            "expected ParamRule(partition=...) to be FlatShards(...) or WholeParams(...), got <class",
        ),
    ],
)
def test_invalid_rule_arguments_are_rejected(make: Callable[[], ParamRule], message: str) -> None:
    with pytest.raises((TypeError, ConfigError)) as caught:
        make()
    assert str(caught.value).startswith(message)


def test_rule_options_and_repr() -> None:
    rule = ParamRule(matrix_params(["embed"]), Muon, partition=WholeParams(), lr=0.1, selector_of_its_own=1)
    assert rule.options == {"lr": 0.1, "selector_of_its_own": 1}
    assert repr(rule) == "ParamRule(matrix_params(exclude=('embed',)), Muon)"
    assert repr(ParamRule(remaining_params, by_hand)) == "ParamRule(remaining_params, by_hand)"


def test_remaining_params_cannot_be_called_directly() -> None:
    selector: Selector = remaining_params
    with pytest.raises(NotImplementedError, match="resolved after all other rules"):
        selector("weight", MATRIX)


def test_class_names_are_unique() -> None:
    classes = [Muon, AdamW, functools.partial(Muon, lr=1), by_hand, AdamW, AdamW]
    names = make_class_names([ParamRule(matrix_params(), cls) for cls in classes])
    assert names == ["Muon", "AdamW", "Muon 2", "by_hand", "AdamW 2", "AdamW 3"]


def test_unmatched_exclude_word_warns() -> None:
    """Otherwise an embedding with a different name would silently be trained as a matrix."""
    model = nn.ModuleDict({"tokens": nn.Embedding(4, 3), "lm_head": nn.Linear(3, 4)})
    rules = [ParamRule(matrix_params(exclude=("embed", "head", "*.gain")), Muon), ParamRule(remaining_params, AdamW)]
    with pytest.warns(UserWarning, match=r"no parameter name of the model contains 'embed' or '\*.gain'"):
        assign_params_to_rules(model.named_parameters(), rules)
