"""May a parameter be cut, and where? Asked by stepping the optimizer on whole probes and on pieces of them."""

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
from torch.optim import Optimizer, optimizer
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

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
# Memoise what probes find out about an optimizer class, for the life of the process.
#
# A probe steps the user's class on small tensors. Its answer depends on the class, its options, the kinds of parameters
# and torch's global state, so these form the key. What cannot be compared by value is probed every time: a factory that
# is not a class, and options or class attributes that are arbitrary objects.
#
# Limits: of the code that a class runs, the key covers its own methods and the plain global values that they read
# directly, but not functions in other modules. Call `clear()` after changing those.
#
# The cache is local to a process. Probes do not communicate, so other ranks cannot tell a hit from a miss.


Probe = TypeVar("Probe", bound=Callable[..., Any])

MAX_ANSWERS_PER_CLASS = 1024
_MAX_TENSOR_NUMEL = 64
_PLAIN_TYPES = (type(None), bool, int, str, bytes, torch.dtype, torch.device, torch.memory_format)

_cached_answers: "weakref.WeakKeyDictionary[type, dict[Hashable, Any]]" = weakref.WeakKeyDictionary()
_cache_lock = threading.Lock()


def memoize_probe(*, on_failure: Any) -> Callable[[Probe], Probe]:
    """Make a function of a recipe, and of further hashable arguments, remember what it returns.

    `on_failure` is the answer where it raises. It is not remembered: memory may have run out.
    """

    def decorate(probe: Probe) -> Probe:
        @functools.wraps(probe)
        def cached_probe(factory: OptimizerFactory, *args: Hashable) -> Any:
            cls, rest = _freeze_factory(factory)
            key = (probe, args, rest, cls and _freeze_class(cls))
            with _cache_lock:
                answers = _cached_answers.get(cls, {}) if cls else {}
                if key in answers:
                    return answers[key]
            before = _collective_sequence_numbers()
            try:
                answer = probe(factory, *args)
            except Exception:
                return on_failure
            # Hazard: an optimizer whose step communicates must be probed on all ranks or on none. Ranks differ in what
            # they have cached, so such answers are never kept. (NCCL does not count point-to-point messages.)
            if cls and before is not None and before == _collective_sequence_numbers():
                # The class as it is now: its first instance makes torch wrap its `step`.
                _store_answer(cls, (probe, args, rest, _freeze_class(cls)), answer)
            return answer

        return cast(Probe, cached_probe)

    return decorate


def clear_probe_cache() -> None:
    """Forget all answers."""
    with _cache_lock:
        _cached_answers.clear()


def _store_answer(cls: type, key: Hashable, answer: Any) -> None:
    with _cache_lock:
        answers = _cached_answers.setdefault(cls, {})
        answers[key] = answer
        if len(answers) > MAX_ANSWERS_PER_CLASS:
            del answers[next(iter(answers))]


def _collective_sequence_numbers() -> list[int] | None:
    """Return the sequence numbers of all process groups; None where a backend does not count."""
    if not dist.is_available() or not dist.is_initialized():
        return []
    try:
        groups: list[Any] = list(dist.distributed_c10d._world.pg_map)
        backends = [group._get_backend(device) for group in groups for device in group._device_types]
        return [backend._get_sequence_number_for_group() for backend in backends]
    except Exception:
        return None


class _NotCacheableError(Exception):
    """A part of the recipe cannot be compared by value."""


def _freeze_factory(optimizer_factory: OptimizerFactory) -> tuple[type | None, Hashable]:
    """Return the optimizer class, which must stay collectable, and what else an answer depends on.

    The class is None if that cannot be compared by value.
    """
    factory: Any = optimizer_factory.optimizer_class
    preset: tuple[Any, ...] = ()
    if type(factory) is functools.partial:
        factory, preset = factory.func, (factory.args, factory.keywords)
    if not isinstance(factory, type):
        return None, None
    try:
        hash(_freeze_class(factory))
        options = _freeze((preset, optimizer_factory.defaults, optimizer_factory.has_plain_params))
        return factory, (
            options,
            tuple(_freeze_group(group) for group in optimizer_factory.groups),
            _freeze_global_state(),
        )
    except (_NotCacheableError, TypeError):  # TypeError: no weak reference, or no hash
        return None, None


def _freeze_group(group: ParamGroup) -> Hashable:
    """Freeze options, and each kind of parameter once: thousands of parameters are of few kinds."""
    options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    kinds = dict.fromkeys(
        (param.dim(), param.dtype, param.device, _freeze_param_attrs(param)) for param in group["params"]
    )
    return "param_names" in group, _freeze(options), tuple(kinds)


def _freeze_param_attrs(param: torch.Tensor) -> Hashable:
    return _freeze(read_param_attrs(param)) if vars(param) else ()


def _freeze(value: Any) -> Hashable:
    """Return a hashable value that is equal for equal input only: `1`, `1.0` and `True` differ."""
    kind = type(value)
    if kind in _PLAIN_TYPES:
        return kind, value
    if kind in (float, complex):
        return kind, repr(value)
    if kind in (tuple, list, torch.Size):
        return kind, tuple(map(_freeze, value))
    if kind is dict:
        return kind, tuple((_freeze(key), _freeze(item)) for key, item in value.items())
    if kind in (torch.Tensor, torch.nn.Parameter) and _is_small(value):
        layout = (value.dtype, value.device, tuple(value.shape), value.requires_grad)
        return kind, layout, repr(value.tolist())
    raise _NotCacheableError


def _is_small(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_meta and tensor.numel() <= _MAX_TENSOR_NUMEL


def _freeze_class(cls: type) -> Hashable:
    """Freeze its methods and attributes, and those of its bases: they can be replaced while the class stays."""
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
    """Return what an attribute of a class runs when it is called or read."""
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    if isinstance(value, property):
        return [it for it in (value.fget, value.fset, value.fdel) if it is not None]
    return [value] if isinstance(value, (types.FunctionType, type)) or inspect.isbuiltin(value) else None


def _freeze_function(function: Any) -> Hashable:
    """Freeze its identity, its code, which reloading replaces in place, and the plain global values it reads."""
    frozen: list[Hashable] = [weakref.ref(function)]
    while isinstance(function, types.FunctionType):
        code, names = function.__code__, function.__globals__
        frozen += [code, tuple(map(type, function.__defaults__ or ())), repr(function.__kwdefaults__)]
        frozen += [(name, repr(names[name])) for name in code.co_names if type(names.get(name)) in (bool, int, float)]
        function = getattr(function, "__wrapped__", None)
    return tuple(frozen)


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _freeze_global_state() -> Hashable:
    """Freeze the settings that change what optimizers compute or whether they can, and the process group: a class may
    communicate in large ones only. Raises where another mode than that of the default device is active."""
    if torch._C._len_torch_dispatch_stack() or any(type(it) is not DeviceContext for it in _function_modes()):
        raise _NotCacheableError
    backends: Any = torch.backends  # the stubs of some of them lack attributes
    deterministic: Any = torch.utils.deterministic
    return (
        (torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads()),
        (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()),
        (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        deterministic.fill_uninitialized_memory,
        tuple((torch.is_autocast_enabled(it), torch.get_autocast_dtype(it)) for it in ("cpu", "cuda", "xpu", "mps")),
        (backends.cuda.matmul.fp32_precision, backends.mkldnn.matmul.fp32_precision, backends.mkldnn.enabled),
        (backends.cudnn.enabled, backends.cudnn.deterministic, backends.cudnn.benchmark),
        backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        getattr(backends.cuda.matmul, "allow_fp16_accumulation", None),
        _freeze_process_group(),
    )


def _function_modes() -> list[Any]:
    return list(_get_current_function_mode_stack())  # type: ignore[no-untyped-call]


def _freeze_process_group() -> Hashable:
    if not dist.is_available() or not dist.is_initialized():
        return None
    return dist.get_world_size(), dist.get_rank(), dist.get_backend()


# ---------------------------------------------------------------------------------------------------------------------
# What kind of optimizer is this? Asked by stepping it on tiny tensors, not guessed from its name.


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


# ---------------------------------------------------------------------------------------------------------------------
# May a parameter be cut, and where? Asked by stepping the optimizer on whole probes and on pieces of them.


_ODD_FACTOR = 15
"""Probes are multiples of it, too: blocks need not have a power of two of elements."""
_LARGE_PROBE_NUMEL = 160 * 768
_SPLIT_SIZES = [*[7] * 9, 12345, _LARGE_PROBE_NUMEL - 12345 - 63]
"""Pieces of the large probe: small ones, and two that meet within a row, at no multiple of anything."""
_CANDIDATE_ALIGNS = (64, 128, 256, 512, 1024, 2048, 4096)
_COARSEST_GRANULARITY = ShardGranularity(_CANDIDATE_ALIGNS[-1], _CANDIDATE_ALIGNS[-1])


class SplitRule(NamedTuple):
    """How parameters may be cut, so that pieces are updated as the whole would be."""

    granularity: ShardGranularity = ShardGranularity()
    shared_inner_names: frozenset[str] = frozenset()
    """Of state that is made of several tensors: those that are the same for all pieces."""


@memoize_probe(on_failure=None)
def probe_split_rule(factory: OptimizerFactory) -> SplitRule | None:
    """The finest way; None if parameters must stay whole."""
    with isolated_probe(factory), suppress(_NotSplittable):
        found = SplitRule()
        for group, like in _distinct_params(factory.groups):
            found = _find_finest(_SplitProbe(factory, group, like), found)
        return found
    return None


def _find_finest(probe: "_SplitProbe", current: SplitRule) -> SplitRule:
    """The finest grain that is not finer than `so_far`. Raises if there is none.

    A small probe comes first: some keep a matrix of as many rows as a parameter has elements once it is flat.
    """
    probe.require_split_in_half()
    if probe.can_split_anywhere():
        return current
    known = current.granularity
    if not known.is_elementwise and (common := probe.try_granularity(known)) is not None:
        return SplitRule(known, current.shared_inner_names | common)
    if probe.try_granularity(_COARSEST_GRANULARITY) is None:
        raise _NotSplittable
    aligns = (
        ShardGranularity(align, _COARSEST_GRANULARITY.min_numel) for align in _CANDIDATE_ALIGNS if align >= known.align
    )
    align = next(grain.align for grain in aligns if probe.try_granularity(grain) is not None)
    for grain in (
        ShardGranularity(align, least) for least in _CANDIDATE_ALIGNS if least >= max(align, known.min_numel)
    ):
        if (common := probe.try_granularity(grain)) is not None:
            return SplitRule(grain, current.shared_inner_names | common)
    raise _NotSplittable


class _NotSplittable(Exception):  # noqa: N818 (an answer)
    """A parameter that is cut is not updated as the whole would be."""


def _distinct_params(groups: Sequence[ParamGroup]) -> Iterable[tuple[ParamGroup, torch.Tensor]]:
    """A parameter of each number of dimensions, dtype, device and marks, in each kind of group: many differ in lr."""
    found: dict[str, tuple[ParamGroup, torch.Tensor]] = {}
    for group in groups:
        kind = repr({key: value for key, value in group.items() if key not in ("params", "param_names", "lr")})
        for param in group["params"]:
            found.setdefault(
                f"{kind} {param.dim()} {param.dtype} {param.device} {read_param_attrs(param)}", (group, param)
            )
    return found.values()


class _SplitResult(NamedTuple):
    values: list[torch.Tensor]
    states: list[dict[str, Any]]


class _SplitProbe:
    """One parameter of a group, whole and in flat pieces, large enough for what optimizers do to large ones only."""

    def __init__(self, factory: OptimizerFactory, group: ParamGroup, like: torch.Tensor) -> None:
        self._factory, self._group, self._like = factory, group, like

    def require_split_in_half(self) -> None:
        """Raise if a small one cannot be cut in two."""
        numel = 128 if self._like.dim() else 1
        if self._compare_split(self._make_shape(numel, 16), [numel // 2, numel - numel // 2]) is None:
            raise _NotSplittable

    def can_split_anywhere(self) -> bool:
        """Whether it may be cut anywhere. Its pieces may then also be joined with those of others."""
        if not self._like.dim():
            return True
        return self._compare_split(self._make_shape(_LARGE_PROBE_NUMEL, 768), _SPLIT_SIZES) == frozenset()

    def try_granularity(self, granularity: ShardGranularity) -> frozenset[str] | None:
        """The common insides if it may be cut so; None if not. The shortest pieces and longer ones are tried.

        To the bit: pieces are so long that no unit of the processor treats their last elements in a way of its own.
        """
        pieces = [
            granularity.min_shard_numel,
            granularity.min_shard_numel + granularity.align,
            granularity.min_shard_numel,
        ]
        blocks = (sum(pieces) + 2 * _COARSEST_GRANULARITY.min_numel) // granularity.align
        common: frozenset[str] = frozenset()
        for numel in (
            granularity.align * (blocks | 1),
            align_up(granularity.align * blocks, granularity.align * _ODD_FACTOR),
        ):
            found = self._compare_split(self._make_shape(numel, 16), [*pieces, numel - sum(pieces)], exact=True)
            if found is None:
                return None
            common |= found
        return common

    def _make_shape(self, numel: int, columns: int) -> tuple[int, ...]:
        dims = self._like.dim()
        return (numel // columns, columns, *[1] * (dims - 2)) if dims > 1 else (numel,) * dims

    def _compare_split(self, shape: tuple[int, ...], sizes: list[int], *, exact: bool = False) -> frozenset[str] | None:
        value = _make_sloped_values(shape, 0.1, 3.0, phase=1).to(self._like.device, probe_dtype(self._like.dtype))
        whole, cut = self._run_steps(value, [value]), self._run_steps(value, torch.split(value.view(-1), sizes))
        found, expected = torch.cat(cut.values), whole.values[0].view(-1)
        # Vector units may round the last elements of a run in another way than those in its midst.
        same = torch.equal(found, expected) if exact else torch.allclose(found, expected, rtol=1e-4, atol=1e-5)
        return _find_shared_inner_names(whole, cut) if same else None

    def _run_steps(self, full: torch.Tensor, values: Sequence[torch.Tensor]) -> _SplitResult:
        probes = [make_probe_with_attrs(value.clone(), self._like) for value in values]
        options = {k: v for k, v in self._group.items() if k not in ("params", "param_names")}
        names = {"param_names": [str(i) for i in range(len(probes))]} if "param_names" in self._group else {}
        group = {**with_visible_lr(options), **names, "params": probes}
        recipe = replace(self._factory, groups=[group], defaults=with_visible_lr(self._factory.defaults))
        inner = set_train_mode(recipe.build(set(map(id, probes))))
        for step, scale in enumerate(GRAD_SCALES):
            slope = (2.0, 0.2) if step % 2 else (0.1, 1.5)
            gradient = scale * _make_sloped_values(full.shape, *slope, phase=step).to(full)
            parts = torch.split(gradient.view(-1), [probe.numel() for probe in probes])
            for probe, part in zip(probes, parts, strict=True):
                probe.grad = part.view(probe.shape).clone()
            step_once(inner)
        return _SplitResult(
            [probe.detach() for probe in probes], [dict(inner.optimizer.state[probe]) for probe in probes]
        )


def _find_shared_inner_names(full: _SplitResult, split: _SplitResult) -> frozenset[str] | None:
    """None unless all state has an element for each of the parameter's, or is the same for whole and pieces.

    Of state that is made of several tensors: those that all pieces have in common.
    """
    (of_whole,), common = full.states, set[str]()
    if any(list(state) != list(of_whole) for state in split.states):
        return None
    for key, value in of_whole.items():
        parts = [state[key] for state in split.states]
        is_cut = _has_shape_of(value, full.values[0]) and all(map(_has_shape_of, parts, split.values))
        if not is_cut and not all(_values_equal(part, value) for part in parts):
            return None
        if is_cut and any(map(is_wrapper_subclass, [value, *parts])):
            found = _find_shared_inner_of_value(value, parts)
            if found is None:
                return None
            common |= found
    return frozenset(common)


def _find_shared_inner_of_value(value: torch.Tensor, shards: list[torch.Tensor]) -> frozenset[str] | None:
    """None unless the whole is what is joined of the parts."""
    if any(type(part) is not type(value) for part in shards):
        return None
    common = frozenset(
        n for n, it in inner_tensors(value).items() if all(_values_equal(inner_tensors(part)[n], it) for part in shards)
    )
    again = inner_tensors(concat_subclass_shards(shards, value.shape, common))
    return common if all(_values_equal(again[name], it) for name, it in inner_tensors(value).items()) else None


def _has_shape_of(value: Any, param: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == param.shape


def _values_equal(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left.shape == right.shape and bool(torch.equal(left, right))
    return bool(left == right)


def _make_sloped_values(shape: tuple[int, ...], start: float, stop: float, phase: int) -> torch.Tensor:
    """Values that are not of one size: a piece must not be like the whole. To be copied, and not to be changed."""
    return _make_flat_sloped_values(math.prod(shape), start, stop, phase).reshape(shape)


@lru_cache(maxsize=16)
def _make_flat_sloped_values(numel: int, start: float, stop: float, phase: int) -> torch.Tensor:
    """They are kept for all shapes of a size: to make them took half of what it takes to make an optimizer."""
    with torch.inference_mode(False):  # its tensors could not be used outside
        return make_probe_values((numel,), phase) * torch.linspace(
            start, stop, numel, dtype=torch.float32, device="cpu"
        )


# ---------------------------------------------------------------------------------------------------------------------
# State as an optimizer makes it when it first steps a parameter, made before that.
#
# torch's checkpoint helpers load into the state of a new optimizer, so its dict needs a place for everything. The
# optimizer itself stays as it is.


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


# ---------------------------------------------------------------------------------------------------------------------
# What a step costs: counted on tensors that have a shape and no memory, or measured.


FLOPS_PER_ELEMENT = 1000
"""Operations that an element is worth, for its way through memory: some hundred on CPUs, some thousand on GPUs."""
_WARMUP_STEPS, _MEASURED_STEPS = 3, 5
_FLOP_COUNT_STEPS = 2
"""Some optimizers do in the second step what they do not in the first."""


class FlopCost:
    """The operations of a step on a parameter, by its shape."""

    def __init__(self, factory: OptimizerFactory) -> None:
        # Without its parameters, which do not matter here, and which may be thousands.
        self._factory = replace(factory, groups=[{**group, "params": []} for group in factory.groups[:1]])
        self._cost_by_shape: dict[tuple[int, ...], int] = {}

    def __call__(self, spec: ParamSpec) -> int:
        if spec.shape not in self._cost_by_shape:
            self._cost_by_shape[spec.shape] = FLOPS_PER_ELEMENT * spec.numel + _count_flops(
                self._factory, spec.shape, spec.dtype
            )
        return self._cost_by_shape[spec.shape]


def numel_cost(spec: ParamSpec) -> int:
    """For optimizers that treat every element by itself."""
    return FLOPS_PER_ELEMENT * spec.numel


CostKey = tuple[tuple[int, ...], torch.dtype]


def cost_key(spec: ParamSpec) -> CostKey:
    """Parameters of which it is equal cost the same."""
    return spec.shape, spec.dtype


@dataclass(frozen=True)
class MeasuredCost:
    """The seconds of a step on a parameter, by its shape and dtype."""

    seconds: Mapping[CostKey, float]

    def __call__(self, spec: ParamSpec) -> float:
        if cost_key(spec) not in self.seconds:
            known = ", ".join(str(shape) for shape, _ in self.seconds)
            raise ConfigError(
                f"no step was measured on a parameter like {spec.label}, of shape {spec.shape} and {spec.dtype}, but "
                f"on those of {known}: measure with the selector of the rule"
            )
        return self.seconds[cost_key(spec)]


def measure_step_seconds(factory: OptimizerFactory, spec: ParamSpec) -> float:
    """Of a step on a parameter like this one, on its device: the median of a few, after others."""
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
    """A cost in a unit of its own, such as seconds, in operations, so that it can stand beside others.

    It says how the work on `specs` is divided among them. How much that is in all is `counted`, by group.
    """
    trained = [spec for spec in specs if spec.trainable]
    total = sum(map(validate_cost(cost), trained))
    factor = sum(flop_costs[spec.group](spec) for spec in trained) / total if total else 1.0
    return lambda spec: factor * cost(spec)


@memoize_probe(on_failure=0)
def _count_flops(factory: OptimizerFactory, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Those of products of matrices; none if the optimizer cannot be asked."""
    from torch.utils.flop_counter import FlopCounterMode  # takes a second

    with isolated_probe(factory):
        param = torch.nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
        inner = build_for_probes(factory, factory.groups[0], [param])
        with FlopCounterMode(display=False) as counter:
            for _ in range(_FLOP_COUNT_STEPS):
                param.grad = torch.empty_like(param)
                step_once(inner)
        return int(counter.get_total_flops()) // _FLOP_COUNT_STEPS
