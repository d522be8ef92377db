"""Parameter rules: which optimizer class updates which parameters of a model.

shard(model, [
    ParamRule(matrix_params(exclude=("embed", "head")), Muon, lr=2e-2),
    ParamRule(remaining_params, torch.optim.AdamW, lr=3e-4),
])
"""

import re
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import count
from typing import Any, cast

import torch
import torch.distributed as dist

from ._formatting import format_names
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

__all__ = ["ParamRule", "matrix_params", "profile_step_cost", "remaining_params"]

Selector = Callable[[str, torch.Tensor], bool]
"""Whether a rule selects the parameter with this name."""
NamedParam = tuple[str, torch.Tensor]


class ParamRule:
    """Update the parameters that `selector` selects with `optimizer_class`.

    Args:
        selector: `matrix_params()`, `remaining_params`, or a function of a name and a parameter. Names are those in the
            model, without the prefixes of `torch.compile` and wrappers. A tied weight has several names; a rule applies
            to it if the selector selects it under each of them.
        optimizer_class: Class, or any callable, that constructs the optimizer.
        partition: `FlatShards(...)` or `WholeParams(...)`. By default parameters are split if the optimizer can update
            parts of a parameter, and assigned whole otherwise.
        **options: Passed to `optimizer_class`.

    Raises:
        ConfigError: If `partition` is neither of these.
        TypeError: If `selector` or `optimizer_class` is not callable.
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
            raise TypeError(
                f"expected ParamRule(selector, ...) with a selector such as matrix_params(), got {selector!r}"
            )
        if not callable(optimizer_class) or isinstance(optimizer_class, torch.optim.Optimizer):
            raise TypeError(
                "expected ParamRule(selector, optimizer_class) with a class such as torch.optim.AdamW, got "
                f"{optimizer_class!r}"
            )
        if not isinstance(partition, (FlatShards, WholeParams, type(None))):
            raise ConfigError(
                f"expected ParamRule(partition=...) to be FlatShards(...) or WholeParams(...), got {partition!r}"
            )
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
        raise NotImplementedError("remaining_params is resolved after all other rules and cannot be called")

    def __repr__(self) -> str:
        return "remaining_params"


remaining_params = _RemainingParams()
"""Selects the parameters that no other rule selects."""


def matrix_params(exclude: Sequence[str] = ()) -> Selector:
    """Return a selector of all two-dimensional parameters whose names contain no word of `exclude`.

    Words of a name are separated by dots and underscores, and match by prefix: `embed` excludes `tok_embed.weight` and
    `embeddings.weight`; `head` excludes `lm_head.weight`, but not `multihead.weight`. Numbers match in full:
    `blocks.1` does not exclude `blocks.10.weight`.

    Args:
        exclude: Words, or patterns with `*` that must match the full name.

    Raises:
        TypeError: If `exclude` is a single string, or contains anything but non-empty strings.
    """
    if isinstance(exclude, str):
        raise TypeError(
            f"expected matrix_params(exclude=...) to be a list of words, got one string. Write exclude=({exclude!r},)."
        )
    if not all(isinstance(word, str) and word for word in exclude):
        raise TypeError(f"expected matrix_params(exclude=...) to be words, got {exclude!r}")
    return _MatrixParams(tuple(exclude))


def assign_params_to_rules(named_params: Iterable[NamedParam], rules: Sequence[ParamRule]) -> list[list[NamedParam]]:
    """Return the parameters of each rule.

    Args:
        named_params: The parameters; a tied weight once for each of its names. The result has the first one.
        rules: The rules.

    Raises:
        ConfigError: If no rule or several rules select a parameter, or a rule selects none.
    """
    params_per_rule: list[list[NamedParam]] = [[] for _ in rules]
    unmatched, ambiguous = [], []
    params_with_names = _group_names_by_param(named_params)
    for names, param in params_with_names:
        matches = _find_matching_rules(names, param, rules)
        if len(matches) == 1:
            params_per_rule[matches[0]].append((names[0], param))
        elif matches:
            ambiguous.append(f"{names[0]} (rules {' and '.join(map(str, matches))})")
        else:
            unmatched.append(" = ".join(names))
    _warn_unused_exclude_patterns(rules, [name for names, _ in params_with_names for name in names])
    _raise_if_any(unmatched, "no rule takes", "add ParamRule(remaining_params, ...)")
    _raise_if_any(ambiguous, "several rules take", "make their selectors choose different ones")
    for index, (rule, params) in enumerate(zip(rules, params_per_rule, strict=True)):
        if not params:
            raise ConfigError(f"rule {index}, {rule!r}, selects no parameter of the model. Remove it.")
    return params_per_rule


def _warn_unused_exclude_patterns(rules: Sequence[ParamRule], names: Sequence[str]) -> None:
    """Warn about misspelled words: the embedding that one was meant to exclude would silently be selected."""
    words = [word for rule in rules if isinstance(rule.selector, _MatrixParams) for word in rule.selector.exclude]
    unused = [word for word in words if not any(_matches_pattern(strip_wrapper_prefixes(name), word) for name in names)]
    if unused:
        warn_at_caller(
            f"matrix_params(exclude=...): no parameter name of the model contains {' or '.join(map(repr, unused))}"
        )


def _group_names_by_param(named_params: Iterable[NamedParam]) -> list[tuple[list[str], torch.Tensor]]:
    names_by_id: dict[int, tuple[list[str], torch.Tensor]] = {}
    for name, param in named_params:
        names_by_id.setdefault(id(param), ([], param))[0].append(name)
    return list(names_by_id.values())


def _find_matching_rules(names: Sequence[str], param: torch.Tensor, rules: Sequence[ParamRule]) -> list[int]:
    fallback = [index for index, rule in enumerate(rules) if rule.selector is remaining_params]
    others = (index for index in range(len(rules)) if index not in fallback)
    return [index for index in others if _is_selected(rules[index].selector, names, param)] or fallback


def _is_selected(selector: Selector, names: Sequence[str], param: torch.Tensor) -> bool:
    return all(selector(strip_wrapper_prefixes(name), param) for name in names)


def select_params(selector: Selector, named_params: Iterable[NamedParam]) -> list[NamedParam]:
    """Return the parameters that a single selector selects."""
    return [
        (names[0], param)
        for names, param in _group_names_by_param(named_params)
        if _is_selected(selector, names, param)
    ]


def make_class_names(rules: Sequence[ParamRule]) -> list[str]:
    """Return a unique name for each rule's class: later rules with the same class get a number appended."""
    names: list[str] = []
    for rule in rules:
        constructor = getattr(rule.optimizer_class, "func", rule.optimizer_class)
        base = getattr(constructor, "__name__", type(constructor).__name__)
        names.append(next(name for n in count(1) if (name := base if n == 1 else f"{base} {n}") not in names))
    return names


def _raise_if_any(names: list[str], problem: str, remedy: str) -> None:
    if names:
        raise ConfigError(
            f"{problem} {len(names)} of the parameters: {format_names(names)}. Every parameter needs one: {remedy}."
        )


def _matches_pattern(name: str, pattern: str) -> bool:
    if "*" in pattern:
        return fnmatchcase(name, pattern)
    words = re.escape(pattern.replace("_", "."))
    end = r"(?!\d)" if pattern[-1].isdigit() else ""
    return re.search(rf"(?:^|\.){words}{end}", name.replace("_", ".")) is not None


# ---------------------------------------------------------------------------------------------------------------------
# Step cost: measured times, for `WholeParams(cost=...)`.


def profile_step_cost(
    model: torch.nn.Module,
    optimizer_class: OptimizerConstructor,
    *,
    selector: Selector | None = None,
    process_group: dist.ProcessGroup | None = None,
    **options: Any,
) -> MeasuredCost:
    """Measure how long `optimizer_class` takes to step each parameter that `selector` selects.

    Rank 0 times steps on new tensors, one of each shape, on the model's device, and broadcasts the result. The model is
    not modified. Call on all ranks, while the devices are idle.

    Args:
        model: The model to be passed to `shard`.
        optimizer_class: As for `ParamRule`.
        selector: As for `ParamRule`. Defaults to `matrix_params()`.
        process_group: The ranks to shard over. Defaults to all ranks.
        **options: Passed to `optimizer_class`.

    Returns:
        The seconds per step of each parameter, equal on all ranks, for `WholeParams(cost=...)`.

    Raises:
        ConfigError: If `selector` selects no parameter.
    """
    comm = Comm(Group(process_group))

    def prepare() -> Prepared[tuple[list[ParamSpec], list[float]]]:
        params = _select_model_params(model, selector or matrix_params())
        specs = list({cost_key(spec): spec for spec in make_param_specs([{"params": params}])}.values())
        factory = enable_fused(OptimizerFactory(optimizer_class, [{"params": params}], True, options))
        times = [measure_step_seconds(factory, spec) for spec in specs] if comm.group.rank == 0 else []
        return Prepared((specs, times), [f"{spec.shape} {spec.dtype} on {spec.device.type}" for spec in specs])

    specs, times = prepare_all(comm, "profile_step_cost", prepare)
    data = comm.broadcast_bytes(struct.pack(f"{len(times)}d", *times) if times else None, Rank(0))
    seconds = struct.unpack(f"{len(specs)}d", data)
    return MeasuredCost(dict(zip(map(cost_key, specs), seconds, strict=True)))


def _select_model_params(model: torch.nn.Module, selector: Selector) -> list[torch.Tensor]:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"expected profile_step_cost(model, ...) with a torch.nn.Module, got {type(model).__name__}")
    selected = [param for _, param in select_params(selector, model.named_parameters(remove_duplicate=False))]
    if not selected:
        raise ConfigError(f"{selector!r} selects no parameter of the model, so there is nothing to measure")
    return selected
