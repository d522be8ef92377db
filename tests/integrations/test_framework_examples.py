"""The examples with frameworks run under torchrun and resume at another world size."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.launch import torchrun

EXAMPLES = Path(__file__).parents[2] / "examples"
SHOW_WARNINGS = "default"  # not "error": frameworks emit many warnings of their own


@pytest.mark.timeout(240)
def test_lightning(tmp_path: Path) -> None:
    losses = []
    for epochs, ranks in ((1, 2), (2, 3)):
        options = ("--epochs", str(epochs), "--steps", "6", "--width", "32")
        printed = torchrun(EXAMPLES / "lightning_gpt.py", ranks, tmp_path, *options, warnings=SHOW_WARNINGS)
        losses += re.findall(rf"step {6 * epochs}, {ranks} ranks: loss (\S+)", printed)
    first, second = map(float, losses)
    assert second < first


@pytest.mark.timeout(240)
def test_transformers(tmp_path: Path) -> None:
    losses = []
    for steps, ranks in ((10, 2), (20, 1)):
        options = ("--steps", str(steps), "--width", "32")
        printed = torchrun(EXAMPLES / "transformers_trainer.py", ranks, tmp_path, *options, warnings=SHOW_WARNINGS)
        losses += re.findall(r"'loss': '?([\d.]+)", printed)
        assert (tmp_path / "checkpoints-transformers" / f"checkpoint-{steps}" / "zeroshard").is_dir()
    first, second = map(float, losses)
    assert second < first


@pytest.mark.timeout(240)
def test_accelerate(tmp_path: Path) -> None:
    for steps, ranks in ((10, 2), (20, 3)):
        printed = torchrun(EXAMPLES / "accelerate_loop.py", ranks, tmp_path, warnings=SHOW_WARNINGS)
        assert f"step {steps}, {ranks} ranks: loss" in printed


@pytest.mark.timeout(240)
def test_lora(tmp_path: Path) -> None:
    losses = []
    for steps, ranks in ((10, 2), (20, 3)):
        printed = torchrun(EXAMPLES / "lora_peft.py", ranks, tmp_path, "--steps", str(steps), warnings=SHOW_WARNINGS)
        losses += re.findall(rf"step {steps}, {ranks} ranks: loss (\S+)", printed)
        assert (tmp_path / "checkpoints-lora" / f"adapters-{steps:09d}" / "adapter_model.safetensors").is_file()
    first, second = map(float, losses)
    assert second < first
