"""Hooks of a sharded optimizer on the model.

- `ParamPrefetch`: with `overlap_param_gather`, a module's forward pass waits for the all-gather of its parameters.
  While it is in flight, `BlockingParameters` replaces the module's dict of parameters: `parameters()`, `state_dict()`,
  loading, copying, saving and moving the model go through it and wait, too. So does the step of any optimizer.
- `BufferBroadcast`: rank 0's buffers are broadcast after each step, and before a training forward pass that follows
  another one without a step in between, unless that one was inside `no_sync()`.
- `ZeroGradWrapper`: `model.zero_grad()` also clears the gradient shards that the optimizer keeps.
- `DoubleReduceGuard`: a forward pass through `DistributedDataParallel`, which would reduce gradients again, raises.

Copies of the model (`deepcopy` or pickle) have none of these hooks. No hook keeps the optimizer alive.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from threading import RLock
from typing import Any
from weakref import WeakMethod, WeakValueDictionary

import torch
from torch.nn import Module
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .._torch_compat import active_ddp, forward_pre_hooks, is_compiled_module, is_traceable_wrapper_subclass
from .._types import Rank
from ..comm.collectives import Comm
from ..errors import ConfigError
from ..profiling import Phase, StepProfiler
from .autograd_hooks import GradHooks
from .flat_shards import FlatShardStore
from .grad_stage import drop_placeholder
from .param_sync import ParamAllGather

# ---------------------------------------------------------------------------------------------------------------------
# Broadcast of buffers and of parameters that no optimizer manages.


class ModelBuffers:
    """The buffers of a model, and their broadcast from one rank."""

    def __init__(self, comm: Comm, model: torch.nn.Module) -> None:
        self._comm = comm
        # By name, since modules may replace their buffers. A None buffer may later become a rank-local cache: skip it.
        named = [(module, name, buffer) for module in model.modules() for name, buffer in module._buffers.items()]
        self._locations = [(module, name) for module, name, buffer in named if buffer is not None]

    @property
    def needs_broadcast(self) -> bool:
        """Whether there are buffers, and other ranks to receive them."""
        return bool(self._locations) and self._comm.group.size > 1

    def broadcast(self, source: Rank) -> None:
        """Broadcast the buffers of `source`. Call on all ranks; their buffers must have the same shapes."""
        broadcast_coalesced(self._comm, self._iter_buffers(), source)

    def _iter_buffers(self) -> Iterator[torch.Tensor]:
        for module, name in self._locations:
            buffer = module._buffers.get(name)
            if buffer is not None and buffer.numel():
                yield buffer


def describe_for_broadcast(comm: Comm, tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Return what must be equal on all ranks for `broadcast_coalesced`; raise if a tensor cannot be broadcast."""
    if comm.group.size > 1:
        for name, tensor in tensors.items():
            _validate_for_broadcast(comm, name, tensor)
    # Each device has messages of its own. Device indices may differ between ranks, so describe devices by position.
    devices = list(dict.fromkeys(tensor.device for tensor in tensors.values()))
    labels = {
        device: device.type + (f" ({position} of {len(devices)} devices)" if position > 1 else "")
        for position, device in enumerate(devices, 1)
    }
    return [
        f"{name}: {tensor.dtype} {tuple(tensor.shape)} on {labels[tensor.device]}" for name, tensor in tensors.items()
    ]


def _validate_for_broadcast(comm: Comm, name: str, tensor: torch.Tensor) -> None:
    """Raise if `tensor` cannot be broadcast.

    Hazard: only receiving ranks write to the tensor, so without this check an error would be raised on them alone.
    """
    if tensor.is_nested or tensor.layout != torch.strided or tensor.is_quantized:
        form = "a nested tensor" if tensor.is_nested else "quantized" if tensor.is_quantized else tensor.layout
        raise ConfigError(
            f"{name} cannot be broadcast from rank 0: it is {form}. Make it dense with to_dense() or dequantize(), "
            "or store it as a plain attribute instead of a buffer."
        )
    if is_traceable_wrapper_subclass(tensor):
        raise ConfigError(
            f"{name} cannot be broadcast from rank 0: it is a {type(tensor.data).__name__}. Make it a plain tensor, "
            "or store it as a plain attribute instead of a buffer."
        )
    if tensor.numel() and any(
        size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ):
        raise ConfigError(
            f"{name} has elements that share memory (shape {tuple(tensor.shape)}, strides {tensor.stride()}), as "
            "after expand(), so rank 0's values cannot be written to it. Copy it with clone() or contiguous()."
        )
    if tensor.numel() and not comm.group.supports_device(tensor.device):
        raise ConfigError(
            f"the process group's backend does not support {tensor.device}, where {name} is. Move it, or initialize "
            "the process group with a backend for that device."
        )


@torch.no_grad()
def broadcast_coalesced(comm: Comm, tensors: Iterable[torch.Tensor], source: Rank) -> None:
    """Broadcast `tensors` from `source` in one message per dtype and device. Call on all ranks."""
    batches: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors if comm.group.size > 1 else ():
        batches[tensor.dtype, tensor.device].append(tensor)
    for batch in batches.values():
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in batch])
        comm.broadcast(flat, source).wait()
        if comm.group.rank != source:
            received = torch.split(flat, [tensor.numel() for tensor in batch])
            for tensor, values in zip(batch, received, strict=True):
                # `.data`, as in DDP: a pending backward pass may have saved the tensor, so keep its version counter.
                tensor.data.copy_(values.view(tensor.shape))


# ---------------------------------------------------------------------------------------------------------------------
# Hooks.


class ForwardPreHook:
    """A forward pre-hook that calls `method(module, is_compiled)`, as long as the object of the method is alive.

    Under torch.compile it breaks the graph for the call.
    """

    def __init__(self, method: Callable[[Module, bool], None]) -> None:
        self._method = WeakMethod(method)
        self._run_uncompiled = torch.compiler.disable(self._run)  # type: ignore[no-untyped-call]

    def register(self, module: Module) -> None:
        """Register the hook on `module`, and remove hooks of optimizers that no longer exist."""
        registered = forward_pre_hooks(module)
        for key, hook in list(registered.items()):
            if isinstance(hook, ForwardPreHook) and hook._method() is None:
                del registered[key]
        module.register_forward_pre_hook(self)

    def __call__(self, module: Module, _: Any) -> None:
        self._run_uncompiled(module, torch.compiler.is_compiling())

    def __reduce__(self) -> Any:
        return getattr, ({}, "get")  # a no-op in copies of the model: `{}.get(module, args)` returns `args`

    def _run(self, module: Module, is_compiled: bool) -> None:
        method = self._method()
        if method is not None:
            method(module, is_compiled)


class EagerForwardPreHook(ForwardPreHook):
    """A `ForwardPreHook` for submodules; skipped in compiled code, where the root's hook has already waited."""

    def __call__(self, module: Module, _: Any) -> None:
        if not torch.compiler.is_compiling():
            self._run(module, False)


class DDPForwardPreHook(ForwardPreHook):
    """A `ForwardPreHook` that runs only inside a forward pass of DDP, so other compiled code has no graph break."""

    def __call__(self, module: Module, _: Any) -> None:
        if active_ddp() is not None:
            self._run_uncompiled(module, torch.compiler.is_compiling())


class ZeroGradWrapper:
    """Replaces `model.zero_grad`: drops gradient placeholders, calls the original, then `after_zero_grad`."""

    def __init__(self, model: Module, after_zero_grad: Callable[[bool], None]) -> None:
        self._model, self._after_zero_grad = model, WeakMethod(after_zero_grad)
        self._wrapped = _remove_dead_wrappers(model.zero_grad)

    def __call__(self, set_to_none: bool = True) -> None:
        for param in self._model.parameters():
            drop_placeholder(param)
        self._wrapped(set_to_none)
        after_zero_grad = self._after_zero_grad()
        if after_zero_grad is not None:
            after_zero_grad(set_to_none)

    def __reduce__(self) -> Any:
        return functools.partial, (type(self._model).zero_grad, self._model)


def _remove_dead_wrappers(zero_grad: Callable[..., None]) -> Callable[..., None]:
    """Unwrap `zero_grad` from wrappers of optimizers that no longer exist; those of live optimizers stay."""
    while isinstance(zero_grad, ZeroGradWrapper) and zero_grad._after_zero_grad() is None:
        zero_grad = zero_grad._wrapped
    if isinstance(zero_grad, ZeroGradWrapper):
        zero_grad._wrapped = _remove_dead_wrappers(zero_grad._wrapped)
    return zero_grad


class BufferBroadcast:
    """Broadcasts rank 0's buffers on DDP's schedule, and when the optimizer calls `broadcast`.

    DDP broadcasts before a forward pass, inside `no_sync()` or not, if the previous pass was outside. All passes that
    accumulate gradients therefore use the buffers of the first one. Here a step broadcasts already, for evaluation, so
    a forward pass broadcasts only if it follows another one without a step in between.

    Hazard: each rank decides on its own whether to broadcast. Passes that a single rank runs must not change the
    decision: passes under `no_grad()` never count, and passes inside `no_sync()` directly after a step neither
    broadcast nor make the next pass broadcast.
    """

    def __init__(
        self,
        comm: Comm,
        profiler: StepProfiler,
        model: Module,
        should_ignore_forward: Callable[[], bool],
        is_accumulating: Callable[[], bool],
    ) -> None:
        """Register the hook on `model`.

        Args:
            comm: All data-parallel ranks.
            profiler: Times the broadcasts.
            model: The model whose buffers are broadcast.
            should_ignore_forward: Whether the next forward pass does not count. A method of the optimizer.
            is_accumulating: Whether the next forward pass is inside `no_sync()`. A method of the optimizer.
        """
        # Hazard: the optimizer owns this object, so strong references would form a cycle. Ranks would then free the
        # optimizer, and stop its hooks, at different times (whenever garbage collection runs), while others still wait
        # for their messages.
        self._should_ignore_forward, self._is_accumulating = (
            WeakMethod(should_ignore_forward),
            WeakMethod(is_accumulating),
        )
        self._model_buffers, self._profiler = ModelBuffers(comm, model), profiler
        self._failure_detector = comm.group.failure_detector
        self._is_due = False
        """Whether the next forward pass broadcasts."""
        if self._model_buffers.needs_broadcast:
            ForwardPreHook(self._before_forward).register(model)

    def broadcast(self, source: Rank, phase: str = "broadcasting buffers") -> None:
        """Broadcast the buffers of `source`. Call on all ranks."""
        if self._model_buffers.needs_broadcast:
            with self._failure_detector.activity(phase), self._profiler.phase(Phase.BROADCAST_BUFFERS):
                self._model_buffers.broadcast(source)
        self._is_due = False

    def _before_forward(self, _: Module, __: bool) -> None:
        should_ignore, is_accumulating = self._should_ignore_forward(), self._is_accumulating()
        if should_ignore is None or is_accumulating is None or should_ignore():
            return
        if self._is_due:
            self.broadcast(Rank(0), "broadcasting buffers (to evaluate on one rank, use torch.no_grad())")
        self._is_due = not is_accumulating()


class DoubleReduceGuard:
    """Raises on training forward passes through DDP, which would reduce the same gradients again."""

    def __init__(self, model: Module, store: FlatShardStore, hooks: GradHooks) -> None:
        self._store, self._hooks = store, hooks
        DDPForwardPreHook(self._before_forward).register(model)

    def _before_forward(self, _: Module, __: bool) -> None:
        ddp = active_ddp()
        if ddp is None or self._hooks.is_superseded or not torch.is_grad_enabled():
            return
        trainable = ((name, param) for name, param in ddp.module.named_parameters() if param.requires_grad)
        managed = [name for name, param in trainable if id(param) in self._store.bucket_by_param_id]
        twice = [name for name in managed if name not in ddp.parameters_to_ignore]
        if twice:
            raise ConfigError(
                f"DistributedDataParallel and shard() would both average the gradients of {len(twice)} parameters, "
                f"for example {twice[0]}. Call the model itself instead of the DDP module. To keep DDP, use "
                "ZeroRedundancyOptimizer(model.parameters(), ...)."
            )


class BlockingParameters(MutableMapping[str, Any], dict[str, Any]):  # type: ignore[misc, metaclass]
    """A module's dict of parameters while their all-gather is in flight: every access waits for it first.

    torch requires a dict here. `MutableMapping` comes first, so that all methods of `dict` go through those below.
    """

    def __init__(self, parameters: dict[str, Any], wait_for_params: Callable[[], None]) -> None:
        # Compiled code reads the dict itself, after it has waited.
        dict.__init__(self, parameters)  # type: ignore[call-overload]
        self._wrapped, self._wait_for_params = parameters, wait_for_params

    def __getitem__(self, name: str) -> Any:
        self._wait_for_params()
        return self._wrapped[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._wait_for_params()
        self._wrapped[name] = value

    def __delitem__(self, name: str) -> None:
        self._wait_for_params()
        del self._wrapped[name]

    def __iter__(self) -> Iterator[str]:
        self._wait_for_params()
        return iter(self._wrapped)

    def __len__(self) -> int:
        self._wait_for_params()
        return len(self._wrapped)

    def copy(self) -> dict[str, Any]:
        self._wait_for_params()
        return dict(self._wrapped)

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.copy()

    def __reduce__(self) -> Any:
        return dict, (self.copy(),)


class ParamPrefetch:
    """Waits for all-gathers of parameters that are in flight, at the first use of each module."""

    def __init__(
        self, model: Module, profiler: StepProfiler, store: FlatShardStore, param_sync: ParamAllGather
    ) -> None:
        self._profiler, self._store, self._param_sync, self._model = profiler, store, param_sync, model
        self._buckets_of_module: dict[Module, list[int]] = {}
        self.refresh_buckets()
        for module in self._buckets_of_module:
            if module is model:
                ForwardPreHook(self._before_model_forward).register(module)
            elif module._parameters:
                EagerForwardPreHook(self._wait_for_module).register(module)
        self._original_parameters: dict[Module, dict[str, Any]] = {}
        self._lock = RLock()
        """Guards `_original_parameters`: a forward pass and another optimizer's step may wait in different threads."""

    def refresh_buckets(self) -> None:
        """Look up which buckets each module needs."""
        bucket_by_param_id = self._store.bucket_by_param_id
        for module in self._model.modules():
            param_ids = (id(param) for param in module.parameters(recurse=False))
            self._buckets_of_module[module] = sorted(
                {bucket_by_param_id[param_id] for param_id in param_ids if param_id in bucket_by_param_id}
            )

    def arm(self) -> None:
        """Make modules wait for their parameters. Called when all-gathers were started."""
        with self._lock:
            for module, buckets in self._buckets_of_module.items():
                # A module that was not used since the last step still blocks.
                if buckets and module not in self._original_parameters:
                    self._original_parameters[module] = original = module._parameters
                    vars(module)["_parameters"] = BlockingParameters(
                        original, functools.partial(self._wait_for_module, module, False)
                    )
            _ARMED[id(self)] = self
        _register_step_hook()

    def wait(self) -> None:
        """Wait for all parameters."""
        with self._lock:
            self._param_sync.finish()
            for module in list(self._original_parameters):
                self._restore_parameters(module)

    def has_pending(self, modules: set[Module]) -> bool:
        return not modules.isdisjoint(self._original_parameters)

    def abandon(self) -> None:
        """Stop waiting for parameters, even if their all-gathers can never complete."""
        with self._lock:
            self._param_sync.abandon()
            for module in list(self._original_parameters):
                self._restore_parameters(module)

    def _before_model_forward(self, model: Module, is_compiled: bool) -> None:
        for module in model.modules() if self._original_parameters else ():
            if is_compiled or is_compiled_module(module):
                for submodule in module.modules():
                    self._wait_for_module(submodule, True)
        self._wait_for_module(model, is_compiled)

    def _wait_for_module(self, module: Module, _: bool) -> None:
        """Wait for the parameters of one module, without its submodules."""
        if module in self._original_parameters:
            with self._lock, self._profiler.phase(Phase.WAIT_MODULE_PARAMS):
                self._param_sync.wait(self._buckets_of_module[module])
                self._restore_parameters(module)

    def _restore_parameters(self, module: Module) -> None:
        original = self._original_parameters.pop(module, None)
        if original is not None:  # otherwise another thread restored it
            vars(module)["_parameters"] = original
        if not self._original_parameters:
            _ARMED.pop(id(self), None)


_ARMED: "WeakValueDictionary[int, ParamPrefetch]" = WeakValueDictionary()
"""Prefetches with all-gathers in flight, by id."""
_step_hook_handle: Any = None


def _register_step_hook() -> None:
    """Make the step of any optimizer wait for all parameters.

    Hazard: hooks must not be added or removed while torch iterates over them, so this one is never removed.
    """
    global _step_hook_handle  # noqa: PLW0603
    registered = {} if _step_hook_handle is None else _step_hook_handle.hooks_dict_ref() or {}
    if _step_hook_handle is None or _step_hook_handle.id not in registered:
        _step_hook_handle = register_optimizer_step_pre_hook(_wait_for_all_params)


def _wait_for_all_params(*_: Any) -> None:
    for reference in _ARMED.valuerefs():
        prefetch = reference()
        if prefetch is not None:
            prefetch.wait()


def abandon_prefetches(model: Module) -> None:
    """Abandon the prefetches of earlier optimizers of the model: their ranks may be gone."""
    modules = set(model.modules())
    for prefetch in filter(None, (reference() for reference in _ARMED.valuerefs())):
        if prefetch.has_pending(modules):
            prefetch.abandon()
