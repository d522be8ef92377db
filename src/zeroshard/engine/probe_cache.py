"""Memoise what probes find out about an optimizer class, for the life of the process.

A probe steps the user's class on small tensors. Its answer depends on the class, its options, the kinds of parameters
and torch's global state, so these form the key. What cannot be compared by value is probed every time: a factory that
is not a class, and options or class attributes that are arbitrary objects.

Limits: of the code that a class runs, the key covers its own methods and the plain global values that they read
directly, but not functions in other modules. Call `clear()` after changing those.

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
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from ..layout.spec import read_param_attrs
from .inner import OptimizerFactory, ParamGroup

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
