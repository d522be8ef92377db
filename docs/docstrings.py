"""Extension of griffe for the reference: lines `name: description` in the docstring of a class become a table.

Docstrings with an `Args:` section do not need it; those of exceptions and small dataclasses do.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

import griffe


class AttributeTables(griffe.Extension):
    """Put attributes that a class docstring describes one per line under the heading `Args`."""

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        if cls.docstring is not None:
            names = {*cls.members, *(param.name for param in cls.parameters)}
            cls.docstring.value = add_args_heading(cls.docstring.value, names)


def add_args_heading(text: str, names: Collection[str]) -> str:
    """Put the first run of lines that begin with a name, and the lines indented below them, under `Args:`."""
    lines = text.splitlines()
    starts = [number for number, line in enumerate(lines) if _describes_name(line, names)]
    if not starts:
        return text
    first = end = starts[0]
    while end < len(lines) and (_describes_name(lines[end], names) or lines[end].startswith("    ")):
        end += 1
    table = ["Args:", *(f"    {line}" for line in lines[first:end])]
    return "\n".join([*lines[:first], *table, *lines[end:]])


def _describes_name(line: str, names: Collection[str]) -> bool:
    match = re.match(r"(\w+): ", line)
    return match is not None and match[1] in names
