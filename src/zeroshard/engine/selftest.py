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

from ..layout.spec import read_param_attrs
from .inner import LocalOptimizer, OptimizerFactory, ParamGroup
from .probe_cache import memoize_probe

_PROBE_SIZES = (2, 3, 4, 5)
GRAD_SCALES = (1.0, 1e3, 1e-2)
"""Gradients of these sizes, one a step: some optimizers look at the others only beyond a threshold."""
_MIN_VISIBLE_LR = 0.05
_MAX_GROUPS = 3


class OptimizerTraits(NamedTuple):
    """What the self-test found; the cautious answer where it could not run."""

    couples_params: bool = False
    """The update of one parameter depends on the others, so that they cannot live on different ranks."""
    param_shaped_keys: frozenset[str] = frozenset()
    """Keys of state that has the shape of its parameter."""
    updates_without_grads: bool = False
    """It changes parameters that have no gradient, too."""
    has_shared_state: bool = False
    """It has state that belongs to no parameter, or adds something to its state dict."""
    required_grads: str = ""
    """A kind of gradients without which it cannot step: "sparse", or with a "graph" of their own."""


@memoize_probe(on_failure=OptimizerTraits())
def probe_traits(factory: OptimizerFactory) -> OptimizerTraits:
    """Step the optimizer on all probes together and on each alone, and compare.

    An optimizer that cannot be stepped this way, or draws random numbers, is taken at its word.
    """
    for kind in _GRAD_VARIANTS:
        trial = _CouplingProbe(factory, kind)
        with isolated_probe(factory), suppress(Exception):
            return trial.find_traits()._replace(required_grads=kind)
    raise RuntimeError(f"{factory.name} cannot be stepped")


@contextmanager
def isolated_probe(factory: OptimizerFactory) -> Iterator[None]:
    """What happens inside leaves no trace."""
    devices = {param.device for group in factory.groups for param in group["params"] if param.device.type == "cuda"}
    with warnings.catch_warnings(), _preserve_rng_state(devices), _suspend_global_hooks():
        warnings.simplefilter("ignore")
        with torch.compiler.set_stance("force_eager"):  # to compile a step for each probe would take minutes
            yield


@contextmanager
def _preserve_rng_state(cuda_devices: set[torch.device]) -> Iterator[None]:
    """Draws inside differ from each other and change no draw afterwards."""
    state = random.getstate()
    try:
        with torch.random.fork_rng(devices=cuda_devices):
            yield
    finally:
        random.setstate(state)


@contextmanager
def _suspend_global_hooks() -> Iterator[None]:
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


def _attach_graph(grad: torch.Tensor, probe: torch.Tensor) -> torch.Tensor:
    """One that can be differentiated once more, as `backward(create_graph=True)` leaves it."""
    with torch.enable_grad():
        return torch.autograd.grad((grad * probe * probe).sum(), probe, create_graph=True)[0]


_GRAD_VARIANTS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "": lambda gradient, _: gradient,
    "sparse": lambda gradient, _: gradient.to_sparse(1),
    "graph": _attach_graph,
}


class _CouplingProbe:
    def __init__(self, factory: OptimizerFactory, grad_variant: str) -> None:
        """`kind`: of gradients."""
        self._factory, self._make_grad = factory, _GRAD_VARIANTS[grad_variant]
        self._groups = [group for group in factory.groups if group["params"]][:_MAX_GROUPS]
        self._templates = [_pick_representative(group["params"]) for group in self._groups]
        self.num_probes = 2 * len(self._groups)

    def find_traits(self) -> OptimizerTraits:
        together = self.run_steps(range(self.num_probes))
        if not _all_equal(together.values, self.run_steps(range(self.num_probes)).values):
            return OptimizerTraits(
                param_shaped_keys=together.param_shaped_keys, has_shared_state=together.has_shared_state
            )
        alone = [self.run_steps([chosen]).values[chosen] for chosen in range(self.num_probes)]
        couples = not _all_equal(together.values, alone)
        return OptimizerTraits(
            couples, together.param_shaped_keys, together.updates_without_grads, together.has_shared_state
        )

    def run_steps(self, owned: Sequence[int]) -> "_CouplingResult":
        """A few steps by an optimizer that owns some of the probes."""
        probes = [make_probe(self._templates[i // 2], i) for i in range(self.num_probes)]
        groups = [self._make_probe_group(group, probes[2 * i : 2 * i + 2]) for i, group in enumerate(self._groups)]
        defaults = with_visible_lr(self._factory.defaults)
        inner = set_train_mode(
            replace(self._factory, groups=groups, defaults=defaults).build({id(probes[i]) for i in owned})
        )
        for step, scale in enumerate(GRAD_SCALES):
            for i in owned:
                gradient = scale * make_probe_values(probes[i].shape, phase=step + 10 * i).to(probes[i])
                probes[i].grad = self._make_grad(gradient, probes[i])
            step_once(inner)
        values = [probe.detach().clone() for probe in probes]
        states = [(inner.optimizer.state[probes[i]], probes[i]) for i in owned]
        for probe in probes:
            probe.grad = None
        with suppress(Exception):
            step_once(inner)
        moved = not _all_equal(values, [probe.detach() for probe in probes])
        return _CouplingResult(
            values, _find_param_shaped_keys(states), moved, bool(inner.shared_state() or inner.extra_state())
        )

    def _make_probe_group(self, group: ParamGroup, probes: list[torch.Tensor]) -> ParamGroup:
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        names = {"param_names": ["a", "b"]} if "param_names" in group else {}
        return {**with_visible_lr(options), **names, "params": probes}


class _CouplingResult(NamedTuple):
    values: list[torch.Tensor]
    param_shaped_keys: frozenset[str]
    updates_without_grads: bool
    has_shared_state: bool


def with_visible_lr(options: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with a learning rate that shows what a step does: warm-ups begin with almost none."""
    copied = copy.deepcopy(dict(options))
    lr = copied.get("lr")
    if isinstance(lr, (float, int, torch.Tensor)) and abs(float(lr)) < _MIN_VISIBLE_LR:
        copied["lr"] = torch.full_like(lr, _MIN_VISIBLE_LR) if isinstance(lr, torch.Tensor) else _MIN_VISIBLE_LR
    return copied


def _pick_representative(params: Sequence[torch.Tensor]) -> torch.Tensor:
    """The first one with dimensions: a scalar's state does not show its shape."""
    return next((param for param in params if param.dim()), params[0])


def make_probe(like: torch.Tensor, index: int) -> torch.Tensor:
    # A scalar's state does not show its shape.
    shape = tuple(_PROBE_SIZES[i % len(_PROBE_SIZES)] for i in range(max(like.dim(), 1)))
    # Without its marks: a multiplier of 0 would hide what a step does.
    return torch.nn.Parameter(make_probe_values(shape, phase=index).to(like.device, probe_dtype(like.dtype)))


def make_probe_with_attrs(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A parameter of this value, to an optimizer like the other one."""
    probe = torch.nn.Parameter(value)
    vars(probe).update(read_param_attrs(like))
    return probe


def probe_dtype(dtype: torch.dtype) -> torch.dtype:
    """What probes are made in. In low precision a coupling could vanish in the rounding, and integers have no gradients
    to step with."""
    differentiable = dtype.is_complex or dtype.is_floating_point
    return dtype if differentiable and dtype.itemsize >= torch.float32.itemsize else torch.float32


def make_probe_values(shape: tuple[int, ...], phase: int) -> torch.Tensor:
    places = torch.arange(math.prod(shape), dtype=torch.float32, device="cpu")
    return torch.sin(places * 1.7 + phase + 1).reshape(shape)


def set_train_mode(inner: LocalOptimizer) -> LocalOptimizer:
    """One that is trained from now on: some optimizers must be told."""
    inner.set_mode("train")
    return inner


def step_once(inner: LocalOptimizer) -> None:
    try:
        inner.step()
    except TypeError:
        inner.step(lambda: torch.tensor(1.0))


def _find_param_shaped_keys(states: list[tuple[dict[str, Any], torch.Tensor]]) -> frozenset[str]:
    """Keys whose tensors all have the shape of their parameter, wherever there is one that has dimensions."""
    seen: dict[str, bool] = {}
    for state, probe in states:
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and probe.dim():
                seen[key] = seen.get(key, True) and value.shape == probe.shape
    return frozenset(key for key, shaped in seen.items() if shaped)


def _all_equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) for a, b in zip(left, right, strict=True))
