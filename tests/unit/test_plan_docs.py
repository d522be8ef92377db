"""docs/planner.md says what the code says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.commands import status_of
from zeroshard.planning.presets import PRESETS

PAGE = (Path(__file__).parents[2] / "docs" / "planner.md").read_text(encoding="utf-8")


def test_all_presets_are_listed() -> None:
    assert [name for name in PRESETS if f"`{name}`" not in PAGE] == []


def test_all_options_are_listed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert status_of("plan", "--help") == 0
    words = capsys.readouterr().out.replace("│", " ").split()
    options = {word for word in words if word.startswith("--") and word.lstrip("-") and word != "--help"}
    assert len(options) == 18
    assert [option for option in sorted(options) if f"`{option}" not in PAGE] == []


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    code = PAGE.split("```python\n")[1].split("```")[0]
    printed: list[str] = []
    exec(
        compile(code, "docs/planner.md", "exec"), {"print": lambda *values: printed.append(" ".join(map(str, values)))}
    )
    assert printed[0].startswith("Transformer: ")
    assert "'method': 'DDP'" in printed[-1]
