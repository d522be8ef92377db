"""Memoise what probes find out about an optimizer class, for the life of the process.

A probe steps the user's class on small tensors. Its answer depends on the class, its options, the kinds of parameters
and torch's global flags, so these form the key. What cannot be compared by value is probed every time: a factory that
is a plain function (it may read anything), and options that are arbitrary objects.

The cache is local to a process. Probes do not communicate, so other ranks cannot tell a hit from a miss.
"""

import functools
import inspect
import threading
import types
import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from ..layout.specs import marks_of
from .inner import ParamGroup, Recipe

Probe = TypeVar("Probe", bound=Callable[..., Any])

OUT_OF_MEMORY = (MemoryError, torch.OutOfMemoryError)
MAX_ANSWERS_PER_CLASS = 1024
_MAX_TENSOR_NUMEL = 64
_PLAIN_TYPES = (type(None), bool, int, str, bytes, torch.dtype, torch.device, torch.memory_format)

_answers: "weakref.WeakKeyDictionary[type, dict[Hashable, Any]]" = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def memoize_probe(*, on_failure: Any) -> Callable[[Probe], Probe]:
    """Make a function of a recipe, and of further hashable arguments, remember its answers.

    `on_failure` is the answer where it raises.
    """

    def decorate(probe: Probe) -> Probe:
        @functools.wraps(probe)
        def ask(recipe: Recipe, *arguments: Hashable) -> Any:
            cls, rest = _describe(recipe)
            question = (probe.__qualname__, arguments, rest)
            with _lock:
                known = _answers.get(cls, {}) if cls else {}
                if cls and (key := (_freeze_class(cls), question)) in known:
                    return known[key]
            before = _count_collectives()
            try:
                answer = probe(recipe, *arguments)
            except OUT_OF_MEMORY:  # says nothing about the class: ask again next time
                return on_failure
            except Exception:
                answer = on_failure
            # Hazard: an optimizer whose step communicates must be probed on all ranks or on none. Ranks differ in what
            # they have cached, so such answers are never kept.
            if cls and before is not None and before == _count_collectives():
                # The class as it is now: its first instance makes torch wrap its `step`.
                _store(cls, (_freeze_class(cls), question), answer)
            return answer

        return cast(Probe, ask)

    return decorate


def clear() -> None:
    """Forget all answers."""
    with _lock:
        _answers.clear()


def _store(cls: type, key: Hashable, answer: Any) -> None:
    with _lock:
        known = _answers.setdefault(cls, {})
        known[key] = answer
        if len(known) > MAX_ANSWERS_PER_CLASS:
            del known[next(iter(known))]


def _count_collectives() -> list[int] | None:
    """Sequence numbers of all process groups; None where a backend does not count."""
    if not dist.is_available() or not dist.is_initialized():
        return []
    try:
        groups: list[Any] = list(dist.distributed_c10d._world.pg_map)
        backends = [group._get_backend(device) for group in groups for device in group._device_types]
        return [backend._get_sequence_number_for_group() for backend in backends]
    except RuntimeError:
        return None


class _NotCacheableError(Exception):
    """A part of the recipe cannot be compared by value."""


def _describe(recipe: Recipe) -> tuple[type | None, Hashable]:
    """The optimizer class, which must stay collectable, and what else an answer depends on; no class if that cannot be
    compared by value."""
    factory: Any = recipe.factory
    preset: tuple[Any, ...] = ()
    if type(factory) is functools.partial:
        factory, preset = factory.func, (factory.args, factory.keywords)
    if not isinstance(factory, type):
        return None, None
    try:
        _freeze_class(factory)
        options = _freeze((preset, recipe.defaults, recipe.plain))
        return factory, (options, tuple(_freeze_group(group) for group in recipe.groups), _torch_flags())
    except _NotCacheableError:
        return None, None


def _freeze_group(group: ParamGroup) -> Hashable:
    """Options, and each kind of parameter once: thousands of parameters are of few kinds."""
    options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    kinds = dict.fromkeys((it.dim(), it.dtype, it.device, _freeze_marks(it)) for it in group["params"])
    return "param_names" in group, _freeze(options), tuple(kinds)


def _freeze_marks(param: torch.Tensor) -> Hashable:
    return _freeze(marks_of(param)) if vars(param) else ()


def _freeze(value: Any) -> Hashable:
    """A hashable value that is equal for equal input only: `1`, `1.0` and `True` differ."""
    kind = type(value)
    if kind in _PLAIN_TYPES:
        return kind, value
    if kind in (float, complex):
        return kind, repr(value)
    if kind in (tuple, list, torch.Size):
        return kind, tuple(map(_freeze, value))
    if kind is dict:
        return kind, tuple((_freeze(key), _freeze(it)) for key, it in value.items())
    if kind in (torch.Tensor, torch.nn.Parameter) and _is_small(value):
        layout = (value.dtype, value.device, tuple(value.shape), value.requires_grad)
        return kind, layout, repr(value.tolist())
    raise _NotCacheableError


def _is_small(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_meta and tensor.numel() <= _MAX_TENSOR_NUMEL


def _freeze_class(cls: type) -> Hashable:
    """Its methods and attributes, and those of its bases: they can be replaced while the class stays."""
    bases = (base for base in cls.__mro__ if base is not object)
    return tuple((weakref.ref(base), _freeze_attributes(base)) for base in bases)


def _freeze_attributes(cls: type) -> Hashable:
    frozen: list[Hashable] = []
    for name, value in vars(cls).items():
        functions = _functions(value)
        if functions is not None:
            frozen.append((name, *map(weakref.ref, functions)))
        elif cls is not Optimizer and not _is_dunder(name) and name != "_abc_impl":
            frozen.append((name, _freeze(value)))
    return tuple(frozen)


def _functions(value: Any) -> list[Any] | None:
    """What an attribute of a class runs when it is called or read."""
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    if isinstance(value, property):
        return [it for it in (value.fget, value.fset, value.fdel) if it is not None]
    return [value] if isinstance(value, (types.FunctionType, type)) or inspect.isbuiltin(value) else None


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _torch_flags() -> Hashable:
    """Global settings that change what optimizers compute, or whether they can."""
    backends: Any = torch.backends  # the stubs of some of them lack attributes
    deterministic: Any = torch.utils.deterministic
    return (
        (torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads()),
        (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()),
        (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        deterministic.fill_uninitialized_memory,
        tuple((torch.is_autocast_enabled(it), torch.get_autocast_dtype(it)) for it in ("cpu", "cuda")),
        (backends.cuda.matmul.fp32_precision, backends.mkldnn.matmul.fp32_precision, backends.mkldnn.enabled),
        (backends.cudnn.enabled, backends.cudnn.deterministic, backends.cudnn.benchmark),
        backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        (torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()),
    )
