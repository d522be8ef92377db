"""What kind of optimizer is this? Asked by stepping it on tiny tensors, not guessed from its name."""

import copy
import math
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.optim import optimizer

from .inner import ParamGroup, Recipe, ShardOptimizer

_SIZES = (2, 3, 4, 5)
_SCALES = (1.0, 1e3, 1e-2)
"""Gradients of these sizes, one a step: some optimizers look at the others only beyond a threshold."""
_LEAST_LR = 0.05
_MOST_GROUPS = 3


class Traits(NamedTuple):
    """What the self-test found; the cautious answer where it could not run."""

    couples_params: bool = False
    """The update of one parameter depends on the others, so that they cannot live on different ranks."""
    param_shaped: frozenset[str] = frozenset()
    """Keys of state that has the shape of its parameter."""
    moves_without_grads: bool = False
    """It changes parameters that have no gradient, too."""


def examine(recipe: Recipe) -> Traits:
    """Step the optimizer on all probes together and on each alone, and compare.

    An optimizer that cannot be stepped this way, or draws random numbers, is taken at its word.
    """
    for sparse in (False, True):
        trial = _Trial(recipe, sparse=sparse)
        with (
            warnings.catch_warnings(),
            _untouched_random_numbers(trial.cuda_devices),
            _no_global_hooks(),
            suppress(Exception),
        ):
            warnings.simplefilter("ignore")
            return trial.traits()
    return Traits()


@contextmanager
def _untouched_random_numbers(cuda_devices: set[torch.device]) -> Iterator[None]:
    """Draws inside differ from each other and change no draw afterwards."""
    state = random.getstate()
    try:
        with torch.random.fork_rng(devices=cuda_devices):
            yield
    finally:
        random.setstate(state)


@contextmanager
def _no_global_hooks() -> Iterator[None]:
    """A step that calls its base class's step would fire them for the probes."""
    registries: list[dict[int, Any]] = [
        optimizer._global_optimizer_pre_hooks,
        optimizer._global_optimizer_post_hooks,
    ]
    hooks = [dict(registry) for registry in registries]
    try:
        for registry in registries:
            registry.clear()
        yield
    finally:
        for registry, kept in zip(registries, hooks, strict=True):
            registry.update(kept)


class _Trial:
    def __init__(self, recipe: Recipe, *, sparse: bool) -> None:
        self._recipe, self._sparse = recipe, sparse
        self._groups = [group for group in recipe.groups if group["params"]][:_MOST_GROUPS]
        self._likes = [_typical(group["params"]) for group in self._groups]
        self.size = 2 * len(self._groups)
        self.cuda_devices = {like.device for like in self._likes if like.device.type == "cuda"}

    def traits(self) -> Traits:
        together = self.run(range(self.size))
        if not _same(together.values, self.run(range(self.size)).values):
            return Traits(param_shaped=together.param_shaped)
        alone = [self.run([chosen]).values[chosen] for chosen in range(self.size)]
        return Traits(not _same(together.values, alone), together.param_shaped, together.moves_without_grads)

    def run(self, owned: Sequence[int]) -> "_Outcome":
        """A few steps by an optimizer that owns some of the probes."""
        probes = [_probe(self._likes[i // 2], i) for i in range(self.size)]
        groups = [self._probe_group(group, probes[2 * i : 2 * i + 2]) for i, group in enumerate(self._groups)]
        defaults = _lively(self._recipe.defaults)
        inner = replace(self._recipe, groups=groups, defaults=defaults).build({id(probes[i]) for i in owned})
        for step, scale in enumerate(_SCALES):
            for i in owned:
                gradient = scale * _wave(probes[i].shape, phase=step + 10 * i).to(probes[i])
                probes[i].grad = gradient.to_sparse(1) if self._sparse else gradient
            _step(inner)
        values = [probe.detach().clone() for probe in probes]
        states = [(inner.optimizer.state[probes[i]], probes[i]) for i in owned]
        for probe in probes:
            probe.grad = None
        with suppress(Exception):
            _step(inner)
        return _Outcome(values, _param_shaped(states), not _same(values, [probe.detach() for probe in probes]))

    def _probe_group(self, group: ParamGroup, probes: list[torch.Tensor]) -> ParamGroup:
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        names = {"param_names": ["a", "b"]} if "param_names" in group else {}
        return {**_lively(options), **names, "params": probes}


class _Outcome(NamedTuple):
    values: list[torch.Tensor]
    param_shaped: frozenset[str]
    moves_without_grads: bool


def _lively(options: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with a learning rate that shows what a step does: warm-ups begin with almost none."""
    copied = copy.deepcopy(dict(options))
    lr = copied.get("lr")
    if isinstance(lr, (float, int, torch.Tensor)) and abs(float(lr)) < _LEAST_LR:
        copied["lr"] = torch.full_like(lr, _LEAST_LR) if isinstance(lr, torch.Tensor) else _LEAST_LR
    return copied


def _typical(params: Sequence[torch.Tensor]) -> torch.Tensor:
    """The first one with dimensions: a scalar's state does not show its shape."""
    return next((param for param in params if param.dim()), params[0])


def _probe(like: torch.Tensor, number: int) -> torch.Tensor:
    shape = tuple(_SIZES[i % len(_SIZES)] for i in range(like.dim()))
    # In low precision a coupling could vanish in the rounding.
    dtype = torch.float32 if like.dtype in (torch.bfloat16, torch.float16) else like.dtype
    return torch.nn.Parameter(_wave(shape, phase=number).to(like.device, dtype))


def _wave(shape: tuple[int, ...], phase: int) -> torch.Tensor:
    return torch.sin(torch.arange(math.prod(shape), dtype=torch.float32) * 1.7 + phase + 1).reshape(shape)


def _step(inner: ShardOptimizer) -> None:
    try:
        inner.step()
    except TypeError:
        inner.step(lambda: torch.tensor(1.0))


def _param_shaped(states: list[tuple[dict[str, Any], torch.Tensor]]) -> frozenset[str]:
    """Keys whose tensors all have the shape of their parameter, wherever there is one that has dimensions."""
    seen: dict[str, bool] = {}
    for state, probe in states:
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and probe.dim():
                seen[key] = seen.get(key, True) and value.shape == probe.shape
    return frozenset(key for key, shaped in seen.items() if shaped)


def _same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) for a, b in zip(left, right, strict=True))
