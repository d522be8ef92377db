"""Examples run as they are, in processes of their own, and the README shows them as they are."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.launch import torchrun

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "train_sharded.py"


def plain_copy(saved: dict[str, Any]) -> torch.optim.AdamW:
    """The unsharded optimizer, on a model of its own, as it was saved."""
    model = nn.Sequential(nn.Linear(32, 512), nn.LayerNorm(512), nn.GELU(), nn.Linear(512, 1))
    model.load_state_dict(saved["model"])
    params = sorted(model.parameters(), key=lambda param: param.dim() <= 1)
    optimizer = torch.optim.AdamW([{"params": params[:2]}, {"params": params[2:]}])
    optimizer.load_state_dict(saved["optimizer"])
    return optimizer


@pytest.mark.timeout(180)
def test_the_whole_script_trains_saves_and_goes_on_at_another_number_of_ranks(tmp_path: Path) -> None:
    for steps, ranks in ((20, 2), (40, 3), (60, 1)):
        assert f"step {steps}: loss" in torchrun(SCRIPT, ranks, tmp_path)
        saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
        assert saved["scheduler"]["last_epoch"] == steps
        optimizer = plain_copy(saved)
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
        assert [state["step"].item() for state in optimizer.state.values()] == [steps] * 6


@pytest.mark.timeout(180)
def test_the_gpt_trains_sharded(tmp_path: Path) -> None:
    printed = torchrun(SCRIPT.with_name("train_gpt.py"), 2, tmp_path, "--way", "shard", "--steps", "2")
    assert "rank 0: loss of its last batch" in printed
    assert "rank 1: loss of its last batch" in printed


def test_the_readme_shows_the_script_as_it_is() -> None:
    assert f"```python\n{SCRIPT.read_text(encoding='utf-8')}```" in (ROOT / "README.md").read_text(encoding="utf-8")
