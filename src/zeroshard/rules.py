"""Which optimizer class updates which parameters of a model."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import count
from typing import Any, cast

import torch

from .errors import ConfigError
from .layout.partition import FlatShards, WholeParams
from .notices import warn_user
from .state.compat import unwrapped

Selector = Callable[[str, torch.Tensor], bool]
"""Whether a parameter with this name is chosen."""
Named = tuple[str, torch.Tensor]
_MOST_NAMES = 8


class Rule:
    """The parameters that `selector` chooses are updated by `optimizer_class`, made with `options`.

    selector: `matrices()`, `everything_else`, or a function of a name and a parameter. Names are those in the model,
        without what `torch.compile` and wrappers put into them. A tied weight has several: a rule takes it if the
        selector chooses it under each of them.
    partition: `FlatShards(...)` or `WholeParams(...)`. By default parameters are cut where the class allows it, and
        whole elsewhere.
    """

    def __init__(
        self,
        selector: Selector,
        optimizer_class: Any,
        *,
        partition: FlatShards | WholeParams | None = None,
        **options: Any,
    ) -> None:
        if not callable(selector) or isinstance(selector, type) or selector == cast(Any, matrices):
            raise TypeError(f"a Rule takes a selector such as matrices(), not {selector!r}")
        if not callable(optimizer_class) or isinstance(optimizer_class, torch.optim.Optimizer):
            raise TypeError(f"a Rule takes a class such as torch.optim.AdamW, not {optimizer_class!r}")
        if not isinstance(partition, (FlatShards, WholeParams, type(None))):
            raise ConfigError(f"Rule(partition=...) takes FlatShards(...) or WholeParams(...), not {partition!r}")
        self.selector, self.optimizer_class = selector, optimizer_class
        self.partition, self.options = partition, options

    def __repr__(self) -> str:
        return f"Rule({self.selector!r}, {getattr(self.optimizer_class, '__qualname__', self.optimizer_class)})"


@dataclass(frozen=True)
class _Matrices:
    exclude: tuple[str, ...]

    def __call__(self, name: str, param: torch.Tensor) -> bool:
        return param.dim() == 2 and not any(_matches(name, pattern) for pattern in self.exclude)

    def __repr__(self) -> str:
        return f"matrices(exclude={self.exclude!r})"


@dataclass(frozen=True)
class _EverythingElse:
    def __call__(self, name: str, param: torch.Tensor) -> bool:
        raise NotImplementedError("what is left is known when the other rules have chosen")

    def __repr__(self) -> str:
        return "everything_else"


everything_else = _EverythingElse()
"""Chooses what no other rule does."""


def matrices(exclude: Sequence[str] = ()) -> Selector:
    """Chooses parameters of two dimensions, but those with a word of `exclude` in their names.

    A word is what stands between dots and underscores, or its beginning: `embed` excludes `tok_embed.weight` and
    `embeddings.weight`, `head` excludes `lm_head.weight` and not `multihead.weight`. A number is a word of its own:
    `blocks.1` does not exclude `blocks.10.weight`. With `*` in it, it is a pattern for the whole name.
    """
    if isinstance(exclude, str):
        raise TypeError(f"matrices(exclude=...) takes several words: exclude=({exclude!r},)")
    if not all(isinstance(word, str) and word for word in exclude):
        raise TypeError(f"matrices(exclude=...) takes words, not {exclude!r}")
    return _Matrices(tuple(exclude))


def divide(named: Iterable[Named], rules: Sequence[Rule]) -> list[list[Named]]:
    """What each rule chooses. A parameter that none chooses, or several, is an error.

    `named`: a tied weight with each of its names. It keeps the first.
    """
    chosen: list[list[Named]] = [[] for _ in rules]
    none, several = [], []
    found = _by_param(named)
    for names, param in found:
        takers = _takers(names, param, rules)
        if len(takers) == 1:
            chosen[takers[0]].append((names[0], param))
        elif takers:
            several.append(f"{names[0]} (rules {' and '.join(map(str, takers))})")
        else:
            none.append(" = ".join(names))
    _warn_of_idle_words(rules, [name for names, _ in found for name in names])
    _refuse(none, "no rule takes", "add Rule(everything_else, ...)")
    _refuse(several, "several rules take", "make their selectors choose different ones")
    for number, (rule, members) in enumerate(zip(rules, chosen, strict=True)):
        if not members:
            raise ConfigError(f"rule {number}, {rule!r}, takes no parameter of the model: remove it")
    return chosen


def _warn_of_idle_words(rules: Sequence[Rule], names: Sequence[str]) -> None:
    """An embedding that was meant to be excluded would be trained as a matrix, in silence."""
    words = [word for rule in rules if isinstance(rule.selector, _Matrices) for word in rule.selector.exclude]
    idle = [word for word in words if not any(_matches(unwrapped(name), word) for name in names)]
    if idle:
        warn_user(f"matrices(exclude=...): no parameter of the model has {' or '.join(map(repr, idle))} in its name")


def _by_param(named: Iterable[Named]) -> list[tuple[list[str], torch.Tensor]]:
    found: dict[int, tuple[list[str], torch.Tensor]] = {}
    for name, param in named:
        found.setdefault(id(param), ([], param))[0].append(name)
    return list(found.values())


def _takers(names: Sequence[str], param: torch.Tensor, rules: Sequence[Rule]) -> list[int]:
    rest = [number for number, rule in enumerate(rules) if rule.selector is everything_else]
    others = (number for number in range(len(rules)) if number not in rest)
    return [number for number in others if _chooses(rules[number].selector, names, param)] or rest


def _chooses(selector: Selector, names: Sequence[str], param: torch.Tensor) -> bool:
    return all(selector(unwrapped(name), param) for name in names)


def chosen_by(selector: Selector, named: Iterable[Named]) -> list[Named]:
    """What one selector alone would choose."""
    return [(names[0], param) for names, param in _by_param(named) if _chooses(selector, names, param)]


def class_names(rules: Sequence[Rule]) -> list[str]:
    """A name for each rule's class. The second rule with the same class has a number behind it."""
    names: list[str] = []
    for rule in rules:
        made_by = getattr(rule.optimizer_class, "func", rule.optimizer_class)
        name = getattr(made_by, "__name__", type(made_by).__name__)
        names.append(next(it for n in count(1) if (it := name if n == 1 else f"{name} {n}") not in names))
    return names


def _refuse(names: list[str], problem: str, remedy: str) -> None:
    if names:
        shown = ", ".join(names[:_MOST_NAMES]) + (", ..." if len(names) > _MOST_NAMES else "")
        raise ConfigError(f"{problem} {len(names)} of the parameters: {shown}. Every parameter needs one: {remedy}.")


def _matches(name: str, pattern: str) -> bool:
    if "*" in pattern:
        return fnmatchcase(name, pattern)
    words = re.escape(pattern.replace("_", "."))
    end = r"(?!\d)" if pattern[-1].isdigit() else ""
    return re.search(rf"(?:^|\.){words}{end}", name.replace("_", ".")) is not None
