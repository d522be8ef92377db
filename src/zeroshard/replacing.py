"""Our classes and functions in the place of torch's, for code that asks torch for them."""

import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib import import_module
from types import ModuleType, TracebackType
from typing import Any, NamedTuple

import torch.distributed as dist

from . import ddp_hooks, zero_redundancy_optimizer
from .notices import warn_user

_OPTIMIZERS = "torch.distributed.optim.zero_redundancy_optimizer"
_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook"


class Swap(NamedTuple):
    """An object of torch's and ours for it."""

    theirs: Any
    ours: Any


class Place(NamedTuple):
    """A name in a module, and what was swapped there."""

    module: ModuleType
    name: str
    swap: Swap

    def __str__(self) -> str:
        return f"{self.module.__name__}.{self.name}"


class Replacement:
    """What `replace_torch` has put in the place of torch's. As a context it is undone at the end."""

    def __init__(self, done: Iterable[Place]) -> None:
        self._done = list(done)

    @property
    def places(self) -> tuple[str, ...]:
        """The names that are replaced, by the modules that have them."""
        return tuple(sorted(map(str, self._done)))

    def undo(self) -> tuple[str, ...]:
        """Put torch's back where it was replaced by this call; the second time does nothing.

        Names that somebody has set to something else since are left alone: they are warned of, and returned.
        """
        changed = []
        for place in self._done:
            names = vars(place.module)
            if names.get(place.name) is place.swap.ours:
                names[place.name] = place.swap.theirs
            else:
                changed.append(str(place))
        self._done.clear()
        if changed:
            warn_user(f"not put back to torch's, since it was set to something else meanwhile: {', '.join(changed)}")
        return tuple(changed)

    def __enter__(self) -> "Replacement":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()


def replace_torch() -> Replacement:
    """Put our `ZeroRedundancyOptimizer` and DDP hooks in the place of torch's, until the result is undone.

        with zeroshard.replace_torch():
            main()  # of code that imports torch's, and looks for it with isinstance

    Every module that has torch's objects by some name gets ours by that name, whether it is torch's own or has
    imported them. Modules that are imported later find ours in torch. Not reached is what code holds elsewhere, in
    local variables, tuples, or as a base class. So it is called early, on all ranks, before any optimizer is made.

    Inside another call it replaces what that one has not, and `undo()` takes back just this. A module that is imported
    while torch's is replaced keeps ours.
    """
    done = list(_found(_swaps()))
    for place in done:
        vars(place.module)[place.name] = place.swap.ours
    return Replacement(done)


@cache
def _swaps() -> dict[int, Swap]:
    """By the identity of torch's objects, which live as long as this. Found once: later names may be replaced."""
    if not dist.is_available():
        raise RuntimeError(
            "replace_torch() needs torch.distributed, which this build of torch does not have: install one that does"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's modules are told to be old when they are imported
        optimizers, hooks = import_module(_OPTIMIZERS), import_module(_HOOKS)
    swaps = [Swap(getattr(hooks, name), getattr(ddp_hooks, name)) for name in ddp_hooks.__all__]
    names = zero_redundancy_optimizer.REPLACED
    swaps += [Swap(getattr(optimizers, name), getattr(zero_redundancy_optimizer, name)) for name in names]
    return {id(swap.theirs): swap for swap in swaps}


def _found(swaps: Mapping[int, Swap]) -> Iterator[Place]:
    """Where torch's objects are. Modules are looked at by their dicts: asked for a name they may import more."""
    for module in {id(it): it for it in list(sys.modules.values())}.values():  # a script is there by two names
        if issubclass(type(module), ModuleType):
            for name, value in list(vars(module).items()):
                if id(value) in swaps:
                    yield Place(module, name, swaps[id(value)])
