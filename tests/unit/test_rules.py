"""Which rule takes which parameter, and what is said where that is not clear."""

import functools
import re
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Muon

from zeroshard import ConfigError, FlatShards, Rule, WholeParams, everything_else, matrices
from zeroshard.rules import Selector, chosen_by, class_names, divide

MATRIX, VECTOR = torch.zeros(3, 2), torch.zeros(3)


class Tied(nn.Module):
    """A small language model whose head is its embedding."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.tok_embed = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(2))
        self.lm_head = nn.Linear(4, 5, bias=False)
        if tied:
            self.lm_head.weight = self.tok_embed.weight


def every_name(model: nn.Module) -> list[tuple[str, Tensor]]:
    return list(model.named_parameters(remove_duplicate=False))


def names(chosen: list[list[tuple[str, Tensor]]]) -> list[list[str]]:
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
def test_words_and_patterns(name: str, words: list[str], excluded: bool) -> None:
    assert matrices(exclude=words)(name, MATRIX) is not excluded
    assert not matrices(exclude=words)(name, VECTOR)
    assert not matrices(exclude=words)(name, torch.zeros(3, 2, 1))


@pytest.mark.parametrize("given", ["embed", ("embed", ""), (1,)])
def test_words_are_words(given: Any) -> None:
    with pytest.raises(TypeError, match=re.escape("matrices(exclude=...) takes")):
        matrices(exclude=given)


def test_each_parameter_goes_to_its_rule_in_the_order_of_the_model() -> None:
    model = Tied(tied=False)
    given = [Rule(everything_else, AdamW), Rule(matrices(("embed", "head")), Muon)]
    rest, chosen = names(divide(every_name(model), given))
    assert chosen == ["blocks.0.0.weight", "blocks.1.0.weight"]
    assert rest == [name for name, _ in model.named_parameters() if name not in chosen]
    assert rest[0] == "tok_embed.weight"


def test_frozen_parameters_have_a_rule_too() -> None:
    model = Tied().requires_grad_(False)
    assert sum(map(len, divide(every_name(model), [Rule(matrices(), Muon), Rule(everything_else, AdamW)]))) == 9


@pytest.mark.parametrize("words", [("embed",), ("head",), ("embed", "head")])
def test_a_tied_weight_is_excluded_by_any_of_its_names(words: tuple[str, ...]) -> None:
    given = [Rule(matrices(words), Muon), Rule(everything_else, AdamW)]
    chosen, rest = names(divide(every_name(Tied()), given))
    assert chosen == ["blocks.0.0.weight", "blocks.1.0.weight"]
    assert rest[0] == "tok_embed.weight"
    assert "lm_head.weight" not in rest, "it is there once"


@pytest.mark.parametrize("wrapping", ["_orig_mod.", "_checkpoint_wrapped_module."])
def test_selectors_see_names_without_what_wrappers_put_into_them(wrapping: str) -> None:
    named = [(f"{wrapping}embed.weight", MATRIX), (f"blocks.0.{wrapping}weight", torch.zeros(2, 2))]
    given = [Rule(matrices(("embed.*",)), Muon), Rule(everything_else, AdamW)]
    assert names(divide(named, given)) == [[f"blocks.0.{wrapping}weight"], [f"{wrapping}embed.weight"]]
    seen: list[str] = []

    def selector(name: str, _: Tensor) -> bool:
        seen.append(name)
        return True

    assert len(chosen_by(selector, named)) == 2
    assert seen == ["embed.weight", "blocks.0.weight"]


def is_bias(name: str, _: Tensor) -> bool:
    return name.endswith("bias")


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (
            [Rule(matrices(("embed", "head")), Muon), Rule(is_bias, SGD)],
            "no rule takes 3 of the parameters: tok_embed.weight = lm_head.weight, blocks.0.1.weight, "
            "blocks.1.1.weight. Every parameter needs one: add Rule(everything_else, ...).",
        ),
        (
            [Rule(matrices(), Muon), Rule(lambda name, _: "blocks.0" in name, SGD), Rule(everything_else, AdamW)],
            "several rules take 1 of the parameters: blocks.0.0.weight (rules 0 and 1). Every parameter needs one: "
            "make their selectors choose different ones.",
        ),
        (
            [Rule(everything_else, Muon), Rule(everything_else, AdamW)],
            "several rules take 9 of the parameters: tok_embed.weight (rules 0 and 1), blocks.0.0.weight (rules 0 and "
            "1), blocks.0.0.bias (rules 0 and 1), blocks.0.1.weight (rules 0 and 1), blocks.0.1.bias (rules 0 and 1), "
            "blocks.1.0.weight (rules 0 and 1), blocks.1.0.bias (rules 0 and 1), blocks.1.1.weight (rules 0 and 1), "
            "....",
        ),
        (
            [Rule(matrices(exclude=("*",)), Muon), Rule(everything_else, AdamW)],
            "rule 0, Rule(matrices(exclude=('*',)), Muon), takes no parameter of the model: remove it",
        ),
    ],
)
def test_what_is_not_clear_is_refused_with_names(given: list[Rule], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        divide(every_name(Tied()), given)
    assert str(caught.value).startswith(problem)


def by_hand(params: Any) -> AdamW:
    return AdamW(params)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: Rule(cast(Any, Muon), AdamW), "a Rule takes a selector such as matrices(), not <class 'torch.optim"),
        (lambda: Rule(matrices, Muon), "a Rule takes a selector such as matrices(), not <function matrices"),  # type: ignore[arg-type]
        (lambda: Rule("embed", Muon), "a Rule takes a selector such as matrices(), not 'embed'"),  # type: ignore[arg-type]
        (lambda: Rule(matrices(), "Muon"), "a Rule takes a class such as torch.optim.AdamW, not 'Muon'"),
        (
            lambda: Rule(matrices(), SGD([MATRIX], lr=0.1)),
            "a Rule takes a class such as torch.optim.AdamW, not SGD (",
        ),
        (
            lambda: Rule(matrices(), Muon, partition=FlatShards),  # type: ignore[arg-type]
            "Rule(partition=...) takes FlatShards(...) or WholeParams(...), not <class",
        ),
    ],
)
def test_rules_check_what_they_are_given(make: Callable[[], Rule], problem: str) -> None:
    with pytest.raises((TypeError, ConfigError)) as caught:
        make()
    assert str(caught.value).startswith(problem)


def test_rules_keep_options_and_show_themselves() -> None:
    rule = Rule(matrices(["embed"]), Muon, partition=WholeParams(), lr=0.1, selector_of_its_own=1)
    assert rule.options == {"lr": 0.1, "selector_of_its_own": 1}
    assert repr(rule) == "Rule(matrices(exclude=('embed',)), Muon)"
    assert repr(Rule(everything_else, by_hand)) == "Rule(everything_else, by_hand)"


def test_everything_else_is_known_when_the_others_have_chosen() -> None:
    selector: Selector = everything_else
    with pytest.raises(NotImplementedError, match="when the other rules have chosen"):
        selector("weight", MATRIX)


def test_names_of_classes_are_different() -> None:
    classes = [Muon, AdamW, functools.partial(Muon, lr=1), by_hand, AdamW, AdamW]
    found = class_names([Rule(matrices(), it) for it in classes])
    assert found == ["Muon", "AdamW", "Muon 2", "by_hand", "AdamW 2", "AdamW 3"]


def test_a_word_that_excludes_nothing_is_told() -> None:
    """Else an embedding of another name would be trained as a matrix, in silence."""
    model = nn.ModuleDict({"tokens": nn.Embedding(4, 3), "lm_head": nn.Linear(3, 4)})
    rules = [Rule(matrices(exclude=("embed", "head", "*.gain")), Muon), Rule(everything_else, AdamW)]
    with pytest.warns(UserWarning, match=r"no parameter of the model has 'embed' or '\*.gain' in its name"):
        divide(model.named_parameters(), rules)
