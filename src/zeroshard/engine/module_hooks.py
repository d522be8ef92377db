"""What a sharded optimizer hangs on the model, so that the model is right whenever it is used.

- Gates: a module's forward pass waits for its parameters, which may be under way.
- Guards: while they are, a module keeps its parameters in a dict that waits for them first. `parameters()`,
  `state_dict()`, loading, copying, saving and moving the model all go through it. Another optimizer's step waits, too.
- Buffers are made equal after each step, and before a forward pass with gradients that follows another one without a
  step in between, unless that one was inside `no_sync()`.
- `model.zero_grad()` clears what the optimizer keeps of gradients, too.
- A forward pass through `DistributedDataParallel`, which would average gradients a second time, is refused.

A copy of the model, deep or saved, has none of this. Nothing here keeps the optimizer alive.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from threading import RLock
from typing import Any
from weakref import WeakMethod, WeakValueDictionary

import torch
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .._types import Rank
from ..comm.collectives import Comm
from ..errors import ConfigError
from ..profiling import Phase
from .autograd_hooks import GradHooks
from .flat_engine import FlatShardEngine
from .grad_bucket import drop_placeholder

# ---------------------------------------------------------------------------------------------------------------------
# Buffers of a model, and parameters that no optimizer holds, made equal on all ranks.


class ModelBuffers:
    """Brings one rank's buffers to all others."""

    def __init__(self, comm: Comm, model: torch.nn.Module) -> None:
        self._comm = comm
        # By name, since modules may replace their buffers. One that is none may become a cache of each rank's own.
        named = [(module, name, it) for module in model.modules() for name, it in module._buffers.items()]
        self._locations = [(module, name) for module, name, it in named if it is not None]

    @property
    def needs_broadcast(self) -> bool:
        """And another rank to bring them to."""
        return bool(self._locations) and self._comm.group.size > 1

    def broadcast(self, source: Rank) -> None:
        """On all ranks, which must have buffers of the same shapes."""
        broadcast_coalesced(self._comm, self._iter_buffers(), source)

    def _iter_buffers(self) -> Iterator[torch.Tensor]:
        for module, name in self._locations:
            buffer = module._buffers.get(name)
            if buffer is not None and buffer.numel():
                yield buffer


def describe_for_broadcast(comm: Comm, tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """What must be equal on all ranks for `make_equal`. Raises where a tensor cannot travel."""
    if comm.group.size > 1:
        for name, tensor in tensors.items():
            _validate_for_broadcast(comm, name, tensor)
    # Each device has messages of its own, whatever its number is on this rank.
    devices = list(dict.fromkeys(tensor.device for tensor in tensors.values()))
    which = {it: it.type + (f" ({n} of {len(devices)} devices)" if n > 1 else "") for n, it in enumerate(devices, 1)}
    return [f"{name}: {it.dtype} {tuple(it.shape)} on {which[it.device]}" for name, it in tensors.items()]


def _validate_for_broadcast(comm: Comm, name: str, tensor: torch.Tensor) -> None:
    """Hazard: only ranks that receive a tensor write to it, so that these alone would raise."""
    if tensor.is_nested or tensor.layout != torch.strided or tensor.is_quantized:
        kind = "a nested tensor" if tensor.is_nested else "quantized" if tensor.is_quantized else tensor.layout
        raise ConfigError(
            f"{name} cannot be broadcast from rank 0, because it is {kind}. Make it dense, for example with to_dense() "
            "or dequantize(), or keep it as a plain attribute of the module, not as a buffer."
        )
    if is_traceable_wrapper_subclass(tensor):
        raise ConfigError(
            f"{name} cannot be broadcast from rank 0, because it is a {type(tensor.data).__name__}. Make it a plain "
            "tensor, or keep it as a plain attribute of the module, not as a buffer."
        )
    if tensor.numel() and any(size > 1 and not step for size, step in zip(tensor.shape, tensor.stride(), strict=True)):
        raise ConfigError(
            f"{name} has elements that share memory (shape {tuple(tensor.shape)}, strides {tensor.stride()}), as "
            "expand() makes them, so it cannot receive the values of rank 0. Give it memory of its own with clone() or "
            "contiguous()."
        )
    if tensor.numel() and not comm.group.supports_device(tensor.device):
        raise ConfigError(f"the backend of the process group cannot carry {name} on {tensor.device}")


@torch.no_grad()
def broadcast_coalesced(comm: Comm, tensors: Iterable[torch.Tensor], source: Rank) -> None:
    """On all ranks: tensors become those of `source`; one message for each dtype and device."""
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors if comm.group.size > 1 else ():
        kinds[tensor.dtype, tensor.device].append(tensor)
    for alike in kinds.values():
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in alike])
        comm.broadcast(flat, source).wait()
        if comm.group.rank != source:
            parts = torch.split(flat, [tensor.numel() for tensor in alike])
            for tensor, part in zip(alike, parts, strict=True):
                # As in DDP autograd does not count it: a pass whose backward is yet to come has used the tensor.
                tensor.data.copy_(part.view(tensor.shape))


# ---------------------------------------------------------------------------------------------------------------------
# What a sharded optimizer hangs on the model, so that the model is right whenever it is used.
#
# - Gates: a module's forward pass waits for its parameters, which may be under way.
# - Guards: while they are, a module keeps its parameters in a dict that waits for them first. `parameters()`,
#   `state_dict()`, loading, copying, saving and moving the model all go through it. Another optimizer's step waits,
#   too.
# - Buffers are made equal after each step, and before a forward pass with gradients that follows another one without a
#   step in between, unless that one was inside `no_sync()`.
# - `model.zero_grad()` clears what the optimizer keeps of gradients, too.
# - A forward pass through `DistributedDataParallel`, which would average gradients a second time, is refused.
#
# A copy of the model, deep or saved, has none of this. Nothing here keeps the optimizer alive.


class ForwardPreHook:
    """A forward pre-hook that calls a method with the module, and says whether torch.compile has compiled the call.

    What is compiled leaves its graph for that, and goes on.
    """

    def __init__(self, method: Callable[[Module, bool], None]) -> None:
        self._method = WeakMethod(method)
        self._run_uncompiled = torch.compiler.disable(self._run)  # type: ignore[no-untyped-call]

    def register(self, module: Module) -> None:
        """In the place of those whose optimizers are gone."""
        for key, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, ForwardPreHook) and hook._method() is None:
                del module._forward_pre_hooks[key]
        module.register_forward_pre_hook(self)

    def __call__(self, module: Module, _: Any) -> None:
        self._run_uncompiled(module, torch.compiler.is_compiling())

    def __reduce__(self) -> Any:
        return getattr, ({}, "get")  # in a copy of the model: `{}.get(module, args)` gives the arguments back

    def _run(self, module: Module, is_compiled: bool) -> None:
        method = self._method()
        if method is not None:
            method(module, is_compiled)


class EagerForwardPreHook(ForwardPreHook):
    """The same for a module inside another one, which has seen to it that what is compiled needs no such call."""

    def __call__(self, module: Module, _: Any) -> None:
        if not torch.compiler.is_compiling():
            self._run(module, False)


class DDPForwardPreHook(ForwardPreHook):
    """The same, but only inside a forward pass of DDP. Anything else that is compiled stays whole."""

    def __call__(self, module: Module, _: Any) -> None:
        if _get_active_ddp() is not None:
            self._run_uncompiled(module, torch.compiler.is_compiling())


def _get_active_ddp() -> DistributedDataParallel | None:
    return getattr(DistributedDataParallel, "_active_ddp_module", None)


class ZeroGradWrapper:
    """`model.zero_grad`, and `also` after it. Placeholders of gradients that are sharded are not there for it."""

    def __init__(self, model: Module, after_zero_grad: Callable[[bool], None]) -> None:
        self._model, self._after_zero_grad = model, WeakMethod(after_zero_grad)
        self._wrapped = _remove_dead_wrappers(model.zero_grad)

    def __call__(self, set_to_none: bool = True) -> None:
        for param in self._model.parameters():
            drop_placeholder(param)
        self._wrapped(set_to_none)
        also = self._after_zero_grad()
        if also is not None:
            also(set_to_none)

    def __reduce__(self) -> Any:
        return functools.partial, (type(self._model).zero_grad, self._model)


def _remove_dead_wrappers(zero_grad: Callable[..., None]) -> Callable[..., None]:
    """`call`, which may be that of another optimizer for parts of the model, less those of optimizers that are gone."""
    while isinstance(zero_grad, ZeroGradWrapper) and zero_grad._after_zero_grad() is None:
        zero_grad = zero_grad._wrapped
    if isinstance(zero_grad, ZeroGradWrapper):
        zero_grad._wrapped = _remove_dead_wrappers(zero_grad._wrapped)
    return zero_grad


class BufferBroadcast:
    """Broadcast rank 0's buffers as often as DDP does, and when the optimizer says so.

    DDP broadcasts before a forward pass, inside `no_sync()` or not, if the pass before it was outside. So passes that
    accumulate gradients use what the first of them has got. Here a step broadcasts already, for evaluation, which
    leaves passes that follow another one without a step.

    Hazard: each rank decides alone whether to broadcast. Passes that one rank makes alone must not change that, so
    those without gradients never count, and those inside `no_sync()` after a step neither send nor ask others to.
    """

    def __init__(
        self, comm: Comm, model: Module, should_ignore_forward: Callable[[], bool], is_accumulating: Callable[[], bool]
    ) -> None:
        """`is_off`: the pass that is next does not count. `accumulates`: it is inside `no_sync()`.

        Both are methods of the optimizer, which owns this object.
        """
        # Hazard: strong references would be a cycle. Ranks would then free the optimizer, and silence its hooks, at
        # different times, whenever their garbage collectors run, while others still wait for their messages.
        self._should_ignore_forward, self._is_accumulating = (
            WeakMethod(should_ignore_forward),
            WeakMethod(is_accumulating),
        )
        self._model_buffers, self._profiler = ModelBuffers(comm, model), comm.profiler
        self._failure_detector = comm.group.failure_detector
        self._is_due = False
        """The next forward pass broadcasts."""
        if self._model_buffers.needs_broadcast:
            ForwardPreHook(self._before_forward).register(model)

    def broadcast(self, source: Rank, phase: str = "bringing buffers to all") -> None:
        """On all ranks."""
        if self._model_buffers.needs_broadcast:
            with self._failure_detector.activity(phase), self._profiler.phase(Phase.BROADCAST_BUFFERS):
                self._model_buffers.broadcast(source)
        self._is_due = False

    def _before_forward(self, _: Module, __: bool) -> None:
        is_off, accumulates = self._should_ignore_forward(), self._is_accumulating()
        if is_off is None or accumulates is None or is_off():
            return
        if self._is_due:
            self.broadcast(Rank(0), "bringing buffers to all; who runs the model alone does so under torch.no_grad()")
        self._is_due = not accumulates()


class DoubleReduceGuard:
    """Refuses forward passes through DDP, which knows neither that gradients leave nor what they have become."""

    def __init__(self, model: Module, engine: FlatShardEngine, hooks: GradHooks) -> None:
        self._engine, self._hooks = engine, hooks
        DDPForwardPreHook(self._before_forward).register(model)

    def _before_forward(self, _: Module, __: bool) -> None:
        ddp = _get_active_ddp()
        if ddp is None or self._hooks.is_superseded or not torch.is_grad_enabled():
            return
        averaged = ((name, param) for name, param in ddp.module.named_parameters() if param.requires_grad)
        ours = [name for name, param in averaged if id(param) in self._engine.bucket_by_param_id]
        twice = [name for name in ours if name not in ddp.parameters_to_ignore]
        if twice:
            raise ConfigError(
                f"DistributedDataParallel and shard() would both average the gradients of {len(twice)} parameters, "
                f"{twice[0]} among them. Call the model itself, not what wraps it. To keep DistributedDataParallel, "
                "use ZeroRedundancyOptimizer(..., config=ZeroConfig(partition=FlatShards())) and its ddp_hook()."
            )


class BlockingParameters(dict[str, Any]):
    """What stands in for a module's dict of parameters while some are under way: whoever touches it waits first."""

    def __init__(self, parameters: dict[str, Any], wait_for_params: Callable[[], None]) -> None:
        super().__init__(parameters)
        self._wrapped, self._wait_for_params = parameters, wait_for_params

    def __reduce__(self) -> Any:
        self._wait_for_params()
        return dict, (self._wrapped,)


def _make_blocking_method(name: str) -> Callable[..., Any]:
    def method(self: BlockingParameters, *args: Any, **kwargs: Any) -> Any:
        self._wait_for_params()
        return getattr(self._wrapped, name)(*args, **kwargs)

    return method


for _name in (
    *(
        "__getitem__",
        "__setitem__",
        "__delitem__",
        "__iter__",
        "__len__",
        "__contains__",
        "__or__",
        "__ror__",
        "__eq__",
    ),
    *("get", "keys", "values", "items", "copy", "pop", "popitem", "setdefault", "update", "clear"),
):
    setattr(BlockingParameters, _name, _make_blocking_method(_name))


class ParamPrefetch:
    """Waits for parameters that are under way where they are first needed."""

    def __init__(self, model: Module, engine: FlatShardEngine) -> None:
        self._engine, self._model = engine, model
        self._buckets_of_module: dict[Module, list[int]] = {}
        self.refresh_buckets()
        for module in self._buckets_of_module:
            if module is model:
                ForwardPreHook(self._before_model_forward).register(module)
            elif module._parameters:
                EagerForwardPreHook(self._wait_for_module).register(module)
        self._original_parameters: dict[Module, dict[str, Any]] = {}
        self._lock = RLock()
        """Whoever needs a parameter first opens: a forward pass, or another optimizer's step in another thread."""

    def refresh_buckets(self) -> None:
        """Learn which buckets each module needs."""
        known = self._engine.bucket_by_param_id
        for module in self._model.modules():
            own = (id(param) for param in module.parameters(recurse=False))
            self._buckets_of_module[module] = sorted({known[key] for key in own if key in known})

    def arm(self) -> None:
        """Parameters are under way."""
        with self._lock:
            for module, buckets in self._buckets_of_module.items():
                if (
                    buckets and module not in self._original_parameters
                ):  # nobody may have looked at it since the last step
                    self._original_parameters[module] = plain = module._parameters
                    vars(module)["_parameters"] = BlockingParameters(
                        plain, functools.partial(self._wait_for_module, module, False)
                    )
            _ARMED[id(self)] = self
        _register_step_hook()

    def wait(self) -> None:
        """All parameters have arrived."""
        with self._lock:
            self._engine.param_sync.finish()
            for module in list(self._original_parameters):
                self._restore_parameters(module)

    def has_pending(self, modules: set[Module]) -> bool:
        return not modules.isdisjoint(self._original_parameters)

    def abandon(self) -> None:
        """As `wait`, also where it is in vain."""
        with self._lock:
            self._engine.param_sync.abandon()
            for module in list(self._original_parameters):
                self._restore_parameters(module)

    def _before_model_forward(self, model: Module, is_compiled: bool) -> None:
        for module in model.modules() if self._original_parameters else ():
            if is_compiled or _is_compiled_module(module):
                for part in module.modules():
                    self._wait_for_module(part, True)
        self._wait_for_module(model, is_compiled)

    def _wait_for_module(self, module: Module, _: bool) -> None:
        """The parameters of one module have arrived."""
        if module in self._original_parameters:
            with self._lock, self._engine.comm.profiler.phase(Phase.WAIT_MODULE_PARAMS):
                self._engine.param_sync.wait(self._buckets_of_module[module])
                self._restore_parameters(module)

    def _restore_parameters(self, module: Module) -> None:
        plain = self._original_parameters.pop(module, None)
        if plain is not None:  # another thread may have been here
            vars(module)["_parameters"] = plain
        if not self._original_parameters:
            _ARMED.pop(id(self), None)


_ARMED: "WeakValueDictionary[int, ParamPrefetch]" = WeakValueDictionary()
"""Those with parameters under way."""
_step_hook_handle: Any = None


def _register_step_hook() -> None:
    """Any optimizer's step waits for all parameters.

    Hazard: hooks must not come and go while torch calls one after the other, so this one stays.
    """
    global _step_hook_handle  # noqa: PLW0603
    known = {} if _step_hook_handle is None else _step_hook_handle.hooks_dict_ref() or {}
    if _step_hook_handle is None or _step_hook_handle.id not in known:
        _step_hook_handle = register_optimizer_step_pre_hook(_wait_for_all_params)


def _wait_for_all_params(*_: Any) -> None:
    for reference in _ARMED.valuerefs():
        gates = reference()
        if gates is not None:
            gates.wait()


def abandon_prefetches(model: Module) -> None:
    """What former optimizers of the model still wait for has arrived, or never will: their ranks may be gone."""
    modules = set(model.modules())
    for gates in filter(None, (reference() for reference in _ARMED.valuerefs())):
        if gates.has_pending(modules):
            gates.abandon()


def _is_compiled_module(module: Module) -> bool:
    # Hazard: looking for an attribute that a module lacks would look into its guarded parameters, and wait.
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules
