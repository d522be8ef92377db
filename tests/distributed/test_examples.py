"""Examples run as they are, in processes of their own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support.launch import torchrun
from zeroshard import checkpoint

SCRIPT = Path(__file__).parents[2] / "examples" / "train_sharded.py"


def load_plain_optimizer(directory: Path) -> torch.optim.AdamW:
    """The unsharded optimizer, on a model of its own, as it was saved."""
    model = nn.Sequential(nn.Linear(32, 512), nn.LayerNorm(512), nn.GELU(), nn.Linear(512, 1))
    params = sorted(model.parameters(), key=lambda param: param.dim() <= 1)
    optimizer = torch.optim.AdamW([{"params": params[:2]}, {"params": params[2:]}])
    checkpoint.load(directory, model=model, optimizer=optimizer)
    return optimizer


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.filterwarnings("ignore:.* was saved by .* ranks")
def test_train_sharded_resumes_at_another_world_size(tmp_path: Path) -> None:
    for steps, ranks in ((20, 2), (40, 3), (60, 1)):
        assert f"step {steps}: loss" in torchrun(SCRIPT, ranks, tmp_path)
        optimizer = load_plain_optimizer(tmp_path / "checkpoints" / f"step-{steps:09d}")
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
        assert [state["step"].item() for state in optimizer.state.values()] == [steps] * 6


def parse_losses(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"ranks: loss (\S+)", printed)]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_stopped_job_resumes_without_losing_a_step(tmp_path: Path) -> None:
    """On the same number of ranks to the last bit; on others sums of float32 are made in another order."""
    script, folders = SCRIPT.with_name("resume.py"), [tmp_path / "straight", tmp_path / "stopped"]
    for folder in folders:
        folder.mkdir()
    straight = parse_losses(torchrun(script, 2, folders[0], "--steps", "16", "--every", "5"))
    stopped: list[float] = []
    for ranks, stop in ((2, 4), (2, 8), (3, 12), (1, 16)):
        stopped += parse_losses(torchrun(script, ranks, folders[1], "--steps", "16", "--stop-at", str(stop)))
    assert len(straight) == len(stopped) == 16
    assert stopped[:8] == straight[:8]
    assert stopped[8:] == pytest.approx(straight[8:], rel=1e-6)
    assert straight[-1] < straight[0] - 0.5


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_train_gpt_sharded(tmp_path: Path) -> None:
    printed = torchrun(SCRIPT.with_name("train_gpt.py"), 2, tmp_path, "--way", "shard", "--steps", "2")
    assert "rank 0: loss of its last batch" in printed
    assert "rank 1: loss of its last batch" in printed


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_train_muon_resumes_at_another_world_size(tmp_path: Path) -> None:
    script, last = SCRIPT.with_name("train_muon.py"), 9.9
    for steps, ranks, more in ((15, 2, ["--measured"]), (30, 3, []), (45, 1, [])):
        printed = torchrun(script, ranks, tmp_path, "--steps", "15", "--layers", "2", "--width", "32", *more)
        (loss,) = map(float, re.findall(rf"step {steps}: loss (\S+) on {ranks} ranks", printed))
        assert loss < last
        last = loss


@pytest.mark.timeout(180)
def test_dropin_shards_optimizer_state_under_ddp(tmp_path: Path) -> None:
    printed = torchrun(SCRIPT.with_name("dropin.py"), 2, tmp_path)
    first, last = map(float, re.findall(r"loss (\S+)", printed))
    assert last < first / 4
    held = {int(rank): int(count.replace(",", "")) for rank, count in re.findall(r"rank (\d) holds (\S+) of", printed)}
    (whole,) = set(re.findall(r"of (\S+) elements", printed))
    assert held.keys() == {0, 1}
    assert sum(held.values()) == int(whole.replace(",", ""))
    assert max(held.values()) < 0.6 * sum(held.values())


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_unfrozen_layers_train_and_get_state(tmp_path: Path) -> None:
    printed = torchrun(SCRIPT.with_name("finetune.py"), 2, tmp_path)
    (head, few), (full, many) = re.findall(r"loss (\S+), rank 0 holds (\S+) elements", printed)
    assert float(full) < float(head) / 2
    assert (few, many) == ("66", "24,962")  # half of two moments: of the head, and of all; slices are aligned


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_bf16_model_needs_master_weights_for_small_updates(tmp_path: Path) -> None:
    printed = torchrun(SCRIPT.with_name("bf16_masters.py"), 2, tmp_path)
    masters, plain = map(int, re.findall(r"(\d+)% with", printed))
    assert masters > 70
    assert plain < 10


def test_readme_lists_all_examples() -> None:
    listed = re.findall(r"^\| \[(\w+\.py)\]", (SCRIPT.parent / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(file.name for file in SCRIPT.parent.glob("*.py"))


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_report_and_trace_write_their_files(tmp_path: Path) -> None:
    printed = torchrun(SCRIPT.with_name("report.py"), 2, tmp_path, "report.png")
    assert "AdamW on 3,241,472 elements of 52 parameters, shared by 2 ranks" in printed
    torchrun(SCRIPT.with_name("trace.py"), 2, tmp_path, "trace.png")
    names = {"report.png", "trace.png", "trace-0.json", "trace-1.json"}
    assert names == {path.name for path in tmp_path.iterdir()}


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_surviving_ranks_continue_after_one_is_killed(tmp_path: Path) -> None:
    command, settings = [sys.executable, str(SCRIPT.with_name("recover.py"))], {"GLOO_SOCKET_IFNAME": "lo"}
    env = {**os.environ, **settings, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"a rank was lost in step 24, held is step 20", done.stdout)) == 2
    assert len(re.findall(r"step 40, loss 0\.\d+", done.stdout)) == 2
