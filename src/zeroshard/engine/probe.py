"""Find out how an optimizer class behaves by stepping it on small tensors ("probes").

There is no hard-coded list of supported optimizers. Probes answer, per class and options:

  * traits: does the update of one parameter depend on others, which state has the parameter's shape (`probe_traits`);
  * may a parameter be split into shards, and at which offsets (`probe_split_rule`);
  * which state does the first step create (`probe_initial_state`);
  * what does a step cost (`FlopCost`, `measure_step_seconds`).

Answers are cached for the life of the process. Probing changes nothing visible: see `isolated_probe`.
"""

import copy
import functools
import inspect
import math
import random
import statistics
import threading
import time
import types
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from .._torch_compat import collective_sequence_numbers, global_step_hooks, has_custom_modes
from .._types import align_up
from ..errors import ConfigError
from ..layout.partition import CostFn, ShardGranularity, validate_cost
from ..layout.spec import ParamSpec, read_param_attrs
from ..state.tensor_utils import (
    clone_tensor,
    concat_subclass_shards,
    deepcopy_except_tensors,
    inner_tensors,
    is_wrapper_subclass,
    map_tensors,
)
from .inner import LocalOptimizer, OptimizerFactory, ParamGroup

# ---------------------------------------------------------------------------------------------------------------------
# Cache of answers.
#
# An answer depends on the optimizer class, its options, the kinds of parameters and torch's global state; these form
# the key. A factory that is not a class, and options or class attributes that are arbitrary objects, cannot be compared
# by value: such optimizers are probed every time.
#
# Limits: the key covers the methods of the class and the plain global values that they read directly, but not functions
# in other modules. Call `clear_probe_cache()` after changing those.
#
# The cache is local to a process. Probes do not communicate, so a hit on one rank and a miss on another are harmless.


Probe = TypeVar("Probe", bound=Callable[..., Any])

MAX_ANSWERS_PER_CLASS = 1024
_MAX_TENSOR_NUMEL = 64
_PLAIN_TYPES = (type(None), bool, int, str, bytes, torch.dtype, torch.device, torch.memory_format)

_cached_answers: "weakref.WeakKeyDictionary[type, dict[Hashable, Any]]" = weakref.WeakKeyDictionary()
_cache_lock = threading.Lock()


def memoize_probe(*, on_failure: Any) -> Callable[[Probe], Probe]:
    """Cache the results of a function of an `OptimizerFactory` and further hashable arguments.

    If the function raises, the result is `on_failure`. That is not cached, because the cause may be lack of memory.
    """

    def decorate(probe: Probe) -> Probe:
        @functools.wraps(probe)
        def cached_probe(factory: OptimizerFactory, *args: Hashable) -> Any:
            cls, factory_key = _freeze_factory(factory)
            key = (probe, args, factory_key, cls and _freeze_class(cls))
            with _cache_lock:
                answers = _cached_answers.get(cls, {}) if cls else {}
                if key in answers:
                    return answers[key]
            before = _collective_sequence_numbers()
            try:
                answer = probe(factory, *args)
            except Exception:
                return on_failure
            # Hazard: an optimizer whose step communicates must be probed on all ranks or on none. Caches differ between
            # ranks, so such answers are never cached. (NCCL does not count point-to-point messages.)
            if cls and before is not None and before == _collective_sequence_numbers():
                # Freeze the class again: torch wraps its `step` when the first instance is created.
                _store_answer(cls, (probe, args, factory_key, _freeze_class(cls)), answer)
            return answer

        return cast(Probe, cached_probe)

    return decorate


def clear_probe_cache() -> None:
    """Drop all cached answers."""
    with _cache_lock:
        _cached_answers.clear()


def _store_answer(cls: type, key: Hashable, answer: Any) -> None:
    with _cache_lock:
        answers = _cached_answers.setdefault(cls, {})
        answers[key] = answer
        if len(answers) > MAX_ANSWERS_PER_CLASS:
            del answers[next(iter(answers))]


def _collective_sequence_numbers() -> list[int] | None:
    """Return the collective sequence numbers of all process groups, or None if a backend does not count them."""
    if not dist.is_available() or not dist.is_initialized():
        return []
    try:
        return collective_sequence_numbers()
    except Exception:
        return None


class _NotCacheableError(Exception):
    """The factory contains something that cannot be compared by value."""


def _freeze_factory(factory: OptimizerFactory) -> tuple[type | None, Hashable]:
    """Return the optimizer class, and a key of everything else that an answer depends on.

    The key holds no strong reference to the class, so that the class can be garbage-collected. Returns (None, None) if
    the factory cannot be compared by value.
    """
    cls: Any = factory.optimizer_class
    partial_args: tuple[Any, ...] = ()
    if type(cls) is functools.partial:
        cls, partial_args = cls.func, (cls.args, cls.keywords)
    if not isinstance(cls, type):
        return None, None
    try:
        hash(_freeze_class(cls))
        options = _freeze((partial_args, factory.defaults, factory.has_plain_params))
        return cls, (options, tuple(_freeze_group(group) for group in factory.groups), _freeze_global_state())
    except (_NotCacheableError, TypeError):  # TypeError: no weak reference, or no hash
        return None, None


def _freeze_group(group: ParamGroup) -> Hashable:
    """Freeze the options and the distinct kinds of parameters: thousands of parameters are of few kinds."""
    param_kinds = dict.fromkeys(
        (param.dim(), param.dtype, param.device, _freeze_param_attrs(param)) for param in group["params"]
    )
    return "param_names" in group, _freeze(_group_options(group)), tuple(param_kinds)


def _freeze_param_attrs(param: torch.Tensor) -> Hashable:
    return _freeze(read_param_attrs(param)) if vars(param) else ()


def _freeze(value: Any) -> Hashable:
    """Return a hashable value that is equal for equal input only: `1`, `1.0` and `True` differ."""
    cls = type(value)
    if cls in _PLAIN_TYPES:
        return cls, value
    if cls in (float, complex):
        return cls, repr(value)
    if cls in (tuple, list, torch.Size):
        return cls, tuple(map(_freeze, value))
    if cls is dict:
        return cls, tuple((_freeze(key), _freeze(item)) for key, item in value.items())
    if cls in (torch.Tensor, torch.nn.Parameter) and _is_small(value):
        metadata = (value.dtype, value.device, tuple(value.shape), value.requires_grad)
        return cls, metadata, repr(value.tolist())
    raise _NotCacheableError


def _is_small(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_meta and tensor.numel() <= _MAX_TENSOR_NUMEL


def _freeze_class(cls: type) -> Hashable:
    """Freeze the methods and attributes of a class and its bases. They can be replaced while the class stays."""
    bases = (base for base in cls.__mro__ if base is not object)
    return tuple((weakref.ref(base), _freeze_attributes(base)) for base in bases)


def _freeze_attributes(cls: type) -> Hashable:
    frozen: list[Hashable] = []
    for name, value in vars(cls).items():
        functions = _find_functions(value)
        if functions is not None:
            frozen.append((name, *map(_freeze_function, functions)))
        elif cls is not Optimizer and not _is_dunder(name) and name != "_abc_impl":
            frozen.append((name, _freeze(value)))
    return tuple(frozen)


def _find_functions(value: Any) -> list[Any] | None:
    """Return the functions that a class attribute runs when it is called or read; None if it is plain data."""
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    if isinstance(value, property):
        return [accessor for accessor in (value.fget, value.fset, value.fdel) if accessor is not None]
    return [value] if isinstance(value, (types.FunctionType, type)) or inspect.isbuiltin(value) else None


def _freeze_function(function: Any) -> Hashable:
    """Freeze a function: identity, code (which reloading replaces in place) and the plain global values it reads."""
    frozen: list[Hashable] = [weakref.ref(function)]
    while isinstance(function, types.FunctionType):
        code, module_globals = function.__code__, function.__globals__
        frozen += [code, tuple(map(type, function.__defaults__ or ())), repr(function.__kwdefaults__)]
        frozen += [
            (name, repr(module_globals[name]))
            for name in code.co_names
            if type(module_globals.get(name)) in (bool, int, float)
        ]
        function = getattr(function, "__wrapped__", None)
    return tuple(frozen)


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _freeze_global_state() -> Hashable:
    """Freeze the global settings that change what optimizers compute, or whether they can run.

    The process group is included: a class may communicate only if there are many ranks.

    Raises:
        _NotCacheableError: A dispatch mode, or a function mode other than the default device's, is active.
    """
    if has_custom_modes():
        raise _NotCacheableError
    backends: Any = torch.backends  # some type stubs lack attributes
    deterministic: Any = torch.utils.deterministic
    return (
        (torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads()),
        (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()),
        (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        deterministic.fill_uninitialized_memory,
        tuple(
            (torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type))
            for device_type in ("cpu", "cuda", "xpu", "mps")
        ),
        (backends.cuda.matmul.fp32_precision, backends.mkldnn.matmul.fp32_precision, backends.mkldnn.enabled),
        (backends.cudnn.enabled, backends.cudnn.deterministic, backends.cudnn.benchmark),
        backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        getattr(backends.cuda.matmul, "allow_fp16_accumulation", None),
        _freeze_process_group(),
    )


def _freeze_process_group() -> Hashable:
    if not dist.is_available() or not dist.is_initialized():
        return None
    return dist.get_world_size(), dist.get_rank(), dist.get_backend()


# ---------------------------------------------------------------------------------------------------------------------
# Traits: coupling between parameters, param-shaped state, shared state.


_PROBE_SIZES = (2, 3, 4, 5)
GRAD_SCALES = (1.0, 1e3, 1e-2)
"""Gradient magnitude of each step. Some optimizers couple parameters only above a threshold (a norm, for example)."""
_MIN_VISIBLE_LR = 0.05
_MAX_GROUPS = 3


class OptimizerTraits(NamedTuple):
    """What `probe_traits` found. The defaults are used if the optimizer could not be probed."""

    couples_params: bool = False
    """The update of one parameter depends on others, so they cannot be sharded over different ranks."""
    param_shaped_keys: frozenset[str] = frozenset()
    """State keys whose tensors have the shape of the parameter."""
    updates_without_grads: bool = False
    """Parameters without a gradient are updated, too."""
    has_shared_state: bool = False
    """It has state that belongs to no parameter, or its state dict has extra entries."""
    required_grads: str = ""
    """The kind of gradients that it needs: "" (any), "sparse", or "graph" (gradients that can be differentiated)."""


@memoize_probe(on_failure=OptimizerTraits())
def probe_traits(factory: OptimizerFactory) -> OptimizerTraits:
    """Step the optimizer on all probes together and on each probe alone, and compare the results.

    An optimizer that cannot be stepped on probes, or that draws random numbers, is assumed not to couple parameters.
    """
    for grad_variant in _GRAD_VARIANTS:
        probe = _CouplingProbe(factory, grad_variant)
        with isolated_probe(factory), suppress(Exception):
            return probe.find_traits()._replace(required_grads=grad_variant)
    raise RuntimeError(f"{factory.name} cannot be stepped")


@contextmanager
def isolated_probe(factory: OptimizerFactory) -> Iterator[None]:
    """Run a probe without side effects: on random number generators, warnings, global hooks and compiled code."""
    devices = {param.device for group in factory.groups for param in group["params"] if param.device.type == "cuda"}
    with warnings.catch_warnings(), _preserve_rng_state(devices), _suspend_global_hooks():
        warnings.simplefilter("ignore")
        with torch.compiler.set_stance("force_eager"):  # compiling a step for each probe would take minutes
            yield


@contextmanager
def _preserve_rng_state(cuda_devices: set[torch.device]) -> Iterator[None]:
    """Restore the random number generators on exit. Draws inside still differ from each other."""
    state = random.getstate()
    try:
        with torch.random.fork_rng(devices=cuda_devices):
            yield
    finally:
        random.setstate(state)


@contextmanager
def _suspend_global_hooks() -> Iterator[None]:
    """Disable global step hooks: a `step` that calls its base class's `step` would run them for the probes."""
    registries = global_step_hooks()
    hooks = [dict(registry) for registry in registries]
    try:
        for registry in registries:
            registry.clear()
        yield
    finally:
        for registry, saved in zip(registries, hooks, strict=True):
            registry.update(saved)


def _attach_graph(grad: torch.Tensor, probe: torch.Tensor) -> torch.Tensor:
    """Return a gradient that can be differentiated again, as after `backward(create_graph=True)`."""
    with torch.enable_grad():
        return torch.autograd.grad((grad * probe * probe).sum(), probe, create_graph=True)[0]


_GRAD_VARIANTS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "": lambda grad, _: grad,
    "sparse": lambda grad, _: grad.to_sparse(1),
    "graph": _attach_graph,
}


class _CouplingProbe:
    """Two probes for each of the first groups, with gradients of one variant (a key of `_GRAD_VARIANTS`)."""

    def __init__(self, factory: OptimizerFactory, grad_variant: str) -> None:
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
        alone = [self.run_steps([i]).values[i] for i in range(self.num_probes)]
        couples = not _all_equal(together.values, alone)
        return OptimizerTraits(
            couples, together.param_shaped_keys, together.updates_without_grads, together.has_shared_state
        )

    def run_steps(self, owned: Sequence[int]) -> "_CouplingResult":
        """Make a few steps with an optimizer that holds the probes in `owned` only."""
        probes = [make_probe(self._templates[i // 2], i) for i in range(self.num_probes)]
        groups = [self._make_probe_group(group, probes[2 * i : 2 * i + 2]) for i, group in enumerate(self._groups)]
        defaults = with_visible_lr(self._factory.defaults)
        inner = set_train_mode(
            replace(self._factory, groups=groups, defaults=defaults).build({id(probes[i]) for i in owned})
        )
        for step, scale in enumerate(GRAD_SCALES):
            for i in owned:
                grad = scale * make_probe_values(probes[i].shape, phase=step + 10 * i).to(probes[i])
                probes[i].grad = self._make_grad(grad, probes[i])
            step_once(inner)
        values = [probe.detach().clone() for probe in probes]
        states = [(inner.optimizer.state[probes[i]], probes[i]) for i in owned]
        for probe in probes:
            probe.grad = None
        with suppress(Exception):
            step_once(inner)
        updates_without_grads = not _all_equal(values, [probe.detach() for probe in probes])
        has_shared_state = bool(inner.shared_state() or inner.extra_state())
        return _CouplingResult(values, _find_param_shaped_keys(states), updates_without_grads, has_shared_state)

    def _make_probe_group(self, group: ParamGroup, probes: list[torch.Tensor]) -> ParamGroup:
        names = {"param_names": ["a", "b"]} if "param_names" in group else {}
        return {**with_visible_lr(_group_options(group)), **names, "params": probes}


class _CouplingResult(NamedTuple):
    values: list[torch.Tensor]
    param_shaped_keys: frozenset[str]
    updates_without_grads: bool
    has_shared_state: bool


def with_visible_lr(options: Mapping[str, Any]) -> dict[str, Any]:
    """Copy options and raise a tiny learning rate, as at the start of a warm-up: steps must have a visible effect."""
    copied = copy.deepcopy(dict(options))
    lr = copied.get("lr")
    if isinstance(lr, (float, int, torch.Tensor)) and abs(float(lr)) < _MIN_VISIBLE_LR:
        copied["lr"] = torch.full_like(lr, _MIN_VISIBLE_LR) if isinstance(lr, torch.Tensor) else _MIN_VISIBLE_LR
    return copied


def _pick_representative(params: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the first parameter that is not a scalar: the shape of a scalar's state says nothing."""
    return next((param for param in params if param.dim()), params[0])


def make_probe(like: torch.Tensor, index: int) -> torch.Tensor:
    """Return a probe with the number of dimensions (at least 1), device and dtype of `like`, without its attributes.

    Attributes are left out because a learning-rate multiplier of 0, for example, would hide the effect of a step.
    """
    shape = tuple(_PROBE_SIZES[i % len(_PROBE_SIZES)] for i in range(max(like.dim(), 1)))
    return torch.nn.Parameter(make_probe_values(shape, phase=index).to(like.device, probe_dtype(like.dtype)))


def make_probe_with_attrs(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a parameter with this value and the attributes that users set on `like`."""
    probe = torch.nn.Parameter(value)
    vars(probe).update(read_param_attrs(like))
    return probe


def probe_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for probes: at least float32.

    In low precision rounding could hide a coupling. Integer parameters have no gradients to step with.
    """
    differentiable = dtype.is_complex or dtype.is_floating_point
    return dtype if differentiable and dtype.itemsize >= torch.float32.itemsize else torch.float32


def make_probe_values(shape: tuple[int, ...], phase: int) -> torch.Tensor:
    positions = torch.arange(math.prod(shape), dtype=torch.float32, device="cpu")
    return torch.sin(positions * 1.7 + phase + 1).reshape(shape)


def set_train_mode(inner: LocalOptimizer) -> LocalOptimizer:
    """Switch optimizers that have modes (schedule-free ones) to training, and return `inner`."""
    inner.set_mode("train")
    return inner


def step_once(inner: LocalOptimizer) -> None:
    """Step, with a closure if the optimizer requires one."""
    try:
        inner.step()
    except TypeError:
        inner.step(lambda: torch.tensor(1.0))


def _find_param_shaped_keys(states: list[tuple[dict[str, Any], torch.Tensor]]) -> frozenset[str]:
    """Return the keys whose tensors all have the shape of their parameter. Scalar parameters are ignored."""
    is_param_shaped: dict[str, bool] = {}
    for state, probe in states:
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and probe.dim():
                is_param_shaped[key] = is_param_shaped.get(key, True) and value.shape == probe.shape
    return frozenset(key for key, flag in is_param_shaped.items() if flag)


def _all_equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) for a, b in zip(left, right, strict=True))


# ---------------------------------------------------------------------------------------------------------------------
# Split rule: may a parameter be split into shards, and at which offsets? Full probes are compared with split ones.


_ODD_FACTOR = 15
"""Some probe sizes are a multiple of it: the block size of an optimizer need not be a power of two."""
_LARGE_PROBE_NUMEL = 160 * 768
_SPLIT_SIZES = [*[7] * 9, 12345, _LARGE_PROBE_NUMEL - 12345 - 63]
"""Shard sizes of the large probe: nine tiny ones, and two large ones that meet inside a row, aligned to nothing."""
_CANDIDATE_ALIGNS = (64, 128, 256, 512, 1024, 2048, 4096)
_COARSEST_GRANULARITY = ShardGranularity(_CANDIDATE_ALIGNS[-1], _CANDIDATE_ALIGNS[-1])


class SplitRule(NamedTuple):
    """How parameters may be split so that shards are updated exactly as the full parameter would be."""

    granularity: ShardGranularity = ShardGranularity()
    shared_inner_names: frozenset[str] = frozenset()
    """For state in tensor subclasses: names of the inner tensors that are the same for all shards."""


@memoize_probe(on_failure=None)
def probe_split_rule(factory: OptimizerFactory) -> SplitRule | None:
    """Return the finest split rule that works for all parameters, or None if parameters must not be split."""
    with isolated_probe(factory), suppress(_NotSplittable):
        rule = SplitRule()
        for group, like in _distinct_params(factory.groups):
            rule = _find_finest(_SplitProbe(factory, group, like), rule)
        return rule
    return None


def _find_finest(probe: "_SplitProbe", current: SplitRule) -> SplitRule:
    """Return the finest split rule that is not finer than `current`; raise `_NotSplittable` if there is none.

    A small probe is tried first: for a flat parameter some optimizers keep a matrix with a row per element.
    """
    probe.require_split_in_half()
    if probe.can_split_anywhere():
        return current
    minimum = current.granularity
    if not minimum.is_elementwise and (shared_names := probe.try_granularity(minimum)) is not None:
        return SplitRule(minimum, current.shared_inner_names | shared_names)
    if probe.try_granularity(_COARSEST_GRANULARITY) is None:
        raise _NotSplittable
    candidates = (
        ShardGranularity(align, _COARSEST_GRANULARITY.min_numel)
        for align in _CANDIDATE_ALIGNS
        if align >= minimum.align
    )
    align = next(candidate.align for candidate in candidates if probe.try_granularity(candidate) is not None)
    for candidate in (
        ShardGranularity(align, min_numel)
        for min_numel in _CANDIDATE_ALIGNS
        if min_numel >= max(align, minimum.min_numel)
    ):
        if (shared_names := probe.try_granularity(candidate)) is not None:
            return SplitRule(candidate, current.shared_inner_names | shared_names)
    raise _NotSplittable


class _NotSplittable(Exception):  # noqa: N818 (an answer, not an error)
    """The shards of a split parameter are not updated as the full parameter would be."""


def _distinct_params(groups: Sequence[ParamGroup]) -> Iterable[tuple[ParamGroup, torch.Tensor]]:
    """Return one parameter for each combination of group options, dimensions, dtype, device and attributes.

    The learning rate is ignored: often many groups differ in nothing else.
    """
    distinct: dict[str, tuple[ParamGroup, torch.Tensor]] = {}
    for group in groups:
        options = repr({key: value for key, value in group.items() if key not in ("params", "param_names", "lr")})
        for param in group["params"]:
            distinct.setdefault(
                f"{options} {param.dim()} {param.dtype} {param.device} {read_param_attrs(param)}", (group, param)
            )
    return distinct.values()


class _SplitResult(NamedTuple):
    values: list[torch.Tensor]
    states: list[dict[str, Any]]


class _SplitProbe:
    """Steps a parameter like `like` as a whole and split into flat shards, and compares the results.

    Probes are large because some optimizers treat large parameters differently.
    """

    def __init__(self, factory: OptimizerFactory, group: ParamGroup, like: torch.Tensor) -> None:
        self._factory, self._group, self._like = factory, group, like

    def require_split_in_half(self) -> None:
        """Raise `_NotSplittable` if a small parameter cannot be split in half."""
        numel = 128 if self._like.dim() else 1
        if self._compare_split(self._make_shape(numel, 16), [numel // 2, numel - numel // 2]) is None:
            raise _NotSplittable

    def can_split_anywhere(self) -> bool:
        """Return whether it may be split at any offset. Its shards may then also be joined with those of others."""
        if not self._like.dim():
            return True
        return self._compare_split(self._make_shape(_LARGE_PROBE_NUMEL, 768), _SPLIT_SIZES) == frozenset()

    def try_granularity(self, granularity: ShardGranularity) -> frozenset[str] | None:
        """Return the shared inner names if it may be split with this granularity, else None.

        The shortest shards and longer ones are tried. Results must be bit-identical: shards of this length have no
        tail that vector units would treat differently.
        """
        sizes = [
            granularity.min_shard_numel,
            granularity.min_shard_numel + granularity.align,
            granularity.min_shard_numel,
        ]
        num_blocks = (sum(sizes) + 2 * _COARSEST_GRANULARITY.min_numel) // granularity.align
        shared_names: frozenset[str] = frozenset()
        for numel in (
            granularity.align * (num_blocks | 1),
            align_up(granularity.align * num_blocks, granularity.align * _ODD_FACTOR),
        ):
            names = self._compare_split(self._make_shape(numel, 16), [*sizes, numel - sum(sizes)], exact=True)
            if names is None:
                return None
            shared_names |= names
        return shared_names

    def _make_shape(self, numel: int, columns: int) -> tuple[int, ...]:
        dims = self._like.dim()
        return (numel // columns, columns, *[1] * (dims - 2)) if dims > 1 else (numel,) * dims

    def _compare_split(self, shape: tuple[int, ...], sizes: list[int], *, exact: bool = False) -> frozenset[str] | None:
        """Return the shared inner names if shards of these sizes are updated like the full probe, else None."""
        value = _make_sloped_values(shape, 0.1, 3.0, phase=1).to(self._like.device, probe_dtype(self._like.dtype))
        full, split = self._run_steps(value, [value]), self._run_steps(value, torch.split(value.view(-1), sizes))
        actual, expected = torch.cat(split.values), full.values[0].view(-1)
        # Vector units may round the tail of a contiguous run differently from its middle.
        is_equal = torch.equal(actual, expected) if exact else torch.allclose(actual, expected, rtol=1e-4, atol=1e-5)
        return _find_shared_inner_names(full, split) if is_equal else None

    def _run_steps(self, full: torch.Tensor, values: Sequence[torch.Tensor]) -> _SplitResult:
        probes = [make_probe_with_attrs(value.clone(), self._like) for value in values]
        names = {"param_names": [str(i) for i in range(len(probes))]} if "param_names" in self._group else {}
        group = {**with_visible_lr(_group_options(self._group)), **names, "params": probes}
        factory = replace(self._factory, groups=[group], defaults=with_visible_lr(self._factory.defaults))
        inner = set_train_mode(factory.build(set(map(id, probes))))
        for step, scale in enumerate(GRAD_SCALES):
            slope = (2.0, 0.2) if step % 2 else (0.1, 1.5)
            grad = scale * _make_sloped_values(full.shape, *slope, phase=step).to(full)
            grad_shards = torch.split(grad.view(-1), [probe.numel() for probe in probes])
            for probe, grad_shard in zip(probes, grad_shards, strict=True):
                probe.grad = grad_shard.view(probe.shape).clone()
            step_once(inner)
        return _SplitResult(
            [probe.detach() for probe in probes], [dict(inner.optimizer.state[probe]) for probe in probes]
        )


def _find_shared_inner_names(full: _SplitResult, split: _SplitResult) -> frozenset[str] | None:
    """Return the names of inner tensors (of tensor subclasses in the state) that all shards share.

    Returns None if the state cannot be split: each value must either have the shape of its parameter, or be the same
    for the full parameter and for all shards.
    """
    (full_state,), shared_names = full.states, set[str]()
    if any(list(state) != list(full_state) for state in split.states):
        return None
    for key, value in full_state.items():
        shards = [state[key] for state in split.states]
        is_sharded = _has_shape_of(value, full.values[0]) and all(map(_has_shape_of, shards, split.values))
        if not is_sharded and not all(_values_equal(shard, value) for shard in shards):
            return None
        if is_sharded and any(map(is_wrapper_subclass, [value, *shards])):
            names = _find_shared_inner_of_value(value, shards)
            if names is None:
                return None
            shared_names |= names
    return frozenset(shared_names)


def _find_shared_inner_of_value(value: torch.Tensor, shards: list[torch.Tensor]) -> frozenset[str] | None:
    """Return the names of inner tensors that all shards share, or None if joining the shards does not give `value`."""
    if any(type(shard) is not type(value) for shard in shards):
        return None
    shared_names = frozenset(
        name
        for name, inner in inner_tensors(value).items()
        if all(_values_equal(inner_tensors(shard)[name], inner) for shard in shards)
    )
    joined = inner_tensors(concat_subclass_shards(shards, value.shape, shared_names))
    return (
        shared_names
        if all(_values_equal(joined[name], inner) for name, inner in inner_tensors(value).items())
        else None
    )


def _has_shape_of(value: Any, param: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == param.shape


def _values_equal(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left.shape == right.shape and bool(torch.equal(left, right))
    return bool(left == right)


def _make_sloped_values(shape: tuple[int, ...], start: float, stop: float, phase: int) -> torch.Tensor:
    """Return values of varying magnitude, so that no shard resembles the full tensor. Read-only: they are cached."""
    return _make_flat_sloped_values(math.prod(shape), start, stop, phase).reshape(shape)


@lru_cache(maxsize=16)
def _make_flat_sloped_values(numel: int, start: float, stop: float, phase: int) -> torch.Tensor:
    """Return the values of all shapes with this many elements. Uncached, this took half of the construction time."""
    with torch.inference_mode(False):  # inference tensors could not be used outside of inference mode
        return make_probe_values((numel,), phase) * torch.linspace(
            start, stop, numel, dtype=torch.float32, device="cpu"
        )


# ---------------------------------------------------------------------------------------------------------------------
# Initial state: what the first step of a parameter creates, found without stepping the real optimizer.
#
# torch's checkpoint helpers load into the state of a new optimizer, so its state dict must already have every entry.


State = dict[Any, Any]
_NEUTRALITY_STEPS = 3


def probe_initial_state(factory: OptimizerFactory, options: ParamGroup, params: Sequence[torch.Tensor]) -> list[State]:
    """Return the state of each parameter as its first step creates it. `params` are not changed."""
    probes = [make_probe_with_attrs(param.detach().clone(), param) for param in params]
    state_probe = _InitialStateProbe(factory, options, probes)
    return [dict(state_probe.initial_state(probe)) for probe in probes]


def init_state(inner: LocalOptimizer, param_ids: Set[int], undo: ExitStack) -> None:
    """Create the initial state of parameters in `param_ids` that have none. Closing `undo` removes it."""
    state = inner.optimizer.state
    for group in inner.optimizer.param_groups:
        for param in [p for p in group["params"] if id(p) in param_ids and not state.get(p)]:
            undo.callback(state.pop, param, None)
            state.update(zip([param], probe_initial_state(inner.factory, group, [param]), strict=True))


@memoize_probe(on_failure=False)
def is_init_neutral(factory: OptimizerFactory) -> bool:
    """Return whether an optimizer with pre-created initial state makes the same updates as one without state."""
    with isolated_probe(factory):
        return all(_is_group_init_neutral(factory, group) for group in factory.groups if group["params"])


def _is_group_init_neutral(factory: OptimizerFactory, group: ParamGroup) -> bool:
    like = group["params"][0]
    lazy, early = [[make_probe(like, index) for index in range(2)] for _ in range(2)]
    options = with_visible_lr(_group_options(group))
    states = probe_initial_state(replace(factory, defaults=with_visible_lr(factory.defaults)), options, early)
    if not any(states) or not _is_init_value_independent(factory, options, like, states):
        return False
    optimizers = [build_for_probes(factory, options, probes) for probes in (lazy, early)]
    optimizers[1].optimizer.state.update(zip(early, states, strict=True))
    for step in range(_NEUTRALITY_STEPS):
        for inner, probes in zip(optimizers, (lazy, early), strict=True):
            for index, probe in enumerate(probes):
                probe.grad = make_probe_values(probe.shape, phase=step + 10 * index).to(probe)
            step_once(inner)
    return all(map(torch.equal, lazy, early))


def _is_init_value_independent(
    factory: OptimizerFactory, options: ParamGroup, like: torch.Tensor, states: list[State]
) -> bool:
    """Return whether the initial state is the same for parameters with other values.

    State that contains a copy of the parameter would be stale if it were created before weights are loaded.
    """
    other_probes = [make_probe(like, index + _NEUTRALITY_STEPS) for index in range(len(states))]
    other_states = probe_initial_state(
        replace(factory, defaults=with_visible_lr(factory.defaults)), options, other_probes
    )
    pairs = zip(_collect_tensors(states), _collect_tensors(other_states), strict=True)
    return all(left.shape == right.shape and torch.equal(left, right) for left, right in pairs)


def _collect_tensors(value: Any) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []
    map_tensors(value, tensors.append)
    return tensors


class _InitialStateProbe:
    """Makes one step with zero gradients and records the first value of each state entry."""

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
    """A dict that keeps a copy of the first value of each key: optimizers modify it in place in the same step."""

    def __init__(self) -> None:
        super().__init__()
        self.first_values: State = {}

    def __setitem__(self, key: Any, value: Any) -> None:
        if key not in self.first_values:
            self.first_values[key] = map_tensors(deepcopy_except_tensors(value), clone_tensor)
        super().__setitem__(key, value)


def build_for_probes(factory: OptimizerFactory, options: ParamGroup, probes: Sequence[torch.Tensor]) -> LocalOptimizer:
    """Build an optimizer with these options that holds only `probes`."""
    group = {**_group_options(options), "params": list(probes)}
    if "param_names" in options:
        group["param_names"] = [str(i) for i in range(len(probes))]
    return set_train_mode(replace(factory, groups=[group]).build(set(map(id, probes))))


def _group_options(group: ParamGroup) -> ParamGroup:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


# ---------------------------------------------------------------------------------------------------------------------
# Cost of a step: FLOPs counted on meta tensors, or measured seconds.


FLOPS_PER_ELEMENT = 1000
"""FLOPs that take as long as the memory traffic of one element: some hundred on CPUs, some thousand on GPUs."""
_WARMUP_STEPS, _MEASURED_STEPS = 3, 5
_FLOP_COUNT_STEPS = 2
"""More than one: some optimizers do things in the second step that they skip in the first."""


class FlopCost:
    """Cost of a step in FLOPs, by the shape of the parameter."""

    def __init__(self, factory: OptimizerFactory) -> None:
        # Drop the parameters: they do not matter here, and there may be thousands.
        self._factory = replace(factory, groups=[{**group, "params": []} for group in factory.groups[:1]])
        self._cost_by_shape: dict[tuple[int, ...], int] = {}

    def __call__(self, spec: ParamSpec) -> int:
        if spec.shape not in self._cost_by_shape:
            self._cost_by_shape[spec.shape] = FLOPS_PER_ELEMENT * spec.numel + _count_flops(
                self._factory, spec.shape, spec.dtype
            )
        return self._cost_by_shape[spec.shape]


def numel_cost(spec: ParamSpec) -> int:
    """Return the cost in FLOPs for optimizers that are element-wise."""
    return FLOPS_PER_ELEMENT * spec.numel


CostKey = tuple[tuple[int, ...], torch.dtype]


def cost_key(spec: ParamSpec) -> CostKey:
    """Return a key that is equal for parameters with equal cost."""
    return spec.shape, spec.dtype


@dataclass(frozen=True)
class MeasuredCost:
    """Cost of a step in seconds, by shape and dtype of the parameter."""

    seconds: Mapping[CostKey, float]

    def __call__(self, spec: ParamSpec) -> float:
        if cost_key(spec) not in self.seconds:
            measured = ", ".join(str(shape) for shape, _ in self.seconds)
            raise ConfigError(
                f"no step was measured for a parameter like {spec.label}, of shape {spec.shape} and {spec.dtype}, "
                f"only for {measured}. Measure with the rule's selector."
            )
        return self.seconds[cost_key(spec)]


def measure_step_seconds(factory: OptimizerFactory, spec: ParamSpec) -> float:
    """Return the median time of a step on a parameter like this one, on its device, after warm-up steps."""
    with isolated_probe(factory):
        param = torch.nn.Parameter(torch.randn(spec.shape, device=spec.device).to(spec.dtype))
        param.grad = torch.randn_like(param)
        inner = build_for_probes(factory, factory.groups[0], [param])
        times = [_time_step(inner, spec.device) for _ in range(_WARMUP_STEPS + _MEASURED_STEPS)]
    return statistics.median(times[_WARMUP_STEPS:])


def _time_step(inner: LocalOptimizer, device: torch.device) -> float:
    _synchronize_device(device)
    start = time.perf_counter()
    step_once(inner)
    _synchronize_device(device)
    return time.perf_counter() - start


def _synchronize_device(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def convert_cost_to_flops(cost: CostFn, specs: Sequence[ParamSpec], flop_costs: Sequence[CostFn]) -> CostFn:
    """Scale a cost function in any unit, such as seconds, to FLOPs, so that it can be compared with other rules' costs.

    `cost` gives the ratio between the `specs`; the total over all of them comes from `flop_costs`, which are indexed by
    parameter group.
    """
    trainable = [spec for spec in specs if spec.trainable]
    total = sum(map(validate_cost(cost), trainable))
    scale = sum(flop_costs[spec.group](spec) for spec in trainable) / total if total else 1.0
    return lambda spec: scale * cost(spec)


@memoize_probe(on_failure=0)
def _count_flops(factory: OptimizerFactory, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return the matrix-multiplication FLOPs of a step; 0 if the optimizer cannot be probed."""
    from torch.utils.flop_counter import FlopCounterMode  # slow to import

    with isolated_probe(factory):
        param = torch.nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
        inner = build_for_probes(factory, factory.groups[0], [param])
        with FlopCounterMode(display=False) as counter:
            for _ in range(_FLOP_COUNT_STEPS):
                param.grad = torch.empty_like(param)
                step_once(inner)
        return int(counter.get_total_flops()) // _FLOP_COUNT_STEPS
