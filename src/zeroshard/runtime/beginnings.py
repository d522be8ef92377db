"""State as an optimizer makes it when it first steps a parameter, made before that.

torch's checkpoint helpers load into the state of a new optimizer, so its dict needs a place for everything. The
optimizer itself stays as it is.
"""

from collections import defaultdict
from collections.abc import Sequence, Set
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from ..state.trees import clone, copy_mutable, map_tensors
from .inner import ParamGroup, Recipe, ShardOptimizer
from .probe_cache import memoize_probe
from .selftest import lively, made_ready, marked, probe_like, quietly, step_once, wave

State = dict[Any, Any]
_STEPS = 3


def first_state(recipe: Recipe, options: ParamGroup, params: Sequence[torch.Tensor]) -> list[State]:
    """What the optimizer keeps of each parameter at the beginning of its first step; `params` stay as they are."""
    probes = [marked(param.detach().clone(), param) for param in params]
    trial = _Trial(recipe, options, probes)
    return [dict(trial.first(probe)) for probe in probes]


def begin(inner: ShardOptimizer, chosen: Set[int], undo: ExitStack) -> None:
    """Give parameters with ids in `chosen` that have no state what their first step would begin with, until `undo`."""
    state = inner.optimizer.state
    for group in inner.optimizer.param_groups:
        for param in [it for it in group["params"] if id(it) in chosen and not state.get(it)]:
            undo.callback(state.pop, param, None)
            state.update(zip([param], first_state(inner.recipe, group, [param]), strict=True))


@memoize_probe(on_failure=False)
def begins_neutrally(recipe: Recipe) -> bool:
    """Whether an optimizer that finds such state goes on as one that makes it. Asked by stepping both."""
    with quietly(recipe):
        return all(_is_neutral(recipe, group) for group in recipe.groups if group["params"])


def _is_neutral(recipe: Recipe, group: ParamGroup) -> bool:
    like = group["params"][0]
    lazy, early = [[probe_like(like, number) for number in range(2)] for _ in range(2)]
    options = lively(_options(group))
    found = first_state(replace(recipe, defaults=lively(recipe.defaults)), options, early)
    if not any(found) or not _same_for_others(recipe, options, like, found):
        return False
    runs = [built_for(recipe, options, probes) for probes in (lazy, early)]
    runs[1].optimizer.state.update(zip(early, found, strict=True))
    for step in range(_STEPS):
        for inner, probes in zip(runs, (lazy, early), strict=True):
            for number, probe in enumerate(probes):
                probe.grad = wave(probe.shape, phase=step + 10 * number).to(probe)
            step_once(inner)
    return all(map(torch.equal, lazy, early))


def _same_for_others(recipe: Recipe, options: ParamGroup, like: torch.Tensor, found: list[State]) -> bool:
    """Whether parameters of other values begin alike. A copy of a parameter would be that of an old one, if it were
    made before weights are loaded."""
    others = [probe_like(like, number + _STEPS) for number in range(len(found))]
    again = first_state(replace(recipe, defaults=lively(recipe.defaults)), options, others)
    pairs = zip(_tensors(found), _tensors(again), strict=True)
    return all(one.shape == other.shape and torch.equal(one, other) for one, other in pairs)


def _tensors(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    map_tensors(value, found.append)
    return found


class _Trial:
    """One step with gradients of zeros."""

    def __init__(self, recipe: Recipe, options: ParamGroup, probes: Sequence[torch.Tensor]) -> None:
        inner = built_for(recipe, options, probes)
        self._state: dict[Any, _FirstValues] = defaultdict(_FirstValues)
        inner.optimizer.state = self._state
        for probe in probes:
            probe.grad = torch.zeros_like(probe)
        step_once(inner)

    def first(self, probe: torch.Tensor) -> State:
        return self._state[probe].first


class _FirstValues(dict[Any, Any]):
    """Copies what each key is first set to: optimizers change it in place in the same step."""

    def __init__(self) -> None:
        super().__init__()
        self.first: State = {}

    def __setitem__(self, key: Any, value: Any) -> None:
        if key not in self.first:
            self.first[key] = map_tensors(copy_mutable(value), clone)
        super().__setitem__(key, value)


def built_for(recipe: Recipe, options: ParamGroup, probes: Sequence[torch.Tensor]) -> ShardOptimizer:
    """The optimizer of these parameters alone."""
    group = {**_options(options), "params": list(probes)}
    if "param_names" in options:
        group["param_names"] = [str(number) for number in range(len(probes))]
    return made_ready(replace(recipe, groups=[group]).build(set(map(id, probes))))


def _options(group: ParamGroup) -> ParamGroup:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
