"""A process ends in order, whatever is still on its way."""

from pathlib import Path

import pytest

from tests.support.launch import torchrun
from tests.support.tiers import sampled

SCRIPT = """
import sys
import torch
import torch.distributed as dist
import zeroshard

dist.init_process_group("gloo")
size = 1000 if "copy" in sys.argv else 64
model = torch.nn.Linear(size, 64)
config = zeroshard.ZeroConfig(second_copy=zeroshard.SecondCopy(every=1) if "copy" in sys.argv else None)
optimizer = zeroshard.shard(model, torch.optim.AdamW, lr=1e-3, config=config)
if dist.get_rank() == 0 or "step" in sys.argv:
    model(torch.ones(4, size)).sum().backward()  # rank 0 alone sends, and receives nothing
if "step" in sys.argv:
    optimizer.step()
if "leave" in sys.argv:
    dist.destroy_process_group()
"""


@pytest.mark.timeout(180)
@sampled("what", [["leave"], [], ["step"], ["step", "leave"], ["step", "copy"]], ids=" ".join)
def test_the_end_of_a_process(tmp_path: Path, what: list[str]) -> None:
    """With gradients or a copy under way or without, from a group that was left or not."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    torchrun(script, 2, tmp_path, *what)
