"""`python -m zeroshard run`: a script as it is, with ours in the place of torch's class and hooks."""

import builtins
import io
import os
import runpy
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Any

from .torch_patch import replace_torch

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
