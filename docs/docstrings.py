"""How docstrings of classes are read for the reference: lines `option: what it is` are a table of options."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

import griffe


class Options(griffe.Extension):
    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        if cls.docstring is not None:
            names = {*cls.members, *(it.name for it in cls.parameters)}
            cls.docstring.value = with_table(cls.docstring.value, names)


def with_table(text: str, names: Collection[str]) -> str:
    """The first run of lines that begin with a name, and what is indented below them, under the heading `Args`."""
    lines = text.splitlines()
    starts = [number for number, line in enumerate(lines) if _names_one(line, names)]
    if not starts:
        return text
    first = end = starts[0]
    while end < len(lines) and (_names_one(lines[end], names) or lines[end].startswith("    ")):
        end += 1
    table = ["Args:", *(f"    {line}" for line in lines[first:end])]
    return "\n".join([*lines[:first], *table, *lines[end:]])


def _names_one(line: str, names: Collection[str]) -> bool:
    found = re.match(r"(\w+): ", line)
    return found is not None and found[1] in names
