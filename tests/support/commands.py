"""The command line, called in this process."""

from __future__ import annotations

from pathlib import Path

import pytest

from zeroshard.cli.app import main


def status_of(*arguments: str | Path) -> int:
    """The exit status of a command."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return int(ended.value.code or 0)


def convert(source: Path, target: Path, to: str, *options: str) -> Path:
    """The target, which must come to be."""
    assert status_of("convert", source, target, "--to", to, *options) == 0
    assert not [entry for entry in target.parent.iterdir() if "converting" in entry.name]
    return target
