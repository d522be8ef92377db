"""What kind of optimizer is this? Asked by stepping it on tiny tensors, not guessed from its name."""

import copy
import math
import random
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
_CUTS = [*[7] * 9, 12345, 160 * 208 - 12345 - 63]
"""Pieces of the large probe: small ones, and two that meet within a row, at no multiple of anything."""


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
        with quietly(recipe), suppress(Exception):
            return trial.traits()
    return Traits()


def is_separable(recipe: Recipe) -> bool:
    """Whether a parameter that is cut into flat pieces is updated as the whole one would be."""
    with quietly(recipe), suppress(Exception):
        return all(_CutTrial(recipe, group, like).is_separable() for group, like in _different(recipe.groups))
    return False


def _different(groups: Sequence[ParamGroup]) -> Iterable[tuple[ParamGroup, torch.Tensor]]:
    """A parameter of each number of dimensions, dtype and device, in each kind of group: many differ in lr only."""
    found: dict[str, tuple[ParamGroup, torch.Tensor]] = {}
    for group in groups:
        kind = repr({key: value for key, value in group.items() if key not in ("params", "param_names", "lr")})
        for param in group["params"]:
            found.setdefault(f"{kind} {param.dim()} {param.dtype} {param.device}", (group, param))
    return found.values()


@contextmanager
def quietly(recipe: Recipe) -> Iterator[None]:
    """What happens inside leaves no trace."""
    devices = {param.device for group in recipe.groups for param in group["params"] if param.device.type == "cuda"}
    with warnings.catch_warnings(), _untouched_random_numbers(devices), _no_global_hooks():
        warnings.simplefilter("ignore")
        yield


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

    def traits(self) -> Traits:
        together = self.run(range(self.size))
        if not _same(together.values, self.run(range(self.size)).values):
            return Traits(param_shaped=together.param_shaped)
        alone = [self.run([chosen]).values[chosen] for chosen in range(self.size)]
        return Traits(not _same(together.values, alone), together.param_shaped, together.moves_without_grads)

    def run(self, owned: Sequence[int]) -> "_Outcome":
        """A few steps by an optimizer that owns some of the probes."""
        probes = [probe_like(self._likes[i // 2], i) for i in range(self.size)]
        groups = [self._probe_group(group, probes[2 * i : 2 * i + 2]) for i, group in enumerate(self._groups)]
        defaults = lively(self._recipe.defaults)
        inner = replace(self._recipe, groups=groups, defaults=defaults).build({id(probes[i]) for i in owned})
        for step, scale in enumerate(_SCALES):
            for i in owned:
                gradient = scale * wave(probes[i].shape, phase=step + 10 * i).to(probes[i])
                probes[i].grad = gradient.to_sparse(1) if self._sparse else gradient
            step_once(inner)
        values = [probe.detach().clone() for probe in probes]
        states = [(inner.optimizer.state[probes[i]], probes[i]) for i in owned]
        for probe in probes:
            probe.grad = None
        with suppress(Exception):
            step_once(inner)
        return _Outcome(values, _param_shaped(states), not _same(values, [probe.detach() for probe in probes]))

    def _probe_group(self, group: ParamGroup, probes: list[torch.Tensor]) -> ParamGroup:
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        names = {"param_names": ["a", "b"]} if "param_names" in group else {}
        return {**lively(options), **names, "params": probes}


class _CutTrial:
    """One parameter of a group, whole and in flat pieces, large enough for what optimizers do to large ones only."""

    def __init__(self, recipe: Recipe, group: ParamGroup, like: torch.Tensor) -> None:
        self._recipe, self._group = recipe, group
        self._whole = _slope(_large(like.dim()), 0.1, 3.0, phase=1).to(like.device, _precise(like.dtype))

    def is_separable(self) -> bool:
        flat = self._whole.view(-1)
        whole, (of_whole,) = self._run([self._whole])
        cut, states = self._run(torch.split(flat, _CUTS) if flat.numel() > 1 else [flat])
        # Vector units may round the last elements of a run in another way than those in its midst.
        same = torch.allclose(torch.cat(cut), whole[0].view(-1), rtol=1e-4, atol=1e-5)
        return same and _divides(of_whole, states, whole[0], cut)

    def _run(self, values: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
        probes = [torch.nn.Parameter(value.clone()) for value in values]
        options = {k: v for k, v in self._group.items() if k not in ("params", "param_names")}
        names = {"param_names": [str(i) for i in range(len(probes))]} if "param_names" in self._group else {}
        group = {**lively(options), **names, "params": probes}
        recipe = replace(self._recipe, groups=[group], defaults=lively(self._recipe.defaults))
        inner = recipe.build(set(map(id, probes)))
        for step, scale in enumerate(_SCALES):
            gradient = scale * _slope(self._whole.shape, 2.0, 0.2, phase=step).to(self._whole)
            parts = torch.split(gradient.view(-1), [probe.numel() for probe in probes])
            for probe, part in zip(probes, parts, strict=True):
                probe.grad = part.view(probe.shape).clone()
            step_once(inner)
        return [probe.detach() for probe in probes], [dict(inner.optimizer.state[probe]) for probe in probes]


def _divides(
    of_whole: dict[str, Any], of_pieces: list[dict[str, Any]], whole: torch.Tensor, pieces: list[torch.Tensor]
) -> bool:
    """Whether all state has an element for each of the parameter's, or is the same for whole and pieces."""
    if any(list(state) != list(of_whole) for state in of_pieces):
        return False
    for key, value in of_whole.items():
        parts = [state[key] for state in of_pieces]
        is_cut = _has_shape(value, whole) and all(map(_has_shape, parts, pieces))
        if not is_cut and not all(_equal(part, value) for part in parts):
            return False
    return True


def _has_shape(value: Any, param: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == param.shape


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left.shape == right.shape and bool(torch.equal(left, right))
    return bool(left == right)


class _Outcome(NamedTuple):
    values: list[torch.Tensor]
    param_shaped: frozenset[str]
    moves_without_grads: bool


def lively(options: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with a learning rate that shows what a step does: warm-ups begin with almost none."""
    copied = copy.deepcopy(dict(options))
    lr = copied.get("lr")
    if isinstance(lr, (float, int, torch.Tensor)) and abs(float(lr)) < _LEAST_LR:
        copied["lr"] = torch.full_like(lr, _LEAST_LR) if isinstance(lr, torch.Tensor) else _LEAST_LR
    return copied


def _typical(params: Sequence[torch.Tensor]) -> torch.Tensor:
    """The first one with dimensions: a scalar's state does not show its shape."""
    return next((param for param in params if param.dim()), params[0])


def probe_like(like: torch.Tensor, number: int) -> torch.Tensor:
    # A scalar's state does not show its shape.
    shape = tuple(_SIZES[i % len(_SIZES)] for i in range(max(like.dim(), 1)))
    # In low precision a coupling could vanish in the rounding.
    return torch.nn.Parameter(wave(shape, phase=number).to(like.device, _precise(like.dtype)))


def _precise(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _large(dims: int) -> tuple[int, ...]:
    return (160, 208, *[1] * (dims - 2)) if dims > 1 else (160 * 208,) * dims


def _slope(shape: tuple[int, ...], start: float, stop: float, phase: int) -> torch.Tensor:
    """Values that are not of one size: a piece must not be like the whole."""
    return wave(shape, phase) * torch.linspace(start, stop, math.prod(shape)).reshape(shape)


def wave(shape: tuple[int, ...], phase: int) -> torch.Tensor:
    return torch.sin(torch.arange(math.prod(shape), dtype=torch.float32) * 1.7 + phase + 1).reshape(shape)


def step_once(inner: ShardOptimizer) -> None:
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
