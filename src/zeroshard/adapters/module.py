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
from collections.abc import Callable
from threading import RLock
from typing import Any
from weakref import WeakMethod, WeakValueDictionary

import torch
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..comm.collectives import Comm
from ..errors import ConfigError
from ..labels import Label
from ..runtime.buffers import BufferSync
from ..runtime.flat import FlatEngine
from ..runtime.sharded_grad import drop_placeholder
from ..units import Rank
from .autograd import GradHooks


class Before:
    """A forward pre-hook that calls a method with the module, and says whether torch.compile has compiled the call.

    What is compiled leaves its graph for that, and goes on.
    """

    def __init__(self, method: Callable[[Module, bool], None]) -> None:
        self._method = WeakMethod(method)
        self._run_outside = torch.compiler.disable(self._run)  # type: ignore[no-untyped-call]

    def hang_on(self, module: Module) -> None:
        """In the place of those whose optimizers are gone."""
        for key, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, Before) and hook._method() is None:
                del module._forward_pre_hooks[key]
        module.register_forward_pre_hook(self)

    def __call__(self, module: Module, _: Any) -> None:
        self._run_outside(module, torch.compiler.is_compiling())

    def __reduce__(self) -> Any:
        return getattr, ({}, "get")  # in a copy of the model: `{}.get(module, args)` gives the arguments back

    def _run(self, module: Module, compiled: bool) -> None:
        method = self._method()
        if method is not None:
            method(module, compiled)


class BeforeInner(Before):
    """The same for a module inside another one, which has seen to it that what is compiled needs no such call."""

    def __call__(self, module: Module, _: Any) -> None:
        if not torch.compiler.is_compiling():
            self._run(module, False)


class BeforeUnderDdp(Before):
    """The same, but only inside a forward pass of DDP. Anything else that is compiled stays whole."""

    def __call__(self, module: Module, _: Any) -> None:
        if _active_ddp() is not None:
            self._run_outside(module, torch.compiler.is_compiling())


def _active_ddp() -> DistributedDataParallel | None:
    return getattr(DistributedDataParallel, "_active_ddp_module", None)


class ZeroGrad:
    """`model.zero_grad`, and `also` after it. Placeholders of gradients that are sharded are not there for it."""

    def __init__(self, model: Module, also: Callable[[bool], None]) -> None:
        self._model, self._also = model, WeakMethod(also)
        self._before = _without_the_dead(model.zero_grad)

    def __call__(self, set_to_none: bool = True) -> None:
        for param in self._model.parameters():
            drop_placeholder(param)
        self._before(set_to_none)
        also = self._also()
        if also is not None:
            also(set_to_none)

    def __reduce__(self) -> Any:
        return functools.partial, (type(self._model).zero_grad, self._model)


def _without_the_dead(call: Callable[..., None]) -> Callable[..., None]:
    """`call`, which may be that of another optimizer for parts of the model, less those of optimizers that are gone."""
    while isinstance(call, ZeroGrad) and call._also() is None:
        call = call._before
    if isinstance(call, ZeroGrad):
        call._before = _without_the_dead(call._before)
    return call


class EqualBuffers:
    """Broadcast rank 0's buffers as often as DDP does, and when the optimizer says so.

    DDP broadcasts before a forward pass, inside `no_sync()` or not, if the pass before it was outside. So passes that
    accumulate gradients use what the first of them has got. Here a step broadcasts already, for evaluation, which
    leaves passes that follow another one without a step.

    Hazard: each rank decides alone whether to broadcast. Passes that one rank makes alone must not change that, so
    those without gradients never count, and those inside `no_sync()` after a step neither send nor ask others to.
    """

    def __init__(self, comm: Comm, model: Module, is_off: Callable[[], bool], accumulates: Callable[[], bool]) -> None:
        """`is_off`: the pass that is next does not count. `accumulates`: it is inside `no_sync()`.

        Both are methods of the optimizer, which owns this object.
        """
        # Hazard: strong references would be a cycle. Ranks would then free the optimizer, and silence its hooks, at
        # different times, whenever their garbage collectors run, while others still wait for their messages.
        self._is_off, self._accumulates = WeakMethod(is_off), WeakMethod(accumulates)
        self._sync, self._clock = BufferSync(comm, model), comm.clock
        self._line = comm.group.line
        self._is_due = False
        """The next forward pass broadcasts."""
        if self._sync.has_any:
            Before(self._before_forward).hang_on(model)

    def sync(self, source: Rank, place: str = "bringing buffers to all") -> None:
        """On all ranks."""
        if self._sync.has_any:
            with self._line.meanwhile(place), self._clock.part(Label.EQUAL):
                self._sync.sync(source)
        self._is_due = False

    def _before_forward(self, _: Module, __: bool) -> None:
        is_off, accumulates = self._is_off(), self._accumulates()
        if is_off is None or accumulates is None or is_off():
            return
        if self._is_due:
            self.sync(Rank(0), "bringing buffers to all; who runs the model alone does so under torch.no_grad()")
        self._is_due = not accumulates()


class AveragedOnce:
    """Refuses forward passes through DDP, which knows neither that gradients leave nor what they have become."""

    def __init__(self, model: Module, engine: FlatEngine, hooks: GradHooks) -> None:
        self._engine, self._hooks = engine, hooks
        BeforeUnderDdp(self._before_forward).hang_on(model)

    def _before_forward(self, _: Module, __: bool) -> None:
        ddp = _active_ddp()
        if ddp is None or self._hooks.is_replaced or not torch.is_grad_enabled():
            return
        averaged = ((name, param) for name, param in ddp.module.named_parameters() if param.requires_grad)
        ours = [name for name, param in averaged if id(param) in self._engine.bucket_of]
        twice = [name for name in ours if name not in ddp.parameters_to_ignore]
        if twice:
            raise ConfigError(
                f"DistributedDataParallel and shard() would both average the gradients of {len(twice)} parameters, "
                f"{twice[0]} among them. Call the model itself, not what wraps it. To keep DistributedDataParallel, "
                "use ZeroRedundancyOptimizer(..., config=ZeroConfig(partition=FlatShards())) and its ddp_hook()."
            )


class Guarded(dict[str, Any]):
    """What stands in for a module's dict of parameters while some are under way: whoever touches it waits first."""

    def __init__(self, plain: dict[str, Any], wait: Callable[[], None]) -> None:
        super().__init__(plain)
        self._plain, self._wait = plain, wait

    def __reduce__(self) -> Any:
        self._wait()
        return dict, (self._plain,)


def _waiting(name: str) -> Callable[..., Any]:
    def call(self: Guarded, *args: Any, **kwargs: Any) -> Any:
        self._wait()
        return getattr(self._plain, name)(*args, **kwargs)

    return call


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
    setattr(Guarded, _name, _waiting(_name))


class Gates:
    """Waits for parameters that are under way where they are first needed."""

    def __init__(self, model: Module, engine: FlatEngine) -> None:
        self._engine, self._model = engine, model
        self._buckets: dict[Module, list[int]] = {}
        self.find_params()
        for module in self._buckets:
            if module is model:
                Before(self._enter).hang_on(module)
            elif module._parameters:
                BeforeInner(self._pass).hang_on(module)
        self._guarded: dict[Module, dict[str, Any]] = {}
        self._lock = RLock()
        """Whoever needs a parameter first opens: a forward pass, or another optimizer's step in another thread."""

    def find_params(self) -> None:
        """Learn which buckets each module needs."""
        known = self._engine.bucket_of
        for module in self._model.modules():
            own = (id(param) for param in module.parameters(recurse=False))
            self._buckets[module] = sorted({known[key] for key in own if key in known})

    def close(self) -> None:
        """Parameters are under way."""
        with self._lock:
            for module, buckets in self._buckets.items():
                if buckets and module not in self._guarded:  # nobody may have looked at it since the last step
                    self._guarded[module] = plain = module._parameters
                    vars(module)["_parameters"] = Guarded(plain, functools.partial(self._pass, module, False))
            _CLOSED[id(self)] = self
        _have_steps_wait()

    def wait(self) -> None:
        """All parameters have arrived."""
        with self._lock:
            self._engine.sync.finish()
            for module in list(self._guarded):
                self._open(module)

    def guards(self, modules: set[Module]) -> bool:
        return not modules.isdisjoint(self._guarded)

    def let_go(self) -> None:
        """As `wait`, also where it is in vain."""
        with self._lock:
            self._engine.sync.let_go()
            for module in list(self._guarded):
                self._open(module)

    def _enter(self, model: Module, compiled: bool) -> None:
        for module in model.modules() if self._guarded else ():
            if compiled or _is_compiled(module):
                for part in module.modules():
                    self._pass(part, True)
        self._pass(model, compiled)

    def _pass(self, module: Module, _: bool) -> None:
        """The parameters of one module have arrived."""
        if module in self._guarded:
            with self._lock, self._engine.comm.clock.part(Label.GATE):
                self._engine.sync.wait(self._buckets[module])
                self._open(module)

    def _open(self, module: Module) -> None:
        plain = self._guarded.pop(module, None)
        if plain is not None:  # another thread may have been here
            vars(module)["_parameters"] = plain
        if not self._guarded:
            _CLOSED.pop(id(self), None)


_CLOSED: "WeakValueDictionary[int, Gates]" = WeakValueDictionary()
"""Those with parameters under way."""
_before_steps: Any = None


def _have_steps_wait() -> None:
    """Any optimizer's step waits for all parameters.

    Hazard: hooks must not come and go while torch calls one after the other, so this one stays.
    """
    global _before_steps  # noqa: PLW0603
    known = {} if _before_steps is None else _before_steps.hooks_dict_ref() or {}
    if _before_steps is None or _before_steps.id not in known:
        _before_steps = register_optimizer_step_pre_hook(_wait_for_all)


def _wait_for_all(*_: Any) -> None:
    for reference in _CLOSED.valuerefs():
        gates = reference()
        if gates is not None:
            gates.wait()


def let_go(model: Module) -> None:
    """What former optimizers of the model still wait for has arrived, or never will: their ranks may be gone."""
    modules = set(model.modules())
    for gates in filter(None, (reference() for reference in _CLOSED.valuerefs())):
        if gates.guards(modules):
            gates.let_go()


def _is_compiled(module: Module) -> bool:
    # Hazard: looking for an attribute that a module lacks would look into its guarded parameters, and wait.
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules
