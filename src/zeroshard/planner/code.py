"""What `package.module:name` and `file.py:name` stand for: code of the user's, run as a script next to it would be."""

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch

from ..errors import ConfigError

_LIBRARY_PREFIXES = tuple(
    f"{Path(str(it)).parent}{os.sep}" for it in (torch.__file__, os.__file__, Path(__file__).parent)
)
"""Where code lies that is not the user's: torch's, Python's and ours."""
USER_CODE_ERRORS = (Exception, SystemExit)
"""How such code may end: also as a program does."""


def describe_error(error: BaseException) -> str:
    """What went wrong, and where in the user's code, as far as it got there."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [it for it in frames if not it.filename.startswith((*_LIBRARY_PREFIXES, "<"))]
    where = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {error}{where}"


def import_object(source: str, expected: str) -> Any:
    """What the name stands for. `expected` says, for errors, what it should be."""
    place, _, name = source.rpartition(":")
    with script_environment(source):
        found = _import_source(place)
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{place} has no {name!r}: expected {expected}")
        found = getattr(found, part)
    return found


@contextmanager
def script_environment(source: str) -> Iterator[None]:
    """The current directory and that of the file can be imported from; words of our own command line are not seen."""
    place = source.rpartition(":")[0]
    folders, words = [str(Path.cwd())], sys.argv
    if place.endswith(".py"):
        folders.insert(0, str(Path(place).resolve().parent))
    sys.path[:0], sys.argv = folders, [place]
    try:
        yield
    finally:
        sys.argv = words
        for folder in folders:
            with suppress(ValueError):
                sys.path.remove(folder)


def _import_source(location: str) -> Any:
    if location.endswith(".py") and not Path(location).is_file():
        raise ConfigError(f"{location} is no file: expected file.py:name or package.module:name")
    try:
        return _import_file(location) if location.endswith(".py") else import_module(location)
    except USER_CODE_ERRORS as error:
        raise ConfigError(f"{location} cannot be imported: {describe_error(error)}") from error


def _import_file(path: str) -> Any:
    """Under a name that no other module has, where classes find the module that they are of."""
    name = f"zeroshard_plans_{Path(path).stem}"
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = sys.modules[name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
