"""What kind of optimizer is this? Asked by stepping it on tiny tensors, not guessed from its name."""

import copy
import math
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.optim import optimizer

from ..layout.specs import marks_of
from .inner import ParamGroup, Recipe, ShardOptimizer
from .probe_cache import memoize_probe

_SIZES = (2, 3, 4, 5)
SCALES = (1.0, 1e3, 1e-2)
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
    keeps_more: bool = False
    """It has state that belongs to no parameter, or adds something to its state dict."""
    needs: str = ""
    """A kind of gradients without which it cannot step: "sparse", or with a "graph" of their own."""


@memoize_probe(on_failure=Traits())
def examine(recipe: Recipe) -> Traits:
    """Step the optimizer on all probes together and on each alone, and compare.

    An optimizer that cannot be stepped this way, or draws random numbers, is taken at its word.
    """
    for kind in _KINDS:
        trial = _Trial(recipe, kind)
        with quietly(recipe), suppress(Exception):
            return trial.traits()._replace(needs=kind)
    raise RuntimeError(f"{recipe.name} cannot be stepped")


@contextmanager
def quietly(recipe: Recipe) -> Iterator[None]:
    """What happens inside leaves no trace."""
    devices = {param.device for group in recipe.groups for param in group["params"] if param.device.type == "cuda"}
    with warnings.catch_warnings(), _untouched_random_numbers(devices), _no_global_hooks():
        warnings.simplefilter("ignore")
        with torch.compiler.set_stance("force_eager"):  # to compile a step for each probe would take minutes
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


def _with_graph(gradient: torch.Tensor, probe: torch.Tensor) -> torch.Tensor:
    """One that can be differentiated once more, as `backward(create_graph=True)` leaves it."""
    with torch.enable_grad():
        return torch.autograd.grad((gradient * probe * probe).sum(), probe, create_graph=True)[0]


_KINDS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "": lambda gradient, _: gradient,
    "sparse": lambda gradient, _: gradient.to_sparse(1),
    "graph": _with_graph,
}


class _Trial:
    def __init__(self, recipe: Recipe, kind: str) -> None:
        """`kind`: of gradients."""
        self._recipe, self._gradient = recipe, _KINDS[kind]
        self._groups = [group for group in recipe.groups if group["params"]][:_MOST_GROUPS]
        self._likes = [_typical(group["params"]) for group in self._groups]
        self.size = 2 * len(self._groups)

    def traits(self) -> Traits:
        together = self.run(range(self.size))
        if not _same(together.values, self.run(range(self.size)).values):
            return Traits(param_shaped=together.param_shaped, keeps_more=together.keeps_more)
        alone = [self.run([chosen]).values[chosen] for chosen in range(self.size)]
        couples = not _same(together.values, alone)
        return Traits(couples, together.param_shaped, together.moves_without_grads, together.keeps_more)

    def run(self, owned: Sequence[int]) -> "_Outcome":
        """A few steps by an optimizer that owns some of the probes."""
        probes = [probe_like(self._likes[i // 2], i) for i in range(self.size)]
        groups = [self._probe_group(group, probes[2 * i : 2 * i + 2]) for i, group in enumerate(self._groups)]
        defaults = lively(self._recipe.defaults)
        inner = made_ready(
            replace(self._recipe, groups=groups, defaults=defaults).build({id(probes[i]) for i in owned})
        )
        for step, scale in enumerate(SCALES):
            for i in owned:
                gradient = scale * wave(probes[i].shape, phase=step + 10 * i).to(probes[i])
                probes[i].grad = self._gradient(gradient, probes[i])
            step_once(inner)
        values = [probe.detach().clone() for probe in probes]
        states = [(inner.optimizer.state[probes[i]], probes[i]) for i in owned]
        for probe in probes:
            probe.grad = None
        with suppress(Exception):
            step_once(inner)
        moved = not _same(values, [probe.detach() for probe in probes])
        return _Outcome(values, _param_shaped(states), moved, bool(inner.shared() or inner.extra()))

    def _probe_group(self, group: ParamGroup, probes: list[torch.Tensor]) -> ParamGroup:
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        names = {"param_names": ["a", "b"]} if "param_names" in group else {}
        return {**lively(options), **names, "params": probes}


class _Outcome(NamedTuple):
    values: list[torch.Tensor]
    param_shaped: frozenset[str]
    moves_without_grads: bool
    keeps_more: bool


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
    # Without its marks: a multiplier of 0 would hide what a step does.
    return torch.nn.Parameter(wave(shape, phase=number).to(like.device, precise(like.dtype)))


def marked(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A parameter of this value, to an optimizer like the other one."""
    probe = torch.nn.Parameter(value)
    vars(probe).update(marks_of(like))
    return probe


def precise(dtype: torch.dtype) -> torch.dtype:
    """What probes are made in. In low precision a coupling could vanish in the rounding, and integers have no gradients
    to step with."""
    differentiable = dtype.is_complex or dtype.is_floating_point
    return dtype if differentiable and dtype.itemsize >= torch.float32.itemsize else torch.float32


def wave(shape: tuple[int, ...], phase: int) -> torch.Tensor:
    places = torch.arange(math.prod(shape), dtype=torch.float32, device="cpu")
    return torch.sin(places * 1.7 + phase + 1).reshape(shape)


def made_ready(inner: ShardOptimizer) -> ShardOptimizer:
    """One that is trained from now on: some optimizers must be told."""
    inner.switch("train")
    return inner


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
