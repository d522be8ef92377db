"""What a sharded optimizer hangs on the model, so that the model is right whenever it is used.

- Gates: a module's forward pass waits for its parameters, which may be under way.
- Traps: while parameters are under way, all other ways to them (`parameters()`, `state_dict()`, copying, saving,
  moving, another optimizer's step) wait for all of them.
- Buffers are made equal before each forward pass of the model.
- `model.zero_grad()` clears what the optimizer keeps of gradients, too.

A copy of the model, deep or saved, has none of this. Nothing here keeps the optimizer alive.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakMethod

import torch
from torch.nn import Module
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..comm.collectives import Comm
from ..runtime.buffers import BufferSync
from ..runtime.flat import FlatEngine
from ..units import Rank

TRAPPED = ("named_parameters", "state_dict", "load_state_dict", "_apply", "__reduce_ex__")
"""What everything that reads or writes the parameters of a module goes through, beside its forward pass."""


class Before:
    """A forward pre-hook that calls a method with the module."""

    def __init__(self, method: Callable[[Module], None]) -> None:
        self._method = WeakMethod(method)

    def __call__(self, module: Module, _: Any) -> None:
        method = self._method()
        if method is not None:
            method(module)

    # torch.compile must not look inside: it leaves the graph, calls this, and goes on.
    __call__._torchdynamo_disable = True  # type: ignore[attr-defined]

    def __reduce__(self) -> Any:
        return getattr, ({}, "get")  # `{}.get(module, args)` gives the arguments back as they are


class BeforeInner(Before):
    """The same for modules inside the model: what is compiled as a whole is waited for at its entrance."""

    def __call__(self, module: Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            super().__call__(module, args)


class ZeroGrad:
    """`model.zero_grad`, and `also` after it."""

    def __init__(self, model: Module, also: Callable[[bool], None]) -> None:
        self._model, self._also = model, WeakMethod(also)

    def __call__(self, set_to_none: bool = True) -> None:
        type(self._model).zero_grad(self._model, set_to_none)
        also = self._also()
        if also is not None:
            also(set_to_none)

    def __reduce__(self) -> Any:
        return functools.partial, (type(self._model).zero_grad, self._model)


class EqualBuffers:
    """Buffers of rank 0 for everyone, before each forward pass."""

    def __init__(self, comm: Comm, model: Module, is_off: Callable[[], bool]) -> None:
        self._sync, self._is_off = BufferSync(comm, model), is_off
        model.register_forward_pre_hook(Before(self._before_forward))

    def sync(self, source: Rank) -> None:
        self._sync.sync(source)

    def _before_forward(self, _: Module) -> None:
        if not self._is_off():
            self.sync(Rank(0))


class Gates:
    """Waits for parameters that are under way where they are first needed."""

    def __init__(self, model: Module, engine: FlatEngine) -> None:
        self._engine, self._model = engine, model
        self._buckets: dict[Module, list[int]] = {}
        self.find_params()
        for module in self._buckets:
            if module is model:
                module.register_forward_pre_hook(Before(self._enter))
            elif module._parameters:
                module.register_forward_pre_hook(BeforeInner(self._pass))
        self._traps = [
            (vars(module), name, functools.partial(self._spring, module, name))
            for module in self._buckets
            for name in TRAPPED
            if name not in vars(module)
        ]
        self._before_steps: Any = None

    def find_params(self) -> None:
        """Learn which buckets each module needs."""
        known = self._engine.bucket_of
        for module in self._model.modules():
            own = (id(param) for param in module.parameters(recurse=False))
            self._buckets[module] = sorted({known[key] for key in own if key in known})

    def close(self) -> None:
        """Parameters are under way."""
        for attributes, name, trap in self._traps:
            attributes[name] = trap
        if self._before_steps is None:
            self._before_steps = register_optimizer_step_pre_hook(lambda *_: self.wait())

    def wait(self) -> None:
        """All parameters have arrived."""
        self._engine.sync.finish()
        self._open()

    def _enter(self, model: Module) -> None:
        for module in model.modules():
            if _is_compiled(module):
                self._wait_for(bucket for part in module.modules() for bucket in self._buckets.get(part, ()))
        self._pass(model)

    def _pass(self, module: Module) -> None:
        self._wait_for(self._buckets[module])

    def _wait_for(self, buckets: Iterable[int]) -> None:
        if self._engine.sync.under_way:
            self._engine.sync.wait(buckets)
            if not self._engine.sync.under_way:
                self._open()

    def _open(self) -> None:
        for attributes, name, _ in self._traps:
            attributes.pop(name, None)
        if self._before_steps is not None:
            self._before_steps.remove()
            self._before_steps = None

    def _spring(self, module: Module, name: str, *args: Any, **kwargs: Any) -> Any:
        self.wait()
        return getattr(module, name)(*args, **kwargs)


def _is_compiled(module: Module) -> bool:
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod") or torch.compiler.is_compiling()
