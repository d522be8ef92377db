"""Pages of the docs, and the blocks of code in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"(?:^<!-- ([^\n]*?) -->\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_ANEW, _PART, _NOT_RUN = "begin anew", "part of ", "not run: "


class Block(NamedTuple):
    """A block of code, and the comment just before it."""

    page: str
    line: int
    language: str
    text: str
    mark: str

    @property
    def code(self) -> str:
        """What it is as Python; of a diff, what it leads to."""
        if self.language != "diff":
            return self.text
        return "".join(line[1:] + "\n" for line in self.text.splitlines() if not line.startswith("-"))

    @property
    def begins_anew(self) -> bool:
        """Names of blocks before it are forgotten."""
        return self.mark == _ANEW

    @property
    def example(self) -> str | None:
        """The file in which it stands as it is, and which is run elsewhere."""
        return self.mark.removeprefix(_PART) if self.mark.startswith(_PART) else None

    @property
    def reason(self) -> str | None:
        """Why it is not run."""
        return self.mark.removeprefix(_NOT_RUN) if self.mark.startswith(_NOT_RUN) else None

    @property
    def is_run(self) -> bool:
        return self.language in ("python", "diff") and not self.example and not self.reason

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[str]:
    """All that people read, from the root of the repository on."""
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md"), ROOT / "benchmarks/README.md"]
    return sorted(file.relative_to(ROOT).as_posix() for file in files)


def blocks_of(page: str) -> list[Block]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, found.start(2)) + 1, found[2], found[3], found[1] or "")
        for found in _BLOCK.finditer(text)
    ]


def without_code(text: str) -> str:
    """What is prose: blocks of code, and code within lines, are left out."""
    return re.sub(r"`[^`\n]*`", "", _BLOCK.sub("", text))


class Command(NamedTuple):
    """A line for a shell, with what it sets in the environment."""

    block: Block
    settings: dict[str, str]
    words: list[str]


def commands_of(block: Block) -> Iterator[Command]:
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        settings = {}
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            name, value = words.pop(0).split("=", 1)
            settings[name] = value
        if words:
            yield Command(block, settings, words)
