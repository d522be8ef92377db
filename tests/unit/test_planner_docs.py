"""docs/planner.md matches the code."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console

from tests.support.tools import status_of
from zeroshard import ZeroConfig
from zeroshard.cli.plan import print_plan
from zeroshard.planner import plan
from zeroshard.planner.shapes import PRESETS, load_model_shape

PAGE = (Path(__file__).parents[2] / "docs" / "planner.md").read_text(encoding="utf-8")


def test_all_presets_are_documented() -> None:
    assert [name for name in PRESETS if f"`{name}`" not in PAGE] == []


def test_all_options_are_documented(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert status_of("plan", "--help") == 0
    words = capsys.readouterr().out.replace("│", " ").split()
    options = {word for word in words if word.startswith("--") and word.lstrip("-") and word != "--help"}
    assert len(options) == 18
    assert [option for option in sorted(options) if f"`{option}" not in PAGE] == []


def test_zero_paper_output_is_current() -> None:
    command, printed = PAGE.split("## The example of the ZeRO paper")[1].split("```")[1:4:2]
    assert command == "console\nzeroshard plan 7.5B --optimizer Adam --precision bf16+fp32 --ranks 64\n"
    model, config = load_model_shape("7.5B").cast(torch.bfloat16), ZeroConfig(master_dtype=torch.float32)
    console = Console(width=120, file=StringIO(), color_system=None)
    print_plan(plan(model, torch.optim.Adam, ranks=64, config=config), console)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert printed.removeprefix("text\n").splitlines() == lines[: len(printed.splitlines()) - 1]


def test_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    code = PAGE.split("```python\n")[1].split("```")[0]
    printed: list[str] = []
    exec(
        compile(code, "docs/planner.md", "exec"), {"print": lambda *values: printed.append(" ".join(map(str, values)))}
    )
    assert printed[0].startswith("Transformer: ")
    assert "'method': 'DDP'" in printed[-1]
