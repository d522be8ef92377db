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

from ..state.trees import clone_tensor, deepcopy_except_tensors, map_tensors
from .inner import LocalOptimizer, OptimizerFactory, ParamGroup
from .probe_cache import memoize_probe
from .selftest import isolated_probe, make_probe, make_probe_values, make_probe_with_attrs, set_train_mode, step_once, with_visible_lr

State = dict[Any, Any]
_NEUTRALITY_STEPS = 3


def probe_initial_state(factory: OptimizerFactory, options: ParamGroup, params: Sequence[torch.Tensor]) -> list[State]:
    """What the optimizer keeps of each parameter at the beginning of its first step; `params` stay as they are."""
    probes = [make_probe_with_attrs(param.detach().clone(), param) for param in params]
    trial = _InitialStateProbe(factory, options, probes)
    return [dict(trial.initial_state(probe)) for probe in probes]


def init_state(inner: LocalOptimizer, param_ids: Set[int], undo: ExitStack) -> None:
    """Give parameters with ids in `chosen` that have no state what their first step would begin with, until `undo`."""
    state = inner.optimizer.state
    for group in inner.optimizer.param_groups:
        for param in [it for it in group["params"] if id(it) in param_ids and not state.get(it)]:
            undo.callback(state.pop, param, None)
            state.update(zip([param], probe_initial_state(inner.factory, group, [param]), strict=True))


@memoize_probe(on_failure=False)
def is_init_neutral(factory: OptimizerFactory) -> bool:
    """Whether an optimizer that finds such state goes on as one that makes it. Asked by stepping both."""
    with isolated_probe(factory):
        return all(_is_group_init_neutral(factory, group) for group in factory.groups if group["params"])


def _is_group_init_neutral(factory: OptimizerFactory, group: ParamGroup) -> bool:
    like = group["params"][0]
    lazy, early = [[make_probe(like, number) for number in range(2)] for _ in range(2)]
    options = with_visible_lr(_group_options(group))
    found = probe_initial_state(replace(factory, defaults=with_visible_lr(factory.defaults)), options, early)
    if not any(found) or not _is_init_value_independent(factory, options, like, found):
        return False
    runs = [build_for_probes(factory, options, probes) for probes in (lazy, early)]
    runs[1].optimizer.state.update(zip(early, found, strict=True))
    for step in range(_NEUTRALITY_STEPS):
        for inner, probes in zip(runs, (lazy, early), strict=True):
            for number, probe in enumerate(probes):
                probe.grad = make_probe_values(probe.shape, phase=step + 10 * number).to(probe)
            step_once(inner)
    return all(map(torch.equal, lazy, early))


def _is_init_value_independent(
    factory: OptimizerFactory, options: ParamGroup, like: torch.Tensor, states: list[State]
) -> bool:
    """Whether parameters of other values begin alike. A copy of a parameter would be that of an old one, if it were
    made before weights are loaded."""
    others = [make_probe(like, number + _NEUTRALITY_STEPS) for number in range(len(states))]
    again = probe_initial_state(replace(factory, defaults=with_visible_lr(factory.defaults)), options, others)
    pairs = zip(_collect_tensors(states), _collect_tensors(again), strict=True)
    return all(one.shape == other.shape and torch.equal(one, other) for one, other in pairs)


def _collect_tensors(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    map_tensors(value, found.append)
    return found


class _InitialStateProbe:
    """One step with gradients of zeros."""

    def __init__(self, factory: OptimizerFactory, options: ParamGroup, probes: Sequence[torch.Tensor]) -> None:
        inner = build_for_probes(factory, options, probes)
        self._state: dict[Any, _FirstValueDict] = defaultdict(_FirstValueDict)
        inner.optimizer.state = self._state
        for probe in probes:
            probe.grad = torch.zeros_like(probe)
        step_once(inner)

    def initial_state(self, probe: torch.Tensor) -> State:
        return self._state[probe].first_values


class _FirstValueDict(dict[Any, Any]):
    """Copies what each key is first set to: optimizers change it in place in the same step."""

    def __init__(self) -> None:
        super().__init__()
        self.first_values: State = {}

    def __setitem__(self, key: Any, value: Any) -> None:
        if key not in self.first_values:
            self.first_values[key] = map_tensors(deepcopy_except_tensors(value), clone_tensor)
        super().__setitem__(key, value)


def build_for_probes(factory: OptimizerFactory, options: ParamGroup, probes: Sequence[torch.Tensor]) -> LocalOptimizer:
    """The optimizer of these parameters alone."""
    group = {**_group_options(options), "params": list(probes)}
    if "param_names" in options:
        group["param_names"] = [str(number) for number in range(len(probes))]
    return set_train_mode(replace(factory, groups=[group]).build(set(map(id, probes))))


def _group_options(group: ParamGroup) -> ParamGroup:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
