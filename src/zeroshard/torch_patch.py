"""`replace_torch`: use zeroshard's classes and hooks in code that imports torch's.

`python -m zeroshard run` does the same for an unmodified script.
"""

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
    """An object of torch and its replacement."""

    original: Any
    replacement: Any


class PatchSite(NamedTuple):
    """A name in a module that is patched."""

    module: ModuleType
    name: str
    patch: Patch

    def __str__(self) -> str:
        return f"{self.module.__name__}.{self.name}"


class Replacement:
    """The result of `replace_torch`. Use it as a context manager to undo the replacement at its end."""

    def __init__(self, sites: Iterable[PatchSite]) -> None:
        self._sites = list(sites)

    @property
    def patched_names(self) -> tuple[str, ...]:
        """The patched names, each with its module."""
        return tuple(sorted(map(str, self._sites)))

    def undo(self) -> tuple[str, ...]:
        """Restore the objects of torch that this call replaced. A second call does nothing.

        Names that were reassigned after the replacement are not restored; a warning lists them.

        Returns:
            The names that were not restored.
        """
        changed = []
        for site in self._sites:
            namespace = vars(site.module)
            if namespace.get(site.name) is site.patch.replacement:
                namespace[site.name] = site.patch.original
            else:
                changed.append(str(site))
        self._sites.clear()
        if changed:
            warn_at_caller(f"not restored, because they were reassigned after replace_torch(): {', '.join(changed)}")
        return tuple(changed)

    def __enter__(self) -> "Replacement":
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.undo()


def replace_torch() -> Replacement:
    """Replace torch's `ZeroRedundancyOptimizer` and DDP hooks by zeroshard's, until the result is undone.

        with zeroshard.replace_torch():
            main()  # imports torch's class, and checks for it with isinstance

    Call it early, on all ranks, before any optimizer is constructed. In every loaded module, names that refer to
    torch's objects refer to zeroshard's afterwards, and modules that are imported later find zeroshard's in torch.
    References that are held elsewhere (local variables, tuples, base classes) are not replaced.

    Nested calls replace what the outer call did not, and `undo()` of the inner one restores just that. A module that is
    imported while the replacement is active keeps zeroshard's objects.

    Returns:
        The replacement, with `undo()`; also a context manager.

    Raises:
        RuntimeError: If torch was built without `torch.distributed`.
    """
    sites = list(_find_sites(_make_patches()))
    for site in sites:
        vars(site.module)[site.name] = site.patch.replacement
    return Replacement(sites)


@cache
def _make_patches() -> dict[int, Patch]:
    """Return the patches by the id of torch's object. Cached, since torch's names may be patched afterwards."""
    if not dist.is_available():
        raise RuntimeError(
            "replace_torch() needs torch.distributed, which this build of torch does not have. Install a build that "
            "has it."
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that these modules are deprecated
        optimizers, hooks = import_module(_TORCH_OPTIMIZER_MODULE), import_module(_TORCH_HOOKS_MODULE)
    patches = [Patch(getattr(hooks, name), getattr(ddp_hooks, name)) for name in ddp_hooks.__all__]
    names = zero_redundancy_optimizer.PATCHED_NAMES
    patches += [Patch(getattr(optimizers, name), getattr(zero_redundancy_optimizer, name)) for name in names]
    return {id(patch.original): patch for patch in patches}


def _find_sites(patches: Mapping[int, Patch]) -> Iterator[PatchSite]:
    """Find the names of torch's objects in all modules. Reads module dicts, since `getattr` may import more modules."""
    unique_modules = {id(module): module for module in list(sys.modules.values())}  # a script is listed under two names
    for module in unique_modules.values():
        if issubclass(type(module), ModuleType):
            for name, value in list(vars(module).items()):
                if id(value) in patches:
                    yield PatchSite(module, name, patches[id(value)])


# ---------------------------------------------------------------------------------------------------------------------
# `python -m zeroshard run`: run an unmodified script under `replace_torch`.


RUN_USAGE = """\
usage: python -m zeroshard run script.py [arguments]
       python -m zeroshard run -m package.module [arguments]

Runs a script or module as python does, with zeroshard's ZeroRedundancyOptimizer and DDP hooks in the place of torch's.
On several ranks: torchrun [options] -m zeroshard run script.py [arguments]
"""


def run_command(arguments: Sequence[str]) -> int:
    """Run a script or module and return the exit status. Exceptions and exits of the script propagate."""
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
    """Install a new `__main__` module, as `python script.py` does; pickle looks up the script's classes there."""
    main: Any = ModuleType("__main__")
    main.__file__, main.__cached__, main.__builtins__ = file, None, builtins
    main.__loader__ = SourceFileLoader("__main__", file)
    sys.modules["__main__"] = main
    return main


def _set_script_dir(directory: str) -> None:
    """Replace the first entry of `sys.path`, the directory of this program, except in Python's safe-path mode."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = directory
