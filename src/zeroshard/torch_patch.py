"""Our classes and functions in the place of torch's, for code that asks torch for them."""

import builtins
import io
import os
import runpy
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.machinery import SourceFileLoader
from types import ModuleType, TracebackType
from typing import Any, NamedTuple

import torch.distributed as dist

from . import ddp_hooks, zero_redundancy_optimizer
from ._logging import warn_at_caller

_TORCH_OPTIMIZER_MODULE = "torch.distributed.optim.zero_redundancy_optimizer"
_TORCH_HOOKS_MODULE = "torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook"


class Patch(NamedTuple):
    """An object of torch's and ours for it."""

    original: Any
    replacement: Any


class PatchSite(NamedTuple):
    """A name in a module, and what was swapped there."""

    module: ModuleType
    name: str
    patch: Patch

    def __str__(self) -> str:
        return f"{self.module.__name__}.{self.name}"


class Replacement:
    """What `replace_torch` has put in the place of torch's. As a context it is undone at the end."""

    def __init__(self, sites: Iterable[PatchSite]) -> None:
        self._sites = list(sites)

    @property
    def patched_names(self) -> tuple[str, ...]:
        """The names that are replaced, by the modules that have them."""
        return tuple(sorted(map(str, self._sites)))

    def undo(self) -> tuple[str, ...]:
        """Put torch's back where it was replaced by this call; the second time does nothing.

        Names that somebody has set to something else since are left alone: they are warned of, and returned.
        """
        changed = []
        for place in self._sites:
            names = vars(place.module)
            if names.get(place.name) is place.patch.replacement:
                names[place.name] = place.patch.original
            else:
                changed.append(str(place))
        self._sites.clear()
        if changed:
            warn_at_caller(
                f"not put back to torch's, since it was set to something else meanwhile: {', '.join(changed)}"
            )
        return tuple(changed)

    def __enter__(self) -> "Replacement":
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
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
    done = list(_find_sites(_make_patches()))
    for place in done:
        vars(place.module)[place.name] = place.patch.replacement
    return Replacement(done)


@cache
def _make_patches() -> dict[int, Patch]:
    """By the identity of torch's objects, which live as long as this. Found once: later names may be replaced."""
    if not dist.is_available():
        raise RuntimeError(
            "replace_torch() needs torch.distributed, which this build of torch does not have: install one that does"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's modules are told to be old when they are imported
        optimizers, hooks = import_module(_TORCH_OPTIMIZER_MODULE), import_module(_TORCH_HOOKS_MODULE)
    swaps = [Patch(getattr(hooks, name), getattr(ddp_hooks, name)) for name in ddp_hooks.__all__]
    names = zero_redundancy_optimizer.PATCHED_NAMES
    swaps += [Patch(getattr(optimizers, name), getattr(zero_redundancy_optimizer, name)) for name in names]
    return {id(swap.original): swap for swap in swaps}


def _find_sites(patches: Mapping[int, Patch]) -> Iterator[PatchSite]:
    """Where torch's objects are. Modules are looked at by their dicts: asked for a name they may import more."""
    for module in {id(it): it for it in list(sys.modules.values())}.values():  # a script is there by two names
        if issubclass(type(module), ModuleType):
            for name, value in list(vars(module).items()):
                if id(value) in patches:
                    yield PatchSite(module, name, patches[id(value)])


# ---------------------------------------------------------------------------------------------------------------------
# `python -m zeroshard run`: a script as it is, with ours in the place of torch's class and hooks.


RUN_USAGE = """\
usage: python -m zeroshard run script.py [arguments]
       python -m zeroshard run -m package.module [arguments]

Runs a script or module as python does, with zeroshard's ZeroRedundancyOptimizer and DDP hooks in the place of torch's.
On several ranks: torchrun [options] -m zeroshard run script.py [arguments]
"""


def run_command(arguments: Sequence[str]) -> int:
    """The exit status. Exceptions and exits of the script are its own."""
    match list(arguments):
        case ["-h" | "--help", *_]:
            sys.stdout.write(RUN_USAGE)
        case ["-m", module, *rest]:
            _run_module(module, rest)
        case [script, *rest] if not script.startswith("-"):
            return _run_script(script, rest)
        case _:
            sys.stderr.write(RUN_USAGE)
            return 2
    return 0


def _run_module(module: str, arguments: list[str]) -> None:
    replace_torch()
    sys.argv[:] = [module, *arguments]
    _set_script_dir(os.getcwd())
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _run_script(script: str, arguments: list[str]) -> int:
    try:
        with io.open_code(os.path.abspath(script)) as file:
            source = file.read()
    except OSError as error:
        hint = f": try {os.path.join(script, '__main__.py')}" if os.path.isdir(script) else ""
        sys.stderr.write(f"{script} cannot be run: {error.strerror}{hint}\n")
        return 2
    replace_torch()
    sys.argv[:] = [script, *arguments]
    _set_script_dir(os.path.dirname(os.path.realpath(script)))
    main = _make_main_module(os.path.abspath(script))
    exec(compile(source, script, "exec", dont_inherit=True), vars(main))
    return 0


def _make_main_module(file: str) -> Any:
    """A fresh `__main__`, as `python script.py` has it, also for what looks its classes up there."""
    main: Any = ModuleType("__main__")
    main.__file__, main.__cached__, main.__builtins__ = file, None, builtins
    main.__loader__ = SourceFileLoader("__main__", file)
    sys.modules["__main__"] = main
    return main


def _set_script_dir(directory: str) -> None:
    """The first entry of the path is where this program was found, unless python was told to leave that out."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = directory
