"""Which optimizer class updates which parameters of a model."""

import re
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import count
from typing import Any, cast

import torch
import torch.distributed as dist

from ._logging import warn_at_caller
from ._types import Rank
from .comm.collectives import Comm
from .comm.consensus import Prepared, prepare_all
from .comm.process_group import Group
from .engine.inner import OptimizerConstructor, OptimizerFactory, enable_fused
from .engine.probe import MeasuredCost, cost_key, measure_step_seconds
from .errors import ConfigError
from .layout.partition import FlatShards, WholeParams
from .layout.spec import ParamSpec, make_param_specs
from .state.state_dict import strip_wrapper_prefixes

Selector = Callable[[str, torch.Tensor], bool]
"""Whether a parameter with this name is chosen."""
NamedParam = tuple[str, torch.Tensor]
_MAX_LISTED_NAMES = 8


class ParamRule:
    """The parameters that `selector` chooses are updated by `optimizer_class`, made with `options`.

    selector: `matrix_params()`, `remaining_params`, or a function of a name and a parameter. Names are those in the
        model, without what `torch.compile` and wrappers put into them. A tied weight has several: a rule takes it if
        the selector chooses it under each of them.
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
        if not callable(selector) or isinstance(selector, type) or selector == cast(Any, matrix_params):
            raise TypeError(f"a ParamRule takes a selector such as matrix_params(), not {selector!r}")
        if not callable(optimizer_class) or isinstance(optimizer_class, torch.optim.Optimizer):
            raise TypeError(f"a ParamRule takes a class such as torch.optim.AdamW, not {optimizer_class!r}")
        if not isinstance(partition, (FlatShards, WholeParams, type(None))):
            raise ConfigError(f"ParamRule(partition=...) takes FlatShards(...) or WholeParams(...), not {partition!r}")
        self.selector, self.optimizer_class = selector, optimizer_class
        self.partition, self.options = partition, options

    def __repr__(self) -> str:
        return f"ParamRule({self.selector!r}, {getattr(self.optimizer_class, '__qualname__', self.optimizer_class)})"


@dataclass(frozen=True)
class _MatrixParams:
    exclude: tuple[str, ...]

    def __call__(self, name: str, param: torch.Tensor) -> bool:
        return param.dim() == 2 and not any(_matches_pattern(name, pattern) for pattern in self.exclude)

    def __repr__(self) -> str:
        return f"matrix_params(exclude={self.exclude!r})"


@dataclass(frozen=True)
class _RemainingParams:
    def __call__(self, name: str, param: torch.Tensor) -> bool:
        raise NotImplementedError("what is left is known when the other rules have chosen")

    def __repr__(self) -> str:
        return "remaining_params"


remaining_params = _RemainingParams()
"""Chooses what no other rule does."""


def matrix_params(exclude: Sequence[str] = ()) -> Selector:
    """Chooses parameters of two dimensions, but those with a word of `exclude` in their names.

    A word is what stands between dots and underscores, or its beginning: `embed` excludes `tok_embed.weight` and
    `embeddings.weight`, `head` excludes `lm_head.weight` and not `multihead.weight`. A number is a word of its own:
    `blocks.1` does not exclude `blocks.10.weight`. With `*` in it, it is a pattern for the whole name.
    """
    if isinstance(exclude, str):
        raise TypeError(f"matrix_params(exclude=...) takes several words: exclude=({exclude!r},)")
    if not all(isinstance(word, str) and word for word in exclude):
        raise TypeError(f"matrix_params(exclude=...) takes words, not {exclude!r}")
    return _MatrixParams(tuple(exclude))


def assign_params_to_rules(named_params: Iterable[NamedParam], rules: Sequence[ParamRule]) -> list[list[NamedParam]]:
    """What each rule chooses. A parameter that none chooses, or several, is an error.

    `named`: a tied weight with each of its names. It keeps the first.
    """
    chosen: list[list[NamedParam]] = [[] for _ in rules]
    none, several = [], []
    found = _group_names_by_param(named_params)
    for names, param in found:
        takers = _find_matching_rules(names, param, rules)
        if len(takers) == 1:
            chosen[takers[0]].append((names[0], param))
        elif takers:
            several.append(f"{names[0]} (rules {' and '.join(map(str, takers))})")
        else:
            none.append(" = ".join(names))
    _warn_unused_exclude_patterns(rules, [name for names, _ in found for name in names])
    _raise_if_any(none, "no rule takes", "add ParamRule(remaining_params, ...)")
    _raise_if_any(several, "several rules take", "make their selectors choose different ones")
    for number, (rule, members) in enumerate(zip(rules, chosen, strict=True)):
        if not members:
            raise ConfigError(f"rule {number}, {rule!r}, takes no parameter of the model: remove it")
    return chosen


def _warn_unused_exclude_patterns(rules: Sequence[ParamRule], names: Sequence[str]) -> None:
    """An embedding that was meant to be excluded would be trained as a matrix, in silence."""
    words = [word for rule in rules if isinstance(rule.selector, _MatrixParams) for word in rule.selector.exclude]
    idle = [word for word in words if not any(_matches_pattern(strip_wrapper_prefixes(name), word) for name in names)]
    if idle:
        warn_at_caller(
            f"matrix_params(exclude=...): no parameter of the model has {' or '.join(map(repr, idle))} in its name"
        )


def _group_names_by_param(named_params: Iterable[NamedParam]) -> list[tuple[list[str], torch.Tensor]]:
    found: dict[int, tuple[list[str], torch.Tensor]] = {}
    for name, param in named_params:
        found.setdefault(id(param), ([], param))[0].append(name)
    return list(found.values())


def _find_matching_rules(names: Sequence[str], param: torch.Tensor, rules: Sequence[ParamRule]) -> list[int]:
    rest = [number for number, rule in enumerate(rules) if rule.selector is remaining_params]
    others = (number for number in range(len(rules)) if number not in rest)
    return [number for number in others if _is_selected(rules[number].selector, names, param)] or rest


def _is_selected(selector: Selector, names: Sequence[str], param: torch.Tensor) -> bool:
    return all(selector(strip_wrapper_prefixes(name), param) for name in names)


def select_params(selector: Selector, named_params: Iterable[NamedParam]) -> list[NamedParam]:
    """What one selector alone would choose."""
    return [
        (names[0], param)
        for names, param in _group_names_by_param(named_params)
        if _is_selected(selector, names, param)
    ]


def make_class_names(rules: Sequence[ParamRule]) -> list[str]:
    """A name for each rule's class. The second rule with the same class has a number behind it."""
    names: list[str] = []
    for rule in rules:
        made_by = getattr(rule.optimizer_class, "func", rule.optimizer_class)
        name = getattr(made_by, "__name__", type(made_by).__name__)
        names.append(next(it for n in count(1) if (it := name if n == 1 else f"{name} {n}") not in names))
    return names


def _raise_if_any(names: list[str], problem: str, remedy: str) -> None:
    if names:
        shown = ", ".join(names[:_MAX_LISTED_NAMES]) + (", ..." if len(names) > _MAX_LISTED_NAMES else "")
        raise ConfigError(f"{problem} {len(names)} of the parameters: {shown}. Every parameter needs one: {remedy}.")


def _matches_pattern(name: str, pattern: str) -> bool:
    if "*" in pattern:
        return fnmatchcase(name, pattern)
    words = re.escape(pattern.replace("_", "."))
    end = r"(?!\d)" if pattern[-1].isdigit() else ""
    return re.search(rf"(?:^|\.){words}{end}", name.replace("_", ".")) is not None


# ---------------------------------------------------------------------------------------------------------------------
# What a step on each of a model's matrices costs, measured.


def profile_step_cost(
    model: torch.nn.Module,
    optimizer_class: OptimizerConstructor,
    *,
    selector: Selector | None = None,
    process_group: dist.ProcessGroup | None = None,
    **options: Any,
) -> MeasuredCost:
    """What it takes `optimizer_class` to step each parameter that `selector` chooses, for `WholeParams(cost=...)`.

    Rank 0 times steps on tensors like them, one of each shape, where the model is, and all ranks get its seconds.
    Nothing of the model changes. Called on all ranks, when the devices have nothing else to do.

    Args:
        model: the model that will be given to `shard`.
        optimizer_class: as in a `ParamRule`.
        selector: as in a `ParamRule`; by default `matrix_params()`.
        process_group: the ranks that will share the work; by default all.
        options: everything else goes to `optimizer_class`.
    """
    comm = Comm(Group(process_group))

    def prepare() -> Prepared[tuple[list[ParamSpec], list[float]]]:
        params = _select_model_params(model, selector or matrix_params())
        found = list({cost_key(spec): spec for spec in make_param_specs([{"params": params}])}.values())
        recipe = enable_fused(OptimizerFactory(optimizer_class, [{"params": params}], True, options))
        times = [measure_step_seconds(recipe, spec) for spec in found] if comm.group.rank == 0 else []
        return Prepared((found, times), [f"{spec.shape} {spec.dtype} on {spec.device.type}" for spec in found])

    found, times = prepare_all(comm, "profile_step_cost", prepare)
    data = comm.broadcast_bytes(struct.pack(f"{len(times)}d", *times) if times else None, Rank(0))
    measured = struct.unpack(f"{len(found)}d", data)
    return MeasuredCost(dict(zip(map(cost_key, found), measured, strict=True)))


def _select_model_params(model: torch.nn.Module, selector: Selector) -> list[torch.Tensor]:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"profile_step_cost() takes a torch.nn.Module, not a {type(model).__name__}")
    chosen = [param for _, param in select_params(selector, model.named_parameters(remove_duplicate=False))]
    if not chosen:
        raise ConfigError(f"{selector!r} chooses no parameter of the model, so that there is nothing to measure")
    return chosen
